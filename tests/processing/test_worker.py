"""A worker in memory, in one thread: what it takes, commits and says in trouble."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pyarrow as pa
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from anabranch.batches.records import Record
from anabranch.cli.errors import failure_of
from anabranch.client.client import Client
from anabranch.client.transaction import Transaction
from anabranch.errors import (
    BeginAgainError,
    EventTooLarge,
    IllegalState,
    InvalidArgument,
    NotReady,
    OwnershipLost,
)
from anabranch.ports import TableError, TopicPartition, TopicSpec
from anabranch.processing.app import Processor
from anabranch.processing.failures import HandlerFailed
from anabranch.processing.plain import import_group, outputs_of
from anabranch.processing.state import StateReader
from anabranch.processing.worker import AllTasks, Worker, make_processor
from anabranch.protocol.defaults import SESSION_S
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.reading.committed_log import CommittedLog
from anabranch.reading.feed import Feed
from anabranch.reading.task_reader import TaskReader
from anabranch.testing.memory.client import memory_client
from anabranch.topics.names import journal_topic, topics_of
from tests.client.world import World


class Place(World):
    """A cluster with streams in and out, whose clients read it, too."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        for name in ("in", "out"):
            self.client.create_stream(f"nyc/{name}")

    def worker(self, app: Processor, folder: str = "w", *tasks: int, **more: Any) -> Worker:
        own = AllTasks(tasks or range(app.tasks))
        return Worker(app, self.client, self.folder / folder, tasks=own, threads=False, **more)

    def write(self, *keys: bytes, timestamp: int = 1, value: bytes = b"1") -> None:
        with self.client.begin("nyc") as txn:
            for key in keys:
                txn.write("nyc/in", value, key=key, timestamp=timestamp)
            txn.commit()

    def with_dead_letters(self, **more: Any) -> Processor:
        """A program of one task, and its stream of dead letters."""
        self.client.create_stream("nyc/dead")
        return Processor("nyc/p", tasks=1, commit_interval=0, dead_letter="nyc/dead", **more)

    def run(self, app: Processor) -> None:
        """Let a worker do some steps."""
        with closing(self.worker(app)) as worker:
            steps(worker)

    def written(self, stream: str = "nyc/out") -> list[bytes]:
        return [each.key or b"" for each in self.events(stream)]


