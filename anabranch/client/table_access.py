"""The access of one process to tables in a transaction: reads of one snapshot, own writes, locks.

`anabranch.client.table_transaction` has the handles that users get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import wraps
from itertools import starmap
from typing import Any, Literal, NoReturn, Self, TypeVar, cast, overload

from anabranch.client.own_writes import Local, OwnRows, Written, merged
from anabranch.client.shared import Shared, entered
from anabranch.client.table_locks import Locks, broken
from anabranch.client.transact import Turns
from anabranch.client.writer import AllOrNothing
from anabranch.core.locks.numbers import changed
from anabranch.errors import (
    AnabranchError,
    IllegalState,
    InvalidArgument,
    LocksBroken,
    RowExists,
    RowMissing,
)
from anabranch.protocol import limits
from anabranch.protocol.legal_names import split_stream
from anabranch.protocol.limits import (
    LEAST_NUMBER,
    MOST_NUMBER,
    check_event,
    check_headers,
    check_row_key,
)
from anabranch.protocol.schemas import records as r
from anabranch.tables.replica import ReadReplica
from anabranch.tables.snapshot import TableSnapshot, bounds, check_limit
from anabranch.types import Headers, K, V
from anabranch.values import Stream, encoded
from anabranch.waits import here

Isolation = Literal["serializable", "snapshot"]
# Why a transaction is over.
BROKEN = "its locks are broken"
IN_DOUBT = "its outcome is not known here"
PREPARED = "it is prepared"
UNDECIDED = ("", IN_DOUBT, PREPARED)

ONE_COMMAND = "`add`, `min` and `max` are for a transaction of one command"

F = TypeVar("F", bound=Callable[..., Any])


def alone(call: F) -> F:
    """Let one thread at a time into a transaction. Locks of its `Transaction` and the replica are taken later."""

    @wraps(call)
    def method(self: TableAccess, /, *args: Any, **named: Any) -> Any:
        # In a forked child the thread that has the lock does not exist.
        with nullcontext() if self._view.is_forked else self._lock:
            return call(self, *args, **named)

    return cast(F, method)


class TableAccess:
    """The reads, writes and locks of one process in a transaction. Thread-safe."""

    def __init__(
        self, shared: Shared, replica: ReadReplica, view: TableSnapshot, isolation: Isolation
    ) -> None:
        self._shared, self._session = shared, shared.session
        self._lock = here().lock()
        self._replica = replica
        self._view = view
        self._reads_lock = isolation == "serializable"  # otherwise written keys are locked
        self._own: OwnRows = Local()
        self._wrote = False
        self._was_read = False  # read or locked something, so the snapshot must not change
        self._locks = Locks()
        self._changes: dict[tuple[str, bytes], tuple[r.ChangeKind, int]] = {}  # by table and key
        self._read_from: dict[int, int] = {}  # writer that was read from -> sequence of its receipt
        self._broken: LocksBroken | None = None
        self._over = ""
        self._turns: Turns | None = None  # at hot rows

    def __enter__(self) -> Self:
        entered(self._shared, self)
        return self

    @property
    def txn_id(self) -> bytes | None:
        raise NotImplementedError

    @property
    def timestamp(self) -> int:
        """The hybrid time of all reads."""
        return self._view.timestamp

    @property
    def is_over(self) -> bool:
        """Whether this process committed, dropped, finished or left the transaction, or its locks are broken."""
        return bool(self._over)

    # -- reading --------------------------------------------------------------------------------------

    @overload
    def get(self, table: str, key: bytes, *, lock: bool = True) -> bytes | None: ...

    @overload
    def get(self, table: Stream[K, V], key: K, *, lock: bool = True) -> V | None: ...

    @alone
    def get(self, table: Any, key: Any, *, lock: bool = True) -> Any:
        """The row of a key, or None: as of the snapshot, with this transaction's own writes.

        The commit fails if another transaction writes the key meanwhile, unless ``lock`` is False.

        Raises: InvalidArgument, TooManyLocks, LocksBroken (the key was written since, and this transaction has
        written), IllegalState (the transaction is over), SnapshotExpired; UndecodableValue.
        """
        if type(table) is not str and isinstance(table, Stream):
            key = table.encode_key(key)
            return table.decode_value(key, self.get(table.name, key, lock=lock))
        self._check()
        self._check_unchanged(table, key)
        own = self._own.get(table, check_row_key(key))
        if own is not None:
            self._note(own.by)
            return own.value
        if self._turns is not None:
            self._turns.check_cold(table, key)
        self._was_read = True
        if not (lock and self._reads_lock):
            return self._view.get(table, key)
        seen = self._view.get_version(table, key)
        self._locks.point(table, key)
        if seen.timestamp > self.timestamp:
            self._break(broken(table, seen, self.timestamp))
        return seen.value

    @overload
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
    ) -> Iterator[tuple[bytes, bytes]]: ...

    @overload
    def scan(
        self,
        table: Stream[K, V],
        low: bytes | None = None,
        high: bytes | None = None,
        *,
        prefix: bytes | None = None,
        reverse: bool = False,
        limit: int | None = None,
        lock: bool = True,
    ) -> Iterator[tuple[K, V]]: ...

    @alone
    def scan(
        self,
        table: Any,
        low: bytes | None = None,
        high: bytes | None = None,
        *,
        prefix: bytes | None = None,
        reverse: bool = False,
        limit: int | None = None,
        lock: bool = True,
    ) -> Iterator[tuple[Any, Any]]:
        """Rows from ``low`` up to ``high`` (not included), or with a prefix, in byte order of their keys.

        The part that was iterated over is locked, including keys without a row. Own writes during the iteration
        are not seen. Bounds and prefixes are bytes, also with the handle of a table. Raises: as `get`.
        """
        if type(table) is not str and isinstance(table, Stream):
            rows = self.scan(
                table.name, low, high, prefix=prefix, reverse=reverse, limit=limit, lock=lock
            )
            return starmap(table.decode_row, rows)
        self._check()
        check_limit(limit)
        self._was_read = True
        begin, end = bounds(low, high, prefix)
        self._check_range_unchanged(table, begin, end)
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

    def _note(self, by: r.WriterAt | None) -> None:
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
        table: Any,
        key: Any = None,
        *,
        low: bytes | None = None,
        high: bytes | None = None,
        prefix: bytes | None = None,
    ) -> None:
        """Lock a key or a range without reading it; without arguments the whole table. Raises: as `get`."""
        if type(table) is not str:
            table, _, key = encoded(table, None, key)
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

        This has an effect only with ``writers`` "all". Raises: IllegalState.
        """
        self._check()
        self._own.refresh()

    # -- writing --------------------------------------------------------------------------------------

    @overload
    def put(self, table: str, key: bytes, value: bytes) -> None: ...

    @overload
    def put(self, table: Stream[K, V], key: K, value: V) -> None: ...

    def put(self, table: Any, key: Any, value: Any) -> None:
        """Write a row, whether the key has one or not.

        Raises: InvalidArgument, IllegalState; LocksBroken (what this transaction read was written since); as
        `Transaction.write` in a long transaction.
        """
        if type(table) is not str:
            table, value, key = encoded(table, value, key)
        if not isinstance(value, bytes):
            raise InvalidArgument(
                f"a row is bytes, not {type(value).__name__}; `delete` takes it away"
            )
        self._put(table, key, value)

    @overload
    def delete(self, table: str, key: bytes) -> None: ...

    @overload
    def delete(self, table: Stream[K, Any], key: K) -> None: ...

    def delete(self, table: Any, key: Any) -> None:
        """Delete a row if it exists. Raises: as `put`."""
        if type(table) is not str:
            table, _, key = encoded(table, None, key)
        self._put(table, key, None)

    @overload
    def insert(self, table: str, key: bytes, value: bytes) -> None: ...

    @overload
    def insert(self, table: Stream[K, V], key: K, value: V) -> None: ...

    @alone
    def insert(self, table: Any, key: Any, value: Any) -> None:
        """Write a row that does not exist. Raises: RowExists; as `get` and `put`."""
        if type(table) is not str:
            table, value, key = encoded(table, value, key)
        if self.get(table, key) is not None:
            raise RowExists(f"{table} has a row {key!r:.100}: `put` or `replace` it")
        self.put(table, key, value)

    @overload
    def replace(self, table: str, key: bytes, value: bytes) -> None: ...

    @overload
    def replace(self, table: Stream[K, V], key: K, value: V) -> None: ...

    @alone
    def replace(self, table: Any, key: Any, value: Any) -> None:
        """Write a row that exists. Raises: RowMissing; as `get` and `put`."""
        if type(table) is not str:
            table, value, key = encoded(table, value, key)
        if self.get(table, key) is None:
            raise RowMissing(f"{table} has no row {key!r:.100}: `put` or `insert` it")
        self.put(table, key, value)

    @alone
    def _put(self, table: str, key: bytes, value: bytes | None) -> None:
        self._check_table(table)
        self._check_writable()
        self._check_unchanged(table, check_row_key(key))
        if not self._reads_lock:
            self._locks.point(table, key)
        self._write_row(table, key, value)

    def _write_row(self, table: str, key: bytes, value: bytes | None) -> None:
        self._wrote = True
        self._write(r.Event(table, -1, key, value, (), -1))
        self._own.put(table, key, value)

    def delete_range(
        self,
        table: str | Stream[Any, Any],
        low: bytes | None = None,
        high: bytes | None = None,
        *,
        prefix: bytes | None = None,
    ) -> int:
        """Delete the rows from ``low`` up to ``high`` (not included), or with a prefix; returns how many.

        Each row in the range, of the snapshot and of own writes, is deleted as by `delete`. The range is locked
        with either isolation: the commit fails if another transaction writes any key in the range before it, even a
        key that has no row. Bounds and prefixes are bytes, also with the handle of a table.

        All or nothing: if the call fails after its first row, the transaction is over. Raises: as `get` and `put`;
        InvalidArgument (no bound).
        """
        begin, end = bounds(low, high, prefix)
        if not begin and end is None:
            raise InvalidArgument("give low, high or prefix; `truncate` deletes all rows")
        return self._delete_rows("delete_range", table, begin, end)

    def truncate(self, table: str | Stream[Any, Any]) -> int:
        """Delete all rows of a table, as by `delete_range`; returns how many."""
        return self._delete_rows("truncate", table, b"", None)

    @alone
    def _delete_rows(
        self, call: str, table: str | Stream[Any, Any], low: bytes, high: bytes | None
    ) -> int:
        name = table if isinstance(table, str) else table.name
        self._check_table(name)
        self._check_writable()
        self._check_range_unchanged(name, low, high)
        self._was_read = True
        rows = merged(
            self._seen(name, low, high, False, True), self._own.scan(name, low, high), False
        )
        count = 0
        with AllOrNothing(call, self._end_in_between) as whole:
            for key, row in rows:
                self._note(row.by)
                if row.value is not None:
                    whole.begun = True
                    self._write_row(name, key, None)
                    count += 1
        return count

    @overload
    def add(self, table: str, key: bytes, number: int) -> None: ...

    @overload
    def add(self, table: Stream[K, Any], key: K, number: int) -> None: ...

    def add(self, table: Any, key: Any, number: int) -> None:
        """Add to the number in a row when the transaction commits. A missing row counts as 0.

        This takes no lock, so any number of transactions may add to a row at once. The row is a decimal integer of
        64 bits. Afterwards the same transaction can't read or write the row, and has to remain a short one: one
        command. The commit raises `NotANumber` and `NumberOverflow`.

        Raises: InvalidArgument (also in a long transaction), IllegalState; LocksBroken, as `put`.
        """
        self._change(table, key, "ADD", number)

    @overload
    def min(self, table: str, key: bytes, number: int) -> None: ...

    @overload
    def min(self, table: Stream[K, Any], key: K, number: int) -> None: ...

    def min(self, table: Any, key: Any, number: int) -> None:
        """Set a row to the lower of its number and ``number``; to ``number`` if it is missing. Else as `add`."""
        self._change(table, key, "MIN", number)

    @overload
    def max(self, table: str, key: bytes, number: int) -> None: ...

    @overload
    def max(self, table: Stream[K, Any], key: K, number: int) -> None: ...

    def max(self, table: Any, key: Any, number: int) -> None:
        """Set a row to the higher of its number and ``number``; to ``number`` if it is missing. Else as `add`."""
        self._change(table, key, "MAX", number)

    @alone
    def _change(self, table: Any, key: Any, kind: r.ChangeKind, number: int) -> None:
        if type(table) is not str:
            table, _, key = encoded(table, None, key)
        self._check_table(table)
        self._check_writable()
        row = table, check_row_key(key)
        if type(number) is not int or not LEAST_NUMBER <= number <= MOST_NUMBER:
            raise InvalidArgument(f"{number!r:.100} is no integer of 64 bits")
        if self._own.get(table, key) is not None:
            raise InvalidArgument(f"{_shown(row)} is written by this transaction: `put` the number")
        known = self._changes.get(row)
        if known is None:
            limits.ROW_CHANGES.check(len(self._changes) + 1, "a transaction")
            self._check_changes(len(table) + len(key))
        elif known[0] != kind:
            raise InvalidArgument(f"{_shown(row)} is changed otherwise by this transaction already")
        else:
            number = changed(kind, known[1], number)
        self._wrote = True
        self._changes[row] = kind, number

    def _check_changes(self, size: int) -> None:
        """Raise `InvalidArgument` if rows can't be changed here. ``size``: the bytes of a row's table and key."""
        raise NotImplementedError

    def _check_unchanged(self, table: str, key: bytes) -> None:
        if (table, key) in self._changes:
            raise InvalidArgument(
                f"{_shown((table, key))} is changed by this transaction, which can't read or write it, too"
            )

    def _check_range_unchanged(self, table: str, low: bytes, high: bytes | None) -> None:
        for its, key in self._changes:
            if its == table and low <= key and (high is None or key < high):
                self._check_unchanged(table, key)

    @overload
    def write(
        self,
        stream: str,
        value: bytes | None = None,
        key: bytes | None = None,
        headers: Headers | None = None,
        timestamp: int | None = None,
    ) -> None: ...

    @overload
    def write(
        self,
        stream: Stream[K, V],
        value: V | None = None,
        key: K | None = None,
        headers: Headers | None = None,
        timestamp: int | None = None,
    ) -> None: ...

    @alone
    def write(
        self,
        stream: Any,
        value: Any = None,
        key: Any = None,
        headers: Headers | None = None,
        timestamp: int | None = None,
    ) -> None:
        """Write an event to a stream, in the same commit as the rows. Arguments: as of `Transaction.write`.

        ``stream``: also a table that the replica does not have; its rows are not locked. Raises: as
        `Transaction.write`; InvalidArgument (a table of the replica: `put` or `delete` its rows), LocksBroken.
        """
        if type(stream) is not str:
            stream, value, key = encoded(stream, value, key)
        if stream in self._replica.tables:
            raise InvalidArgument(
                f"{stream} is a table of this replica: `put` or `delete` its rows"
            )
        pairs = check_headers(headers) or ()
        if timestamp is not None:
            self._shared.check_time(stream, timestamp)
        check_event(key, value, timestamp)
        self._check_writable()
        self._shared.check_stream(split_stream(self._replica.tables[0])[0], stream)
        self._wrote = True
        kept = tuple([r.EventHeader(*pair) for pair in pairs])
        self._write(r.Event(stream, -1, key, value, kept, timestamp or -1))

    def _check_writable(self) -> None:
        self._check()
        self._view.check_open()
        if self._broken is not None:
            self._fail(self._broken)

    def _write(self, event: r.Event) -> None:
        raise NotImplementedError

    # -- its end --------------------------------------------------------------------------------------

    def _end(self, why: str) -> None:
        if not self._over:
            self._view.close()
            self._own.close()
        if self._over in UNDECIDED:
            self._over = why

    def _end_in_between(self, error: BaseException, call: str) -> None:
        """End the transaction after a call that wrote only a part of its rows."""
        if not self._over:
            with suppress(AnabranchError):
                self._give_up()
            self._end(f"because {call} was left by {type(error).__name__}")

    def _break(self, error: LocksBroken) -> None:
        """Note that a lock is broken. A transaction that wrote ends; without writes it may continue to read."""
        self._broken = self._broken or error
        if self._wrote:
            self._fail(self._broken)

    def _fail(self, error: LocksBroken) -> NoReturn:
        """End the transaction with this error; with the controller's answer if the controller has ended it."""
        self._broken = error
        self._replica.broken_at = max(self._replica.broken_at, error.commit_timestamp)
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


def _shown(row: tuple[str, bytes]) -> str:
    return f"{row[0]} {row[1]!r:.100}"
