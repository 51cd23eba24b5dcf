"""The bodies of record batches: compiled code against the oracle, and both against an independent reader."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.client import raw_encoding
from anabranch.client.raw_encoding import Chunk, ChunkEncoder, Slot
from anabranch.core.ids import TXN_HEADER, pack_txn_header
from anabranch.core.keyspace import even_ranges, position_of, record_checksum
from anabranch.topics.batch import frame
from anabranch.topics.records import decode_records

HEADER = (TXN_HEADER, pack_txn_header(bytes(range(16)), -5, 3))
START_S = 1_700_000_000.0

_bytes = st.one_of(st.none(), st.binary(max_size=40), st.binary(min_size=120, max_size=300))
_headers = st.one_of(
    st.none(), st.lists(st.tuples(st.text(max_size=5), st.one_of(st.none(), st.binary(max_size=9))))
)
_stamps = st.one_of(st.none(), st.integers(1, 1 << 62), st.just(int(START_S * 1000)))
_events = st.lists(st.tuples(_bytes, _bytes, _headers, _stamps), min_size=1, max_size=30)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    raw_encoding.warm()
    assert raw_encoding._kernel is not None


def encoder(segments: int) -> ChunkEncoder:
    slots = [Slot(partition) for partition in range(segments)]
    return ChunkEncoder([low for low, _ in even_ranges(segments)], slots, HEADER)


def chunk_of(events: list[Any]) -> Chunk:
    chunk = Chunk()
    for i, (key, value, headers, stamp) in enumerate(events):
        if headers or stamp:
            chunk.special[i] = (headers, stamp)
        chunk.nulls |= key is None or value is None
        chunk.keys.append(key)
        chunk.values.append(value)
        chunk.stamps.append(START_S + i / 3)
    return chunk


@settings(deadline=None)
@given(st.lists(_events, min_size=1, max_size=3), st.integers(1, 5), st.integers(0, 4))
def test_compiled_is_the_same_as_plain(chunks: list[Any], segments: int, keyless: int) -> None:
    plain, fast = encoder(segments), encoder(segments)
    for events in chunks:
        turn = keyless % segments
        plain._encode_plainly(chunk_of(events), plain.slots[turn])
        assert raw_encoding._kernel is not None
        fast._encode_compiled(raw_encoding._kernel, chunk_of(events), fast.slots[turn])
    assert fast.slots == plain.slots


@settings(deadline=None)
@given(_events, st.integers(1, 5), st.integers(0, 4), st.booleans())
def test_what_is_written_is_what_is_read(
    events: list[Any], segments: int, keyless: int, fast: bool
) -> None:
    under_test = encoder(segments)
    chunk = chunk_of(events)
    if fast:
        assert raw_encoding._kernel is not None
        under_test._encode_compiled(
            raw_encoding._kernel, chunk, under_test.slots[keyless % segments]
        )
    else:
        under_test._encode_plainly(chunk, under_test.slots[keyless % segments])
    expected: dict[int, list[Any]] = {}
    sums: dict[int, int] = {}
    for i, (key, value, headers, stamp) in enumerate(events):
        partition = keyless % segments
        if key is not None:
            at = position_of(key)
            partition = next(
                n for n, (low, high) in enumerate(even_ranges(segments)) if low <= at < high
            )
        own = stamp or int((START_S + i / 3) * 1000)
        expected.setdefault(partition, []).append((own, key, value, (*(headers or ()), HEADER)))
        sums[partition] = sums.get(partition, 0) + record_checksum(key, value)
    for slot in under_test.slots:
        found: list[Any] = []
        if slot.count:
            batch = frame(
                slot.body,
                compression=0,
                last_offset_delta=slot.count - 1,
                count=slot.count,
                base_timestamp=slot.base_timestamp,
                max_timestamp=slot.max_timestamp,
            )
            found = [(r.timestamp_ms, r.key, r.value, r.headers) for r in decode_records(batch)]
            assert slot.max_timestamp == max(stamp for stamp, *_ in found)
        assert found == expected.get(slot.partition, [])
        assert slot.events == len(found)
        assert slot.crc_sum == sums.get(slot.partition, 0)


def test_a_long_batch_goes_on_over_chunks() -> None:
    under_test = encoder(1)
    for part in range(40):
        events = [
            (b"k%d" % i, b"v" * (i % 200), None, None) for i in range(part * 500, part * 500 + 500)
        ]
        under_test.encode(chunk_of(events), under_test.slots[0])
    (slot,) = under_test.slots
    batch = frame(
        slot.body,
        compression=0,
        last_offset_delta=slot.count - 1,
        count=slot.count,
        base_timestamp=slot.base_timestamp,
        max_timestamp=slot.max_timestamp,
    )
    assert [record.key for record in decode_records(batch)] == [b"k%d" % i for i in range(20_000)]
