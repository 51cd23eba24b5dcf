"""The commands of all lanes: each lane is first in, first out, and lanes take turns by bytes.

A flooded lane has its own share of the room, so it costs its own commands. Positions are the shell's to know:
`Lanes.positions` tells how far each lane is decided once a batch is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter

from anabranch.core import limits
from anabranch.core.decisions.lanes import is_blocked, position_of
from anabranch.core.decisions.quotas import quota
from anabranch.core.decisions.turn import AT_END
from anabranch.core.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.core.memory import LaneSeen
from anabranch.core.state import State
from anabranch.ports import LogError, TopicPartition
from anabranch.processors.lanes.command import Command, weight_of
from anabranch.processors.lanes.held import HeldAnswers
from anabranch.processors.lanes.trouble import LaneTrouble
from anabranch.schemas.records import LaneRow
from anabranch.topics.names import commands_topic

QUANTUM = 64 << 10  # bytes of a lane's turn, about
CHUNKS = 20  # a second, of a lane that has as many commands as its quota allows
_LANE = attrgetter("lane")


@dataclass(slots=True)
class Lane(LaneSeen):
    """A lane that is not blocked. ``at``: how far it is fetched; `AT_END`: its end is not found yet.

    ``unlogged``: ``at`` is the end that was found, and no round has logged it. ``served``: bytes decided, compared
    with other lanes'. ``asked_end``: its end as of ``asked_ms``; ``decided_ms``: that of an ask before. ``rate``:
    commands a second that its quota allows, 0: any; ``allowance``: commands that it may send now, or owes.
    ``waits``: how often in a row its next batch, beyond its share, found no room beside others.
    """

    name: str = field(kw_only=True)
    place: TopicPartition = field(kw_only=True)
    at: int = 0
    queue: list[Command] = field(default_factory=list)
    size: int = 0  # bytes queued
    served: int = 0
    unlogged: bool = False
    asked_ms: int = -1
    asked_end: int = 0
    decided_ms: int = -1
    rate: int = 0
    allowance: float = 0.0
    waits: int = 0

    @property
    def due(self) -> int:
        """Commands that its quota has to allow before any goes on: a flood goes in chunks, each soon decided."""
        return min(len(self.queue), max(1, self.rate // CHUNKS))

    @property
    def going(self) -> int:
        """How many commands of its queue may go now; the rest waits for its quota."""
        if not self.rate:
            return len(self.queue)
        return min(len(self.queue), int(self.allowance)) if self.allowance >= self.due else 0

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
    _filled: float = 0.0  # when lanes' allowances grew last, monotonic seconds
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
        self._fill()
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
            at, rate = position_of(state, name), quota(state, name, "commands") or 0
            lane = former.get(name)
            if lane is None or (at == AT_END and not lane.unlogged):
                topic = commands_topic(self.trouble.settings.prefix, name)
                place = TopicPartition(topic, self.trouble.settings.control_partition)
                lane = Lane(name=name, place=place, at=at, allowance=rate)
            lane.rate = rate
            self.on[name] = lane
        self._by_place = {lane.place: lane for lane in self.on.values()}

    def _fill(self) -> None:
        """Let allowances grow, to a second's worth at most."""
        now = self.trouble.clock.monotonic()
        passed, self._filled = now - self._filled, now
        for lane in self.on.values():
            if lane.rate:
                lane.allowance = min(lane.rate, lane.allowance + passed * lane.rate)

    @property
    def wait_s(self) -> float:
        """Seconds until a lane that waits can go on."""
        late = [
            (lane.due - lane.allowance) / lane.rate
            for lane in self.on.values()
            if lane.queue and lane.rate
        ]
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
            if lane.rate:  # else it is decided soon
                lane.give_back(self.share)
        room, waiting = self.share // 2, self.trouble.waiting
        return {
            lane.place: lane.at
            for lane in lanes
            if lane.size <= room
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
        if not lane.queue:  # no lane saves up turns, or has to make up for some
            served = [one.served for one in self.on.values() if one.queue]
            least = min(served) if served else max([one.served for one in self.on.values()])
            lane.served = max(lane.served, least)  # or a lane of one command came first each time
        lane.queue += commands
        lane.size += weight_of(commands)

    # -- out ------------------------------------------------------------------------------------------

    @property
    def active(self) -> list[Lane]:
        """The lanes with commands that may go now."""
        return [lane for lane in self.on.values() if lane.queue and lane.going]

    def next(self, most: int, among: Sequence[Lane]) -> list[Command]:
        """Up to so many commands of these lanes, in turns. They stay queued until they are `passed`."""
        if len(among) < 2:
            return among[0].queue[: min(most, among[0].going)] if among else []
        turns = [(lane.served, i, 0) for i, lane in enumerate(among)]
        heapify(turns)
        going = [lane.going for lane in among]
        batch: list[Command] = []
        size = 0
        while turns and len(batch) < most and size <= limits.ROUND.value:
            served, i, at = heappop(turns)
            queue, begun = among[i].queue, served
            while at < going[i] and served - begun < QUANTUM and len(batch) < most:
                served += queue[at].weight
                batch.append(queue[at])
                at += 1
            size += served - begun
            if at < going[i]:
                heappush(turns, (served, i, at))
        return batch

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
            done = lane.size
            if count < len(lane.queue):
                done = weight_of(lane.queue[:count])
            del lane.queue[:count]
            lane.size -= done
            lane.served += done
            lane.allowance -= count

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
