"""A driver that will be killed, as its test sees it: its processes, and what it has read so far."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from tests.owned import start_module
from tests.spark.disturbed import FOLDER

ROOT = Path(__file__).parents[2]
SOON_S = 240.0

Row = tuple[str, int, int, str]


def _command(process: psutil.Process) -> list[str]:
    """Its command; empty if it has ended, as Spark's idle workers do at any moment."""
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.NoSuchProcess:
        return []


def _children(process: psutil.Process) -> list[psutil.Process]:
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
class Life:
    """`tests.spark.killed_driver` in a process of its own; ``batches``: what its reading query has read, in all
    its lives."""

    settings: dict[str, Any]
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    batches: dict[int, list[Row]] = field(default_factory=dict)
    _seen: set[Path] = field(default_factory=set)

    def start(self, batch: str | None) -> None:
        """A driver's life; with a batch job, if a stream is given for it."""
        (self.folder / "out").mkdir(exist_ok=True)
        for name in ("pids", "go"):
            (self.folder / name).unlink(missing_ok=True)
        settings = self.settings | {"folder": str(self.folder), "batch": batch}
        with (self.folder / "log").open("ab") as log:
            self.process = start_module(
                "tests.spark.killed_driver",
                [json.dumps(settings)],
                output=log,
                environment=os.environ | {"PYTHONPATH": str(ROOT), FOLDER: str(self.folder)},
            )

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """While the driver runs."""

        def check() -> bool:
            assert self.process is not None
            assert self.process.poll() is None or holds(), self.log
            return holds()

        self.wait_until(check)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + SOON_S
        while not holds():
            assert time.monotonic() < until, self.log
            self.look()
            time.sleep(0.05)

    @property
    def log(self) -> str:
        """The end of what the driver said."""
        return (self.folder / "log").read_text(errors="replace")[-4000:]

    # -- what was read --------------------------------------------------------------------------------

    def look(self) -> None:
        """Read the output. A micro-batch that comes again has the same events."""
        paths = {path for path in (self.folder / "out").iterdir() if not path.suffix}
        for path in paths - self._seen:
            self._seen.add(path)
            number = int(path.name.partition("-")[0])
            rows = sorted((s, p, o, v) for s, p, o, v in json.loads(path.read_text()))
            assert self.batches.setdefault(number, rows) == rows

    @property
    def rows(self) -> list[Row]:
        return sorted(row for batch in self.batches.values() for row in batch)

    def went_on(self) -> None:
        """Until there are more micro-batches, also than the one that is in hand."""
        self.look()  # what the driver before had done is not this one's
        seen = len(self.batches)
        self.wait_for(lambda: len(self.batches) >= seen + 2)

    # -- its processes --------------------------------------------------------------------------------

    def pids(self) -> tuple[int, int]:
        """Driver and JVM, once they are there."""
        self.wait_for((self.folder / "pids").exists)
        driver, jvm = json.loads((self.folder / "pids").read_text())
        return driver, jvm

    def workers(self) -> tuple[psutil.Process, list[psutil.Process]]:
        """The reading query's planner, which lives as long as the query, and the tasks' workers."""
        _, jvm = self.pids()
        commands: list[tuple[psutil.Process, list[str]]] = []
        planners: list[psutil.Process] = []

        def there_is_one() -> bool:  # none while the query starts again
            commands[:] = [(p, _command(p)[-2:]) for p in _children(psutil.Process(jvm))]
            planners[:] = [p for p, said in commands if said and said[-1].endswith("source_runner")]
            return len(planners) == 1

        self.wait_until(there_is_one)
        (planner,) = planners
        daemons = [p for p, said in commands if said == ["pyspark.daemon", "pyspark.worker"]]
        return planner, [worker for daemon in daemons for worker in _children(daemon)]

    def go(self) -> None:
        """It may write now."""
        (self.folder / "go").touch()

    def dies(self) -> None:
        """Wait for the SIGKILL that it has coming, and that of its JVM."""
        assert self.process is not None
        assert self.process.wait(SOON_S) == -signal.SIGKILL, self.log
        _, jvm = json.loads((self.folder / "pids").read_text())
        self.wait_until(lambda: not psutil.pid_exists(jvm) or not _command(psutil.Process(jvm)))

    def kill(self) -> None:
        """SIGKILL of all that is left, the JVM first."""
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
