"""The way of a write, which the handles `Transaction` and `Writer` share."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from anabranch.client.ports import Journals, JournalWriter
from anabranch.client.receipt_account import (
    EventFields,
    StreamLane,
    WriteFunction,
    WriterAccount,
    check_fields,
    check_layout,
    warn_of_seconds,
)
from anabranch.client.session import Session
from anabranch.core.legal_names import check_type, is_state
from anabranch.core.limits import (
    AHEAD_MS,
    check_ahead,
    check_event,
    check_headers,
    check_timestamp,
)
from anabranch.core.stream_settings import latest_time
from anabranch.core.stream_states import ACTIVE, FORGOTTEN, WAITING
from anabranch.core.transaction_states import locks_broken
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    IllegalState,
    InvalidArgument,
    NotForkSafe,
    NotReady,
    StreamLost,
    TransactionAborted,
    UnknownStream,
    WriteFailed,
)
from anabranch.extras import need
from anabranch.ports import JournalMissing, RecordHeaders
from anabranch.schemas.records import Outcome, Receipt, SegmentRange, StreamInfo
from anabranch.types import Headers

if TYPE_CHECKING:
    import pyarrow as pa

    from anabranch.batches.columns_write import EventColumns

Heart: TypeAlias = "Callable[[Handle], None]"

QUIET_S = 5.0  # most seconds for an abort while an exception is on its way
_LAYOUT_S = 30.0  # so long a layout is believed: others may scale the stream
_AT_ONCE = 1000  # events that write_many takes from its iterable before it writes them
_MOST_NAMES = 10_000  # of streams that are remembered: of a scope, and with a layout


@dataclass
class Shared:
    """The state that all handles of a client share."""

    session: Session
    journals: Journals
    timeout: float
    one_shot_bytes: int
    heart: Heart  # begins to send heartbeats for a handle
    handles: weakref.WeakSet[Handle] = field(default_factory=weakref.WeakSet)
    # When a stream's description expires, and the description; None: the client can't get it.
    streams: dict[str, tuple[float, StreamInfo | None]] = field(default_factory=dict)
    near_ms: int = 0  # times up to this one are not too far ahead for any stream
    legal: dict[str, set[str]] = field(default_factory=dict)  # by scope: streams beside it
    dropped: deque[JournalWriter] = field(default_factory=deque)  # of handles that are no more
    forked: bool = False
    closed: bool = False

    def check(self) -> None:
        """`NotForkSafe` in a forked child, `IllegalState` once closed."""
        if self.forked:
            raise NotForkSafe("this client was made before a fork: connect again in the child")
        if self.closed:
            raise IllegalState(
                "the client is closed, by itself if nothing refers to it: keep it while you use what it made"
            )

    def layout(self, stream: str, deadline: float) -> Sequence[SegmentRange]:
        """The stream's segments as they were some seconds ago. Raises: as `Session.describe`, MalformedRecord."""
        until, found = self.streams.get(stream, (0.0, None))
        if found is None or self.session.now() >= until:
            found = self.session.describe(stream, deadline)
            self.learn(stream, found)
        check_layout(stream, found.segments)
        return found.segments

    def learn(self, stream: str, found: StreamInfo | None) -> None:
        """Remember the stream's description for a while."""
        if len(self.streams) >= _MOST_NAMES:
            self.streams.clear()
        self.streams[stream] = self.session.now() + _LAYOUT_S, found

    def judge_time(self, stream: str, timestamp: int) -> None:
        """Raise `InvalidArgument` for a time too far ahead for the stream, if its settings can be known."""
        if timestamp <= self.near_ms:
            return
        now_ms = int(self.session.wall() * 1000)
        self.near_ms = now_ms + AHEAD_MS
        if timestamp <= self.near_ms:
            return
        self.check()
        until, found = self.streams.get(stream, (0.0, None))
        if self.session.now() >= until:
            found = None
            with suppress(AnabranchError):
                found = self.session.describe(stream, self.deadline(None))
            self.learn(stream, found)
        if found is not None:
            check_ahead(timestamp, latest_time(found.settings, now_ms), stream)

    def deadline(self, timeout: float | None) -> float:
        """The monotonic second at which a call that begins now ends."""
        seconds = self.timeout if timeout is None else timeout
        check_type("a timeout, in seconds,", seconds, int, float)
        if not 0 <= seconds < 1e9:
            raise InvalidArgument(f"timeout {seconds!r}: seconds, 0 or more")
        return self.session.now() + seconds


