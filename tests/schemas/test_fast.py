"""The hand-written codec of the hottest records does what fastavro does, byte for byte, or leaves it to it.

So does the codec that is made from the schemas of all records.
"""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import MalformedRecord
from anabranch.protocol.schemas import codec, fast
from anabranch.protocol.schemas import records as r
from tests.batches.strategies import mutated
from tests.schemas.test_codec import (
    HOSTILE_LENGTHS,
    framed_records,
    patient,
    record_strategy,
    zigzag,
)

WRITTEN = sorted(fast.WRITERS, key=lambda cls: cls.__name__)
READ = sorted(fast.READERS, key=lambda cls: cls.__name__)

TXN_ID = bytes(range(16))
NOW = 1_795_000_000_000
TIME = NOW * 1000 << 12

short = st.text(max_size=8)
names = st.one_of(short, st.text(min_size=200, max_size=300))
numbers = st.one_of(
    st.integers(-70, 70),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.sampled_from([63, 64, -64, -65, 8191, 8192, NOW, TIME, (1 << 63) - 1, -(1 << 63)]),
)
sizes = st.sampled_from([0, 1, 63, 64, 100, 4095, 4096, 8191, 8192, 70_000])
blobs = st.one_of(st.none(), st.binary(max_size=70), st.builds(lambda size: b"x" * size, sizes))
headers = st.lists(st.builds(r.EventHeader, names, blobs), max_size=3).map(tuple)
events = st.builds(
    r.Event,
    st.one_of(st.just("nyc/flights"), names),
    st.one_of(st.just(-1), numbers),
    blobs,
    blobs,
    st.one_of(st.just(()), headers),
    st.one_of(st.just(-1), numbers),
)
ranges = st.builds(r.LockedRange, st.binary(max_size=70), st.none() | st.binary(max_size=70))
locks = st.builds(
    r.TableLocks,
    names,
    numbers,
    numbers,
    st.lists(numbers, max_size=3).map(tuple),
    st.just(()) | st.lists(ranges, max_size=2).map(tuple),
)
changes = st.builds(
    r.RowChange,
    names,
    st.binary(max_size=70),
    st.sampled_from(r.ChangeKind.__args__),  # type: ignore[attr-defined]
    numbers,
    st.none() | st.binary(max_size=70),
)
derivations = st.builds(r.Derivation, names, names, st.integers(-(1 << 31), (1 << 31) - 1))
one_shots = st.builds(
    r.OneShot,
    st.binary(min_size=16, max_size=16),
    names,
    st.none() | names,
    st.lists(events, max_size=6).map(tuple),
    st.none() | record_strategy("Consumed"),
    st.just(()) | st.lists(locks, max_size=2).map(tuple),
    st.just(()) | st.lists(changes, max_size=3).map(tuple),
    st.just(()) | st.lists(record_strategy("FollowedRows"), max_size=3).map(tuple),
    st.none() | st.binary(min_size=16, max_size=16),
    st.just(()) | st.lists(derivations, max_size=3).map(tuple),
    st.just(()) | st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=3).map(tuple),
    st.none() | st.binary(min_size=32, max_size=32),
)
outcomes = st.builds(
    r.Outcome,
    st.binary(min_size=16, max_size=16),
    st.sampled_from(r.TxnState.__args__),  # type: ignore[attr-defined]
    names,
    st.none() | names,
    *[numbers] * 4,
    st.just("") | names,
    *[numbers] * 2,
    st.integers(-(1 << 31), (1 << 31) - 1),
    st.just(()) | st.lists(names, max_size=3).map(tuple),
    st.just(()),
    names,
    st.just(0) | numbers,
    st.just(b"") | st.binary(max_size=40),
    st.just(()) | st.lists(st.builds(r.TableTime, names, numbers), max_size=2).map(tuple),
    st.just(0) | numbers,
    st.none() | record_strategy("BrokenLock"),
)
replies = st.builds(r.Reply, st.binary(max_size=70), st.binary(max_size=70), numbers, outcomes)
prepares = st.builds(r.Prepare, st.binary(max_size=70), st.binary(max_size=70))
prepare_events = st.builds(
    r.PrepareEvents,
    st.binary(min_size=16, max_size=16),
    names,
    st.none() | names,
    st.lists(events, max_size=6).map(tuple),
    st.binary(min_size=32, max_size=32),
    prepares,
)
prepared_rows = st.builds(r.PreparedRow, prepares, numbers, st.lists(events, max_size=6).map(tuple))
usual = one_shots, replies, prepare_events, prepared_rows
hot = st.one_of(*usual, *[record_strategy(cls.__name__) for cls in WRITTEN])


