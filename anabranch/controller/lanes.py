"""The queues of all lanes' commands, what each lane may cost the leader, and replies to be sent.

A *lane* is a request channel: the topics for the commands of some clients and for the replies to them. Each lane is
first in, first out. Lanes take turns, and the lane that was charged least comes first. Each has its share of the
memory and of the leader's time, so if a lane is flooded, only its own commands wait. The positions up to which
lanes are decided (`Lanes.positions`) are in the same *round*, that is native transaction, as the decisions.
"""

from __future__ import annotations

import logging
import math
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter

from anabranch.batches.one_shots import decode_lazily
from anabranch.batches.records import Record
from anabranch.controller.durability import answers_of, messages_of
from anabranch.controller.topic_trouble import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    TopicTrouble,
    refuses_data,
)
from anabranch.core import work
from anabranch.core.decisions.across import receiving
from anabranch.core.decisions.decide import catch_up, decide, is_question
from anabranch.core.decisions.lanes import is_blocked, is_read, position_of
from anabranch.core.decisions.quotas import quota
from anabranch.core.decisions.turn import AT_END, Settings, Turn, refuse
from anabranch.core.round import Answer, ReplyTo, Round
from anabranch.core.state import State
from anabranch.errors import AnabranchError, InvalidArgument
from anabranch.ports import Clock, Log, LogError, TopicPartition
from anabranch.protocol import hybrid_time, limits
from anabranch.protocol.ids import (
    CORRELATION_HEADER,
    DECIDED_HEADER,
    REPLY_HEADER,
    TIME_HEADER,
    WAIT_HEADER,
    command_digest,
)
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.protocol.messages import BIG
from anabranch.protocol.schemas.codec import TYPES, name_of
from anabranch.protocol.schemas.records import AdoptScope, LaneRow, Outcome
from anabranch.topics.names import commands_topic, control_topic
from anabranch.tracing import Served
from anabranch.tracing import current as current_tracing

log = logging.getLogger("anabranch.controller")

SHARES = 20  # after a wait, work resumes once 1/20 of a second's units is there
UNSENT_PAUSE_S = 0.01
QUANTUM = 1_000  # units of work in a turn of a lane; the most in a round with other lanes
_LANE = attrgetter("lane")


@dataclass(slots=True)
class Lane:
    """A lane that is not blocked, and its queued commands.

    Decisions see it as a `core.memory.LaneSeen`, which explains ``end`` to ``trouble``.

    ``at``: the next offset to fetch; `AT_END`: the lane starts at its end, which is not found yet. ``unlogged``:
    ``at`` is that end, but no round has logged it. ``asked_end``: the lane's end as of ``asked_ms``.
    ``decided_ms``: the time of an earlier question for the end, up to which all commands are decided. ``waits``:
    how many times in a row its next batch, beyond its share, found no room because other lanes used it.
    ``deciding``: how many of its first commands are in a round that is being written; they stay queued until then.
    """

    name: str = field(kw_only=True)
    place: TopicPartition = field(kw_only=True)
    meter: Meter = field(kw_only=True)
    end: int = 0
    read_ms: int = -1
    well_ms: int = -1
    trouble: str = ""
    at: int = 0
    queue: list[Command] = field(default_factory=list)
    size: int = 0  # bytes queued
    unlogged: bool = False
    asked_ms: int = -1
    asked_end: int = 0
    decided_ms: int = -1
    waits: int = 0
    deciding: int = 0

    @property
    def left(self) -> float:
        """The units that its next commands may be charged now, at least 1. Without a quota there is no limit."""
        if not self.meter.rate:
            return math.inf
        owed = sum([command.charge for command in self.queue[: self.deciding]])
        return max(1, self.meter.left - owed)

    @property
    def wait_s(self) -> float:
        """Seconds until the lane's quota permits its next command."""
        return self.meter.wait_s(work.forecast(self.size, len(self.queue)))

    def usage(self) -> Mapping[str, int]:
        return {"work": self.meter.used, "debt": self.meter.debt, "journals": self.meter.drawn}

    def give_back(self, most: int) -> None:
        """Drop the last commands until at most ``most`` bytes are queued. They are fetched again later."""
        while self.size > most and len(self.queue) > self.deciding:
            command = self.queue.pop()
            self.size, self.at = self.size - command.weight, command.offset

    def after(self, count: int) -> int:
        """The lane's position once the first ``count`` commands of its queue are decided."""
        return self.queue[count].offset if count < len(self.queue) else self.at


