"""Events as their command, or row, has them: Avro bytes, and what decisions need to know of these bytes.

A leader makes no object of an event in a command or a row. The shell finds the columns and runs of the events in
one walk (`anabranch.batches.one_shots`), decisions check the runs and group the numbers of the events, and the
shell copies the bytes into record batches. Each event can still be read, for a refusal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from anabranch.protocol.limits import RESERVED
from anabranch.protocol.partitioner import place_of
from anabranch.protocol.schemas.fast import EncodedEvents, read_events, read_key, write_events
from anabranch.protocol.schemas.records import Event


class EventRun(NamedTuple):
    """Consecutive events of one stream. Sizes are in bytes, times in Unix milliseconds; a null has no bytes.

    ``end``: the number of the event after the last one. ``headers``: of all events; ``most_headers``: of one.
    ``biggest``: the bytes of key, value and headers of the biggest event. ``reserved``: whether the name of some
    header is reserved.
    """

    stream: str
    end: int
    headers: int
    most_headers: int
    biggest: int
    earliest: int
    latest: int
    shortest_key: int
    longest_key: int
    reserved: int


COLUMNS = 3  # numbers for each event of a command: its start, place and size
RUN_COLUMNS = len(EventRun._fields) - 1  # numbers for each run


class _ReadLater(Sequence[Event]):
    """Events that are read when they are asked for; equal to any other sequence of the same events."""

    __slots__ = ()

    def __getitem__(self, at: Any) -> Any:
        return tuple(self)[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))


class CommandEvents(_ReadLater, EncodedEvents):
    """All events of a command.

    ``starts``: where each event starts in ``payload``. ``places``: where each belongs in any layout
    (`anabranch.protocol.partitioner.place_of`). ``sizes``: the bytes of each key and value. ``runs``: the events by
    stream, in order.
    """

    __slots__ = ("payload", "places", "runs", "sizes", "starts")

    def __init__(
        self,
        payload: bytes,
        runs: Sequence[EventRun],
        starts: Sequence[int],
        places: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        self.payload = payload
        self.runs = runs
        self.starts = starts
        self.places = places
        self.sizes = sizes

    @classmethod
    def of(cls, events: Sequence[Event]) -> CommandEvents:
        """The same for events that are read already, as those of an unusual form are."""
        if isinstance(events, cls):
            return events
        payload, starts = write_events(events)
        runs: list[EventRun] = []
        for stream, its in groupby(events, attrgetter("stream")):
            runs.append(_run(stream, runs[-1].end if runs else 0, list(its)))
        places = [place_of(event.key, event.segment_id) for event in events]
        sizes = [len(event.key or b"") + len(event.value or b"") for event in events]
        return cls(payload, runs, starts, places, sizes)

    def followed_by(self, events: Sequence[Event]) -> CommandEvents:
        """These events and then others."""
        more = CommandEvents.of(events)
        count, size = len(self), len(self.payload)
        return CommandEvents(
            self.payload + more.payload,
            [*self.runs, *[run._replace(end=run.end + count) for run in more.runs]],
            [*self.starts, *[start + size for start in more.starts]],
            [*self.places, *more.places],
            [*self.sizes, *more.sizes],
        )

    def with_last(self, events: Sequence[Event]) -> CommandEvents:
        """These events, of which the last ones have other values."""
        kept = len(self) - len(events)
        size = self.starts[kept]
        payload, starts = write_events(events)
        sizes = [len(event.key or b"") + len(event.value or b"") for event in events]
        return CommandEvents(
            self.payload[:size] + payload,
            self.runs,
            [*self.starts[:kept], *[size + start for start in starts]],
            self.places,
            [*self.sizes[:kept], *sizes],
        )

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[Event]:
        return iter(read_events(self.payload, self.starts[0], len(self))[0] if self.starts else ())

    def by_stream(self) -> dict[str, Sequence[int]]:
        """The numbers of each stream's events, in order."""
        if len(self.runs) == 1:
            return {self.runs[0].stream: range(len(self))}
        found: dict[str, list[int]] = {}
        begin = 0
        for run in self.runs:
            found.setdefault(run.stream, []).extend(range(begin, run.end))
            begin = run.end
        return dict(found)

    @property
    def items(self) -> int:
        """The number of events, and of their headers."""
        return len(self) + sum([run.headers for run in self.runs])


class SomeEvents(_ReadLater):
    """Some events of a command (``of``), by their numbers."""

    __slots__ = ("numbers", "of")

    def __init__(self, of: CommandEvents, numbers: Sequence[int]) -> None:
        self.of = of
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Event]:
        payload, starts = self.of.payload, self.of.starts
        for number in self.numbers:
            yield read_events(payload, starts[number], 1)[0][0]

    @property
    def starts(self) -> list[int]:
        starts = self.of.starts
        return [starts[number] for number in self.numbers]

    @property
    def places(self) -> list[int]:
        places = self.of.places
        return [places[number] for number in self.numbers]

    @property
    def size(self) -> int:
        """The bytes of all keys and values."""
        sizes = self.of.sizes
        return sum([sizes[number] for number in self.numbers])

    @property
    def keys(self) -> list[bytes | None]:
        payload = self.of.payload
        return [read_key(payload, start) for start in self.starts]


NO_EVENTS = SomeEvents(CommandEvents(b"", (), (), (), ()), ())


def _run(stream: str, begin: int, events: list[Event]) -> EventRun:
    headers = [len(event.headers) for event in events]
    keys = [len(event.key or b"") for event in events]
    times = [event.timestamp for event in events]
    sizes = [size + len(event.value or b"") for size, event in zip(keys, events, strict=True)]
    if any(headers):
        sizes = [
            size + sum(len(name.encode()) + len(value or b"") for name, value in event.headers)
            for size, event in zip(sizes, events, strict=True)
        ]
    return EventRun(
        stream=stream,
        end=begin + len(events),
        headers=sum(headers),
        most_headers=max(headers),
        biggest=max(sizes),
        earliest=min(times),
        latest=max(times),
        shortest_key=min(keys),
        longest_key=max(keys),
        reserved=any(h.key.startswith(RESERVED) for event in events for h in event.headers),
    )
