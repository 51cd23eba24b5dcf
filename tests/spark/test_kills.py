"""Tasks, planners and drivers that are killed, with SIGKILL: what is read and what is written has one effect.

One life of a driver (`tests.spark.killed_driver`) takes all of it: a query that reads two streams, of which
workers and the planner are killed; a batch job whose task attempts die at every point; and three queries
whose micro-batches are before, in and after their commit when the driver and its JVM are killed. The session of
the other tests continues from their checkpoints. The judge is a plain read_committed consumer.

``ANABRANCH_SPARK_LIVES=3`` kills three drivers, one after the other.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import anabranch
from anabranch.errors import RetryError
from tests.plain_reader import values
from tests.spark.disturbed import COMMITS, LIVES, TASKS
from tests.spark.killed_driver import ROWS, SUFFIX, start_reading, start_sink
from tests.spark.killed_life import SOON_S, Life, kill_all
from tests.spark.sink_place import Place, place_in, put_file, texts
from tests.spark.source_world import World

pytestmark = [pytest.mark.broker, pytest.mark.soak]

LINES = 50  # of a file, which is a micro-batch


class Writing:
    """Commits to two streams, one of which is scaled, in a thread. What ends it is raised by `stop`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        try:
            while not self._stopping.is_set():
                with suppress(RetryError):  # a broker that stalls; nothing is changed
                    self._one()
                self._stopping.wait(0.4)
        except BaseException as error:  # noqa: BLE001 - raised again below
            self._error = error

    def _one(self) -> None:
        world = self.world
        world.commit(25, others=5)
        if len(world.results) % 20 == 10:
            segments = 3 + len(world.results) // 20 % 2
            world.client.scale(world.events, segments=segments)

    def stop(self) -> int:
        """Returns how many events there are."""
        self._stopping.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return sum(result.counts.committed for result in self.world.results)


@pytest.fixture
def writing(own_clients: None, bootstrap: str, unique: str) -> Iterator[Writing]:
    with anabranch.connect(bootstrap, timeout=SOON_S) as client:
        world = World(bootstrap, client, f"kills{unique}")
        client.create_stream(world.events, segments=2)
        client.create_stream(world.other)
        writing = Writing(world)
        yield writing
        writing.stop()


@pytest.fixture
def batch(client: anabranch.Client, bootstrap: str, unique: str) -> Place:
    """The stream of the batch job."""
    return place_in(bootstrap, client, f"killed{unique}", "batch")


@pytest.fixture
def sinks(batch: Place, tmp_path: Path) -> dict[str, Place]:
    """The streams of the queries; the files that they read are there."""
    found = {}
    for name in COMMITS:
        found[name] = place_in(batch.bootstrap, batch.client, batch.scope, name)
        (tmp_path / name).mkdir()
        for number in range(LIVES + 2):
            put_file(tmp_path / name, number, LINES, 1000 * number)
    return found


def lines(*files: int) -> list[bytes]:
    """The rows of these files."""
    return sorted(line for number in files for line in texts(LINES, 1000 * number))


@pytest.mark.timeout(300 + 600 * LIVES)
def test_whatever_is_killed(
    spark: SparkSession, writing: Writing, batch: Place, sinks: dict[str, Place], tmp_path: Path
) -> None:
    world = writing.world
    settings = {
        "bootstrap": batch.bootstrap,
        "streams": f"{world.events},{world.other}",
        "sinks": {name: place.stream for name, place in sinks.items()},
    }
    life = Life(settings, tmp_path)
    after = list(range(LIVES + 2))  # the files that the last of the queries has had
    try:
        for number in range(1, LIVES + 1):
            life.start(batch.stream if number == 1 else None)
            kill_while_reading(life)
            life.go()
            life.dies()
            if number == 1:
                a_batch_job_has_one_effect(batch, tmp_path)
            assert (tmp_path / f"attempt-{number}").exists()
            committed_or_not(sinks, number)
            # What was committed comes again, with other rows.
            put_file(tmp_path / "after", number, 5 * LINES, 90_000 + 1000 * number)
    finally:
        life.kill()

    reading = start_reading(spark, settings | {"folder": str(tmp_path)})
    queries = [
        start_sink(
            spark,
            "anabranch",
            tmp_path / name,
            {"bootstrap": place.bootstrap, "stream": place.stream},
        )
        for name, place in sinks.items()
    ]
    try:
        for query in queries:
            assert query.awaitTermination(int(SOON_S))
            assert query.exception() is None
        for name, place in sinks.items():
            assert place.values() == lines(*after), name
        # What the dead attempt has written; that of "before" goes stale, which has a test of its own.
        sinks["after"].nothing_staged()
        count = writing.stop()
        life.wait_until(lambda: len(life.rows) >= count)
    finally:
        for query in (reading, *queries):
            query.stop()
    life.look()
    each_event_was_read_once(life, world, count)
    the_zombie_was_told(batch, tmp_path)


def kill_while_reading(life: Life) -> None:
    """Workers of tasks, one after the other, and the planner."""
    life.went_on()
    planner, workers = life.workers()
    assert workers
    for worker in workers:  # another attempt is made of its task, if it has one
        kill_all([worker])
        life.went_on()
    assert planner.is_running()
    planner.kill()  # with it the query fails, and is started again
    life.went_on()
    assert life.workers()[0] != planner


def a_batch_job_has_one_effect(batch: Place, folder: Path) -> None:
    assert (folder / "batch-done").exists()
    happened = {path.name for path in folder.glob("task-*")}
    assert happened == {f"task-{accident}" for accident in TASKS.values()}
    assert batch.values() == rows_of_the_job()


def rows_of_the_job() -> list[bytes]:
    return sorted(value + SUFFIX.encode() for value in texts(ROWS))


def committed_or_not(sinks: dict[str, Place], number: int) -> None:
    """When the driver is dead, killed in this micro-batch."""
    whole = lines(*range(number + 1))
    assert sinks["before"].values() == lines(*range(number))
    assert sinks["after"].values() == whole
    # On its way: it arrives or does not.
    assert sinks["during"].values() in (lines(*range(number)), whole)


def each_event_was_read_once(life: Life, world: World, count: int) -> None:
    places = [(stream, partition, offset) for stream, partition, offset, _ in life.rows]
    assert len(set(places)) == len(places) == count
    for stream in (world.events, world.other):
        found = sorted(value for name, _, _, value in life.rows if name == stream)
        assert found == [value.decode() for value in values(world.bootstrap, stream)]


def the_zombie_was_told(batch: Place, folder: Path) -> None:
    """And what it has written after the commit is nowhere."""
    assert (folder / "zombie-writes").exists()
    zombie = json.loads((folder / "zombie.json").read_text())
    assert zombie["end"] == "AlreadyCommitted"
    assert zombie["written"] > 0
    assert batch.values() == rows_of_the_job()
    batch.nothing_staged()
