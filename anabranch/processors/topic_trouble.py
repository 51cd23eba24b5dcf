"""Streams in trouble: decides which streams have to wait, and which are given up.

A call that fails names the topics it failed for (`LogError.topics`). Their streams *wait*: none of their topics is
read or written; all others continue. The brokers' metadata says more: a topic is not found, or was replaced; a
partition has no leader; too few replicas are in sync; a right is missing. A stream continues by itself once the
metadata shows no fault and its pause is over; the pause grows while the same stream fails again and again.

Only a stream with a lost topic is given up, since that can't be undone. A topic is lost if, for as long as
`Settings.lost_after_ms`, the brokers' quorum does not have it, or all brokers have another id for it. Or, at once,
if new events land below its old ones, as all replicas in sync took them. One broker's word is not enough: it may
have just started, or be cut off. An answer counts only if it knows the status topic, too. A partition that reads
shorter than before is waited for: a former leader may have answered that does not know of the new one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.backoff import Backoff
from anabranch.core import limits
from anabranch.core.state import State
from anabranch.core.stream_settings import MAX_MESSAGE, MIN_ISR
from anabranch.core.stream_states import ACTIVE
from anabranch.errors import chain_of
from anabranch.ports import (
    CORRUPT_MESSAGE,
    INVALID_RECORD,
    INVALID_TIMESTAMP,
    MESSAGE_TOO_LARGE,
    UNSUPPORTED_COMPRESSION_TYPE,
    Clock,
    Log,
    LogError,
    LogRefused,
    LogUnavailable,
    TopicGone,
    TopicInfo,
    TopicPartition,
)
from anabranch.topics.creation import stream_problems
from anabranch.topics.names import history_topic, topics_of

log = logging.getLogger("anabranch.controller")

# Codes by which a broker refuses records; two are RECORD_LIST_TOO_LARGE and UNSUPPORTED_FOR_MESSAGE_FORMAT. Other
# codes refuse the topic.
DATA_CODES = frozenset(
    (
        CORRUPT_MESSAGE,
        MESSAGE_TOO_LARGE,
        18,
        INVALID_TIMESTAMP,
        43,
        UNSUPPORTED_COMPRESSION_TYPE,
        INVALID_RECORD,
    )
)

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0
QUIET_S = 10.0  # after this long without trouble a pause is short again
LOOK_S = 1.0  # seconds between two checks of the streams that wait
FRESH_S = 1.0  # how old a look may be before a merge is carried there


@dataclass(slots=True)
class _Trouble:
    """Everything known against a stream; monotonic seconds.

    ``pauses``: before it is tried again. ``gone_since``: since when each look misses a topic of it. ``lost``:
    waiting won't help. ``refused``: brokers refused data of it for its content, and may be set wrong.
    """

    pauses: Backoff
    gone_since: float | None = None
    lost: bool = False
    refused: bool = False


@dataclass(slots=True)
class StreamTrouble:
    """``waiting``: stream -> why it waits; decisions see it, and the intake.

    ``witness``: a topic that exists as long as this partition is led: a broker without it knows nothing.
    ``_hints``: failures; they outlast a change of leadership, which they may have caused.
    """

    log: Log
    clock: Clock
    witness: str
    waiting: dict[str, str] = field(default_factory=dict)
    _troubles: dict[str, _Trouble] = field(default_factory=dict)
    recovered: list[str] = field(
        default_factory=list
    )  # streams that continue after trouble, to be checked once more
    _hints: list[LogError] = field(default_factory=list)
    _seen: dict[str, float] = field(default_factory=dict)  # since the last failure: when, by stream
    _next: float = 0.0
    _looked: float = 0.0  # when the last answer came that counts

    @property
    def suspects(self) -> bool:
        """Whether a stream waits, or leading ended for one."""
        return bool(self.waiting or self._hints)

    def hint(self, error: LogError) -> None:
        """Keep a failure for topics that ends leading, the last one of each: the next lead looks at it.

        Without tracebacks, which hold all that was led.
        """
        for each in chain_of(error):
            each.__traceback__ = None
        if error.topics:
            self._hints = [hint for hint in self._hints if hint.topics != error.topics]
            self._hints.append(error)

    def begin(self, state: State) -> None:
        """Begin a leadership: streams that waited still wait, until a look finds them well."""
        active = {stream for stream, row in state.streams.items() if row.state == ACTIVE}
        for stream in self.waiting.keys() - active:
            del self.waiting[stream]
        self._seen.clear()
        for trouble in self._troubles.values():
            trouble.gone_since = None
            trouble.lost = False
        hints, self._hints = self._hints, []
        for error in hints:
            self._note_all(state, error)
        if hints or self.waiting:
            self.look(state)

    def find(self, state: State, *errors: LogError) -> bool:
        """Let the streams that these errors name wait. False if one names no stream here: its cause is another."""
        self._seen.clear()
        mine = [self._note_all(state, error) for error in errors]
        if not all(isinstance(error, TopicGone) and error.lost for error in errors):
            self.look(state)
        return all(mine)

    def check(self, state: State, streams: Sequence[str], reserved: Sequence[str] = ()) -> None:
        """Look at streams before a round writes to them: first in a leadership, and after each failure.

        A native transaction that meets too few replicas in sync keeps its transactional id busy until these are
        back. Thanks to the look a dead broker costs one id, and not one for each of its streams.

        ``reserved``: where a merge begins to be carried, which holds others from then on: no look at these is old.

        Raises: LogUnavailable: for streams that wait from now on.
        """
        known = [s for s in dict.fromkeys((*streams, *reserved)) if s in state.streams]
        now = self.clock.monotonic()
        old = any(now - self._seen.get(stream, -FRESH_S) >= FRESH_S for stream in reserved)
        if old or not self._seen.keys() >= set(known):
            self.look(state, known)
            self._seen |= dict.fromkeys(known, now)
        waiting = [stream for stream in known if stream in self.waiting]
        if waiting:
            topics = {topic for stream in waiting for topic in topics_of(stream)}
            raise LogUnavailable("; ".join(self.waiting[stream] for stream in waiting), topics)

    def find_journals(self, find_ends: Callable[[State], Sequence[LogError]], state: State) -> None:
        """Find the journals' ends; without those that can't be asked. ``find_ends``: `Intake.find_ends`."""
        while failed := find_ends(state):
            known = len(self.waiting)
            if not self.find(state, *failed) or len(self.waiting) == known:
                raise failed[0]

    def given_up(self, state: State, after_s: float) -> list[tuple[str, str]]:
        """(stream, why) of those that are not to be waited for any longer."""
        if not self.waiting:
            return []
        now = self.clock.monotonic()
        if now >= self._next:
            self.look(state)
        found = []
        for stream, why in sorted(self.waiting.items()):
            trouble = self._troubles.get(stream)
            if trouble is None:
                continue
            since = trouble.gone_since
            if trouble.lost or (since is not None and self._looked - since >= after_s):
                if trouble.lost or self._is_gone(state, stream):
                    found.append((stream, why))
                else:
                    trouble.gone_since = now
        return found

    def forget_stream(self, stream: str) -> None:
        """Drop a stream: its loss, or its forgetting, is on the log."""
        self.waiting.pop(stream, None)
        self._troubles.pop(stream, None)

    def may_be_refused(self, state: State, streams: Collection[str]) -> bool:
        """Whether the data that brokers refused may be to blame. False if a topic's setting is wrong.

        Then the stream waits, and its data, which was acknowledged, is not given up.
        """
        for stream in streams:
            self._troubles.setdefault(stream, _Trouble(new_pauses(self.clock))).refused = True
        self.look(state, streams)
        return not any(stream in self.waiting for stream in streams)

    def look(self, state: State, also: Container[str] = ()) -> None:
        """Look at the topics of streams that wait, and of these ``also``.

        An answer without the witness does not count.
        """
        now = self.clock.monotonic()
        self._next = now + LOOK_S
        topics = {
            topic: stream
            for topic, stream in _streams(state).items()
            if stream in self.waiting or stream in also
        }
        described = describe(self.log, self.witness, topics)
        if described is None:
            return
        found = described.found
        self._looked = now
        forbidden = {topics[topic] for topic in described.forbidden}
        for topic in sorted(described.forbidden):
            self._note(topics[topic], described.forbidden[topic])
        topics = {topic: stream for topic, stream in topics.items() if stream not in forbidden}
        wrong: dict[str, str] = {}
        missing: set[str] = set()
        for topic, stream in topics.items():
            row = state.streams[stream]
            at = topics_of(stream).index(topic)
            partitions = row.partitions if topic != history_topic(stream) else 1
            topic_id = row.topic_ids[at] if row.topic_ids else ""
            why = gone(topic, found.get(topic), partitions, topic_id)
            if why:
                missing.add(stream)
                wrong[stream] = why
            elif stream not in missing and (why := unwell(found[topic], partitions)):
                wrong[stream] = why
        for stream in sorted(set(topics.values()) - wrong.keys()):
            known = self._troubles.get(stream)
            if known is not None and known.refused:
                bad = stream_problems(stream, found, state.streams[stream].partitions)
                wrong |= {stream: "; ".join(bad)} if bad else {}
        for stream, why in wrong.items():
            trouble = self._note(stream, why)
            if stream in missing:
                trouble.gone_since = now if trouble.gone_since is None else trouble.gone_since
        for stream in list(self.waiting):
            trouble = self._troubles[stream]
            if stream not in missing:
                trouble.gone_since = None
            if stream not in wrong and stream not in forbidden and not trouble.lost:
                if now >= trouble.pauses.until:
                    log.info("%s continues", stream)
                    del self.waiting[stream]
                    self.recovered.append(stream)
                else:
                    self._next = min(self._next, trouble.pauses.until)

    def _is_gone(self, state: State, stream: str) -> bool:
        """Whether the brokers' quorum says that a topic is gone, or all brokers that it has another id."""
        row = state.streams[stream]
        names = topics_of(stream)
        counts = row.partitions, row.partitions, 1
        try:
            return any(map(self.log.is_gone, names, counts, row.topic_ids or ("", "", "")))
        except LogError as error:
            log.warning("%s: it can't be asked whether its topics are gone: %s", stream, error)
            return False

    def _note_all(self, state: State, error: LogError) -> bool:
        """Let the streams of an error wait; False unless all its topics are streams' here."""
        topics = _streams(state)
        mine = {topics[topic] for topic in error.topics & topics.keys()}
        for stream in sorted(mine):
            trouble = self._note(stream, str(error))
            if isinstance(error, TopicGone) and error.lost and error.certain:
                trouble.lost = True
        return bool(mine) and error.topics <= topics.keys()

    def _note(self, stream: str, why: str) -> _Trouble:
        trouble = self._troubles.setdefault(stream, _Trouble(new_pauses(self.clock)))
        if stream not in self.waiting:
            trouble.pauses.begin()
            self._next = min(self._next, trouble.pauses.until)
            log.warning("%s waits: %s", stream, why)
        # Its quiet time begins again.
        trouble.pauses.until = max(trouble.pauses.until, self.clock.monotonic())
        self.waiting[stream] = why
        return trouble


