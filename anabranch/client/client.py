"""The client that `anabranch.connect` makes.

The file is long because it has every call of a client, with what it does and raises. Calls that need more than one
command are carried out by the client's parts (see `anabranch.client`).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

from anabranch.client.calls.admin import Administration, lane_acls
from anabranch.client.calls.derivations import Deriving
from anabranch.client.calls.processors import Processors, check_imported
from anabranch.client.calls.reading import Reading, SystemTables
from anabranch.client.calls.streams import Streams, given
from anabranch.client.commit_parts import CommitParts, Wait
from anabranch.client.ports import ClientPorts
from anabranch.client.reservation import (
    Reservation,
    abort_by,
    asked_about,
    commit_by,
    id_of,
    keepalive_ms_of,
    reserve,
)
from anabranch.client.session import Session
from anabranch.client.shared import Handle, Heart, Shared
from anabranch.client.transact import ownership_of, transact
from anabranch.client.transaction import Transaction
from anabranch.client.write_session import Flush, WriteSession
from anabranch.client.writer import Writer, join
from anabranch.core.authorize import ADD, ALL, TAKE
from anabranch.core.stream_settings import EXCLUSIVE, TABLE, in_force
from anabranch.core.transaction_states import FINISHED
from anabranch.errors import ClockSkew, InvalidArgument, NotForkSafe, UnsupportedSetting
from anabranch.extras import need
from anabranch.presentation.system_tables import (
    CommitRow,
    LockRow,
    TableRow,
    TransactionRow,
    VersionRow,
    check_call,
)
from anabranch.protocol import defaults
from anabranch.protocol.hybrid_time import MAX, to_text
from anabranch.protocol.legal_names import check_scope, check_type
from anabranch.protocol.limits import AWAITED, Room
from anabranch.protocol.schemas import records as r
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.group_lag import (
    ConsumerGroup,
    InputLag,
    Lag,
    count_events,
    group_of,
    groups_of,
    input_lags,
    move_group,
)
from anabranch.reading.history import Start, check_at
from anabranch.reading.ordered_reader import Reader
from anabranch.reading.positions import Mirror
from anabranch.reading.snapshot import At, Mode, Snapshot, SnapshotPlan
from anabranch.reading.store_lookup import RawRows, StoreFormat, stored
from anabranch.reading.transaction_reader import TransactionReader
from anabranch.topics.rights import Acl
from anabranch.tracing import current as current_tracing
from anabranch.types import (
    AuditEntry,
    CommandsInfo,
    FeatureLevel,
    Grant,
    K,
    Lane,
    LeaderInfo,
    Listed,
    OpenTransaction,
    Receipt,
    Rejected,
    Result,
    StreamDescription,
    TaskOwnership,
    Timeline,
    Transacted,
    TransactionInfo,
    V,
    description_of,
    info_of,
    open_of,
    result_of,
    right_bits,
    warn_left_out,
)
from anabranch.values import Spec, Stream, stream_of

if TYPE_CHECKING:
    from anabranch.client.replica import Replica
    from anabranch.core.derived_rows import DerivingFunction
    from anabranch.core.stream_settings import Kind
    from anabranch.reading.task_reader import TaskReader
    from anabranch.tables.changes import Changes
    from anabranch.tables.indexes import Index

T = TypeVar("T")
_clients: weakref.WeakSet[Client] = weakref.WeakSet()


class Client:
    """A connection to the controllers of a cluster, made by `anabranch.connect`.

    Thread-safe. Timeouts are in seconds; calls without a ``timeout`` use that of the client. In a forked child
    calls raise `NotForkSafe`, and once the client is closed `IllegalState`.
    """

    def __init__(
        self,
        ports: ClientPorts,
        *,
        timeout: float = defaults.TIMEOUT_S,
        one_shot_bytes: int = defaults.ONE_SHOT_BYTES,
        threads: bool = True,
    ) -> None:
        """``threads`` False: the caller drives `heart`, as the simulator does, and replicas advance in calls."""
        if not 0 < timeout < 1e9:
            raise InvalidArgument(f"timeout {timeout!r}: seconds above 0")
        if not 0 <= one_shot_bytes <= 1 << 30:
            raise InvalidArgument(f"one_shot_bytes {one_shot_bytes!r}: 0 to 2^30")
        self._threads = threads
        self._close_lock = threading.Lock()
        tracing = current_tracing()
        self._session = Session(ports, tracing)
        self._heart = Heart(self._session, thread=threads)
        self._shared = Shared(
            self._session, ports, timeout, one_shot_bytes, self._heart.add, tracing
        )
        self._streams = Streams(self._shared)
        self._reading = Reading(self._shared)
        self._processors = Processors(self._shared, self._reading)
        self._admin = Administration(self._shared)
        self._deriving = Deriving(self._shared, self._reading, threads=threads)
        self._system = SystemTables(self._shared, self._reading)
        _clients.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._shared.forked:
            self.close()

    @property
    def heart(self) -> Heart:
        """The heartbeats, for a caller that drives them step by step."""
        return self._heart

    @property
    def lane(self) -> str:
        """The lane of this client."""
        return self._shared.ports.lane

    @property
    def last_timestamp(self) -> int:
        """The highest hybrid time that this client has seen in answers, tokens and `observe`; 0: none yet.

        Its transactions commit above it, and its snapshots have all commits up to it. Readers don't raise it.
        """
        return self._session.highest_timestamp

    def observe(self, timestamp: int) -> None:
        """Make all later commits of this client get higher timestamps than this hybrid time. Nothing is sent.

        Use it for a timestamp that came in a message, or in an event that was read: answers and tokens are observed
        by themselves.

        Raises: ClockSkew (more than ``max_clock_skew`` ahead of this machine's clock), InvalidArgument; then
        nothing is changed.
        """
        check_type("a timestamp", timestamp, int)
        if not 0 <= timestamp <= MAX:
            raise InvalidArgument(f"timestamp {timestamp}: a hybrid time, 0 to 2^63 - 1")
        if not self._session.observe(timestamp):
            raise ClockSkew(
                f"the time {to_text(timestamp)} is more than {self._shared.ports.max_clock_skew:g} s ahead of this "
                "machine's clock: set the clocks"
            )

    @property
    def cluster(self) -> str:
        """The brokers' id of their cluster, and the prefix, as one text. Raises: NotReady, DeadlineExceeded."""
        return self._session.cluster(self._shared.checked_deadline(None))

    # -- transactions begun here, and writers -------------------------------------------------------

    def begin(
        self,
        scope: str,
        name: str | None = None,
        keepalive: float = defaults.KEEPALIVE_S,
        *,
        ownership: TaskOwnership | None = None,
    ) -> Transaction:
        """Begin a transaction in a scope.

        With a ``name``, which is unique in the scope, the controller begins it at once: if the name is committed
        already, the handle has its `result`; an open transaction of the name is aborted. If a transaction of the
        name is prepared, the handle has it as `prepared`, and may end it by `commit` or `abort` with its secret; a
        write raises `ReservedByPrepared`. Without a name nothing is sent yet. ``keepalive``: seconds (at least 1)
        without a heartbeat after which the controller aborts the transaction; the handle sends heartbeats.
        ``ownership``, without a name: the ownership of the tasks whose positions the commit will move.

        Raises: InvalidArgument; with a name also UnknownScope, TooManyTransactions, ClockSkew, NotReady,
        DeadlineExceeded.
        """
        self._shared.check()
        keepalive_ms = keepalive_ms_of(keepalive)
        if ownership is not None and (name is not None or ownership.scope != scope):
            raise InvalidArgument(
                f"a transaction that moves positions of {ownership.processor} is of its scope, and has no name"
            )
        txn = Transaction(self._shared, check_scope(scope), name, keepalive_ms, ownership)
        if name is not None:
            txn.open_named()
        return txn

    def transact(
        self,
        function: Callable[[Transaction], T],
        *,
        scope: str | None = None,
        name: str | None = None,
        consume: TaskReader | None = None,
        keepalive: float = defaults.KEEPALIVE_S,
        wait: Wait = "merged",
        timeout: float | None = None,
    ) -> Transacted[T]:
        """Call ``function`` with a transaction, and commit; repeat this if it is aborted, for ``timeout`` seconds.

        Each try is as old as the first one, so that at an exclusive stream it is never aborted again and again.

        The function may be called several times, so it must have no side effects. The result has what it returned
        as ``value``. An exception from it aborts the transaction, and is raised. ``scope``: None for the scope of
        the first stream that it writes to; without a write nothing is sent. ``keepalive``: as of `begin`. For rows
        and events together: `Replica.transact`.

        ``name``: as of `Transaction.commit`. The commit checks the name, as asking before would take one more round
        trip. So if the name is committed already, the function runs all the same, and its writes are dropped. The
        result is then that of the earlier commit, with the ``value`` of this call.

        ``consume``: a reader that `read` made with an ``ownership``. The commit moves its positions past all events
        that it has returned; the function must not read from it. If the call fails without effect, the reader's
        next commit moves past these events. If the name is committed already, the positions move in a commit of
        their own. The transaction belongs to the processor's scope.

        ``wait``: as of `Transaction.commit`; `finished` waits for the rest.

        Raises: as `Transaction.commit`; TransactionAborted, WriteFailed (after the timeout). OwnershipLost,
        OutcomeUnknown: take the tasks again; later calls with this reader raise IllegalState.
        """
        self._shared.check()
        keepalive_ms = keepalive_ms_of(keepalive)
        chosen = "" if scope is None else check_scope(scope)
        ownership = None
        if consume is not None:
            ownership = ownership_of(consume)
            if chosen not in ("", ownership.scope):
                raise InvalidArgument(
                    f"a transaction that moves positions of {ownership.processor} is of its scope"
                )
            chosen = ownership.scope
        former: bytes | None = None
        txn: Transaction | None = None

        def begin(_: float) -> Transaction:
            nonlocal former, txn
            former = former if txn is None else txn.txn_id or former
            txn = Transaction(self._shared, chosen, None, keepalive_ms, ownership, as_old_as=former)
            return txn

        return transact(
            self._shared,
            begin,
            function,
            CommitParts(name=name, wait=wait),
            self._shared.deadline(timeout),
            reader=consume,
        )

    def reserve(
        self,
        scope: str,
        name: str | None = None,
        keepalive: float = defaults.KEEPALIVE_S,
        *,
        timeout: float | None = None,
    ) -> Reservation:
        """Reserve a transaction id for writers to join; the first write begins the transaction.

        The arguments are those of `begin`. Only writers joined with ``heartbeat`` send heartbeats. Without such a
        writer, the keepalive must cover the time from the last write to the commit.

        Raises: InvalidArgument, UnknownScope, NotReady, DeadlineExceeded.
        """
        return reserve(
            self._session, scope, name, keepalive, self._shared.checked_deadline(timeout)
        )

    def join(
        self, transaction: bytes | Reservation, heartbeat: bool = False, *, label: str = ""
    ) -> Writer:
        """Make a writer for a transaction, given its token or its reservation.

        Nothing is sent before the first write, which begins the transaction of a reservation. If the transaction is
        over, every write raises `TransactionAborted` or `AlreadyCommitted`; the ``result`` of the latter may be of
        another transaction that committed under the name of the reservation.

        ``heartbeat``: send heartbeats from here, too. A token needs the right write, and with ``heartbeat`` also
        the right heartbeat. ``label``: at most 64 characters, the writer's name in `WritersUnfinished` and in
        tools. Raises: InvalidToken, NotAuthorized, InvalidArgument.
        """
        self._shared.check()
        return join(self._shared, transaction, heartbeat=heartbeat, label=label)

    def session(self, flush: Flush = "background") -> WriteSession:
        """A session: rows of streams and tables that are committed in the order in which they are written.

        Use it in a ``with`` block, or close it. Each row commits by itself, many in one request. ``flush``:

        - "background": rows are sent once they fill a request, or after 50 ms. With 32 MiB of rows in
          the session a write waits.
        - "sync": each write waits until its row is committed, and raises its error.
        - "manual": rows are sent by `WriteSession.flush` alone.

        Raises: InvalidArgument, NonTransactional.
        """
        self._shared.deadline_outside("session", None)
        return WriteSession(self._shared, flush, threads=self._threads)

    def outside(self) -> AbstractContextManager[None]:
        """A ``with`` block in which this thread, or asyncio task, is in none of this client's transactions.

        Inside the ``with`` block of an open transaction, calls that take effect at once, and commits of other
        transactions, raise `NonTransactional`. Inside this block they are allowed, and their effects remain even if
        the open transaction is aborted.
        """
        return self._shared.outside()

    # -- transactions by token, id or reservation ---------------------------------------------------

    def commit(
        self,
        transaction: bytes | Reservation,
        receipts: Sequence[Receipt | bytes] | None = None,
        name: str | None = None,
        number: int | None = None,
        *,
        consumed: r.Consumed | None = None,
        secret: bytes | None = None,
        wait: Wait = "merged",
        timeout: float | None = None,
    ) -> Result:
        """Commit a transaction, given its reservation, or a token with the right commit.

        With the ``secret`` that it was prepared with, the id (16 bytes) is enough, from any lane. Arguments and
        errors are those of `Transaction.commit`; `NotAuthorized`: the token lacks the right.

        ``receipts``: exactly the writers to take; None: all finished writers. Repeating the call returns the same
        result. If no writer has begun the transaction of a reservation, it commits without events. After
        ``wait="decided"`` the same call without it waits for the merge, and so does `finished`.
        """
        parts = CommitParts(receipts, name, number, consumed, secret, wait)
        command = parts.command(id_of(transaction))
        deadline = self._shared.checked_deadline(timeout)
        with self._shared.span("commit", transaction):
            outcome = commit_by(
                self._session, transaction, command, deadline, decided=parts.decided
            )
        warn_left_out(outcome, receipts)
        return result_of(outcome)

    def prepare(
        self,
        transaction: bytes | Reservation,
        receipts: Sequence[Receipt | bytes] | None = None,
        name: str | None = None,
        number: int | None = None,
        *,
        consumed: r.Consumed | None = None,
        by: bytes = b"",
        attempt: bytes = b"",
        timeout: float | None = None,
    ) -> TransactionInfo:
        """Prepare a transaction, given its reservation, or a token with the right commit.

        Arguments, result and errors are those of `Transaction.prepare`.
        """
        parts = CommitParts(receipts, name, number, consumed)
        command = parts.command(id_of(transaction), r.Prepare(by, attempt))
        deadline = self._shared.checked_deadline(timeout)
        with self._shared.span("prepare", transaction):
            return info_of(commit_by(self._session, transaction, command, deadline))

    def abort(
        self,
        transaction: bytes | Reservation,
        reason: str = "aborted by a client",
        *,
        secret: bytes | None = None,
        timeout: float | None = None,
    ) -> None:
        """Abort a transaction, given its reservation, or a token with the right abort. Repeating the call is fine.

        After this, no writer can begin the transaction of the reservation. The id (16 bytes) is enough in the lane
        that began it, for operators, and with the ``secret`` that it was prepared with.

        Raises: AlreadyCommitted, InvalidToken, NotAuthorized, UnknownTransaction, Expired, NotReady,
        DeadlineExceeded.
        """
        abort_by(self._session, transaction, reason, secret, self._shared.checked_deadline(timeout))

    def force(
        self,
        transaction: bytes,
        reason: str = "forced by an operator",
        *,
        outcome: bool | None = None,
        control_partition: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Force the end of a transaction, given its id or a token. For operators; repeating the call is fine.

        Without ``outcome`` it aborts a transaction whose merge can't finish because a stream is LOST or in trouble.
        Events that were already merged into other streams can't be removed: consumers that read the topics without
        the history see them. ``outcome``, for a PREPARED transaction whose coordinator will never end it: True
        commits it, False aborts it. A decided transaction that waits for a control partition which can't be led any
        more ends without its part there, if ``outcome`` is as it was decided. ``control_partition``: end its part
        at this control partition alone, in the way of ``outcome``, because the control partition in its id can't be
        led any more; None: that one is asked.

        Raises: IllegalState (nothing stops its merge; the merge has not begun: `abort` it; or it waits for another
        control partition, for less than 10 s yet), AlreadyCommitted, InvalidToken, UnknownTransaction, Expired,
        NotReady, DeadlineExceeded (repeating is safe).
        """
        deadline = self._shared.checked_deadline(timeout)
        self._session.force(id_of(transaction), reason, deadline, outcome, control_partition)

    def state(
        self, transaction: bytes | str | Reservation, *, timeout: float | None = None
    ) -> TransactionInfo:
        """The state of a transaction, given its token, id (16 bytes or 32 digits) or reservation. Changes nothing.

        Raises: UnknownTransaction (no controller knows it, or this client may not see it; a command that begins it
        may still arrive, unless you `resolve` it), NotAuthorized (the token has expired), Expired, InvalidToken,
        NotReady, DeadlineExceeded.
        """
        txn_id, _, token = asked_about(self._session, transaction)
        deadline = self._shared.checked_deadline(timeout)
        return info_of(self._session.state(txn_id, token, deadline))

    def is_finished(
        self, transaction: bytes | str | Reservation, *, timeout: float | None = None
    ) -> bool:
        """Whether a transaction is COMMITTED or ABORTED, given as for `state`. Raises: as `state`."""
        deadline = self._shared.checked_deadline(timeout)
        txn_id, _, token = asked_about(self._session, transaction)
        return self._session.part_of_state(txn_id, token, deadline).state in FINISHED

    def finished(
        self,
        transactions: Iterable[bytes | str | Reservation],
        *,
        timeout: float | None = None,
    ) -> Iterator[TransactionInfo]:
        """Wait until transactions have ended, given as for `state`: an iterator of each one once it has ended.

        For up to 10,000 transactions, decided ones or any others. The call starts no thread: while the caller
        iterates, it asks for the states of the transactions that have not ended, with pauses of up to a second.
        ``timeout``: seconds for all.

        Raises: DeadlineExceeded (some have not ended: call again for those), InvalidArgument, and as `state`.
        """
        deadline = self._shared.checked_deadline(timeout)
        if isinstance(transactions, bytes | str):
            raise InvalidArgument("give a list of tokens or ids; `is_finished` takes a single one")
        asked = {}
        for each in transactions:
            txn_id, _, token = asked_about(self._session, each)
            asked[txn_id] = token
            AWAITED.check(len(asked), "the call")
        return map(info_of, self._session.finished(asked, deadline))

    def resolve(
        self, transaction: bytes | str | Reservation, *, timeout: float | None = None
    ) -> TransactionInfo:
        """As `state`, but a transaction that no controller knows is aborted, so that it can never begin.

        Raises: Expired, ClockSkew (an unknown id, made more than a day ahead of the controller's clock: its
        transaction can't begin), InvalidToken, NotReady, DeadlineExceeded (repeating is safe).
        """
        deadline = self._shared.checked_deadline(timeout)
        txn_id, scope, token = asked_about(self._session, transaction)
        found = self._session.resolve(txn_id, scope, token, deadline)
        return info_of(self._session.whole(found, token, deadline))

    def transactions(
        self,
        scope: str | None = None,
        finished: bool = False,
        limit: int = 100,
        *,
        timeout: float | None = None,
    ) -> Listed[TransactionInfo]:
        """Open transactions, the oldest first; with ``finished`` all transactions, the newest first.

        The list's ``missing``: control partitions that don't answer. Raises: UnknownScope, InvalidArgument
        (``limit`` is 1 to 10,000); NotReady, DeadlineExceeded (none answers).
        """
        check_type("a limit", limit, int)
        wanted = r.ListTransactions(scope, finished, limit, None)
        deadline = self._shared.checked_deadline(timeout)
        return self._session.transactions(wanted, deadline).each(info_of)

    def open_transactions(
        self, scope: str | None = None, limit: int = 100, *, timeout: float | None = None
    ) -> Listed[OpenTransaction]:
        """Open transactions, the oldest first, with their bytes, ages, remaining keepalives, and streams.

        ``missing`` and errors: as in `transactions`.
        """
        check_type("a limit", limit, int)
        deadline = self._shared.checked_deadline(timeout)
        return self._session.open_ones(r.ListOpen(scope, None, limit), deadline).each(open_of)

    def open_transaction(self, txn_id: bytes, *, timeout: float | None = None) -> OpenTransaction:
        """One transaction by its id, open or not, with its writers and its merge's progress. Raises: as `state`."""
        deadline = self._shared.checked_deadline(timeout)
        return open_of(self._session.open_ones(r.ListOpen(None, id_of(txn_id), 1), deadline)[0])

    def timeline(
        self, transaction: bytes | str | Reservation, *, timeout: float | None = None
    ) -> Timeline:
        """When each step of a transaction happened: begun, touched, receipts, decided, merged, readable.

        The timeline is read from the status log and the histories. Without the right Read on the status topic it
        has only what `state` has, and ``gaps`` says so. ``transaction``: as of `state`, which the caller must be
        allowed to see by its id. After ``timeout`` seconds the timeline ends with what was read.

        Raises: as `state`.
        """
        self._shared.check()
        txn_id, _, _ = asked_about(self._session, transaction)
        return self._reading.timeline(txn_id, timeout)

    def prepared(
        self,
        scope: str | None = None,
        *,
        secret: bytes | None = None,
        limit: int = 10_000,
        timeout: float | None = None,
    ) -> Listed[TransactionInfo]:
        """Prepared transactions, which wait for their coordinator, the oldest first.

        ``secret``: only those prepared ``by`` its SHA-256, of all lanes. ``missing`` and errors: as in
        `transactions`.
        """
        wanted = r.ListTransactions(scope, False, limit, None, True, secret)
        deadline = self._shared.checked_deadline(timeout)
        return self._session.transactions(wanted, deadline).each(info_of)

    def series(
        self, scope: str, name: str | None = None, *, timeout: float | None = None
    ) -> list[r.SeriesInfo]:
        """The latest number and the owner of each series of a scope, by name; ``name``: of this one series.

        Number -1: the series has an ``owner``, but no commit yet. ``taken_ms``: Unix milliseconds. Raises:
        UnknownScope, NotReady, DeadlineExceeded.
        """
        return self._session.series(scope, name, self._shared.checked_deadline(timeout))

    def set_series(
        self,
        scope: str,
        name: str,
        number: int,
        *,
        expected: int | None,
        owner: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """Move a series to ``number`` (-1: as if it had no commit): the next commit must have a higher one.

        Needs the right series. ``expected``: its present number (None: no commit). ``owner``: the only lane that
        may commit in it from now on; "": all lanes that may write to the whole scope; None: as before.

        Raises: IllegalState (its present number is not ``expected``), NotAuthorized, InvalidArgument, UnknownLane,
        UnknownScope, NotReady, DeadlineExceeded (repeating is safe).
        """
        deadline = self._shared.deadline_outside("set_series", timeout)
        partition = self._session.find_scope(check_scope(scope), deadline)
        command = r.SetSeries(scope, name, expected, number, owner)
        self._session.ask(partition, command, r.SeriesList, deadline)

    # -- streams ------------------------------------------------------------------------------------

    def create_stream(
        self,
        stream: str,
        segments: int | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        adopt: bool = False,
        near: str | None = None,
        description: str = "",
        exclusive: bool = False,
        exist_ok: bool = False,
        timeout: float | None = None,
    ) -> StreamDescription:
        """Create a stream (``scope/name``), and its scope if that is new. Repeating the call changes nothing.

        ``segments``: 1 to 10,000 key ranges, each a partition (default: 1). ``settings``: of the stream's topic,
        under Kafka's names; a span of time may be a text such as ``"7d"``, or a `timedelta`. ``exist_ok``: a stream
        that exists is returned unchanged. Only the settings and the number of segments that you give have to
        match. ``adopt``: the topic may exist and have records, which readers get unchanged (this needs
        the right operate on ``*``). ``near``: a new scope gets the control partition of this one, so that
        transactions can write to both. None: the control partition with the fewest scopes. ``description``: text
        for people, up to 1,024 characters; it needs feature level 2.

        ``exclusive``: one transaction at a time writes a segment, from its first event there to its end; this can't
        be changed, and needs feature level 4. A transaction that meets an older one raises `TransactionAborted`.
        One that meets younger ones alone waits, for the client's timeout at most; then it raises `Locked`, as do
        transactions that are sent in one command. The setting ``exclusive.hold.ms`` (600,000) is how long an open
        transaction may have segments; then it is aborted.

        Raises: StreamExists (it differs; the message says in what), TopicNotEmpty, InvalidArgument (also if the
        scope exists, but on another control partition than ``near``), FeatureNotEnabled (``description``,
        ``exclusive``), NotAuthorized, UnknownScope (``near``), TopicMisconfigured, NotReady, DeadlineExceeded
        (repeating is safe).
        """
        deadline = self._shared.deadline_outside("create_stream", timeout)
        return self._streams.create(
            stream,
            segments,
            {**given(settings), EXCLUSIVE: "true"} if exclusive else settings,
            deadline,
            adopt=adopt,
            near=near,
            description=description,
            exist_ok=exist_ok,
        )

    def create_table(
        self,
        table: str,
        segments: int | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        near: str | None = None,
        description: str = "",
        exist_ok: bool = False,
        timeout: float | None = None,
    ) -> StreamDescription:
        """Create a table: a stream whose newest value of a key is a row; an event without a value deletes it.

        Write to it as to any stream; read it with `replica`. ``settings``: as of `create_stream`, without
        ``retention.*``; and ``table.history.ms``, the milliseconds that replicas keep versions (default: an hour).
        ``exist_ok``: as of `create_stream`.

        Raises: as `create_stream`.
        """
        self._shared.deadline_outside("create_table", timeout)
        chosen = {TABLE: "true", **given(settings)}
        return self.create_stream(
            table,
            segments,
            chosen,
            near=near,
            description=description,
            exist_ok=exist_ok,
            timeout=timeout,
        )

    def derive(
        self,
        source: str,
        name: str,
        function: DerivingFunction,
        *,
        version: int = 1,
        unique: bool = False,
        totals: bool = False,
        asynchronous: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Let each write to a table also write the rows of a derived table, in its transaction; returns its name.

        ``function``: takes key and row, and returns the values (bytes, several, or None) under which
        `TableTransaction.lookup` finds the row; always the same for the same row. ``unique``: no two rows may have
        one value. ``totals``: the function returns pairs of a group (bytes) and a number (int), and
        `TableTransaction.total` returns the sum of a group. ``asynchronous``: only create the derived table; the
        workers of an `anabranch.DerivedTable` write its rows.

        The first call for a name brings the derivation into force: it is built from the rows that are there, and
        from then on every writer has to make this call, too. The next call continues a build that was left.
        ``version``: give another function a higher one, which `rebuild` brings into force. The call compares name,
        version and kind, and can't see that a function has changed. Needs feature level 3, and the right operate
        then.

        Raises: UniqueViolation, DerivationFailed (of the rows that are there: `drop_derivation` takes it back),
        NumberOverflow, StreamExists (it is of another kind), InvalidArgument, FeatureNotEnabled, NotAuthorized,
        NotInstalled, NotReady (an open transaction writes to the table), IllegalState; UnknownStream,
        DeadlineExceeded (repeating is safe).
        """
        self._shared.deadline_outside("derive", timeout)
        kinds: dict[Kind, bool] = {
            "unique": unique,
            "totals": totals,
            "asynchronous": asynchronous,
        }
        wanted = [kind for kind, is_wanted in kinds.items() if is_wanted]
        if len(wanted) > 1:
            raise InvalidArgument(f"a derivation can't be {' and '.join(wanted)}")
        return self._deriving.derive(
            source, name, function, version, timeout, kind=wanted[0] if wanted else "index"
        )

    def rebuild(self, source: str, name: str, *, timeout: float | None = None) -> str:
        """Bring the highest version of a derivation that this client has into force, while others write.

        From the beginning of the call on, writers need its function and the former one; at the end, look-ups switch
        to it at one commit timestamp. The call also completes a build that was left, and returns the name of
        the derived table. If the derivation is asynchronous, it waits until the highest version that has a table is
        up to date, and switches look-ups to it. Raises: as `derive`; DerivationMissing (this client has no function
        of it).
        """
        self._shared.deadline_outside("rebuild", timeout)
        return self._deriving.rebuild(source, name, timeout)

    def drop_derivation(
        self,
        source: str,
        name: str,
        *,
        version: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Take a derivation out of force, or one version of it that is being built. Its table stays, unchanged.

        Raises: InvalidArgument (it is not in force), NotAuthorized (without the right operate), DeadlineExceeded.
        """
        self._shared.deadline_outside("drop_derivation", timeout)
        self._deriving.drop(source, name, version, timeout)

    def check_derivation(
        self,
        source: str,
        name: str,
        function: DerivingFunction | None = None,
        *,
        timeout: float | None = None,
    ) -> list[str]:
        """Compare a derived table with its source, as of one moment. Returns up to 1,000 differences, in words.

        ``function``: of the version that is ready; None: the one of `derive`. Raises: DerivationMissing (no version
        is ready, or this client has no function of it); as `replica`.
        """
        self._shared.checked_deadline(timeout)
        return self._deriving.check(source, name, function, timeout)

    def streams(
        self, scope: str | None = None, *, timeout: float | None = None
    ) -> Listed[StreamDescription]:
        """All streams of a scope, or of the cluster, by name; ``missing``: control partitions that don't answer.

        Raises: UnknownScope; NotReady, DeadlineExceeded (none answers).
        """
        return self._session.streams(scope, self._shared.checked_deadline(timeout)).each(
            description_of
        )

    def describe(self, stream: str, *, timeout: float | None = None) -> StreamDescription:
        """One stream. Raises: UnknownScope, UnknownStream, NotReady, DeadlineExceeded."""
        return self._streams.describe(stream, self._shared.checked_deadline(timeout))

    def rejected(self, stream: str, *, timeout: float | None = None) -> Rejected:
        """The records of a stream's journal that no commit has, though the broker had acknowledged them.

        These are plain writes that the stream does not take, and records that can't be read. Counts
        are kept as long as the stream, and the newest 1,000 records for 7 days; a takeover changes neither.
        Records that name a transaction are not among them: its outcome counts those.

        Raises: FeatureNotEnabled (it needs feature level 4), UnknownScope, UnknownStream, NotReady,
        DeadlineExceeded.
        """
        return self._streams.rejected(stream, self._shared.checked_deadline(timeout))

    def scale(
        self,
        stream: str,
        segments: int | None = None,
        *,
        seal: Sequence[int] = (),
        ranges: Sequence[tuple[int, int]] = (),
        timeout: float | None = None,
    ) -> StreamDescription:
        """Change the segments of a stream. Open transactions neither delay a scaling nor notice it.

        ``segments``: split the keys evenly into this many; segments that fit already stay. Or give both ``seal``,
        the active segments to seal (ids from `describe`), and ``ranges``, the (low, high) key positions of the new
        ones, which have to cover exactly the same keys.

        Raises: InvalidArgument, UnknownScope, UnknownStream, StreamLost, TooManyStreams, TopicMisconfigured (its
        topics have other settings or partitions), NotAuthorized, NotReady (another scaling waits for partitions),
        DeadlineExceeded (repeating is safe with ``segments``).
        """
        deadline = self._shared.deadline_outside("scale", timeout)
        return self._streams.scale(stream, segments, seal, ranges, deadline)

    def alter_stream(
        self,
        stream: str,
        settings: Mapping[str, Any] | None = None,
        *,
        description: str | None = None,
        timeout: float | None = None,
    ) -> StreamDescription:
        """Change a stream, or a table, while transactions and readers continue. Repeating the call is fine.

        ``settings``: as of `create_stream`; ``replication.factor`` can't be changed, and ``max.message.bytes`` only
        raised. The value None removes a setting. ``description``: as of `create_stream`; an empty one removes it,
        None keeps it. For operators. After a refusal nothing is changed.

        Raises: UnsupportedSetting, InvalidArgument (also if the brokers refuse), FeatureNotEnabled
        (``description``), TopicMisconfigured, NotAuthorized, UnknownScope, UnknownStream, StreamLost, NotReady
        (another change is under way, or the brokers are away), DeadlineExceeded (repeating is safe).
        """
        deadline = self._shared.deadline_outside("alter_stream", timeout)
        if derived := sorted(in_force(given(settings))):
            raise UnsupportedSetting(
                f"{derived[0]} is set by `derive`, `rebuild` and `drop_derivation` alone"
            )
        return self._streams.alter(stream, settings, deadline, description=description)

    def truncate_stream(
        self, stream: str, until: int | datetime, *, timeout: float | None = None
    ) -> StreamDescription:
        """Delete a stream's events up to a time, for good: exactly those committed at or before it.

        ``until``: a commit timestamp, or a datetime with its time zone. Each transaction is deleted whole or not at
        all in this stream, and across streams if all get the same time. Open transactions are not affected. Readers
        whose position is before the time continue after it, or raise `SnapshotExpired`, as after retention. For
        operators; repeating the call is fine.

        Raises: InvalidArgument (also for the state of a processor), NotAuthorized, UnknownScope, UnknownStream,
        StreamLost, NotReady (the time is in the future; another change is under way; the brokers are away),
        DeadlineExceeded (repeating is safe).
        """
        at = check_at(until, "until")
        if at is None:
            raise InvalidArgument(
                "until None: a commit timestamp, or a datetime with its time zone"
            )
        deadline = self._shared.deadline_outside("truncate_stream", timeout)
        return description_of(
            self._session.ask_stream(stream, r.TruncateStream(stream, at), deadline)
        )

    def forget_stream(self, stream: str, *, timeout: float | None = None) -> None:
        """Remove a LOST stream, and what remains of its topics, for good. Its name can be used again.

        Positions in the old stream (snapshots, checkpoints of Spark queries) are invalid in a new stream of that
        name: delete them. For operators; repeating the call is fine.

        Raises: IllegalState (the stream is not LOST, or is a participant of an unfinished transaction: `force`
        that one), UnknownScope, UnknownStream, InvalidArgument (the brokers don't delete topics), NotReady,
        DeadlineExceeded (repeating is safe).
        """
        deadline = self._shared.deadline_outside("forget_stream", timeout)
        self._streams.take_away(stream, r.ForgetStream(stream), deadline)

    def delete_stream(
        self, stream: str, *, despite: Sequence[str] = (), timeout: float | None = None
    ) -> None:
        """Delete a stream for good: its topics, events and groups' positions. Its name can be used again.

        Uncommitted plain writes are deleted, too; readers get `UnknownStream`. Positions kept elsewhere are
        invalid, as after `forget_stream`. If the brokers don't delete the topics, the stream is LOST:
        `recover_stream`, or repeat this. ``despite``: processors that read the stream; their workers fail from then
        on. For operators; repeating the call is fine.

        Raises: IllegalState (unfinished transactions have touched it: commit or abort them; a processor reads it
        that ``despite`` does not name), UnknownScope, UnknownStream, InvalidArgument, NotAuthorized (the
        brokers don't delete topics), NotReady (it is in trouble), DeadlineExceeded (repeating is safe).
        """
        deadline = self._shared.deadline_outside("delete_stream", timeout)
        self._streams.take_away(stream, r.DeleteStream(stream, tuple(despite)), deadline)

    def recover_stream(self, stream: str, *, timeout: float | None = None) -> StreamDescription:
        """Make a LOST stream usable again, if its topics are the same ones, and were only invisible for a while.

        Transactions that were aborted when the stream became LOST stay aborted. For operators.

        Raises: IllegalState (a topic is missing, or was replaced), UnknownScope, UnknownStream, NotReady,
        DeadlineExceeded (repeating is safe).
        """
        deadline = self._shared.deadline_outside("recover_stream", timeout)
        return description_of(self._session.ask_stream(stream, r.RecoverStream(stream), deadline))

    def effective_settings(self, stream: str, *, timeout: float | None = None) -> dict[str, str]:
        """All settings of the stream's topic, as the brokers report them; `describe` has only the given ones.

        Raises: UnknownStream, NotAuthorized (``DescribeConfigs`` on the topic is missing), NotReady,
        UnsupportedSetting (the client has options that only librdkafka takes).
        """
        return self._streams.settings(stream, self._shared.checked_deadline(timeout))

    def topic_id(self, stream: str, *, timeout: float | None = None) -> str:
        """The id of the stream's topic, which no later stream of that name has; empty if brokers have no such ids.

        Raises: as `effective_settings`.
        """
        return self._streams.topic(stream, self._shared.checked_deadline(timeout)).topic_id

    def control_partitions(self, streams: Sequence[str]) -> dict[str, int]:
        """The number of each stream's control partition, to see whether they are of several.

        All get the same number if they are of one scope, or if this lane may not see one of them.

        Raises: UnknownScope, NotReady, DeadlineExceeded.
        """
        self._shared.check()
        return self._session.control_partitions(streams, self._shared.deadline(None))

    def safe_time(
        self, streams: Sequence[str], at: int | None = None, *, timeout: float | None = None
    ) -> int:
        """A hybrid time up to which the streams have all commits, and get no more of them.

        ``at``: at or above this time, which a record of such a stream has. None: a time of now: every commit that
        was answered before this call has a time up to it. Raises: UnknownScope, NotReady, DeadlineExceeded,
        NotAuthorized.
        """
        deadline = self._shared.checked_deadline(timeout)
        if at is None:
            return self._session.instant(streams, None, deadline)
        return self._session.reach(streams, at, deadline)

    # -- typed streams ------------------------------------------------------------------------------

    @overload
    def stream(
        self, name: str, key: Spec[K], value: ModuleType, undecodable: str = "raise"
    ) -> Stream[K, Any]: ...

    @overload
    def stream(
        self, name: str, key: None = None, *, value: ModuleType, undecodable: str = "raise"
    ) -> Stream[bytes, Any]: ...

    @overload
    def stream(
        self, name: str, key: None = None, value: None = None, undecodable: str = "raise"
    ) -> Stream: ...

    @overload
    def stream(
        self, name: str, key: Spec[K], value: None = None, undecodable: str = "raise"
    ) -> Stream[K, bytes]: ...

    @overload
    def stream(
        self, name: str, key: None = None, *, value: Spec[V], undecodable: str = "raise"
    ) -> Stream[bytes, V]: ...

    @overload
    def stream(
        self, name: str, key: Spec[K], value: Spec[V], undecodable: str = "raise"
    ) -> Stream[K, V]: ...

    def stream(
        self, name: str, key: Any = None, value: Any = None, undecodable: str = "raise"
    ) -> Stream[Any, Any]:
        """A handle of a stream or table, with the codecs of its keys and values. Nothing is sent.

        Calls take it in place of the name, and then take and return these types. ``key``, ``value``: None or
        bytes, str, json, an object with ``dumps`` and ``loads``, a model class of pydantic or msgspec, a pair of
        functions (encode, decode), or of a serializer and a deserializer of confluent-kafka. None is never encoded.

        ``undecodable``, for readers of events: 'raise' raises `UndecodableValue`, and the next call continues after
        the event; 'skip' counts it in the reader's ``skipped``; the name of a stream commits the event to that
        stream, with the headers ``error`` and ``from``, before the position moves on. Raises: InvalidArgument.
        """
        return stream_of(name, key, value, undecodable)

    # -- reading ------------------------------------------------------------------------------------

    @overload
    def read(
        self,
        streams: Stream[K, V] | Sequence[Stream[K, V]],
        group: str | None = None,
        timeout: float | None = None,
        start: Start = "begin",
        *,
        ownership: None = None,
    ) -> Reader[K, V]: ...

    @overload
    def read(
        self,
        streams: str | Sequence[str],
        group: str | None = None,
        timeout: float | None = None,
        start: Start = "begin",
        *,
        ownership: None = None,
    ) -> Reader: ...

    @overload
    def read(
        self,
        streams: Sequence[str | Stream[Any, Any]],
        group: str | None = None,
        timeout: float | None = None,
        start: Start = "begin",
        *,
        ownership: None = None,
    ) -> Reader[Any, Any]: ...

    @overload
    def read(
        self,
        streams: str | Sequence[str],
        *,
        timeout: float | None = None,
        ownership: TaskOwnership,
    ) -> TaskReader: ...

    def read(
        self,
        streams: Any,
        group: str | None = None,
        timeout: float | None = None,
        start: Start = "begin",
        *,
        ownership: TaskOwnership | None = None,
    ) -> Reader[Any, Any] | TaskReader:
        """Read committed events of one or more streams. Iterate over the reader, and close it.

        ``streams``: names, or what `stream` made, with its types (not with an ``ownership``).

        Events of one key come in commit order, also across scalings.

        ``group``: its members share the events, and resume from its positions, so that each event comes at least
        once. None: this reader gets all events, and keeps no position. ``timeout``: the iteration ends after this
        many seconds without an event; None: never. ``start``, used where there is no position yet: 'begin', 'end',
        or a commit timestamp (a hybrid time, as of a `Result`, or a datetime with its time zone) after which to
        begin.

        ``ownership``, without ``group`` and ``start``: only the events of these tasks of a processor, from their
        positions; commit the reader's `consumed` to move the positions.

        Raises: UnknownStream, InvalidArgument, NotReady, DeadlineExceeded; while iterating NotReady and
        DeadlineExceeded (continuing is safe), FixCallError.
        """
        return self._reading.read(streams, group, timeout, start, ownership)

    @overload
    def read_transactions(
        self,
        stream: str,
        group: str | None = None,
        timeout: float | None = None,
        start: Start = "begin",
    ) -> TransactionReader: ...

    @overload
    def read_transactions(
        self,
        stream: Stream[K, V],
        group: str | None = None,
        timeout: float | None = None,
        start: Start = "begin",
    ) -> TransactionReader[K, V]: ...

    def read_transactions(
        self,
        stream: str | Stream[Any, Any],
        group: str | None = None,
        timeout: float | None = None,
        start: Start = "begin",
    ) -> TransactionReader[Any, Any]:
        """Read whole transactions of a stream in commit order. Iterate over the reader, and close it.

        A group has one active member; its position is committed after each transaction. The other arguments
        and errors are those of `read`.
        """
        return self._reading.read_transactions(stream, group, timeout, start)

    def snapshot(
        self,
        streams: str | Stream[Any, Any] | Sequence[str | Stream[Any, Any]],
        at: At = None,
        since: At = None,
        mode: Mode = "snapshot",
        *,
        timeout: float | None = None,
    ) -> Snapshot:
        """Streams as of a commit timestamp. Nothing of them is read yet.

        ``at``: a hybrid time (that of a `Result` includes its transaction) or a datetime with its time zone; the
        call waits for a time in the future, if it comes before the timeout. None: now, including all commits
        answered before this call, and all that this client has seen. ``since``: only what was committed after this
        time. ``mode``: 'latest' takes all that the histories have, including all commits answered before this call;
        it asks no controller, except for the control partitions of several scopes. Over several control partitions
        it asks their controllers for a time, too.

        Raises: UnknownScope, UnknownStream, InvalidArgument (also if ``since`` is later than the
        snapshot); SnapshotExpired (retention has passed it); NotReady (also if the time is not reached, or the
        histories end before it), DeadlineExceeded.
        """
        return self.open_snapshot(self._reading.plan(streams, at, since, mode, timeout))

    def open_snapshot(self, plan: SnapshotPlan | str) -> Snapshot:
        """The snapshot of a plan, or the rest of a snapshot after a position. Nothing is sent.

        Raises: InvalidArgument.
        """
        if isinstance(plan, str):
            plan = SnapshotPlan.of_text(plan)
        if not isinstance(plan, SnapshotPlan):
            raise InvalidArgument(
                f"open_snapshot takes what snapshot.plan() or snapshot.position() gave, not {plan!r:.100}"
            )
        self._reading.readers()
        # Functions that refer to the client keep it open while only its snapshots are used.
        return Snapshot(
            plan,
            lambda stream, cut, decoder: self._reading.read_cut(stream, cut, decoder),
            lambda stream: self._reading.decoder(stream),
        )

    def progress(
        self, streams: str | Sequence[str], group: str, *, timeout: float | None = None
    ) -> int:
        """The highest hybrid time up to which this consumer group has read all commits of these streams.

        To check a copy that the group feeds, compare it with a `snapshot` at this time. Raises: as `snapshot`;
        InvalidArgument (the group has no position in a stream).
        """
        return self._reading.progress(streams, group, timeout)

    def count_events(self, stream: str, *, timeout: float | None = None) -> Lag:
        """The number of committed events of a stream, and the Unix ms of the oldest of their commits (0: none).

        The count is not ``exact`` for a long history: then offsets are counted, including Kafka's markers. Raises:
        UnknownStream, NotReady, NotAuthorized. ``timeout``: for each question to the brokers, here and in the calls
        below.
        """
        return count_events(self.reader_ports(), stream, self._shared.seconds(timeout))

    def groups(
        self, stream: str | None = None, *, timeout: float | None = None
    ) -> list[ConsumerGroup]:
        """The consumer groups with positions in a stream, or in any stream, by name, and their lags.

        Groups of plain Kafka consumers are included. A lag counts events without Kafka's markers. If a stream is in
        trouble, its lag has the reason. Raises: NotReady, NotAuthorized, InvalidArgument.
        """
        readers = self._reading.readers()
        return groups_of(readers.ports, readers.groups, stream, self._shared.seconds(timeout))

    def group(self, name: str, *, timeout: float | None = None) -> ConsumerGroup:
        """A consumer group, its members, and its positions in streams.

        Raises: InvalidArgument (there is no group of the name), NotReady, NotAuthorized (Describe on the group).
        """
        readers = self._reading.readers()
        return group_of(readers.ports, readers.groups, name, self._shared.seconds(timeout))

    def reset_group(
        self, name: str, stream: str, start: Start, *, timeout: float | None = None
    ) -> ConsumerGroup:
        """Move a consumer group's positions in a stream to ``start``, as of `read`. Repeating the call is harmless.

        Raises: IllegalState (the group has members; nothing was changed), UnknownStream, InvalidArgument, NotReady,
        NotAuthorized (Read on the group), SnapshotExpired (retention has passed that time).
        """
        self._shared.deadline_outside("reset_group", timeout)
        readers = self._reading.readers()
        seconds = self._shared.seconds(timeout)
        return move_group(readers.ports, readers.groups, name, stream, start, seconds)

    def reader_ports(self) -> ReaderPorts:
        """The ports of this client's readers, for programs that read topics themselves."""
        return self._reading.readers().ports

    # -- tables -------------------------------------------------------------------------------------

    def replica(
        self,
        *tables: str | Stream[Any, Any],
        folder: str | Path | None = None,
        timeout: float | None = None,
        threads: bool = True,
        index: Mapping[str, Index] | None = None,
    ) -> Replica:
        """A replica of tables, in RocksDB; close it, or use it as a context manager.

        Its transactions and snapshots read all of the tables as of one moment. Transactions need tables of one
        control partition (`CrossScope`). ``folder``: a folder for this replica only, kept over restarts; None: a
        temporary one. ``threads`` False: the replica advances only in calls that wait, and in `step`. ``index``:
        name of an index -> a function of key and row that returns the values (bytes, several, or None) by which
        `TableSnapshot.lookup` finds the row; with several tables (table, function). A folder with other names is
        loaded again; a changed function needs a new name.

        Raises: NotInstalled, UnknownStream, InvalidArgument (not a table), IllegalState (the folder is in use, or
        of another cluster), NotReady, DeadlineExceeded.
        """
        threaded = threads and self._threads
        return self._reading.replica(tables, folder, timeout, threads=threaded, index=index)

    @overload
    def changes(
        self,
        table: str,
        group: str | None = None,
        timeout: float | None = None,
        start: Start = "begin",
        *,
        until: At | Literal["end"] = None,
        before: bool = False,
        folder: str | Path | None = None,
    ) -> Changes: ...

    @overload
    def changes(
        self,
        table: Stream[K, V],
        group: str | None = None,
        timeout: float | None = None,
        start: Start = "begin",
        *,
        until: At | Literal["end"] = None,
        before: bool = False,
        folder: str | Path | None = None,
    ) -> Changes[K, V]: ...

    def changes(
        self,
        table: str | Stream[Any, Any],
        group: str | None = None,
        timeout: float | None = None,
        start: Start = "begin",
        *,
        until: At | Literal["end"] = None,
        before: bool = False,
        folder: str | Path | None = None,
    ) -> Changes[Any, Any]:
        """Read the changes of a table's rows in commit order. Iterate over the reader.

        ``group``, ``timeout`` and ``start`` are those of `read_transactions`. ``until``, without ``group``: end
        after all that was committed up to this time ('end': now). With ``start`` the changes are then the
        difference between two times. ``before``: include the former row, from a replica of the table that this
        reader keeps in ``folder`` (as of `replica`).

        Raises: as `read_transactions` and `replica`; InvalidArgument: ``until`` with a group, or below ``start``.
        While iterating: NotReady and DeadlineExceeded (continuing is safe), SnapshotExpired, FixCallError.
        """
        return self._reading.changes(
            table, group, timeout, start, until=until, before=before, folder=folder
        )

    def compact_table(
        self,
        table: str,
        *,
        plain_readers_lose_history: bool = False,
        folder: str | Path | None = None,
        timeout: float = defaults.COMPACT_S,
        progress: Callable[[int], None] = lambda _: None,
    ) -> r.BaseRow:
        """Make a base of a table, and delete the older events that no snapshot within the table's history needs.

        The base has all rows as of now minus ``table.history.ms``, each with its own commit; new replicas start
        from it. The call may be repeated, and run in several processes at once: one finishes what another began.
        ``folder``: where to keep the replica that it reads, for the next call. ``progress``: called with the number
        of rows written so far. For operators, of the lane that made the first base.

        ``plain_readers_lose_history``: has to be True. A consumer that reads the topic from its beginning later, as
        a GlobalKTable does, lacks all rows that did not change since; the stream ``<table>-base`` has them.

        Raises: InvalidArgument (also without ``plain_readers_lose_history``), IllegalState (names groups that have
        not yet read the changes), NotReady (the table is too young; a snapshot needs the events; another process
        makes a base), NotAuthorized, UnknownStream, DeadlineExceeded.
        """
        self._shared.deadline_outside("compact_table", None)
        need("rocksdict", "pyarrow", extra="tables")
        from anabranch.client.calls.compact import Compactor

        if not plain_readers_lose_history:
            raise InvalidArgument(
                f"consumers that read the topic of {table} from its beginning will lack rows that don't change any "
                "more: say plain_readers_lose_history=True (`--plain-readers-lose-history`) if that is fine"
            )
        open_replica = partial(
            self._reading.read_replica, table, folder, None, threads=self._threads
        )
        compactor = Compactor(self._shared, self._streams, self._reading)
        return compactor.compact(table, lambda at: open_replica(hold=at), timeout, progress)

    def publish_base(self, table: str, timestamp: int, txn_id: bytes) -> r.BaseRow:
        """Make a committed base the beginning of its table, for programs that make bases. Repeating it is harmless.

        ``timestamp``: the hybrid time of the base's rows, a whole second. ``txn_id``: the transaction that wrote
        the base, only to the stream ``<table>-base``. Its number in the series of that stream's name has to be that
        second. For operators.

        Raises: IllegalState (not a base, or there is a later one), InvalidArgument, NotReady (snapshots need events
        that would be deleted; another change is under way), NotAuthorized, UnknownStream, DeadlineExceeded.
        """
        deadline = self._shared.deadline_outside("publish_base", None)
        return self._streams.publish_base(table, timestamp, txn_id, deadline)

    # -- processors ---------------------------------------------------------------------------------

    def create_processor(
        self,
        processor: str,
        inputs: str | Sequence[str | r.ProcessorInput],
        tasks: int = defaults.TASKS,
        start: Start = "begin",
        *,
        stores: Sequence[str] | Mapping[str, str] = (),
        topology: str = "",
        timeout: float | None = None,
    ) -> r.ProcessorInfo:
        """Make a processor (``scope/name``, in an existing scope). Repeating the call can only add stores.

        ``inputs``: streams, of any scopes, which begin at ``start`` (as of `read`); or `ProcessorInput` records,
        each with its own start. ``tasks``: a power of two up to 1,024, which never changes; this many workers can
        share the work. ``stores``: names, or a mapping of each to its kind. They are in the state stream
        ``scope/name.state``, and are never removed. Another kind under the same name is refused until a reset.
        ``topology``: what the program is made of, as JSON for people; the last one is kept, from feature level 3
        on.

        Raises: UnknownScope, UnknownStream, IllegalState (it exists with other tasks, inputs or kinds of stores),
        InvalidArgument, NotAuthorized (the right process), NotReady, DeadlineExceeded, and for its state as
        `create_stream`.
        """
        deadline = self._shared.deadline_outside("create_processor", timeout)
        return self._processors.create(
            processor, inputs, tasks, start, deadline, stores=stores, topology=topology
        )

    def reset_processor(
        self,
        processor: str,
        start: Start | None = None,
        *,
        keep_state: bool = False,
        timeout: float | None = None,
    ) -> r.ProcessorInfo:
        """Restart a processor from ``start`` (as of `read`), without its state; all task ownership ends.

        ``keep_state``: keep its stores, and without ``start`` its positions, too. Streams keep the events that it
        has written. Each call resets it once more.

        Raises: UnknownScope, UnknownStream, UnknownProcessor, InvalidArgument (neither start nor keep_state),
        IllegalState (another call reset it at the same time), NotReady (a commit of it is being merged),
        NotAuthorized (the right process), DeadlineExceeded.
        """
        deadline = self._shared.deadline_outside("reset_processor", timeout)
        return self._processors.reset(processor, start, bool(keep_state), deadline)

    def mark_copy(
        self,
        processor: str,
        origin: str,
        phase: str,
        *,
        origin_resets: int,
        resets: int,
        timeout: float | None = None,
    ) -> r.ProcessorInfo:
        """Begin or end a copy of a processor, for programs that copy: `anabranch.copy_processor` is one.

        ``phase``: 'copying' begins, with the tasks, inputs and stores of ``origin``; from then on tasks can be
        taken only with ``copying``. '' or 'savepoint' ends it. ``origin_resets``, ``resets``:
        `ProcessorInfo.resets` of both, as last seen; 0 for a copy that does not exist.

        Raises: UnknownScope, UnknownProcessor, InvalidArgument (another scope), IllegalState (it exists, and is
        no copy of ``origin`` that was begun; one of them was reset meanwhile), NotReady, FeatureNotEnabled,
        NotAuthorized (the right process on both), DeadlineExceeded.
        """
        deadline = self._shared.deadline_outside("mark_copy", timeout)
        return self._processors.mark_copy(processor, origin, phase, origin_resets, resets, deadline)

    def alter_processor(
        self,
        processor: str,
        *,
        add: Sequence[str] = (),
        start: Start | None = None,
        drop: Sequence[str] = (),
        timeout: float | None = None,
    ) -> r.ProcessorInfo:
        """Let a processor read other inputs; its stores, and the positions of inputs that stay, are kept.

        ``add``: streams, which begin at ``start`` (as of `read`). ``drop``: inputs that it shall not read any
        more. All task ownership ends: workers whose program has other inputs stop with `IllegalState`, and don't
        start any more. Repeating the call is harmless: an input to add that is there keeps its position.

        Raises: UnknownScope, UnknownStream, UnknownProcessor, InvalidArgument (an input to add and to drop, a
        plain topic to add, no input left, more than 64), IllegalState (another call reset or altered it at the
        same time; an input to add was created again since), NotReady (a commit of it is being merged),
        FeatureNotEnabled, NotAuthorized (the right process; describe on the new inputs), DeadlineExceeded.
        """
        deadline = self._shared.deadline_outside("alter_processor", timeout)
        return self._processors.alter(processor, add, start, drop, deadline)

    def import_group(
        self,
        processor: str,
        group: str,
        inputs: str | Sequence[str] = (),
        tasks: int = defaults.TASKS,
        *,
        timeout: float | None = None,
    ) -> r.ProcessorInfo:
        """Start a processor from the offsets of a Kafka consumer group in the topics of its inputs.

        With ``inputs`` the processor is made; without, an existing one is reset, and loses its state. In each input
        it starts with the first commit that the group has not read completely: no event is missed, and some may
        come again. Stop the group's members first.

        Raises: as `create_processor` and `reset_processor`; InvalidArgument (the group has no offsets there, or is
        the processor's own mirror), IllegalState (with inputs: it exists with another start), SnapshotExpired.
        """
        check_imported(processor, group)
        deadline = self._shared.deadline_outside("import_group", timeout)
        return self._processors.import_group(processor, group, inputs, tasks, deadline)

    def delete_processor(self, processor: str, *, timeout: float | None = None) -> None:
        """Delete a processor with its state. A later processor of that name starts without state.

        The topics of its state are deleted after the answer. Raises: as `reset_processor`.
        """
        deadline = self._shared.deadline_outside("delete_processor", timeout)
        self._processors.delete(processor, deadline)

    def processors(self, scope: str, *, timeout: float | None = None) -> list[r.ProcessorInfo]:
        """The processors of a scope, by name, without their tasks. Raises: UnknownScope, NotReady."""
        return self._processors.listed(scope, self._shared.checked_deadline(timeout))

    def processor(
        self, processor: str, *, topology: bool = False, timeout: float | None = None
    ) -> r.ProcessorInfo:
        """A processor, and the positions of its tasks. Raises: UnknownScope, UnknownProcessor, NotReady.

        ``topology``: also what its program is made of, as the worker that started last has said.
        """
        deadline = self._shared.checked_deadline(timeout)
        return self._processors.described(processor, deadline, topology=topology)

    def check_outputs(
        self, processor: str, streams: Iterable[str], *, timeout: float | None = None
    ) -> dict[str, Room]:
        """Check that commits of a processor can write to these streams.

        Returns the size limits of each stream; a limit that is not known is None. Raises: UnknownScope,
        UnknownStream, NotReady, DeadlineExceeded.
        """
        deadline = self._shared.checked_deadline(timeout)
        return self._processors.check_outputs(processor, streams, deadline)

    def take_tasks(
        self,
        processor: str,
        tasks: Iterable[int] | None = None,
        *,
        holder: str | None = None,
        copying: bool = False,
        timeout: float | None = None,
    ) -> TaskOwnership:
        """Take ownership of tasks of a processor (None: all). From now on no other worker can commit for them.

        The call returns when their earlier commits are merged, so that their positions are final. If it fails, it
        gives the tasks back, if it can. ``holder``: a name of the worker for people; None: this host and process.
        ``copying``: to fill a copy that `mark_copy` began.

        Raises: IllegalState (it is a savepoint, or a copy that is not complete), OwnershipLost (another worker
        took a task at the same time, and nothing was changed: take them again if they are yours), UnknownScope,
        UnknownProcessor, InvalidArgument, NotAuthorized, NotReady, DeadlineExceeded.
        """
        return self._processors.take_tasks(
            processor, tasks, holder, self._shared.checked_deadline(timeout), copying=copying
        )

    def release_tasks(self, ownership: TaskOwnership, *, timeout: float | None = None) -> None:
        """Give up tasks; tasks that another worker has taken are not affected. Repeating the call is fine."""
        self._processors.release_tasks(ownership, self._shared.checked_deadline(timeout))

    @overload
    def stored(
        self,
        processor: str,
        store: str,
        key: bytes,
        task: int | None = None,
        *,
        timeout: float | None = None,
    ) -> bytes | None: ...

    @overload
    def stored(
        self,
        processor: str,
        store: StoreFormat,
        key: bytes,
        task: int | None = None,
        *,
        timeout: float | None = None,
    ) -> Any: ...

    def stored(
        self,
        processor: str,
        store: str | StoreFormat,
        key: bytes,
        task: int | None = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """The committed value of a key in a processor's store, or None. Reads a whole partition.

        ``store``: a name, for the row as it is stored; or the program's store, for what `testing.Driver.store`
        shows: a decoded value, the sessions of a key, or the start and value of each of its windows.
        ``task``: for a local store, the task to ask; None: the task of the key.

        Raises: UnknownScope, UnknownProcessor, InvalidArgument (no such store or task), NotReady, NotAuthorized;
        with the program's store as its codec.
        """
        info = self.processor(processor, timeout=timeout)
        shape = RawRows(store) if isinstance(store, str) else store
        with self._reading.readers().source() as source:
            return stored(source, info, shape, key, task, self._shared.seconds(timeout))

    def mirror(
        self,
        processor: str,
        ask: Callable[[], r.ProcessorInfo] | None = None,
        *,
        timeout: float | None = None,
    ) -> Mirror:
        """A mirror of a processor's positions, for Kafka's tools: call its `step` every few seconds, and close it.

        ``ask``: a function that describes the processor; default: `processor`.
        """
        ask = ask or partial(self.processor, processor, timeout=timeout)
        return Mirror(self.reader_ports(), processor, ask, self._shared.seconds(timeout))

    def lag(
        self, processor: str | r.ProcessorInfo, *, timeout: float | None = None
    ) -> list[InputLag]:
        """The lag of a processor's tasks in each of its inputs.

        ``processor``: its name, or as `processor` returns it. Lags are computed from the inputs' histories.
        If an input is in trouble, its lag has the reason. Raises: as `processor`, if it is given by name.
        """
        if isinstance(processor, str):
            info = self.processor(processor, timeout=timeout)
        else:
            info = processor
        with self._reading.readers().source() as source:
            return input_lags(source, info, self._shared.seconds(timeout))

    # -- operators ----------------------------------------------------------------------------------

    def lanes(self, *, timeout: float | None = None) -> list[Lane]:
        """All lanes, by name. Raises: NotAuthorized, NotReady, DeadlineExceeded."""
        return self._admin.lanes(self._shared.checked_deadline(timeout))

    def add_lane(
        self,
        name: str,
        principals: Iterable[str] = (),
        quotas: Mapping[str, int | None] | None = None,
        *,
        apply: bool = False,
        adopt_topics: bool = False,
        timeout: float | None = None,
    ) -> Lane:
        """Make a lane: its two topics, then the lane itself in all control partitions. Repeating the call is safe.

        If control partitions were added, an existing lane gets more partitions for its commands. Only its
        ``principals`` (``User:etl``) may be allowed to write to its command topic and read its reply topic. With
        ``apply`` the call first adds these ACLs; otherwise add them first yourself (see
        `anabranch.topics.rights.client_rights`). ``quotas``: those to set, None for the default; others stay as
        they are. ``adopt_topics``: the topics may exist, if they are empty and well configured, as after an
        interrupted call.

        Raises: InvalidArgument, NotAuthorized, IllegalState (a topic exists; the brokers have no ACLs), NotReady,
        DeadlineExceeded (repeat it, then with ``adopt_topics``).
        """
        acls = lane_acls(self._shared.ports.prefix, name, principals)
        deadline = self._shared.deadline_outside("add_lane", timeout)
        return self._admin.add_lane(name, acls, quotas, deadline, apply=apply, adopt=adopt_topics)

    def block_lane(self, name: str, *, timeout: float | None = None) -> Lane:
        """Stop reading a lane's commands, and refuse its commits that wait undecided. Repeating the call is fine.

        Raises: UnknownLane, NotAuthorized, NotReady, DeadlineExceeded (repeating is safe).
        """
        return self._admin.block(name, True, self._shared.deadline_outside("block_lane", timeout))

    def unblock_lane(self, name: str, *, timeout: float | None = None) -> Lane:
        """Read a lane's commands again, from the topic's end: commands sent meanwhile are never carried out.

        Raises: as `block_lane`.
        """
        deadline = self._shared.deadline_outside("unblock_lane", timeout)
        return self._admin.block(name, False, deadline)

    def grants(self, *, timeout: float | None = None) -> list[Grant]:
        """All grants, by lane and pattern. Raises: NotAuthorized, NotReady, DeadlineExceeded."""
        return self._admin.grants(self._shared.checked_deadline(timeout))

    def grant(
        self, lane: str, pattern: str, rights: Iterable[str], *, timeout: float | None = None
    ) -> Grant:
        """Add rights, such as ``("write", "describe")``, to the rights that a lane has on this pattern.

        Patterns are ``scope/stream``, ``scope/*`` and ``*``. Returns the lane's rights on exactly this pattern.
        Raises: InvalidArgument, UnknownLane, NotAuthorized, NotReady, DeadlineExceeded (repeating is safe).
        """
        deadline = self._shared.deadline_outside("grant", timeout)
        return self._admin.set_grant(lane, pattern, ADD | right_bits(rights), deadline)

    def revoke(
        self,
        lane: str,
        pattern: str,
        rights: Iterable[str] | None = None,
        *,
        timeout: float | None = None,
    ) -> Grant:
        """Remove rights (None: all) on exactly this pattern; returns the remaining rights. Raises: as `grant`."""
        taken = int(ALL) if rights is None else right_bits(rights)
        deadline = self._shared.deadline_outside("revoke", timeout)
        return self._admin.set_grant(lane, pattern, TAKE | taken, deadline)

    def feature_level(
        self, *, raise_to: int | None = None, timeout: float | None = None
    ) -> FeatureLevel:
        """The feature level of the cluster. ``raise_to``: raise it first, where it is lower.

        Raise it once all controllers run a release that knows the level: others can't lead afterwards, and the
        level is never lowered. Needs the right operate on ``*``.

        Raises: UnsupportedVersion (a leader does not know the level), InvalidArgument (below 1), NotAuthorized,
        NotReady, DeadlineExceeded (repeating is safe).
        """
        deadline = self._shared.deadline_outside("feature_level", timeout)
        return self._admin.feature_level(raise_to, deadline)

    def grow_cluster(self, control_partitions: int, *, timeout: float | None = None) -> int:
        """Give the cluster more control partitions, while it runs; returns their new number.

        Controllers lead the new ones within seconds, without a restart. New scopes get those with the fewest
        scopes. Existing scopes stay where they are. New control partitions get the feature level, lanes and grants
        of the others before a scope gets one. After an interruption call it again: it continues. One call adds at
        most 64. Needs feature level 4, the rights operate and admin on ``*``, and the brokers' right Alter on the
        topics of control partitions and lanes.

        Raises: InvalidArgument (fewer than there are, or more than 64 added), FeatureNotEnabled, NotAuthorized
        (also if a right of the brokers is missing), NotReady, DeadlineExceeded (repeating is safe).
        """
        deadline = self._shared.deadline_outside("grow_cluster", timeout)
        return self._admin.grow(control_partitions, deadline)

    def audit_log(self, limit: int = 100, *, timeout: float | None = None) -> list[AuditEntry]:
        """Operators' commands, the newest first: an entry for each control partition that carried a command out.

        Raises: InvalidArgument, NotAuthorized, NotReady, DeadlineExceeded.
        """
        check_type("a limit", limit, int)
        if limit < 1:
            raise InvalidArgument(f"limit {limit}: 1 or more")
        return self._admin.audit_log(limit, self._shared.checked_deadline(timeout))

    def commands(self, *, timeout: float | None = None) -> Listed[CommandsInfo]:
        """How many commands each control partition has handled, and which are quarantined.

        ``missing``: control partitions that don't answer. Raises: NotReady, DeadlineExceeded (none answers).
        """
        return self._admin.commands(self._shared.checked_deadline(timeout))

    def leaders(self, *, timeout: float | None = None) -> Listed[LeaderInfo]:
        """The leader of each control partition, and how much it does.

        ``missing``: control partitions that don't answer. Raises: NotAuthorized (it needs operate on ``*``),
        UnsupportedVersion (an older controller), NotReady, DeadlineExceeded (none answers).
        """
        return self._admin.leaders(self._shared.checked_deadline(timeout))

    def acls(self, *, timeout: float | None = None) -> list[Acl]:
        """The ACLs of the brokers. Raises: NotAuthorized, IllegalState (the brokers have none)."""
        return self._admin.acls(self._shared.checked_deadline(timeout))

    # -- system tables ------------------------------------------------------------------------------

    @overload
    def system(
        self, name: Literal["transactions"], of: str | None = None, **how: Any
    ) -> Listed[TransactionRow]: ...

    @overload
    def system(
        self, name: Literal["locks"], of: str | None = None, **how: Any
    ) -> Listed[LockRow]: ...

    @overload
    def system(self, name: Literal["commits"], of: str, **how: Any) -> Listed[CommitRow]: ...

    @overload
    def system(
        self, name: Literal["tables"], of: str | None = None, **how: Any
    ) -> Listed[TableRow]: ...

    @overload
    def system(self, name: Literal["versions"], of: str, **how: Any) -> Listed[VersionRow]: ...

    def system(  # type: ignore[misc] # `check_call` judges `how`
        self,
        name: str,
        of: str | None = None,
        *,
        key: bytes | None = None,
        start: At = None,
        until: At = None,
        folder: str | Path | None = None,
        limit: int = 1000,
        timeout: float | None = None,
    ) -> Listed[Any]:
        """A system table: rows of named columns, as pandas takes them.

        - 'transactions', of a scope or of all: open transactions, the oldest first, then known finished ones.
        - 'locks', of a scope or of all: registered locks of open transactions; which transaction waits for which.
        - 'commits', of a scope or a stream: after ``start`` (None: all) and up to ``until`` (None: now), the newest
          first; for the next page, give the last timestamp - 1 as ``until``.
        - 'tables', of a scope or of all, by name.
        - 'versions', of a table's ``key``, from a replica (``folder``: as of `replica`).

        ``limit``: 1 to 10,000 rows. ``timeout``: seconds for each question. The list's ``missing``: as in
        `transactions`. Raises: InvalidArgument, UnknownScope, UnknownStream, NotAuthorized, NotReady,
        DeadlineExceeded; 'versions' as `replica`.
        """
        self._shared.check()
        check_call(name, of, key=key, start=start, until=until, folder=folder, limit=limit)
        return self._system.rows(
            name, of, key=key, start=start, until=until, folder=folder, limit=limit, timeout=timeout
        )

    # -- its end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free everything. Abort open transactions first, or they stay open until their keepalive ends."""
        if self._shared.forked:
            raise NotForkSafe("this client was made before a fork: the parent closes it")
        with self._close_lock:
            if self._shared.closed:
                return
            self._shared.closed = True
        with ExitStack() as ends:  # the last one first; all of them, even if one raises
            ends.callback(self._session.close)
            ends.callback(self._shared.ports.journals.close)
            if self._shared.ports.readers is not None:
                ends.callback(self._shared.ports.readers.close)
            ends.callback(self._heart.close)
            for handle in _all_of(self._shared.handles):
                handle.client_closes()

    def __del__(self) -> None:
        shared = getattr(self, "_shared", None)
        # When the process ends, `_at_exit` closes clients, as long as the modules it needs are loaded.
        if shared and not shared.closed and not shared.forked and not sys.is_finalizing():
            self.close()

    def _after_fork(self) -> None:
        self._shared.forked = True
        for handle in _all_of(self._shared.handles):
            handle.after_fork()
        if self._shared.ports.readers is not None:
            self._shared.ports.readers.after_fork()
        self._shared.ports.bus.after_fork()
        self._shared.ports.journals.after_fork()


def _all_of(handles: Iterable[Handle]) -> list[Handle]:
    """The present handles; other threads may add some at the same time."""
    while True:
        with suppress(RuntimeError):
            return list(handles)


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._after_fork()  # noqa: SLF001


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


@atexit.register
def _at_exit() -> None:
    for client in list(_clients):
        if not client._shared.forked:  # noqa: SLF001
            client.close()
