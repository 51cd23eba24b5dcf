"""Scalings and transactions mixed on one stream, under SIGKILLs of controllers, writers and group readers.

Judged twice: the log, read raw, whose order is told by its history alone (`oracle.check_epochs`); and what the
members of a group were given, in the order of time. Both must have each committed event, in the order of its
key.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import anabranch
from anabranch.errors import RetryError
from anabranch.ports import Log
from anabranch.protocol.schemas.records import CommitRecord, EpochRecord
from tests.conftest import Broker
from tests.crash.load import read_diaries
from tests.crash.mix import (
    CHUNK_BYTES,
    Follow,
    Mix,
    head_of,
    read_notes,
    value_of,
)
from tests.crash.oracle import StreamLog, check_epochs, check_stream, read_status, read_stream
from tests.crash.reshaping import check_nothing_left
from tests.crash.test_random_kills import SEED, Chaos
from tests.crash.zygote import Child, Spec, Zygote

SCALINGS = int(os.environ.get("ANABRANCH_SCALINGS", "200"))
TRANSACTIONS = int(os.environ.get("ANABRANCH_TRANSACTIONS", "2000"))
KILL_EVERY_S = 1.5
MOST_SEGMENTS = 6
WRITERS, READERS = 2, 4
READ_DEADLINE_S = 60.0


@dataclass
class Mixed(Chaos):
    """Writers, readers, controllers and a process that scales."""

    wanted_scalings: int = SCALINGS
    wanted_commits: int = TRANSACTIONS
    chunk_bytes: int = CHUNK_BYTES
    threads: bool = True
    tidy: bool = True
    readers: list[Child] = field(default_factory=list)
    all_writers: list[Child] = field(default_factory=list)
    kills: int = 0
    reader_due: bool = False
    read_sizes: dict[str, int] = field(default_factory=dict)
    scalings: int = 0
    refusals: Counter[str] = field(default_factory=Counter)

    @property
    def stream(self) -> str:
        return f"{self.scope}/mixed"

    @property
    def committed(self) -> int:
        """So many transactions were told to be committed."""
        return sum(len(writer.said("told")) for writer in self.all_writers)

    def add_worker(self) -> None:
        self.forked += 1
        spec: Spec = Mix(
            self.bootstrap,
            self.prefix,
            f"w{self.forked}",
            stream=self.stream,
            spool=str(self.spool),
            seed=self.chance.randrange(1 << 30),
        )
        self.workers.append(self.zygote.fork(spec))
        self.all_writers.append(self.workers[-1])

    def add_reader(self) -> None:
        self.forked += 1
        spec = Follow(
            self.bootstrap,
            self.prefix,
            f"r{self.forked}",
            stream=self.stream,
            spool=str(self.spool),
            group=f"{self.prefix}-group",
        )
        self.readers.append(self.zygote.fork(spec))

    def kill_reader(self) -> None:
        """One that is being given events: as soon as there is one."""
        self.reader_due = True

    def kill_busy_reader(self) -> None:
        """If one is due, and was given something since the last call."""
        sizes = {path.stem: path.stat().st_size for path in self.spool.glob("*.read")}
        grown = {name for name, size in sizes.items() if size > self.read_sizes.get(name, 0)}
        self.read_sizes = sizes
        busy = [reader for reader in self.readers if reader.spec.name in grown]
        if self.reader_due and busy:
            self.reader_due = False
            victim = self.chance.choice(busy)
            assert victim.running, f"a reader ended by itself: {victim.events[-2:]}"
            victim.kill()
            self.readers.remove(victim)
            self.killed["reader"] += 1
            self.add_reader()

    def kill_one(self) -> None:
        """Mostly a controller."""
        turn = (self.kill_leader, self.kill_reader, self.kill_leader, self.kill_worker)
        turn[self.kills % len(turn)]()
        self.kills += 1

    def scale(self, client: anabranch.Client, stop: threading.Event) -> None:
        """Evenly spread over the transactions."""
        segments = 1
        while self.scalings < self.wanted_scalings and not stop.is_set():
            if self.committed * self.wanted_scalings < self.scalings * self.wanted_commits:
                stop.wait(0.02)
                continue
            segments = self.chance.choice([n for n in range(1, MOST_SEGMENTS + 1) if n != segments])
            while not stop.is_set():
                try:
                    client.scale(self.stream, segments)
                    break
                except RetryError as error:
                    self.refusals[type(error).__name__] += 1
                    stop.wait(0.1)
            self.scalings += 1

    def stir(self, client: anabranch.Client) -> None:
        """Until everything is scaled and committed."""
        stop = threading.Event()
        scaler = threading.Thread(target=self.scale, args=(client, stop))
        scaler.start()
        try:
            next_kill = time.monotonic() + KILL_EVERY_S
            while self.committed < self.wanted_commits or self.scalings < self.wanted_scalings:
                assert scaler.is_alive() or self.scalings == self.wanted_scalings, (
                    "the scaling failed"
                )
                time.sleep(0.05)
                self.kill_busy_reader()
                if time.monotonic() > next_kill:
                    self.kill_one()
                    next_kill = time.monotonic() + self.chance.uniform(0.5, 1.5) * KILL_EVERY_S
        finally:
            stop.set()
            scaler.join()

    def wait_read(self, wanted: int) -> None:
        """Until the group was given so many different events."""
        until = time.monotonic() + READ_DEADLINE_S
        while len(seen := set(read_notes(self.spool))) < wanted:
            for reader in self.readers:
                assert reader.running, f"a reader ended by itself: {reader.events[-2:]}"
            assert time.monotonic() < until, f"the group was given {len(seen)} of {wanted} events"
            time.sleep(0.5)


@dataclass
class Intent:
    """The plan of a transaction."""

    values: list[bytes]
    told: bool = False
    aborted: bool = False


def intents(spool: Path) -> tuple[dict[str, Intent], Counter[str]]:
    """By the id in the payloads; and troubles by kind."""
    found: dict[str, Intent] = {}
    troubles: Counter[str] = Counter()
    for line in read_diaries(spool):
        match line["what"]:
            case "commit" | "abort" as what:
                values = [
                    value_of(line["own"], line["lane"], n)
                    for n in range(line["first"], line["end"])
                ]
                found[line["own"]] = Intent(values, aborted=what == "abort")
            case "told":
                found[line["own"]].told = True
            case "trouble":
                troubles[line["kind"]] += 1
            case "defect":
                raise AssertionError(f"{line['kind']}: {line['why']}")
    return found, troubles


def judge(known: Mapping[str, Intent], seen: Counter[bytes]) -> int:
    """Each transaction is there once and whole, or not at all. How many are there."""
    twice = [head for head, times in seen.items() if times > 1]
    assert not twice, f"{len(twice)} events twice, as {twice[:3]!r}"
    by_own: dict[str, set[bytes]] = defaultdict(set)
    for head in seen:
        by_own[head.partition(b" ")[0].decode()].add(head)
    assert by_own.keys() <= known.keys(), f"strangers: {by_own.keys() - known.keys()}"
    for own, intent in known.items():
        visible = by_own.get(own, set())
        told = f"{own}: {len(visible)} of {len(intent.values)} events are there"
        assert visible in (set(), set(intent.values)), told
        assert visible or not intent.told, f"{told}; its writer was told that it is committed"
        assert not (visible and intent.aborted), f"{told}; it was aborted"
    return len(by_own)


def number_of(head: bytes) -> int:
    return int(head.rpartition(b" ")[2])


def check_order(what: str, heads: Mapping[bytes, list[bytes]]) -> None:
    """The numbers of each key rise."""
    for key, values in heads.items():
        numbers = [number_of(head) for head in values]
        back = [(a, b) for a, b in itertools.pairwise(numbers) if a >= b]
        assert not back, f"{what}: {key!r} goes back: {back[:3]}"


def first_deliveries(notes: list[bytes], keys: Mapping[bytes, bytes]) -> dict[bytes, list[bytes]]:
    """Key -> its events in the order in which the group was given them first."""
    found: dict[bytes, list[bytes]] = defaultdict(list)
    for head in dict.fromkeys(notes):
        found[keys[head]].append(head)
    return found


def figures(stream: StreamLog) -> str:
    epochs = [record for _, record in stream.history if isinstance(record, EpochRecord)]
    own = sum(e.reference_epoch == e.stream_epoch for e in epochs) - 1
    commits = sum(isinstance(record, CommitRecord) for _, record in stream.history)
    return (
        f"{commits} commits, {len(stream.events)} events, {own} scalings, "
        f"{len(epochs) - 1 - own} duplicate epochs"
    )


@pytest.mark.broker
@pytest.mark.soak
@pytest.mark.timeout(120 + 3 * SCALINGS + TRANSACTIONS)
def test_scalings_and_transactions_under_kills(
    broker: Broker,
    zygote: Zygote,
    log: Log,
    tmp_path: Path,
    measured: Callable[[str], None],
) -> None:
    mixed = Mixed(
        zygote,
        broker.bootstrap,
        tmp_path,
        random.Random(SEED),
    )
    mixed.spool.mkdir()
    print(f"ANABRANCH_SEED={SEED}")
    started = time.monotonic()
    mixed.lead().wait_leading(30.0)
    with anabranch.connect(broker.bootstrap, prefix=mixed.prefix) as client:
        client.create_stream(mixed.stream, 1)
        for _ in range(WRITERS):
            mixed.add_worker()
        for _ in range(READERS):
            mixed.add_reader()
        for child in (*mixed.workers, *mixed.readers):
            child.wait_said("works", 30.0)
        mixed.stir(client)
        mixed.finish()
        until = time.monotonic() + 60
        while left := client.transactions(mixed.scope):  # those of the killed go stale first
            assert time.monotonic() < until, f"still open: {left[:3]}"
            time.sleep(0.1)
    worked = time.monotonic() - started
    early = len(read_notes(mixed.spool))
    stream = read_stream(log, mixed.stream)
    check_stream(stream)
    known, troubles = intents(mixed.spool)
    there = judge(known, Counter(head_of(event.value) for event in stream.events))
    by_key = {k: [head_of(v) for v in values] for k, values in check_epochs(stream).items()}
    check_order("the log", by_key)
    mixed.wait_read(len(stream.events))
    for reader in mixed.readers:
        reader.kill()
    notes = read_notes(mixed.spool)
    leader = mixed.leader
    assert leader is not None
    leader.wait_leading(30.0)
    leader.signal(signal.SIGTERM)
    leader.wait_ended()
    check_nothing_left(log, mixed.prefix, mixed.stream)
    keys = {head: key for key, heads in by_key.items() for head in heads}
    assert set(notes) <= keys.keys(), "the group was given what is not committed"
    given = first_deliveries(notes, keys)
    check_order("the group", given)
    assert given == by_key, "the group was not given everything"
    measured(
        f"{figures(stream)} of {there} transactions in {worked:.0f} s; killed: {dict(mixed.killed)}, "
        f"{len(read_status(log, mixed.prefix).terms)} terms; {early} events given meanwhile, "
        f"{len(notes) - len(keys)} again; troubles: {dict(troubles)}, {dict(mixed.refusals)} of scalings; "
        f"seed {SEED}"
    )
