"""The examples beside the ledger: the stream decides; exactly once into a table."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

import anabranch
from examples import stream_decides, table_from_stream
from tests.postgres import Postgres

pytestmark = pytest.mark.broker


class Killed(BaseException):
    pass


class Mortal(psycopg.Connection[Any]):
    """A connection whose process dies before it ends what is prepared."""

    def tpc_commit(self, xid: psycopg.Xid | str | None = None) -> None:
        raise Killed


@pytest.fixture(scope="module")
def preparing() -> Iterator[Postgres]:
    own = Postgres()
    try:
        yield own.start("max_prepared_transactions=10")
    finally:
        own.remove()


@pytest.mark.long
def test_the_stream_decides(
    client: anabranch.Client, preparing: Postgres, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = f"{unique}/orders"
    client.create_stream(stream, segments=1)

    def order(connection: psycopg.Connection[Any], name: str, *, fails: bool = False) -> None:
        with client.begin(unique) as txn:
            txn.write(stream, name.encode())
            with stream_decides.decided_by_stream(txn, connection) as cursor:
                cursor.execute("insert into orders values (%s)", (name,))
                if fails:
                    raise ZeroDivisionError

    with psycopg.connect(preparing.dsn()) as connection:
        connection.execute("create table orders (name text)")
        connection.commit()
        order(connection, "whole")
        with pytest.raises(ZeroDivisionError):
            order(connection, "rolled back", fails=True)
        with closing(Mortal.connect(preparing.dsn())) as mortal, pytest.raises(Killed):
            order(mortal, "dead after the commit")
        with closing(Mortal.connect(preparing.dsn())) as mortal:
            monkeypatch.setattr(anabranch.Transaction, "commit", _die)
            with pytest.raises(Killed):
                order(mortal, "dead before the commit")
            monkeypatch.undo()
        assert stream_decides.recover(client, connection) == 0
        rows = connection.execute("select name from orders order by name").fetchall()
        assert connection.tpc_recover() == []
    assert [row[0] for row in rows] == ["dead after the commit", "whole"]
    found = [event.value for event in client.snapshot(stream).read(stream)]
    assert found == [b"whole", b"dead after the commit"]


def _die(*_: Any, **named: Any) -> None:
    raise Killed


def test_exactly_once_into_a_table(client: anabranch.Client, unique: str, tmp_path: Path) -> None:
    stream = f"{unique}/orders"
    client.create_stream(stream, segments=2)

    def sell(*amounts: int) -> None:
        with client.begin(unique) as txn:
            for number, amount in enumerate(amounts):
                txn.write(stream, b"%d" % amount, key=b"item-%d" % number)
            txn.commit()

    class Dying(sqlite3.Connection):
        commits = 0

        def commit(self) -> None:
            super().commit()
            self.commits += 1
            if self.commits == 3:  # after the second transaction
                raise Killed

    for number in range(5):
        sell(number, 10 * number)
    with (
        closing(sqlite3.connect(tmp_path / "x.db", factory=Dying)) as database,
        pytest.raises(Killed),
    ):
        table_from_stream.copy(client, database, stream, timeout=30.0)
    with closing(sqlite3.connect(tmp_path / "x.db")) as again:

        def copy(commits: int) -> None:
            copied, until = 0, time.monotonic() + 60
            while copied < commits:  # on a busy machine 2 s without a commit are not the end
                assert time.monotonic() < until
                copied += table_from_stream.copy(client, again, stream, timeout=2.0)
            assert copied == commits

        copy(3)
        sell(1000)
        copy(1)
        totals = again.execute("select * from totals order by item").fetchall()
    assert totals == [("item-0", 1010), ("item-1", 100)]
