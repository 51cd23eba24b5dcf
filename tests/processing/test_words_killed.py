"""All words in two processors under SIGKILLs and scalings: what they write is a fold of what was committed."""

from __future__ import annotations

import json
import os
import random
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.client.client import Client
from anabranch.client.transaction import Transaction
from tests.cluster import ControllerProcess
from tests.conftest import Broker
from tests.processing import words
from tests.processing.workers import WorkerProcess

SEED = int(os.environ.get("ANABRANCH_SEED", time.time_ns() % 1_000_000))
COMMITS = 250
BEGUN_MS = 1_700_000_000_000
PATIENCE_S = 60.0
CHECKED = [word for word in words.WORDS if word != "inner"]
Rows = dict[bytes, list[Any]]  # values by key, in order


class Names:
    """The streams of the programs, in a scope of this run."""

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.inputs = [
            self.of(name) for name in (words.LEFT, words.RIGHT, words.ORDERS, words.PEOPLE)
        ]
        self.outs = {
            word: [f"{scope}/{name}-{word}" for name in ("out", "late")] for word in CHECKED
        }
        keys = words.NAMED, words.TOTALS, words.OF_PERSON, words.VIA
        self.keys = [self.of(name) for name in keys]

    def of(self, stream: str) -> str:
        return f"{self.scope}/{stream.partition('/')[2]}"


