"""The handle of the process that begins a transaction: it writes, commits, prepares and aborts.

The file is long because it has one class: each call depends on the state that all others change.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, Self, overload

from anabranch.client.commit_parts import CommitParts, Wait
from anabranch.client.receipts import (
    EventFields,
    StateRow,
    StreamLane,
    TypedFields,
    check_shape,
    check_taken,
    with_trace,
)
from anabranch.client.reservation import WRITER, Reservation, RightNames, abort_reserved, narrow_at
from anabranch.client.session import no_replica, unknown
from anabranch.client.shared import Shared, entered
from anabranch.client.writer import AllOrNothing, Writer, again, chunks_of, end_of, left_early
from anabranch.core.transaction_states import HANDLES, IN_DOUBT, USABLE, HandleOp, HandleState
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    ClockSkew,
    CrossScope,
    DerivationMissing,
    EventTooLarge,
    Expired,
    IllegalState,
    InvalidArgument,
    LocksBroken,
    MalformedRecord,
    NotAuthorized,
    OutcomeUnknown,
    OwnershipLost,
    ReservedByPrepared,
    StreamLost,
    TransactionAborted,
    UnsupportedVersion,
    WriteFailed,
)
from anabranch.ports import RecordHeaders
from anabranch.protocol.ids import NO_TXN, is_marked, txn_text
from anabranch.protocol.legal_names import is_state, split_stream
from anabranch.protocol.limits import EVENTS, check_event, check_headers, headers_size
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import TokenBytes
from anabranch.tracing import TRACED_BYTES, traced
from anabranch.types import (
    Counts,
    Headers,
    K,
    Receipt,
    Result,
    TaskOwnership,
    TransactionInfo,
    V,
    info_of,
    result_of,
    warn_left_out,
)
from anabranch.values import Stream, encoded, encoded_events
from anabranch.waits import here

if TYPE_CHECKING:
    import pyarrow as pa

    from anabranch.batches.columns_write import EventColumns

log = logging.getLogger("anabranch.client")

QUIET_S = 5.0  # limit of an abort while an exception leaves the with block
GRACE_S = 5.0  # extra time to resolve an outcome
EVENT_OVERHEAD = 48  # upper bound of what an event adds to a command besides its bytes
# Refusals of one copy of a command only: when an earlier copy arrived, the lane may have had the right, and the id
# may not have been too old or too new.
_OF_ONE_COPY = (NotAuthorized, Expired, ClockSkew)


class Reads(Protocol):
    """A transaction's reads of tables, with what its commit needs of them."""

    @property
    def validated(self) -> tuple[r.Validated, ...]:
        """The registered sets of locks that were revalidated."""

    def locks(self) -> tuple[r.TableLocks, ...]:
        """The locks to send with a single command, validated. Raises: LocksBroken, SnapshotExpired."""

    def revalidate(self, answer: r.Revalidate, deadline: float) -> None:
        """Validate the locks, or wait until `locks` can. Raises: LocksBroken, NotReady (the replica lags)."""


