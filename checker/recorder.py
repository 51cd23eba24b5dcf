"""Writes a history while it happens: lines of JSON that outlive the process (`docs/checker.md`, "The format")."""

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
    """Raised within `Recorder.asking`: nobody knows whether the operation took effect."""


class Failed(Exception):
    """Raised within `Recorder.asking`: the operation has had no effect, and never will."""


class Recorder:
    """The history of one process: all that can crash as one. Threads may share it."""

    def __init__(self, path: Path, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """A new file, or more lines of one that is there.

        Args:
            path: its name ends in ``.history``; all files of a folder are one history.
            clock: nanoseconds, on one clock for all processes of the history.
        """
        if path.suffix != SUFFIX:
            raise ValueError(f"{path}: the name of a history ends in {SUFFIX}")
        self._clock = clock
        # Ids have to differ from those of an earlier life of the same name.
        self._ids = itertools.count(_whole_lines(path) if path.exists() else 0)
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def ask(self, what: str, **more: Any) -> int:
        """Before the operation begins. Returns its number, for `told`."""
        with self._lock:
            op = next(self._ids)
            self._put({"op": op, "kind": "ask", "what": what, **more})
        return op

    def told(self, op: int, outcome: str, **more: Any) -> None:
        """After the operation has ended: ``ok``, ``failed`` (surely without effect) or ``unknown``."""
        with self._lock:
            self._put({"op": op, "kind": "told", "outcome": outcome, **more})

    def note(self, what: str, **more: Any) -> None:
        """Something that has no duration."""
        self.told(self.ask(what, **more), "ok")

    @contextmanager
    def asking(self, what: str, **more: Any) -> Iterator[dict[str, Any]]:
        """An operation; what is put into the given dictionary is told with ``ok``.

        `Failed` and `Unknown` are told as such, and passed on; so is every other exception, as ``unknown``.
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
        """Nothing more is written."""
        os.close(self._file)

    def _put(self, entry: dict[str, Any]) -> None:
        # One write, so that a line is there whole or, at the very end of a killed process, cut.
        os.write(self._file, json.dumps({"at": self._clock(), **entry}).encode() + b"\n")


def _whole_lines(path: Path) -> int:
    """Bytes of a file that was left, after what a kill has cut of its last line is taken off."""
    with path.open("r+b") as file:
        size = file.read().rfind(b"\n") + 1
        file.truncate(size)
    return size
