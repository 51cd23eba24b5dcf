"""Tables in processors, by workers in memory, in one thread: locks, conflicts, undoing, and what is refused."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from anabranch.client.client import Client
from anabranch.client.table_transaction import TableTransaction
from anabranch.controller.monitor import Numbers
from anabranch.errors import (
    BeginAgainError,
    FeatureNotEnabled,
    IllegalState,
    InvalidArgument,
    NotReady,
    OutcomeUnknown,
    SnapshotExpired,
    UnknownStream,
)
from anabranch.processing.app import Processor
from anabranch.processing.batch import BatchConflict, WorkBatch
from anabranch.processing.metrics import TABLE
from anabranch.processing.tables import Conflicts
from anabranch.processing.worker import Worker
from anabranch.protocol import limits
from anabranch.protocol.defaults import CONFLICT_LOG_S
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from tests.client.doubles import ManualClock
from tests.processing.test_worker import Place

ROWS = "nyc/rows"


def steps(worker: Worker, count: int = 8) -> None:
    for _ in range(count):
        worker.step()


class Shop(Place):
    """A cluster with a table, which others write, too."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.connect(lane=ADMIN_LANE).feature_level(raise_to=LEVEL)
        self.client.create_stream("nyc/dead")
        self.client.create_table(ROWS)
        self.other = self.new_client()

    def program(self, **more: Any) -> tuple[Processor, Any]:
        given: dict[str, Any] = {
            "tasks": 1,
            "commit_interval": 0,
            "dead_letter": "nyc/dead",
            "retries": 0,
        } | more
        app = Processor("nyc/p", **given)
        return app, app.table(ROWS, value=json)

    def put(self, **rows: Any) -> int:
        """Rows by another client, in one commit."""
        with self.other.begin("nyc") as txn:
            for key, value in rows.items():
                txn.write(ROWS, None if value is None else json.dumps(value).encode(), key.encode())
            return txn.commit().commit_timestamp

    def run(self, app: Processor) -> None:
        with closing(self.worker(app)) as worker:
            steps(worker)

    def rows(self) -> dict[str, Any]:
        with self.client.replica(ROWS, threads=False) as replica, replica.snapshot() as now:
            return {key.decode(): json.loads(value) for key, value in now.scan(ROWS)}

    def dead(self) -> list[str]:
        """The errors of the dead letters."""
        found = (dict(e.headers)["error"] or b"" for e in self.events("nyc/dead"))
        return [error.decode() for error in found]


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def counting(
    shop: Shop, before: Callable[[Any], None] = lambda _: None, *, waits: bool = False, **more: Any
) -> Processor:
    """Counts events in rows. ``before``: called between read and write. ``waits``: in an ``async`` handler."""
    app, rows = shop.program(**more)
    out = app.output("nyc/out")

    def count(event: Any) -> None:
        now = rows.get(event.key, 0)
        before(event)
        rows[event.key] = now + 1
        out.write(b"%d" % (now + 1), key=event.key)

    async def count_later(event: Any) -> None:
        await asyncio.sleep(0)
        count(event)

    app.on(app.input("nyc/in"))(count_later if waits else count)
    return app


def test_rows_are_read_and_written_in_the_commit_of_their_events(shop: Shop) -> None:
    shop.put(a=5)
    shop.write(b"a", b"b", b"a")
    shop.write(b"b")
    shop.run(counting(shop))
    assert shop.rows() == {"a": 7, "b": 2}
    assert [e.value for e in shop.events("nyc/out")] == [b"6", b"1", b"7", b"2"]
    ends = [c.timestamp for c in shop.commits(ROWS)[1:]]
    assert ends == [c.timestamp for c in shop.commits("nyc/out")]
    assert not shop.dead()


def test_a_batch_whose_locks_are_broken_is_handled_again(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "anabranch.processor")
    others = iter([10, 20])

    def before(_: Any) -> None:
        if (value := next(others, None)) is not None:
            shop.put(a=value)

    shop.write(b"a", b"b")
    with closing(shop.worker(counting(shop, before))) as worker:
        steps(worker, 10)
        assert worker.metrics.values["processor_conflicts"] == {(ROWS,): 1}
        assert worker.metrics.values["processor_events_in"] == {("nyc/in",): 2}
        assert not worker.metrics.values["processor_taken_again"]
    said = f"Conflict in {ROWS}, key a: another transaction wrote it. The batch is handled again (try 2)."
    assert said in caplog.text
    # The second write came when b was handled, and broke the lock of a.
    assert shop.rows() == {"a": 21, "b": 1}
    assert [(e.key, e.value) for e in shop.events("nyc/out")][1] == (b"b", b"1")
    assert not shop.dead()


