"""The handles of transactions that read and write tables (docs/inside/tables.md).

`TableTransaction` is the handle of the process that begins one, `JoinedTransaction` that of a process that joins
it. Their reads, writes and locks are those of `anabranch.client.table_access`.

The file is long because each call of both handles is described here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from anabranch.client.commit_parts import CommitParts, Wait
from anabranch.client.own_writes import Local, ReadBack, Writers
from anabranch.client.receipts import EventFields, StateRow, check_shape
from anabranch.client.reservation import keepalive_ms_of
from anabranch.client.row_chain import HotRow, Member, needs_commits
from anabranch.client.shared import Shared
from anabranch.client.table_access import (
    BROKEN,
    IN_DOUBT,
    ONE_COMMAND,
    PREPARED,
    UNDECIDED,
    Isolation,
    TableAccess,
    alone,
)
from anabranch.client.table_locks import RegisteredLocks, SentLocks, name_tables
from anabranch.client.table_one_shot import InMemory, TableOneShot
from anabranch.client.transaction import (
    EVENT_OVERHEAD,
    GRACE_S,
    Transaction,
    check_task,
    checked_rows,
    fields_of,
    pairs_of,
    state_size,
)
from anabranch.client.writer import AllOrNothing, Writer
from anabranch.core.derived_rows import AnyFunction
from anabranch.core.transaction_states import USABLE
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    DerivationMissing,
    EventTooLarge,
    FixCallError,
    IllegalState,
    InvalidArgument,
    LocksBroken,
    OutcomeUnknown,
    OwnershipLost,
    RetryError,
    SnapshotExpired,
    TransactionAborted,
    UnsupportedSetting,
)
from anabranch.protocol import defaults, limits
from anabranch.protocol.hybrid_time import to_text
from anabranch.protocol.ids import NO_TXN, txn_text
from anabranch.protocol.legal_names import is_state, split_stream
from anabranch.protocol.limits import EVENTS, headers_size
from anabranch.protocol.schemas import records as r
from anabranch.tables.replica import ReadReplica
from anabranch.tables.snapshot import TableSnapshot
from anabranch.types import (
    Counts,
    Receipt,
    Result,
    TaskOwnership,
    TransactionInfo,
    result_of,
)

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("anabranch.client")

_BEGINS = 3  # tries, each with a fresh snapshot
# Why a transaction is over.
_ABORTED = "it is aborted"
_COMMITTED = "it is committed"
_LOST = "another worker has its tasks"


class TableTransaction(TableAccess):
    """A transaction on tables that this process begins, by `Replica.begin`. Thread-safe.

        with replica.begin() as txn:
            balance = int(txn.get("bank/accounts", b"anna") or b"0")
            txn.put("bank/accounts", b"anna", b"%d" % (balance + 5))
            txn.commit()

    A short transaction is one command. A ``keepalive``, `token`, `flush`, or too many writes for one command make
    it a long one, which is open at the controller. Leaving the ``with`` block without a commit drops it.
    """

    def __init__(
        self,
        shared: Shared,
        replica: ReadReplica,
        view: TableSnapshot,
        isolation: Isolation,
        keepalive: float | None = None,
        writers: Writers = "own",
        *,
        ownership: TaskOwnership | None = None,
        member: Member | None = None,
    ) -> None:
        """``keepalive``: seconds; None for a short transaction. ``member``: the call of `transact` that tries."""
        super().__init__(shared, replica, view, isolation)
        self._member = member
        self._one_shot = TableOneShot(shared, replica, member)
        self._ownership = ownership
        self._wrote = ownership is not None  # its commit at least moves positions
        self._keepalive = defaults.KEEPALIVE_S if keepalive is None else keepalive
        self._reads_others = writers == "all"
        # Events that were not passed to the handle of a long one yet.
        self._events: deque[r.Event] = deque()
        self._bytes = 0
        self._home = ""  # the scope for which it has an id
        self._result: Result | None = None
        self._opened: Transaction | None = None
        self._prepares = False  # the handle in `_opened` prepares by one command
        self._reads: RegisteredLocks | None = None
        if keepalive is not None:
            try:
                self._open(None)
            except BaseException:
                self._end("it was not begun")
                raise

    @alone
    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if self._view.is_forked:
            return
        opened = self._opened
        if opened is not None and not self._one_shot.is_sent:
            opened.left_by(error)
        if self._one_shot.is_sent or (
            opened is not None and opened.state in ("doubted", "decided")
        ):
            self._end(IN_DOUBT)
            return  # other processes may rely on it
        if opened is not None and opened.state == "prepared":
            self._end(PREPARED)
            return  # its coordinator decides
        if not self._over and self._wrote and error is None:
            log.warning("%r is left without commit: its writes are dropped", self)
        try:
            self.abort()
        except AnabranchError as trouble:
            if error is None:
                raise
            log.warning("%r could not be aborted and will go stale: %s", self, trouble)
        finally:
            self._end("it could not be aborted")
        if isinstance(error, Exception) and not isinstance(error, HotRow | LocksBroken):
            if self._again is not None:  # the function raised another error instead
                raise self._again from error
            try:
                self._check_committed(f"raises {type(error).__name__}")
            except HotRow as again:
                raise again from error

    def _check_committed(self, why: str) -> None:
        """Raise `HotRow` if the transaction may have read what is not committed, or an old snapshot."""
        if self._member is not None and self._member.is_unsure:
            self._call_again(needs_commits(why))

    def __repr__(self) -> str:
        return (
            f"<TableTransaction of {', '.join(self._replica.tables)} at "
            f"{to_text(self._view.timestamp)}>"
        )

    @property
    def txn_id(self) -> bytes | None:
        """The id, 16 bytes; None before anything was sent."""
        return self._one_shot.txn_id

    @property
    def result(self) -> Result | None:
        """The result after the commit, else None."""
        return self._result

    @property
    def prepared(self) -> TransactionInfo | None:
        """As `Transaction.prepared`."""
        return None if self._opened is None else self._opened.prepared

    @property
    def cluster(self) -> str:
        """As `Client.cluster`."""
        return self._session.cluster(self._shared.deadline(None))

    @alone
    def assign_id(self) -> bytes:
        """The id, 16 bytes, made now if it has none. This does not begin the transaction. Raises: as `token`."""
        self._check()
        if self._one_shot.txn_id is None:
            self._home = self._scope()
            self._one_shot.txn_id = self._session.new_txn_id(
                self._home, self._shared.deadline(None)
            )
        return self._one_shot.txn_id

    # -- writing --------------------------------------------------------------------------------------

    def _write(self, event: r.Event) -> None:
        size = len(event.key or b"") + len(event.value or b"") + len(event.stream) + EVENT_OVERHEAD
        size += headers_size(pairs_of(event) or ())
        fits = self._fits(1, size)
        self._bytes += size
        self._events.append(event)
        if not fits:
            try:
                self._open(None)
            except AnabranchError:
                if self._events and self._events[-1] is event:
                    self._events.pop()  # this write was refused
                    self._bytes -= size
                raise

    def _check_changes(self, size: int) -> None:
        if self._opened is not None or self._reads is not None:
            raise InvalidArgument(f"{ONE_COMMAND}, and this one is open at the controller")
        size += EVENT_OVERHEAD + limits.NUMBER_BYTES
        if self._bytes + size > self._shared.one_shot_bytes:
            raise InvalidArgument(f"{ONE_COMMAND}, and this one is too big already")
        self._bytes += size

    def _fits(self, count: int, size: int) -> bool:
        """Whether ``count`` more events, of ``size`` bytes in all, still fit into a one-shot."""
        few = len(self._events) + count <= EVENTS.value
        return self._reads is None and few and self._bytes + size <= self._shared.one_shot_bytes

    @alone
    def write_state(self, task: int, rows: Iterable[StateRow]) -> int:
        """Change the state of one task, as `Transaction.write_state`. Raises: LocksBroken; as there."""
        given = checked_rows(rows)
        stream = check_task(self._ownership, task).state
        self._check_writable()
        size = state_size(stream, given)
        if self._fits(len(given), size):
            self._events += [r.Event(stream, task, key, value, (), -1) for key, value in given]
            self._bytes += size
            return len(given)
        opened, _ = self._open(None)
        with self._broken_fails():
            return opened.write_state(task, given)

    @alone
    def write_many(self, stream: str, events: Iterable[EventFields]) -> int:
        """Write many events, as `Transaction.write_many`. Raises: as `write`."""
        written = 0
        with AllOrNothing("write_many", self._end_in_between) as call:
            for event in events:
                check_shape(event)
                self.write(stream, *event)
                written, call.begun = written + 1, True
        return written

    @alone
    def write_batch(self, stream: str, batch: pa.RecordBatch | pa.Table) -> int:
        """Write the rows of a pyarrow record batch or table, as `Transaction.write_batch`. Raises: as `write`."""
        pieces = self._shared.columns(stream, batch)
        count = sum(piece.rows for piece in pieces)
        size = sum(int(piece.sizes().sum()) for piece in pieces)
        if stream in self._replica.tables or self._fits(
            count, size + count * (len(stream) + EVENT_OVERHEAD)
        ):
            return self.write_many(stream, (e for piece in pieces for e in piece.events()))
        self._check_writable()
        self._wrote = True
        opened, _ = self._open(None)
        with self._broken_fails():
            return opened.write_batch(stream, batch)

    # -- a long transaction ---------------------------------------------------------------------------

    def _open(self, timeout: float | None) -> tuple[Transaction, RegisteredLocks]:
        """Begin the transaction at the controller unless it is open, and pass on what was written so far."""
        if self._changes:
            raise InvalidArgument(
                f"{ONE_COMMAND}: commit it without a number, or positions of tasks of another control "
                "partition, or `put` instead"
            )
        opened = self._opened
        if opened is None or self._reads is None:
            self._check_committed("it becomes a long one")
            opened = self._begun(timeout)
            self._reads = RegisteredLocks(
                self._shared,
                opened.identity,
                self._replica,
                self._view,
                self._locks,
                self._read_from,
            )
            opened.read_by(self._reads)
        with self._broken_fails():
            while self._events:
                event = self._events[0]
                if event.key is not None and is_state(event.stream):
                    opened.write_state(event.segment_id, [(event.key, event.value)])
                else:
                    opened.write(*fields_of(event))
                self._events.popleft()
        # Until now it has this process's rows only.
        if self._reads_others and isinstance(self._own, Local):
            self._own.close()
            self._own = read_back(self._shared, opened)
        return opened, self._reads

    @contextmanager
    def _broken_fails(self) -> Iterator[None]:
        try:
            with nullcontext() if self._reads is None else self._reads.explained():
                yield
        except LocksBroken as error:
            self._fail(error)

    def _begun(self, timeout: float | None) -> Transaction:
        """The handle of the transaction, begun at the controller, which then keeps the snapshot readable.

        A snapshot that is too old is replaced if it was not read yet.
        """
        tries = 0
        while True:
            if self._opened is None:
                self._home = self._scope()
                self._opened = self._handle(self._home)
            opened = self._opened
            tries += 1
            try:
                opened.open_named(timeout)
                self._one_shot.txn_id = opened.txn_id
                self._name_tables(opened, timeout)
                return opened
            except TransactionAborted:
                self._one_shot.txn_id = opened.txn_id
                # This asks the controller. Without new commits only a question moves the newest moment of the
                # replica, and the next transaction would begin at the same one.
                view = self._replica.snapshot()
                self._view.close()
                self._view = view
                if self._was_read or tries == _BEGINS:
                    self._end(_ABORTED)
                    raise
            self._opened = self._one_shot.txn_id = None

    def _handle(self, scope: str) -> Transaction:
        """A handle of this transaction, which the controller does not know yet."""
        made = Transaction(
            self._shared,
            scope,
            None,
            keepalive_ms_of(self._keepalive),
            self._ownership,
            snapshot=self._view.timestamp,
            txn_id=self._one_shot.txn_id,
        )
        made.ran = self._ran
        return made

    def _name_tables(self, opened: Transaction, timeout: float | None) -> None:
        """Make the controller keep the tables readable at the snapshot; raise `TransactionAborted` if too old."""
        deadline = self._shared.deadline(timeout)
        try:
            name_tables(self._shared, opened.identity, self._replica.tables, deadline)
        except FixCallError as error:
            self._drop(opened, str(error))
            self._opened = None
            if isinstance(error, SnapshotExpired):
                raise TransactionAborted(str(error)) from error
            raise

    @alone
    def token(
        self,
        rights: str | Iterable[str] = ("write", "heartbeat"),
        *,
        expires: float | None = None,
        lane: str | None = None,
    ) -> bytes:
        """The secret bytes with which other processes join (`Replica.join`), as for `Transaction.token`.

        All reads so far are registered and valid. Raises: LocksBroken, TooMuchLocked, as `commit`.
        """
        self._check()
        opened, _ = self._register(None)
        return opened.token(rights, expires=expires, lane=lane)

    @alone
    def flush(self, timeout: float | None = None) -> None:
        """Wait until what was read is registered and validated, and what was written is stored.

        Raises: LocksBroken, TooMuchLocked; as `Transaction.flush`.
        """
        self._check()
        opened, _ = self._register(timeout)
        with self._broken_fails():
            opened.flush(timeout)

    def _register(self, timeout: float | None) -> tuple[Transaction, RegisteredLocks]:
        opened, reads = self._open(timeout)
        if self._broken is not None:
            self._fail(self._broken)
        try:
            reads.flush(self._shared.deadline(timeout))
        except LocksBroken as error:
            self._fail(error)
        return opened, reads

    # -- its end --------------------------------------------------------------------------------------

    def commit(
        self,
        receipts: Sequence[Receipt | bytes] | None = None,
        *,
        name: str | None = None,
        number: int | None = None,
        consumed: r.Consumed | None = None,
        secret: bytes | None = None,
        wait: Wait = "merged",
        timeout: float | None = None,
    ) -> Result:
        """Commit, if nothing that was read has changed by the commit timestamp. Repeating it is fine.

        A transaction without writes and name succeeds without a command: its commit timestamp is that of the
        snapshot. The arguments are those of `Transaction.commit`. The locks of all its processes count, even if
        their writes are not taken.

        Raises:
            LocksBroken, TransactionAborted: it is over without effect; begin again.
            OwnershipLost: another worker has taken tasks of ``consumed``; as for `Transaction.commit`.
            DeadlineExceeded, NotReady, EventTooLarge, SnapshotExpired, NonTransactional: nothing was written.
            OutcomeUnknown: commit again, or ask ``client.state`` later.
            WritersUnfinished, ReceiptMismatch and others: as `Transaction.commit`.
        """
        parts = CommitParts(receipts, name, number, consumed, secret, wait)
        return self.commit_with(parts, timeout)

    @alone
    def merged(self, timeout: float | None = None) -> Result:
        """As `Transaction.merged`."""
        if self._result is None:
            raise IllegalState("its commit is not decided: commit it first")
        if self._opened is not None and not self._result.is_merged:
            self._result = self._opened.merged(timeout)
        return self._result

    @alone
    def commit_with(self, parts: CommitParts, timeout: float | None) -> Result:
        """As `commit`."""
        opened = self._opened
        if self._result is not None:
            if opened is not None and not self._result.is_merged:
                self._result = opened.commit_with(parts, timeout)
            return self._result
        if opened is not None and (self._prepares or opened.state == "prepared"):
            self._result = opened.commit_with(parts, timeout)
            self._end(_COMMITTED)
            return self._result
        parts.check_consumed(self._ownership)
        if parts.number is not None and self._one_shot.is_sent:
            raise IllegalState("its commit was sent without a number: repeat that one")
        late = self._over == IN_DOUBT
        if not late:
            super()._check()
            self._check_outside("commit", writes=bool(parts.receipts or parts.name))
        if opened is not None or (not late and self._takes_a_long_one(parts, timeout)):
            try:
                self._result = self._commit_open(parts, timeout)
            except AlreadyCommitted:  # by another process, perhaps with all writes of this one
                if self._events or self._opened is None:
                    raise
                self._result = self._opened.commit_with(parts, timeout)
        elif late:
            deadline = self._shared.deadline(timeout)
            self._result = self._by(lambda: self._one_shot.resolved(self._scope(), deadline))
        elif parts.receipts:
            raise InvalidArgument(
                "no other process can have written, as the token was never asked for: give no receipts"
            )
        elif not (self._events or self._changes or parts.name is not None or parts.consumed):
            self._check_committed("it ends without a commit")
            self._result = Result(NO_TXN, self._view.timestamp, Counts(0, 0, 0))
        else:
            deadline = self._shared.deadline(timeout)
            self._result = self._by(
                lambda: self._one_shot.commit(self._in_memory(), parts, deadline)
            )
        self._end(_COMMITTED)
        return self._result

    def _check_outside(self, call: str, *, writes: bool = False) -> None:
        """As `Shared.check_outside`, unless a commit was sent, or there is nothing to commit."""
        usable = (
            not self._one_shot.is_sent if self._opened is None else self._opened.state in USABLE
        )
        if usable and (writes or self._wrote or self._opened is not None):
            self._shared.check_outside(call, self)

    def _by(self, one_shot: Callable[[], r.Outcome]) -> Result:
        """The result of a call of the one-shot. Ends the transaction if an error of the call does."""
        try:
            return result_of(one_shot())
        except LocksBroken as error:
            self._fail(error)
        except AnabranchError as error:
            if self._one_shot.is_over:
                self._end(_LOST if isinstance(error, OwnershipLost) else _ABORTED)
            raise

    def _in_memory(self) -> InMemory:
        return InMemory(
            self._scope(),
            self._view,
            self._locks,
            self._events,
            self._changes,
            self._broken,
            self._ran,
        )

    def _takes_a_long_one(self, parts: CommitParts, timeout: float | None) -> bool:
        """Whether no single command can have these parts."""
        if parts.number is not None:
            return True
        return parts.consumed is not None and self._is_apart(self._shared.deadline(timeout))

    def _is_apart(self, deadline: float) -> bool:
        """Whether it concerns several control partitions."""
        streams = {*self._in_memory().streams, f"{self._scope()}/s"}
        return not self._session.serves_all(streams, deadline)

    def _scope(self) -> str:
        """The scope of its tasks; without tasks of the first row that it writes, else of the first table.

        Once it has an id, the scope stays the same: the id names the scope's control partition.
        """
        if self._home and self._one_shot.txn_id is not None:
            return self._home
        if self._ownership is not None:
            return self._ownership.scope
        tables = self._replica.tables
        rows = (event.stream for event in self._events if event.stream in tables)
        changed_first = next((table for table, _ in self._changes), tables[0])
        return split_stream(next(rows, changed_first))[0]

    def _check(self) -> None:
        state = None if self._opened is None else self._opened.state
        sent = self._one_shot.is_sent or state in ("sent", "doubted")
        if self._over == IN_DOUBT or (sent and not self._over):
            raise IllegalState("its commit was sent, and the outcome is not known: commit again")
        if state == "prepared" and self._over in UNDECIDED:
            raise IllegalState("the transaction is prepared: commit or abort it")
        super()._check()
        if state == "decided":
            raise AlreadyCommitted("the transaction was committed elsewhere")

    @alone
    def prepare(
        self,
        receipts: Sequence[Receipt | bytes] | None = None,
        *,
        name: str | None = None,
        number: int | None = None,
        consumed: r.Consumed | None = None,
        by: bytes = b"",
        attempt: bytes = b"",
        timeout: float | None = None,
    ) -> TransactionInfo:
        """Make sure that the transaction can commit, if nothing that was read has changed.

        `commit` or `abort` ends it. The arguments are those of `Transaction.prepare`. Until the end, other commits
        to what was read wait; from 10 seconds on they are refused. Needs feature level 3.

        Raises: as `commit`; FeatureNotEnabled, InvalidArgument (after `add`, `min` or `max`), and as
        `Transaction.prepare`.
        """
        parts, prepare = CommitParts(receipts, name, number, consumed), r.Prepare(by, attempt)
        opened = self._opened
        if opened is None or opened.state in USABLE:
            self._check()
            if self._changes:
                raise InvalidArgument(f"{ONE_COMMAND}, which commits at once: `prepare` takes none")
            parts.check_consumed(self._ownership)
            self._check_committed("it is prepared")
            self._check_outside("prepare", writes=True)
            if self._broken is not None:
                self._fail(self._broken)
        try:
            info = None
            fits = parts.fit_one_command and self._opened is None
            if self._prepares or (fits and not self._is_apart(self._shared.deadline(timeout))):
                info = self._prepare_shot(parts, prepare, timeout)
            info = info or self._prepare_open(parts, prepare, timeout)
        except LocksBroken as error:
            self._fail(error)
        except (TransactionAborted, OwnershipLost, AlreadyCommitted) as error:
            self._end(_LOST if isinstance(error, OwnershipLost) else _ABORTED)
            raise
        if self._opened is not None:
            self._one_shot.txn_id, self._result = self._opened.txn_id, self._opened.result
        if self._result is not None:
            self._end(_COMMITTED)
        return info

    def _prepare_shot(
        self, parts: CommitParts, prepare: r.Prepare, timeout: float | None
    ) -> TransactionInfo | None:
        """Prepare by one command. Returns None if the writes are too big for that."""
        if self._opened is None:
            self._opened, self._prepares = self._handle(self._scope()), True
            deadline, streams = self._shared.deadline(timeout), self._in_memory().streams
            tables = self._session.beside(streams, self._replica.tables, deadline)
            self._opened.read_by(SentLocks(self._replica, self._view, self._locks, tables))
            self._opened.keep(self._events)
        opened = self._opened
        try:
            return opened.prepare_with(replace(parts, receipts=None), prepare, timeout)
        except EventTooLarge:
            if opened.state != "buffered":
                raise
            return None
        finally:
            if (
                opened.state in ("buffered", "over") and opened.result is None
            ):  # nothing is prepared
                self._opened, self._prepares, self._one_shot.txn_id = None, False, opened.txn_id

    def _prepare_open(
        self, parts: CommitParts, prepare: r.Prepare, timeout: float | None
    ) -> TransactionInfo:
        opened, reads = self._open(timeout)
        with reads.explained():
            if opened.state == "open":
                reads.register(self._shared.deadline(timeout))
            return opened.prepare_with(parts, prepare, timeout)

    def _commit_open(self, parts: CommitParts, timeout: float | None) -> Result:
        opened, reads = self._open(timeout)
        try:
            with reads.explained():
                # In other states only the controller knows whether the locks are valid.
                if opened.state == "open":
                    if self._broken is not None:
                        raise self._broken
                    with suppress(OutcomeUnknown):  # another commit is under way
                        reads.register(self._shared.deadline(timeout))
                return opened.commit_with(parts, timeout)
        except LocksBroken as error:
            self._broken = self._broken or error
            wrote = self._wrote or parts.receipts or parts.name is not None
            if wrote or self._others_wrote(opened):
                self._fail(error)
            self._drop(opened)
            return Result(NO_TXN, self._view.timestamp, Counts(0, 0, 0))
        except (TransactionAborted, OwnershipLost) as error:
            self._end(_LOST if isinstance(error, OwnershipLost) else _ABORTED)
            raise

    def _others_wrote(self, opened: Transaction) -> bool:
        try:
            token, _ = opened.identity
        except LocksBroken:
            return True  # the controller has aborted it, so it did more than read
        state = self._session.state(opened.txn_id or b"", token, self._shared.deadline(None))
        return bool(state.streams)

    def _drop(self, opened: Transaction, reason: str = BROKEN) -> None:
        """Abort it. Raises: AlreadyCommitted, OutcomeUnknown (a commit came first: broken locks don't matter)."""
        try:
            opened.abort(reason, timeout=GRACE_S)
        except (AlreadyCommitted, OutcomeUnknown):
            raise  # only the controller knows the outcome
        except AnabranchError as trouble:
            log.warning("%r could not be aborted and will go stale: %s", self, trouble)

    @alone
    def abort(
        self,
        reason: str = "aborted by the client",
        *,
        secret: bytes | None = None,
        timeout: float | None = None,
    ) -> None:
        """Drop the transaction; repeating this is harmless.

        A long or prepared one is aborted as by `Transaction.abort`. If a commit was sent, this does not change the
        outcome: commit again to learn it.
        """
        if self._opened is not None and self._over in UNDECIDED:
            self._opened.abort(reason, secret=secret, timeout=timeout)
        self._end(IN_DOUBT if self._one_shot.is_sent else _ABORTED)

    def _give_up(self) -> None:
        if self._opened is not None and self._over in UNDECIDED:
            self._drop(self._opened)


class JoinedTransaction(TableAccess):
    """Reads and writes in a transaction that another process began, at its snapshot. Made by `Replica.join`.

    Leaving its ``with`` block without an exception finishes it. Thread-safe.
    """

    def __init__(
        self,
        shared: Shared,
        replica: ReadReplica,
        writer: Writer,
        view: TableSnapshot,
        isolation: Isolation,
        writers: Writers,
    ) -> None:
        super().__init__(shared, replica, view, isolation)
        if writers == "all":
            self._own = read_back(shared, writer)
        self._writer = writer
        self._reads = RegisteredLocks(
            shared, writer.identity, replica, view, self._locks, self._read_from
        )
        self._finished: Receipt | None = None

    @alone
    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if self._view.is_forked:
            return
        try:
            if error is None and not self._over:
                self.finish()
        except RetryError:
            self._end(IN_DOUBT)
            raise
        finally:
            if self._over != IN_DOUBT:
                self.discard()

    def __repr__(self) -> str:
        return f"<JoinedTransaction {txn_text(self.txn_id)} at {to_text(self.timestamp)}>"

    @property
    def txn_id(self) -> bytes:
        """The transaction, 16 bytes."""
        return self._writer.txn_id

    def _write(self, event: r.Event) -> None:
        with self._broken_fails():
            self._writer.write(*fields_of(event))

    @contextmanager
    def _broken_fails(self) -> Iterator[None]:
        try:
            with self._reads.explained():
                yield
        except LocksBroken as error:
            self._fail(error)

    @alone
    def flush(self, timeout: float | None = None) -> Receipt:
        """Wait until what was read is registered and validated, and what was written is stored.

        Pass on conclusions from these reads only after this call. Raises: LocksBroken; as `Writer.flush`.
        """
        self._check()
        with self._broken_fails():
            self._reads.flush(self._shared.deadline(timeout))
            return self._writer.flush(timeout)

    @alone
    def finish(self, timeout: float | None = None) -> Receipt:
        """`flush`, and end this part. Pass the receipt to the process that commits. Later calls return the same.

        After a `RetryError` it may be repeated, even after the ``with`` block.
        """
        if self._finished is None:
            if self._over != IN_DOUBT:
                self._check()
            with self._broken_fails():
                self._reads.flush(self._shared.deadline(timeout))
                self._finished = self._writer.finish(timeout)
            self._end("this part of it is finished")
        return self._finished

    @alone
    def discard(self) -> None:
        """Drop writes that are not flushed. Registered locks stay."""
        if self._finished is None:
            self._writer.discard()
        self._end("this part of it is discarded")

    def _check(self) -> None:
        if self._over == IN_DOUBT:
            raise IllegalState(
                "it was left, and is not finished: call `finish` again, or `discard`"
            )
        super()._check()

    def _functions(self, table: str) -> Sequence[AnyFunction]:
        found = super()._functions(table)
        if found:
            # Neither process sees the other's rows before, so the entries would be wrong.
            raise DerivationMissing(
                f"{table} is the source of derivation {found[0].of.name!r}: only the process that began the "
                "transaction may write to it"
            )
        return found

    def _check_changes(self, size: int) -> None:
        del size
        raise InvalidArgument(f"{ONE_COMMAND}, not for one that other processes join")

    def _give_up(self) -> None:
        self._reads.check_open(self._shared.deadline(None))
        self._writer.discard()


def read_back(shared: Shared, handle: Transaction | Writer) -> ReadBack:
    """The rows that a transaction wrote, of this handle and of finished writers."""
    readers = shared.ports.readers
    if readers is None:
        raise UnsupportedSetting("this client has no readers")
    return ReadBack(handle, shared.session, readers.ports, lambda: shared.deadline(None))
