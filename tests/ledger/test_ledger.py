"""The ledger's promises one by one, over a controller in memory and a real database of each kind."""

# ruff: noqa: PT012 (what a `with` of ours does at its end is what is tested)

from __future__ import annotations

import io
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any
from unittest.mock import patch

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg2.extras import RealDictCursor  # type: ignore[import-untyped]

from anabranch import errors as e
from anabranch.client.transaction import Transaction
from anabranch.ledger import Ledger, Recovered
from anabranch.ledger.book import Book
from anabranch.ledger.dialects import SQLite, driver_of
from anabranch.ledger.watch import Watch
from anabranch.ports import TopicPartition
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.testing.memory.client import memory_client
from anabranch.testing.memory.trouble import Kind, Trouble
from tests.client.world import World
from tests.ledger.places import Place, Psycopg2Place, SQLitePlace
from tests.ledger.races import DAY_S, differences, settle, start

LONG_AGO = -DAY_S * 1000.0  # all that is prepared is older


SERVERS = [pytest.param(driver, marks=pytest.mark.long) for driver in ("postgresql", "psycopg2")]
# Tests of what databases do in their own ways, or sessions and locks of a server: on one in the test command, too.
ON_A_SERVER = pytest.mark.parametrize("place", ["sqlite", "postgresql", SERVERS[1]], indirect=True)


@pytest.fixture(params=["sqlite", *SERVERS])
def place(request: pytest.FixtureRequest, new_place: Callable[[str], Place]) -> Place:
    """A database by each driver."""
    return new_place(request.param)


@pytest.fixture
def world(place: Place) -> World:
    return start(place)


@pytest.fixture
def ledger(place: Place) -> Ledger:
    return Ledger(place.connect)


def write(txn: Transaction, key: str) -> None:
    for stream in ("shop/orders", "bank/postings"):
        txn.write(stream, key.encode(), key=b"k")


@contextmanager
def ordered(
    world: World, place: Place, ledger: Ledger, key: str, **options: Any
) -> Iterator[Transaction]:
    """A transaction with an order and its events; the body runs after both."""
    with world.client.begin("shop") as txn, ledger.commit(txn, **options) as cursor:
        write(txn, key)
        place.order(cursor, key)
        yield txn


@ON_A_SERVER
def test_one_commit_decides_for_both(world: World, place: Place, ledger: Ledger) -> None:
    with ordered(world, place, ledger, "a") as txn:
        pass
    assert txn.result is not None
    assert txn.result.counts.committed == 2
    with pytest.raises(ZeroDivisionError), ordered(world, place, ledger, "b"):
        raise ZeroDivisionError
    assert place.orders() == ["a"]
    assert differences(world, place) == set()
    settle(world, place)


def test_the_older_driver_takes_it_too(new_place: Callable[[str], Place]) -> None:
    place = new_place("psycopg2")
    test_one_commit_decides_for_both(start(place), place, Ledger(place.connect))


def test_a_connection_of_the_callers_own(world: World, place: Place, ledger: Ledger) -> None:
    with closing(place.connect()) as connection:
        for key in ("a", "b"):
            with ordered(world, place, Ledger(connection), key):
                pass
        with ordered(world, place, ledger, "c", connection=connection):
            pass
        place.order(connection.cursor(), "d")  # it is open, and used further
        connection.commit()
    assert place.orders() == ["a", "b", "c", "d"]


def test_done_before_is_success_and_the_database_stays(
    world: World, place: Place, ledger: Ledger
) -> None:
    """L9."""
    results = []
    for key in ("first", "again"):
        with ordered(world, place, ledger, key, name="daily") as txn:
            pass
        results.append(txn.result)
    assert results[0] == results[1] is not None
    assert place.orders() == ["first"]
    assert differences(world, place) == set()


# -- bad input: a named error, nothing changed -----------------------------------------------------------


def autocommit(place: Place) -> Any:
    if isinstance(place, SQLitePlace):
        return sqlite3.connect(place.path, isolation_level=None)
    connection = place.connect()
    connection.autocommit = True
    return connection


