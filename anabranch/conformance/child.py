"""The client under test as a child process that answers requests, one JSON document a line.

Requests may overlap: each has an id, and its answer may come at any time.
"""

from __future__ import annotations

import base64
import json
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

END_S = 5.0  # for a child to end by itself after its input has ended
START_S = 60.0  # a cold JVM on a busy machine


class ChildError(Exception):
    """The client answered a request by an error. ``name``: as in docs/protocol.md, "Refusals"."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(name, message)
        self.name = name

    def __str__(self) -> str:
        return ": ".join(map(str, self.args))


class NoAnswer(Exception):
    """The client did not answer a request in time, ended, or wrote something that is no answer."""


class NotOffered(Exception):
    """The client does not offer an operation."""


class Child:
    """A process of the client. Several threads may use it."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        """Start it. ``log``: gets its standard error. Raises `OSError`, `NoAnswer`."""
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._last = 0
        self._over = ""
        self._reader = threading.Thread(target=self._read, name="conformance-child", daemon=True)
        self._reader.start()
        try:
            self.about = self.ask("hello", START_S)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process runs, and has kept to the form of answers."""
        return not self._over and self._process.poll() is None

    def start(self, op: str, **arguments: Any) -> Future[Any]:
        """Send a request. The future has the answer's ``ok``, or `ChildError`, `NoAnswer`, `NotOffered`."""
        future: Future[Any] = Future()
        with self._lock:
            self._last += 1
            number = self._last
            self._waiting[number] = future
            line = json.dumps({"id": number, "op": op, **arguments}) + "\n"
            try:
                pipe = self._process.stdin
                if pipe is None or self._over:
                    raise BrokenPipeError
                pipe.write(line.encode())
                pipe.flush()
            except OSError:
                self._waiting.pop(number, None)
                future.set_exception(NoAnswer(self._over or f"the client has ended{self._tail()}"))
        return future

    def ask(self, op: str, seconds: float, **arguments: Any) -> Any:
        """The answer to a request. Raises: `ChildError`, `NoAnswer`, `NotOffered`."""
        began = time.monotonic()
        try:
            return self.start(op, **arguments).result(seconds)
        except TimeoutError:
            waited = time.monotonic() - began
            raise NoAnswer(f"{op} was not answered in {waited:.0f} s{self._tail()}") from None

    def close(self) -> None:
        """End its input, and kill it if it does not end by itself."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(END_S)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()

    def _read(self) -> None:
        output = self._process.stdout
        for line in output if output is not None else ():
            try:
                answer = json.loads(line)
                with self._lock:
                    future = self._waiting.pop(answer["id"])
                if "error" in answer:
                    name, text = str(answer["error"]), str(answer.get("message", ""))
                    kind = NotOffered(text) if name == "NotOffered" else ChildError(name, text)
                    future.set_exception(kind)
                else:
                    future.set_result(answer["ok"])
            except (ValueError, LookupError, TypeError):
                self._end(f"the client wrote a line that is no answer: {line[:200]!r}")
                return
        self._process.wait()
        self._end(f"the client ended with exit code {self._process.returncode}{self._tail()}")

    def _end(self, why: str) -> None:
        self._over = why
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(NoAnswer(why))

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()[-3:]
        return f"; its last words: {' | '.join(lines)}" if lines else ""


def to_text(data: bytes | None) -> str | None:
    """Bytes as they are in JSON lines."""
    return None if data is None else base64.b64encode(data).decode()


def to_bytes(text: str | None) -> bytes | None:
    """Bytes of a JSON line. Raises `ValueError`."""
    return None if text is None else base64.b64decode(text, validate=True)
