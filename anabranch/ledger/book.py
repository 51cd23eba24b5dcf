"""The ledger's table through one connection.

Each transaction has one row: ``begun``, ``commit`` or ``abort``; no row means ``abort``. The user's database
transaction first inserts ``begun``, so a process that can still commit has the row locked. One more row is the
ledger's own.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from anabranch.errors import (
    AlreadyCommitted,
    IllegalState,
    InvalidArgument,
    LedgerMoved,
    NoLedger,
    TransactionAborted,
)
from anabranch.ledger import dialects as sql
from anabranch.ledger.dialects import Dialect, dialect_of, driver_of, marked

BEGUN = "begun"
COMMIT = "commit"
ABORT = "abort"
# notes of rows
_FORMER = "former"
_EARLY = "early"
_SAVEPOINT = "anabranch_ledger"  # the end of the database transaction removes it
_VERSION = 1
_UNDEFINED_TABLE = "42P01"  # PostgreSQL's code
LOCK_S = 1.0  # the longest wait of recovery for a locked row
BEGAN_AGAIN = (
    "a call in the block was refused, and the transaction began again since: nothing is committed; begin another "
    "transaction, and enter the block again"
)
ENDED = (
    "the block has ended the database's transaction by itself (a commit, a rollback, or a call that "
    "commits, as `executescript`): the rows that it committed stay, but the events are aborted"
)


class Meta(NamedTuple):
    """The ledger's own row: its secret, cluster and server."""

    secret: bytes
    server: str
    cluster: str


class Row(NamedTuple):
    """The row of a transaction. ``made``: Unix milliseconds. ``former``: from before `Ledger.adopt`.

    ``early``: the row was durable while still ``begun``: the statements inside `Ledger.commit` committed early.
    """

    txn_id: bytes
    outcome: str
    attempt: bytes
    made: int
    former: bool
    early: bool = False


FIRST = Row(b"", "", b"", -1, False)  # sorts before all rows


