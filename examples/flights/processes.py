"""The parent's side of the run's processes: starts them, reads their messages, sends orders, and ends them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from anabranch.cli.cluster import child_environment
from anabranch.cli.errors import ChildFailed
from anabranch.infra.process import log_tail

Message = dict[str, Any]
_POLL_S = 0.05
_STOP_TIMEOUT_S = 3.0
_TAIL_LINES = 12


class Child:
    """A process in a role, and its messages so far."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        on_message: Callable[[Message], None] | None = None,
    ) -> None:
        """Start the process. ``on_message``: called with each message, in a thread."""
        self.name = name
        self.log = log
        self.messages: list[Message] = []
        self.other_lines: list[str] = []
        self.expected_dead = False
        self._on_message = on_message
        self._lock = threading.Lock()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=child_environment(),
                # Ctrl-C in a terminal goes to the parent alone.
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name=f"hear-{name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        if self._process.stdout is None:
            return
        for raw in self._process.stdout:
            line = raw.decode("utf-8", "replace").rstrip("\n")
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict) or "say" not in message:
                with self._lock:
                    self.other_lines.append(line)
                continue
            with self._lock:
                self.messages.append(message)
            if self._on_message is not None:
                self._on_message(message)

    def said(self, what: str) -> list[Message]:
        with self._lock:
            return [message for message in self.messages if message["say"] == what]

    def last(self, what: str) -> Message | None:
        found = self.said(what)
        return found[-1] if found else None

    @property
    def lines(self) -> list[str]:
        """The lines of standard output that are no messages."""
        with self._lock:
            return list(self.other_lines)

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.poll()

    def finish(self) -> None:
        """Order its last report."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write(b"finish\n")
                self._process.stdin.flush()

    def kill(self) -> None:
        """End it by SIGKILL, as a step of the story."""
        self.expected_dead = True
        self._process.kill()
        self._process.wait(_STOP_TIMEOUT_S)
        self._reader.join(_STOP_TIMEOUT_S)

    def check(self) -> None:
        """Raise `ChildFailed` if it reported a failure, or ended with another exit code than 0."""
        code = self.poll()
        if self.expected_dead or code in (None, 0):
            return
        self._reader.join(_STOP_TIMEOUT_S)
        failed = self.last("failed")
        if failed is not None:
            raise ChildFailed(f"{self.name}: {failed['name']}: {failed['message']}")
        tail = "\n".join(f"  {line}" for line in log_tail(self.log, _TAIL_LINES))
        raise ChildFailed(f"{self.name} ended with exit code {code}\nits last lines:\n{tail}")

    def end(self) -> None:
        """Make it end, without waiting for the end."""
        self.expected_dead = True
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        self._process.terminate()

    def close(self) -> None:
        """End it, and wait for the end; kill it if that takes too long."""
        self.end()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_TIMEOUT_S)
        self._reader.join(_STOP_TIMEOUT_S)
        if self._process.stdout is not None:
            self._process.stdout.close()


class Family:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.children: list[Child] = []

    def start(
        self,
        role: str,
        parameters: Mapping[str, Any],
        *,
        name: str | None = None,
        on_message: Callable[[Message], None] | None = None,
    ) -> Child:
        """Start a child in a role of `examples.flights.child`."""
        command = [sys.executable, "-P", "-m", "examples.flights.child", role]
        return self.start_command(
            name or role, [*command, json.dumps(dict(parameters))], on_message=on_message
        )

    def start_command(
        self,
        name: str,
        command: Sequence[str],
        on_message: Callable[[Message], None] | None = None,
    ) -> Child:
        """Start any program as a child."""
        child = Child(name, command, self._folder / f"{name}.log", on_message=on_message)
        self.children.append(child)
        return child

    def check(self) -> None:
        """Raise `ChildFailed` if a child failed."""
        for child in self.children:
            child.check()

    def wait_for(
        self, what: str, condition: Callable[[], Any], timeout_s: float, poll_s: float = _POLL_S
    ) -> Any:
        """Wait until the condition is true, and return its value.

        Raises: ChildFailed (a child failed meanwhile, or the time is over).
        """
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            self.check()
            if time.monotonic() > deadline:
                raise ChildFailed(f"{what}: not within {timeout_s:g} s")
            time.sleep(poll_s)
        return value

    def hear(self, child: Child, what: str, timeout_s: float) -> Message:
        """Wait for a child's message of a kind."""

        def said() -> Message | None:
            message = child.last(what)
            if message is None and child.poll() == 0:
                child._reader.join(_STOP_TIMEOUT_S)  # noqa: SLF001
                message = child.last(what)
                if message is None:
                    raise ChildFailed(f"{child.name} ended without saying {what!r}")
            return message

        message: Message = self.wait_for(f"{child.name}: {what}", said, timeout_s)
        return message

    def close(self) -> None:
        """End all of them, concurrently."""
        for child in self.children:
            child.end()
        for child in self.children:
            child.close()
        self.children.clear()
