"""The handle of a transaction's beginner."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, Self

from anabranch.client.buffered import Buffered, check_consumed, place_null_keys
from anabranch.client.handle import (
    QUIET_S,
    Shared,
)
from anabranch.client.receipt_account import check_taken
from anabranch.client.reservation import (
    Reservation,
    abort_reserved,
)
from anabranch.client.session import no_replica, unknown
from anabranch.core.ids import is_marked, txn_text
from anabranch.core.legal_names import check_number
from anabranch.core.transaction_states import IN_DOUBT, USABLE, HandleOp, HandleState
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    ClockSkew,
    EventTooLarge,
    Expired,
    IllegalState,
    InvalidArgument,
    LocksBroken,
    MalformedRecord,
    NotAuthorized,
    OutcomeUnknown,
    TenureLost,
    TransactionAborted,
    UnsupportedVersion,
)
from anabranch.schemas import records as r
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

log = logging.getLogger("anabranch.client")

# Refusals that say nothing of a copy that was sent before: its lane had the right, or its id was not too old yet.
_OF_ONE_COPY = (NotAuthorized, Expired, ClockSkew)


class Reads(Protocol):
    """The reads of an open transaction on tables, as far as its commit needs them."""

    @property
    def vouched(self) -> tuple[r.Vouched, ...]:
        """The sets of locks that were looked at."""

    def look_again(self, answer: r.LookAgain, deadline: float) -> None:
        """Check the locks that the controller names. Raises: LocksBroken, NotReady (the replica is late)."""


class Transaction(Buffered):
    """A transaction begun here. Use it as a context manager: leaving without a commit aborts.

    Writes stay in memory first. If the commit finds all of them there, and no token was asked for, the whole
    transaction is one command. Else it opens: the controller begins it, and the writes go to journals. Made by
    `Client.begin`. Any thread may use it.
    """

    def __init__(
        self,
        shared: Shared,
        scope: str,
        name: str | None,
        keepalive_ms: int,
        tenure: Tenure | None = None,
        *,
        snapshot: int = 0,
    ) -> None:
        """``snapshot``: hybrid time that its reads of tables are at; 0: it has none."""
        super().__init__(shared, scope, name, keepalive_ms, tenure, snapshot)
        self._reads: Reads | None = None
        self._outcome: r.Outcome | None = None  # of its prepare or commit
        self._own: r.Receipt | None = None  # of the commit that was sent
        self._shot: r.PrepareEvents | None = None  # all events in one command

    def read_by(self, reads: Reads) -> None:
        """Let this look at what it read of tables, when it commits."""
        self._reads = reads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if self._result is not None or self._shared.forked:
            return
        if self.state in ("doubted", "prepared"):  # others may rely on the outcome
            self.beating = False
            return
        written = self._written()
        if error is None and self._over is None and written:
            log.warning("%r is left without commit: its %d events are dropped", self, written)
        try:
            if error is None:
                self.abort("its with block was left without commit")
            else:
                self.abort(f"left by {type(error).__name__}", timeout=QUIET_S)
        except AlreadyCommitted:
            log.warning("%r is left without commit here, and is committed all the same", self)
        except AnabranchError as trouble:
            if error is None:
                raise
            log.warning("%r could not be aborted and will go stale: %s", self, trouble)

    def _written(self) -> int:
        lanes = self._account.lanes.values() if self._account is not None else ()
        return len(self._buffer) + sum(a.count for x in lanes for a in x.accounts.values())

    def __repr__(self) -> str:
        known = txn_text(self._txn_id) if self._txn_id else "buffered"
        return f"<Transaction {self._scope} {known}>"

    @property
    def txn_id(self) -> bytes | None:
        """16 bytes; None before anything was sent."""
        return self._txn_id

    @property
    def result(self) -> Result | None:
        """The outcome once committed; known at once if the name was committed before."""
        return self._result

    @property
    def prepared(self) -> TransactionInfo | None:
        """This transaction, or the one that has its name, as it was prepared; None: it is not."""
        outcome = self._outcome
        return info_of(outcome) if self.state == "prepared" and outcome is not None else None

    # -- ending ---------------------------------------------------------------------------------------

    def commit(
        self,
        receipts: Sequence[Receipt | bytes] | None = None,
        *,
        name: str | None = None,
        number: int | None = None,
        consumed: r.Consumed | None = None,
        secret: bytes | None = None,
        timeout: float | None = None,
    ) -> Result:
        """Commit: everything becomes visible at once. Repeating it returns the same result.

        ``receipts``: the writers to take besides this handle's own writes; None: every finished one. ``name``:
        claim this name; if it is committed already, its outcome is the result, and this transaction has no effect.
        ``number``, 0 or more: claim this number of the series ``name`` instead; it must be above all numbers that
        were ever committed in the series. ``consumed``: of a `TaskReader`; these positions move with the events, or
        neither does. The transaction was begun with its tenure, and has no name. ``secret``: of who prepared it, as
        `prepare` says. ``timeout`` in seconds.

        Raises:
            TenureLost: another one has taken tasks of ``consumed``; this transaction is aborted, or committed if
                their positions say so: take them again.
            AlreadyCommitted: the series is beyond this number, or its outcome is forgotten; this one is aborted.
            WritersUnfinished, ReceiptMismatch, ReceiptsNotCovered, UnknownStream, InvalidArgument, StreamLost,
                NotAuthorized, HeldByPrepared, EventTooLarge, IllegalState: nothing is changed; correct it and
                commit again, or abort. NotReady, DeadlineExceeded, TooManyTransactions, TooMuchStaged: likewise.
            TransactionAborted, LocksBroken: it is over without effect; begin a new one.
            ClockSkew: it was not begun: this machine's clock is more than a day ahead of the controller's.
            WriteFailed: an own write failed; abort.
            OutcomeUnknown: no answer in time. Commit again, or ask ``client.state`` later.
        """
        with self._lock:
            if self._result is not None:
                return self._result
            self._shared.check()
            self._check_not_over()
            check_number(name, number)
            check_consumed(self._tenure, consumed)
            deadline = self._shared.deadline(timeout)
            if self._token is None and self.state != "open" and not receipts and number is None:
                return self._commit_one_shot(name, deadline, consumed)
            if self._token is None and receipts:
                raise InvalidArgument(
                    "no other process can have written, as the token was never asked for: give no receipts"
                )
            if self._token is None or self.state in USABLE:
                self._open(deadline)
            if self._result is None:
                self._commit_open(receipts, name, deadline, number, consumed, secret=secret)
            return self._done()

    def prepare(
        self,
        receipts: Sequence[Receipt | bytes] | None = None,
        *,
        name: str | None = None,
        number: int | None = None,
        by: bytes = b"",
        attempt: bytes = b"",
        timeout: float | None = None,
    ) -> TransactionInfo:
        """Make sure of a commit, and leave the decision for later: `commit` or `abort` end it, days later too.

        Silence never aborts it; no reader, other commit or scaling waits for it. There is no write after it.
        ``by``: the SHA-256 of a secret (32 bytes), which alone ends it then, from any process. ``attempt``: up to
        64 bytes; repeating the call with the same one is harmless. The state of the result is PREPARED, or
        COMMITTED if name or number were committed before: then this transaction has no effect.

        Raises: as `commit`; HeldByPrepared (by another one that has the claim), TooManyTransactions, TooMuchStaged
        (too many are prepared), IllegalState (another attempt prepared it).
        """
        with self._lock:
            self._shared.check()
            if self._outcome is None:
                self._check_not_over()
                check_number(name, number)
                if self._tenure is not None:
                    raise InvalidArgument("a transaction that moves positions can't be prepared")
                deadline = self._shared.deadline(timeout)
                prepare = r.Prepare(by, attempt)
                try:
                    if (
                        receipts
                        or number is not None
                        or not self._prepare_events(name, prepare, deadline)
                    ):
                        self._open(deadline)
                        if self._outcome is None:
                            self._commit_open(receipts, name, deadline, number, prepare=prepare)
                finally:
                    if self.state == "sent":
                        self._move("doubt")
            if self._outcome is None:
                raise IllegalState("the transaction is not prepared")
            return info_of(self._outcome)

    def _prepare_events(self, name: str | None, prepare: r.Prepare, deadline: float) -> bool:
        """Prepare by one command; False if the writes are too many for that, or are in journals."""
        if self._shot is None and (self._token is not None or self.state == "open"):
            return False
        txn_id = self._make_id(deadline)
        self._secret = self._secret or self._session.new_secret()
        if self._shot is None:
            place_null_keys(self._shared, self._buffer, deadline)
        parts = txn_id, self._scope, name, tuple(self._buffer), self._secret, prepare
        self._shot = self._shot or r.PrepareEvents(*parts)
        if self._token is None:
            begin = r.Begin(txn_id, self._scope, name, self.keepalive_ms, self._secret)
            self._token = self._session.token_of(begin)
        self._move("send")
        try:
            outcome = self._session.prepare_events(self._shot, deadline)
        except AnabranchError as error:
            if self.state == "sent" and isinstance(error, EventTooLarge):
                self._shot = self._token = None
                self._move("refuse_shot")
                return False
            self._failed_to_commit(error, "refuse_shot")
            if self.state not in IN_DOUBT:  # resolving it may have given up the id
                self._shot = self._token = self._txn_id = None
            raise
        self._take_outcome(outcome)
        return True

    def _commit_one_shot(
        self, name: str | None, deadline: float, consumed: r.Consumed | None
    ) -> Result:
        txn_id = self._make_id(deadline, marked=consumed is not None)
        place_null_keys(self._shared, self._buffer, deadline)
        # From here on an interruption leaves it in doubt.
        self._move("send")
        try:
            shot = r.OneShot(txn_id, self._scope, name, tuple(self._buffer), consumed)
            outcome = self._session.one_shot(shot, deadline)
        except EventTooLarge:
            self._move("refuse_shot")
            self._txn_id = None if consumed is not None else txn_id  # a marked one is for one-shots
            self._open(deadline)
            self._commit_open(None, name, deadline, consumed=consumed)
            return self._done()
        except AnabranchError as error:
            self._failed_to_commit(error, "refuse_shot")
            if self.state == "buffered":
                self._txn_id = None  # resolving it may have given up the id
            raise
        self._take_outcome(outcome)
        return self._done()

    def _commit_open(
        self,
        receipts: Sequence[Receipt | bytes] | None,
        name: str | None,
        deadline: float,
        number: int | None = None,
        consumed: r.Consumed | None = None,
        prepare: r.Prepare | None = None,
        secret: bytes | None = None,
    ) -> None:
        others = receipt_records(receipts, self._txn_id)
        own: tuple[r.Receipt, ...] = ()
        if self._token is None or (self._account is None and self.state in USABLE):
            raise IllegalState("the transaction is not open")
        if self._account is not None:
            if self._own is None:
                self._flush(deadline)
                seen = self._session.highest_timestamp
                self._own = self._account.receipt(finished=True, seen=seen)
            own = (self._own,) if self._account.lanes else ()
        self._hot.clear()
        # From here on an interruption leaves it in doubt.
        self._move("send")
        reads = self._reads
        looked = () if reads is None else reads.vouched
        command = r.Commit(
            self._token, own, others, name, 0, number, consumed, prepare, secret, looked
        )
        outcome = self._send(command, deadline)
        while isinstance(outcome, r.LookAgain):
            if outcome.decided:
                self._move("under_way")
            if reads is None:
                raise no_replica()
            # An error of the check says nothing about the commit that was sent.
            reads.look_again(outcome, deadline)
            command = replace(command, vouched=reads.vouched)
            outcome = self._send(command, deadline)
        warn_left_out(outcome, receipts)
        self._take_outcome(outcome)

    def _send(self, command: r.Commit, deadline: float) -> r.Outcome | r.LookAgain:
        try:
            answer = self._session.try_commit(command, deadline)
            if isinstance(answer, r.Outcome):
                if command.own:
                    answer = self._session.whole(answer, command.token, deadline)
                check_taken(answer, command.own, self._txn_id)
        except AnabranchError as error:
            self._failed_to_commit(error, "refuse")
            raise
        return answer

    def _failed_to_commit(self, error: AnabranchError, refused: HandleOp) -> None:
        """Handle an error of a send. ``refused``: the op for an error that means that the copy had no effect."""
        if isinstance(error, TransactionAborted | LocksBroken | AlreadyCommitted | TenureLost):
            self._end(error)
            self._discard()
        elif isinstance(error, _OF_ONE_COPY) and self.state in ("doubted", "decided"):
            raise unknown(f"is not known: {error}", self._txn_id or b"", self._token) from error
        elif isinstance(error, OutcomeUnknown | MalformedRecord | UnsupportedVersion):
            self._move("doubt")  # there is no answer, or it is unreadable
            self.beating = False
            self._hot.clear()
        else:
            self._move(refused)
            if self.state in USABLE:
                self._own = None  # more may be written before the next commit

    def _take_outcome(self, outcome: r.Outcome) -> None:
        if outcome.state == "PREPARED":
            self._outcome = outcome
            self._move("prepare")
            if outcome.txn_id != self._txn_id:  # the name's; its id does for its owner's lane
                self._txn_id = self._token = outcome.txn_id
            self.beating = False
            self._hot.clear()
            self._buffer.clear()
            return
        if outcome.state != "COMMITTED":
            self._end(TransactionAborted(f"the transaction is aborted ({outcome.reason})"))
            self._check_not_over()
        self._outcome, self._result = outcome, result_of(outcome)
        self._move("commit")
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
        """Give up: after this, no event of it ever becomes visible. Repeating the call is fine.

        ``secret``: as `commit`. Raises: AlreadyCommitted. DeadlineExceeded, NotReady, OutcomeUnknown: the abort is
        not certain; repeat it (if no commit was sent, silence makes the controller abort it).
        """
        with self._lock:
            if self._result is not None:
                raise AlreadyCommitted("the transaction is committed: there is no abort any more")
            self._shared.check()
            if isinstance(self._over, TransactionAborted):
                return
            before, self._over = self.state, None
            self._move("abort")
            try:
                self._abort(reason, self._shared.deadline(timeout), secret, before)
                self._end(TransactionAborted(f"the transaction is aborted ({reason})"))
            except AlreadyCommitted:  # perhaps with all of this handle's writes: `commit` asks
                self._move("late")
                self.beating = False
                self._hot.clear()
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

    def gone(self, outcome: r.Outcome) -> None:
        """As `Handle.gone`; a commit may have been this handle's own, so `commit` still asks for its outcome."""
        if outcome.state != "COMMITTED":
            super().gone(outcome)
        elif self.beating:
            self.beating = False
            self._move("late")
            self._hot.clear()

    def _check_usable(self) -> None:
        self._shared.check()
        if self._result is not None:
            raise AlreadyCommitted("the transaction is committed: its result stands")
        if self.state not in USABLE:
            self._check_not_over()
            self._move("write")  # raises why not

    def _end(self, error: AnabranchError) -> None:
        super()._end(error)
        self._move("fail")

    def _check_not_over(self) -> None:
        super()._check_not_over()
        if self.state == "aborting":
            why = "is not known, because its abort was not answered: abort it again"
            raise unknown(why, self._txn_id or b"", self._token)
