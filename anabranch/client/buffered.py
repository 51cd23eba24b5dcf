"""Writes of a transaction that stay in memory until it is one command, or opens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anabranch.client.handle import Handle, Shared
from anabranch.client.receipt_account import StateRow, StreamLane
from anabranch.client.reservation import WRITER, RightNames, narrow_at
from anabranch.core.legal_names import check_type, is_state
from anabranch.core.limits import EVENTS, headers_size
from anabranch.core.tokens import TokenBytes
from anabranch.core.transaction_states import HANDLES, USABLE, HandleOp, HandleState
from anabranch.errors import IllegalState, InvalidArgument
from anabranch.ports import RecordHeaders
from anabranch.schemas import records as r
from anabranch.types import Result, Tenure

if TYPE_CHECKING:
    from anabranch.batches.columns_write import EventColumns

_EVENT_OVERHEAD = 48  # more than an event's fields take in a command, besides its bytes


class Buffered(Handle):
    """The writes of a `Transaction`."""

    def __init__(
        self,
        shared: Shared,
        scope: str,
        name: str | None,
        keepalive_ms: int,
        tenure: Tenure | None,
        snapshot: int,
    ) -> None:
        super().__init__(shared, scope, keepalive_ms)
        self._name = name
        self._tenure = tenure
        self._snapshot = snapshot
        self._txn_id: bytes | None = None
        self._secret: bytes | None = None
        self.state: HandleState = "buffered"  # of begin, commit and abort
        self._result: Result | None = None
        self._buffer: list[r.Event] = []
        self._buffered_bytes = 0

    def _take_outcome(self, outcome: r.Outcome) -> None:
        raise NotImplementedError

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
        self._account = self._new_account(txn_id)
        self.beating = True
        self._shared.heart(self)

    def _make_id(self, deadline: float, *, marked: bool = False) -> bytes:
        if self._txn_id is None:
            self._txn_id = self._session.new_txn_id(self._scope, deadline, marked=marked)
        return self._txn_id

    def _check_usable(self) -> None:
        raise NotImplementedError

    def _move(self, op: HandleOp) -> None:
        """Move to the state after an op. Raises the error of an op that is illegal in this state."""
        self.state = HANDLES.judge(self.state, op) or self.state

    # -- opening --------------------------------------------------------------------------------------

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

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything written is acknowledged and its receipt registered. Opens the transaction.

        ``timeout`` in seconds. Raises: WriteFailed, DeadlineExceeded (repeating is safe), NotReady (a stream's
        journal is missing: repeating is safe), StreamLost (the journal won't come back: abort), and as `write`.
        """
        with self._lock:
            self._check_usable()
            deadline = self._shared.deadline(timeout)
            self._open(deadline)
            self._flush(deadline)
            if self._account is not None and self._account.lanes and self._token is not None:
                seen = self._session.highest_timestamp
                receipt = self._account.receipt(finished=False, seen=seen)
                self._session.register(self._token, receipt, deadline)

    def written_to(self, stream: str) -> int:
        """As `Handle.written_to`."""
        return super().written_to(stream) + sum(e.stream == stream for e in self._buffer)

    # -- writing --------------------------------------------------------------------------------------

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

    def _fits(self, count: int, size: int) -> bool:
        """Whether so many more events, of ``size`` bytes in all, may wait in memory for a single request."""
        few = len(self._buffer) + count <= EVENTS.value
        return few and self._buffered_bytes + size <= self._shared.one_shot_bytes

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
        for stream, lane in lanes.items():
            if not is_state(stream):
                self._hot[stream] = lane.write

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

    def _write_cold(
        self,
        stream: str,
        key: bytes | None,
        value: bytes | None,
        headers: RecordHeaders | None,
        timestamp: int | None,
    ) -> None:
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
                return
            self._open(self._shared.deadline(None))
        lane = self._touch(stream, self._shared.deadline(None))
        lane.write(key, value, headers, timestamp)
        self._hot[stream] = lane.write

    def _lane(self, stream: str, pieces: Sequence[EventColumns]) -> StreamLane | None:
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
