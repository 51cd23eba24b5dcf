"""Reservations of transactions that begin later, and tokens with fewer rights for other programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from anabranch.client.session import Session
from anabranch.clock import SystemClock
from anabranch.core.transaction_states import FINISHED
from anabranch.errors import AlreadyCommitted, InvalidArgument
from anabranch.protocol.ids import TXN_ID_SIZE, parse_txn_text, txn_text
from anabranch.protocol.legal_names import check_name, check_scope, check_type
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode_as, encode
from anabranch.protocol.tokens import (
    SEE,
    Rights,
    TokenBytes,
    check_right,
    id_named,
    peek,
    rights_of_names,
)
from anabranch.protocol.tokens import narrow as narrow_exactly
from anabranch.types import committed, result_of


@dataclass(frozen=True, slots=True)
class Reservation:
    """A transaction id, and all that its first writer needs to begin the transaction. Made by `Client.reserve`.

    A plain value: pass it on pickled, or as bytes. Keep it secret: its holder may write, commit and abort. Share it
    among writers of one lane, which then owns the transaction; writers of other lanes need a token. Valid during
    the retention of outcomes.
    """

    scope: str
    txn_id: bytes
    keepalive_ms: int
    secret: bytes = field(repr=False)
    name: str | None = None

    def __str__(self) -> str:
        return txn_text(self.txn_id)

    @property
    def begin(self) -> r.Begin:
        """The command that begins the transaction."""
        return r.Begin(self.txn_id, self.scope, self.name, self.keepalive_ms, self.secret)

    def to_bytes(self) -> bytes:
        """The `Begin` command as bytes, in a format that is the same in every language."""
        return encode(self.begin)

    @classmethod
    def from_bytes(cls, data: bytes) -> Reservation:
        """The reservation that `to_bytes` encoded. Raises `MalformedRecord` or `UnsupportedVersion`."""
        begin = decode_as(r.Begin, bytes(data))
        return cls(begin.scope, begin.txn_id, begin.keepalive_ms, begin.secret, begin.name)


def keepalive_ms_of(seconds: float) -> int:
    """A keepalive in milliseconds."""
    check_type("a keepalive, in seconds,", seconds, int, float)
    if not 1 <= seconds < (1 << 31) / 1000:
        raise InvalidArgument(f"keepalive {seconds!r}: seconds, 1 to {(1 << 31) // 1000:,}")
    return int(seconds * 1000)


def id_of(transaction: bytes | str | Reservation) -> bytes:
    """The transaction id of a token, an id, its text, or a reservation."""
    if isinstance(transaction, Reservation):
        return transaction.txn_id
    if isinstance(transaction, str):
        return parse_txn_text(transaction)
    check_type("a transaction's token or id", transaction, bytes)
    return id_named(transaction)


def asked_about(
    session: Session, transaction: bytes | str | Reservation
) -> tuple[bytes, str, bytes | None]:
    """Id, scope and token of a transaction. From an id alone the scope is empty and the token None."""
    txn_id = id_of(transaction)
    if isinstance(transaction, Reservation):
        return txn_id, transaction.scope, session.token_of(transaction.begin)
    if isinstance(transaction, str) or len(transaction) == TXN_ID_SIZE:
        return txn_id, "", None
    token = peek(transaction)
    return txn_id, token.scope, transaction if token.rights & SEE else None


def reserve(
    session: Session, scope: str, name: str | None, keepalive: float, deadline: float
) -> Reservation:
    """A new reservation. The controller is asked only for the scope."""
    keepalive_ms = keepalive_ms_of(keepalive)
    check_name(name)
    txn_id = session.new_txn_id(check_scope(scope), deadline)
    return Reservation(scope, txn_id, keepalive_ms, session.new_secret(), name)


def begin_reserved(
    session: Session, reservation: Reservation, deadline: float
) -> r.Begun | r.Outcome:
    """Begin the transaction unless a writer did. Returns an `Outcome` if it, or another of its name, is committed.

    Raises: TransactionAborted, AlreadyCommitted, Expired, and all that `begin` raises.
    """
    begun = session.begin(reservation.begin, deadline)
    if isinstance(begun, r.Outcome):
        return committed(begun)
    return begun


def token_to_write(session: Session, reservation: Reservation, deadline: float) -> bytes:
    """The token for a writer. Raises `AlreadyCommitted`, with the result, if the transaction is committed."""
    begun = begin_reserved(session, reservation, deadline)
    if isinstance(begun, r.Begun):
        return session.token_of(reservation.begin, begun.begun_ms)
    text = "the transaction is committed: nothing can be added"
    if begun.txn_id != reservation.txn_id:
        text = f"what it claims was committed before by {txn_text(begun.txn_id)}: there is nothing to do"
    raise AlreadyCommitted(text, result=result_of(begun))


def abort_reserved(
    session: Session, reservation: Reservation, reason: str, deadline: float
) -> None:
    """Abort the transaction, so that no writer can begin it later."""
    token = session.token_of(reservation.begin)
    outcome = session.resolve(reservation.txn_id, reservation.scope, token, deadline)
    if outcome.state not in FINISHED:  # a writer began it
        try:
            outcome = session.abort(token, reason, deadline)
        except AlreadyCommitted:
            outcome = session.state(reservation.txn_id, token, deadline)
    if outcome.state == "COMMITTED" and outcome.txn_id == reservation.txn_id:
        raise AlreadyCommitted(
            "the transaction is committed: there is no abort any more", result=result_of(outcome)
        )


def commit_by(
    session: Session,
    transaction: bytes | Reservation,
    command: r.Commit,
    deadline: float,
    *,
    decided: bool = False,
) -> r.Outcome:
    """Commit or prepare a transaction by its token, id or reservation. Raises: as `Client.commit`.

    ``command``: complete except for the token. ``decided``: the decision is enough.
    """
    txn_id = id_of(transaction)
    if isinstance(transaction, Reservation):
        begun = begin_reserved(session, transaction, deadline)
        if isinstance(begun, r.Outcome) and begun.txn_id != txn_id:
            return begun  # the committed transaction of this name
        transaction = session.token_of(transaction.begin, begun.begun_ms)
    if command.secret is None or transaction != txn_id:
        token = peek(transaction)
        check_right(token, Rights.COMMIT)
        session.observe(token.seen)
    return session.commit(replace(command, token=transaction), deadline, decided=decided)


def abort_by(
    session: Session,
    transaction: bytes | Reservation,
    reason: str,
    secret: bytes | None,
    deadline: float,
) -> None:
    """Abort a transaction by its token, id or reservation. Raises: as `Client.abort`."""
    if isinstance(transaction, Reservation):
        abort_reserved(session, transaction, reason, deadline)
        return
    if id_of(transaction) != transaction:
        check_right(peek(transaction), Rights.ABORT)
    session.abort(transaction, reason, deadline, secret)


# -- tokens ------------------------------------------------------------------------------------------

RightNames: TypeAlias = "str | Iterable[str]"
WRITER = ("write", "heartbeat")  # the default rights of a token


def narrow(
    token: bytes,
    *,
    rights: RightNames | None = None,
    expires: float | None = None,
    lane: str | None = None,
) -> TokenBytes:
    """A token with fewer rights than this one, or valid for less time, or in one lane. Nothing is sent.

    The arguments are those of `Transaction.token`; None keeps what the token has. Raises: InvalidArgument (more
    than it has), InvalidToken.
    """
    return narrow_at(token, rights, expires, lane, SystemClock().wall())


def narrow_at(
    token: bytes, rights: RightNames | None, expires: float | None, lane: str | None, now: float
) -> TokenBytes:
    """As `narrow`, with the present time given as ``now``, in Unix seconds."""
    end_ms = None
    if expires is not None:
        check_type("a token's end, in seconds from now,", expires, int, float)
        if not 0 < expires < 1e10:
            raise InvalidArgument(f"a token expires in {expires!r} seconds: above 0")
        end_ms = int((now + expires) * 1000)
    chosen = None if rights is None else rights_of_names(rights)
    return narrow_exactly(token, rights=chosen, not_after_ms=end_ms, lane=lane)
