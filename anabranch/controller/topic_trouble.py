"""Topics in trouble: what waits for them, for how long, and which streams are given up.

One rule is for all kinds of trouble (`Kind`). A call that fails names the topics for which it failed
(`LogError.topics`). Then one of these *waits*: a stream with all its topics, one topic of a lane, or a job on
topics. Everything else continues. A pause begins when trouble begins, and after each try that fails; it grows while
tries keep failing. Streams and lanes continue once their pause is over and the brokers' metadata shows no fault. A
job is tried again once its pause is over.

The metadata shows that a topic is not found, or was replaced; that a partition has no leader; that too few replicas
are in sync; that a right is missing. An answer does not count unless it has the status topic, too.

To give up a stream can't be undone, so a stream is never given up without a lost topic. A topic is lost if,
throughout `Settings.lost_after_ms`, the brokers' quorum does not have it, or all brokers have another id for it. A
topic is lost at once if new events are placed below its old events, because all replicas in sync took the new
events. One broker's answer is not enough: that broker may have just started, or have lost its connections. If a
partition seems to end earlier than before, its stream waits, and is not given up: a former leader of the partition
may have answered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from anabranch.backoff import Backoff
from anabranch.core.decisions.lanes import is_blocked
from anabranch.core.decisions.turn import Settings
from anabranch.core.state import State
from anabranch.core.stream_settings import MAX_MESSAGE, MIN_ISR
from anabranch.core.stream_states import ACTIVE
from anabranch.errors import chain_of, count_of
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
from anabranch.protocol import limits
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.topics.creation import stream_problems
from anabranch.topics.names import commands_topic, replies_topic, status_topic, topics_of

log = logging.getLogger("anabranch.controller")

# Codes by which a broker refuses records; 18 is RECORD_LIST_TOO_LARGE, 43 is UNSUPPORTED_FOR_MESSAGE_FORMAT. By
# any other code it refuses the topic.
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
LOOK_S = 1.0  # seconds between two checks of what waits
FRESH_S = 1.0  # how old the last check of a stream may be when a staged merge to it begins

# A stream, a topic of a lane, or a job (`jobs`) on the topics of a stream, or on one topic (truncation), waits.
Kind = Literal["stream", "lane", "topics", "growth", "truncation"]
JOBS: tuple[Kind, ...] = ("topics", "growth", "truncation")
_Key = tuple[Kind, str]


@dataclass(slots=True)
class _Trouble:
    """The trouble of a stream, a lane's topic or a job. Times are monotonic seconds.

    ``pauses``: the pauses before it is tried again. The other fields are of streams only. ``gone_since``: since
    when each check has missed one of its topics. ``lost``: waiting won't help. ``refused``: brokers refused its
    data for its content, so a topic's setting may be wrong.
    """

    pauses: Backoff
    gone_since: float | None = None
    lost: bool = False
    refused: bool = False


class _Watched(NamedTuple):
    """A topic whose metadata is checked. ``partitions``: the least number. ``topic_id``: empty: any id is right."""

    key: _Key
    name: str
    partitions: int
    topic_id: str
    led: Sequence[int] = ()  # partitions of a lane's topic that need a leader

    def wrong(self, info: TopicInfo) -> str:
        """The reason why a topic that is there can't be used; empty if none is known."""
        if self.key[0] == "stream":
            return unwell(info, self.partitions)
        return leaderless(info, self.led)


