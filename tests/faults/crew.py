"""The processes on an embedded cluster: started, replaced, ended."""

from __future__ import annotations

import math
import random
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import anabranch
from anabranch.batches import columns_write, framing
from anabranch.errors import RetryError
from anabranch.infra.cluster import EmbeddedCluster
from checker.recorder import Recorder
from tests.cluster import ControllerProcess
from tests.crash.zygote import Child, Spec, Zygote
from tests.faults.acting import CALL_S, PATIENCE, STREAMS
from tests.faults.groups import Watcher
from tests.faults.helping import Help
from tests.faults.reading import Read
from tests.faults.writing import Write

READY_S = 60.0
CONTROLLER = (
    *("--chunk-bytes", str(16 << 10)),
    # A frozen broker answers nothing: half a minute of patience would be most of a run.
    *("--kafka", "socket.timeout.ms=8000"),
)


@dataclass
class Crew:
    """Two controllers, two writers, two helpers, and the readers that it is given.

    Every wait has a deadline, and fails with what it waited for; what is done is printed with its second.
    """

    zygote: Zygote
    cluster: EmbeddedCluster
    folder: Path
    chance: random.Random
    readers: list[tuple[str, bool]]  # mode, whether in a group
    prefix: str = field(default_factory=lambda: f"f{uuid.uuid4().hex[:6]}")
    controllers: list[ControllerProcess] = field(default_factory=list)
    clients: list[Child] = field(default_factory=list)
    forked: int = 0
    done: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)  # what coordinators had in hand
    scalings: int = 0
    told: int = 0
    troubles: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _gone: list[Child] = field(default_factory=list)
    _watcher: Watcher | None = None
    _began: float = field(default_factory=time.monotonic)
    _finish_by: float = math.inf

    @property
    def scope(self) -> str:
        return f"{self.prefix}-scope"

    @property
    def streams(self) -> list[str]:
        return [f"{self.scope}/{name}" for name in STREAMS]

    def _streams_of(self, mode: str) -> list[str]:
        """Whole transactions are of one stream."""
        return self.streams[:1] if mode == "transactions" else self.streams

    @property
    def history(self) -> Path:
        return self.folder / "history"

    def note(self, what: object) -> None:
        """Printed, with the second: a run that fails shows where it was."""
        print(f"{time.monotonic() - self._began:6.1f} s  {what}", flush=True)

    # -- starting -------------------------------------------------------------------------------------

    def start(self) -> None:
        """All of them, until they work."""
        self._start_controllers()
        until = time.monotonic() + READY_S
        with self.connect() as client:
            for name in STREAMS:
                while True:
                    try:
                        client.create_stream(f"{self.scope}/{name}", 2, timeout=READY_S)
                        break
                    except RetryError:  # only for some seconds a client waits for the first topics
                        if time.monotonic() > until:
                            raise
        for kind in (Write, Help, Write, Help):
            self._fork(
                kind(
                    self.cluster.bootstrap,
                    self.prefix,
                    self._name(kind.__name__.lower()),
                    scope=self.scope,
                    spool=str(self.history),
                    seed=self.chance.randrange(1 << 30),
                )
            )
        for mode, in_group in self.readers:
            self._read(mode, f"{self.prefix}-{mode}" if in_group else None)
        groups = {
            (f"{self.prefix}-{mode}", mode): self._streams_of(mode)
            for mode, grouped in self.readers
            if grouped
        }
        self._watcher = Watcher(
            Recorder(self.history / "watcher.history"), self.cluster.bootstrap, groups
        )
        for child in self.clients:
            child.wait_said("works", READY_S)
        self.note("all work")

    def _start_controllers(self) -> None:
        """Two, and the folder of histories."""
        self.history.mkdir(parents=True)
        # On a fresh tree they are compiled first, for up to a minute: not in the middle of a fault.
        columns_write.warm()
        framing.warm()
        for n in range(2):
            controller = ControllerProcess(
                self.cluster.bootstrap,
                self.folder / f"controller-{n}",
                self.prefix,
                CONTROLLER,
            )
            self.controllers.append(controller.start())

    def connect(self) -> anabranch.Client:
        return anabranch.connect(
            self.cluster.bootstrap, prefix=self.prefix, timeout=CALL_S, config=PATIENCE
        )

    def _name(self, kind: str) -> str:
        self.forked += 1
        return f"{kind}-{self.forked}"

    def _read(self, mode: str, group: str | None) -> None:
        self._fork(
            Read(
                self.cluster.bootstrap,
                self.prefix,
                self._name(mode),
                mode=mode,
                streams=tuple(self._streams_of(mode)),
                group=group,
                spool=str(self.history),
            )
        )

    def _fork(self, spec: Spec) -> Child:
        child = self.zygote.fork(spec)
        self.clients.append(child)
        return child

    def _again(self, child: Child) -> None:
        """Another one of the same kind."""
        self.clients.remove(child)
        self._gone.append(child)
        spec = child.spec
        if isinstance(spec, Read):
            self._read(spec.mode, spec.group)
            return
        assert isinstance(spec, Write | Help)
        kind = type(spec)
        self._fork(
            kind(
                spec.bootstrap,
                spec.prefix,
                self._name(kind.__name__.lower()),
                scope=spec.scope,
                spool=spec.spool,
                seed=self.chance.randrange(1 << 30),
            )
        )

    def work_on(self, commits: int, seconds: float) -> None:
        """Until so many more commits are told, or the time is over: what is struck has something to lose."""
        until = time.monotonic() + seconds
        wanted = self.commits() + commits
        while self.commits() < wanted and time.monotonic() < until:
            time.sleep(0.05)

    def commits(self) -> int:
        """Told by now."""
        return sum(len(child.said("told")) for child in [*self.clients, *self._gone])

    def close(self) -> None:
        """End all processes; whatever was frozen goes on."""
        self._over.set()
        if self._watcher is not None:
            self._watcher.close()
        for child in self.clients:
            child.kill()
        for controller in self.controllers:
            controller.kill()
