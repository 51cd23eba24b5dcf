"""Columns laid out by compiled code against the same events, one by one: `StreamLane` and `BatchBuilder`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.batches.builder import BatchBuilder
from anabranch.batches.columns_write import ColumnEncoder
from anabranch.batches.compression import CODECS, decompress
from anabranch.batches.format import HEADER_SIZE, Packed
from anabranch.batches.records import Record, decode_records
from anabranch.client import receipts as writing
from anabranch.client.arrow import columns_of
from anabranch.client.receipts import StreamLane, WriterAccount
from anabranch.errors import EventTooLarge
from anabranch.protocol.limits import LATEST
from anabranch.protocol.partitioner import SPACE, even_ranges, position_of
from anabranch.protocol.schemas.records import SegmentRange, Touched
from tests.client.doubles import ListJournal
from tests.conftest import some

NOW = 1_750_000_000_000
Event = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]] | None, int | None]

_BYTES = st.none() | st.binary(max_size=30) | st.binary(min_size=100, max_size=150)
_KEYS = st.none() | st.binary(max_size=12) | st.sampled_from([b"a", b"b", b"c"])
_NAMES = st.text(max_size=5).filter(lambda name: not name.startswith("ab."))
_HEADERS = st.none() | st.lists(st.tuples(_NAMES, _BYTES), max_size=3)
_TIMES = st.none() | st.integers(1, LATEST) | st.integers(NOW - 9000, NOW + 9000)
EVENTS = st.lists(st.tuples(_BYTES, _KEYS, _HEADERS, _TIMES), min_size=1, max_size=60)

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
WIDE_HEADERS = pa.large_list(pa.struct([("value", pa.large_binary()), ("key", pa.large_string())]))


@st.composite
def kinds(draw: st.DrawFn) -> dict[str, pa.DataType]:
    """Types of the columns that events may come in."""
    data = [pa.binary(), pa.large_binary(), pa.dictionary(pa.int16(), pa.binary())]
    data.append(pa.binary_view())
    return {
        "value": draw(st.sampled_from(data)),
        "key": draw(st.sampled_from(data)),
        "headers": draw(st.sampled_from([HEADERS, WIDE_HEADERS])),
        "timestamp": draw(st.sampled_from([pa.int64(), pa.timestamp("ms", tz="UTC")])),
    }


def table(events: Sequence[Event], kinds: dict[str, pa.DataType]) -> pa.Table:
    """The events as a slice of a table, so that nothing begins at 0."""
    junk: list[Event] = [(b"junk", b"junk", [("junk", b"junk")], 7)]
    every = [*junk, *events, *junk]
    columns = dict(
        zip(("value", "key", "headers", "timestamp"), zip(*every, strict=True), strict=True)
    )
    columns["headers"] = tuple(
        None if one is None else [{"key": name, "value": value} for name, value in one]
        for one in columns["headers"]
    )
    arrays = {name: _array(list(column), kinds[name]) for name, column in columns.items()}
    return pa.table(arrays).slice(1, len(events))


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode().cast(kind)
    return pa.array(values, kind)


def lane_of(
    segments: int | list[tuple[int, int]],
    writer: int,
    *,
    limit: int = 1 << 20,
    backwards: bool = False,
) -> tuple[StreamLane, ListJournal]:
    """A lane whose journal keeps the records; ``segments``: how many, or which."""
    journal = ListJournal(limit)
    bounds = even_ranges(segments) if isinstance(segments, int) else segments
    ranges = [
        SegmentRange(i, low, high, len(bounds) - i if backwards else i)
        for i, (low, high) in enumerate(bounds)
    ]
    lane = WriterAccount(b"t" * 16, writer, journal).add(Touched("s/t", 3, tuple(ranges)), 0)
    return lane, journal


def expected(journal: ListJournal) -> dict[int, list[Record]]:
    """The records of each partition."""
    found: dict[int, list[Record]] = {}
    for _, partition, key, value, headers, stamp in journal.written:
        records = found.setdefault(partition, [])
        records.append(Record(0, stamp or NOW, key, value, tuple(headers)))
    return found


def check_batches(packed: Sequence[tuple[int, Packed]], journal: ListJournal) -> None:
    """The same records in each partition's batches, and the bytes that `BatchBuilder` makes of them."""
    want = expected(journal)
    for partition, batch in packed:
        records, want[partition] = want[partition][: batch.rows], want[partition][batch.rows :]
        builder = BatchBuilder()
        builder.add_all((r.key, r.value, r.headers, r.timestamp_ms) for r in records)
        assert decompress(batch.codec, batch.records) == builder.build()[HEADER_SIZE:]
        decoded = decode_records(batch.frame())
        assert [one._replace(offset=0) for one in decoded] == records
        assert batch.max_timestamp == max(record.timestamp_ms for record in records)
    assert not any(want.values())


def check_counts(encoder: ColumnEncoder, lane: StreamLane) -> None:
    """The account that goes into the receipt."""
    counted = [(one.partition, one.rows, one.crc_sum) for one in encoder.counted()]
    accounts = sorted(lane.accounts.values(), key=lambda account: account.partition)
    assert counted == [(a.partition, a.count, a.crc_sum) for a in accounts if a.count]
    assert encoder.counted() == []


