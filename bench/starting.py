"""How long a program and the command line take to start: import and connect, and ``anabranch --help``.

Each is a process of its own, in turn with a Python that does nothing. Files are in the system cache. Medians, with
the start of Python. CPU is that of the process.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import Any

from bench.setting import Place

CONNECT = "import anabranch, sys; anabranch.connect(sys.argv[1]).close()"
# What is started, its command, and the most seconds.
STARTS: dict[str, tuple[list[str], float | None]] = {
    "Python alone": (["-c", "pass"], None),
    "import anabranch": (["-c", "import anabranch"], None),
    "import and connect": (["-c", CONNECT], 0.4),
    "anabranch --help": (["-m", "anabranch.cli", "--help"], 0.3),
}


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Seconds and CPU seconds of each start."""
    rounds = 5 if quick else 15
    took: dict[str, list[tuple[float, float]]] = {what: [] for what in STARTS}
    for number in range(rounds + 1):
        for what, (arguments, _) in STARTS.items():
            given = [place.bootstrap] if CONNECT in arguments else []
            found = start([sys.executable, *arguments, *given])
            if number:  # the first round fills the caches
                took[what].append(found)
    figures = {
        what: {
            "s": statistics.median(seconds for seconds, _ in each),
            "cpu_s": statistics.median(cpu for _, cpu in each),
            "most_s": STARTS[what][1],
        }
        for what, each in took.items()
    }
    return {"rounds": rounds, "starts": figures}


def start(command: list[str]) -> tuple[float, float]:
    """Seconds and CPU seconds of a command, which has to succeed."""
    began, before = time.perf_counter(), _children()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began, _children() - before


def _children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    rows = []
    for what, of in result["starts"].items():
        goal = "" if of["most_s"] is None else f"≤ {of['most_s']} s"
        rows.append([what, f"{of['s']:.3f} s", f"{of['cpu_s']:.3f} s", goal])
    return ["", "time", "CPU", "goal"], rows
