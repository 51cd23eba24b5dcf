"""Snapshots: streams of one control partition as of a commit timestamp. `Client.snapshot`.

A snapshot is plain data, its *plan*: the timestamp, and for each stream the offsets between which its events lie,
from the vector of the last history record at or below the timestamp. The controller's answer to `SafeTime`
makes that record final. Offsets never move, so each reading of the plan gives the same; retention may delete events
that it names, and that is an error by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple, TypeAlias

from anabranch.core.hybrid_time import MAX, from_datetime, to_text
from anabranch.core.ids import split_stream
from anabranch.errors import InvalidArgument, SnapshotExpired
from anabranch.ports import TopicPartition
from anabranch.reading.committed_log import CommittedLog, partitions_of
from anabranch.reading.history_search import HistorySearch
from anabranch.reading.snapshot_reader import SnapshotReader, StreamCut
from anabranch.topics.names import stream_topic

At: TypeAlias = "int | datetime | None"
_LEAST_S = 0.1


class SnapshotPlan(NamedTuple):
    """A snapshot as plain data, to be pickled and read anywhere: `Client.open_snapshot`.

    ``timestamp``: hybrid time. ``cuts``: stream -> its offsets.
    """

    timestamp: int
    cuts: Mapping[str, StreamCut]


class Snapshot:
    """Streams as of a commit timestamp: of each transaction all events in them, or none.

    Reading it twice gives the same events, or `SnapshotExpired` once retention has deleted some of them.
    Thread-safe; its readers are not.
    """

    def __init__(
        self, plan: SnapshotPlan, reader: Callable[[str, StreamCut], SnapshotReader]
    ) -> None:
        self._plan = plan
        self._reader = reader

    def __repr__(self) -> str:
        return f"<Snapshot of {', '.join(self.streams)} at {to_text(self.timestamp)}>"

    def __reduce__(self) -> str:
        raise TypeError("send snapshot.plan(), and open it there: client.open_snapshot(plan)")

    @property
    def timestamp(self) -> int:
        """Hybrid time: every event's commit timestamp is at or below it, and all such events are here."""
        return self._plan.timestamp

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams, as they were asked for."""
        return tuple(self._plan.cuts)

    def plan(self) -> SnapshotPlan:
        """The snapshot as plain data."""
        return self._plan

    def offsets(self, stream: str) -> dict[int, int]:
        """Partition -> end offset in the stream's topic; 0 where a partition is not named."""
        return dict(self._cut(stream).offsets)

    def start_offsets(self, stream: str) -> dict[int, int]:
        """Partition -> first offset that retention had left when the snapshot was taken, at most the end."""
        return dict(self._cut(stream).start_offsets)

    def history(self, stream: str) -> int:
        """The offset after the snapshot's last record in the stream's history: later ones stand from there on."""
        return self._cut(stream).history

    def read(self, stream: str) -> SnapshotReader:
        """The stream's events, each key in commit order; iterate over what is returned: it ends by itself.

        Raises: SnapshotExpired, NotReady; while iterating those and DeadlineExceeded (read again).
        """
        return self._reader(stream, self._cut(stream))

    def _cut(self, stream: str) -> StreamCut:
        cut = self._plan.cuts.get(stream)
        if cut is None:
            raise InvalidArgument(
                f"{stream!r} is not in this snapshot of {', '.join(self.streams)}"
            )
        return cut


def check_at(at: object) -> int | None:
    """A hybrid time, also that of a moment, or None for now. `InvalidArgument` for anything else."""
    if isinstance(at, datetime):
        return from_datetime(at)
    if at is None or (isinstance(at, int) and not isinstance(at, bool) and 0 <= at <= MAX):
        return at
    raise InvalidArgument(f"at {at!r}: a commit timestamp, a datetime with its time zone, or None")


def streams_of(streams: str | Sequence[str]) -> list[str]:
    """These streams, each once. `InvalidArgument`."""
    names = [streams] if isinstance(streams, str) else list(dict.fromkeys(streams))
    if not names:
        raise InvalidArgument("a snapshot is of at least one stream")
    for name in names:
        split_stream(name)
    return names


def take(
    source: CommittedLog, streams: Sequence[str], timestamp: int, deadline: float
) -> SnapshotPlan:
    """The plan of a snapshot at a timestamp that is safe. ``deadline``: monotonic seconds.

    Raises: UnknownStream, SnapshotExpired, NotReady.
    """
    partitions_of(source, streams, deadline)
    return SnapshotPlan(timestamp, {s: _cut(source, s, timestamp, deadline) for s in streams})


def _cut(source: CommittedLog, stream: str, timestamp: int, deadline: float) -> StreamCut:
    left = max(_LEAST_S, deadline - source.clock.monotonic())
    search = HistorySearch(source, stream, left)
    found = search.as_of(timestamp)
    if found is None:
        if search.is_cut():
            raise SnapshotExpired(
                f"the history of {stream} does not reach back to {to_text(timestamp)} any more: "
                "take a later snapshot"
            )
        return StreamCut({}, {}, 0)  # there was no such stream yet
    ends = found.vector()
    topic = stream_topic(stream)
    places = [TopicPartition(topic, partition) for partition in ends]
    starts = {p.partition: at for p, at in source.start_offsets(places, deadline).items()}
    kept = {p: min(starts[p], end) for p, end in ends.items()}
    # A marker stands behind the last event, so what was deleted may end beyond it.
    passed = [p for p, end in ends.items() if 0 < end < starts[p]]
    if passed:
        now = search.as_of("end")
        newest = now.vector() if now is not None else {}
        gone = [str(p) for p in passed if newest.get(p, 0) > ends[p]]
        if gone:
            raise SnapshotExpired(
                f"retention has deleted all that {stream} had at {to_text(timestamp)} on partition "
                f"{', '.join(gone)}: take a later snapshot"
            )
    return StreamCut(ends, kept, found.offset + 1)
