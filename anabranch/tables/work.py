"""Reads and writes of tables in a transaction: one snapshot, the transaction's own writes, and locks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import wraps
from inspect import isasyncgen, isawaitable, iscoroutine, isgenerator
from typing import Concatenate, Literal, NoReturn, ParamSpec, Protocol, TypeVar

from anabranch.core.limits import check_row_key
from anabranch.errors import IllegalState, InvalidArgument, LocksBroken, RowExists, RowMissing
from anabranch.schemas.records import WriterAt
from anabranch.tables.locks import Locks, broken
from anabranch.tables.own_writes import Local, OwnRows, Written, merged
from anabranch.tables.snapshot import TableSnapshot, bounds, check_limit

Isolation = Literal["serializable", "snapshot"]
BROKEN = "its locks are broken"
IN_DOUBT = "its outcome is not known here"


def check_called(returned: object) -> None:
    """Raise `InvalidArgument` for the result of an async function or a generator, whose call has not run it."""
    if isawaitable(returned) or isgenerator(returned) or isasyncgen(returned):
        if iscoroutine(returned):
            returned.close()  # otherwise Python warns that it was never awaited
        raise InvalidArgument(
            "the function was not run: give a plain one, neither async nor a generator"
        )


class Validating(Protocol):
    """The calls of a replica that its transactions make."""

    @property
    def tables(self) -> tuple[str, ...]: ...

    def marks(self) -> Mapping[str, tuple[int, int]]:
        """Table -> (complete through, its newest commit), both of one moment."""

    def observe(self, timestamp: int, last: Mapping[str, int]) -> None:
        """Note the controller's report: at ``timestamp`` these were the newest commits."""

    def broken_at(self, timestamp: int) -> None:
        """Note that this commit broke locks."""

    def wait(self, timestamp: int, last: Mapping[str, int], deadline: float) -> None:
        """`observe`, and wait until all tables are complete up to ``timestamp``."""

    def snapshot(self, at: int | None = None) -> TableSnapshot:
        """The tables as of a time; None: as of now."""


W = TypeVar("W", bound="TableWork")
P = ParamSpec("P")
T = TypeVar("T")


def alone(call: Callable[Concatenate[W, P], T]) -> Callable[Concatenate[W, P], T]:
    """Let one thread at a time into a transaction. Locks of the handle and the replica are taken after this one."""

    @wraps(call)
    def method(self: W, /, *args: P.args, **named: P.kwargs) -> T:
        # In a forked child the thread that has the lock does not exist.
        with nullcontext() if self._view.is_forked else self._lock:
            return call(self, *args, **named)

    return method


