"""Registering the locks of one process of an open transaction, and validating locks that may be broken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

from anabranch.core.journal.table_writes import fingerprint
from anabranch.core.transaction_states import HandleState, locks_broken
from anabranch.errors import AnabranchError, LocksBroken, RetryError, TransactionAborted
from anabranch.schemas import records as r
from anabranch.tables.locks import Locks, broken
from anabranch.tables.own_writes import OwnRows
from anabranch.tables.snapshot import TableSnapshot
from anabranch.tables.work import TableWork, Validating
from anabranch.types import Receipt, Result


class Controller(Protocol):
    """The calls about an open transaction that a client sends; deadlines are monotonic seconds."""

    def deadline(self, timeout: float | None) -> float:
        """The end of a call with this timeout in seconds."""

    def lock_reads(self, command: r.LockReads | r.ListLocks, deadline: float) -> r.ReadsLocked:
        """Register locks, or list registered ones."""

    def state(self, txn_id: bytes, token: bytes | None, deadline: float) -> r.Outcome:
        """The transaction's present state."""

    def reading_back(self, part: Part) -> OwnRows:
        """Rows that the transaction wrote, from this process and from finished writers."""

    def entered(self, work: TableWork) -> None:
        """Refuse this client's non-transactional calls on this thread until the work is over."""


class Part(Protocol):
    """A process's handle of an open transaction."""

    @property
    def identity(self) -> tuple[bytes, int]:
        """The token, and the writer; raises if it is over."""

    @property
    def txn_id(self) -> bytes | None: ...

    def written_to(self, stream: str) -> int: ...

    def acknowledged(self, deadline: float) -> tuple[bytes, r.Receipt]: ...


class Opened(Part, Protocol):
    """The handle of an open transaction: `anabranch.client.transaction.Transaction`."""

    @property
    def state(self) -> HandleState:
        """The state of its begin, commit and abort, as this process knows it."""

    def read_by(self, reads: Registering) -> None:
        """Let ``reads`` validate the locks when the transaction commits."""

    def open_named(self, timeout: float | None = None) -> None: ...

    def write(self, stream: str, value: bytes | None = None, key: bytes | None = None) -> None: ...

    def token(
        self,
        rights: str | Iterable[str] = ...,
        *,
        expires: float | None = None,
        lane: str | None = None,
    ) -> bytes: ...

    def flush(self, timeout: float | None = None) -> None: ...

    def commit(
        self,
        receipts: Sequence[Receipt | bytes] | None = None,
        *,
        name: str | None = None,
        timeout: float | None = None,
    ) -> Result: ...

    def abort(self, reason: str = ..., *, timeout: float | None = None) -> None: ...


@contextmanager
def explained(controller: Controller, token: bytes) -> Iterator[None]:
    """Add to an error about broken locks the lock, and the transaction that broke it."""
    try:
        yield
    except (TransactionAborted, LocksBroken) as error:
        told = None
        if not isinstance(error, LocksBroken) or not error.table:
            with suppress(AnabranchError):
                told = controller.lock_reads(r.ListLocks(token, 0, 0), controller.deadline(None))
        if told is not None and told.broken is not None:
            raise locks_broken(told.broken) from error
        raise


