"""Replicas over a real controller and the log in memory: each step shows a state that was, all of it."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from anabranch.batches.records import Record
from anabranch.client import receipts
from anabranch.errors import (
    IllegalState,
    InvalidArgument,
    NotAuthorized,
    NotReady,
    ReceiptMismatch,
    RetryError,
    SnapshotExpired,
    UnknownStream,
)
from anabranch.ports import LogUnavailable, TableError, TopicPartition
from anabranch.protocol.hybrid_time import to_us
from anabranch.reading.history import HistoryCursor
from anabranch.tables import follow
from anabranch.tables import replica as replica_module
from anabranch.tables.replica import ReadReplica
from anabranch.tables.snapshot import TableSnapshot, bounds
from anabranch.tables.store import Rows, Store
from anabranch.topics.names import history_topic, journal_topic, stream_topic
from tests.client.world import World
from tests.tables.worlds import Truth, as_it_lies, operator, put, replica, visible
from tests.waiting import wait_until

TABLES = ("bank/one", "bank/two", "bank/idle")
KEYS = [b"a", b"a\0", b"b", b"c\xff", b"d", None]


@pytest.fixture
def world() -> World:
    made = World()
    for table in TABLES:
        made.client.create_stream(table, 2)
    return made


def write(world: World, chance: random.Random, keys: Sequence[bytes | None] = tuple(KEYS)) -> None:
    """A transaction, or a plain one-shot, of some of the tables; big ones go through journals."""
    with world.client.begin("bank") as txn:
        for _ in range(chance.choice([1, 2, 5, 40])):
            value = chance.choice([None, b"%d" % chance.randrange(99), b"x" * 200])
            txn.write(chance.choice(TABLES[:2]), value, chance.choice(keys))
        if chance.random() < 0.1:
            return  # aborted
        txn.commit()


def check(found: ReadReplica, truth: Truth, at: int) -> None:
    """All tables as of a time that is here whole."""
    snapshot = TableSnapshot(
        found._store, at, {t: m.number for t, m in found._store.marks.items()}, lambda _: None
    )
    for table in found.tables:
        rows = visible(truth.versions(table), at)
        assert dict(snapshot.scan(table)) == rows, (table, at)
        assert list(snapshot.scan(table, reverse=True)) == list(rows.items())[::-1]
        assert snapshot.get_many(table, [b"none", *truth.versions(table)]) == rows
        if found._store.indexes(table):
            for end in {row[-1:] for row in rows.values()} | {b"?"}:
                wanted = [(key, row) for key, row in rows.items() if row[-1:] == end]
                assert list(snapshot.lookup("end", end)) == wanted, (table, at, end)


@contextlib.contextmanager
def disk(store: Store, chance: random.Random) -> Iterator[None]:
    """Writes fail: nothing is there of one, or all of it, and the process does not know."""
    real = store.write

    def write(rows: Rows) -> None:
        if chance.random() < 0.5:
            before = dict(store.marks)
            real(rows)
            store.marks = before
        raise OSError("no space left")

    with patch.object(store, "write", write), contextlib.suppress(OSError):
        yield


@pytest.mark.parametrize(
    "seed", [0, 10, 11, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2, 3))]
)
def test_each_step_shows_what_was(
    world: World, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of few rows, crashes between any two of them, errors of brokers, words that come early and late."""
    monkeypatch.setattr(follow, "BATCH_ROWS", 3)
    chance = random.Random(seed)
    truth = Truth(world, TABLES)
    how: dict[str, Any] = {
        "history_ms": 2000,
        "index": {"end": (TABLES[0], lambda _, row: row[-1:])},
    }
    found = replica(world, truth, TABLES, tmp_path / "0", **how)
    lives = 0
    for _ in range(120):
        kind = chance.choices(["write", "step", "told", "crash", "scale"], [6, 40, 4, 2, 1])[0]
        if kind == "write":
            write(world, chance)
        elif kind == "scale":
            world.client.scale(chance.choice(TABLES), chance.choice([1, 2, 3]))
        elif kind == "told":
            found.observe(*truth.safe(TABLES, 0, 0.0))
        elif kind == "crash":
            lives += 1
            if chance.random() < 0.7:
                found._store._db.flush()
            copy = tmp_path / str(lives)
            copy.mkdir()
            as_it_lies(tmp_path / str(lives - 1) / "rows", copy / "rows")
            found.close()
            found = replica(world, truth, TABLES, copy, **how)
        else:
            odds = chance.choice([0, 0, 0, 0.1, 0.5])

            def fault(_: str, odds: float = odds) -> BaseException | None:
                return LogUnavailable("gone") if chance.random() < odds else None

            world.fault = fault if odds else None
            with (
                contextlib.suppress(RetryError) if odds else contextlib.nullcontext(),
                disk(found._store, chance) if chance.random() < 0.1 else contextlib.nullcontext(),
            ):
                found.step(world.clock.now)
            world.fault = None
        if not found._store.loading and found.timestamp:
            check(found, truth, found.timestamp)
    now, last = truth.safe(TABLES, 0, 0.0)
    found.wait(now, last, world.clock.now + 300)
    assert all(found.last[table] == at for table, at in last.items() if at)
    floor = max(mark.floor for mark in found._store.marks.values())
    for at in sorted({c.timestamp for t in TABLES for c in world.commits(t)}):
        if at >= floor:
            check(found, truth, at)
    found.close()


