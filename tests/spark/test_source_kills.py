"""A streaming query whose processes are killed, with SIGKILL: each event once in its output, none lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

import anabranch
from tests.spark.plain_reader import values
from tests.spark.source_world import World

pytestmark = [pytest.mark.broker, pytest.mark.slow(40), pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SOON_S = 90.0

Row = tuple[str, int, int, str]


def command(process: psutil.Process) -> list[str]:
    """Its command; empty if it has ended, as Spark's idle workers do at any moment."""
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.NoSuchProcess:
        return []


def children(process: psutil.Process) -> list[psutil.Process]:
    """Its processes; none if it has ended."""
    try:
        return list(process.children())
    except psutil.NoSuchProcess:
        return []


def kill_all(processes: list[psutil.Process]) -> None:
    """SIGKILL of those that are still there."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


@dataclass
class Query:
    """The query's driver in a process of its own, and its output so far."""

    bootstrap: str
    streams: str
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    batches: dict[int, list[Row]] = field(default_factory=dict)

    def start(self) -> None:
        (self.folder / "out").mkdir(exist_ok=True)
        (self.folder / "pids").unlink(missing_ok=True)
        settings = {
            "bootstrap": self.bootstrap,
            "streams": self.streams,
            "folder": str(self.folder),
        }
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.source_query", json.dumps(settings)],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_for(self, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + SOON_S
        while not holds():
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() > until:
                raise AssertionError((self.folder / "log").read_text()[-4000:])
            self.look()
            time.sleep(0.05)

    def look(self) -> None:
        """Read the output. A micro-batch that comes again has the same events."""
        for path in [path for path in (self.folder / "out").iterdir() if not path.suffix]:
            number = int(path.name.partition("-")[0])
            rows = sorted((s, p, o, v) for s, p, o, v in json.loads(path.read_text()))
            assert self.batches.setdefault(number, rows) == rows

    @property
    def rows(self) -> list[Row]:
        return sorted(row for batch in self.batches.values() for row in batch)

    def went_on(self) -> None:
        """Until there are more micro-batches, also than the one that is in hand."""
        seen = len(self.batches)
        self.wait_for(lambda: len(self.batches) >= seen + 2)

    def pids(self) -> tuple[int, int]:
        """Driver and JVM, once they are there."""
        self.wait_for((self.folder / "pids").exists)
        driver, jvm = json.loads((self.folder / "pids").read_text())
        return driver, jvm

    def workers(self) -> tuple[psutil.Process, list[psutil.Process]]:
        """The planner, which lives as long as the query, and the tasks' workers."""
        _, jvm = self.pids()
        commands = [(p, command(p)[-2:]) for p in psutil.Process(jvm).children()]
        (planner,) = (p for p, said in commands if said and said[-1].endswith("source_runner"))
        daemons = [p for p, said in commands if said == ["pyspark.daemon", "pyspark.worker"]]
        return planner, [worker for daemon in daemons for worker in children(daemon)]

    def kill(self) -> None:
        """SIGKILL of all, the JVM first."""
        if self.process is None:
            return
        if (self.folder / "pids").exists():
            _, jvm = json.loads((self.folder / "pids").read_text())
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(jvm)
                kill_all([process, *process.children(recursive=True)])
        self.process.kill()
        self.process.wait(SOON_S)
        self.process = None


class Writing:
    """Commits to two streams, one of which is scaled, in a thread."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        world = self.world
        while not self._stopping.is_set():
            world.commit(25, others=5)
            if len(world.results) % 20 == 10:
                segments = 3 + len(world.results) // 20 % 2
                world.client.scale(world.events, segments=segments)
            self._stopping.wait(0.4)

    def stop(self) -> int:
        """Returns how many events there are."""
        self._stopping.set()
        self._thread.join()
        return sum(result.counts.committed for result in self.world.results)


@pytest.fixture
def writing(client: anabranch.Client, bootstrap: str, unique: str) -> Iterator[Writing]:
    world = World(bootstrap, client, f"kills{unique}")
    client.create_stream(world.events, segments=2)
    client.create_stream(world.other)
    writing = Writing(world)
    yield writing
    writing.stop()


def test_kills(writing: Writing, tmp_path: Path, bootstrap: str) -> None:
    world = writing.world
    query = Query(bootstrap, f"{world.events},{world.other}", tmp_path)
    try:
        query.start()
        query.went_on()
        planner, workers = query.workers()
        assert workers
        for worker in workers:  # another attempt is made of its task, if it has one
            kill_all([worker])
            query.went_on()
        assert planner.is_running()
        planner.kill()  # with it the query fails
        query.went_on()
        assert query.workers()[0] != planner
        _, jvm = query.pids()
        os.kill(jvm, signal.SIGKILL)
        query.kill()
        query.start()
        query.went_on()
        count = writing.stop()
        query.wait_for(lambda: len(query.rows) >= count)
    finally:
        query.kill()
    query.look()
    places = [(stream, partition, offset) for stream, partition, offset, _ in query.rows]
    assert len(set(places)) == len(places) == count
    for stream in (world.events, world.other):
        found = sorted(value for name, _, _, value in query.rows if name == stream)
        assert found == [value.decode() for value in values(bootstrap, stream)]
