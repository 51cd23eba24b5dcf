"""A client that commits orders all the time: as a thread, and in a container that has only the product.

``python writer.py`` commits until SIGTERM, prints the number of commits as it grows, and at the end reads all back:
its exit code is 0 if each order is there once, and the processor of ``infra/processor`` has counted it once.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable

import anabranch
from anabranch.errors import AlreadyCommitted, AskOutcomeError, RetryError

SCOPE, ORDERS, TOTALS = "shop", "shop/orders", "shop/totals"
CUSTOMERS = 7
MORE = 20  # commits after each strike
PATIENCE_S = 240.0  # brokers take long to start on a busy machine
_PAUSE_S = 0.05
_SILENCE_S = 10.0  # then a reader has seen all


class Writer(threading.Thread):
    """Commits orders until it is stopped, each under a name that commits once; repeats what was not answered.

    ``bootstrap``: None: as the environment says. ``kind``: begins all its values and keys.
    """

    def __init__(self, bootstrap: str | None, kind: str) -> None:
        super().__init__(daemon=True)
        self.kind, self.committed = kind, 0
        self.failure: BaseException | None = None
        self._brokers, self._stopping = bootstrap, threading.Event()

    def run(self) -> None:
        try:
            with anabranch.connect(self._brokers, timeout=5) as client:
                while not self._stopping.is_set():
                    self._commit(client, self.committed)
                    self.committed += 1
        except BaseException as error:  # noqa: BLE001 - `stop` raises it
            self.failure = error

    def _commit(self, client: anabranch.Client, number: int) -> None:
        name = f"{self.kind}-{number}"
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            try:
                with client.begin(SCOPE, name=name) as txn:
                    txn.write(ORDERS, name.encode(), customer(self.kind, number))
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


def customer(kind: str, number: int) -> bytes:
    """The key of an order."""
    return f"{kind}-{number % CUSTOMERS}".encode()


Pair = tuple[bytes | None, bytes | None]  # key and value of an event


def check_orders(orders: Iterable[Pair], kind: str, committed: int) -> None:
    """Each order of a kind is there exactly once."""
    seen = Counter(value for _, value in orders if value and value.startswith(kind.encode()))
    wanted = Counter(f"{kind}-{n}".encode() for n in range(committed))
    assert seen == wanted, (seen - wanted, wanted - seen)


def counted(totals: Iterable[Pair], kind: str) -> int:
    """The number of orders of a kind that the processor has counted: for each customer one, two, three, …"""
    by_customer: dict[bytes, list[int]] = defaultdict(list)
    for key, value in totals:
        if key is not None and key.startswith(kind.encode()):
            by_customer[key].append(int(value or b""))
    for key, numbers in by_customer.items():
        assert numbers == list(range(1, len(numbers) + 1)), (key, numbers)
    return sum(map(len, by_customer.values()))


def _read(client: anabranch.Client, stream: str) -> list[Pair]:
    with client.read(stream, timeout=_SILENCE_S) as events:
        return [(event.key, event.value) for event in events]


def main() -> None:
    kind = "compose"
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    writer = Writer(None, kind)
    writer.start()
    while not stopping.wait(_PAUSE_S):
        sys.stdout.write(f"{writer.committed}\n")
        sys.stdout.flush()
    writer.stop()
    with anabranch.connect(timeout=PATIENCE_S) as client:
        check_orders(_read(client, ORDERS), kind, writer.committed)
        until = time.monotonic() + PATIENCE_S
        while (count := counted(_read(client, TOTALS), kind)) < writer.committed:
            assert time.monotonic() < until, f"{count} of {writer.committed} orders were counted"
        assert count == writer.committed


if __name__ == "__main__":
    main()
