"""kfake as a process: built once with Go, started on free ports, killed and started again on its data."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from anabranch.infra.fetch import cache_root
from anabranch.infra.sockets import HOST, free_port
from tests.kfake.kinds import Kind

SOURCE = Path(__file__).with_name("broker")
_USUAL_PLACE = Path("/usr/local/go/bin/go")
_BUILD_DEADLINE_S = 570.0
_START_DEADLINE_S = 60.0
_SIGN_IN = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}
# Of a kind that denies something: it is denied to the user alone.
USER, ADMIN = (
    {**_SIGN_IN, "sasl.username": name, "sasl.password": name} for name in ("user", "admin")
)


class NoGo(Exception):
    """Go is missing: kfake can't be built here."""


def program() -> Path:
    """The broker's program. It is built once for each state of its source, and kept in the cache.

    Raises: NoGo; CalledProcessError, with its output in ``stderr``: it can't be built, or its modules not fetched.
    """
    files = sorted(path for path in SOURCE.iterdir() if path.suffix in (".go", ".mod", ".sum"))
    source = hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]
    built = cache_root() / "kfake" / source
    if built.exists():
        return built
    go = shutil.which("go") or (str(_USUAL_PLACE) if _USUAL_PLACE.exists() else None)
    if go is None:
        raise NoGo(f"no `go` on the path, nor at {_USUAL_PLACE}: kfake can't be built")
    built.parent.mkdir(parents=True, exist_ok=True)
    with _locked(built.with_suffix(".lock")):
        if not built.exists():
            with tempfile.TemporaryDirectory(dir=built.parent) as folder:
                made = Path(folder, "kfake")
                subprocess.run(
                    [go, "build", "-mod=readonly", "-trimpath", "-o", str(made), "."],
                    cwd=SOURCE,
                    check=True,
                    capture_output=True,
                    timeout=_BUILD_DEADLINE_S,
                )
                made.replace(built)
    return built


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Kfake:
    """A kfake of a kind, as the embedded broker is: ``bootstrap``, `kill`, `start`.

    ``folder``: where its log is, and, with ``keeps``, its data.
    """

    def __init__(self, kind: Kind, folder: Path, *, keeps: bool = False) -> None:
        self._kind = kind
        self._folder = folder
        self._data = str(folder / "data") if keeps else ""
        ports: list[int] = []
        while len(ports) < kind.brokers:
            ports.append(free_port(frozenset(ports)))
        self._ports = tuple(ports)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        """``host:port`` of each broker."""
        return ",".join(f"{HOST}:{port}" for port in self._ports)

    def options(self, user: Mapping[str, str] = USER) -> Mapping[str, str]:
        """How a client comes in."""
        return user if self._kind.denied else {}

    @property
    def log_file(self) -> Path:
        """What it printed."""
        return self._folder / "kfake.log"

    def start(self) -> None:
        """Start it, and wait until it listens."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [str(program()), self._kind.text(self._ports, self._data)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "GOMAXPROCS": "2"},
            )
        until = time.monotonic() + _START_DEADLINE_S
        while not all(map(_listens, self._ports)):
            if self._process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"kfake does not start: {self.log_file.read_text()[-2000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            with suppress(OSError):
                assert self._process.stdin is not None
                self._process.stdin.close()

    def __enter__(self) -> Kfake:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0
