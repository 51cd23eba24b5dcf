"""Snapshots: streams as of a commit timestamp. `Client.snapshot`.

A snapshot is plain data, its *plan*: the timestamp, and for each stream the end offsets of its partitions. They
are the *vector* of a record of the stream's history (its topic with one record for each commit): the last record
at or below the timestamp. The answer to `SafeTime`, of each control partition's controller, promises that no other
commit will get a timestamp up to this one, so that record stays the last. Offsets never move, so each reading of
the plan returns the same events, or an error once retention has deleted some. A difference begins at the vector of
an earlier timestamp. A position is a plan that begins after the events already read. Plans have the ids of the
topics, so that a stream that was deleted and created again is not taken for the old one. Events come in the order
of `ordered_reader`, up to the plan's offsets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, get_args, overload
from zlib import crc32

from anabranch.errors import (
    AnabranchError,
    DeadlineExceeded,
    InvalidArgument,
    RetryError,
    SnapshotExpired,
)
from anabranch.ports import TopicPartition
from anabranch.protocol.hybrid_time import to_text
from anabranch.protocol.legal_names import split_stream
from anabranch.protocol.schemas.records import CommitRecord
from anabranch.reading.committed_log import (
    UNKNOWN_IDS,
    CommittedLog,
    ReaderPorts,
    StreamIds,
    ids_of,
    partitions_of,
)
from anabranch.reading.feed import Feed
from anabranch.reading.history import Found, HistorySearch, safe_time_in
from anabranch.reading.iteration import Iteration
from anabranch.reading.ordered_reader import IDLE_S, OrderedStream, Step, turn_pauses
from anabranch.topics.names import history_topic, stream_topic
from anabranch.types import Event, K, V
from anabranch.values import Decoder, Held, Stream, name_of

_STEP = 1024


class StreamCut(NamedTuple):
    """A stream as of a timestamp.

    ``offsets``: partition -> end offset; a partition without one is empty. ``start_offsets``: the first undeleted
    offsets when the snapshot was taken, at most the end offsets. ``history``: the offset after the last record of
    the stream's history that belongs to it. ``ids``: topic ids of these offsets; empty in data of an older version.
    """

    offsets: Mapping[int, int]
    start_offsets: Mapping[int, int]
    history: int
    ids: StreamIds = UNKNOWN_IDS


class Given:
    """How far a snapshot's reader has returned events, by partition."""

    def __init__(self, starts: Mapping[int, int]) -> None:
        self._done = dict(starts)
        self._step: Step | None = None

    def begins(self, step: Step | None) -> None:
        """Note that this step is returned next, so all earlier steps are returned; None: no step follows."""
        self._done = self.positions()
        self._step = step

    def positions(self) -> dict[int, int]:
        """Partition -> the offset after the last returned event; without such an event, where reading began."""
        step = self._step
        if step is None or not step.given_to:
            return dict(self._done)
        return self._done | {step.place.partition: step.given_to}