def test_a_table_is_complete_by_its_own_last_commit(world: World) -> None:
    """The word counts once the commit that it names is laid down, for that table alone."""
    truth = Truth(world, TABLES)
    found = replica(world, truth, TABLES, None)
    one, two, idle = TABLES
    found.wait(1, {}, world.clock.now + 9)
    with world.client.begin("bank") as txn:
        txn.write(one, b"1", b"k")
        txn.write(two, b"1", b"k")
        commit = txn.commit().commit_timestamp
    assert commit is not None
    found.observe(commit + 5, {one: commit, idle: 0})
    assert found.complete[one] < commit
    assert found.complete[idle] == commit + 5
    while found.step(world.clock.now):
        pass
    assert found.complete == {one: commit + 5, two: commit, idle: commit + 5}
    assert found.timestamp == commit
    found.close()


def test_snapshots(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "_LEAST_SWEPT", 1)
    one = TABLES[0]
    truth = Truth(world, TABLES)
    with replica(world, truth, [one], tmp_path, history_ms=1000) as found:
        first = put(world.client, one, b"1", b"a", b"b", b"b\xff", b"c")
        with found.snapshot() as then:
            for value in (b"2", None):
                world.clock.sleep(5)
                put(world.client, one, value, b"a")
            with found.snapshot() as now:
                for _ in range(4):
                    found.step(world.clock.now)
                assert (then.get(one, b"a"), now.get(one, b"a")) == (b"1", None)
                assert [k for k, _ in now.scan(one, prefix=b"b")] == [b"b", b"b\xff"]
                assert [k for k, _ in now.scan(one, b"b", b"c", reverse=True)] == [b"b\xff", b"b"]
                assert [k for k, _ in then.scan(one, limit=2)] == [b"a", b"b"]
                assert found.snapshot(at=first).get(one, b"a") == b"1"
                bad: list[Any] = [b"", b"k" * 8193, "a"]
                for key in bad:
                    with pytest.raises(InvalidArgument, match="1 to 8,192 of them"):
                        now.get(one, key)
                with pytest.raises(InvalidArgument, match="not in this replica of bank/one"):
                    now.get(TABLES[1], b"a")
        with pytest.raises(IllegalState, match="take another one"):
            then.get(one, b"a")
        found._open.clear()
        for truth.oldest in (first, 0):  # of a transaction that is open elsewhere
            world.clock.sleep(5)
            put(world.client, one, b"3", b"d")
            with found.snapshot():
                for _ in range(4):
                    found.step(world.clock.now)
            if truth.oldest:
                with found.snapshot(at=first) as then:
                    assert then.get(one, b"a") == b"1"
        with pytest.raises(
            SnapshotExpired, match=r"take a later snapshot, or set `table.history.ms`"
        ):
            found.snapshot(at=first)
        with pytest.raises(NotReady, match="not yet"):
            found.snapshot(at=found.timestamp + (1 << 40), timeout=1)


