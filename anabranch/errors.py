"""All errors that a caller can see, grouped by what the caller does next.

The groups are *retry* the call, *begin again*, *ask for the outcome*, and *fix the call*, as in SlateDB's error
model. `InvariantViolation` is in none of them: it reports a defect in anabranch.

The class names are also the error codes of the wire protocol (``Refusal.code``), so that a client in any language
can group them in the same way (``docs/protocol.md``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def read_back(
    kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    """Rebuild a pickled error without its constructor, which may take other arguments than ``args``."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def count_of(count: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    plural = f"{noun}es" if noun.endswith(("s", "tch", "each")) else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


class AnabranchError(Exception):
    """Base of all errors that are raised on purpose. The message says what is wrong and what to do."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        return read_back, (type(self), self.args, self.__dict__)


class RetryError(AnabranchError):
    """The call changed nothing, or is safe to repeat: call again later."""


class BeginAgainError(AnabranchError):
    """The transaction has ended without effect: begin a new one."""


class AskOutcomeError(AnabranchError):
    """Whether the call took effect is not known here: ask with ``client.state(token)``."""


class FixCallError(AnabranchError):
    """The call can't succeed as it is, and changed nothing: change the call."""


class InvariantViolation(AnabranchError):
    """A rule that the code relies on does not hold. This is a defect in anabranch: please report it."""


class NotInstalled(AnabranchError, ModuleNotFoundError):
    """A package is missing. The message has the command that installs it."""

    __reduce__ = ModuleNotFoundError.__reduce__


class NotSupported(AnabranchError):
    """This operating system, or this kind of threads, can't do this. The message names one that can."""


def check(condition: bool, message: str) -> None:
    """Raise `InvariantViolation` unless ``condition`` holds. Unlike an assert, this is never compiled away."""
    if not condition:
        raise InvariantViolation(message)


# -- retry ------------------------------------------------------------------------------------------


class NotReady(RetryError):
    """No controller answers, or the cluster's topics do not exist: start `anabranch controller`."""


class DeadlineExceeded(RetryError):
    """A wait ended at its deadline and nothing was changed: call again with more time."""


class ReceiptsNotCovered(RetryError):
    """The journal did not show all records of the receipts in time. The transaction is open: commit again."""


class TooManyTransactions(RetryError):
    """The limit of open transactions is reached: wait until some have ended."""


class TooManyUncommittedBytes(RetryError):
    """The limit of uncommitted bytes is reached: end some transactions, or wait until some have ended."""


class TooMuchLocked(RetryError):
    """All transactions, or the lane's, have too many registered locks: end some of them, or wait until some end."""


class Locked(RetryError):
    """A transaction has locked a segment of an exclusive stream, and nothing was changed: call again later."""


class WriteFailed(RetryError):
    """A write was not acknowledged, so this writer can give no receipt: join again and rewrite its events."""


class SessionFull(RetryError):
    """A session holds as many bytes of rows as it may, and took none: flush it, or write the row again later."""


class NotLeader(RetryError):
    """This process has lost its leadership; its successor finishes the work. Internal to controllers."""


# -- begin again ------------------------------------------------------------------------------------


class TransactionAborted(BeginAgainError):
    """A client, an operator, missing heartbeats, or a newer transaction of its name aborted the transaction."""


class OwnershipLost(BeginAgainError):
    """Another worker owns these tasks now: take them again. Their positions show what was committed."""


class LocksBroken(BeginAgainError):
    """Another commit changed rows that the transaction has read: begin it again, on the present rows.

    ``table`` and ``key`` (bytes) name the row. ``by`` is the transaction that wrote the row (16 bytes),
    ``commit_timestamp`` the hybrid time of its commit. A value that is not known is empty or 0.
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
    """The outcome is forgotten, or the id is too old to begin: the retention of outcomes is over for it."""


# -- ask for the outcome ----------------------------------------------------------------------------


class OutcomeUnknown(AskOutcomeError):
    """The outcome is not known yet, because a reply to the commit is missing: ask ``client.state`` later.

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
    """A right is missing. The message names the right, and the topic, group or other resource that needs it."""


class NameTaken(NotAuthorized):
    """Another lane owns the name or the series: choose another name, or ask an operator to end or move it."""


class InvalidToken(FixCallError):
    """The token is malformed, truncated, or of an unknown version: pass it unchanged."""


class UnknownTransaction(NotAuthorized):
    """The transaction is not known, or the lane may not do this with it; the reply is the same for both."""


class UnknownStream(FixCallError):
    """The stream does not exist: create it first."""


class StreamLost(FixCallError):
    """A topic of the stream was deleted or replaced, so it takes no commits: recover or forget the stream."""


class UnknownScope(FixCallError):
    """The scope does not exist: create a stream in it first."""


class UnknownProcessor(FixCallError):
    """The processor does not exist: create it first."""


class UnknownLane(FixCallError):
    """The lane does not exist: ask an operator to run ``anabranch lane add``."""


class StreamExists(FixCallError):
    """The stream exists with other settings: use them, or alter the stream."""


class CrossScope(FixCallError):
    """The scopes are on different control partitions, and this call needs all of them on one.

    Below feature level 4 so does each transaction. A scope gets its control partition when it is made:
    ``create_stream(…, near=…)``.
    """


class WritersUnfinished(FixCallError):
    """A registered writer has not finished: pass the receipts to commit, or finish that writer."""


