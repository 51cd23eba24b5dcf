"""Creates, alters, grows and deletes the topics of streams, as the status log says.

The intent is logged first, in the stream's row. Then this module does the work, and the result is logged. A new
leader that finds an intent without a result does the work again, which is harmless.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from anabranch.backoff import Backoff
from anabranch.core import limits
from anabranch.core.decisions.alter import stream_changed
from anabranch.core.decisions.bases import base_published, is_published
from anabranch.core.decisions.scale import partitions_added, partitions_refused
from anabranch.core.decisions.streams import (
    forget_refused,
    prove_leadership,
    recovery_refused,
    stream_created,
    stream_forgotten,
    stream_recovered,
    stream_refused,
)
from anabranch.core.decisions.turn import Turn
from anabranch.core.history_records import NO_PREVIOUS
from anabranch.core.legal_names import base_stream
from anabranch.core.state import State
from anabranch.core.stream_states import CREATING, FORGETTING, RECOVERING
from anabranch.errors import (
    AnabranchError,
    IllegalState,
    InvalidArgument,
    NotAuthorized,
    NotReady,
    TopicMisconfigured,
)
from anabranch.ports import (
    Clock,
    Log,
    LogError,
    LogFenced,
    LogRefused,
    LogUnavailable,
    TableError,
    TopicInfo,
)
from anabranch.processors.history_tail import base_place, events_until, load_tail
from anabranch.processors.streams.cleanup import Truncator
from anabranch.processors.streams.helper_thread import helper
from anabranch.processors.topic_trouble import new_pauses
from anabranch.schemas.records import BaseRow, StreamRow
from anabranch.topics.altering import alter_stream_topics
from anabranch.topics.creation import (
    create_stream_topics,
    grow_stream_topics,
    refusal_of,
)
from anabranch.topics.names import history_topic, journal_topic, stream_topic, topics_of
from anabranch.topics.new_topics import NewTopics

log = logging.getLogger("anabranch.controller")

Done = Callable[[Turn], None]  # puts the result into a turn
T = TypeVar("T")
# Ends of a new stream's partitions, and ids of its topics.
_Made = tuple[dict[int, int], tuple[str, ...]]
RECHECK_S = 0.1  # the pause between two checks whether deleted topics are gone
GIVE_UP_S = 30.0  # how long to check
AGAIN_S = 1.0  # the first pause after work on a stream's topics failed
TRIES = 3  # how often to try to create, delete or find topics while brokers refuse or don't answer


@dataclass(slots=True)
class _Deleting:
    """A stream whose topics are being deleted. Times are monotonic seconds.

    ``begun``: other work on its topics is over, and ``give_up_at`` was set again then. ``found``: topics found by
    the last check; ``proved``: this leader has committed a round since, so it may delete them. ``deleted``: the
    stream's own topics (not later ones of the same names) that brokers have deleted.
    """

    look_at: float
    give_up_at: float
    begun: bool = False
    found: list[TopicInfo] = field(default_factory=list)
    proved: bool = False
    deleted: set[str] = field(default_factory=set)


class StreamTopics:
    """Creates, alters, truncates, grows and deletes topics on helper threads, so that slow brokers delay no round.

    Each stream has at most one such work at a time.
    """

    def __init__(
        self,
        log: Log,
        clock: Clock,
        witness: str,
        truncator: Truncator,
        *,
        threads: bool,
        record_bytes: int = limits.RECORD.value,
    ) -> None:
        """``witness``: a topic that exists. A broker that does not know it is not believed about other topics.

        ``record_bytes``: the size of messages that a history accepts.
        """
        self._log = log
        self._clock = clock
        self._witness = witness
        self._record_bytes = record_bytes
        self._truncator = truncator
        self._growth = Growth(log, clock, threads=threads)
        self._helper = helper("anabranch-topics", threads=threads)
        self._under_way: dict[str, tuple[object, Future[Any]]] = {}  # the intent, and the work
        self._closed = False
        self._deleting: dict[str, _Deleting] = {}
        self._tried: dict[str, Backoff] = {}  # streams whose last try failed
        self._new: dict[str, NewTopics] = {}  # of streams that are being created, or were refused
        self.missed: set[str] = set()  # streams of which a topic was not found

    @property
    def busy(self) -> bool:
        """Whether work is under way, so that `step` should be called soon."""
        return self._growth.busy or bool(self._under_way or self._deleting or self._tried)

    def step(self, state: State, waiting: Container[str] = ()) -> Iterator[tuple[str, Done]]:
        """Begin the work that the status log asks for, and yield the results. Log each before taking the next one.

        ``waiting``: streams in trouble. Their topics are not grown, altered or truncated.

        Raises: LogError, if the log can't be reached.
        """
        wanted = [
            row
            for row in state.streams.values()
            if row.state in (CREATING, RECOVERING, FORGETTING)
            or (row.change is not None and row.stream not in waiting)
        ]
        left = (self._under_way.keys() | self._tried.keys()) - {row.stream for row in wanted}
        for stream in left:  # the work is no longer wanted, or the stream is in trouble
            if stream not in self._under_way or self._under_way[stream][1].done():
                self._under_way.pop(stream, None)
                self._tried.pop(stream, None)
        for stream in self._new.keys() & state.streams.keys():
            if state.streams[stream].state != CREATING:  # created: they are the stream's topics now
                del self._new[stream]
        for row in wanted:
            if row.state == CREATING:
                created = self._create(row)
                if created is not None:
                    yield row.stream, created
                    self._tried.pop(row.stream, None)
            else:
                yield from self._changed(row, state)
        for stream, grown in self._growth.step(state, waiting):
            if isinstance(grown, int):
                yield stream, partial(partitions_added, stream=stream, partitions=grown)
            else:
                if isinstance(grown.error, NotReady):
                    self.missed.add(stream)
                yield stream, partial(partitions_refused, stream=stream, **grown._asdict())

    def _changed(self, row: StreamRow, state: State) -> Iterator[tuple[str, Done]]:
        """One step of work on an existing stream; after a base was published, the next step too."""
        done = self._contained(row, state)
        while done is not None:
            yield row.stream, done  # the caller logs the result, then takes the next one
            if (deleting := self._deleting.get(row.stream)) is not None:
                deleting.proved = True
            now = state.streams.get(row.stream)
            done = self._contained(now, state) if now is not None and now.change else None

    def refused(self, row: StreamRow, error: LogRefused | LogUnavailable) -> Done | None:
        """The result to log if a round could not write to a new stream; None: the round is tried again."""
        wrong: AnabranchError
        if isinstance(error, LogRefused):
            wrong = refusal_of(error)
        else:  # a broker may not know the new topics yet
            pauses = self._pauses(row.stream)
            if pauses.count + 1 < TRIES:
                pauses.begin()
                return None
            wrong = NotReady(f"its topics can't be used now: {error}")
        wrong.args = (f"{wrong}{self._new.get(row.stream, '')}",)
        self._tried.pop(row.stream, None)
        return partial(stream_refused, stream=row.stream, error=wrong)

    def _pauses(self, stream: str) -> Backoff:
        """The pauses between tries of the work on a stream."""
        new = Backoff(AGAIN_S, AGAIN_S * 10, self._clock, growth=10)
        return self._tried.setdefault(stream, new)

    def _is_pausing(self, stream: str) -> bool:
        pauses = self._tried.get(stream)
        return pauses is not None and not pauses.is_over

    def close(self) -> None:
        """End without waiting for work under way: the next leader does it again.

        Such work may still create topics of a stream that is forgotten by then.
        """
        self._closed = True
        self._growth.close()
        self._helper.shutdown(wait=False, cancel_futures=True)
        self._under_way.clear()

    def _done(self, row: StreamRow, work: Callable[[], T], by: object = None) -> Future[T] | None:
        """Begin the work on a stream unless it is under way. Returns it once it has ended; None: call again.

        ``by``: what the work depends on, besides the row's state and change. If any of these has changed, the work
        is done again.
        """
        wanted = row.state, row.change, by
        if row.stream not in self._under_way:
            self._under_way[row.stream] = wanted, self._helper.submit(work)
        what, begun = self._under_way[row.stream]
        if not begun.done():
            return None
        del self._under_way[row.stream]
        return begun if what == wanted else None

    def _create(self, row: StreamRow) -> Done | None:
        """Create a stream's topics. None: call again. After a few tries without an answer, this is an error."""
        if self._is_pausing(row.stream):
            return None
        error: AnabranchError
        new = self._new.setdefault(row.stream, NewTopics())
        try:
            made = self._done(row, partial(self._make, row, new), row.adopt)
            if made is None:
                return None
            starts, ids = made.result()
        except AnabranchError as wrong:
            error = wrong
        except LogRefused as refused:
            error = refusal_of(refused)
        except (LogFenced, TableError):
            raise
        except Exception as trouble:
            pauses = self._pauses(row.stream)
            tries = pauses.count + 1
            log.warning(
                "%s can't be created, try %d: %s", row.stream, tries, trouble, exc_info=True
            )
            if tries < TRIES:
                pauses.begin()
                return None
            error = NotReady(f"its topics can't be made now: {trouble}")
        else:
            return partial(stream_created, stream=row.stream, starts=starts, topic_ids=ids)
        if not new.ids:
            del self._new[row.stream]
        return partial(stream_refused, stream=row.stream, error=error)

    def _make(self, row: StreamRow, new: NewTopics) -> _Made:
        made = create_stream_topics(
            self._log,
            row.stream,
            segments=row.segment_count,
            settings=row.settings,
            adopt=row.adopt,
            record_bytes=self._record_bytes,
            new=new,
        )
        self._check_no_history(row.stream)
        return made

    def _contained(self, row: StreamRow, state: State) -> Done | None:
        """One step of recovering, forgetting, altering or truncating a stream. None: call again.

        If the log fails, the step is tried a few times, then refused. This process stays leader: a new leader would
        begin with the same step, and fail in the same way.
        """
        stream = row.stream
        base = state.bases.get(stream)
        work, refused = {
            RECOVERING: (self._recover, recovery_refused),
            FORGETTING: (self._delete, forget_refused),
        }.get(row.state, (partial(self._change, base=base), stream_changed))
        if self._is_pausing(stream):
            return None
        if row.state == FORGETTING:
            # Requests of other work name a topic without its id, so they might reach a new topic of that name.
            waits = self._truncator.is_at(stream) or self._growth.is_at(stream)
            if stream not in self._under_way and self._is_overdue(stream, waits):
                why = f"its topics are still cut or grown after {GIVE_UP_S:.0f} s, as brokers don't answer"
                return self._refused(stream, NotReady(f"{why}; repeat this"))
            if waits:
                return None
        try:
            done = self._done(row, partial(work, row), base)
            return None if done is None else done.result()
        except LogFenced:
            raise
        except LogError as trouble:
            pauses = self._pauses(stream)
            tries = pauses.count + 1
            log.warning("the topics of %s, %s, try %d: %s", stream, row.state, tries, trouble)
            now, under_way = self._clock.monotonic(), self._deleting.get(stream)
            if tries < TRIES and (under_way is None or now < under_way.give_up_at):
                pauses.begin()
                return None
            self._forget(stream)
            error = NotReady(f"the brokers don't do now what this needs: {trouble}")
            return partial(refused, stream=stream, error=error)

    def _recover(self, row: StreamRow) -> Done:
        """Check that the topics of a LOST stream are the ones that it had."""
        names = topics_of(row.stream)
        found = self._log.describe_topics(names)
        for name, topic_id in zip(names, row.topic_ids, strict=False):
            info = found.get(name)
            least = 1 if name == names[2] else row.partitions
            if info is None or info.topic_id != topic_id or info.partitions < least:
                error: AnabranchError = IllegalState(
                    f"{row.stream} can't be taken back: {name} is not the topic that it was; forget the stream"
                )
                if not self._log.is_gone(name, least, topic_id):
                    error = NotReady(f"a broker does not show {name} as it was (yet); ask again")
                self._forget(row.stream)
                return partial(recovery_refused, stream=row.stream, error=error)
        self._forget(row.stream)
        return partial(stream_recovered, stream=row.stream)

    def _check_no_history(self, stream: str) -> None:
        """`TopicMisconfigured` if the history is a former stream's: readers would take it for this one's."""
        if load_tail(self._log, self._clock, stream).last != NO_PREVIOUS:
            raise TopicMisconfigured(
                f"{history_topic(stream)} has the history of another stream, whose name was free: delete that "
                f"topic, {stream_topic(stream)} and {journal_topic(stream)}, or choose another name"
            )

    def _change(self, row: StreamRow, base: BaseRow | None) -> Done | None:
        """Alter or truncate the topics of a stream as its row says. None: its row has no change any more.

        A base is published by a round of its own, before anything is deleted. ``base``: the last published one.
        """
        change, error = row.change, None
        if change is None:
            return None
        try:
            if not is_published(base, change):
                place = base_place(self._log, self._clock, row.stream, change.until)
                return partial(base_published, stream=row.stream, position=place[0], last=place[1])
            if change.until:
                due = events_until(self._log, self._clock, row.stream, change.until)
                if base is not None and change.base is not None:  # older bases are deleted, too
                    below = base.commit_timestamp - 1
                    due |= events_until(self._log, self._clock, base_stream(row.stream), below)
                self._check_open()
                self._log.delete_records(due)
            else:
                former, check = change.settings, self._check_open
                alter_stream_topics(self._log, row, former=former, check=check)
        except AnabranchError as wrong:
            error = wrong
        except LogRefused as wrong:
            error = refusal_of(wrong)
        self._forget(row.stream)
        return partial(stream_changed, stream=row.stream, error=error)

    def _is_overdue(self, stream: str, waits: bool) -> bool:
        """Whether a deletion has waited too long for other work. Its full time begins once that work has ended."""
        now = self._clock.monotonic()
        deleting = self._deleting.setdefault(stream, _Deleting(now, now + GIVE_UP_S))
        if not (waits or deleting.begun):
            deleting.begun = True
            deleting.give_up_at = now + GIVE_UP_S
        return waits and now >= deleting.give_up_at

    def _delete(self, row: StreamRow) -> Done | None:
        """One step of deleting what is left of a stream's topics. None: call again.

        Topics that are found are deleted by the next step, after a round has proved that this process is leader.
        """
        stream = row.stream
        now = self._clock.monotonic()
        under_way = self._deleting[stream]
        if now < under_way.look_at:
            return None
        left = under_way.found if under_way.proved else []
        under_way.found = []
        under_way.proved = False
        try:
            if left:
                self._check_open()
                self._log.delete_topics(left)
                own = {topic.name for topic in left if topic.topic_id in row.topic_ids}
                under_way.deleted |= own
        except LogRefused as error:
            refusal = f"the brokers don't delete {_names(left)}: {error}; delete them by hand, then repeat this"
            kind = NotAuthorized if error.forbidden else InvalidArgument
            return self._refused(stream, kind(refusal))
        names = topics_of(stream)
        known = self._log.describe_topics([self._witness, *names])
        found = [known[name] for name in names if name in known]
        # The broker that answered may lag, so all brokers are asked about the rest.
        rest = [name for name in names if name not in under_way.deleted]
        if self._witness in known and not found and not any(map(self._log.is_known, rest)):
            self._forget(stream)
            return partial(stream_forgotten, stream=stream)
        if now >= under_way.give_up_at:
            wrong = _names(found) or "topics that can't be looked for"
            return self._refused(
                stream,
                NotReady(
                    f"still there, or created again, after {GIVE_UP_S:.0f} s: {wrong}; stop the clients that "
                    "write there, then repeat this"
                ),
            )
        under_way.look_at = now + (RECHECK_S if left or not found else 0)
        under_way.found = found
        return partial(prove_leadership, stream=stream) if found else None

    def _check_open(self) -> None:
        """Stop work of a closed leader, because the next leader may have begun it again."""
        if self._closed:
            raise LogUnavailable("this process leads no more")

    def _refused(self, stream: str, error: AnabranchError) -> Done:
        self._forget(stream)
        return partial(forget_refused, stream=stream, error=error)

    def _forget(self, stream: str) -> None:
        self._deleting.pop(stream, None)
        self._tried.pop(stream, None)


