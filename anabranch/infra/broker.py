"""`EmbeddedBroker`: one Apache Kafka broker, in KRaft mode, for tests and development."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from anabranch.infra.errors import (
    BrokerDied,
    BrokerNotRunning,
    FolderUnusable,
    PortTaken,
    StartDeadlinePassed,
)
from anabranch.infra.fetch import broker_lock, ensure_broker
from anabranch.infra.java import JavaRuntime, find_archive, find_java
from anabranch.infra.process import SupervisedProcess, log_since, log_tail, mark_log
from anabranch.infra.settings import (
    Membership,
    SecureListener,
    check_extra,
    jvm_options,
    properties_text,
    server_properties,
)
from anabranch.infra.sockets import (
    HOST,
    free_port,
    free_ports,
    is_free,
    is_ready,
    make_coordinators,
)
from anabranch.infra.storage import DATA, ensure_formatted, hold

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.03
_PORT_TRIES = 3
_ADDRESS_IN_USE = "Address already in use"


class EmbeddedBroker:
    """One broker with its data folder, as a context manager.

    The broker listens on the loopback interface only, without authentication except with ``secure``. When its owner
    (the process that started it) ends in any way, the broker ends, too. Restarts keep data and ports.

    >>> with EmbeddedBroker() as broker:
    ...     connect(broker.bootstrap)
    """

    def __init__(
        self,
        folder: Path | str | None = None,
        *,
        port: int = 0,
        transaction_version: int | None = None,
        properties: Mapping[str, str] | None = None,
        heap_mb: int = 512,
        quick_start: bool = False,
        java_options: Sequence[str] = (),
        log: Path | str | None = None,
        proxy: str | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        membership: Membership | None = None,
        secure: SecureListener | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            folder: is kept, and a later broker may use it; None: a temporary one, removed at `stop` and when the
                owner dies.
            port: where to listen; 0: any free port.
            transaction_version: the feature level for formatting a new folder: 0 and 1 are the older protocols,
                2 is KIP-890's second part; None: the highest that the broker knows.
            properties: server properties that replace the defaults of `anabranch.infra.settings`.
            heap_mb: the most megabytes of Java heap.
            quick_start: start sooner, with less throughput.
            java_options: further options of the JVM, after our own.
            log: the file to which the broker's output is appended; None: ``broker.log`` in the folder.
            proxy: ``host:port`` of a proxy. The broker gets a listener for it at `proxied_port`, which advertises
                the proxy's address.
            start_timeout_s: seconds after which a start fails.
            membership: its place in an `EmbeddedCluster`, where it serves once most nodes run; None: it is alone.
            secure: a second listener, at `secure_bootstrap`, with authentication.

        Raises:
            ValueError: an argument out of its range, or a property that the caller may not set.
            FolderUnusable: the folder's path has a comma.
        """
        if transaction_version is None:
            transaction_version = broker_lock().transaction_version
        if not 0 <= transaction_version <= 2:
            raise ValueError(f"transaction_version must be 0, 1 or 2, not {transaction_version}")
        if not 0 <= port < 65536:
            raise ValueError(f"port must be 0 to 65535, not {port}")
        if heap_mb < 128:
            raise ValueError(f"heap_mb must be at least 128, not {heap_mb}")
        self._extra = {name: str(value) for name, value in (properties or {}).items()}
        check_extra(self._extra)
        if folder is not None and "," in str(Path(folder).absolute()):
            raise FolderUnusable(
                f"{folder}: Kafka would read a path with a comma as two paths; give another one"
            )
        self._given_folder = Path(folder).absolute() if folder is not None else None
        self._given_log = Path(log).absolute() if log is not None else None
        self._folder: Path | None = self._given_folder
        self._port = port
        self._transaction_version = transaction_version
        self._heap_mb = heap_mb
        self._quick_start = quick_start
        self._java_options = list(java_options)
        self._start_timeout_s = start_timeout_s
        self._membership = membership
        self._proxy = proxy
        self._proxied_port = 0
        self._secure = secure
        self._secure_port = 0
        self._process: SupervisedProcess | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = f"pid {self._process.pid}" if self._process else "stopped"
        return f"<EmbeddedBroker {HOST}:{self._port} {state} folder {self._folder}>"

    @property
    def bootstrap(self) -> str:
        """``host:port`` for clients. Restarts keep it."""
        return f"{HOST}:{self.port}"

    @property
    def port(self) -> int:
        """The port. With ``port=0`` it is known after the first start."""
        if self._port == 0:
            raise BrokerNotRunning("the broker was never started: it has no port yet")
        return self._port

    @property
    def proxied_port(self) -> int:
        """The port for the given proxy. Each start chooses another port."""
        if self._proxied_port == 0:
            raise BrokerNotRunning("the broker was never started, or was given no proxy")
        return self._proxied_port

    @property
    def secure_bootstrap(self) -> str:
        """``host:port`` of the listener with authentication. Restarts keep it."""
        if self._secure_port == 0:
            raise BrokerNotRunning("the broker was never started, or has no secure listener")
        return f"{HOST}:{self._secure_port}"

    @property
    def pid(self) -> int:
        """The process id of the broker's JVM."""
        return self._running().pid

    @property
    def folder(self) -> Path:
        """The folder with ``data``, ``server.properties``, ``broker.json`` and, by default, the log."""
        if self._folder is None:
            raise BrokerNotRunning("the broker has no temporary folder before its start")
        return self._folder

    @property
    def log(self) -> Path:
        return self._given_log or self.folder / "broker.log"

    @property
    def transaction_version(self) -> int:
        """The feature level ``transaction.version`` with which the folder was formatted."""
        return self._transaction_version

    @property
    def running(self) -> bool:
        """Whether the broker's process exists (a paused one does)."""
        return self._process is not None and self._process.poll() is None

    def log_tail(self) -> list[str]:
        return log_tail(self.log)

    def start(self) -> None:
        """Fetch missing jars, format a new folder, start the broker, and wait until it serves.

        Nothing happens if the broker runs already.

        Raises:
            NoJava, DownloadFailed, HashMismatch, CacheBusy: as `find_java` and `ensure_broker`.
            PortTaken: the given port is in use.
            BrokerDied: the broker, or the formatting, ended by itself.
            StartDeadlinePassed: the broker did not serve in time, and was stopped.
            FolderInUse, FolderUnusable: as `hold`.
            FolderMismatch: the folder was formatted with another ``transaction_version``.
        """
        if self.running:
            return
        self._drop_process()
        java = find_java()
        class_path = ensure_broker()
        # The deadline excludes the fetch, which takes as long as the network does.
        deadline = time.monotonic() + self._start_timeout_s
        if self._port and not is_free(self._port):
            raise PortTaken(self._port)
        made_folder = self._make_folder()
        try:
            # The supervisor keeps the lock until the broker has ended, even if the owner dies.
            with hold(self.folder) as held:
                for tries_left in reversed(range(_PORT_TRIES)):
                    last = tries_left == 0
                    if self._launch(java, class_path, deadline, held, may_lose_race=not last):
                        return
                    self._drop_process()
        except BaseException:
            self._drop_process()
            if made_folder:
                self._remove_folder()
            raise

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Shut the broker down, or kill it after ``timeout_s``; remove a temporary folder.

        Nothing happens in a child that the owner forked.
        """
        if self._process is not None and self._process.foreign:
            return
        self._halt(timeout_s)
        if self._given_folder is None:
            self._remove_folder()

    def kill(self) -> None:
        """End the broker by SIGKILL, and wait for its end. The folder stays, for `start`."""
        process = self._running()
        process.kill()
        process.wait(STOP_TIMEOUT_S)
        self._drop_process()

    def restart(self) -> None:
        """Stop and start: with the same folder and port, and another process id."""
        self._running()
        self._halt(STOP_TIMEOUT_S)
        self.start()

    def pause(self) -> None:
        """Pause the broker (SIGSTOP): connections stay open, and it answers nothing."""
        self._running().pause()

    def resume(self) -> None:
        """Resume a paused broker (SIGCONT)."""
        self._running().resume()

    # -- inside ----------------------------------------------------------------------------------

    def _running(self) -> SupervisedProcess:
        if self._process is None or self._process.poll() is not None:
            raise BrokerNotRunning(
                "the broker does not run",
                log=self.log if self._folder else None,
                log_tail=self.log_tail() if self._folder else (),
            )
        return self._process

    def _launch(
        self,
        java: JavaRuntime,
        class_path: list[Path],
        deadline: float,
        held: int,
        *,
        may_lose_race: bool,
    ) -> bool:
        """Try to start once; False if another process took our port meanwhile."""
        port = self._port or free_port()
        membership, proxied, secure = self._place(port)
        properties = server_properties(
            data=self.folder / DATA,
            port=port,
            membership=membership,
            extra=self._extra,
            proxied=proxied,
            secure=secure,
        )
        config = self._write_config(properties)
        environment = dict(os.environ) | {"CLASSPATH": os.pathsep.join(map(str, class_path))}
        options = jvm_options(
            heap_mb=self._heap_mb,
            quick_start=self._quick_start,
            archive=find_archive(java, class_path),
            extra=self._java_options,
        )
        command = [str(java.path), *options]
        cluster_id = ensure_formatted(
            self.folder,
            java=command,
            environment=environment,
            config=config,
            log=self.log,
            transaction_version=self._transaction_version,
            deadline=deadline,
            kept_in=class_path[0].parent,
            node_id=membership.node_id,
            cluster_id=membership.cluster_id,
            more=self._secure.format_arguments() if self._secure else (),
        )
        started_at = mark_log(
            self.log,
            f"starting Kafka {broker_lock().kafka_version} on Java {java.major}, port {port}",
        )
        self._process = SupervisedProcess.start(
            [*command, "kafka.Kafka", str(config)],
            log=self.log,
            environment=environment,
            held=held,
            remove_when_orphaned=membership.temporary,
        )
        if not self._await_ready(self._process, port, cluster_id, deadline, started_at):
            if may_lose_race and (self._port == 0 or is_free(self._port)):
                return False
            raise PortTaken(port)
        self._port = port
        self._proxied_port = proxied[0] if proxied is not None else 0
        self._secure_port = secure[0] if secure is not None else 0
        return True

    def _place(
        self, port: int
    ) -> tuple[Membership, tuple[int, str] | None, tuple[int, SecureListener] | None]:
        """The membership, and the ports and arguments of the listeners for a proxy and with authentication."""
        voters = self._membership.voters if self._membership else {}
        own, proxied, secure = free_ports(3, avoid=frozenset({port, *voters.values()}))
        temporary = self.folder if self._given_folder is None else None
        return (
            self._membership or Membership(1, {1: own}, temporary),
            None if self._proxy is None else (proxied, self._proxy),
            None if self._secure is None else (self._secure_port or secure, self._secure),
        )

    def _write_config(self, properties: Mapping[str, str]) -> Path:
        config = self.folder / "server.properties"
        config.touch(mode=0o600)  # it may hold passwords
        config.chmod(0o600)
        config.write_text(properties_text(properties), encoding="utf-8")
        return config

    def _await_ready(
        self,
        process: SupervisedProcess,
        port: int,
        cluster_id: str,
        deadline: float,
        started_at: int,
    ) -> bool:
        """Wait until the broker serves; False if it ended because a port is taken."""
        while not is_ready(HOST, port, cluster_id):
            if (code := process.poll()) is not None:
                if _ADDRESS_IN_USE in log_since(self.log, started_at):
                    return False
                raise BrokerDied(
                    f"the broker ended while starting, with exit code {code}",
                    log=self.log,
                    log_tail=self.log_tail(),
                )
            if time.monotonic() > deadline:
                process.kill()
                raise StartDeadlinePassed(
                    f"the broker did not serve within {self._start_timeout_s:g} s",
                    log=self.log,
                    log_tail=self.log_tail(),
                )
            time.sleep(POLL_S)
        make_coordinators(HOST, port)
        return True

    def _make_folder(self) -> bool:
        """Make a temporary folder if the caller gave none; returns whether it did."""
        made = self._folder is None
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="anabranch-broker-"))
        if self._given_log is not None:
            self._given_log.parent.mkdir(parents=True, exist_ok=True)
        return made

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None

    def _halt(self, timeout_s: float) -> None:
        if self._process is not None:
            # A paused process handles SIGTERM only after SIGCONT.
            self._process.terminate()
            self._process.resume()
            if self._process.wait(timeout_s) is None:
                self._process.kill()
        self._drop_process()

    def _drop_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
