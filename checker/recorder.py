"""Records a history while it happens, as lines of JSON that survive a crash (`docs/inside/checker.md`)."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SUFFIX = ".history"


class Unknown(Exception):
    """Raised within `Recorder.asking`: it is not known whether the operation took effect."""


class Failed(Exception):
    """Raised within `Recorder.asking`: the operation has had no effect, and never will have one."""


class Recorder:
    """Writes the history of one process. Thread-safe."""

    def __init__(self, path: Path, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Start a new file, or continue an existing one.

        Args:
            path: its name ends in ``.history``; all files of a folder are one history.
            clock: nanoseconds, on one clock for all processes of the history.
        """
        if path.suffix != SUFFIX:
            raise ValueError(f"{path}: the name of a history ends in {SUFFIX}")
        self._clock = clock
        # Numbers have to differ from those of an earlier process that wrote this file.
        self._ids = itertools.count(_whole_lines(path) if path.exists() else 0)
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def ask(self, what: str, **more: Any) -> int:
        """Record a request before the operation begins. Returns its number, for `told`."""
        with self._lock:
            op = next(self._ids)
            self._put({"op": op, "kind": "ask", "what": what, **more})
        return op

    def told(self, op: int, outcome: str, **more: Any) -> None:
        """Record the answer: ``ok``, ``failed`` (surely without effect) or ``unknown``."""
        with self._lock:
            self._put({"op": op, "kind": "told", "outcome": outcome, **more})

    def note(self, what: str, **more: Any) -> None:
        """Record an event without a duration."""
        self.told(self.ask(what, **more), "ok")

    @contextmanager
    def asking(self, what: str, **more: Any) -> Iterator[dict[str, Any]]:
        """Record an operation. Fields that the block puts into the dictionary go into an answer with ``ok``.

        An exception is recorded, and raised again: `Failed` as ``failed``, any other as ``unknown``.
        """
        op = self.ask(what, **more)
        result: dict[str, Any] = {}
        try:
            yield result
        except Failed as error:
            self.told(op, "failed", why=str(error))
            raise
        except BaseException as error:
            self.told(op, "unknown", why=f"{type(error).__name__}: {error}")
            raise
        self.told(op, "ok", **result)

    def close(self) -> None:
        os.close(self._file)

    def _put(self, entry: dict[str, Any]) -> None:
        # One write for a line: only the last line of a killed process may be incomplete.
        os.write(self._file, json.dumps({"at": self._clock(), **entry}).encode() + b"\n")


def _whole_lines(path: Path) -> int:
    """Remove the incomplete last line of a killed process's file. Returns the bytes left."""
    with path.open("r+b") as file:
        size = file.read().rfind(b"\n") + 1
        file.truncate(size)
    return size
