"""`Ledger`: a database whose commit decides transactions.

At the end of the ``with``, the transaction is prepared; its row in the database becomes ``commit``; the database
commits; then the transaction is committed. Once it is prepared, only the row decides: it commits if the row is
``commit``, and aborts if there is no such row and no process can write it any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from random import sample
from secrets import token_bytes
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from anabranch.client.client import Client
from anabranch.client.commit_parts import CommitParts, Wait
from anabranch.client.transaction import QUIET_S, Transaction
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    AskOutcomeError,
    Expired,
    IllegalState,
    InvalidArgument,
    LedgerDiffers,
    NotAuthorized,
    OutcomeUnknown,
    RetryError,
    TransactionAborted,
)
from anabranch.ledger.book import BEGAN_AGAIN, BEGUN, COMMIT, ENDED, FIRST, Book, Meta, Row
from anabranch.ledger.dialects import Dialect
from anabranch.protocol import defaults
from anabranch.protocol.ids import control_partition_of, txn_text
from anabranch.protocol.schemas.records import Consumed
from anabranch.types import Receipt, TransactionInfo

if TYPE_CHECKING:
    from anabranch.client.table_transaction import TableTransaction

log = logging.getLogger("anabranch.ledger")
T = TypeVar("T")
TABLE = "anabranch_ledger"
SECRET_SIZE = 32
ATTEMPT_SIZE = 16
MOST_WAITING = 20  # a recovery ends when this many wait: the controllers may be away
_PAUSE_S = 0.2
_QUICK_S = 0.5  # timeout of further transactions once one waits
_TORN = "its block committed rows by itself, and its events are aborted"
_NO_COMMIT = "the ledger's database has not committed it"
_claimed: WeakSet[Transaction | TableTransaction] = WeakSet()
_claiming = threading.Lock()


@dataclass(slots=True)
class Recovered:
    """The result of one recovery: ids of transactions that it ended, and of transactions that it could not end.

    ``held``: a process that can still commit has locked the row. ``forgotten``: deleted rows that are not needed
    any more. ``waiting``: id -> why it can't be ended yet; a later recovery ends it. ``missing``: control partition
    -> why it does not answer; a later recovery ends its transactions. ``alarms``: id -> a contradiction between
    database and log, for a person; see the runbook. ``expired``: committed in the database, but ended before the
    retention of outcomes, so the outcome is unknown.
    """

    committed: list[bytes] = field(default_factory=list)
    aborted: list[bytes] = field(default_factory=list)
    held: list[bytes] = field(default_factory=list)
    waiting: dict[bytes, AnabranchError] = field(default_factory=dict)
    missing: dict[int, AnabranchError] = field(default_factory=dict)
    expired: list[bytes] = field(default_factory=list)
    alarms: dict[bytes, str] = field(default_factory=dict)
    forgotten: int = 0


class Ledger:
    """A database, SQLite or PostgreSQL, with a ledger's table. Thread-safe if it is made of a function."""

    def __init__(
        self,
        database: Any | Callable[[], Any],
        *,
        table: str = TABLE,
        dialect: Dialect | None = None,
    ) -> None:
        """``database``: a function that connects, by any DB-API driver, or a connection.

        If a given connection breaks during a commit, only `recover` can find the outcome. ``table``: its name, with
        or without a schema. ``dialect``: for other databases than SQLite and PostgreSQL.
        """
        self._database = database
        self._connects = not hasattr(database, "cursor")
        if self._connects and not callable(database):
            raise InvalidArgument(
                "a ledger is made of a connection, or of a function that connects"
            )
        self._table = table
        self._dialect = dialect

    @contextmanager
    def _open(self, connection: Any = None) -> Iterator[Book]:
        if connection is not None or not self._connects:
            given = self._database if connection is None else connection
            yield Book(given, self._table, self._dialect)
            return
        with closing(self._database()) as made:
            yield Book(made, self._table, self._dialect)

    # -- a transaction --------------------------------------------------------------------------------

    @contextmanager
    def commit(
        self,
        txn: Transaction | TableTransaction,
        connection: Any = None,
        *,
        receipts: Sequence[Receipt | bytes] | None = None,
        name: str | None = None,
        number: int | None = None,
        consumed: Consumed | None = None,
        wait: Wait = "merged",
        timeout: float | None = None,
    ) -> Iterator[Any]:
        """A cursor for statements that are committed together with the transaction, or not at all.

            with client.begin("shop") as txn, ledger.commit(txn) as cursor:
                txn.write("shop/orders", b"...", key=b"42")
                cursor.execute("update stock set n = n - 1 where item = %s", [42])

        The end of the ``with`` commits both; an exception aborts both. Don't commit inside, nor call anything that
        commits (sqlite3's `executescript`). ``connection``: one without a begun transaction, as from a pool.
        ``receipts``, ``name``, ``number``, ``consumed``, ``wait``: as of `Transaction.commit`; if the name or
        number was committed before, the database is rolled back, and ``txn.result`` is that outcome. ``timeout``:
        seconds for each step of the end. After the database has committed, only `LedgerDiffers` is raised: if the
        controllers don't answer, ``txn.result`` is None, and `recover` commits the events.

        Raises:
            LocksBroken: another commit has changed what it read; both are rolled back: begin again.
            InvalidArgument, UnsupportedSetting: the connection, or its database, can't be used; nothing was begun.
            NoLedger, LedgerMoved: the database is not that of the ledger.
            IllegalState: the transaction is in a ledger already; the connection has begun a transaction; or the
                block has committed inside: then those rows stay, but the events are aborted.
            OutcomeUnknown: the database did not answer the commit, and it, or the controllers, can't be asked:
                `recover` ends the transaction.
            LedgerDiffers: the database has committed, but an operator has aborted the transaction.
            TransactionAborted, AlreadyCommitted, and as `Transaction.commit` and the driver: both are rolled back.
        """
        CommitParts(wait=wait)  # a wrong one is refused before the database commits
        with self._open(connection) as book:
            attempt, secret = token_bytes(ATTEMPT_SIZE), None
            claim: dict[str, Any] = {"name": name, "number": number, "consumed": consumed}
            txn_id, meta = _enter(book, txn, attempt)
            try:
                with closing(book.connection.cursor()) as cursor:
                    yield cursor
                book.check_same()
                secret = meta.secret
                by = sha256(secret).digest()
                info = txn.prepare(receipts, **claim, by=by, attempt=attempt, timeout=timeout)
                if info.state == "COMMITTED":
                    book.rollback()
                    if book.is_early(txn_id):
                        raise IllegalState(ENDED)
                    return
                if txn.txn_id != txn_id:  # its row would be for another transaction
                    raise IllegalState(BEGAN_AGAIN)
                book.end(txn_id, attempt)
            except BaseException as error:
                _give_up(book, txn, secret, error)
                raise
            try:
                book.connection.commit()
            except book.driver.Error as error:
                row = self._last_word(book, txn_id, timeout, error)
                if row.outcome != COMMIT and not _is_committed(txn, secret):
                    raise
        _finish(txn, secret, wait, timeout)

    def _last_word(self, book: Book, txn_id: bytes, timeout: float | None, error: Exception) -> Row:
        """The final row, after a commit that failed or was not answered. Raises: OutcomeUnknown (unreadable)."""
        deadline = time.monotonic() + (defaults.TIMEOUT_S if timeout is None else timeout)
        usable = book.rollback()
        trouble: Exception = error
        while self._connects or usable:
            try:
                with self._open(None if self._connects else book.connection) as other:
                    row = other.decide(txn_id)
                if row is not None:
                    return row
            except (book.driver.Error, OSError, AnabranchError) as found:
                trouble = found
            if time.monotonic() > deadline or isinstance(trouble, AnabranchError):
                break
            time.sleep(_PAUSE_S)
        raise OutcomeUnknown(
            f"the database did not say whether it has committed ({trouble}); `Ledger.recover` will end both alike",
            txn_id=txn_id,
        ) from error

    # -- for operators --------------------------------------------------------------------------------

    def create(self, client: Client) -> None:
        """Make the table, for the cluster of this client. Repeating the call is fine.

        Raises: InvalidArgument (the table is of another cluster; a standby), NoLedger (another table has the name),
        LedgerMoved, UnsupportedSetting, and the driver's errors.
        """
        with self._open() as book:
            book.create(token_bytes(SECRET_SIZE), client.cluster)
            self._meta(book, client)

    def _meta(self, book: Book, client: Client, *, moved: bool = False) -> Meta:
        try:
            return _check_cluster(book.open(moved=moved), client.cluster)
        finally:
            book.rollback()

    def recover(
        self,
        client: Client,
        scope: str | None = None,
        older_than: float = defaults.LEDGER_AGE_S,
        *,
        limit: int = defaults.LEDGER_ROWS,
    ) -> Recovered:
        """End the transactions that dead processes left, as the database says; delete unneeded rows.

        ``scope``: end the prepared transactions of this scope; None: of all. ``older_than``: leave transactions
        prepared less than this many seconds ago. ``limit``: the most transactions and rows to check, besides
        alarms; the call also ends when 20 transactions wait. Any process may call it at any time, several
        concurrently.

        Raises: NoLedger, LedgerMoved, InvalidArgument (another cluster), NotReady, DeadlineExceeded (no control
        partition answers) and the driver's errors: then the next call does the rest.
        """
        found, over = Recovered(), {}
        with self._open() as book:
            meta = self._meta(book, client)
            before = time.time() - older_than
            prepared = client.prepared(scope, secret=meta.secret)
            found.missing = prepared.missing
            infos = [
                info
                for info in prepared
                if info.prepared_at is not None and info.prepared_at.timestamp() <= before
            ]
            for info in islice(_until_many_wait(infos, found), limit):
                row = book.decide(info.txn_id)
                if row is None:
                    found.held.append(info.txn_id)
                elif end := _ended(client, meta.secret, row, found):
                    (found.committed if end == COMMIT else found.aborted).append(row.txn_id)
                    over[row.txn_id] = row
            after = FIRST
            while some := book.rows(int(before * 1000), limit, after, former=False):
                waits = len(found.waiting)
                for row in _until_many_wait(some, found):
                    last = book.decide(row.txn_id) if row.outcome == BEGUN else row
                    known = row.txn_id in over or row.txn_id in found.waiting or last is None
                    if last is not None and not known and _ended(client, meta.secret, last, found):
                        over[row.txn_id] = last
                ended = any(row.txn_id in over for row in some)
                if ended or len(found.waiting) > waits or waits >= MOST_WAITING:
                    break
                after = some[-1]  # these rows stay; continue after them
            found.forgotten = book.forget(over.values())
        return found

    def adopt(self, client: Client, *, keep: bool = False) -> list[TransactionInfo]:
        """Move the ledger to its present server; returns the prepared transactions, which a person has to end.

        The ledger gets another secret. So it can't end transactions that were prepared by way of the former server:
        read their rows there, then force each of them. ``keep``: the server moved with all its rows, and the former
        one never returns: the secret stays, and `recover` ends all transactions as before.

        Raises: NoLedger, InvalidArgument (a standby, another cluster), NotReady, DeadlineExceeded.
        """
        with self._open() as book:
            meta = self._meta(book, client, moved=True)
            left = client.prepared(secret=meta.secret).check()
            book.adopt(meta.secret if keep else token_bytes(SECRET_SIZE))
        return [] if keep else left

    def rows(self, limit: int = defaults.LEDGER_ROWS) -> list[Row]:
        """The table's rows, the oldest first, on any server."""
        with self._open() as book:
            book.open(moved=True)
            return book.rows(1 << 62, limit)


