"""The controller of one control partition: a thin loop round the core.

`Controller.step` is one pass, as `docs/architecture.md` lists it. It has no thread, clock or sleep of its own:
time and I/O come through the ports, so the same loop runs on Kafka and in the simulator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from anabranch.core import rows as k
from anabranch.core.decide import CHECK_MS, anything_stale, decide_due
from anabranch.core.decide_commit import next_due_ms
from anabranch.core.decide_lost import give_up_stream
from anabranch.core.decide_plain import give_up
from anabranch.core.decide_txn import abort_txn
from anabranch.core.plan import Tail
from anabranch.core.state import State
from anabranch.core.turn import IN_TROUBLE, Hearing, Settings, Turn, close_round, is_usable, refuse
from anabranch.errors import EventTooLarge, InvalidArgument, NotLeading, check
from anabranch.ports import (
    Clock,
    Log,
    LogRefused,
    Producer,
    Table,
    TopicGone,
    TopicPartition,
)
from anabranch.processors.autoscaling import Autoscaling
from anabranch.processors.carrier import Carriers, is_carrying, lanes_of
from anabranch.processors.cleanup import Cutter, move_next
from anabranch.processors.durability import Durable, write_round
from anabranch.processors.failpoints import AFTER_DECISION
from anabranch.processors.foresight import Foresight
from anabranch.processors.history_tail import tail_for
from anabranch.processors.intake import Command, Intake, decide_command
from anabranch.processors.leadership import Lease, take_lead
from anabranch.processors.lookout import Lookout
from anabranch.processors.stream_topics import StreamTopics
from anabranch.topics.names import status_topic

log = logging.getLogger("anabranch.controller")

MAX_COMMANDS = 2_000  # a round; the rest waits for the next pass
INDEX_ROWS = 5_000  # so many changes of the journal index call for a round of their own
MESSAGE_TOO_LARGE = 10
REFUSED_WAIT_MS = 10_000  # how long the last round of a carried merge waits after a refusal
GROWTH_LOOK_S = 0.01  # how soon topics that are being changed are looked at again


@dataclass(slots=True)
class Controller:
    """Decides, merges and answers for one control partition while it leads.

    ``leader``: who this is, for people (host, process, start).
    """

    log: Log
    table: Table
    clock: Clock
    settings: Settings
    leader: str
    native_timeout: float = 60.0
    on_event: Callable[[str, str], None] | None = None  # a failpoint's hook
    threads: bool = False  # may use helper threads: to read ahead, and to carry big merges aside
    lease: Lease | None = None
    rounds: int = 0
    _state: State = field(init=False)
    _intake: Intake = field(init=False)
    _hearing: Hearing = field(init=False)
    _carriers: Carriers | None = None
    _topics: StreamTopics | None = None
    _cutter: Cutter | None = None
    _tails: dict[str, Tail] = field(default_factory=dict)
    _foresight: Foresight = field(default_factory=Foresight)
    _autoscaling: Autoscaling = field(default_factory=Autoscaling)
    _lookout: Lookout = field(init=False)
    _careful: int = 0  # in so many rounds there is one thing each: the broker refused a round

    def __post_init__(self) -> None:
        self._state = State(self.table)
        self._intake = Intake(self.log, self.table, self.settings)
        self._hearing = Hearing(0)
        self._lookout = Lookout(self.log, self.clock, status_topic(self.settings.prefix))

    # -- leading --------------------------------------------------------------------------------------

    def lead(self) -> None:
        """Take the lead (design §5). Everything unlogged is dropped first."""
        self.resign()
        with self._lookout.hinting():
            self._lead()

    def _lead(self) -> None:
        self._state = State(self.table)
        self.lease = take_lead(
            self.log,
            self.table,
            self._state,
            self.clock,
            control_partition=self.settings.control_partition,
            prefix=self.settings.prefix,
            leader=self.leader,
            token_key=self.settings.token_key,
            native_timeout=self.native_timeout,
        )
        self._hearing = Hearing(self._now_ms())
        self._intake.missing = self._hearing.missing
        self._lookout.begin(self._state, self._hearing.missing)
        self._intake.begin(self._state)
        self._lookout.find_journals(self._intake, self._state)
        self._tails.clear()
        self._autoscaling = Autoscaling()
        status = TopicPartition(status_topic(self.settings.prefix), self.settings.control_partition)
        self._carriers = Carriers(
            lanes_of(
                self.log, status, self.lease.carriers, self.settings.chunk_bytes, self.threads
            ),
            threads=self.threads,
            trouble=self._hearing.trouble,
            carrying=self._hearing.carrying,
        )
        self._cutter = Cutter(self.log, threads=self.threads)
        self._topics = StreamTopics(
            self.log, self.clock, status.topic, self._cutter, threads=self.threads
        )
        self._cutter.logged(  # a former leader may not have come to it
            {place: low for place, low in self._state.low_water.items() if self._usable(place[0])}
        )
        self._finish_topics()

    def resign(self) -> None:
        """Lead no more. Nothing needs to be said: a successor fences what is left."""
        for part in (self._carriers, self._topics, self._cutter, self.lease):
            if part is not None:
                part.close()
        self._carriers = self._topics = self._cutter = self.lease = None

    @property
    def state(self) -> State:
        """The fold, for inspection."""
        return self._state

    # -- one pass -------------------------------------------------------------------------------------

    def step(self, max_wait: float) -> bool:
        """One pass; waits at most ``max_wait`` seconds for something to do. True if a round was written."""
        check(self.lease is not None, "step is for a controller that leads")
        with self._lookout.hinting():
            return self._step(max_wait)

    def _step(self, max_wait: float) -> bool:
        self._give_up_streams()
        self._carry()
        self._shorten_journals()
        queue = self._intake.queue
        if not queue:
            try:
                self._intake.fetch(self._state, self._wait_for(max_wait))
            except TopicGone as error:
                if not self._lookout.find(self._state, error):
                    raise
                return False
        # Carefully: a command, plain writes, merges in turn, or one kind could keep the others waiting.
        limit = MAX_COMMANDS if not self._careful else int(self._careful % 3 == 0)
        batch = queue[:limit]
        turn = self._turn()
        at_end = (
            len(batch) == len(queue)
            and anything_stale(self._state, self._hearing, turn.now_ms)
            and self._intake.all_read()
        )
        try:
            wrote = self._round(turn, batch, read_to_end=at_end)
        except LogRefused as error:
            self._after_refusal(turn, batch, error)
            return True
        del queue[:limit]
        self._careful = max(0, self._careful - 1)
        self._finish_topics()
        return wrote

    def _round(self, turn: Turn, commands: list[Command], *, read_to_end: bool) -> bool:
        for command in commands:
            decide_command(turn, command)
        horizon = None
        if not self._careful:
            self._autoscaling.decide(turn)
        if not (self._careful and commands):
            horizon = decide_due(turn, read_to_end=read_to_end)
        return self._write(turn, commands, horizon)

    def _after_refusal(self, turn: Turn, commands: list[Command], error: LogRefused) -> None:
        """The broker refused the round's data; nothing happened. Find whose it was and refuse that.

        First each command, each run of plain writes and each merge gets a round of its own; what is refused
        then is answered with an error, passed over, or aborted if it was a decided transaction. All others
        go on.
        """
        self._state = State(self.table)  # the table holds what is committed, and nothing else
        self._tails.clear()
        for txn_id in turn.ended:  # they did not end: without this they would look silent
            self._hearing.heard[txn_id] = turn.now_ms
        if isinstance(error, TopicGone) and self._lookout.find(self._state, error):
            return  # decided anew, without that stream
        if not self._careful:
            most = max(len(commands), len(turn.state.committing), turn.round.plain_runs)
            self._careful = 3 * (most + 1)
            return
        fresh = self._turn()
        if commands:
            kind = EventTooLarge if error.error == MESSAGE_TOO_LARGE else InvalidArgument
            fresh.reply(commands[0].to, refuse(kind(f"the broker refused the events: {error}")))
            self._write(fresh, commands[:1])
            del self._intake.queue[0]
            return
        for txn_id in turn.round.merged:
            if fresh.open(txn_id).row.state == "COMMIT_IN_PROGRESS":
                abort_txn(fresh, txn_id, f"the broker refused its data: {error}")
            else:  # carried aside: there is no way back
                self._hearing.not_before_ms[txn_id] = turn.now_ms + REFUSED_WAIT_MS
                self._hearing.trouble[txn_id] = f"{IN_TROUBLE}: {error}"
        give_up(fresh, turn.round)
        check(
            not fresh.round.empty or bool(turn.round.merged),
            f"the broker refuses what the controller itself says: {error}",
        )
        self._write(fresh)

    def _write(
        self,
        turn: Turn,
        commands: Sequence[Command] = (),
        horizon: int | None = None,
        producer: Producer | None = None,
    ) -> bool:
        """Close the round and make it durable. ``commands``: those that it decides.

        ``producer``: the one in whose native transaction something stands already.
        """
        if self._intake.rows.size > INDEX_ROWS:
            turn.put(k.ROUND_KEY, turn.state.round)  # a round for the index alone
        round_ = close_round(turn, self._intake.done(commands), expired_ms=horizon)
        if round_.empty:
            return False
        for stream in round_.streams:
            if stream not in self._tails:
                self._tails[stream] = tail_for(self.log, self.clock, stream, round_)
        if self.lease is None:
            raise NotLeading("a round is for a controller that leads")
        loads = self._autoscaling.weigh(round_, self._state, self._intake.index, self._tails)
        write_round(
            Durable(
                self.log,
                self.table,
                self.settings.prefix,
                self.settings.control_partition,
                self.threads,
                self._foresight,
            ),
            producer or self.lease.next_producer(),
            round_,
            self._state,
            self._intake.rows,
            self._tails,
            wall_ms=turn.wall_ms,
            carrying=is_carrying(self._state),
        )
        self._autoscaling.add(loads, self._state, self._tails, turn.now_ms)
        self._intake.index.settle(turn.ended, turn.cut)
        for stream in turn.forgotten:
            self._forget_stream(stream)
        if self._cutter is not None:
            self._cutter.logged(turn.cut)
        self.rounds += 1
        if self.on_event is not None and any(op.op == "BEGIN_COMMIT" for _, _, op in round_.ops):
            self.on_event(AFTER_DECISION, "after")
        return True

    def _forget_stream(self, stream: str) -> None:
        """What is kept in memory of a stream that is no more; another one may come under its name."""
        self._tails.pop(stream, None)
        self._intake.forget_stream(stream)
        self._hearing.forget_stream(stream)
        self._autoscaling.forget_stream(stream)
        if self._cutter is not None:
            self._cutter.forget_stream(stream)

    def _turn(self) -> Turn:
        return Turn(
            state=self._state,
            index=self._intake.index,
            settings=self.settings,
            hearing=self._hearing,
            now_us=int(self.clock.wall() * 1_000_000),
            now_ms=self._now_ms(),
            merge_limit=1 if self._careful else None,
            plain_waits=self._careful % 3 == 1,
        )

    def _now_ms(self) -> int:
        return int(self.clock.monotonic() * 1000)

    # -- reading --------------------------------------------------------------------------------------

    def _wait_for(self, max_wait: float) -> float:
        """Seconds that this pass may wait for new records: until the next deadline."""
        plain = self._intake.index.plain_waiting(self._state)
        if self._hearing.crowded or any(self._usable(stream) for stream, _ in plain):
            return 0.0  # there is more to move, or the round before was full
        wall_ms = int(self.clock.wall() * 1000)
        due_ms = next_due_ms(
            self._state, self._intake.index, self._hearing, wall_ms, self._now_ms()
        )
        if due_ms is not None:
            max_wait = min(max_wait, due_ms / 1000)
        if self._state.open:
            max_wait = min(max_wait, CHECK_MS / 1000)
        if self._topics is not None and self._topics.busy:
            max_wait = min(max_wait, GROWTH_LOOK_S)
        return max(0.0, max_wait)

    # -- topics that are gone -------------------------------------------------------------------------

    def _usable(self, stream: str) -> bool:
        return is_usable(self._state, self._hearing, stream)

    def _give_up_streams(self) -> None:
        """Log which streams are lost, and what that ends. One round each: it may end many transactions."""
        after_s = self.settings.lost_after_ms / 1000
        for stream, why in self._lookout.given_up(self._state, after_s):
            turn = self._turn()
            aborted = give_up_stream(turn, stream, why)
            self._write(turn)
            self._lookout.settled(stream)
            log.error("%s is lost: %s; %d transactions are aborted", stream, why, len(aborted))

    # -- effects --------------------------------------------------------------------------------------

    def _carry(self) -> None:
        """Take up what carriers have logged since the last pass; the table follows at once."""
        if self._carriers is None or not self._state.committing:
            return
        wall_ms = int(self.clock.wall() * 1000)
        rows = self._carriers.take(wall_ms)
        for row in rows:
            self._state.apply(k.carry_key(row.txn_id, row.stream, row.number), row)
            if row.done:
                self._hearing.not_before_ms.pop(row.txn_id, None)
        if rows:
            self.table.write(self._state.take_changes())
        gone, self._carriers.gone = self._carriers.gone, []
        for error in gone:
            self._lookout.find(self._state, error)
        self._carriers.sync(self._state, self._intake.index, wall_ms, self._usable)

    def _shorten_journals(self) -> None:
        """Delete what is below the logged low waters; move the next chunk of what keeps them low."""
        if self._cutter is not None:
            self._cutter.cut(self._now_ms())
        if not self._hearing.crowded or self._careful or self.lease is None:
            return
        turn = self._turn()
        producer = self.lease.next_producer
        try:
            move_next(self.log, turn, producer, lambda used: self._write(turn, producer=used))
        except LogRefused:
            self._state = State(self.table)

    def _finish_topics(self) -> None:
        """What is logged about topics is done; also what a former leader left."""
        if self._topics is None:
            return
        for decide_done in self._topics.step(self._state, self._hearing.missing):
            turn = self._turn()
            decide_done(turn)
            try:
                self._write(turn)
            except TopicGone as error:
                self._state = State(self.table)
                self._tails.clear()
                if not self._lookout.find(self._state, error):
                    raise
                return  # all others go on
        if self._topics.missed:
            self._topics.missed = False
            self._lookout.look(self._state)
