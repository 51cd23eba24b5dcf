"""The batch builder against the plain encoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.batches import builder, framing
from anabranch.batches.builder import BatchBuilder
from anabranch.batches.format import CONTROL
from anabranch.batches.kernels import copy as kernel
from anabranch.batches.kernels.parts import NO_ROOM
from anabranch.batches.records import Record, decode_records, encode_batch
from anabranch.errors import InvalidArgument
from anabranch.ports import CorruptBatch
from anabranch.testing.memory.partition import encode_sparse
from tests.batches.strategies import CODECS, raw, records
from tests.batches.test_format import edited
from tests.batches.test_records import MALFORMED
from tests.conftest import some


@given(records(), st.sampled_from(CODECS))
def test_events_are_encoded_as_the_plain_encoder_does(
    made: list[Record], codec: str | None
) -> None:
    built = BatchBuilder(codec)
    built.add_all((r.key, r.value, r.headers, r.timestamp_ms) for r in made)
    assert built.count == len(made)
    assert built.build() == encode_batch(made, codec)
    if codec is None:
        assert built.size_estimate == len(built.build())


def test_sizes_beyond_the_tables() -> None:
    sizes = (0, 1, 63, 64, 4095, 4096, 8191, 8192, 100_000)
    made = [
        Record(i, i * 5000 - 7, b"k" * size, b"v" * size, (("h" * 70, b"x" * size),))
        for i, size in enumerate(sizes)
    ] + [Record(0, 5, b"k", b"v") for _ in range(5000)]
    built = BatchBuilder()
    built.add_all((r.key, r.value, r.headers, r.timestamp_ms) for r in made)
    assert built.build() == encode_batch(made)


def test_headers_given_as_a_list() -> None:
    built = BatchBuilder()
    headers = [("a", b"1"), ("b", None)]
    built.add(b"k", b"v", headers, 7)
    headers.append(("c", b"2"))
    built.add(b"k", b"v", headers, 7)
    assert [r.headers for r in decode_records(built.build())] == [
        (("a", b"1"), ("b", None)),
        (("a", b"1"), ("b", None), ("c", b"2")),
    ]


@settings(max_examples=some(150))
@given(
    st.lists(st.tuples(records(), st.sampled_from(CODECS)), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 21), st.integers(0, 21)), max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_taking_records_out_of_batches(
    sources: list[tuple[list[Record], str | None]],
    taken: list[tuple[int, int, int]],
    compiled: bool,
    append_time: bool,
) -> None:
    framing.warm()
    batches = []
    for made, codec in sources:
        data = encode_batch(made, codec)
        if append_time:
            data = edited(data, attributes=data[22] | 0x08, base_offset=1000, max_timestamp=1 << 40)
        batches.append(raw(data))
    wanted = [Record(0, 123, b"first", None)]
    built = BatchBuilder()
    built.add_all((r.key, r.value, r.headers, r.timestamp_ms) for r in wanted)
    with pytest.MonkeyPatch.context() as patched:
        if not compiled:
            patched.setattr(builder, "kernels_for", lambda _: None)
        for which, low, high in taken:
            batch = batches[which % len(batches)]
            found = [
                r for r in decode_records(batch.data) if low <= r.offset - batch.base_offset <= high
            ]
            assert built.add_from_batch(batch, low, high) == len(found)
            wanted += found
    assert built.count == len(wanted)
    assert built.build() == encode_batch(wanted)


def test_runs_taken_one_after_the_other(made_with: None) -> None:
    made = [Record(i, 1000 - i * 3, b"k%d" % i, b"v" * (i % 90)) for i in range(700)]
    batch = raw(encode_batch(made, "zstd"))
    other = raw(encode_batch(made[:40]))
    built = BatchBuilder()
    wanted: list[Record] = []
    for low in range(0, 700, 7):
        assert built.add_from_batch(batch, low, low + 2) == 3
        wanted += made[low : low + 3]
    for low, high in ((50, 60), (10, 20), (699, 699), (0, 0), (0, 699)):
        built.add_from_batch(batch, low, high)
        wanted += made[low : high + 1]
        built.add_from_batch(other, 5, 6)
        wanted += made[5:7]
    assert built.build() == encode_batch(wanted)


def test_records_too_big_for_the_first_guess(made_with: None) -> None:
    made = [Record(i, 0, b"k", b"v" * 50_000) for i in range(5)]
    built = BatchBuilder()
    assert built.add_from_batch(raw(encode_batch(made)), 1, 3) == 3
    assert built.build() == encode_batch(made[1:4])


def test_batches_with_gaps_become_dense(made_with: None) -> None:
    made = [Record(offset, 5, b"k", b"%d" % offset) for offset in (10, 12, 17)]
    batch = raw(encode_sparse(made, base_offset=10, next_offset=20))
    built = BatchBuilder()
    assert built.add_from_batch(batch, 1, 9) == 2
    assert built.build() == encode_batch(made[1:])


@pytest.mark.parametrize(
    "case", ["a record beyond the end", "a negative length", "no lz4", "no zstd"]
)
def test_what_can_not_be_read_adds_nothing(case: str, made_with: None) -> None:
    built = BatchBuilder()
    built.add(b"k", b"v", (), 5)
    before = built.build()
    with pytest.raises(CorruptBatch):
        built.add_from_batch(raw(MALFORMED[case]), 0, 5)
    assert built.build() == before


def test_a_control_batch_has_no_records_to_take(made_with: None) -> None:
    batch = raw(edited(encode_batch([Record(0, 0, b"k", b"v")]), attributes=CONTROL))
    with pytest.raises(CorruptBatch, match="control"):
        BatchBuilder().add_from_batch(batch, 0, 0)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least one"):
        BatchBuilder().build()
    with pytest.raises(InvalidArgument, match="lz4"):
        BatchBuilder("lzma")


@given(records(), st.integers(0, 600))
def test_adding_stops_at_a_limit_and_resumes_after_it(made: list[Record], limit: int) -> None:
    rows = iter([(r.key, r.value, r.headers, r.timestamp_ms) for r in made])
    taken: list[Record] = []
    while True:
        built = BatchBuilder()
        added = built.add_all(rows, limit)
        assert built.count == added
        if not added:
            break
        data = built.build()
        part = made[len(taken) : len(taken) + added]
        assert data == encode_batch(part)
        if len(taken) + added < len(made):
            assert built.size_estimate >= limit
        assert added == 1 or len(encode_batch(part[:-1])) < limit
        taken += part
    assert taken == made


def test_what_was_added_before_a_bad_row_stays() -> None:
    built = BatchBuilder()
    rows: list[Any] = [(b"a", b"1", (), 5), (b"b", b"2", (), 9), ("text", b"3", (), 7)]
    with pytest.raises(TypeError):
        built.add_all(rows)
    assert built.count == 2
    built.add(b"c", None, (), 1)
    wanted = [Record(0, 5, b"a", b"1"), Record(1, 9, b"b", b"2"), Record(2, 1, b"c", None)]
    assert built.build() == encode_batch(wanted)


def test_runs_that_touch_lose_nothing_between_them(made_with: None) -> None:
    made = [Record(i, 5, b"k%d" % i, b"v") for i in range(300)]
    batch = raw(encode_batch(made, "lz4"))
    built = BatchBuilder()
    at = 0
    for size in (1, 2, 1, 50, 100, 1, 145):
        assert built.add_from_batch(batch, at, at + size - 1) == size
        at += size
    assert at == 300
    assert built.build() == encode_batch(made)


def test_copying_never_writes_beyond_its_room() -> None:
    made = [Record(i, i * 1000, b"key", b"v" * (i * 7 % 40), (("h", b"x"),)) for i in range(30)]
    body = np.frombuffer(encode_batch(made), dtype=np.uint8, offset=61)
    outcomes = set()
    for room in range(len(body) + 40):
        # Bytes behind the room must stay as they are.
        whole = np.full(len(body) + 200, 0xAA, dtype=np.uint8)
        state = np.zeros(kernel.STATE_SIZE, dtype=np.int64)
        result = kernel.copy(body, 0, 29, 0, 0, False, whole[:room], state)
        assert (whole[room:] == 0xAA).all()
        outcomes.add(result)
        if result == 0:
            assert bytes(whole[: state[kernel.TARGET_AT]]) == bytes(body)
        else:
            assert not state.any()
    assert outcomes == {0, NO_ROOM}
