"""Parts of commits for the tasks of a processor. Their events stay in blocks until they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from anabranch.batches.columns_read import Longs
from anabranch.extras import need
from anabranch.reading.decoded import Run
from anabranch.types import Event

if TYPE_CHECKING:
    import pyarrow as pa

EVENT_BYTES = 32  # counted for an event, in addition to its key and value


def count_within(ends: Longs, room: int) -> int:
    """How many events a part of a commit takes: up to the one that fills ``room``. ``ends``: as `Slice.ends`."""
    return min(int(np.searchsorted(ends, room)) + 1, len(ends))


@dataclass(slots=True)
class Slice:
    """Some events of a run. ``places``: their places in the run, rising; None: all. ``tasks``: of each event.

    ``placed``: whether each event that has a key is certainly in the task of that key: no key is outside of the
    range of its segment.
    """

    run: Run
    tasks: list[int]
    places: Longs | None = None
    placed: bool = False

    def ends(self) -> Longs:
        """For each event, the bytes of all events up to and including it."""
        low = self.run.low
        sizes = self.run.block.sizes(low, low + self.run.stretch.length) + EVENT_BYTES
        return np.cumsum(sizes if self.places is None else sizes[self.places])

    def split(self, at: int) -> tuple[Slice, Slice]:
        """The first ``at`` events, and the others."""
        places = np.arange(len(self.tasks)) if self.places is None else self.places
        halves = slice(at), slice(at, None)
        first, rest = (
            Slice(self.run, self.tasks[half], places[half], self.placed) for half in halves
        )
        return first, rest

    def first(self) -> int:
        """The offset of the slice's first event."""
        return self.run.offsets[0 if self.places is None else int(self.places[0])]

    def last(self) -> tuple[int, int]:
        """The segment, and the offset of the slice's last event."""
        at = -1 if self.places is None else int(self.places[-1])
        return self.run.stretch.segment_id, self.run.offsets[at]

    def timestamps(self) -> list[int]:
        """The timestamps of the events, which are not made for this."""
        found = self.run.block.timestamps(self.run.low, self.run.low + self.run.stretch.length)
        return found if self.places is None else [found[place] for place in self.places.tolist()]

    def events(self, stream: str) -> Iterator[Event]:
        """The events, each made on demand."""
        events = self.run.events(stream)
        if self.places is None:
            return events
        chosen = np.zeros(self.run.stretch.length, dtype=np.bool_)
        chosen[self.places] = True
        return compress(events, chosen.tolist())


@dataclass(slots=True)
class Slices:
    """Some events of one stream; each iteration makes the events again.

    ``record``: the history record of their commit; -1 for a plain topic. ``order``: the record's segments.
    ``size``: bytes of all events, counted as in `Slice.ends`; not of a part.
    """

    stream: str
    slices: list[Slice] = field(default_factory=list)
    record: int = -1
    order: Mapping[int, int] = field(default_factory=dict)
    size: int = 0

    def __len__(self) -> int:
        return sum(len(each.tasks) for each in self.slices)

    def __iter__(self) -> Iterator[Event]:
        for each in self.slices:
            yield from each.events(self.stream)

    def split(self, at: int) -> tuple[Slices, Slices]:
        """The first ``at`` events, and the others; both have some."""
        first, rest = list[Slice](), list[Slice]()
        for one in self.slices:
            if at >= len(one.tasks):
                first.append(one)
            elif at > 0:
                half, other = one.split(at)
                first.append(half)
                rest.append(other)
            else:
                rest.append(one)
            at -= len(one.tasks)
        return replace(self, slices=first), replace(self, slices=rest)


class Place(NamedTuple):
    """A place in an input: a history record, and a place in the record. They compare in the order of reading."""

    record: int
    part: int = -1  # index of the segment in the record; -1: before the first event
    offset: int = -1  # in that segment, all below was returned
    segment: int = -1
    timestamp: int = 0  # of the last record that was returned completely


INSIDE = Place(0, 0, 0, 0)  # somewhere inside of a commit


class Piece(NamedTuple):
    """The events of one commit of an input, or of a part of it, with the task of each."""

    stream: str
    timestamp: int
    events: Sequence[Event] | Slices
    tasks: list[int]
    whole: bool = True  # whether this is the last part of the commit
    before: Place | None = None  # all earlier events of the input were returned up to there

    @property
    def size(self) -> int:
        """The bytes of the events, as they were read."""
        some = self.events
        return some.size if isinstance(some, Slices) else EVENT_BYTES * len(some)

    @property
    def is_inside(self) -> bool:
        """Whether the piece begins inside of a commit, after another part."""
        return self.before is not None and self.before.segment >= 0

    def split(self, at: int) -> tuple[Piece, Piece]:
        """The first ``at`` events, and the others, as two parts; both have some."""
        events = self.events
        if not isinstance(events, Slices):
            first = self._replace(events=events[:at], tasks=self.tasks[:at], whole=False)
            return first, self._replace(events=events[at:], tasks=self.tasks[at:], before=INSIDE)
        handled, others = events.split(at)
        rest = self._replace(events=others, tasks=self.tasks[at:])
        if events.record < 0:
            rest = rest._replace(timestamp=others.slices[0].first())
        else:
            segment, offset = handled.slices[-1].last()
            since = self.before.timestamp if self.before is not None else 0
            part = events.order[segment]
            rest = rest._replace(before=Place(events.record, part, offset + 1, segment, since))
        return self._replace(events=handled, tasks=self.tasks[:at], whole=False), rest

    @property
    def placed(self) -> bool:
        """As of `Slice`."""
        return isinstance(self.events, Slices) and all(one.placed for one in self.events.slices)

    def timestamps(self) -> list[int]:
        """The timestamp of each event, in Unix milliseconds."""
        if isinstance(self.events, Slices):
            return [one for some in self.events.slices for one in some.timestamps()]
        return [event.timestamp for event in self.events]

    def batch(self) -> pa.RecordBatch:
        """The events as an Arrow batch, with the columns of `anabranch.reading.event_columns`."""
        need("pyarrow")
        import pyarrow as pa

        from anabranch.reading.event_columns import batch_of, batch_of_run

        if not isinstance(self.events, Slices):
            return batch_of(self.events)
        found = [batch_of_run(self.stream, one.run, one.places) for one in self.events.slices]
        return found[0] if len(found) == 1 else pa.concat_batches(found)


def split_pieces(pieces: Sequence[Piece], count: int) -> tuple[list[Piece], list[Piece]]:
    """The pieces with the first ``count`` events, and the others."""
    for at, piece in enumerate(pieces):
        if count < len(piece.tasks):
            if not count:
                return list(pieces[:at]), list(pieces[at:])
            first, rest = piece.split(count)
            return [*pieces[:at], first], [rest, *pieces[at + 1 :]]
        count -= len(piece.tasks)
    return list(pieces), []