def plain_events(count: int) -> tuple[r.Event, ...]:
    return tuple(
        r.Event("nyc/flights", -1, b"key-%d" % i, b"v" * 100, (), -1) for i in range(count)
    )


OUTCOME = r.Outcome(
    TXN_ID, "COMMITTED", "nyc", None, TIME, 10, 0, 0, "", NOW, NOW, 0, (), (), "open"
)
ROW = r.TxnRow(TXN_ID, "nyc", None, "COMMITTED", 0, NOW, NOW, TIME, 10, 0, 0, "", None, "open")
PREPARE = r.Prepare(b"h" * 32, b"a" * 16)
LOCKS = r.TableLocks(
    "nyc/rows",
    TIME,
    TIME - 1,
    (-(1 << 63), 7),
    (r.LockedRange(b"a", b"b"), r.LockedRange(b"c", None)),
)
FOLLOWED = (r.FollowedRows(TXN_ID, "nyc/rows", (-7, TIME)),)
CHANGES = (
    r.RowChange("nyc/rows", b"k", "ADD", -(1 << 63), b"12"),
    r.RowChange("nyc/rows", b"l", "MAX", 7, None),
)
USUAL: list[Any] = [
    r.OneShot(TXN_ID, "nyc", None, plain_events(10), None, (LOCKS, LOCKS)),
    r.OneShot(TXN_ID, "nyc", "daily", plain_events(1000)),
    r.OneShot(TXN_ID, "nyc", None, (), None, (LOCKS,), CHANGES),
    r.OneShot(TXN_ID, "nyc", None, (), None, (LOCKS,), (), FOLLOWED, TXN_ID),
    r.OneShot(
        TXN_ID, "nyc", None, (), None, (LOCKS,), (), (), None, (r.Derivation("nyc/a", "by-b", 1),)
    ),
    r.OneShot(TXN_ID, "nyc", None, plain_events(2), places=(1, 2), secret=b"s" * 32),
    r.OneShot(TXN_ID, "ber", None, plain_events(2), None, (LOCKS,), CHANGES, secret=b"s" * 32),
    r.PrepareEvents(TXN_ID, "nyc", None, plain_events(10), b"s" * 32, PREPARE),
    r.PreparedRow(PREPARE, NOW, plain_events(10)),
    r.PreparedRow(PREPARE, NOW),
    r.Reply(b"c" * 16, b"d" * 8, TIME, OUTCOME._replace(streams=("nyc/a",), prepared_ms=NOW)),
    r.OneShot(
        TXN_ID,
        "nyc",
        None,
        plain_events(2),
        r.Consumed("nyc/p", bytes(16), (r.TaskStep((1, 70), 9, (r.TaskPosition(0, 300, TIME),)),)),
    ),
    r.Reply(b"c" * 16, b"d" * 8, TIME, OUTCOME._replace(tables=(r.TableTime("nyc/rows", TIME),))),
    ROW,
    r.CommitRecord(
        TXN_ID,
        0,
        TIME,
        (r.SegmentCommit(0, 0, 100, 105, 5), r.SegmentCommit(1, 1, 7, 12, 5)),
        (r.Position(0, 105), r.Position(1, 12)),
        -2,
    ),
]


def fastavro_says(data: bytes) -> Any:
    """The general way's result: a record, or None for a refusal."""
    try:
        return codec._decode(codec.TYPES[data[1]], data)
    except MalformedRecord:
        return None


def fast_says(data: bytes) -> Any:
    """The fast way's result: a record, or None where it declines."""
    try:
        return fast.READERS[codec.TYPES[data[1]]](data)
    except fast.DECLINED:
        return None