@settings(max_examples=some(80), deadline=None)
@given(
    events=EVENTS,
    kinds=kinds(),
    segments=st.integers(1, 7),
    writer=st.integers(-(1 << 63), (1 << 63) - 1),
    sticky=st.integers(1, 600),
    batch_bytes=st.integers(HEADER_SIZE + 40, 3000),
    codec=st.sampled_from(sorted(CODECS.values())),
    pieces=st.integers(1, 4),
    backwards=st.booleans(),
)
def test_records_places_and_sums_are_those_of_single_writes(
    events: list[Event],
    kinds: dict[str, pa.DataType],
    segments: int,
    writer: int,
    sticky: int,
    batch_bytes: int,
    codec: int,
    pieces: int,
    backwards: bool,
) -> None:
    with patch.object(writing, "STICKY_BYTES", sticky):
        lane, journal = lane_of(segments, writer, backwards=backwards)
        for value, key, headers, timestamp in events:
            lane.write(key, value, headers, timestamp)
        encoder = ColumnEncoder(lane._placing, batch_bytes=batch_bytes, codec=codec)
    packed: list[tuple[int, Packed]] = []
    step = -(-len(events) // pieces)
    for at in range(0, len(events), step):
        for columns in columns_of(table(events[at : at + step], kinds)):
            packed += encoder.encode(columns, NOW)
    packed += encoder.rest()
    assert not list(encoder.rest())
    check_batches(packed, journal)
    check_counts(encoder, lane)
    for _, batch in packed:
        assert HEADER_SIZE + len(batch.records) <= batch_bytes or batch.rows == 1


@settings(max_examples=some(50), deadline=None)
@given(EVENTS, kinds())
def test_columns_give_the_events_back(events: list[Event], kinds: dict[str, pa.DataType]) -> None:
    (columns,) = columns_of(table(events, kinds))
    assert list(columns.events()) == [(v, k, h or [], t) for v, k, h, t in events]
    sizes = [
        len(v or b"") + len(k or b"") + sum(len(n.encode()) + len(x or b"") + 6 for n, x in h or ())
        for v, k, h, _ in events
    ]
    assert columns.sizes().tolist() == sizes


def test_bounds_of_ranges_and_of_sticky_runs_are_exact() -> None:
    keys = [b"a", b"b", b"c", b"d"]
    bounds = sorted({0, SPACE, *(p + d for p in map(position_of, keys) for d in (-1, 0, 1, 2))})
    size = 256 - writing.RECORD_OVERHEAD
    assert writing.STICKY_BYTES % 256 == 0
    events: list[Event] = [(b"v" * size, None, None, None) for _ in range(500)]
    events += [(b"v", key, None, None) for key in keys]
    lane, journal = lane_of(list(pairwise(bounds)), 1)
    for value, key, _, _ in events:
        lane.write(key, value, None, None)
    check_batches(written(lane, events, 250_000), journal)


# -- sizes ----------------------------------------------------------------------------------------------


def written(
    lane: StreamLane, events: Sequence[Event], batch_bytes: int
) -> list[tuple[int, Packed]]:
    """The batches of the events, in plain form."""
    encoder = ColumnEncoder(lane._placing, batch_bytes=batch_bytes, codec=CODECS["lz4"])

    def run() -> Iterator[tuple[int, Packed]]:
        for columns in columns_of(table(events, PLAIN)):
            yield from encoder.encode(columns, NOW)
        yield from encoder.rest()

    found = list(run())
    check_counts(encoder, lane)
    return found


PLAIN = {"value": pa.binary(), "key": pa.binary(), "headers": HEADERS, "timestamp": pa.int64()}


def test_rows_bigger_than_a_batch_go_alone_wherever_they_come() -> None:
    lane, journal = lane_of(3, 1)
    sizes = [10, 5000, 10, 7000, 6999, 10, 10, 9000, 9000, 20, 5000]
    events: list[Event] = [
        (os.urandom(size), b"k%d" % i, [("h", b"x" * i)], None) for i, size in enumerate(sizes)
    ]
    for value, key, headers, _ in events:
        lane.write(key, value, headers, None)
    packed = written(lane, events, 1000)
    check_batches(packed, journal)
    assert sorted(b.rows for _, b in packed if len(b.records) > 1000) == [1] * 6


def test_what_does_not_pack_is_left_as_it_is() -> None:
    lane, _ = lane_of(1, 1)
    events: list[Event] = [(os.urandom(900), None, None, None), (b"v" * 900, None, None, None)]
    for value, *_ in events:
        lane.write(None, value, None, None)
    (_, noise), (_, text) = written(lane, events, 1024)
    assert noise.codec == CODECS["none"]
    assert HEADER_SIZE + len(noise.records) <= 1024
    assert text.codec == CODECS["lz4"]
    assert len(text.records) < 200


def test_ten_thousand_partitions_share_the_room() -> None:
    lane, journal = lane_of(10_000, 1)
    events: list[Event] = [(b"v" * 3000, b"%d" % i, None, None) for i in range(3000)]
    for value, key, _, _ in events:
        lane.write(key, value, None, None)
    check_batches(written(lane, events, 250_000), journal)


def test_the_largest_row_is_as_large_as_the_largest_event() -> None:
    lane, _ = lane_of(1, 1, limit=900 + writing.RECORD_OVERHEAD)
    event: Event = (b"v" * 885, b"kkk", [("nam", b"val")], None)
    (columns,) = columns_of(table([event, (b"v", b"k", None, None)], PLAIN))
    lane.check_columns(columns)
    (more,) = columns_of(table([(b"v", b"k", None, None), (b"v" * 901, None, None, None)], PLAIN))
    with pytest.raises(EventTooLarge, match="901 bytes"):
        lane.check_columns(more)