class SnapshotReader(Iteration[Event[K, V]], Generic[K, V]):
    """The events of a stream as of a snapshot, each key in commit order. An iterator that ends by itself.

    Everything is freed at the end, by closing it, and by leaving the loop. One thread at a time.
    """

    _resumes_after = AnabranchError  # the next call continues after an error

    def __init__(
        self,
        ports: ReaderPorts,
        stream: str,
        cut: StreamCut,
        timeout: float,
        decoder: Decoder | None = None,
    ) -> None:
        """``timeout``: seconds without new records after which it raises `DeadlineExceeded`.

        Raises: SnapshotExpired, UnknownStream (the stream was deleted), NotReady.
        """
        super().__init__()
        self._clock = ports.clock
        self._stream = stream
        self._topic = stream_topic(stream)
        self._ends = cut.offsets
        self._timeout = timeout
        # Partitions that are not fetched to their ends yet.
        self._unread = {p for p, end in cut.offsets.items() if cut.start_offsets[p] < end}
        self._step = Step(TopicPartition("", 0), [], lambda *_, **__: iter(()))
        self._decoder = decoder
        self.given = Given(cut.start_offsets)
        self._source = source = ports.committed_log(timeout)
        source.expect(stream, cut.ids)
        self._feed = Feed(source, gone=self._gone)
        self._ordered = OrderedStream(source, self._feed, None, stream, timeout)
        self._closed = False
        if self._unread:
            try:
                _check_history(source, stream, cut, timeout)
            except BaseException:
                source.close()
                raise
        self._ordered.begin(cut.start_offsets, cut.offsets)
        self._feed.assign(
            {TopicPartition(self._topic, p): cut.start_offsets[p] for p in self._unread}
        )

    def _free(self) -> None:
        self._step = Step(TopicPartition("", 0), [], lambda *_, **__: iter(()))
        self._source.close()

    @property
    def skipped(self) -> int:
        """As `Reader.skipped`."""
        return 0 if self._decoder is None else self._decoder.skipped

    # -- events ---------------------------------------------------------------------------------------

    def _run(self) -> Generator[Event[Any, Any], None, None]:
        while not self._closed:
            current = self._step
            yield from current.rest if self._decoder is None else self._decoder.decoded(current)
            if self._step is not current:
                continue  # another thread iterates, too, and was faster
            try:
                step = self._next_step()
            except RetryError:  # closed by another thread, with its connections
                if not self._is_closed():
                    raise
                break
            self.given.begins(step)
            if step is None:
                self.close()
                break
            self._step = step

    def _next_step(self) -> Step | None:
        """The next events; None when all of the snapshot is returned, or the reader is closed."""
        give_up = self._clock.monotonic() + self._timeout
        pauses = turn_pauses(self._clock)
        idle = False
        while not self._closed:
            step = self._ordered.step(_STEP)
            if step is not None:
                return step
            at = self._feed.positions(self._topic, self._unread)
            self._unread -= {p for p, offset in at.items() if offset >= self._ends[p]}
            self._ordered.update_positions(idle)
            self._ordered.release()
            waiting = self._ordered.waiting()
            read = self._ends.keys() - self._unread - {place.partition for place in waiting}
            self._ordered.forget(read)
            if not self._unread and not waiting:
                break
            now = self._clock.monotonic()
            if now >= give_up:
                raise DeadlineExceeded(
                    f"{self._topic} did not show in {self._timeout:g} s all that the snapshot has of it: "
                    "read it again"
                )
            pause = pauses.begin()
            if not self._ordered.holds:
                pause = IDLE_S
            waiting |= {TopicPartition(self._topic, p) for p in self._ends if p not in self._unread}
            portions = self._feed.next(min(give_up, now + pause), waiting)
            for portion in portions:
                portion.end = self._ends[portion.place.partition]
                self._ordered.put(portion)
            idle = not portions
        return None

    def _gone(self, place: TopicPartition, offset: int) -> None:
        raise _expired(self._stream)


def _expired(stream: str) -> SnapshotExpired:
    return SnapshotExpired(
        f"retention has deleted events of {stream} that the snapshot has: take a later one"
    )


def _check_history(source: CommittedLog, stream: str, cut: StreamCut, timeout: float) -> None:
    """Raise `SnapshotExpired` unless the snapshot's last history record still exists."""
    place = TopicPartition(history_topic(stream), 0)
    if source.start_offsets([place], source.clock.monotonic() + timeout)[place] >= cut.history:
        raise SnapshotExpired(
            f"the history of {stream} does not reach back to the snapshot any more: take a later one"
        )


At: TypeAlias = "int | datetime | None"
Mode: TypeAlias = Literal["snapshot", "latest"]
_LEAST_S = 0.1
_NO_EVENT = 1 << 62