def _enter(book: Book, txn: Transaction | TableTransaction, attempt: bytes) -> tuple[bytes, Meta]:
    """Insert ``begun`` in the database transaction; returns the transaction's id, and the ledger's row.

    If it raises, nothing is changed.
    """
    with _claiming:
        if txn in _claimed:
            raise IllegalState("the transaction is in a ledger already: one `with` a transaction")
        _claimed.add(txn)
    try:
        txn_id = txn.assign_id()
        cluster = txn.cluster
        meta = _check_cluster(book.begin(txn_id, attempt), cluster)
    except BaseException:
        book.rollback()
        _claimed.discard(txn)
        raise
    return txn_id, meta


def _check_cluster(meta: Meta, cluster: str) -> Meta:
    if meta.cluster != cluster:
        raise InvalidArgument(
            f"the ledger is of the cluster {meta.cluster}, and this is {cluster}: each has a table of its own"
        )
    return meta


def _give_up(
    book: Book, txn: Transaction | TableTransaction, secret: bytes | None, error: BaseException
) -> None:
    """Roll back and abort, because the database's commit was not sent. Recovery repeats what fails here."""
    if not book.rollback():
        log.warning("%r is left to recovery: the database could not roll back", txn)
        return
    with suppress(book.driver.Error):  # `recover` repeats it
        if txn.txn_id is not None and book.is_early(txn.txn_id):
            log.error("%r: its block has committed rows by itself, and its events are aborted", txn)
    with suppress(AnabranchError):  # `recover` repeats it
        txn.abort(f"left by {type(error).__name__}", secret=secret, timeout=QUIET_S)


