"""`EmbeddedBroker`: one Apache Kafka broker, in KRaft mode, for tests and for development."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from anabranch.infra.errors import (
    BrokerDied,
    BrokerNotRunning,
    FolderMismatch,
    PortTaken,
    StartDeadlinePassed,
)
from anabranch.infra.fetch import ensure_broker
from anabranch.infra.java import JavaRuntime, find_java
from anabranch.infra.lock import KAFKA_VERSION
from anabranch.infra.ports import HOST, free_port, is_free
from anabranch.infra.process import SupervisedProcess
from anabranch.infra.ready import is_ready
from anabranch.infra.settings import (
    check_extra,
    jvm_options,
    properties_text,
    server_properties,
)

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
_POLL_S = 0.03
_PORT_RACES = 3
_TAIL_LINES = 25
_TAIL_BYTES = 64 * 1024
_ADDRESS_IN_USE = "Address already in use"


class EmbeddedBroker:
    """One broker with its data folder, as a context manager.

    It listens on the loopback interface only, without authentication. It ends with the process that
    started it, however that ends. Restarting keeps data and port.

    >>> with EmbeddedBroker() as broker:
    ...     connect(broker.bootstrap)
    """

    def __init__(
        self,
        folder: Path | str | None = None,
        *,
        port: int = 0,
        transaction_version: int = 2,
        properties: Mapping[str, str] | None = None,
        heap_mb: int = 512,
        quick_start: bool = False,
        java_options: Sequence[str] = (),
        log: Path | str | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Nothing is started yet.

        Args:
            folder: kept, and used again if a broker had it before; None: a temporary one, removed
                at `stop` (and when the owner dies).
            port: where to listen; 0: any free one.
            transaction_version: feature level given when the folder is first formatted: 0 and 1 are
                the older protocols, 2 is KIP-890's second part.
            properties: server properties that replace the defaults of `anabranch.infra.settings`.
            heap_mb: most megabytes of Java heap.
            quick_start: start sooner, at the price of throughput.
            java_options: further options of the JVM, after our own.
            log: where the broker's output is appended; ``broker.log`` in the folder by default.
            start_timeout_s: seconds until a start is given up.

        Raises:
            ValueError: an argument out of its range, or a property not for the caller to set.
        """
        if not 0 <= transaction_version <= 2:
            raise ValueError(f"transaction_version must be 0, 1 or 2, not {transaction_version}")
        if not 0 <= port < 65536:
            raise ValueError(f"port must be 0 to 65535, not {port}")
        if heap_mb < 128:
            raise ValueError(f"heap_mb must be at least 128, not {heap_mb}")
        self._extra = {name: str(value) for name, value in (properties or {}).items()}
        check_extra(self._extra)
        self._given_folder = Path(folder).absolute() if folder is not None else None
        self._given_log = Path(log).absolute() if log is not None else None
        self._folder: Path | None = self._given_folder
        self._given_port = port
        self._port = port
        self._transaction_version = transaction_version
        self._heap_mb = heap_mb
        self._quick_start = quick_start
        self._java_options = list(java_options)
        self._start_timeout_s = start_timeout_s
        self._process: SupervisedProcess | None = None

    def __enter__(self) -> Self:
        """Starts the broker."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops the broker."""
        self.stop()

    def __repr__(self) -> str:
        state = f"pid {self._process.pid}" if self._process else "stopped"
        return f"<EmbeddedBroker {HOST}:{self._port} {state} folder {self._folder}>"

    # -- what it is ------------------------------------------------------------------------------

    @property
    def bootstrap(self) -> str:
        """``host:port`` for clients. Stays the same over restarts."""
        return f"{HOST}:{self.port}"

    @property
    def port(self) -> int:
        """The port; with ``port=0`` known from the first start on."""
        if self._port == 0:
            raise BrokerNotRunning("the broker was never started: it has no port yet")
        return self._port

    @property
    def pid(self) -> int:
        """The process id of the broker's JVM."""
        return self._running().pid

    @property
    def folder(self) -> Path:
        """Holds ``data``, ``server.properties``, ``broker.json`` and, if not elsewhere, the log."""
        if self._folder is None:
            raise BrokerNotRunning("the broker has no temporary folder before its start")
        return self._folder

    @property
    def log(self) -> Path:
        """The file that the broker's output goes to."""
        return self._given_log or self.folder / "broker.log"

    @property
    def transaction_version(self) -> int:
        """The feature level ``transaction.version`` that the folder was formatted with."""
        return self._transaction_version

    @property
    def running(self) -> bool:
        """Whether the broker's process is there (a paused one is)."""
        return self._process is not None and self._process.poll() is None

    def log_tail(self, lines: int = _TAIL_LINES) -> list[str]:
        """The last lines of the log."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        return text.splitlines()[-lines:]

    # -- what it does ----------------------------------------------------------------------------

    def start(self) -> None:
        """Fetches what is missing, formats a new folder, starts the broker, waits until it serves.

        Does nothing if it runs already.

        Raises:
            NoJava, DownloadFailed, HashMismatch: see `find_java` and `ensure_broker`.
            PortTaken: the given port is in use.
            BrokerDied: it (or formatting) ended by itself; with the last lines of its log.
            StartDeadlinePassed: it did not serve in time, and was stopped.
            FolderMismatch: the folder was formatted with another ``transaction_version``.
        """
        if self.running:
            return
        self._drop_process()
        deadline = time.monotonic() + self._start_timeout_s
        java = find_java()
        class_path = ensure_broker()
        deadline = max(deadline, time.monotonic() + self._start_timeout_s)
        if self._port and not is_free(self._port):
            raise PortTaken(self._port)
        made_folder = self._make_folder()
        try:
            for races_left in reversed(range(_PORT_RACES)):
                if self._launch(java, class_path, deadline, may_lose_race=races_left > 0):
                    return
        except BaseException:
            self._drop_process()
            if made_folder:
                self._remove_folder()
            raise

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Shuts the broker down, killing it after ``timeout_s``; removes a temporary folder.

        Does nothing if it does not run, or in a child that its owner forked.
        """
        if self._process is not None and self._process.foreign:
            return
        self._halt(timeout_s)
        if self._given_folder is None:
            self._remove_folder()

    def kill(self) -> None:
        """Ends the broker by SIGKILL; returns when it is gone. The folder stays, for `start`."""
        process = self._running()
        process.kill()
        process.wait(STOP_TIMEOUT_S)
        self._drop_process()

    def restart(self, *, hard: bool = False) -> None:
        """Stops (``hard``: kills) and starts again: same folder, same port, another process id."""
        if hard:
            self.kill()
        else:
            self._running()
            self._halt(STOP_TIMEOUT_S)
        self.start()

    def pause(self) -> None:
        """Freezes the broker (SIGSTOP): connections stay open and nothing answers."""
        self._running().pause()

    def resume(self) -> None:
        """Lets a paused broker go on (SIGCONT)."""
        self._running().resume()

    # -- inside ----------------------------------------------------------------------------------

    def _running(self) -> SupervisedProcess:
        if self._process is None or self._process.poll() is not None:
            raise BrokerNotRunning("the broker does not run", log=self._log_if_any())
        return self._process

    def _log_if_any(self) -> Path | None:
        return self.log if self._folder is not None and self.log.exists() else None

    def _launch(
        self, java: JavaRuntime, class_path: list[Path], deadline: float, *, may_lose_race: bool
    ) -> bool:
        """One try to start; False if somebody took a port of our own choice in the meantime."""
        folder = self.folder
        port = self._port or free_port()
        controller_port = free_port(avoid=frozenset({port}))
        properties = server_properties(
            data=folder / "data", port=port, controller_port=controller_port, extra=self._extra
        )
        config = folder / "server.properties"
        config.write_text(properties_text(properties), encoding="utf-8")
        environment = dict(os.environ) | {"CLASSPATH": os.pathsep.join(map(str, class_path))}
        options = jvm_options(heap_mb=self._heap_mb, quick_start=self._quick_start, archive=None)
        command = [str(java.path), *options, *self._java_options]
        self._format(command, environment, config)
        log_start = self._mark_log(
            f"starting Kafka {KAFKA_VERSION} on Java {java.major}, port {port}"
        )
        process = SupervisedProcess.start(
            [*command, "kafka.Kafka", str(config)],
            log=self.log,
            environment=environment,
            remove_when_orphaned=folder if self._given_folder is None else None,
        )
        self._process = process
        while not is_ready(HOST, port):
            if process.poll() is not None:
                self._drop_process()
                if _ADDRESS_IN_USE in self._log_since(log_start):
                    if self._port and not is_free(self._port):
                        raise PortTaken(self._port)
                    if may_lose_race:
                        return False
                raise BrokerDied(
                    f"the broker ended while starting, with exit code {process.returncode}",
                    log=self.log,
                    log_tail=self.log_tail(),
                )
            if time.monotonic() > deadline:
                tail = self.log_tail()
                process.kill()
                self._drop_process()
                raise StartDeadlinePassed(
                    f"the broker did not serve within {self._start_timeout_s:g} s",
                    log=self.log,
                    log_tail=tail,
                )
            time.sleep(_POLL_S)
        self._port = port
        return True

    def _format(self, command: list[str], environment: dict[str, str], config: Path) -> None:
        """Formats the data folder if it is new; else checks that it is what was asked for."""
        facts_path = self.folder / "broker.json"
        if (self.folder / "data" / "meta.properties").exists():
            with suppress(FileNotFoundError):
                facts = json.loads(facts_path.read_text(encoding="utf-8"))
                if facts["transaction_version"] != self._transaction_version:
                    raise FolderMismatch(
                        f"{self.folder} was formatted with transaction.version="
                        f"{facts['transaction_version']}, not {self._transaction_version}: "
                        "ask for that, or give another folder"
                    )
            return
        facts = {"kafka_version": KAFKA_VERSION, "transaction_version": self._transaction_version}
        facts_path.write_text(json.dumps(facts) + "\n", encoding="utf-8")
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        with self.log.open("ab") as output:
            done = subprocess.run(
                [
                    *(*command, "-XX:TieredStopAtLevel=1", "kafka.tools.StorageTool", "format"),
                    *("--config", str(config), "--cluster-id", f"A{cluster_id[1:]}"),
                    *("--feature", f"transaction.version={self._transaction_version}"),
                ],
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=self._start_timeout_s,
                check=False,
            )
        if done.returncode != 0:
            raise BrokerDied(
                f"formatting {self.folder} failed with exit code {done.returncode}",
                log=self.log,
                log_tail=self.log_tail(),
            )

    def _make_folder(self) -> bool:
        """Makes the folder if there is none; whether it made a temporary one."""
        made = self._folder is None
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="anabranch-broker-"))
        self._folder.mkdir(parents=True, exist_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        return made

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None

    def _halt(self, timeout_s: float) -> None:
        if self._process is not None:
            # A paused process takes no SIGTERM until it goes on.
            self._process.terminate()
            self._process.resume()
            if self._process.wait(timeout_s) is None:
                self._process.kill()
        self._drop_process()

    def _drop_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _mark_log(self, text: str) -> int:
        """Appends a line of our own to the log; the log's size after it."""
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} anabranch: {text}\n")
            return file.tell()

    def _log_since(self, position: int) -> str:
        with self.log.open("rb") as file:
            file.seek(position)
            return file.read().decode(errors="replace")
