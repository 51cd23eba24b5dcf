"""A controller process under test: started, killed, frozen, watched as an operator would; ends with its owner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.topics import rights
from tests.owned import send_signal, start_module
from tests.secured import CLIENT, CONTROLLER, entrance, grant

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 60.0  # a controller allows itself 30 s: its leaders, and leaving the group


@dataclass
class ControllerProcess:
    """`anabranch controller` in a process of its own. ``folder`` is kept across restarts."""

    bootstrap: str
    folder: Path
    prefix: str = "anabranch"
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    module: str = "anabranch.cli"
    trusts_open: bool = True
    process: subprocess.Popen[bytes] | None = None

    @property
    def status_file(self) -> Path:
        return self.folder / "status.json"

    @property
    def log_file(self) -> Path:
        return self.folder / "controller.log"

    def start(self) -> ControllerProcess:
        """Start it; `wait_leading` says when it leads."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.status_file.unlink(missing_ok=True)
        address, options = entrance(self.bootstrap, CONTROLLER)
        grant(self.bootstrap, CONTROLLER, rights.controller_rights(self.prefix))
        for lane in (OPEN_LANE, ADMIN_LANE):
            grant(self.bootstrap, CLIENT, rights.client_rights(self.prefix, lane))
        arguments = ["controller", "--bootstrap", address]
        arguments += ["--trusts-open"] if self.trusts_open else []
        arguments += words(options)
        arguments += ["--data-dir", str(self.folder / "data")]
        arguments += ["--status-file", str(self.status_file), *self.arguments]
        # Older builds know the variable, but not the option --cluster-prefix.
        environment = os.environ | {"ANABRANCH_PREFIX": self.prefix} | self.environment
        with self.log_file.open("ab") as log:
            self.process = start_module(self.module, arguments, output=log, environment=environment)
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def leading(self) -> list[int]:
        """Control partitions that it says it leads."""
        if not self.running:
            return []
        try:
            return list(json.loads(self.status_file.read_text())["leading"])
        except (FileNotFoundError, json.JSONDecodeError):
            return []

    def wait_leading(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Until it leads control partition 0."""
        until = time.monotonic() + deadline_s
        while 0 not in self.leading():
            if not self.running or time.monotonic() > until:
                tail = self.log_file.read_text(errors="replace")[-4000:]
                raise AssertionError(f"the controller does not lead:\n{tail}")
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        send_signal(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, also of a frozen one."""
        if self.running:
            self.signal(signal.SIGKILL)
            assert self.process is not None
            self.process.wait(STOP_DEADLINE_S)

    def ended(self) -> int:
        """Wait for its end. Returns the exit code."""
        assert self.process is not None
        return self.process.wait(STOP_DEADLINE_S)

    def stop(self) -> int:
        """SIGTERM: hands over. Returns the exit code."""
        assert self.process is not None
        if self.running:
            self.signal(signal.SIGTERM)
        return self.process.wait(STOP_DEADLINE_S)

    def __enter__(self) -> ControllerProcess:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


def words(options: Mapping[str, str]) -> tuple[str, ...]:
    """Options on a command line."""
    return tuple(word for name, value in options.items() for word in ("-X", f"{name}={value}"))


@dataclass
class Cluster:
    """A broker with a controller that leads."""

    bootstrap: str
    controller: ControllerProcess
    prefix: str = "anabranch"


def start_cluster(
    bootstrap: str,
    folder: Path | None = None,
    prefix: str = "anabranch",
    arguments: tuple[str, ...] = (),
    *,
    trusts_open: bool = True,
) -> Cluster:
    """Start a controller on a broker and wait until it leads. ``arguments``: more of its command's."""
    place = folder or Path(tempfile.mkdtemp(prefix="anabranch-cluster-"))
    controller = ControllerProcess(
        bootstrap,
        place / "c0",
        prefix,
        arguments,
        trusts_open=trusts_open,
    ).start()
    try:
        controller.wait_leading()
    except BaseException:
        controller.kill()
        raise
    return Cluster(bootstrap, controller, prefix)
