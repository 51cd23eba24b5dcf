"""Controllers as child processes, alone or with a broker: for `dev`, the examples and users' tests."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import anabranch
from anabranch.cli.controller import arguments_of
from anabranch.cli.errors import ChildFailed, ExitCode
from anabranch.extras import need
from anabranch.infra.process import SupervisedProcess, log_tail
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL

if TYPE_CHECKING:
    from anabranch.controller.config import ControllerOptions
    from anabranch.infra.broker import EmbeddedBroker

STOP_TIMEOUT_S = 10.0
SESSION_TIMEOUT_S = 3.0
# One that fails ends at once. One that compiles its code takes half a minute, and minutes on a busy machine.
_LEAD_TIMEOUT_S = 300.0
_TAIL_LINES = 15
_KERNELS = Path(anabranch.__file__).parent / "batches" / "kernels"
_SETTINGS = (
    "ANABRANCH_CONFIG",
    "ANABRANCH_KAFKA_FILE",
    "ANABRANCH_LOG_FORMAT",
    "ANABRANCH_CONTROLLER__",
)


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child process that imports this anabranch from any folder."""
    environment = dict(os.environ)
    here = str(Path(anabranch.__file__).resolve().parents[1])
    others = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]
    paths = [here, *(str(Path(p).absolute()) for p in others)]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    environment["PYTHONUNBUFFERED"] = "1"
    return environment | dict(extra or {})


class ControllerProcess:
    """A controller process, which can be killed and started again with the same name, folder and options."""

    def __init__(self, name: str, options: ControllerOptions, log: Path) -> None:
        """``options.status_file`` is needed. The process is not started yet."""
        self.name = name
        self.options = options
        self.log = log
        self._process: SupervisedProcess | None = None

    @classmethod
    def inside(
        cls, folder: Path, name: str, bootstrap: str, session_timeout_s: float, **more: Any
    ) -> Self:
        """A controller with its tables, status file and log in a folder. ``more``: further options."""
        from anabranch.controller.config import ControllerOptions

        options = ControllerOptions(
            bootstrap=bootstrap,
            data_dir=folder / name,
            session_timeout_s=session_timeout_s,
            status_file=folder / f"{name}.status.json",
            **more,
        )
        return cls(name, options, folder / f"{name}.log")

    @property
    def pid(self) -> int:
        """The process id; 0 if it is not running."""
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self, module: str = "anabranch.cli") -> None:
        """Start the process. ``module``: has the command line."""
        self.close()
        if self.options.status_file is not None:
            self.options.status_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", module, *arguments_of(self.options)]
        environment = child_environment()
        for name in list(environment):  # its arguments have all of its options
            if name.startswith(_SETTINGS):
                del environment[name]
        self._process = SupervisedProcess.start(command, log=self.log, environment=environment)

    def leads(self) -> frozenset[int]:
        """The control partitions that this controller leads, by its status file; empty if it is not running."""
        status = self.options.status_file
        if status is None or not self.running:
            return frozenset()
        try:
            document = json.loads(status.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return frozenset()
        if document.get("pid") != self.pid:
            return frozenset()
        return frozenset(document.get("leading", ()))

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)

    def terminate(self) -> None:
        """Send SIGTERM, and don't wait."""
        if self._process is not None:
            self._process.terminate()

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if the process does not end in time."""
        if self._process is not None:
            self._process.terminate()
            if self._process.wait(STOP_TIMEOUT_S) is None:
                self._process.kill()
        self.close()

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL or SIGTERM ended it. Other signals are crashes."""
        code = self._process.poll() if self._process is not None else None
        return code in (-signal.SIGKILL, -signal.SIGTERM, ExitCode.TERMINATED)

    def close(self) -> None:
        """End the process if it is running."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def check(self) -> None:
        """Raises: ChildFailed, with the end of its log, if it has ended by itself."""
        if self._process is None:
            return
        code = self._process.poll()
        if code is not None:
            raise ChildFailed(self.failure(f"{self.name} ended with exit code {code}"))

    def failure(self, what: str) -> str:
        """``what``, and the log's last lines."""
        tail = "\n".join(f"  {line}" for line in log_tail(self.log, _TAIL_LINES))
        return f"{what}\nlast lines of {self.log}:\n{tail}"


def await_leader(
    controllers: list[ControllerProcess], partition: int, timeout_s: float
) -> ControllerProcess:
    """The leader of the control partition, once there is one. Raises: ChildFailed."""
    deadline = time.monotonic() + timeout_s
    while True:
        for controller in controllers:
            if partition in controller.leads():
                return controller
            controller.check()
        if time.monotonic() > deadline:
            raise ChildFailed(
                controllers[0].failure(
                    f"control partition {partition} has no leader after {timeout_s:g} s"
                )
            )
        time.sleep(0.02)


def raise_feature_level(bootstrap: str, prefix: str) -> None:
    """Raise a cluster's feature level to the highest one. Settings in the environment are ignored."""
    from anabranch.client.connect import connect_to

    with connect_to(bootstrap, prefix, ADMIN_LANE, {}, timeout=_LEAD_TIMEOUT_S) as operator:
        operator.feature_level(raise_to=LEVEL)


class LocalCluster(NamedTuple):
    """A broker and controllers on this machine, of which one leads."""

    broker: EmbeddedBroker
    controllers: list[ControllerProcess]


def check_local() -> None:
    """Raise `NotInstalled` without the extra `local`."""
    need("rocksdict", "mode", "numba", "jgo", extra="local")


@contextmanager
def compiling(log: Path) -> Iterator[None]:
    """Compile a part of a controller's code in a process of its own, unless code is kept there already.

    A controller begins with the other part, and then finds this one: on two busy cores the first start took 30 s in
    place of 41 s. If the process fails, the controller compiles both parts.
    """
    if any(_KERNELS.glob("__pycache__/scan.*.nbi")):
        yield
        return
    command = [sys.executable, "-c", "import anabranch.batches.kernels.scan"]
    process = SupervisedProcess.start(command, log=log, environment=child_environment())
    try:
        yield
    finally:
        process.close()


@contextmanager
def local_cluster(folder: Path, controllers: int = 1, **options: Any) -> Iterator[LocalCluster]:
    """A broker and controllers that trust the lane open, until the ``with`` block ends.

    Its feature level is the highest one, as no older release runs here. ``folder``: keeps their data and logs.
    ``options``: of the `EmbeddedBroker`. Raises: NotInstalled, ChildFailed.
    """
    check_local()
    from anabranch.infra.broker import EmbeddedBroker

    with ExitStack() as stack:
        broker = stack.enter_context(EmbeddedBroker(folder / "broker", **options))
        running = [
            ControllerProcess.inside(
                folder, f"controller-{n}", broker.bootstrap, SESSION_TIMEOUT_S, trusts_open=True
            )
            for n in range(1, controllers + 1)
        ]
        for controller in running:
            stack.callback(controller.stop)
            controller.start()
        await_leader(running, 0, _LEAD_TIMEOUT_S)
        raise_feature_level(broker.bootstrap, running[0].options.prefix)
        yield LocalCluster(broker, running)
