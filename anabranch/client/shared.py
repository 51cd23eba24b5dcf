"""The state that a client's parts and handles share: session, ports, known streams; and the heartbeats."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from anabranch.client.ports import ClientPorts, JournalWriter
from anabranch.client.receipts import check_layout, warn_of_seconds
from anabranch.client.reservation import Reservation, id_of
from anabranch.client.session import Session
from anabranch.core.derived_rows import AnyFunction
from anabranch.core.stream_settings import (
    Derived,
    derivations_of,
    derived_from,
    derived_table,
    latest_time,
)
from anabranch.errors import (
    AnabranchError,
    DerivationMissing,
    IllegalState,
    InvalidArgument,
    NonTransactional,
    NotForkSafe,
)
from anabranch.extras import need
from anabranch.protocol.legal_names import check_type, is_state, split_stream
from anabranch.protocol.limits import AHEAD_MS, check_ahead, check_timestamp
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.records import Outcome, SegmentRange, StreamInfo
from anabranch.protocol.tokens import peek
from anabranch.tracing import Trace, Tracing
from anabranch.waits import Job, here

if TYPE_CHECKING:
    import pyarrow as pa

    from anabranch.batches.columns_write import EventColumns

log = logging.getLogger("anabranch.client")

BEATS_PER_KEEPALIVE = 3
_IDLE_S = 3600.0
_AFTER_TROUBLE_S = 1.0
_JOIN_S = 10.0
_LAYOUT_S = 30.0  # a layout is used for this long: other clients may scale the stream
MOST_NAMES = 10_000  # limit of each cache of streams


class Handle(Protocol):
    """The methods of `Transaction` and `Writer` that their client calls."""

    keepalive_ms: int

    @property
    def live_token(self) -> bytes | None:
        """The token to send heartbeats for; None if the transaction needs no heartbeats."""

    def gone(self, outcome: Outcome) -> None:
        """Called by the thread of heartbeats when a reply says that the transaction is over."""

    def client_closes(self) -> None:
        """Called by the client's `close`: later writes raise."""

    def after_fork(self) -> None:
        """Called in a forked child. Later calls must not use the parent's connections or wait for its locks."""


class Entered(Protocol):
    """A handle of a transaction whose ``with`` block can be entered."""

    @property
    def txn_id(self) -> bytes | None: ...

    @property
    def is_over(self) -> bool:
        """Whether the transaction, or this process's part of it, has ended, or the block was left."""


class Needs(NamedTuple):
    """The derivations in force of a source, or the derivation of a derived table, by the table's settings."""

    in_force: tuple[r.Derivation, ...]
    derived: Derived | None


_NONE = Needs((), None)


