"""The topics of streams: made, grown and deleted as the log says, by whoever leads.

What shall be is logged first, in the stream's row; then it is done here, and that it is done is logged. A successor
that finds the first without the last does it again, which is harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from anabranch.core.decide_admin import CREATING, FORGETTING, stream_created, stream_refused
from anabranch.core.decide_forget import forget_refused, prove_lead, stream_forgotten
from anabranch.core.decide_scale import partitions_added, partitions_refused
from anabranch.core.plan import NO_PREVIOUS
from anabranch.core.state import State
from anabranch.core.turn import Turn
from anabranch.errors import AnabranchError, InvalidArgument, NotReady, TopicMisconfigured
from anabranch.ports import Clock, Log, LogRefused, TopicInfo
from anabranch.processors.cleanup import Cutter
from anabranch.processors.growth import Growth
from anabranch.processors.history_tail import load_tail
from anabranch.schemas.records import StreamRow
from anabranch.topics.declarations import create_stream_topics, refusal_of
from anabranch.topics.names import history_topic, journal_topic, stream_topic

Done = Callable[[Turn], None]  # puts into a turn what was done
LOOK_AGAIN_S = 0.1  # how soon it is looked whether deleted topics are gone
GIVE_UP_S = 30.0  # … and how long


@dataclass(slots=True)
class _Deleting:
    """A stream whose topics are being deleted; monotonic seconds.

    ``found``: what is left of it, seen before a round of this leader was committed.
    """

    look_at: float
    give_up_at: float
    found: list[TopicInfo] = field(default_factory=list)


class StreamTopics:
    """Makes and deletes topics in the loop, and grows them beside it."""

    def __init__(
        self, log: Log, clock: Clock, witness: str, cutter: Cutter, *, threads: bool
    ) -> None:
        """``witness``: a topic that is there: a broker that does not know it knows nothing."""
        self._log = log
        self._clock = clock
        self._witness = witness
        self._cutter = cutter
        self._growth = Growth(log, threads=threads)
        self._deleting: dict[str, _Deleting] = {}
        self.missed = False  # a topic was not found

    @property
    def busy(self) -> bool:
        """Whether something is under way: look again soon."""
        return self._growth.busy or bool(self._deleting)

    def step(self, state: State, missing: Container[str] = ()) -> Iterator[Done]:
        """Do, or begin, what the log says. What is done is to be logged before the next is taken.

        ``missing``: streams that lack a topic: nothing of theirs is grown.

        Raises: LogError, if the log can't be reached.
        """
        for row in list(state.streams.values()):
            if row.state == CREATING:
                yield self._create(row)
            elif row.state == FORGETTING:
                done = self._delete(row.stream)
                if done is not None:
                    yield done
        for stream, grown in self._growth.step(state, missing):
            if isinstance(grown, int):
                yield partial(partitions_added, stream=stream, partitions=grown)
            else:
                self.missed |= isinstance(grown, NotReady)
                yield partial(partitions_refused, stream=stream, error=grown)

    def close(self) -> None:
        """Wait for what is under way: it is harmless, and whoever leads next does it again."""
        self._growth.close()

    def _create(self, row: StreamRow) -> Done:
        try:
            starts = create_stream_topics(
                self._log, row.stream, segments=row.segment_count, settings=row.settings
            )
            self._check_no_history(row.stream)
        except AnabranchError as error:
            return partial(stream_refused, stream=row.stream, error=error)
        except LogRefused as error:
            return partial(stream_refused, stream=row.stream, error=refusal_of(error))
        return partial(stream_created, stream=row.stream, starts=starts)

    def _check_no_history(self, stream: str) -> None:
        """`TopicMisconfigured` if there is a former stream's: readers would take it for this one's."""
        if load_tail(self._log, self._clock, stream).last != NO_PREVIOUS:
            raise TopicMisconfigured(
                f"{history_topic(stream)} has the history of another stream, whose name was free: delete that "
                f"topic, {stream_topic(stream)} and {journal_topic(stream)}, or choose another name"
            )

    def _delete(self, stream: str) -> Done | None:
        """A step of deleting what is left of a stream's topics. None: look again."""
        now = self._clock.monotonic()
        under_way = self._deleting.setdefault(stream, _Deleting(now, now + GIVE_UP_S))
        if now < under_way.look_at:
            return None
        if self._cutter.is_at(stream) or self._growth.is_at(stream):
            return (
                None  # these name a topic only: what comes next under that name must not get them
            )
        left, under_way.found = under_way.found, []
        try:
            if left:
                self._log.delete_topics(left)
        except LogRefused as error:
            refusal = f"the brokers don't delete {_names(left)}: {error}; delete them by hand, then repeat this"
            return self._refused(stream, InvalidArgument(refusal))
        names = [stream_topic(stream), journal_topic(stream), history_topic(stream)]
        known = self._log.describe_topics([self._witness, *names])
        found = [known[name] for name in names if name in known]
        if self._witness in known and not found:
            del self._deleting[stream]
            return partial(stream_forgotten, stream=stream)
        if now >= under_way.give_up_at:
            wrong = _names(found) or "topics that can't be looked for"
            return self._refused(
                stream,
                NotReady(
                    f"still there, or made anew, after {GIVE_UP_S:.0f} s: {wrong}; end what writes there, then "
                    "repeat this"
                ),
            )
        under_way.look_at = now + (LOOK_AGAIN_S if left or not found else 0)
        under_way.found = found
        return partial(prove_lead, stream=stream) if found else None

    def _refused(self, stream: str, error: AnabranchError) -> Done:
        del self._deleting[stream]
        return partial(forget_refused, stream=stream, error=error)


def _names(topics: Sequence[TopicInfo]) -> str:
    return ", ".join(topic.name for topic in topics)