class SnapshotPlan(NamedTuple):
    """A snapshot as plain data, to be pickled and read anywhere: `Client.open_snapshot`.

    ``timestamp``: hybrid time. ``cuts``: stream -> its offsets. ``since``: the beginning of a difference.
    """

    timestamp: int
    cuts: Mapping[str, StreamCut]
    since: int | None = None

    def to_text(self) -> str:
        """The plan as text: some 30 characters a partition and 80 a stream, with a checksum."""
        cuts = {
            stream: [
                [*cut.ids, cut.history],
                *([p, cut.start_offsets[p], e] for p, e in cut.offsets.items()),
            ]
            for stream, cut in self.cuts.items()
        }
        body = [self.timestamp, self.since, cuts]
        return json.dumps([_VERSION, _sum_of([_VERSION, *body]), *body], separators=(",", ":"))

    @classmethod
    def of_text(cls, text: str) -> SnapshotPlan:
        """The plan of a text. Raises `InvalidArgument` if the text is not a plan, or not whole."""
        try:
            version, checksum, *body = json.loads(text)
            sums = {_NO_IDS: body, _VERSION: [_VERSION, *body]}
            if checksum != _sum_of(sums[version]):
                raise ValueError
            timestamp, since, parts = body
            cuts = {}
            for stream, (head, *places) in parts.items():
                *ids, history = head if version == _VERSION else ["", "", head]
                ends, starts = {p: e for p, _, e in places}, {p: s for p, s, _ in places}
                cuts[stream] = StreamCut(ends, starts, history, StreamIds(*ids))
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidArgument(
                f"{text[:60]!r} is no position: give the whole text of snapshot.position()"
            ) from error
        return cls(timestamp, cuts, since)


_NO_IDS = 1  # the version of texts without ids of topics
_VERSION = 2


def _sum_of(summed: list[Any]) -> int:
    return crc32(json.dumps(summed, separators=(",", ":")).encode())


class Snapshot:
    """Streams as of a commit timestamp, with all or no events of each transaction.

    Reading a snapshot twice gives the same events, or `SnapshotExpired` once retention has deleted some of them. A
    snapshot is thread-safe; its readers are not.
    """

    def __init__(
        self,
        plan: SnapshotPlan,
        reader: Callable[[str, StreamCut, Decoder | None], SnapshotReader[Any, Any]],
        decoder: Callable[[Stream[Any, Any]], Decoder],
    ) -> None:
        self._plan = plan
        self._reader, self._decoder = reader, decoder
        self._given: dict[str, Given] = {}

    def __repr__(self) -> str:
        since = "" if self.since is None else f" since {to_text(self.since)}"
        return f"<Snapshot of {', '.join(self.streams)} at {to_text(self.timestamp)}{since}>"

    def __reduce__(self) -> str:
        raise TypeError("send snapshot.plan(), and open it there: client.open_snapshot(plan)")

    @property
    def timestamp(self) -> int:
        """Hybrid time: every event's commit timestamp is at or below it, and all such events are here."""
        return self._plan.timestamp

    @property
    def since(self) -> int | None:
        """Hybrid time; all events have later commit timestamps. None if the snapshot is not a difference."""
        return self._plan.since

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams, as they were asked for."""
        return tuple(self._plan.cuts)

    def plan(self) -> SnapshotPlan:
        """The snapshot as plain data."""
        return self._plan

    def position(self) -> str:
        """The rest of the snapshot, as text for `Client.open_snapshot` in any process.

        A stream begins after the last event that its newest reader returned; without a reader, at its beginning.
        """
        cuts = {
            stream: cut._replace(start_offsets=given.positions())
            if (given := self._given.get(stream)) is not None
            else cut
            for stream, cut in self._plan.cuts.items()
        }
        return self._plan._replace(cuts=cuts).to_text()

    def offsets(self, stream: str) -> dict[int, int]:
        """Partition -> end offset in the stream's topic; 0 where a partition is not named."""
        return dict(self._cut(stream).offsets)

    def start_offsets(self, stream: str) -> dict[int, int]:
        """Partition -> first offset: as of `since`, or the first undeleted offset when the snapshot was taken."""
        return dict(self._cut(stream).start_offsets)

    def history(self, stream: str) -> int:
        """The offset after the snapshot's last record in the stream's history."""
        return self._cut(stream).history

    @overload
    def read(self, stream: str) -> SnapshotReader: ...

    @overload
    def read(self, stream: Stream[K, V]) -> SnapshotReader[K, V]: ...

    def read(self, stream: str | Stream[Any, Any]) -> SnapshotReader[Any, Any]:
        """The stream's events, each key in commit order, as an iterator that ends by itself.

        Raises: SnapshotExpired, UnknownStream (it was deleted, perhaps created again), NotReady; while iterating
        also DeadlineExceeded (read again).
        """
        name: str = name_of(stream)
        decoder = self._decoder(stream) if isinstance(stream, Stream) else None
        reader = self._reader(name, self._cut(name), decoder)
        self._given[name] = reader.given
        return reader

    @overload
    def changes(self, stream: str) -> Iterator[Event]: ...

    @overload
    def changes(self, stream: Stream[K, V]) -> Iterator[Event[K, V]]: ...

    def changes(self, stream: str | Stream[Any, Any]) -> Iterator[Event[Any, Any]]:
        """The last event of each key, in the order of reading: with `since`, what has changed from then on.

        A value of None means that the key was deleted. Events without a key are skipped. All keys are in memory.
        Raises: as `read`, before the first event is returned.
        """
        last: dict[bytes, Event] = {}
        with self.read(name_of(stream)) as reader:
            for event in reader:
                if event.key is not None:
                    last.pop(event.key, None)
                    last[event.key] = event
        found = iter(last.values())
        return self._decoder(stream).decoded(Held(found)) if isinstance(stream, Stream) else found

    def _cut(self, stream: str) -> StreamCut:
        cut = self._plan.cuts.get(stream)
        if cut is None:
            raise InvalidArgument(
                f"{stream!r} is not in this snapshot of {', '.join(self.streams)}"
            )
        return cut


