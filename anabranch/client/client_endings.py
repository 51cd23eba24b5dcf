"""The calls of a client that end transactions, and ask about them, by token, id or reservation."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.client.client_streams import Streams
from anabranch.client.reservation import (
    Reservation,
    abort_reserved,
    asked_about,
    begin_reserved,
    id_of,
)
from anabranch.core.legal_names import check_number, check_scope, check_type
from anabranch.core.tokens import Rights, check_right, peek
from anabranch.schemas.records import (
    Commit,
    Consumed,
    ListOpen,
    ListTransactions,
    Outcome,
    Prepare,
    SeriesInfo,
    SeriesList,
    SetSeries,
)
from anabranch.types import (
    Listed,
    OpenTransaction,
    Receipt,
    Result,
    TransactionInfo,
    info_of,
    open_of,
    receipt_records,
    result_of,
    warn_left_out,
)


class Endings(Streams):
    """See `Client`, which has these calls."""

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
            if isinstance(begun, Outcome) and begun.txn_id != txn_id:
                return begun  # what it gave way to
            transaction = self._session.token_of(transaction.begin, begun.begun_ms)
        if secret is None or transaction != txn_id:
            token = peek(transaction)
            check_right(token, Rights.COMMIT)
            self._session.observe(token.seen)
        command = Commit(transaction, (), records, name, 0, number, consumed, prepare, secret)
        return self._session.commit(command, deadline)

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
        """Open transactions, the oldest first; with ``finished`` also the ended ones, the newest first.

        The list's ``missing``: control partitions that don't answer. Raises: UnknownScope, InvalidArgument
        (``limit`` is 1 to 10,000); NotReady, DeadlineExceeded (none answers).
        """
        self._shared.check()
        check_type("a limit", limit, int)
        wanted = ListTransactions(scope, finished, limit, None)
        return self._session.transactions(wanted, self._shared.deadline(timeout)).each(info_of)

    def open_transactions(
        self, scope: str | None = None, limit: int = 100, *, timeout: float | None = None
    ) -> Listed[OpenTransaction]:
        """Open transactions, the oldest first, with bytes, ages, what is left of keepalives, and streams.

        ``missing`` and errors: as in `transactions`.
        """
        self._shared.check()
        check_type("a limit", limit, int)
        wanted = ListOpen(scope, None, limit)
        return self._session.open_ones(wanted, self._shared.deadline(timeout)).each(open_of)

    def open_transaction(self, txn_id: bytes, *, timeout: float | None = None) -> OpenTransaction:
        """One transaction by its id, open or not, with its writers and how far its merge is.

        Raises: as `state`.
        """
        deadline = self._deadline(timeout)
        wanted = ListOpen(None, id_of(txn_id), 1)
        return open_of(self._session.open_ones(wanted, deadline)[0])

    def prepared(
        self,
        scope: str | None = None,
        *,
        secret: bytes | None = None,
        limit: int = 10_000,
        timeout: float | None = None,
    ) -> Listed[TransactionInfo]:
        """Prepared transactions, which wait for their coordinator's word, the oldest first.

        ``secret``: those prepared ``by`` its SHA-256, whichever lane began them. ``missing`` and errors:
        as in `transactions`.
        """
        self._shared.check()
        wanted = ListTransactions(scope, False, limit, None, True, secret)
        return self._session.transactions(wanted, self._shared.deadline(timeout)).each(info_of)

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
        deadline = self._alone("set_series", timeout)
        partition = self._session.find_scope(check_scope(scope), deadline)
        command = SetSeries(scope, name, expected, number)
        self._session.ask(partition, command, SeriesList, deadline)
