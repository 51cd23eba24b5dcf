"""One turn of a control partition: commands and due deadlines become one `Round`.

The shell (the controller's code around the core) writes a round as one native transaction. A `Turn` is all that
decisions see: the state, the journal index, the settings, the leader's memory, and the time. `put` applies each row
at once, so that the next command of the same round sees the row. State without a row (`core.memory`) changes in the
turn's drafts. A turn that is not written has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from anabranch import errors
from anabranch.core import rows as k
from anabranch.core import work
from anabranch.core.across.holds import Holds
from anabranch.core.authorize import Right, of_scope, rights_of, shown
from anabranch.core.journal_index import JournalIndex
from anabranch.core.locks.recent_writes import RecentWritesDraft
from anabranch.core.memory import (
    Across,
    Cleaning,
    Drafts,
    Histories,
    Keepalives,
    LeaderMemory,
    Merging,
    RowTurns,
    SegmentAsks,
    Wait,
    is_usable,
    trouble_of,
    wait_of,
)
from anabranch.core.round import Message, ReplyTo, Round
from anabranch.core.state import OpenTxn, State
from anabranch.core.stream_settings import RETENTION_MS, latest_time
from anabranch.core.transaction_states import FINISHED, TRANSACTIONS, Op
from anabranch.errors import check
from anabranch.protocol import hybrid_time, limits
from anabranch.protocol.ids import TXN_ID_SIZE, control_partition_of, made_ms_of
from anabranch.protocol.legal_names import OPEN_LANE
from anabranch.protocol.messages import weight
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import MAX_KEEPALIVE_MS, Rights, check_right, is_genuine, peek

DAY_MS = 86_400_000
FORGOTTEN = (
    "no transaction of this id is known; if there was one, "
    "its outcome is older than the retention of outcomes"
)
_WRITER = attrgetter("writer")
AT_END = -1  # a lane's position: the end of its commands, which is not known yet
WAITING = "its commit is not decided: it waits for the journal to cover the receipts"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a control partition on which decisions depend."""

    control_partition: int
    control_partitions: int
    prefix: str
    reply_partitions: int = 1
    retention_ms: int = 7 * DAY_MS
    max_open: int = 100_000
    max_uncommitted_bytes: int = 64 << 30  # in journals; above it, new transactions are refused
    # The most unneeded bytes that a journal partition keeps before runs are moved.
    move_bytes: int = 256 << 20
    clean_ms: int = 5_000  # how often journals are checked for truncation
    clean_records: int = 10_000  # a journal partition is truncated by at least this many offsets,
    clean_bytes: int = 8 << 20  # or bytes,
    clean_after_ms: int = 3_600_000  # or by any number, if it could be truncated for this long
    clean_history_ms: int = 60_000  # how often histories are checked for truncation
    # After this many commits the epoch is logged again, so that the history can be truncated there.
    epoch_again: int = 4_096
    max_keepalive_ms: int = MAX_KEEPALIVE_MS
    max_streams: int = 10_000
    max_partitions: int = 5_000  # in all streams, and in their journals
    # (lane, offset) of commands that an operator quarantines.
    skip_commands: frozenset[tuple[str, int]] = frozenset()
    lanes_only: bool = False  # the lane `open` is not served
    # The lane `open` may scale and set series from the start, and has no quotas.
    trusts_open: bool = False
    # The most that the commands topic takes of big commands, unpacked.
    command_bytes: int = limits.COMMAND.value
    # The biggest record that the topics of status and replies accept.
    record_bytes: int = limits.RECORD.value
    round_bytes: int = 16 << 20  # merges of one round, about
    chunk_bytes: int = 16 << 20  # a bigger merge is staged, in chunks of this many bytes
    # A stream has rolling commits at most once in this time, so that rolling commits share an epoch.
    collate_ms: int = 200
    purge_per_look: int = 500  # old outcomes forgotten every `decide.CHECK_MS`, at most
    # How far times that clients have seen may raise the hybrid time ahead of the clock.
    max_clock_skew_ms: int = 10_000
    clock_error_ms: int | None = None  # of each controller's clock, at most; None: no commit wait
    # A stream is given up when one of its topics is not found for this long.
    lost_after_ms: int = 30_000
    # Whether transactions may have parts on other control partitions (`docs/inside/across.md`): the controller
    # allows it once the feature level does, and there are several.
    across: bool = False

    @property
    def max_ahead_ms(self) -> int:
        """How far a client's clock may be ahead: less than the retention, so that no id is forgotten already."""
        return min(DAY_MS, self.retention_ms // 2)

    @property
    def receipt_bytes(self) -> int:
        """The limit of a transaction's receipts, about: together they have to fit into one row."""
        return min(limits.RECEIPTS.value, 3 * self.record_bytes // 8)

    @property
    def listed_bytes(self) -> int:
        """The size, about, from which a list is continued in another answer. The last item may be big."""
        return min(limits.ANSWER.value // 2, self.record_bytes // 8)


@dataclass(slots=True)
class Turn:
    """The state as this round leaves it, and the round itself.

    ``now_us``: the wall clock, Unix microseconds. ``now_ms``: a monotonic clock, for keepalives, waits and pauses.
    ``hybrid_time``: the highest so far. ``former``: the turn before, if its round is still being written.
    """

    state: State
    index: JournalIndex
    settings: Settings
    memory: LeaderMemory
    now_us: int
    now_ms: int
    former: Turn | None = None
    round: Round = field(default_factory=Round)
    hybrid_time: int = 0
    at: int | None = None  # the offset of the command that is being decided
    lane: str = OPEN_LANE  # … and its lane
    command_bytes: int = 1 << 62  # … and an upper bound of its size
    # The highest hybrid time that the command's sender has received; None: the command does not say.
    seen: int | None = None
    puts: int = 0
    size: int = 0  # bytes of commands, rows and answers, about
    charged: int = 0  # units of work that are counted by `charge`
    owed: dict[str, int] = field(default_factory=dict)  # lane -> units for its commits (`owe`)
    # Commands came, and more may be waiting, so the merges of this round stay small.
    busy: bool = False
    merge_limit: int | None = None  # how many more merges this round may have; None: no limit
    plain_waits: bool = False  # plain writes are not committed in this round
    plain_bytes: int = 0  # bytes of plain writes that this round commits
    newly_committing: set[bytes] = field(default_factory=set)  # PREPARED before this round
    expired_ms: int = 0  # ids that were made up to this time may be forgotten, Unix milliseconds
    ended: list[bytes] = field(default_factory=list)  # transactions that end with this round
    # Transactions whose parts here are ready, and whose timestamps follow (`OpenTxn.lacks_time`).
    ready: list[bytes] = field(default_factory=list)
    rolled: set[str] = field(default_factory=set)  # streams with rolling commits in this round
    cut: dict[tuple[str, int], int] = field(default_factory=dict)  # low waters
    forgotten: list[str] = field(default_factory=list)  # streams that this round forgets
    # Journal partitions whose plain writes were committed in this round: the next round begins with other ones.
    served: list[tuple[str, int]] = field(default_factory=list)
    keepalives: Keepalives = field(init=False)  # this and the next six: drafts of memory
    merging: Merging = field(init=False)
    cleaning: Cleaning = field(init=False)
    histories: Histories = field(init=False)
    row_turns: RowTurns = field(init=False)
    holds: Holds = field(init=False)
    across: Across = field(init=False)
    segment_asks: SegmentAsks = field(init=False)
    recent_writes: RecentWritesDraft = field(init=False)
    drafts: Drafts = field(init=False)
    _finished: int = field(init=False)

    def __post_init__(self) -> None:
        former = self.former
        self.drafts = drafts = (self.memory if former is None else former.drafts).draft()
        self.keepalives, self.merging = drafts.keepalives, drafts.merging
        self.cleaning, self.histories = drafts.cleaning, drafts.histories
        self.row_turns, self.recent_writes = drafts.row_turns, drafts.recent_writes
        self.holds = drafts.holds
        self.across = drafts.across
        self.segment_asks = drafts.segment_asks
        self._finished = self.state.finished
        self.hybrid_time = self.state.round.hybrid_time
        if self.holds.in_use:  # commits may have taken timestamps in a turn that logged nothing
            self.hybrid_time = max(self.hybrid_time, self.holds.time)
        self.expired_ms = self.state.round.expired_ms

    # -- what decisions do ----------------------------------------------------------------------------

    @property
    def control_partitions(self) -> int:
        """The number of control partitions that new scopes may get: the logged one, or all that there are."""
        row = self.state.feature
        logged = 0 if row is None else row.control_partitions
        return logged or self.settings.control_partitions

    @property
    def round_bytes(self) -> int:
        """The bytes of merges and plain writes in this round, at most, about."""
        most = self.settings.round_bytes
        return min(most, limits.BUSY_ROUND.value) if self.busy else most

    @property
    def wall_ms(self) -> int:
        """Unix milliseconds."""
        return self.now_us // 1000

    @property
    def finished(self) -> int:
        """The number of transactions that end with this round, including one-shots."""
        return self.state.finished - self._finished

    def put(self, key: bytes, row: Any) -> None:
        """Write a row (None: delete it)."""
        value = self.state.apply(key, row)
        self.size += len(value or b"")
        self.puts += 1
        # The key's former row is dropped first, so that rows are logged in the order of their last changes.
        self.round.rows.pop(key, None)
        self.round.rows[key] = value

    def reply(self, to: ReplyTo | None, result: Any) -> None:
        """Answer a command, if it has an asker."""
        if to is not None:
            self.size += weight(result)
            self.round.replies.append((to, result))

    def send(self, receiver: int, record: Any, secret: bytes | None) -> None:
        """Send a message to another leader. Arguments: see `core.round.Message`."""
        self.size += weight(record)
        self.charge(work.ANSWER)
        self.round.messages.append(Message(receiver, record, secret))

    def tell(self, to: ReplyTo, row: r.TxnRow) -> None:
        """Answer with a transaction's outcome before the round is written, as it follows from what is logged."""
        self.charge(work.ANSWER)
        self.round.facts.append((to, self.outcome(row)))

    def ask(self, receiver: int, record: Any, secret: bytes | None) -> None:
        """Send a question before the round is written, as it states nothing. Arguments: as of `send`."""
        self.size += weight(record)
        self.charge(work.ANSWER)
        self.round.questions.append(Message(receiver, record, secret))

    def answer(self, to: ReplyTo | None, row: r.TxnRow, *, full: bool = True) -> None:
        """Answer a command with a transaction's outcome, if it has an asker."""
        if to is not None:
            self.reply(to, self.outcome(row, full=full))

    def charge(self, units: int) -> None:
        """Count work (`core.work`) that is not counted by its rows, answers and bytes."""
        self.charged += units

    def owe(self, lane: str, since: int) -> None:
        """Charge a lane for its commits that were due: for the work since `work` was ``since``."""
        self.owed[lane] = self.owed.get(lane, 0) + self.work - since

    @property
    def work(self) -> int:
        """Units of work of this round so far, including rows, answers and bytes."""
        round_ = self.round
        return (
            self.charged
            + work.ROW * self.puts
            + work.ANSWER * len(round_.replies)
            + work.JOURNAL_OP * len(round_.ops)
            + (self.size >> work.KIB_BITS)
        )

    def audit(self, command: object, what: str) -> None:
        """Add an audit row for an operator's command that is carried out. ``what``: for people, without secrets."""
        self._file(self._audit_row(command, what))

    def audit_later(self, command: object, stream: str, what: str) -> None:
        """Add an audit row later, when the stream's topics are changed (`audited`)."""
        self.put(k.audit_due_key(stream), self._audit_row(command, what))

    def audited(self, stream: str, *, done: bool) -> None:
        """Add the row of `audit_later`; drop it if the change of the topics was refused (``done`` False)."""
        row = self.state.audit_due.get(stream)
        if row is not None:
            self.put(k.audit_due_key(stream), None)
            if done:
                self._file(replace(row, at_ms=self.wall_ms))

    def _audit_row(self, command: object, what: str) -> r.AuditRow:
        return r.AuditRow(self.wall_ms, self.lane, type(command).__name__, limits.cut(what))

    def _file(self, row: r.AuditRow) -> None:
        """Put an audit row. Each lane has a limit, so that none displaces rows of others: its oldest is deleted."""
        number = len(self.round.audit)
        while self.state.get(key := k.audit_key(row.at_ms, number)) is not None:
            number += 1
            self.charge(work.LOOK)
        self.put(key, row)
        self.round.audit.append(row)
        kept = self.state.audits[row.lane]
        while len(kept) > limits.AUDIT.value:
            self.put(k.AUDIT_KEY + next(iter(kept)), None)

    def next_timestamp(self) -> int:
        """A commit timestamp later than all earlier ones.

        With transactions over control partitions, no other control partition gives the same one. (Replicas, and the
        histories of plain writes, know commits by their timestamps.)
        """
        self.hybrid_time = self.coming_timestamp()
        return self.hybrid_time

    def coming_timestamp(self) -> int:
        """The timestamp that `next_timestamp` would return now. This call does not use it up."""
        own = self.settings.control_partition if self.settings.across else None
        return hybrid_time.next_after(self.hybrid_time, self.now_us, own)

    def latest_time(self, stream: str) -> int:
        """The latest time that an event may have in the stream now, Unix milliseconds.

        The timestamp of the next commit counts as now: it never falls, whatever a later leader's clock shows.
        """
        settings = self.state.streams[stream].settings
        if RETENTION_MS not in settings:
            return limits.LATEST
        now = hybrid_time.next_after(self.hybrid_time, self.now_us)
        return latest_time(settings, hybrid_time.to_ms(now))

    def move(self, row: r.TxnRow, op: Op, **changes: Any) -> r.TxnRow:
        """The transaction's row after a legal op, which the caller puts; raises the error of an illegal op."""
        state = TRANSACTIONS.judge(row.state, op, row.reason)
        return row._replace(state=state if state is not None else row.state, **changes)

    # -- looking up -----------------------------------------------------------------------------------

    def transaction(
        self,
        data: bytes,
        right: int,
        accepts_expired: Callable[[r.TxnRow], bool] = lambda _: False,
        proven: Callable[[r.TxnRow], bool] = lambda _: False,
        *,
        anywhere: bool = False,
    ) -> r.TxnRow:
        """The row of the transaction that a token or a bare id names, if the sender has the right.

        A bare id is accepted from the owner's lane and from lanes with the right `operate`; in the lane `open` the
        owner may only see the transaction by it. A refusal has the same text whether the transaction exists or not.

        ``right``: one of these `Rights` is needed; 0: the lane's right `operate` is needed. ``accepts_expired``:
        whether an expired token is accepted for this row. ``proven``: whether the command proves its right in
        another way. ``anywhere``: whether the transaction's coordinator may be another control partition.

        Raises: InvalidToken (malformed; of another control partition), NotAuthorized, UnknownTransaction, Expired.
        """
        token = None if len(data) == TXN_ID_SIZE else peek(data)
        txn_id = data if token is None else token.txn_id
        if control_partition_of(txn_id) != self.settings.control_partition and not anywhere:
            raise errors.InvalidToken(
                "the token is of another control partition: send the command to "
                f"partition {control_partition_of(txn_id)}"
            )
        late = False
        if token is not None:
            check_right(token, right)
            if not token.lanes <= {self.lane}:
                raise errors.NotAuthorized(
                    f"the token is good in lane {' and '.join(sorted(token.lanes))} only, this is {self.lane}"
                )
            late = 0 < token.not_after_ms < self.wall_ms
        row = self.state.txn_row(txn_id)
        if row is None and self.is_forgotten(txn_id):
            raise errors.Expired(FORGOTTEN)
        if row is None:
            known = False
        # A transaction without a begin has no secret, so no token of it can be checked.
        elif token is None or row.secret is None:
            known = self._may_by_id(row, right)
        else:
            known = is_genuine(token, row.secret)
        known = known or (row is not None and proven(row))
        if late and not (known and row is not None and accepts_expired(row)):
            raise errors.NotAuthorized("the token's time is over: ask its maker for another one")
        if row is None or not known:
            raise errors.UnknownTransaction(
                f"there is no such transaction, or lane {self.lane!r} may not do this by its id or by this token: "
                "begin it, or ask its maker for a token"
            )
        return row

    def _may_by_id(self, row: r.TxnRow, right: int) -> bool:
        if rights_of(self.state, self.lane, of_scope(row.scope)) & Right.OPERATE:
            return True
        seen = self.lane != OPEN_LANE or right & Rights.STATE
        return row.owner == self.lane and bool(right and seen)

    def row(self, txn_id: bytes) -> r.TxnRow:
        """The row of a transaction that has one."""
        row = self.state.txn_row(txn_id)
        if row is None:
            raise errors.InvariantViolation("a transaction has no row")
        return row

    def is_forgotten(self, txn_id: bytes) -> bool:
        """Whether an id without a row may have had one once."""
        return made_ms_of(txn_id) <= self.expired_ms

    def check_new_id(self, txn_id: bytes) -> None:
        """Raise `Expired` or `ClockSkew` for an id without a row that may not get one."""
        made_ms, wall_ms = made_ms_of(txn_id), self.wall_ms
        wrong_ms = self.expired_ms - wall_ms
        if wrong_ms > 0 and not self.expired_ms < made_ms <= wall_ms + self.settings.max_ahead_ms:
            # A forgotten id was older than half the retention by the clock at that time.
            wrong_ms += self.settings.retention_ms - self.settings.max_ahead_ms
            raise errors.ClockSkew(
                f"the controller's clock is {wrong_ms:,} ms or more earlier than when outcomes were "
                "forgotten: set the clock of the controller"
            )
        if made_ms <= max(self.expired_ms, wall_ms - self.settings.retention_ms):
            raise errors.Expired("the transaction id is too old: begin a new one")
        ahead_ms = made_ms - wall_ms
        if ahead_ms > self.settings.max_ahead_ms:
            raise errors.ClockSkew(
                f"the transaction id was made {ahead_ms:,} ms ahead of the controller's clock, "
                f"{self.settings.max_ahead_ms:,} are allowed: set the clock"
            )

    def open(self, txn_id: bytes) -> OpenTxn:
        """A transaction that is known to be open."""
        txn = self.state.open.get(txn_id)
        if txn is None:
            raise errors.InvariantViolation("an unfinished transaction is not among the open ones")
        return txn

    def rejected(self, row: r.TxnRow) -> int:
        """The number of journal records of an open transaction that were rejected so far."""
        return row.rejected + self.index.rejected_of(row.txn_id)

    def usable(self, stream: str) -> bool:
        return is_usable(self.state, self.memory.waiting, stream)

    def trouble(self, txn_id: bytes) -> str:
        return trouble_of(self.state, self.memory, txn_id)

    def wait_of(self, txn_id: bytes) -> Wait | None:
        return wait_of(self.state, self.memory, txn_id)

    def hear(self, txn_id: bytes) -> None:
        """Note a sign of life of a transaction: its keepalive starts again."""
        self.keepalives.heard.put(txn_id, self.now_ms)

    def done(self) -> None:
        """Apply the drafts to memory. Call it when the round is on the log, or had nothing to log."""
        self.index.round_done(self.ended, self.cut, self.served)
        self.memory.follow(self.drafts, self.ended, self.forgotten)

    def follows(self) -> None:
        """Note that the former turn's round is written, and `done` was called."""
        self.former = None
        self.drafts.rebase()

    def _waiting(self, txn_id: bytes) -> str:
        """Why a commit is not decided, for people."""
        txn = self.open(txn_id)
        if txn.votes_row is None or txn.votes_row.asks == "REOPEN":
            return WAITING
        places = ", ".join(map(str, sorted(txn.partitions)))
        return f"its commit is not decided: it waits for the votes of control partition {places}"

    def outcome(
        self,
        row: r.TxnRow,
        *,
        full: bool = True,
        lane: str | None = None,
        after: int | None = None,
        prepared: r.PreparedRow | None = None,
        tables: tuple[r.TableTime, ...] = (),
    ) -> r.Outcome:
        """A transaction as clients see it: with a pending commit it is COMMIT_IN_PROGRESS.

        ``full``: with its streams, and some of its writers, after the writer ``after``. ``lane``: of the asker;
        None: of this command. ``prepared``: how it was prepared, if that is known; None: it is looked up.
        ``tables``: the times of the tables that its commit names.
        """
        writers = self._writers(row.txn_id, after) if full else ()
        waits = row.state == "OPEN" and row.txn_id in self.state.committing
        ended = row.state in FINISHED
        trouble = "" if ended else self.trouble(row.txn_id)
        if prepared is None and row.secret is not None:
            prepared = self.state.prepared_row(row.txn_id)
        committed, left_out = row.committed, row.left_out
        if row.state in ("FINALIZE_IN_PROGRESS", "PREPARED"):  # the row counts its own part
            elsewhere = self.state.partition_rows(row.txn_id).values()
            committed += sum([one.committed for one in elsewhere])
            left_out += sum([one.left_out for one in elsewhere])
        state: r.TxnState = "COMMIT_IN_PROGRESS" if waits else row.state
        return r.Outcome(
            txn_id=row.txn_id,
            # An abort is final when it is logged; the participants only follow.
            state="ABORTED" if state == "ABORT_IN_PROGRESS" else state,
            scope=row.scope,
            name=row.name,
            commit_timestamp=row.commit_timestamp,
            committed=committed,
            # Until the end the row has only the counts below the low waters.
            rejected=row.rejected if ended else 0,
            left_out=left_out,
            reason=row.reason or trouble or (self._waiting(row.txn_id) if waits else ""),
            begun_ms=row.begun_ms,
            finished_ms=row.finished_ms,
            keepalive_ms=row.keepalive_ms,
            streams=tuple(sorted(self.state.participants(row.txn_id))) if full else (),
            writers=writers,
            owner=row.owner,
            prepared_ms=0 if prepared is None else prepared.prepared_ms,
            # In the row with the events of a one-shot there is no time: no program has prepared it.
            prepared_by=prepared.prepare.by
            if prepared is not None and prepared.prepared_ms
            else b"",
            snapshot=row.snapshot,
            broken=shown(self.state, lane or self.lane, row.broken),
            tables=tables,
        )

    def _writers(self, txn_id: bytes, after: int | None) -> tuple[r.Receipt, ...]:
        """The receipts for an answer: all, by writer; or, if there are too many, some in row order."""
        most, txn = limits.WRITERS_LISTED.value, self.state.open.get(txn_id)
        if txn is not None and after is None and len(txn.writers) < most:
            found = [*txn.writers.values()]
        else:
            found = self.state.writers_after(txn_id, after, most)
        if after is None and len(found) < most:
            found.sort(key=_WRITER)
        self.charge(work.of_receipts(found))
        return tuple(found)


def refuse(error: errors.AnabranchError) -> r.Refusal:
    """The answer for an error."""
    return r.Refusal(code=type(error).__name__, message=limits.cut(str(error)))


def attempt(turn: Turn, to: ReplyTo | None, decision: Callable[[], None]) -> None:
    """Run a decision. An error becomes the answer; `InvariantViolation` if it came after a change."""
    before = (turn.puts, len(turn.round.replies), turn.hybrid_time)
    try:
        decision()
    except errors.AnabranchError as error:
        after = (turn.puts, len(turn.round.replies), turn.hybrid_time)
        check(before == after, f"a refused command changed something: {error}")
        turn.reply(to, refuse(error))


def close_round(
    turn: Turn,
    commands_offset: int,
    control_offset: int,
    lanes: Mapping[str, int] = {},
    *,
    expired_ms: int | None = None,
) -> Round:
    """The round, completed by the leader's reading positions. ``lanes``: the positions of lanes except `open`."""
    row = r.RoundRow(
        term=turn.state.term.term if turn.state.term else 0,
        hybrid_time=turn.hybrid_time,
        commands_offset=commands_offset,
        control_offset=control_offset,
        expired_ms=max(turn.expired_ms, expired_ms or 0),
    )
    if not turn.round.empty:
        if turn.holds.in_use:
            turn.round.safe = turn.holds.safe_time(turn.hybrid_time)
        turn.put(k.ROUND_KEY, row)
        for lane, at in lanes.items():
            if turn.state.lane_positions.get(lane, 0) not in (at, AT_END):
                turn.put(k.lane_position_key(lane), r.LanePositionRow(at))
    return turn.round


def is_finished(row: r.TxnRow) -> bool:
    return row.state in FINISHED
