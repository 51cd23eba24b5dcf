"""Python modules as child processes that end with their owner, however that ends: by SIGKILL, and frozen, too.

Linux's parent-death signal does it. It is sent when the *thread* ends that started the child, and threads of
tests come and go: so one thread, that lives as long as its process, starts all of them. Elsewhere they may be
left over.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

# No `preexec_fn`: what runs between fork and exec can hang when another thread held a lock.
_RUN = """\
import os, runpy, signal, sys
owner = int(sys.argv.pop(1))
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != owner:
    os._exit(1)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
_STOP_DEADLINE_S = 10.0
_starter = ThreadPoolExecutor(1, "owned")


def start_module(
    module: str, arguments: Sequence[str], *, output: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """``python -m module arguments``, all its output to a file, nothing to read."""
    command = [sys.executable, "-c", _RUN, str(os.getpid()), module, *arguments]
    return _starter.submit(
        subprocess.Popen,
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(environment),
    ).result()


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal, if the process has not ended.

    After SIGSTOP all threads stand still: on a busy machine some work on for a while.
    """
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    if number != signal.SIGSTOP or sys.platform != "linux":
        return
    until = time.monotonic() + _STOP_DEADLINE_S
    while moving := [state for state in _states(pid) if state not in "TtZX"]:
        assert time.monotonic() < until, f"process {pid} does not stop: {moving}"
        time.sleep(0.001)


def _states(pid: int) -> list[str]:
    """The state of each thread, by its letter."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            states.append(stat.read_text().rpartition(")")[2].split()[0])
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    return states