def begun(place: Place) -> Any:
    connection = place.connect()
    place.order(connection.cursor(), "before")
    return connection


def after(sql: str) -> Callable[[Place], Any]:
    """Connections once this statement was carried out."""

    def made(place: Place) -> Any:
        place.run(sql)
        return place.connect()

    return made


def note(old: str, new: str) -> Callable[[Place], Any]:
    return after(f"update anabranch_ledger set note = replace(note, '{old}', '{new}')")


# How the connection is made, the error, and words of it.
REFUSED: dict[str, tuple[Callable[[Place], Any], type[Exception], str]] = {
    "autocommit": (autocommit, e.InvalidArgument, "commits each statement"),
    "begun": (begun, e.IllegalState, "roll it back first"),
    "foreign": (
        after("alter table anabranch_ledger rename column outcome to colour"), e.NoLedger, "ledger create",
    ),
    "emptied": (after("delete from anabranch_ledger"), e.NoLedger, "ledger create"),
    "missing": (
        after("drop table anabranch_ledger"), e.NoLedger, "there is no table anabranch_ledger here: run",
    ),
    "newer": (note('"version": 1', '"version": 2'), e.NoLedger, "upgrade"),
    "elsewhere": (note("memory/", "other/"), e.InvalidArgument, "of the cluster other/"),
    "moved": (note('"server": "', '"server": "x'), e.LedgerMoved, "ledger adopt"),
}  # fmt: skip


@ON_A_SERVER
@pytest.mark.parametrize("case", REFUSED)
def test_a_connection_is_refused_by_name(world: World, place: Place, case: str) -> None:
    made, error, says = REFUSED[case]
    with closing(made(place)) as connection, world.client.begin("shop") as txn:
        with pytest.raises(error, match=says), Ledger(connection).commit(txn):
            pytest.fail("the block ran")
        write(txn, "alone")  # the transaction is as it was
        txn.commit()
    assert place.orders() == []


def test_it_is_made_of_a_driver_s_connection() -> None:
    with pytest.raises(e.InvalidArgument, match="made of a connection"):
        Ledger("postgresql://host/name")
    with pytest.raises(e.InvalidArgument, match="no connection of a DB-API driver"):
        Ledger(io.StringIO).rows()


def test_a_transaction_has_one_ledger(world: World, place: Place, ledger: Ledger) -> None:
    """L5."""
    with (
        ordered(world, place, ledger, "a") as txn,
        pytest.raises(e.IllegalState, match="one `with`"),
        Ledger(place.connect).commit(txn),
    ):
        pytest.fail("the block ran")
    assert place.orders() == ["a"]


def test_a_transaction_that_began_again_commits_no_row_of_its_former_id(
    world: World, place: Place, ledger: Ledger
) -> None:
    """A refused commit in the block gave up the id that the ledger's row has."""
    with (
        pytest.raises(e.IllegalState, match="began again"),
        ordered(world, place, ledger, "a") as txn,
    ):
        txn.write("shop/late", b"a", key=b"k")
        with pytest.raises(e.UnknownStream):
            txn.commit()
        with world.client.outside():
            world.client.create_stream("shop/late")
    assert (place.orders(), ledger.rows()) == ([], [])
    assert differences(world, place) == set()
    settle(world, place)


@pytest.mark.parametrize(
    ("outcome", "error"), [("commit", e.AlreadyCommitted), ("abort", e.TransactionAborted)]
)
def test_a_row_of_that_id_is_there(
    world: World, place: Place, ledger: Ledger, outcome: str, error: type[Exception]
) -> None:
    with world.client.begin("shop") as txn:
        txn.token()
        assert txn.txn_id is not None
        place.run(
            f"insert into anabranch_ledger values ('{txn.txn_id.hex()}', '{outcome}', '00', 1, null)",
        )
        with pytest.raises(error), ledger.commit(txn):
            pytest.fail("the block ran")
        txn.abort()


def _by_call(_: Any, connection: Any) -> None:
    connection.commit()


def _by_sql(cursor: Any, _: Any) -> None:
    cursor.execute("commit")


