"""The SQL of a ledger, and its databases: how each makes commits durable, and how its server is identified."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from anabranch.errors import IllegalState, InvalidArgument, UnsupportedSetting

# The statements that `Book` runs: it puts the table's name for TABLE, and parameters in the driver's style for ?.
OWN_KEY = "ledger"  # the key of the ledger's own row
CREATE = (
    "create table if not exists TABLE (txn_id varchar(32) primary key, outcome varchar(8) not null, "
    "attempt varchar(64) not null, made bigint not null, note text)"
)
READ_OWN = f"select attempt, note, {{facts}}, outcome, made from TABLE where txn_id = '{OWN_KEY}'"
ADOPT = f"update TABLE set attempt = ?, note = ? where txn_id = '{OWN_KEY}'"
MARK_FORMER = f"update TABLE set note = ? where txn_id <> '{OWN_KEY}'"
INSERT = "insert into TABLE (txn_id, outcome, attempt, made, note) values (?, ?, ?, ?, ?) on conflict do nothing"
# The row as `INSERT` adds it, with what `READ_OWN` reads, and the number of rows that were added.
INSERT_AND_READ = (
    f"with added as ({INSERT} returning 1) select attempt, note, {{facts}}, (select count(*) from added) "
    f"from TABLE where txn_id = '{OWN_KEY}'"
)
READ = "select txn_id, outcome, attempt, made, note from TABLE where txn_id = ?"
COMMIT = "update TABLE set outcome = ? where txn_id = ? and attempt = ? and outcome = ?{same}"
ABORT = "update TABLE set outcome = ?, note = coalesce(note, ?) where txn_id = ? and outcome = ?"
DELETE = "delete from TABLE where txn_id = ? and outcome = ? and attempt = ?"
LIST = (
    f"select txn_id, outcome, attempt, made, note from TABLE where txn_id <> '{OWN_KEY}' and made < ? "
    "and (made > ? or made = ? and txn_id > ?) {which}order by made, txn_id limit ?"
)
NOT_MARKED = "and (note is null or note <> ?) "


class Dialect:
    """A kind of database. For a database that is not here, give `Ledger` a subclass as ``dialect``."""

    # An SQL expression, selected in each transaction together with the ledger's own row.
    facts = "null"
    # Whether one statement can insert and read (`INSERT_AND_READ`).
    joins = False
    # An SQL condition, "and …", that this database transaction wrote a row. Empty: a savepoint shows whether the
    # transaction is still open.
    same = ""

    def check(self, connection: Any) -> None:
        """Refuse a connection in autocommit mode, or with a begun transaction.

        Raises: InvalidArgument, IllegalState.
        """

    def has_begun(self, connection: Any) -> bool | None:
        """Whether the driver has begun a transaction; None: it does not say."""
        return None

    def cursor(self, connection: Any) -> Any:
        """A cursor whose rows are tuples and whose texts are str, whatever the connection's settings are."""
        return connection.cursor()

    def is_over(self, error: Exception) -> bool:
        """Whether an error means that a savepoint is missing because its transaction has ended."""
        return "savepoint" in str(error)

    def server(self, cursor: Any, facts: str | None) -> str:
        """Make this transaction's commit durable; returns the server's identity, which a copy of the server lacks.

        Raises: InvalidArgument (a standby, or in memory), UnsupportedSetting (its commits can't be made durable).
        """
        raise NotImplementedError

    def hurry(self, cursor: Any, seconds: float) -> None:
        """Limit how long a statement of this transaction waits for a lock."""
        raise NotImplementedError

    def is_held(self, error: Exception) -> bool:
        """Whether an error means that another transaction has locked a ledger's row that this transaction needs.

        In general each `OperationalError` counts, though a lost connection may raise it, too. Dialects with drivers
        that say more override this.
        """
        return any(kind.__name__ == "OperationalError" for kind in type(error).__mro__)


class SQLite(Dialect):
    """SQLite, identified by the device, inode and path of its file."""

    def check(self, connection: Any) -> None:
        # Since Python 3.12; -1: isolation_level decides.
        mode = getattr(connection, "autocommit", None)
        if mode is True or (mode is not False and connection.isolation_level is None):
            raise InvalidArgument(
                "the connection commits each statement: connect without isolation_level=None"
            )
        if mode is not False and connection.in_transaction:
            raise _begun()
        texts = connection.text_factory
        if texts not in (str, bytes, bytearray) and texts(b"a") not in ("a", b"a"):
            raise InvalidArgument(
                "the connection's text_factory gives neither text nor bytes: give the ledger another connection"
            )

    def cursor(self, connection: Any) -> Any:
        cursor = connection.cursor()
        cursor.row_factory = _texts
        return cursor

    def server(self, cursor: Any, facts: str | None) -> str:
        files = {row[1]: row[2] for row in cursor.execute("pragma database_list").fetchall()}
        if not files["main"]:
            raise InvalidArgument("the database is in memory: a ledger must outlive the process")
        if cursor.execute("pragma synchronous").fetchone()[0] < 2:
            cursor.execute("pragma synchronous = full")
        mode = cursor.execute("pragma journal_mode").fetchone()[0]
        if mode in ("off", "memory") or cursor.execute("pragma synchronous").fetchone()[0] < 2:
            raise UnsupportedSetting(
                f"commits are not durable with journal_mode={mode}: set it to wal, and synchronous to full"
            )
        path = os.path.realpath(files["main"])
        file = os.stat(path)
        return f"sqlite:{file.st_dev}:{file.st_ino}:{path}"

    def hurry(self, cursor: Any, seconds: float) -> None:
        cursor.execute(f"pragma busy_timeout = {int(seconds * 1000)}")

    def is_held(self, error: Exception) -> bool:
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in (5, 6)  # BUSY, LOCKED


