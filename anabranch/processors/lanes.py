"""The commands of all lanes: each lane is first in, first out, and lanes take turns by what they were charged.

A flooded lane has its own share of the room and of the leader's time, so only its own commands wait.
`Lanes.positions` returns how far each lane is decided once a batch is, to be logged with it.
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

SHARES = 20  # a second: a sender that has to wait goes on with this share of a second's units
UNSENT_PAUSE_S = 0.01
QUANTUM = 1_000  # units of work: a lane's turn, and its part of a round that other lanes are in
_LANE = attrgetter("lane")


@dataclass(slots=True)
class Lane(LaneSeen):
    """A lane that is not blocked. ``at``: how far it is fetched; `AT_END`: its end is not found yet.

    ``unlogged``: ``at`` is the end that was found, and no round has logged it. ``asked_end``: its end as of
    ``asked_ms``; ``decided_ms``: that of an ask before. ``waits``: how often in a row its next batch, beyond its
    share, found no room as other lanes had it.
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
        """Seconds until its quota lets the next of its queue go."""
        return self.meter.wait_s(work.forecast(self.size, len(self.queue)))

    def usage(self) -> Mapping[str, int]:
        return {"work": self.meter.used, "debt": self.meter.debt, "journals": self.meter.drawn}

    def give_back(self, most: int) -> None:
        """Drop the last commands, until ``most`` bytes are left: they are fetched again."""
        while self.size > most:
            command = self.queue.pop()
            self.size, self.at = self.size - command.weight, command.offset

    def after(self, count: int) -> int:
        """The lane's position once the first ``count`` commands of its queue are decided."""
        return self.queue[count].offset if count < len(self.queue) else self.at


@dataclass(slots=True)
class Lanes:
    """The lanes that are not blocked, and the messages of controllers (``control``), which go first."""

    trouble: LaneTrouble
    on: dict[str, Lane] = field(default_factory=dict)
    control: list[Command] = field(default_factory=list)
    _by_place: dict[TopicPartition, Lane] = field(default_factory=dict)
    _rows: Mapping[str, LaneRow] = field(default_factory=dict)
    _waited: bool = False  # whether some lane's trouble was reported
    commit_wait: CommitWaitQueue = field(init=False)

    def __post_init__(self) -> None:
        self.commit_wait = CommitWaitQueue(self.trouble)

    # -- which there are ------------------------------------------------------------------------------

    def begin(self, state: State) -> None:
        """Go on where the folded state says."""
        self.on.clear()
        self.control.clear()
        self.trouble.begin(state)
        self._renew(state)

    def follow(self, state: State) -> dict[str, int]:
        """Follow the lanes' rows. Returns positions to log (`core.decisions.lanes.resume`) before `go_on`."""
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
            found[OPEN_LANE] = AT_END  # a later leader may serve it, and must not run the backlog
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
        self.on.clear()  # decisions see this very dict
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
        """Seconds until a lane that waits can go on."""
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
        """Read the lanes whose positions are logged."""
        for name in logged.keys() & self.on.keys():
            self.on[name].unlogged = False

    # -- in -------------------------------------------------------------------------------------------

    def _readable(self, lane: Lane) -> bool:
        return not lane.unlogged and lane.place.topic not in self.trouble.waiting

    @property
    def share(self) -> int:
        """The bytes that each lane may queue, about."""
        return limits.QUEUED.value // max(1, len(self.on))

    @property
    def room(self) -> int:
        """The bytes that all lanes together may still queue: clients write commands, and little unpacks to much."""
        return limits.QUEUED.value - sum([lane.size for lane in self.on.values()])

    def wanted(self) -> dict[TopicPartition, int]:
        """Positions to fetch from, of the lanes that have room."""
        lanes = self.on.values()
        full = self.room < 0
        for lane in lanes if full and any(one.waits for one in lanes) else ():
            if lane.meter.rate:  # else it is decided soon
                lane.give_back(self.share)
        room, waiting = self.share // 2, self.trouble.waiting
        return {
            lane.place: lane.at
            for lane in lanes
            if lane.size <= room
            and not lane.meter.debt  # nothing of it can be decided
            and not (full and lane.waits)  # its next batch is a big one
            and lane.at != AT_END
            and not lane.unlogged
            and lane.place.topic not in waiting
        }

    def among(self, places: Collection[TopicPartition]) -> list[Lane]:
        """The lanes of these places; those first that found no room for the longest time."""
        found = [lane for lane in self.on.values() if lane.place in places]
        return sorted(found, key=lambda lane: -lane.waits)

    def has(self, place: TopicPartition) -> bool:
        """Whether a lane's commands are there."""
        return place in self._by_place

    def move(self, place: TopicPartition, at: int) -> None:
        """Go on at this offset there: retention took what was before."""
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
        """The lanes with commands that may go now."""
        return [lane for lane in self.on.values() if lane.queue and lane.wait_s <= 0]

    def next(self, most: int, among: Sequence[Lane]) -> list[Command]:
        """Up to ``most`` commands of these lanes, in turns. They stay queued until they are `passed`."""
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
        """The units that each lane of a batch may be charged in its round: then it gives the rest back.

        Its last command may exceed them. If other lanes are in the round, a lane gets a `QUANTUM` at most. Its
        quota also bounds them.
        """
        names = set(map(_LANE, batch)) if batch and not batch[0].control else ()
        most = QUANTUM if len(names) > 1 else math.inf
        meters = {name: self.on[name].meter for name in names}
        return {n: min(most, max(1, m.left)) if m.rate else most for n, m in meters.items()}

    def positions(self, batch: Sequence[Command]) -> dict[str, int]:
        """Each lane's position once this batch is decided: the first of its queue, for each lane in it."""
        counts = _counts(batch)
        return {
            name: lane.after(counts.get(name, 0))
            for name, lane in self.on.items()
            if lane.at != AT_END
        }

    def passed(self, batch: Sequence[Command]) -> None:
        """Drop the commands of a batch that is decided."""
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
        """Charge lanes for work that was not a command of theirs."""
        for name in owed.keys() & self.on.keys():
            self.on[name].meter.charge(owed[name])

    # -- silence --------------------------------------------------------------------------------------

    def ask(self, names: Collection[str], now_ms: int) -> None:
        """Ask for these lanes' ends as of now; not of one that is not decided up to the last such end."""
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
        """Let decisions know how far the lanes are read, once this batch is decided."""
        for name, at in self.positions(batch).items():
            lane = self.on[name]
            lane.read_ms = lane.asked_ms if at >= lane.asked_end else lane.decided_ms