class Keyed:
    """Changes of orders and people, and what follows from them."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.rows: dict[str, dict[bytes, Any]] = {words.ORDERS: {}, words.PEOPLE: {}}
        self.counts = Counter[bytes]()
        self.number = 0

    def change(self) -> list[tuple[str, bytes, Any]]:
        """Some changes, for one commit."""
        found = list[tuple[str, bytes, Any]]()
        for _ in range(self.chance.randint(1, 3)):
            self.number += 1
            person = b"p%d" % self.chance.randrange(5)
            if is_order := self.chance.random() < 0.6:
                stream, key = words.ORDERS, b"o%d" % self.chance.randrange(20)
            else:
                stream, key = words.PEOPLE, person
            row: Any = {"n": self.number, "of": person.decode()}
            if self.chance.random() < 0.15:
                row = None
            elif is_order:
                self.counts[person] += 1
            self.rows[stream][key] = row
            found.append((stream, key, row))
        return found

    def joined(self) -> dict[bytes, Any]:
        """The last result of each order that has one."""
        orders, people = self.rows[words.ORDERS], self.rows[words.PEOPLE]
        pairs = (
            (key, order, people.get(order["of"].encode()))
            for key, order in orders.items()
            if order is not None
        )
        return {
            key: [order["n"], person["n"]] for key, order, person in pairs if person is not None
        }


def read(
    client: Client, streams: Sequence[str], is_done: Callable[[Mapping[str, Rows]], bool]
) -> dict[str, Rows]:
    """Values by stream and key, once they are all there, and a little later: there must be no more."""
    give_up, done = time.monotonic() + PATIENCE_S, 0
    while True:
        found: dict[str, Rows] = {name: defaultdict(list) for name in streams}
        with client.read(list(streams), timeout=1.0) as reader:
            for event in reader:
                found[event.stream][event.key or b""].append(json.loads(event.value or b"null"))
        done += is_done(found)
        if done > 1 or time.monotonic() > give_up:
            return found


def has(count: int, found: Mapping[str, Rows]) -> bool:
    """Whether there are this many events."""
    return sum(len(values) for rows in found.values() for values in rows.values()) >= count


def last_of(rows: Rows) -> dict[bytes, Any]:
    """The last value of each key, without those that are None."""
    return {key: values[-1] for key, values in rows.items() if values[-1] is not None}


def by_key(wrote: Sequence[tuple[str, bytes | None, Any, int | None]], stream: str) -> Rows:
    """What a fold wrote to a stream."""
    found: Rows = defaultdict(list)
    for name, key, value, _ in wrote:
        if name.endswith(stream):
            found[key or b""].append(value)
    return found


def same(what: str, found: Rows, wanted: Rows) -> None:
    """Raises: AssertionError, with the first difference."""
    for key in sorted(found.keys() | wanted.keys()):
        here, there = found.get(key, []), wanted.get(key, [])
        pairs = enumerate(zip_longest(here, there))
        first = next((place for place in pairs if place[1][0] != place[1][1]), None)
        assert first is None, f"{what} of {key!r}: {len(here)} of {len(there)}; {first}"


def write(client: Client, names: Names, number: int, events: Sequence[tuple[Any, ...]]) -> None:
    """Write (stream, key, value, timestamp) in one commit, once."""

    def put(txn: Transaction) -> None:
        for stream, key, value, at in events:
            data = None if value is None else json.dumps(value).encode()
            txn.write(names.of(stream), data, key=key, timestamp=at)

    client.transact(put, name=f"commit-{number}", scope=names.scope, timeout=60.0)


def check(client: Client, names: Names, commits: words.Commits, keyed: Keyed) -> Mapping[str, int]:
    """Raises: AssertionError. Returns how much was written."""
    counts = dict[str, int]()
    for word, streams in names.outs.items():
        fold = words.WORDS[word][1]()
        fold.run(commits)
        count = len(fold.wrote)
        found = read(client, streams, partial(has, count))
        for stream, name in zip(streams, ("/out", "/late"), strict=True):
            same(f"{word}{name}", found[stream], by_key(fold.wrote, name))
        counts[word] = count
    named, totals = (names.of(name) for name in (words.NAMED, words.TOTALS))
    wanted = {key: list(range(1, n + 1)) for key, n in keyed.counts.items()}
    found = read(
        client, [named, totals],
        lambda found: found[totals] == wanted and last_of(found[named]) == keyed.joined(),
    )  # fmt: skip
    assert last_of(found[named]) == keyed.joined()
    assert found[totals] == wanted
    return counts | {"named": sum(map(len, found[named].values()))}


def kill(process: ControllerProcess | WorkerProcess) -> None:
    """Kill it, if it runs."""
    if process.running:
        process.kill()


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.timeout(170)
def test_all_words_are_folds_of_their_input_under_kills(broker: Broker, tmp_path: Path) -> None:
    print(f"ANABRANCH_SEED={SEED}")
    chance, prefix = random.Random(SEED), f"pw{uuid.uuid4().hex[:6]}"
    names, keyed = Names(f"{prefix}-s"), Keyed(random.Random(SEED + 1))
    environment = {"ANABRANCH_PREFIX": prefix, "ANABRANCH_TRIAL_SCOPE": names.scope}
    controllers = [
        ControllerProcess(broker.bootstrap, tmp_path / f"c{n}", prefix) for n in range(2)
    ]
    group = ("-X", "session.timeout.ms=2000", "-X", "heartbeat.interval.ms=300")
    arguments = ("--bootstrap", broker.bootstrap, *group)
    workers = [
        WorkerProcess(
            tmp_path / f"w{n}", arguments, environment, program=f"tests.processing.words:{app}"
        )
        for n, app in enumerate(("app", "app", "keys_app"))
    ]
    commits = [
        [one._replace(at=one.at + BEGUN_MS) for one in commit]
        for commit in words.random_commits(SEED, COMMITS)
    ]
    with ExitStack() as stack:
        processes: list[ControllerProcess | WorkerProcess] = [*controllers, *workers]
        for process in processes:
            stack.callback(kill, process)
        controllers[0].start()
        controllers[0].wait_leading()  # the topics are there
        controllers[1].start()
        client = stack.enter_context(
            anabranch.connect(broker.bootstrap, prefix=prefix, timeout=20.0)
        )
        for stream in (
            *names.inputs,
            *names.keys,
            *(one for some in names.outs.values() for one in some),
        ):
            client.create_stream(stream, segments=2 if stream in names.inputs else 1)
        for worker in workers:
            worker.start()
        strike = time.monotonic() + 8.0
        for number, commit in enumerate(commits):
            events: list[tuple[Any, ...]] = [(one.stream, one.key, one.n, one.at) for one in commit]
            write(client, names, 2 * number, events)
            changes = [(*change, BEGUN_MS) for change in keyed.change()]
            write(client, names, 2 * number + 1, changes)
            if number % 70 == 35:
                client.scale(
                    chance.choice(names.inputs), segments=chance.randint(1, 4), timeout=60.0
                )
            if time.monotonic() > strike:
                strike += chance.uniform(2.0, 5.0)
                process = chance.choice(processes)
                process.kill()
                process.start()
            time.sleep(0.02)
        for worker in workers:
            worker.check()
        found = check(client, names, commits, keyed)
        for worker in workers:
            worker.check()
            worker.end()
    assert min(found.values()) > 0, found