def check_mode(mode: object) -> None:
    """Raise `InvalidArgument` for a value that is not in `Mode`."""
    if mode not in get_args(Mode):
        raise InvalidArgument(f"mode {mode!r}: 'snapshot', or 'latest'")


def check_since(since: int | None, at: int | None) -> None:
    """Raise `InvalidArgument` if a difference would end before it begins."""
    if since is not None and at is not None and since > at:
        raise InvalidArgument(
            f"since {to_text(since)} is later than {to_text(at)}, the snapshot's time: give an earlier one"
        )


def streams_of(streams: str | Sequence[str]) -> list[str]:
    """These streams, each once. Raises `InvalidArgument` for an illegal name, or without any stream."""
    names = [streams] if isinstance(streams, str) else list(streams)
    if not names:
        raise InvalidArgument("name at least one stream")
    for name in names:
        split_stream(name)
    return list(dict.fromkeys(names))


def take(
    source: CommittedLog,
    streams: Sequence[str],
    timestamp: int,
    deadline: float,
    since: int | None = None,
) -> SnapshotPlan:
    """The plan of a snapshot at a timestamp that is safe. ``deadline``: monotonic seconds.

    Raises: UnknownStream, SnapshotExpired, NotReady.
    """
    ids = ids_of(source, streams, deadline)
    cuts = {}
    for stream in streams:
        source.expect(stream, ids[stream])
        cut = _cut(source, stream, timestamp, deadline, since)
        cuts[stream] = cut._replace(ids=ids[stream])
    return SnapshotPlan(timestamp, cuts, since)