def _counts(batch: Sequence[Command]) -> Mapping[str, int]:
    """How many commands of each lane a batch has."""
    if not batch or batch[0].control:
        return {}
    return Counter(map(_LANE, batch)) if len(batch) > 1 else {batch[0].lane: 1}


# -- answers that wait for clocks ---------------------------------------------------------------------


@dataclass(slots=True)
class CommitWaitQueue:
    """Answers that wait until every clock is past their commit (commit wait), and how all others are sent.

    The answers that wait are of rounds that have happened, so each is true however late it is sent. If the process
    ends, they are lost: their clients ask again, and another leader delays the answer for the rest of the time.
    """

    trouble: LaneTrouble
    _held: list[tuple[int, int, Answer, int]] = field(default_factory=list)
    _count: int = 0

    def sending(
        self, round_: Round, time: int
    ) -> Callable[[Iterable[tuple[TopicPartition, bytes]]], None]:
        """The way to send a round's answers once it has happened. Those that wait are taken out of it here.

        ``time``: the hybrid time of the round.
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
        # Another controller's clock may be slower than this one, by twice the error.
        error_us = 1000 * (self.trouble.settings.clock_error_ms or 0)
        return hybrid_time.to_us(result.commit_timestamp) + 1 + 2 * error_us

    def send_due(self) -> None:
        """Send those that have waited long enough."""
        now_us = self._now_us()
        while self._held and self._held[0][0] <= now_us:
            _, _, answer, time = heappop(self._held)
            prefix = self.trouble.settings.prefix
            self.trouble.send(answers_of(prefix, [answer], time, now_us // 1000))

    @property
    def wait_s(self) -> float:
        """Seconds until the next one is due."""
        return (self._held[0][0] - self._now_us()) / 1e6 if self._held else float("inf")

    def _now_us(self) -> int:
        return int(self.trouble.clock.wall() * 1_000_000)


# -- lanes in trouble ---------------------------------------------------------------------------------


class _Topic(NamedTuple):
    """A topic of a lane. ``partitions``: as many as it has at least. ``topic_id``: empty where any will do."""

    name: str
    commands: bool
    partitions: int
    topic_id: str


@dataclass(slots=True)
class LaneTrouble:
    """Lanes whose topics fail: each waits alone, and all other lanes are served. The one home of that rule.

    Commands that can't be read are not asked for. Answers that can't be written are not sent, and their clients ask
    again. A topic is tried again once the brokers' metadata shows it well and its pause is over; the pause grows
    while it fails again and again. A topic whose id is not the one in the lane's row is never read or written.
    `open` and `admin` are lanes as others are.

    ``waiting``: topic -> why it is not read, or written. ``unsent``: some answers are not on their way yet.
    """

    log: Log
    clock: Clock
    settings: Settings
    waiting: dict[str, str] = field(default_factory=dict)
    unsent: bool = False
    _pauses: dict[str, Backoff] = field(default_factory=dict)  # by topic

    def begin(self, state: State) -> None:
        """A leader begins: lanes whose topics have ids are looked at."""
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
        """How long the loop may wait."""
        if self.unsent:
            return UNSENT_PAUSE_S
        return FIRST_PAUSE_S if self.waiting else LONGEST_PAUSE_S

    def send(self, answers: Iterable[tuple[TopicPartition, bytes]] = ()) -> None:
        """Send answers, but none to topics that wait; hear what became of earlier ones."""
        failed: dict[TopicPartition, LogError] = {}
        heard = [answer for answer in answers if answer[0].topic not in self.waiting]
        self.unsent = self.log.send(heard, failed)
        for place, error in failed.items():
            if refuses_data(error):
                log.warning("an answer is lost: %s", error)  # others to that lane are fine
            else:
                self.note(place.topic, str(error))

    def note(self, topic: str, why: str, *, looked: bool = False) -> None:
        """Let a topic wait; longer, if it waits already and was looked at."""
        known = topic in self.waiting
        if looked or not known:
            self._pauses.setdefault(topic, new_pauses(self.clock)).begin()
        if not known:
            log.warning("%s waits: %s", topic, why)
        self.waiting[topic] = why

    def look(self, state: State) -> None:
        """Look at the topics whose pause is over."""
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
                why = "it can't be looked at now"
            elif name in described.forbidden:
                why = described.forbidden[name]
            else:
                why = self._wrong(topic, described.found.get(name))
            if why:
                self.note(name, why, looked=True)
            elif self.waiting.pop(name, ""):
                log.info("%s goes on", name)

    def _wrong(self, topic: _Topic, info: TopicInfo | None) -> str:
        why = gone(topic.name, info, topic.partitions, topic.topic_id)
        if why or info is None:
            return why
        mine = (self.settings.control_partition,) if topic.commands else range(topic.partitions)
        lacking = [partition for partition in mine if partition in info.leaderless]
        return f"{topic.name}[{lacking[0]}] has no leader" if lacking else ""

    def _topics(self, state: State) -> dict[str, _Topic]:
        """The topics of all lanes, by name; without the commands of blocked ones."""
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


# -- what senders cost --------------------------------------------------------------------------------


@dataclass(slots=True)
class Meter:
    """The account of a lane, or of a stream's journals: what it may cost the leader, and what it did (`core.work`).

    ``rate``: units a second, 0: any. ``left``: what it may be charged now, a second's worth at most. A charge may
    exceed it: then it is below 0, a debt, and its owner waits until time has paid that off. ``used``: charged in
    all. ``served``: the same, as it counts for turns: see `join`. ``drawn``: what the journals of a lane's streams
    cost, in all.
    """

    clock: Clock
    rate: int = 0
    left: float = 0.0
    used: int = 0
    served: int = 0
    drawn: int = 0
    _lent: float = 0.0  # what journals drew beyond what was spare: paid before they draw again
    _filled: float = 0.0  # when it was filled last, monotonic seconds

    def set_rate(self, rate: int) -> None:
        """Go on at this rate; one that had none, or a new one, begins with a second's worth."""
        if not self.rate:
            self.left, self._filled = float(rate), self.clock.monotonic()
        self.rate = rate

    def fill(self) -> None:
        """Let what is left grow with the time that passed."""
        if self.rate:
            now = self.clock.monotonic()
            self.left = min(self.rate, self.left + (now - self._filled) * self.rate)
            self._filled = now
            paid = max(0.0, min(self._lent, self.left - self.rate / 2))
            self.left, self._lent = self.left - paid, self._lent - paid

    def charge(self, units: int, *, free: bool = False) -> None:
        """Take units off what is left; ``free``: count them only, as no other needs the leader."""
        self.fill()
        self.used += units
        self.served += units
        if self.rate and not free:
            self.left -= units

    @property
    def spare(self) -> float:
        """The units that others may draw: those beyond half a second's worth, which stays for its own work."""
        self.fill()
        return max(0.0, self.left - self.rate / 2) if self.rate else math.inf

    def draw(self, units: int, *, free: bool) -> None:
        """Take units of journals off what is spare; ``free``: count them only."""
        self.drawn += units
        if self.rate and not free:
            taken = min(float(units), self.spare)
            self.left, self._lent = self.left - taken, self._lent + units - taken

    def spare_in_s(self) -> float:
        """Seconds until there is something spare."""
        missing = 1 + self.rate / 2 + self._lent - self.left
        return max(0.0, missing / self.rate) if self.rate else 0.0

    def join(self, waiting: Collection[Meter], others: Iterable[Meter]) -> None:
        """Begin to wait for turns. Its owner saved up none, and has to make up for none.

        ``waiting``: of the others, those that wait for turns.
        """
        served = [meter.served for meter in waiting]
        least = min(served) if served else max([meter.served for meter in others], default=0)
        self.served = max(self.served, least)  # or an owner of one command came first each time

    @property
    def debt(self) -> int:
        """Units that time has to pay off before anything more of its owner goes on."""
        self.fill()
        return max(0, -int(self.left)) if self.rate else 0

    def wait_s(self, wanted: int) -> float:
        """Seconds until work of this forecast may begin: it goes on in shares of a second, not bit by bit."""
        if not self.rate:
            return 0.0
        return (min(wanted, max(1, self.rate // SHARES)) - self.left) / self.rate