@dataclass(slots=True)
class TopicTrouble:
    """Everything that waits for its topics.

    ``reasons``: kind -> name -> why it waits. The intake and decisions see the reasons of streams (`waiting`).
    ``_hints``: failures that ended a leadership; the next leadership checks the topics that they name.
    ``recovered``: streams that continue after trouble, to be checked for lost markers.
    """

    log: Log
    clock: Clock
    settings: Settings
    reasons: dict[Kind, dict[str, str]] = field(
        default_factory=lambda: {kind: {} for kind in get_args(Kind)}
    )
    recovered: list[str] = field(default_factory=list)
    _troubles: dict[_Key, _Trouble] = field(default_factory=dict)
    _hints: list[LogError] = field(default_factory=list)
    # Stream -> when it was checked, if that was after the last failure.
    _seen: dict[str, float] = field(default_factory=dict)
    _next: float = 0.0
    _looked: float = 0.0  # when the last answer came that counts

    @property
    def witness(self) -> str:
        """A topic that exists as long as there is a leader: answers of brokers that lack it don't count."""
        return status_topic(self.settings.prefix)

    @property
    def waiting(self) -> dict[str, str]:
        """Why each stream waits."""
        return self.reasons["stream"]

    # -- one rule for all kinds -----------------------------------------------------------------------

    def note(self, kind: Kind, name: str, why: str, *, looked: bool = False) -> _Trouble:
        """Let something wait, because a try failed, or because a check of metadata (``looked``) found a fault."""
        trouble = self._of(kind, name)
        new = name not in self.reasons[kind]
        if new or (not looked and trouble.pauses.is_over):
            trouble.pauses.begin()
        else:  # its quiet time begins again
            trouble.pauses.until = max(trouble.pauses.until, self.clock.monotonic())
        if new:
            log.warning("%s %s waits: %s", kind, name, why, extra={kind: name})
        self._next = min(self._next, trouble.pauses.until)
        self.reasons[kind][name] = why
        return trouble

    def failed(self, kind: Kind, name: str, error: Exception) -> int:
        """Note that a job failed. Returns how often in a row it has failed."""
        if not isinstance(error, LogError):
            log.error(
                "a defect in work on topics (%s of %s)",
                kind,
                name,
                exc_info=error,
                extra={kind: name},
            )
        return self.note(kind, name, str(error)).pauses.count

    def is_pausing(self, kind: Kind, name: str) -> bool:
        """Whether a job waits, and its pause is not over."""
        return name in self.reasons[kind] and not self._troubles[kind, name].pauses.is_over

    def end(self, kind: Kind, name: str) -> None:
        """Note that a job succeeded, or is not wanted any more."""
        self.reasons[kind].pop(name, None)
        self._troubles.pop((kind, name), None)

    def of_lane(self, lane: str) -> str:
        """The reason why a lane waits; empty if it does not."""
        prefix, waiting = self.settings.prefix, self.reasons["lane"]
        names = commands_topic(prefix, lane), replies_topic(prefix, lane)
        return "; ".join(waiting[name] for name in names if name in waiting)

    def forget_stream(self, stream: str) -> None:
        """Drop a stream: its loss, or its forgetting, is on the log."""
        for kind in ("stream", "topics", "growth"):
            self.end(kind, stream)
        for topic in topics_of(stream):
            self.end("truncation", topic)

    def _of(self, kind: Kind, name: str) -> _Trouble:
        pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, self.clock, quiet_s=QUIET_S)
        return self._troubles.setdefault((kind, name), _Trouble(pauses))

    # -- streams --------------------------------------------------------------------------------------

    @property
    def suspects(self) -> bool:
        """Whether a stream waits, or the last leadership ended because of topics."""
        return bool(self.waiting or self._hints)

    def hint(self, error: LogError) -> None:
        """Keep a failure that ends the leadership for the next leadership: the last failure of each set of topics.

        Tracebacks are dropped, because they would keep the whole state in memory.
        """
        for each in chain_of(error):
            each.__traceback__ = None
        if error.topics:
            self._hints = [hint for hint in self._hints if hint.topics != error.topics]
            self._hints.append(error)

    def begin(self, state: State) -> None:
        """Begin a leadership. Streams and lanes that waited wait until a check finds no fault. Jobs begin again.

        Lanes' topics with known ids are checked, so that another topic of the same name is never read or written.
        """
        active = {stream for stream, row in state.streams.items() if row.state == ACTIVE}
        for stream in self.waiting.keys() - active:
            del self.waiting[stream]
        for kind in JOBS:
            for name in list(self.reasons[kind]):
                self.end(kind, name)
        self._seen.clear()
        for trouble in self._troubles.values():
            trouble.gone_since = None
            trouble.lost = False
        hints, self._hints = self._hints, []
        for error in hints:
            self._note_all(state, error)
        lanes = [topic for topic in self._lane_topics(state) if topic.topic_id]
        if lanes or hints or self.waiting or self.reasons["lane"]:
            self.look(state, lanes=lanes)

    def find(self, state: State, *errors: LogError) -> bool:
        """Let the streams that these errors name wait. False: an error names topics of no stream, or no topic."""
        self._seen.clear()
        mine = [self._note_all(state, error) for error in errors]
        if not all(isinstance(error, TopicGone) and error.lost for error in errors):
            self.look(state)
        return all(mine)

    def check(self, state: State, streams: Sequence[str], reserved: Sequence[str] = ()) -> None:
        """Check streams' topics before a round writes to them, unless they were checked since the last failure.

        A native transaction that meets too few replicas in sync keeps its transactional id busy until the replicas
        are back. Because of this check, a dead broker costs one id, and not one id for each of its streams.

        ``reserved``: streams in which a staged merge begins, which delays other merges: for these the check must be
        recent.

        Raises: LogUnavailable: some of the streams wait.
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
        """Find the journals' ends. Streams whose brokers don't answer wait. ``find_ends``: `Intake.find_ends`."""
        while failed := find_ends(state):
            known = len(self.waiting)
            if not self.find(state, *failed) or len(self.waiting) == known:
                raise failed[0]

    def given_up(self, state: State, after_s: float) -> list[tuple[str, str]]:
        """Check the topics of everything that waits, if a check is due. Returns (stream, why) of lost streams."""
        now = self.clock.monotonic()
        if (self.waiting or self.reasons["lane"]) and now >= self._next:
            self.look(state)
        found = []
        for stream, why in sorted(self.waiting.items()):
            trouble = self._troubles["stream", stream]
            since = trouble.gone_since
            if trouble.lost or (since is not None and self._looked - since >= after_s):
                if trouble.lost or self._is_gone(state, stream):
                    found.append((stream, why))
                else:
                    trouble.gone_since = now
        return found

    def may_be_refused(self, state: State, streams: Collection[str]) -> bool:
        """Whether the data that brokers refused may be the cause.

        False: a topic's setting is wrong. Then the stream waits: its data was acknowledged, and is not given up.
        """
        for stream in streams:
            self._of("stream", stream).refused = True
        self.look(state, streams)
        return not any(stream in self.waiting for stream in streams)

    def look(
        self, state: State, also: Container[str] = (), *, lanes: Iterable[_Watched] = ()
    ) -> None:
        """Check the topics of streams and lanes that wait, of the streams ``also``, and the topics ``lanes``."""
        now = self.clock.monotonic()
        self._next = now + LOOK_S
        waiting = self.reasons["lane"]
        watched = [
            *_stream_topics(state, lambda stream: stream in self.waiting or stream in also),
            *dict.fromkeys([*lanes, *(x for x in self._lane_topics(state) if x.name in waiting)]),
        ]
        described = describe(self.log, self.witness, [topic.name for topic in watched])
        if described is None:
            for topic in lanes:  # they may have been replaced
                self.note(*topic.key, "it can't be checked now", looked=True)
            return
        self._looked = now
        wrong, missing = _judge(watched, described)
        for key in dict.fromkeys(topic.key for topic in watched):
            known = self._troubles.get(key)
            if key not in wrong and known is not None and known.refused:
                stream = key[1]
                bad = stream_problems(stream, described.found, state.streams[stream].partitions)
                wrong |= {key: "; ".join(bad)} if bad else {}
        for key, why in sorted(wrong.items()):
            trouble = self.note(*key, why, looked=True)
            if key in missing and trouble.gone_since is None:
                trouble.gone_since = now
        self._go_on(wrong, missing, now)

    def _go_on(self, wrong: Container[_Key], missing: Container[_Key], now: float) -> None:
        """Let everything that waited continue if its pause is over and no fault of it is known."""
        keys: list[_Key] = [("stream", name) for name in self.waiting]
        keys += [("lane", name) for name in self.reasons["lane"]]
        for key in keys:
            trouble = self._troubles[key]
            if key not in missing:
                trouble.gone_since = None
            if key in wrong or trouble.lost:
                continue
            if now < trouble.pauses.until:
                self._next = min(self._next, trouble.pauses.until)
                continue
            kind, name = key
            log.info("%s %s continues", kind, name, extra={kind: name})
            del self.reasons[kind][name]
            if kind == "stream":
                self.recovered.append(name)

    def _is_gone(self, state: State, stream: str) -> bool:
        """Whether the brokers' quorum has no such topic any more, or all brokers have another id for a topic."""
        row = state.streams[stream]
        names = topics_of(stream)
        counts = row.partitions, row.partitions, 1
        try:
            return any(map(self.log.is_gone, names, counts, row.topic_ids or ("", "", "")))
        except LogError as error:
            log.warning(
                "%s: it can't be asked whether its topics are gone: %s",
                stream,
                error,
                extra={"stream": stream},
            )
            return False

    def _note_all(self, state: State, error: LogError) -> bool:
        """Let the streams of an error wait. True if it names topics, and all of them belong to streams here."""
        topics = _streams(state)
        mine = {topics[topic] for topic in error.topics & topics.keys()}
        for stream in sorted(mine):
            trouble = self.note("stream", stream, str(error))
            if isinstance(error, TopicGone) and error.lost and error.certain:
                trouble.lost = True
        return bool(mine) and error.topics <= topics.keys()

    # -- lanes ----------------------------------------------------------------------------------------

    def _lane_topics(self, state: State) -> Iterator[_Watched]:
        """The topics of all lanes, except the command topics of blocked lanes."""
        settings = self.settings
        own = settings.control_partition
        for lane in {OPEN_LANE, ADMIN_LANE, *state.lanes}:
            row = state.lanes.get(lane)
            ids = row.topic_ids if row is not None and len(row.topic_ids) == 2 else ("", "")
            commands = commands_topic(settings.prefix, lane)
            if not is_blocked(state, lane):
                yield _Watched(("lane", commands), commands, own + 1, ids[0], (own,))
            replies = replies_topic(settings.prefix, lane)
            count = settings.reply_partitions if lane == OPEN_LANE else 1
            yield _Watched(("lane", replies), replies, count, ids[1], range(count))