class Transaction:
    """A transaction that this process begins, by `Client.begin`. Any thread may use it.

        with client.begin("nyc") as txn:
            txn.write("nyc/flights", b"value", key=b"key")
            txn.commit()

    Leaving the ``with`` block aborts it unless it was committed. Writes stay in memory first. If they all still do
    at the commit, and no token was requested, the transaction is a one-shot. Otherwise it opens: the controller
    begins it, and its writes go to journals. `anabranch.core.transaction_states.HANDLES` says which calls each
    `state` allows.
    """

    def __init__(
        self,
        shared: Shared,
        scope: str,
        name: str | None,
        keepalive_ms: int,
        ownership: TaskOwnership | None = None,
        *,
        snapshot: int = 0,
        txn_id: bytes | None = None,
        as_old_as: bytes | None = None,
    ) -> None:
        """``scope``: "" for that of the first stream written to.

        ``snapshot``: the hybrid time of its reads of tables; 0 if it reads none. ``txn_id``: None: an id is made
        when one is needed. ``as_old_as``: as of `Session.new_txn_id`.
        """
        self._shared = shared
        self._session = shared.session
        self.trace = shared.new_trace()
        self._scope = scope
        self._name = name
        self._ownership = ownership
        self._snapshot = snapshot
        self._lock = here().lock()
        self.state: HandleState = "buffered"
        self._over: AnabranchError | None = None  # raised by every later call
        self.keepalive_ms = keepalive_ms
        self.beating = False
        self._buffer: list[r.Event] = []
        self._buffered_bytes = 0
        self._txn_id = txn_id
        self._as_old_as = as_old_as
        self._secret: bytes | None = None
        self._token: bytes | None = None
        self._writer: Writer | None = None  # for the events of this handle, once it is open
        self._prepare_sent = False  # whether only a prepare was sent
        self._reads: Reads | None = None
        self._own: r.Receipt | None = None  # receipt in the commit that was sent
        self._shot: r.PrepareEvents | None = None  # the prepare that was sent as one command
        self._sent_shot: r.OneShot | None = None  # the one-shot that was sent last
        self._outcome: r.Outcome | None = None  # of the prepare or commit
        self._result: Result | None = None
        self._parts: CommitParts | None = None  # of the commit that was sent last
        self._is_left = False  # its `with` block
        self.ran: Iterable[r.Derivation] = ()  # the derivations whose entries it writes, too
        shared.handles.add(self)

    def read_by(self, reads: Reads) -> None:
        """Set the reads that the commit has to revalidate."""
        self._reads = reads

    def keep(self, events: Iterable[r.Event]) -> None:
        """Add events. The caller has checked them, and that all of them fit into one command."""
        self._buffer += events

    def __enter__(self) -> Self:
        self._is_left = False
        entered(self._shared, self)
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self._is_left = True
        if self._result is not None or self._shared.forked:
            return
        if self.state in ("doubted", "prepared"):  # it may be committed, or others may commit it
            self.beating = False
            self.left_by(error)
            return
        written = self._written()
        if error is None and self._over is None and written:
            said = "%r is left without commit: its %d events are dropped"
            log.warning(said, self, written, extra={"txn": self._txn_id})
        try:
            if error is None:
                self.abort("its with block was left without commit")
            else:
                self.abort(f"left by {type(error).__name__}", timeout=QUIET_S)
        except AlreadyCommitted:
            said = "%r is left without commit here, and is committed all the same"
            log.warning(said, self, extra={"txn": self._txn_id})
        except AnabranchError as trouble:
            if error is None:
                raise
            said = "%r could not be aborted and will go stale: %s"
            log.warning(said, self, trouble, extra={"txn": self._txn_id})

    def left_by(self, error: BaseException | None) -> None:
        """After an error that left a prepare in doubt, try to abort it: perhaps no coordinator knows of it."""
        if error is not None and self._prepare_sent and self.state == "doubted":
            with suppress(AnabranchError):
                self.abort(f"left by {type(error).__name__} in a prepare", timeout=QUIET_S)

    def _written(self) -> int:
        return len(self._buffer) + (self._writer.written if self._writer is not None else 0)

    def __repr__(self) -> str:
        known = txn_text(self._txn_id) if self._txn_id else "buffered"
        return f"<Transaction {self._scope or 'without a scope'} {known}>"

    @property
    def txn_id(self) -> bytes | None:
        """The id of the transaction, 16 bytes; None before anything was sent."""
        return self._txn_id

    @property
    def is_over(self) -> bool:
        """Whether it has ended as far as is known here, or its ``with`` block was left."""
        return self._is_left or self._result is not None or self._over is not None

    @property
    def result(self) -> Result | None:
        """The result once it is decided, else None; `begin` sets it if the name was committed before."""
        return self._result

    @property
    def prepared(self) -> TransactionInfo | None:
        """The prepared transaction: this one, or another of the same name; None if neither is prepared."""
        outcome = self._outcome
        return info_of(outcome) if self.state == "prepared" and outcome is not None else None

    @property
    def identity(self) -> tuple[bytes, int]:
        """The token, and the writer's number. Raises: as `write`; IllegalState (the transaction is not open)."""
        self._check_not_over()
        if self._token is None or self._writer is None:
            raise IllegalState("the transaction is not open")
        return self._token, self._writer.number

    @property
    def cluster(self) -> str:
        """As `Client.cluster`."""
        return self._session.cluster(self._shared.deadline(None))

    def _move(self, op: HandleOp) -> None:
        """Go to the state that follows this operation; raise if the present state does not allow it."""
        self.state = HANDLES.judge(self.state, op) or self.state

    # -- opening --------------------------------------------------------------------------------------

    def _make_id(self, deadline: float, *, marked: bool = False) -> bytes:
        if not self._scope:
            raise InvalidArgument(
                "the transaction has no scope yet: give it one, or write to a stream first"
            )
        if self._txn_id is None:
            self._txn_id = self._session.new_txn_id(
                self._scope, deadline, marked=marked, as_old_as=self._as_old_as
            )
        return self._txn_id

    @traced("begin")
    def _begin(self, deadline: float) -> None:
        txn_id = self._make_id(deadline)
        self._move("begin")
        # A repeated begin has to send the same one.
        self._secret = self._secret or self._session.new_secret()
        of = None if self._ownership is None else self._ownership.hash
        begin = r.Begin(
            txn_id, self._scope, self._name, self.keepalive_ms, self._secret, of, self._snapshot
        )
        begun = self._session.begin(begin, deadline)
        if isinstance(begun, r.Outcome):
            self._take_outcome(begun)
            return
        self._token = self._session.token_of(begin, begun.begun_ms)
        self._writer = Writer(
            self._shared, self._scope, txn_id, self.keepalive_ms, trace=self.trace
        )
        self._writer.ran = self.ran
        self._writer.opened(self._token)
        self.beating = True
        self._shared.heart(self)

    def _open(self, deadline: float) -> None:
        """Begin, unless begun, and write the buffered events to the journals: all or none."""
        if self._token is None:
            self._begin(deadline)
        lanes: dict[str, StreamLane] = {}
        for event in self._buffer:
            lanes[event.stream] = self._touch(event.stream, deadline, event.key)
            lanes[event.stream].check(event.key, event.value, pairs_of(event))
        for stream, lane in lanes.items():
            if lane.exclusive:
                lane.reserve(event.key for event in self._buffer if event.stream == stream)
        what = "bringing events to the journals"
        with AllOrNothing(what, self._end_in_between, begun=True):
            self._write_buffer(lanes)
        self._buffer.clear()
        self._buffered_bytes = 0

    def _write_buffer(self, lanes: Mapping[str, StreamLane]) -> None:
        state: dict[int, list[StateRow]] = {}
        for event in self._buffer:
            if event.key is not None and is_state(event.stream):
                state.setdefault(event.segment_id, []).append((event.key, event.value))
                continue
            stamp = event.timestamp if event.timestamp > 0 else None
            lanes[event.stream].write(event.key, event.value, pairs_of(event), stamp)
        if self._ownership is not None:
            for task, rows in state.items():
                lanes[self._ownership.state].write_rows(task, rows)

    def _touch(self, stream: str, deadline: float, key: bytes | None = None) -> StreamLane:
        """The `StreamLane` of this handle's writer for a stream. ``key``: as of `Writer.touch`."""
        if self._writer is None:
            raise IllegalState("the transaction is not open")
        return self._writer.touch(stream, deadline, key)

    def token(
        self, rights: RightNames = WRITER, *, expires: float | None = None, lane: str | None = None
    ) -> TokenBytes:
        """The secret bytes with which other processes take part. This opens the transaction.

        ``rights``: write (includes joining), heartbeat, commit (includes state), abort, state; one, several, or
        "all". ``expires``: seconds from now; None: when the transaction ends. ``lane``: the only lane in which it
        is valid; None: any.

        Raises: InvalidArgument, UnknownScope, NotReady, DeadlineExceeded; as `write` if the transaction is over.
        """
        with self._lock:
            if self.state != "prepared":  # a prepared one keeps its token
                self._check_usable()
                self._open(self._shared.deadline(None))
            self._check_its_own()
            if self._token is None:
                raise IllegalState("the transaction has no token here")
            token = self._session.token_as_of_now(self._token, self._secret or b"")
            return narrow_at(token, rights, expires, lane, self._session.wall())

    def assign_id(self) -> bytes:
        """The id, 16 bytes, made now if it has none. This does not begin the transaction. Raises: as `token`."""
        with self._lock:
            self._check_usable()
            return self._make_id(self._shared.deadline(None))

    def open_named(self, timeout: float | None = None) -> None:
        """Begin now, under the name. If the name is committed already, `result` is set."""
        with self._lock:
            self._begin(self._shared.deadline(timeout))

    # -- writing --------------------------------------------------------------------------------------

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

    def write(
        self,
        stream: Any,
        value: Any = None,
        key: Any = None,
        headers: Headers | None = None,
        timestamp: int | None = None,
    ) -> None:
        """Queue an event; `flush` or the commit waits until it is stored.

        ``stream``: a name, with ``value`` and ``key`` as bytes, or what `Client.stream` made, with its types.
        ``headers``: (name, bytes) pairs or a mapping; names that begin with "ab." are reserved. ``timestamp``:
        Unix milliseconds above 0; None: now. Events of one key keep their order.

        Raises:
            InvalidArgument, CrossScope, UnknownScope: the arguments are wrong; nothing was written.
            EventTooLarge: the stream's journal takes no event of this size; nothing was written, and the
                transaction stays usable.
            UnknownStream: raised by the first write that isn't buffered, or by the commit.
            TransactionAborted, AlreadyCommitted, IllegalState: the transaction is over.
            ReservedByPrepared: `begin` found a prepared transaction of the same name.
            OutcomeUnknown: the transaction is being committed without this write; ask ``client.state``.
            WriteFailed: a write of this writer failed, so it makes no more receipts.
            DeadlineExceeded: no room in the queue, or no answer, within the client's timeout.
        """
        if type(stream) is not str:
            stream, value, key = encoded(stream, value, key)
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

    @overload
    def write_many(self, stream: str, events: Iterable[EventFields]) -> int: ...

    @overload
    def write_many(self, stream: Stream[Any, V], events: Iterable[TypedFields[V]]) -> int: ...

    def write_many(self, stream: Any, events: Iterable[Any]) -> int:
        """Write many events, faster than by `write`; returns how many.

        ``events``: tuples (value, key, headers, timestamp) as `write` takes them; trailing fields may be omitted.
        The iterable may have any length: a thousand events at a time are in memory.

        All or nothing: a refused event, or an exception of the iterable, ends the call. If some events were already
        written, every later call of this handle raises `WriteFailed`, so that no part of them is committed. Raises:
        as `write`.
        """
        if type(stream) is not str:
            stream, events = encoded_events(stream, events)
        written = 0
        with AllOrNothing("write_many", self._end_in_between) as call:
            for chunk in chunks_of(events):
                with self._lock:
                    is_open = self.state == "open" and not self._buffer
                    if is_open and self._writer is not None and len(chunk) > 1:
                        self._writer.put_many(stream, chunk)
                    else:
                        for event in chunk:
                            check_shape(event)
                            self.write(stream, *event)
                written += len(chunk)
                call.begun = True
        return written

    def write_batch(self, stream: str, batch: pa.RecordBatch | pa.Table) -> int:
        """Write the rows of a pyarrow record batch or table; returns how many. By far the fastest way.

        Columns: ``value``, and optionally ``key``, ``headers``, ``timestamp``, as `write` takes them. ``value`` and
        ``key`` are binary or string (written as UTF-8), ``headers`` list<struct<key: string, value: binary>>,
        ``timestamp`` a timestamp or int64 in Unix milliseconds; null: now. Dictionaries are decoded.

        All or nothing: the rows are checked first. If the call fails after a row was written, every later call of
        this handle raises `WriteFailed`. Switching between this call and `write` waits for acknowledgements.

        Raises: as `write`; InvalidArgument (a column or type that `write_batch` does not take).
        """
        pieces = self._shared.columns(stream, batch)
        with AllOrNothing("write_batch", self._end_in_between) as call:
            for columns in pieces:
                with self._lock:
                    self._shared.check()
                    lane = self._lane(stream, pieces, elsewhere=self._check_stream(stream))
                    if not call.begun and lane is not None:
                        for each in pieces:
                            lane.check_columns(each)
                    call.begun = True
                    if lane is not None:
                        lane.write_columns(columns)
                    else:
                        for event in columns.events():
                            self.write(stream, *event)
        return sum(columns.rows for columns in pieces)

    def write_state(self, task: int, rows: Iterable[StateRow]) -> int:
        """Change the state of one task of the ``ownership`` given to `begin`; returns the number of rows.

        ``rows``: (key, value); a key is incarnation, number of the store, key in the store (``docs/protocol.md``).
        The value None deletes; of several rows of a key the last one counts. The commit has to move the task's
        positions (``consumed``). All rows of a commit may take at most the controllers' chunk bytes.

        All or nothing, as `write_many`. Raises: InvalidArgument (no task ownership, not one of its tasks, not
        bytes), UnknownStream (the processor has no stores), and as `write`.
        """
        ownership = check_task(self._ownership, task)
        given = checked_rows(rows)
        stream = ownership.state
        size = state_size(stream, given)
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
            with AllOrNothing("write_state", self._end_in_between, begun=True):
                lane.write_rows(task, given)
        return len(given)

    def _keep(
        self,
        stream: str,
        key: bytes | None,
        value: bytes | None,
        headers: RecordHeaders | None,
        timestamp: int | None,
    ) -> Writer | None:
        """Keep an event in memory. If the event does not fit, open the transaction, and return its writer."""
        self._shared.check()
        check_event(key, value, timestamp)
        elsewhere = self._check_stream(stream)
        if self._result is not None or self.state not in USABLE:
            self._check_usable()
        if self._token is None or self._buffer:
            size = len(key or b"") + len(value or b"") + len(stream) + EVENT_OVERHEAD
            if self.trace is not None:
                size += TRACED_BYTES
            kept: tuple[r.EventHeader, ...] = ()
            if headers:
                size += headers_size(headers)
                kept = tuple([r.EventHeader(*pair) for pair in headers])
            if self._token is None and not elsewhere and self._fits(1, size):
                self._buffer.append(r.Event(stream, -1, key, value, kept, timestamp or -1))
                self._buffered_bytes += size
                return None
            self._open(self._shared.deadline(None))
        if self._writer is None:
            raise IllegalState("the transaction is not open")
        return self._writer

    def _check_stream(self, stream: str) -> bool:
        """Raise as `write` does, unless this transaction may write to the stream, which may give it its scope.

        Returns whether another control partition serves the stream, and this client has not yet learned that one
        transaction may write to several (`Session.writes_apart`): then a one-shot can't have its events.
        """
        scope = self._scope or split_stream(stream)[0]
        elsewhere = self._shared.check_stream(scope, stream)
        self._scope = scope
        return elsewhere and not self._session.writes_apart

    def _lane(
        self, stream: str, pieces: Sequence[EventColumns], *, elsewhere: bool
    ) -> StreamLane | None:
        """The `StreamLane` of a stream; None if the events fit into memory. Raises: as `write`."""
        self._check_usable()
        if self._token is None and not elsewhere:
            overhead = len(stream) + EVENT_OVERHEAD
            size = sum(int(piece.sizes().sum()) + piece.rows * overhead for piece in pieces)
            if self._fits(sum(piece.rows for piece in pieces), size):
                return None
        deadline = self._shared.deadline(None)
        if self._token is None or self._buffer:
            self._open(deadline)
        return self._touch(stream, deadline)

    def _fits(self, count: int, size: int) -> bool:
        """Whether ``count`` more events, of ``size`` bytes in all, still fit into a one-shot."""
        few = len(self._buffer) + count <= EVENTS.value
        return few and self._buffered_bytes + size <= self._shared.one_shot_bytes

    # -- what was written -----------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything written is acknowledged and its receipt registered. This opens the transaction.

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

    @traced("flush")
    def _store(self, deadline: float) -> None:
        """Wait until everything written is acknowledged. Raises: as `flush`."""
        if self._writer is not None:
            try:
                self._writer.store(deadline)
            except (WriteFailed, StreamLost) as error:
                self._end(error)
                raise

    def acknowledged(self, deadline: float) -> tuple[bytes, r.Receipt]:
        """The token, and the unregistered receipt of all that was written. Raises: as `flush`."""
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
        wait: Wait = "merged",
        timeout: float | None = None,
    ) -> Result:
        """Commit: everything becomes visible at once. Repeating the call returns the same result.

        ``receipts``: the writers to take, besides this handle's own writes; None: all finished writers. ``name``:
        the name to commit under; if it is committed already, its outcome is the result, and this transaction has
        no effect. ``number``, 0 or more: commit as this number of the series ``name``; it must be above all numbers
        committed in the series before. ``consumed``: from a `TaskReader`; its positions are committed with the
        events, in a transaction that was begun with its ``ownership``. ``secret``: the secret that the transaction
        was prepared with (see `prepare`). ``timeout`` in seconds.

        ``wait="decided"``: return at the decision. A big commit is decided long before its events are merged: then
        the result is not `Result.is_merged`, and `merged` waits for the rest. From the decision on nothing can
        refuse or abort the commit, except an operator's force after a stream was lost. A transaction of one
        request, and any other commit that one round decides and merges, has its whole result at once. Below
        feature level 4 the call waits for the merge.

        Raises:
            OwnershipLost: another worker has taken tasks of ``consumed``. This transaction is aborted, or already
                committed; the positions of the tasks show which: take them again.
            AlreadyCommitted: the series has a higher number, or the number's outcome is forgotten; or, with
                ``consumed``, the name or number is committed. This transaction is aborted, and no position moved:
                commit the positions alone, as `Client.transact` does.
            NonTransactional: the caller is in the ``with`` block of another open transaction, around this one's.
            WritersUnfinished, ReceiptMismatch, ReceiptsNotCovered, UnknownStream, InvalidArgument, StreamLost,
                NotAuthorized, ReservedByPrepared, EventTooLarge, IllegalState: nothing is changed; correct it and
                commit again, or abort.
            NotReady, DeadlineExceeded, TooManyTransactions, TooManyUncommittedBytes: nothing is changed; commit
                again, or abort.
            TransactionAborted, LocksBroken: it is over without effect; begin a new one.
            ClockSkew: not begun: this machine's clock is more than a day ahead of the controller's.
            WriteFailed: a write of this handle failed; abort.
            OutcomeUnknown: no answer in time. Commit again, or ask ``client.state`` later.
        """
        parts = CommitParts(receipts, name, number, consumed, secret, wait)
        return self.commit_with(parts, timeout)

    def merged(self, timeout: float | None = None) -> Result:
        """After `commit` with ``wait="decided"``: wait until all events are merged, and return the whole result.

        Another thread may wait: ``pool.submit(txn.merged)`` makes a `concurrent.futures.Future`. Raises:
        IllegalState (its commit is not decided), OutcomeUnknown (no answer in time: call again), TransactionAborted
        (an operator forced its end after a stream was lost).
        """
        if self._result is None:
            self._check_not_over()
            raise IllegalState("its commit is not decided: commit it first")
        return self.commit_with(CommitParts(), timeout)

    @traced("commit", "PRODUCER")
    def commit_with(self, parts: CommitParts, timeout: float | None) -> Result:
        """As `commit`."""
        with self._lock:
            if self._result is not None:
                if self._result.is_merged or parts.decided:
                    return self._result
                # Only the merge of the commit that was decided is awaited, whatever is asked for now.
                parts = replace(self._parts or parts, wait="merged")
            self._shared.check()
            self._check_not_over()
            if self.state != "prepared" or parts.consumed is not None:
                parts.check_consumed(self._ownership)
            deadline, self._prepare_sent = self._shared.deadline(timeout), False
            if not self._scope and parts.name is None:
                return self._commit_nothing()
            self._check_outside("commit")
            fits = parts.fit_one_command and not (
                parts.consumed is not None and self._is_apart(deadline)
            )
            if self._token is None and self.state != "open" and fits:
                return self._commit_one_shot(parts, deadline)
            if self._token is None and parts.receipts:
                raise InvalidArgument(
                    "no other process can have written, as the token was never asked for: give no receipts"
                )
            if self._token is None or self.state in USABLE:
                self._open(deadline)
            if self._result is None or not self._result.is_merged:
                self._commit_open(parts, deadline)
            return self._done()

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
        """Make sure that the transaction can commit. `commit` or `abort` ends it, even days later.

        A prepared transaction needs no heartbeats, and takes no more writes. Without locks and positions, no
        reader, other commit or scaling waits for it. ``consumed``: as of `commit`; the tasks make no other commit
        until it ends. ``by``: the SHA-256 (32 bytes) of a secret; then only a holder of the secret can end it, from
        any process. ``attempt``: up to 64 bytes; repeating the call with the same one is harmless. The state of the
        result is PREPARED, or COMMITTED if the name or number was committed before: then this transaction has no
        effect.

        Raises: as `commit`; ReservedByPrepared (another prepared transaction has the name), TooManyTransactions,
        TooManyUncommittedBytes (too many are prepared), IllegalState (another attempt prepared it).
        """
        parts = CommitParts(receipts, name, number, consumed)
        return self.prepare_with(parts, r.Prepare(by, attempt), timeout)

    @traced("prepare", "PRODUCER")
    def prepare_with(
        self, parts: CommitParts, prepare: r.Prepare, timeout: float | None
    ) -> TransactionInfo:
        """As `prepare`."""
        with self._lock:
            self._shared.check()
            if self._outcome is None:
                self._check_not_over()
                parts.check_consumed(self._ownership)
                self._check_outside("prepare")
                deadline = self._shared.deadline(timeout)
                if self.state in USABLE:
                    self._prepare_sent = True
                try:
                    whole = parts.fit_one_command
                    if not (whole and self._prepare_events(parts, prepare, deadline)):
                        self._open(deadline)
                        if self._outcome is None:
                            self._commit_open(parts, deadline, prepare)
                finally:
                    if self.state == "sent":
                        self._move("doubt")
            if self._outcome is None:
                raise IllegalState("the transaction is not prepared")
            return info_of(self._outcome)

    def _prepare_events(self, parts: CommitParts, prepare: r.Prepare, deadline: float) -> bool:
        """Prepare with one command. Returns False if the writes are too big for it, or in journals already.

        With reads of tables, raises EventTooLarge if the writes are too big.
        """
        if self._shot is None and (
            self._token is not None or self.state == "open" or self._is_apart(deadline)
        ):
            return False
        txn_id = self._make_id(deadline)
        self._secret = self._secret or self._session.new_secret()
        if self._shot is None:
            place_null_keys(self._shared, self._buffer, deadline)
            self._shot = r.PrepareEvents(
                txn_id,
                self._scope,
                parts.name,
                with_trace(self._buffer, self.trace),
                self._secret,
                prepare,
                parts.consumed,
                () if self._reads is None else self._reads.locks(),
                tuple(sorted(self.ran)),
            )
        if self._token is None:
            begin = r.Begin(txn_id, self._scope, parts.name, self.keepalive_ms, self._secret)
            self._token = self._session.token_of(begin)
        self._move("send")
        try:
            outcome = self._send_shot(self._shot, deadline)
        except AnabranchError as error:
            # Events of other control partitions do not fit into one command.
            if self.state == "sent" and isinstance(error, EventTooLarge | CrossScope):
                self._shot = self._token = None
                self._move("refuse_shot")
                if self._reads is not None:
                    raise
                return False
            if isinstance(error, DerivationMissing):
                self._shared.derivations.forget()
            self._failed_to_commit(error, "refuse_shot")
            if self.state not in IN_DOUBT:  # RESOLVE may have aborted the id
                self._shot = self._token = self._txn_id = None
            raise
        self._take_outcome(outcome)
        return True

    def _send_shot(self, shot: r.PrepareEvents, deadline: float) -> r.Outcome:
        """Send a prepare, and again after each revalidation of its locks, until it has an outcome."""
        while isinstance(answer := self._session.prepare_events(shot, deadline), r.Revalidate):
            if self._reads is None:
                raise no_replica()
            try:
                self._reads.revalidate(answer, deadline)
                self._shot = shot = replace(shot, locks=self._reads.locks())
            except AnabranchError as error:
                # A copy may still be on its way, and no process would end what it prepares: RESOLVE aborts it.
                try:
                    found = self._session.resolve(
                        shot.txn_id, shot.scope, None, self._shared.deadline(GRACE_S)
                    )
                except AnabranchError as trouble:
                    raise unknown(f"is not known: {trouble}", shot.txn_id, None) from error
                if found.state in ("PREPARED", "COMMITTED"):
                    return found
                raise
        return answer

    def _commit_nothing(self) -> Result:
        """Commit without a command: nothing was written, and so no scope is known."""
        self._move("send")
        self._move("commit")
        self._result = Result(NO_TXN, self._session.highest_timestamp, Counts(0, 0, 0))
        return self._result

    def _is_apart(self, deadline: float) -> bool:
        """Whether the buffered events are for several control partitions."""
        streams = {event.stream for event in self._buffer}
        return not self._session.serves_all({*streams, f"{self._scope}/s"}, deadline)

    def _commit_one_shot(self, parts: CommitParts, deadline: float) -> Result:
        parts.check_id(self._txn_id)
        txn_id = self._make_id(deadline, marked=parts.are_marked)
        place_null_keys(self._shared, self._buffer, deadline)
        # From here on an interruption leaves the outcome in doubt.
        self._move("send")
        try:
            shot = self._sent_shot
            if shot is None or self._result is None:  # else it is decided, and its merge is awaited
                shot = self._sent_shot = r.OneShot(
                    txn_id,
                    self._scope,
                    parts.name,
                    with_trace(self._buffer, self.trace),
                    parts.consumed,
                    derivations=tuple(sorted(self.ran)),
                )
            outcome = self._session.one_shot(shot, deadline, decided=parts.decided)
        except EventTooLarge:
            self._move("refuse_shot")
            # A marked id is for one-shots only; that of a refused one over several control partitions is used up.
            used_up = parts.are_marked or self._is_apart(deadline)
            self._txn_id = None if used_up else txn_id
            self._open(deadline)
            self._commit_open(parts, deadline)
            return self._done()
        except AnabranchError as error:
            self._failed_to_commit(error, "refuse_shot")
            if self.state == "buffered":
                self._txn_id = None  # RESOLVE may have aborted the id
            raise
        self._take_outcome(outcome)
        return self._done()

    def _commit_open(
        self, parts: CommitParts, deadline: float, prepare: r.Prepare | None = None
    ) -> None:
        command = parts.command(self._txn_id, prepare)  # raises if a receipt is wrong
        own: tuple[r.Receipt, ...] = ()
        if prepare is None:
            self._parts = parts
        if self._token is None or (self._writer is None and self.state in USABLE):
            raise IllegalState("the transaction is not open")
        if self._writer is not None:
            if self._own is None:
                self._store(deadline)
                self._own = self._writer.receipt(finished=True)
            own = (self._own,) if self._writer.has_touched else ()
        # From here on an interruption leaves the outcome in doubt.
        self._move("send")
        reads = self._reads
        validated = () if reads is None else reads.validated
        command = replace(command, token=self._token, own=own, validated=validated)
        outcome = self._send(command, deadline, decided=parts.decided)
        while isinstance(outcome, r.Revalidate):
            if outcome.decided:
                self._move("under_way")
            if reads is None:
                raise no_replica()
            # If this raises, the outcome of the commit that was sent stays unknown here.
            reads.revalidate(outcome, deadline)
            command = replace(command, validated=reads.validated)
            outcome = self._send(command, deadline, decided=parts.decided)
        warn_left_out(outcome, parts.receipts)
        self._take_outcome(outcome)

    def _send(
        self, command: r.Commit, deadline: float, *, decided: bool
    ) -> r.Outcome | r.Revalidate:
        try:
            answer = self._session.try_commit(command, deadline, decided=decided)
            if isinstance(answer, r.Outcome):
                if command.own:
                    answer = self._session.whole(answer, command.token, deadline)
                check_taken(answer, command.own, self._txn_id)
        except AnabranchError as error:
            self._failed_to_commit(error, "refuse")
            raise
        return answer

    def _failed_to_commit(self, error: AnabranchError, refused: HandleOp) -> None:
        """Handle an error of a sent commit. ``refused``: what to do to the state if the commit had no effect."""
        if isinstance(error, TransactionAborted | LocksBroken | AlreadyCommitted | OwnershipLost):
            self._end(error)
            self._discard()
        elif isinstance(error, _OF_ONE_COPY) and self.state in ("doubted", "decided"):
            raise unknown(f"is not known: {error}", self._txn_id or b"", self._token) from error
        elif isinstance(error, OutcomeUnknown | MalformedRecord | UnsupportedVersion):
            self._move("doubt")  # no answer, or an unreadable one
            self.beating = False
        else:
            self._move(refused)
            if self.state in USABLE:
                self._own = None  # more may be written before the next commit

    def _take_outcome(self, outcome: r.Outcome) -> None:
        if outcome.state == "PREPARED":
            self._outcome = outcome
            self._move("prepare")
            # Another transaction has the name; its id is as good as a token in its owner's lane.
            if outcome.txn_id != self._txn_id:
                self._txn_id = self._token = outcome.txn_id
            self.beating = False
            self._buffer.clear()
            return
        if outcome.state == "FINALIZE_IN_PROGRESS":
            self._result = result_of(outcome)
            self._move("late")
        elif outcome.state == "COMMITTED":
            self._outcome, self._result = outcome, result_of(outcome)
            self._move("commit")
        else:
            self._end(TransactionAborted(f"the transaction is aborted ({outcome.reason})"))
            self._check_not_over()
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
        """Abort: no event of this transaction will become visible. Repeating the call is fine.

        ``secret``: as of `commit`. Raises: AlreadyCommitted; DeadlineExceeded, NotReady, OutcomeUnknown (the abort
        is not certain: repeat it; if no commit was sent, the controller aborts it when the keepalive ends).
        """
        with self._lock:
            if self._result is not None:
                raise AlreadyCommitted("its commit is decided: there is no abort any more")
            self._shared.check()
            if isinstance(self._over, TransactionAborted):
                return
            before, self._over = self.state, None
            self._move("abort")
            try:
                self._abort(reason, self._shared.deadline(timeout), secret, before)
                self._end(TransactionAborted(f"the transaction is aborted ({reason})"))
            except AlreadyCommitted:  # perhaps by this handle: `commit` finds out
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
            raise AlreadyCommitted("the transaction is committed: its result is final")
        if self.state not in USABLE:
            self._check_not_over()
            self._check_its_own()
            self._move("write")  # raises the reason

    def _check_its_own(self) -> None:
        """Raise `ReservedByPrepared` if begin found a prepared transaction of the name: the token is its id."""
        if self._token is not None and self._token == self._txn_id:
            raise ReservedByPrepared(
                f"transaction {txn_text(self._txn_id)} named {self._name!r} is prepared: it has to be ended first, "
                "by its coordinator, or by `commit` or `abort` with its `secret`; or begin under another name"
            )

    def _check_outside(self, call: str) -> None:
        """As `Shared.check_outside`. A `TableTransaction` checks it before it calls its handle."""
        if self.state in USABLE and not self._snapshot:
            self._shared.check_outside(call, self)

    def _check_not_over(self) -> None:
        if self._over is not None:
            raise again(self._over)
        if self.state == "aborting":
            why = "is not known, because its abort was not answered: abort it again"
            raise unknown(why, self._txn_id or b"", self._token)

    def _end(self, error: AnabranchError) -> None:
        """Make every later call raise this error."""
        self._over, self._result = error, None
        self.beating = self.beating and isinstance(error, WriteFailed)
        self._move("fail")

    def _end_in_between(self, error: BaseException, call: str) -> None:
        with self._lock:
            if self._over is None:
                self._end(left_early(error, call))

    def _discard(self) -> None:
        """Drop unacknowledged writes, and free the journal writer."""
        self.beating = False
        if self._writer is not None:
            self._writer.discard()

    # -- called by the client -------------------------------------------------------------------------

    @property
    def live_token(self) -> bytes | None:
        """As `Handle.live_token`."""
        return self._token if self.beating else None

    def gone(self, outcome: r.Outcome) -> None:
        """As `Handle.gone`. If it is committed, `commit` still asks whether this handle's commit did that."""
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
        self._lock = here().lock()


