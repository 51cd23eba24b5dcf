"""Splitting batches by key, with and without compiled code, against placing record by record."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.batches import builder, framing, split
from anabranch.batches.compression import NAMES
from anabranch.batches.format import HEADER_SIZE, LOG_APPEND_TIME, read_header
from anabranch.batches.packer import MIN_SPLICED_RECORDS
from anabranch.batches.records import Record, decode_records, encode_batch
from anabranch.batches.split import Split
from anabranch.core.journal_runs import StoredRun
from anabranch.errors import InvariantViolation
from anabranch.ports import CorruptBatch, RawBatch
from anabranch.protocol.ids import segment_id
from anabranch.protocol.partitioner import even_ranges, position_of
from anabranch.protocol.schemas.records import SegmentRange
from anabranch.testing.memory.partition import encode_sparse
from tests.batches.strategies import CODECS, raw, records, stored_run
from tests.batches.test_format import edited

T = 1_700_000_000_000
Fields = tuple[bytes | None, bytes | None, Any, int]


def layout(count: int, *, shift: int = 0) -> tuple[SegmentRange, ...]:
    """Even segments on partitions from ``shift`` on, the highest keys first."""
    ranges = list(enumerate(even_ranges(count)))
    return tuple(
        SegmentRange(segment_id(0, i), low, high, shift + i) for i, (low, high) in reversed(ranges)
    )


def fields(record: Record) -> Fields:
    return record.key, record.value, record.headers, record.timestamp_ms


def expected(
    segments: Sequence[SegmentRange], made: Sequence[Record], partition: int
) -> list[list[Fields]]:
    """The slow way: each record by itself."""
    here = [i for i, s in enumerate(segments) if s.partition == partition]
    keyless = here[0] if here else 0
    found: dict[int, list[Fields]] = defaultdict(list)
    for record in made:
        index = keyless
        if record.key is not None:
            at = position_of(record.key)
            (index,) = [i for i, s in enumerate(segments) if s.low <= at < s.high]
        found[index].append(fields(record))
    return [found[i] for i in range(len(segments))]


def given_out(batches: list[list[RawBatch]]) -> list[list[Fields]]:
    return [[fields(r) for b in each for r in decode_records(b.data)] for each in batches]


def whole(batch: RawBatch, *, pure: bool = True) -> StoredRun:
    count = read_header(batch.data).record_count
    return stored_run(batch.base_offset, batch.base_offset, batch.next_offset, count, pure)


def split_up(
    segments: Sequence[SegmentRange],
    batches: Sequence[tuple[RawBatch, StoredRun]],
    partition: int = 0,
    **given: int,
) -> list[list[RawBatch]]:
    made = Split(segments, **given)
    for batch, run in batches:
        made.add(batch, run, made.keyless(partition))
    return made.done()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(st.tuples(records(), st.sampled_from(CODECS)), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(0, 6),
)
def test_each_record_goes_to_the_segment_of_its_key(
    made_with: None, made: list[tuple[list[Record], str | None]], count: int, partition: int
) -> None:
    segments = layout(count, shift=2)
    batches = [raw(encode_batch(each, codec)) for each, codec in made]
    found = split_up(segments, [(batch, whole(batch)) for batch in batches], partition)
    everything = [record for each, _ in made for record in each]
    assert given_out(found) == expected(segments, everything, partition)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(records(30), st.data())
def test_runs_of_a_batch(made_with: None, made: list[Record], data: st.DataObject) -> None:
    """Some records of a batch, whose offsets may have gaps."""
    offsets = sorted(data.draw(st.sets(st.integers(0, 99), min_size=len(made), max_size=len(made))))
    made = [r._replace(offset=1000 + at) for r, at in zip(made, offsets, strict=True)]
    cuts = sorted(
        data.draw(st.sets(st.integers(0, len(made)), min_size=2, max_size=min(6, len(made) + 1)))
    )
    batch = raw(encode_sparse(made, base_offset=1000, next_offset=1100))
    taken, runs = [], []
    for i, (a, b) in enumerate(pairwise(cuts)):
        if i % 2 == 0 and a < b:
            runs.append(stored_run(1000, made[a].offset, made[b - 1].offset + 1, b - a, False))
            taken += made[a:b]
    segments = layout(3)
    found = split_up(segments, [(batch, run) for run in runs])
    assert given_out(found) == expected(segments, taken, 0)


def keys_of(segments: Sequence[SegmentRange], index: int, count: int) -> list[bytes]:
    """Keys that belong to one segment."""
    keys = (b"key-%d" % i for i in range(100_000))
    low, high = segments[index].low, segments[index].high
    return [key for key in keys if low <= position_of(key) < high][:count]


def batch_of(keys: Sequence[bytes | None], size: int = 5, codec: str | None = "lz4") -> RawBatch:
    value = b"v" * size
    return raw(encode_batch([Record(i, T + i, k, value, ()) for i, k in enumerate(keys)], codec))


@pytest.mark.parametrize("more", [0, 1])
def test_a_big_batch_of_one_segment_is_taken_as_it_is(made_with: None, more: int) -> None:
    segments = layout(4)
    first = batch_of(keys_of(segments, 2, 3))
    big = batch_of(keys_of(segments, 2, MIN_SPLICED_RECORDS + more))
    found = split_up(segments, [(batch, whole(batch)) for batch in (first, big, first)])
    assert [bool(each) for each in found] == [False, False, True, False]
    assert [b.data is big.data for b in found[2]] == [False, True, False]


@pytest.mark.parametrize("why", ["small", "a key of another segment", "not the whole batch"])
def test_batches_that_can_not_be_spliced_are_rebuilt(made_with: None, why: str) -> None:
    segments = layout(4)
    keys = keys_of(segments, 2, MIN_SPLICED_RECORDS - (why == "small"))
    if why == "a key of another segment":
        keys += keys_of(segments, 1, 1)
    batch = batch_of(keys)
    found = split_up(segments, [(batch, whole(batch, pure=why != "not the whole batch"))])
    assert all(b.data is not batch.data for each in found for b in each)
    assert sum(len(each) for each in given_out(found)) == len(keys)


def test_records_without_a_key_stay_on_their_partition(made_with: None) -> None:
    segments = layout(3, shift=1)
    batch = batch_of([None] * 150)
    for partition, index in ((1, 2), (2, 1), (3, 0), (0, 0), (4, 0)):
        found = split_up(segments, [(batch, whole(batch))], partition)
        assert [len(each) for each in found] == [int(i == index) for i in range(3)]
        assert found[index][0].data is batch.data


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.integers(0, 1_500), min_size=1, max_size=40), st.integers(1, 3))
def test_no_batch_is_bigger_than_its_limit(made_with: None, sizes: list[int], count: int) -> None:
    """But a record that is too big by itself, which goes alone, packed as it came."""
    made = [
        Record(i, T - i, b"key-%d" % i, b"v" * size, (("h", b"x"),)) for i, size in enumerate(sizes)
    ]
    batch = raw(encode_batch(made, "zstd"))
    segments = layout(count)
    found = split_up(segments, [(batch, whole(batch, pure=False))] * 2, limit=1_000)
    assert given_out(found) == expected(segments, made * 2, 0)
    assert all(len(b.data) <= 1_000 for each in found for b in each)
    for each in found:
        for before, after in pairwise(each):
            if not any(read_header(b.data).compression for b in (before, after)):
                one_more = len(fields(next(iter(decode_records(after.data))))[1] or b"") + 60
                assert len(before.data) + one_more > 1_000, "batches are not smaller than need be"


def test_the_log_s_own_time_stays(made_with: None) -> None:
    """The broker's time of a journal's batches, where it sets it, is the records' time."""
    batch = batch_of([b"a", b"b", b"c"], codec=None)
    stamped = raw(edited(bytes(batch.data), attributes=LOG_APPEND_TIME, max_timestamp=T + 77))
    found = split_up(layout(2), [(stamped, whole(stamped))])
    assert {f[3] for each in given_out(found) for f in each} == {T + 77}


