"""A process whose clock is wrong: ``python -m tests.shifted …`` is ``anabranch …`` by such a clock."""

from __future__ import annotations

import os
import runpy
import time

VARIABLE = "ANABRANCH_AHEAD_S"  # how far this process's clock is ahead, seconds


def environment(ahead_s: float) -> dict[str, str]:
    return {VARIABLE: str(ahead_s)}


def shift() -> None:
    """From now on the Unix time is as the environment says."""
    right, ahead_s = time.time, float(os.environ.get(VARIABLE, "0"))
    time.time = lambda: right() + ahead_s


if __name__ == "__main__":
    shift()
    runpy.run_module("anabranch.cli", run_name="__main__", alter_sys=True)