def check_task(ownership: TaskOwnership | None, task: int) -> TaskOwnership:
    """The ownership. Raises `InvalidArgument` unless it has the task."""
    if ownership is None or task not in ownership.tasks:
        raise InvalidArgument(
            f"task {task!r}: begin the transaction with a task ownership, and name one of its tasks"
        )
    return ownership


def checked_rows(rows: Iterable[StateRow]) -> list[StateRow]:
    """The rows of a state. Raises `InvalidArgument` if one is no row."""
    given: list[tuple[Any, Any]] = list(rows)  # callers without a type checker pass anything
    if given:
        keys, values = zip(*given, strict=True)
        if {*map(type, keys)} != {bytes} or not {*map(type, values)} <= {bytes, type(None)}:
            raise InvalidArgument("a row of state is a key, bytes, and a value, bytes or None")
    return given


def state_size(stream: str, rows: Sequence[StateRow]) -> int:
    """About how many bytes rows of a state take in a command."""
    keys, values = zip(*rows, strict=True) if rows else ((), ())
    size = sum(map(len, keys)) + sum(map(len, filter(None, values)))
    return size + len(rows) * (len(stream) + EVENT_OVERHEAD)


def place_null_keys(shared: Shared, events: MutableSequence[r.Event], deadline: float) -> None:
    """Spread a one-shot's events without a key over the segments of their streams."""
    turn: dict[str, int] = {}
    for i, event in enumerate(events):
        if event.key is None and event.segment_id == -1:
            layout = shared.layout(event.stream, deadline)
            at = turn.setdefault(event.stream, shared.session.random64() % len(layout))
            events[i] = event._replace(segment_id=layout[at % len(layout)].segment_id)


def pairs_of(event: r.Event) -> RecordHeaders | None:
    """The headers of an event, in the form that journals take."""
    return [(h.key, h.value) for h in event.headers] if event.headers else None


def fields_of(event: r.Event) -> tuple[Any, ...]:
    """The arguments of `Transaction.write` for an event that a transaction kept in memory."""
    stamp = event.timestamp if event.timestamp > 0 else None
    return event.stream, event.value, event.key, pairs_of(event), stamp