def _by_with(_: Any, connection: Any) -> None:
    if isinstance(connection, psycopg.Connection):
        connection.commit()  # its `with` closes it
    else:
        with connection:
            pass


def _by_script(cursor: Any, connection: Any) -> None:
    if isinstance(connection, sqlite3.Connection):
        cursor.executescript("create table other (id int)")
    else:
        cursor.execute("commit; create table other (id int)")


def _and_chain(cursor: Any, connection: Any) -> None:
    cursor.execute("commit" if isinstance(connection, sqlite3.Connection) else "commit and chain")


@ON_A_SERVER
@pytest.mark.parametrize(("later", "raises"), [(True, False), (False, True)])
@pytest.mark.parametrize("ends", [_by_call, _by_sql, _by_with, _by_script, _and_chain])
def test_a_block_that_commits_by_itself_is_noticed(
    world: World,
    place: Place,
    ledger: Ledger,
    caplog: pytest.LogCaptureFixture,
    ends: Callable[[Any, Any], None],
    later: bool,
    raises: bool,
) -> None:
    """``later``: another transaction of the database follows, which looks like the first one."""
    expected: type[Exception] = ZeroDivisionError if raises else e.IllegalState
    with (
        closing(place.connect()) as connection,
        pytest.raises(expected, match=None if raises else "by itself"),
        world.client.begin("shop") as txn,
        Ledger(connection).commit(txn) as cursor,
    ):
        write(txn, "a")
        place.order(cursor, "a")
        ends(cursor, connection)
        if later:
            place.order(cursor, "b")
        if raises:
            raise ZeroDivisionError
    # psycopg2 takes the transaction for the first one, and begins none.
    by_text = isinstance(place, Psycopg2Place) and ends in (_by_sql, _by_script)
    assert place.orders() == ["a", "b"][: 1 + (later and by_text)]
    assert world.events("shop/orders") == []
    assert "its block has committed rows by itself" in caplog.text
    for _ in range(2):
        found = ledger.recover(world.client, older_than=LONG_AGO)
        assert list(found.alarms) == [txn.txn_id]
        assert (found.forgotten, found.aborted) == (0, [])
    assert [(row.outcome, row.early) for row in ledger.rows()] == [("abort", True)]
    place.run("delete from anabranch_ledger where txn_id <> 'ledger'")
    settle(world, place)


@ON_A_SERVER
def test_a_block_may_have_savepoints_and_roll_back_to_them(
    world: World, place: Place, ledger: Ledger
) -> None:
    with world.client.begin("shop") as txn, ledger.commit(txn) as cursor:
        write(txn, "a")
        place.order(cursor, "a")
        cursor.execute("savepoint mine")
        place.order(cursor, "b")
        cursor.execute("rollback to mine")
        cursor.execute("savepoint another")
    assert (place.orders(), differences(world, place)) == (["a"], set())
    settle(world, place)
    with (
        pytest.raises(e.IllegalState, match="by itself"),
        world.client.begin("shop") as txn,
        ledger.commit(txn) as cursor,
    ):
        write(txn, "c")
        cursor.execute("rollback")
    assert (place.orders(), differences(world, place), ledger.rows()) == (["a"], set(), [])


def test_a_block_that_rolls_back_and_continues_commits_nothing(world: World, place: Place) -> None:
    with (
        closing(place.connect()) as connection,
        pytest.raises((e.IllegalState, e.TransactionAborted)),
        ordered(world, place, Ledger(connection), "a"),
    ):
        connection.rollback()
        place.order(connection.cursor(), "b")
    assert (place.orders(), differences(world, place)) == ([], set())
    settle(world, place)


def test_a_block_that_commits_by_itself_is_noticed_though_its_name_was_committed(
    world: World, place: Place, ledger: Ledger
) -> None:
    with ordered(world, place, ledger, "a", name="daily"):
        pass
    with (
        closing(place.connect()) as connection,
        pytest.raises(e.IllegalState, match="by itself"),
        ordered(world, place, Ledger(connection), "b", name="daily") as txn,
    ):
        connection.commit()
        place.order(connection.cursor(), "c")
    assert place.orders() == ["a", "b"]
    assert list(ledger.recover(world.client, older_than=LONG_AGO).alarms) == [txn.txn_id]