class Derivations:
    """The functions of a client, and the needs of tables as far as it knows them. Thread-safe."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._functions: dict[r.Derivation, AnyFunction] = {}
        self._sources: dict[str, str] = {}  # of the tables that they derive
        self._needs: dict[str, Needs] = {}

    def add(self, function: AnyFunction) -> None:
        """Use a function for writes to its source."""
        self._functions[function.of] = function
        self._sources[function.table] = function.of.source

    def named(self, source: str, name: str | None = None) -> list[AnyFunction]:
        """The functions of a source, or of one of its derivations, by name and version."""
        return sorted(
            f
            for of, f in self._functions.items()
            if of.source == source and name in (None, of.name)
        )

    def learn(self, table: str, settings: Mapping[str, str]) -> Needs:
        """Remember the needs of a table."""
        needs = Needs(derivations_of(table, settings), derived_from(settings))
        if needs == _NONE:
            needs = _NONE
        self._needs[table] = needs
        return needs

    def forget(self) -> None:
        """Ask again: a write was refused."""
        self._needs.clear()

    def learned(self, table: str) -> Needs:
        """The needs of a table as they were learned last; none if they never were."""
        return self._needs.get(table, _NONE)

    def has_none(self, table: str) -> bool:
        """Whether a table was learned to need none."""
        return self._needs.get(table) is _NONE

    def needs(self, table: str, deadline: float) -> Needs:
        """The needs of a table. Raises: as `Session.describe`."""
        found = self._needs.get(table)
        return found or self.learn(table, self._session.describe(table, deadline).settings)

    def made_of(self, tables: Iterable[str]) -> list[str]:
        """The derived tables of these tables, which are known: in force, or by a function of this client."""
        found = {
            derived_table(of)
            for table in tables
            for of in (*self.learned(table).in_force, *(f.of for f in self.named(table)))
        }
        return sorted(found.difference(tables))

    def check_not_derived(self, stream: str) -> None:
        """`InvalidArgument` for a table that functions of this client derive."""
        source = self._sources.get(stream)
        if source is not None:
            raise InvalidArgument(
                f"{stream} is derived from {source}: write to that, and its rows follow"
            )

    def functions(self, table: str, deadline: float) -> Sequence[AnyFunction]:
        """The functions that a write to the table runs. `DerivationMissing`; `InvalidArgument`: it is derived."""
        needs = self.needs(table, deadline)
        if needs.derived is not None or not self._functions.keys() >= set(needs.in_force):
            found = self._session.describe(table, deadline)  # its settings may have changed
            needs = self.learn(table, found.settings)
        if needs.derived is not None:
            raise InvalidArgument(
                f"{table} is derived from {needs.derived.of.source}: write to that, and its rows follow"
            )
        return [self.function(of) for of in needs.in_force]

    def function(self, of: r.Derivation) -> AnyFunction:
        """The function of a version. `DerivationMissing`: this client does not have it."""
        found = self._functions.get(of)
        if found is None:
            source, name, version = of
            raise DerivationMissing(
                f"{source} is the source of derivation {name!r}, version {version}, and this client has no "
                f"function for it: call `client.derive({source!r}, {name!r}, function, version={version})`"
            )
        return found


@dataclass
class Shared:
    """The state that all parts and handles of a client share."""

    session: Session
    ports: ClientPorts
    timeout: float
    one_shot_bytes: int
    heart: Callable[[Handle], None]  # starts heartbeats for a handle
    tracing: Tracing | None = None
    handles: weakref.WeakSet[Handle] = field(default_factory=weakref.WeakSet)
    # By stream: when its description expires, and the description (None if the client can't get it).
    streams: dict[str, tuple[float, StreamInfo | None]] = field(default_factory=dict)
    near_ms: int = 0  # no stream refuses event times up to this one as too far ahead
    # By scope: streams that its transactions may write to, and whether another control partition serves them.
    legal: dict[str, dict[str, bool]] = field(default_factory=dict)
    exclusive: set[str] = field(default_factory=set)  # streams that are known to be exclusive
    dropped: deque[JournalWriter] = field(default_factory=deque)  # of garbage-collected handles
    forked: bool = False
    closed: bool = False
    derivations: Derivations = field(init=False)

    def __post_init__(self) -> None:
        self.derivations = Derivations(self.session)

    def check(self) -> None:
        """Raise `NotForkSafe` in a forked child, and `IllegalState` once the client is closed."""
        if self.forked:
            raise NotForkSafe("this client was made before a fork: connect again in the child")
        if self.closed:
            raise IllegalState(
                "the client is closed, by itself if nothing refers to it: keep it while you use what it made"
            )

    def seconds(self, timeout: float | None) -> float:
        """The time-out of a call: the given one, or the client's. Raises: InvalidArgument."""
        seconds = self.timeout if timeout is None else timeout
        check_type("a timeout, in seconds,", seconds, int, float)
        if not 0 <= seconds < 1e9:
            raise InvalidArgument(f"timeout {seconds!r}: seconds, 0 or more")
        return seconds

    def deadline(self, timeout: float | None) -> float:
        """The deadline, in monotonic seconds, of a call that begins now."""
        return self.session.now() + self.seconds(timeout)

    def checked_deadline(self, timeout: float | None) -> float:
        """`check`, then `deadline`. Raises: NotForkSafe, IllegalState."""
        self.check()
        return self.deadline(timeout)

    def deadline_outside(self, call: str, timeout: float | None) -> float:
        """As `checked_deadline`, for a call that takes effect at once. Raises: also as `check_outside`."""
        self.check()
        self.check_outside(call)
        return self.deadline(timeout)

    def check_outside(self, call: str, own: Entered | None = None) -> None:
        """Raise `NonTransactional` if the caller is inside an open transaction of this client.

        ``own``: the transaction that the call is about. The call may be in a ``with`` block of its handles, and in
        other blocks inside of that one.
        """
        for shared, made in _entered.get():
            txn = made()
            if txn is None or shared() is not self or txn.is_over:
                continue
            if own is not None and (txn is own or txn.txn_id == own.txn_id is not None):
                return
            raise NonTransactional(
                f"{call} inside the open transaction {txn!r}: it takes effect at once, and no abort of that "
                "transaction takes it back; make the call before or after it, or in `with client.outside()`"
            )

    @contextmanager
    def outside(self) -> Iterator[None]:
        """As `Client.outside`."""
        before = _entered.set(tuple([each for each in _entered.get() if each[0]() is not self]))
        try:
            yield
        finally:
            with suppress(
                ValueError
            ):  # another asyncio task closes a generator that is in the block
                _entered.reset(before)

    # -- traces ---------------------------------------------------------------------------------------

    def new_trace(self) -> Trace | None:
        """The spans of a new handle; None if the program does not trace."""
        return None if self.tracing is None else Trace(self.tracing)

    def span(self, name: str, transaction: bytes | Reservation) -> AbstractContextManager[object]:
        """A ``with`` block with a span about a transaction that is given by token or reservation."""
        trace = self.new_trace()
        span = None if trace is None else trace.start(name, "CLIENT", id_of(transaction))
        return nullcontext() if trace is None or span is None else trace.within(span)

    # -- streams --------------------------------------------------------------------------------------

    def layout(self, stream: str, deadline: float) -> Sequence[SegmentRange]:
        """The stream's segments, up to 30 s old. Raises: as `Session.describe`, MalformedRecord."""
        until, found = self.streams.get(stream, (0.0, None))
        if found is None or self.session.now() >= until:
            found = self.session.describe(stream, deadline)
            self.learn(stream, found)
        check_layout(stream, found.segments)
        return found.segments

    def learn(self, stream: str, found: StreamInfo | None) -> None:
        """Remember the stream's description for a while."""
        if len(self.streams) >= MOST_NAMES:
            self.streams.clear()
        self.streams[stream] = self.session.now() + _LAYOUT_S, found

    def check_stream(self, scope: str, stream: str) -> bool:
        """Raise as `Transaction.write` does, unless transactions of this scope may write to the stream.

        Returns whether another control partition serves it.
        """
        legal = self.legal.get(scope)
        if legal is None:
            legal = self.legal[scope] = {}
        elsewhere = legal.get(stream)
        if elsewhere is None:
            own = split_stream(stream)[0]
            elsewhere = own != scope and not self.session.are_together(
                (own, scope), self.deadline(None)
            )
            if is_state(stream):
                raise InvalidArgument(f"{stream} is a processor's state: use `write_state`")
            if len(legal) >= MOST_NAMES:
                legal.clear()
            legal[stream] = elsewhere
        return elsewhere

    # -- events ---------------------------------------------------------------------------------------

    def check_time(self, stream: str, timestamp: int) -> None:
        """Raise `InvalidArgument` for a timestamp that the stream does not take; warn if it looks like seconds."""
        check_timestamp(timestamp)
        warn_of_seconds(timestamp)
        self.judge_time(stream, timestamp)

    def judge_time(self, stream: str, timestamp: int) -> None:
        """Raise `InvalidArgument` if a timestamp is too far ahead for the stream. Unknown settings allow any."""
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

    def columns(self, stream: str, batch: pa.RecordBatch | pa.Table) -> list[EventColumns]:
        """The rows of a batch for `write_batch`, as checked columns. Raises: as `Transaction.write_batch`."""
        need("pyarrow", "numpy")
        self.derivations.check_not_derived(stream)
        from anabranch.client.arrow import columns_of

        pieces = columns_of(batch)
        latest = max((int(piece.timestamps.max(initial=0)) for piece in pieces), default=0)
        self.judge_time(stream, latest)
        return pieces