def test_a_history_that_was_cut_loads_no_table(world: World, tmp_path: Path) -> None:
    """A folder that is behind the cut is dropped; without its beginning there is no table."""
    truth = Truth(world, TABLES)
    one = TABLES[0]
    found = replica(world, truth, [one], tmp_path)
    write(world, random.Random(1))
    one_row(world)  # a table without rows would keep its number
    found.snapshot().close()
    number = found._store.marks[one].number
    found.close()
    place = TopicPartition(history_topic(one), 0)
    for _ in range(3):
        put(world.client, one, b"1", b"a")
    log = world.cluster.log("retention")
    end = log.end_offsets([place], committed=True)[place]
    now, last = truth.safe([one], 0, 0.0)
    log.delete_records({place: end - 1})
    with replica(world, truth, [one], tmp_path) as found:
        errors: list[tuple[type[Exception], str]] = [
            (NotReady, "it is loaded again"),
            (SnapshotExpired, "no table can be made of it"),
        ]
        for error, match in errors:
            with pytest.raises(error, match=match):
                found.step(world.clock.now)
        with pytest.raises(SnapshotExpired, match="no table can be made of it"):
            found.wait(now, last, world.clock.now + 9)
        assert found._store.marks[one].number > number


@pytest.mark.parametrize("steps", ["one for all", "one for each record"])
def test_a_table_whose_events_are_deleted_says_so_until_it_is_mended(
    world: World, monkeypatch: pytest.MonkeyPatch, steps: str
) -> None:
    truth = Truth(world, TABLES)
    one = one_row(world)
    log = world.cluster.log("retention")
    places = [TopicPartition(stream_topic(one), p) for p in range(2)]
    log.delete_records(log.end_offsets(places, committed=True))
    if steps == "one for each record":  # then EPOCH is laid down before the commit is met
        real = HistoryCursor.next
        monkeypatch.setattr(HistoryCursor, "next", lambda its, at, _: real(its, at, 1))
    with replica(world, truth, [one], None) as found:
        numbers = set()
        for _ in range(20):
            with contextlib.suppress(SnapshotExpired):
                found.step(world.clock.now)
            with pytest.raises(SnapshotExpired, match="no table can be made of it"):
                found.snapshot()
            numbers.add(found._store.marks[one].number)
        assert len(numbers) == 1, "it has no rows"
        operator(world).delete_stream(one)
        world.client.create_table(one, 2)
        one_row(world)
        with found.snapshot() as now:
            assert list(now.scan(one)) == [(b"a", b"1")]


def test_a_stream_made_again_is_loaded_again(world: World, tmp_path: Path) -> None:
    truth = Truth(world, TABLES)
    one = TABLES[0]
    put(world.client, one, b"old", b"a")
    found = replica(world, truth, [one], tmp_path)
    found.snapshot().close()
    mark = found._store.marks[one]
    rows = Rows()
    rows.add(mark.number, bytes(16), mark.last, [b"b"], [b"of another stream"])
    rows.marks[one] = mark._replace(ids="others", position=99)
    found._store.write(rows)
    found.close()
    found = replica(world, truth, [one], tmp_path)
    with found.snapshot() as now:
        assert list(now.scan(one)) == [(b"a", b"old")]
        found._follower._begin_again(one, "others")
        with pytest.raises(SnapshotExpired, match="loaded again"):
            now.get(one, b"a")
    found.close()


def one_row(world: World) -> str:
    """The first table, with a row."""
    put(world.client, TABLES[0], b"1", b"a")
    return TABLES[0]


