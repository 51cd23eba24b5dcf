"""Transactions that read and write tables (docs/inside/tables.md).

`TableTransaction` is the handle of the process that begins one, `JoinedTransaction` that of a process that joins
it. The file is long because both share the state of `TableWork`: one snapshot, own writes, and locks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from itertools import starmap
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    Self,
    TypeVar,
    cast,
    overload,
)

from anabranch.backoff import Backoff
from anabranch.client.own_writes import Local, OwnRows, ReadBack, Writers, Written, merged
from anabranch.client.receipts import EventFields, StateRow, check_shape, with_trace
from anabranch.client.reservation import keepalive_ms_of
from anabranch.client.session import unknown
from anabranch.client.shared import Shared, entered
from anabranch.client.table_locks import Locks, RegisteredLocks, SentLocks, broken
from anabranch.client.transact import Turns
from anabranch.client.transaction import (
    Transaction,
    check_consumed,
    check_id,
    check_task,
    checked_rows,
    fields_of,
    pairs_of,
    place_null_keys,
    state_size,
)
from anabranch.client.writer import AllOrNothing, Writer
from anabranch.core.locks.numbers import changed
from anabranch.core.transaction_states import USABLE
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    DeadlineExceeded,
    EventTooLarge,
    FixCallError,
    IllegalState,
    InvalidArgument,
    LocksBroken,
    MalformedRecord,
    NotANumber,
    NumberOverflow,
    OutcomeUnknown,
    OwnershipLost,
    RetryError,
    RowExists,
    RowMissing,
    SnapshotExpired,
    TransactionAborted,
    UnsupportedSetting,
    UnsupportedVersion,
)
from anabranch.protocol import defaults, limits
from anabranch.protocol.hybrid_time import to_text
from anabranch.protocol.ids import NO_TXN, is_marked, txn_text
from anabranch.protocol.legal_names import check_number, is_state, split_stream
from anabranch.protocol.limits import (
    EVENTS,
    LEAST_NUMBER,
    MOST_NUMBER,
    check_event,
    check_headers,
    check_row_key,
    headers_size,
)
from anabranch.protocol.schemas import records as r
from anabranch.tables.replica import ReadReplica
from anabranch.tables.snapshot import TableSnapshot, bounds, check_limit
from anabranch.tracing import traced
from anabranch.types import (
    Counts,
    Headers,
    K,
    Receipt,
    Result,
    TaskOwnership,
    TransactionInfo,
    V,
    result_of,
)
from anabranch.values import Stream, encoded
from anabranch.waits import here

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("anabranch.client")
_GRACE_S = 5.0  # extra time to resolve an outcome
_BEGINS = 3  # tries, each with a fresh snapshot
_EVENT_BYTES = 48  # size of an event in a command, without key, value, headers and stream
Isolation = Literal["serializable", "snapshot"]
_BROKEN = "its locks are broken"
_IN_DOUBT = "its outcome is not known here"
_PREPARED = "it is prepared"
_UNDECIDED = ("", _IN_DOUBT, _PREPARED)
_ABORTED = "it is aborted"
_COMMITTED = "it is committed"
_LOST = "another worker has its tasks"


_ONE_COMMAND = "`add`, `min` and `max` are for a transaction of one command"

F = TypeVar("F", bound=Callable[..., Any])


def alone(call: F) -> F:
    """Let one thread at a time into a transaction. Locks of its `Transaction` and the replica are taken later."""

    @wraps(call)
    def method(self: TableWork, /, *args: Any, **named: Any) -> Any:
        # In a forked child the thread that has the lock does not exist.
        with nullcontext() if self._view.is_forked else self._lock:
            return call(self, *args, **named)

    return cast(F, method)


class TableWork:
    """The reads and writes of one process in a transaction. Thread-safe."""

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

        Each row there, of the snapshot and of own writes, is deleted as by `delete`. The range is locked, with
        either isolation: the commit fails if another transaction writes a key of it meanwhile, also one without a
        row. Bounds and prefixes are bytes, also with the handle of a table.

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
        64 bits. The same transaction can't read or write it afterwards, and is a short one: one command. The commit
        raises `NotANumber` and `NumberOverflow`.

        Raises: InvalidArgument (also in a long transaction), IllegalState; LocksBroken, as `put`.
        """
        self._change(table, key, "ADD", number)

    @overload
    def min(self, table: str, key: bytes, number: int) -> None: ...

    @overload
    def min(self, table: Stream[K, Any], key: K, number: int) -> None: ...

    def min(self, table: Any, key: Any, number: int) -> None:
        """Make a row the lower of its number and this one, or this one if there is no row; otherwise as `add`."""
        self._change(table, key, "MIN", number)

    @overload
    def max(self, table: str, key: bytes, number: int) -> None: ...

    @overload
    def max(self, table: Stream[K, Any], key: K, number: int) -> None: ...

    def max(self, table: Any, key: Any, number: int) -> None:
        """Make a row the higher of its number and this one, or this one if there is no row; otherwise as `add`."""
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
        """`InvalidArgument` if rows can't be changed here. ``size``: of a row's table and key."""
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
        if self._over in _UNDECIDED:
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
        self._end(_BROKEN)
        raise error

    def _give_up(self) -> None:
        """Leave an open transaction. Raises the controller's answer if the transaction has ended."""

    def _check(self) -> None:
        self._view.check_fork()
        if self._over:
            if self._over == _BROKEN and self._broken is not None:
                raise self._broken
            raise IllegalState(f"the transaction is over, {self._over}: begin another one")

    def _check_table(self, table: str) -> None:
        if table not in self._replica.tables:
            raise InvalidArgument(
                f"{table!r} is not in this replica of {', '.join(self._replica.tables)}: open it with that one, too"
            )


