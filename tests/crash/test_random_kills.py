"""SIGKILLs of the leader at random moments, and of writers: nothing lost, nothing twice, no half.

The judge is a plain consumer (confluent-kafka, read_committed) that knows nothing of the library: it sees
payloads, which say of whose transaction they are.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

import anabranch
from anabranch.errors import UnknownTransaction
from anabranch.ports import Log
from tests.conftest import Broker
from tests.crash.children import wait_more
from tests.crash.leader import Lead
from tests.crash.load import Drive, Help, payloads, read_diaries
from tests.crash.oracle import check_stream, read_status, read_stream
from tests.crash.zygote import Child, Spec, Zygote

KILLS = int(os.environ.get("ANABRANCH_KILLS", "500"))
SEED = int(os.environ.get("ANABRANCH_SEED", time.time_ns() % 1_000_000))
SEGMENTS = {"wide": 3, "narrow": 1}
READ_DEADLINE_S = 60.0
FEW = 10  # fewer commits show nothing; how many there are is the machine's speed


@dataclass
class Chaos:
    """Controllers on three machines' folders, drivers and helpers; and who kills them."""

    zygote: Zygote
    bootstrap: str
    folder: Path
    chance: random.Random
    prefix: str = field(default_factory=lambda: f"rk{uuid.uuid4().hex[:6]}")
    leader: Child | None = None
    workers: list[Child] = field(default_factory=list)
    forked: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    chunk_bytes: int = Lead.chunk_bytes
    threads: bool = False
    tidy: bool = False

    @property
    def scope(self) -> str:
        return f"{self.prefix}-scope"

    @property
    def spool(self) -> Path:
        return self.folder / "spool"

    def lead(self) -> Child:
        """The next leader, on some machine; one in ten of them has lost its disk."""
        machine = self.folder / f"machine-{self.chance.randrange(3)}"
        if self.chance.random() < 0.1:
            shutil.rmtree(machine, ignore_errors=True)
        spec = Lead(
            self.bootstrap,
            self.prefix,
            "leader",
            folder=str(machine / "table"),
            prepare=True,
            chunk_bytes=self.chunk_bytes,
            threads=self.threads,
            tidy=self.tidy,
        )
        self.leader = self.zygote.fork(spec)
        return self.leader

    def kill_leader(self) -> None:
        """At a random moment: of its work, or of its taking the lead."""
        leader = self.leader
        assert leader is not None
        if self.chance.random() < 0.8:
            leader.wait_leading(30.0)
        time.sleep(self.chance.uniform(0, 0.3))
        assert leader.running, f"the leader ended by itself: {leader.status} {leader.events[-3:]}"
        leader.kill()
        self.killed["controller"] += 1
        self.lead()

    def add_worker(self) -> None:
        """A driver or a helper, so that there are two of each."""
        kinds = Counter(type(w.spec) for w in self.workers)
        kind = Drive if kinds[Drive] <= kinds[Help] else Help
        self.forked += 1
        name = f"{kind.__name__.lower()}-{self.forked}"
        spec: Spec = kind(
            self.bootstrap,
            self.prefix,
            name,
            scope=self.scope,
            spool=str(self.spool),
            seed=self.chance.randrange(1 << 30),
        )
        self.workers.append(self.zygote.fork(spec))

    def kill_worker(self) -> None:
        """One of them, at whatever it is."""
        victim = self.workers.pop(self.chance.randrange(len(self.workers)))
        victim.kill()
        self.killed["writer"] += 1
        self.add_worker()

    def finish(self) -> None:
        """All processes finish the work in hand."""
        for worker in self.workers:
            worker.wait_said("works", 60.0)  # before, it listens to no signal
            worker.signal(signal.SIGTERM)
        for worker in self.workers:
            worker.wait_ended(60.0)
            assert worker.status == 0, f"{worker.spec.name}: {worker.status} {worker.events[-2:]}"