def _names(topics: Sequence[TopicInfo]) -> str:
    return ", ".join(topic.name for topic in topics)


# -- growth -------------------------------------------------------------------------------------------


class NotGrown(NamedTuple):
    """The reason why a stream's topics can't be grown, and how many partitions its journal has."""

    error: AnabranchError
    there: int = 0


class Growth:
    """Adds the partitions that the status log asks for, on a helper thread; a former leader may have begun it.

    A growth that failed is tried again after a pause, since brokers may have added the partitions all the same.
    """

    def __init__(self, log: Log, clock: Clock, *, threads: bool) -> None:
        self._log = log
        self._clock = clock
        self._helper = helper("anabranch-growth", threads=threads)
        self._under_way: dict[str, Future[int | NotGrown]] = {}
        self._pauses: dict[str, Backoff] = {}

    @property
    def busy(self) -> bool:
        """Whether topics are being grown."""
        return bool(self._under_way)

    def is_at(self, stream: str) -> bool:
        """Whether this stream's topics are being grown."""
        return stream in self._under_way

    def step(
        self, state: State, waiting: Container[str] = ()
    ) -> Iterator[tuple[str, int | NotGrown]]:
        """Begin the growth that is wanted. Yields a stream with its new number of partitions, or with the failure.

        ``waiting``: streams in trouble, which are not grown.

        Raises: LogError, if the log can't be reached.
        """
        for stream in [s for s, work in self._under_way.items() if work.done()]:
            row = state.streams.get(stream)
            if row is None or row.wanted_partitions <= row.partitions:
                del self._under_way[stream]  # no longer wanted
        for stream, row in list(state.streams.items()):
            if row.wanted_partitions <= row.partitions:
                continue
            if stream not in self._under_way:
                pauses = self._pauses.get(stream)
                if stream in waiting or (pauses is not None and not pauses.is_over):
                    continue
                wanted = row.wanted_partitions
                self._under_way[stream] = self._helper.submit(_grow, self._log, stream, wanted)
            work = self._under_way[stream]
            if work.done():
                del self._under_way[stream]
                grown = work.result()
                if isinstance(grown, NotGrown):
                    self._pauses.setdefault(stream, new_pauses(self._clock)).begin()
                yield stream, grown

    def close(self) -> None:
        """End without waiting for work under way: the next leader does it again.

        Such work may still add partitions, even to topics of a later stream of that name; this does no harm.
        """
        self._helper.shutdown(wait=False, cancel_futures=True)
        self._under_way.clear()


def _grow(source: Log, stream: str, partitions: int) -> int | NotGrown:
    """Add partitions. A failure reports those of the journal: they stay wanted, as plain writes may come there."""
    try:
        try:
            grow_stream_topics(source, stream, partitions)
        except LogRefused as error:
            journal = source.describe_topics([journal_topic(stream)]).get(journal_topic(stream))
            return NotGrown(refusal_of(error), journal.partitions if journal is not None else 0)
    except AnabranchError as error:
        return NotGrown(error)
    except (LogRefused, LogUnavailable) as error:
        return NotGrown(NotReady(f"the brokers can't add partitions now: {error}"))
    return partitions
