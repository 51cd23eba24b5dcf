"""The controller of one control partition: while it is leader, it decides commands and makes the results durable.

`Controller.step` is one pass, in the order that `docs/inside/architecture.md` lists. The controller has no thread,
clock or sleep of its own: time and I/O come through ports, so the same code runs on Kafka and in the simulator.
`leader` has the thread that calls it.

A pass decides in *turns*. `_turn` begins one over the state, `anabranch.core` decides in it, and `_write` makes its
round durable (`durability` has the order). While commands come, the next turn is decided while a round is being
written (`_overlap`). If a round cannot be written, nothing of it has happened: the turn is dropped, and the cause
is excluded from the next one (a stream that waits, or a suspect command).

The file is long because a pass needs all parts of a leader, and only this class knows them all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from anabranch.batches.one_shots import decode_lazily
from anabranch.controller.autoscaling import Autoscaling, StreamLoad
from anabranch.controller.background import BackgroundWork
from anabranch.controller.carrier import is_staging
from anabranch.controller.cleanup import move_next
from anabranch.controller.durability import Durable, OffsetGuess, write_round
from anabranch.controller.history_tail import tail_for
from anabranch.controller.intake import Intake
from anabranch.controller.lanes import Command, Lanes, decide_command
from anabranch.controller.leadership import Lease, become_leader
from anabranch.controller.metrics import Metrics
from anabranch.controller.suspects import SuspectCommands
from anabranch.controller.topic_trouble import TopicTrouble, places_of, refuses_data
from anabranch.core import rows as k
from anabranch.core.across.messages import LEVEL as ACROSS_LEVEL
from anabranch.core.decisions.across import coordinating_one_shots, receiving
from anabranch.core.decisions.across.holding import holds_of
from anabranch.core.decisions.cleanup import log_epochs_again
from anabranch.core.decisions.commit import next_due_ms
from anabranch.core.decisions.decide import CHECK_MS, decide_due, decide_freed
from anabranch.core.decisions.lanes import resume
from anabranch.core.decisions.merge import give_up
from anabranch.core.decisions.streams import give_up_stream
from anabranch.core.decisions.transactions import abort_txn, silent_lanes
from anabranch.core.decisions.turn import Settings, Turn, close_round, refuse
from anabranch.core.history_records import Tail
from anabranch.core.locks import row_turns, segment_locks
from anabranch.core.locks.recent_writes import RecentWrites
from anabranch.core.memory import Keepalives, LeaderMemory, across_of, is_usable
from anabranch.core.round import Answer, Round
from anabranch.core.state import State
from anabranch.core.stream_states import CREATING
from anabranch.errors import EventTooLarge, InvalidArgument, NotLeader, check
from anabranch.ports import (
    MESSAGE_TOO_LARGE,
    Clock,
    Log,
    LogBusy,
    LogError,
    LogFenced,
    LogRefused,
    LogUnavailable,
    Producer,
    RecordsGone,
    Steps,
    Table,
    TableError,
)
from anabranch.protocol import limits
from anabranch.protocol.schemas.records import TermRow
from anabranch.topics.names import (
    history_topic,
    journal_topic,
    stream_topic,
    topics_of,
)

log = logging.getLogger("anabranch.controller")

REFUSED_WAIT_MS = 10_000  # how long the last round of a staged merge waits after a refusal
HAND_OVERS = 5  # tries to log that a leader has resigned, if others fence it or no broker answers
OVERLAP_S = 0.02  # how long rounds may overlap before other work gets its turn
# A round of fewer commands does not overlap: brokers and leader spend more on the round than on its commands.
OVERLAP_FROM = 24
ADVANCE_EVERY = 8  # commands, between looks for the answer to the round under way
GROWTH_LOOK_S = 0.01  # how long a pass waits at most while topics are being changed


@dataclass(slots=True)
class _RoundUnderWay:
    """A round that is being written: its turn, commands and producer, and the steps that are left.

    ``loads``: for the autoscaler. ``delayed``: answers in commit wait. ``begun``: from `Metrics.begin`.
    ``failure``: why a step failed.
    """

    turn: Turn
    commands: Sequence[Command]
    producer: Producer
    steps: Steps[None]
    loads: Mapping[str, StreamLoad]
    delayed: list[Answer]
    begun: float
    is_written: bool = False
    failure: Exception | None = None


@dataclass(slots=True)
class Controller:
    """Decides, merges and answers for one control partition while it is leader (while it has a ``lease``).

    ``leader``: this process, for people: host, process id, start. ``threads``: whether helper threads may read
    ahead, carry big merges and change topics; without them, all of that runs inside of `step`. ``overlap_from``:
    from this number of commands on, `step` may leave a round under way, so that the next `step` decides another one
    meanwhile; 0: never. ``terms``: see `become_leader`.
    """

    log: Log
    table: Table
    clock: Clock
    settings: Settings
    leader: str
    threads: bool = False
    overlap_from: int = 0
    lease: Lease | None = None
    rounds: int = 0
    metrics: Metrics = field(default_factory=Metrics)
    native_timeout: float = 60.0
    terms: list[TermRow] = field(default_factory=list)
    _state: State = field(init=False)
    _intake: Intake = field(init=False)
    _lanes: Lanes = field(init=False)
    _memory: LeaderMemory = field(init=False)
    _background: BackgroundWork | None = None
    _tails: dict[str, Tail] = field(default_factory=dict)
    _offset_guess: OffsetGuess = field(default_factory=OffsetGuess)
    _autoscaling: Autoscaling = field(default_factory=Autoscaling)
    _trouble: TopicTrouble = field(init=False)
    _suspects: SuspectCommands = field(init=False)
    _under_way: _RoundUnderWay | None = None
    _alone_from: float = 0.0  # from this monotonic second on, no round is left under way
    _trying: Sequence[Command] = ()  # the commands of the round that failed
    _lacked_ids: bool = False  # `lacks_ids` of the last lease, or not known

    def __post_init__(self) -> None:
        self._state = self._state_of_table()
        self._memory = LeaderMemory(Keepalives(0))
        self._suspects = SuspectCommands(self.settings.skip_commands)
        self._trouble = TopicTrouble(self.log, self.clock, self.settings)
        self._lanes = Lanes(self.log, self.clock, self.settings, self._trouble)
        waiting = self._trouble.waiting
        self._intake = Intake(self.log, self.table, self.clock, self.settings, waiting, self._lanes)

    @property
    def state(self) -> State:
        """The state as folded from the status log, for inspection."""
        return self._state

    # -- leadership -----------------------------------------------------------------------------------

    def lead(self) -> None:
        """Become leader (`leadership` has the steps). Everything that is not logged is dropped first."""
        self.resign()
        self._trying = ()
        try:
            self._lead()
        except LogError as error:
            self._ends(error)
            raise

    def _state_of_table(self) -> State:
        return State(self.table, trusts_open=self.settings.trusts_open, decode=decode_lazily)

    def _lead(self, *, again: bool = False) -> None:
        self._state = self._state_of_table()
        former = self.terms[-1:]
        try:
            self.lease = become_leader(
                self.log,
                self.table,
                self._state,
                self.clock,
                control_partition=self.settings.control_partition,
                prefix=self.settings.prefix,
                leader=self.leader,
                native_timeout=self.native_timeout,
                terms=self.terms,
                again=again,
            )
        except (LogError, NotLeader):
            if (
                self.terms[-1:] != former
            ):  # the term may be logged, and ids may have been passed over
                self._lacked_ids = True
            raise
        keepalives = Keepalives(self._now_ms())
        self._trouble.begin(self._state)
        self._intake.begin(self._state)
        self._suspects.begin(self._state)
        self._trouble.find_journals(self._intake.find_ends, self._state)
        self._tails.clear()
        self._autoscaling = Autoscaling()
        background = self._background = BackgroundWork(
            self.log,
            self.clock,
            self.settings,
            lease=self.lease,
            trouble=self._trouble,
            state=self._state,
            threads=self.threads,
        )
        self._memory = LeaderMemory(
            keepalives,
            waiting=self._trouble.waiting,
            staging=background.carriers.staging,
            foreign=background.foreign_records.found,
            lanes=self._lanes.on,
            holds=holds_of(self._state),
            across=across_of(self._state, on=self.settings.across),
            recent_writes=RecentWrites(self._state.round.hybrid_time),
        )
        background.truncator.logged(  # a former leader may not have applied them
            {place: low for place, low in self._state.low_water.items() if self._usable(place[0])}
        )
        self._finish_topics()

    def _ends(self, error: LogError) -> None:
        """Stop being leader after a failure, as the state may be ahead of the log.

        The next leadership begins with a check of the topics that the failure names.
        """
        self.resign()
        self._trouble.hint(error)
        self._suspects.failed(error, self._trying)

    def resign(self) -> None:
        """Stop being leader. No record is needed: a successor fences this leader."""
        if self._under_way is not None:
            self._under_way.steps.close()
            self._under_way = None
        if self.lease is not None:
            self._lacked_ids = self.lease.lacks_ids
        for part in (self._background, self.lease):
            if part is not None:
                part.close()
        self._background = self.lease = None

    def hand_over(self) -> None:
        """Log that this leader has resigned, and resign: a successor need not wait for its unfinished work then.

        A stream in trouble may keep transactional ids busy. A successor may not pass over busy ids before the
        record of the resignation is logged, and each successor that tries fences the other ids. So this leader
        becomes leader once more to write the record, if no other controller has led since.
        """
        lacks = self._lacked_ids if self.lease is None else self.lease.lacks_ids
        busy = lacks or self._trouble.suspects
        for tries in range(1, HAND_OVERS + 1):
            try:
                if self._under_way is not None:
                    self._end_overlap(self._under_way)
                if self.lease is None and self.terms and busy:
                    self._lead(again=True)
                self._hand_over()
                break
            except (LogFenced, LogUnavailable):
                self.resign()
                if not busy or tries == HAND_OVERS:
                    raise

    def _hand_over(self) -> None:
        term = self._state.term
        ready = self.lease and term and self._background and self._background.carriers.close()
        while ready and self.lease and term and self.lease.producers:
            turn = self._turn()
            turn.put(k.TERM_KEY, replace(term, resigned=True))
            try:
                ready = not self._write(turn, producer=self.lease.producers[0])
            except LogBusy:  # try again with the next id
                self._drop()
        self.resign()

    def took(self, busy_us: int) -> None:
        """Note the processor time of the thread that makes the passes, in microseconds."""
        self._memory.busy_us = busy_us

    def update_metrics(self) -> None:
        """Bring the metrics up to date."""
        self.metrics.update(
            self._state,
            self._intake,
            self._memory,
            self._tails,
            native_aborts=self._offset_guess.misses,
            quarantined=self._suspects.count,
            settings=self.settings,
            wall_ms=int(self.clock.wall() * 1000),
        )

    # -- one pass -------------------------------------------------------------------------------------

    def step(self, max_wait: float) -> bool:
        """Make one pass. Waits at most ``max_wait`` seconds for something to do.

        False: no round was written, and none failed.
        """
        check(self.lease is not None, "step is for a controller that leads")
        self._trying = ()
        try:
            return self._step(max_wait)
        except LogError as error:
            self._ends(error)
            raise

    def _step(self, max_wait: float) -> bool:
        if self._under_way is not None:
            self._overlap(self._under_way)
            return True
        self._alone_from = self.clock.monotonic() + OVERLAP_S
        self._give_up_streams()
        if self._background is not None:
            self._background.stage(
                self._state, self.table, self._memory, self._intake.index, self._usable
            )
        self._shorten_journals()
        self._follow_lanes()
        wait = 0.0 if self._lanes.control or self._lanes.active else self._wait_for(max_wait)
        failed = self._intake.fetch(self._state, wait)
        if failed and not self._trouble.find(self._state, *failed):
            raise failed[0]
        batch = self._suspects.take(self._lanes)
        try:
            if not self._suspects.may_try(batch, self._turn, self._write):
                self._suspects.done(batch, self._lanes)
                return True
        except (LogRefused, LogUnavailable) as error:
            if not self._is_contained(error):
                raise
            return True
        return self._decide_round(batch)

    def _follow_lanes(self) -> None:
        """Log where new lanes begin, before any of their commands is read."""
        found = self._lanes.follow(self._state)
        if found:
            turn = self._turn()
            resume(turn, found)
            if self._written(turn):
                self._lanes.go_on(found)

    def _decide_round(self, batch: list[Command]) -> bool:
        """Decide these commands and all that is due, and write the round. False: there was nothing to write.

        The round may be left under way.
        """
        turn = self._turn()
        silent = silent_lanes(self._state, self._memory.keepalives, turn.now_ms)
        self._lanes.ask(silent, turn.now_ms)
        if not self._tried(turn, batch, lambda: self._round(turn, batch, judge=bool(silent))):
            return True
        if self._under_way is None:
            self._decided(turn, batch)
            self._finish_topics()
        return not turn.round.empty

    def _tried(self, turn: Turn, commands: Sequence[Command], do: Callable[[], None]) -> bool:
        """Decide or write the turn's round by calling ``do``. False: it failed, nothing of it has happened, and the
        cause is excluded from the next rounds.
        """
        try:
            do()
        except (LogRefused, LogUnavailable) as error:
            self._trying = commands
            self._after_refusal(turn, commands, error)
            self._trying = ()
            return False
        except LogError:
            self._trying = commands
            raise
        except Exception as error:
            if not commands or isinstance(error, TableError):
                raise
            self._drop()
            self._trying = commands
            self._suspects.raised(None if turn.at is None else (turn.lane, turn.at), error)
            return False
        return True

    def _decided(self, turn: Turn, commands: Sequence[Command]) -> None:
        """Note that the turn's round is written, or had nothing to write."""
        self._lanes.charge(turn.owed)
        self._intake.warn_unanswered(commands, turn.now_ms)
        self._intake.warn_rejected(turn.now_ms)
        self._suspects.done(commands, self._lanes)

    def _round(self, turn: Turn, commands: list[Command], *, judge: bool) -> None:
        self._intake.quarantine(turn)
        commands[:] = self._decide(turn, commands)
        turn.at = None
        horizon = asked = None
        if not self._suspects.careful:
            asked = self._autoscaling.decide(turn)
        if not (self._suspects.careful and commands):
            if judge:
                self._lanes.judge(commands)
            horizon = decide_due(turn, judge_silence=judge)
        overlaps = asked is None and self._may_overlap(commands)
        self._write_or_begin(turn, commands, horizon, overlaps=overlaps)
        if asked is not None:
            self._autoscaling.has_asked(asked, turn.now_ms)

    # -- rounds that overlap --------------------------------------------------------------------------

    def _may_overlap(self, commands: Sequence[Command]) -> bool:
        """Whether the next round may be decided while a round with these commands is being written.

        A lone command is answered sooner if nothing else is done meanwhile. Other work, like topics and staged
        merges, has its turn between rounds, at least every `OVERLAP_S`.
        """
        return (
            len(commands) > 1
            and len(commands) >= self.overlap_from > 0
            and not self._suspects.careful
            and not commands[0].control
            and not self._intake.passed_over
            and not is_staging(self._state)
            and self.clock.monotonic() < self._alone_from
        )

    def _overlap(self, former: _RoundUnderWay) -> None:
        """Finish the round under way. Meanwhile decide the next one, if enough commands have come, and begin it."""
        self._lanes.replies.send_due()
        self._intake.fetch(self._state, 0.0, index=False)
        more = self._suspects.take_more(self._lanes)
        if len(more) >= max(1, self.overlap_from):
            wrote = self._overlap_with(former, more)
        else:  # they are decided later, together with others
            wrote = self._end_overlap(former)
        if wrote and self._under_way is None:
            self._finish_topics()

    def _overlap_with(self, former: _RoundUnderWay, more: list[Command]) -> bool:
        """Decide these commands, finish the round under way, and write or begin theirs. False: a round failed."""
        turn = self._turn(former.turn)
        horizon = failure = None
        try:
            self._intake.quarantine(turn)
            more[:] = self._decide(turn, more)
            turn.at = None
            horizon = decide_due(turn, judge_silence=False)
        except Exception as error:  # noqa: BLE001 - raised once the former round is written
            failure = error

        def begin() -> None:
            if failure is not None:
                raise failure
            turn.follows()
            self._write_or_begin(turn, more, horizon, overlaps=self._may_overlap(more))

        if not (self._end_overlap(former) and self._tried(turn, more, begin)):
            return False
        if self._under_way is None:
            self._decided(turn, more)
        return True

    def _end_overlap(self, former: _RoundUnderWay) -> bool:
        """Finish the round under way. False: it failed, and nothing of it, or of a later turn, has happened."""
        self._under_way = None
        if not self._tried(former.turn, former.commands, lambda: self._finish(former)):
            return False
        self._decided(former.turn, former.commands)
        return True

    def _advance(self) -> None:
        """Take the next step of the round under way, if brokers have answered the last one."""
        writing = self._under_way
        if writing is None or writing.is_written or writing.failure is not None:
            return
        try:
            if writing.producer.is_answered():
                self._take_step(writing)
        except Exception as error:  # noqa: BLE001 - raised when the round is finished
            writing.failure = error

    def _write_or_begin(
        self, turn: Turn, commands: Sequence[Command], horizon: int | None, *, overlaps: bool
    ) -> None:
        """Write a turn's round. ``overlaps``: only begin to write it, and leave it under way."""
        writing = self._begin(turn, commands, horizon)
        if writing is None:
            return
        if overlaps:
            self._under_way = writing
            self._lanes.decide(commands)
        else:
            self._finish(writing)
            self._intake.passed_over.clear()

    def _decide(self, turn: Turn, commands: Sequence[Command]) -> list[Command]:
        """Decide commands of a batch until one round has no more room or time. Returns the decided commands.

        A lane that was charged all its units of this round gives the rest of its commands back. Messages come
        first, and commits that they set free are merged before any command is decided.
        """
        allowed = self._lanes.allowed(commands)
        decided: list[Command] = []
        charged, most = turn.work, limits.ROUND_WORK.value
        was_message = False
        for command in commands:
            if was_message and not command.control:
                turn.at = None
                decide_freed(turn)
                charged = turn.work
            was_message = command.control
            if allowed and not was_message and allowed[command.lane] <= 0:
                continue
            if len(decided) % ADVANCE_EVERY == 0:
                self._advance()
            decide_command(turn, command)
            decided.append(command)
            before, charged = charged, turn.work
            command.charge = charged - before
            if allowed and not was_message:
                allowed[command.lane] -= command.charge
            if charged > most or turn.size > limits.ROUND.value:
                break
        return decided

    def _after_refusal(
        self, turn: Turn, commands: Sequence[Command], error: LogRefused | LogUnavailable
    ) -> None:
        """Exclude the cause of a round that was not written, so that the rest can be decided again.

        If the broker refuses the data, rounds get fewer commands; then each command, run of plain writes and merge
        gets a round of its own. If the broker refuses such a round, its command is answered with an error, its run
        is skipped, or its decided transaction is aborted. Nothing else is affected.
        """
        self.metrics.add("refused_rounds")
        if self._is_contained(error):
            return
        if not isinstance(error, LogRefused):
            raise error
        if not (refuses_data(error) or isinstance(error, RecordsGone)):
            # A control topic can't be written, or brokers named no topic: the data is not the cause.
            raise LogUnavailable(str(error), error.topics) from error
        if self._suspects.refused(commands, max(len(turn.state.committing), turn.round.plain_runs)):
            return
        fresh = self._turn()
        if commands:
            kind = EventTooLarge if error.error == MESSAGE_TOO_LARGE else InvalidArgument
            fresh.reply(commands[0].to, refuse(kind(f"the broker refused the events: {error}")))
            self._write(fresh, commands[:1])
            self._suspects.done(commands[:1], self._lanes)
            return
        for txn_id in turn.round.merged:
            # If it is not logged, or open, its decision with other control partitions was in this round.
            if fresh.state.open.get(txn_id) is None:
                coordinating_one_shots.refuse_shot(fresh, txn_id, str(error))
            elif fresh.open(txn_id).row.state in ("OPEN", "COMMIT_IN_PROGRESS"):
                abort_txn(fresh, txn_id, f"the broker refused its data: {error}")
            else:  # a staged merge can't be aborted
                fresh.merging.wait(txn_id, "refused", turn.now_ms, REFUSED_WAIT_MS, str(error))
        for stream, partition, runs in give_up(fresh, turn.round):
            first, end = runs[0].first, runs[-1].end
            log.error(
                "%s[%d]: plain writes in [%d, %d) of the journal are passed over: %s",
                stream,
                partition,
                first,
                end,
                error,
                extra={"stream": stream},
            )
        if fresh.round.empty and not turn.round.merged:
            raise LogUnavailable(f"the broker refuses the controller's own records: {error}")
        self._write(fresh)

    # -- rounds ---------------------------------------------------------------------------------------

    def _turn(self, former: Turn | None = None) -> Turn:
        self._let_span()
        return Turn(
            state=self._state,
            index=self._intake.index,
            settings=self.settings,
            memory=self._memory,
            now_us=int(self.clock.wall() * 1_000_000),
            now_ms=self._now_ms(),
            busy=self._intake.busy,
            merge_limit=1 if self._suspects.one_each else None,
            plain_waits=self._suspects.plain_waits,
            former=former,
        )

    def _let_span(self) -> None:
        """Allow transactions over several control partitions, once there are several and the feature level does."""
        row = self._state.feature
        if self.settings.across or row is None or row.level < ACROSS_LEVEL:
            return
        if max(row.control_partitions, self.settings.control_partitions) > 1:
            self.settings = replace(self.settings, across=True)
            self._memory.across.on = True

    def _write(
        self,
        turn: Turn,
        commands: Sequence[Command] = (),
        horizon: int | None = None,
        producer: Producer | None = None,
    ) -> bool:
        """Close the turn's round and make it durable. False if there is nothing to write.

        ``commands``: the commands that the round decides. ``producer``: the producer whose native transaction has
        records already.
        """
        writing = self._begin(turn, commands, horizon, producer)
        if writing is not None:
            self._finish(writing)
        return writing is not None

    def _begin(
        self,
        turn: Turn,
        commands: Sequence[Command] = (),
        horizon: int | None = None,
        producer: Producer | None = None,
    ) -> _RoundUnderWay | None:
        """Close the turn's round and begin to write it. Arguments: see `_write`. None: nothing to write."""
        if self._intake.is_full:
            turn.put(k.ROUND_KEY, turn.state.round)  # a round for the index alone
        log_epochs_again(turn)
        logged = self._state.round.hybrid_time
        open_at, control_at, lanes_at = self._intake.positions(self._state, commands)
        round_ = close_round(turn, open_at, control_at, lanes_at, expired_ms=horizon)
        for why in round_.ignored:
            self.metrics.add("messages_ignored", why)
        self._lanes.replies.send_now(round_, logged)
        self.metrics.sent(round_.questions)
        self._end_spans(round_.facts)
        if round_.empty:
            turn.done()
            return None
        if self.lease is None or self._background is None:
            raise NotLeader("a round is for a controller that leads")
        touched = round_.touched
        self._trouble.check(self._state, touched, round_.reserved)
        self._find_tails(round_, self.lease)
        moving = [stream for stream, _ in self._memory.cleaning.crowded[:1]]
        self._background.lost_markers.touched([*touched, *moving], turn.now_ms)
        loads = self._autoscaling.weigh(round_, self._state, self._intake.index, self._tails)
        begun = self.metrics.begin()
        producer = producer or self.lease.next_producer()
        delayed = self._lanes.replies.take_waiting(round_)
        steps = write_round(
            self._durable(self._background),
            producer,
            round_,
            self._state,
            self._intake.rows,
            self._tails,
            wall_ms=turn.wall_ms,
            staging=is_staging(self._state),
        )
        writing = _RoundUnderWay(turn, commands, producer, steps, loads, delayed, begun)
        self._take_step(writing)
        return writing

    def _take_step(self, writing: _RoundUnderWay) -> None:
        """Take the next step of writing a round."""
        try:
            next(writing.steps)
        except StopIteration:
            writing.is_written = True
        except LogBusy as error:
            log.warning("%s", error)
            if self.lease is not None:
                self.lease.leave_out(writing.producer)
            raise

    def _finish(self, writing: _RoundUnderWay) -> None:
        """Take the steps that are left of writing a round. Then change memory, and begin the round's effects."""
        if writing.failure is not None:
            raise writing.failure
        while not writing.is_written:
            self._take_step(writing)
        background, turn, round_ = self._background, writing.turn, writing.turn.round
        if background is None:
            raise NotLeader("a round is for a controller that leads")
        self._lanes.replies.hold(writing.delayed, turn.hybrid_time)
        self._autoscaling.add(writing.loads, self._state, self._tails, turn.now_ms)
        turn.done()
        background.carriers.forget(turn.ended)
        for stream in turn.forgotten:
            self._forget_stream(stream)
        background.truncator.logged(turn.cut)
        for row in round_.audit:
            said = {"lane": row.lane, "command": row.command}
            log.info("by lane %s: %s %s", row.lane, row.command, row.what, extra=said)
        for what in round_.unread:
            log.warning("%s", what)
        self.rounds += 1
        self.metrics.wrote(round_, len(writing.commands), writing.begun)
        self._end_spans([*round_.replies, *writing.delayed])

    def _end_spans(self, answers: Iterable[Answer]) -> None:
        """End the spans of commands that are answered, if this process traces."""
        if self._lanes.served is not None:
            for to, result in answers:
                self._lanes.served.answered(to.lane, to.correlation_id, result)

    def _find_tails(self, round_: Round, lease: Lease) -> None:
        """Find the ends of the histories to which no earlier round of this leadership has written."""
        for stream in round_.streams:
            if stream not in self._tails:
                lease.check(places_of(self._state, stream))
                self._tails[stream] = tail_for(self.log, self.clock, stream, round_)

    def _durable(self, background: BackgroundWork) -> Durable:
        return Durable(
            log=self.log,
            send=self._lanes.replies.send,
            table=self.table,
            clock=self.clock,
            prefix=self.settings.prefix,
            control_partition=self.settings.control_partition,
            journals=background.journals,
            offset_guess=self._offset_guess,
            appended=background.foreign_records.appended,
        )

    def _drop(self) -> None:
        """Drop an unwritten turn: read the state before it from the table, and the histories' ends from the log."""
        self._state = self._state_of_table()
        self._memory.written.clear()  # the turn may have frozen locks
        self._lanes.decide_again()
        self._tails.clear()

    def _is_contained(self, error: LogError) -> bool:
        """Whether the commands of a round that was not written can be decided again, without the error's cause."""
        self._drop()
        if isinstance(error, LogBusy):
            return True  # the next try has another transactional id
        if refuses_data(error):
            # If a controller's own record is refused, a topic's setting is wrong, as such records are never too
            # big.
            own = (journal_topic, history_topic)
            topics = {topic(stream) for stream in self._state.streams for topic in own}
            if not error.topics & topics:
                streams = {s for s in self._state.streams if stream_topic(s) in error.topics}
                return not self._trouble.may_be_refused(self._state, streams)
        return self._trouble.find(self._state, error)

    def _written(self, turn: Turn) -> bool:
        """Write the turn's round. False: not now, because a stream has to wait."""
        try:
            return self._write(turn) or True
        except (LogRefused, LogUnavailable) as error:
            if not self._is_contained(error):
                raise
            return False

    # -- waiting --------------------------------------------------------------------------------------

    def _wait_for(self, max_wait: float) -> float:
        """Seconds that this pass may wait for new records: until the next deadline."""
        plain = self._intake.plain_wait(self._state, self._memory, self._usable)
        if self._memory.cleaning.crowded or not plain:
            return 0.0  # more runs to move, or the round before was full
        max_wait = min(max_wait, plain, self._intake.journal_wait_s)
        due_ms = next_due_ms(
            self._state,
            self._intake.index,
            self._memory.merging,
            int(self.clock.wall() * 1000),
            self._now_ms(),
        )
        if due_ms is not None:
            max_wait = min(max_wait, due_ms / 1000)
        for due_ms in (
            row_turns.next_due_ms(self._memory.row_turns, self._now_ms()),
            segment_locks.next_due_ms(self._memory.segment_asks, self._now_ms()),
            self._memory.holds.due_ms(self._now_ms()),
            receiving.next_due_ms(self._memory.across, self._now_ms()),
        ):
            if due_ms is not None:
                max_wait = min(max_wait, due_ms / 1000)
        if self._state.open:
            max_wait = min(max_wait, CHECK_MS / 1000)
        if self._background is not None and self._background.topics.busy:
            max_wait = min(max_wait, GROWTH_LOOK_S)
        return max(0.0, min(max_wait, self._lanes.wait_s))

    # -- topics that are gone -------------------------------------------------------------------------

    def _give_up_streams(self) -> None:
        """End native transactions that lack markers. Then log which streams are lost, and abort their transactions.

        Each lost stream gets a round of its own, because its transactions may be many.
        """
        after_s = self.settings.lost_after_ms / 1000
        if self.lease and self._background:
            carriers = self._background.carriers
            checked = self._background.lost_markers.step(
                self._state, self.lease, carriers, self._now_ms()
            )
            for stream in checked:
                self._tails.pop(stream, None)
        for stream, why in self._trouble.given_up(self._state, after_s):
            turn = self._turn()
            aborted = give_up_stream(turn, stream, why)
            if not self._written(turn):
                return
            self._trouble.forget_stream(stream)
            said = "%s is lost: %s; %d transactions are aborted"
            log.error(said, stream, why, len(aborted), extra={"stream": stream})

    # -- effects --------------------------------------------------------------------------------------

    def _shorten_journals(self) -> None:
        """Delete records below the logged low waters. Move the next chunk of runs that keep a low water down."""
        if self._background is not None:
            self._background.shorten(self._memory, self._kept)
        if not self._memory.cleaning.crowded or self._suspects.careful or self.lease is None:
            return
        turn = self._turn()
        producer = self.lease.next_producer
        try:
            move_next(self.log, turn, producer, lambda used: self._write(turn, producer=used))
        except (LogRefused, LogUnavailable) as error:
            if not self._is_contained(error) and isinstance(error, LogUnavailable):
                raise

    def _kept(self) -> dict[str, int]:
        """The streams whose histories may be truncated, with their numbers of partitions."""
        streams = self._state.streams.items()
        return {stream: row.partitions for stream, row in streams if self._usable(stream)}

    def _finish_topics(self) -> None:
        """Log the results of work on topics, and begin more."""
        if self._background is None:
            return
        topics = self._background.topics
        for stream, decide_done in topics.step(self._state):
            turn = self._turn()
            decide_done(turn)
            try:
                self._write(turn)
            except (LogRefused, LogUnavailable) as error:
                contained = self._is_contained(error)
                row = self._state.streams.get(stream)
                named = error.topics and error.topics <= {*topics_of(stream)}
                own = named or isinstance(error, LogRefused)
                if own and row is not None and row.state == CREATING:
                    self._trouble.end("stream", stream)  # the stream is not created yet
                    refused = topics.refused(row, error)
                    if refused is not None:
                        turn = self._turn()
                        refused(turn)
                        self._write(turn)
                elif not contained:
                    raise
                return  # the state is another object now
        for missed in (topics.missed, self._background.truncator.missed):
            if missed:
                self._trouble.look(self._state, missed)
                missed.clear()

    def _forget_stream(self, stream: str) -> None:
        """Drop what memory keeps of a forgotten stream: a new one may get its name."""
        self._tails.pop(stream, None)
        self._intake.forget_stream(stream)
        self._autoscaling.forget_stream(stream)
        self._trouble.forget_stream(stream)
        if self._background is not None:
            self._background.forget_stream(stream)

    def _now_ms(self) -> int:
        return int(self.clock.monotonic() * 1000)

    def _usable(self, stream: str) -> bool:
        return is_usable(self._state, self._trouble.waiting, stream)
