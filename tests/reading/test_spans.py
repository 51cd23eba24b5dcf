"""Spans of a partition: read from history records by compiled code, joined to offsets, filtered."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.batches import columns_read
from anabranch.batches.columns_read import Columns, ColumnsBuilder
from anabranch.batches.records import Record, encode_batch
from anabranch.errors import AnabranchError
from anabranch.protocol.schemas.codec import decode, encode
from anabranch.protocol.schemas.records import (
    CommitRecord,
    EpochRecord,
    EpochSegment,
    Position,
    SegmentCommit,
    SegmentEnd,
)
from anabranch.reading import commit_columns as commits
from anabranch.reading.commit_columns import (
    NO_SPANS,
    CommitFilter,
    Part,
    Spans,
    _part,
    _walk,
    spans_of,
)
from anabranch.reading.history import HistoryRecord
from tests.batches.strategies import mutated, raw
from tests.conftest import some

# Here, that no test of hypothesis takes so long.
columns_read.warm()
commits.warm()

ALL = np.array([[0], [1 << 62]], dtype=np.int64)
_LONG = st.integers(0, 200) | st.integers(-(1 << 63), (1 << 63) - 1)
_INT = st.integers(0, 2) | st.integers(-(1 << 31), (1 << 31) - 1)
_VECTOR = st.lists(st.builds(Position, _INT, _LONG), max_size=4).map(tuple)
_COMMIT = st.builds(
    CommitRecord,
    txn_id=st.binary(min_size=16, max_size=16),
    stream_epoch=_INT,
    timestamp=_LONG,
    segments=st.lists(st.builds(SegmentCommit, _LONG, _INT, _LONG, _LONG, _LONG), max_size=4).map(
        tuple
    ),
    vector=_VECTOR,
    previous=_LONG,
    vector_at=st.just(-1) | _LONG,
    safe=st.just(0),
)
_EPOCH = st.builds(
    EpochRecord,
    stream_epoch=_INT,
    reference_epoch=_INT,
    timestamp=_LONG,
    segments=st.lists(st.builds(EpochSegment, _LONG, _LONG, _LONG, _INT, _LONG), max_size=4).map(
        tuple
    ),
    sealed=st.lists(st.builds(SegmentEnd, _LONG, _LONG), max_size=3).map(tuple),
    vector=_VECTOR,
    previous=_LONG,
    safe=st.just(0),
)


def columns(values: list[bytes]) -> Columns:
    """Records with these values, as the history's are read."""
    builder = ColumnsBuilder()
    builder.add(raw(encode_batch([Record(i, 0, b"", v) for i, v in enumerate(values)])), ALL)
    found = builder.finish()
    assert found is not None
    return found


def plain(part: Part | None) -> object:
    """A part, to be compared."""
    if part is None:
        return None
    s = part.spans
    arrays = [a.tolist() for a in s.columns]
    return arrays, part.reached, part.timestamp


@given(st.lists(_COMMIT | _EPOCH, min_size=1, max_size=6), st.integers(0, 2))
def test_the_compiled_walk_finds_what_the_codec_does(
    records: list[HistoryRecord], partition: int
) -> None:
    found = _walk(columns([encode(record) for record in records]), partition)
    assert plain(found) == plain(_part(records, partition))


@settings(max_examples=some(500))
@given(_COMMIT | _EPOCH, st.data())
def test_mutated_records_are_declined_or_read_alike(
    record: HistoryRecord, data: st.DataObject
) -> None:
    body = mutated(encode(record), data, most=2)
    found = _walk(columns([body]), 0)
    try:
        wanted = decode(body)
    except AnabranchError:
        assert found is None
    else:
        if found is not None:
            assert plain(found) == plain(_part([wanted], 0))


def test_records_of_level_4_are_left_to_the_codec() -> None:
    """Such a record was merged while another transaction was held, which is rare."""
    assert _walk(columns([encode(CommitRecord(bytes(16), 0, 7, (), (), -1, safe=6))]), 0) is None


def test_arrays_in_blocks_with_their_sizes() -> None:
    """A form of Avro that our encoder never writes."""
    record = CommitRecord(bytes(16), 0, 7, (SegmentCommit(3, 0, 1, 2, 1),), (Position(0, 2),), -1)
    body = encode(record)
    at = 2 + 16 + 2
    assert body[at : at + 7] == bytes((2, 6, 0, 2, 4, 2, 0))
    sized = body[:at] + bytes((1, 10)) + body[at + 1 :]
    assert decode(sized) == record
    assert plain(_walk(columns([sized]), 0)) == plain(_part([record], 0))