@pytest.mark.parametrize("record", USUAL, ids=lambda record: type(record).__name__)
def test_the_usual_form_is_done_here(record: Any) -> None:
    data = codec._encode(record)
    assert fast.WRITERS[type(record)](record) == data
    if type(record) in fast.READERS:
        assert fast.READERS[type(record)](data) == record


@patient(500)
@given(hot | framed_records)
def test_what_is_written_is_what_fastavro_writes(record: Any) -> None:
    assert codec.encode(record) == codec._encode(record)


@patient(500)
@given(framed_records, st.data())
def test_by_the_schema_is_read_what_fastavro_reads_and_nothing_more(
    record: Any, data: st.DataObject
) -> None:
    cls: Any = type(record)
    whole = codec._encode(record)
    if codec._form(cls, whole[0]) is not None:
        assert codec._decode_by_form(cls, whole) == record
    other = whole[:2] + mutated(whole[2:] or b"x", data, most=4)
    found = codec._decode_by_form(cls, other)
    assert found is None or found == fastavro_says(other)


@pytest.mark.parametrize(
    "record",
    [
        r.VotesRow(1, "TIMESTAMP", True),
        r.PendingCommitRow(
            (r.Asker(b"c", 0, b"d", "open", False, True),), True, (), None, None, 0, None, PREPARE
        ),
        r.AskVote(TXN_ID, r.TxnHead("nyc", "open", 1, NOW, b"s" * 32, 0), 1, "VOTE", False, ()),
        r.Vote(TXN_ID, 1, 1, "NO", 0, False, 0, 0, r.Refusal("NotReady", "")),
    ],
    ids=lambda record: type(record).__name__,
)
def test_fastavro_is_not_asked_for_what_commits_over_control_partitions_log(record: Any) -> None:
    assert codec._encode_by_form(record) == codec._encode(record)
    assert codec._decode_by_form(type(record), codec._encode(record)) == record


@patient(300)
@given(st.one_of(one_shots, replies, *[record_strategy(cls.__name__) for cls in READ]))
def test_what_is_read_is_what_fastavro_reads(record: Any) -> None:
    data = codec._encode(record)
    assert codec.decode(data) == record
    found = fast_says(data)
    assert found is None or found == record


@patient(200)
@given(one_shots)
def test_every_one_shot_of_fastavro_is_read_here(record: r.OneShot) -> None:
    assert fast_says(codec._encode(record)) == record


@pytest.mark.parametrize(
    "record", [x for x in USUAL if type(x) in READ], ids=lambda record: type(record).__name__
)
def test_every_truncation_is_declined(record: Any) -> None:
    data = codec._encode(record)
    for size in range(2, min(len(data), 2000)):
        assert fast_says(data[:size]) is None
        with pytest.raises(MalformedRecord):
            codec.decode(data[:size])


@patient(300)
@given(st.one_of(one_shots, replies, record_strategy("CommitRecord")), st.data())
def test_of_mutated_bytes_nothing_is_accepted_that_fastavro_refuses(
    record: Any, data: st.DataObject
) -> None:
    whole = codec._encode(record)
    other = whole[:2] + mutated(whole[2:], data, most=4)
    # `decode` asks the fast way for level 1 alone; a `CommitRecord` of level 4 has a field that it does not know.
    found = None if other[0] == codec.LEVEL else fast_says(other)
    assert found is None or found == fastavro_says(other)


@patient(700)
@given(st.sampled_from([8, 32, 98]), st.binary(max_size=200))
def test_of_random_bytes_nothing_is_accepted_that_fastavro_refuses(
    number: int, body: bytes
) -> None:
    data = bytes((1, number)) + body
    found = fast_says(data)
    assert found is None or found == fastavro_says(data)