class TableWork:
    """The reads and writes of one process in a transaction. Thread-safe."""

    def __init__(self, replica: Validating, view: TableSnapshot, isolation: Isolation) -> None:
        self._lock = threading.RLock()
        self._replica = replica
        self._view = view
        self._reads_lock = isolation == "serializable"  # otherwise written keys are locked
        self._own: OwnRows = Local()
        self._wrote = False
        self._was_read = False  # read or locked something, so the snapshot must not change
        self._locks = Locks()
        self._read_from: dict[int, int] = {}  # writer that was read from -> sequence of its receipt
        self._broken: LocksBroken | None = None
        self._over = ""

    @property
    def timestamp(self) -> int:
        """The hybrid time of all reads."""
        return self._view.timestamp

    @property
    def is_over(self) -> bool:
        """Whether this process committed, dropped, finished or left it, or its locks are broken."""
        return bool(self._over)

    # -- reading --------------------------------------------------------------------------------------

    @alone
    def get(self, table: str, key: bytes, *, lock: bool = True) -> bytes | None:
        """The row of a key, or None: as of the snapshot, with this transaction's own writes.

        The commit fails if another transaction writes the key meanwhile; with ``lock`` False it does not.

        Raises: InvalidArgument, TooManyLocks, LocksBroken (the key was written since, and this transaction has
        written), IllegalState (the transaction is over), SnapshotExpired.
        """
        self._check()
        own = self._own.get(table, check_row_key(key))
        if own is not None:
            self._note(own.by)
            return own.value
        self._was_read = True
        if not (lock and self._reads_lock):
            return self._view.get(table, key)
        seen = self._view.get_version(table, key)
        self._locks.point(table, key)
        if seen.timestamp > self.timestamp:
            self._break(broken(table, seen, self.timestamp))
        return seen.value

    @alone
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

        The part that was iterated over is locked, including its missing keys. Own writes during the iteration are
        not seen. Raises: as `get`.
        """
        self._check()
        check_limit(limit)
        self._was_read = True
        begin, end = bounds(low, high, prefix)
        mine = self._own.scan(table, begin, end, reverse=reverse)
        seen = self._seen(table, begin, end, reverse, lock and self._reads_lock)
        return self._rows(merged(seen, mine, reverse), limit)

    def _rows(
        self, found: Iterator[tuple[bytes, Written]], limit: int | None
    ) -> Iterator[tuple[bytes, bytes]]:
        left = -1 if limit is None else limit
        while left != 0:
            row = self._step(found)
            if row is None:
                return
            if row[1].value is not None:
                left -= 1
                yield row[0], row[1].value

    @alone
    def _step(self, found: Iterator[tuple[bytes, Written]]) -> tuple[bytes, Written] | None:
        self._check()
        row = next(found, None)
        if row is not None:
            self._note(row[1].by)
        return row

    def _note(self, by: WriterAt | None) -> None:
        if by is not None:
            self._read_from[by.writer] = max(by.sequence, self._read_from.get(by.writer, 0))

    def _seen(
        self, table: str, low: bytes, high: bytes | None, reverse: bool, lock: bool
    ) -> Iterator[tuple[bytes, Written]]:
        """Rows of the snapshot. Each returned row, and the range before it, is locked."""
        span = None
        for seen in self._view.walk(table, low, high, reverse=reverse):
            if lock:
                first, end = (seen.key, high) if reverse else (low, seen.key + b"\0")
                span = span or self._locks.span(table, low, high)
                span.low, span.high = first, end
                if seen.timestamp > self.timestamp:
                    self._break(broken(table, seen, self.timestamp))
            yield seen.key, Written(seen.value)
        if lock:
            span = span or self._locks.span(table, low, high)
            span.low, span.high = low, high

    @alone
    def lock(
        self,
        table: str,
        key: bytes | None = None,
        *,
        low: bytes | None = None,
        high: bytes | None = None,
        prefix: bytes | None = None,
    ) -> None:
        """Lock a key or a range without reading it; without arguments the whole table. Raises: as `get`."""
        self._check()
        self._check_table(table)
        self._was_read = True
        if key is not None and not low is high is prefix is None:
            raise InvalidArgument("give a key, a prefix, or low and high")
        if key is not None:
            self._locks.point(table, check_row_key(key))
        else:
            self._locks.span(table, *bounds(low, high, prefix))

    @alone
    def refresh(self) -> None:
        """Let later reads see the writes of this transaction's processes that have finished since the first read.

        This needs ``writers`` "all". Raises: IllegalState.
        """
        self._check()
        self._own.refresh()

    # -- writing --------------------------------------------------------------------------------------

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """Write a row, whether the key has one or not.

        Raises: InvalidArgument, IllegalState; LocksBroken (what this transaction read was written since); as
        `Transaction.write` in a long transaction.
        """
        if not isinstance(value, bytes):
            raise InvalidArgument(
                f"a row is bytes, not {type(value).__name__}; `delete` takes it away"
            )
        self._put(table, key, value)

    def delete(self, table: str, key: bytes) -> None:
        """Delete a row if it exists. Raises: as `put`."""
        self._put(table, key, None)

    @alone
    def insert(self, table: str, key: bytes, value: bytes) -> None:
        """Write a row that does not exist. Raises: RowExists; as `get` and `put`."""
        if self.get(table, key) is not None:
            raise RowExists(f"{table} has a row {key!r:.100}: `put` or `replace` it")
        self.put(table, key, value)

    @alone
    def replace(self, table: str, key: bytes, value: bytes) -> None:
        """Write a row that exists. Raises: RowMissing; as `get` and `put`."""
        if self.get(table, key) is None:
            raise RowMissing(f"{table} has no row {key!r:.100}: `put` or `insert` it")
        self.put(table, key, value)

    @alone
    def _put(self, table: str, key: bytes, value: bytes | None) -> None:
        self._check()
        self._check_table(table)
        self._view.check_open()
        if self._broken is not None:
            self._fail(self._broken)
        check_row_key(key)
        if not self._reads_lock:
            self._locks.point(table, key)
        self._wrote = True
        self._write(table, key, value)
        self._own.put(table, key, value)

    def _write(self, table: str, key: bytes, value: bytes | None) -> None:
        raise NotImplementedError

    # -- its end --------------------------------------------------------------------------------------

    def _end(self, why: str) -> None:
        if not self._over:
            self._view.close()
            self._own.close()
        if self._over in ("", IN_DOUBT):
            self._over = why

    def _break(self, error: LocksBroken) -> None:
        """Note that a lock is broken. A transaction that wrote ends; one that did not may continue to read."""
        self._broken = self._broken or error
        if self._wrote:
            self._fail(self._broken)

    def _fail(self, error: LocksBroken) -> NoReturn:
        """End the transaction with this error, or with the controller's answer if another process has committed
        it.
        """
        self._broken = error
        self._replica.broken_at(error.commit_timestamp)
        self._give_up()
        self._end(BROKEN)
        raise error

    def _give_up(self) -> None:
        """Leave an open transaction. Raises the controller's answer if the transaction has ended."""

    def _check(self) -> None:
        self._view.check_fork()
        if self._over:
            if self._over == BROKEN and self._broken is not None:
                raise self._broken
            raise IllegalState(f"the transaction is over, {self._over}: begin another one")

    def _check_table(self, table: str) -> None:
        if table not in self._replica.tables:
            raise InvalidArgument(
                f"{table!r} is not in this replica of {', '.join(self._replica.tables)}: open it with that one, too"
            )