def _is_committed(txn: Transaction | TableTransaction, secret: bytes | None) -> bool:
    """Abort the transaction; True if recovery has already committed it, and deleted its row.

    Raises: OutcomeUnknown (the controllers don't say which).
    """
    try:
        txn.abort(_NO_COMMIT, secret=secret, timeout=QUIET_S)
    except AlreadyCommitted:
        return True
    except (RetryError, AskOutcomeError) as trouble:
        raise OutcomeUnknown(
            "the database lost the answer to its commit, and the controllers don't say whether recovery has made "
            f"it count ({trouble}); `Ledger.recover` will end both alike",
            txn_id=txn.txn_id,
        ) from trouble
    except AnabranchError as trouble:
        log.warning("%r is left to recovery: %s", txn, trouble)
    return False


def _finish(
    txn: Transaction | TableTransaction, secret: bytes | None, wait: Wait, timeout: float | None
) -> None:
    """Commit the transaction after the database. No answer is no error, because recovery will commit it."""
    try:
        txn.commit(secret=secret, wait=wait, timeout=timeout)
    except TransactionAborted as error:
        raise LedgerDiffers(
            f"the database has committed {txn!r}, which was aborted: mend the rows by hand ({error})"
        ) from error
    except AlreadyCommitted:
        pass  # recovery has committed it already
    except AnabranchError as trouble:
        log.warning("%r is committed in the database, and will be by recovery: %s", txn, trouble)