@pytest.mark.parametrize("length", HOSTILE_LENGTHS)
@pytest.mark.parametrize("at", range(6))
def test_a_claimed_length_is_declined_at_once(length: int, at: int) -> None:
    head = b"\x01\x08" + TXN_ID
    before = [
        head,
        head + zigzag(1) + b"a" + zigzag(1),
        head + zigzag(1) + b"a" + zigzag(0),
        head + zigzag(1) + b"a" + zigzag(0) + zigzag(1),
        head + zigzag(1) + b"a" + zigzag(0) + zigzag(1) + zigzag(0) + zigzag(0) + zigzag(1),
        b"\x01\x20",
    ][at]
    data = before + zigzag(length) + b"\x07" * 100_000
    began = time.process_time()
    assert fast_says(data) is None
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("before", [b"\x01\x08" + TXN_ID, b"\x01\x20\x00", b"\x01\x20"])
def test_an_endless_number_is_declined_at_once(before: bytes) -> None:
    began = time.process_time()
    assert fast_says(before + b"\xff" * 1_000_000) is None
    assert time.process_time() - began < 0.5


def test_blocks_with_sizes_and_more_than_one_block_are_left_to_fastavro() -> None:
    data = codec._encode(r.OneShot(TXN_ID, "nyc", None, plain_events(2)))
    at = 2 + 16 + 4 + 1  # the array of events
    body = data[at + 1 : -2]
    sized = data[:at] + zigzag(-2) + zigzag(len(body)) + body + zigzag(0) * 2
    apart = data[:at] + zigzag(1) + body[: len(body) // 2]
    apart += zigzag(1) + body[len(body) // 2 :] + zigzag(0) * 2
    for other in (sized, apart):
        assert fast_says(other) is None
        assert codec.decode(other) == codec.decode(data)


def test_a_long_number_of_few_bits_is_read_as_fastavro_reads_it() -> None:
    data = codec._encode(r.Reply(b"", b"", 1, OUTCOME))
    longer = data[:4] + b"\x82\x80\x00" + data[5:]
    assert codec.decode(longer) == codec.decode(data) == fastavro_says(longer)


@pytest.mark.parametrize(
    "event",
    [
        ("nyc/a", -1, bytearray(b"k"), b"", (), -1),
        ("nyc/a", True, b"", b"", (), -1),
        ("nyc/a", -1, b"", b"", (), 7.0),
    ],
)
def test_other_types_are_written_as_fastavro_writes_them(event: tuple[Any, ...]) -> None:
    record = r.OneShot(TXN_ID, "nyc", None, (r.Event(*event),))
    with pytest.raises(fast.DECLINED):
        fast.WRITERS[r.OneShot](record)
    assert codec.encode(record) == codec._encode(record)


EVENTS_NOT_ALLOWED: list[Any] = [
    ("nyc/a", -1, "text", b"", (), -1),
    ("nyc/a", -1, b"", 7, (), -1),
    ("nyc/a", -1, b"", memoryview(b"x"), (), -1),
    ("nyc/a", -1, b"", b"", (), 1 << 63),
    ("nyc/a", 1 << 70, b"", b"", (), -1),
    ("nyc/\ud800", -1, b"", b"", (), -1),
    (b"nyc/a", -1, b"", b"", (), -1),
    (None, -1, b"", b"", (), -1),
    ("nyc/a", -1, b"", b"", (r.EventHeader("h", "text"),), -1),  # type: ignore[arg-type]
    ("nyc/a", -1, b"", b"", (r.EventHeader(None, b""),), -1),  # type: ignore[arg-type]
]
# Fields of rows and of outcomes.
NOT_ALLOWED: list[dict[str, Any]] = [
    {"txn_id": bytes(15)},
    {"state": "NOPE"},
    {"keepalive_ms": 1 << 31},
    {"begun_ms": 1 << 63},
    {"reason": None},
]


@pytest.mark.parametrize(
    "record",
    [
        *[r.OneShot(TXN_ID, "nyc", None, (r.Event(*event),)) for event in EVENTS_NOT_ALLOWED],
        *[ROW._replace(**fields) for fields in [*NOT_ALLOWED, {"secret": bytes(31)}]],
        *[r.Reply(b"", b"", 0, OUTCOME._replace(**fields)) for fields in NOT_ALLOWED],
    ],
)
def test_what_the_schema_does_not_allow_is_not_written(record: Any) -> None:
    with pytest.raises(MalformedRecord):
        codec.encode(record)
