"""Members of a consumer group in threads, and what they were given."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import anabranch

LONG_S = 30.0


def by_key(events: Iterable[anabranch.Event]) -> dict[bytes, list[int]]:
    """Key -> the numbers of its events, as they came."""
    found: dict[bytes, list[int]] = {}
    for event in events:
        found.setdefault(event.key or b"", []).append(int((event.value or b"").split(b":")[1]))
    return found


class Members:
    """Members of a group, each in a thread with a client of its own."""

    def __init__(self, bootstrap: str, stream: str, group: str) -> None:
        self._bootstrap = bootstrap
        self._stream = stream
        self._group = group
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(8)
        self._leaving: list[threading.Event] = []
        self._running: list[Future[None]] = []
        self.seen: list[tuple[int, anabranch.Event]] = []

    def join(self) -> None:
        leaving = threading.Event()
        self._leaving.append(leaving)
        self._running.append(self._pool.submit(self._read, len(self._running), leaving))

    def _read(self, who: int, leaving: threading.Event) -> None:
        quick = {"heartbeat.interval.ms": 300}  # to hear of others
        with (
            anabranch.connect(self._bootstrap, config=quick) as client,
            client.read(self._stream, group=self._group, timeout=0.2) as reader,
        ):
            while not leaving.is_set():
                for event in reader:
                    with self._lock:
                        self.seen.append((who, event))
                    if leaving.is_set():
                        break

    def leave(self, who: int) -> None:
        self._leaving[who].set()
        self._running[who].result(LONG_S)

    def wait_for(self, enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG_S
        while not enough():
            assert time.monotonic() < deadline, self.by_key()
            for running in self._running:
                if running.done():
                    running.result()
            time.sleep(0.05)

    @property
    def reading(self) -> set[int]:
        """The members that got something."""
        with self._lock:
            return {who for who, _ in self.seen}

    @property
    def events(self) -> list[anabranch.Event]:
        """All that was given out, as it came."""
        with self._lock:
            return [event for _, event in self.seen]

    def by_key(self) -> dict[bytes, list[int]]:
        """Key -> the numbers of its events as they came first: a change of members repeats some."""
        return {key: list(dict.fromkeys(n)) for key, n in by_key(self.events).items()}

    def close(self) -> None:
        for leaving in self._leaving:
            leaving.set()
        for running in self._running:
            running.result(LONG_S)
        self._pool.shutdown()
