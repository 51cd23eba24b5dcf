"""What a worker handles in one go is bounded in time, and it stays a member of its group meanwhile."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from anabranch.batches.records import Record
from anabranch.errors import FixCallError, InvalidArgument, OwnershipLost
from anabranch.ports import TopicPartition, TopicSpec
from anabranch.processing.app import Processor
from anabranch.processing.handlers import PART_S
from anabranch.processing.worker import Membership, Worker
from anabranch.testing import Driver
from anabranch.testing.driver import START_MS
from tests.processing.test_worker import Place

MANY = 40


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def slow(place: Place, seconds: float, source: str = "nyc/in", **more: Any) -> Processor:
    """Copies its input; each event takes some seconds."""
    app = Processor("nyc/p", tasks=1, commit_interval=0.1, **more)
    out = app.output("nyc/out")
    given = app.topic(source) if "/" not in source else app.input(source)

    @app.on(given)
    def handle(event: Any) -> None:
        place.clock.sleep(seconds)
        out.write(b"", key=event.key)

    return app


def keys(count: int = MANY) -> list[bytes]:
    return [b"%02d" % number for number in range(count)]


def commits_of(place: Place, worker: Worker) -> list[int]:
    """How many events each commit has, until all are written."""
    found, before = list[int](), 0
    while before < MANY:
        worker.step()
        if (now := len(place.written())) > before:
            found.append(now - before)
            before = now
    return found


def test_a_transaction_that_takes_long_comes_in_parts(place: Place) -> None:
    place.write(*keys())
    with closing(place.worker(slow(place, 1.0))) as worker:
        parts = commits_of(place, worker)
    assert place.written() == keys()
    assert set(parts) == {PART_S}


def test_a_transaction_is_kept_whole_if_the_program_says_so(place: Place) -> None:
    place.write(*keys())
    with closing(place.worker(slow(place, 1.0, whole=True))) as worker:
        assert commits_of(place, worker) == [MANY]


def test_small_transactions_wait_for_a_commit_no_longer_than_its_interval(place: Place) -> None:
    for key in keys():
        place.write(key)
    with closing(place.worker(slow(place, 0.03))) as worker:
        parts = commits_of(place, worker)
    assert place.written() == keys()
    assert max(parts) <= 4


def test_records_of_plain_topics_wait_no_longer_either(place: Place) -> None:
    log = place.cluster.log("kafka")
    log.create_topics([TopicSpec("orders", 1, {}, 1)])
    log.produce(TopicPartition("orders", 0), [Record(0, 1, key, b"v") for key in keys()])
    with closing(place.worker(slow(place, 0.03, "orders"))) as worker:
        parts = commits_of(place, worker)
    assert place.written() == keys()
    assert max(parts) <= 4


@pytest.mark.parametrize(("stop", "most"), [*((n, math.inf) for n in range(1, 9)), (1, 4), (8, 4)])
def test_another_worker_continues_inside_of_a_transaction(
    place: Place, stop: int, most: float
) -> None:
    """In two inputs, with windows that close when event time moves at the end of the whole transaction.

    ``most``: events of a worker's first batch, as after one that was too big for a commit.
    """
    place.client.create_stream("nyc/more")
    app = Processor("nyc/p", tasks=1, commit_interval=0)
    out, inputs = app.output("nyc/out"), [app.input("nyc/in"), app.input("nyc/more")]
    windows = app.windows("w", 1)

    @app.on(*inputs)
    def handle(event: Any) -> None:
        place.clock.sleep(1.0 if most == math.inf else 0.0)
        for window in windows.of(event):
            window.value = b"".join([window.value or b"", event.key])
        out.write(b"", key=event.key)

    @windows.on_close
    def closed(window: Any) -> None:
        out.write(window.value, key=b"closed %d" % window.start)

    with place.client.begin("nyc") as txn:
        for at in range(1, 13):
            txn.write("nyc/in", b"", key=b"a", timestamp=1000 * at)
            txn.write("nyc/more", b"", key=b"b", timestamp=1000 * (13 - at) + 1)
        txn.commit()
    ends = [(b"closed %d" % (1000 * at), key) for at in range(1, 12) for key in (b"a", b"b")]
    count = 0
    while len(place.written()) < 24 + len(ends):
        count += 1
        assert count < 100
        with closing(place.worker(app, str(count))) as worker:
            worker._handlers._most_events, worker._handlers._splits = most, most < math.inf
            for _ in range(stop):
                worker.step()
    written = place.events("nyc/out")
    assert [one.key for one in written[:24]] == [b"a"] * 12 + [b"b"] * 12
    assert len(place.commits("nyc/out")) >= (24 // PART_S if most == math.inf else 3)
    assert [(one.key, one.value) for one in written[24:]] == ends


def twice(worker: Worker) -> None:
    """Take the tasks, and handle the input, if the first step has not done both."""
    for _ in range(2):
        worker.step()


def test_a_worker_that_lost_its_tasks_stops_while_handlers_run(place: Place) -> None:
    app = Processor("nyc/p", tasks=1, commit_interval=0, whole=True)
    out, handled, worker = app.output("nyc/out"), list[bytes](), list[Worker]()

    @app.on(app.input("nyc/in"))
    def handle(event: Any) -> None:
        place.clock.sleep(7.0)
        handled.append(event.key)
        out.write(b"", key=event.key)
        if event.key == b"02":
            place.client.take_tasks("nyc/p", holder="another")
        worker[0].watch()  # as the group's thread calls it

    place.write(*keys())
    with closing(place.worker(app)) as busy:
        worker.append(busy)
        with pytest.raises(OwnershipLost, match="another"):
            twice(busy)
    assert handled == keys(3)
    assert place.written() == []


def test_handlers_side_by_side_stop_in_time_and_in_order(place: Place) -> None:
    app = Processor("nyc/p", tasks=1, commit_interval=0, concurrency=2)
    out, at_work = app.output("nyc/out"), set[bytes]()

    @app.on(app.input("nyc/in"))
    async def handle(event: Any) -> None:
        at_work.add(event.key)
        assert len(at_work) <= 2
        place.clock.sleep(1.0)
        await asyncio.sleep(0.001)
        out.write(event.value, key=event.key)
        at_work.discard(event.key)

    place.write(*keys())
    with closing(place.worker(app)) as worker:
        parts = commits_of(place, worker)
    assert sorted(place.written()) == keys()
    assert len(parts) >= 4


class Group:
    """A member of a group that assigns once more with each call of `serve`."""

    def __init__(self) -> None:
        self.served = 0
        self.error: Exception | None = None
        self.ended = False

    def join(self, topics: Sequence[str], gained: Callable[..., None], lost: Any) -> None:
        self._gained = gained

    def serve(self, wait: float) -> None:
        time.sleep(0.01)
        if self.error is not None:
            raise self.error
        self.served += 1
        self._gained([TopicPartition("t", self.served)])

    def close(self) -> None:
        self.ended = True


def test_the_group_is_served_while_handlers_are_at_work() -> None:
    group, watched = Group(), threading.Event()
    membership = Membership(group, "t", watched.set)  # type: ignore[arg-type]
    assert membership.serve(5.0)
    before = group.served
    time.sleep(0.2)  # a handler at work
    assert group.served > before + 2
    assert watched.is_set()
    assert max(membership.serve(0.0)) > before
    group.error = FixCallError("planted")
    time.sleep(0.1)
    with pytest.raises(FixCallError, match="planted"):
        membership.serve(5.0)
    membership.close()
    assert group.ended


@pytest.mark.parametrize("second", ["full", "empty"])
def test_plain_topics_are_read_by_event_time(place: Place, second: str) -> None:
    """From the beginning of two topics with a backlog, no event is late that was not late when it came."""
    log = place.cluster.log("kafka")
    log.create_topics([TopicSpec(topic, 2, {}, 1) for topic in ("a", "b")])
    for topic in ("a", "b") if second == "full" else ("a",):
        for chunk in range(10):  # each its own Kafka batch
            for partition in range(2):
                records = [
                    Record(0, 1_000_000 + 1000 * (100 * chunk + at), b"%d" % partition, b"v")
                    for at in range(100)
                ]
                log.produce(TopicPartition(topic, partition), records)
    app = Processor("nyc/p", tasks=2, commit_interval=0)
    place.client.create_stream("nyc/late")
    windows = app.windows("w", 10, grace=20, value=json, late=app.output("nyc/late"))
    handled = list[int]()

    @app.on(app.topic("a"), app.topic("b"))
    def count(event: Any) -> None:
        handled.append(event.timestamp)
        for window in windows.of(event):
            window.value = 1

    began = place.clock.now
    with closing(place.worker(app)) as worker:
        while len(handled) < (4000 if second == "full" else 2000):
            worker.step()
    assert place.events("nyc/late") == []
    assert place.clock.now - began < 5, "an empty topic is not waited for"


def test_a_time_of_next_year_closes_no_windows() -> None:
    app = Processor("nyc/p", tasks=1, ahead=60)
    out, late = app.output("nyc/out", value=json), app.output("nyc/late")
    windows = app.windows("w", 10, value=json, late=late)

    @app.on(app.input("nyc/in"))
    def count(event: Any) -> None:
        for window in windows.of(event):
            window.value = (window.value or 0) + 1

    @windows.on_close
    def closed(window: Any) -> None:
        out.write(window.value, key=window.key)

    driver = Driver(app)
    driver.send("nyc/in", b"v", key="k", timestamp=START_MS + 365 * 86_400_000)
    for at in range(50):
        driver.send("nyc/in", b"v", key="k", timestamp=START_MS + 1000 * at)
    assert [event.timestamp for event in driver.outputs("nyc/late")] == [
        START_MS + 365 * 86_400_000
    ]
    assert [event.value for event in driver.outputs("nyc/out")] == [10] * 4
    driver.send("nyc/in", b"v", key="k", timestamp=START_MS + 60_000)
    assert len(driver.outputs("nyc/late")) == 1, "just not too far ahead"
    for wrong in (-1, 1e10):
        with pytest.raises(InvalidArgument, match="ahead"):
            Processor("nyc/p", ahead=wrong)


def test_no_lag_is_left_once_all_input_is_read(place: Place) -> None:
    """Tasks without events move, too, within a second or two."""
    app = Processor("nyc/p", tasks=16, commit_interval=0)
    app.on(app.input("nyc/in"))(lambda event: None)
    with closing(place.worker(app)) as worker:
        place.write(b"a")
        while worker.metrics.total("processor_events_in") < 1:
            worker.step()
        began = place.clock.now
        while place.client.lag(place.client.processor("nyc/p"))[0].most.events:
            worker.step()
            assert place.clock.now < began + 3
        commits = worker.metrics.total("processor_commits")
        while place.clock.now < began + 30:
            worker.step()
        assert worker.metrics.total("processor_commits") <= commits + 1, (
            "an idle one writes nothing"
        )


def test_timers_that_take_long_come_in_several_commits(place: Place) -> None:
    """Those that are left fire before any event."""
    app = Processor("nyc/p", tasks=1, commit_interval=0)
    out = app.output("nyc/out")

    @app.timer("end")
    def end(key: bytes, due: int) -> None:
        place.clock.sleep(1.0)
        out.write(b"", key=key)

    @app.on(app.input("nyc/in"))
    def handle(event: Any) -> None:
        if event.timestamp > 1000:
            out.write(b"", key=b"event")
        else:
            end.set(event.key, at=event.timestamp + 1)

    place.write(*keys(20), timestamp=100)
    place.write(b"x", timestamp=2000)
    place.write(b"y", timestamp=2001)
    with closing(place.worker(app)) as worker:
        while len(place.written()) < 22:
            worker.step()
    assert place.written() == [b"event", *keys(20), b"event"]
    assert len(place.commits("nyc/out")) >= 4