def places_of(state: State, stream: str) -> list[TopicPartition]:
    """All partitions of a stream's topics."""
    *topics, history = topics_of(stream)
    numbers = range(state.streams[stream].partitions)
    return [TopicPartition(history, 0), *(TopicPartition(t, n) for t in topics for n in numbers)]


def _streams(state: State) -> dict[str, str]:
    """topic -> stream, of all streams that can be written to."""
    return {
        topic: stream
        for stream, row in state.streams.items()
        if row.state == ACTIVE
        for topic in topics_of(stream)
    }


# -- topics as brokers describe them ------------------------------------------------------------------


def new_pauses(clock: Clock) -> Backoff:
    """The pauses of a topic, or a stream, that fails."""
    return Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, clock, quiet_s=QUIET_S)


def refuses_data(error: LogError) -> bool:
    """Whether brokers refused records for their content."""
    return isinstance(error, LogRefused) and error.error in DATA_CODES


class Described(NamedTuple):
    """Topics as they are. ``forbidden``: those that may not be seen, and the reason."""

    found: dict[str, TopicInfo]
    forbidden: dict[str, str]


def describe(source: Log, witness: str, topics: Iterable[str]) -> Described | None:
    """The topics as brokers describe them; None if there is no answer that counts: one that has the witness."""
    left, forbidden = set(topics), dict[str, str]()
    while True:
        try:
            found = source.describe_topics([witness, *sorted(left)])
        except LogRefused as error:
            if not error.topics & left:
                log.warning("topics can't be checked now: %s", error)
                return None
            forbidden |= dict.fromkeys(error.topics & left, str(error))
            left -= error.topics
        except LogError as error:
            log.warning("topics can't be checked now: %s", error)
            return None
        else:
            if witness in found:
                return Described(found, forbidden)
            log.warning("topics can't be checked now: a broker does not know %s", witness)
            return None


def gone(topic: str, info: TopicInfo | None, partitions: int, topic_id: str) -> str:
    """The reason why a topic is not there, or is not the one that it was; empty: it is."""
    if info is None:
        return f"there is no topic {topic}"
    if topic_id and info.topic_id != topic_id:
        return f"topic {topic} is another one: it was deleted and created again"
    if info.partitions < partitions:
        return f"topic {topic} has only {info.partitions} partitions"
    return ""


def unwell(info: TopicInfo, partitions: int) -> str:
    """The reason why these partitions of a topic can't be written to; empty if none is known."""
    leaderless = [partition for partition in info.leaderless if partition < partitions]
    if leaderless:
        return f"{info.name}[{leaderless[0]}] has no leader"
    least = int(info.config.get(MIN_ISR, "1"))
    if 0 <= info.in_sync < least:
        return f"{info.name} has {info.in_sync} replicas in sync, {MIN_ISR} is {least}"
    # Brokers apply it to markers of native transactions, too: a round would never end.
    least = limits.LEAST_MESSAGE.value
    size = int(info.config.get(MAX_MESSAGE, least))
    if size < least:
        return f"{info.name} takes batches of {size:,} bytes only; set {MAX_MESSAGE} to {least} or more"
    return ""
