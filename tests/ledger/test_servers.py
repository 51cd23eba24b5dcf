"""L3: a ledger belongs to the server that it was made on. A copied, restored or promoted database ends nothing."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from anabranch import errors as e
from anabranch.ledger import Ledger
from tests.client.world import World
from tests.ledger.places import Place, PostgresPlace, SQLitePlace
from tests.ledger.races import differences, start
from tests.ledger.test_ledger import LONG_AGO, left, ordered
from tests.postgres import Postgres


def refused(world: World, copy: Place, error: type[Exception], says: str) -> None:
    """No call ends or begins anything from here."""
    ledger = Ledger(copy.connect)
    for call in (
        lambda: ledger.recover(world.client, older_than=LONG_AGO),
        lambda: ledger.create(world.client),
    ):
        with pytest.raises(error, match=says):
            call()
    with world.client.begin("shop") as txn, pytest.raises(error, match=says), ledger.commit(txn):
        pytest.fail("the block ran")


def test_a_copied_file(tmp_path: Path) -> None:
    """Staging is copied from production: it can't end what production prepared, before and after `adopt`."""
    production = SQLitePlace(tmp_path / "production.db").made()
    world = start(production)
    shutil.copy(production.path, tmp_path / "staging.db")
    staging = SQLitePlace(tmp_path / "staging.db")
    txn_id = left(world, production, "a", committed=True)
    refused(world, staging, e.LedgerMoved, "ledger adopt")
    ledger = Ledger(staging.connect)
    assert [info.txn_id for info in ledger.adopt(world.client)] == [txn_id]
    assert ledger.recover(world.client, older_than=LONG_AGO).aborted == []
    with ordered(world, staging, ledger, "b"):
        pass
    found = Ledger(production.connect).recover(world.client, older_than=LONG_AGO)
    assert (found.committed, found.alarms) == ([txn_id], {})
    assert production.orders() == ["a"]
    assert staging.orders() == ["b"]


def test_rows_of_a_former_secret_are_no_alarm(tmp_path: Path) -> None:
    production = SQLitePlace(tmp_path / "production.db").made()
    world = start(production)
    left(world, production, "a", committed=True)
    shutil.copy(production.path, tmp_path / "restored.db")
    restored = Ledger(SQLitePlace(tmp_path / "restored.db").connect)
    restored.adopt(world.client)
    assert restored.recover(world.client, older_than=LONG_AGO).alarms == {}
    assert [(row.outcome, row.former) for row in restored.rows()] == [("commit", True)]


def test_a_file_that_moved_for_good(tmp_path: Path) -> None:
    place = SQLitePlace(tmp_path / "here.db").made()
    world = start(place)
    txn_id = left(world, place, "a", committed=True)
    there = SQLitePlace(place.path.rename(tmp_path / "there.db"))
    refused(world, there, e.LedgerMoved, "ledger adopt")
    assert Ledger(there.connect).adopt(world.client, keep=True) == []
    assert Ledger(there.connect).recover(world.client, older_than=LONG_AGO).committed == [txn_id]
    assert differences(world, there) == set()


@pytest.mark.soak
def test_a_cloned_and_a_restored_database(postgres: Postgres, unique: str) -> None:
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        connection.execute(f"create database p{unique}")
        production = PostgresPlace(postgres.dsn(f"p{unique}"))
        world = start(production.made())
        left(world, production, "a", committed=True)
        connection.execute(f"create database c{unique} template p{unique}")
        connection.execute(f"create database r{unique}")
    dumped = postgres.run("pg_dump", "-h", str(postgres.folder), "-U", "root", f"p{unique}")
    script = postgres.folder / f"{unique}.sql"
    script.write_text(dumped)
    postgres.run(
        "psql", "-h", str(postgres.folder), "-U", "root", "-d", f"r{unique}", "-f", str(script)
    )
    for name in (f"c{unique}", f"r{unique}"):
        refused(world, PostgresPlace(postgres.dsn(name)), e.LedgerMoved, "ledger adopt")


@pytest.mark.soak
@pytest.mark.slow(8)
def test_a_standby_and_its_promotion(postgres: Postgres, unique: str) -> None:
    """The standby can't be written; promoted it may lack the newest rows, so a person decides."""
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        connection.execute(f"create database s{unique}")
    world = start(PostgresPlace(postgres.dsn(f"s{unique}")).made())
    folder = Path(tempfile.mkdtemp(prefix="anabranch-pg-"))
    standby = Postgres(folder)
    try:
        postgres.run(
            "pg_basebackup",
            "-h",
            str(postgres.folder),
            "-U",
            "root",
            "-D",
            str(standby.data),
            "-R",
            "-c",
            "fast",
        )
        standby.start()
        place = PostgresPlace(standby.dsn(f"s{unique}"))
        refused(world, place, e.InvalidArgument, "standby")
        standby.run("pg_ctl", "promote", "-D", str(standby.data))
        refused(world, place, e.LedgerMoved, "ledger adopt")
    finally:
        standby.remove()


def test_a_server_that_does_not_keep_commits_is_refused(unique: str) -> None:
    """L4: what is weaker for the session is made durable; what is off for the server is refused."""
    weak = Postgres()
    try:
        with (
            closing(psycopg.connect(weak.start("fsync=off").dsn())) as connection,
            pytest.raises(e.UnsupportedSetting, match="fsync"),
        ):
            Ledger(connection).create(World().client)
        weak.kill()
        place = PostgresPlace(weak.start("synchronous_commit=off").dsn()).made()
        world = start(place)
        shown = []
        with world.client.begin("shop") as txn, Ledger(place.connect).commit(txn) as cursor:
            shown = cursor.execute("show synchronous_commit").fetchall()
        assert shown == [("on",)]
        assert place.all("show synchronous_commit") == [("off",)]
    finally:
        weak.remove()