def spans(*rows: tuple[int, int, int, int]) -> Spans:
    """Of (first, end, timestamp, segment)."""
    table = np.array([(*row, 0, 0, 0) for row in rows], dtype=np.int64).reshape(-1, 7).T
    return Spans(*(row.copy() for row in table))


@pytest.mark.parametrize(
    ("first", "end", "wanted"),
    [
        (0, 99, [(0, 10, 10), (10, 20, 9), (21, 30, -1)]),
        (5, 15, [(5, 10, 5), (10, 15, -1)]),
        (10, 30, [(10, 20, 9), (21, 30, -1)]),
    ],
)
def test_events_within_a_range_are_counted_where_it_is_sure(
    first: int, end: int, wanted: list[tuple[int, int, int]]
) -> None:
    """The second has a marker, the third is malformed."""
    three = spans((0, 10, 1, 0), (10, 20, 1, 0), (21, 30, 1, 0))
    counted = replace(three, counts=np.array([10, 9, 10], dtype=np.int64))
    near = counted.overlapping(first, end).clipped(first, end)
    assert (
        list(zip(*(c.tolist() for c in (near.firsts, near.ends, near.counts)), strict=True))
        == wanted
    )


_ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(1, 2), st.integers(0, 2)),
    max_size=8,
)


def laid_out(drawn: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Of (gap, length, step of time, segment): spans in order."""
    at = time = 0
    rows = []
    for gap, length, step, segment in drawn:
        at, time = at + gap, time + step
        rows.append((at, at + length, time, segment))
        at += length
    return rows


@given(_ROWS, st.lists(st.integers(0, 50), unique=True).map(sorted))
def test_offsets_find_their_commit(
    drawn: list[tuple[int, int, int, int]], asked: list[int]
) -> None:
    rows = laid_out(drawn)
    joined = spans(*rows).join(np.array(asked, dtype=np.int64))
    known = [True] * len(asked) if joined.known is None else joined.known.tolist()
    found = zip(known, joined.timestamps.tolist(), joined.segments.tolist(), strict=True)
    for offset, (is_known, timestamp, segment) in zip(asked, found, strict=True):
        mine = [row for row in rows if row[0] <= offset < row[1]]
        assert [row[2:] for row in mine] == ([(timestamp, segment)] if is_known else [])


_BOUND = st.none() | st.integers(0, 12)


@given(
    _ROWS,
    _BOUND,
    _BOUND,
    st.none() | st.frozensets(st.integers(0, 2)),
    st.tuples(st.integers(0, 30), st.integers(0, 60)),
)
def test_filters_take_whole_commits(
    drawn: list[tuple[int, int, int, int]],
    low: int | None,
    high: int | None,
    segments: frozenset[int] | None,
    within: tuple[int, int],
) -> None:
    rows = laid_out(drawn)
    first, end = sorted(within)
    ranges = spans(*rows).wanted(CommitFilter(low, high, segments), first, end)
    # A range may also pass over markers between two commits.
    named = {offset for row in rows for offset in range(row[0], row[1])}
    taken = {o for a, b in ranges.T.tolist() for o in range(a, b)} & named
    assert taken == {
        offset
        for begins, stops, timestamp, segment in rows
        if (low is None or low <= timestamp)
        and (high is None or timestamp <= high)
        and (segments is None or segment in segments)
        for offset in range(max(begins, first), min(stops, end))
    }
    edges = ranges.T.ravel().tolist()
    assert edges == sorted(edges)


def test_nothing_is_known_without_spans() -> None:
    joined = NO_SPANS.join(np.array([3, 4], dtype=np.int64))
    assert joined.known is not None
    assert joined.known.tolist() == [False, False]
    assert len(spans_of([], 0)) == 0


@pytest.mark.parametrize("first", [0, 1, 5, 9, 10, 30])
def test_spans_that_overlap_an_interval_are_found(first: int) -> None:
    rows = [(0, 5, 1, 1), (6, 10, 2, 1), (10, 12, 3, 2)]
    for end in range(first, 14):
        found = spans(*rows).overlapping(first, end)
        wanted = [row[0] for row in rows if row[1] > first and row[0] < end]
        assert found.firsts.tolist() == wanted
