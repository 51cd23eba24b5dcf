"""The handle of a writer: it writes events to the journals, and makes the receipt for them.

A process that joins a transaction uses it directly; an open `Transaction` has one for its own events.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, overload

from anabranch.client.receipts import (
    EventFields,
    StreamLane,
    TypedFields,
    WriteFunction,
    WriterAccount,
    check_fields,
    check_layout,
)
from anabranch.client.reservation import Reservation, token_to_write
from anabranch.client.shared import MOST_NAMES, Shared, entered
from anabranch.core.stream_states import ACTIVE, FORGOTTEN, WAITING
from anabranch.core.transaction_states import locks_broken
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    DerivationMissing,
    Expired,
    IllegalState,
    NotReady,
    StreamLost,
    TransactionAborted,
    UnknownStream,
    WriteFailed,
)
from anabranch.ports import JournalMissing, RecordHeaders
from anabranch.protocol.ids import txn_text
from anabranch.protocol.legal_names import check_type
from anabranch.protocol.limits import LABEL, LOCKED_POSITIONS, check_event, check_headers
from anabranch.protocol.partitioner import position_of
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import Rights, Token, check_right, peek
from anabranch.tracing import TRACE_HEADER, Trace, traced
from anabranch.types import Headers, K, Receipt, V
from anabranch.values import Stream, encoded, encoded_events
from anabranch.waits import here

if TYPE_CHECKING:
    import pyarrow as pa

    from anabranch.tracing import Span

_AT_ONCE = 1000  # events in a chunk of write_many


class Writer:
    """A writer of a transaction that another process began. Any thread may use it.

    Made by `Client.join`; each join is a writer of its own. Leaving its ``with`` block without an exception
    finishes it.
    """

    def __init__(
        self,
        shared: Shared,
        scope: str,
        txn_id: bytes,
        keepalive_ms: int,
        *,
        heartbeat: bool = False,
        label: str = "",
        reserved: Reservation | None = None,
        trace: Trace | None = None,
    ) -> None:
        """``reserved``: the reservation, if the transaction may not have begun. Without it, call `opened`."""
        self._shared = shared
        self.trace = trace
        self._writing: Span | None = None  # from the first event until the last one is stored
        self._session = shared.session
        self._scope = scope
        self._heartbeat = heartbeat
        self._label = label  # sent after the first touch
        self._reserved = reserved
        self._lock = here().lock()
        self._hot: dict[str, WriteFunction] = {}  # by stream; no checks are needed before these
        self._token: bytes | None = None
        self._finished: Receipt | None = None
        self._over: AnabranchError | None = None
        self._is_left = False  # its `with` block
        self._has_asked = False
        self.ran: Iterable[r.Derivation] = ()  # the derivations whose entries it writes, too
        self.keepalive_ms = keepalive_ms
        self.beating = False
        while shared.dropped:  # first free the journal writers of collected handles
            shared.dropped.popleft().discard()
        journal = shared.ports.journals.writer()
        # Garbage collection may run at any point, so it takes no lock and only notes the journal writer.
        weakref.finalize(self, shared.dropped.append, journal).atexit = False
        self._account = WriterAccount(txn_id, self._session.random64(), journal)
        shared.handles.add(self)

    def __enter__(self) -> Self:
        self._is_left = False
        entered(self._shared, self)
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self._is_left = True
        if self._shared.forked:
            return
        if error is None:
            self.finish()
        elif self._finished is None:
            self.discard()

    def __repr__(self) -> str:
        return f"<Writer of {txn_text(self.txn_id)}>"

    @property
    def txn_id(self) -> bytes:
        """The id of the transaction, 16 bytes."""
        return self._account.txn_id

    @property
    def is_over(self) -> bool:
        """Whether this writer has ended, or its ``with`` block was left."""
        return self._is_left or self._finished is not None or self._over is not None

    @property
    def number(self) -> int:
        """The number that names this writer in receipts."""
        return self._account.writer

    @property
    def identity(self) -> tuple[bytes, int]:
        """The token, and the writer's number. Raises: as `write`; IllegalState (the transaction is not open)."""
        self._check_not_over()
        if self._token is None:
            raise IllegalState("the transaction is not open")
        return self._token, self.number

    @property
    def cluster(self) -> str:
        """As `Client.cluster`."""
        return self._session.cluster(self._shared.deadline(None))

    # -- opening --------------------------------------------------------------------------------------

    def open(self, timeout: float | None = None) -> None:
        """Begin the transaction of a reservation, and start heartbeats if the writer was joined with them.

        The first write calls this. Call it yourself if the first event may come late. Raises: as `write`.
        """
        with self._lock:
            self._check_writable()
            self._open(self._shared.deadline(timeout))

    def opened(self, token: bytes) -> None:
        """Use this token from now on."""
        self._token = token
        if self._heartbeat:
            self.beating = True
            self._shared.heart(self)

    def _open(self, deadline: float) -> None:
        """Begin the transaction of a reservation, if it has not begun."""
        if self._token is None and self._reserved is not None:
            try:
                self.opened(token_to_write(self._session, self._reserved, deadline))
            except (TransactionAborted, AlreadyCommitted, Expired) as error:
                self._end(error)
                raise

    def touch(self, stream: str, deadline: float, key: bytes | None = None) -> StreamLane:
        """The `StreamLane` of a stream; the first call for a stream touches it.

        ``key``: of the first event, if there is one: a stream that is known to be exclusive is then locked there.
        """
        if self._token is None:
            raise IllegalState("the transaction is not open")
        lane = self._account.lanes.get(stream)
        if lane is None:
            self._begin_writing()
            known = key if stream in self._shared.exclusive else None
            first = () if known is None else (position_of(known),)
            touched = self._touch(stream, deadline, first)
            check_layout(stream, touched.segments)
            if touched.exclusive and len(self._shared.exclusive) < MOST_NAMES:
                self._shared.exclusive.add(stream)
            if self._label:  # the first touch has made the writer known
                self._session.label(self._token, self.number, self._label, stream, deadline)
                self._label = ""
            lane = self._account.add(touched, deadline)
            lane.judge_time = partial(self._shared.judge_time, stream)
            lane.lock = partial(self._lock_segments, stream)
        return lane

    def _lock_segments(self, stream: str, positions: Sequence[int]) -> r.Touched:
        """Lock the segments of an exclusive stream that have keys at these positions."""
        deadline, most = self._shared.deadline(None), LOCKED_POSITIONS.value
        for at in range(0, len(positions) - most, most):
            self._touch(stream, deadline, positions[at : at + most])
        last = (len(positions) - 1) // most * most
        return self._touch(stream, deadline, positions[last:])

    def _touch(self, stream: str, deadline: float, positions: Sequence[int]) -> r.Touched:
        if self._token is None:
            raise IllegalState("the transaction is not open")
        self._has_asked = True
        try:
            return self._session.touch(
                self._token, stream, self.number, deadline, self.ran, positions
            )
        except DerivationMissing:
            self._shared.derivations.forget()
            raise
        except TransactionAborted as error:
            self._end(error)
            raise

    def _begin_writing(self) -> None:
        """Begin the span of all writes, whose context the events carry."""
        if self.trace is not None and self._writing is None:
            self._writing = span = self.trace.start("write", "PRODUCER", self.txn_id)
            header = None if span is None else self.trace.header(span)
            self._account.trace = [] if header is None else [(TRACE_HEADER, header)]

    def _end_writing(self) -> None:
        if self._writing is not None and self._writing.is_recording():
            self._writing.set_attribute("messaging.batch.message_count", self.written)
            self._writing.end()

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
        """Queue an event; `flush` or `finish` waits until it is stored. Arguments: as of `Transaction.write`.

        Raises: as `Transaction.write`; IllegalState (the writer is finished, or was discarded), Expired.
        """
        if type(stream) is not str:
            stream, value, key = encoded(stream, value, key)
        pairs = check_headers(headers) if headers is not None else None
        if timestamp is not None:
            self._shared.check_time(stream, timestamp)
        with self._lock:
            self.put(stream, key, value, pairs, timestamp)

    def put(
        self,
        stream: str,
        key: bytes | None,
        value: bytes | None,
        headers: RecordHeaders | None,
        timestamp: int | None,
    ) -> None:
        """As `write`, for a caller that has checked headers and timestamp and holds its own lock."""
        try:
            hot = self._hot.get(stream)
            if hot is not None:
                hot(key, value, headers, timestamp)
                return
            self._shared.check()
            check_event(key, value, timestamp)
            self._shared.check_stream(self._scope, stream)
            lane = self._lane(stream, key)
            lane.write(key, value, headers, timestamp)
            self._hot[stream] = lane.write
        except TypeError:
            check_event(key, value, timestamp)
            raise
        except WriteFailed as error:
            self._end(error)
            raise

    @overload
    def write_many(self, stream: str, events: Iterable[EventFields]) -> int: ...

    @overload
    def write_many(self, stream: Stream[Any, V], events: Iterable[TypedFields[V]]) -> int: ...

    def write_many(self, stream: Any, events: Iterable[Any]) -> int:
        """Write many events, faster than by `write`; returns how many. Arguments: as of `Transaction.write_many`.

        Raises: as `write`.
        """
        if type(stream) is not str:
            stream, events = encoded_events(stream, events)
        written = 0
        with AllOrNothing("write_many", self._end_in_between) as call:
            for chunk in chunks_of(events):
                with self._lock:
                    self.put_many(stream, chunk)
                written += len(chunk)
                call.begun = True
        return written

    def put_many(self, stream: str, chunk: Sequence[EventFields]) -> None:
        """Write a chunk of `chunks_of`, for a caller that holds its own lock."""
        if len(chunk) == 1 or stream not in self._hot:
            for event in chunk:
                check_fields(event)
                self.write(stream, *event)
            return
        try:
            self._account.lanes[stream].write_many(chunk)
        except TypeError:
            for event in chunk:
                check_fields(event)
            raise

    def write_batch(self, stream: str, batch: pa.RecordBatch | pa.Table) -> int:
        """Write the rows of a pyarrow record batch or table; returns how many. See `Transaction.write_batch`.

        Raises: as `write`; InvalidArgument (a column or type that `write_batch` does not take).
        """
        pieces = self._shared.columns(stream, batch)
        with AllOrNothing("write_batch", self._end_in_between) as call:
            for columns in pieces:
                with self._lock:
                    self._shared.check()
                    self._shared.check_stream(self._scope, stream)
                    lane = self._lane(stream)
                    if not call.begun:
                        for each in pieces:
                            lane.check_columns(each)
                    call.begun = True
                    lane.write_columns(columns)
        return sum(columns.rows for columns in pieces)

    def _lane(self, stream: str, key: bytes | None = None) -> StreamLane:
        self._check_writable()
        deadline = self._shared.deadline(None)
        self._open(deadline)
        return self.touch(stream, deadline, key)

    def _check_writable(self) -> None:
        self._shared.check()
        if self._finished is not None:
            raise IllegalState("the writer is finished: join again to write more")
        self._check_not_over()

    # -- what was written -----------------------------------------------------------------------------

    def written_to(self, stream: str) -> int:
        """How many events this handle wrote to a stream so far."""
        lane = self._account.lanes.get(stream)
        return sum(account.count for account in lane.accounts.values()) if lane is not None else 0

    @property
    def written(self) -> int:
        """How many events this handle wrote to all streams so far."""
        return sum(self.written_to(stream) for stream in self._account.lanes)

    @property
    def has_touched(self) -> bool:
        """Whether a controller may know this writer: it has asked to touch a stream, perhaps without an answer."""
        return self._has_asked

    def flush(self, timeout: float | None = None) -> Receipt:
        """Wait until everything written is acknowledged, and register the receipt. More may be written after it.

        A writer that joined a reservation and wrote nothing gets an empty receipt, which is not registered.

        Raises: WriteFailed (join again and rewrite), DeadlineExceeded (repeating is safe), NotReady (a stream's
        journal is missing: repeating is safe), StreamLost (the journal won't come back), TransactionAborted,
        AlreadyCommitted, IllegalState, OutcomeUnknown (the transaction is being committed without this).
        """
        with self._lock:
            self._check_writable()
            return self._register(timeout, finished=False)

    def finish(self, timeout: float | None = None) -> Receipt:
        """`flush`, and mark this writer as finished. Later calls return the same receipt."""
        with self._lock:
            if self._finished is None:
                self._check_writable()
                self._finished = self._register(timeout, finished=True)
                self._free()
            return self._finished

    def acknowledged(self, deadline: float) -> tuple[bytes, r.Receipt]:
        """The token, and the unregistered receipt of all that was written. Raises: as `flush`.

        After `finish` the receipt is that of `finish`.
        """
        if self._finished is not None and self._token is not None:
            return self._token, self._finished.record
        with self._lock:
            self._check_not_over()
            self._open(deadline)
            self.store(deadline)
            if self._token is None:
                raise IllegalState("the transaction is not open")
            return self._token, self.receipt(finished=False)

    @traced("flush")
    def _register(self, timeout: float | None, *, finished: bool) -> Receipt:
        deadline = self._shared.deadline(timeout)
        self.store(deadline)
        record = self.receipt(finished=finished)
        if self._token is not None:  # otherwise nothing was written
            self._session.register(self._token, record, deadline)
        return Receipt(record)

    def receipt(self, *, finished: bool) -> r.Receipt:
        """The receipt of all that is acknowledged."""
        if finished:
            self._end_writing()
        return self._account.receipt(finished=finished, seen=self._session.highest_timestamp)

    def store(self, deadline: float) -> None:
        """Wait until everything written is acknowledged. Raises: as `flush`."""
        try:
            while True:
                try:
                    self._account.flush(deadline)
                except JournalMissing as missing:
                    self._ask_about(missing, deadline)
                else:
                    return
        except (WriteFailed, StreamLost) as error:
            self._end(error)
            raise

    def _ask_about(self, missing: JournalMissing, deadline: float) -> None:
        """Raise `StreamLost` if the journal is missing because its stream is LOST or deleted.

        Otherwise return, so that the caller tries again; raise `NotReady` at the deadline.
        """
        lanes = self._account.lanes.values()
        stream = next(lane.stream for lane in lanes if lane.topic == missing.topic)
        try:
            state = self._session.describe(stream, deadline).state
        except UnknownStream:
            state = FORGOTTEN
        if state not in (ACTIVE, WAITING):
            raise StreamLost(
                f"{stream} is {state}: somebody deleted its journal, and what was written there is gone; "
                "begin a new transaction, without that stream"
            ) from missing
        if self._session.now() >= deadline:
            raise NotReady(f"{stream}: {missing}") from missing

    # -- its end --------------------------------------------------------------------------------------

    def discard(self) -> None:
        """Drop unflushed writes. A commit that does not name this writer's receipt omits flushed writes, too."""
        with self._lock:
            if self._finished is None and self._over is None:
                self._end(IllegalState("the writer was discarded"))
            self._free()

    def _free(self) -> None:
        """Drop unflushed writes, and free the journal writer."""
        self._end_writing()
        self._hot.clear()
        self.beating = False
        if not self._shared.forked:
            self._account.journal.discard()

    def _end(self, error: AnabranchError) -> None:
        """Make every later call raise this error."""
        self._over = error
        self._hot.clear()
        self.beating = self.beating and isinstance(error, WriteFailed)

    def _end_in_between(self, error: BaseException, call: str) -> None:
        with self._lock:
            if self._over is None:
                self._end(left_early(error, call))

    def _check_not_over(self) -> None:
        if self._over is not None:
            raise again(self._over)

    @property
    def live_token(self) -> bytes | None:
        """As `Handle.live_token`."""
        return self._token if self.beating else None

    def gone(self, outcome: r.Outcome) -> None:
        """As `Handle.gone`."""
        if self.beating:
            self._end(end_of(outcome))

    def client_closes(self) -> None:
        """As `Handle.client_closes`."""
        self.beating = False
        self._hot.clear()

    def after_fork(self) -> None:
        """As `Handle.after_fork`."""
        self._lock = here().lock()
        self._hot = {}


