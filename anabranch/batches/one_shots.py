"""Events of one-shots and prepared transactions: a leader walks them to decide, and copies them into batches.

A client writes events as Avro. Between that and the stream's batches they are bytes: `decode_lazily` finds what
decisions need to know of them, `EventCopies` puts them into batches, with the header of their commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from anabranch.batches.framing import kernels
from anabranch.core.command_events import COLUMNS, RUN_COLUMNS, CommandEvents, EventRun, SomeEvents
from anabranch.protocol.ids import TXN_ID_SIZE
from anabranch.protocol.schemas import fast
from anabranch.protocol.schemas.codec import decode

_new = tuple.__new__  # makes a named tuple without its checks, in half the time


def decode_lazily(payload: bytes) -> Any:
    """As `anabranch.protocol.schemas.codec.decode`, but events stay encoded (`CommandEvents`).

    Events in an unusual form of Avro are decoded: only fastavro decides what is accepted.
    """
    read = fast.WITH_EVENTS.get(payload[:2])
    if read is not None:
        try:
            return read(payload, read_events)
        except fast.DECLINED:
            pass
    return decode(payload)


def read_events(data: bytes, at: int, count: int) -> tuple[CommandEvents, int]:
    """The events of an array's only block, and the end of the array. Raises one of `fast.DECLINED`."""
    columns = 1 + COLUMNS * count
    found = np.empty(columns + RUN_COLUMNS * count, np.int64)
    end: int = kernels().events.scan(np.frombuffer(data, np.uint8, offset=at), 0, count, found)
    if end < 0:
        raise fast.Unusual
    payload = data[at : at + end - 1]  # without the end of the array
    listed = found[: columns + RUN_COLUMNS * int(found[0])].tolist()
    starts = listed[1 : 1 + count]
    runs = []
    begin = 0
    for row in range(columns, len(listed), RUN_COLUMNS):
        stream, _ = fast.read_name(payload, starts[begin])
        runs.append(_new(EventRun, (stream, *listed[row : row + RUN_COLUMNS])))
        begin = listed[row]
    places, sizes = listed[1 + count : 1 + 2 * count], listed[1 + 2 * count : columns]
    return CommandEvents(payload, runs, starts, places, sizes), at + end


class EventPart(NamedTuple):
    """Events of one commit for one partition. ``timestamp_ms``: of those without a time; ``txn``: their header
    ab.txn, encoded; ``at``: the place of their command among all commands.
    """

    events: SomeEvents
    timestamp_ms: int
    txn: bytes
    at: int


class EventCopies:
    """Copies the events of a round's commits into batches. Make all parts before the first copy.

    No event may be in two parts: the room for copies is that of all commands, with framing.
    """

    def __init__(self) -> None:
        self._payloads: list[bytes] = []
        self._last = b""  # the commit of the part that was made last
        self._size = 0
        self._events = 0
        self._arrays: tuple[Any, Any] | None = None

    def part(self, events: SomeEvents, timestamp_ms: int, txn: bytes) -> EventPart:
        """Make a part, which `anabranch.batches.packer.Packer.events` takes. ``txn``: the value of ab.txn."""
        payload = events.of.payload
        # The parts of one commit are made one after the other. Two commits may have the same bytes, as rows with
        # equal events are decoded once.
        if self._last != txn[:TXN_ID_SIZE] or self._payloads[-1] is not payload:
            self._payloads.append(payload)
            self._size += len(payload)
            self._last = txn[:TXN_ID_SIZE]
        self._events += len(events)
        txn = kernels().events.TXN_START + txn
        return EventPart(events, timestamp_ms, txn, self._size - len(payload))

    def copy_of(self, parts: Sequence[EventPart]) -> tuple[Callable[..., int], list[int]]:
        """A copy of these parts, for `BatchBuilder.add_encoded`, and the number of events up to each part's end.

        The copy takes two arguments more, first: the number of bytes that are enough, and the most of them.
        """
        starts: list[int] = []
        ends: list[int] = []
        rows: list[int] = []
        for events, timestamp_ms, _, at in parts:
            starts += events.starts
            ends.append(len(starts))
            rows += (len(starts), at, timestamp_ms)
        txns = b"".join([part.txn for part in parts])
        return partial(
            kernels().events.copy,
            self._made()[0],
            np.array(starts, np.int64),
            np.array(rows, np.int64),
            np.frombuffer(txns, np.uint8),
        ), ends

    @property
    def out(self) -> Any:
        """The array that a copy fills: it has room for the events of all parts."""
        return self._made()[1]

    def _made(self) -> tuple[Any, Any]:
        if self._arrays is None:
            size = self._size + self._events * kernels().events.MOST_FRAMING
            source = np.frombuffer(b"".join(self._payloads), np.uint8)
            self._arrays = (source, np.empty(size, np.uint8))
        return self._arrays
