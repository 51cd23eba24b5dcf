"""A child process that ends with its owner (the process that started it), and its log.

This is the owner's side; ``supervisor`` is a process between the two.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_START_TIMEOUT_S = 30.0
_ORDER_TIMEOUT_S = 10.0
_WAIT_SLICE_S = 0.05


class SupervisedProcess:
    """A running command with its own supervisor. Made by `start`; thread-safe.

    In a child that the owner forked, this object does nothing: it shares the pipes with the owner, which would lack
    the lines that the child reads.
    """

    def __init__(self, supervisor: subprocess.Popen[bytes]) -> None:
        """Call `start` instead."""
        self._owner = os.getpid()
        self._supervisor = supervisor
        self._lock = threading.Lock()
        self._buffer = b""
        self._done: list[str] = []
        self._failed = "its supervisor ended or did not answer"
        self.pid = 0
        self.returncode: int | None = None

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        remove_when_orphaned: Path | None = None,
        held: int | None = None,
    ) -> SupervisedProcess:
        """Start ``command``, its output appended to ``log``.

        ``remove_when_orphaned``: a folder that the supervisor removes if this process dies. ``held``: an open file
        that the supervisor keeps open while the command runs. Raises: OSError.
        """
        supervisor = subprocess.Popen(
            # -I -S: site packages and start-up files of users would cost time, and can fail.
            [
                *(sys.executable or "python3", "-I", "-S", str(_SUPERVISOR)),
                *(str(os.getpid()), str(log), str(remove_when_orphaned or "")),
                *("--", *command),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            cwd="/",
            # A session of its own: Ctrl-C in a terminal goes to the owner alone.
            start_new_session=True,
            bufsize=0,
            pass_fds=() if held is None else (held,),
        )
        process = cls(supervisor)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not process.pid and process._take_lines(deadline - time.monotonic()):
            pass
        if process.pid:
            return process
        process.close()
        raise OSError(f"{command[0]} could not be started: {process._failed}")

    @property
    def foreign(self) -> bool:
        """Whether this is a copy of the object in a child that the owner forked."""
        return os.getpid() != self._owner

    def poll(self) -> int | None:
        """The exit code (negative: the signal's number), or None while it runs."""
        with self._lock:
            self._take_lines(0.0)
            return self.returncode

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end. Returns the exit code, or None after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while not self.foreign and (left := deadline - time.monotonic()) > 0:
            # In slices, so that another thread gets the lock to kill the command.
            with self._lock:
                self._take_lines(min(left, _WAIT_SLICE_S))
                if self.returncode is not None:
                    break
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM, unless the command has ended."""
        self._order("T")

    def kill(self) -> None:
        """Send SIGKILL, unless the command has ended."""
        self._order("K")

    def pause(self) -> None:
        """Send SIGSTOP; returns when all threads are stopped."""
        self._order("P")

    def resume(self) -> None:
        """Send SIGCONT."""
        self._order("C")

    def close(self) -> None:
        """End the command if it runs (SIGTERM, SIGKILL after three seconds), and free the pipes."""
        if self.foreign:
            return
        with self._lock:
            stdin, stdout = self._supervisor.stdin, self._supervisor.stdout
            if stdin is not None and not stdin.closed:
                with suppress(OSError):
                    stdin.write(b"Q")
                stdin.close()
            self._supervisor.wait()
            if stdout is not None:
                while self.returncode is None and self._take_lines(0.0):
                    pass
                stdout.close()
            if self.returncode is None:
                self.returncode = -9

    def _order(self, order: str) -> None:
        if self.foreign:
            return
        with self._lock:
            if self.returncode is not None or self._supervisor.stdin is None:
                return
            self._done.clear()
            with suppress(OSError):  # it has just ended, as the next line will show
                self._supervisor.stdin.write(order.encode())
            deadline = time.monotonic() + _ORDER_TIMEOUT_S
            while order not in self._done and self.returncode is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"the supervisor of process {self.pid} does not answer")
                self._take_lines(left)

    def _take_lines(self, timeout_s: float) -> bool:
        """Read the supervisor's next lines. Returns whether there may be more. Call with the lock held."""
        stdout = self._supervisor.stdout
        if self.foreign or self.returncode is not None or stdout is None or stdout.closed:
            return False
        if not _readable(stdout.fileno(), timeout_s):
            return False
        taken = os.read(stdout.fileno(), 4096)
        if not taken:
            # The supervisor died without a report, and the command with it.
            self.returncode = -9
            return False
        self._buffer += taken
        self._note_lines()
        return True

    def _note_lines(self) -> None:
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            word, _, value = line.decode(errors="replace").partition(" ")
            if word == "started":
                self.pid = int(value)
            elif word == "failed":
                self._failed = value
            elif word == "exited":
                self.returncode = int(value)
            elif word == "done":
                self._done.append(value)


def _readable(fd: int, timeout_s: float) -> bool:
    # poll, not select: a process with many connections has descriptors beyond select's 1,024.
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(timeout_s, 0.0) * 1000))


TAIL_LINES = 25
_TAIL_BYTES = 64 * 1024


def mark_log(log: Path, text: str) -> int:
    """Append a line of ours; returns the log's size in bytes after it."""
    with log.open("ab") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} anabranch: {text}\n".encode())
        return file.tell()


def log_tail(log: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of the last 64 KiB; empty if there is no file."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]


def log_since(log: Path, position: int) -> str:
    """The text that was appended from byte ``position`` on."""
    with log.open("rb") as file:
        file.seek(position)
        return file.read().decode(errors="replace")
