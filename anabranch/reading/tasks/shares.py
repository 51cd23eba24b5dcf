"""Shares of commits' events, as readers of tasks give them: in columns, until somebody asks for the events."""

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

EVENT_BYTES = 32  # of an event, besides its key and value


@dataclass(slots=True)
class Share:
    """Events of a run that are given. ``places``: where they are in it, rising; None: all. ``tasks``: of each."""

    run: Run
    tasks: list[int]
    places: Longs | None = None

    def ends(self) -> Longs:
        """Bytes of the events up to each one, and with it."""
        low = self.run.low
        sizes = self.run.block.sizes(low, low + self.run.stretch.length) + EVENT_BYTES
        return np.cumsum(sizes if self.places is None else sizes[self.places])

    def split(self, at: int) -> tuple[Share, Share]:
        """The first so many of its events, and the others."""
        places = np.arange(len(self.tasks)) if self.places is None else self.places
        halves = slice(at), slice(at, None)
        first, rest = (Share(self.run, self.tasks[half], places[half]) for half in halves)
        return first, rest

    def last(self) -> tuple[int, int]:
        """The segment and the offset of its last event."""
        at = -1 if self.places is None else int(self.places[-1])
        return self.run.stretch.segment_id, self.run.offsets[at]

    def events(self, stream: str) -> Iterator[Event]:
        """The events, each made when it is asked for."""
        events = self.run.events(stream)
        if self.places is None:
            return events
        chosen = np.zeros(self.run.stretch.length, dtype=np.bool_)
        chosen[self.places] = True
        return compress(events, chosen.tolist())


@dataclass(slots=True)
class Shares:
    """Events of one stream; each iteration makes them again."""

    stream: str
    shares: list[Share] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(len(share.tasks) for share in self.shares)

    def __iter__(self) -> Iterator[Event]:
        for share in self.shares:
            yield from share.events(self.stream)


class Place(NamedTuple):
    """A place in an input: a record of its history, and how far in it; they compare in the order of reading."""

    record: int
    part: int = -1  # which segment of the record, in its order; -1: none of it is given
    offset: int = -1  # all below, in that segment, is given
    segment: int = -1
    timestamp: int = 0  # of the last record that is given whole


class Piece(NamedTuple):
    """The events of one commit of an input, or of a part of it, for these tasks; and the task of each."""

    stream: str
    timestamp: int
    events: Sequence[Event] | Shares
    tasks: list[int]
    whole: bool = True  # this is the last part of it
    before: Place | None = None  # up to there all else of the input is given

    @property
    def is_inside(self) -> bool:
        """Whether it begins inside of a commit, behind another part."""
        return self.before is not None and self.before.segment >= 0

    def batch(self) -> pa.RecordBatch:
        """The events as an Arrow batch, with the columns of `anabranch.reading.event_columns`."""
        need("pyarrow")
        import pyarrow as pa

        from anabranch.reading.event_columns import batch_of, batch_of_run

        if not isinstance(self.events, Shares):
            return batch_of(self.events)
        found = [batch_of_run(self.stream, one.run, one.places) for one in self.events.shares]
        return found[0] if len(found) == 1 else pa.concat_batches(found)
