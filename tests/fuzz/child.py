"""The process in which inputs are tried: hangs and crashes end it, and what it was doing stays in a file.

An input has so many seconds of CPU time (a kernel's timer ends the process, also in compiled code), so a busy
machine is no finding. Memory: an input that makes the process grow by more than its target allows is a finding,
and beyond a hard limit allocations fail.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import mmap
import resource
import signal
import struct
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from tests.fuzz.target import Run, Target

CPU_S = 5.0  # an input may take
MOST_BYTES = 2 << 30  # of addresses beyond what the process had at the start
CURRENT = struct.Struct(">iqi")  # target, number of the input, its size
ROOM = (4 << 20) + CURRENT.size
_EACH = 3  # findings of one kind that are reported


def main() -> int:
    """``child FOLDER NAMES SEED INPUTS SECONDS TARGET NUMBER``: from there on in the list of names.

    INPUTS 0: as many as fit; -1: each target's own number. SECONDS are for each target; 0: no limit.
    """
    from tests.fuzz.targets import TARGETS

    folder, names = Path(sys.argv[1]), sys.argv[2].split(",")
    seed, inputs = int(sys.argv[3]), int(sys.argv[4])
    seconds, begin, number = float(sys.argv[5]), int(sys.argv[6]), int(sys.argv[7])
    warnings.simplefilter("error")
    with (folder / "current").open("r+b") as file, (folder / "told").open("a") as told:
        room = mmap.mmap(file.fileno(), ROOM)
        session = _Session(room, told)
        for place in range(begin, len(names)):
            target = TARGETS[names[place]]
            session.run(target, place, seed, number, inputs, seconds)
            number = 0
    return 0


class _Session:
    def __init__(self, room: mmap.mmap, told: TextIO) -> None:
        self._room = room
        self._told = told

    def run(
        self, target: Target, place: int, seed: int, number: int, inputs: int, seconds: float
    ) -> None:
        seeds = target.seeds()
        self._note(place, -1, b"")
        run = target.make()
        for data in seeds[:3]:  # what is loaded at the first use is not the input's
            _quietly(run, data)
        limit_memory()
        guard_cpu(0)
        found: Counter[str] = Counter()
        until = time.monotonic() + seconds if seconds else 0.0
        first, last = number, len(seeds) + inputs
        while (not inputs or number < last) and not (until and time.monotonic() > until):
            data = target.input(seed, number, seeds)
            self._note(place, number, data)
            why = judge(target, run, data, is_seed=number < len(seeds))
            if why:
                kind = _kind(why)
                found[kind] += 1
                if found[kind] <= _EACH:
                    self._tell(target.name, number, data, why)
            number += 1
        guard_cpu(None)
        self._tell_done(target.name, number - first)

    def _note(self, place: int, number: int, data: bytes) -> None:
        head = CURRENT.pack(place, number, len(data))
        self._room[: len(head) + len(data)] = head + data

    def _tell(self, name: str, number: int, data: bytes, why: str) -> None:
        line = {"target": name, "number": number, "data": data.hex(), "why": why}
        self._told.write(json.dumps(line) + "\n")
        self._told.flush()

    def _tell_done(self, name: str, done: int) -> None:
        self._told.write(json.dumps({"target": name, "done": done}) + "\n")
        self._told.flush()


def judge(target: Target, run: Run, data: bytes, *, is_seed: bool = False) -> str:
    """Try an input; returns its fault, if any. Warnings count as errors."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    guard_cpu(CPU_S)
    try:
        run(data)
    except target.allowed as error:
        if is_seed:
            return f"a valid input is refused: {error!r}"
        if not str(error):
            return f"an error that says nothing: {error!r}"
    except Exception:  # noqa: BLE001 - all others are findings
        return traceback.format_exc()
    finally:
        guard_cpu(0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    return f"memory: {grown} MB more" if grown > target.memory else ""


def guard_cpu(seconds: float | None) -> None:
    """End this process (SIGPROF) when it has used so much CPU time from now on; 0: don't; None: never again."""
    if seconds:
        faulthandler.enable()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds or 0)


def limit_memory() -> None:
    """Let allocations fail beyond what the process has now and `MOST_BYTES`."""
    gc.collect()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, hard))


def _quietly(run: Run, data: bytes) -> None:
    with contextlib.suppress(Exception):  # it is tried again, and told then
        run(data)


def _kind(why: str) -> str:
    """The identity of a finding: the place where an error was raised."""
    lines: Sequence[str] = [line for line in why.splitlines() if line.startswith("  File")]
    return lines[-1] if lines else why.partition(":")[0]


if __name__ == "__main__":
    sys.exit(main())
