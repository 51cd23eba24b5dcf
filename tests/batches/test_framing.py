"""Cutting batches into runs: the compiled walk, and the oracle that it must agree with."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.batches import framing, framing_plain
from anabranch.batches.format import HEADER_SIZE
from anabranch.batches.framing import Kind, Run, scan_batch
from anabranch.batches.kernels import parts as parts_kernel
from anabranch.batches.kernels import scan as scan_kernel
from anabranch.batches.kernels.parts import MALFORMED_RESULT
from anabranch.batches.records import MIN_RECORD_BYTES, Record, encode_batch
from anabranch.core.locks.table_writes import FEW_KEYS, Keys
from anabranch.ports import RawBatch
from anabranch.protocol.ids import OP_HEADER, TXN_HEADER, pack_txn_header
from anabranch.protocol.limits import LATEST, ROW_KEY, Room
from anabranch.protocol.partitioner import position_of, record_checksum
from anabranch.testing.memory.partition import encode_sparse, with_base_offset
from tests.batches.strategies import ANY_BATCH, CODECS, mutated, raw, records
from tests.batches.test_records import MALFORMED
from tests.conftest import some

A, B = (pack_txn_header(bytes([i]) * 16, i, 0) for i in (1, 2))
LENIENT = Room()  # what any stream takes
IN_A, IN_B = ((TXN_HEADER, A),), ((TXN_HEADER, B),)


def kernel_rows(
    body: bytes, count: int, last_delta: int, base_timestamp: int, rules: Room
) -> list[list[int]] | None:
    """The compiled answer, with room for all runs; the same with keys noted or not."""
    head = count, last_delta, base_timestamp
    found, noted = (_kernel_rows(body, *head, rules, keys) for keys in (0, 1))
    assert found == noted
    return found


def _kernel_rows(
    body: bytes, count: int, last_delta: int, base_timestamp: int, rules: Room, noted: int
) -> list[list[int]] | None:
    rows = np.empty((max(count, 1), scan_kernel.COLUMNS), dtype=np.int64)
    keys = np.empty((3, noted * max(min(count, len(body) // MIN_RECORD_BYTES), 0)), dtype=np.int64)
    bounds = np.empty((max(count, 1), 4), dtype=np.int64)
    numbers = np.array(rules[1:], dtype=np.int64)
    head = count, last_delta, base_timestamp, numbers
    found = scan_kernel.scan(np.frombuffer(body, dtype=np.uint8), *head, rows, keys, bounds)
    if found < 0:
        assert found == MALFORMED_RESULT
        return None
    listed: list[list[int]] = rows[:found].tolist()
    return listed


def agree(body: bytes, count: int, last_delta: int, base_timestamp: int) -> list[list[int]] | None:
    """Both walks' answer, for a stream that takes little, and for one that takes all that any does."""
    head = count, last_delta, base_timestamp
    compiled = None
    for rules in (Room("", 9, True, 1_000), Room("", 1 << 40)):
        compiled = kernel_rows(body, *head, rules)
        assert compiled == framing_plain.scan(body, *head, rules)
    return compiled


def scan_both(data: bytes, monkeypatch: pytest.MonkeyPatch, rules: Room = LENIENT) -> list[Run]:
    """`scan_batch` with compiled code and without."""
    framing.warm()
    compiled, digests = scan_batch(raw(data), rules), digests_of(data)
    monkeypatch.setattr(framing, "_kernels", None)
    monkeypatch.setattr(framing, "_load", lambda: None)
    assert scan_batch(raw(data), rules) == compiled
    in_python = digests_of(data)
    assert in_python == (digests if any(in_python) else [b""] * len(compiled))
    return compiled


def digests_of(data: bytes) -> list[bytes]:
    """The digests of a batch's runs."""
    return [run.digest for run in scan_batch(raw(data), digests=True)]


