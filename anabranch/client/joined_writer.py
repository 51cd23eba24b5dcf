"""The handle of a joined writer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from anabranch.client.handle import Handle, Shared
from anabranch.client.receipt_account import StreamLane
from anabranch.client.reservation import Reservation, token_to_write
from anabranch.core.ids import txn_text
from anabranch.core.legal_names import check_type
from anabranch.core.limits import LABEL
from anabranch.core.tokens import Rights, Token, check_right, peek
from anabranch.errors import AlreadyCommitted, Expired, IllegalState, TransactionAborted
from anabranch.ports import RecordHeaders
from anabranch.schemas import records as r
from anabranch.types import Receipt

if TYPE_CHECKING:
    from anabranch.batches.columns_write import EventColumns


class Writer(Handle):
    """A writer of a transaction begun elsewhere. Leaving its `with` without an exception finishes it.

    Made by `Client.join`; each join is a writer of its own. Any thread may use it.
    """

    def __init__(
        self,
        shared: Shared,
        transaction: bytes | Reservation,
        *,
        heartbeat: bool,
        label: str = "",
    ) -> None:
        check_type("a label", label, str)
        LABEL.check(len(label), "the label of a writer")
        claims: Reservation | Token
        if isinstance(transaction, Reservation):
            claims = transaction
        else:
            claims = peek(transaction)
            check_right(claims, Rights.WRITE)
            if heartbeat:
                check_right(claims, Rights.HEARTBEAT)
            shared.session.observe(claims.seen)
        super().__init__(shared, claims.scope, claims.keepalive_ms)
        self._heartbeat = heartbeat
        self._label = label
        self._account = self._new_account(claims.txn_id)
        self._finished: Receipt | None = None
        self._reserved: Reservation | None = None
        if isinstance(transaction, Reservation):
            self._reserved = transaction
        else:
            self._opened(transaction)

    def _opened(self, token: bytes) -> None:
        self._token = token
        if self._heartbeat:
            self.beating = True
            self._shared.heart(self)

    def _open(self, deadline: float) -> None:
        """Begin a reservation that has not begun."""
        if self._token is None and self._reserved is not None:
            try:
                self._opened(token_to_write(self._session, self._reserved, deadline))
            except (TransactionAborted, AlreadyCommitted, Expired) as error:
                self._end(error)
                raise

    def open(self, timeout: float | None = None) -> None:
        """Begin a reservation that has not begun, and send heartbeats if the writer was joined with them.

        The first write calls this by itself. Call it if the first event may be late. Raises: as `write`.
        """
        with self._lock:
            self._check_writable()
            self._open(self._shared.deadline(timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if self._shared.forked:
            return
        if error is None:
            self.finish()
        elif self._finished is None:
            self.discard()

    def __repr__(self) -> str:
        return f"<Writer of {txn_text(self.txn_id)}>"

    @property
    def txn_id(self) -> bytes:
        """The transaction, 16 bytes."""
        if self._account is None:
            raise IllegalState("the writer has no account")
        return self._account.txn_id

    def _write_cold(
        self,
        stream: str,
        key: bytes | None,
        value: bytes | None,
        headers: RecordHeaders | None,
        timestamp: int | None,
    ) -> None:
        self._check_writable()
        deadline = self._shared.deadline(None)
        self._open(deadline)
        lane = self._touch(stream, deadline)
        lane.write(key, value, headers, timestamp)
        self._hot[stream] = lane.write

    def _lane(self, stream: str, pieces: Sequence[EventColumns]) -> StreamLane:
        self._check_writable()
        deadline = self._shared.deadline(None)
        self._open(deadline)
        return self._touch(stream, deadline)

    def flush(self, timeout: float | None = None) -> Receipt:
        """Wait until everything written is acknowledged, and register the receipt; the writer goes on.

        A writer that joined a reservation and wrote nothing gets an empty receipt, which is not registered.

        Raises: WriteFailed (join again and rewrite), DeadlineExceeded (repeating is safe), NotReady (a stream's
        journal is missing: repeating is safe), StreamLost (the journal won't come back), TransactionAborted,
        AlreadyCommitted, IllegalState, OutcomeUnknown (the transaction is being committed without this).
        """
        with self._lock:
            self._check_writable()
            return self._register(timeout, finished=False)

    def finish(self, timeout: float | None = None) -> Receipt:
        """`flush`, and mark this writer as complete. Later calls return the same receipt."""
        with self._lock:
            if self._finished is None:
                self._check_writable()
                self._finished = self._register(timeout, finished=True)
                self._discard()
            return self._finished

    def acknowledged(self, deadline: float) -> tuple[bytes, r.Receipt]:
        """As `Handle.acknowledged`; once finished, the receipt of that."""
        if self._finished is not None and self._token is not None:
            return self._token, self._finished.record
        return super().acknowledged(deadline)

    def discard(self) -> None:
        """Drop unflushed writes; the commit takes the flushed ones only if it names their receipt."""
        with self._lock:
            if self._finished is None and self._over is None:
                self._end(IllegalState("the writer was discarded"))
            self._discard()

    def _register(self, timeout: float | None, *, finished: bool) -> Receipt:
        deadline = self._shared.deadline(timeout)
        self._flush(deadline)
        if self._account is None:
            raise IllegalState("the writer has no account")
        seen = self._session.highest_timestamp
        record: r.Receipt = self._account.receipt(finished=finished, seen=seen)
        if self._token is not None:  # else nothing was written or begun
            self._session.register(self._token, record, deadline)
        return Receipt(record)

    def _check_writable(self) -> None:
        self._shared.check()
        if self._finished is not None:
            raise IllegalState("the writer is finished: join again to write more")
        self._check_not_over()
