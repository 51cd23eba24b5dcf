"""The handle of a transaction's beginner: its writes in memory, its own writer once it is open, and its end.

The file is long because the class is whole: each call depends on the one state that all others change.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, Self

from anabranch.client.receipts import (
    EventFields,
    StateRow,
    StreamLane,
    check_fields,
    check_taken,
)
from anabranch.client.reservation import (
    WRITER,
    Reservation,
    RightNames,
    abort_reserved,
    narrow_at,
)
from anabranch.client.session import no_replica, unknown
from anabranch.client.shared import Shared
from anabranch.client.writer import Writer, again, chunks_of, end_of, left_early
from anabranch.core.ids import is_marked, txn_text
from anabranch.core.legal_names import check_number, check_type, is_state
from anabranch.core.limits import EVENTS, check_event, check_headers, headers_size
from anabranch.core.tokens import TokenBytes
from anabranch.core.transaction_states import HANDLES, IN_DOUBT, USABLE, HandleOp, HandleState
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    ClockSkew,
    EventTooLarge,
    Expired,
    IllegalState,
    InvalidArgument,
    LocksBroken,
    MalformedRecord,
    NotAuthorized,
    OutcomeUnknown,
    StreamLost,
    TenureLost,
    TransactionAborted,
    UnsupportedVersion,
    WriteFailed,
)
from anabranch.ports import RecordHeaders
from anabranch.schemas import records as r
from anabranch.types import (
    Headers,
    Receipt,
    Result,
    Tenure,
    TransactionInfo,
    info_of,
    receipt_records,
    result_of,
    warn_left_out,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from anabranch.batches.columns_write import EventColumns

log = logging.getLogger("anabranch.client")

QUIET_S = 5.0  # most seconds for an abort while an exception is on its way
_EVENT_OVERHEAD = 48  # more than an event's fields take in a command, besides its bytes
# Refusals that say nothing of a copy that was sent before: its lane had the right, or its id was not too old yet.
_OF_ONE_COPY = (NotAuthorized, Expired, ClockSkew)


class Reads(Protocol):
    """The reads of an open transaction on tables, as far as its commit needs them."""

    @property
    def vouched(self) -> tuple[r.Vouched, ...]:
        """The sets of locks that were looked at."""

    def look_again(self, answer: r.LookAgain, deadline: float) -> None:
        """Check the locks that the controller names. Raises: LocksBroken, NotReady (the replica is late)."""


class Transaction:
    """A transaction begun here. Use it as a context manager: leaving without a commit aborts.

    Writes stay in memory first. If the commit finds all of them there, and no token was asked for, the whole
    transaction is one command. Else it opens: the controller begins it, and the writes go to journals. Made by
    `Client.begin`. Any thread may use it.

    `state` is that of the table `anabranch.core.transaction_states.HANDLES`, which says what each call may do.
    """

    def __init__(
        self,
        shared: Shared,
        scope: str,
        name: str | None,
        keepalive_ms: int,
        tenure: Tenure | None = None,
        *,
        snapshot: int = 0,
    ) -> None:
        """``snapshot``: hybrid time that its reads of tables are at; 0: it has none."""
        self._shared = shared
        self._session = shared.session
        self._scope = scope
        self._name = name
        self._tenure = tenure
        self._snapshot = snapshot
        self._lock = threading.RLock()
        self.state: HandleState = "buffered"  # of begin, commit and abort
        self._over: AnabranchError | None = None  # of every later call
        self.keepalive_ms = keepalive_ms
        self.beating = False
        self._buffer: list[r.Event] = []
        self._buffered_bytes = 0
        self._txn_id: bytes | None = None
        self._secret: bytes | None = None
        self._token: bytes | None = None
        self._writer: Writer | None = None  # of its own events, once it is open
        self._reads: Reads | None = None
        self._own: r.Receipt | None = None  # of the commit that was sent
        self._shot: r.PrepareEvents | None = None  # all events in one command
        self._outcome: r.Outcome | None = None  # of its prepare or commit
        self._result: Result | None = None
        shared.handles.add(self)

    def read_by(self, reads: Reads) -> None:
        """Let this look at what it read of tables, when it commits."""
        self._reads = reads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if self._result is not None or self._shared.forked:
            return
        if self.state in ("doubted", "prepared"):  # others may rely on the outcome
            self.beating = False
            return
        written = self._written()
        if error is None and self._over is None and written:
            log.warning("%r is left without commit: its %d events are dropped", self, written)
        try:
            if error is None:
                self.abort("its with block was left without commit")
            else:
                self.abort(f"left by {type(error).__name__}", timeout=QUIET_S)
        except AlreadyCommitted:
            log.warning("%r is left without commit here, and is committed all the same", self)
        except AnabranchError as trouble:
            if error is None:
                raise
            log.warning("%r could not be aborted and will go stale: %s", self, trouble)

    def _written(self) -> int:
        return len(self._buffer) + (self._writer.written if self._writer is not None else 0)

    def __repr__(self) -> str:
        known = txn_text(self._txn_id) if self._txn_id else "buffered"
        return f"<Transaction {self._scope} {known}>"

    @property
    def txn_id(self) -> bytes | None:
        """16 bytes; None before anything was sent."""
        return self._txn_id

    @property
    def result(self) -> Result | None:
        """The outcome once committed; known at once if the name was committed before."""
        return self._result

    @property
    def prepared(self) -> TransactionInfo | None:
        """This transaction, or the one that has its name, as it was prepared; None: it is not."""
        outcome = self._outcome
        return info_of(outcome) if self.state == "prepared" and outcome is not None else None

    @property
    def identity(self) -> tuple[bytes, int]:
        """The token, and the writer. `IllegalState`: it is not open; as `write`: it is over."""
        self._check_not_over()
        if self._token is None or self._writer is None:
            raise IllegalState("the transaction is not open")
        return self._token, self._writer.number

    @property
    def cluster(self) -> str:
        """As `Client.cluster`."""
        return self._session.cluster(self._shared.deadline(None))

    def _move(self, op: HandleOp) -> None:
        """Move to the state after an op. Raises the error of an op that is illegal in this state."""
        self.state = HANDLES.judge(self.state, op) or self.state

    # -- opening --------------------------------------------------------------------------------------

    def _make_id(self, deadline: float, *, marked: bool = False) -> bytes:
        if self._txn_id is None:
            self._txn_id = self._session.new_txn_id(self._scope, deadline, marked=marked)
        return self._txn_id

    def _begin(self, deadline: float) -> None:
        txn_id = self._make_id(deadline)
        self._move("begin")
        self._secret = self._secret or self._session.new_secret()  # the same when this is repeated
        of = None if self._tenure is None else self._tenure.hash
        begin = r.Begin(
            txn_id, self._scope, self._name, self.keepalive_ms, self._secret, of, self._snapshot
        )
        begun = self._session.begin(begin, deadline)
        if isinstance(begun, r.Outcome):
            self._take_outcome(begun)
            return
        self._token = self._session.token_of(begin, begun.begun_ms)
        self._writer = Writer(self._shared, self._scope, txn_id, self.keepalive_ms)
        self._writer.opened(self._token)
        self.beating = True
        self._shared.heart(self)

    def _open(self, deadline: float) -> None:
        """Begin unless it has begun; bring all buffered writes to the journals, or none."""
        if self._token is None:
            self._begin(deadline)
        lanes = {event.stream: self._touch(event.stream, deadline) for event in self._buffer}
        for event in self._buffer:
            lanes[event.stream].check(event.key, event.value, _pairs_of(event))
        try:
            self._write_buffer(lanes)
        except BaseException as error:
            self._end_in_between(error, "bringing events to the journals")
            raise
        self._buffer.clear()
        self._buffered_bytes = 0

    def _write_buffer(self, lanes: Mapping[str, StreamLane]) -> None:
        state: dict[int, list[StateRow]] = {}
        for event in self._buffer:
            if event.key is not None and is_state(event.stream):
                state.setdefault(event.segment_id, []).append((event.key, event.value))
                continue
            stamp = event.timestamp if event.timestamp > 0 else None
            lanes[event.stream].write(event.key, event.value, _pairs_of(event), stamp)
        if self._tenure is not None:
            for task, rows in state.items():
                lanes[self._tenure.state].write_rows(task, rows)

    def _touch(self, stream: str, deadline: float) -> StreamLane:
        """The lane of its own writer into a stream."""
        if self._writer is None:
            raise IllegalState("the transaction is not open")
        return self._writer.touch(stream, deadline)

    def token(
        self, rights: RightNames = WRITER, *, expires: float | None = None, lane: str | None = None
    ) -> TokenBytes:
        """The secret bytes with which other processes take part. Opens the transaction.

        ``rights``: write (and join), heartbeat, commit, abort, state (see it; commit does, too); one, several, or
        "all". ``expires``: seconds from now; None: with the transaction. ``lane``: good in this lane only.

        Raises: InvalidArgument, UnknownScope, NotReady, DeadlineExceeded, as `write` if the transaction is over.
        """
        with self._lock:
            if self.state != "prepared":  # else its token has not changed
                self._check_usable()
                self._open(self._shared.deadline(None))
            if self._token is None or self._token == self._txn_id:
                raise IllegalState("the transaction has no token here")
            token = self._session.token_as_of_now(self._token, self._secret or b"")
            return narrow_at(token, rights, expires, lane, self._session.wall())

    def assign_id(self) -> bytes:
        """The id that the transaction will have, or has, 16 bytes. Nothing begins by that.

        Raises: as `token`.
        """
        with self._lock:
            self._check_usable()
            return self._make_id(self._shared.deadline(None))

    def open_named(self, timeout: float | None = None) -> None:
        """Begin at once, under the name; a committed name gives its result."""
        with self._lock:
            self._begin(self._shared.deadline(timeout))

    # -- writing --------------------------------------------------------------------------------------

    def write(
        self,
        stream: str,
        value: bytes | None = None,
        key: bytes | None = None,
        headers: Headers | None = None,
        timestamp: int | None = None,
    ) -> None:
        """Queue an event; `flush` or the commit waits until it is stored.

        ``headers``: (name, bytes) pairs or a mapping; names that begin with "ab." are reserved. ``timestamp``:
        Unix milliseconds above 0; None: now. Events of one key keep their order.

        Raises:
            InvalidArgument, CrossScope, UnknownScope: the arguments are wrong; nothing was written.
                EventTooLarge: the stream's journal takes no event of this size; nothing was written, go on.
                UnknownStream: raised by the first write that isn't buffered, or by the commit.
                TransactionAborted, AlreadyCommitted, IllegalState: the transaction is over.
                OutcomeUnknown: the transaction is being committed without this write; ask ``client.state``.
                WriteFailed: a write of this writer failed; it gives no receipt any more.
                DeadlineExceeded: no room in the queue, or no answer, within the client's timeout.
        """
        pairs = check_headers(headers) if headers is not None else None
        if timestamp is not None:
            self._shared.check_time(stream, timestamp)
        with self._lock:
            try:
                writer = self._writer if self.state == "open" and not self._buffer else None
                writer = writer or self._keep(stream, key, value, pairs, timestamp)
                if writer is not None:
                    writer.put(stream, key, value, pairs, timestamp)
            except WriteFailed as error:
                self._end(error)
                raise

    def write_many(self, stream: str, events: Iterable[EventFields]) -> int:
        """Write many events in less time than by `write`; returns how many.

        ``events``: (value, key, headers, timestamp) of each, as `write` takes them; the last ones may be left
        out. The call takes a thousand events at a time from the iterable, which may be of any length.

        All or nothing. A refused event or an exception of the iterable ends the call early. If an event was
        written before, every later call of this handle raises `WriteFailed`: so no part can be committed.

        Raises: as `write`.
        """
        written = 0
        try:
            for chunk in chunks_of(events):
                with self._lock:
                    is_open = self.state == "open" and not self._buffer
                    if is_open and self._writer is not None and len(chunk) > 1:
                        self._writer.put_many(stream, chunk)
                    else:
                        for event in chunk:
                            check_fields(event)
                            self.write(stream, *event)
                written += len(chunk)
        except BaseException as error:
            if written:
                self._end_in_between(error, "write_many")
            raise
        return written

    def write_batch(self, stream: str, batch: pa.RecordBatch | pa.Table) -> int:
        """Write the rows of a pyarrow record batch or table; returns how many. The quickest way by far.

        Columns: ``value``, and if they are there ``key``, ``headers``, ``timestamp``, as `write` takes them.
        ``value`` and ``key`` are binary or string (its UTF-8), ``headers`` list<struct<key: string, value:
        binary>>, ``timestamp`` a timestamp or int64 in Unix milliseconds; null: now. Dictionaries are decoded.

        All or nothing: the rows are checked first. If the call ends early once a row was written, every later
        call of this handle raises `WriteFailed`. Each change between this and `write` waits for
        acknowledgements.

        Raises: as `write`; InvalidArgument names a column or type that `write_batch` does not take.
        """
        pieces, begun = self._shared.columns(stream, batch), False
        try:
            for columns in pieces:
                with self._lock:
                    self._shared.check()
                    self._shared.check_stream(self._scope, stream)
                    lane = self._lane(stream, pieces)
                    if not begun and lane is not None:
                        for each in pieces:
                            lane.check_columns(each)
                    begun = True
                    if lane is not None:
                        lane.write_columns(columns)
                    else:
                        for event in columns.events():
                            self.write(stream, *event)
        except BaseException as error:
            if begun:
                self._end_in_between(error, "write_batch")
            raise
        return sum(columns.rows for columns in pieces)

    def write_state(self, task: int, rows: Iterable[StateRow]) -> int:
        """Change the state of a task, of the tenure that the transaction was begun with; returns how many rows.

        ``rows``: (key, value), the key whole: incarnation, number of the store, key in it (``docs/protocol.md``).
        None as value deletes. The commit has to move the task (``consumed``); a later row of a key counts. All
        rows of a commit take at most the controllers' chunk bytes.

        All or nothing, as `write_many`. Raises: InvalidArgument (no tenure, not one of its tasks, no bytes),
        UnknownStream (the processor has no stores), and as `write`.
        """
        tenure = self._tenure
        if tenure is None or task not in tenure.tasks:
            raise InvalidArgument(
                f"task {task!r}: begin the transaction with a tenure, and name one of its tasks"
            )
        given: list[tuple[Any, Any]] = list(rows)  # callers without a type checker pass anything
        stream = tenure.state
        size = len(given) * (len(stream) + _EVENT_OVERHEAD)
        for key, value in given:
            if type(key) is not bytes or not (value is None or type(value) is bytes):
                raise InvalidArgument("a row of state is a key, bytes, and a value, bytes or None")
            size += len(key) + len(value or b"")
        with self._lock:
            self._check_usable()
            if self._token is None and self._fits(len(given), size):
                self._buffer += [r.Event(stream, task, k, v, (), -1) for k, v in given]
                self._buffered_bytes += size
                return len(given)
            deadline = self._shared.deadline(None)
            if self._token is None or self._buffer:
                self._open(deadline)
            lane = self._touch(stream, deadline)
            try:
                lane.write_rows(task, given)
            except BaseException as error:
                self._end_in_between(error, "write_state")
                raise
        return len(given)

    def _keep(
        self,
        stream: str,
        key: bytes | None,
        value: bytes | None,
        headers: RecordHeaders | None,
        timestamp: int | None,
    ) -> Writer | None:
        """Keep an event in memory. If it does not fit, the transaction opens: the writer to write it by."""
        self._shared.check()
        check_event(key, value, timestamp)
        self._shared.check_stream(self._scope, stream)
        if self._result is not None or self.state not in USABLE:
            self._check_usable()
        if self._token is None or self._buffer:
            size = len(key or b"") + len(value or b"") + len(stream) + _EVENT_OVERHEAD
            kept: tuple[r.EventHeader, ...] = ()
            if headers:
                size += headers_size(headers)
                kept = tuple([r.EventHeader(*pair) for pair in headers])
            if self._token is None and self._fits(1, size):
                self._buffer.append(r.Event(stream, -1, key, value, kept, timestamp or -1))
                self._buffered_bytes += size
                return None
            self._open(self._shared.deadline(None))
        if self._writer is None:
            raise IllegalState("the transaction is not open")
        return self._writer

    def _lane(self, stream: str, pieces: Sequence[EventColumns]) -> StreamLane | None:
        """The lane into a stream; None: few events, kept in memory. Raises as `write`."""
        self._check_usable()
        if self._token is None:
            overhead = len(stream) + _EVENT_OVERHEAD
            size = sum(int(piece.sizes().sum()) + piece.rows * overhead for piece in pieces)
            if self._fits(sum(piece.rows for piece in pieces), size):
                return None
        deadline = self._shared.deadline(None)
        if self._token is None or self._buffer:
            self._open(deadline)
        return self._touch(stream, deadline)

    def _fits(self, count: int, size: int) -> bool:
        """Whether this many more events, of ``size`` bytes in all, may wait in memory for a single request."""
        few = len(self._buffer) + count <= EVENTS.value
        return few and self._buffered_bytes + size <= self._shared.one_shot_bytes

    # -- what was written -----------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything written is acknowledged and its receipt registered. Opens the transaction.

        ``timeout`` in seconds. Raises: WriteFailed, DeadlineExceeded (repeating is safe), NotReady (a stream's
        journal is missing: repeating is safe), StreamLost (the journal won't come back: abort), and as `write`.
        """
        with self._lock:
            self._check_usable()
            deadline = self._shared.deadline(timeout)
            self._open(deadline)
            self._store(deadline)
            if self._writer is not None and self._writer.has_touched and self._token is not None:
                self._session.register(self._token, self._writer.receipt(finished=False), deadline)

    def _store(self, deadline: float) -> None:
        """Wait until everything written is acknowledged. Raises: as `flush`."""
        if self._writer is not None:
            try:
                self._writer.store(deadline)
            except (WriteFailed, StreamLost) as error:
                self._end(error)
                raise

    def acknowledged(self, deadline: float) -> tuple[bytes, r.Receipt]:
        """A token, and the receipt of all that was written; it is not registered. Raises: as `flush`."""
        with self._lock:
            self._check_not_over()
            self._open(deadline)
            self._store(deadline)
            if self._writer is None or self._token is None:
                raise IllegalState("the transaction is not open")
            return self._token, self._writer.receipt(finished=False)

    def written_to(self, stream: str) -> int:
        """How many events this handle wrote to a stream so far."""
        stored = self._writer.written_to(stream) if self._writer is not None else 0
        return stored + sum(event.stream == stream for event in self._buffer)

    # -- ending ---------------------------------------------------------------------------------------

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
        """Commit: everything becomes visible at once. Repeating it returns the same result.

        ``receipts``: the writers to take besides this handle's own writes; None: every finished one. ``name``:
        claim this name; if it is committed already, its outcome is the result, and this transaction has no effect.
        ``number``, 0 or more: claim this number of the series ``name`` instead; it must be above all numbers that
        were ever committed in the series. ``consumed``: of a `TaskReader`; these positions move with the events, or
        neither does. The transaction was begun with its tenure, and has no name. ``secret``: of who prepared it, as
        `prepare` says. ``timeout`` in seconds.

        Raises:
            TenureLost: another one has taken tasks of ``consumed``; this transaction is aborted, or committed if
                their positions say so: take them again.
            AlreadyCommitted: the series is beyond this number, or its outcome is forgotten; this one is aborted.
            WritersUnfinished, ReceiptMismatch, ReceiptsNotCovered, UnknownStream, InvalidArgument, StreamLost,
                NotAuthorized, HeldByPrepared, EventTooLarge, IllegalState: nothing is changed; correct it and
                commit again, or abort. NotReady, DeadlineExceeded, TooManyTransactions, TooMuchStaged: likewise.
            TransactionAborted, LocksBroken: it is over without effect; begin a new one.
            ClockSkew: it was not begun: this machine's clock is more than a day ahead of the controller's.
            WriteFailed: an own write failed; abort.
            OutcomeUnknown: no answer in time. Commit again, or ask ``client.state`` later.
        """
        with self._lock:
            if self._result is not None:
                return self._result
            self._shared.check()
            self._check_not_over()
            check_number(name, number)
            check_consumed(self._tenure, consumed)
            deadline = self._shared.deadline(timeout)
            if self._token is None and self.state != "open" and not receipts and number is None:
                return self._commit_one_shot(name, deadline, consumed)
            if self._token is None and receipts:
                raise InvalidArgument(
                    "no other process can have written, as the token was never asked for: give no receipts"
                )
            if self._token is None or self.state in USABLE:
                self._open(deadline)
            if self._result is None:
                self._commit_open(
                    receipts, name, deadline, number=number, consumed=consumed, secret=secret
                )
            return self._done()

    def prepare(
        self,
        receipts: Sequence[Receipt | bytes] | None = None,
        *,
        name: str | None = None,
        number: int | None = None,
        by: bytes = b"",
        attempt: bytes = b"",
        timeout: float | None = None,
    ) -> TransactionInfo:
        """Make sure of a commit, and leave the decision for later: `commit` or `abort` end it, days later too.

        Silence never aborts it; no reader, other commit or scaling waits for it. There is no write after it.
        ``by``: the SHA-256 of a secret (32 bytes), which alone ends it then, from any process. ``attempt``: up to
        64 bytes; repeating the call with the same one is harmless. The state of the result is PREPARED, or
        COMMITTED if name or number were committed before: then this transaction has no effect.

        Raises: as `commit`; HeldByPrepared (by another one that has the claim), TooManyTransactions, TooMuchStaged
        (too many are prepared), IllegalState (another attempt prepared it).
        """
        with self._lock:
            self._shared.check()
            if self._outcome is None:
                self._check_not_over()
                check_number(name, number)
                if self._tenure is not None:
                    raise InvalidArgument("a transaction that moves positions can't be prepared")
                deadline = self._shared.deadline(timeout)
                prepare = r.Prepare(by, attempt)
                try:
                    if (
                        receipts
                        or number is not None
                        or not self._prepare_events(name, prepare, deadline)
                    ):
                        self._open(deadline)
                        if self._outcome is None:
                            self._commit_open(
                                receipts, name, deadline, number=number, prepare=prepare
                            )
                finally:
                    if self.state == "sent":
                        self._move("doubt")
            if self._outcome is None:
                raise IllegalState("the transaction is not prepared")
            return info_of(self._outcome)

    def _prepare_events(self, name: str | None, prepare: r.Prepare, deadline: float) -> bool:
        """Prepare by one command; False if the writes are too many for that, or are in journals."""
        if self._shot is None and (self._token is not None or self.state == "open"):
            return False
        txn_id = self._make_id(deadline)
        self._secret = self._secret or self._session.new_secret()
        if self._shot is None:
            place_null_keys(self._shared, self._buffer, deadline)
        parts = txn_id, self._scope, name, tuple(self._buffer), self._secret, prepare
        self._shot = self._shot or r.PrepareEvents(*parts)
        if self._token is None:
            begin = r.Begin(txn_id, self._scope, name, self.keepalive_ms, self._secret)
            self._token = self._session.token_of(begin)
        self._move("send")
        try:
            outcome = self._session.prepare_events(self._shot, deadline)
        except AnabranchError as error:
            if self.state == "sent" and isinstance(error, EventTooLarge):
                self._shot = self._token = None
                self._move("refuse_shot")
                return False
            self._failed_to_commit(error, "refuse_shot")
            if self.state not in IN_DOUBT:  # resolving it may have given up the id
                self._shot = self._token = self._txn_id = None
            raise
        self._take_outcome(outcome)
        return True

    def _commit_one_shot(
        self, name: str | None, deadline: float, consumed: r.Consumed | None
    ) -> Result:
        txn_id = self._make_id(deadline, marked=consumed is not None)
        place_null_keys(self._shared, self._buffer, deadline)
        # From here on an interruption leaves it in doubt.
        self._move("send")
        try:
            shot = r.OneShot(txn_id, self._scope, name, tuple(self._buffer), consumed)
            outcome = self._session.one_shot(shot, deadline)
        except EventTooLarge:
            self._move("refuse_shot")
            self._txn_id = None if consumed is not None else txn_id  # a marked one is for one-shots
            self._open(deadline)
            self._commit_open(None, name, deadline, consumed=consumed)
            return self._done()
        except AnabranchError as error:
            self._failed_to_commit(error, "refuse_shot")
            if self.state == "buffered":
                self._txn_id = None  # resolving it may have given up the id
            raise
        self._take_outcome(outcome)
        return self._done()

    def _commit_open(
        self,
        receipts: Sequence[Receipt | bytes] | None,
        name: str | None,
        deadline: float,
        *,
        number: int | None = None,
        consumed: r.Consumed | None = None,
        prepare: r.Prepare | None = None,
        secret: bytes | None = None,
    ) -> None:
        others = receipt_records(receipts, self._txn_id)
        own: tuple[r.Receipt, ...] = ()
        if self._token is None or (self._writer is None and self.state in USABLE):
            raise IllegalState("the transaction is not open")
        if self._writer is not None:
            if self._own is None:
                self._store(deadline)
                self._own = self._writer.receipt(finished=True)
            own = (self._own,) if self._writer.has_touched else ()
        # From here on an interruption leaves it in doubt.
        self._move("send")
        reads = self._reads
        looked = () if reads is None else reads.vouched
        command = r.Commit(
            self._token, own, others, name, 0, number, consumed, prepare, secret, looked
        )
        outcome = self._send(command, deadline)
        while isinstance(outcome, r.LookAgain):
            if outcome.decided:
                self._move("under_way")
            if reads is None:
                raise no_replica()
            # An error of the check says nothing about the commit that was sent.
            reads.look_again(outcome, deadline)
            command = replace(command, vouched=reads.vouched)
            outcome = self._send(command, deadline)
        warn_left_out(outcome, receipts)
        self._take_outcome(outcome)

    def _send(self, command: r.Commit, deadline: float) -> r.Outcome | r.LookAgain:
        try:
            answer = self._session.try_commit(command, deadline)
            if isinstance(answer, r.Outcome):
                if command.own:
                    answer = self._session.whole(answer, command.token, deadline)
                check_taken(answer, command.own, self._txn_id)
        except AnabranchError as error:
            self._failed_to_commit(error, "refuse")
            raise
        return answer

    def _failed_to_commit(self, error: AnabranchError, refused: HandleOp) -> None:
        """Handle an error of a send. ``refused``: the op for an error that means that the copy had no effect."""
        if isinstance(error, TransactionAborted | LocksBroken | AlreadyCommitted | TenureLost):
            self._end(error)
            self._discard()
        elif isinstance(error, _OF_ONE_COPY) and self.state in ("doubted", "decided"):
            raise unknown(f"is not known: {error}", self._txn_id or b"", self._token) from error
        elif isinstance(error, OutcomeUnknown | MalformedRecord | UnsupportedVersion):
            self._move("doubt")  # there is no answer, or it is unreadable
            self.beating = False
        else:
            self._move(refused)
            if self.state in USABLE:
                self._own = None  # more may be written before the next commit

    def _take_outcome(self, outcome: r.Outcome) -> None:
        if outcome.state == "PREPARED":
            self._outcome = outcome
            self._move("prepare")
            if outcome.txn_id != self._txn_id:  # the name's; its id does for its owner's lane
                self._txn_id = self._token = outcome.txn_id
            self.beating = False
            self._buffer.clear()
            return
        if outcome.state != "COMMITTED":
            self._end(TransactionAborted(f"the transaction is aborted ({outcome.reason})"))
            self._check_not_over()
        self._outcome, self._result = outcome, result_of(outcome)
        self._move("commit")
        self._buffer.clear()
        self._discard()

    def _done(self) -> Result:
        if self._result is None:
            raise IllegalState("the transaction is not committed")
        return self._result

    def abort(
        self,
        reason: str = "aborted by the client",
        *,
        secret: bytes | None = None,
        timeout: float | None = None,
    ) -> None:
        """Give up: after this, no event of it ever becomes visible. Repeating the call is fine.

        ``secret``: as `commit`. Raises: AlreadyCommitted. DeadlineExceeded, NotReady, OutcomeUnknown: the abort is
        not certain; repeat it (if no commit was sent, silence makes the controller abort it).
        """
        with self._lock:
            if self._result is not None:
                raise AlreadyCommitted("the transaction is committed: there is no abort any more")
            self._shared.check()
            if isinstance(self._over, TransactionAborted):
                return
            before, self._over = self.state, None
            self._move("abort")
            try:
                self._abort(reason, self._shared.deadline(timeout), secret, before)
                self._end(TransactionAborted(f"the transaction is aborted ({reason})"))
            except AlreadyCommitted:  # perhaps with all of this handle's writes: `commit` asks
                self._move("late")
                self.beating = False
                raise
            except OutcomeUnknown:
                self._move("under_way")
                raise
            finally:
                if self.state in ("aborting", "over") and self._result is None:
                    self._buffer.clear()
                    self._discard()

    def _abort(
        self, reason: str, deadline: float, secret: bytes | None, before: HandleState
    ) -> None:
        if self._token is not None:
            self._session.abort(self._token, reason, deadline, secret)
        elif self._txn_id is not None and is_marked(self._txn_id):
            if before in IN_DOUBT:
                raise unknown("is not known: take the tasks again to know it", self._txn_id, None)
        elif self._txn_id is not None and before not in ("buffered", "over"):
            secret = self._secret or self._session.new_secret()
            sent = Reservation(self._scope, self._txn_id, self.keepalive_ms, secret, self._name)
            try:
                abort_reserved(self._session, sent, reason, deadline)
            except AlreadyCommitted as error:
                self._result = error.result
                self._move("commit")
                self._discard()
                raise

    def _check_usable(self) -> None:
        self._shared.check()
        if self._result is not None:
            raise AlreadyCommitted("the transaction is committed: its result stands")
        if self.state not in USABLE:
            self._check_not_over()
            self._move("write")  # raises why not

    def _check_not_over(self) -> None:
        if self._over is not None:
            raise again(self._over)
        if self.state == "aborting":
            why = "is not known, because its abort was not answered: abort it again"
            raise unknown(why, self._txn_id or b"", self._token)

    def _end(self, error: AnabranchError) -> None:
        """Let every later call raise this error."""
        self._over = error
        self.beating = self.beating and isinstance(error, WriteFailed)
        self._move("fail")

    def _end_in_between(self, error: BaseException, call: str) -> None:
        with self._lock:
            if self._over is None:
                self._end(left_early(error, call))

    def _discard(self) -> None:
        """Drop writes that are not stored, if there are any, and free the journal writer."""
        self.beating = False
        if self._writer is not None:
            self._writer.discard()

    # -- what its client calls ------------------------------------------------------------------------

    @property
    def live_token(self) -> bytes | None:
        """As `Handle.live_token`."""
        return self._token if self.beating else None

    def gone(self, outcome: r.Outcome) -> None:
        """As `Handle.gone`; a commit may have been this handle's own, so `commit` still asks for its outcome."""
        if not self.beating:
            return
        if outcome.state == "COMMITTED":
            self.beating = False
            self._move("late")
        else:
            self._end(end_of(outcome))

    def client_closes(self) -> None:
        """As `Handle.client_closes`."""
        self.beating = False

    def after_fork(self) -> None:
        """As `Handle.after_fork`."""
        self._lock = threading.RLock()


def check_consumed(tenure: Tenure | None, consumed: r.Consumed | None) -> None:
    """`InvalidArgument` unless a commit moves positions of the tenure that its transaction began with."""
    if consumed is not None:
        check_type("consumed", consumed, r.Consumed)
    began = None if tenure is None else (tenure.processor, tenure.secret)
    if began != (None if consumed is None else (consumed.processor, consumed.tenure)):
        raise InvalidArgument(
            "begin with a tenure, and commit with what its reader gives as `consumed`: both, or neither"
        )


def place_null_keys(shared: Shared, events: list[r.Event], deadline: float) -> None:
    """Spread a one-shot's events without a key over the segments, as far as the layout is known."""
    turn: dict[str, int] = {}
    for i, event in enumerate(events):
        if event.key is None and event.segment_id == -1:
            layout = shared.layout(event.stream, deadline)
            at = turn.setdefault(event.stream, shared.session.random64() % len(layout))
            events[i] = event._replace(segment_id=layout[at % len(layout)].segment_id)


def _pairs_of(event: r.Event) -> RecordHeaders | None:
    """The headers of a one-shot's event, as journals take them."""
    return [(h.key, h.value) for h in event.headers] if event.headers else None