@given(records())
def test_both_walks_agree_on_records(made: list[Record]) -> None:
    body = encode_batch(made)[HEADER_SIZE:]
    rows = agree(body, len(made), len(made) - 1, made[0].timestamp_ms)
    assert rows is not None
    assert sum(row[2] for row in rows) == len(made)
    assert sum(row[8] for row in rows) == len(body)
    assert sum(row[3] for row in rows) == sum(record_checksum(r.key, r.value) for r in made)


@pytest.mark.parametrize("count", [1, FEW_KEYS, FEW_KEYS + 1, 999, 5_000])
def test_digests_say_which_keys_a_run_has(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few exactly, of more the bounds; keys that are null, empty, each other's beginnings, and twice."""
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    keys = [draw.choice([None, b"", b"same", b"abcdefgh" * draw.randrange(4) + draw.randbytes(draw.randrange(4))])
            for _ in range(count)]  # fmt: skip
    half = count // 2
    made = [Record(i, 0, key, b"v", IN_A if i < half else IN_B) for i, key in enumerate(keys)]
    framing.warm()
    wanted = [Keys.of(run).to_bytes() for run in (keys[:half], keys[half:]) if run]
    assert digests_of(encode_batch(made, "lz4")) == wanted, f"seed {seed}"
    if count < 1_000:
        scan_both(encode_batch(made), monkeypatch)


@given(*ANY_BATCH)
def test_both_walks_agree_on_any_bytes(body: bytes, count: int, last: int, base: int) -> None:
    agree(body, count, last, base)


@settings(max_examples=some(400))
@given(records(max_size=5), st.data())
def test_both_walks_agree_on_mutated_records(made: list[Record], data: st.DataObject) -> None:
    body = mutated(encode_batch(made)[HEADER_SIZE:], data)
    agree(body, len(made), len(made) - 1, made[0].timestamp_ms)


@pytest.mark.parametrize("case", MALFORMED)
def test_what_the_decoder_refuses_is_one_bad_run(case: str) -> None:
    data = MALFORMED[case]
    (run,) = scan_batch(raw(data))
    assert run.kind is Kind.MALFORMED
    assert run.kind >= Kind.MALFORMED
    assert not run.pure
    assert run.first_delta == 0
    assert run.records >= 0
    assert check_pure(data) is None


def test_a_malformed_header_is_one_bad_run() -> None:
    assert scan_batch(RawBatch(5, 9, memoryview(b"junk"))) == [
        Run(Kind.MALFORMED, 0, 3, 4, 0, b"", -1, -1, 0, 0, False)
    ]
    (run,) = scan_batch(RawBatch(5, 5, memoryview(b"")))
    assert run.records == 0


def test_runs_are_cut_where_the_writer_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [
        Record(0, 5, b"a", b"1", IN_A),
        Record(1, 5, b"b", b"22", IN_A),
        Record(2, 5, b"c", None, IN_B),
        Record(3, 5, None, b"3", IN_A),
        Record(4, 5, b"d", b"4", (("x", b"y"), *IN_A)),
        Record(5, 5, b"e", b"5"),
        Record(6, 5, None, None, (("x", None),)),
        Record(7, 5, b"f", b"6", ((OP_HEADER, b""),)),
    ]
    found = scan_both(encode_batch(made, "lz4"), monkeypatch)
    assert [(r.kind, r.first_delta, r.last_delta, r.records, r.txn) for r in found] == [
        (Kind.WRITE, 0, 1, 2, A),
        (Kind.WRITE, 2, 2, 1, B),
        (Kind.WRITE, 3, 4, 2, A),
        (Kind.PLAIN, 5, 6, 2, b""),
        (Kind.OP, 7, 7, 1, b""),
    ]
    first, second, third, plain, _ = found
    assert first.checksum == record_checksum(b"a", b"1") + record_checksum(b"b", b"22")
    assert (first.low, first.high) == tuple(sorted((position_of(b"a"), position_of(b"b"))))
    assert second.low == second.high == position_of(b"c")
    assert (third.low, third.high, third.keyless) == (position_of(b"d"), position_of(b"d"), 1)
    assert plain.keyless == 1
    assert first.size + second.size == len(encode_batch(made[:3])) - HEADER_SIZE
    assert not any(run.pure for run in found)


ROOM = Room("", 100, is_table=True, latest=1_000)
# Rules, and a record (key, value, headers, time) that they allow or not -> its kind as a WRITE, as a plain record.
OF_STREAMS: dict[str, tuple[Room, Any, Kind, Kind]] = {
    "a row": (ROOM, (b"k", b"v", (), 5), Kind.WRITE, Kind.PLAIN),
    "no key": (ROOM, (None, b"v", (), 5), Kind.BAD_KEY, Kind.BAD_KEY),
    "no key, no table": (Room("", 100), (None, b"v", (), 5), Kind.WRITE, Kind.PLAIN),
    "an empty key": (ROOM, (b"", b"v", (), 5), Kind.BAD_KEY, Kind.BAD_KEY),
    "the longest key": (ROOM._replace(most=None), (b"k" * ROW_KEY.value, None, (), 5), Kind.WRITE, Kind.PLAIN),
    "a longer key": (ROOM, (b"k" * (ROW_KEY.value + 1), b"v", (), 5), Kind.BAD_KEY, Kind.BAD_KEY),
    "no time": (ROOM, (b"k", b"v", (), -1), Kind.WRITE, Kind.PLAIN),
    "below it": (ROOM, (b"k", b"v", (), -2), Kind.WRITE, Kind.BAD_TIME),
    "the latest time": (ROOM, (b"k", b"v", (), 1_000), Kind.WRITE, Kind.PLAIN),
    "a later one": (ROOM, (b"k", b"v", (), 1_001), Kind.WRITE, Kind.BAD_TIME),
    "the last of 9999": (LENIENT, (b"k", b"v", (), LATEST), Kind.WRITE, Kind.PLAIN),
    "a far one": (LENIENT, (b"k", b"v", (), LATEST + 1), Kind.WRITE, Kind.BAD_TIME),
    "as big as may be": (ROOM, (b"k", b"v" * 99, (), 5), Kind.WRITE, Kind.PLAIN),
    "a byte more": (ROOM, (b"k", b"v" * 100, (), 5), Kind.TOO_LARGE, Kind.TOO_LARGE),
    "with headers": (ROOM, (b"k", b"v" * 50, (("é", b"v" * 47), ("", None)), 5), Kind.WRITE, Kind.PLAIN),
    "bigger ones": (ROOM, (b"k", b"v" * 50, (("é", b"v" * 48), ("", None)), 5), Kind.TOO_LARGE, Kind.TOO_LARGE),
    "two reasons": (ROOM, (None, b"v" * 100, (), 1_001), Kind.BAD_KEY, Kind.BAD_KEY),
}  # fmt: skip


@pytest.mark.parametrize("case", OF_STREAMS)
def test_records_that_a_stream_does_not_take_have_their_kind(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in the middle of others, of a writer or of none, which stay."""
    rules, (key, value, headers, timestamp), of_writer, plain = OF_STREAMS[case]
    good = Record(0, 5, b"k", b"v")
    for own, kinds in ((IN_A, of_writer), ((), plain)):
        bad = Record(1, timestamp, key, value, (*headers, *own))
        made = [good._replace(headers=own), bad, good._replace(offset=2, headers=own)]
        with monkeypatch.context() as patched:
            found = scan_both(encode_batch(made), patched, rules)
        spread = [kind for run in found for kind in [run.kind] * run.records]
        assert spread == [spread[0], kinds, spread[0]]
        assert spread[0] == (Kind.WRITE if own else Kind.PLAIN)


BAD_HEADERS = {
    "two ab.txn": (IN_A + IN_A, Kind.DOUBLE_TXN),
    "two ab.txn and ab.op": (IN_A + IN_B + ((OP_HEADER, b""),), Kind.DOUBLE_TXN),
    "ab.txn and ab.op": (((OP_HEADER, b""), *IN_A), Kind.TXN_AND_OP),
    "two ab.op": (((OP_HEADER, b""),) * 2, Kind.DOUBLE_OP),
    "27 bytes": (((TXN_HEADER, A[1:]),), Kind.TXN_LENGTH),
    "29 bytes": (((TXN_HEADER, A + b"x"),), Kind.TXN_LENGTH),
    "null": (((TXN_HEADER, None),), Kind.TXN_LENGTH),
    "empty": (((TXN_HEADER, b""),), Kind.TXN_LENGTH),
    "another name": ((("ab.new", A),), Kind.RESERVED),
    "ab. alone": ((("ab.", None),), Kind.RESERVED),
    "ab.txn beside another": ((*IN_A, ("ab.new", b"")), Kind.RESERVED),
    "ab.op beside another": (((OP_HEADER, b""), ("ab.new", b"")), Kind.RESERVED),
    "no text": ((("\udcff", b""),), Kind.NO_TEXT),
    "ab.txn beside no text": ((*IN_A, ("x\udcc3", b"")), Kind.NO_TEXT),
    "ab. and no text": ((("ab.\udcff", b""),), Kind.RESERVED),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_headers_have_their_kind(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    headers, kind = BAD_HEADERS[case]
    made = [
        Record(0, 0, b"k", b"v", IN_A),
        Record(1, 0, b"k", b"v", headers),
        Record(2, 0, b"k", b"v", IN_A),
    ]
    found = scan_both(encode_batch(made), monkeypatch)
    assert [run.kind for run in found] == [Kind.WRITE, kind, Kind.WRITE]
    assert kind >= Kind.MALFORMED
    assert found[1].txn == b""


@pytest.mark.parametrize("name", ["a", "ab", "AB.txn", "xab.txn", "ab_txn", "", "naïve ✈ 🛩"])
def test_other_names_are_not_ours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Record(0, 0, b"k", b"v", ((name, A),))]
    (run,) = scan_both(encode_batch(made), monkeypatch)
    assert run.kind is Kind.PLAIN


def _is_utf8(name: bytes) -> bool:
    """The kernel's own answer."""
    return bool(parts_kernel._is_utf8(np.frombuffer(name, dtype=np.uint8), 0, len(name)))


def test_utf8_is_what_python_says_it_is() -> None:
    """At every boundary that the encoding has: of lead bytes, of second bytes, of the name's end."""
    leads = [0x41, 0x7F, 0x80, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xEC, 0xED, 0xEE, 0xEF]
    leads += [0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]
    tails = [0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0]
    names = {bytes(n) for size in range(4) for n in itertools.product(leads, *[tails] * size)}
    names |= {name + end for name in names for end in (b"\x80", b"a", b"\xc3")}
    said = {}
    for name in names:
        with contextlib.suppress(UnicodeDecodeError):
            said[name] = name.decode()
    assert 100 < len(said) < len(names) - 100
    assert {name for name in names if _is_utf8(name)} == set(said)


@pytest.mark.parametrize("codec", CODECS)
def test_a_batch_of_one_writer_is_pure(codec: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Record(i, 0, b"k%d" % i, b"v", IN_A) for i in range(1000)]
    (run,) = scan_both(with_base_offset(encode_batch(made, codec), 77), monkeypatch)
    assert run.pure
    assert (run.first_delta, run.last_delta, run.records) == (0, 999, 1000)


def test_a_batch_that_compaction_emptied_has_no_runs() -> None:
    assert scan_batch(raw(encode_sparse([], base_offset=3, next_offset=9))) == []


def test_many_runs_find_room(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Record(i, 0, b"k", b"v", IN_A if i % 2 else IN_B) for i in range(5000)]
    found = scan_both(encode_batch(made), monkeypatch)
    assert len(found) == 5000
    assert [run.txn for run in found] == [A if i % 2 else B for i in range(5000)]


def test_checksums_of_all_sizes() -> None:
    rng = random.Random(3)
    made = [
        Record(i, 0, rng.randbytes(i % 37) if i % 3 else None, rng.randbytes(i), IN_A)
        for i in range(400)
    ]
    found = agree(encode_batch(made)[HEADER_SIZE:], 400, 399, 0)
    assert found is not None
    assert found[0][3] == sum(record_checksum(r.key, r.value) for r in made)


def test_kinds_have_the_kernels_numbers() -> None:
    for kind in Kind:
        assert getattr(scan_kernel, kind.name) == getattr(framing_plain, kind.name) == kind


def test_small_batches_do_not_load_the_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(framing, "_kernels", None)
    monkeypatch.setattr(framing, "_load", lambda: asked.append(True))
    scan_batch(raw(encode_batch([Record(i, 0, b"k", b"v") for i in range(256)])))
    assert asked == []
    scan_batch(raw(encode_batch([Record(i, 0, b"k", b"v") for i in range(257)])))
    assert asked == [True]


def check_pure(data: bytes) -> bytes | None:
    """The ab.txn value that all records have, if the batch may be spliced whole; the same without compiled code."""
    framing.warm()
    found = pure_txn(scan_batch(raw(data)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(framing, "_kernels", None)
        patched.setattr(framing, "_load", lambda: None)
        assert pure_txn(scan_batch(raw(data))) == found
    return found


def pure_txn(runs: list[Run]) -> bytes | None:
    return runs[0].txn if len(runs) == 1 and runs[0].pure else None


@given(records(), st.sampled_from(CODECS))
def test_both_walks_call_the_same_batches_pure(made: list[Record], codec: str | None) -> None:
    check_pure(encode_batch(made, codec))


def test_what_is_pure_and_what_is_not() -> None:
    mine = [Record(i, 0, b"k%d" % i, b"v", IN_A) for i in range(10)]
    assert check_pure(encode_batch(mine, "lz4")) == A
    assert check_pure(encode_batch([*mine, Record(10, 0, b"k", b"v", IN_B)])) is None
    assert check_pure(encode_batch([r._replace(headers=()) for r in mine])) is None
    assert check_pure(encode_batch([r._replace(headers=((OP_HEADER, b""),)) for r in mine])) is None
    for gap in (0, 5):
        sparse = encode_sparse(mine[:gap] + mine[gap + 1 :], base_offset=0, next_offset=10)
        assert check_pure(sparse) is None
        assert scan_batch(raw(sparse))[0].records == 9
    assert check_pure(encode_sparse(mine, base_offset=0, next_offset=11)) is None
    assert check_pure(encode_sparse([], base_offset=0, next_offset=10)) is None
    assert pure_txn(scan_batch(RawBatch(0, 1, memoryview(b"junk")))) is None
    bomb = raw(encode_batch([Record(0, 0, None, b"\x00" * 2_000_000, IN_A)], "lz4"))
    assert [run.kind for run in scan_batch(bomb, limit=1_000_000)] == [Kind.MALFORMED]
    assert pure_txn(scan_batch(bomb, limit=3_000_000)) == A


@pytest.mark.parametrize("at", range(28))
def test_every_byte_of_the_header_distinguishes_writers(at: int) -> None:
    other = A[:at] + bytes((A[at] ^ 1,)) + A[at + 1 :]
    made = [Record(0, 0, b"k", b"v", IN_A), Record(1, 0, b"k", b"v", ((TXN_HEADER, other),))]
    assert check_pure(encode_batch(made)) is None
    rows = agree(encode_batch(made)[HEADER_SIZE:], 2, 1, 0)
    assert rows is not None
    assert len(rows) == 2
