"""The client process of `bench.builds`: ``python -m bench.builds_client BOOTSTRAP PREFIX SCOPE``.

It reads a line of JSON for each turn and prints a line when the turn is over. All builds have the calls it uses.
"""

from __future__ import annotations

import json
import random
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anabranch
from anabranch.processing.app import Processor
from anabranch.processing.worker import Worker
from bench.setting import side_by_side

ROWS, EVENTS = 10_000, 20_000
KEYS = [b"%08d" % i for i in range(ROWS)]
VALUE = b"v" * 100


class Works:
    """The works of one build. Each call returns the number of commits, or of events for ``map``."""

    def __init__(self, client: anabranch.Client, scope: str) -> None:
        self._client = client
        self._scope = scope
        self._stream, self._table = f"{scope}/events", f"{scope}/rows"
        self._source, self._copy = f"{scope}/source", f"{scope}/copy"
        for stream in (self._stream, self._source, self._copy):
            client.create_stream(stream, 2)
        client.create_table(self._table, 4)
        with client.begin(scope) as txn:
            txn.write_many(self._table, [(b"1000", key) for key in KEYS])
            txn.commit(timeout=60)
        for start in range(0, EVENTS, 100):
            with client.begin(scope) as txn:
                for i in range(start, start + 100):
                    txn.write(self._source, VALUE, key=KEYS[i % ROWS])
                txn.commit(timeout=60)
        self._replica = client.replica(self._table, timeout=60)
        self._replica.snapshot().close()

    def one_shots(self, in_flight: int, seconds: float) -> int:
        """Transactions of ten events, each one command."""

        def commit(_: random.Random) -> None:
            with self._client.begin(self._scope) as txn:
                for i in range(10):
                    txn.write(self._stream, VALUE, key=b"key-%d" % i)
                txn.commit(timeout=60)

        return _repeat(commit, in_flight, seconds)

    def transfers(self, in_flight: int, seconds: float) -> int:
        """Transactions that read two rows and write both."""

        def commit(chance: random.Random) -> None:
            pair = chance.sample(KEYS, 2)

            def move(txn: Any) -> None:
                for key, amount in zip(pair, (-1, 1), strict=True):
                    held = int(txn.get(self._table, key) or 0) + amount
                    txn.put(self._table, key, b"%d" % held)

            self._replica.transact(move, timeout=60)

        return _repeat(commit, in_flight, seconds)

    def map(self) -> int:
        """Events that a fresh processor copies, from its worker's start to its end."""
        app = Processor(f"{self._scope}/p{uuid.uuid4().hex[:8]}", tasks=2, commit_interval=0.1)
        source, target = app.input(self._source), app.output(self._copy)
        handled = 0

        @app.on(source)
        def copy(event: anabranch.Event) -> None:
            nonlocal handled
            target.write(event.value, key=event.key)
            handled += 1
            if handled == EVENTS:
                worker.stop.set()

        with TemporaryDirectory(prefix="anabranch-bench-") as folder:
            worker = Worker(app, self._client, Path(folder))
            try:
                worker.run()
            finally:
                worker.close()
        return EVENTS


def _repeat(commit: Callable[[random.Random], None], in_flight: int, seconds: float) -> int:
    counts = [0] * in_flight
    until = time.monotonic() + seconds

    def work(number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < until:
            commit(chance)
            counts[number] += 1

    side_by_side(work, in_flight)
    return sum(counts)


def main() -> None:
    """Answer until standard input ends."""
    bootstrap, prefix, scope = sys.argv[1:]
    with anabranch.connect(bootstrap, prefix=prefix, timeout=60) as client:
        works = Works(client, scope)
        calls: dict[str, Callable[[float], Any]] = {
            "begin": lambda _: {"from": anabranch.__file__},
            "one-shots, 1 in flight": lambda s: {"count": works.one_shots(1, s)},
            "one-shots, 64 in flight": lambda s: {"count": works.one_shots(64, s)},
            "transfers, 64 in flight": lambda s: {"count": works.transfers(64, s)},
            "map": lambda _: {"count": works.map()},
        }
        for line in sys.stdin:
            question = json.loads(line)
            answer = calls[question["work"]](question.get("seconds", 0.0))
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