class Handle:
    """One writer of one transaction."""

    def __init__(self, shared: Shared, scope: str, keepalive_ms: int) -> None:
        self._shared = shared
        self._session = shared.session
        self._scope = scope
        self._lock = threading.RLock()
        self._hot: dict[str, WriteFunction] = {}
        self._account: WriterAccount | None = None
        self._token: bytes | None = None
        self._over: AnabranchError | None = None
        self._legal = shared.legal.setdefault(scope, set())
        self._label = ""  # still to be told
        self.keepalive_ms = keepalive_ms
        self.beating = False
        shared.handles.add(self)

    @property
    def cluster(self) -> str:
        """As `Client.cluster`."""
        return self._session.cluster(self._shared.deadline(None))

    def _new_account(self, txn_id: bytes) -> WriterAccount:
        """The account of a new writer. Journal writers of handles that are no more are freed before."""
        while self._shared.dropped:
            self._shared.dropped.popleft().discard()
        journal = self._shared.journals.writer()
        # The collector may come in the middle of anything, so it notes the writer and takes no lock.
        weakref.finalize(self, self._shared.dropped.append, journal).atexit = False
        return WriterAccount(txn_id, self._session.random64(), journal)

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
            check_timestamp(timestamp)
            warn_of_seconds(timestamp)
            self._shared.judge_time(stream, timestamp)
        with self._lock:
            try:
                hot = self._hot.get(stream)
                if hot is not None:
                    hot(key, value, pairs, timestamp)
                else:
                    self._shared.check()
                    check_event(key, value, timestamp)
                    self._check_stream(stream)
                    self._write_cold(stream, key, value, pairs, timestamp)
            except TypeError:
                check_event(key, value, timestamp)
                raise
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
        source = iter(events)
        written = 0
        for event in islice(source, 1):
            check_fields(event)
            self.write(stream, *event)
            written = 1
        try:
            while chunk := list(islice(source, _AT_ONCE)):
                with self._lock:
                    self._write_chunk(stream, chunk)
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
        need("pyarrow", "numpy")
        from anabranch.client.arrow import columns_of

        pieces, begun = columns_of(batch), False
        latest = max((int(piece.timestamps.max(initial=0)) for piece in pieces), default=0)
        self._shared.judge_time(stream, latest)
        try:
            for columns in pieces:
                with self._lock:
                    self._shared.check()
                    self._check_stream(stream)
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

    def _lane(self, stream: str, pieces: Sequence[EventColumns]) -> StreamLane | None:
        """The lane into a stream; None: few events, kept in memory. Raises as `write`."""
        raise NotImplementedError

    def _write_chunk(self, stream: str, chunk: Sequence[EventFields]) -> None:
        if self._account is None or stream not in self._hot:
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

    def _end_in_between(self, error: BaseException, call: str) -> None:
        with self._lock:
            if self._over is None:
                if not isinstance(error, WriteFailed):
                    error = WriteFailed(
                        f"{call} was left by {type(error).__name__}: not all of its events were written"
                    )
                self._end(error)

    def _write_cold(
        self,
        stream: str,
        key: bytes | None,
        value: bytes | None,
        headers: RecordHeaders | None,
        timestamp: int | None,
    ) -> None:
        raise NotImplementedError

    def _check_stream(self, stream: str) -> None:
        if stream not in self._legal:
            self._session.check_together((stream,), self._shared.deadline(None), beside=self._scope)
            if is_state(stream):
                raise InvalidArgument(f"{stream} is a processor's state: use `write_state`")
            if len(self._legal) >= _MOST_NAMES:
                self._legal.clear()
            self._legal.add(stream)

    def _touch(self, stream: str, deadline: float) -> StreamLane:
        """The lane into a stream; its first use registers the stream with the transaction."""
        if self._account is None or self._token is None:
            raise IllegalState("the transaction is not open")
        lane = self._account.lanes.get(stream)
        if lane is None:
            touched = self._session.touch(self._token, stream, self._account.writer, deadline)
            check_layout(stream, touched.segments)
            if self._label:  # its writer is known by its touch
                self._session.label(self._token, self._account.writer, self._label, deadline)
                self._label = ""
            lane = self._account.add(touched, deadline)
            lane.judge_time = partial(self._shared.judge_time, stream)
        return lane

    def written_to(self, stream: str) -> int:
        """How many events this handle wrote to a stream so far."""
        lane = self._account.lanes.get(stream) if self._account is not None else None
        return sum(account.count for account in lane.accounts.values()) if lane is not None else 0

    def acknowledged(self, deadline: float) -> tuple[bytes, Receipt]:
        """A token, and the receipt of all that was written; it is not registered. Raises: as a flush."""
        with self._lock:
            self._check_not_over()
            self._open(deadline)
            self._flush(deadline)
            if self._account is None or self._token is None:
                raise IllegalState("the transaction is not open")
            seen = self._session.highest_timestamp
            return self._token, self._account.receipt(finished=False, seen=seen)

    def _open(self, deadline: float) -> None:
        raise NotImplementedError

    def _flush(self, deadline: float) -> None:
        if self._account is None:
            return
        try:
            while True:
                try:
                    self._account.flush(deadline)
                except JournalMissing as missing:
                    self._ask_about(missing, self._account, deadline)
                else:
                    return
        except (WriteFailed, StreamLost) as error:
            self._end(error)
            raise

    def _ask_about(self, missing: JournalMissing, account: WriterAccount, deadline: float) -> None:
        """Raise `StreamLost` if the missing journal's stream is given up.

        Before the deadline it returns otherwise, and the caller asks again; at the deadline: `NotReady`.
        """
        stream = next(lane.stream for lane in account.lanes.values() if lane.topic == missing.topic)
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

    @property
    def identity(self) -> tuple[bytes, int]:
        """The token, and the writer. `IllegalState`: it is not open; as `write`: it is over."""
        self._check_not_over()
        if self._token is None or self._account is None:
            raise IllegalState("the transaction is not open")
        return self._token, self._account.writer

    # -- its end --------------------------------------------------------------------------------------

    def _end(self, error: AnabranchError) -> None:
        """Let every later call raise this error."""
        self._over = error
        self._hot.clear()
        self.beating = self.beating and isinstance(error, WriteFailed)

    def _check_not_over(self) -> None:
        if self._over is not None:
            raise _again(self._over)

    def _discard(self) -> None:
        """Drop writes that are not flushed, if there are any, and free the journal writer."""
        self._hot.clear()
        self.beating = False
        if self._account is not None and not self._shared.forked:
            self._account.journal.discard()

    def gone(self, outcome: Outcome) -> None:
        """Called by the heart's thread: a heartbeat's answer says that the transaction is over."""
        if not self.beating:
            return
        if outcome.state == "COMMITTED":
            self._end(AlreadyCommitted("the transaction was committed elsewhere"))
        elif outcome.broken is not None:
            self._end(locks_broken(outcome.broken))
        else:
            why = outcome.reason or outcome.state
            self._end(TransactionAborted(f"the transaction is aborted ({why}): begin a new one"))

    def client_closes(self) -> None:
        """Called by the client's `close`: later writes raise."""
        self.beating = False
        self._hot.clear()

    @property
    def live_token(self) -> bytes | None:
        """The token to send heartbeats for, None if there is nothing to keep alive."""
        return self._token if self.beating else None

    def after_fork(self) -> None:
        """In a forked child: no call may reach the parent's connections or wait for its locks."""
        self._lock = threading.RLock()
        self._hot = {}


def _again(error: AnabranchError) -> AnabranchError:
    """A fresh copy to raise: one error raised twice would collect tracebacks."""
    copy = type(error)(str(error))
    copy.__dict__.update(error.__dict__)
    return copy