@dataclass(slots=True)
class Lanes:
    """The lanes that are not blocked, and the messages of other controllers (``control``), which come first."""

    log: Log
    clock: Clock
    settings: Settings
    trouble: TopicTrouble
    on: dict[str, Lane] = field(default_factory=dict)
    control: list[Command] = field(default_factory=list)
    _by_place: dict[TopicPartition, Lane] = field(default_factory=dict)
    _rows: Mapping[str, LaneRow] = field(default_factory=dict)
    _waited: bool = False  # whether some lane's trouble was reported
    replies: Replies = field(init=False)
    served: Served | None = field(init=False)  # None unless the process traces

    def __post_init__(self) -> None:
        self.replies = Replies(self.log, self.clock, self.settings, self.trouble)
        tracing = current_tracing()
        self.served = None if tracing is None else Served(tracing, self.settings.control_partition)

    # -- the set of lanes -----------------------------------------------------------------------------

    def begin(self, state: State) -> None:
        """Start from the positions in the state that the leader has read."""
        self.on.clear()
        self.control.clear()
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
        self.replies.send_due()
        if self.trouble.reasons["lane"] or self._waited:
            self._waited = bool(self.trouble.reasons["lane"])
            for lane in self.on.values():
                lane.trouble = self.trouble.of_lane(lane.name)
        found = self._find_ends() if resumes else {}
        if self.settings.lanes_only and state.lane_positions.get(OPEN_LANE) != AT_END:
            found[OPEN_LANE] = AT_END  # a later leader that serves it must not decide the backlog
        return found

    def _names(self, state: State) -> list[str]:
        """The lanes to read."""
        left_out = (OPEN_LANE,) if self.settings.lanes_only else ()
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
                topic = commands_topic(self.settings.prefix, name)
                place = TopicPartition(topic, self.settings.control_partition)
                lane = Lane(name=name, place=place, meter=Meter(self.clock), at=at)
            lane.meter.set_rate(quota(state, name, "work") or 0)
            self.on[name] = lane
        self._by_place = {lane.place: lane for lane in self.on.values()}

    @property
    def wait_s(self) -> float:
        """Seconds until a waiting lane or reply can continue."""
        late = [x.wait_s for x in self.on.values() if x.meter.rate and (x.queue or x.meter.debt)]
        return min(
            [
                FIRST_PAUSE_S if self.trouble.reasons["lane"] else LONGEST_PAUSE_S,
                self.replies.wait_s,
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
        ends = self.log.end_offsets(places, committed=False, failed=failed)
        for place, error in failed.items():
            self.trouble.note("lane", place.topic, str(error))
        return ends

    def go_on(self, logged: Mapping[str, int]) -> None:
        """Start to read the lanes whose positions are logged now."""
        for name in logged.keys() & self.on.keys():
            self.on[name].unlogged = False

    # -- commands that come in ------------------------------------------------------------------------

    def _readable(self, lane: Lane) -> bool:
        return not lane.unlogged and lane.place.topic not in self.trouble.reasons["lane"]

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
        room, waiting = self.share // 2, self.trouble.reasons["lane"]
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
        """The lanes of these partitions. Lanes that found no room most often come first."""
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

    # -- commands to decide ---------------------------------------------------------------------------

    @property
    def active(self) -> list[Lane]:
        """The lanes with commands that may be decided now."""
        lanes = self.on.values()
        return [lane for lane in lanes if len(lane.queue) > lane.deciding and lane.wait_s <= 0]

    def next(self, most: int, among: Sequence[Lane]) -> list[Command]:
        """Up to ``most`` commands of these lanes, in turns. They stay queued until `passed` is called."""
        if len(among) < 2:
            return among[0].queue[among[0].deciding :][:most] if among else []
        turns = [(lane.meter.served, i, lane.deciding) for i, lane in enumerate(among)]
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

        The quota limits these units. If other lanes are in the round, `QUANTUM` limits them, too. A lane's last
        command may exceed the limit.
        """
        names = _counts(batch).keys()
        most = QUANTUM if len(names) > 1 else math.inf
        return {name: min(most, self.on[name].left) for name in names}

    def positions(self, batch: Sequence[Command]) -> dict[str, int]:
        """Each lane's position once this batch is decided. Its commands are the first of their lanes' queues."""
        counts = _counts(batch)
        return {
            name: lane.after(counts.get(name, 0))
            for name, lane in self.on.items()
            if lane.at != AT_END
        }

    def decide(self, batch: Sequence[Command]) -> None:
        """Note that a round with these commands is being written, so that `next` continues after them."""
        for name, count in _counts(batch).items():
            if name in self.on:
                self.on[name].deciding = count

    def decide_again(self) -> None:
        """Note that the round was not written: `next` begins with its commands."""
        for lane in self.on.values():
            lane.deciding = 0

    def passed(self, batch: Sequence[Command]) -> None:
        """Remove the commands of a decided batch, and charge their lanes."""
        del self.control[: messages_in(batch)]
        for name, count in _counts(batch).items():
            lane = self.on.get(name)
            if lane is None:
                continue
            decided = lane.queue[:count]
            lane.meter.charge(sum([command.charge for command in decided]))
            lane.size -= weight_of(decided)
            del lane.queue[:count]
            lane.deciding = 0

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
        """Set ``read_ms`` of each lane: the time up to which the lane is read once this batch is decided."""
        for name, at in self.positions(batch).items():
            lane = self.on[name]
            lane.read_ms = lane.asked_ms if at >= lane.asked_end else lane.decided_ms


def _counts(batch: Sequence[Command]) -> Mapping[str, int]:
    """How many commands of each lane a batch has."""
    own = batch[messages_in(batch) :]
    return Counter(map(_LANE, own)) if len(own) != 1 else {own[0].lane: 1}


def messages_in(batch: Sequence[Command]) -> int:
    """How many messages of other controllers a batch has. They come before its commands."""
    return sum([one.control for one in batch]) if batch and batch[0].control else 0


# -- replies ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Replies:
    """Sends replies, and delays those in commit wait until every clock is past their commit timestamp.

    Waiting replies belong to committed rounds, so they stay true however late they are sent. If the process ends,
    they are lost: their clients ask again, and the next leader delays the reply for the rest of the time. Replies
    to a topic in trouble are not sent, and their clients ask again.

    ``unsent``: some replies are not sent yet.
    """

    log: Log
    clock: Clock
    settings: Settings
    trouble: TopicTrouble
    unsent: bool = False
    _held: list[tuple[int, int, Answer, int]] = field(default_factory=list)
    _count: int = 0

    def take_waiting(self, round_: Round) -> list[Answer]:
        """Remove the replies that have to wait from a round. `hold` them once it is committed."""
        if not any(to.held for to, _ in round_.replies):
            return []
        now_us = self._now_us()
        held = [answer for answer in round_.replies if self._due_us(answer) > now_us]
        round_.replies = [answer for answer in round_.replies if self._due_us(answer) <= now_us]
        return held

    def hold(self, held: Iterable[Answer], time: int) -> None:
        """Queue replies that have to wait. ``time``: the hybrid time of their round."""
        for answer in held:
            self._count += 1
            heappush(self._held, (self._due_us(answer), self._count, answer, time))

    def send_now(self, round_: Round, time: int) -> None:
        """Send the answers and questions that need not wait for their round (`Round.facts`, `Round.questions`).

        ``time``: the hybrid time of the last round on the log.
        """
        if not (round_.facts or round_.questions):
            return
        prefix, now_us = self.settings.prefix, self._now_us()
        due = [answer for answer in round_.facts if self._due_us(answer) <= now_us]
        self.hold([answer for answer in round_.facts if self._due_us(answer) > now_us], time)
        here, now_ms = self.settings.control_partition, now_us // 1000
        self.send(
            [
                *answers_of(prefix, due, time, now_ms),
                *messages_of(prefix, here, round_.questions, time, now_ms),
            ]
        )

    def send(self, answers: Iterable[tuple[TopicPartition, bytes]] = ()) -> None:
        """Send replies, except to waiting topics, and handle the errors of earlier ones."""
        failed: dict[TopicPartition, LogError] = {}
        waiting = self.trouble.reasons["lane"]
        self.unsent = self.log.send([one for one in answers if one[0].topic not in waiting], failed)
        for place, error in failed.items():
            if place.topic == control_topic(self.settings.prefix):
                log.warning(
                    "messages to control partition %d are sent again: %s", place.partition, error
                )
            elif refuses_data(error):
                log.warning("an answer is lost: %s", error)  # the lane itself is well
            else:
                self.trouble.note("lane", place.topic, str(error))

    def send_due(self) -> None:
        """Send the replies that have waited long enough, and handle the errors of earlier ones."""
        now_us = self._now_us()
        while self._held and self._held[0][0] <= now_us:
            _, _, answer, time = heappop(self._held)
            self.send(answers_of(self.settings.prefix, [answer], time, now_us // 1000))
        self.send()

    @property
    def wait_s(self) -> float:
        """Seconds until the next reply is due, or until unsent ones are tried again."""
        due_s = (self._held[0][0] - self._now_us()) / 1e6 if self._held else math.inf
        return min(due_s, UNSENT_PAUSE_S) if self.unsent else due_s

    def _due_us(self, answer: Answer) -> int:
        to, result = answer
        if not to.held or not isinstance(result, Outcome) or not result.commit_timestamp:
            return 0
        # Both clocks may be off by the error, so another one may be slower than this one by twice the error.
        error_us = 1000 * (self.settings.clock_error_ms or 0)
        return hybrid_time.to_us(result.commit_timestamp) + 1 + 2 * error_us

    def _now_us(self) -> int:
        return int(self.clock.wall() * 1_000_000)


# -- accounting of work -------------------------------------------------------------------------------


@dataclass(slots=True)
class Meter:
    """The account of a lane, or of a stream's journals: the work that it may cause, and has caused (`core.work`).

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
        """Begin to take turns. A lane that was idle begins with the charge of the other lanes: it has saved no
        turns.

        ``waiting``: the meters of lanes that wait for turns; ``others``: of all lanes, if none waits.
        """
        served = [meter.served for meter in waiting]
        least = min(served) if served else max([meter.served for meter in others], default=0)
        self.served = max(self.served, least)  # otherwise single commands would always come first

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


# -- commands: taken out of their records, and decided -------------------------------------------------

Key = tuple[str, int]  # a command's lane and offset

_RECORD_BYTES = 300  # about how many bytes a queued command takes besides its payload


@dataclass(slots=True)
class Command:
    """A record of a lane's commands, or of the control topic."""

    offset: int
    to: ReplyTo | None
    payload: bytes = field(repr=False)
    native: bool  # sent inside a native transaction
    lane: str = OPEN_LANE
    control: bool = False  # a record of the control topic, which only controllers write
    unanswered: bool = False  # its headers for the reply are unusable
    seen: bytes | None = None  # the hybrid time that its sender has seen, not parsed
    mac: bytes | None = field(default=None, repr=False)  # of a message of another leader
    charge: int = work.SMALL  # the units of work that it cost, once it is decided

    @property
    def key(self) -> Key:
        """The command's lane and offset. In the control topic, the offset is negated, so it is below 0."""
        return self.lane, -1 - self.offset if self.control else self.offset

    @property
    def weight(self) -> int:
        """About how many bytes it takes in a queue."""
        return len(self.payload) + _RECORD_BYTES


def weight_of(commands: Iterable[Command]) -> int:
    return sum([command.weight for command in commands])


def decide_command(turn: Turn, command: Command) -> None:
    """Decide a command. If the payload is not a command, the reply is a refusal."""
    size = len(command.payload)
    (turn.lane, turn.at), turn.command_bytes = command.key, size
    turn.size += size
    turn.charged += work.COMMAND
    if turn.state.lanes and not command.control and not is_read(turn.state, command.lane):
        return  # a command before it in this round blocked its lane, so it counts as not read
    try:
        _check_size(turn, command.payload)
        if not is_question(command.payload):
            # Before it is decoded, which may cost much.
            turn.state.check_level(command.payload, "the command")
        if not command.control:
            catch_up(turn, command.payload)
        record = decode_lazily(command.payload)
        if size > work.FEW_BYTES:
            turn.charge(work.of_parts(record))
        turn.seen = None if command.seen is None else hybrid_time.parse(command.seen)
    except AnabranchError as error:
        turn.reply(command.to, refuse(error))
        return
    if command.control and isinstance(record, receiving.MESSAGES):
        receiving.receive(turn, record, command.payload, command.mac, turn.seen)
        return
    refusal = None
    if isinstance(record, AdoptScope) != command.control:
        refusal = InvalidArgument("controllers alone send AdoptScope, and no commands of clients")
    elif command.native and not command.control:
        # Commands are read before native transactions end: this one could take effect, and then be aborted.
        refusal = InvalidArgument("send commands outside of native transactions")
    if refusal is not None:
        turn.reply(command.to, refuse(refusal))
        return
    decide(turn, record, command.to)


def _check_size(turn: Turn, payload: bytes) -> None:
    if len(payload) <= limits.COMMAND.value:
        return
    big = TYPES.get(payload[1]) in BIG
    limit = limits.COMMAND._replace(value=turn.settings.command_bytes) if big else limits.COMMAND
    limit.check(len(payload), f"a command {name_of(payload)}")


def command_of(record: Record, native: bool, lane: str, reply_partitions: int) -> Command:
    """Make the command of a record. Without the two headers for the reply, no client waits for one."""
    headers = dict(record.headers)
    correlation_id = headers.get(CORRELATION_HEADER)
    partition = headers.get(REPLY_HEADER)
    payload = record.value or b""
    to = None
    if correlation_id and partition is not None and len(partition) == 4:
        number = struct.unpack(">i", partition)[0]
        known = 0 <= number < reply_partitions
        if known and len(correlation_id) <= limits.CORRELATION_ID.value:
            to = ReplyTo(
                correlation_id,
                number,
                command_digest(payload),
                lane,
                WAIT_HEADER in headers,
                DECIDED_HEADER in headers,
            )
    unanswered = to is None and (correlation_id is not None or partition is not None)
    seen = headers.get(TIME_HEADER)
    return Command(record.offset, to, payload, native, lane, unanswered=unanswered, seen=seen)