class _Claim(NamedTuple):
    """The arguments of a commit or prepare that say what else it does besides its writes."""

    name: str | None
    number: int | None
    consumed: r.Consumed | None
    secret: bytes | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The arguments that are given."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class TableTransaction(TableWork):
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
        turns: Turns | None = None,
    ) -> None:
        """``keepalive``: seconds; None for a short transaction. ``turns``: of the call that makes this try."""
        super().__init__(shared, replica, view, isolation)
        self._turns = turns
        self._ownership = ownership
        self._wrote = ownership is not None  # its commit at least moves positions
        self.trace = shared.new_trace()
        self._keepalive = defaults.KEEPALIVE_S if keepalive is None else keepalive
        self._reads_others = writers == "all"
        # Events that were not passed to the handle of a long one yet.
        self._events: deque[r.Event] = deque()
        self._bytes = 0
        self._txn_id: bytes | None = None
        self._sent = False  # a commit was sent, and may have taken effect
        self._shot: r.OneShot | None = None  # the command of that commit
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
        if opened is not None and not self._sent:
            opened.left_by(error)
        if self._sent or (opened is not None and opened.state in ("doubted", "decided")):
            self._end(_IN_DOUBT)
            return  # other processes may rely on it
        if opened is not None and opened.state == "prepared":
            self._end(_PREPARED)
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
        if self._txn_id is None:
            self._txn_id = self._session.new_txn_id(self._scope(), self._shared.deadline(None))
        return self._txn_id

    # -- writing --------------------------------------------------------------------------------------

    def _write(self, event: r.Event) -> None:
        size = len(event.key or b"") + len(event.value or b"") + len(event.stream) + _EVENT_BYTES
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
            raise InvalidArgument(f"{_ONE_COMMAND}, and this one is open at the controller")
        size += _EVENT_BYTES + limits.NUMBER_BYTES
        if self._bytes + size > self._shared.one_shot_bytes:
            raise InvalidArgument(f"{_ONE_COMMAND}, and this one is too big already")
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
            count, size + count * (len(stream) + _EVENT_BYTES)
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
            raise InvalidArgument(f"{_ONE_COMMAND}: commit it, without a number, or `put` instead")
        opened = self._opened
        if opened is None or self._reads is None:
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
                ownership = self._ownership
                table = self._replica.tables[0]
                scope = split_stream(table)[0] if ownership is None else ownership.scope
                self._opened = self._handle(scope)
            opened = self._opened
            tries += 1
            try:
                opened.open_named(timeout)
                self._txn_id = opened.txn_id
                self._name_tables(opened, timeout)
                return opened
            except TransactionAborted:
                self._txn_id = opened.txn_id
                # This asks the controller. Without new commits only a question moves the newest moment of the
                # replica, and the next transaction would begin at the same one.
                view = self._replica.snapshot()
                self._view.close()
                self._view = view
                if self._was_read or tries == _BEGINS:
                    self._end(_ABORTED)
                    raise
            self._opened = self._txn_id = None

    def _handle(self, scope: str) -> Transaction:
        """A handle of this transaction, which the controller does not know yet."""
        return Transaction(
            self._shared,
            scope,
            None,
            keepalive_ms_of(self._keepalive),
            self._ownership,
            snapshot=self.timestamp,
            txn_id=self._txn_id,
        )

    def _name_tables(self, opened: Transaction, timeout: float | None) -> None:
        """Make the controller keep the tables readable at the snapshot; raise `TransactionAborted` if too old."""
        named = r.LockReads(*opened.identity, 0, tables=self._replica.tables)
        try:
            self._session.lock_reads(named, self._shared.deadline(timeout))
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

    @alone
    def commit(
        self,
        receipts: Sequence[Receipt | bytes] | None = None,
        *,
        name: str | None = None,
        number: int | None = None,
        consumed: r.Consumed | None = None,
        secret: bytes | None = None,
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
        if self._result is not None:
            return self._result
        claim = _Claim(name, number, consumed, secret)
        opened = self._opened
        if opened is not None and (self._prepares or opened.state == "prepared"):
            self._result = opened.commit(receipts, **claim.given, timeout=timeout)
            self._end(_COMMITTED)
            return self._result
        check_consumed(self._ownership, consumed)
        check_number(name, number)
        if number is not None and self._sent:
            raise IllegalState("its commit was sent without a number: repeat that one")
        late = self._over == _IN_DOUBT
        if not late:
            super()._check()
            self._check_outside("commit", writes=bool(receipts or name))
        if opened is not None or (number is not None and not late):
            try:
                self._result = self._commit_open(receipts, claim, timeout)
            except AlreadyCommitted:  # by another process, perhaps with all writes of this one
                if self._events or self._opened is None:
                    raise
                self._result = self._opened.commit(receipts, **claim.given, timeout=timeout)
        elif late:
            self._result = result_of(self._found_out(self._shared.deadline(timeout)))
        elif receipts:
            raise InvalidArgument(
                "no other process can have written, as the token was never asked for: give no receipts"
            )
        elif not (self._events or self._changes) and name is None and consumed is None:
            self._result = Result(NO_TXN, self.timestamp, Counts(0, 0, 0))
        else:
            deadline = self._shared.deadline(timeout)
            self._result = result_of(self._commit(name, consumed, deadline))
        self._end(_COMMITTED)
        return self._result

    def _check_outside(self, call: str, *, writes: bool = False) -> None:
        """As `Shared.check_outside`, unless a commit was sent, or there is nothing to commit."""
        usable = not self._sent if self._opened is None else self._opened.state in USABLE
        if usable and (writes or self._wrote or self._opened is not None):
            self._shared.check_outside(call, self)

    def _found_out(self, deadline: float) -> r.Outcome:
        """Resolve the outcome of a short transaction whose commit was not answered."""
        if self._txn_id is not None and is_marked(self._txn_id):
            return self._repeated(unknown("is not known", self._txn_id, None), deadline)
        outcome = self._session.resolve(self._txn_id or NO_TXN, self._scope(), None, deadline)
        if outcome.state != "COMMITTED" and self._shot is not None:
            # If its name was committed before, only an answer to the command itself has that outcome.
            answer = self._session.locked_shot(self._shot, deadline)
            outcome = answer if isinstance(answer, r.Outcome) else outcome
        if outcome.state != "COMMITTED":
            why = outcome.reason or outcome.state
            raise TransactionAborted(f"the transaction is aborted ({why}): begin a new one")
        return outcome

    def _scope(self) -> str:
        """The scope of its tasks, the first row, or the replica's first table, whatever else is written."""
        if self._ownership is not None:
            return self._ownership.scope
        tables = self._replica.tables
        rows = (event.stream for event in self._events if event.stream in tables)
        changed_first = next((table for table, _ in self._changes), tables[0])
        return split_stream(next(rows, changed_first))[0]

    @traced("commit", "PRODUCER")
    def _commit(self, name: str | None, consumed: r.Consumed | None, deadline: float) -> r.Outcome:
        self._shared.check()
        scope, marked = self._scope(), consumed is not None and name is None
        txn_id = self._txn_id
        check_id(txn_id, marked=marked and not self._sent)
        if txn_id is None or (is_marked(txn_id) != marked and not self._sent):
            txn_id = self._txn_id = self._new_id(scope, deadline, marked=marked)
        place_null_keys(self._shared, self._events, deadline)
        pauses, unsure = self._pauses(), False
        while True:
            # Take the marks before validating, so that the validation includes everything up to them.
            marks = self._replica.marks()
            changes: tuple[r.RowChange, ...] = ()
            found: AnabranchError | None
            try:
                found = self._broken or self._locks.validate(self._view, marks)
                changes = self._changes_of(marks)
            except SnapshotExpired as error:
                found = error
            if found is not None and self._sent:
                # The lock may have been broken by this commit itself, or after it.
                if unsure and isinstance(found, LocksBroken):
                    # RESOLVE would abort the id, and end its turn.
                    return self._repeated(found, self._shared.deadline(_GRACE_S))
                return self._given_up(txn_id, scope, found)
            if isinstance(found, LocksBroken):
                self._fail(found)
            if found is not None:
                raise found
            locks = self._locks.records(self._replica.tables, marks)
            events = with_trace(self._events, self.trace)
            command = r.OneShot(txn_id, scope, name, events, consumed, locks, changes)
            try:
                with self._replica.report_due():
                    answer = self._send(command, deadline)
            except (NotANumber, NumberOverflow) as error:
                if not self._sent:
                    raise
                return self._given_up(txn_id, scope, error)
            last = {each.table: each.last for each in answer.tables}
            if isinstance(answer, r.Outcome):
                self._replica.observe(answer.commit_timestamp, last)
                return answer
            # A copy may be carried out yet: of a one-shot that was advised to take a turn, or of one with changes,
            # when another commit leaves the numbers of these rows with the controller.
            self._sent = unsure = bool(answer.writers or changes)
            timestamp = answer.timestamp
            if answer.writers and self._turns is not None:
                row = self._locks.key_of(answer.writers[0])
                held = self._turns.take_for(txn_id, *row, deadline)
                timestamp, last = (timestamp, last) if held is None else (held.timestamp, held.last)
            try:
                self._replica.wait(timestamp, last, deadline)
                if changes and not answer.writers and not pauses.sleep(deadline):
                    raise DeadlineExceeded(
                        "other writers keep writing the rows that this one changes"
                    )
            except AnabranchError as error:
                return self._given_up(txn_id, scope, error)

    def _new_id(self, scope: str, deadline: float, *, marked: bool) -> bytes:
        held = None if self._turns is None else self._turns.held
        if held is not None and is_marked(held.txn_id) == marked:
            return held.txn_id
        return self._session.new_txn_id(scope, deadline, marked=marked)

    def _pauses(self) -> Backoff:
        """The pauses after answers that ask to revalidate: clients that change one row must not send together.

        The first one of them that commits leaves its number with the controller, which is enough for all others.
        """
        return Backoff(
            defaults.FIRST_CHANGE_PAUSE_S,
            defaults.LONGEST_CHANGE_PAUSE_S,
            self._shared.ports.clock,
            jitter=lambda: self._session.random64() % 1024 / 1024,
        )

    def _changes_of(self, marks: Mapping[str, tuple[int, int]]) -> tuple[r.RowChange, ...]:
        """The changes, each with its row as of its table's mark. `SnapshotExpired`."""
        found = []
        for (table, key), (kind, number) in self._changes.items():
            base = self._view.row_at(table, key, marks[table][0])
            cut = None if base is None else base[: limits.NUMBER_BYTES + 1]  # longer: no number
            found.append(r.RowChange(table, key, kind, number, cut))
        return tuple(found)

    def _send(self, command: r.OneShot, deadline: float) -> r.Outcome | r.Revalidate:
        before, self._sent, self._shot = self._sent, True, command
        try:
            return self._session.locked_shot(command, deadline)
        except (OutcomeUnknown, MalformedRecord, UnsupportedVersion):
            raise  # no answer, or an unreadable one
        except (TransactionAborted, OwnershipLost, AlreadyCommitted) as error:
            self._end(_LOST if isinstance(error, OwnershipLost) else _ABORTED)
            raise
        except AnabranchError:
            self._sent = before  # this copy was refused, so it had no effect
            if not before:
                self._txn_id = None  # resolving it may have aborted the id
            raise

    def _given_up(self, txn_id: bytes, scope: str, error: AnabranchError) -> r.Outcome:
        """Give up a commit, for ``error``: RESOLVE aborts it, unless a copy of the command was carried out already.

        Returns the outcome if it is COMMITTED. Otherwise ends the transaction and raises: OutcomeUnknown (no
        answer), ``error``, or DeadlineExceeded instead of a `RetryError`.
        """
        if is_marked(txn_id):
            return self._repeated(error, self._shared.deadline(_GRACE_S))
        try:
            outcome = self._session.resolve(txn_id, scope, None, self._shared.deadline(_GRACE_S))
        except AnabranchError as trouble:
            raise OutcomeUnknown(
                f"the outcome of transaction {txn_text(txn_id)} is not known: {trouble}",
                txn_id=txn_id,
            ) from error
        if outcome.state == "COMMITTED":
            return outcome
        if isinstance(error, LocksBroken):
            self._fail(error)
        self._end(_ABORTED)
        if not isinstance(error, RetryError):
            raise error
        raise DeadlineExceeded(
            f"the replica did not show in time whether the locks hold: {error}; nothing was written, begin again"
        ) from error

    def _repeated(self, error: AnabranchError, deadline: float) -> r.Outcome:
        """Send the last command again, if a copy of it is not answered; RESOLVE takes no marked id.

        Returns the outcome if a copy was carried out. Otherwise raises ``error``, and `commit` may be repeated
        unless locks are broken: no copy can be carried out after this one, as what broke its locks stays. Raises
        OutcomeUnknown if only others' turns, or their writes to rows that this one changes, were in the way.
        """
        if self._sent and self._shot is not None:
            answer = self._send(self._shot, deadline)
            if isinstance(answer, r.Outcome):
                return answer
            # Its locks stay broken, but another commit may make changes of rows possible.
            possible = self._shot.changes and not isinstance(error, LocksBroken)
            self._sent = bool(answer.writers or possible)
            if self._sent:
                raise unknown("is not known", self._shot.txn_id, None) from error
        if isinstance(error, LocksBroken):
            self._fail(error)
        raise error

    def _check(self) -> None:
        state = None if self._opened is None else self._opened.state
        sent = self._sent or state in ("sent", "doubted")
        if self._over == _IN_DOUBT or (sent and not self._over):
            raise IllegalState("its commit was sent, and the outcome is not known: commit again")
        if state == "prepared" and self._over in _UNDECIDED:
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
        opened = self._opened
        if opened is None or opened.state in USABLE:
            self._check()
            if self._changes:
                raise InvalidArgument(
                    f"{_ONE_COMMAND}, which commits at once: `prepare` takes none"
                )
            check_consumed(self._ownership, consumed)
            self._check_outside("prepare", writes=True)
            if self._broken is not None:
                self._fail(self._broken)
        claim = _Claim(name, number, consumed)
        how: dict[str, Any] = {"by": by, "attempt": attempt, "timeout": timeout}
        try:
            info = None
            if self._prepares or (self._opened is None and not receipts and number is None):
                info = self._prepare_shot(claim, how)
            info = info or self._prepare_open(receipts, claim, how)
        except LocksBroken as error:
            self._fail(error)
        except (TransactionAborted, OwnershipLost, AlreadyCommitted) as error:
            self._end(_LOST if isinstance(error, OwnershipLost) else _ABORTED)
            raise
        if self._opened is not None:
            self._txn_id, self._result = self._opened.txn_id, self._opened.result
        if self._result is not None:
            self._end(_COMMITTED)
        return info

    def _prepare_shot(self, claim: _Claim, how: Mapping[str, Any]) -> TransactionInfo | None:
        """Prepare by one command. Returns None if the writes are too big for that."""
        if self._opened is None:
            self._opened, self._prepares = self._handle(self._scope()), True
            self._opened.read_by(SentLocks(self._replica, self._view, self._locks))
            self._opened.keep(self._events)
        opened = self._opened
        try:
            return opened.prepare(**claim.given, **how)
        except EventTooLarge:
            if opened.state != "buffered":
                raise
            return None
        finally:
            if (
                opened.state in ("buffered", "over") and opened.result is None
            ):  # nothing is prepared
                self._opened, self._prepares, self._txn_id = None, False, opened.txn_id

    def _prepare_open(
        self, receipts: Sequence[Receipt | bytes] | None, claim: _Claim, how: Mapping[str, Any]
    ) -> TransactionInfo:
        opened, reads = self._open(how["timeout"])
        with reads.explained():
            if opened.state == "open":
                reads.register(self._shared.deadline(how["timeout"]))
            return opened.prepare(receipts, **claim.given, **how)

    def _commit_open(
        self, receipts: Sequence[Receipt | bytes] | None, claim: _Claim, timeout: float | None
    ) -> Result:
        opened, reads = self._open(timeout)
        try:
            with reads.explained():
                # In other states only the controller knows whether the locks are valid.
                if opened.state == "open":
                    if self._broken is not None:
                        raise self._broken
                    with suppress(OutcomeUnknown):  # another commit is under way
                        reads.register(self._shared.deadline(timeout))
                return opened.commit(receipts, **claim.given, timeout=timeout)
        except LocksBroken as error:
            self._broken = self._broken or error
            if self._wrote or receipts or claim.name is not None or self._others_wrote(opened):
                self._fail(error)
            self._drop(opened)
            return Result(NO_TXN, self.timestamp, Counts(0, 0, 0))
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

    def _drop(self, opened: Transaction, reason: str = _BROKEN) -> None:
        """Abort it. Raises: AlreadyCommitted, OutcomeUnknown (a commit came first: broken locks don't matter)."""
        try:
            opened.abort(reason, timeout=_GRACE_S)
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
        if self._opened is not None and self._over in _UNDECIDED:
            self._opened.abort(reason, secret=secret, timeout=timeout)
        self._end(_IN_DOUBT if self._sent else _ABORTED)

    def _give_up(self) -> None:
        if self._opened is not None and self._over in _UNDECIDED:
            self._drop(self._opened)


class JoinedTransaction(TableWork):
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
            self._end(_IN_DOUBT)
            raise
        finally:
            if self._over != _IN_DOUBT:
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
            if self._over != _IN_DOUBT:
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
        if self._over == _IN_DOUBT:
            raise IllegalState(
                "it was left, and is not finished: call `finish` again, or `discard`"
            )
        super()._check()

    def _check_changes(self, size: int) -> None:
        del size
        raise InvalidArgument(f"{_ONE_COMMAND}, not for one that other processes join")

    def _give_up(self) -> None:
        self._reads.check_open(self._shared.deadline(None))
        self._writer.discard()


def _shown(row: tuple[str, bytes]) -> str:
    return f"{row[0]} {row[1]!r:.100}"


def read_back(shared: Shared, handle: Transaction | Writer) -> ReadBack:
    """The rows that a transaction wrote, of this handle and of finished writers."""
    readers = shared.ports.readers
    if readers is None:
        raise UnsupportedSetting("this client has no readers")
    return ReadBack(handle, shared.session, readers.ports, lambda: shared.deadline(None))