class PostgreSQL(Dialect):
    """PostgreSQL, identified by system identifier, timeline and the oid of the database."""

    facts = (
        "concat_ws(' ', set_config('synchronous_commit', case current_setting('synchronous_commit') "
        "when 'remote_apply' then 'remote_apply' else 'on' end, true), "
        "case when pg_is_in_recovery() then 'standby' when current_setting('fsync') = 'off' then 'fsync' "
        "else concat_ws(':', 'postgresql', (select system_identifier from pg_control_system()), "
        "substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8), "
        "(select oid from pg_database where datname = current_database())) end)"
    )
    joins = True
    same = " and xmin::text = mod(txid_current(), 4294967296)::text"  # xmin has the lower 32 bits

    def check(self, connection: Any) -> None:
        if getattr(connection, "autocommit", False):
            raise InvalidArgument(
                "the connection commits each statement: connect with autocommit=False"
            )
        if self.has_begun(connection):
            raise _begun()

    def has_begun(self, connection: Any) -> bool | None:
        info = getattr(connection, "info", None)  # psycopg and psycopg2 have it
        return None if info is None else int(info.transaction_status) != 0

    def cursor(self, connection: Any) -> Any:
        driver = driver_of(connection).__name__
        if driver == "psycopg":
            return connection.cursor(row_factory=import_module("psycopg.rows").tuple_row)
        if driver == "psycopg2":
            return connection.cursor(cursor_factory=import_module("psycopg2.extensions").cursor)
        return connection.cursor()

    def is_over(self, error: Exception) -> bool:
        return code_of(error) in ("3B001", "25P01")  # no such savepoint, no transaction

    def server(self, cursor: Any, facts: str | None) -> str:
        server = (facts or "").split(" ")[-1]
        if server == "standby":
            raise InvalidArgument("the database is a standby: connect to its primary")
        if server == "fsync":
            raise UnsupportedSetting("commits are not durable with fsync=off: set it to on")
        return server

    def hurry(self, cursor: Any, seconds: float) -> None:
        cursor.execute(f"set local lock_timeout = {int(seconds * 1000)}")
        # A shorter statement timeout of the user would end the wait first, with an error that names no lock.
        cursor.execute("set local statement_timeout = 0")

    def is_held(self, error: Exception) -> bool:
        # lock timeout, deadlock, serialization failure
        return code_of(error) in ("55P03", "40P01", "40001")


def code_of(error: Exception) -> str | None:
    """PostgreSQL's code of an error; None: it has none, as SQLite's."""
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)


def _texts(_: object, row: Sequence[Any]) -> tuple[Any, ...]:
    """A row of SQLite with str texts, whatever the text_factory of the connection is."""
    return tuple(value.decode() if isinstance(value, bytes | bytearray) else value for value in row)


# Drivers that report a missing table by a `ProgrammingError`.
_DRIVERS = {"sqlite3": SQLite, "psycopg": PostgreSQL, "psycopg2": PostgreSQL}
_MARKS = {"qmark": "?", "format": "%s", "pyformat": "%s"}


def driver_of(connection: Any) -> ModuleType:
    """The driver module of a connection, with its exceptions and paramstyle. Raises: InvalidArgument."""
    for kind in type(connection).__mro__:
        module = sys.modules.get(kind.__module__.partition(".")[0])
        if module is not None and hasattr(module, "paramstyle"):
            return module
    raise InvalidArgument(f"{type(connection).__name__} is no connection of a DB-API driver")


def dialect_of(driver: ModuleType) -> Dialect:
    """The dialect of a driver's database. Raises: UnsupportedSetting."""
    if driver.__name__ not in _DRIVERS or driver.paramstyle not in _MARKS:
        raise UnsupportedSetting(
            f"{driver.__name__} is not known to ledgers ({', '.join(_DRIVERS)} are): give a `dialect`"
        )
    return _DRIVERS[driver.__name__]()


def marked(sql: str, driver: ModuleType) -> str:
    """SQL with ``?`` for each parameter, in the paramstyle of the driver."""
    return sql.replace("?", _MARKS.get(driver.paramstyle, "?"))


def _begun() -> IllegalState:
    return IllegalState(
        "the connection has begun a transaction: commit it or roll it back first, as the ledger's row comes first"
    )
