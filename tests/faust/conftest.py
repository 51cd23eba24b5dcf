"""A scope for an app of Faust's, and what was written to its inputs."""

from __future__ import annotations

import itertools
import json
import uuid
from collections import Counter
from collections.abc import Callable

import pytest

import anabranch
from tests.waiting import wait_until

KEYS = [b"key-%d" % i for i in range(20)]
WAIT_S = 60.0


class Place:
    """A scope with two inputs and outputs; what was written to the inputs."""

    def __init__(self, client: anabranch.Client) -> None:
        self.client = client
        self.scope = f"f{uuid.uuid4().hex[:8]}"
        segments = {"a": 3, "b": 1, "out": 2, "even": 1, "ticks": 1, "dead": 1}
        for name, count in segments.items():
            client.create_stream(f"{self.scope}/{name}", segments=count)
        self.written: dict[bytes, list[int]] = {}
        self._number = itertools.count()

    def write(self, count: int) -> None:
        """A transaction over both inputs."""
        with self.client.begin(self.scope) as txn:
            for i in range(count):
                key, number = KEYS[i % len(KEYS)], next(self._number)
                data = json.dumps({"n": number}).encode()
                txn.write(f"{self.scope}/{'ab'[i % 2]}", data, key=key)
                self.written.setdefault(key, []).append(number)
            txn.commit()

    def read(self, name: str) -> list[anabranch.Event]:
        stream = f"{self.scope}/{name}"
        return list(self.client.snapshot(stream).read(stream))

    def wait(self, condition: Callable[[], bool] | None = None) -> None:
        """Until all is counted, or this is so."""
        wait_until(condition or self.is_whole, WAIT_S)

    def is_whole(self) -> bool:
        return len(self.read("out")) >= sum(map(len, self.written.values()))

    def check(self) -> None:
        """Each input event once; the sums rise one event at a time."""
        found: dict[bytes, list[tuple[int, int, int]]] = {}
        for event in self.read("out"):
            row = json.loads(event.value or b"")
            found.setdefault(event.key or b"", []).append((row["seen"], row["total"], row["n"]))
        assert {k: Counter(n for *_, n in rows) for k, rows in found.items()} == {
            k: Counter(v) for k, v in self.written.items() if v
        }
        for key, rows in found.items():
            total = 0
            for i, (seen, summed, number) in enumerate(rows, 1):
                total += number
                assert (seen, summed) == (i, total), key


@pytest.fixture
def place(client: anabranch.Client) -> Place:
    return Place(client)
