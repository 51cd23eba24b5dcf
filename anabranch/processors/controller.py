"""The controller of one control partition: a thin loop round the core.

`Controller.step` is one pass, as `docs/inside/architecture.md` lists it. The loop has no thread, clock or sleep of
its own: time and I/O come through the ports, so the same loop runs on Kafka and in the simulator.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from anabranch.core import limits
from anabranch.core import rows as k
from anabranch.core.decisions.commits.commit import next_due_ms
from anabranch.core.decisions.decide import CHECK_MS, decide_due
from anabranch.core.decisions.expiry import silent_lanes
from anabranch.core.decisions.lanes import resume
from anabranch.core.decisions.plain import give_up
from anabranch.core.decisions.streams import give_up_stream
from anabranch.core.decisions.transactions import abort_txn
from anabranch.core.decisions.turn import Turn, refuse
from anabranch.core.memory import Keepalives, LeaderMemory
from anabranch.core.read_locks import Windows
from anabranch.core.state import State
from anabranch.core.stream_states import CREATING
from anabranch.errors import EventTooLarge, InvalidArgument, check
from anabranch.ports import (
    MESSAGE_TOO_LARGE,
    LogBusy,
    LogError,
    LogFenced,
    LogRefused,
    LogUnavailable,
    RecordsGone,
    TableError,
)
from anabranch.processors.beside import Beside
from anabranch.processors.lanes.command import Command, decide_command
from anabranch.processors.leadership import take_lead
from anabranch.processors.rounds import Rounds
from anabranch.processors.streams.autoscaling import Autoscaling
from anabranch.processors.streams.cleanup import move_next
from anabranch.processors.streams.health import refuses_data
from anabranch.schemas.records import TermRow
from anabranch.topics.names import topics_of

log = logging.getLogger("anabranch.controller")

REFUSED_WAIT_MS = 10_000  # how long the last round of a carried merge waits after a refusal
HAND_OVERS = 5  # tries to log that a leader has resigned, while another one fences it
GROWTH_LOOK_S = 0.01  # the wait between looks at topics that are being changed


@dataclass(slots=True)
class Controller(Rounds):
    """Decides, merges and answers for one control partition while it leads.

    ``terms``: the last ones of this process, perhaps; closed.
    """

    native_timeout: float = 60.0
    terms: list[TermRow] = field(default_factory=list)
    _trying: Sequence[Command] = ()  # the commands of the round that failed
    _lacked_ids: bool = False  # the last lease

    # -- leading --------------------------------------------------------------------------------------

    def lead(self) -> None:
        """Take the lead (design §5). Everything unlogged is dropped first."""
        self.resign()
        self._trying = ()
        try:
            self._lead()
        except LogError as error:
            self._ends(error)
            raise

    def _ends(self, error: LogError) -> None:
        """Lead no more, as the state may be ahead of the log; the next lead looks at the topics of the failure."""
        self.resign()
        self._stream_trouble.hint(error)
        self._culprit.failed(error, self._trying)

    def _lead(self, *, again: bool = False) -> None:
        self._state = State(self.table, trusts_open=self.settings.trusts_open)
        self.lease = take_lead(
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
        keepalives = Keepalives(self._now_ms())
        self._stream_trouble.begin(self._state)
        self._intake.begin(self._state)
        self._culprit.begin(self._state)
        self._stream_trouble.find_journals(self._intake, self._state)
        self._tails.clear()
        self._autoscaling = Autoscaling()
        parts = self.lease, self._stream_trouble, self._state
        beside = self._beside = Beside(
            self.log, self.clock, self.settings, *parts, threads=self.threads
        )
        self._memory = LeaderMemory(
            keepalives,
            waiting=self._stream_trouble.waiting,
            carrying=beside.carriers.carrying,
            foreign=beside.gaps.found,
            lanes=self._lanes.on,
            windows=Windows(self._state.round.hybrid_time),
        )
        beside.cutter.logged(  # a former leader may not have cut them
            {place: low for place, low in self._state.low_water.items() if self._usable(place[0])}
        )
        self._finish_topics()

    def hand_over(self) -> None:
        """Log that this leader has resigned, and resign: then a successor need not wait for its unfinished work.

        A stream in trouble may keep ids busy. A successor passes these over only once that record is logged, and
        each successor that tries fences the other ids. So this leader becomes leader once more to write the record,
        if no other controller has led since.
        """
        lacks = self._lacked_ids if self.lease is None else self.lease.lacks_ids
        busy = lacks or self._stream_trouble.suspects
        for tries in range(1, HAND_OVERS + 1):
            try:
                if self.lease is None and self.terms and busy:
                    self._lead(again=True)
                self._hand_over()
                break
            except LogFenced:
                self.resign()
                if not busy or tries == HAND_OVERS:
                    raise

    def _hand_over(self) -> None:
        term = self._state.term
        ready = self.lease and term and self._beside and self._beside.carriers.close()
        while ready and self.lease and term and self.lease.producers:
            turn = self._turn()
            turn.put(k.TERM_KEY, replace(term, resigned=True))
            try:
                ready = not self._write(turn, producer=self.lease.producers[0])
            except LogBusy:  # with the next id
                self._drop()
        self.resign()

    def resign(self) -> None:
        """Lead no more. No message is needed: a successor fences this leader."""
        if self.lease is not None:
            self._lacked_ids = self.lease.lacks_ids
        for part in (self._beside, self.lease):
            if part is not None:
                part.close()
        self._beside = self.lease = None

    def look(self) -> None:
        """Bring the metrics up to date."""
        parts = self._state, self._intake, self._memory, self._offset_guess, self._tails
        self.metrics.look(*parts, self._culprit.count, self.settings, int(self.clock.wall() * 1000))

    # -- one pass -------------------------------------------------------------------------------------

    def step(self, max_wait: float) -> bool:
        """One pass; waits at most ``max_wait`` seconds for something to do. True if a round was written."""
        check(self.lease is not None, "step is for a controller that leads")
        self._trying = ()
        try:
            return self._step(max_wait)
        except LogError as error:
            self._ends(error)
            raise

    def _step(self, max_wait: float) -> bool:
        self._give_up_streams()
        if self._beside is not None:
            parts = self._state, self.table, self._memory, self._intake.index
            self._beside.carry(*parts, self._usable)
        self._shorten_journals()
        found = self._lanes.follow(self._state)
        if found:  # logged before anything of these lanes is read
            turn = self._turn()
            resume(turn, found)
            if self._written(turn):
                self._lanes.go_on(found)
        wait = 0.0 if self._lanes.control or self._lanes.active else self._wait_for(max_wait)
        failed = self._intake.fetch(self._state, wait)
        if failed and not self._stream_trouble.find(self._state, *failed):
            raise failed[0]
        batch = self._culprit.take(self._lanes)
        try:
            if not self._culprit.may_try(batch, self._turn, self._write):
                self._culprit.done(batch, self._lanes)
                return True
        except (LogRefused, LogUnavailable) as error:
            if not self._is_contained(error):
                raise
            return True
        turn = self._turn()
        silent = silent_lanes(self._state, self._memory.keepalives, turn.now_ms)
        self._lanes.ask(silent, turn.now_ms)
        try:
            wrote = self._round(turn, batch, judge=bool(silent))
        except (LogRefused, LogUnavailable) as error:
            self._trying = batch
            self._after_refusal(turn, batch, error)
            self._trying = ()
            return True
        except LogError:
            self._trying = batch
            raise
        except Exception as error:
            if not batch or isinstance(error, TableError):
                raise
            self._drop()
            self._trying = batch
            self._culprit.raised(None if turn.at is None else (turn.lane, turn.at), error)
            return True
        self._lanes.charge(turn.owed)
        self._intake.passed_over.clear()
        self._intake.warn_unheard(batch, turn.now_ms)
        self._intake.warn_rejected(turn.now_ms)
        self._culprit.done(batch, self._lanes)
        self._finish_topics()
        return wrote

    def _round(self, turn: Turn, commands: list[Command], *, judge: bool) -> bool:
        self._intake.set_aside(turn)
        commands[:] = self._decide(turn, commands)
        turn.at = None
        horizon = asked = None
        if not self._culprit.careful:
            asked = self._autoscaling.decide(turn)
        if not (self._culprit.careful and commands):
            if judge:
                self._lanes.judge(commands)
            horizon = decide_due(turn, judge_silence=judge)
        wrote = self._write(turn, commands, horizon)
        if asked is not None:
            self._autoscaling.has_asked(asked, turn.now_ms)
        return wrote

    def _decide(self, turn: Turn, commands: Sequence[Command]) -> list[Command]:
        """Decide commands of a batch, as far as one round has room and time for them. Returns those decided.

        A lane that was charged all that it is allowed in this round gives the rest of its commands back.
        """
        allowed = self._lanes.allowed(commands)
        decided = []
        charged, most = turn.work, limits.ROUND_WORK.value
        for command in commands:
            if allowed and allowed[command.lane] <= 0:
                continue
            decide_command(turn, command)
            decided.append(command)
            before, charged = charged, turn.work
            command.charge = charged - before
            if allowed:
                allowed[command.lane] -= command.charge
            if charged > most or turn.size > limits.ROUND.value:
                break
        return decided

    def _after_refusal(
        self, turn: Turn, commands: list[Command], error: LogRefused | LogUnavailable
    ) -> None:
        """The round was not written; nothing happened. Decide again without the cause.

        If the broker refuses the data, rounds get fewer commands; then each command, run of plain writes and merge
        gets its own. Refused alone, a command is answered with an error, a run is passed over, and a
        decided transaction is aborted. All others go on.
        """
        self.metrics.add("refused_rounds")
        if self._is_contained(error):
            return
        if not isinstance(error, LogRefused):
            raise error
        if not (refuses_data(error) or isinstance(error, RecordsGone)):
            # A control topic can't be written, or brokers named no topic: the data is not the cause.
            raise LogUnavailable(str(error), error.topics) from error
        if self._culprit.refused(commands, max(len(turn.state.committing), turn.round.plain_runs)):
            return
        fresh = self._turn()
        if commands:
            kind = EventTooLarge if error.error == MESSAGE_TOO_LARGE else InvalidArgument
            fresh.reply(commands[0].to, refuse(kind(f"the broker refused the events: {error}")))
            self._write(fresh, commands[:1])
            self._culprit.done(commands[:1], self._lanes)
            return
        for txn_id in turn.round.merged:
            if fresh.open(txn_id).row.state == "COMMIT_IN_PROGRESS":
                abort_txn(fresh, txn_id, f"the broker refused its data: {error}")
            else:  # carried aside: it can't be aborted
                fresh.merging.wait(txn_id, "refused", turn.now_ms, REFUSED_WAIT_MS, str(error))
        for stream, partition, runs in give_up(fresh, turn.round):
            first, end = runs[0].first, runs[-1].end
            log.error(
                "%s[%d]: plain writes in [%d, %d) of the journal are passed over: %s",
                *(stream, partition, first, end, error),
            )
        if fresh.round.empty and not turn.round.merged:
            raise LogUnavailable(f"the broker refuses the controller's own records: {error}")
        self._write(fresh)

    # -- reading --------------------------------------------------------------------------------------

    def _wait_for(self, max_wait: float) -> float:
        """Seconds that this pass may wait for new records: until the next deadline."""
        plain = self._intake.plain_wait(self._state, self._memory.merging, self._usable)
        if self._memory.cleaning.crowded or not plain:
            return 0.0  # more runs to move, or the round before was full
        max_wait = min(max_wait, plain, self._intake.journal_wait_s)
        parts = self._state, self._intake.index, self._memory.merging
        due_ms = next_due_ms(*parts, int(self.clock.wall() * 1000), self._now_ms())
        if due_ms is not None:
            max_wait = min(max_wait, due_ms / 1000)
        if self._state.open:
            max_wait = min(max_wait, CHECK_MS / 1000)
        if self._beside is not None and self._beside.topics.busy:
            max_wait = min(max_wait, GROWTH_LOOK_S)
        return max(0.0, min(max_wait, self._lanes.wait_s))

    # -- topics that are gone -------------------------------------------------------------------------

    def _give_up_streams(self) -> None:
        """Log which streams are lost, and which transactions that ends. One round each: they may be many."""
        after_s = self.settings.lost_after_ms / 1000
        if self.lease and self._beside:
            parts = self._state, self.lease, self._beside.carriers
            for stream in self._beside.quiet.step(*parts, self._now_ms()):
                self._tails.pop(stream, None)
        for stream, why in self._stream_trouble.given_up(self._state, after_s):
            turn = self._turn()
            aborted = give_up_stream(turn, stream, why)
            if not self._written(turn):
                return
            self._stream_trouble.forget_stream(stream)
            log.error("%s is lost: %s; %d transactions are aborted", stream, why, len(aborted))

    # -- effects --------------------------------------------------------------------------------------

    def _shorten_journals(self) -> None:
        """Delete below the logged low waters; move the next chunk of runs that keep them low."""
        if self._beside is not None:
            self._beside.shorten(self._memory, self._kept)
        if not self._memory.cleaning.crowded or self._culprit.careful or self.lease is None:
            return
        turn = self._turn()
        producer = self.lease.next_producer
        try:
            move_next(self.log, turn, producer, lambda used: self._write(turn, producer=used))
        except (LogRefused, LogUnavailable) as error:
            if not self._is_contained(error) and isinstance(error, LogUnavailable):
                raise

    def _kept(self) -> dict[str, int]:
        """Streams whose histories may be cut, and their partitions."""
        streams = self._state.streams.items()
        return {stream: row.partitions for stream, row in streams if self._usable(stream)}

    def _finish_topics(self) -> None:
        """Log the work on topics that is done; also a former leader's."""
        if self._beside is None:
            return
        topics = self._beside.topics
        for stream, decide_done in topics.step(self._state, self._stream_trouble.waiting):
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
                    self._stream_trouble.forget_stream(stream)  # it is not there yet
                    refused = topics.refused(row, error)
                    if refused is not None:
                        turn = self._turn()
                        refused(turn)
                        self._write(turn)
                elif not contained:
                    raise
                return  # the state is another object now
        for missed in (topics.missed, self._beside.cutter.missed):
            if missed:
                self._stream_trouble.look(self._state, missed)
                missed.clear()
