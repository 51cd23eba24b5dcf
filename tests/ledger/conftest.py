"""One PostgreSQL server for the tests of this folder; each test has a database of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg
import pytest

from tests.ledger.places import Place, PostgresPlace, Psycopg2Place, SQLitePlace
from tests.postgres import Postgres, server


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with server() as started:
        yield started


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: thousands of durable commits wait for no disk."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def emptied() -> list[str]:
    """Databases of the server that tests have used, with nothing in them: to make one takes long."""
    return []


@pytest.fixture
def new_place(
    request: pytest.FixtureRequest, quick_path: Path, unique: str, emptied: list[str]
) -> Iterator[Callable[[str], Place]]:
    """Makes an empty database with the user's table ``orders``, to be used by a driver."""
    used: list[str] = []

    def make(driver: str) -> Place:
        if driver == "sqlite":
            return SQLitePlace(quick_path / "shop.db").made()
        server: Postgres = request.getfixturevalue("postgres")
        if not emptied:
            run(server.dsn(), f"create database d{unique}{len(used)}")
            emptied.append(f"d{unique}{len(used)}")
        used.append(emptied.pop())
        kind = Psycopg2Place if driver == "psycopg2" else PostgresPlace
        return kind(server.dsn(used[-1])).made()

    yield make
    for name in used:
        dsn = request.getfixturevalue("postgres").dsn(name)
        run(dsn, "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s and pid <> "
            "pg_backend_pid()", name)  # fmt: skip
        run(dsn, "drop schema public cascade; create schema public")
        emptied.append(name)


def run(dsn: str, sql: str, *given: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.cursor().execute(sql.encode(), given or None)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def place(request: pytest.FixtureRequest, new_place: Callable[[str], Place]) -> Place:
    """A database of each kind; in the test command `test_ledger.py` alone has a server."""
    return new_place(request.param)