def test_conflicts_are_logged_rarely(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "anabranch.processor")
    now = ManualClock()
    conflicts = Conflicts("nyc/p", Numbers(TABLE), now)
    batch = cast(WorkBatch, SimpleNamespace(tables=None, commits=1))
    for table in (ROWS, ROWS, "nyc/others"):
        conflicts.note(BatchConflict("x", table=table, key=b"a"), batch)
    now.sleep(CONFLICT_LOG_S)
    conflicts.note(BatchConflict("x", table=ROWS, key=b"a"), batch)
    assert [each.levelname for each in caplog.records] == ["INFO", "DEBUG", "INFO", "INFO"]


@pytest.mark.parametrize("by_handle", [False, True], ids=["output", "table"])
def test_a_row_of_a_prepared_transaction_is_waited_for(shop: Shop, by_handle: bool) -> None:
    """From 10 seconds on the controller refuses commits to the row."""
    shop.put(a=5)
    with shop.other.replica(ROWS, threads=False) as replica:
        prepared = replica.begin()
        prepared.get(ROWS, b"a")
        prepared.put(ROWS, b"z", b"1")
        prepared.prepare()
        shop.clock.sleep(15)
        shop.write(b"a")
        if by_handle:
            app = counting(shop)
        else:
            app = Processor("nyc/p", tasks=1, commit_interval=0)
            out = app.output(ROWS)
            app.on(app.input("nyc/in"))(lambda event: out.write(b"6", key=event.key))
        with closing(shop.worker(app)) as worker:
            for _ in range(4):
                if by_handle:
                    worker.step()
                    continue
                with suppress(BeginAgainError):  # as `Worker.run` does
                    worker.step()
                    continue
                worker._drop()
            assert shop.rows() == {"a": 5}
            prepared.commit()
            steps(worker)
    assert shop.rows() == {"a": 6, "z": 1}
    assert not shop.dead()


@pytest.mark.parametrize("swallow", [False, True])
def test_a_lock_that_is_seen_broken_ends_the_batch_in_the_handler(
    shop: Shop, swallow: bool
) -> None:
    """The replica has the later version when the second row is read; a handler may catch the error."""
    app, rows = shop.program()
    out = app.output("nyc/out")
    calls = 0

    @app.on(app.input("nyc/in"))
    def copy(event: Any) -> None:
        nonlocal calls
        calls += 1
        found = rows.get("x")
        if calls == 1:
            shop.put(a=1, b=1)
            worker._shared.tables.replica.snapshot().close()  # type: ignore[union-attr]
        try:
            found = rows.get("a"), rows.get("b")
        except BatchConflict:
            if not swallow:
                raise
        out.write(repr(found).encode())

    shop.write(b"k")
    with closing(shop.worker(app)) as worker:
        steps(worker, 10)
    assert calls == 2
    assert [e.value for e in shop.events("nyc/out")] == [b"(1, 1)"]
    assert not shop.dead()