def join(
    shared: Shared, transaction: bytes | Reservation, *, heartbeat: bool, label: str = ""
) -> Writer:
    """A writer of a transaction, given its token or reservation. Arguments and errors: as of `Client.join`."""
    check_type("a label", label, str)
    LABEL.check(len(label), "the label of a writer")
    claims: Reservation | Token
    reserved = None
    if isinstance(transaction, Reservation):
        claims = reserved = transaction
    else:
        claims = peek(transaction)
        check_right(claims, Rights.WRITE)
        if heartbeat:
            check_right(claims, Rights.HEARTBEAT)
        shared.session.observe(claims.seen)
    writer = Writer(
        shared,
        claims.scope,
        claims.txn_id,
        claims.keepalive_ms,
        heartbeat=heartbeat,
        label=label,
        reserved=reserved,
        trace=shared.new_trace(),
    )
    if not isinstance(transaction, Reservation):
        writer.opened(transaction)
    return writer


def chunks_of(events: Iterable[EventFields]) -> Iterator[list[EventFields]]:
    """Chunks for `write_many`: first one event, whose refusal does no harm, then a thousand events at a time."""
    source = iter(events)
    at_once = 1
    while chunk := list(islice(source, at_once)):
        yield chunk
        at_once = _AT_ONCE


