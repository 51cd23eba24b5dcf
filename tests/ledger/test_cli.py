"""`anabranch ledger`, over a controller in memory and a real database."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

import psycopg
import pytest
from typer.testing import CliRunner

from anabranch.cli import ledger as commands
from anabranch.cli import options
from anabranch.cli.main import app
from anabranch.client.client import Client
from anabranch.controller import monitor
from tests.client.world import World
from tests.ledger.places import Place, PostgresPlace, SQLitePlace
from tests.ledger.races import STREAMS
from tests.ledger.test_ledger import force_abort, left
from tests.processing.test_watched import page


class Shell:
    """Runs commands against a world and a place."""

    def __init__(self, world: World, place: Place) -> None:
        self.world = world
        self.url = str(place.path) if isinstance(place, SQLitePlace) else ""
        self.url = place.dsn if isinstance(place, PostgresPlace) else self.url

    def __call__(self, *words: str, code: int = 0) -> Any:
        """The JSON documents that a command prints."""
        words = ("ledger", *words, "--database", self.url, "--bootstrap", "x:1", "--json")
        done = CliRunner().invoke(app, words)
        assert done.exit_code == code, done.output
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def shell(place: Place, monkeypatch: pytest.MonkeyPatch) -> Shell:
    world = World()
    for stream in STREAMS:
        world.client.create_stream(stream, segments=1)

    @contextmanager
    def connected(_: object) -> Iterator[Client]:
        yield world.client

    monkeypatch.setattr(options, "connected", connected)
    return Shell(world, place)


def test_the_life_of_a_ledger(shell: Shell, place: Place) -> None:
    world = shell.world
    shell("recover", "--once", code=2)  # there is no ledger
    assert shell("create") == shell("create")
    done, undone = (left(world, place, key, committed=key == "a") for key in ("a", "b"))
    (row,) = shell("list")[0]["rows"]
    assert (row["txn_id"], row["outcome"], row["former"]) == (done.hex(), "commit", False)
    (found,) = shell("recover", "--once", "--older-than", "0s")
    assert (found["committed"], found["aborted"]) == ([done.hex()], [undone.hex()])
    assert shell("list") == [{"rows": []}]
    # An operator forces its end, and is wrong.
    wrong = left(world, place, "c", committed=True)
    force_abort(world, wrong)
    found, error = shell_with_error(shell)
    assert list(found["alarms"]) == [wrong.hex()]
    assert error["error"]["name"] == "CheckFailed"
    # Under another secret the rows so far are former; what was prepared is shown, for a person.
    waiting = left(world, place, "d", committed=True)
    shell("adopt", code=2)  # it asks first
    (shown,) = shell("adopt", "--yes")
    assert [each["txn_id"] for each in shown["prepared"]] == [waiting.hex()]
    assert {row["former"] for row in shell("list")[0]["rows"]} == {True}
    assert shell("recover", "--once", "--older-than", "0s")[0]["alarms"] == {}


def test_a_mistyped_file_is_refused_and_not_made(tmp_path: Path) -> None:
    path = tmp_path / "shpo.db"
    for command in ("list", "recover"):
        words = ("ledger", command, "--database", str(path), "--bootstrap", "x:1")
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2
        assert done.stderr.startswith(f"NoLedger: there is no file {path}: correct --database")
        assert not path.exists()


def shell_with_error(shell: Shell) -> tuple[Any, Any]:
    words = ("ledger", "recover", "--once", "--older-than", "0s")
    done = CliRunner().invoke(
        app, [*words, "--database", shell.url, "--bootstrap", "x:1", "--json"]
    )
    assert done.exit_code == 1
    return json.loads(done.stdout), json.loads(done.stderr)


def test_the_service_waits_for_a_database_that_is_away(
    shell: Shell, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its third look meets the database, and ends what is left; its page says so; then Ctrl-C."""
    shell("create")
    txn_id = left(shell.world, place, "a", committed=True)
    looks: list[float] = []

    def connect() -> Any:
        if len(looks) < 2:
            raise psycopg.OperationalError("the database is away")
        return place.connect()

    ready: list[int] = []
    pages: list[str] = []

    real = time.sleep

    def sleep(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            return real(seconds)  # threads that others left sleep as they like
        looks.append(seconds)
        ready.append(page(servers[0].server_port, "ready")[0])
        if len(looks) == 4:
            pages.append(page(servers[0].server_port, "metrics")[1])
            raise KeyboardInterrupt
        return None

    servers: list[WSGIServer] = []
    make_server = monitor.make_server  # type: ignore[attr-defined]

    def made(*given: Any) -> WSGIServer:
        servers.append(make_server(*given))
        return servers[-1]

    monkeypatch.setattr(monitor, "make_server", made)
    monkeypatch.setattr(commands, "_connector", lambda url, new: connect)
    monkeypatch.setattr(time, "sleep", sleep)
    words = ("--older-than", "0s", "--every", "7s", "--http", "127.0.0.1:0")
    (found,) = shell("recover", *words, code=130)
    assert looks == [7.0] * 4
    assert found["committed"] == [txn_id.hex()]
    assert ready == [503, 503, 200, 200]
    for line in (
        'recovered_total{ledger="anabranch_ledger"} 1.0',
        'failures_total{error="OperationalError",ledger="anabranch_ledger"} 2.0',
        'look_seconds_count{ledger="anabranch_ledger"} 4.0',
        'alarms{ledger="anabranch_ledger"} 0.0',
    ):
        assert f"anabranch_ledger_{line}" in pages[0]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("create", "--database", ""), 2),
        (("list", "--database", "/nowhere/x.db"), 2),
        (("list", "--database", "/"), 6),
        (("list", "--database", "postgresql+psycopg://u:secret@h/d"), 2),
    ],
)
def test_a_database_that_is_not_there(words: tuple[str, ...], code: int) -> None:
    done = CliRunner().invoke(app, ["ledger", *words, "--bootstrap", "x:1"])
    assert done.exit_code == code
    if "://" in words[-1]:
        assert "postgresql://" in done.stderr
        assert "SQLite file" in done.stderr
        assert "secret" not in done.stderr


@pytest.mark.parametrize(
    ("url", "path"), [("sqlite:///x.db", "x.db"), ("sqlite:////srv/x.db", "/srv/x.db")]
)
def test_a_url_of_sqlite_is_answered_with_the_file_s_path(url: str, path: str) -> None:
    done = CliRunner().invoke(app, ["ledger", "list", "--database", url, "--bootstrap", "x:1"])
    assert done.exit_code == 2
    assert f"of SQLite give the file's path: --database {path} ->" in done.stderr
