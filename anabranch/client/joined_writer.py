"""The handle of who joins a transaction, by its token or before anybody began it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from anabranch.client.handle import Handle, Shared
from anabranch.client.ports import RecordHeaders
from anabranch.client.receipt_account import StreamLane, WriterAccount
from anabranch.client.reservation import Reservation, token_to_write
from anabranch.core.ids import txn_text
from anabranch.core.tokens import peek
from anabranch.errors import AlreadyCommitted, Expired, IllegalState, TransactionAborted
from anabranch.schemas import records as r
from anabranch.types import Receipt

if TYPE_CHECKING:
    from anabranch.batches.columns_write import EventColumns


class Writer(Handle):
    """A writer of somebody's transaction. Leaving its `with` cleanly finishes it, by an exception doesn't.

    Made by `Client.join`. Any thread may use it; each join is a writer of its own.
    """

    def __init__(
        self, shared: Shared, transaction: bytes | Reservation, *, heartbeat: bool
    ) -> None:
        claims = transaction if isinstance(transaction, Reservation) else peek(transaction)
        super().__init__(shared, claims.scope, claims.keepalive_ms)
        self._heartbeat = heartbeat
        self._account = WriterAccount(
            claims.txn_id, self._session.random64(), shared.journals.writer()
        )
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
        """Begin what is only reserved so far, unless somebody has."""
        if self._token is None and self._reserved is not None:
            try:
                self._opened(token_to_write(self._session, self._reserved, deadline))
            except (TransactionAborted, AlreadyCommitted, Expired) as error:
                self._end(error)
                raise

    def open(self, timeout: float | None = None) -> None:
        """Begin what is only reserved, unless somebody has, and send heartbeats if it was joined with them.

        The first write does it by itself; this is for a writer that has to wait for its first event. Raises: as
        `write`.
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

        One that joined a reservation and wrote nothing has an empty receipt, of which nobody is told.

        Raises: WriteFailed (for ever: join again and rewrite), DeadlineExceeded (again is safe), NotReady (a
        stream's journal is not found: again is safe), StreamLost (nor will it be), TransactionAborted,
        AlreadyCommitted, IllegalState, OutcomeUnknown (it is being committed without this).
        """
        with self._lock:
            self._check_writable()
            return self._register(timeout, finished=False)

    def finish(self, timeout: float | None = None) -> Receipt:
        """`flush`, and say that this writer is complete. Returns the same receipt ever after."""
        with self._lock:
            if self._finished is None:
                self._check_writable()
                self._finished = self._register(timeout, finished=True)
                self._discard()
            return self._finished

    def discard(self) -> None:
        """Drop what is not flushed; what is stays out of the commit unless its receipt is named."""
        with self._lock:
            if self._finished is None and self._over is None:
                self._end(IllegalState("the writer was discarded"))
            self._discard()

    def _register(self, timeout: float | None, *, finished: bool) -> Receipt:
        deadline = self._shared.deadline(timeout)
        self._flush(deadline)
        if self._account is None:
            raise IllegalState("the writer has no account")
        record: r.Receipt = self._account.receipt(finished=finished)
        if self._token is not None:  # else nothing was written, and nothing begun
            self._session.register(self._token, record, deadline)
        return Receipt(record)

    def _check_writable(self) -> None:
        self._shared.check()
        if self._finished is not None:
            raise IllegalState("the writer is finished: join again to write more")
        self._check_not_over()
