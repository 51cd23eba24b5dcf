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
from typing import Literal, NamedTuple, TypeVar

from anabranch.controller.cleanup import Truncator
from anabranch.controller.history_tail import base_place, events_until, load_tail
from anabranch.controller.jobs import Jobs
from anabranch.controller.topic_trouble import TopicTrouble
from anabranch.core.decisions.bases import base_published, is_published
from anabranch.core.decisions.scale import partitions_added, partitions_refused
from anabranch.core.decisions.streams import (
    forget_refused,
    prove_leadership,
    recovery_refused,
    stream_changed,
    stream_created,
    stream_forgotten,
    stream_recovered,
    stream_refused,
)
from anabranch.core.decisions.turn import Turn
from anabranch.core.history_records import NO_PREVIOUS
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
from anabranch.protocol import limits
from anabranch.protocol.legal_names import base_stream
from anabranch.protocol.schemas.records import BaseRow, StreamRow
from anabranch.topics.creation import (
    alter_stream_topics,
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
# How many tries to create, delete or find topics while brokers don't answer: they take about 8 s.
TRIES = 6


@dataclass(slots=True)
class _Deleting:
    """A stream whose topics are being deleted. Times are monotonic seconds.

    ``begun``: other work on its topics is over, and ``give_up_at`` was set again then. ``found``: the topics that
    the last check found. ``proved``: this leader has committed a round since that check, so it may delete these
    topics. ``deleted``: the stream's own topics (no later topics of the same names) that brokers have deleted.
    """

    look_at: float
    give_up_at: float
    begun: bool = False
    found: list[TopicInfo] = field(default_factory=list)
    proved: bool = False
    deleted: set[str] = field(default_factory=set)


class StreamTopics:
    """Creates, alters, truncates, grows and deletes the topics of streams, by jobs (`topics`, `growth`).

    Each stream has at most one job of a kind at a time. A job that fails is tried again after a pause.
    """

    def __init__(
        self,
        log: Log,
        clock: Clock,
        jobs: Jobs,
        trouble: TopicTrouble,
        truncator: Truncator,
        *,
        record_bytes: int = limits.RECORD.value,
    ) -> None:
        """``record_bytes``: the size of messages that a history accepts."""
        self._log = log
        self._clock = clock
        self._record_bytes = record_bytes
        self._jobs = jobs
        self._trouble = trouble
        self._truncator = truncator
        self._deleting: dict[str, _Deleting] = {}
        self._new: dict[str, NewTopics] = {}  # of streams that are being created, or were refused
        self.missed: set[str] = set()  # streams of which a topic was not found

    @property
    def busy(self) -> bool:
        """Whether work is under way, so that `step` should be called soon."""
        jobs, tried = self._jobs, self._trouble.reasons["topics"]
        return bool(jobs.names("topics") or jobs.names("growth") or self._deleting or tried)

    def step(self, state: State) -> Iterator[tuple[str, Done]]:
        """Begin the work that the status log asks for, and yield its results. Log each before taking the next
        result.

        The topics of streams in trouble are not grown, altered or truncated.

        Raises: LogError, if the log can't be reached.
        """
        waiting = self._trouble.waiting
        wanted = [
            row
            for row in state.changing.values()
            if row.state in (CREATING, RECOVERING, FORGETTING)
            or (row.change is not None and row.stream not in waiting)
        ]
        self._drop_unwanted("topics", {row.stream for row in wanted})
        for stream in self._new.keys() & state.streams.keys():
            if state.streams[stream].state != CREATING:  # created: these are the stream's topics
                del self._new[stream]
        for row in wanted:
            if row.state == CREATING:
                created = self._create(row)
                if created is not None:
                    yield row.stream, created
                    self._trouble.end("topics", row.stream)
            else:
                yield from self._changed(row, state)
        yield from self._grown(state)

    def _drop_unwanted(self, kind: Literal["topics", "growth"], wanted: Container[str]) -> None:
        """Drop ended jobs and troubles of work that is no longer wanted, or whose stream is in trouble."""
        for stream in self._jobs.names(kind) | self._trouble.reasons[kind].keys():
            if stream not in wanted and not self._jobs.is_running(kind, stream):
                self._jobs.drop(kind, stream)
                self._trouble.end(kind, stream)

    def _grown(self, state: State) -> Iterator[tuple[str, Done]]:
        """Add the partitions that the status log asks for. A former leader may have begun to add them.

        A growth that failed is tried again, since brokers may have added the partitions all the same.
        """
        wanted = {s: r for s, r in state.changing.items() if r.wanted_partitions > r.partitions}
        self._drop_unwanted("growth", wanted)
        for stream, row in wanted.items():
            waits = stream in self._trouble.waiting or self._trouble.is_pausing("growth", stream)
            if waits and not self._jobs.is_under_way("growth", stream):
                continue
            work = partial(_grow, self._log, stream, row.wanted_partitions)
            job = self._jobs.run("growth", stream, work)
            if job is None:
                continue
            grown = job.result()
            if isinstance(grown, int):
                self._trouble.end("growth", stream)
                yield stream, partial(partitions_added, stream=stream, partitions=grown)
                continue
            self._trouble.note("growth", stream, str(grown.error))
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
            if self._trouble.failed("topics", row.stream, error) < TRIES:
                return None
            wrong = NotReady(f"its topics can't be used now: {error}")
        wrong.args = (f"{wrong}{self._new.get(row.stream, '')}",)
        self._trouble.end("topics", row.stream)
        return partial(stream_refused, stream=row.stream, error=wrong)

    def _done(self, row: StreamRow, work: Callable[[], T], by: object = None) -> Future[T] | None:
        """Begin the job of a stream unless it is under way. Returns it once it has ended; None: call again.

        ``by``: other values on which the work depends, besides the row's state and change. If one of all these has
        changed, the work is done again.
        """
        return self._jobs.run("topics", row.stream, work, (row.state, row.change, by))

    def _create(self, row: StreamRow) -> Done | None:
        """Create a stream's topics. None: call again. After a few tries without an answer it is an error."""
        if self._trouble.is_pausing("topics", row.stream):
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
        except Exception as trouble:  # noqa: BLE001 logged, and tried again
            if self._trouble.failed("topics", row.stream, trouble) < TRIES:
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
        if self._trouble.is_pausing("topics", stream):
            return None
        if row.state == FORGETTING:
            # Requests of other work name a topic without its id, so they might reach a new topic of the same name.
            waits = self._truncator.is_at(stream) or self._jobs.is_under_way("growth", stream)
            if not self._jobs.is_under_way("topics", stream) and self._is_overdue(stream, waits):
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
            tries = self._trouble.failed("topics", stream, trouble)
            now, under_way = self._clock.monotonic(), self._deleting.get(stream)
            if tries < TRIES and (under_way is None or now < under_way.give_up_at):
                return None
            self._forget(stream)
            error = NotReady(f"the brokers don't do now what this needs: {trouble}")
            return partial(refused, stream=stream, error=error)

    def _recover(self, row: StreamRow) -> Done:
        """Check that the topics of a LOST stream are the topics that it had before."""
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
        """`TopicMisconfigured` if the history is a former stream's: readers would take it for the new stream's."""
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
                self._jobs.check_open()
                self._log.delete_records(due)
            else:
                former, check = change.settings, self._jobs.check_open
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
                self._jobs.check_open()
                self._log.delete_topics(left)
                own = {topic.name for topic in left if topic.topic_id in row.topic_ids}
                under_way.deleted |= own
        except LogRefused as error:
            refusal = f"the brokers don't delete {_names(left)}: {error}; delete them by hand, then repeat this"
            kind = NotAuthorized if error.forbidden else InvalidArgument
            return self._refused(stream, kind(refusal))
        names = topics_of(stream)
        known = self._log.describe_topics([self._trouble.witness, *names])
        found = [known[name] for name in names if name in known]
        # The broker that answered may lag, so all brokers are asked about the rest.
        rest = [name for name in names if name not in under_way.deleted]
        if self._trouble.witness in known and not found and not any(map(self._log.is_known, rest)):
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

    def _refused(self, stream: str, error: AnabranchError) -> Done:
        self._forget(stream)
        return partial(forget_refused, stream=stream, error=error)

    def _forget(self, stream: str) -> None:
        self._deleting.pop(stream, None)
        self._trouble.end("topics", stream)


def _names(topics: Sequence[TopicInfo]) -> str:
    return ", ".join(topic.name for topic in topics)


# -- growth -------------------------------------------------------------------------------------------


class NotGrown(NamedTuple):
    """The reason why a stream's topics can't be grown, and how many partitions its journal has."""

    error: AnabranchError
    there: int = 0


def _grow(source: Log, stream: str, partitions: int) -> int | NotGrown:
    """Add partitions. A failure has the journal's number: these stay wanted, as plain writes may come there."""
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