class Member:
    """A member of a group whose positions are 1 everywhere."""

    def committed(self, places: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(places, 1)

    def close(self) -> None: ...


def refuse(*_: object, **__: object) -> None:
    raise InvalidArgument("planted")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def counting(tasks: int = 1) -> Processor:
    """Counts events by key."""
    app = Processor("nyc/p", tasks=tasks, commit_interval=0)
    seen = app.store("seen", value=json)

    @app.on(app.input("nyc/in"))
    def count(event: Any) -> None:
        seen[event.key] = seen.get(event.key, 0) + 1

    return app


def windows(*more: str) -> Processor:
    """Writes the keys of windows of a second as they close, in small batches."""
    app = Processor("nyc/p", tasks=1, commit_interval=0, cut_bytes=2000)
    out = app.output("nyc/out", value=json)
    stores = [app.windows(name, 1, value=json) for name in ("hours", *more)]

    def closed(window: Any) -> None:
        out.write(1, key=window.key)

    @app.on(app.input("nyc/in", value=json))
    def put(event: Any) -> None:
        for store in stores:
            for window in store.of(event):
                window.value = 1

    for store in stores:
        store.on_close(closed)

    return app


def test_windows_that_close_together_and_later_events_take_several_cuts(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = TaskReader.cut  # in memory each read gives one commit
    monkeypatch.setattr(
        TaskReader, "cut", lambda *args: [piece for _ in range(9) for piece in cut(*args)]
    )
    app = windows()
    worker, keys = place.worker(app), [b"%03d" % i for i in range(20)]
    place.write(*keys, timestamp=500)
    place.write(b"later", timestamp=1600)
    place.write(b"last", timestamp=3500)
    place.write(b"end", timestamp=9999)
    lives = left = 0
    while len(place.written()) < 22 and lives < 60:
        for _ in range(2):
            worker.step()
        left += len(worker._handlers._left)
        worker.close()  # the next one continues from the positions
        worker, lives = place.worker(app, str(lives)), lives + 1
    worker.close()
    assert place.written() == [*keys, b"later", b"last"]
    assert left


def test_windows_that_an_older_program_does_not_know_close_under_the_newer_one(
    place: Place,
) -> None:
    for number, more in enumerate((["days"], [], ["days"])):
        place.write(b"a", timestamp=500 + 2000 * number)
        with closing(place.worker(windows(*more), str(number))) as worker:
            for _ in range(4):
                worker.step()
    assert place.written() == [b"a"] * 3, "of both windows of the first event, and one of the next"


def test_a_batch_of_a_stream_has_no_store(place: Place) -> None:
    """A handler of single events ran before, and left its task."""
    app, said = Processor("nyc/p", tasks=2, commit_interval=0), list[str]()
    seen = app.store("seen", value=json, local=True)
    source = app.input("nyc/in", value=json)
    place.client.create_stream("nyc/batches")

    @app.on(source)
    def one(event: Any) -> None:
        seen[event.key] = 1

    @app.on(app.input("nyc/batches"), batch=True)
    def batch(_: Any) -> None:
        for call in (lambda: seen.get(b"a"), lambda: list(seen.items())):
            with pytest.raises(InvalidArgument, match="without batch=True") as refused:
                call()
            said.append(str(refused.value))

    with closing(place.worker(app)) as worker, place.client.begin("nyc") as txn:
        for stream in ("nyc/in", "nyc/batches"):
            txn.write(stream, b"1", key=b"a")
        txn.commit()
        for _ in range(4):
            worker.step()
    assert len(said) == 2


def test_state_that_can_t_be_read_is_waited_for(place: Place) -> None:
    """Nothing comes; then its end is read, and the last commit is not there."""
    app = counting()
    with closing(place.worker(app)) as worker:
        for n in range(3):
            place.write(b"%d" % n)
            worker.step()
            worker.step()

    def nothing(*_: object) -> list[object]:
        place.clock.sleep(0.5)
        return []

    with closing(place.worker(app, "other")) as worker:
        with (
            patch.object(Feed, "next", nothing),
            patch("anabranch.processing.worker._RESTORE_S", 5.0),
            pytest.raises(NotReady, match="can't be read to its end"),
        ):
            worker.step()
        worker._drop()
        with (
            patch("anabranch.processing.worker._RESTORE_S", 5.0),
            patch.object(StateReader, "_apply", return_value=0),
            pytest.raises(IllegalState, match="lacks the last commit"),
        ):
            worker.step()


def test_a_task_whose_taker_is_gone_is_taken_back(place: Place) -> None:
    app = counting()
    with closing(place.worker(app)) as worker:
        worker.step()
        place.client.take_tasks("nyc/p", holder="one that is killed")
        place.write(b"a")
        with pytest.raises(OwnershipLost):  # noqa: PT012 (not at once)
            for _ in range(9):
                worker.step()
        worker._drop()  # as `run`
        worker._lost.tasks, worker._check_at = frozenset({0}), 0.0
        worker.step()
        assert "others hold tasks that its group gives it: 0" in (worker.trouble or "")
        before = place.clock.monotonic()
        while worker.trouble is not None and place.clock.monotonic() < before + 60:
            place.clock.sleep(1)
            worker.step()
        assert place.clock.monotonic() - before > 20
        assert list(worker.tasks) == [0]


@pytest.mark.parametrize("begun", [True, False])
def test_a_group_is_imported_once_and_its_tasks_are_free(place: Place, begun: bool) -> None:
    """Two machines look, and both see that nothing has begun."""
    place.cluster.log("kafka").create_topics([TopicSpec("orders", 1, {}, 1)])
    app = Processor("nyc/bridge", tasks=1)
    app.on(app.topic("orders"))(lambda _: None)
    make_processor(place.client, app)
    stale = place.client.processor(app.name)
    ports = replace(place.client.reader_ports(), member=lambda *_: Member())  # type: ignore[arg-type]

    def again() -> int:
        with patch.object(Client, "processor", lambda *_: stale):
            return import_group(place.client, ports, app.name, "g", 5.0)

    if not begun:
        with pytest.raises(InvalidArgument), patch.object(Transaction, "commit", refuse):
            again()
    else:
        again()
        with pytest.raises(IllegalState, match="has begun"):
            again()
    (row,) = place.client.processor(app.name).tasks
    assert (row.holder, row.sequence) == ("", int(begun))


LATER = 10**13  # in 2286
ANY_TIME = {"message.timestamp.after.max.ms": str((1 << 63) - 1)}
BAD: dict[str, dict[str, Any]] = {
    "header": {"headers": [("ab.x", b"1")]},
    "many headers": {"headers": [("a", b"1")] * 1001},
    "time": {"timestamp": -1},
    "micros": {"timestamp": 10**15},
    "far ahead": {"timestamp": LATER},
    "size": {"value": bytes(2_000_000)},
    "size of headers": {"headers": [("a", bytes(2_000_000))]},
    "type": {"value": "text"},
    "row without a key": {},
    "long key of a row": {"key": bytes(9000)},
}


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("bad", ["surrogate", "long error", "name", "old time", *BAD])
def test_an_event_that_no_commit_could_have_is_a_dead_letter(
    place: Place, bad: str, batch: bool
) -> None:
    app = Processor("nyc/p", tasks=1, commit_interval=0, retries=0, dead_letter="nyc/dead")
    place.client.create_stream("nyc/dead", settings={"retention.ms": 86_400_000})
    out = app.output("nyc/out")
    place.client.create_stream("nyc/kept", settings={"retention.ms": 86_400_000})
    place.client.create_stream("nyc/rows", settings={"table": "true"})
    kept, rows = app.output("nyc/kept"), app.output("nyc/rows")
    strange = 10**15 if bad == "old time" else 1000
    if batch and bad not in BAD:
        return

    log, orders = place.cluster.log("kafka"), TopicPartition("orders", 0)
    log.create_topics([TopicSpec("orders", 1, ANY_TIME, 1)])

    @app.on(app.topic("orders") if bad in ("name", "old time") else app.input("nyc/in"))
    def handle(event: Any) -> None:
        if event.key == b"good":
            out.write(event.value, key=event.key)
        elif bad == "name":
            out.write(b"", headers=event.headers)
        elif bad == "surrogate":
            raise ValueError("\ud800")
        elif bad in ("long error", "old time"):
            raise ValueError("x" * 2_000_000)
        else:
            to = kept if bad == "far ahead" else rows if "row" in bad else out
            written = {"value": b"", "headers": None, "timestamp": None, "key": None} | BAD[bad]
            if not batch:
                to.write(**written)
                return
            pairs = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
            named = [{"key": k, "value": v} for k, v in written["headers"] or ()]
            columns = {"headers": pa.array([named], pairs)}
            columns["value"] = pa.array([written["value"]])
            columns["key"] = pa.array([written["key"]], pa.binary())
            columns["timestamp"] = pa.array([written["timestamp"]], pa.int64())
            if bad == "type":
                columns["value"] = pa.array([1])
            to.write_batch(pa.record_batch(columns))

    place.write(b"good", b"bad", b"good")
    for key in (b"good", b"bad", b"good"):
        headers = (("\udcff", b"1"), *[("more", b"")] * 1000)
        log.produce(orders, [Record(0, strange, key, b"v", headers)])
    place.run(app)
    assert (place.written(), place.written("nyc/dead")) == ([b"good", b"good"], [b"bad"])


def test_an_event_is_no_dead_letter_when_the_worker_s_disk_fails(place: Place) -> None:
    app = place.with_dead_letters(retries=0)
    seen = app.store("seen", value=json)
    app.on(app.input("nyc/in"))(lambda event: seen.get(event.key))
    place.write(b"good")
    with closing(place.worker(app)) as worker:
        worker._table._get = Mock(side_effect=Exception("IO error: No space left on device"))
        with pytest.raises(TableError, match="make room"):
            steps(worker)
    assert place.written("nyc/dead") == []


def steps(worker: Worker, count: int = 6) -> None:
    for _ in range(count):
        try:
            worker.step()
        except BeginAgainError as error:
            worker.begin_again(error)


def rows_of(app: Processor, place: Place, most: int) -> Processor:
    """Stores as many bytes for each event as its value says, and for its window. ``most``: of a commit's state."""
    (controller,) = place.controllers.values()
    controller.settings = replace(controller.settings, chunk_bytes=most)
    rows, out = app.store("rows"), app.output("nyc/out")
    spans = app.windows("spans", 1, value=json)

    @app.on(app.input("nyc/in"))
    def store(event: Any) -> None:
        rows[event.key] = bytes(int(event.value))
        for window in spans.of(event):
            window.value = 1
        out.write(b"event", key=event.key)

    @spans.on_close
    def close(window: Any) -> None:
        rows[b"closed " + window.key] = bytes(200)
        out.write(b"window", key=window.key)

    return app


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_too_big_for_a_commit_comes_in_smaller_batches(place: Place, whole: bool) -> None:
    """The rows of a transaction's events are, and then those of its windows, which close together."""
    app = rows_of(place.with_dead_letters(whole=whole), place, 2000)
    keys = [b"%02d" % n for n in range(16)]
    with closing(place.worker(app)) as worker:
        for some in [keys[:4], keys[4:8], keys[8:]] if whole else [keys]:
            place.write(*some, value=b"200")
        place.write(b"end", timestamp=5000)
        steps(worker, 30)
        assert worker.metrics.values["processor_taken_again"].keys() == {("BatchTooBig",)}
    written = [(each.key, each.value) for each in place.events("nyc/out")]
    wanted = [(key, what) for what in (b"event", b"window") for key in keys]
    assert (sorted(written), place.events("nyc/dead")) == (
        sorted([*wanted, (b"end", b"event")]),
        [],
    )


def test_transactions_that_are_only_together_too_big_for_a_commit_stay_whole(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = TaskReader.cut  # in memory each read gives one commit
    monkeypatch.setattr(TaskReader, "cut", lambda *args: [p for _ in range(10) for p in cut(*args)])
    app = rows_of(place.with_dead_letters(), place, 2500)
    for n in range(10):
        place.write(*(b"%d.%d" % (n, m) for m in range(3)), value=b"200")
    with closing(place.worker(app)) as worker:
        steps(worker, 20)
        assert worker.metrics.total("processor_taken_again") > 0
    counts = [sum(part.count for part in commit.segments) for commit in place.commits("nyc/out")]
    assert (sum(counts), {count % 3 for count in counts}) == (30, {0})


def test_batches_stay_small_until_a_slow_reader_has_input(place: Place) -> None:
    """A reader that has nothing at first leaves an empty batch after each try."""
    app, real, begun = rows_of(Processor("nyc/p", tasks=1), place, 2000), TaskReader.cut, []

    def cut(reader: TaskReader, *args: Any) -> Any:
        is_new = reader not in begun
        begun.extend([reader] if is_new else [])
        return [] if is_new else real(reader, *args)

    place.write(*(b"%02d" % n for n in range(16)), value=b"200")
    with closing(place.worker(app)) as worker, patch.object(TaskReader, "cut", cut):
        steps(worker, 20)
    assert len(place.written()) == 16


def test_a_batch_of_a_plain_topic_that_is_too_big_is_cut_anywhere(place: Place) -> None:
    """Its records are in no transaction, so what was fetched together need not stay together."""
    log = place.cluster.log("kafka")
    log.create_topics([TopicSpec("orders", 1, {}, 1)])
    log.produce(TopicPartition("orders", 0), [Record(0, 1, b"%d" % n, b"200") for n in range(64)])
    (controller,) = place.controllers.values()
    controller.settings = replace(controller.settings, chunk_bytes=2000)
    app = Processor("nyc/p", tasks=1, commit_interval=0)
    rows, out = app.store("rows"), app.output("nyc/out")

    @app.on(app.topic("orders"))
    def store(event: Any) -> None:
        rows[event.key] = bytes(int(event.value))
        out.write(b"", key=event.key)

    with closing(place.worker(app)) as worker:
        steps(worker, 20)
    assert len(place.written()) == 64


@pytest.mark.parametrize("how", ["dead letters", "none", "whole"])
def test_an_event_that_is_too_big_alone_fails_by_name(place: Place, how: str) -> None:
    dead = place.with_dead_letters(whole=how == "whole")
    app = rows_of(dead if how != "none" else Processor("nyc/p", tasks=1), place, 4000)
    place.write(*(b"%02d" % n for n in range(9)))
    place.write(b"bad", *([b"worse"] if how == "whole" else []), value=b"5000")
    place.write(b"end")
    says = r"a state change of [\d,]+ bytes"
    with closing(place.worker(app)) as worker:
        if how == "dead letters":
            steps(worker, 20)
            (letter,) = place.events("nyc/dead")
            assert (letter.key, dict(letter.headers)["from"]) == (b"bad", b"nyc/in[0]@10")
            assert re.search(says.encode(), dict(letter.headers)["error"] or b"")
            assert len(place.written()) == 10
            return
        with pytest.raises(HandlerFailed if how == "none" else EventTooLarge, match=says) as error:
            steps(worker, 20)
    assert ("nyc/in[0]@10, key bad" in str(error.value)) == (how == "none")
    assert "--chunk-bytes" in str(error.value)


def test_what_a_stream_takes_may_change(place: Place) -> None:
    app = place.with_dead_letters(retries=0)
    out = app.output("nyc/out")
    app.on(app.input("nyc/in"))(lambda event: out.write(bytes(int(event.value)), key=event.key))
    with closing(place.worker(app)) as worker:
        for key, most in ((b"a", 1_048_588), (b"b", 5_000_000), (b"c", 1_500_000)):
            settings = {topic: {"max.message.bytes": str(most)} for topic in topics_of("nyc/out")}
            place.cluster.log("admin").alter_topics(settings)
            place.write(key, value=b"2000000")
            steps(worker)
    assert (place.written(), place.written("nyc/dead")) == ([b"b"], [b"a", b"c"])


def test_an_output_s_retention_may_be_set_under_a_worker(place: Place) -> None:
    app = place.with_dead_letters(retries=0)
    out = app.output("nyc/out")
    app.on(app.input("nyc/in"))(
        lambda event: out.write(b"", key=event.key, timestamp=int(event.value))
    )
    log = place.cluster.log("admin")
    admin = memory_client(log, place.clock, place._entropy, lane=ADMIN_LANE)
    with closing(place.worker(app)) as worker:
        for key in (b"a", b"b"):
            place.write(key, value=b"%d" % LATER)
            steps(worker)
            admin.alter_stream("nyc/out", {"retention.ms": 86_400_000})
    assert (place.written(), place.written("nyc/dead")) == ([b"a"], [b"b"])


@pytest.mark.parametrize("row", [False, True])
def test_what_a_stream_takes_is_not_known_for_now(place: Place, row: bool) -> None:
    """Then the commit decides: the handler refuses an event only by what is true now."""
    app = place.with_dead_letters(retries=0)
    out, seen = app.output("nyc/out"), app.store("seen")

    @app.on(app.input("nyc/in"))
    def handle(event: Any) -> None:
        with patch.object(worker._limits, "_ask", side_effect=NotReady("no leader")):
            for _ in range(2):
                if row:
                    seen[event.key] = bytes(2_000_000)
                else:
                    out.write(bytes(2_000_000), key=event.key)
        out.write(b"", key=event.key)

    with closing(place.worker(app)) as worker:
        worker.step()
        topics = topics_of("nyc/p.state" if row else "nyc/out")
        settings = {topic: {"max.message.bytes": "5000000"} for topic in topics}
        place.cluster.log("admin").alter_topics(settings)
        place.write(b"a")
        worker.step()
    assert (set(place.written()), place.written("nyc/dead")) == ({b"a"}, [])


def test_a_worker_begins_though_an_output_lacks_its_journal(place: Place) -> None:
    app = place.with_dead_letters()
    out = app.output("nyc/out")
    app.on(app.input("nyc/in"))(lambda event: out.write(event.value, key=event.key))
    place.write(b"a")
    log, journal = place.cluster.log("admin"), journal_topic("nyc/dead")
    log.delete_topics(list(log.describe_topics([journal]).values()))
    before = place.clock.monotonic()
    place.run(app)
    assert place.written() == [b"a"]
    assert place.clock.monotonic() - before < 2 * SESSION_S, (
        "asked twice; its group waits no longer"
    )


@pytest.mark.parametrize("batch", [False, True])
def test_records_without_a_time_are_copied(place: Place, batch: bool) -> None:
    log, orders = place.cluster.log("kafka"), TopicPartition("orders", 0)
    log.create_topics([TopicSpec("orders", 1, {}, 1)])
    for timestamp in (-1, 0, 1000):
        log.produce(orders, [Record(0, timestamp, b"%d" % timestamp, b"v")])
    app = Processor("nyc/p", tasks=1, commit_interval=0)
    out = app.output("nyc/out")
    source = app.topic("orders")
    if batch:  # as `anabranch bridge`
        app.on(source, batch=True)(lambda batch: out.write_batch(outputs_of(batch)))
    else:
        app.on(source)(lambda event: out.write(event.value, key=event.key))
    with closing(place.worker(app)) as worker:
        for _ in range(4):
            worker.step()
    assert place.written() == [b"-1", b"0", b"1000"]


def test_a_busy_standby_keeps_its_copies_warm(place: Place) -> None:
    busy, other = (place.worker(counting(2), str(task), task, standby=not task) for task in (0, 1))
    with closing(busy), closing(other):
        for _ in range(100):
            place.write(*(b"%d" % n for n in range(8)))
            other.step()
            busy.step()
        mark = busy._table.mark(1)
        assert mark is not None
        assert mark.sequence > 10


class Called:
    """A handler that is an object."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def __call__(self, event: Any) -> None:
        await self._call(event)


def decorated(call: Any) -> Any:
    """A plain function around it, as decorators for metrics, retries and tracing make one."""

    @functools.wraps(call)
    def called(*args: Any) -> Any:
        return call(*args)

    return called


AWAITED: dict[str, Callable[[Any], Any]] = {
    "async def": lambda call: call,
    "decorated": decorated,
    "object": Called,
    "lambda": lambda call: lambda event: call(event),
    "partial": lambda call: functools.partial(call),
}


@pytest.mark.parametrize("how", AWAITED)
def test_what_a_handler_returns_is_awaited(place: Place, how: str) -> None:
    app = Processor("nyc/p", tasks=1, commit_interval=0)
    out = app.output("nyc/out")
    most = now = 0

    async def handle(event: Any) -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        out.write(b"", key=event.key)

    app.on(app.input("nyc/in"))(AWAITED[how](handle))
    keys = [b"%d" % n for n in range(9)]
    with closing(place.worker(app)) as worker:
        for _ in range(2):
            place.write(*keys)
            steps(worker)
    assert sorted(place.written()) == sorted(2 * keys)
    assert most > 5


def returning(found: Callable[[], Any]) -> Any:
    return decorated(lambda *_: found())


async def _nothing(*_: Any) -> None: ...


def _yields(*_: Any) -> Any:
    yield


async def _yields_later(*_: Any) -> Any:
    yield


DECLARED: dict[str, Callable[[Processor, Any], Any]] = {
    "timer": lambda app, call: app.timer("t")(call),
    "on_close": lambda app, call: app.windows("w", 1).on_close(call),
    "batch": lambda app, call: app.on(app.input("nyc/in"), batch=True)(call),
    "events": lambda app, call: app.on(app.input("nyc/in"))(call),
}


@pytest.mark.parametrize("call", [_nothing, _yields, _yields_later], ids=lambda call: call.__name__)
@pytest.mark.parametrize("what", DECLARED)
def test_a_function_that_nothing_would_run_is_refused_where_it_is_declared(
    what: str, call: Any
) -> None:
    if what == "events" and call is _nothing:
        return
    with pytest.raises(InvalidArgument, match=call.__name__):
        DECLARED[what](Processor("nyc/p"), call)


@pytest.mark.parametrize(
    "found", [_nothing, _yields, _yields_later], ids=lambda call: call.__name__
)
@pytest.mark.parametrize("what", [*DECLARED, "side by side"])
def test_a_result_that_nothing_would_run_stops_the_worker_before_anything_is_consumed(
    place: Place, what: str, found: Any
) -> None:
    """There is no dead letter: the program is wrong, not the event. Other results are ignored."""
    if what in ("events", "side by side") and found is _nothing:
        return
    app = place.with_dead_letters(retries=0)
    timer = app.timer("t")(returning(found) if what == "timer" else lambda *_: 1)
    windows = app.windows("w", 1, value=json)
    windows.on_close(returning(found) if what == "on_close" else lambda _: [2])
    source = app.input("nyc/in")
    if what == "side by side":
        app.on(source)(_nothing)
    if what == "batch":
        app.on(source, batch=True)(returning(found))
    else:

        @app.on(source)
        def handle(event: Any) -> Any:
            timer.set(event.key, 2)
            for window in windows.of(event):
                window.value = 1
            return found() if what in ("events", "side by side") else "anything"

    place.write(b"a")
    place.write(b"b", timestamp=5000)
    with closing(place.worker(app)) as worker, pytest.raises(InvalidArgument, match="return"):
        steps(worker)
    (task,) = place.client.processor(app.name).tasks
    assert task.sequence < 2, "the commit that failed"
    assert place.written("nyc/dead") == []


def failing(app: Processor, what: str) -> None:
    """Handlers that fail at what has the value b'bad', in many ways, after they have written."""
    out, seen = app.output("nyc/out"), app.store("seen")

    def picky(key: bytes) -> bytes:
        if key == b"bad":
            raise ValueError("no")
        return key

    source = app.input("nyc/in", key=(bytes, picky) if what == "codec" else None)
    windows = app.windows("hours", 1, value=bytes)

    @app.timer("due")
    def due(key: bytes, at: int) -> None:
        out.write(b"%d" % at, key=key)
        if what == "timer" and key == b"bad":
            raise ValueError("no")

    @windows.on_close
    def closed(window: Any) -> None:
        out.write(b"closed", key=window.key)
        if what == "window" and window.key == b"bad":
            raise ValueError("no")

    def by_event(event: Any) -> None:
        out.write(event.value, key=event.key)
        if what == "timer":
            due.set(event.key, 1500)
        if what == "window":
            for window in windows.of(event):
                window.value = event.value
        if event.key != b"bad":
            return
        if what == "row":
            seen[event.key] = bytes(1_100_000)
        elif what == "key of a row":
            seen[b"k" * 1_100_000] = b""
        elif what == "window's row":
            next(windows.of(event)).value = bytes(1_100_000)
        elif what == "cancelled":
            raise asyncio.CancelledError
        elif what == "exit":
            raise SystemExit(3)

    def by_batch(batch: Any) -> None:
        out.write_batch(batch.select(["key", "value"]))
        if b"bad" in batch["key"].to_pylist():
            raise ValueError("no")

    async def cancels(event: Any) -> None:
        out.write(event.value, key=event.key)
        if event.key == b"bad" and what == "cancels itself":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        elif event.key == b"bad":
            task = asyncio.create_task(ends())
            await task
        await asyncio.sleep(0)

    async def ends() -> None:
        raise SystemExit(3)

    if what == "batch":
        app.on(source, batch=True)(by_batch)
    else:
        app.on(source)(cancels if what in ("cancels itself", "exit of a task") else by_event)


FAILS = {
    "timer": (b"due@1500", None),
    "window": (b"hours@1000", b"1"),
    "batch": (b"nyc/in[0]@7", b"1"),
    "codec": (b"nyc/in[0]@7", b"1"),
    "row": (b"nyc/in[0]@7", b"1"),
    "key of a row": (b"nyc/in[0]@7", b"1"),
    "window's row": (b"nyc/in[0]@7", b"1"),
    "cancelled": (b"nyc/in[0]@7", b"1"),
    "exit": (b"nyc/in[0]@7", b"1"),
    "cancels itself": (b"nyc/in[0]@7", b"1"),
    "exit of a task": (b"nyc/in[0]@7", b"1"),
}
SAYS = {
    "codec": "UndecodableValue: nyc/in[0]@7, key b'bad'",
    "row": "EventTooLarge: key b'bad' of seen: an event of 1,100,007 bytes; nyc/p.state takes up to",
    "key of a row": "EventTooLarge: key b'kkk",
    "window's row": "of hours: an event of",
    "cancelled": "CancelledError",
    "exit": "SystemExit: 3",
    "cancels itself": "CancelledError",
    "exit of a task": "SystemExit: 3",
}


@pytest.mark.parametrize("what", FAILS)
def test_whatever_fails_is_a_dead_letter_alone(place: Place, what: str) -> None:
    app = place.with_dead_letters(retries=1)
    failing(app, what)
    good = [b"%02d" % n for n in range(20)]
    place.write(*good[:7], b"bad", *good[7:])
    place.write(b"end", timestamp=1700)
    with closing(place.worker(app)) as worker:
        steps(worker)
        assert worker.metrics.total("processor_dead_letters") == 1
    (dead,) = place.events("nyc/dead")
    from_, value = FAILS[what]
    headers = dict(dead.headers)
    assert (dead.key, dead.value, headers["from"]) == (b"bad", value, from_)
    assert SAYS.get(what, "ValueError: no").encode() in (headers["error"] or b"")
    written = [*good, b"end"]
    if what in ("timer", "window"):  # its event has been handled
        written += [b"bad", *good, *([b"end"] if what == "timer" else [])]
    assert sorted(place.written()) == sorted(written)
    with closing(place.worker(app, "again")) as worker:  # it is gone from the state, too
        place.write(b"more", timestamp=1900)
        steps(worker)
        assert worker.metrics.total("processor_dead_letters") == 0


@pytest.mark.parametrize("what", FAILS)
def test_without_dead_letters_it_stops_the_worker_by_name(place: Place, what: str) -> None:
    app = Processor("nyc/p", tasks=1, commit_interval=0, retries=0)
    failing(app, what)
    place.write(*([b"0"] * 7), b"bad")
    place.write(b"end", timestamp=1700)
    from_, _ = FAILS[what]
    named = b"nyc/in[0]@0 on" if what == "batch" else from_
    with closing(place.worker(app)) as worker, pytest.raises(HandlerFailed) as failed:
        steps(worker)
    assert named.decode() in str(failed.value)
    assert SAYS.get(what, "ValueError: no") in str(failed.value)
    line = failure_of(failed.value).line()
    assert line.startswith("HandlerFailed: ")
    assert 'give the processor dead_letter="SCOPE/STREAM"' in line


@pytest.mark.parametrize(
    ("value", "place_"),
    [
        (
            b"{",
            "UndecodableValue: nyc/in[0]@0, key b'N1\\xff': codec json does not decode the value (JSON",
        ),
        (b"7", "nyc/in[0]@0, key N1\\xff, handler test_"),
    ],
)
def test_an_error_names_the_event_and_what_failed(place: Place, value: bytes, place_: str) -> None:
    app = Processor("nyc/p", tasks=1, commit_interval=0, retries=0)

    @app.on(app.input("nyc/in", value=json))
    def fail(event: Any) -> None:
        raise ValueError(event.value)

    with place.client.begin("nyc") as txn:
        txn.write("nyc/in", value, key=b"N1\xff")
        txn.commit()
    with closing(place.worker(app)) as worker, pytest.raises(HandlerFailed) as failed:
        steps(worker)
    assert str(failed.value).startswith(place_)


def pauses(place: Place, app: Processor, *keys: bytes) -> list[float]:
    """The pauses between tries of events with these keys."""
    place.write(*keys)
    with (
        closing(place.worker(app, keys[0].decode())) as worker,
        patch.object(worker.stop, "wait", side_effect=lambda _: False) as wait,
    ):
        steps(worker)
    return [call.args[0] for call in wait.call_args_list]


def failing_by_key(app: Processor, kind: type[Exception], calls: list[bytes]) -> None:
    """Events "bad" fail, "later" fail twice of three times, "much later" 1,100 times; "other" in another way."""
    out = app.output("nyc/out")

    @app.on(app.input("nyc/in"))
    def handle(event: Any) -> None:
        calls.append(event.key)
        out.write(event.value, key=event.key)
        if event.key == b"other":
            raise KeyError
        many = {b"bad": 1 << 30, b"much later": 1100}.get(event.key, 0)
        if calls.count(event.key) <= many or (event.key == b"later" and calls.count(b"later") % 3):
            raise kind


def test_a_failed_event_is_tried_again_by_itself_with_pauses(place: Place) -> None:
    """However often the same error came before: an outage is one error for all events."""
    app, calls = place.with_dead_letters(), list[bytes]()
    failing_by_key(app, ConnectionError, calls)
    assert pauses(place, app, b"a", b"bad", b"b", b"bad", b"c") == [0.1, 0.2] * 2
    assert calls == [b"a", *[b"bad"] * 3, b"b", *[b"bad"] * 3, b"c"]
    assert pauses(place, app, b"bad", b"later", b"bad") == [0.1, 0.2] * 3
    app.retries = 2000
    assert set(pauses(place, app, b"much later")[10:]) == {2.0}
    assert place.written() == [b"a", b"b", b"c", b"later", b"much later"]


def test_pauses_that_changed_nothing_are_not_repeated_for_the_same_error(place: Place) -> None:
    app, calls = place.with_dead_letters(), list[bytes]()
    failing_by_key(app, ValueError, calls)
    assert pauses(place, app, b"a", b"bad", b"b", b"bad", b"c") == [0.02, 0.04]
    assert calls == [b"a", *[b"bad"] * 3, b"b", *[b"bad"] * 3, b"c"]
    assert pauses(place, app, b"bad", b"other", b"bad", b"other") == [0.02, 0.04] * 2
    assert pauses(place, app, b"bad", b"later", b"bad") == [0.02, 0.04] * 2, "it may pass by itself"
    with patch("anabranch.processing.failures._LASTING_S", 0.0):
        assert pauses(place, app, b"bad", b"bad") == [0.02, 0.04] * 2, (
            "later it may be another cause"
        )
    dead = len(place.written("nyc/dead"))
    assert pauses(place, app, *[b"bad"] * 1000) == [0.02, 0.04]
    assert len(place.written("nyc/dead")) == dead + 1000
    assert place.written() == [b"a", b"b", b"c", b"later"]


@pytest.mark.parametrize("how", ["in turn", "side by side", "batch"])
def test_a_worker_that_ends_in_a_pause_makes_no_dead_letters(place: Place, how: str) -> None:
    app = place.with_dead_letters()
    out, worker = app.output("nyc/out"), list[Worker]()

    def handle(event: Any) -> None:
        if worker:
            worker[0].stop.set()
            raise ConnectionError
        if how == "batch":
            out.write_batch(event.select(["key", "value"]))
        else:
            out.write(event.value, key=event.key)

    async def later(event: Any) -> None:
        handle(event)

    app.on(app.input("nyc/in"), batch=how == "batch")(later if how == "side by side" else handle)
    place.write(b"a", b"b")
    with closing(place.worker(app)) as ends:
        worker.append(ends)
        ends.run()
    worker.clear()
    with closing(place.worker(app)) as again:
        steps(again)
    assert (place.written(), place.written("nyc/dead")) == ([b"a", b"b"], [])


def test_an_outage_that_is_shorter_than_an_event_s_tries_costs_a_batch_nothing(
    place: Place,
) -> None:
    app = place.with_dead_letters()
    out, waited = app.output("nyc/out"), list[float]()

    @app.on(app.input("nyc/in"), batch=True)
    def handle(batch: Any) -> None:
        if sum(waited) < 0.5:
            raise ConnectionError
        out.write_batch(batch.select(["key", "value"]))

    place.write(b"a", b"b", b"c", b"d")
    with (
        closing(place.worker(app)) as worker,
        patch.object(worker.stop, "wait", side_effect=waited.append),
    ):
        steps(worker)
    assert (place.written(), place.written("nyc/dead")) == ([b"a", b"b", b"c", b"d"], [])


class Ends:
    """A signal's handler that is an object."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)


@pytest.mark.parametrize(
    ("kind", "where", "by"),
    [
        (SystemExit, "handler", lambda call: call),
        (SystemExit, "side by side", functools.partial),
        (KeyboardInterrupt, "side by side", lambda call: call),
        (ValueError, "handler", Ends),
        (ValueError, "side by side", Ends),
        (ValueError, "codec", Ends),
    ],
)
def test_what_a_signal_raises_is_no_failure_of_an_event(
    place: Place, kind: type[BaseException], where: str, by: Any
) -> None:
    app = place.with_dead_letters(retries=0)

    def end(*_: Any) -> None:
        raise kind("the signal")

    signals = [signal.SIGUSR1]  # one: if it were lost, the worker would go on

    def handle(_: Any) -> None:
        if signals and where != "codec":
            os.kill(os.getpid(), signals.pop())
            time.sleep(5)

    async def later(event: Any) -> None:
        handle(event)

    def decode(data: bytes) -> bytes:
        if signals and where == "codec":
            os.kill(os.getpid(), signals.pop())
        return data

    source = app.input("nyc/in", value=(bytes, decode))
    app.on(source)(later if where == "side by side" else handle)
    place.write(b"a")
    before = signal.signal(signal.SIGUSR1, by(end))
    try:
        with closing(place.worker(app)) as worker, pytest.raises(kind, match="the signal"):
            steps(worker)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert place.written("nyc/dead") == []


def test_calls_that_would_have_no_effect_are_refused(place: Place) -> None:
    """Rows of windows and timers are set by their own methods; an input has one codec."""
    app, said = Processor("nyc/p", tasks=1, commit_interval=0), list[str]()
    windows = app.windows("w", 1)
    timer: Any = app.timer("t")(lambda *_: None)
    calls: list[Callable[[Any], object]] = [
        lambda of: of.__setitem__(b"k", b"1"),
        lambda of: of[b"k"],
        lambda of: of.get(b"k"),
        lambda of: b"k" in of,
        lambda of: of.__delitem__(b"k"),
        lambda of: list(of.items()),
    ]

    @app.on(app.input("nyc/in"))
    def handle(_: Any) -> None:
        for of in (windows, timer):
            for call in calls:
                with pytest.raises((AttributeError, TypeError)) as refused:
                    call(of)
                said.append(str(refused.value))

    place.write(b"a")
    place.run(app)
    assert len(said) == 12


def test_an_input_is_declared_twice_with_one_codec_only() -> None:
    app = Processor("nyc/p")

    class Own:
        def dumps(self, value: Any) -> bytes:
            return bytes(value)

        def loads(self, data: bytes) -> Any:
            return data

    own = Own()
    for name, value in (("raw", None), ("json", json), ("own", own)):
        source = app.input(f"nyc/{name}", value=value)
        assert app.input(f"nyc/{name}", value=value) is source
        assert app.input("nyc/raw", value=bytes) is app.input("nyc/raw")
        with pytest.raises(InvalidArgument, match="another codec"):
            app.input(f"nyc/{name}", value=str)
    with pytest.raises(InvalidArgument, match="another codec"):
        app.input("nyc/own", value=Own())
    app = Processor("nyc/q")
    app.topic("orders")
    with pytest.raises(InvalidArgument, match="another codec"):
        app.topic("orders", value=json)


def test_events_and_batches_of_one_output_share_a_commit_in_their_order(place: Place) -> None:
    app = Processor("nyc/p", tasks=1, commit_interval=0)
    out = app.output("nyc/out")
    place.client.create_stream("nyc/more")

    @app.on(app.input("nyc/in"))
    def one(event: Any) -> None:
        out.write(event.value, key=event.key)
        if event.key == b"b":
            out.write_batch(pa.record_batch({"key": [b"b1"] * 400, "value": [b""] * 400}))
            out.write(b"", key=b"b2")

    @app.on(app.input("nyc/more"), batch=True)
    def some(batch: Any) -> None:
        out.write_batch(batch.select(["key", "value"]))

    with closing(place.worker(app)) as worker, place.client.begin("nyc") as txn:
        for key in (b"a", b"b", b"c"):
            txn.write("nyc/in", b"1", key=key)
        txn.write("nyc/more", b"1", key=b"d")
        txn.commit()
        steps(worker)
        assert worker.metrics.total("processor_commits") == 1
        assert worker.metrics.total("processor_events_out") == 405
    assert place.written() == [b"a", b"b", *[b"b1"] * 400, b"b2", b"c", b"d"]


LEFT: dict[
    str, tuple[float, float]
] = {  # when the task writes, and when its event and a concurrent one are over
    "after its event, while another is handled": (0.02, 0.2),
    "after all events": (0.02, 0.0),
    "long after": (0.3, 0.0),
}


@pytest.mark.parametrize("when", LEFT)
@pytest.mark.parametrize("what", ["output", "store", "window"])
def test_a_task_that_no_handler_awaits_and_that_writes_stops_the_worker(
    place: Place, when: str, what: str
) -> None:
    app = place.with_dead_letters(retries=0)
    out, seen, windows = app.output("nyc/out"), app.store("seen"), app.windows("w", 1)
    (later, over), left = LEFT[when], set[Any]()

    async def write(event: Any, window: Any) -> None:
        await asyncio.sleep(later)
        if what == "output":
            out.write(b"", key=b"stray")
        elif what == "store":
            seen[event.key] = b"stray"
        else:
            window.value = b"stray"

    @app.on(app.input("nyc/in"))
    async def handle(event: Any) -> None:
        if event.key == b"a":
            left.add(asyncio.create_task(write(event, next(windows.of(event)))))
        await asyncio.sleep(over if event.key == b"b" else 0)

    place.write(b"a", b"b")
    with (  # noqa: PT012 (not at once)
        closing(place.worker(app)) as worker,
        pytest.raises(IllegalState, match="went on after"),
    ):
        for _ in range(20):
            worker.step()
            time.sleep(0.05)
    for task in left:
        task.cancel()
    assert place.written() == place.written("nyc/dead") == []


@pytest.mark.parametrize("concurrency", [1, 2])
def test_handlers_side_by_side_reach_the_rows_of_their_own_key(
    place: Place, concurrency: int
) -> None:
    """A running total over an await would lose most of it."""
    app = Processor("nyc/p", tasks=1, commit_interval=0, retries=0, concurrency=concurrency)
    total, refused = app.store("total", value=json, local=True), list[bytes]()
    own, out = app.store("own", value=json), app.output("nyc/out", value=json)

    @app.on(app.input("nyc/in"))
    async def add(event: Any) -> None:
        own[event.key] = 1
        calls: list[Callable[[], Any]] = [lambda: total.get("all", 0), lambda: [*own.items()]]
        if concurrency > 1:
            for call in calls:
                with pytest.raises(InvalidArgument, match="concurrency=1"):
                    call()
            refused.append(event.key)
            return
        before, rows = (call() for call in calls)
        await asyncio.sleep(0.001)
        total["all"] = before + 1
        out.write([before + 1, len(rows)], key=b"all")

    place.write(*(b"%d" % n for n in range(20)))
    place.run(app)
    if concurrency == 1:
        assert [one.value for one in place.events("nyc/out")][-1] == b"[20,20]"
    else:
        assert len(refused) == 20


def test_late_events_keep_their_headers(place: Place) -> None:
    """Also of a plain topic, whose records may have names that no stream takes."""
    log, orders = place.cluster.log("kafka"), TopicPartition("orders", 0)
    log.create_topics([TopicSpec("orders", 1, {}, 1)])
    app = Processor("nyc/p", tasks=1, commit_interval=0)
    windows = app.windows("w", 1, value=json, late=app.output("nyc/out"))
    app.on(app.topic("orders"))(lambda event: list(windows.of(event)))
    headers = (("a", b"b"), ("a", None), ("ab.variant", b"B"), ("\udcff", b"1"))
    with closing(place.worker(app)) as worker:
        log.produce(orders, [Record(0, 9000, b"first", b"1")])
        steps(worker)
        log.produce(orders, [Record(0, 7, b"late", b"v", headers)])
        steps(worker)
    (late,) = place.events("nyc/out")
    kept = [header for header in late.headers if header[0] != "ab.txn"]
    assert (late.key, late.value) == (b"late", b"v")
    assert kept == [("a", b"b"), ("a", None), ("_ab.variant", b"B"), ("?", b"1")]


def test_a_forked_child_of_a_handler_writes_nothing(place: Place) -> None:
    """The child has a copy of the commit, which is never sent."""
    app = Processor("nyc/p", tasks=1, commit_interval=0)
    out, said = app.output("nyc/out"), list[int]()

    @app.on(app.input("nyc/in"))
    def handle(event: Any) -> None:
        child = os.fork()
        if not child:
            try:
                out.write(b"", key=b"child")
            except IllegalState:
                os._exit(3)
            os._exit(0)
        said.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        out.write(b"", key=event.key)

    place.write(b"a", b"b")
    place.run(app)
    assert (said, place.written()) == ([3, 3], [b"a", b"b"])


def test_inputs_may_come_in_another_order(place: Place) -> None:
    place.client.create_stream("nyc/more")
    for number, names in enumerate((["in", "more"], ["more", "in"])):
        app = Processor("nyc/p", tasks=1, commit_interval=0)
        out = app.output("nyc/out")
        app.on(*(app.input(f"nyc/{name}") for name in names))(
            lambda event, out=out: out.write(b"", key=event.key)
        )
        with place.client.begin("nyc") as txn:
            for name in ("in", "more"):
                txn.write(f"nyc/{name}", b"", key=b"%d-%s" % (number, name.encode()))
            txn.commit()
        with closing(place.worker(app, str(number))) as worker:
            steps(worker)
    assert sorted(place.written()) == [b"0-in", b"0-more", b"1-in", b"1-more"]


def copying(place: Place) -> Processor:
    """Copies its input, with a commit each second."""
    app = Processor("nyc/p", tasks=1, commit_interval=1)
    out = app.output("nyc/out")
    app.on(app.input("nyc/in"))(lambda event: out.write(b"", key=event.key))
    return app


def rests_of(
    place: Place, monkeypatch: pytest.MonkeyPatch, before: Callable[[], None] = lambda: None
) -> list[float]:
    """How long each worker rested before its reads. ``before``: is called before each."""
    rests = list[float]()
    rest = Worker._rest

    def noted(*of: Any) -> bool:
        before()
        began = place.clock.now
        found = rest(*of)
        rests.append(place.clock.now - began)
        return found

    monkeypatch.setattr(Worker, "_rest", noted)
    return rests


def test_slow_input_is_read_few_times_for_a_commit(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = iter([b"%d" % number for number in range(1, 40)])
    with closing(place.worker(copying(place))) as worker:
        place.write(b"0")
        while not place.commits("nyc/out"):
            worker.step()
        rests = rests_of(place, monkeypatch, lambda: place.write(next(keys)))
        while len(place.commits("nyc/out")) == 1:
            worker.step()
    assert 3 < sum(one > 0 for one in rests) <= len(rests) <= 6, rests
    assert place.written() == [b"%d" % number for number in range(len(rests) + 1)]


def test_a_backlog_is_read_without_a_rest(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        place.write(b"%d" % number, value=bytes(100_000))  # a read takes three
    rests = rests_of(place, monkeypatch)
    with closing(place.worker(copying(place))) as worker:
        while len(place.written()) < 20:
            worker.step()
    assert len(rests) >= 7
    assert not any(rests[:7])
    assert any(rests[7:]), "at the end of its input it rests"


def test_after_few_reads_during_a_long_commit_the_next_has_all_that_came(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 workers on two cores read so often while their commits were under way that these took longer.

    What came between the last of these reads and the end of the commit waited for one commit more.
    """
    clock, reads = place.clock, 0
    fetch = CommittedLog.wait_for

    def counted(*of: Any) -> Any:
        nonlocal reads
        reads += 1
        return fetch(*of)

    with closing(place.worker(copying(place))) as worker:
        place.write(b"0")
        while not place.commits("nyc/out"):
            worker.step()
        clock.now += 1
        ends = clock.now + 5

        def wait(seconds: float | None = None) -> bool:
            before = clock.now
            clock.now += max(0.0, ends - clock.now) if seconds is None else seconds
            if before < ends <= clock.now:
                place.write(b"2")
            return clock.now >= ends

        monkeypatch.setattr(worker._commits, "wait", wait)
        monkeypatch.setattr(CommittedLog, "wait_for", counted)
        place.write(b"1")
        worker.step()
    assert clock.now >= ends
    assert 0 < reads <= 5 / 0.05 + 3
    assert [sum(part.count for part in one.segments) for one in place.commits("nyc/out")] == [1, 2]


def test_what_came_during_a_rest_is_in_the_next_commit(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit took one fetched batch of the history, and the others waited for the commit after it."""
    # In memory a fetch brings one commit, so the rest of a fetch is what the reader knows to be there.
    monkeypatch.setattr(TaskReader, "has_fetched", TaskReader.is_behind)
    written = iter([5])

    def write() -> None:
        for number in range(next(written, 0)):
            place.write(b"%d" % (number + 1))

    with closing(place.worker(copying(place))) as worker:
        place.write(b"0")
        while not place.commits("nyc/out"):
            worker.step()
        rests_of(place, monkeypatch, write)
        while len(place.commits("nyc/out")) == 1:
            worker.step()
    assert [sum(part.count for part in one.segments) for one in place.commits("nyc/out")] == [1, 5]


def test_positions_that_are_not_committed_are_put_back(place: Place) -> None:
    place.client.create_processor("nyc/p", "nyc/in", tasks=4)
    owned = place.client.take_tasks("nyc/p")
    with place.client.read("nyc/in", ownership=owned, timeout=1.0) as reader:
        place.write(b"a", b"b", b"c", b"d")
        assert len(list(reader)) == 4
        first = reader.consumed()
        reader.put_back(first)
        with pytest.raises(IllegalState, match="only the last positions"):
            reader.put_back(first)
        again = reader.consumed()
        assert again == first
        reader.put_back(again)
        place.write(b"a", b"e")
        assert len(list(reader)) == 2
        later = reader.consumed()
        with place.client.begin("nyc", ownership=owned) as txn:
            txn.commit(consumed=later)
    rows = place.client.processor("nyc/p").tasks
    touched = {task for step in later.steps for task in step.tasks}
    assert {row.task for row in rows if row.sequence == 1} == touched
    assert touched >= {task for step in first.steps for task in step.tasks}
    with place.client.read(
        "nyc/in", ownership=place.client.take_tasks("nyc/p"), timeout=1.0
    ) as reader:
        assert not list(reader)


def test_a_traced_worker_s_commit_continues_the_traces_of_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    place = Place(tmp_path)
    app = Processor("nyc/p", tasks=1, commit_interval=0)

    out = app.output("nyc/out")
    app.on(app.input("nyc/in"))(lambda event: out.write(event.value, key=event.key))

    def processed() -> tuple[Any, list[str]]:
        """The span of the only batch, and the span ids of the commits that wrote its input."""
        spans = exporter.get_finished_spans()
        exporter.clear()
        (found,) = [span for span in spans if span.name == "anabranch process nyc/p"]
        inner = [
            span for span in spans if span.parent and span.parent.span_id == found.context.span_id
        ]
        assert "anabranch commit" in [span.name for span in inner]
        written = place.events("nyc/out")[-1]
        assert f"{found.context.trace_id:032x}" in str(dict(written.headers))
        return found, [
            f"{span.context.span_id:x}" for span in spans if span.name == "anabranch commit"
        ]

    place.write(b"a")
    place.run(app)
    one, commits = processed()
    assert f"{one.parent.span_id:x}" in commits
    assert one.links == ()
    assert one.attributes["messaging.batch.message_count"] == 1
    traces = [f"00-{number:032x}-{number:016x}-01" for number in (7, 8)]
    with place.client.begin("nyc") as txn:
        for each in traces:
            txn.write("nyc/in", b"1", key=b"b", headers={"traceparent": each.encode()})
        txn.commit()
    place.run(app)
    both, _ = processed()
    assert both.parent is None
    assert sorted(link.context.trace_id for link in both.links) == [7, 8]


def to_tuple(data: bytes) -> tuple[str, ...]:
    return tuple(data.decode().split("/"))


@pytest.mark.parametrize(
    ("codec", "raw", "key"),
    [
        (None, b"a", b"a"),
        (str, b"a", "a"),
        (json, b'"a" ', "a"),  # as another writer encodes it
        ((lambda key: "/".join(key).encode(), to_tuple), b"a/b", ("a", "b")),
    ],
)
def test_timers_and_windows_have_the_keys_of_events(
    place: Place, codec: Any, raw: bytes, key: Any
) -> None:
    app = Processor("nyc/p", commit_interval=0)
    out = app.output("nyc/out", key=codec, value=json)
    late = app.output("nyc/late")
    place.client.create_stream("nyc/late")
    windows, found = app.windows("w", 1, value=json, late=late), list[Any]()

    @app.timer("t")
    def fired(key: Any, due: int) -> None:
        found.append(key)
        timer.set(key, at=5000)  # the last one
        out.write(due, key=key)

    timer = fired

    @windows.on_close
    def closed(window: Any) -> None:
        found.append(window.key)
        timer.cancel(window.key)

    @app.on(app.input("nyc/in", key=codec))
    def handle(event: Any) -> None:
        for window in windows.of(event):
            found.append(window.key)
            window.value = (window.value or 0) + 1
        timer.set(event.key, at=900)

    for at in (1, 1500, 2, 9000):
        place.write(raw, timestamp=at)
    place.run(app)
    assert found == [key] * 7
    assert [e.key for e in place.events("nyc/late")] == [raw]


def test_inputs_with_different_keys_leave_them_bytes(place: Place) -> None:
    place.client.create_stream("nyc/more")
    app, found = Processor("nyc/p", commit_interval=0), list[Any]()

    @app.timer("t")
    def fired(key: Any, _: int) -> None:
        found.append(key)

    @app.on(app.input("nyc/in", key=str), app.input("nyc/more"))
    def handle(event: Any) -> None:
        fired.set(event.key, at=5)

    for at in (1, 9):
        place.write(b"a", timestamp=at)
    place.run(app)
    assert found == [b"a"]


def test_rows_of_a_store_are_read_while_their_event_is_handled(place: Place) -> None:
    app, kept = place.with_dead_letters(retries=0), list[Any]()
    store = app.store("s")

    @app.on(app.input("nyc/in"))
    def handle(event: Any) -> None:
        store[event.key] = b""
        if not kept:
            store["z"] = b""
            kept.append(store.items())
        next(kept[0])

    with closing(place.worker(app)) as worker:
        place.write(b"a")
        steps(worker)
        place.write(b"b")
        steps(worker)
    (letter,) = place.events("nyc/dead")
    assert letter.key == b"b"
    assert b"read them again" in (dict(letter.headers)["error"] or b"")


def test_a_batch_that_waits_for_its_commit_ends_when_its_tasks_are_taken(place: Place) -> None:
    """As by a copy of the processor, which has released them by then: nothing else would end the wait."""
    app = Processor("nyc/p", tasks=1, commit_interval=300)

    @app.on(app.input("nyc/in"))
    def handle(event: Any) -> None:
        if event.key == b"taken":
            place.client.release_tasks(place.client.take_tasks("nyc/p"))

    with closing(place.worker(app)) as worker:
        place.write(b"a")
        steps(worker)
        place.write(b"taken")
        before = worker._clock.monotonic()
        with pytest.raises(OwnershipLost):
            worker.step()
        assert worker._clock.monotonic() - before < 60
