"""Committed events of a stream for a page: the newest, those after a time, those of one commit.

Each read has bounds, and asks no controller: the histories and the stream's topic have all that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from itertools import islice
from typing import NamedTuple

from anabranch.client.client import Client
from anabranch.presentation.system_tables import CommitRow, before_newest, commit_rows
from anabranch.protocol.hybrid_time import MAX
from anabranch.protocol.schemas.records import CommitRecord
from anabranch.reading.committed_log import UNKNOWN_IDS, StreamIds
from anabranch.reading.history import HistorySearch
from anabranch.reading.snapshot import SnapshotPlan
from anabranch.types import Event

_WIDER = 16  # how much farther back a search looks if too few events were wanted


class Bounds(NamedTuple):
    """The most that one read takes: events, bytes of them (`weight`), seconds."""

    events: int = 10_000
    bytes: int = 16 << 20
    seconds: float = 1.5


BOUNDS = Bounds()


class Part(NamedTuple):
    """Events in commit order, and where they are from.

    ``until``: the hybrid time up to which commits were read. ``more``: whether later commits exist. ``ended``: why
    not all of the wanted events are here; empty if they are. ``ids``: of the stream's topics.
    """

    events: list[Event]
    until: int
    more: bool = False
    ended: str = ""
    ids: StreamIds = UNKNOWN_IDS


@dataclass(frozen=True, slots=True)
class Search:
    """Which events of a stream are wanted, and how many at most. ``timeout``: seconds for each question."""

    stream: str
    count: int
    is_wanted: Callable[[Event], bool] | None
    timeout: float
    bounds: Bounds = BOUNDS


def weight(event: Event) -> int:
    """The bytes of an event's key, value and headers; of the names of headers, the characters."""
    headers = sum(len(name) + len(value or b"") for name, value in event.headers)
    return len(event.key or b"") + len(event.value or b"") + headers


class _Budget:
    """Counts what one read takes. All steps of a search have one deadline."""

    def __init__(self, bounds: Bounds, now: Callable[[], float]) -> None:
        self._bounds = bounds
        self._now = now
        self._until = now() + bounds.seconds
        self._bytes = self.events = 0
        self.ended = ""

    @property
    def is_late(self) -> bool:
        return self._now() >= self._until

    @property
    def late(self) -> str:
        """When a late search ended, for `Part.ended`."""
        return f"after {self._bounds.seconds:g} s"

    def read_again(self) -> None:
        """Count from 0, up to the same deadline."""
        self._bytes = self.events = 0
        self.ended = ""

    @property
    def is_heavy(self) -> bool:
        """Whether the bound of bytes ended the read."""
        return self._bytes > self._bounds.bytes

    def taken(self, events: Iterator[Event]) -> Iterator[Event]:
        """The events until a bound is reached; `ended` says which."""
        for event in events:
            self.events += 1
            self._bytes += weight(event)
            yield event
            if self.events >= self._bounds.events:
                self.ended = f"after {self._bounds.events:,} events"
            elif self.is_heavy:
                self.ended = f"after {self._bounds.bytes >> 20} MiB"
            elif self.is_late:
                self.ended = self.late
            if self.ended:
                return


def newest(client: Client, search: Search, known: Part | None = None) -> Part:
    """The newest wanted events. ``known``: what the last call returned, and this one does if nothing has changed.

    Raises: as `Client.snapshot` and its readers.
    """
    ports = client.reader_ports()
    plan = _latest(client, search, None, None)
    until, ids = plan.timestamp, plan.cuts[search.stream].ids
    if known is not None and (known.until, known.ids) == (until, ids):
        return known
    commits = partial(_commits, client, search)
    budget = _Budget(search.bounds, ports.clock.monotonic)
    window, part = search.count, Part([], until, ids=ids)
    while True:
        since = before_newest(commits, until, window)
        if window > search.count and budget.is_late:
            return part._replace(ended=budget.late)
        found = _last(client, search, _latest(client, search, until, since), budget)
        # A wider read may have ended before it came to what the last one found.
        both = {_place(event): event for event in (*part.events, *found.events)}
        events = [both[at] for at in sorted(both)[-search.count :]]
        part = found._replace(events=events, ids=ids)
        if part.ended or since is None or len(part.events) == search.count:
            return part
        window *= _WIDER  # few events were wanted


