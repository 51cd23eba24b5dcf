"""The client that `anabranch.connect` makes."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal, Self, overload

from anabranch.client.client_admin import Administration
from anabranch.client.client_endings import Endings
from anabranch.client.client_processors import Processors
from anabranch.client.handle import Handle, Shared
from anabranch.client.joined_writer import Writer
from anabranch.client.ports import ClientPorts
from anabranch.client.reservation import Reservation, keepalive_ms_of, reserve
from anabranch.client.session import Session
from anabranch.client.transaction import Transaction
from anabranch.core import defaults
from anabranch.core.hybrid_time import MAX, to_text
from anabranch.core.legal_names import check_scope, check_type
from anabranch.core.stream_settings import is_table
from anabranch.core.stream_states import CREATING, GIVEN_UP
from anabranch.core.tokens import peek
from anabranch.errors import (
    AnabranchError,
    ClockSkew,
    InvalidArgument,
    MalformedRecord,
    NotAuthorized,
    NotForkSafe,
)
from anabranch.extras import need
from anabranch.reading.history_search import check_at
from anabranch.reading.snapshot import At
from anabranch.schemas.records import BaseRow, ListTableLocks, PublishBase
from anabranch.shown.system import (
    CommitRow,
    LockRow,
    TableRow,
    TransactionRow,
    VersionRow,
    check_call,
    commit_rows,
    lock_rows,
    table_rows,
    transaction_rows,
    version_rows,
)
from anabranch.types import Listed, StreamDescription, Tenure

_clients: weakref.WeakSet[Client] = weakref.WeakSet()
log = logging.getLogger("anabranch.client")

BEATS_PER_KEEPALIVE = 3
_IDLE_S = 3600.0
_AFTER_TROUBLE_S = 1.0
_JOIN_S = 10.0


class Heart:
    """Keeps the transactions of handles alive; a handle hears of it when its transaction is over.

    Handles are held weakly: the transaction of a dropped handle goes stale.
    """

    def __init__(self, session: Session, *, thread: bool) -> None:
        self._session = session
        self._with_thread = thread
        self._thread: threading.Thread | None = None
        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._wake = threading.Condition()
        self._correlation_id = session.new_correlation_id()  # of the last heartbeats
        self._digests: Collection[bytes] = ()
        self._due = math.inf
        self._sent = False  # something was, since a handle came last: an answer can be waited for
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
            if self._with_thread and self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="anabranch-heartbeats", daemon=True
                )
                self._thread.start()

    def step(self) -> float:
        """Send the heartbeats if they are due. Returns the monotonic second of the next ones."""
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

    def hear(self, deadline: float) -> None:
        """Take one answer by the deadline, and tell the handles concerned."""
        gone = self._session.hear_beat(self._correlation_id, self._digests, deadline)
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
                    self.hear(due)
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
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)


class Client(Endings, Processors, Administration):
    """A connection to the controllers of a cluster. Thread-safe; a forked child can't use it.

    Made by `anabranch.connect`. Calls without a ``timeout`` end after the client's own, in seconds.
    """

    def __init__(
        self,
        ports: ClientPorts,
        *,
        timeout: float = defaults.TIMEOUT_S,
        one_shot_bytes: int = defaults.ONE_SHOT_BYTES,
        threads: bool = True,
    ) -> None:
        """``threads`` False: no thread sends heartbeats; the caller drives `heart`, as the simulator does."""
        if not 0 < timeout < 1e9:
            raise InvalidArgument(f"timeout {timeout!r}: seconds above 0")
        if not 0 <= one_shot_bytes <= 1 << 30:
            raise InvalidArgument(f"one_shot_bytes {one_shot_bytes!r}: 0 to 2^30")
        self._ports = ports
        self._threads = threads
        self._close_lock = threading.Lock()
        self._session = Session(ports)
        self._heart = Heart(self._session, thread=threads)
        self._shared = Shared(
            self._session, ports.journals, timeout, one_shot_bytes, self._heart.add
        )
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
        """The lane that this client asks by."""
        return self._ports.lane

    @property
    def last_timestamp(self) -> int:
        """The highest hybrid time that this client was told, by answers, tokens and `observe`; 0: none.

        Its transactions commit above it, and its snapshots have all up to it. Readers don't raise it.
        """
        return self._session.highest_timestamp

    def observe(self, timestamp: int) -> None:
        """Let all that this client commits from now on, anywhere, come after this commit timestamp.

        Meant for one that came on another way than by an answer or a token: in a message, in an event that was
        read. Nothing is sent.

        Raises: ClockSkew (more than ``max_clock_skew`` ahead of this machine's clock), InvalidArgument; nothing
        changed.
        """
        check_type("a timestamp", timestamp, int)
        if not 0 <= timestamp <= MAX:
            raise InvalidArgument(f"timestamp {timestamp}: a hybrid time, 0 to 2^63 - 1")
        if not self._session.observe(timestamp):
            raise ClockSkew(
                f"the time {to_text(timestamp)} is more than {self._ports.max_clock_skew:g} s ahead of this "
                "machine's clock: set the clocks"
            )

    @property
    def cluster(self) -> str:
        """The brokers' name of their cluster, and the prefix. Raises: NotReady, DeadlineExceeded."""
        return self._session.cluster(self._deadline(None))

    # -- transactions ---------------------------------------------------------------------------------

    def begin(
        self,
        scope: str,
        name: str | None = None,
        keepalive: float = defaults.KEEPALIVE_S,
        *,
        tenure: Tenure | None = None,
    ) -> Transaction:
        """Begin a transaction in a scope.

        Only a ``name`` is sent at once: names are unique in a scope. If it is committed already, the handle has
        its `result`; an open transaction of that name is aborted. ``keepalive``: seconds (at least 1) of silence
        after which the controller aborts the transaction; the handle sends heartbeats by itself. ``tenure``: the
        commit will move positions of its tasks; then without a name.

        Raises: InvalidArgument; with a name also UnknownScope, TooManyTransactions, ClockSkew, NotReady,
        DeadlineExceeded.
        """
        self._shared.check()
        keepalive_ms = keepalive_ms_of(keepalive)
        if tenure is not None and (name is not None or tenure.scope != scope):
            raise InvalidArgument(
                f"a transaction that moves positions of {tenure.processor} is of its scope, and has no name"
            )
        txn = Transaction(self._shared, check_scope(scope), name, keepalive_ms, tenure)
        if name is not None:
            txn.open_named()
        return txn

    def reserve(
        self,
        scope: str,
        name: str | None = None,
        keepalive: float = defaults.KEEPALIVE_S,
        *,
        timeout: float | None = None,
    ) -> Reservation:
        """Agree on a transaction without beginning it: the first write of a joined writer begins it.

        The arguments are those of `begin`. Only a writer joined with ``heartbeat`` sends heartbeats; without one
        the keepalive has to cover the time between the last write and the commit.

        Raises: InvalidArgument, UnknownScope, NotReady, DeadlineExceeded.
        """
        return reserve(self._session, scope, name, keepalive, self._deadline(timeout))

    def join(
        self, transaction: bytes | Reservation, heartbeat: bool = False, *, label: str = ""
    ) -> Writer:
        """Make a writer for a transaction, given its token or its reservation.

        Nothing is sent before the first write, which begins a reservation that has not begun. If the transaction
        is over, every write raises `TransactionAborted` or `AlreadyCommitted`; the ``result`` of the latter may be
        of another transaction that took the reservation's name.

        ``heartbeat``: keep the transaction alive from here too. A token needs the right write, and heartbeat for
        that. ``label``: at most 64 characters, by which `WritersUnfinished` and operators' tools call the writer.
        Raises: InvalidToken, NotAuthorized, InvalidArgument.
        """
        self._shared.check()
        return Writer(self._shared, transaction, heartbeat=heartbeat, label=label)

    # -- system tables --------------------------------------------------------------------------------

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

        'transactions', of a scope or of all: open ones, the oldest first, then those that ended and are kept.
        'locks', of a scope or of all: registered ones of open transactions on tables, and who waits for whom.
        'commits', of a scope or a stream: committed after ``start`` and up to ``until``, the newest first; None:
        all, now. To go on, give the last one's timestamp - 1 as ``until``. 'tables', of a scope or of all, by name.
        'versions', of a table's ``key``: as a replica of it keeps them (``folder``, as of `replica`).
        ``limit``: 1 to 10,000 rows. ``timeout``: seconds, of each question. The list's ``missing``: as in
        `transactions`.

        Raises: InvalidArgument, UnknownScope, UnknownStream, NotAuthorized, NotReady, DeadlineExceeded;
        'versions' as `replica`.
        """
        self._shared.check()
        missing: dict[int, AnabranchError] = {}
        check_call(name, of, key=key, start=start, until=until, folder=folder, limit=limit)
        deadline = self._deadline(timeout)
        if name == "transactions":
            opened = self.open_transactions(of, limit, timeout=timeout)
            listed = self.transactions(of, True, limit, timeout=timeout)
            found: Iterable[Any] = transaction_rows(opened, listed, self._session.wall())
            missing = opened.missing | listed.missing
        elif name == "locks":
            locks = self._session.table_locks(ListTableLocks(of, limit), deadline)
            found, missing = lock_rows(locks), locks.missing
        elif name == "tables":
            streams = self.streams(of, timeout=timeout)
            missing = streams.missing
            found = table_rows(streams, self._newest(streams, self._deadline(timeout)))
        elif name == "commits":
            found = self._commits(
                of or "", check_at(start, "start"), check_at(until), limit, deadline
            )
        else:
            table, row = of or "", key or b""
            with (
                self.replica(table, folder=folder, timeout=timeout) as replica,
                replica.snapshot(until, timeout=timeout) as view,
            ):
                found = list(islice(version_rows(table, view.versions(table, row)), limit))
        return Listed(islice(found, limit), missing)

    def _commits(
        self, of: str, above: int | None, until: int | None, limit: int, deadline: float
    ) -> list[CommitRow]:
        scope, slash, _ = of.partition("/")
        # The histories have all commits up to a safe time before their present ends.
        until = self._session.instant(check_scope(scope), until, deadline)
        if above is not None and above > until:
            raise InvalidArgument(f"start {to_text(above)} is later than {to_text(until)}, the end")
        if slash:
            names = [self._session.describe(of, deadline).stream]
        else:
            gone = {CREATING, *GIVEN_UP}
            found = self._session.streams(scope, deadline)
            names = [each.stream for each in found if each.state not in gone]
        left = max(0.1, deadline - self._session.now())
        return commit_rows(self.reader_ports(), names, above or 0, until, limit, left)

    def _newest(self, found: Sequence[StreamDescription], deadline: float) -> dict[str, int]:
        """The newest commits of the tables among these streams, of scopes where this lane may ask for all."""
        newest: dict[str, int] = {}
        tables = [
            each.stream for each in found if is_table(each.settings) and each.state != CREATING
        ]
        for scope, its in groupby(tables, lambda table: table.partition("/")[0]):
            with suppress(NotAuthorized, InvalidArgument):  # the latter: one is deleted meanwhile
                told = self._session.safe_tables(scope, None, list(its), deadline)
                newest |= {each.table: each.last for each in told.tables}
        return newest

    # -- tables ---------------------------------------------------------------------------------------

    def compact_table(
        self,
        table: str,
        *,
        plain_readers_lose_history: bool = False,
        folder: str | Path | None = None,
        timeout: float = defaults.COMPACT_S,
        progress: Callable[[int], None] = lambda _: None,
    ) -> BaseRow:
        """Make a base of a table, which new replicas begin at, and delete what no promised snapshot needs.

        A base has all rows as of now minus ``table.history.ms``, each with its own commit. Repeating the call, also
        in several processes at once, is fine: what one began the next one finishes. ``folder``: of a replica, kept
        for the next time. ``timeout``: seconds. ``progress``: called with the rows that are written.

        ``plain_readers_lose_history``: say so. A consumer that reads the topic from its beginning afterwards, as a
        GlobalKTable does, lacks all rows that did not change since; the companion stream ``<table>-base`` has them.

        For operators, of the lane that made the first base.

        Raises: InvalidArgument (also: not said so), IllegalState (groups that read changes have not come so far: it
        names them), NotReady (the table is too young; a snapshot needs what would go; another process makes a
        base), NotAuthorized, UnknownStream, DeadlineExceeded.
        """
        self._alone("compact_table", None)
        need("rocksdict", "pyarrow", extra="tables")
        from anabranch.tables.compact import compact

        if not plain_readers_lose_history:
            raise InvalidArgument(
                f"consumers that read the topic of {table} from its beginning will lack rows that don't change any "
                "more: say plain_readers_lose_history=True (`--plain-readers-lose-history`) if that is fine"
            )
        open_replica = partial(self._replica, [table], folder, None, threads=self._threads)
        return compact(self, table, lambda at: open_replica(held=at), timeout, progress)

    def publish_base(self, table: str, timestamp: int, txn_id: bytes) -> BaseRow:
        """Let a table begin at a base that is committed, for programs that make bases. Repeating it is harmless.

        ``timestamp``: its rows are as of this hybrid time, of a whole second. ``txn_id``: its transaction, of the
        companion stream alone, which has that second's number in the series of the companion's name.

        For operators.

        Raises: IllegalState (it is none, or there is a later one), InvalidArgument, NotReady (snapshots need what
        would go; another change is under way), NotAuthorized, UnknownStream, DeadlineExceeded.
        """
        command = PublishBase(table, timestamp, txn_id)
        info = self._session.ask_stream(table, command, self._alone("publish_base", None))
        if info.base is None:
            raise MalformedRecord(f"the controller tells no base of {table}")
        return info.base

    # -- its end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free everything. Open handles go stale at the controller: abort them first."""
        if self._shared.forked:
            raise NotForkSafe("this client was made before a fork: the parent closes it")
        with self._close_lock:
            if self._shared.closed:
                return
            self._shared.closed = True
        with ExitStack() as ends:  # the last one first, and all of them whatever one raises
            ends.callback(self._session.close)
            ends.callback(self._ports.journals.close)
            if self._ports.readers is not None:
                ends.callback(self._ports.readers.close)
            ends.callback(self._heart.close)
            for handle in _all_of(self._shared.handles):
                handle.client_closes()

    def __del__(self) -> None:
        shared = getattr(self, "_shared", None)
        # At the process's end `_at_exit` closes clients, while the modules it needs are still loaded.
        if shared and not shared.closed and not shared.forked and not sys.is_finalizing():
            self.close()

    def _after_fork(self) -> None:
        self._shared.forked = True
        for handle in _all_of(self._shared.handles):
            handle.after_fork()
        if self._ports.readers is not None:
            self._ports.readers.after_fork()
        self._ports.bus.after_fork()
        self._ports.journals.after_fork()


def _all_of(handles: Iterable[Handle]) -> list[Handle]:
    """The handles of now; other threads may begin meanwhile."""
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
