"""The codec: every record comes back; other bytes are refused by name, quickly and cheaply."""

import resource
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import cache
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.errors import MalformedRecord, UnsupportedVersion
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import (
    LEVEL,
    TYPES,
    decode,
    decode_as,
    encode,
    level_of,
    schema_of,
)
from anabranch.protocol.schemas.fast import EVENTS
from tests.batches.strategies import mutated
from tests.conftest import some
from tests.core.labels import SECRET

BY_NUMBER = sorted(TYPES.items())


def patient(examples: int = 100) -> settings:
    """Strategies for whole records are slow to draw from at first."""
    return settings(
        max_examples=some(examples), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


SIMPLE: dict[str, Callable[[], st.SearchStrategy[Any]]] = {
    "string": lambda: st.text(max_size=20),
    "bytes": lambda: st.binary(max_size=40),
    "boolean": st.booleans,
    "int": lambda: st.integers(-(1 << 31), (1 << 31) - 1),
    "long": lambda: st.integers(-(1 << 63), (1 << 63) - 1),
    "null": st.none,
}


@cache
def record_strategy(name: str) -> st.SearchStrategy[Any]:
    cls = getattr(r, name.removeprefix("anabranch."))
    return st.builds(cls, *[value_strategy(field["type"]) for field in schema_of(cls)["fields"]])


def value_strategy(avro: Any) -> st.SearchStrategy[Any]:
    """Values of an Avro type as parsed by fastavro (named types inline once, then by name)."""
    if isinstance(avro, list):
        return st.one_of(*[value_strategy(branch) for branch in avro])
    if isinstance(avro, str):
        return SIMPLE[avro]() if avro in SIMPLE else named_strategy(avro)
    kind = avro["type"]
    if kind == "array":
        return st.lists(value_strategy(avro["items"]), max_size=3).map(tuple)
    if kind == "map":
        return st.dictionaries(st.text(max_size=10), value_strategy(avro["values"]), max_size=3)
    if kind in ("record", "fixed", "enum"):
        return named_strategy(avro["name"])
    return value_strategy(kind)


def named_strategy(name: str) -> st.SearchStrategy[Any]:
    if name == "anabranch.TxnId":
        return st.binary(min_size=16, max_size=16)
    if name == "anabranch.Secret":
        return st.binary(min_size=32, max_size=32)
    if words := get_args(getattr(r, name.removeprefix("anabranch."), None)):
        return st.sampled_from(words)
    return record_strategy(name)


framed_records = st.one_of(*[record_strategy(cls.__name__) for _, cls in BY_NUMBER])


def zigzag(value: int) -> bytes:
    """An Avro long."""
    number = (value << 1) ^ (value >> 63)
    out = bytearray()
    while number & ~0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def outcome(data: bytes) -> Any:
    """The record, or the class of the error; any other error is a failure."""
    try:
        return decode(data)
    except (MalformedRecord, UnsupportedVersion) as error:
        return type(error)


@pytest.mark.parametrize(("number", "cls"), BY_NUMBER, ids=lambda x: getattr(x, "__name__", x))
def test_every_record_comes_back(number: int, cls: type) -> None:
    @patient(40)
    @given(record_strategy(cls.__name__))
    def check(record: Any) -> None:
        data = encode(record)
        assert data[:2] == bytes((level_of(record), number))
        assert decode(data) == record
        assert decode_as(cls, data) == record
        assert encode(decode(data)) == data

    check()


@given(st.binary(max_size=200), st.integers(0, 255))
def test_a_higher_level_is_refused_before_anything_is_parsed(body: bytes, level: int) -> None:
    data = bytes((level,)) + body
    if 1 <= level <= LEVEL or len(data) < 2:
        return
    with pytest.raises(UnsupportedVersion, match=f"feature level {level}, .* levels 1 to {LEVEL}"):
        decode(data)


def test_an_unknown_type_is_refused_by_number() -> None:
    for number in set(range(256)) - set(TYPES):
        with pytest.raises(UnsupportedVersion, match=f"type {number} "):
            decode(bytes((1, number)) + b"abc")


@patient()
@given(framed_records, st.binary(min_size=1, max_size=30))
def test_trailing_bytes_are_refused(record: Any, more: bytes) -> None:
    with pytest.raises(MalformedRecord):
        decode(encode(record) + more)


@patient(50)
@given(framed_records)
def test_every_truncation_is_refused(record: Any) -> None:
    data = encode(record)
    for size in range(len(data)):
        with pytest.raises(MalformedRecord):
            decode(data[:size])


@patient(1000)
@given(st.sampled_from([number for number, _ in BY_NUMBER]), st.binary(max_size=300))
def test_random_bodies_give_a_record_or_a_named_error(number: int, body: bytes) -> None:
    found = outcome(bytes((1, number)) + body)
    if not isinstance(found, type):
        assert decode(encode(found)) == found  # what is read can be written again


@patient(500)
@given(framed_records, st.data())
def test_mutated_records_give_a_record_or_a_named_error(record: Any, data: st.DataObject) -> None:
    found = outcome(mutated(encode(record), data, most=4))
    if not isinstance(found, type):
        assert decode(encode(found)) == found


HOSTILE_LENGTHS = [1 << 20, 1 << 31, 1 << 40, 1 << 60, (1 << 63) - 1, -1, -(1 << 40), -(1 << 63)]


@pytest.mark.parametrize("length", HOSTILE_LENGTHS)
@pytest.mark.parametrize(
    ("where", "before"),
    [
        ("bytes", bytes((1, 9))),
        ("string", bytes((1, 1))),
        ("array of bytes", bytes((1, 12))),
        ("array of records", bytes((1, 8)) + bytes(16) + zigzag(1) + b"a" + zigzag(0)),
        ("map", bytes((1, 2)) + zigzag(1) + b"a" + zigzag(1)),
        ("union", bytes((1, 32)) + zigzag(0) + zigzag(0)),
        ("enum", bytes((1, 96))),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_claimed_length_costs_nothing(where: str, before: bytes, length: int) -> None:
    data = before + zigzag(length) + zigzag(7)
    tracemalloc.start()
    began = time.process_time()
    try:
        assert outcome(data) is MalformedRecord
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert time.process_time() - began < 1


def test_a_length_costs_no_memory_outside_python_either() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for length in HOSTILE_LENGTHS:
        assert outcome(bytes((1, 9)) + zigzag(length)) is MalformedRecord
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < 64 << 20


def test_an_endless_number_is_refused_in_bounded_time() -> None:
    began = time.process_time()
    assert outcome(bytes((1, 1)) + b"\xff" * 1_000_000) is MalformedRecord
    assert time.process_time() - began < 5


def test_the_smallest_events_are_read_as_many_as_a_list_may_have() -> None:
    head = bytes((1, 8)) + bytes(16) + zigzag(1) + b"a" + zigzag(0)
    block = zigzag(EVENTS) + bytes(6) * EVENTS
    assert len(decode(head + block + zigzag(0) + b"\0\0").events) == EVENTS
    for more in (zigzag(1) + bytes(6), zigzag(-1) + zigzag(6) + bytes(6)):
        with pytest.raises(MalformedRecord, match="events: 5001 where 5000 items at most"):
            decode(head + block + more + zigzag(0) + b"\0\0")


def test_blocks_with_sizes_are_read() -> None:
    # Avro lets an encoder cut arrays into blocks and give their sizes; some encoders always do.
    block = zigzag(-2) + zigzag(4) + zigzag(1) + b"a" + zigzag(1) + b"b"
    data = bytes((1, 12)) + block + zigzag(1) + zigzag(1) + b"c" + zigzag(0)
    assert decode(data) == r.Heartbeat((b"a", b"b", b"c"))


@pytest.mark.parametrize("value", [1 << 31, -(1 << 31) - 1, 1 << 40, (1 << 63) - 1])
def test_an_int_has_32_bits_both_ways(value: int) -> None:
    good = encode(r.Begin(bytes(16), "nyc", None, 0, SECRET))
    with pytest.raises(MalformedRecord, match="32 bits"):
        decode(good[: -len(SECRET) - 3] + zigzag(value) + SECRET + bytes(2))
    with pytest.raises(MalformedRecord, match="32 bits"):
        encode(r.Begin(bytes(16), "nyc", None, value, SECRET))
    commit = encode(r.CommitRecord(bytes(16), 0, 5, (), (), 7))
    with pytest.raises(MalformedRecord, match="32 bits"):
        decode(commit[:18] + zigzag(value) + commit[19:])
    receipt = r.Receipt(bytes(16), 1, value, True, ())
    with pytest.raises(MalformedRecord, match="32 bits"):
        encode(r.Commit(b"", (receipt,), None, None, 0))


@pytest.mark.parametrize(
    "record",
    [
        r.Begin(bytes(15), "nyc", None, 1, SECRET),
        r.Begin(bytes(16), "nyc\ud800", None, 1, SECRET),
        r.Begin(bytes(16), "nyc", None, 1 << 70, SECRET),
        r.Begin(bytes(16), "nyc", 7, 1, SECRET),  # type: ignore[arg-type]
        r.Begin(bytes(16), None, None, 1, SECRET),  # type: ignore[arg-type]
        r.Abort("text", "x"),  # type: ignore[arg-type]
        r.JournalOp("NOPE", bytes(16), 0, 0),  # type: ignore[arg-type]
        r.CommitRecord(bytes(16), 0, 1 << 63, (), (), 0),
        r.Reply(b"", b"", 0, r.Abort(b"", "")),  # type: ignore[arg-type]
    ],
)
def test_what_the_schema_does_not_allow_is_not_written(record: Any) -> None:
    with pytest.raises(MalformedRecord):
        encode(record)


def test_decode_as_names_both_types() -> None:
    with pytest.raises(MalformedRecord, match="Resolve where GetState belongs"):
        decode_as(r.GetState, encode(r.Resolve(bytes(16), "nyc")))


# -- as Avro has it, and in every form that Avro has -----------------------------------------------

_ID = bytes(16)
_BEGIN = b"\x01\x04" + _ID + b"\x06nyc"
_RECEIPT = r.Receipt(_ID, 1, 1, True, (r.Extent("s/a", 0, 0, 1, 1, 7),) * 2)
_EXTENT = b"\x06s/a\x00\x00\x02\x02\x0e"
_ONE_SHOT = b"\x01\x08" + _ID + b"\x06nyc"


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (_BEGIN + b"\x01\x02x\x00", "name: -1"),
        (_BEGIN + b"\x03\x00", "name: -2"),
        (_BEGIN + b"\x04\x00", "name: 2"),
        (_BEGIN + b"\x02\x06x", "name: 3"),
        (_BEGIN, "name: the record ends early"),
        (_BEGIN + b"\x02\x01", "name: -1"),
        (_ONE_SHOT + b"\x01\x02x\x00", "name: -1"),
        (_ONE_SHOT + b"\x00\x02" + b"\x02s\x01\x01", "events: key: -1"),
        (b"\x01\x01\x06nyc\x02", "create: 2"),
        (b"\x01\x21" + _ID + b"\x02\x02\xff\x00", "finished: 255"),
        (b"\x01\x20\x00\x00\x00\x0d", "result: -7"),
        (b"\x01\x20\x00\x00\x00\x0c" + _ID + b"\x01", "result: state: -1"),
        (b"\x01\x06\x00" + _ID + b"\x80" * 11, "receipt: writer: more"),
    ],
)
def test_what_fastavro_would_take_is_refused_by_field(data: bytes, field: str) -> None:
    with pytest.raises(MalformedRecord, match=field):
        decode(data)


@pytest.mark.parametrize(
    "extents",
    [
        b"\x04" + _EXTENT * 2 + b"\x00",
        b"\x02" + _EXTENT + b"\x02" + _EXTENT + b"\x00",
        b"\x03" + bytes((2 * len(_EXTENT) * 2,)) + _EXTENT * 2 + b"\x00",
        b"\x84\x00" + _EXTENT * 2 + b"\x80\x00",
    ],
    ids=["one block", "two blocks", "a block with its size", "long numbers"],
)
def test_every_legal_form_is_taken(extents: bytes) -> None:
    data = b"\x01\x21" + _ID + b"\x02\x02\x01" + extents + b"\x00"
    assert decode(data) == _RECEIPT
