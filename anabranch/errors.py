"""Every error a caller can see, sorted by what the caller does next.

Four kinds, as in SlateDB's error model: *retry* the same call, *begin again*, *ask for the outcome*,
*fix the call*. `InvariantViolation` is none of them: it reports a defect in anabranch itself.

The class names double as the error codes of the wire protocol (``Refusal.code``), so that a client in
any language sorts them the same way: see ``docs/protocol.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def read_back(
    kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    """Rebuild an error from another process, whose constructor may take other arguments than ``args``."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class AnabranchError(Exception):
    """Base of all errors raised on purpose. The message says what to do."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        return read_back, (type(self), self.args, self.__dict__)


class RetryError(AnabranchError):
    """Nothing happened, or it is safe to repeat: call again, later."""


class BeginAgainError(AnabranchError):
    """The transaction is over without effect: begin a new one."""


class AskOutcomeError(AnabranchError):
    """The effect is not known here: ask with ``client.state(token)``."""


class FixCallError(AnabranchError):
    """The call can never succeed as it is: change it. Nothing was changed by it."""


class InvariantViolation(AnabranchError):
    """A rule that the code relies on does not hold: a defect in anabranch, please report it."""


class NotInstalled(AnabranchError, ModuleNotFoundError):
    """A package is missing that only an extra brings: the message has the command that gets it."""

    __reduce__ = ModuleNotFoundError.__reduce__


class NotSupported(AnabranchError):
    """This operating system, or this kind of threads, does not support it; the message says which one does."""


def check(condition: bool, message: str) -> None:
    """Raise `InvariantViolation` unless ``condition`` holds (never compiled away, unlike assert)."""
    if not condition:
        raise InvariantViolation(message)


# -- retry ------------------------------------------------------------------------------------------


class NotReady(RetryError):
    """No controller answers yet, or the cluster's topics do not exist: start `anabranch controller`."""


class DeadlineExceeded(RetryError):
    """A wait ended at its deadline and nothing was changed: call again with more time."""


class ReceiptsNotCovered(RetryError):
    """The journal did not show all that the receipts claim in time. The transaction is still open: commit again."""


class TooManyTransactions(RetryError):
    """The limit of open transactions is reached: wait for some to end."""


class TooManyUncommittedBytes(RetryError):
    """Open transactions have all the bytes in journals that they may: end some, or wait for some to end."""


class TooMuchLocked(RetryError):
    """Open transactions have all the registered locks that they may: end some, or wait for some to end."""


class WriteFailed(RetryError):
    """A write was not acknowledged; this writer gives no receipt any more: join again and rewrite."""


class NotLeader(RetryError):
    """This process lost its leadership in mid-work; a successor finishes. Internal to controllers."""


# -- begin again ------------------------------------------------------------------------------------


class TransactionAborted(BeginAgainError):
    """The transaction is aborted (by a client, an operator, staleness or a newer one of its name)."""


class OwnershipLost(BeginAgainError):
    """Another process took these tasks: take them again. Their positions say what is committed, this too."""


class LocksBroken(BeginAgainError):
    """Somebody else changed what the transaction read: begin it again, with what is there now.

    ``table``; ``key``: the row that was written (bytes); ``by``: the transaction that wrote it (16 bytes), and
    ``commit_timestamp``: when (hybrid time).
    """

    def __init__(
        self,
        message: str,
        *,
        table: str = "",
        key: bytes = b"",
        by: bytes = b"",
        commit_timestamp: int = 0,
    ) -> None:
        super().__init__(message)
        self.table, self.key, self.by, self.commit_timestamp = table, key, by, commit_timestamp


class Expired(BeginAgainError):
    """The outcome is older than the stated retention, or the id older than what is still known."""


# -- ask for the outcome ----------------------------------------------------------------------------


class OutcomeUnknown(AskOutcomeError):
    """The outcome is not known yet, after a deadline or during a commit: ``client.state`` tells it later.

    ``token`` (bytes, or None for a one-shot) and ``txn_id`` (16 bytes) name the transaction.
    """

    def __init__(
        self, message: str, *, txn_id: bytes | None = None, token: bytes | None = None
    ) -> None:
        super().__init__(message)
        self.txn_id = txn_id
        self.token = token


# -- fix the call -----------------------------------------------------------------------------------


class NotAuthorized(FixCallError):
    """A right is missing; the message names it, and the topic, group or other thing that it is for."""


class NameTaken(NotAuthorized):
    """Another lane has the name, or the series: choose another one, or let an operator end or move it."""


class InvalidToken(FixCallError):
    """The token is malformed, cut, or of a version that this side does not know."""


