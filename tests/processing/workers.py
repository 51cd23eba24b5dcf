"""Workers of a trial: processes of `anabranch processor run`, and what becomes of their folders."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path

from tests.owned import send_signal, start_module

END_S = 30.0
# The exit codes of a process that SIGTERM meets before it is a worker.
STARTING = (143, -signal.SIGTERM)


class Failed(AssertionError):
    """A process ended by itself, or something took too long."""


@dataclass
class WorkerProcess:
    """A worker, with a folder that is kept, lost or exchanged. ``arguments``: of the command, besides."""

    folder: Path
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    module: str = "anabranch.cli"
    program: str = "tests.processing.program:app"
    process: subprocess.Popen[bytes] | None = None
    frozen: bool = False
    _logged: int = 0  # bytes of its log before this life

    def start(self, *more: str) -> None:
        """A new process. ``more``: arguments."""
        arguments = ["processor", "run", self.program, *self.arguments, *more]
        arguments += ["--folder", str(self.folder)]
        with self.log_file.open("ab") as log:
            self._logged = log.tell()
            self.process = start_module(
                self.module, arguments, output=log, environment=os.environ | self.environment
            )

    @property
    def log_file(self) -> Path:
        return self.folder.with_suffix(".log")

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """0 without a process."""
        return 0 if self.process is None else self.process.pid

    def tail(self) -> str:
        """What it said last."""
        return self.log_file.read_text(errors="replace")[-6000:]

    def kill(self) -> None:
        """SIGKILL, also of a frozen one."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(END_S)
        self.process = None

    def freeze(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after some seconds."""
        process = self.process
        assert process is not None
        send_signal(process.pid, signal.SIGSTOP)
        self.frozen = True

        def wake() -> None:
            self.frozen = False
            process.send_signal(signal.SIGCONT)

        timer = threading.Timer(seconds, wake)
        timer.daemon = True
        timer.start()

    def end(self) -> None:
        """SIGTERM."""
        assert self.process is not None
        self.process.terminate()
        code = self.process.wait(END_S)
        starting = self.log_file.stat().st_size == self._logged
        if code != 0 and not (starting and code in STARTING):
            raise Failed(f"{self.folder.name}: exit code {code} after SIGTERM:\n{self.tail()}")
        self.process = None

    def check(self) -> None:
        """It has not ended by itself."""
        if self.process is not None and self.process.poll() is not None:
            code = self.process.returncode
            raise Failed(f"{self.folder.name} ended by itself, {code}:\n{self.tail()}")


def kill_one(workers: list[WorkerProcess], chance: random.Random) -> tuple[WorkerProcess, str]:
    """Kill a worker, and let its folder be kept, wiped, an older one, or another worker's. Which, and what."""
    worker = chance.choice([one for one in workers if not one.frozen])
    what = chance.choice(["kept"] * 3 + ["wiped", "older", "exchanged"])
    other = workers[worker is workers[0]]
    if what == "exchanged" and other.frozen:
        what = "kept"
    worker.kill()
    older = worker.folder.with_suffix(".older")
    if what == "wiped":
        shutil.rmtree(worker.folder, ignore_errors=True)
    elif what == "exchanged":
        other.kill()
        _exchange(worker.folder, other.folder)
        other.start()
    elif what == "older" and older.exists():
        _exchange(worker.folder, older)
    elif worker.folder.exists() and not older.exists():
        shutil.copytree(worker.folder, older)
    return worker, what


def _exchange(one: Path, other: Path) -> None:
    middle = one.with_suffix(".middle")
    for source, target in ((one, middle), (other, one), (middle, other)):
        if source.exists():
            source.rename(target)