@pytest.mark.parametrize("waits", [False, True])
def test_a_row_whose_locks_break_three_times_gets_a_batch_of_its_own(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    """``async`` handlers work on one input transaction at a time, too: snapshot and cuts are by transaction."""
    batches = list[list[bytes]]()
    times = 0

    def before(event: Any) -> None:
        nonlocal times
        batches[-1].append(event.key)
        if event.key == b"hot" and times < 4:
            times += 1
            shop.put(hot=100 * times)

    for key in (b"a", b"b", b"hot", b"c"):
        shop.write(key)
    app = counting(shop, before, waits=waits)
    with closing(shop.worker(app)) as worker:
        new = worker._commits.new_batch

        def new_batch(count: int) -> WorkBatch:
            batches.append([])
            return new(count)

        monkeypatch.setattr(worker._commits, "new_batch", new_batch)
        worker._handlers.monotonic = lambda: 0.0  # all that was read is handled in one go
        steps(worker, 40)
    tried = [b"".join(one) for one in batches if one]
    assert tried == [*[b"abhotc"] * 3, b"ab", b"hot", b"hot", b"c"]
    assert shop.rows() == {"a": 1, "b": 1, "hot": 401, "c": 1}
    assert shop.written() == [b"a", b"b", b"hot", b"c"]


def test_what_a_failed_handler_wrote_is_undone(shop: Shop) -> None:
    app, rows = shop.program()

    @app.on(app.input("nyc/in"))
    def handle(event: Any) -> None:
        rows["all"] = rows.get("all", 0) + 1
        if event.key == b"new":
            rows["new"] = 1
            del rows["old"]
        if event.key != b"good":
            raise ValueError(rows.get("all"))

    shop.put(old=1)
    shop.write(b"good", b"bad", b"new", b"good")
    shop.run(app)
    assert shop.rows() == {"old": 1, "all": 2}
    assert shop.dead() == ["ValueError: 2", "ValueError: 2"]


def test_reads_see_the_batch_s_own_writes_in_order(shop: Shop) -> None:
    app, rows = shop.program()
    found = list[Any]()

    @app.on(app.input("nyc/in"))
    def handle(event: Any) -> None:
        rows["b"] = 20
        del rows["c"]
        rows["e"] = 50
        found.append(
            (
                dict(rows.items()),
                list(rows.items(reverse=True, lock=False)),
                dict(rows.items("b", "d")),
                dict(rows.items(prefix="e")),
                list(rows.items("x", "a")),
                "c" in rows,
                "e" in rows,
                rows.get("b", lock=False),
            )
        )
        with pytest.raises(KeyError):
            rows["c"]
        with pytest.raises(TypeError, match="items"):
            iter(rows)

    shop.put(a=1, b=2, c=3, d=4)
    shop.write(b"k")
    shop.run(app)
    assert found == [
        (
            {b"a": 1, b"b": 20, b"d": 4, b"e": 50},
            [(b"e", 50), (b"d", 4), (b"b", 20), (b"a", 1)],
            {b"b": 20},
            {b"e": 50},
            [],
            False,
            True,
            20,
        )
    ]
    assert shop.rows() == {"a": 1, "b": 20, "d": 4, "e": 50}


@pytest.mark.parametrize("locked", [False, True])
def test_a_scanned_range_is_locked_and_other_reads_are_not(shop: Shop, locked: bool) -> None:
    app, rows = shop.program()
    calls = list[Any]()

    @app.on(app.input("nyc/in"))
    def handle(event: Any) -> None:
        calls.append((dict(rows.items(lock=locked)), rows.get("a", lock=locked)))
        rows["sum"] = 1
        if len(calls) == 1:
            shop.put(a=1)

    shop.write(b"k")
    shop.run(app)
    assert calls == ([({}, None), ({b"a": 1}, 1)] if locked else [({}, None)])


def test_rows_as_of_an_event_s_own_commit(shop: Shop) -> None:
    app, rows = shop.program()
    found = list[Any]()

    @app.on(app.input("nyc/in"))
    def handle(event: Any) -> None:
        found.append((rows.get("rate", at=event.commit_timestamp), rows.get("rate", lock=False)))

    for rate in (1, 2, 3):
        shop.put(rate=rate)
        shop.write(b"k")
    shop.put(rate=9)
    shop.run(app)
    assert [at for at, _ in found] == [1, 2, 3]
    assert all(now == 9 or now >= at for at, now in found)


def test_a_batch_sees_all_that_was_committed_before_its_events(shop: Shop) -> None:
    """Also if its snapshot is taken before a later event is read: that event is for the next batch."""
    app, rows = shop.program(commit_interval=2)
    found = list[Any]()

    @app.on(app.input("nyc/in"))
    def handle(event: Any) -> None:
        found.append(rows.get("n", lock=False))
        if len(found) < 3:
            shop.put(n=len(found))
            shop.write(b"k")

    shop.put(n=0)
    shop.write(b"k")
    with closing(shop.worker(app)) as worker:
        steps(worker, 20)
    assert found == [0, 1, 2]


def test_handles_are_for_handlers(shop: Shop) -> None:
    app, rows = shop.program()
    kept = list[Iterator[Any]]()

    @app.on(app.input("nyc/in"))
    def handle(event: Any) -> None:
        kept.append(rows.items())
        next(kept[-1])
        if len(kept) > 1:
            with pytest.raises(IllegalState):
                next(kept[0])

    shop.put(a=1, b=2, c=3)
    with closing(shop.worker(app)) as worker:
        for _ in range(2):  # each in a batch of its own
            shop.write(b"k")
            steps(worker)
    for call in (
        lambda: rows["a"],
        lambda: rows.get("a"),
        lambda: "a" in rows,
        lambda: next(kept[1]),
    ):
        with pytest.raises(IllegalState):
            call()
    assert not shop.dead()


def test_bad_rows_are_of_the_event(shop: Shop) -> None:
    app, rows = shop.program()

    @app.on(app.input("nyc/in"))
    def handle(event: Any) -> None:
        if event.key == b"none":
            rows["k"] = None
        elif event.key == b"empty":
            rows[b""] = 1
        elif event.key == b"key":
            rows.get(5)
        elif event.key == b"big":
            rows["k"] = "x" * 2_000_000
        elif event.key == b"bytes":
            rows["k"] = b"no JSON"
        elif event.key == b"undecodable":
            rows["bad"]
        elif event.key == b"future":
            rows.get("k", at="yesterday")
        else:
            rows["good"] = 1

    with shop.other.begin("nyc") as txn:
        txn.write(ROWS, b"{", b"bad")
        txn.commit()
    shop.write(b"none", b"empty", b"key", b"big", b"bytes", b"undecodable", b"future", b"good")
    app2 = app
    with closing(shop.worker(app2)) as worker:
        steps(worker, 10)
    found = [error.partition(":")[0] for error in shop.dead()]
    assert found == [
        "InvalidArgument", "InvalidArgument", "InvalidArgument", "EventTooLarge", "InvalidArgument",
        "UndecodableValue", "InvalidArgument",
    ]  # fmt: skip


def test_too_many_locks_are_of_the_event_or_end_the_batch(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LOCKS", limits.Limit(10, "locks", "a transaction"))
    app, rows = shop.program()

    @app.on(app.input("nyc/in"))
    def handle(event: Any) -> None:
        for number in range(int(event.value)):
            rows.get(b"%s%d" % (event.key, number))
        rows[event.key] = 1

    for key, count in ((b"a", 6), (b"b", 6), (b"c", 11), (b"d", 10)):
        shop.write(key, value=b"%d" % count)
    with closing(shop.worker(app)) as worker:
        worker._handlers.monotonic = lambda: 0.0  # all that was read is handled in one go
        steps(worker, 30)
    assert shop.rows() == {"a": 1, "b": 1, "d": 1}
    assert [error.partition(":")[0] for error in shop.dead()] == ["TooManyLocks"]


def test_handlers_of_batches_and_timers_use_tables(shop: Shop) -> None:
    app, rows = shop.program()
    hours = app.windows("hours", 1, value=json)
    later = app.output("nyc/out")

    @app.on(app.input("nyc/in"))
    def handle(event: Any) -> None:
        for window in hours.of(event):
            window.value = 1
        soon.set(b"%d" % event.timestamp, at=event.timestamp + 500)

    @app.timer("soon")
    def soon(key: bytes, _: int) -> None:
        rows[b"timer"] = rows.get(b"timer", 0) + 1

    @hours.on_close
    def close(window: Any) -> None:
        rows[b"window"] = rows.get(b"window", 0) + 1
        if rows[b"window"] == 1 and not shop.commits(ROWS)[1:]:
            shop.put(window=100)
        later.write(b"1", key=window.key)

    shop.put(timer=10)
    for at in (1, 2000, 4000):
        shop.write(b"k", timestamp=at)
    shop.run(app)
    assert shop.rows() == {"timer": 12, "window": 102}
    assert len(shop.events("nyc/out")) == 2


def test_arrow_handlers_use_tables(shop: Shop) -> None:
    app, rows = shop.program()

    @app.on(app.input("nyc/in"), batch=True)
    def handle(batch: pa.RecordBatch) -> None:
        rows["n"] = rows.get("n", 0) + batch.num_rows
        if b"bad" in batch.column("key").to_pylist():
            raise ValueError("bad")

    shop.put(n=1)
    shop.write(b"a", b"bad", b"c")
    shop.run(app)
    assert shop.rows() == {"n": 3}
    assert len(shop.dead()) == 1


@pytest.mark.parametrize("concurrency", [1, 8])
def test_async_handlers_lock_their_own_key_only(shop: Shop, concurrency: int) -> None:
    app, rows = shop.program(concurrency=concurrency)

    @app.on(app.input("nyc/in"))
    async def handle(event: Any) -> None:
        rows[event.key] = rows.get(event.key, 0) + rows.get("rate", lock=False)
        if event.value == b"all":
            rows["sum"] = sum(value for _, value in rows.items())

    shop.put(rate=2)
    shop.write(b"a", b"b", b"a")
    shop.write(b"a", value=b"all")
    shop.run(app)
    if concurrency == 1:
        assert shop.rows() == {"rate": 2, "a": 6, "b": 2, "sum": 10}
    else:
        assert shop.rows() == {"rate": 2, "a": 4, "b": 2}
        assert "concurrency=1" in shop.dead()[0]


def test_a_replica_is_open_while_a_worker_runs(shop: Shop) -> None:
    app = Processor("nyc/p", tasks=1, commit_interval=0)
    rates, out = app.replica(ROWS), app.output("nyc/out")

    @app.on(app.input("nyc/in"))
    def handle(event: Any) -> None:
        with rates.snapshot(at=event.commit_timestamp) as rows:
            out.write(rows.get(ROWS, b"rate"))

    with pytest.raises(IllegalState, match="while a worker runs"):
        rates.snapshot()
    for rate in (1, 2):
        shop.put(rate=rate)
        shop.write(b"k")
    shop.run(app)
    assert [e.value for e in shop.events("nyc/out")] == [b"1", b"2"]
    with pytest.raises(IllegalState, match="while a worker runs"):
        rates.snapshot()


def test_an_unanswered_commit_is_committed_once(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = TableTransaction.commit
    left = 2

    def unanswered(self: TableTransaction, *given: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        found = commit(self, *given, **named) if left else None
        if left >= 0:
            self._result = None
            self._over = ""
            raise OutcomeUnknown("planted")
        return found

    shop.write(b"a")
    monkeypatch.setattr(TableTransaction, "commit", unanswered)
    shop.run(counting(shop))
    assert shop.rows() == {"a": 1}


def test_workers_take_over_and_locks_hold_between_processors(shop: Shop) -> None:
    """Two processors count the same events in the same rows: nothing is lost."""
    first = counting(shop)
    second = Processor("nyc/q", tasks=1, commit_interval=0)
    rows = second.table(ROWS, value=json)

    @second.on(second.input("nyc/in"))
    def count(event: Any) -> None:
        rows[event.key] = rows.get(event.key, 0) + 1

    with closing(shop.worker(first, "w")) as one, closing(shop.worker(second, "v")) as other:
        for number in range(9):
            shop.write(b"k%d" % (number % 3), b"k")
            one.step()
            other.step()
        for _ in range(20):
            one.step()
            other.step()
    assert shop.rows() == {"k0": 6, "k1": 6, "k2": 6, "k": 18}


def test_names_are_checked(shop: Shop) -> None:
    app = Processor("nyc/p")
    app.table(ROWS)
    for call in (lambda: app.table(ROWS), lambda: app.table("rows"), app.replica):
        with pytest.raises(InvalidArgument):
            call()
    app.output(ROWS)
    app.on(app.input("nyc/in"))(lambda _: None)
    with pytest.raises(InvalidArgument, match="output and a table"):
        shop.worker(app)


@pytest.mark.parametrize(
    ("table", "error"), [("nyc/out", InvalidArgument), ("nyc/none", UnknownStream)]
)
def test_a_worker_does_not_start_with_a_wrong_table(
    shop: Shop, table: str, error: type[Exception]
) -> None:
    app = Processor("nyc/p")
    app.table(table)
    app.on(app.input("nyc/in"))(lambda _: None)
    with pytest.raises(error):
        shop.worker(app)


def test_older_controllers_refuse_by_name(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.client.create_table(ROWS)
    app = Processor("nyc/p", tasks=1, commit_interval=0)
    rows = app.table(ROWS)
    app.on(app.input("nyc/in"))(lambda event: rows.get(event.key))
    place.write(b"k")
    with closing(place.worker(app)) as worker, pytest.raises(FeatureNotEnabled):
        steps(worker)


def test_a_replica_that_lags_is_not_the_event_s_fault(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lags(*_: Any) -> Any:
        raise NotReady("it lags")

    shop.write(b"a")
    with closing(shop.worker(counting(shop))) as worker:
        steps(worker, 1)
        monkeypatch.setattr(worker._tables, "begin", lags)
        shop.write(b"a")
        with pytest.raises(NotReady):
            steps(worker, 5)
        assert not shop.dead()


def test_a_batch_whose_snapshot_is_swept_is_handled_again(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, swept = TableTransaction.get, iter([SnapshotExpired("swept")])

    def get(*given: Any, **more: Any) -> Any:
        if (error := next(swept, None)) is not None:
            raise error
        return real(*given, **more)

    monkeypatch.setattr(TableTransaction, "get", get)
    shop.write(b"a")
    shop.run(counting(shop))
    assert shop.rows() == {"a": 1}
    assert not shop.dead()


def test_versions_that_are_swept_are_an_error_of_the_event(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, rows = shop.program()
    app.on(app.input("nyc/in"))(lambda event: rows.get("a", at=event.commit_timestamp))
    shop.write(b"k")

    def expired(*_: Any) -> Any:
        raise SnapshotExpired("swept")

    with closing(shop.worker(app)) as worker:
        monkeypatch.setattr(worker._tables, "get_at", expired)
        steps(worker, 5)
    assert shop.dead() == ["SnapshotExpired: swept"]


@pytest.mark.parametrize("change", ["add", "min", "max"])
def test_changes_that_commute_are_refused_by_name(shop: Shop, change: str) -> None:
    app, rows = shop.program()
    app.on(app.input("nyc/in"))(lambda event: getattr(rows, change)(event.key, 1))
    shop.write(b"a")
    shop.run(app)
    assert "a commit changes at most 64 rows in this way" in shop.dead()[0]
    assert not shop.rows()


def derive(shop: Shop, client: Client, versions: int = 1) -> None:
    """Take the functions of an index of the rows."""
    shop.connect(lane=ADMIN_LANE).grant("open", ROWS, ("operate",))
    for version in range(1, versions + 1):
        client.derive(ROWS, "by-value", lambda _, row: row, version=version)


def test_a_batch_that_reads_nothing_writes_to_the_source_of_a_derived_table(shop: Shop) -> None:
    derive(shop, shop.client)
    app, rows = shop.program()

    @app.on(app.input("nyc/in"))
    def put(event: Any) -> None:
        rows[event.key] = 7

    shop.write(b"a", b"b")
    shop.run(app)
    assert shop.rows() == {"a": 7, "b": 7}
    assert not shop.client.check_derivation(ROWS, "by-value")
    assert not shop.dead()


def test_an_event_whose_row_a_derivation_refuses_is_a_dead_letter(shop: Shop) -> None:
    def tens(_: bytes, row: bytes) -> bytes:
        return b"%d" % (100 // max(0, int(row)))  # only rows above 0

    shop.connect(lane=ADMIN_LANE).grant("open", ROWS, ("operate",))
    for client in (shop.client, shop.other):
        client.derive(ROWS, "by-value", tens, unique=True)
    app, rows = shop.program()
    wanted, less = {b"a": 5, b"b": 7, b"c": 5, b"e": 9}, itertools.count(-1, -1)

    @app.on(app.input("nyc/in"))
    def put(event: Any) -> None:
        rows[event.key] = wanted.get(event.key) or next(less)  # another value in each try

    for keys in ([b"a"], [b"b", b"c", b"d"], [b"e"]):
        shop.write(*keys)
    with closing(shop.worker(app)) as worker:
        steps(worker, 20)
    assert shop.rows() == {"a": 5, "b": 7, "e": 9}
    assert [one.split(":")[0] for one in shop.dead()] == ["UniqueViolation", "ZeroDivisionError"]
    assert not shop.client.check_derivation(ROWS, "by-value")


def test_a_worker_continues_when_another_version_comes_into_force(shop: Shop) -> None:
    derive(shop, shop.client, 2)
    shop.write(b"a")
    with closing(shop.worker(counting(shop))) as worker:
        steps(worker)
        derive(shop, shop.other, 2)
        shop.other.rebuild(ROWS, "by-value")
        shop.write(b"a")
        steps(worker)
        assert not worker.metrics.values["processor_taken_again"]
    assert shop.rows() == {"a": 2}
    assert not shop.other.check_derivation(ROWS, "by-value")
