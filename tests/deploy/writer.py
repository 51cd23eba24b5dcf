"""A client that commits all the time: as a thread, and in a container, where there is nothing but the product.

``python writer.py STREAM`` commits until SIGTERM, prints the number of commits as it grows, and at the end reads
all back: its exit code is 0 if each is there once.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import Counter

import anabranch
from anabranch.errors import AlreadyCommitted, AskOutcomeError, RetryError

SCOPE = "shop"
MORE = 20  # commits after each strike
PATIENCE_S = 90.0
_PAUSE_S = 0.05


class Writer(threading.Thread):
    """Commits values until it is stopped, each under a name that commits once; repeats what was not answered.

    ``bootstrap``: None: as the environment says.
    """

    def __init__(self, bootstrap: str | None, stream: str) -> None:
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


def main() -> None:
    stream = sys.argv[1]
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    with anabranch.connect(timeout=PATIENCE_S) as client:
        client.create_stream(stream)
    writer = Writer(None, stream)
    writer.start()
    while not stopping.wait(_PAUSE_S):
        sys.stdout.write(f"{writer.committed}\n")
        sys.stdout.flush()
    writer.stop()
    with anabranch.connect(timeout=PATIENCE_S) as client, client.read(stream, timeout=10) as events:
        seen = Counter(event.value for event in events)
    assert seen == Counter(b"%d" % n for n in range(writer.committed)), seen


if __name__ == "__main__":
    main()
