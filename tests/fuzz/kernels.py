"""Fuzzed: compiled code itself, on arrays of exactly the size that its callers promise, between guard pages.

Its callers unpack and check before; here it gets bodies as they are, and header fields at their edges.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from anabranch.batches import framing_plain
from anabranch.batches.columns_read import _Room
from anabranch.batches.compression import decompress
from anabranch.batches.format import read_header
from anabranch.batches.records import MIN_RECORD_BYTES
from anabranch.core.command_events import COLUMNS, RUN_COLUMNS, CommandEvents
from anabranch.errors import MalformedRecord, UnsupportedVersion
from anabranch.protocol.limits import Room
from anabranch.protocol.schemas import fast
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode, encode
from tests.fuzz.guarded import Guarded
from tests.fuzz.samples import batches, sample
from tests.fuzz.target import Run, Target

_HEAD = struct.Struct(">iiq")  # record count, last offset delta, base timestamp
_MOST = 2 << 20
_MOST_RECORDS = _MOST // MIN_RECORD_BYTES
_RULES = (Room("", _MOST), Room("", 9, True, 1_000))  # a stream's: what any takes, and little


class _Input(NamedTuple):
    body: Any
    records: int
    last_delta: int
    base_timestamp: int
    at_end: bool


def _seeds() -> list[bytes]:
    found = []
    for data in batches():
        header = read_header(data)
        body = decompress(header.compression, data[61:])
        head = _HEAD.pack(header.record_count, header.last_offset_delta, header.base_timestamp)
        found.append(head + body)
    return found


class _Bodies:
    def __init__(self) -> None:
        self._room = Guarded(_MOST)

    def of(self, data: bytes) -> _Input:
        head, body = data[: _HEAD.size].ljust(_HEAD.size, b"\x00"), data[_HEAD.size :]
        at_end = len(data) % 4 != 0
        count, last_delta, base_timestamp = _HEAD.unpack(head)
        filled = self._room.filled(body, at_end=at_end)
        return _Input(filled, count, last_delta, base_timestamp, at_end)


def _scan() -> Run:
    from anabranch.batches.kernels import scan as kernel
    from anabranch.batches.kernels.parts import MALFORMED_RESULT, NO_ROOM

    bodies, room = _Bodies(), Guarded(_MOST_RECORDS * kernel.COLUMNS * 8)
    key_room, bound_room = Guarded(_MOST_RECORDS * 3 * 8), Guarded(_MOST_RECORDS * 4 * 8)

    def run(data: bytes) -> None:
        body, count, last_delta, base, at_end = bodies.of(data)
        noted = len(data) % 2 * max(min(count, len(body) // MIN_RECORD_BYTES), 0)
        keys = key_room.array((3, noted), np.int64, at_end=at_end)
        rules = _RULES[len(data) % len(_RULES)]
        expected = framing_plain.scan(bytes(body), count, last_delta, base, rules)
        as_array = np.array(rules[1:], dtype=np.int64)
        # A run for each record is the most there can be.
        most = min(max(count, 1), _MOST_RECORDS) if expected is None else max(len(expected), 1)
        found, rows = 0, None
        for many in (1, most):
            rows = room.array((many, kernel.COLUMNS), np.int64, at_end=at_end)
            bounds = bound_room.array((many, 4), np.int64, at_end=at_end)
            found = kernel.scan(body, count, last_delta, base, as_array, rows, keys, bounds)
            assert found <= many
            if many < most:
                assert found in (NO_ROOM, MALFORMED_RESULT)
        if expected is None:
            assert found == MALFORMED_RESULT
        else:
            assert rows is not None
            assert rows[:found].tolist() == expected

    return run


def _copies() -> Run:
    from anabranch.batches.builder import COPY_GROWTH
    from anabranch.batches.kernels import copy as kernel
    from anabranch.batches.kernels.parts import MALFORMED_RESULT, NO_ROOM

    bodies, out_room, state_room = _Bodies(), Guarded(16 * _MOST), Guarded(64)

    def run(data: bytes) -> None:
        body, count, last_delta, base, at_end = bodies.of(data)
        records = min(max(count, 0), len(body))
        for size in (0, len(body) // 2, len(body) + records * COPY_GROWTH):
            out = out_room.array(size, np.uint8, at_end=at_end)
            state = state_room.array(kernel.STATE_SIZE, np.int64, at_end=at_end)
            state[:] = 0
            result = kernel.copy(body, 0, last_delta, base, 5, False, out, state)
            assert result in (0, MALFORMED_RESULT, NO_ROOM)
            assert 0 <= state[kernel.TARGET_AT] <= size

    return run


def _places() -> Run:
    from anabranch.batches.builder import COPY_GROWTH
    from anabranch.batches.kernels import copy as kernel
    from anabranch.batches.kernels.parts import MALFORMED_RESULT

    bodies, out_room, state_room = _Bodies(), Guarded(16 * _MOST), Guarded(64)
    starts_room, deltas_room, places_room = (Guarded(8 * (_MOST_RECORDS + 1)) for _ in range(3))
    lows = np.array([0, 1 << 31], dtype=np.int64)
    order = np.array([1, 0], dtype=np.int64)

    def run(data: bytes) -> None:
        body, count, _, base, at_end = bodies.of(data)
        # As many as any caller makes room for, who has not asked whether they fit.
        many = min(max(count, 0), _MOST_RECORDS)
        starts = starts_room.array(many + 1, np.int64, at_end=at_end)
        deltas = deltas_room.array(many, np.int64, at_end=at_end)
        places = places_room.array(many, np.int64, at_end=at_end)
        if many == 0 and count > 0:
            return
        result = kernel.place(body, count, lows, order, 0, starts, deltas, places)
        assert result in (0, MALFORMED_RESULT)
        if result != 0:
            return
        for place in (0, 1):
            for size in (0, len(body), len(body) + count * COPY_GROWTH):
                out = out_room.array(size, np.uint8, at_end=at_end)
                state = state_room.array(kernel.STATE_SIZE, np.int64, at_end=at_end)
                state[:] = 0
                args = (body, starts, places, place, count, base, 5, False, out, state)
                result = kernel.copy_placed(*args)
                assert result in (0, MALFORMED_RESULT)
                assert 0 <= state[kernel.TARGET_AT] <= size
                assert 0 <= state[kernel.SOURCE_AT] <= count

    return run


def _columns() -> Run:
    from anabranch.batches.kernels import columns_read as kernel
    from anabranch.batches.kernels.parts import MALFORMED_RESULT, NO_ROOM

    bodies = _Bodies()
    wanted = np.array([[0, 7], [5, 1 << 40]], dtype=np.int64)
    shapes = _Room(1, 1, 1, kernel).columns
    rooms = [Guarded(3 * 8 * (_MOST + 2)) for _ in shapes]

    def run(data: bytes) -> None:
        body, count, last_delta, base, at_end = bodies.of(data)
        if not 0 <= count <= len(body) // MIN_RECORD_BYTES:
            return  # the caller looks
        for headers in (0, 3, len(body) // 2):
            columns: list[Any] = []
            made: Any
            for made, room in zip(
                _Room(count, len(body), headers, kernel).columns, rooms, strict=True
            ):
                column = room.array(made.shape, made.dtype, at_end=at_end)
                column[...] = made if made.size < 64 else 0
                columns.append(column)
            result = kernel.columns(
                body, count, last_delta, 3, base, 5, bool(count % 2), wanted, *columns
            )
            assert result in (0, MALFORMED_RESULT, NO_ROOM)
            state = columns[-1]
            if result == 0:
                assert state[kernel.ROWS] <= count
                assert state[kernel.HEADERS] <= headers
            else:
                assert not state.any()
            if result != NO_ROOM:
                return
        raise AssertionError("no room for as many headers as fit into the body")

    return run


def _history() -> Run:
    from anabranch.batches.kernels import history as kernel
    from anabranch.batches.kernels.parts import MALFORMED_RESULT

    data_room, spans_room = Guarded(_MOST), Guarded(kernel.SPAN_ROWS * 8 * _MOST)
    ends_room, state_room = Guarded(64), Guarded(64)

    def run(data: bytes) -> None:
        at_end = len(data) % 4 != 0
        records = data_room.filled(data, at_end=at_end)
        many = len(data) // kernel.MIN_SPAN_BYTES + 1
        spans = spans_room.array((kernel.SPAN_ROWS, many), np.int64, at_end=at_end)
        ends = ends_room.array(2, np.int32, at_end=at_end)
        state = state_room.array(kernel.STATE_SIZE, np.int64, at_end=at_end)
        ends[:] = (0, len(data))
        state[:] = (0, -1, -1)
        result = kernel.commits(records, ends, 1, spans, state)
        assert result in (0, MALFORMED_RESULT)
        assert 0 <= state[kernel.SPANS] <= many
        try:
            record = decode(data)
        except (MalformedRecord, UnsupportedVersion):
            assert result != 0, "only the codec refuses it"
            return
        if result != 0:
            return  # of a rare form; the codec reads it then
        assert isinstance(record, r.CommitRecord | r.EpochRecord)
        assert state[kernel.LAST_TIMESTAMP] == record.timestamp
        if isinstance(record, r.CommitRecord):
            mine = [s for s in record.segments if s.partition == 1]
            halves = np.frombuffer(record.txn_id, np.int64).tolist()
            rows = [
                [s.first, s.end, record.timestamp, s.segment_id, *halves, s.count] for s in mine
            ]
            assert spans[:, : len(mine)].T.tolist() == rows

    return run


def _history_seeds() -> list[bytes]:
    return [encode(sample(cls, i)) for cls in (r.CommitRecord, r.EpochRecord) for i in range(12)]


def _events() -> Run:
    from anabranch.batches.kernels import copy as copy_kernel
    from anabranch.batches.kernels import events as kernel
    from anabranch.batches.kernels.parts import MALFORMED_RESULT, NO_ROOM

    columns = COLUMNS + RUN_COLUMNS
    data_room, out_room, state_room = Guarded(_MOST), Guarded(2 * _MOST), Guarded(64)
    found_room = Guarded(8 * (1 + columns * fast.EVENTS))
    starts_room, parts_room, txns_room = Guarded(8 * fast.EVENTS), Guarded(64), Guarded(64)

    def run(data: bytes) -> None:
        at_end = len(data) % 4 != 0
        count = int.from_bytes(data[:2], "big")
        if not 1 <= count <= fast.EVENTS:
            return  # the caller looks
        body = data_room.filled(data[2:], at_end=at_end)
        found = found_room.array(1 + columns * count, np.int64, at_end=at_end)
        end = kernel.scan(body, 0, count, found)
        assert end == MALFORMED_RESULT or 0 < end <= len(body)
        if end == MALFORMED_RESULT:
            return
        try:
            events, read_to = fast.read_events(bytes(body), 0, count)
        except UnicodeDecodeError:
            return  # of a stream's name, which the caller reads
        assert read_to + 1 == end
        assert found[0] == len(CommandEvents.of(events).runs)
        starts = starts_room.array(count, np.int64, at_end=at_end)
        starts[:] = found[1 : 1 + count]
        parts = parts_room.array(kernel.PART_COLUMNS, np.int64, at_end=at_end)
        parts[:] = (count, 0, 5)
        txns = txns_room.filled(bytes(kernel.TXN_BYTES), at_end=at_end)
        enough = len(body) + count * kernel.MOST_FRAMING
        for size in (0, len(body), enough):
            out = out_room.array(size, np.uint8, at_end=at_end)
            state = state_room.array(copy_kernel.STATE_SIZE, np.int64, at_end=at_end)
            state[:] = 0
            result = kernel.copy(body, starts, parts, txns, _MOST, _MOST, out, state)
            assert result == 0 or (result == NO_ROOM and size < enough)
            assert 0 <= state[copy_kernel.TARGET_AT] <= size
            assert state[copy_kernel.SOURCE_AT] == (count if result == 0 else 0)

    return run


def _event_seeds() -> list[bytes]:
    """The number of events in two bytes, and the array's block with its end."""
    found = []
    for i in range(12):
        shot = sample(r.OneShot, i)
        events = (*shot.events, *shot.events, r.Event("s", -1, b"k", None, (), -1))
        found.append(len(events).to_bytes(2, "big") + fast.write_events(events)[0] + b"\x00")
    return found


TARGETS = (
    Target("kernel-scan", _seeds, _scan, ()),
    Target("kernel-copy", _seeds, _copies, ()),
    Target("kernel-place", _seeds, _places, ()),
    Target("kernel-columns", _seeds, _columns, ()),
    Target("kernel-events", _event_seeds, _events, ()),
    Target("kernel-history", _history_seeds, _history, ()),
)
