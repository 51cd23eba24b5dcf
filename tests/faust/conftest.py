"""A scope for an app of Faust's, and what was written to its inputs."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import anabranch
import anabranch.faust
from tests.cluster import Cluster
from tests.waiting import wait_until

KEYS = [b"key-%d" % i for i in range(20)]
WAIT_S = 60.0


class Place:
    """A scope with two inputs and outputs; what was written to the inputs."""

    def __init__(self, client: anabranch.Client) -> None:
        self.client = client
        self.scope = f"f{uuid.uuid4().hex[:8]}"
        segments = {"a": 3, "b": 1, "out": 2, "even": 1, "ticks": 1, "dead": 1}
        segments |= {"middle": 2, "thirds": 1, "lists": 1}
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


Make = Callable[..., anabranch.faust.App]


class Running:
    """An app on a thread of its own, until it crashes or is stopped."""

    def __init__(self, app: anabranch.faust.App) -> None:
        self._app, self._stop = app, threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    async def _run(self) -> None:
        await self._app.start()
        while not (self._stop.is_set() or self._app.crashed):
            await asyncio.sleep(0.02)
        await self._app.stop()

    def end(self, *, crashes: bool = False) -> BaseException | None:
        """Why it crashed. ``crashes``: wait until it does."""
        if not crashes:
            self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self._app.crash_reason


@pytest.fixture
def place(client: anabranch.Client) -> Place:
    return Place(client)


@pytest.fixture
def make(place: Place, cluster: Cluster, tmp_path: Path) -> Make:
    def app(**options: Any) -> anabranch.faust.App:
        given = {"tasks": 4, "commit_interval": 0.02, "web_enabled": False} | options
        return anabranch.faust.App(
            f"{place.scope}/sums", bootstrap=cluster.bootstrap, datadir=str(tmp_path),
            folder=tmp_path / "rows", **given,
        )  # fmt: skip

    return app
