"""The processes of a run: ``python -m examples.flights.child ROLE PARAMETERS``.

A child prints its messages as lines of JSON on standard output, and takes the order ``finish`` on standard input.
When standard input ends, the parent is gone, and the child ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from anabranch.cli.errors import ExitCode, exit_code_of

Say = Callable[..., None]
FINISH = "finish"


def orders() -> threading.Event:
    """An event that is set when the parent orders the last report. If the parent is gone, this process ends."""
    finish = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            if line.strip() == FINISH:
                finish.set()
        os._exit(ExitCode.TERMINATED)

    threading.Thread(target=listen, name="orders", daemon=True).start()
    return finish


Role = Callable[[Mapping[str, Any], Say, threading.Event], None]


def say(what: str, **fields: Any) -> None:
    """Print a message to the parent. ``at``: by the monotonic clock, which all processes of a machine share."""
    line = json.dumps({"say": what, "at": time.monotonic(), **fields})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# Each role's module and function. A role imports only its own module.
_ROLES = {
    "compiler": ("writers", "compile_code"),
    "maker": ("writers", "make"),
    "driver": ("writers", "drive"),
    "writer": ("writers", "write"),
    "committer": ("writers", "commit"),
    "aborter": ("writers", "abort"),
    "asker": ("writers", "ask"),
    "ticker": ("ticker", "run"),
    "ender": ("ticker", "end"),
    "plain": ("observers", "watch_plain"),
    "reader": ("observers", "read_events"),
    "transactions": ("observers", "read_whole"),
    "member": ("observers", "read_in_order"),
    "clerk": ("transfers", "clerk"),
    "auditor": ("transfers", "audit"),
    "scaler": ("historian", "scale"),
    "historian": ("historian", "tell"),
}


def _role_of(name: str) -> Role:
    module, function = _ROLES[name]
    role: Role = getattr(import_module(f"examples.flights.{module}"), function)
    return role


def main(arguments: list[str]) -> int:
    """Play a role; returns the exit code."""
    name, parameters = arguments
    finish = orders()
    try:
        _role_of(name)(json.loads(parameters), say, finish)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the parent shows any error
        traceback.print_exc()
        say("failed", name=type(error).__name__, message=str(error))
        return exit_code_of(error)
    return ExitCode.OK


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # The interpreter's usual end would wait for the thread that reads standard input.
    os._exit(code)
