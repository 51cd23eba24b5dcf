"""Runs one command and ends it when its owner ends, however that happens.

Run as a script, in a session of its own, by `anabranch.infra.process`::

    python -I -S supervisor.py OWNER_PID LOG REMOVE -- COMMAND...

REMOVE is a folder to remove when the owner is gone, or empty. Standard input and output are pipes to the owner.
Only the standard library is needed. Each of three events ends the command, because none alone is enough:

* The pipe ends: the owner closed it, or died. But a child that the owner forked without exec has a copy of the
  pipe, and keeps it open after the owner's death.
* So this process also watches the owner, by a pidfd where there is one, else by the parent's id.
* This process dies: then the kernel ends the command, by PR_SET_PDEATHSIG where Linux has it. (Between owner and
  command this would not work: it ends the command when the *thread* that forked ends. Here there is one thread.)

The owner sends orders of one byte:

* ``K`` kill, ``T`` terminate, ``P`` pause, ``C`` continue. Only this process, the command's parent, sends signals:
  so they can't hit another process that got the command's id;
* ``Q``: end the command and this process. (The pipe would not end while a forked child has a copy of it.)

This process sends lines: ``started PID``, ``failed REASON``, ``done ORDER``, ``exited CODE`` (negative: the
signal). After the last one it stays until the owner sends ``Q`` or is gone.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_ORDERS = {
    b"K": signal.SIGKILL,
    b"T": signal.SIGTERM,
    b"P": signal.SIGSTOP,
    b"C": signal.SIGCONT,
}
_QUIT = b"Q"
_PAUSE = b"P"
_PR_SET_PDEATHSIG = 1
_GRACE_S = 3.0
_POLL_S = 0.25


def main(arguments: list[str]) -> int:
    """Run the command until it ends, or its owner does."""
    owner, log, remove = int(arguments[0]), arguments[1], arguments[2]
    command = arguments[arguments.index("--") + 1 :]
    # Writing to an owner that is gone must not end this process.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    owner_fd = _pidfd(owner)
    if os.getppid() != owner:
        return 1
    # The owner may have blocked signals, and the mask is inherited: the command needs SIGTERM.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # SIGTERM to this process ends the command, by the same path as the owner's end.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with open(log, "ab") as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent(),
            )
    except (OSError, subprocess.SubprocessError) as error:
        _tell(f"failed {error}")
        return 1
    _tell(f"started {child.pid}")
    try:
        released = _watch(child, owner, owner_fd, wake_read)
    finally:
        _end(child)
    _tell(f"exited {child.returncode}")
    if released is None:
        released = _watch(None, owner, owner_fd, wake_read)
    if remove and not released:
        shutil.rmtree(remove, ignore_errors=True)
    return 0


def _watch(
    child: subprocess.Popen[bytes] | None, owner: int, owner_fd: int | None, wake: int
) -> bool | None:
    """Carry out orders until the owner or the command ends.

    Returns True if the owner sent ``Q``, False if the owner is gone, None if ``child`` has ended.
    """
    watched = [0, wake] if owner_fd is None else [0, wake, owner_fd]
    while child is None or child.poll() is None:
        ready, _, _ = select.select(watched, [], [], _POLL_S)
        if owner_fd is not None and owner_fd in ready:
            return False
        if owner_fd is None and os.getppid() != owner:
            return False
        if wake in ready and signal.SIGTERM in os.read(wake, 4096):
            return True
        if 0 in ready:
            orders = os.read(0, 64)
            if not orders:
                # The owner died: `close` sends an order first.
                return False
            for order in (orders[i : i + 1] for i in range(len(orders))):
                if order == _QUIT:
                    return True
                if child is not None and order in _ORDERS:
                    child.send_signal(_ORDERS[order])
                    if order == _PAUSE:
                        _wait_until_stopped(child.pid)
                    _tell(f"done {order.decode()}")
    return None


def _wait_until_stopped(pid: int) -> None:
    """Wait for the last thread to stop: on a busy machine some work for a while after the signal was sent."""
    if not hasattr(os, "waitid"):  # macOS, before Python 3.13
        return
    deadline = time.monotonic() + _GRACE_S
    wanted = os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG
    while os.waitid(os.P_PID, pid, wanted) is None and time.monotonic() < deadline:
        time.sleep(0.002)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the command: SIGCONT and SIGTERM, and SIGKILL after `_GRACE_S` seconds."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        child.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + _GRACE_S
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if child.poll() is None:
            child.kill()
    child.wait()


def _die_with_parent() -> Callable[[], None] | None:
    if not sys.platform.startswith("linux"):
        return None
    # Before the fork: importing and loading are not safe between fork and exec.
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def apply() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return apply


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _tell(line: str) -> None:
    with suppress(OSError):
        os.write(1, (line.replace("\n", " ") + "\n").encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