def test_a_run_that_the_batch_does_not_show(made_with: None) -> None:
    batch = batch_of([b"a"] * 4)
    with pytest.raises(InvariantViolation, match="a run of 5 records at 0 has 4"):
        split_up(layout(2), [(batch, stored_run(0, 0, 5, 5, False))])


@pytest.mark.parametrize("change", ["a record longer than the rest", "fewer records than said"])
def test_a_batch_that_can_not_be_read(made_with: None, change: str) -> None:
    data = bytes(batch_of([b"a"] * 4, codec=None).data)
    if change == "a record longer than the rest":
        data = data[:HEADER_SIZE] + b"\x7e" + data[HEADER_SIZE + 1 :]
    else:
        data = edited(data, record_count=5, last_offset_delta=4)
    with pytest.raises(CorruptBatch):
        split_up(layout(2), [(raw(data), stored_run(0, 0, 4, 4, True))])


def test_much_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Big batches: both ways give the same records in batches of the same sizes, about."""
    framing.warm()
    keys: list[bytes | None] = [
        None if i % 50 == 0 else b"key-%d" % (i * i % 3_001) for i in range(40_000)
    ]
    batches = [batch_of(keys[i : i + 7_000], 100, "zstd") for i in range(0, len(keys), 7_000)]
    segments = layout(16)
    added = [(batch, whole(batch)) for batch in batches]
    quick = split_up(segments, added, 3)
    for module in (split, builder):
        monkeypatch.setattr(module, "kernels_for", lambda _: None)
    slow = split_up(segments, added, 3)
    assert given_out(quick) == given_out(slow)


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec])
def test_what_unpacks_to_much_is_packed_again_by_its_own_codec(made_with: None, codec: str) -> None:
    """Sixteen events of a small batch, which go to four segments, are no megabytes in the stream."""
    made = [Record(n, T, b"%d" % n, bytes(100_000)) for n in range(16)]
    batch = raw(encode_batch(made, codec))
    found = split_up(layout(4), [(batch, whole(batch))])
    assert sorted(f for each in given_out(found) for f in each) == sorted(map(fields, made))
    assert codecs_of(found) == [[codec]] * 4
    assert sum(len(one.data) for each in found for one in each) < 100_000


def test_each_batch_is_packed_as_it_is_worth(made_with: None) -> None:
    """To pack small ones again, or what hardly gets smaller, takes longer than to append them as they are."""
    segments = layout(1)
    much, few, dense = bytes(100_000), bytes(1_000), random.Random(7).randbytes(100_000)
    came = (
        (much, "zstd"), (few, "zstd"), (much, "gzip"), (dense, "gzip"), (much, "lz4"),
    )  # fmt: skip
    batches = [
        raw(encode_batch([Record(n, T, b"k", value) for n in range(4)], codec))
        for value, codec in came
    ]
    found = split_up(segments, [(batch, whole(batch, pure=False)) for batch in batches])
    assert [f[1] for f in given_out(found)[0]] == [value for value, _ in came for _ in range(4)]
    assert codecs_of(found) == [["zstd", "none", "gzip", "none", "lz4"]]


def codecs_of(batches: list[list[RawBatch]]) -> list[list[str]]:
    """The codecs of each segment's batches, each named once in a row."""
    names = ([NAMES[read_header(one.data).compression] for one in each] for each in batches)
    return [[name for name, _ in groupby(each)] for each in names]