class Registering:
    """Registers and validates the reads of one process of an open transaction."""

    def __init__(
        self,
        controller: Controller,
        part: Part,
        replica: Validating,
        view: TableSnapshot,
        locks: Locks,
        read_from: Mapping[int, int],
    ) -> None:
        self._controller, self._replica = controller, replica
        self._token, self._writer = part.identity
        self._view, self._locks = view, locks
        self._read_from = read_from
        self._told_from: dict[int, int] = {}
        self._sequence = 0
        self._unsure: r.LockReads | None = None  # a command that was sent and not answered
        self._due: r.ReadsLocked | None = None  # registered, and not validated yet
        self._through: dict[tuple[int, int], int] = {}  # (writer, set) -> validated through

    @property
    def validated(self) -> tuple[r.Validated, ...]:
        """The validated sets, for the commit."""
        return tuple(r.Validated(*which, through) for which, through in self._through.items())

    def flush(self, deadline: float) -> None:
        """Register what was read, validate it, and report that. From then on other processes may rely on it.

        Raises: LocksBroken, TooManyLocks, TooMuchLocked, NotReady (the replica did not catch up in time).
        """
        if self.register(deadline):
            self._ask(r.LockReads(self._token, self._writer, 0, validated=self.validated), deadline)

    def register(self, deadline: float) -> bool:
        """Register what was read, and validate it.

        Returns whether there is anything to report. Raises: as `flush`.
        """
        if self._unsure is not None:
            self._register(self._unsure, deadline)
        sources = self._fresh_sources()
        while (locks := self._locks.fresh()) or sources:
            command = r.LockReads(
                self._token,
                self._writer,
                self._sequence + 1,
                locks,
                sources,
                tables=self._replica.tables,
            )
            self._register(command, deadline)
            sources = ()
        due = self._due
        if due is not None:
            self._look(due.timestamp, due.tables, deadline)
            self._due = None
        return due is not None

    def _fresh_sources(self) -> tuple[r.WriterAt, ...]:
        fresh = self._read_from.items() - self._told_from.items()
        self._told_from = dict(self._read_from)
        return tuple(r.WriterAt(*each) for each in sorted(fresh))

    def _register(self, command: r.LockReads, deadline: float) -> None:
        self._unsure = command  # repeated unchanged if it is not answered
        self._due = self._ask(command, deadline)
        self._unsure, self._sequence = None, command.sequence
        self._locks.registered(command.locks)

    def explained(self) -> AbstractContextManager[None]:
        """As `explained`."""
        return explained(self._controller, self._token)

    def _ask(self, command: r.LockReads, deadline: float) -> r.ReadsLocked:
        with self.explained():
            answer = self._controller.lock_reads(command, deadline)
        if answer.broken is not None:
            raise locks_broken(answer.broken)
        return answer

    def check_open(self, deadline: float) -> None:
        """Raise the controller's answer, unless the transaction is open or there is no answer."""
        with suppress(RetryError, LocksBroken), self.explained():
            self._controller.lock_reads(r.LockReads(self._token, self._writer, 0), deadline)

    def _look(self, timestamp: int, tables: Iterable[r.TableTime], deadline: float) -> None:
        """Validate all locks of this process through a time that the controller reported."""
        self._replica.wait(timestamp, {each.table: each.last for each in tables}, deadline)
        with self._shown() as view:
            found = self._locks.look(view)
        if found is not None:
            raise found
        self._through = {
            which: through for which, through in self._through.items() if which[0] != self._writer
        }
        if self._sequence:
            self._through[self._writer, self._sequence] = timestamp

    @contextmanager
    def _shown(self) -> Iterator[TableSnapshot]:
        """The snapshot, or an equal one if it is closed: commit and finish may be repeated after the `with`
        block.
        """
        if self._view.is_open:
            yield self._view
        else:
            with self._replica.snapshot(at=self._view.timestamp) as view:
                yield view.in_place_of(self._view)

    # -- validation for a commit --------------------------------------------------------------------------

    def revalidate(self, answer: r.Revalidate, deadline: float) -> None:
        """Validate the locks of the writers that the controller names, also of processes that ended."""
        self._look(answer.timestamp, answer.tables, deadline)
        for writer in answer.writers:
            if writer != self._writer:
                self._look_for(writer, answer.timestamp, deadline)

    def _look_for(self, writer: int, timestamp: int, deadline: float) -> None:
        """Validate the locks of another writer, of whose keys only fingerprints are known here."""
        sequence = 0
        while True:
            told = self._controller.lock_reads(r.ListLocks(self._token, writer, sequence), deadline)
            if told.broken is not None:
                raise locks_broken(told.broken)
            if not told.sequence:
                break
            sequence = told.sequence
            for locks in told.locks:
                self._search(locks)
        self._through[writer, sequence] = timestamp

    def _search(self, locks: r.TableLocks) -> None:
        points, snapshot = set(locks.points), self._view.timestamp
        everything = (r.LockedRange(b"", None),) if points else ()
        with self._shown() as view:
            for span in (*everything, *locks.ranges):
                whole = span in everything
                for seen in view.walk(locks.table, span.low, span.high):
                    if seen.timestamp > snapshot and (not whole or fingerprint(seen.key) in points):
                        raise broken(locks.table, seen, snapshot)
