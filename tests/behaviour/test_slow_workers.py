"""Workers of a group on a broker: slow handlers, and restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.processing.app import Processor
from anabranch.processing.worker import Worker
from tests.behaviour.test_processors import Place, Running
from tests.cluster import Cluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.long]

POLL_MS = 6_000  # `max.poll.interval.ms`, the least that librdkafka takes with a session of 6 s
EVENTS = 50
EACH_S = 0.2


@pytest.fixture
def place(client: anabranch.Client, cluster: Cluster) -> Place:
    return Place(client, cluster.bootstrap)


@pytest.fixture
def start(
    place: Place, cluster: Cluster, tmp_path: Path
) -> Iterator[Callable[[Processor, str], Running]]:
    """Starts a worker with a folder, in the group."""
    with ExitStack() as stack:

        def begin(app: Processor, folder: str) -> Running:
            more: dict[str, Any] = {"config": {"max.poll.interval.ms": POLL_MS}}
            client = stack.enter_context(anabranch.connect(cluster.bootstrap, **more))
            return Running(Worker(app, client, tmp_path / folder))

        yield begin


def test_slow_handlers_never_make_two_workers_exchange_tasks(
    place: Place, start: Callable[[Processor, str], Running]
) -> None:
    """One transaction, kept whole, is handled for longer than the group's patience; a second worker joins."""
    app = Processor(f"{place.scope}/slow", tasks=4, commit_interval=0.1, whole=True)
    out = app.output(place.output)

    @app.on(app.input(place.inputs[0]))
    def handle(event: Any) -> None:
        time.sleep(EACH_S)
        out.write(event.value, key=event.key)

    with place.client.begin(place.scope) as txn:
        for number in range(EVENTS):
            txn.write(place.inputs[0], b"%d" % number, key=b"%d" % number)
        txn.commit()
    running = [start(app, "a")]
    time.sleep(3.0)
    running.append(start(app, "b"))
    wait_until(lambda: len(place.committed(place.output)) >= EVENTS, 60.0)
    wait_until(lambda: all(one.worker.tasks for one in running), 30.0)
    taken_again = sum(one.worker.metrics.total("processor_taken_again") for one in running)
    for one in running:
        one.end()
        assert one.error is None
    assert sorted(int(one.value or b"") for one in place.committed(place.output)) == [
        *range(EVENTS)
    ]
    assert taken_again <= 3


def test_tasks_stay_where_their_rows_are(
    place: Place, start: Callable[[Processor, str], Running]
) -> None:
    app = place.app()

    def tasks(one: Running) -> set[int]:
        return set(one.worker.tasks)

    def has_all(one: Running) -> bool:
        return len(tasks(one)) == 4

    running = {name: start(app, name) for name in "ab"}
    wait_until(lambda: all(len(tasks(one)) == 2 for one in running.values()), 30.0)
    place.write(1, 20)
    place.wait()
    before = {name: tasks(one) for name, one in running.items()}
    for name in "abab":
        running.pop(name).end()
        (other,) = running.values()
        wait_until(partial(has_all, other), 30.0)
        running[name] = start(app, name)
        wait_until(lambda: all(len(tasks(one)) == 2 for one in running.values()), 30.0)
        assert {name: tasks(one) for name, one in running.items()} == before
    restored = running["a"].worker.metrics.total("processor_restored_rows")
    for one in running.values():
        one.end()
        assert one.error is None
    assert restored == 0
