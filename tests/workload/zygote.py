"""A warm process that forks controllers and clients: one more is there at once, and can really be killed.

`Zygote` is the tests' side. The process itself imports everything once, has no threads, and forks a child
for each request, which runs the function that its spec names. Events of all children and their ends come
back through one pipe, a line of JSON each.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from tests.owned import send_signal

ROOT = Path(__file__).resolve().parents[2]
READY_DEADLINE_S = 300.0  # it compiles code if none is kept
EXIT_DEADLINE_S = 10.0
_PR_SET_PDEATHSIG = 1
# NumPy and pyarrow have threads as soon as they are loaded.
_NO_THREADS = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


@dataclass(frozen=True)
class Spec:
    """The parameters of every child. ``run``: the function that it runs, ``module:name``.

    ``mutant``: the planted bug of `tests.mutants.catalogue` that it has; empty: none.
    """

    bootstrap: str
    prefix: str
    name: str = ""
    mutant: str = ""

    run: ClassVar[str]


@dataclass
class Child:
    """A forked process as the tests see it."""

    spec: Spec
    pid: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    status: int | None = None
    stopped: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def running(self) -> bool:
        """Not ended (a stopped one is running)."""
        return self.status is None

    @property
    def killed(self) -> bool:
        """Ended by SIGKILL."""
        return self.status is not None and os.WIFSIGNALED(self.status)

    @property
    def leading(self) -> bool:
        """By its own word."""
        last = [e["event"] for e in self.events if e["event"] in ("leads", "lost")]
        return self.running and last[-1:] == ["leads"]

    def said(self, event: str) -> list[dict[str, Any]]:
        """Its events of one kind."""
        return [e for e in list(self.events) if e["event"] == event]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it has not ended."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                send_signal(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.signal(signal.SIGKILL)
        self.wait_ended()

    def wait_ended(self, deadline_s: float = EXIT_DEADLINE_S) -> None:
        """Until it has ended."""
        self._wait(lambda: not self.running, "end", deadline_s)

    def wait_leading(self, deadline_s: float = EXIT_DEADLINE_S) -> None:
        """Until it leads."""
        self._wait(lambda: self.leading, "lead", deadline_s)

    def arm(self) -> None:
        """Let its point count from here on."""
        self.signal(signal.SIGUSR1)
        self.wait_said("armed")

    def wait_stopped(self, deadline_s: float = EXIT_DEADLINE_S) -> None:
        """Until it has stopped."""
        self._wait(lambda: self.stopped, "stop", deadline_s)

    def go_on(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def wait_said(self, event: str, deadline_s: float = EXIT_DEADLINE_S) -> None:
        """Until an event of this kind came."""
        self._wait(lambda: bool(self.said(event)), f"say {event!r}", deadline_s)

    def _wait(self, done: Any, what: str, deadline_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(done, deadline_s):
                raise AssertionError(
                    f"{self.spec.name or 'controller'} {self.pid} did not {what} in {deadline_s:g} s: "
                    f"{self.events[-5:]}"
                )

    def take(self, event: dict[str, Any]) -> None:
        """An event came."""
        with self._changed:
            if event["event"] == "forked":
                self.pid = event["pid"]
            elif event["event"] == "ended":
                self.status = event["status"]
            elif event["event"] in ("stopped", "continued"):
                self.stopped = event["event"] == "stopped"
            else:
                self.events.append(event)
            self._changed.notify_all()


class Zygote:
    """Starts the warm process; `fork` gives controllers. Ends with all its children at `close`.

    ``modules``: more that children run; the process imports them, and calls the ``warm_up`` of those that have one.
    ``environment``: what else it has. ``folder``: where it starts.
    """

    def __init__(
        self, *modules: str, environment: Mapping[str, str] = {}, folder: Path = ROOT
    ) -> None:
        self._children: dict[int, Child] = {}
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.workload.zygote", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env=os.environ | _NO_THREADS | dict(environment),
        )
        self._thread = threading.Thread(target=self._read, name="zygote", daemon=True)
        self._thread.start()
        if not self._ready.wait(READY_DEADLINE_S):
            raise AssertionError("the zygote did not start")

    def __enter__(self) -> Zygote:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def fork(self, spec: Spec) -> Child:
        """A new process; returns when it is there."""
        child = Child(spec)
        with self._lock:
            number = len(self._children)
            self._children[number] = child
            assert self._process.stdin is not None
            request = {"number": number, "run": spec.run, "spec": asdict(spec)}
            line = json.dumps(request)
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        with child._changed:
            if not child._changed.wait_for(lambda: child.pid > 0, READY_DEADLINE_S):
                raise AssertionError("the zygote did not fork")
        return child

    def close(self) -> None:
        """Kill all children, end the process."""
        for child in list(self._children.values()):
            child.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(EXIT_DEADLINE_S)
        self._thread.join(EXIT_DEADLINE_S)
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                self._ready.set()
            else:
                self._children[event["number"]].take(event)


# -- the warm process ------------------------------------------------------------------------------------


def say(number: int, event: str, **more: Any) -> None:
    """One line; shorter than what a pipe takes whole, so that children can share it."""
    line = json.dumps({"number": number, "event": event, **more})[:4000]
    os.write(1, line.encode() + b"\n")


def die_with_parent() -> None:
    """SIGKILL this process when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Fork on request until standard input ends."""
    from tests.workload import leader, money, readers, writers  # noqa: F401

    leader.warm_up()
    for module in map(importlib.import_module, sys.argv[1:]):
        getattr(module, "warm_up", lambda: None)()
    if len(os.listdir("/proc/self/task") if sys.platform == "linux" else [0]) > 1:
        raise AssertionError("a process with threads must not fork")
    numbers: dict[int, int] = {}
    ended_read, ended_write = os.pipe()
    os.set_blocking(ended_write, False)
    signal.set_wakeup_fd(ended_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    say(-1, "ready")
    pending = b""
    while True:
        ready, _, _ = select.select([0, ended_read], [], [])
        if ended_read in ready:
            os.read(ended_read, 4096)
            _reap(numbers)
        if 0 not in ready:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(ended_read)
                os.close(ended_write)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                die_with_parent()
                _run_child(request["number"], request["run"], request["spec"])
            numbers[pid] = request["number"]
            say(request["number"], "forked", pid=pid)
    # not reached


def _run_child(number: int, run: str, given: dict[str, Any]) -> None:
    code = 1
    try:
        module, _, name = run.partition(":")
        body = getattr(importlib.import_module(module), name)
        with _planted(given["mutant"]):
            code = body(number, given)
    except BaseException as error:  # noqa: BLE001 - the child ends here, whatever it was
        say(number, "failed", why=f"{type(error).__name__}: {error}", at=time.time())
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _planted(mutant: str) -> contextlib.AbstractContextManager[object]:
    if not mutant:
        return contextlib.nullcontext()
    # It imports the workload, too.
    from tests.mutants.catalogue import planted

    return planted(mutant)


def _reap(numbers: dict[int, int]) -> None:
    while numbers:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if os.WIFSTOPPED(status):
            say(numbers[pid], "stopped")
        elif os.WIFCONTINUED(status):
            say(numbers[pid], "continued")
        else:
            say(numbers.pop(pid), "ended", status=status)


if __name__ == "__main__":
    main()
