"""Tasks and drivers that are killed, with SIGKILL: each batch has one effect, whole.

The accidents are those of `tests.spark.disturbed`; the judge is a plain read_committed consumer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark.disturbed import FOLDER
from tests.spark.sink_place import Place, place_in, put_file, stream_files, texts
from tests.spark.test_sink import attempt, batch_sink

pytestmark = [pytest.mark.broker, pytest.mark.slow(70)]

ROOT = Path(__file__).parents[2]
LIFE_S = 150.0
PARTITIONS, ROWS = 4, 40_000
TASKS = {"0": "kill", "1": "fail", "2": "zombie"}
COMMITS = {"1": "before", "2": "during", "3": "after"}


def whole(*files: int) -> list[bytes]:
    """The lines of these files, each of which is a micro-batch."""
    return sorted(line for i in files for line in texts(50, 1000 * i))


@pytest.fixture
def batches(place: Place) -> Place:
    """Where the batch job writes to."""
    return place_in(place.bootstrap, place.client, place.scope, "batches")


def live(folder: Path, place: Place, batch: Place | None) -> int:
    """A driver's life; how it ended."""
    settings = {
        "bootstrap": place.bootstrap,
        "stream": place.stream,
        "folder": str(folder),
        "batch": batch and batch.stream,
        "rows": ROWS,
        "partitions": PARTITIONS,
    }
    environment = {FOLDER: str(folder), "PYTHONPATH": str(ROOT)}
    with (folder / "driver.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.sink_driver", json.dumps(settings)],
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            return process.wait(LIFE_S)
        finally:
            # The JVM, too, if this test ends before its time.
            for pid in (process.pid,) if process.poll() is None else ():
                os.killpg(pid, signal.SIGKILL)


@pytest.mark.timeout(400)
def test_killed_tasks_and_drivers(
    spark: SparkSession, place: Place, batches: Place, tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"tasks": TASKS, "commits": COMMITS}))
    for i in range(5):
        put_file(tmp_path, i, 50, 1000 * i)

    # The batch job: one attempt of each of three tasks is lost; then the query's driver, before a commit.
    assert live(tmp_path, place, batches) == -signal.SIGKILL, log_of(tmp_path)
    happened(tmp_path, TASKS, "tasks", 3)
    suffix = b"-" * 100
    assert batches.values() == sorted(value + suffix for value in texts(ROWS))
    happened(tmp_path, COMMITS, "commits", 1)
    assert place.values() == whole(0)

    # While the commit is on its way: it arrives, or does not.
    assert live(tmp_path, place, None) == -signal.SIGKILL, log_of(tmp_path)
    happened(tmp_path, COMMITS, "commits", 2)
    assert place.values() in (whole(0, 1), whole(0, 1, 2))

    # After the commit, before Spark knows.
    assert live(tmp_path, place, None) == -signal.SIGKILL, log_of(tmp_path)
    happened(tmp_path, COMMITS, "commits", 3)
    assert place.values() == whole(0, 1, 2, 3)

    # Its batch comes again, with other rows.
    put_file(tmp_path, 3, 500, 90_000)
    query = stream_files(spark, place, tmp_path)
    assert query.exception() is None
    assert place.values() == whole(0, 1, 2, 3, 4)

    zombie = json.loads(wait_for_file(tmp_path / "zombie.json").read_text())
    assert zombie["end"] == "AlreadyCommitted"
    assert zombie["written"] > 0
    assert batches.values() == sorted(value + suffix for value in texts(ROWS))
    place.nothing_staged()
    batches.nothing_staged()


def happened(folder: Path, plan: Mapping[str, str], kind: str, count: int) -> None:
    """The first ``count`` accidents of the plan happened, and no other."""
    found = sorted(path.name for path in folder.glob(f"{kind}-*"))
    assert found == [f"{kind}-{key}-{plan[key]}" for key in sorted(plan)[:count]], log_of(folder)


def log_of(folder: Path) -> str:
    return (folder / "driver.log").read_text(errors="replace")[-4000:]


def wait_for_file(path: Path) -> Path:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.05)
    return path


def test_a_writer_that_is_left_goes_stale(spark: SparkSession, place: Place) -> None:
    """Neither commit nor abort comes: after the keepalive nothing is staged."""
    sink = batch_sink(place, keepalive="2")
    written = attempt(place, sink, 1000)
    assert place.client.state(written.reservation).state == "OPEN"
    place.nothing_staged()
    info = place.client.state(written.reservation)
    assert info.state == "ABORTED"
    assert place.values() == []
