"""A transaction that reads and writes tables: one snapshot, own writes over it, locks on what it read.

All is in memory until the commit, which is one command. `docs/tables.md` has the rules.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, NoReturn, Protocol, Self

from anabranch.core.hybrid_time import to_text
from anabranch.core.ids import NO_TXN, split_stream, txn_text
from anabranch.errors import (
    AnabranchError,
    DeadlineExceeded,
    IllegalState,
    InvalidArgument,
    LocksBroken,
    OutcomeUnknown,
    RetryError,
    RowExists,
    RowMissing,
)
from anabranch.schemas import records as r
from anabranch.tables.locks import Locks, broken
from anabranch.tables.snapshot import TableSnapshot, bounds, check_key, check_limit
from anabranch.types import Counts, Result, result_of

Isolation = Literal["serializable", "snapshot"]
log = logging.getLogger("anabranch.client")
_BROKEN = "its locks are broken"
_GRACE_S = 5.0  # to make sure of an outcome


class Commits(Protocol):
    """Commits, as a client sends them; deadlines are monotonic seconds."""

    def deadline(self, timeout: float | None) -> float:
        """The end of a call that may take so many seconds."""

    def new_txn_id(self, scope: str, deadline: float) -> bytes:
        """An id for a transaction of this scope."""

    def locked_shot(self, command: r.OneShot, deadline: float) -> r.Outcome | r.LookAgain:
        """Commit, or learn that the locks have to be looked at again. `OutcomeUnknown`; as of any one-shot."""

    def resolve(self, txn_id: bytes, scope: str, token: bytes | None, deadline: float) -> r.Outcome:
        """The outcome, made final."""

    def random64(self) -> int:
        """64 random bits, as a signed number."""

    def entered(self, txn: TableTransaction) -> None:
        """Refuse calls of this client, on this thread, that take effect at once, until the transaction is over."""


class Vouching(Protocol):
    """A replica, as its transactions see it."""

    @property
    def tables(self) -> tuple[str, ...]: ...

    def marks(self) -> Mapping[str, tuple[int, int]]:
        """Table -> (complete through, its newest commit), both of one moment."""

    def told(self, timestamp: int, last: Mapping[str, int]) -> None:
        """The controller's word: at ``timestamp`` these were the newest commits."""

    def broken_at(self, timestamp: int) -> None:
        """Locks are broken by this commit."""

    def wait(self, timestamp: int, last: Mapping[str, int], deadline: float) -> None:
        """The same, and wait until all tables are complete up to it."""


class _Own(NamedTuple):
    """The transaction's writes to one table. ``keys``: rising."""

    rows: dict[bytes, bytes | None]
    keys: list[bytes]


