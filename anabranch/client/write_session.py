"""Sessions: rows that a client writes one by one, and that are committed in this order, many in a request.

A session's requests are one-shots. Several are under way, and each names the one before it (`OneShot.follows`), so
none is committed unless that one is. A request that is refused for a row is halved until the row is found. Requests
that were sent after it were refused with it, and are sent again under their ids, once it has an outcome.
So the order is kept, and no row is committed twice (``docs/inside/decisions/0064-sessions.md``).

The file is long because the ways in which a request may end, and the order among requests, are one subject.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self, get_args, overload

from anabranch.backoff import Backoff
from anabranch.client.session import Copy
from anabranch.client.shared import Shared
from anabranch.core.stream_settings import MAX_MESSAGE, is_table
from anabranch.errors import (
    AnabranchError,
    AskOutcomeError,
    BeginAgainError,
    ClockSkew,
    DeadlineExceeded,
    DerivationMissing,
    Expired,
    FeatureNotEnabled,
    FixCallError,
    IllegalState,
    InvalidArgument,
    MalformedRecord,
    NotAuthorized,
    OutcomeUnknown,
    RetryError,
    RowsFailed,
    SessionFull,
    StreamLost,
    TransactionAborted,
    UnknownScope,
    UnknownStream,
    UnsupportedVersion,
    count_of,
)
from anabranch.protocol import defaults, limits
from anabranch.protocol.legal_names import check_type, is_state, split_stream
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.fast import EncodedEvents, encoded_event, event_head, read_events
from anabranch.types import Headers, K, RowError, V
from anabranch.values import Stream, encoded
from anabranch.waits import Job, here

log = logging.getLogger("anabranch.client")

Flush = Literal["sync", "background", "manual"]
# These refusals hold for each row of the stream, so no row is looked for.
_OF_STREAM = (DerivationMissing, NotAuthorized, StreamLost, UnknownScope, UnknownStream)
_NO_FEATURE = (FeatureNotEnabled, UnsupportedVersion)
# These have nothing to do with a row.
_OF_ALL = (ClockSkew, Expired, FeatureNotEnabled)
_UNREADABLE = (MalformedRecord, UnsupportedVersion)  # the answer, perhaps
_MOST_STREAMS = 10_000


def _exact(value: bytes | None) -> bytes | None:
    """The same bytes, not of a subclass."""
    return None if value is None else bytes(value)


def _were(rows: int) -> str:
    return "was" if rows == 1 else "were"


class _Rows(EncodedEvents):
    """The rows of a request, encoded."""

    __slots__ = ("_count", "payload")

    def __init__(self, rows: Sequence[bytes]) -> None:
        self.payload = b"".join(rows)
        self._count = len(rows)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        return self._read()[at]

    def __iter__(self) -> Iterator[r.Event]:
        return iter(self._read())

    def _read(self) -> tuple[r.Event, ...]:
        return read_events(self.payload, 0, self._count)[0]


class _Place(NamedTuple):
    """The place of a stream's rows, and their limits.

    ``head``: the first fields of a row with a key; ``keyless``: of rows without one, by segment. ``most``: bytes of
    a row. ``until``: when the segments are to be asked for again.
    """

    partition: int
    scope: str
    head: bytes
    keyless: Sequence[bytes]
    is_table: bool
    most: int
    until: float


@dataclass(eq=False, slots=True)
class _Request:
    """Rows that are committed together. ``first``: the number of the first one.

    ``txn_id``: kept until it is certain that no copy of the command is carried out. ``in_doubt``: a copy of an
    earlier try may yet be carried out.
    """

    partition: int
    scope: str
    first: int
    rows: list[bytes] = field(default_factory=list)
    size: int = 0
    begun: float = 0.0
    txn_id: bytes | None = None
    in_doubt: bool = False
    command: r.OneShot | None = None
    posted: Copy | None = None


class _Sender:
    """Sends the rows of a session in order. One caller at a time sends: `pump`.

    ``ended``: how many rows have an outcome; these are the first ones. ``held``: bytes of all others.
    """

    def __init__(self, shared: Shared, most_bytes: int) -> None:
        self._shared, self._session = shared, shared.session
        self._most_bytes, self._most_rows = most_bytes, limits.EVENTS.value
        # Guards all that `add` changes; held for a few lines. The garbage collector may call `stop` inside of them.
        self._guard = threading.RLock()
        self._pumping = here().lock()
        self._is_pumping = False
        self._changed = here().condition()
        self._open: _Request | None = None
        self._queue: deque[_Request] = deque()
        self._under_way: deque[_Request] = deque()
        self._is_broken = False  # what is under way follows a request that was not committed
        self._most_under_way = defaults.SESSION_IN_FLIGHT
        self._pauses = self._backoff()
        self.count = self.ended = self.held = 0
        self.errors: dict[int, RowError] = {}
        self.failed = 0
        self._awaited: dict[int, RowError | None] = {}  # rows whose callers wait for their errors
        self.trouble: AnabranchError | None = None
        self.is_stopped = False

    # -- rows -----------------------------------------------------------------------------------------

    def add(self, place: _Place, row: bytes, *, alone: bool = False) -> tuple[int, bool]:
        """Take a row. Returns its number, and whether a request is now full.

        ``alone``: in a request of its own; its error is for `take_error`.
        """
        size = len(row)
        with self._guard:
            request, sealed = self._open, False
            if request is not None and (
                request.partition != place.partition
                or request.size + size > self._most_bytes
                or len(request.rows) == self._most_rows
            ):
                self._queue_open()
                request, sealed = None, True
            is_new = request is None
            if request is None:
                now = self._session.now()
                request = self._open = _Request(place.partition, place.scope, self.count, begun=now)
            request.rows.append(row)
            request.size += size
            self.held += size
            number = self.count
            self.count = number + 1
            if alone:
                self._awaited[number] = None
                self._queue_open()
                sealed = True
        if sealed or is_new:
            self.notify()
        return number, sealed

    def seal(self) -> int:
        """Queue the request that still takes rows. Returns the number of rows so far."""
        with self._guard:
            self._queue_open()
            return self.count

    def _queue_open(self) -> None:
        if self._open is not None:
            self._queue.append(self._open)
            self._open = None

    def notify(self) -> None:
        """Wake all callers of `wait` and `has_room`, and the job."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, until_ended: int, deadline: float) -> bool:
        """Wait until this number of rows have an outcome. Returns False at the deadline."""
        with self._changed:
            while self.ended < until_ended and not self.is_stopped:
                left = deadline - self._session.now()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return self.ended >= until_ended

    def has_room(self, deadline: float) -> bool:
        """Wait until more rows may be taken. Returns False at the deadline."""
        with self._changed:
            while self.held > defaults.SESSION_BYTES and not self.is_stopped:
                left = deadline - self._session.now()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def take_errors(self) -> tuple[tuple[RowError, ...], int]:
        """Remove and return the errors, by row, and their number."""
        with self._guard:
            found, count = tuple(self.errors[n] for n in sorted(self.errors)), self.failed
            self.errors, self.failed = {}, 0
        return found, count

    def take_error(self, number: int) -> RowError | None:
        """The error of a row that was added alone; later its error is among those of `take_errors`."""
        with self._guard:
            return self._awaited.pop(number, None)

    def stop(self) -> str:
        """Send nothing more. Returns, in words, what is not committed for certain; empty: all have an outcome."""
        with self._guard:
            self.is_stopped = True
            sent = sum(len(each.rows) for each in list(self._under_way) if each.txn_id is not None)
            unsent = self.count - self.ended - sent
        if not self._is_pumping:  # else `pump` does it
            self._forget()
        self.notify()
        said = [f"{count_of(unsent, 'row')} {_were(unsent)} not sent"] if unsent else []
        said += [f"{count_of(sent, 'row')} may be committed"] if sent else []
        return f"{' and '.join(said)} (from row {self.ended} on)" if said else ""

    # -- sending --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Send rows when they fill a request, or are old enough: the job of a session in the background."""
        while not self.is_stopped and not self._shared.closed:
            with self._changed:
                left = self._due_in()
                if left > 0:
                    self._changed.wait(left)
                    continue
            with self._guard:
                if not self._queue:
                    self._queue_open()
            self._try(self.count, self._shared.deadline(None))

    def _due_in(self) -> float:
        """Seconds until something is to be sent."""
        with self._guard:
            if self._queue or self._under_way:
                return 0.0
            if self._open is None:
                return threading.TIMEOUT_MAX
            return self._open.begun + defaults.SESSION_FLUSH_S - self._session.now()

    def _try(self, ended: int, deadline: float) -> bool:
        """`pump`, and pause after an error that may pass. Returns False at the deadline."""
        try:
            self.pump(ended, deadline)
        except (RetryError, AskOutcomeError) as error:
            self.trouble = error
            return self._pauses.sleep(deadline)
        self._pauses.reset()
        return True

    def pump_until(self, ended: int, deadline: float) -> bool:
        """Send until this number of rows have an outcome. Returns False at the deadline."""
        while self.ended < ended and not self.is_stopped:
            if self._session.now() >= deadline or not self._try(ended, deadline):
                break
        return self.ended >= ended

    def _backoff(self) -> Backoff:
        return Backoff(defaults.FIRST_RETRY_S, defaults.LONGEST_RETRY_S, self._shared.ports.clock)

    def pump(self, ended: int, deadline: float) -> None:
        """Send the requests in the queue until this number of rows have an outcome, or the queue is empty.

        Raises: RetryError, AskOutcomeError. Then the next call continues.
        """
        left = max(0.0, deadline - self._session.now())
        if not self._pumping.acquire(timeout=min(left, threading.TIMEOUT_MAX)):
            raise DeadlineExceeded("another call sends the session's rows")
        self._is_pumping = True
        try:
            while self.ended < ended and not self.is_stopped and self._fill(deadline):
                self._finish(self._under_way[0], deadline)
        finally:
            self._is_pumping = False
            if self.is_stopped:
                self._forget()
            self._pumping.release()

    def _forget(self) -> None:
        """Drop the answers to requests that are under way: no caller waits for them any more."""
        for request in list(self._under_way):
            if request.posted is not None:
                self._session.forget(request.posted.correlation_id)

    def _fill(self, deadline: float) -> bool:
        """Post requests, each following the one before. Returns whether any is under way."""
        under_way = self._under_way
        if not under_way:
            self._is_broken = False
        while not self._is_broken and len(under_way) < self._most_under_way:
            with self._guard:
                if not self._queue or self.is_stopped:
                    break
                # Order between control partitions: a request waits until the other has committed all before.
                if under_way and under_way[-1].partition != self._queue[0].partition:
                    break
                request = self._queue.popleft()
                under_way.append(request)
                self._is_broken = True  # unless it is sent
            before = under_way[-2].txn_id if len(under_way) > 1 else None
            with suppress(AnabranchError):  # when its turn comes, the error comes again
                request.posted = self._session.post(self._made(request, before, deadline), deadline)
                self._is_broken = False
        return bool(under_way)

    def _made(self, request: _Request, before: bytes | None, deadline: float) -> r.OneShot:
        """The request's command. ``before``: the transaction that it follows, which may be under way."""
        follows = () if before is None else (r.FollowedRows(before, "", ()),)
        if request.txn_id is None:
            txn_id = self._session.new_txn_id(request.scope, deadline)
            with self._guard:
                if self.is_stopped:  # `stop` has said that it was not sent
                    raise IllegalState("the session was closed meanwhile")
                request.txn_id = txn_id
            request.command, request.in_doubt = None, False
        if request.command is None:
            request.command = r.OneShot(
                request.txn_id,
                request.scope,
                None,
                _Rows(request.rows),  # type: ignore[arg-type] # events, encoded
                None,
                (),
                (),
                follows,
            )
        else:
            request.command = request.command._replace(follows=follows)
        return request.command

    def _finish(self, request: _Request, deadline: float) -> None:
        """Wait for the answer to the oldest request under way, and act on it. Raises: as `pump`."""
        posted, request.posted = request.posted, None
        command = request.command if posted is not None else None
        try:
            if command is None:
                command = self._made(request, None, deadline)  # all before it have an outcome
            answer = self._session.locked_shot(command, deadline, posted)
        except (RetryError, AskOutcomeError):
            self._is_broken = request.in_doubt = True
            raise
        except AnabranchError as error:
            self._is_broken = True
            if self._shared.closed or self._shared.forked or self.is_stopped:
                raise OutcomeUnknown(str(error)) from error
            self._refused(request, command, error, deadline)
            return
        except BaseException:  # the caller was interrupted, or cancelled: the next one continues
            self._is_broken = request.in_doubt = True
            raise
        if isinstance(answer, r.Revalidate):
            # The request that it followed was not committed then, and has an outcome now.
            self._is_broken = request.in_doubt = True
            return
        self._end(request)

    def _refused(
        self,
        request: _Request,
        command: r.OneShot | None,
        error: AnabranchError,
        deadline: float,
    ) -> None:
        """Act on a refusal, once it is certain that no copy of the request was or will be carried out."""
        if isinstance(error, TransactionAborted):  # RESOLVE has ended the id, as no answer had come
            request.txn_id = None
            return
        if request.txn_id is not None and (request.in_doubt or isinstance(error, _UNREADABLE)):
            try:
                found = self._session.resolve(request.txn_id, request.scope, None, deadline)
            except (BeginAgainError, FixCallError) as trouble:
                said = f"the row may be committed: {trouble}"
                self._fail(request, OutcomeUnknown(said, txn_id=request.txn_id))
                return
            if found.state == "COMMITTED":
                self._end(request)
                return
            request.txn_id = None
        if isinstance(error, _NO_FEATURE) and command is not None and command.follows:
            self._most_under_way = 1  # the leader can't keep the order of several
            return
        streams = {event.stream for event in _Rows(request.rows)}
        of_all = isinstance(error, _OF_ALL) or (isinstance(error, _OF_STREAM) and len(streams) == 1)
        if len(request.rows) == 1 or of_all:
            self._fail(request, error)
        else:
            self._halve(request)

    def _halve(self, request: _Request) -> None:
        middle = len(request.rows) // 2
        halves = [
            _Request(request.partition, request.scope, request.first, request.rows[:middle]),
            _Request(
                request.partition, request.scope, request.first + middle, request.rows[middle:]
            ),
        ]
        for half in halves:
            half.size = sum(map(len, half.rows))
        with self._guard:
            self._under_way.popleft()
            self._under_way.extendleft(reversed(halves))

    def _fail(self, request: _Request, error: AnabranchError) -> None:
        with self._guard:
            for number, event in enumerate(_Rows(request.rows), request.first):
                key = None if event.key is None else event.key[: limits.ROW_KEY.value]
                found = RowError(number, event.stream, key, error)
                if number in self._awaited:
                    self._awaited[number] = found
                    continue
                self.failed += 1
                if len(self.errors) < defaults.SESSION_ERRORS:
                    self.errors[number] = found
        self._end(request)

    def _end(self, request: _Request) -> None:
        """Note that the rows of the oldest request under way have an outcome."""
        with self._guard:
            self._under_way.popleft()
            self.ended += len(request.rows)
            self.held -= request.size
        self.trouble = None
        self.notify()