def consume(bootstrap: str, scope: str) -> Counter[tuple[bytes, str]]:
    """Every payload, with the id in its header, that a plain consumer sees, to the ends as of now."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"judge-{uuid.uuid4().hex}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
        }
    )
    try:
        places = [(f"{scope}.{name}", p) for name, n in SEGMENTS.items() for p in range(n)]
        ends = {
            place: consumer.get_watermark_offsets(TopicPartition(*place), timeout=10)[1]
            for place in places
        }
        consumer.assign([TopicPartition(*place, 0) for place in places])
        seen: Counter[tuple[bytes, str]] = Counter()
        until = time.monotonic() + READ_DEADLINE_S
        left = {place for place in places if ends[place]}
        while left:
            assert time.monotonic() < until, f"{left} can't be read to {ends}"
            for message in consumer.consume(10_000, timeout=0.2):
                if message.error() is None:
                    header = dict(message.headers() or [])["ab.txn"]
                    assert isinstance(header, bytes)
                    seen[message.value() or b"", header[:16].hex()] += 1
            at = consumer.position([TopicPartition(*place) for place in left])
            left = {(p.topic, p.partition) for p in at if p.offset < ends[p.topic, p.partition]}
        return seen
    finally:
        consumer.close()


@dataclass
class Intent:
    """The plan of a transaction, and the answer to its driver."""

    takes: dict[str, int] = field(default_factory=dict)
    told: bool = False
    aborted: bool = False
    one_shot: bool = False
    txn: str = ""


def intents(spool: Path) -> tuple[dict[str, Intent], Counter[str], list[str]]:
    """By the id in the payloads: what the diaries say; troubles by kind; defects."""
    found: dict[str, Intent] = defaultdict(Intent)
    troubles: Counter[str] = Counter()
    defects: list[str] = []
    for line in read_diaries(spool):
        own = line.get("own") or line.get("txn", "")
        match line["what"]:
            case "begun":
                found[own] = Intent()
            case "one-shot":
                found[own] = Intent({"one-shot": line["count"]}, one_shot=True)
            case "commit":
                found[own].takes = line["takes"]
            case "told":
                found[own].told = True
                found[own].txn = line["txn"]
            case "unknown":
                found[own].txn = line["txn"]
            case "abort" | "told abort":
                found[own].aborted = True
            case "trouble":
                troubles[line["kind"]] += 1
            case "defect":
                defects.append(f"{line['kind']}: {line['why']}")
    return found, troubles, defects


def states(client: anabranch.Client, ids: list[str]) -> dict[str, str]:
    """The state of each transaction; empty where nothing is known of it."""
    found = {}
    for txn_id in ids:
        try:
            found[txn_id] = str(client.state(txn_id).state)
        except UnknownTransaction:
            found[txn_id] = ""
    return found


@pytest.mark.broker
@pytest.mark.soak
@pytest.mark.timeout(300 + 10 * KILLS)
def test_random_kills(
    broker: Broker, zygote: Zygote, log: Log, tmp_path: Path, measured: Callable[[str], None]
) -> None:
    chance = random.Random(SEED)
    chaos = Chaos(zygote, broker.bootstrap, tmp_path, chance)
    chaos.spool.mkdir()
    print(f"ANABRANCH_SEED={SEED}")
    started = time.monotonic()
    chaos.lead().wait_leading(30.0)
    with anabranch.connect(broker.bootstrap, prefix=chaos.prefix) as client:
        for name, segments in SEGMENTS.items():
            client.create_stream(f"{chaos.scope}/{name}", segments)
    for _ in range(4):
        chaos.add_worker()
    for worker in chaos.workers:
        worker.wait_said("works", 30.0)
    for kill in range(KILLS):
        chaos.kill_leader()
        if kill % 4 == 3:
            chaos.kill_worker()
    told = b'"what": "told"'  # a line may be half written
    wait_more(lambda: sum(at.read_bytes().count(told) for at in chaos.spool.glob("*.diary")))
    chaos.finish()
    known, troubles, defects = intents(chaos.spool)
    assert not defects, defects[:3]
    asked = sorted(i for i, intent in known.items() if not intent.one_shot)
    answers = []
    leader = chaos.leader
    assert leader is not None
    for _ in range(2):
        leader.wait_leading(30.0)
        until = time.monotonic() + 30
        for _ in range(2):
            with anabranch.connect(broker.bootstrap, prefix=chaos.prefix) as client:
                while client.transactions(chaos.scope):  # those of the killed go stale first
                    assert time.monotonic() < until, "transactions of killed drivers stay open"
                    time.sleep(0.1)
                answers.append(states(client, asked))
        leader.kill()
        leader = chaos.lead()
    leader.wait_leading(30.0)
    assert all(answer == answers[0] for answer in answers[1:]), "answers change"
    leader.signal(signal.SIGTERM)
    leader.wait_ended()
    seen = consume(broker.bootstrap, chaos.scope)
    verdict = judge(known, answers[0], seen)
    for name in SEGMENTS:
        check_stream(read_stream(log, f"{chaos.scope}/{name}"))
    terms = read_status(log, chaos.prefix).terms
    measured(
        f"{chaos.killed['controller']} leaders and {chaos.killed['writer']} writers killed in "
        f"{time.monotonic() - started:.0f} s, {len(terms)} terms; {sum(seen.values())} events of "
        f"{dict(verdict)}; troubles: {dict(troubles)}; seed {SEED}"
    )
    assert verdict["committed, told"] > FEW, "too little was done under the kills"


def judge(
    known: dict[str, Intent], states: dict[str, str], seen: Counter[tuple[bytes, str]]
) -> Counter[str]:
    """The events seen are exactly those in answers."""
    twice = [what for what, times in seen.items() if times > 1]
    assert not twice, f"{len(twice)} payloads twice, as {twice[:3]}"
    by_txn: dict[str, set[bytes]] = defaultdict(set)
    headers: dict[str, set[str]] = defaultdict(set)
    for value, header in seen:
        own = value.split(b" ", 1)[0].decode()
        by_txn[own].add(value)
        headers[own].add(header)
    strangers = by_txn.keys() - known.keys()
    assert not strangers, f"transactions that nobody began: {sorted(strangers)[:3]}"
    verdict: Counter[str] = Counter()
    for txn, intent in known.items():
        visible = by_txn.get(txn, set())
        whole = {
            value
            for who, count in intent.takes.items()
            for _, _, value in payloads(bytes.fromhex(txn), who, count)
        }
        # A one-shot's id is known by its answer or its events; that the two agree is seen here.
        told = f"{txn}: {len(visible)} of {len(whole)} events visible, {intent}"
        assert visible in (set(), whole), told
        assert len(headers[txn]) == bool(visible), told
        assert bool(visible) or not intent.told, told
        assert not (visible and intent.aborted), told
        if not intent.one_shot:
            told += f", {states[txn]}"
            assert states[txn] in ("COMMITTED", "ABORTED"), told
            assert bool(visible) == (states[txn] == "COMMITTED"), told
            assert headers[txn] in (set(), {txn}), told
        elif intent.txn:
            assert headers[txn] in (set(), {intent.txn}), told
        verdict[f"{'committed' if visible else 'aborted'}{', told' * intent.told}"] += 1
    return verdict