class ReceiptMismatch(FixCallError):
    """A receipt and the journal differ in count or checksum: events of that writer are missing or damaged."""


class IllegalState(FixCallError):
    """The transaction's state does not allow the call. Nothing was changed."""


class NoLedger(FixCallError):
    """The database has no ledger table of this name: make it with `anabranch ledger create`."""


class LedgerMoved(FixCallError):
    """The ledger was made in another database, of which this is a copy or replica: adopt the ledger."""


class LedgerDiffers(FixCallError):
    """The database has committed a transaction that was aborted by force: correct the data by hand."""


class RowsFailed(FixCallError):
    """Rows of a session were refused. All its other rows are committed, once each and in order.

    ``errors``: one `anabranch.RowError` for each of the first 1,000 rows. ``count``: how many rows were refused.
    """

    errors: tuple[Any, ...] = ()
    count = 0


class ReservedByPrepared(FixCallError):
    """A prepared transaction with this name, series or row has to be ended first (`Client.prepared`).

    Its owner ends it, or a ledger's recovery. After that the same call succeeds.
    """


class AlreadyCommitted(FixCallError):
    """The transaction, or another one of its name or number, is committed: nothing can be added to it.

    ``result``: the `anabranch.Result` of that commit, or None if it is not known here.
    """

    def __init__(self, message: str, *, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class UnsupportedVersion(FixCallError):
    """A record has a feature level or type that this release does not know: upgrade anabranch."""


class FeatureNotEnabled(FixCallError):
    """The call needs a higher feature level than the cluster has: an operator has to raise it."""


class UnsupportedSetting(FixCallError):
    """The setting is not supported here: remove it, or use a supported value."""


class MalformedRecord(FixCallError):
    """Bytes do not follow the protocol."""


class InvalidArgument(FixCallError):
    """An argument has a value that is not allowed."""


class UndecodableValue(FixCallError):
    """A codec does not decode a key or a value. The reader's next call continues after the event.

    ``event``: the event as it is in the log, with bytes; None for a table's row. The message has its place.
    """

    def __init__(self, message: str, *, event: Any = None) -> None:
        super().__init__(message)
        self.event = event


class EventTooLarge(FixCallError):
    """An event, a one-shot, or a commit's change of state is larger than a limit: split it, or raise the limit.

    ``stream``: the stream of the event. ``limit``: the limit of key, value and headers in bytes; 0: not known.
    """

    stream = ""
    limit = 0


class BatchTooLarge(FixCallError):
    """A batch unpacks to more bytes than the reader's option max.event.bytes allows: raise that option."""


class TooManyStreams(FixCallError):
    """The control partition, or the lane, has reached its limit of streams, of their partitions, or of scopes."""


class Quarantined(FixCallError):
    """The command failed three times and is quarantined, without any effect."""


class ClockSkew(FixCallError):
    """Two clocks differ by too much: set the wrong one. The message says which clock, and by how much."""


class TopicMisconfigured(FixCallError):
    """Settings of a topic are wrong or too weak. The message names each, and the value to set."""


class TopicNotEmpty(FixCallError):
    """A topic of that name has, or had, records of other programs: choose another name, or adopt the topic."""


class WouldDelete(FixCallError):
    """Applying the file would delete events, so nothing was changed: allow the deletion, or change the file."""


class RowExists(FixCallError):
    """`insert` found a row of this key, so nothing was written: use `put` or `replace`."""


class RowMissing(FixCallError):
    """`replace` found no row of this key, so nothing was written: use `put` or `insert`."""


class DerivationMissing(FixCallError):
    """A table is the source of a derivation that the writer, or the replica, does not have, so nothing was written.

    Give its function by `Client.derive`, and write by a replica of the table.
    """


class DerivationFailed(FixCallError):
    """The function of a derivation raised an error for a row that exists, so the derived table is not built yet."""


class UniqueViolation(FixCallError):
    """Another row has this value of a unique derivation, so nothing of this row was written."""


class NotANumber(FixCallError):
    """A row that `add`, `min` or `max` would change is no decimal integer of 64 bits, so nothing was written."""


class NumberOverflow(FixCallError):
    """The sum of a row and a number, or a total, has more than 64 bits, so nothing was written."""


class TooManyLocks(FixCallError):
    """The transaction has reached its limit of locks: scan a range, or read with ``lock=False``."""


class NonTransactional(FixCallError):
    """The call takes effect at once, so it can't be part of the open transaction: make it before or after.

    If its effect is to remain even if that transaction is aborted, make it in ``with client.outside()``.
    """


class SnapshotExpired(FixCallError):
    """Retention has deleted events of the snapshot: take a later one, or keep the stream's events for longer."""


class NotForkSafe(FixCallError):
    """A client was used in a forked child process: connect again in the child."""


_CODES: dict[str, type[AnabranchError]] = {}


def _collect(base: type[AnabranchError]) -> None:
    for sub in base.__subclasses__():
        _CODES[sub.__name__] = sub
        _collect(sub)


_collect(AnabranchError)


def error_of(code: str, message: str) -> AnabranchError:
    """The error of a wire code. An unknown code, which a newer controller may send, becomes `FixCallError`."""
    kind = _CODES.get(code, FixCallError)
    return kind(message) if kind is not FixCallError else FixCallError(f"{code}: {message}")


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes, each once, as the chain of causes may be a circle."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
