"""Databases under test: connections whose commits pass a hook, and a user's table."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import psycopg
import psycopg2.extensions  # type: ignore[import-untyped]

# Called with a step's name before the step, and with name + ".after" after it; it may raise.
Hook = Callable[[str], None]
ORDERS = "create table orders (id varchar(40) primary key, amount bigint not null)"


def quiet(_: str) -> None:
    """No hook."""


class Place:
    """A database that can be connected to. ``mark``: of a parameter."""

    mark = "?"

    def connect(self, hook: Hook = quiet) -> Any:
        raise NotImplementedError

    def made(self) -> Self:
        self.run(ORDERS)
        return self

    def run(self, sql: str) -> None:
        with closing(self.connect()) as connection:
            connection.cursor().execute(sql)
            connection.commit()

    def order(self, cursor: Any, key: str, amount: int = 0) -> None:
        """The user's own statement."""
        cursor.execute(f"insert into orders values ({self.mark}, {self.mark})", (key, amount))

    def all(self, sql: str) -> list[Any]:
        with closing(self.connect()) as connection, closing(connection.cursor()) as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())

    def orders(self) -> list[str]:
        return sorted(row[0] for row in self.all("select id from orders"))


class SQLitePlace(Place):
    """A file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def connect(self, hook: Hook = quiet) -> Any:
        connection = sqlite3.connect(self.path, timeout=0, factory=_SQLite)
        connection.hook = hook
        return connection


class PostgresPlace(Place):
    """A database of a server. No test waits for long for a lock."""

    mark = "%s"

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    def connect(self, hook: Hook = quiet) -> Any:
        connection = self._connect(options="-c lock_timeout=5000")
        connection.hook = hook
        return connection

    def _connect(self, **options: Any) -> Any:
        return _Psycopg.connect(self.dsn, **options)


class Psycopg2Place(PostgresPlace):
    """The same by the older driver."""

    def _connect(self, **options: Any) -> Any:
        return psycopg2.connect(self.dsn, connection_factory=_Psycopg2, **options)


class _Hooked:
    """A driver's connection whose steps pass a hook."""

    hook: Hook = staticmethod(quiet)

    def commit(self) -> None:
        self.hook("commit")
        super().commit()  # type: ignore[misc]
        self.hook("commit.after")

    def rollback(self) -> None:
        self.hook("rollback")
        super().rollback()  # type: ignore[misc]

    def cut(self) -> None:
        """The server ends the session's transaction."""
        super().rollback()  # type: ignore[misc]


class _SQLite(_Hooked, sqlite3.Connection):
    pass


class _Psycopg(_Hooked, psycopg.Connection[Any]):
    pass


class _Psycopg2(_Hooked, psycopg2.extensions.connection):  # type: ignore[misc]
    pass
