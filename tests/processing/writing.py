"""What a trial's inputs get: transactions of all sizes over all of them, once each, while they are scaled."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import anabranch
from anabranch.errors import AskOutcomeError, BeginAgainError, RetryError
from tests.processing.program import SCOPE_INPUTS, TASKS, WINDOW_MS, Fold, Given, task_of
from tests.processing.workers import Failed

KEYS = [b"key-%d" % number for number in range(200)]
BIG, HUGE = 4_000, 14_000  # events: below and above what one commit takes
FEEDERS = 3
STEP_MS = 25  # of event time, from a transaction to the next
BEGUN_MS = 1_700_000_000_000
END_S = 120.0
T = TypeVar("T")


@dataclass
class Writing:
    """Writes to the inputs of a scope. ``committed``: commit timestamp and events of each transaction."""

    bootstrap: str
    prefix: str
    scope: str
    seed: int
    committed: list[tuple[int, list[Given]]] = field(default_factory=list)
    written: int = 0
    allowed: int = 0  # events to be written by now
    scaled: list[tuple[float, float]] = field(default_factory=list)  # monotonic, from and to
    done: Counter[str] = field(default_factory=Counter)
    over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.streams = [f"{self.scope}/{name}" for name in SCOPE_INPUTS]
        self._lock = threading.Lock()
        self._clock_ms = BEGUN_MS
        self._names = 0

    @contextmanager
    def connect(self) -> Iterator[anabranch.Client]:
        """A client."""
        with anabranch.connect(self.bootstrap, prefix=self.prefix, timeout=20.0) as client:
            yield client

    @property
    def outputs(self) -> list[str]:
        return [f"{self.scope}/{name}" for name in ("out", "times", "late")]

    def create(self, client: anabranch.Client) -> None:
        """Inputs and outputs."""
        for stream, segments in zip(self.streams, SCOPE_INPUTS.values(), strict=True):
            client.create_stream(stream, segments=segments)
        for stream in self.outputs:
            client.create_stream(stream, segments=2)

    def fold(self) -> Fold:
        """What outputs and stores have to be by now."""
        fold = Fold()
        for _, events in sorted(self.committed):
            fold.commit(events)
        return fold

    def feed(self, events: int, number: int) -> None:
        """Write until there are ``events``, as fast as `allowed` grows. ``number``: of the thread."""
        chance = random.Random(f"{self.seed}/feed/{number}")
        bursts = [(events * part // 8, BIG) for part in range(1, 8) if events > 4 * BIG]
        bursts += [(events * part // 3, HUGE) for part in (1, 2) if events > 4 * HUGE]
        bursts = sorted(bursts)[number::FEEDERS]
        with self.connect() as client:
            while self.written < events and not self.over.is_set():
                if self.written >= self.allowed:
                    time.sleep(0.01)
                    continue
                luck = chance.random()
                count = chance.randint(1, 40)
                if bursts and self.written > bursts[0][0]:
                    _, count = bursts.pop(0)
                elif luck < 0.1:
                    count = chance.randint(300, 1500)
                elif luck < 0.4:
                    count = chance.randint(50, 200)
                self.commit(client, self.events(count, chance))

    def scale(self, events: int, scalings: int) -> None:
        """Scale the inputs, one after another; a transaction that began before commits after."""
        chance = random.Random(f"{self.seed}/scale")
        with self.connect() as client:
            for number in range(scalings):
                while self.written < events * (number + 0.5) / (scalings + 1):
                    if self.over.wait(0.02):
                        return
                stream, segments = chance.choice(self.streams), chance.randint(1, 6)

                def scale(stream: str = stream, segments: int = segments) -> None:
                    begun = time.monotonic()
                    with client.outside():  # a transaction of this client is open
                        self._until_done(lambda: client.scale(stream, segments=segments))
                    self.scaled.append((begun, time.monotonic()))
                    self.done["scalings"] += 1

                self.commit(client, self.events(chance.randint(20, 600), chance), scale)

    def to_each_task(self, client: anabranch.Client, later_ms: int = STEP_MS) -> None:
        """One event for each task, so much later in event time."""
        with self._lock:
            self._clock_ms += later_ms
            first, now = self.written, self._clock_ms
            self.written += TASKS
        keys = {task_of(key): key for key in KEYS}
        self.commit(
            client,
            [Given(self.streams[t % 3], keys[t], first + t, now) for t in range(TASKS)],
        )

    def events(self, count: int, chance: random.Random) -> list[Given]:
        """Events of one transaction: each key is in one input of it, and its numbers are new."""
        with self._lock:
            self._clock_ms += STEP_MS
            now, first = self._clock_ms, self.written
            self.written += count
        turn = chance.randrange(3)
        found = []
        for number in range(first, first + count):
            which = chance.randrange(len(KEYS))
            at = now - chance.randrange(STEP_MS)
            if chance.random() < 0.002:
                at -= 10 * WINDOW_MS  # too late for its window
            found.append(Given(self.streams[(which + turn) % 3], KEYS[which], number, at))
        return found

    def commit(
        self, client: anabranch.Client, events: Sequence[Given],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Commit them once, whatever happens: by name. ``meanwhile``: when half of them are written."""
        with self._lock:
            self._names += 1
            name = f"t{self._names}"
        half = len(events) // 2

        def once() -> int:
            with client.begin(self.scope, name) as txn:
                if txn.result is None:
                    _write(txn, events[:half])
                    if meanwhile is not None:
                        txn.flush()
                        meanwhile()
                    _write(txn, events[half:])
                    txn.commit()
                assert txn.result is not None
                return txn.result.commit_timestamp

        timestamp = self._until_done(once)
        with self._lock:
            self.committed.append((timestamp, list(events)))

    def _until_done(self, call: Callable[[], T]) -> T:
        begun = time.monotonic()
        while True:
            try:
                return call()
            except (RetryError, BeginAgainError, AskOutcomeError) as error:
                self.done[f"{type(error).__name__} of the writer"] += 1
                if time.monotonic() - begun > END_S:
                    raise Failed(f"not done in {END_S:g} s: {error}") from error
                time.sleep(0.1)


def _write(txn: anabranch.Transaction, events: Sequence[Given]) -> None:
    by_stream: dict[str, list[tuple[bytes, bytes, None, int]]] = defaultdict(list)
    for stream, key, number, timestamp in events:
        value = b'{"n":%d,"p":"%s"}' % (number, b"p" * 100)
        by_stream[stream].append((value, key, None, timestamp))
    for stream, some in by_stream.items():
        txn.write_many(stream, some)