def after(client: Client, search: Search, since: int | None) -> Part:
    """The first wanted events of the commits after a time (None: the beginning). Raises: as `newest`."""
    ports = client.reader_ports()
    target = search.count if search.is_wanted is None else search.bounds.events
    until, total, more = 0, 0, False
    with closing(ports.committed_log(search.timeout)) as source:
        between = HistorySearch(source, search.stream, search.timeout).between(since or 0, MAX)
        for _, record in between:
            if isinstance(record, CommitRecord):
                if more := total >= target:
                    break
                until = record.timestamp
                total += sum(segment.count for segment in record.segments)
    if not until:
        return Part([], since or 0)
    plan = _latest(client, search, until, since)
    return _first(client, search, plan)._replace(more=more)


def of_commit(client: Client, search: Search, timestamp: int) -> Part:
    """The first wanted events of one commit. Raises: as `newest`."""
    return _first(client, search, _latest(client, search, timestamp, timestamp - 1))


def _latest(client: Client, search: Search, until: int | None, since: int | None) -> SnapshotPlan:
    snapshot = client.snapshot(search.stream, until, since, "latest", timeout=search.timeout)
    return snapshot.plan()


def _commits(client: Client, search: Search, until: int, most: int) -> list[CommitRow]:
    return commit_rows(client.reader_ports(), [search.stream], 0, until, most, search.timeout)


def _first(client: Client, search: Search, plan: SnapshotPlan) -> Part:
    """The first wanted events of a snapshot."""
    budget = _Budget(search.bounds, client.reader_ports().clock.monotonic)
    with client.open_snapshot(plan).read(search.stream) as reader:
        wanted = filter(search.is_wanted or _any, budget.taken(iter(reader)))
        # One more than is shown, to know whether there are more.
        found = list(islice(wanted, search.count + 1))
    ended = budget.ended
    if len(found) > search.count:
        ended = f"at {search.count:,} events"
    return Part(sorted(found[: search.count], key=_place), plan.timestamp, ended=ended)


def _last(client: Client, search: Search, plan: SnapshotPlan, budget: _Budget) -> Part:
    """The newest wanted events of a snapshot. If it is too heavy, only the ends of its partitions are read."""
    cut = plan.cuts[search.stream]
    partitions = max(1, len(cut.offsets))
    read, keep = 0, search.bounds.events // partitions
    while True:
        starts = {p: max(cut.start_offsets[p], end - keep) for p, end in cut.offsets.items()}
        shorter = plan._replace(cuts={search.stream: cut._replace(start_offsets=starts)})
        before = budget.events
        with client.open_snapshot(shorter).read(search.stream) as reader:
            wanted = filter(search.is_wanted or _any, budget.taken(iter(reader)))
            found = nlargest(search.count, wanted, key=_place)
        read = budget.events - before
        if not budget.is_heavy or keep == 1 or budget.is_late:
            break
        # Events have this size, so half the number of the newest ones takes less.
        keep = max(1, read // partitions // 2)
        budget.read_again()
    # A partition's share of the newest events is at its end.
    has_all = len(found) == search.count <= keep
    is_short = starts != dict(cut.start_offsets) and not has_all
    ended = budget.ended or (f"the newest {keep:,} offsets of each partition" if is_short else "")
    return Part(found[::-1], plan.timestamp, ended=ended)


def _any(_: Event) -> bool:
    return True


def _place(event: Event) -> tuple[int, int, int]:
    return event.commit_timestamp, event.partition, event.offset
