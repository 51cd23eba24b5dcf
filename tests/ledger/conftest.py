"""One PostgreSQL server for the tests of this folder; each test has a database of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg
import pytest

from tests.ledger.places import Place, PostgresPlace, SQLitePlace
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


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, quick_path: Path, unique: str) -> Place:
    """An empty database with the user's table ``orders``."""
    if request.param == "sqlite":
        return SQLitePlace(quick_path / "shop.db").made()
    server: Postgres = request.getfixturevalue("postgres")
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(f"create database d{unique}")
    return PostgresPlace(server.dsn(f"d{unique}")).made()
