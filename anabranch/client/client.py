"""The client that `anabranch.connect` makes."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Self

from anabranch.client.client_admin import Administration
from anabranch.client.client_processors import Processors
from anabranch.client.handle import Shared
from anabranch.client.heartbeats import Heart
from anabranch.client.joined_writer import Writer
from anabranch.client.ports import ClientPorts
from anabranch.client.reservation import (
    Reservation,
    abort_reserved,
    asked_about,
    begin_reserved,
    id_of,
    keepalive_ms_of,
    reserve,
)
from anabranch.client.session import Session
from anabranch.client.transaction import Transaction
from anabranch.core.ids import check_number, check_scope, check_type
from anabranch.core.tokens import Rights, check_right, peek
from anabranch.errors import InvalidArgument, NotForkSafe
from anabranch.schemas.records import (
    Consumed,
    ListTransactions,
    Outcome,
    Prepare,
    SeriesInfo,
    SeriesList,
    SetSeries,
)
from anabranch.types import (
    Receipt,
    Result,
    Tenure,
    TransactionInfo,
    info_of,
    receipt_records,
    result_of,
    warn_left_out,
)

DEFAULT_TIMEOUT_S = 30.0
DEFAULT_KEEPALIVE_S = 30.0
DEFAULT_ONE_SHOT_BYTES = 256 << 10
_clients: weakref.WeakSet[Client] = weakref.WeakSet()


class Client(Processors, Administration):
    """A connection to the controllers of a cluster. Thread-safe; a forked child can't use it.

    Made by `anabranch.connect`. Calls without a ``timeout`` end after the client's own, in seconds.
    """

    def __init__(
        self,
        ports: ClientPorts,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        one_shot_bytes: int = DEFAULT_ONE_SHOT_BYTES,
        threads: bool = True,
    ) -> None:
        """``threads`` False: no thread sends heartbeats; the caller drives `heart`, as the simulator does."""
        if not 0 < timeout < 1e9:
            raise InvalidArgument(f"timeout {timeout!r}: seconds above 0")
        if not 0 <= one_shot_bytes <= 1 << 30:
            raise InvalidArgument(f"one_shot_bytes {one_shot_bytes!r}: 0 to 2^30")
        self._ports = ports
        self._session = Session(ports)
        self._heart = Heart(self._session, thread=threads)
        self._shared = Shared(
            self._session, ports.journals, timeout, one_shot_bytes, self._heart.add
        )
        self._close_lock = threading.Lock()
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
    def cluster(self) -> str:
        """The brokers' name of their cluster, and the prefix. Raises: NotReady, DeadlineExceeded."""
        return self._session.cluster(self._deadline(None))

    # -- transactions ---------------------------------------------------------------------------------

    def begin(
        self,
        scope: str,
        name: str | None = None,
        keepalive: float = DEFAULT_KEEPALIVE_S,
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
        keepalive: float = DEFAULT_KEEPALIVE_S,
        *,
        timeout: float | None = None,
    ) -> Reservation:
        """Agree on a transaction without beginning it: the first write of a joined writer begins it.

        The arguments are those of `begin`. Only a writer joined with ``heartbeat`` sends heartbeats; without one
        the keepalive has to cover the time between the last write and the commit.

        Raises: InvalidArgument, UnknownScope, NotReady, DeadlineExceeded.
        """
        return reserve(self._session, scope, name, keepalive, self._deadline(timeout))

    def join(self, transaction: bytes | Reservation, heartbeat: bool = False) -> Writer:
        """Make a writer for a transaction, given its token or its reservation.

        Nothing is sent before the first write, which begins a reservation that has not begun. If the transaction
        is over, every write raises `TransactionAborted` or `AlreadyCommitted`; the ``result`` of the latter may be
        of another transaction that took the reservation's name.

        ``heartbeat``: keep the transaction alive from here too. A token needs the right write, and heartbeat for
        that. Raises: InvalidToken, NotAuthorized.
        """
        self._shared.check()
        return Writer(self._shared, transaction, heartbeat=heartbeat)

    def commit(
        self,
        transaction: bytes | Reservation,
        receipts: Sequence[Receipt | bytes] | None = None,
        name: str | None = None,
        number: int | None = None,
        *,
        consumed: Consumed | None = None,
        secret: bytes | None = None,
        timeout: float | None = None,
    ) -> Result:
        """Commit a transaction by its reservation, or by a token with the right commit.

        With the ``secret`` of what prepared it the id (16 bytes) does, from any lane. Arguments and errors are
        those of `Transaction.commit`; `NotAuthorized`: the token lacks that right.

        ``receipts``: exactly the writers to take; None: every finished one. Repeating it gives the same result.
        A reservation that no writer began is begun and committed, empty.
        """
        claim = name, number
        outcome = self._commit(transaction, receipts, claim, timeout, consumed, secret=secret)
        warn_left_out(outcome, receipts)
        return result_of(outcome)

    def prepare(
        self,
        transaction: bytes | Reservation,
        receipts: Sequence[Receipt | bytes] | None = None,
        name: str | None = None,
        number: int | None = None,
        *,
        by: bytes = b"",
        attempt: bytes = b"",
        timeout: float | None = None,
    ) -> TransactionInfo:
        """Prepare a transaction by its reservation, or by a token with the right commit.

        Arguments, result and errors are those of `Transaction.prepare`.
        """
        prepare = Prepare(by, attempt)
        return info_of(self._commit(transaction, receipts, (name, number), timeout, None, prepare))

    def _commit(
        self,
        transaction: bytes | Reservation,
        receipts: Sequence[Receipt | bytes] | None,
        claim: tuple[str | None, int | None],
        timeout: float | None,
        consumed: Consumed | None = None,
        prepare: Prepare | None = None,
        secret: bytes | None = None,
    ) -> Outcome:
        name, number = claim
        check_number(name, number)
        txn_id = id_of(transaction)
        records = receipt_records(receipts, txn_id)
        deadline = self._deadline(timeout)
        if isinstance(transaction, Reservation):
            begun = begin_reserved(self._session, transaction, deadline)
            if isinstance(begun, Outcome):
                return begun
            transaction = self._session.token_of(transaction.begin, begun.begun_ms)
        if secret is None or transaction != txn_id:
            check_right(peek(transaction), Rights.COMMIT)
        return self._session.commit(
            transaction, (), records, name, deadline, number, consumed, prepare, secret
        )

    def abort(
        self,
        transaction: bytes | Reservation,
        reason: str = "aborted by a client",
        *,
        secret: bytes | None = None,
        timeout: float | None = None,
    ) -> None:
        """Abort a transaction by its reservation, or by a token with the right abort. Repeating the call is fine.

        A reservation that no writer began can't be begun after this. The id (16 bytes) does in the lane that began
        it, for operators, and with the ``secret`` of what prepared it.

        Raises: AlreadyCommitted, InvalidToken, NotAuthorized, UnknownTransaction, Expired, NotReady,
        DeadlineExceeded.
        """
        deadline = self._deadline(timeout)
        if isinstance(transaction, Reservation):
            abort_reserved(self._session, transaction, reason, deadline)
        else:
            if id_of(transaction) != transaction:
                check_right(peek(transaction), Rights.ABORT)
            self._session.abort(transaction, reason, deadline, secret)

    def settle(
        self,
        transaction: bytes,
        reason: str = "settled by an operator",
        *,
        presume: bool | None = None,
        timeout: float | None = None,
    ) -> None:
        """Abort a transaction in all its streams: one of them is LOST, so its merge can't go on.

        ``presume``: it is PREPARED, and its coordinator will never say how it ends; True commits it.

        For operators, by its id or a token of it. Repeating the call is fine. Consumers that read the topics of its
        other streams directly, without the history, may have seen events of it and keep seeing them: events can't
        be taken out.

        Raises: IllegalState (no stream of it is lost, or its merge has not begun: `abort` it), AlreadyCommitted,
        InvalidToken, UnknownTransaction, Expired, NotReady, DeadlineExceeded (repeating is safe).
        """
        deadline = self._deadline(timeout)
        self._session.settle(id_of(transaction), reason, deadline, presume)

    def state(
        self, transaction: bytes | str | Reservation, *, timeout: float | None = None
    ) -> TransactionInfo:
        """The state of a transaction, given its token, id (16 bytes or 32 digits) or reservation. Changes nothing.

        Raises: UnknownTransaction (no controller knows it *so far*: a command may be on its way, `resolve` makes
        this final; or this client may not see it), NotAuthorized (the token's time is over), Expired,
        InvalidToken, NotReady, DeadlineExceeded.
        """
        txn_id, _, token = asked_about(self._session, transaction)
        return info_of(self._session.state(txn_id, token, self._deadline(timeout)))

    def resolve(
        self, transaction: bytes | str | Reservation, *, timeout: float | None = None
    ) -> TransactionInfo:
        """`state`, made final: a transaction that no controller knows is aborted, so that it can never begin.

        Raises: Expired, ClockSkew (an unknown id, made more than a day ahead of the controller's clock: it can't
        begin either), InvalidToken, NotReady, DeadlineExceeded (repeating is safe).
        """
        deadline = self._deadline(timeout)
        return info_of(self._session.resolve(*asked_about(self._session, transaction), deadline))

    def transactions(
        self,
        scope: str | None = None,
        finished: bool = False,
        limit: int = 100,
        *,
        timeout: float | None = None,
    ) -> list[TransactionInfo]:
        """Open transactions, the oldest first; with ``finished`` also the ended ones, the newest first.

        Raises: UnknownScope, InvalidArgument (``limit`` is 1 to 10,000), NotReady, DeadlineExceeded.
        """
        self._shared.check()
        check_type("a limit", limit, int)
        wanted = ListTransactions(scope, finished, limit, None)
        found = self._session.transactions(wanted, self._shared.deadline(timeout))
        return [info_of(outcome) for outcome in found]

    def prepared(
        self,
        scope: str | None = None,
        *,
        secret: bytes | None = None,
        limit: int = 10_000,
        timeout: float | None = None,
    ) -> list[TransactionInfo]:
        """Prepared transactions, which wait for their coordinator's word, the oldest first.

        ``secret``: those prepared ``by`` its SHA-256, whichever lane began them. Raises: as `transactions`.
        """
        self._shared.check()
        wanted = ListTransactions(scope, False, limit, None, True, secret)
        found = self._session.transactions(wanted, self._shared.deadline(timeout))
        return [info_of(outcome) for outcome in found]

    def series(
        self, scope: str, name: str | None = None, *, timeout: float | None = None
    ) -> list[SeriesInfo]:
        """The latest number of each series of a scope, by name; ``name``: of this series alone, if it has a commit.

        Raises: UnknownScope, NotReady, DeadlineExceeded.
        """
        return self._session.series(scope, name, self._deadline(timeout))

    def set_series(
        self,
        scope: str,
        name: str,
        number: int,
        *,
        expected: int | None,
        timeout: float | None = None,
    ) -> None:
        """Move a series to ``number`` (-1: as if it had no commit): the next commit must have a higher one.

        Takes the right series. ``expected``: its number now (None: no commit).

        Raises: IllegalState (its number is another one), NotAuthorized, InvalidArgument,
        UnknownScope, NotReady, DeadlineExceeded (repeating is safe).
        """
        deadline = self._deadline(timeout)
        partition = self._session.find_scope(check_scope(scope), deadline)
        command = SetSeries(scope, name, expected, number)
        self._session.ask(partition, command, SeriesList, deadline)

    # -- its end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free everything. Open handles go stale at the controller: abort them first."""
        if self._shared.forked:
            raise NotForkSafe("this client was made before a fork: the parent closes it")
        with self._close_lock:
            if self._shared.closed:
                return
            self._shared.closed = True
        for handle in list(self._shared.handles):
            handle.client_closes()
        self._heart.close()
        if self._ports.readers is not None:
            self._ports.readers.close()
        self._ports.journals.close()
        self._ports.bus.close()

    def __del__(self) -> None:
        shared = getattr(self, "_shared", None)
        # At the process's end `_at_exit` closes clients, while the modules it needs are still loaded.
        if shared and not shared.closed and not shared.forked and not sys.is_finalizing():
            self.close()

    def _after_fork(self) -> None:
        self._shared.forked = True
        for handle in list(self._shared.handles):
            handle.after_fork()
        if self._ports.readers is not None:
            self._ports.readers.after_fork()
        self._ports.bus.after_fork()
        self._ports.journals.after_fork()


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
