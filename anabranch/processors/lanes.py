"""The queues of all lanes' commands, what each lane may cost the leader, and replies that wait.

Each lane is first in, first out. Lanes take turns, and the one that was charged least comes first. Each has its
share of the memory and of the leader's time, so if a lane is flooded, only its own commands wait. Positions in the
lanes (`Lanes.positions`) are logged in the round that decides the commands before them.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import NamedTuple

from anabranch.backoff import Backoff
from anabranch.core import hybrid_time, limits, work
from anabranch.core.decisions.lanes import is_blocked, position_of
from anabranch.core.decisions.quotas import quota
from anabranch.core.decisions.turn import AT_END, Settings
from anabranch.core.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.core.memory import LaneSeen
from anabranch.core.round import Answer, Round
from anabranch.core.state import State
from anabranch.ports import Clock, Log, LogError, TopicInfo, TopicPartition
from anabranch.processors.command import Command, weight_of
from anabranch.processors.durability import answers_of
from anabranch.processors.topic_trouble import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    describe,
    gone,
    new_pauses,
    refuses_data,
)
from anabranch.schemas.records import LaneRow, Outcome
from anabranch.topics.names import commands_topic, replies_topic, status_topic

log = logging.getLogger("anabranch.controller")

SHARES = 20  # after a wait, work resumes once 1/20 of a second's units is there
UNSENT_PAUSE_S = 0.01
QUANTUM = 1_000  # units of work in a turn of a lane; the most in a round with other lanes
_LANE = attrgetter("lane")


@dataclass(slots=True)
class Lane(LaneSeen):
    """A lane that is not blocked, and its queued commands.

    ``at``: the next offset to fetch; `AT_END`: the lane starts at its end, which is not found yet. ``unlogged``:
    ``at`` is that end, but no round has logged it. ``asked_end``: the lane's end as of ``asked_ms``.
    ``decided_ms``: the time of an earlier such question, whose end is decided. ``waits``: how many times in a row
    its next batch, beyond its share, found no room because other lanes used it.
    """

    name: str = field(kw_only=True)
    place: TopicPartition = field(kw_only=True)
    meter: Meter = field(kw_only=True)
    at: int = 0
    queue: list[Command] = field(default_factory=list)
    size: int = 0  # bytes queued
    unlogged: bool = False
    asked_ms: int = -1
    asked_end: int = 0
    decided_ms: int = -1
    waits: int = 0

    @property
    def wait_s(self) -> float:
        """Seconds until the lane's quota permits its next command."""
        return self.meter.wait_s(work.forecast(self.size, len(self.queue)))

    def usage(self) -> Mapping[str, int]:
        return {"work": self.meter.used, "debt": self.meter.debt, "journals": self.meter.drawn}

    def give_back(self, most: int) -> None:
        """Drop the last commands until at most ``most`` bytes are queued. They are fetched again later."""
        while self.size > most:
            command = self.queue.pop()
            self.size, self.at = self.size - command.weight, command.offset

    def after(self, count: int) -> int:
        """The lane's position once the first ``count`` commands of its queue are decided."""
        return self.queue[count].offset if count < len(self.queue) else self.at