@ON_A_SERVER
def test_the_ledger_takes_two_statements_of_a_transaction(
    world: World, place: Place, ledger: Ledger
) -> None:
    statements: list[str] = []
    real = Book._run

    def run(self: Book, statement: str, *values: Any) -> Any:
        statements.append(statement.split()[0])
        return real(self, statement, *values)

    with patch.object(Book, "_run", run), ordered(world, place, ledger, "a"):
        pass
    apart = [
        "select",
        "insert",
        "savepoint",
        "release",
        "update",
    ]  # SQLite has no round trips to save
    assert statements == (apart if isinstance(place, SQLitePlace) else ["with", "update"])


def dicts(place: Place) -> Any:
    connection = place.connect()
    if isinstance(place, Psycopg2Place):
        connection.cursor_factory = RealDictCursor
    elif isinstance(connection, sqlite3.Connection):
        connection.row_factory = lambda its, row: dict(
            zip((column[0] for column in its.description), row, strict=True)
        )
    else:
        connection.row_factory = dict_row
    return connection


def texts_as_bytes(place: Place) -> Any:
    connection = dicts(place)
    if isinstance(connection, sqlite3.Connection):
        connection.text_factory = bytes
    return connection


@ON_A_SERVER
@pytest.mark.parametrize("made", [dicts, texts_as_bytes])
def test_rows_of_the_callers_kind(world: World, place: Place, made: Callable[[Place], Any]) -> None:
    """The block's cursor gives such rows; the ledger's own cursor does not."""
    ledger = Ledger(lambda: made(place))
    ledger.create(world.client)
    with ordered(world, place, ledger, "a"):
        pass
    with world.client.begin("shop") as txn, ledger.commit(txn) as cursor:
        cursor.execute("select id, amount from orders")
        (row,) = cursor.fetchall()
        assert {**row} == {
            "id": b"a" if made is texts_as_bytes and place.mark == "?" else "a",
            "amount": 0,
        }
    dead = left(world, place, "b", committed=False)
    assert [row.outcome for row in ledger.rows()] == ["commit", "commit"]
    assert ledger.recover(world.client, older_than=LONG_AGO).aborted == [dead]
    assert ledger.adopt(world.client) == []
    settle(world, place)


def test_a_wrong_wait_is_refused_before_the_database_commits(world: World, ledger: Ledger) -> None:
    wrong: Any = "soon"
    with (
        world.client.begin("shop") as txn,
        pytest.raises(e.InvalidArgument, match="merged or decided"),
        ledger.commit(txn, wait=wrong),
    ):
        pytest.fail("the block ran")


def test_what_is_refused_at_prepare_changes_nothing(
    world: World, place: Place, ledger: Ledger
) -> None:
    with pytest.raises(e.WritersUnfinished), ordered(world, place, ledger, "a") as txn:
        other = world.client.join(txn.token())
        other.write("shop/orders", b"unfinished", key=b"k")
        other.flush()
    assert place.orders() == []
    settle(world, place)


def test_texts_that_are_neither_text_nor_bytes_are_refused(tmp_path: Any) -> None:
    with closing(sqlite3.connect(tmp_path / "x.db")) as connection:
        connection.text_factory = lambda text: text[::-1] + b"!"
        with pytest.raises(e.InvalidArgument, match="text_factory"):
            SQLite().check(connection)


@pytest.mark.parametrize("pragma", ["journal_mode = memory", "journal_mode = off"])
def test_commits_that_are_not_durable_are_refused(tmp_path: Any, pragma: str) -> None:
    """L4: the weak setting is mended, or refused."""
    with closing(sqlite3.connect(tmp_path / "x.db")) as connection:
        cursor = connection.cursor()
        cursor.execute("pragma synchronous = off")
        SQLite().server(cursor, None)
        assert cursor.execute("pragma synchronous").fetchone() == (2,)
        cursor.execute(f"pragma {pragma}")
        with pytest.raises(e.UnsupportedSetting, match="not durable"):
            SQLite().server(cursor, None)
    with closing(sqlite3.connect(":memory:")) as connection, pytest.raises(e.InvalidArgument):
        SQLite().server(connection.cursor(), None)