class TableTransaction:
    """Made by `Replica.begin`; use it as a context manager. One thread at a time.

    Leaving it without a commit drops it: nothing was sent.
    """

    def __init__(
        self, replica: Vouching, commits: Commits, view: TableSnapshot, isolation: Isolation
    ) -> None:
        self._replica = replica
        self.commits = commits
        self._view = view
        self._reads_lock = isolation == "serializable"  # else the keys that are written do
        self._own: dict[str, _Own] = {}
        self._events: list[r.Event] = []
        self._locks = Locks()
        self._broken: LocksBroken | None = None
        self._txn_id: bytes | None = None
        self._sent = False  # and not known to have come to nothing
        self._over = ""
        self._result: Result | None = None

    def __enter__(self) -> Self:
        self.commits.entered(self)
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if not self._over and self._events and error is None:
            log.warning(
                "%r is left without commit: its %d writes are dropped", self, len(self._events)
            )
        self.abort()

    def __repr__(self) -> str:
        return (
            f"<TableTransaction of {', '.join(self._replica.tables)} at {to_text(self.timestamp)}>"
        )

    @property
    def timestamp(self) -> int:
        """The hybrid time that all reads are at."""
        return self._view.timestamp

    @property
    def is_over(self) -> bool:
        """Whether it was committed or dropped, or its locks are broken."""
        return bool(self._over)

    @property
    def txn_id(self) -> bytes | None:
        """16 bytes; None before anything was sent."""
        return self._txn_id

    @property
    def result(self) -> Result | None:
        """The outcome, once committed."""
        return self._result

    # -- reading --------------------------------------------------------------------------------------

    def get(self, table: str, key: bytes, *, lock: bool = True) -> bytes | None:
        """The row of a key, None if there is none: as of the snapshot, with this transaction's own writes.

        The commit will hold only if no other wrote the key meanwhile; ``lock`` False: whatever others write.

        Raises: InvalidArgument, TooManyLocks, LocksBroken (it was written since, and this transaction wrote
        already), IllegalState (it is over), SnapshotExpired.
        """
        self._check()
        own = self._own.get(table)
        if own is not None and check_key(key) in own.rows:
            return own.rows[key]
        if not (lock and self._reads_lock):
            return self._view.get(table, key)
        seen = self._view.look(table, key)
        self._locks.point(table, key)
        if seen.timestamp > self.timestamp:
            self._break(broken(table, seen, self.timestamp))
        return seen.value

    def scan(
        self,
        table: str,
        low: bytes | None = None,
        high: bytes | None = None,
        *,
        prefix: bytes | None = None,
        reverse: bool = False,
        limit: int | None = None,
        lock: bool = True,
    ) -> Iterator[tuple[bytes, bytes]]:
        """Rows from ``low`` up to ``high`` (not included), or with a prefix, in byte order of their keys.

        The part that was really iterated over is locked, with all keys that are not there. Own writes that are made
        while it iterates are not seen. Raises: as `get`.
        """
        self._check()
        check_limit(limit)
        begin, end = bounds(low, high, prefix)
        own = self._own.get(table, _Own({}, []))
        keys = [k for k in own.keys if begin <= k and (end is None or k < end)]
        mine = [(key, own.rows[key]) for key in (keys[::-1] if reverse else keys)]
        seen = self._seen(table, begin, end, reverse, lock and self._reads_lock)
        return self._rows(_merged(seen, iter(mine), reverse), limit)

    def _rows(
        self, found: Iterator[tuple[bytes, bytes | None]], limit: int | None
    ) -> Iterator[tuple[bytes, bytes]]:
        left = -1 if limit is None else limit
        while left != 0 and (row := next(found, None)) is not None:
            self._check()
            if row[1] is not None:
                left -= 1
                yield row[0], row[1]

    def _seen(
        self, table: str, low: bytes, high: bytes | None, reverse: bool, lock: bool
    ) -> Iterator[tuple[bytes, bytes | None]]:
        """Rows of the snapshot; what is given, and what lies before it, is locked."""
        span = None
        for seen in self._view.walk(table, low, high, reverse=reverse):
            if lock:
                first, end = (seen.key, high) if reverse else (low, seen.key + b"\0")
                span = span or self._locks.span(table, first, end)
                span.low, span.high = first, end
                if seen.timestamp > self.timestamp:
                    self._break(broken(table, seen, self.timestamp))
            yield seen.key, seen.value
        if lock:
            span = span or self._locks.span(table, low, high)
            span.low, span.high = low, high

    def lock(
        self,
        table: str,
        key: bytes | None = None,
        *,
        low: bytes | None = None,
        high: bytes | None = None,
        prefix: bytes | None = None,
    ) -> None:
        """Lock a key, or a range, without reading it. Raises: as `get`."""
        self._check()
        self._check_table(table)
        if key is not None:
            self._locks.point(table, check_key(key))
        else:
            self._locks.span(table, *bounds(low, high, prefix))

    # -- writing --------------------------------------------------------------------------------------

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """Write a row, whether there is one or not.

        Raises: InvalidArgument, IllegalState; LocksBroken (what this transaction read was written since).
        """
        if not isinstance(value, bytes):
            raise InvalidArgument(
                f"a row is bytes, not {type(value).__name__}; `delete` takes it away"
            )
        self._write(table, key, value)

    def delete(self, table: str, key: bytes) -> None:
        """Delete a row, if it is there. Raises: as `put`."""
        self._write(table, key, None)

    def insert(self, table: str, key: bytes, value: bytes) -> None:
        """Write a row that is not there. Raises: RowExists; as `get` and `put`."""
        if self.get(table, key) is not None:
            raise RowExists(f"{table} has a row {key!r:.100}: `put` or `replace` it")
        self.put(table, key, value)

    def replace(self, table: str, key: bytes, value: bytes) -> None:
        """Write a row that is there. Raises: RowMissing; as `get` and `put`."""
        if self.get(table, key) is None:
            raise RowMissing(f"{table} has no row {key!r:.100}: `put` or `insert` it")
        self.put(table, key, value)

    def _write(self, table: str, key: bytes, value: bytes | None) -> None:
        self._check()
        self._check_table(table)
        if self._broken is not None:
            self._fail(self._broken)
        own = self._own.setdefault(table, _Own({}, []))
        if check_key(key) not in own.rows:
            insort(own.keys, key)
        if not self._reads_lock:
            self._locks.point(table, key)
        own.rows[key] = value
        self._events.append(r.Event(table, -1, key, value, (), -1))

    # -- its end --------------------------------------------------------------------------------------

    def commit(self, *, name: str | None = None, timeout: float | None = None) -> Result:
        """Commit: all that was read must be so at the commit timestamp. Repeating it returns the same result.

        A transaction without writes and name ends well without a command: its commit timestamp is that of the
        snapshot. ``name``: as of `Transaction.commit`.

        Raises:
            LocksBroken, TransactionAborted: it is over without effect; begin again.
                DeadlineExceeded, NotReady, EventTooLarge, SnapshotExpired: nothing was written.
                OutcomeUnknown: commit again, or ask ``client.state`` later.
        """
        if self._result is not None:
            return self._result
        self._check(again=True)
        if not self._events and name is None:
            self._result = Result(NO_TXN, self.timestamp, Counts(0, 0, 0))
        else:
            self._result = result_of(self._commit(name, self.commits.deadline(timeout)))
        self._end("it is committed")
        return self._result

    def _commit(self, name: str | None, deadline: float) -> r.Outcome:
        scope = split_stream(self._events[0].stream if self._events else self._replica.tables[0])[0]
        txn_id = self._txn_id = self._txn_id or self.commits.new_txn_id(scope, deadline)
        while True:
            # The marks come first: what is laid down after them is seen by the look, too.
            marks = self._replica.marks()
            found = self._broken or self._locks.look(self._view)
            if found is not None and self._sent:
                return self._given_up(
                    txn_id, scope, found
                )  # perhaps by its own commit, or after it
            if found is not None:
                self._fail(found)
            locks = self._locks.records(self._replica.tables, marks)
            command = r.OneShot(txn_id, scope, name, tuple(self._events), None, locks)
            self._sent = True
            answer = self.commits.locked_shot(command, deadline)
            last = {each.table: each.last for each in answer.tables}
            if isinstance(answer, r.Outcome):
                self._replica.told(answer.commit_timestamp, last)
                return answer
            self._sent = False
            try:
                self._replica.wait(answer.timestamp, last, deadline)
            except AnabranchError as error:
                return self._given_up(txn_id, scope, error)

    def _given_up(self, txn_id: bytes, scope: str, error: AnabranchError) -> r.Outcome:
        """A copy that was sent before may still be carried out: make the outcome final."""
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

    def abort(self) -> None:
        """Drop it. Repeating the call is fine."""
        self._end("it is aborted")

    def _end(self, why: str) -> None:
        if not self._over:
            self._over = why
            self._view.close()

    def _break(self, error: LocksBroken) -> None:
        """Note that a lock is broken. A transaction that wrote ends; one that did not may go on reading."""
        self._broken = self._broken or error
        if self._events:
            self._fail(self._broken)

    def _fail(self, error: LocksBroken) -> NoReturn:
        self._broken = error
        self._replica.broken_at(error.commit_timestamp)
        self._end(_BROKEN)
        raise error

    def _check(self, *, again: bool = False) -> None:
        """``again``: to commit, perhaps once more."""
        if self._over:
            if self._over == _BROKEN and self._broken is not None:
                raise self._broken
            raise IllegalState(f"the transaction is over, {self._over}: begin another one")
        if self._sent and not again:
            raise IllegalState("its commit was sent, and the outcome is not known: commit again")

    def _check_table(self, table: str) -> None:
        if table not in self._replica.tables:
            raise InvalidArgument(
                f"{table!r} is not in this replica of {', '.join(self._replica.tables)}: open it with that one, too"
            )


def _merged(
    seen: Iterator[tuple[bytes, bytes | None]],
    mine: Iterator[tuple[bytes, bytes | None]],
    reverse: bool,
) -> Iterator[tuple[bytes, bytes | None]]:
    """Rows of the snapshot with the transaction's own over them, in order; None where there is no row."""
    theirs, ours = next(seen, None), next(mine, None)
    while theirs is not None or ours is not None:
        if theirs is not None and (ours is None or _first(theirs[0], ours[0], reverse)):
            yield theirs
            theirs = next(seen, None)
        elif ours is not None:
            if theirs is not None and theirs[0] == ours[0]:
                theirs = next(seen, None)
            yield ours
            ours = next(mine, None)


def _first(one: bytes, other: bytes, reverse: bool) -> bool:
    return one > other if reverse else one < other