@dataclass(slots=True)
class Lanes:
    """The lanes that are not blocked, and the messages from other controllers (``control``), which come first."""

    trouble: LaneTrouble
    on: dict[str, Lane] = field(default_factory=dict)
    control: list[Command] = field(default_factory=list)
    _by_place: dict[TopicPartition, Lane] = field(default_factory=dict)
    _rows: Mapping[str, LaneRow] = field(default_factory=dict)
    _waited: bool = False  # whether some lane's trouble was reported
    commit_wait: CommitWaitQueue = field(init=False)

    def __post_init__(self) -> None:
        self.commit_wait = CommitWaitQueue(self.trouble)

    # -- the set of lanes -----------------------------------------------------------------------------

    def begin(self, state: State) -> None:
        """Start from the positions in the state that the leader has read."""
        self.on.clear()
        self.control.clear()
        self.trouble.begin(state)
        self._renew(state)

    def follow(self, state: State) -> dict[str, int]:
        """Follow the lanes' rows, and send what is due.

        Returns the positions at which lanes start. Log them (`core.decisions.lanes.resume`), then call `go_on`.
        """
        resumes = AT_END in state.lane_positions.values() and self._resumes(state)
        if resumes or state.lanes != self._rows:
            self._renew(state)
        for lane in self.on.values():
            if lane.queue:
                lane.meter.fill()
        self.commit_wait.send_due()
        self.trouble.send()
        if self.trouble.waiting or self._waited:
            self.trouble.look(state)
            self._waited = bool(self.trouble.waiting)
            for lane in self.on.values():
                lane.trouble = self.trouble.of(lane.name)
        found = self._find_ends() if resumes else {}
        if self.trouble.settings.lanes_only and state.lane_positions.get(OPEN_LANE) != AT_END:
            found[OPEN_LANE] = AT_END  # a later leader that serves it must not decide the backlog
        return found

    def _names(self, state: State) -> list[str]:
        """The lanes to read."""
        left_out = (OPEN_LANE,) if self.trouble.settings.lanes_only else ()
        names = dict.fromkeys((OPEN_LANE, ADMIN_LANE, *state.lanes))
        return [name for name in names if name not in left_out and not is_blocked(state, name)]

    def _resumes(self, state: State) -> bool:
        return any(state.lane_positions.get(name) == AT_END for name in self._names(state))

    def _renew(self, state: State) -> None:
        self._rows = dict(state.lanes)
        former = dict(self.on)
        self.on.clear()  # the same dict: decisions have a reference to it
        for name in self._names(state):
            at, lane = position_of(state, name), former.get(name)
            if lane is None or (at == AT_END and not lane.unlogged):
                topic = commands_topic(self.trouble.settings.prefix, name)
                place = TopicPartition(topic, self.trouble.settings.control_partition)
                lane = Lane(name=name, place=place, meter=Meter(self.trouble.clock), at=at)
            lane.meter.set_rate(quota(state, name, "work") or 0)
            self.on[name] = lane
        self._by_place = {lane.place: lane for lane in self.on.values()}

    @property
    def wait_s(self) -> float:
        """Seconds until a waiting lane or reply can continue."""
        late = [x.wait_s for x in self.on.values() if x.meter.rate and (x.queue or x.meter.debt)]
        return min(
            [
                self.trouble.wait_s,
                self.commit_wait.wait_s,
                *(max(0.001, seconds) for seconds in late),
            ]
        )

    def _find_ends(self) -> dict[str, int]:
        places = [one.place for one in self.on.values() if one.at == AT_END and self._readable(one)]
        for place, end in self._ends(places).items() if places else ():
            lane = self._by_place[place]
            lane.at, lane.unlogged = end, True
        return {lane.name: lane.at for lane in self.on.values() if lane.unlogged}

    def _ends(self, places: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        failed: dict[TopicPartition, LogError] = {}
        ends = self.trouble.log.end_offsets(places, committed=False, failed=failed)
        for place, error in failed.items():
            self.trouble.note(place.topic, str(error))
        return ends

    def go_on(self, logged: Mapping[str, int]) -> None:
        """Start to read the lanes whose positions are logged now."""
        for name in logged.keys() & self.on.keys():
            self.on[name].unlogged = False

    # -- in -------------------------------------------------------------------------------------------

    def _readable(self, lane: Lane) -> bool:
        return not lane.unlogged and lane.place.topic not in self.trouble.waiting

    @property
    def share(self) -> int:
        """About how many bytes each lane may queue."""
        return limits.QUEUED.value // max(1, len(self.on))

    @property
    def room(self) -> int:
        """The bytes that all lanes together may still queue.

        Memory has to be limited here, since clients write commands, and a small batch may decompress to a big one.
        """
        return limits.QUEUED.value - sum([lane.size for lane in self.on.values()])

    def wanted(self) -> dict[TopicPartition, int]:
        """The positions to fetch from, for the lanes that have room."""
        lanes = self.on.values()
        full = self.room < 0
        for lane in lanes if full and any(one.waits for one in lanes) else ():
            if lane.meter.rate:  # without a quota, its queue is decided soon
                lane.give_back(self.share)
        room, waiting = self.share // 2, self.trouble.waiting
        return {
            lane.place: lane.at
            for lane in lanes
            if lane.size <= room
            and not lane.meter.debt  # none of its commands may be decided now
            and not (full and lane.waits)  # its next batch is too big for the room left
            and lane.at != AT_END
            and not lane.unlogged
            and lane.place.topic not in waiting
        }

    def among(self, places: Collection[TopicPartition]) -> list[Lane]:
        """The lanes of these partitions. Those that found no room most often come first."""
        found = [lane for lane in self.on.values() if lane.place in places]
        return sorted(found, key=lambda lane: -lane.waits)

    def has(self, place: TopicPartition) -> bool:
        """Whether this partition has a lane's commands."""
        return place in self._by_place

    def move(self, place: TopicPartition, at: int) -> None:
        """Continue at this offset, because retention has deleted the records before it."""
        self._by_place[place].at = at

    def add(self, lane: Lane, commands: Sequence[Command]) -> None:
        """Queue a lane's next commands."""
        if not lane.queue:
            lane.meter.fill()
            waiting = [one.meter for one in self.on.values() if one.queue]
            lane.meter.join(waiting, [one.meter for one in self.on.values()])
        lane.queue += commands
        lane.size += weight_of(commands)

    # -- out ------------------------------------------------------------------------------------------

    @property
    def active(self) -> list[Lane]:
        """The lanes with commands that may be decided now."""
        return [lane for lane in self.on.values() if lane.queue and lane.wait_s <= 0]

    def next(self, most: int, among: Sequence[Lane]) -> list[Command]:
        """Up to ``most`` commands of these lanes, in turns. They stay queued until `passed` is called."""
        if len(among) < 2:
            return among[0].queue[:most] if among else []
        turns = [(lane.meter.served, i, 0) for i, lane in enumerate(among)]
        heapify(turns)
        batch: list[Command] = []
        size = 0
        while turns and len(batch) < most and size <= limits.ROUND.value:
            served, i, at = heappop(turns)
            queue, end = among[i].queue, served + QUANTUM
            while at < len(queue) and served < end and len(batch) < most:
                command = queue[at]
                served += work.forecast(command.weight)
                size += command.weight
                batch.append(command)
                at += 1
            if at < len(queue):
                heappush(turns, (served, i, at))
        return batch

    def allowed(self, batch: Sequence[Command]) -> dict[str, float]:
        """The units that each lane of a batch may be charged in its round. Other commands wait for later rounds.

        The quota limits them; if other lanes are in the round, so does `QUANTUM`. A lane's last command may exceed
        them.
        """
        names = set(map(_LANE, batch)) if batch and not batch[0].control else ()
        most = QUANTUM if len(names) > 1 else math.inf
        meters = {name: self.on[name].meter for name in names}
        return {n: min(most, max(1, m.left)) if m.rate else most for n, m in meters.items()}

    def positions(self, batch: Sequence[Command]) -> dict[str, int]:
        """Each lane's position once this batch is decided. Its commands are the first of their lanes' queues."""
        counts = _counts(batch)
        return {
            name: lane.after(counts.get(name, 0))
            for name, lane in self.on.items()
            if lane.at != AT_END
        }

    def passed(self, batch: Sequence[Command]) -> None:
        """Remove the commands of a decided batch, and charge their lanes."""
        if batch and batch[0].control:
            del self.control[: len(batch)]
        for name, count in _counts(batch).items():
            lane = self.on.get(name)
            if lane is None:
                continue
            decided = lane.queue[:count]
            lane.meter.charge(sum([command.charge for command in decided]))
            lane.size -= weight_of(decided)
            del lane.queue[:count]

    def charge(self, owed: Mapping[str, int]) -> None:
        """Charge lanes for work other than their commands."""
        for name in owed.keys() & self.on.keys():
            self.on[name].meter.charge(owed[name])

    # -- silence --------------------------------------------------------------------------------------

    def ask(self, names: Collection[str], now_ms: int) -> None:
        """Ask for these lanes' ends as of now, except where commands before the last such end are undecided."""
        if not names:
            return
        places = []
        for lane in [lane for lane in self.on.values() if lane.name in names]:
            readable = self._readable(lane)
            lane.well_ms = now_ms if readable else lane.well_ms
            if lane.at != AT_END and lane.after(0) >= lane.asked_end:
                lane.decided_ms = lane.asked_ms
                places += [lane.place] if readable else []
        for place, end in self._ends(places).items() if places else ():
            lane = self._by_place[place]
            lane.asked_ms, lane.asked_end = now_ms, end

    def judge(self, batch: Sequence[Command]) -> None:
        """Set for decisions up to what time each lane is read, once this batch is decided."""
        for name, at in self.positions(batch).items():
            lane = self.on[name]
            lane.read_ms = lane.asked_ms if at >= lane.asked_end else lane.decided_ms


def _counts(batch: Sequence[Command]) -> Mapping[str, int]:
    """How many commands of each lane a batch has."""
    if not batch or batch[0].control:
        return {}
    return Counter(map(_LANE, batch)) if len(batch) > 1 else {batch[0].lane: 1}


# -- replies that wait for clocks ---------------------------------------------------------------------


@dataclass(slots=True)
class CommitWaitQueue:
    """Sends replies, and delays those in commit wait until every clock is past their commit timestamp.

    Waiting replies belong to committed rounds, so they stay true however late they are sent. If the process ends,
    they are lost: their clients ask again, and the next leader delays the reply for the rest of the time.
    """

    trouble: LaneTrouble
    _held: list[tuple[int, int, Answer, int]] = field(default_factory=list)
    _count: int = 0

    def sending(
        self, round_: Round, time: int
    ) -> Callable[[Iterable[tuple[TopicPartition, bytes]]], None]:
        """Remove the replies that have to wait from a round. Returns what sends the others after the commit.

        The returned function also queues the replies that wait. ``time``: the hybrid time of the round.
        """
        held: list[Answer] = []
        if any(to.held for to, _ in round_.replies):
            now_us = self._now_us()
            held = [answer for answer in round_.replies if self._due_us(answer) > now_us]
            round_.replies = [answer for answer in round_.replies if self._due_us(answer) <= now_us]

        def send(answers: Iterable[tuple[TopicPartition, bytes]]) -> None:
            self.trouble.send(answers)
            for answer in held:
                self._count += 1
                heappush(self._held, (self._due_us(answer), self._count, answer, time))

        return send

    def _due_us(self, answer: Answer) -> int:
        to, result = answer
        if not to.held or not isinstance(result, Outcome) or not result.commit_timestamp:
            return 0
        # Both clocks may be off by the error, so another one may be slower than this one by twice the error.
        error_us = 1000 * (self.trouble.settings.clock_error_ms or 0)
        return hybrid_time.to_us(result.commit_timestamp) + 1 + 2 * error_us

    def send_due(self) -> None:
        """Send the replies that have waited long enough."""
        now_us = self._now_us()
        while self._held and self._held[0][0] <= now_us:
            _, _, answer, time = heappop(self._held)
            prefix = self.trouble.settings.prefix
            self.trouble.send(answers_of(prefix, [answer], time, now_us // 1000))

    @property
    def wait_s(self) -> float:
        """Seconds until the next reply is due."""
        return (self._held[0][0] - self._now_us()) / 1e6 if self._held else float("inf")

    def _now_us(self) -> int:
        return int(self.trouble.clock.wall() * 1_000_000)


# -- lanes in trouble ---------------------------------------------------------------------------------


class _Topic(NamedTuple):
    """A topic of a lane. ``partitions``: how many it needs at least. ``topic_id``: its id; empty: any."""

    name: str
    commands: bool
    partitions: int
    topic_id: str


@dataclass(slots=True)
class LaneTrouble:
    """Lanes whose topics fail. Such a lane waits; all others are served.

    A failing commands topic is not fetched. Replies to a failing topic are not sent, and their clients ask again.
    A topic is used again once its pause is over and the brokers' metadata shows no trouble; the pause grows while
    it keeps failing. A topic whose id differs from the one in the lane's row is never read or written. The rule is
    the same for `open` and `admin`.

    ``waiting``: topic -> why it is not read or written. ``unsent``: some replies are not sent yet.
    """

    log: Log
    clock: Clock
    settings: Settings
    waiting: dict[str, str] = field(default_factory=dict)
    unsent: bool = False
    _pauses: dict[str, Backoff] = field(default_factory=dict)  # by topic

    def begin(self, state: State) -> None:
        """Check the topics with known ids, and those that wait: a new leader calls this."""
        topics = self._topics(state)
        known = [topic for topic in topics.values() if topic.topic_id]
        self._look([*known, *(topics[name] for name in self.waiting if name in topics)])

    def of(self, lane: str) -> str:
        """The reason why a lane waits; empty if it does not."""
        prefix = self.settings.prefix
        names = commands_topic(prefix, lane), replies_topic(prefix, lane)
        return "; ".join(self.waiting[name] for name in names if name in self.waiting)

    @property
    def wait_s(self) -> float:
        """How many seconds the leader's loop may wait."""
        if self.unsent:
            return UNSENT_PAUSE_S
        return FIRST_PAUSE_S if self.waiting else LONGEST_PAUSE_S

    def send(self, answers: Iterable[tuple[TopicPartition, bytes]] = ()) -> None:
        """Send replies, except to waiting topics, and take in the errors of earlier ones."""
        failed: dict[TopicPartition, LogError] = {}
        heard = [answer for answer in answers if answer[0].topic not in self.waiting]
        self.unsent = self.log.send(heard, failed)
        for place, error in failed.items():
            if refuses_data(error):
                log.warning("an answer is lost: %s", error)  # the lane itself is well
            else:
                self.note(place.topic, str(error))

    def note(self, topic: str, why: str, *, looked: bool = False) -> None:
        """Let a topic wait. If a check (``looked``) found that it still fails, its next pause is longer."""
        known = topic in self.waiting
        if looked or not known:
            self._pauses.setdefault(topic, new_pauses(self.clock)).begin()
        if not known:
            log.warning("%s waits: %s", topic, why)
        self.waiting[topic] = why

    def look(self, state: State) -> None:
        """Check the topics whose pause is over."""
        if not self.waiting:
            return
        topics = self._topics(state)
        for name in self.waiting.keys() - topics.keys():
            del self.waiting[name]
        self._look([topics[name] for name in sorted(self.waiting) if self._pauses[name].is_over])

    def _look(self, topics: Iterable[_Topic]) -> None:
        wanted = {topic.name: topic for topic in topics}
        if not wanted:
            return
        described = describe(self.log, status_topic(self.settings.prefix), wanted)
        for name, topic in wanted.items():
            if described is None:
                why = "it can't be checked now"
            elif name in described.forbidden:
                why = described.forbidden[name]
            else:
                why = self._wrong(topic, described.found.get(name))
            if why:
                self.note(name, why, looked=True)
            elif self.waiting.pop(name, ""):
                log.info("%s continues", name)

    def _wrong(self, topic: _Topic, info: TopicInfo | None) -> str:
        why = gone(topic.name, info, topic.partitions, topic.topic_id)
        if why or info is None:
            return why
        mine = (self.settings.control_partition,) if topic.commands else range(topic.partitions)
        lacking = [partition for partition in mine if partition in info.leaderless]
        return f"{topic.name}[{lacking[0]}] has no leader" if lacking else ""

    def _topics(self, state: State) -> dict[str, _Topic]:
        """The topics of all lanes by name, except the command topics of blocked lanes."""
        found = {}
        for lane in {OPEN_LANE, ADMIN_LANE, *state.lanes}:
            row = state.lanes.get(lane)
            ids = row.topic_ids if row is not None and len(row.topic_ids) == 2 else ("", "")
            commands = commands_topic(self.settings.prefix, lane)
            if not is_blocked(state, lane):
                least = self.settings.control_partition + 1
                found[commands] = _Topic(commands, True, least, ids[0])
            replies = replies_topic(self.settings.prefix, lane)
            least = self.settings.reply_partitions if lane == OPEN_LANE else 1
            found[replies] = _Topic(replies, False, least, ids[1])
        return found


# -- accounting of work -------------------------------------------------------------------------------


@dataclass(slots=True)
class Meter:
    """The account of a lane, or of a stream's journals: the work it may cause, and has caused (`core.work`).

    ``rate``: units a second; 0: no limit. ``left``: the units that may be charged now, at most a second's worth. A
    charge may exceed it: ``left`` is then negative, a debt, and the lane or stream waits until time has made up for
    it. ``used``: all units charged. ``served``: the same, adjusted for turns (see `join`). ``drawn``: all units
    that the journals of a lane's streams cost.
    """

    clock: Clock
    rate: int = 0
    left: float = 0.0
    used: int = 0
    served: int = 0
    drawn: int = 0
    _lent: float = 0.0  # units that journals drew beyond `spare`: repaid before they draw again
    _filled: float = 0.0  # when `fill` was called last, monotonic seconds

    def set_rate(self, rate: int) -> None:
        """Set the rate. If there was none before, begin with a second's worth."""
        if not self.rate:
            self.left, self._filled = float(rate), self.clock.monotonic()
        self.rate = rate

    def fill(self) -> None:
        """Add to ``left`` what the time since the last call is worth."""
        if self.rate:
            now = self.clock.monotonic()
            self.left = min(self.rate, self.left + (now - self._filled) * self.rate)
            self._filled = now
            paid = max(0.0, min(self._lent, self.left - self.rate / 2))
            self.left, self._lent = self.left - paid, self._lent - paid

    def charge(self, units: int, *, free: bool = False) -> None:
        """Charge units. ``free``: only count them, because no other lane needs the leader."""
        self.fill()
        self.used += units
        self.served += units
        if self.rate and not free:
            self.left -= units

    @property
    def spare(self) -> float:
        """The units that journals may draw. Half a second's worth is reserved for the lane's commands."""
        self.fill()
        return max(0.0, self.left - self.rate / 2) if self.rate else math.inf

    def draw(self, units: int, *, free: bool) -> None:
        """Take units for journals from `spare`. ``free``: only count them."""
        self.drawn += units
        if self.rate and not free:
            taken = min(float(units), self.spare)
            self.left, self._lent = self.left - taken, self._lent + units - taken

    def spare_in_s(self) -> float:
        """Seconds until `spare` is above 0."""
        missing = 1 + self.rate / 2 + self._lent - self.left
        return max(0.0, missing / self.rate) if self.rate else 0.0

    def join(self, waiting: Collection[Meter], others: Iterable[Meter]) -> None:
        """Begin to take turns: an idle lane neither gains nor loses its share.

        ``waiting``: those of the others that wait for turns.
        """
        served = [meter.served for meter in waiting]
        least = min(served) if served else max([meter.served for meter in others], default=0)
        self.served = max(self.served, least)  # else single commands always came first

    @property
    def debt(self) -> int:
        """Units that time has to make up for before more of this work is done."""
        self.fill()
        return max(0, -int(self.left)) if self.rate else 0

    def wait_s(self, wanted: int) -> float:
        """Seconds until work of this size may begin. Big work resumes at a share of a second's units (`SHARES`)."""
        if not self.rate:
            return 0.0
        return (min(wanted, max(1, self.rate // SHARES)) - self.left) / self.rate