def newest(source: CommittedLog, streams: Sequence[str], deadline: float) -> tuple[int, bool]:
    """The timestamp of the newest record in the histories of these streams (0 without a record); and is it safe?

    One control partition serves the streams. All commits to them before this call have timestamps up to this one.
    If it is safe, no later commit gets a timestamp up to it. Raises: UnknownStream, NotReady.
    """
    partitions_of(source, streams, deadline)
    found = [_search(source, stream, deadline).last() for stream in streams]
    records = [at.record for at in found if at is not None]
    last = max((record.timestamp for record in records), default=0)
    return last, max(map(safe_time_in, records), default=0) >= last


def _search(source: CommittedLog, stream: str, deadline: float) -> HistorySearch:
    return HistorySearch(source, stream, max(_LEAST_S, deadline - source.clock.monotonic()))


def _cut(
    source: CommittedLog, stream: str, timestamp: int, deadline: float, since: int | None = None
) -> StreamCut:
    search = _search(source, stream, deadline)
    found = _as_of(search, stream, timestamp)
    if found is None:
        return StreamCut({}, {}, 0)  # the stream did not exist yet
    ends = found.vector()
    topic = stream_topic(stream)
    places = [TopicPartition(topic, partition) for partition in ends]
    starts = {p.partition: at for p, at in source.start_offsets(places, deadline).items()}
    if since is None:
        _check_left(search, stream, timestamp, found, starts)
        below: Mapping[int, int] = {}
    else:
        before = _as_of(search, stream, since)
        below = before.vector() if before is not None else {}
        gone = [
            str(p)
            for p, end in ends.items()
            if below.get(p, 0) < min(starts[p], end)
            and _first_event(search, p, below.get(p, 0)) < starts[p]
        ]
        if gone:
            raise SnapshotExpired(
                f"retention has deleted events of {stream} from after {to_text(since)} on partition "
                f"{', '.join(gone)}: give a later `since`, or take a whole snapshot"
            )
    firsts = {p: min(max(starts[p], below.get(p, 0)), end) for p, end in ends.items()}
    return StreamCut(ends, firsts, found.offset + 1)


def _as_of(search: HistorySearch, stream: str, timestamp: int) -> Found | None:
    """The last record at or below a timestamp; None if the stream did not exist yet. Raises `SnapshotExpired`."""
    found = search.as_of(timestamp)
    if found is None and search.is_cut():
        raise SnapshotExpired(
            f"the history of {stream} does not reach back to {to_text(timestamp)} any more: "
            "take a later snapshot"
        )
    return found


def _check_left(
    search: HistorySearch, stream: str, timestamp: int, found: Found, starts: Mapping[int, int]
) -> None:
    """Raise `SnapshotExpired` if a partition has lost all events of the snapshot, and later events were written.

    The later events are on that partition; if its segment is sealed by now, they are on another partition.
    """
    ends = found.vector()
    # Deletion may end at the last event, or after the marker that follows it.
    passed = [p for p, end in ends.items() if 0 < end <= starts[p]]
    now = search.as_of("end") if passed else None
    if now is None:
        return
    later = {p for p, end in now.vector().items() if end > ends.get(p, 0)}
    closed = _closed(search, found, now) if later else set()
    gone = [p for p in passed if p in later | closed]
    if gone:
        raise SnapshotExpired(
            f"retention has deleted all that {stream} had at {to_text(timestamp)} on partition "
            f"{', '.join(map(str, gone))}: take a later snapshot"
        )


def _closed(search: HistorySearch, then: Found, now: Found) -> set[int]:
    """The partitions of segments that were open at one record, and sealed at a later one."""
    before, after = search.epoch(then), search.epoch(now)
    if before is None or after is None:
        return set()
    left = {segment.segment_id for segment in after.segments}
    return {s.partition for s in before.segments if s.segment_id not in left}


def _first_event(search: HistorySearch, partition: int, offset: int) -> int:
    """The first committed event of a partition from an offset on, by the history."""
    for _, record in search.since(search.passing(partition, offset)):
        for part in record.segments if isinstance(record, CommitRecord) else ():
            if part.partition == partition and part.end > offset:
                return max(part.first, offset)
    return _NO_EVENT
