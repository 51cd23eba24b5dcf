"""Parts of commits for the tasks of a processor. Their events stay in blocks until they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
    """Some events of a run. ``places``: their places in the run, rising; None: all. ``tasks``: of each event."""

    run: Run
    tasks: list[int]
    places: Longs | None = None

    def ends(self) -> Longs:
        """For each event, the bytes of all events up to and including it."""
        low = self.run.low
        sizes = self.run.block.sizes(low, low + self.run.stretch.length) + EVENT_BYTES
        return np.cumsum(sizes if self.places is None else sizes[self.places])

    def split(self, at: int) -> tuple[Slice, Slice]:
        """The first ``at`` events, and the others."""
        places = np.arange(len(self.tasks)) if self.places is None else self.places
        halves = slice(at), slice(at, None)
        first, rest = (Slice(self.run, self.tasks[half], places[half]) for half in halves)
        return first, rest

    def last(self) -> tuple[int, int]:
        """The segment, and the offset of the slice's last event."""
        at = -1 if self.places is None else int(self.places[-1])
        return self.run.stretch.segment_id, self.run.offsets[at]

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
    """Some events of one stream; each iteration makes the events again."""

    stream: str
    slices: list[Slice] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(len(each.tasks) for each in self.slices)

    def __iter__(self) -> Iterator[Event]:
        for each in self.slices:
            yield from each.events(self.stream)


class Place(NamedTuple):
    """A place in an input: a history record, and a place in the record. They compare in the order of reading."""

    record: int
    part: int = -1  # index of the segment in the record; -1: before the first event
    offset: int = -1  # in that segment, all below was returned
    segment: int = -1
    timestamp: int = 0  # of the last record that was returned completely


class Piece(NamedTuple):
    """The events of one commit of an input, or of a part of it, with the task of each."""

    stream: str
    timestamp: int
    events: Sequence[Event] | Slices
    tasks: list[int]
    whole: bool = True  # whether this is the last part of the commit
    before: Place | None = None  # all earlier events of the input were returned up to there

    @property
    def is_inside(self) -> bool:
        """Whether the piece begins inside of a commit, after another part."""
        return self.before is not None and self.before.segment >= 0

    def batch(self) -> pa.RecordBatch:
        """The events as an Arrow batch, with the columns of `anabranch.reading.event_columns`."""
        need("pyarrow")
        import pyarrow as pa

        from anabranch.reading.event_columns import batch_of, batch_of_run

        if not isinstance(self.events, Slices):
            return batch_of(self.events)
        found = [batch_of_run(self.stream, one.run, one.places) for one in self.events.slices]
        return found[0] if len(found) == 1 else pa.concat_batches(found)