def test_a_snapshot_of_a_table_that_is_just_being_dropped(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the wait and the snapshot it is empty; the snapshot waits until it is loaded again."""
    one = one_row(world)
    with replica(world, Truth(world, TABLES), [one], None) as found:
        found.snapshot().close()
        real = found.wait

        def drop(*given: Any) -> None:
            real(*given)
            monkeypatch.setattr(found, "wait", real)
            found._follower._begin_again(one, found._store.marks[one].ids)
            found._follower._tables = []

        for at in (found.timestamp, None):
            monkeypatch.setattr(found, "wait", drop)
            with found.snapshot(at=at) as view:
                assert view.get(one, b"a") == b"1"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((None, None, None), (b"", None)),
        ((b"a", None, None), (b"a", None)),
        ((None, None, b"a"), (b"a", b"b")),
        ((None, None, b"a\xff\xff"), (b"a\xff\xff", b"b")),
        ((None, None, b"\xff"), (b"\xff", None)),
        ((None, None, b""), (b"", None)),
        ((b"a", b"a", None), "not below"),
        ((None, b"", None), "not below"),
        ((b"a", None, b"a"), "a prefix, or low and high"),
        ((None, b"k" * 8193, None), (b"", b"k" * 8193)),
        ((b"k" * 8194, None, None), "8,194 bytes"),  # more than a command can lock
        ((None, None, b"k" * 8194), "8,194 bytes"),
    ],
)
def test_bounds_of_a_scan_follow_from_its_arguments(
    given: tuple[bytes | None, ...], wanted: object
) -> None:
    if isinstance(wanted, str):
        with pytest.raises(InvalidArgument, match=wanted):
            bounds(*given)
    else:
        assert bounds(*given) == wanted


def go_on(world: World, found: ReadReplica, table: str, seconds: float) -> None:
    """Some time passes, a row is written, and the replica follows and may sweep."""
    world.clock.sleep(seconds)
    put(world.client, table, b"2", b"k")
    found.snapshot(timeout=60).close()
    found.step(world.clock.now)


def test_a_sweep_whose_question_fails_is_soon_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, truth = one_row(world), Truth(world, TABLES)
    with replica(world, truth, [one], None, history_ms=60_000) as found:
        for asked in (Mock(side_effect=NotReady("no leader")), Mock(return_value=0)):
            monkeypatch.setattr(truth, "oldest_snapshot", asked)
            go_on(world, found, one, 2)
            assert asked.called


def test_a_sweep_s_question_that_fails_time_and_again_is_asked_less_and_less(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is answered."""
    one, truth = one_row(world), Truth(world, TABLES)
    asked: list[int] = []
    answers: list[int] = []

    def ask(*_: object) -> int:
        asked.append(found.timestamp)
        if not answers:
            raise NotReady("no leader")
        return answers.pop()

    monkeypatch.setattr(truth, "oldest_snapshot", ask)
    with replica(world, truth, [one], None, history_ms=20_000) as found:
        for second in range(60):
            answers.extend([0] * (second == 30))
            go_on(world, found, one, 1)
    paused = [round(to_us(after - before) / 1e6) for before, after in pairwise(asked)]
    assert paused == [1, 2, 4, 8, 10, 10, 10, 1, 2, 4]


def test_a_waiting_call_raises_the_error_of_the_replica(world: World) -> None:
    truth = Truth(world, ["bank/none"])
    with (
        replica(world, truth, ["bank/none"], None) as found,
        pytest.raises(UnknownStream, match="create it first"),
    ):
        found.wait(5, {"bank/none": 0}, world.clock.now + 10)


class FullDisk:
    """A database that takes no writes any more."""

    def __init__(self, db: Any) -> None:
        self._db = db
        self.write = Mock(side_effect=Exception("IO error: No space left on device"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def close(self) -> None:
        self._db.close()
        self.write()  # rocksdict raises it then


def test_a_replica_whose_disk_fails_says_so_and_frees_its_folder(
    world: World, tmp_path: Path
) -> None:
    one, truth = one_row(world), Truth(world, TABLES)
    with replica(world, truth, [one], tmp_path) as found:
        found.snapshot().close()
        found._store._db = FullDisk(found._store._db)
        put(world.client, one, b"2", b"b")
        with pytest.raises(TableError, match="make room"):
            found.snapshot()
    with replica(world, truth, [one], tmp_path) as found, found.snapshot() as view:
        assert list(view.scan(one)) == [(b"a", b"1"), (b"b", b"2")]


def test_waiting_threads_step_one_at_a_time_and_again_after_an_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = one_row(world)
    with replica(world, Truth(world, TABLES), [one], None) as found:
        real, inside, errors = found.step, threading.Lock(), [NotAuthorized("for a moment")]

        def step(deadline: float) -> bool:
            assert inside.acquire(blocking=False), "two are in it"
            try:
                time.sleep(0.01)
                if errors:
                    raise errors.pop()
                return real(deadline)
            finally:
                inside.release()

        monkeypatch.setattr(found, "step", step)
        with pytest.raises(NotAuthorized):
            found.snapshot()
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda _: found.wait(1, {}, world.clock.now + 9), range(4)))
        with found.snapshot() as view:
            assert view.get(one, b"a") == b"1"


def test_waiting_threads_share_a_question_but_for_a_time_to_come(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, asked, come = one_row(world), [], threading.Event()
    truth = Truth(world, TABLES)
    with replica(world, truth, [one], None) as found, ThreadPoolExecutor() as threads:
        assert found.lag()[one].seconds == float("inf"), "nothing is here yet"
        now = found.snapshot().timestamp + 1

        def safe(tables: Sequence[str], at: int, _: float) -> tuple[int, dict[str, int]]:
            asked.append(at)
            assert come.wait(9 if at == now + 9 else 0.05) or at != now + 9
            return at, found.last

        monkeypatch.setattr(truth, "safe", safe)
        monkeypatch.setattr(replica_module, "_TURN_S", 9.0)
        list(threads.map(lambda _: found.wait(now, {}, 0.0), range(4)))
        assert asked == [now]
        monkeypatch.setattr(replica_module, "_TURN_S", 0.01)
        later = threads.submit(found.wait, now + 9, {}, 0.0)
        wait_until(lambda: asked[-1] == now + 9, pause=0.001)
        found.wait(now + 1, {}, 0.0)
        come.set()
        later.result(60)


@pytest.mark.parametrize("comes", [True, False])
def test_a_report_that_is_due_is_waited_for_before_a_question(
    world: World, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    one, truth = one_row(world), Truth(world, TABLES)
    monkeypatch.setattr(replica_module, "_TURN_S", 9.0 if comes else 0.01)
    with replica(world, truth, [one], None) as found, ThreadPoolExecutor() as threads:
        now = found.snapshot().timestamp + 1
        safe = Mock(return_value=(now, found.last))
        monkeypatch.setattr(truth, "safe", safe)
        with found.report_due():
            later = threads.submit(found.wait, now, {}, world.clock.now + 9)
            if comes:
                while not found._waiters._waiting:
                    time.sleep(0.001)
                found.observe(now, found.last)
            later.result(60)
        assert safe.call_count == (0 if comes else 1)


@pytest.mark.parametrize("others", [0, 40, 2000])  # batches of all walks, and too many for a digest
def test_only_rows_with_invalid_keys_are_rejected(world: World, others: int) -> None:
    """By plain writes and by journals; a transaction that wrote one can't commit."""
    table = "bank/table"
    world.client.create_table(table, 2)
    topic = journal_topic(table)
    bad = [None, b"", b"k" * 8193]
    keys = [b"first", bad[0], bad[1], b"k" * 8192, bad[2], *(b"%d" % n for n in range(others))]
    world.cluster.log("plain").produce(
        TopicPartition(topic, 0), [Record(0, 1, key, b"plain") for key in keys]
    )
    good = {key for key in keys if key is not None} - set(bad)
    for _ in range(60):
        world.step()
    assert {event.key for event in world.events(table)} == good
    assert world.client.describe(table).rejected == {"bad_key": 3}
    at_once = world.new_client(one_shot_bytes=100_000)
    for key in bad:
        with at_once.begin("bank") as txn:
            txn.write(table, b"v", key)
            with pytest.raises(InvalidArgument):
                txn.commit()
        # By an older client, which does not judge keys where they are written.
        with (
            patch.object(receipts, "check_row_key"),
            world.client.begin("bank") as txn,
        ):
            txn.token()
            txn.write(table, b"v", b"beside")
            txn.write(table, b"v", key)
            with pytest.raises(ReceiptMismatch):
                txn.commit()
    assert world.client.describe(table).rejected == {"bad_key": 6}
    assert {event.key for event in world.events(table)} == good


def test_a_snapshot_that_a_program_lost_holds_no_versions(world: World) -> None:
    one = one_row(world)
    with replica(world, Truth(world, TABLES), [one], None, history_ms=10_000) as found:
        found.snapshot(timeout=60)
        held = found.snapshot(timeout=60)
        rows = held.scan(one)
        del held
        gc.collect()
        assert len(found._open) == 1, "rows that are read go on"
        list(rows)
        del rows
        gc.collect()
        assert not found._open