def places_of(state: State, stream: str) -> list[TopicPartition]:
    """All partitions of a stream's topics."""
    *topics, history = topics_of(stream)
    numbers = range(state.streams[stream].partitions)
    return [TopicPartition(history, 0), *(TopicPartition(t, n) for t in topics for n in numbers)]


def _streams(state: State) -> dict[str, str]:
    """Topic -> stream, for all streams that can be written to."""
    return {
        topic: stream
        for stream, row in state.streams.items()
        if row.state == ACTIVE
        for topic in topics_of(stream)
    }


def _stream_topics(state: State, chosen: Callable[[str], bool]) -> Iterator[_Watched]:
    """The topics of the chosen streams that can be written to."""
    for stream, row in state.streams.items():
        if row.state == ACTIVE and chosen(stream):
            counts = row.partitions, row.partitions, 1
            ids = row.topic_ids or ("", "", "")
            for topic, count, topic_id in zip(topics_of(stream), counts, ids, strict=True):
                yield _Watched(("stream", stream), topic, count, topic_id)


def _judge(
    watched: Sequence[_Watched], described: Described
) -> tuple[dict[_Key, str], Container[_Key]]:
    """The fault of each stream or lane topic, and which of them miss a topic. A missing right counts first."""
    wrong: dict[_Key, str] = {}
    forbidden = {topic.key for topic in watched if topic.name in described.forbidden}
    missing: set[_Key] = set()
    for topic in watched:
        info = described.found.get(topic.name)
        if topic.key in forbidden:
            wrong[topic.key] = described.forbidden.get(topic.name) or wrong.get(topic.key, "")
        elif why := gone(topic.name, info, topic.partitions, topic.topic_id):
            missing.add(topic.key)
            wrong[topic.key] = why
        elif info is not None and topic.key not in missing and (why := topic.wrong(info)):
            wrong[topic.key] = why
    return wrong, missing


