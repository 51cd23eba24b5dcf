"""A steady client: a thread commits one event after the other, and notes how each commit ended, and when.

Tests of deadlines and delays have it in their own process, and compare its stream with what it was answered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import anabranch
from anabranch.errors import OutcomeUnknown
from anabranch.protocol.defaults import KEEPALIVE_S

COMMITTED, UNKNOWN = "COMMITTED", "UNKNOWN"
PROGRESS_S = 60.0


@dataclass
class Commit:
    """One commit. ``result``: COMMITTED, UNKNOWN, or the error that says that nothing changed; empty: under way.

    Times are monotonic seconds; ``slowest``: of its longest call.
    """

    value: bytes
    began: float
    ended: float = 0.0
    slowest: float = 0.0
    result: str = ""
    txn_id: bytes | None = None


@dataclass
class Steady:
    """``holds``: seconds for which each transaction is open, by its heartbeats alone; 0: one-shots.

    ``journal``: every other transaction goes through the journal. ``timeout``: of each commit.
    """

    client: anabranch.Client
    stream: str
    name: str = "n"
    holds: float = 0.0
    keepalive: float = KEEPALIVE_S
    pause: float = 0.02
    timeout: float | None = None
    journal: bool = False
    commits: list[Commit] = field(default_factory=list)

    def run(self, over: threading.Event) -> None:
        """Commit until it is over."""
        while not over.is_set():
            self._one(len(self.commits), over)
            over.wait(self.pause)

    def _one(self, number: int, over: threading.Event) -> None:
        found = Commit(f"{self.name}-{number:06}".encode(), time.monotonic())
        self.commits.append(found)

        def timed(call: Callable[[], object]) -> None:
            began = time.monotonic()
            try:
                call()
            finally:
                found.slowest = max(found.slowest, time.monotonic() - began)

        try:
            txn = self.client.begin(self.stream.partition("/")[0], keepalive=self.keepalive)
            if self.journal and number % 2:
                timed(txn.token)
            txn.write(self.stream, found.value, key=b"k")
            if self.holds:
                timed(txn.flush)
                over.wait(self.holds)
            found.txn_id = txn.txn_id
            timed(partial(txn.commit, timeout=self.timeout))
            found.result = COMMITTED
        except OutcomeUnknown as error:
            found.txn_id, found.result = error.txn_id, UNKNOWN
        except Exception as error:  # noqa: BLE001 - the test decides which may occur
            found.result = f"{type(error).__name__}: {error}"
        found.ended = time.monotonic()

    def of(self, *results: str) -> list[Commit]:
        """Commits that ended so."""
        return [one for one in list(self.commits) if one.result in results]

    @property
    def values(self) -> list[bytes]:
        """The events that were answered to be committed."""
        return [one.value for one in self.of(COMMITTED)]

    def wait_more(self, count: int, seconds: float = PROGRESS_S) -> None:
        """Wait for that many more commits that begin now or later."""
        since, until = time.monotonic(), time.monotonic() + seconds
        while sum(one.began >= since for one in self.of(COMMITTED)) < count:
            assert time.monotonic() < until, f"{self.stream}: {self.commits[-3:]}"
            time.sleep(0.01)


@contextmanager
def steadily(*clients: Steady) -> Iterator[None]:
    """Run each in a thread."""
    over = threading.Event()
    threads = [threading.Thread(target=client.run, args=(over,)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(PROGRESS_S)