class WriteSession:
    """Rows that are committed in the order in which they were written, by `Client.session`. Thread-safe.

        with client.session() as session:
            session.apply("shop/clicks", b"value", key=b"key")
            session.put("shop/prices", b"key", b"row")

    Each row commits by itself; no other row's failure undoes it. Leaving the ``with`` block sends all rows, and
    raises `RowsFailed` if some of them were refused. After an exception in the block, rows that were not sent yet
    are dropped, and a warning in the log has their number.
    """

    keepalive_ms = 0
    live_token: bytes | None = None

    def __init__(self, shared: Shared, flush: Flush, *, threads: bool) -> None:
        if flush not in get_args(Flush):
            raise InvalidArgument(f"flush {flush!r}: one of {', '.join(get_args(Flush))}")
        self._shared, self._session, self._mode = shared, shared.session, flush
        self._now = shared.ports.clock.monotonic
        self._places: dict[str, _Place] = {}
        self._turn = 0  # of rows without a key
        self._is_closed = False
        most = min(shared.one_shot_bytes, defaults.ONE_SHOT_BYTES)
        self._sender = _Sender(shared, most)
        self._job: Job | None = None
        if flush == "background" and threads:
            self._job = here().start("anabranch-session", self._sender.run)
        shared.handles.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if self._shared.forked:
            return
        if error is None:
            self.close()
        else:
            self._stop(f"left by {type(error).__name__}")

    def __del__(self) -> None:
        if hasattr(self, "_sender") and not self._shared.forked:
            self._stop("dropped without close")

    def __repr__(self) -> str:
        return f"<WriteSession {self._mode}, {count_of(self._sender.count, 'row')}>"

    @overload
    def apply(
        self,
        stream: str,
        value: bytes | None = None,
        key: bytes | None = None,
        headers: Headers | None = None,
        timestamp: int | None = None,
    ) -> int: ...

    @overload
    def apply(
        self,
        stream: Stream[K, V],
        value: V | None = None,
        key: K | None = None,
        headers: Headers | None = None,
        timestamp: int | None = None,
    ) -> int: ...

    def apply(
        self,
        stream: Any,
        value: Any = None,
        key: Any = None,
        headers: Headers | None = None,
        timestamp: int | None = None,
    ) -> int:
        """Write an event, or a row of a table. Returns the row's number in this session: 0, 1, …

        Arguments are those of `Transaction.write`. With ``flush="sync"`` the row is committed when the call
        returns; else `flush` reports what the controller refuses.

        Raises, and the session does not take the row: InvalidArgument (also for a table that is derived, or the
        source of a derivation), EventTooLarge, UnknownStream, UnknownScope; NonTransactional (inside the ``with``
        block of an open transaction); SessionFull (in the background after the client's timeout); IllegalState (it
        is closed). With "sync": the row's own error; DeadlineExceeded (the session has the row, and `flush`
        continues).
        """
        if type(stream) is not str:
            stream, value, key = encoded(stream, value, key)
        shared = self._shared
        if self._is_closed or shared.closed or shared.forked:
            self._check()
        shared.check_outside("a session's write")
        place = self._places.get(stream) if type(stream) is str else None
        if place is None or self._now() >= place.until:
            place = self._place(stream)
        if type(key) is not bytes or type(value) is not bytes:
            limits.check_event(key, value, None)
            key, value = _exact(key), _exact(value)
        size = len(key or b"") + len(value or b"")
        pairs = None
        if headers is not None:
            pairs = limits.check_headers(headers)
            size += sum(len(name.encode()) + len(data or b"") for name, data in pairs or ())
        if timestamp is not None:
            shared.check_time(stream, timestamp)
        if place.is_table:
            limits.check_row_key(key)
        if size > place.most:
            limits.check_bytes(size, place.most, stream)
        head = place.head if key is not None else self._keyless(place)
        row = encoded_event(head, key, value, pairs, timestamp or -1)
        return self._add(place, row)

    @overload
    def put(self, table: str, key: bytes, value: bytes) -> int: ...

    @overload
    def put(self, table: Stream[K, V], key: K, value: V) -> int: ...

    def put(self, table: Any, key: Any, value: Any) -> int:
        """Write a row of a table, whether the key has one or not. Returns and raises: as `apply`."""
        if type(table) is not str:
            table, value, key = encoded(table, value, key)
        if not isinstance(value, bytes):
            raise InvalidArgument(
                f"a row is bytes, not {type(value).__name__}; `delete` takes it away"
            )
        return self.apply(self._table(table), value, key)

    @overload
    def delete(self, table: str, key: bytes) -> int: ...

    @overload
    def delete(self, table: Stream[K, Any], key: K) -> int: ...

    def delete(self, table: Any, key: Any) -> int:
        """Delete a row of a table if it exists. Returns and raises: as `apply`."""
        if type(table) is not str:
            table, _, key = encoded(table, None, key)
        return self.apply(self._table(table), None, key)

    def _table(self, name: str) -> str:
        if not self._place(name).is_table:
            raise InvalidArgument(
                f"{name} is a stream, not a table: use `apply`, or make a table with `create_table`"
            )
        return name

    def _add(self, place: _Place, row: bytes) -> int:
        sender = self._sender
        if sender.held > defaults.SESSION_BYTES:
            self._make_room()
        number, sealed = sender.add(place, row, alone=self._mode == "sync")
        if self._mode == "sync":
            deadline = self._shared.deadline(None)
            try:
                done = sender.pump_until(number + 1, deadline)
            finally:
                failed = sender.take_error(number)
            if failed is not None:
                raise failed.error
            if not done:
                raise self._late()
        elif sealed and self._mode == "background" and self._job is None:
            sender.pump_until(number, self._shared.deadline(None))
        return number

    def _make_room(self) -> None:
        sender = self._sender
        waits = self._mode == "background" and self._job is not None
        if waits and sender.has_room(self._shared.deadline(None)):
            self._check()
            return
        said = f" ({sender.trouble})" if sender.trouble is not None else ""
        raise SessionFull(
            f"the session holds {sender.held:,} bytes of rows that are not committed yet{said}: `flush` it, or try "
            "again later"
        )

    def _keyless(self, place: _Place) -> bytes:
        """The first fields of a row without a key: such rows go to the segments in turn."""
        self._turn += 1
        return place.keyless[self._turn % len(place.keyless)]

    def _place(self, stream: str) -> _Place:
        """The places of a stream's rows, known for less than about half a minute. Raises: as `apply`."""
        if type(stream) is not str:
            check_type("a stream, scope/name,", stream, str)
        place = self._places.get(stream)
        if place is None:
            return self._learned(stream)
        now = self._now()
        if now >= place.until:
            try:
                place = self._learned(stream, min(defaults.SESSION_ASK_S, self._shared.timeout))
            except RetryError:  # the session takes rows while no controller answers
                place = self._places[stream] = place._replace(
                    until=now + defaults.SESSION_ASK_AGAIN_S
                )
        return place

    def _learned(self, stream: str, timeout: float | None = None) -> _Place:
        """Ask where the rows of a stream go. Raises: as `apply`."""
        shared, session = self._shared, self._session
        deadline = shared.checked_deadline(timeout)
        scope, _ = split_stream(stream)
        stream = str.__str__(stream)  # not of a subclass
        if is_state(stream):
            raise InvalidArgument(f"{stream} is a processor's state: use `write_state`")
        partition = session.find_scope(scope, deadline)
        segments = shared.layout(stream, deadline)
        until, found = shared.streams[stream]
        settings = {} if found is None else found.settings
        needs = shared.derivations.learn(stream, settings)
        if needs.derived is not None:
            raise InvalidArgument(
                f"{stream} is derived from {needs.derived.of.source}: write to that, and its rows follow"
            )
        if needs.in_force:
            raise InvalidArgument(
                f"{stream} is the source of derivation {needs.in_force[0].name!r}, which needs the rows before: "
                "write to it by a replica's `transact`"
            )
        if len(self._places) >= _MOST_STREAMS:
            self._places.clear()
        place = self._places[stream] = _Place(
            partition,
            scope,
            event_head(stream, -1),
            [event_head(stream, each.segment_id) for each in segments],
            is_table(settings),
            int(settings.get(MAX_MESSAGE, limits.MESSAGE.value)) - limits.FRAMING,
            until,
        )
        return place

    # -- ending ---------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all rows that were written before are committed, or refused.

        Raises:
            RowsFailed: with an error for each row that was refused since the last call; all others are committed.
            DeadlineExceeded: rows are left, which the session sends later, or in the next call.
            NonTransactional, IllegalState, NotForkSafe.
        """
        self._check()
        deadline = self._shared.deadline_outside("flush of a session", timeout)
        sender = self._sender
        ended = sender.seal()
        sender.notify()
        is_served = self._job is not None and self._job.is_alive()
        ends = sender.wait if is_served else sender.pump_until
        if not ends(ended, deadline):
            raise self._late()
        failed = self._failed()
        if failed is not None:
            raise failed

    def _failed(self) -> RowsFailed | None:
        """The error with those of all rows that were refused since the last call."""
        errors, count = self._sender.take_errors()
        if not count:
            return None
        first = errors[0]
        failed = RowsFailed(
            f"{count_of(count, 'row')} of the session failed, the others are committed; row {first.number} of "
            f"{first.stream}: {first.error}"
        )
        failed.errors, failed.count = errors, count
        return failed

    def _late(self) -> DeadlineExceeded:
        """The error of a call that waits no longer. Raises: as `_check`, if the session was closed meanwhile."""
        self._check()
        sender = self._sender
        said = f" ({sender.trouble})" if sender.trouble is not None else ""
        left = sender.count - sender.ended
        rows = f"{count_of(left, 'row')} of the session {_were(left)} not committed yet"
        return DeadlineExceeded(f"{rows}{said}: flush again")

    def close(self, timeout: float | None = None) -> None:
        """`flush`, and end the session. Repeating the call is harmless.

        Raises: as `flush`. If rows are left at the deadline, `DeadlineExceeded` says how many were not sent, and
        how many may be committed; no more is sent. If rows were refused before, `RowsFailed` is its cause.
        """
        if self._is_closed:
            return
        try:
            self.flush(timeout)
        except RowsFailed:
            self._end()
            raise
        except DeadlineExceeded as error:
            left, failed = self._end(), self._failed()
            if left:
                raise self._cut_short(left, failed) from (failed or error)
            if failed is not None:
                raise failed from None
        self._end()

    def _cut_short(self, left: str, failed: RowsFailed | None) -> DeadlineExceeded:
        """The error of `close` at its deadline. ``left``: what is not committed for certain."""
        trouble = self._sender.trouble
        said = ""
        if failed is not None:
            said = f"; {count_of(failed.count, 'row')} failed: {failed.errors[0].error}"
        said += f" (last trouble: {trouble})" if trouble is not None else ""
        return DeadlineExceeded(f"the session is closed: {left}{said}")

    def _end(self) -> str:
        self._is_closed = True
        return self._sender.stop()

    def _stop(self, why: str) -> None:
        """Send nothing more, and say in the log what is not committed for certain."""
        if self._is_closed:
            return
        left = self._end()
        _, failed = self._sender.take_errors()
        if left:
            log.warning("%r is %s: %s", self, why, left)
        if failed:
            log.warning("%r is %s: %s failed", self, why, count_of(failed, "row"))

    def _check(self) -> None:
        self._shared.check()
        if self._is_closed:
            raise IllegalState("the session is closed: make a new one")

    # -- called by the client -------------------------------------------------------------------------

    def gone(self, outcome: r.Outcome) -> None:
        """As `Handle.gone`: a session has no open transaction."""

    def client_closes(self) -> None:
        """As `Handle.client_closes`."""
        self._stop("closed with its client")

    def after_fork(self) -> None:
        """As `Handle.after_fork`: all later calls raise."""