# -- the database is away, or silent -----------------------------------------------------------------


class Break:
    """A connection's hook that raises the driver's error at one step, after ending the session or not."""

    def __init__(self, place: Place, at: str, *, commits: bool = False) -> None:
        self.place, self.at, self.commits = place, at, commits
        self.connections: list[Any] = []

    def connect(self) -> Any:
        connection = self.place.connect(self if not self.connections else lambda _: None)
        self.connections.append(connection)
        return connection

    def __call__(self, step: str) -> None:
        if step == self.at:
            self.at = ""
            own = self.connections[0]
            if not self.commits:
                own.cut()
            raise driver_of(own).OperationalError("away")


@ON_A_SERVER
@pytest.mark.parametrize("connected", ["a function", "a connection"])
def test_a_commit_whose_answer_is_lost_counts(world: World, place: Place, connected: str) -> None:
    """The row says so, and it is our own attempt's."""
    lost = Break(place, "commit.after", commits=True)
    if connected == "a function":
        ledger = Ledger(lost.connect)
    else:
        ledger = Ledger(lost.connect())
    with ordered(world, place, ledger, "a") as txn:
        pass
    lost.connections[0].close()
    assert txn.result is not None
    assert (place.orders(), differences(world, place)) == (["a"], set())


def test_a_commit_that_failed_is_aborted_by_the_row(world: World, place: Place) -> None:
    failing = Break(place, "commit")
    with (
        pytest.raises(Exception, match="away"),
        ordered(world, place, Ledger(failing.connect), "a") as txn,
    ):
        pass
    assert (place.orders(), differences(world, place)) == ([], set())
    assert world.client.state(txn.txn_id or b"").state == "ABORTED"
    settle(world, place)


@ON_A_SERVER
@pytest.mark.parametrize("committed", [True, False])
def test_a_database_that_stays_away_aborts_nothing(
    world: World, place: Place, ledger: Ledger, committed: bool
) -> None:
    """L1 e: the outcome is unknown, and the outer `with` does nothing."""
    at = "commit.after" if committed else "commit"
    broken = Break(place, at, commits=committed)
    connection = broken.connect()
    with (
        patch.object(Book, "rollback", lambda book: False),
        pytest.raises(e.OutcomeUnknown, match="recover"),
        ordered(world, place, Ledger(connection), "a") as txn,
    ):
        pass
    connection.close()
    assert world.client.state(txn.txn_id or b"").state == "PREPARED"
    found = ledger.recover(world.client, "shop", LONG_AGO)
    assert (found.committed, found.aborted) == (
        ([txn.txn_id], []) if committed else ([], [txn.txn_id])
    )
    assert place.orders() == (["a"] if committed else [])
    settle(world, place)
    assert differences(world, place) == set()


def test_a_commit_that_recovery_ended_is_unknown_while_no_controller_answers(place: Place) -> None:
    """The commit's answer is lost; recovery ends it and forgets the row; then the controllers are away."""
    world, done, connections = start(place), list[Recovered](), list[Any]()

    def lose(step: str) -> None:
        if step == "commit.after" and not done:
            done.append(Ledger(place.connect).recover(world.client, older_than=LONG_AGO))
            world.stop_controller()
            raise driver_of(connections[0]).OperationalError("away")

    def connect() -> Any:
        connections.append(place.connect(lose))
        return connections[-1]

    client = world.new_client(timeout=5.0)
    txn = client.begin("shop")
    with (
        pytest.raises(e.OutcomeUnknown, match="recover"),
        txn,
        Ledger(connect).commit(txn, timeout=5) as cursor,
    ):
        write(txn, "a")
        place.order(cursor, "a")
    assert (place.orders(), done[0].committed) == (["a"], [txn.txn_id])


