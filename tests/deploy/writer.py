"""A client that commits all the time, whatever is killed meanwhile."""

from __future__ import annotations

import threading
import time

import anabranch
from anabranch.errors import AlreadyCommitted, AskOutcomeError, RetryError

SCOPE = "shop"
MORE = 20  # commits after each strike
PATIENCE_S = 90.0
_PAUSE_S = 0.05


class Writer(threading.Thread):
    """Commits values until it is stopped, each under a name that commits once; repeats what was not answered."""

    def __init__(self, bootstrap: str, stream: str) -> None:
        super().__init__(daemon=True)
        self.stream, self.committed = stream, 0
        self.failure: BaseException | None = None
        self._brokers, self._stopping = bootstrap, threading.Event()

    def run(self) -> None:
        try:
            with anabranch.connect(self._brokers, timeout=5) as client:
                while not self._stopping.is_set():
                    self._commit(client, b"%d" % self.committed)
                    self.committed += 1
        except BaseException as error:  # noqa: BLE001 - `stop` raises it
            self.failure = error

    def _commit(self, client: anabranch.Client, value: bytes) -> None:
        name = f"{self.stream}-{value.decode()}"
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            try:
                with client.begin(SCOPE, name=name) as txn:
                    txn.write(self.stream, value)
                    txn.commit()
            except AlreadyCommitted:
                return
            except (RetryError, AskOutcomeError):
                time.sleep(_PAUSE_S)
            else:
                return
        raise AssertionError(f"{name} did not commit within {PATIENCE_S:.0f} s")

    def more(self) -> None:
        """Wait for further commits."""
        wanted = self.committed + MORE
        until = time.monotonic() + PATIENCE_S
        while self.committed < wanted:
            if self.failure is not None:
                raise self.failure
            assert time.monotonic() < until, f"only {self.committed} of {wanted} commits"
            time.sleep(_PAUSE_S)

    def stop(self) -> None:
        self._stopping.set()
        self.join(2 * PATIENCE_S)
        assert not self.is_alive()
        if self.failure is not None:
            raise self.failure