class UnknownTransaction(NotAuthorized):
    """No such transaction is known so far, or the sender may not do this with it: both read the same."""


class UnknownStream(FixCallError):
    """The stream does not exist: create it first."""


class StreamLost(FixCallError):
    """A topic of the stream was deleted or replaced: nothing can be committed there any more."""


class UnknownScope(FixCallError):
    """The scope does not exist: create a stream in it first."""


class UnknownProcessor(FixCallError):
    """The processor does not exist: create it first."""


class UnknownLane(FixCallError):
    """The lane does not exist: an operator makes it, with ``anabranch lane add``."""


class StreamExists(FixCallError):
    """The stream exists with other settings."""


class CrossScope(FixCallError):
    """The scopes are on different control partitions: one transaction writes to scopes of one, for now.

    A scope's place is chosen when it is made: ``create_stream(…, near=…)``.
    """


class WritersUnfinished(FixCallError):
    """A registered writer did not finish: give the receipts to take, or let it finish."""


class ReceiptMismatch(FixCallError):
    """A receipt and the journal disagree in count or checksum: that writer's data is not whole."""


class IllegalState(FixCallError):
    """The operation is impossible in the transaction's state; nothing changed."""


class NoLedger(FixCallError):
    """The database has no ledger, or another table of its name: `anabranch ledger create` makes it."""


class LedgerMoved(FixCallError):
    """The database is not the one that the ledger was made in: copied, restored or promoted."""


class LedgerDiffers(FixCallError):
    """The database has committed what was aborted by hand: the row stays, and a person mends it."""


class ReservedByPrepared(FixCallError):
    """A prepared transaction has the name, or the series: its coordinator has to end it (`Client.prepared`)."""


class AlreadyCommitted(FixCallError):
    """The transaction (or its name, or its number) is committed: nothing can be added to its result.

    ``result``: that `anabranch.Result`, where it is known here, else None.
    """

    def __init__(self, message: str, *, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class UnsupportedVersion(FixCallError):
    """A record of a version or type that this side does not know: upgrade it."""


class UnsupportedSetting(FixCallError):
    """A setting that this path does not support (yet), refused by name."""


class MalformedRecord(FixCallError):
    """Bytes that break the protocol."""


class InvalidArgument(FixCallError):
    """An argument is out of its range."""


class EventTooLarge(FixCallError):
    """An event, or a one-shot, is bigger than the broker takes."""

    stream = ""  # the stream of the event
    limit = 0  # the most bytes of key, value and headers; 0: not known


class BatchTooLarge(FixCallError):
    """Events that lie packed together unpack to more bytes than the reader's option max.event.bytes allows."""


class TooManyStreams(FixCallError):
    """A control partition, or a lane, has all the streams, partitions of streams or scopes that it may."""


class Quarantined(FixCallError):
    """The command failed three times and was passed over: it had no effect."""


class ClockSkew(FixCallError):
    """A clock is too far from another one: set it. The message says which, and by how much."""


class TopicMisconfigured(FixCallError):
    """A topic's settings are too weak or wrong; the message names each and what to set."""


class TopicNotEmpty(FixCallError):
    """A topic of that name has, or had, records that anabranch did not write: choose another name, or adopt it."""


class WouldDelete(FixCallError):
    """A file of streams would delete events; nothing was changed: allow it, or change the file."""


class RowExists(FixCallError):
    """`insert` found a row of this key; nothing was written: `put` or `replace` it."""


class RowMissing(FixCallError):
    """`replace` found no row of this key; nothing was written: `put` or `insert` it."""


class TooManyLocks(FixCallError):
    """A transaction on tables has all the locks that it may: scan a range instead, or read with ``lock=False``."""


class NonTransactional(FixCallError):
    """A call takes effect at once, and came inside an open transaction on tables: make it before, or after."""


class SnapshotExpired(FixCallError):
    """Retention has deleted what the snapshot needs: take a later one, or keep the stream for longer."""


class NotForkSafe(FixCallError):
    """A client was used in a forked child: connect again there."""


_CODES: dict[str, type[AnabranchError]] = {}


def _collect(base: type[AnabranchError]) -> None:
    for sub in base.__subclasses__():
        _CODES[sub.__name__] = sub
        _collect(sub)


_collect(AnabranchError)


def error_of(code: str, message: str) -> AnabranchError:
    """The error for a wire code; an unknown code (a newer controller) becomes `FixCallError`."""
    kind = _CODES.get(code, FixCallError)
    return kind(message) if kind is not FixCallError else FixCallError(f"{code}: {message}")


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was raised from, each once: such a chain may be a circle."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