def test_controllers_that_are_away_are_no_error(
    world: World, place: Place, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    with ordered(world, place, ledger, "a", timeout=1.0) as txn:
        silent = patch.object(txn, "commit", side_effect=e.NotReady("no controller answered"))
        silent.start()
    silent.stop()
    assert txn.result is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert ledger.recover(world.client, older_than=LONG_AGO).committed == [txn.txn_id]
    assert differences(world, place) == set()


# -- recovery ------------------------------------------------------------------------------------------


def left(world: World, place: Place, key: str, *, committed: bool) -> bytes:
    """A transaction that a process left when it died, before or after the database's commit."""

    class Killed(BaseException):
        pass

    def kill(step: str) -> None:
        if step == ("commit.after" if committed else "commit"):
            raise Killed

    connections: list[Any] = []

    def connect() -> Any:
        connections.append(place.connect(kill))
        return connections[-1]

    txn = world.client.begin("shop")
    with pytest.raises(Killed), ExitStack() as stack:
        cursor = stack.enter_context(Ledger(connect).commit(txn))
        write(txn, key)
        place.order(cursor, key)
    connections[0].close()
    return txn.txn_id or b""


def test_recovery_ends_what_is_old_enough(world: World, place: Place, ledger: Ledger) -> None:
    done, undone = (left(world, place, key, committed=key == "a") for key in ("a", "b"))
    assert ledger.recover(world.client, older_than=1e10) == Recovered()
    found = ledger.recover(world.client, "shop", LONG_AGO)
    assert (found.committed, found.aborted, found.alarms) == ([done], [undone], {})
    assert (place.orders(), differences(world, place)) == (["a"], set())
    assert ledger.rows() == []


@ON_A_SERVER
def test_a_row_that_a_process_holds_is_left_alone(
    world: World, place: Place, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L2: a process that sleeps in its open database transaction, for longer than all that is kept."""
    monkeypatch.setattr("anabranch.ledger.book.LOCK_S", 0.05)
    seen: list[Recovered] = []

    def sleep(step: str) -> None:
        if step == "commit" and not seen:
            for _ in range(3):
                world.clock.sleep(20 * DAY_S)
                seen.append(ledger.recover(world.client, older_than=LONG_AGO))

    with ordered(world, place, Ledger(lambda: place.connect(sleep)), "a") as txn:
        pass
    assert [found.held for found in seen] == [[txn.txn_id]] * 3
    assert all(not (found.aborted or found.committed or found.alarms) for found in seen)
    assert (place.orders(), differences(world, place)) == (["a"], set())


FULL = """
create function full_disk() returns trigger language plpgsql as
$$ begin raise exception 'no space left' using errcode = '53100'; end $$;
create trigger t before insert on anabranch_ledger for each row execute function full_disk()
"""


@ON_A_SERVER
def test_a_database_that_takes_no_row_is_no_row_that_is_held(
    world: World, place: Place, ledger: Ledger
) -> None:
    """A full disk on PostgreSQL, a file to be read only on SQLite: recovery says so, and goes on later."""
    txn_id = left(world, place, "a", committed=False)
    if isinstance(place, SQLitePlace):
        connection = sqlite3.connect(f"file:{place.path}?mode=ro", uri=True)
    else:
        place.run(FULL)
        connection = place.connect()
    with closing(connection):
        for _ in range(2):
            with pytest.raises(driver_of(connection).OperationalError, match=r"readonly|no space"):
                Ledger(connection).recover(world.client, older_than=LONG_AGO)
    assert world.client.state(txn_id).state == "PREPARED"


@ON_A_SERVER
def test_a_held_row_is_known_where_statements_have_little_time(
    world: World, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.ledger.book.LOCK_S", 0.6)
    with closing(place.connect()) as holder, closing(place.connect()) as other:
        if not isinstance(place, SQLitePlace):
            other.cursor().execute("set statement_timeout = 300")
            other.commit()
        Book(holder, "anabranch_ledger", None).begin(b"t" * 16, b"")
        assert Book(other, "anabranch_ledger", None).decide(b"t" * 16) is None


@ON_A_SERVER
def test_a_sleeper_whose_session_ended_finds_its_row_gone(
    world: World, place: Place, ledger: Ledger
) -> None:
    """L2: recovery decides, forgets the row and the log its outcome; absence is abort for the sleeper."""
    connection = place.connect()
    with pytest.raises(e.TransactionAborted), ordered(world, place, Ledger(connection), "a") as txn:
        real = txn.prepare

        def prepare(*given: Any, **named: Any) -> Any:
            found = real(*given, **named)
            connection.rollback()
            world.clock.sleep(100.0)
            assert ledger.recover(world.client, older_than=LONG_AGO).aborted == [txn.txn_id]
            world.clock.sleep(20 * DAY_S)
            return found

        stack = patch.object(txn, "prepare", prepare)
        stack.start()
    assert (place.orders(), differences(world, place), ledger.rows()) == ([], set(), [])


def force_abort(world: World, txn_id: bytes) -> None:
    operator = memory_client(world.cluster.log("admin"), world.clock, os.urandom, lane=ADMIN_LANE)
    operator.force(txn_id, outcome=False)


@pytest.mark.parametrize("small", [True, False])
def test_a_transaction_that_waits_keeps_no_other_one(
    world: World, place: Place, ledger: Ledger, small: bool
) -> None:
    """A partition of one has no leader."""
    world.client.create_stream("shop/gone")
    txns = []
    for stream in ("shop/gone", "bank/postings"):
        with patch("anabranch.ledger.ledger._finish"), world.client.begin("shop") as txn:
            with ledger.commit(txn):
                if not small:
                    txn.token()
                txn.write(stream, b"a", key=b"k")
            txns.append(txn.txn_id)
    world.cluster.troubles[TopicPartition("shop.gone", 0)] = Trouble(Kind.LEADERLESS)
    for _ in range(200):
        world.clock.sleep(0.5)
    client = world.new_client(timeout=5)
    found = ledger.recover(client, older_than=LONG_AGO)
    assert (list(found.waiting), found.committed, found.forgotten) == (txns[:1], txns[1:], 1)
    watch, unknown = Watch(10), bytes([0, 0]) + bytes(14)
    place.run(f"insert into anabranch_ledger values ('{unknown.hex()}', 'commit', '00', 1, null)")
    found = watch.look(lambda: ledger.recover(client, older_than=LONG_AGO))
    assert (list(found.waiting), found.expired) == (txns[:1], [unknown])
    assert (watch.trouble() or "").startswith("1 can't be ended yet: ")
    del world.cluster.troubles[TopicPartition("shop.gone", 0)]
    world.clock.sleep(60)
    assert ledger.recover(client, older_than=LONG_AGO).forgotten == 1


def test_a_read_of_the_outcome_is_short_without_controllers(
    world: World, place: Place, ledger: Ledger
) -> None:
    for n in range(50):
        txn_id = (bytes([0, 0]) + n.to_bytes(14, "big")).hex()
        place.run(f"insert into anabranch_ledger values ('{txn_id}', 'commit', '00', {n}, null)")
    client = world.new_client(timeout=5)
    told = client.prepared("shop", secret=b"")
    world.stop_controller()
    with patch.object(client, "prepared", lambda *_, **__: told):
        looks = [ledger.recover(client, older_than=LONG_AGO, limit=most) for most in (10, 1000)]
    assert [len(found.waiting) for found in looks] == [10, 20]


def test_rows_that_stay_hide_no_other_one(world: World, place: Place, ledger: Ledger) -> None:
    for n in range(3):
        with ordered(world, place, ledger, f"former {n}"):
            pass
    ledger.adopt(world.client)
    settled = left(world, place, "settled", committed=True)
    force_abort(world, settled)
    with ordered(world, place, ledger, "a"):
        pass
    found = ledger.recover(world.client, older_than=LONG_AGO, limit=1)
    assert (list(found.alarms), found.forgotten) == ([settled], 1)
    assert len(ledger.rows()) == 4


def test_a_row_that_contradicts_the_log_is_an_alarm_and_stays(
    world: World, place: Place, ledger: Ledger
) -> None:
    """An operator forced its abort, and the database has committed."""
    txn_id = left(world, place, "a", committed=True)
    force_abort(world, txn_id)
    for _ in range(2):
        found = ledger.recover(world.client, older_than=LONG_AGO)
        assert set(found.alarms) == {txn_id}
    assert {row.txn_id for row in ledger.rows()} == {txn_id}


def test_a_row_whose_outcome_is_forgotten_is_reported_once(
    world: World, place: Place, ledger: Ledger
) -> None:
    """The transaction was committed, and no recovery ran for longer than outcomes are kept."""
    with patch("anabranch.ledger.ledger._finish"), ordered(world, place, ledger, "a") as txn:
        pass
    assert txn.txn_id is not None
    world.client.commit(txn.txn_id, secret=_secret(ledger))
    world.clock.sleep(8 * DAY_S)
    with world.client.begin("shop") as other:  # the controllers forget what is old with each round
        write(other, "b")
        other.commit()
    looks = [ledger.recover(world.client, older_than=LONG_AGO) for _ in range(2)]
    assert [(f.expired, f.forgotten, f.alarms) for f in looks] == [
        ([txn.txn_id], 1, {}),
        ([], 0, {}),
    ]
    assert ledger.rows() == []


def test_a_control_partition_that_does_not_answer_holds_up_no_recovery(place: Place) -> None:
    world, ledger = start(place, control_partitions=2), Ledger(place.connect)
    world.client = world.new_client(timeout=2.0)
    dead = left(world, place, "a", committed=True), left(world, place, "b", committed=False)
    there = bytes([0, 1]) + dead[0][2:]
    place.run(f"insert into anabranch_ledger values ('{there.hex()}', 'commit', '00', 1, null)")
    watch = Watch(10)
    found = watch.look(lambda: ledger.recover(world.client, older_than=LONG_AGO))
    assert (found.committed, found.aborted) == ([dead[0]], [dead[1]])
    assert (list(found.missing), found.waiting, found.alarms) == ([1], {}, {})
    assert (watch.trouble() or "").startswith("control partition 1 does not answer: ")
    assert [row.txn_id for row in ledger.rows()] == [there]
    with pytest.raises(e.NotReady, match="control partition 1"):
        ledger.adopt(world.client)
    world.stop_controller()
    with pytest.raises(e.RetryError):
        ledger.recover(world.client, older_than=LONG_AGO)


def _secret(ledger: Ledger) -> bytes:
    with ledger._open() as book:
        return book.open().secret


def test_forced_while_the_process_lives(world: World, place: Place, ledger: Ledger) -> None:
    def force(step: str) -> None:
        if step == "commit.after":
            force_abort(world, txn_id[0])

    txn_id: list[bytes] = []
    with (
        pytest.raises(e.LedgerDiffers, match="by hand"),
        ordered(world, place, Ledger(lambda: place.connect(force)), "a") as txn,
    ):
        txn_id.append(txn.txn_id or b"")
    assert place.orders() == ["a"]


def test_a_ledger_ends_only_what_it_prepared(
    world: World, place: Place, ledger: Ledger, tmp_path: Any
) -> None:
    """Two databases, one scope."""
    txn_id = left(world, place, "a", committed=True)
    other = SQLitePlace(tmp_path / "other.db").made()
    second = Ledger(other.connect)
    second.create(world.client)
    assert second.recover(world.client, older_than=LONG_AGO) == Recovered()
    with pytest.raises(e.NotAuthorized):
        world.client.abort(txn_id)
    assert ledger.recover(world.client, older_than=LONG_AGO).committed == [txn_id]


def test_create_again_changes_nothing(world: World, place: Place, ledger: Ledger) -> None:
    txn_id = left(world, place, "a", committed=True)
    ledger.create(world.client)
    assert ledger.recover(world.client, older_than=LONG_AGO).committed == [txn_id]
