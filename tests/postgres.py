"""A PostgreSQL server under test: in a folder and on a socket of its own; it ends with its owner.

``python -m tests.postgres USER PROGRAM ARGUMENT...`` runs the program as that user: PostgreSQL refuses root.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import psycopg

from tests.owned import start_module

START_S = 60.0
_PDEATHSIG = 1
MISSING = (
    "PostgreSQL's server is missing, and the ledger is tested on it. On Debian and Ubuntu: apt-get install "
    "postgresql (scripts/setup does it for root); elsewhere put initdb and postgres on the PATH"
)


class Postgres:
    """A server that may be killed and started again. ``folder`` is removed at `remove`."""

    def __init__(self, folder: Path | None = None) -> None:
        """``folder``: of a server that was copied; None: a new one."""
        self.user = _user()
        self.port = 5432
        self.folder = folder or Path(tempfile.mkdtemp(prefix="anabranch-pg-"))
        self._process: subprocess.Popen[bytes] | None = None
        shutil.chown(self.folder, self.user)
        if folder is None:
            self.run("initdb", "-D", str(self.data), "-A", "trust", "-U", "root", "-N")

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def dsn(self, database: str = "postgres", user: str = "root") -> str:
        return f"host={self.folder} port={self.port} dbname={database} user={user}"

    def run(self, program: str, *arguments: str) -> str:
        """A program of PostgreSQL's, as its user."""
        done = subprocess.run(
            [f"{_bin()}/{program}", *arguments],
            user=self.user if os.geteuid() == 0 else None,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{program}: {done.stderr}"
        return done.stdout

    def start(self, *settings: str) -> Postgres:
        """Start it, and wait until it lets connections in. ``settings``: as ``fsync=off``."""
        own = ("listen_addresses=", f"port={self.port}", f"unix_socket_directories={self.folder}")
        words = [word for setting in (*own, *settings) for word in ("-c", setting)]
        with (self.folder / "log").open("ab") as log:
            self._process = start_module(
                "tests.postgres",
                [self.user, f"{_bin()}/postgres", "-D", str(self.data), *words],
                output=log,
                environment=os.environ,
            )
        until = time.monotonic() + START_S
        while True:
            try:
                psycopg.connect(self.dsn()).close()
                return self
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > until:
                    raise AssertionError((self.folder / "log").read_text()[-2000:]) from None
                time.sleep(0.05)

    def kill(self) -> None:
        """End it as a power cut would: each of its processes at once, without a checkpoint."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(START_S)

    def freeze(self, seconds: float) -> None:
        """Let none of its processes run for so long."""
        assert self._process is not None
        postmaster = psutil.Process(self._process.pid)
        postmaster.suspend()
        frozen = [postmaster, *postmaster.children()]
        for what in ("suspend", "resume"):
            for each in frozen:
                with suppress(psutil.NoSuchProcess):  # a session that has just ended
                    getattr(each, what)()
            time.sleep(seconds if what == "suspend" else 0.0)

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def server() -> Iterator[Postgres]:
    """A new server, started."""
    made = Postgres()
    try:
        yield made.start()
    finally:
        made.remove()


@cache
def _bin() -> Path:
    """The folder of initdb and postgres; a failure, never a skip, without them."""
    found = [
        shutil.which("initdb"),
        *sorted(map(str, Path("/").glob("usr/lib/postgresql/*/bin/initdb"))),
    ]
    places = [Path(os.path.realpath(name)).parent for name in found if name]
    assert places, MISSING
    return places[-1]


def _user() -> str:
    """The user that the server runs as."""
    me = pwd.getpwuid(os.geteuid()).pw_name
    if me != "root":
        return me
    return "postgres" if any(p.pw_name == "postgres" for p in pwd.getpwall()) else "nobody"


def main() -> None:
    user, program, *arguments = sys.argv[1:]
    owner = os.getppid()
    if os.geteuid() == 0:
        entry = pwd.getpwnam(user)
        os.setgroups([])
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)
    if sys.platform == "linux":  # another user's process has lost what `tests.owned` set
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGQUIT)
    if os.getppid() == owner:
        os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main()
