"""A transaction that is agreed on and not yet begun."""

from __future__ import annotations

from dataclasses import dataclass, field

from anabranch.client.session import Session
from anabranch.core.ids import (
    TXN_ID_SIZE,
    check_name,
    check_scope,
    check_type,
    parse_txn_text,
    txn_text,
)
from anabranch.core.states import FINISHED
from anabranch.core.tokens import peek
from anabranch.errors import AlreadyCommitted, InvalidArgument, TransactionAborted
from anabranch.schemas import records as r
from anabranch.schemas.codec import decode_as, encode
from anabranch.types import committed, result_of


@dataclass(frozen=True, slots=True)
class Reservation:
    """A transaction's id, and all that it takes to begin it: whoever writes first does.

    A plain value: hand it on pickled, or as bytes. Whoever has it may write, commit and abort: keep it from
    others. Made by `Client.reserve`; good for as long as outcomes are kept. ``keepalive_ms``: milliseconds.
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
        """The command that begins it."""
        return r.Begin(self.txn_id, self.scope, self.name, self.keepalive_ms, self.secret)

    def to_bytes(self) -> bytes:
        """The reservation as bytes, the same in every language: the `Begin` command that was not sent."""
        return encode(self.begin)

    @classmethod
    def from_bytes(cls, data: bytes) -> Reservation:
        """The reservation of `to_bytes`. `MalformedRecord` or `UnsupportedVersion` if it is not one."""
        begin = decode_as(r.Begin, bytes(data))
        return cls(begin.scope, begin.txn_id, begin.keepalive_ms, begin.secret, begin.name)


def keepalive_ms_of(seconds: float) -> int:
    """A keepalive in milliseconds."""
    check_type("a keepalive, in seconds,", seconds, int, float)
    if not 1 <= seconds < (1 << 31) / 1000:
        raise InvalidArgument(f"keepalive {seconds!r}: seconds, at least 1")
    return int(seconds * 1000)


def id_of(transaction: bytes | str | Reservation) -> bytes:
    """The transaction id of a token, an id, its text, or a reservation."""
    if isinstance(transaction, Reservation):
        return transaction.txn_id
    if isinstance(transaction, str):
        return parse_txn_text(transaction)
    check_type("a transaction's token or id", transaction, bytes)
    return transaction if len(transaction) == TXN_ID_SIZE else peek(transaction).txn_id


def reserve(
    session: Session, scope: str, name: str | None, keepalive: float, deadline: float
) -> Reservation:
    """A new reservation; only the scope is looked up."""
    keepalive_ms = keepalive_ms_of(keepalive)
    check_name(name)
    txn_id = session.new_txn_id(check_scope(scope), deadline)
    return Reservation(scope, txn_id, keepalive_ms, session.new_secret(), name)


def begin_reserved(
    session: Session, reservation: Reservation, deadline: float
) -> r.Begun | r.Outcome:
    """Begin it if nobody has yet; an `Outcome` means that it, or what it gave way to, is committed.

    Raises: TransactionAborted, AlreadyCommitted, Expired, and what any `begin` raises.
    """
    begun = session.begin(reservation.begin, deadline)
    if isinstance(begun, r.Outcome):
        return committed(begun)
    return begun


def token_to_write(session: Session, reservation: Reservation, deadline: float) -> bytes:
    """The token for a writer. `AlreadyCommitted`, with the result, where there is nothing to add to."""
    begun = begin_reserved(session, reservation, deadline)
    if isinstance(begun, r.Begun):
        return begun.token
    text = "the transaction is committed: nothing can be added"
    if begun.txn_id != reservation.txn_id:
        text = f"what it claims was committed before by {txn_text(begun.txn_id)}: there is nothing to do"
    raise AlreadyCommitted(text, result=result_of(begun))


def abort_reserved(
    session: Session, reservation: Reservation, reason: str, deadline: float
) -> None:
    """Abort it. If nobody has begun it, nobody can from now on."""
    outcome = session.resolve(reservation.txn_id, deadline)
    if outcome.state not in FINISHED:
        # Somebody began it, so this is a repetition: it brings the token and begins nothing.
        try:
            begun = begin_reserved(session, reservation, deadline)
        except TransactionAborted:
            return
        if isinstance(begun, r.Begun):
            outcome = session.abort(begun.token, reason, deadline)
        else:
            outcome = begun
    if outcome.state == "COMMITTED" and outcome.txn_id == reservation.txn_id:
        raise AlreadyCommitted(
            "the transaction is committed: there is no abort any more", result=result_of(outcome)
        )