class Book:
    """The table through one connection.

    `open`, `begin`, `check_same` and `end` leave the database transaction open; other calls end it.
    """

    def __init__(self, connection: Any, table: str, dialect: Dialect | None) -> None:
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", table, re.ASCII):
            raise InvalidArgument(f"{table!r} is no name of a table")
        self.connection = connection
        self.driver = driver_of(connection)
        self._dialect = dialect or dialect_of(self.driver)
        self._table = table
        self._dialect.check(connection)
        self._cursor = self._dialect.cursor(connection)

    def _run(self, statement: str, *values: Any) -> Any:
        text = marked(statement.replace("TABLE", self._table), self.driver)
        self._cursor.execute(text, values) if values else self._cursor.execute(text)
        return self._cursor

    def rollback(self) -> bool:
        """Roll back; False if the connection fails."""
        try:
            self.connection.rollback()
        except self.driver.Error:
            return False
        return True

    # -- the ledger itself ----------------------------------------------------------------------------

    def open(self, *, moved: bool = False) -> Meta:
        """Begin a database transaction whose commit is durable, and return the ledger's own row.

        ``moved``: accept another server than the row names. Raises: NoLedger, LedgerMoved, and as `Dialect.server`.
        """
        statement = sql.READ_OWN.format(facts=self._dialect.facts)
        meta, server, _ = self._read(statement)
        return meta._replace(server=server) if moved else _check_server(meta, server)

    def _read(self, statement: str, *values: Any) -> tuple[Meta, str, Any]:
        """The ledger's own row, the server's identity, and what else the statement selects."""
        with self._missing():
            found = self._run(statement, *values).fetchone()
        try:
            secret, note = bytes.fromhex(found[0]), json.loads(found[1])
            meta = Meta(secret, note["server"], note["cluster"])
        except (TypeError, ValueError, KeyError) as error:
            raise NoLedger(_no_ledger(self._table, "its own row is missing")) from error
        if note.get("version") != _VERSION:
            raise NoLedger(f"the ledger is of version {note.get('version')}: upgrade anabranch")
        return meta, self._dialect.server(self._cursor, found[2]), found[3:]

    @contextmanager
    def _missing(self) -> Iterator[None]:
        """Raise `NoLedger` if the table is missing, not a ledger's, or forbidden."""
        try:
            yield
        except self.driver.Error as error:
            text = str(error)
            if "no such table" in text or sql.code_of(error) == _UNDEFINED_TABLE:
                raise NoLedger(
                    f"there is no table {self._table} here: run `anabranch ledger create`"
                ) from error
            if isinstance(error, self.driver.ProgrammingError) or re.search("no such|no col", text):
                raise NoLedger(_no_ledger(self._table, text)) from error
            raise

    def create(self, secret: bytes, cluster: str) -> None:
        """Make the table and the ledger's own row, unless they exist."""
        with self._missing():
            facts = self._run(f"select {self._dialect.facts}").fetchone()[0]
            server = self._dialect.server(self._cursor, facts)
            self._run(sql.CREATE)
            self._insert(sql.OWN_KEY, sql.OWN_KEY, secret, _note(server, cluster))
        self.connection.commit()

    def adopt(self, secret: bytes) -> None:
        """Move the ledger to this server. With another secret all present rows become former rows."""
        meta = self.open(moved=True)
        if secret != meta.secret:
            self._run(sql.MARK_FORMER, _FORMER)
        self._run(sql.ADOPT, secret.hex(), _note(meta.server, meta.cluster))
        self.connection.commit()

    # -- transactions ---------------------------------------------------------------------------------

    def _insert(self, key: str, outcome: str, attempt: bytes, note: str | None = None) -> bool:
        added = self._run(sql.INSERT, key, outcome, attempt.hex(), _now_ms(), note)
        return bool(added.rowcount == 1)

    def begin(self, txn_id: bytes, attempt: bytes) -> Meta:
        """Open as `open`, and insert ``begun`` in the user's database transaction.

        If the row exists, raise the error of its outcome. Raises: AlreadyCommitted, TransactionAborted, as `open`.
        """
        if self._dialect.joins:
            meta, is_new = self._open_and_insert(txn_id.hex(), BEGUN, attempt)
        else:
            meta, is_new = self.open(), self._insert(txn_id.hex(), BEGUN, attempt)
        if not is_new:
            raise _refusal(self._row(txn_id))
        if not self._dialect.same:
            self._run(f"savepoint {_SAVEPOINT}")
        return meta

    def _open_and_insert(self, key: str, outcome: str, attempt: bytes) -> tuple[Meta, bool]:
        """As `open` and `_insert`, by one statement."""
        statement = sql.INSERT_AND_READ.format(facts=self._dialect.facts)
        try:
            meta, server, (count,) = self._read(
                statement, key, outcome, attempt.hex(), _now_ms(), None
            )
        except self.driver.Error:
            if self.rollback():
                self.open()  # a standby refuses the insert: say that it is a standby
            raise
        return _check_server(meta, server), count == 1

    def check_same(self) -> None:
        """Raise `IllegalState` if the database transaction has ended since `begin`, as far as is known here.

        `end` finds the other cases.
        """
        if self._dialect.same:
            if self._dialect.has_begun(self.connection) is False:
                raise IllegalState(ENDED)
            return
        try:
            self._run(f"release savepoint {_SAVEPOINT}")
        except self.driver.Error as error:
            if not self._dialect.is_over(error):
                raise
            raise IllegalState(ENDED) from error

    def end(self, txn_id: bytes, attempt: bytes) -> None:
        """Change ``begun`` to ``commit``, without a database commit.

        Raises: as `begin`, if the row has changed; IllegalState, if another database transaction has written it.
        """
        statement = sql.COMMIT.format(same=self._dialect.same)
        if self._run(statement, COMMIT, txn_id.hex(), attempt.hex(), BEGUN).rowcount != 1:
            row = self._row(txn_id)
            raise IllegalState(ENDED) if row and row.outcome == BEGUN else _refusal(row)

    def _row(self, txn_id: bytes) -> Row | None:
        found = self._run(sql.READ, txn_id.hex()).fetchone()
        return None if found is None else _row_of(found)

    def is_early(self, txn_id: bytes) -> bool:
        """Whether the user's statements have committed before the ledger wrote ``commit``.

        Then the row is durable while its outcome is still ``begun``. Call this after the connection's transaction
        has ended: within that transaction the row is seen in any case.
        """
        row = self._row(txn_id)
        self.connection.rollback()
        return row is not None and row.outcome == BEGUN

    def decide(self, txn_id: bytes) -> Row | None:
        """The final row: unless it is ``commit``, write a durable ``abort``.

        None: a process that can still commit has locked the row.
        """
        try:
            self.open()
            self._dialect.hurry(self._cursor, LOCK_S)
            if not self._insert(txn_id.hex(), ABORT, b""):
                self._run(sql.ABORT, ABORT, _EARLY, txn_id.hex(), BEGUN)
            row = self._row(txn_id)
            self.connection.commit()
        except self.driver.Error as error:
            self._check_held(error)
            return None
        return row

    def _check_held(self, error: Exception) -> None:
        """Roll back. Raise the error, unless it says that another process has locked the row."""
        if not (self.rollback() and self._dialect.is_held(error)):
            raise error

    def rows(
        self, before_ms: int, limit: int, after: Row = FIRST, *, former: bool = True
    ) -> list[Row]:
        """Rows made before a time, the oldest first, that sort after a row. ``former``: include former rows."""
        values: list[object] = [before_ms, after.made, after.made, after.txn_id.hex()]
        values += [limit] if former else [_FORMER, limit]
        text = sql.LIST.format(which="" if former else sql.NOT_MARKED)
        found = [_row_of(row) for row in self._run(text, *values).fetchall()]
        self.connection.rollback()
        return found

    def forget(self, rows: Iterable[Row]) -> int:
        """Delete rows, and return how many. Rows that have changed since they were read, or are locked, stay."""
        gone = 0
        try:
            self.open()
            self._dialect.hurry(self._cursor, LOCK_S)
            for row in rows:
                gone += self._run(
                    sql.DELETE, row.txn_id.hex(), row.outcome, row.attempt.hex()
                ).rowcount
            self.connection.commit()
        except self.driver.Error as error:
            self._check_held(error)
            return 0
        return gone


def _refusal(row: Row | None) -> AlreadyCommitted | TransactionAborted:
    if row is not None and row.outcome == COMMIT:
        return AlreadyCommitted("the ledger has committed this transaction, by another attempt")
    return TransactionAborted("the ledger has ended this transaction: begin a new one")


def _row_of(found: Any) -> Row:
    txn_id, outcome, attempt, made, note = found
    return Row(
        bytes.fromhex(txn_id),
        outcome,
        bytes.fromhex(attempt),
        made,
        former=note == _FORMER,
        early=note == _EARLY,
    )


def _check_server(meta: Meta, server: str) -> Meta:
    if server != meta.server:
        raise LedgerMoved(
            f"the ledger was made on {meta.server}, and this is {server}: a copy, or restored. If it takes the "
            "other's place for good, `anabranch ledger adopt`"
        )
    return meta


def _now_ms() -> int:
    return int(time.time() * 1000)


def _note(server: str, cluster: str) -> str:
    return json.dumps({"version": _VERSION, "server": server, "cluster": cluster})


def _no_ledger(table: str, why: str) -> str:
    return f"the table {table} here is no ledger; `anabranch ledger create` makes it: {why.strip()}"
