"""Events of decoded blocks: the same from columns as from records one by one; and portions of batches."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Sequence
from functools import partial
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.batches import columns_read
from anabranch.batches.columns_read import ColumnsBuilder
from anabranch.batches.records import Record, encode_batch
from anabranch.errors import MalformedRecord, UndecodableValue
from anabranch.ports import RawBatch, TopicPartition
from anabranch.protocol.ids import TXN_HEADER
from anabranch.reading import decoded as portions
from anabranch.reading.decoded import (
    ColumnsBlock,
    Portion,
    RecordsBlock,
    Run,
    Stretch,
    events_of,
    portion_of_batches,
)
from anabranch.reading.event_columns import batch_of
from anabranch.reading.ordered_reader import Step
from anabranch.reading.slices import EVENT_BYTES, Piece, Slice, Slices
from anabranch.testing.memory.partition import with_base_offset
from anabranch.types import Event
from anabranch.values import Decoder, stream_of
from tests.batches import strategies

ALL = np.array([[0], [1 << 62]], dtype=np.int64)
PLACE = TopicPartition("s.t", 3)
IDS = (None, b"0" * 16, bytes([1]) * 16)


def columns(records: Sequence[Record]) -> ColumnsBlock:
    builder = ColumnsBuilder()
    found = builder.add(strategies.raw(encode_batch(records)), ALL) or builder.finish()
    assert found is not None
    return ColumnsBlock(found)


def events(
    block: ColumnsBlock | RecordsBlock, low: int, stretches: Sequence[Stretch]
) -> list[Event]:
    return list(events_of("s/t", 3, block, low, stretches, iter(block.offsets[low:])))


@settings(deadline=None)
@given(st.data())
def test_columns_and_records_make_the_same_events(data: st.DataObject) -> None:
    records = data.draw(strategies.records())
    low = data.draw(st.integers(0, len(records) - 1))
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    stretches = []
    left = len(records) - low
    for number, length in enumerate(lengths):
        if left:
            txn_id = data.draw(st.sampled_from(IDS))
            stretches.append(Stretch(min(length, left), txn_id, 100 + number, 200 + number))
            left -= stretches[-1].length
    made = events(RecordsBlock(records), low, stretches)
    assert events(columns(records), low, stretches) == made
    assert all(type(event) is Event and type(event.headers) is list for event in made)
    of = [s for s in stretches for _ in range(s.length)]
    assert len(made) == len(of)
    for event, record, stretch in zip(made, records[low:], of, strict=False):
        assert event[:3] == ("s/t", record.key, record.value)
        assert event.headers == [h for h in record.headers if h[0] not in ("ab.txn", "ab.op")]
        ids = [v[:16] for n, v in record.headers if n == TXN_HEADER and v and len(v) >= 16]
        assert event.txn_id == (ids[-1] if ids else stretch.txn_id)
        assert event[6:8] == (stretch.commit_timestamp, stretch.segment_id)
        assert event[8:] == (3, record.offset)
        assert event.timestamp == record.timestamp_ms


@pytest.mark.parametrize("sizes", [(5, 5, 5), (0, 0, 0), (1, 2, 3), (0, 7, 0)])
def test_values_of_one_size_and_of_several(sizes: tuple[int, ...]) -> None:
    records = [Record(i, 0, b"k", bytes([i]) * size) for i, size in enumerate(sizes)]
    made = events(columns(records), 1, [Stretch(2, None, 1, 1)])
    assert [event.value for event in made] == [record.value for record in records[1:]]


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 2, 2), (0, 3, 1), (0, 0, 0)])
def test_headers_of_one_number_and_of_several(counts: tuple[int, ...]) -> None:
    numbers = itertools.count()
    records = [
        Record(i, 0, None, None, tuple((f"h{j}", b"%d" % next(numbers)) for j in range(count)))
        for i, count in enumerate(counts)
    ]
    made = events(columns(records), 1, [Stretch(2, None, 1, 1)])
    assert [event.headers for event in made] == [list(record.headers) for record in records[1:]]


def test_events_share_no_headers() -> None:
    made = events(
        columns([Record(i, 0, None, None) for i in range(2)]), 0, [Stretch(2, None, 1, 1)]
    )
    made[0].headers.append(("mine", b""))
    assert made[1].headers == []


# -- portions -------------------------------------------------------------------------------------------


def batches(count: int, rows: int) -> list[RawBatch]:
    """Batches of so many rows, from offset 100 on, each followed by an offset without a record."""
    data = encode_batch([Record(i, 0, b"k", b"%d" % i) for i in range(rows)], "lz4")
    return [strategies.raw(with_base_offset(data, 100 + i * (rows + 1))) for i in range(count)]


def offsets(portion: Portion) -> list[int]:
    found = []
    while (offset := portion.first()) is not None:
        found.append(offset)
        _, at = portion.next_of_block()
        portion.advance(at + 1)
    return found


@pytest.mark.parametrize("loaded", [False, True])
def test_a_portion_gives_its_records_from_an_offset_on(
    loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns_read, "is_warm", lambda: loaded)
    monkeypatch.setattr(portions, "_BLOCK_ROWS", 16)
    monkeypatch.setattr(portions, "_loading", portions._Loading())
    portion = portion_of_batches(PLACE, batches(7, 10), 104)
    assert portion.first() == 104
    block, _ = portion.next_of_block()
    assert type(block) is (ColumnsBlock if loaded else RecordsBlock)
    expected = [100 + i * 11 + j for i in range(7) for j in range(10)]
    assert offsets(portion) == expected[4:]
    assert portion.first() is None
    portion = portion_of_batches(PLACE, batches(7, 10), 104)
    portion.end = 150
    assert offsets(portion) == [offset for offset in expected[4:] if offset < 150]


def test_nothing_waits_while_the_compiled_code_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, loaded = threading.Event(), threading.Event()

    def warm() -> None:
        begun.set()
        assert loaded.wait(60)

    monkeypatch.setattr(columns_read, "warm", warm)
    monkeypatch.setattr(columns_read, "is_warm", loaded.is_set)
    monkeypatch.setattr(portions, "_loading", portions._Loading())
    try:
        for _ in range(3):
            portion = portion_of_batches(PLACE, batches(2, 3000), 0)
            assert len(offsets(portion)) == 6000
            assert begun.wait(60), "it is loaded beside what is read"
    finally:
        loaded.set()
    portion = portion_of_batches(PLACE, batches(2, 3000), 0)
    portion.first()
    assert type(portion.next_of_block()[0]) is ColumnsBlock


def test_a_module_that_another_thread_imports_right_now_is_not_there_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = columns_read.__name__
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert not portions._Loading().worth_it(10)


def test_few_records_do_without_compiled_code() -> None:
    columns_read.warm()
    for rows, kind in ((3, RecordsBlock), (3000, ColumnsBlock)):
        portion = portion_of_batches(PLACE, batches(1, rows), 0)
        portion.first()
        assert type(portion.next_of_block()[0]) is kind


@pytest.mark.parametrize("rows", [5, 500])
def test_a_corrupt_batch_raises_each_time_after_what_comes_before_it(rows: int) -> None:
    columns_read.warm()
    good, bad, after = batches(3, rows)
    broken = bytearray(bad.data)
    broken[-1] ^= 0xFF
    portion = portion_of_batches(
        PLACE, [good, bad._replace(data=memoryview(broken)), after], good.base_offset
    )
    for offset in range(good.base_offset, good.next_offset):
        assert portion.first() == offset
        portion.advance(portion.next_of_block()[1] + 1)
    for _ in range(2):
        with pytest.raises(MalformedRecord, match=r"s\.t\[3\]"):
            portion.first()


def test_records_in_hand() -> None:
    records = [Record(i, 0, None, b"v") for i in (3, 5, 8)]
    assert offsets(Portion(PLACE, iter([RecordsBlock(records)]))) == [3, 5, 8]


# -- steps ----------------------------------------------------------------------------------------------


def done(step: Step) -> int | None:
    return step.processed_to


def test_an_event_is_processed_when_more_is_asked_for() -> None:
    block = RecordsBlock([Record(10 + i, 0, None, b"v") for i in range(5)])
    stretches = [Stretch(5, None, 1, 1)]
    make = partial(events_of, "s/t", 3, block, 0, stretches)
    step = Step(TopicPartition("s.t", 3), block.offsets, make)
    assert done(step) is None
    next(step.rest)
    assert done(step) is None
    step.asked_for_more()
    assert done(step) == 11
    assert [event.offset for event in itertools.islice(step.rest, 2)] == [11, 12]
    assert done(step) == 12
    step.asked_for_more()
    assert done(step) == 13
    assert [event.offset for event in step.rest] == [13, 14]
    assert done(step) == 14
    assert next(step.rest, None) is None
    step.asked_for_more()
    assert done(step) == 15


def typed_step(*values: bytes | None) -> Step:
    """Offsets from 10 on."""
    block = RecordsBlock([Record(10 + i, 0, b"k", value) for i, value in enumerate(values)])
    make = partial(events_of, "s/t", 3, block, 0, [Stretch(len(values), None, 1, 1)])
    return Step(TopicPartition("s.t", 3), block.offsets, make)


def test_typed_events_are_decoded_as_they_are_made() -> None:
    calls: list[bytes] = []

    def number(data: bytes) -> int:
        calls.append(data)
        return int(data)

    step = typed_step(b"1", None, b"3", b"4")
    decoder = Decoder(stream_of("s/t", str, (str, number), "raise"), lambda *_: None)
    events = decoder.decoded(step)
    first, second = next(events), next(events)
    assert (first.key, first.value, first.offset) == ("k", 1, 10)
    assert (second.value, second.offset) == (None, 11)
    assert (calls, done(step), step.given_to) == ([b"1"], 11, 12)
    events.close()  # type: ignore[attr-defined]
    # Another loop continues after what was returned.
    assert [(event.value, event.offset) for event in decoder.decoded(step)] == [(3, 12), (4, 13)]
    assert (calls, done(step)) == ([b"1", b"3", b"4"], 13)


@pytest.mark.parametrize("bad", range(4))
def test_the_position_is_exact_at_an_undecodable_event(bad: int) -> None:
    values: list[bytes | None] = [b"0", b"1", b"2", b"3"]
    values[bad] = b"x"
    left = [i for i in range(4) if i != bad]
    raising, skipping = (stream_of("s/t", str, (str, int), way) for way in ("raise", "skip"))

    step, decoder = typed_step(*values), Decoder(raising, lambda *_: None)
    events = decoder.decoded(step)
    assert [next(events).value for _ in range(bad)] == list(range(bad))
    with pytest.raises(UndecodableValue) as raised:
        next(events)
    assert raised.value.event.value == b"x"
    assert step.given_to == 10 + bad + 1, "the error returned it"
    assert [event.value for event in decoder.decoded(step)] == left[bad:]

    step, decoder = typed_step(*values), Decoder(skipping, lambda *_: None)
    assert [event.value for event in decoder.decoded(step)] == left
    assert decoder.skipped == 1


def test_a_codec_that_raises_stop_iteration_loses_no_event() -> None:
    def first(data: bytes) -> int:
        return next(int(digit) for digit in data.decode() if digit.isdigit())

    decoder = Decoder(stream_of("s/t", None, (str, first), "skip"), lambda *_: None)
    found = decoder.decoded(typed_step(b"0", b"x", b"2", b"3"))
    assert [(event.value, event.offset) for event in found] == [(0, 10), (2, 12), (3, 13)]
    assert decoder.skipped == 1


@pytest.mark.parametrize("bad", [None, 2, 3, 4, 5])
def test_two_loops_over_a_step_share_its_events(bad: int | None) -> None:
    values = [b"x" if i == bad else b"%d" % i for i in range(8)]
    step = typed_step(*values)
    decoder = Decoder(stream_of("s/t", None, (str, int), "skip"), lambda *_: None)
    loops, found = [decoder.decoded(step), decoder.decoded(step)], []
    for turn in itertools.count():
        event = next(loops[turn % 2], None)
        if event is None:
            break
        found.append((event.value, event.offset))
    assert found == [(i, 10 + i) for i in range(8) if i != bad]


# -- slices of runs -----------------------------------------------------------------------------------

_KEYS = (None, b"", b"k", b"another")
_VALUES = (None, b"", b"value")
_HEADERS: tuple[tuple[tuple[str, bytes | None], ...], ...] = (
    (),
    (("h", None),),
    (("h", b"1"), ("", b"2")),
    ((TXN_HEADER, b"t" * 16),),
)


def piece(*slices: Slice) -> Piece:
    return Piece("s/t", 1, Slices("s/t", list(slices)), [7 for one in slices for _ in one.tasks])


def bytes_of(events: Sequence[Event]) -> list[int]:
    return [len(e.key or b"") + len(e.value or b"") + EVENT_BYTES for e in events]


@settings(deadline=None)
@given(st.data())
def test_a_slice_is_the_same_in_all_its_forms(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    keys, values = st.sampled_from(_KEYS), st.sampled_from(_VALUES)
    headers = st.sampled_from(_HEADERS)
    records = [
        Record(2 * n, 1000 + n, data.draw(keys), data.draw(values), data.draw(headers))
        for n in range(count)
    ]
    low = data.draw(st.integers(0, count - 1))
    length = data.draw(st.integers(1, count - low))
    stretch = Stretch(length, data.draw(st.sampled_from((None, b"x" * 16))), 5, 6)
    chosen = data.draw(st.none() | st.sets(st.integers(0, length - 1), min_size=1).map(sorted))
    for block in (columns(records), RecordsBlock(records)):
        run = Run(block, 3, low, stretch)
        wanted = [e for n, e in enumerate(run.events("s/t")) if chosen is None or n in chosen]
        made = Slice(run, [7] * len(wanted), None if chosen is None else np.array(chosen))
        found = piece(made)
        assert [*found.events] == [*found.events] == wanted
        assert len(found.events) == len(wanted)
        assert found.batch().equals(batch_of(wanted)), found.batch()
        assert made.last() == (6, wanted[-1].offset)
        assert made.ends().tolist() == np.cumsum(bytes_of(wanted)).tolist()
        at = data.draw(st.integers(1, len(wanted)))
        parts = [part for part in made.split(at) if part.tasks]
        assert len(parts[0].tasks) == at
        assert [*piece(*parts).events] == wanted
        assert piece(*parts).batch().equals(batch_of(wanted))
