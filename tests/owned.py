"""Python modules as child processes that end with their owner, however that ends: by SIGKILL, and frozen, too.

Linux's parent-death signal does it. It is sent when the *thread* ends that started the child, and threads of
tests come and go: so one thread, that lives as long as its process, starts all of them. Elsewhere they may be
left behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
