"""The access of one process to tables in a transaction: reads of one snapshot, own writes, locks.

The file is long because it has one class: each read depends on what was read, locked and written before.
`anabranch.client.table_transaction` has the handles that users get.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import wraps
from itertools import chain, starmap
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Self, TypeVar, cast, overload

from anabranch.client.own_writes import Local, OwnRows, Written, merged
from anabranch.client.row_chain import HotRow, Member, SentRows, needs_commits
from anabranch.client.shared import Shared, entered
from anabranch.client.table_locks import Locks, Span, broken
from anabranch.client.writer import AllOrNothing
from anabranch.core.derived_rows import (
    BUILDING,
    PROGRESS_KEY,
    READY,
    STATE_KEY,
    AnyFunction,
    Function,
    Total,
    Totals,
    of_value,
    total_of,
)
from anabranch.core.locks.numbers import changed
from anabranch.core.stream_settings import Kind, derived_table
from anabranch.errors import (
    AnabranchError,
    DerivationMissing,
    IllegalState,
    InvalidArgument,
    LocksBroken,
    RowExists,
    RowMissing,
    UniqueViolation,
)
from anabranch.protocol import limits
from anabranch.protocol.hybrid_time import to_text
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

if TYPE_CHECKING:
    from anabranch.tables.store import Cursor, Seen

Isolation = Literal["serializable", "snapshot"]
# Why a transaction is over.
BROKEN = "its locks are broken"
IN_DOUBT = "its outcome is not known here"
PREPARED = "it is prepared"
UNDECIDED = ("", IN_DOUBT, PREPARED)

_PIECE = 8  # entries of a look-up that are read, and locked, at once

ONE_COMMAND = "`add`, `min` and `max` are for a transaction of one command"

F = TypeVar("F", bound=Callable[..., Any])


class _Ready(NamedTuple):
    """The version of a derivation in which look-ups look."""

    of: r.Derivation
    kind: Kind
    table: str


@dataclass(slots=True)
class _Value:
    """The entries of a value that a look-up reads, in [low, high). ``size``: of the value in an entry.

    ``next``: where the next piece begins. ``own``: entries that the transaction wrote before.
    """

    ready: _Ready
    size: int
    low: bytes
    high: bytes | None
    next: bytes = b""
    own: list[tuple[bytes, Written]] | None = None
    span: Span | None = None
    is_over: bool = False

    def with_own(self, seen: Sequence[Seen]) -> Iterator[tuple[bytes, Written]]:
        """The entries of a piece, with own ones up to its end, which are taken away."""
        own = self.own or []
        count = len(own) if self.is_over else bisect_right(own, seen[-1].key, key=itemgetter(0))
        own, self.own = own[:count], own[count:]
        stored = ((each.key, Written(each.value)) for each in seen)
        return merged(stored, iter(own), False)


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
        # By table: the same for all writes of the transaction, else it would claim a version for all of them.
        self._functions_of: dict[str, Sequence[AnyFunction]] = {}
        # By derived table: its state, and the time of that if it is being built.
        self._states: dict[str, tuple[bytes | None, int]] = {}
        self._found_ready: dict[tuple[str, str | None], _Ready] = {}  # by derivation and source
        self._ran: set[r.Derivation] = set()  # the derivations whose entries were written, too
        self._read_from: dict[int, int] = {}  # writer that was read from -> sequence of its receipt
        self._broken: LocksBroken | None = None
        self._over = ""
        self._member: Member | None = None  # of the chain at hot rows
        self._again: HotRow | None = None
        self._needs_snapshot = False  # reads that take no lock have to be true at one time

    def __enter__(self) -> Self:
        entered(self._shared, self)
        return self

    @property
    def txn_id(self) -> bytes | None:
        raise NotImplementedError

    @property
    def timestamp(self) -> int:
        """The hybrid time of all reads."""
        self._read_at_snapshot("its time was asked for")
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
        return self._read(table, check_row_key(key), lock and self._reads_lock)

    def _read(
        self, table: str, key: bytes, lock: bool, cursor: Cursor | None = None
    ) -> bytes | None:
        """A row as this transaction wrote it, or as of the snapshot. ``cursor``: made for this snapshot."""
        own = self._own.get(table, key)
        if own is not None:
            self._note(own.by)
            return own.value
        if lock:
            return self._get_locked(table, key, cursor)
        if self._member is not None:
            self._under_way(self._member, table, key)
        self._was_read = True
        self._read_at_snapshot("a row was read without a lock")
        return self._view.get(table, key)

    def _get_locked(self, table: str, key: bytes, cursor: Cursor | None = None) -> bytes | None:
        """A row that this transaction has not written, with a lock."""
        sent = None if self._member is None else self._under_way(self._member, table, key)
        self._was_read = True
        if sent is not None:
            self._follow(table, key, sent)
            return sent.rows[table, key]
        if table in self._replica.without_locks:
            self._check_has_locks(table)
        seen = self._view.get_version(table, key, cursor)
        self._locks.point(table, key)
        if seen.timestamp > self._view.timestamp:
            self._break(broken(table, seen, self._view.timestamp))
        return seen.value

    def _check_has_locks(self, table: str) -> None:
        if table in self._replica.without_locks:
            raise InvalidArgument(
                f"{table} is derived by a worker, after its source was committed, so its rows can't be locked: "
                "read a snapshot of a replica, or here with lock=False"
            )

    def _under_way(self, member: Member, table: str, key: bytes) -> SentRows | None:
        """The commit under way whose version of a row is read. At a hot row this enters the chain."""
        if member.must_enter(table, key):
            used = self._was_read or self._wrote or self._needs_snapshot
            view = None if used else member.enter_at(table, key)
            if view is None:
                text = f"others take turns at {table} {key!r:.100}"
                self._call_again(HotRow(text, table=table, key=key))
            self._view.close()
            self._view = view
        return member.newest(table, key)

    def _follow(self, table: str, key: bytes, sent: SentRows) -> None:
        if self._needs_snapshot:
            self._call_again(needs_commits("needs rows as of one time"))
        if (table, key) in sent.changed:
            self._call_again(needs_commits(f"the value of {table} {key!r:.100} is not known yet"))
        self._view.check_open()
        self._locks.follow(table, key, sent)
        if self._locks.follows_count > limits.FOLLOWED.value:
            self._call_again(needs_commits(f"of more than {limits.FOLLOWED.value} transactions"))

    def _call_again(self, error: HotRow) -> NoReturn:
        """End the try, even if the function does not let the error through."""
        self._again = error
        raise error

    def _read_at_snapshot(self, why: str) -> None:
        """Note a read that is true at the time of the snapshot only."""
        if self._locks.followed:
            self._call_again(needs_commits(why))
        self._needs_snapshot = True

    def _check_range_is_committed(self, table: str, low: bytes, high: bytes | None) -> None:
        if self._member is not None and self._member.has_between(table, low, high):
            self._call_again(needs_commits(f"a range of {table} with such rows was read or locked"))

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
        self._check_range_is_committed(table, begin, end)
        if not (lock and self._reads_lock):
            self._read_at_snapshot("a range was read without a lock")
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
        if lock:
            self._check_has_locks(table)
        span = None
        for seen in self._view.walk(table, low, high, reverse=reverse):
            if lock:
                first, end = (seen.key, high) if reverse else (low, seen.key + b"\0")
                span = span or self._locks.span(table, low, high)
                span.low, span.high = first, end
                if seen.timestamp > self._view.timestamp:
                    self._break(broken(table, seen, self._view.timestamp))
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
        self._check_has_locks(table)
        if key is not None and not low is high is prefix is None:
            raise InvalidArgument("give a key, a prefix, or low and high")
        if key is not None:
            check_row_key(key)
            sent = None if self._member is None else self._under_way(self._member, table, key)
            self._was_read = True
            if sent is None:
                self._locks.point(table, key)
            else:
                self._follow(table, key, sent)
        elif low is high is prefix is None:
            self._was_read = True
            self._check_range_is_committed(table, b"", None)
            self._locks.whole(table)
        else:
            self._was_read = True
            span = bounds(low, high, prefix)
            self._check_range_is_committed(table, *span)
            self._locks.span(table, *span)

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
        functions = self._functions(table)
        if not functions:
            if not self._reads_lock:
                self._locks.point(table, key)
            self._write_row(table, key, value)
            return
        before = self._locked(table, key)
        entries = [self._entries(f, key, before, value) for f in functions]
        self._ran.update(f.of for f in functions)
        with AllOrNothing("a write", self._end_in_between) as whole:
            whole.begun = self._write_row(table, key, value)
            self._write_all(functions, entries)

    def _write_row(self, table: str, key: bytes, value: bytes | None) -> bool:
        self._wrote = True
        self._write(r.Event(table, -1, key, value, (), -1))
        self._own.put(table, key, value)
        return True

    # -- derived tables -------------------------------------------------------------------------------

    def _functions(self, table: str) -> Sequence[AnyFunction]:
        """The functions that derive from a table's rows. Raises: DerivationMissing, InvalidArgument."""
        found = self._functions_of.get(table)
        if found is None:
            known = self._shared.derivations
            if known.has_none(table):
                found = ()
            else:
                found = known.functions(table, self._shared.deadline(None))
            self._functions_of[table] = found
        return found

    def _locked(self, table: str, key: bytes) -> bytes | None:
        """A row that decides what is written: it is locked with either isolation."""
        own = self._own.get(table, key)
        if own is not None:
            self._note(own.by)
            return own.value
        if table not in self._replica.tables:
            raise DerivationMissing(
                f"this replica was opened before {table} was made, which each write reads: open it again"
            )
        return self._get_locked(table, key)

    def _entries(
        self, function: AnyFunction, key: bytes, before: bytes | None, after: bytes | None
    ) -> dict[bytes, bytes | None]:
        """The derived rows that change with a row; None: deleted. Deletions come first.

        Raises: UniqueViolation, NumberOverflow; as `get`, as the function.
        """
        if isinstance(function, Totals):
            return self._totals(function, key, before, after)
        former, now = function.entries(key, before), function.entries(key, after)
        gone = former.keys() - now.keys()
        if function.unique:
            # In a table that is being built, another row may have an entry that this row has not yet.
            gone = {entry for entry in gone if self._locked(function.table, entry) == key}
            self.check_unique(function, now.keys() - former.keys(), key)
        come = sorted(now.keys() - former.keys())
        return dict.fromkeys(sorted(gone)) | {entry: now[entry] for entry in come}

    def _totals(
        self, function: Totals, key: bytes, before: bytes | None, after: bytes | None
    ) -> dict[bytes, bytes | None]:
        """The totals that change with a row, which get locked. Without a state nothing was added yet."""
        table = function.table
        state, since = self._state(table)
        if state is None:
            return {}
        if since and before is not None and not self._was_added(function, key, since):
            before = None
        return self.added(function, function.changes(key, before, after))

    @alone
    def added(self, function: Totals, changes: Mapping[bytes, Total]) -> dict[bytes, bytes | None]:
        """The rows of totals after changes. They get locked. Raises: NumberOverflow; as `get`."""
        table = function.table
        return {
            entry: function.added(entry, self._locked(table, entry), change)
            for entry, change in changes.items()
        }

    def _state(self, table: str) -> tuple[bytes | None, int]:
        """The state of a derived table, which gets locked, and the time of the state if it is being built."""
        found = self._states.get(table)
        if found is None:
            state, since = self._locked(table, STATE_KEY), 0
            if state is not None and state.startswith(BUILDING):
                since = self._view.get_version(table, STATE_KEY).timestamp
            found = self._states[table] = state, since
        return found

    @alone
    def unchanged(self, table: str, key: bytes, since: int) -> bytes | None:
        """The row of a key, which gets locked, unless it was written after that time. For a build."""
        if self._view.get_version(table, key).timestamp > since:
            return None
        return self._locked(table, key)

    def _was_added(self, function: Totals, key: bytes, since: int) -> bool:
        """Whether totals, which are built since then, have a row: it was written since, or the build was there."""
        source, table = function.of.source, function.table
        if self._own.get(source, key) is not None:
            return True
        if self._member is not None and self._member.newest(source, key) is not None:
            self._call_again(needs_commits(f"{table} is being built"))
        if self._view.get_version(source, key).timestamp > since:
            return True
        progress = self._view.get(table, PROGRESS_KEY)
        if progress is not None and key <= progress:
            return True
        self._locks.point(table, PROGRESS_KEY)
        return False

    @alone
    def check_unique(self, function: Function, entries: Iterable[bytes], key: bytes) -> None:
        """`UniqueViolation` if another row has one of these entries, which get locked."""
        for entry in sorted(entries):
            found = self._locked(function.table, entry)
            if found not in (None, key):
                raise UniqueViolation(
                    f"row {found!r:.100} of {function.of.source} has a value of row {key!r:.100} already, by "
                    f"derivation {function.of.name!r}: nothing of the row was written"
                )

    def _write_all(
        self, functions: Iterable[AnyFunction], entries: Iterable[Mapping[bytes, bytes | None]]
    ) -> None:
        for function, its in zip(functions, entries, strict=True):
            self.write_entries(function.of, its.items())

    @alone
    def write_entries(
        self, of: r.Derivation, entries: Iterable[tuple[bytes, bytes | None]]
    ) -> None:
        """Write rows of a derived table. Only for writes to its source, and while it is built."""
        self._check_writable()
        self._ran.add(of)
        table = derived_table(of)
        with AllOrNothing("a write", self._end_in_between) as whole:
            for entry, row in entries:
                whole.begun = self._write_row(table, entry, row)

    @alone
    def lookup(
        self,
        derivation: str,
        value: bytes,
        *,
        source: str | Stream[Any, Any] | None = None,
        limit: int | None = None,
    ) -> Iterator[tuple[Any, Any]]:
        """Keys and rows of a table that a derivation has under a value, in byte order of keys; at most ``limit``.

        The rows that were returned are locked, and the part of the index before them: the commit fails if a row of
        this value comes, changes or goes meanwhile. Without ``limit`` up to 8 rows are read, and locked, at once.
        ``source``: needed if several tables of the replica have a derivation of this name; with the handle of a
        table, keys and rows are decoded.

        Raises: as `get`; DerivationMissing (no version of it is built, or is in this replica), InvalidArgument.
        """
        self._check()
        if limit is not None:
            check_limit(limit)
        if not isinstance(value, bytes):
            raise InvalidArgument(f"a derivation is asked for bytes, not {value!r:.100}")
        with self._view.cursor() as cursor:
            ready = self._ready(derivation, source, cursor)
            if ready.kind == "index":
                found = self._rows_of(ready, of_value(value), limit, cursor)
            elif ready.kind == "unique":
                found = self._row_of(ready, of_value(value), cursor) if limit != 0 else iter(())
            else:
                raise InvalidArgument(
                    f"derivation {derivation!r} has totals: ask for one by `total`"
                )
        return found if isinstance(source, str | None) else starmap(source.decode_row, found)

    @alone
    def total(
        self, derivation: str, group: bytes, *, source: str | Stream[Any, Any] | None = None
    ) -> Total:
        """The sum of a group, and the number of its rows; zeros for a group without rows.

        The total is locked: the commit fails if it changes meanwhile. ``source``: as of `lookup`. Raises: as
        `lookup`.
        """
        self._check()
        if not isinstance(group, bytes):
            raise InvalidArgument(f"a derivation is asked for bytes, not {group!r:.100}")
        with self._view.cursor() as cursor:
            ready = self._ready(derivation, source, cursor)
            if ready.kind != "totals":
                raise InvalidArgument(
                    f"derivation {derivation!r} has no totals: find rows by `lookup`"
                )
            return total_of(self._read(ready.table, of_value(group), self._reads_lock, cursor))

    def _row_of(self, ready: _Ready, entry: bytes, cursor: Cursor) -> Iterator[tuple[bytes, bytes]]:
        """The row of a unique value, if there is one."""
        key = self._read(ready.table, entry, self._reads_lock, cursor)
        row = None if key is None else self._read(ready.of.source, key, self._reads_lock, cursor)
        return iter(()) if key is None or row is None else iter(((key, row),))

    def _rows_of(
        self, ready: _Ready, prefix: bytes, limit: int | None, cursor: Cursor
    ) -> Iterator[tuple[bytes, bytes]]:
        """The rows of a value. They are read and locked in pieces, of which the first one is read now."""
        # The range of all keys with this prefix, which ends with a zero.
        value = _Value(ready, len(prefix), prefix, prefix[:-1] + b"\1", next=prefix)
        first = self._some_rows(value, limit, cursor)
        if value.is_over:
            return iter(first)
        left = None if limit is None else limit - len(first)
        return chain(first, self._more_rows(value, left))

    def _more_rows(self, value: _Value, left: int | None) -> Iterator[tuple[bytes, bytes]]:
        while not value.is_over and left != 0:
            rows = self._next_rows(value, left)
            left = None if left is None else left - len(rows)
            yield from rows

    @alone
    def _next_rows(self, value: _Value, most: int | None) -> list[tuple[bytes, bytes]]:
        self._check()
        with self._view.cursor() as cursor:
            return self._some_rows(value, most, cursor)

    def _some_rows(
        self, value: _Value, most: int | None, cursor: Cursor
    ) -> list[tuple[bytes, bytes]]:
        """The rows of the next entries of a value, at most ``most``. The range of the entries is locked, too."""
        if most == 0:
            return []
        self._was_read = True
        self._check_range_is_committed(value.ready.table, value.low, value.high)
        source, lock, found = value.ready.of.source, self._reads_lock, list[tuple[bytes, bytes]]()
        for key in self._next_keys(value, min(most or _PIECE, _PIECE), cursor):
            row = self._read(source, key, lock, cursor)
            if row is not None:
                found.append((key, row))
        return found[:most]

    def _next_keys(self, value: _Value, most: int, cursor: Cursor) -> list[bytes]:
        """The source's keys of the next entries, of which at most ``most`` are stored."""
        table = value.ready.table
        if value.own is None:
            value.own = list(self._own.scan(table, value.low, value.high))
        seen = self._view.walk_some(table, value.next, value.high, most, cursor)
        value.is_over = len(seen) < most
        if not value.is_over:
            value.next = seen[-1].key + b"\0"
        if not self._reads_lock:
            self._read_at_snapshot("a range was read without a lock")
        else:
            value.span = value.span or self._locks.span(table, value.low, value.high)
            value.span.high, at = value.high if value.is_over else value.next, self._view.timestamp
            for each in seen:
                if each.timestamp > at:
                    self._break(broken(table, each, at))
        if not value.own:
            return [each.key[value.size :] for each in seen if each.value is not None]
        keys = []
        for entry, written in value.with_own(seen):
            self._note(written.by)
            if written.value is not None:
                keys.append(entry[value.size :])
        return keys

    def _ready(self, name: str, given: str | Stream[Any, Any] | None, cursor: Cursor) -> _Ready:
        """The version of a derivation that is ready at the snapshot. Its state is read, and locked, once."""
        source = given if given is None or isinstance(given, str) else given.name
        ready = self._found_ready.get((name, source))
        if ready is None:
            ready = self._found_ready[name, source] = self._find_ready(name, source, cursor)
        made = self._functions_of.get(ready.of.source)
        if made is not None and ready.of not in [function.of for function in made]:
            self._shared.derivations.forget()
            text = f"{ready.table} has no rows of this transaction's own writes: begin again"
            self._fail(LocksBroken(text, table=ready.table, key=STATE_KEY))
        return ready

    def _find_ready(self, name: str, source: str | None, cursor: Cursor) -> _Ready:
        named = [
            (table, derived)
            for table, derived in self._view.derived.items()
            if derived.of.name == name and source in (None, derived.of.source)
        ]
        # Those of workers lack the transaction's own writes, whatever the isolation.
        found = [(table, each) for table, each in named if not each.asynchronous]
        if named and not found:
            raise InvalidArgument(
                f"derivation {name!r} is derived by a worker, after its source was committed, so its rows can't be "
                "locked: call `lookup` of a snapshot of the replica"
            )
        ready = [
            _Ready(each.of, each.kind, table)
            for table, each in found
            if self._read(table, STATE_KEY, self._reads_lock, cursor) == READY
        ]
        if not ready:
            raise DerivationMissing(
                f"no version of derivation {name!r} is ready in this replica at {to_text(self.timestamp)}: call "
                "`client.derive` before the replica is opened, or again if its build was left (`client.rebuild` if "
                "it is of a higher version)"
            )
        if len(ready) > 1 and len({each.of.source for each in ready}) > 1:
            raise InvalidArgument(f"several tables have a derivation {name!r}: give `source`")
        return ready[0]

    # -- rows of a range, and changes -----------------------------------------------------------------

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
        functions = self._functions(name)
        self._ran.update(f.of for f in functions)
        self._check_range_is_committed(name, low, high)
        self._was_read = True
        rows = merged(
            self._seen(name, low, high, False, True), self._own.scan(name, low, high), False
        )
        count = 0
        with AllOrNothing(call, self._end_in_between) as whole:
            for key, row in rows:
                self._note(row.by)
                if row.value is not None:
                    entries = [self._entries(f, key, row.value, None) for f in functions]
                    whole.begun = self._write_row(name, key, None)
                    self._write_all(functions, entries)
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
        if self._functions(table):
            raise DerivationMissing(
                f"{table} is the source of a derivation, which has to know the row: `put` it"
            )
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
        `Transaction.write`; InvalidArgument (a table of the replica: `put` or `delete` its rows; a derived table),
        LocksBroken.
        """
        if type(stream) is not str:
            stream, value, key = encoded(stream, value, key)
        if stream in self._replica.tables:
            raise InvalidArgument(
                f"{stream} is a table of this replica: `put` or `delete` its rows"
            )
        # The transaction may have the leave to write there, as it writes to the source.
        self._shared.derivations.check_not_derived(stream)
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
        if self._again is not None:
            raise self._again
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
