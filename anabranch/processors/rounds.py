"""The rounds of one control partition: turns over its state, their writing, and what is dropped if that fails."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from anabranch.core import rows as k
from anabranch.core.decisions.cleanup import log_epochs_again
from anabranch.core.decisions.turn import Settings, Turn, close_round
from anabranch.core.history_records import Tail
from anabranch.core.memory import Keepalives, LeaderMemory, is_usable
from anabranch.core.state import State
from anabranch.errors import NotLeading
from anabranch.ports import (
    Clock,
    Log,
    LogBusy,
    LogError,
    LogRefused,
    LogUnavailable,
    Producer,
    Table,
)
from anabranch.processors.beside import Beside
from anabranch.processors.carrier import is_carrying
from anabranch.processors.durability import Durable, write_round
from anabranch.processors.history_tail import tail_for
from anabranch.processors.intake import Intake
from anabranch.processors.lanes.command import Command
from anabranch.processors.lanes.queues import Lanes
from anabranch.processors.lanes.trouble import LaneTrouble
from anabranch.processors.leadership import Lease
from anabranch.processors.metrics import Metrics
from anabranch.processors.offset_guess import OffsetGuess
from anabranch.processors.poison_commands import Culprit
from anabranch.processors.streams.autoscaling import Autoscaling
from anabranch.processors.streams.health import refuses_data
from anabranch.processors.streams.trouble import StreamTrouble, places_of
from anabranch.topics.names import history_topic, journal_topic, status_topic, stream_topic

log = logging.getLogger("anabranch.controller")


@dataclass(slots=True)
class Rounds:
    """The state of a control partition and the parts in step with it; a leader's, while it has a ``lease``.

    ``leader``: this process, for people (host, process id, start).
    """

    log: Log
    table: Table
    clock: Clock
    settings: Settings
    leader: str
    threads: bool = False  # may use helper threads: to read ahead, and to carry big merges aside
    lease: Lease | None = None
    rounds: int = 0
    metrics: Metrics = field(default_factory=Metrics)
    _state: State = field(init=False)
    _intake: Intake = field(init=False)
    _lanes: Lanes = field(init=False)
    _memory: LeaderMemory = field(init=False)
    _beside: Beside | None = None
    _tails: dict[str, Tail] = field(default_factory=dict)
    _offset_guess: OffsetGuess = field(default_factory=OffsetGuess)
    _autoscaling: Autoscaling = field(default_factory=Autoscaling)
    _stream_trouble: StreamTrouble = field(init=False)
    _culprit: Culprit = field(init=False)

    def __post_init__(self) -> None:
        self._state = State(self.table, trusts_open=self.settings.trusts_open)
        self._memory = LeaderMemory(Keepalives(0))
        self._culprit = Culprit(self.settings.skip_commands)
        status = status_topic(self.settings.prefix)
        self._stream_trouble = StreamTrouble(self.log, self.clock, status)
        self._lanes = Lanes(LaneTrouble(self.log, self.clock, self.settings))
        waiting = self._stream_trouble.waiting
        self._intake = Intake(self.log, self.table, self.clock, self.settings, waiting, self._lanes)

    @property
    def state(self) -> State:
        """The fold, for inspection."""
        return self._state

    def _write(
        self,
        turn: Turn,
        commands: Sequence[Command] = (),
        horizon: int | None = None,
        producer: Producer | None = None,
    ) -> bool:
        """Close the round and make it durable. ``commands``: those that it decides.

        ``producer``: the one whose native transaction has records already.
        """
        if self._intake.is_full:
            turn.put(k.ROUND_KEY, turn.state.round)  # a round for the index alone
        log_epochs_again(turn)
        positions = self._intake.positions(self._state, commands)
        round_ = close_round(turn, *positions, expired_ms=horizon)
        if round_.empty:
            turn.done()
            return False
        if self.lease is None or self._beside is None:
            raise NotLeading("a round is for a controller that leads")
        self._stream_trouble.check(self._state, round_.touched, round_.reserved)
        for stream in round_.streams:
            if stream not in self._tails:
                self.lease.check(places_of(self._state, stream))
                self._tails[stream] = tail_for(self.log, self.clock, stream, round_)
        moving = [stream for stream, _ in self._memory.cleaning.crowded[:1]]
        self._beside.quiet.touched([*round_.touched, *moving], turn.now_ms)
        loads = self._autoscaling.weigh(round_, self._state, self._intake.index, self._tails)
        begun = self.metrics.begin()
        producer = producer or self.lease.next_producer()
        send = self._lanes.held.sending(round_, self._state.round.hybrid_time)
        ports = self.log, send, self.table, self.clock
        how = self.settings.prefix, self.settings.control_partition, self._beside.journals
        try:
            write_round(
                Durable(*ports, *how, self._offset_guess, self._beside.gaps),
                producer,
                round_,
                self._state,
                self._intake.rows,
                self._tails,
                wall_ms=turn.wall_ms,
                carrying=is_carrying(self._state),
            )
        except LogBusy as error:
            log.warning("%s", error)
            self.lease.set_aside(producer)
            raise
        self._autoscaling.add(loads, self._state, self._tails, turn.now_ms)
        turn.done()
        self._beside.carriers.forget(turn.ended)
        for stream in turn.forgotten:
            self._forget_stream(stream)
        self._beside.cutter.logged(turn.cut)
        for row in round_.audit:
            log.info("by lane %s: %s %s", row.lane, row.command, row.what)
        for what in round_.unread:
            log.warning("%s", what)
        self.rounds += 1
        self.metrics.wrote(round_, len(commands), begun)
        return True

    def _forget_stream(self, stream: str) -> None:
        """Drop what memory keeps of a forgotten stream: another one may come under its name."""
        self._tails.pop(stream, None)
        self._intake.forget_stream(stream)
        self._autoscaling.forget_stream(stream)
        self._stream_trouble.forget_stream(stream)
        if self._beside is not None:
            self._beside.forget_stream(stream)

    def _turn(self) -> Turn:
        return Turn(
            state=self._state,
            index=self._intake.index,
            settings=self.settings,
            memory=self._memory,
            now_us=int(self.clock.wall() * 1_000_000),
            now_ms=self._now_ms(),
            busy=self._intake.busy,
            merge_limit=1 if self._culprit.one_each else None,
            plain_waits=self._culprit.plain_waits,
        )

    def _now_ms(self) -> int:
        return int(self.clock.monotonic() * 1000)

    def _usable(self, stream: str) -> bool:
        return is_usable(self._state, self._stream_trouble.waiting, stream)

    def _drop(self) -> None:
        """Drop an unwritten turn: the table has the state before it, the log the histories' ends."""
        self._state = State(self.table, trusts_open=self.settings.trusts_open)
        self._tails.clear()

    def _is_contained(self, error: LogError) -> bool:
        """After a round that was not written: whether it can be decided again, without the cause."""
        self._drop()
        if isinstance(error, LogBusy):
            return True  # with another transactional id
        if refuses_data(error):
            # Controllers' own records are never too big: then a topic's setting is wrong.
            own = (journal_topic, history_topic)
            topics = {topic(stream) for stream in self._state.streams for topic in own}
            if not error.topics & topics:
                streams = {s for s in self._state.streams if stream_topic(s) in error.topics}
                return not self._stream_trouble.may_be_refused(self._state, streams)
        return self._stream_trouble.find(self._state, error)

    def _written(self, turn: Turn) -> bool:
        """Write the round; False if it can't be now, for a stream that has to wait."""
        try:
            return self._write(turn) or True
        except (LogRefused, LogUnavailable) as error:
            if not self._is_contained(error):
                raise
            return False