class AllOrNothing:
    """The ``with`` block of a call that writes all or nothing: an exception ends its handle once ``begun`` is set.

    ``end``: makes every later call of the handle raise an error that names the exception and the call.
    """

    def __init__(
        self, call: str, end: Callable[[BaseException, str], None], *, begun: bool = False
    ) -> None:
        self._call, self._end, self.begun = call, end, begun

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.begun:
            self._end(error, self._call)


def left_early(error: BaseException, call: str) -> WriteFailed:
    """The error of a handle after a call that wrote only a part of its events."""
    if isinstance(error, WriteFailed):
        return error
    return WriteFailed(
        f"{call} was left by {type(error).__name__}: not all of its events were written"
    )


def end_of(outcome: r.Outcome) -> AnabranchError:
    """The error of a handle whose transaction is over, from the outcome that a heartbeat returned."""
    if outcome.state == "COMMITTED":
        return AlreadyCommitted("the transaction was committed elsewhere")
    if outcome.broken is not None:
        return locks_broken(outcome.broken)
    why = outcome.reason or outcome.state
    return TransactionAborted(f"the transaction is aborted ({why}): begin a new one")


def again(error: AnabranchError) -> AnabranchError:
    """A copy of an error, to raise it again: an error that is raised repeatedly collects tracebacks."""
    copy = type(error)(str(error))
    copy.__dict__.update(error.__dict__)
    return copy
