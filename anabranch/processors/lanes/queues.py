"""The commands of all lanes: each lane is first in, first out, and lanes take turns by what they were charged.

A flooded lane has its own share of the room and of the leader's time, so it costs its own commands. Positions are
the shell's to know: `Lanes.positions` tells how far each lane is decided once a batch is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter

from anabranch.core import limits, work
from anabranch.core.decisions.lanes import is_blocked, position_of
from anabranch.core.decisions.quotas import quota
from anabranch.core.decisions.turn import AT_END
from anabranch.core.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.core.memory import LaneSeen
from anabranch.core.state import State
from anabranch.ports import LogError, TopicPartition
from anabranch.processors.lanes.command import Command, weight_of
from anabranch.processors.lanes.held import HeldAnswers
from anabranch.processors.lanes.meter import Meter
from anabranch.processors.lanes.trouble import LaneTrouble
from anabranch.schemas.records import LaneRow
from anabranch.topics.names import commands_topic

QUANTUM = 1_000  # units of work: a lane's turn, and its part of a round that other lanes are in
_LANE = attrgetter("lane")


@dataclass(slots=True)
class Lane(LaneSeen):
    """A lane that is not blocked. ``at``: how far it is fetched; `AT_END`: its end is not found yet.

    ``unlogged``: ``at`` is the end that was found, and no round has logged it. ``asked_end``: its end as of
    ``asked_ms``; ``decided_ms``: that of an ask before. ``waits``: how often in a row its next batch, beyond its
    share, found no room beside others.
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
        """Let go of what is beyond so many bytes: it is fetched again."""
        while self.size > most:
            command = self.queue.pop()
            self.size, self.at = self.size - command.weight, command.offset

    def after(self, count: int) -> int:
        """The lane's position once so many of the queue are decided."""
        return self.queue[count].offset if count < len(self.queue) else self.at


@dataclass(slots=True)
class Lanes:
    """The lanes that are not blocked, and the messages of controllers (``control``), which go first."""

    trouble: LaneTrouble
    on: dict[str, Lane] = field(default_factory=dict)
    control: list[Command] = field(default_factory=list)
    _by_place: dict[TopicPartition, Lane] = field(default_factory=dict)
    _rows: Mapping[str, LaneRow] = field(default_factory=dict)
    _waited: bool = False  # whether some lane's trouble was told
    held: HeldAnswers = field(init=False)

    def __post_init__(self) -> None:
        self.held = HeldAnswers(self.trouble)

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
        self.held.send_due()
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
            [self.trouble.wait_s, self.held.wait_s, *(max(0.001, seconds) for seconds in late)]
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
        """Up to so many commands of these lanes, in turns. They stay queued until they are `passed`."""
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

        Its last command may exceed them. Beside other lanes it is a `QUANTUM`, and what its quota has left.
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
        """Charge lanes what was due for them besides commands."""
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
        """Tell decisions how far the lanes are read, once this batch is decided."""
        for name, at in self.positions(batch).items():
            lane = self.on[name]
            lane.read_ms = lane.asked_ms if at >= lane.asked_end else lane.decided_ms


def _counts(batch: Sequence[Command]) -> Mapping[str, int]:
    """How many commands of each lane a batch has."""
    if not batch or batch[0].control:
        return {}
    return Counter(map(_LANE, batch)) if len(batch) > 1 else {batch[0].lane: 1}