# -- topics as brokers describe them ------------------------------------------------------------------


def refuses_data(error: LogError) -> bool:
    """Whether brokers refused records for their content."""
    return isinstance(error, LogRefused) and error.error in DATA_CODES


class Described(NamedTuple):
    """Topics as they are. ``forbidden``: those that may not be seen, and the reason."""

    found: dict[str, TopicInfo]
    forbidden: dict[str, str]


def describe(source: Log, witness: str, topics: Iterable[str]) -> Described | None:
    """The topics as brokers describe them; None if no answer has the witness, because such answers don't count."""
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
    """The reason why a topic is missing, or is not the same topic as before; empty if it is there."""
    if info is None:
        return f"there is no topic {topic}"
    if topic_id and info.topic_id != topic_id:
        return f"topic {topic} is another one: it was deleted and created again"
    if info.partitions < partitions:
        return f"topic {topic} has only {count_of(info.partitions, 'partition')}"
    return ""


def leaderless(info: TopicInfo, partitions: Sequence[int]) -> str:
    """The reason why these partitions of a topic can't be asked now; empty if all have a leader."""
    lacking = [partition for partition in info.leaderless if partition in partitions]
    return f"{info.name}[{lacking[0]}] has no leader" if lacking else ""


def unwell(info: TopicInfo, partitions: int) -> str:
    """The reason why these partitions of a topic can't be written to; empty if none is known."""
    if why := leaderless(info, range(partitions)):
        return why
    least = int(info.config.get(MIN_ISR, "1"))
    if 0 <= info.in_sync < least:
        return f"{info.name} has {count_of(info.in_sync, 'replica')} in sync, {MIN_ISR} is {least}"
    # Brokers apply this limit to markers of native transactions, too, so a round would never end.
    least = limits.LEAST_MESSAGE.value
    size = int(info.config.get(MAX_MESSAGE, least))
    if size < least:
        return f"{info.name} takes batches of {size:,} bytes only; set {MAX_MESSAGE} to {least} or more"
    return ""