def _until_many_wait(some: Sequence[T], found: Recovered) -> Iterator[T]:
    """These items in random order, until too many wait; so waiting transactions don't block others."""
    for one in sample(some, len(some)) if len(some) > MOST_WAITING else some:
        if len(found.waiting) >= MOST_WAITING:
            return
        yield one


def _ended(client: Client, secret: bytes, row: Row, found: Recovered) -> str | None:
    """End a transaction as its row says. Returns ``commit`` or ``abort``; None if it waits, or is an alarm."""
    if control_partition_of(row.txn_id) in found.missing:
        return None
    timeout = _QUICK_S if found.waiting else None
    try:
        if row.outcome == COMMIT:
            client.commit(row.txn_id, secret=secret, timeout=timeout)
        else:
            client.abort(row.txn_id, _NO_COMMIT, secret=secret, timeout=timeout)
    except AlreadyCommitted:
        return COMMIT  # another recovery has ended it, and deleted the row, before this one wrote its own
    except Expired:
        if row.outcome == COMMIT:  # prepared transactions are always listed, so this one has ended
            found.expired.append(row.txn_id)
            said = "ledger: %s ended longer ago than outcomes are kept"
            log.warning(said, txn_text(row.txn_id), extra={"txn": row.txn_id})
    except (TransactionAborted, NotAuthorized) as error:
        if row.outcome == COMMIT:
            found.alarms[row.txn_id] = f"the row says commit: {error}"
            said = "ledger: %s: the row says commit: %s"
            log.error(said, txn_text(row.txn_id), error, extra={"txn": row.txn_id})
            return None
    except (RetryError, AskOutcomeError) as trouble:
        found.waiting[row.txn_id] = trouble
        return None
    if row.early:
        found.alarms[row.txn_id] = _TORN
        log.error("ledger: %s: %s", txn_text(row.txn_id), _TORN, extra={"txn": row.txn_id})
        return None
    return row.outcome
