"""A transaction that reads and writes tables, begun by this process: one command, or a long one."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Protocol, Self

from anabranch.core import defaults
from anabranch.core.hybrid_time import to_text
from anabranch.core.ids import NO_TXN, txn_text
from anabranch.core.legal_names import split_stream
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    DeadlineExceeded,
    FixCallError,
    IllegalState,
    InvalidArgument,
    LocksBroken,
    MalformedRecord,
    OutcomeUnknown,
    RetryError,
    SnapshotExpired,
    TransactionAborted,
    UnsupportedVersion,
)
from anabranch.schemas import records as r
from anabranch.tables.joined import Joins
from anabranch.tables.own_writes import Local, Writers
from anabranch.tables.registering import Opened, Registering
from anabranch.tables.snapshot import TableSnapshot
from anabranch.tables.work import BROKEN, IN_DOUBT, Isolation, TableWork, Validating, alone
from anabranch.types import Counts, Receipt, Result, result_of

log = logging.getLogger("anabranch.client")
_GRACE_S = 5.0  # extra time to resolve an outcome
_BEGINS = 3  # tries, each with a fresh snapshot
_ROW_BYTES = 48  # size of an event in a command, without key, value and table


class Commits(Joins, Protocol):
    """The calls of a client that begin and commit; deadlines are monotonic seconds."""

    @property
    def one_shot_bytes(self) -> int:
        """The most bytes that one command carries."""

    def opening(self, scope: str, keepalive: float, snapshot: int) -> Opened:
        """A transaction that is not begun yet. ``keepalive``: seconds."""

    def new_txn_id(self, scope: str, deadline: float) -> bytes:
        """An id for a transaction of this scope."""

    def locked_shot(self, command: r.OneShot, deadline: float) -> r.Outcome | r.Revalidate:
        """Commit, or get the answer to revalidate the locks. `OutcomeUnknown`; raises as any one-shot."""

    def resolve(self, txn_id: bytes, scope: str, token: bytes | None, deadline: float) -> r.Outcome:
        """The outcome, made final."""

    def random64(self) -> int:
        """64 random bits, as a signed number."""


class TableTransaction(TableWork):
    """Made by `Replica.begin`; use it as a context manager. Thread-safe.

    A short transaction is one command. A ``keepalive``, `token`, `flush`, or too many writes for one command make
    it a long one, which is open at the controller. Leaving the block without a commit drops it.
    """

    def __init__(
        self,
        replica: Validating,
        commits: Commits,
        view: TableSnapshot,
        isolation: Isolation,
        keepalive: float | None = None,
        writers: Writers = "own",
    ) -> None:
        """``keepalive``: seconds; None for a short transaction."""
        super().__init__(replica, view, isolation)
        self.commits = commits
        self._keepalive = defaults.KEEPALIVE_S if keepalive is None else keepalive
        self._reads_others = writers == "all"
        # Events that are not handed to the handle of a long one.
        self._events: deque[r.Event] = deque()
        self._bytes = 0
        self._txn_id: bytes | None = None
        self._sent = False  # a commit was sent, and may have taken effect
        self._shot: r.OneShot | None = None  # the command of that commit
        self._result: Result | None = None
        self._opened: Opened | None = None
        self._reads: Registering | None = None
        if keepalive is not None:
            try:
                self._open(None)
            except BaseException:
                self._end("it was not begun")
                raise

    def __enter__(self) -> Self:
        self.commits.entered(self)
        return self

    @alone
    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if self._view.is_forked:
            return
        opened = self._opened
        if self._sent or (opened is not None and opened.state in ("doubted", "decided")):
            self._end(IN_DOUBT)
            return  # other processes may rely on it
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

    def __repr__(self) -> str:
        return (
            f"<TableTransaction of {', '.join(self._replica.tables)} at {to_text(self.timestamp)}>"
        )

    @property
    def txn_id(self) -> bytes | None:
        """The id, 16 bytes; None before anything was sent."""
        return self._txn_id

    @property
    def result(self) -> Result | None:
        """The result after the commit, else None."""
        return self._result

    # -- writing --------------------------------------------------------------------------------------

    def _write(self, table: str, key: bytes, value: bytes | None) -> None:
        self._bytes += len(key) + len(value or b"") + len(table) + _ROW_BYTES
        event = r.Event(table, -1, key, value, (), -1)
        self._events.append(event)
        if self._reads is not None or self._bytes > self.commits.one_shot_bytes:
            try:
                self._open(None)
            except AnabranchError:
                if self._events and self._events[-1] is event:
                    self._events.pop()  # this write was refused
                raise

    # -- a long transaction ---------------------------------------------------------------------------

    def _open(self, timeout: float | None) -> tuple[Opened, Registering]:
        """Begin it at the controller unless it is open, and hand over what was written so far."""
        opened = self._opened
        if opened is None or self._reads is None:
            opened = self._begun(timeout)
            self._reads = Registering(
                self.commits, opened, self._replica, self._view, self._locks, self._read_from
            )
            opened.read_by(self._reads)
        try:
            with self._reads.explained():
                while self._events:
                    event = self._events[0]
                    opened.write(event.stream, event.value, key=event.key)
                    self._events.popleft()
        except LocksBroken as error:
            self._fail(error)
        if self._reads_others and isinstance(
            self._own, Local
        ):  # until now it has this process's rows
            self._own.close()
            self._own = self.commits.reading_back(opened)
        return opened, self._reads

    def _begun(self, timeout: float | None) -> Opened:
        """The handle of the transaction, begun at the controller with the tables that it reads at the snapshot.

        A snapshot that is too old is replaced if it was not read yet.
        """
        scope, tries = split_stream(self._replica.tables[0])[0], 0
        while True:
            opened = self._opened = self._opened or self.commits.opening(
                scope, self._keepalive, self.timestamp
            )
            tries += 1
            try:
                opened.open_named(timeout)
                self._txn_id = opened.txn_id
                self._name_tables(opened, timeout)
                return opened
            except TransactionAborted:
                self._txn_id = opened.txn_id
                # Ask, also for the next transaction: without commits only a question moves the newest moment.
                view = self._replica.snapshot()
                self._view.close()
                self._view = view
                if self._was_read or tries == _BEGINS:
                    self._end("it is aborted")
                    raise
            self._opened = None

    def _name_tables(self, opened: Opened, timeout: float | None) -> None:
        """Make the controller keep the tables readable at the snapshot. `TransactionAborted`: it is too old."""
        named = r.LockReads(*opened.identity, 0, tables=self._replica.tables)
        try:
            self.commits.lock_reads(named, self.commits.deadline(timeout))
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
        opened.flush(timeout)

    def _register(self, timeout: float | None) -> tuple[Opened, Registering]:
        opened, reads = self._open(timeout)
        if self._broken is not None:
            self._fail(self._broken)
        try:
            reads.flush(self.commits.deadline(timeout))
        except LocksBroken as error:
            self._fail(error)
        return opened, reads

    # -- its end --------------------------------------------------------------------------------------

    @alone
    def commit(
        self,
        receipts: Sequence[Receipt | bytes] | None = None,
        *,
        name: str | None = None,
        timeout: float | None = None,
    ) -> Result:
        """Commit, if nothing that was read has changed at the commit timestamp. Repeating it returns the same
        result.

        A transaction without writes and name succeeds without a command: its commit timestamp is that of the
        snapshot. ``receipts``, ``name``: as for `Transaction.commit`. The reads of all its processes count, even if
        their writes are not taken.

        Raises:
            LocksBroken, TransactionAborted: it is over without effect; begin again.
                DeadlineExceeded, NotReady, EventTooLarge, SnapshotExpired: nothing was written.
                OutcomeUnknown: commit again, or ask ``client.state`` later.
                WritersUnfinished, ReceiptMismatch and others: as `Transaction.commit`.
        """
        if self._result is not None:
            return self._result
        late = self._over == IN_DOUBT
        if not late:
            super()._check()
        if self._opened is not None:
            try:
                self._result = self._commit_open(receipts, name, timeout)
            except (
                AlreadyCommitted
            ):  # another process committed it, perhaps with all writes of this one
                if self._events:
                    raise
                self._result = self._opened.commit(receipts, name=name, timeout=timeout)
        elif late:
            self._result = result_of(self._found_out(self.commits.deadline(timeout)))
        elif receipts:
            raise InvalidArgument(
                "no other process can have written, as the token was never asked for: give no receipts"
            )
        elif not self._events and name is None:
            self._result = Result(NO_TXN, self.timestamp, Counts(0, 0, 0))
        else:
            self._result = result_of(self._commit(name, self.commits.deadline(timeout)))
        self._end("it is committed")
        return self._result

    def _found_out(self, deadline: float) -> r.Outcome:
        """Resolve the outcome of a short transaction whose commit was not answered."""
        outcome = self.commits.resolve(self._txn_id or NO_TXN, self._scope(), None, deadline)
        if outcome.state != "COMMITTED" and self._shot is not None:
            # If it gave way to an earlier commit of its name, only an answer to the command itself names that one.
            answer = self.commits.locked_shot(self._shot, deadline)
            outcome = answer if isinstance(answer, r.Outcome) else outcome
        if outcome.state != "COMMITTED":
            why = outcome.reason or outcome.state
            raise TransactionAborted(f"the transaction is aborted ({why}): begin a new one")
        return outcome

    def _scope(self) -> str:
        return split_stream(self._events[0].stream if self._events else self._replica.tables[0])[0]

    def _commit(self, name: str | None, deadline: float) -> r.Outcome:
        scope = self._scope()
        txn_id = self._txn_id = self._txn_id or self.commits.new_txn_id(scope, deadline)
        while True:
            # Take the marks before validating, so that the validation includes everything up to them.
            marks = self._replica.marks()
            found: AnabranchError | None
            try:
                found = self._broken or self._locks.look(self._view, marks)
            except SnapshotExpired as error:
                found = error
            if found is not None and self._sent:
                # The lock may be broken by its own commit, or after it.
                return self._given_up(txn_id, scope, found)
            if isinstance(found, LocksBroken):
                self._fail(found)
            if found is not None:
                raise found
            locks = self._locks.records(self._replica.tables, marks)
            command = r.OneShot(txn_id, scope, name, tuple(self._events), None, locks)
            answer = self._send(command, deadline)
            last = {each.table: each.last for each in answer.tables}
            if isinstance(answer, r.Outcome):
                self._replica.observe(answer.commit_timestamp, last)
                return answer
            self._sent = False
            try:
                self._replica.wait(answer.timestamp, last, deadline)
            except AnabranchError as error:
                return self._given_up(txn_id, scope, error)

    def _send(self, command: r.OneShot, deadline: float) -> r.Outcome | r.Revalidate:
        before, self._sent, self._shot = self._sent, True, command
        try:
            return self.commits.locked_shot(command, deadline)
        except (OutcomeUnknown, MalformedRecord, UnsupportedVersion):
            raise  # no answer, or an unreadable one
        except TransactionAborted:
            self._end("it is aborted")
            raise
        except AnabranchError:
            self._sent = before  # this copy was refused, so it had no effect
            if not before:
                self._txn_id = None  # resolving it may have aborted the id
            raise

    def _given_up(self, txn_id: bytes, scope: str, error: AnabranchError) -> r.Outcome:
        """Resolve the outcome, because an earlier copy of the command may still be carried out."""
        try:
            outcome = self.commits.resolve(txn_id, scope, None, self.commits.deadline(_GRACE_S))
        except AnabranchError as trouble:
            raise OutcomeUnknown(
                f"the outcome of transaction {txn_text(txn_id)} is not known: {trouble}",
                txn_id=txn_id,
            ) from error
        if outcome.state == "COMMITTED":
            return outcome
        if isinstance(error, LocksBroken):
            self._fail(error)
        self._end("it is aborted")
        if not isinstance(error, RetryError):
            raise error
        raise DeadlineExceeded(
            f"the replica did not show in time whether the locks hold: {error}; nothing was written, begin again"
        ) from error

    def _check(self) -> None:
        state = None if self._opened is None else self._opened.state
        sent = self._sent or state in ("sent", "doubted")
        if self._over == IN_DOUBT or (sent and not self._over):
            raise IllegalState("its commit was sent, and the outcome is not known: commit again")
        super()._check()
        if state == "decided":
            raise AlreadyCommitted("the transaction was committed elsewhere")

    def _commit_open(
        self, receipts: Sequence[Receipt | bytes] | None, name: str | None, timeout: float | None
    ) -> Result:
        opened, reads = self._open(timeout)
        try:
            with reads.explained():
                if (
                    opened.state == "open"
                ):  # otherwise only the controller knows whether the locks are valid
                    if self._broken is not None:
                        raise self._broken
                    with suppress(OutcomeUnknown):  # another commit is under way
                        reads.register(self.commits.deadline(timeout))
                return opened.commit(receipts, name=name, timeout=timeout)
        except LocksBroken as error:
            self._broken = self._broken or error
            if self._wrote or receipts or name is not None or self._others_wrote(opened):
                self._fail(error)
            self._drop(opened)
            return Result(NO_TXN, self.timestamp, Counts(0, 0, 0))
        except TransactionAborted:
            self._end("it is aborted")
            raise

    def _others_wrote(self, opened: Opened) -> bool:
        try:
            token, _ = opened.identity
        except LocksBroken:
            return True  # the controller has aborted it, so it did more than read
        state = self.commits.state(opened.txn_id or b"", token, self.commits.deadline(None))
        return bool(state.streams)

    def _drop(self, opened: Opened, reason: str = BROKEN) -> None:
        """Abort it.

        Raises: AlreadyCommitted, OutcomeUnknown (its commit came first, so broken locks do not matter).
        """
        try:
            opened.abort(reason, timeout=_GRACE_S)
        except (AlreadyCommitted, OutcomeUnknown):
            raise  # only the controller knows the outcome
        except AnabranchError as trouble:
            log.warning("%r could not be aborted and will go stale: %s", self, trouble)

    @alone
    def abort(self, reason: str = "aborted by the client") -> None:
        """Drop the transaction; repeating this is harmless. A long one is aborted as by `Transaction.abort`.

        If a commit was sent, this does not change the outcome: commit again to learn it.
        """
        if self._opened is not None and self._over in ("", IN_DOUBT):
            self._opened.abort(reason)
        self._end(IN_DOUBT if self._sent else "it is aborted")

    def _give_up(self) -> None:
        if self._opened is not None and self._over in ("", IN_DOUBT):
            self._drop(self._opened)