class Heart:
    """Sends heartbeats for handles, and calls `Handle.gone` when a reply says that a transaction is over.

    References to handles are weak: if the program drops a handle, its heartbeats end, and the keepalive runs out.
    """

    def __init__(self, session: Session, *, thread: bool) -> None:
        self._session = session
        self._with_thread = thread
        self._job: Job | None = None
        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._wake = here().condition()
        self._correlation_id = session.new_correlation_id()  # of the last heartbeats
        self._digests: Collection[bytes] = ()
        self._due = math.inf
        self._sent = False  # whether heartbeats were sent since the last handle was added
        self._closed = False

    def add(self, handle: Handle) -> None:
        """Send heartbeats for this handle while it has a `live_token`."""
        with self._wake:
            self._handles.add(handle)
            due = self._session.now() + handle.keepalive_ms / 1000 / BEATS_PER_KEEPALIVE
            if due < self._due:
                self._due, self._sent = due, False
                self._session.forget(self._correlation_id)
                self._wake.notify_all()
            if self._with_thread and self._job is None:
                self._job = here().start("anabranch-heartbeats", self._run)

    def step(self) -> float:
        """Send the heartbeats that are due. Returns when the next ones are due, in monotonic seconds."""
        with self._wake:
            alive = [(h.live_token, h.keepalive_ms) for h in self._handles]
            tokens = [token for token, _ in alive if token is not None]
            if not tokens:
                self._due = math.inf
                return math.inf
            now = self._session.now()
            if now < self._due:
                return self._due
            shortest_s = min(ms for token, ms in alive if token is not None) / 1000
            self._due = now + shortest_s / BEATS_PER_KEEPALIVE
            self._session.forget(self._correlation_id)
            self._correlation_id = self._session.new_correlation_id()
            self._sent = True
        self._digests = self._session.beat(self._correlation_id, tokens, self._due)
        return self._due

    def receive(self, deadline: float) -> None:
        """Wait for one reply until the deadline, and call `gone` on the handles whose transactions are over."""
        gone = self._session.receive_beat(self._correlation_id, self._digests, deadline)
        over = {outcome.txn_id: outcome for outcome in gone}
        if over:
            with self._wake:
                handles = list(self._handles)
            for handle in handles:
                token = handle.live_token
                outcome = over.get(peek(token).txn_id) if token is not None else None
                if outcome is not None:
                    handle.gone(outcome)

    def _run(self) -> None:
        while not self._closed:
            pause = 0.0
            try:
                due = self.step()
                if due < math.inf and self._sent:
                    self.receive(due)
                    continue
            except AnabranchError as error:
                log.warning("heartbeats can't be sent: %s", error)
                pause = _AFTER_TROUBLE_S
            with self._wake:
                if not self._closed:
                    left = _IDLE_S if self._due == math.inf else self._due - self._session.now()
                    self._wake.wait(max(0.0, pause or left))

    def close(self) -> None:
        """Stop the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._session.forget(self._correlation_id)
        if self._job is not None and self._job is not threading.current_thread():
            self._job.join(_JOIN_S)


# The open `with` blocks of this thread or asyncio task: client and transaction, the outermost first.
_entered: ContextVar[tuple[tuple[weakref.ref[Shared], weakref.ref[Entered]], ...]] = ContextVar(
    "anabranch-entered", default=()
)


def entered(shared: Shared, txn: Entered) -> None:
    """Note that this thread or asyncio task is inside this transaction, until the transaction is over.

    An asyncio task that is started in the block is inside, too, as it gets a copy of its creator's context.
    """
    still = [each for each in _entered.get() if (other := each[1]()) and not other.is_over]
    _entered.set((*still, (weakref.ref(shared), weakref.ref(txn))))
