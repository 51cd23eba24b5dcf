"""Legal floods: a sender asks, or writes, as much as it may, beside single-request transactions of another lane.

``scripts/hostile floods --minutes 10`` runs each for that long, on a broker and a controller of its own. What Kafka
and the machine cost is not ours, so the bounds compare with the same sender, which sends as many bytes of
heartbeats; and if it writes to journals, with as many messages: its records go to a topic that no controller reads,
where the broker unpacks them, too, and heartbeats in place of its commands. The sender has one core, at a lower
priority.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

import anabranch
from anabranch.batches.records import decode_records
from anabranch.core.authorize import CREATORS, names_of
from anabranch.infra.broker import EmbeddedBroker
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicPartition
from anabranch.protocol import hybrid_time, tokens
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode, encode
from anabranch.topics.names import commands_topic, journal_topic, replies_topic
from tests.behaviour.attacks import ATTACKS, SMALL, STREAM
from tests.cluster import Cluster, start_cluster
from tests.crash.raw import Raw, Refused, make_txn_id, make_writer
from tests.owned import start_module

# Lanes: the honest one, one with a scope of its own, one without a grant.
GOOD, BAD, POOR = "good", "bad", "poor"
OWN = "own/events"
TABLE = "own/table"
VICTIM = "victim/events"  # a stream in whose journal the flood may write
WIDE = "victim/wide"  # … with four segments
ELSEWHERE = "elsewhere"  # a topic that no controller reads
PAUSE_S = 0.02  # of the honest client between two commits
CALM_S = 10.0
COMPARED_S = 120.0
WARM_S = 5.0
AFTER_S = 10.0  # after its end all is as before
SHOWN = 1_000  # of a flood's last answers
MESSAGES_S = 5_000  # the most that a flood of commands sends, so that disks suffice
LINGER_S = 0.5  # of a producer of small records
RECORDS_S = 50_000  # … and one of small records in a journal
P99, RATE, GROWTH, AFTER = 2.0, 0.5, 1.2, 2.0
LEAST_P99_S = 0.05  # below this no difference is judged: a pause of the machine is as long
SPARE_BYTES = 32 << 20  # what memory may grow by in any case


class Sent(NamedTuple):
    """A message of a flood."""

    topic: str
    value: bytes
    headers: list[tuple[str, bytes]]
    key: bytes | None = None
    timestamp: int = 0


@dataclass
class Sender:
    """The flooding side: its lane's commands, and its own stream."""

    bootstrap: str
    prefix: str
    random: Random
    lane: str = BAD
    scope: str = "own"
    flush: Callable[[], object] = lambda: None  # sends what was yielded, in one batch

    def __post_init__(self) -> None:
        log = KafkaLog(self.bootstrap, {})
        self.raw = Raw(self.bootstrap, self.prefix, log, lane=self.lane).start()

    def close(self) -> None:
        self.raw.log.close()

    def command(self, command: Any, *, headers: list[tuple[str, bytes]] | None = None) -> Sent:
        asks = [("ab.cid", self.random.randbytes(16)), ("ab.reply", bytes(4))]
        payload = command if isinstance(command, bytes) else encode(command)
        return Sent(
            commands_topic(self.prefix, self.lane), payload, asks if headers is None else headers
        )

    def asked(self, *commands: Any) -> None:
        """Ask for what a flood needs before it begins. `Refused` if the leader refuses some of it."""
        for answer in self.raw.ask_all(commands, deadline_s=120):
            if isinstance(answer, r.Refusal):
                raise Refused(answer)

    def now(self) -> int:
        """The time that the leader gives in its answers, which snapshots and locks may have."""
        self.asked(r.SafeTime(self.scope, None))
        return self.raw.hybrid_time

    def begin(self, count: int, *, snapshot: int = 0) -> list[bytes]:
        """Begin so many transactions."""
        made = [make_txn_id() for _ in range(count)]
        self.asked(
            *[r.Begin(i, self.scope, None, 600_000, bytes(32), None, snapshot) for i in made]
        )
        return made

    def shot(self, stream: str, *keys: bytes, headers: int = 0, at: int = -1) -> r.OneShot:
        few = tuple(r.EventHeader("h", b"") for _ in range(headers))
        events = tuple(r.Event(stream, -1, key, b"v", few, at) for key in keys)
        return r.OneShot(make_txn_id(), stream.partition("/")[0], None, events)


Flood = Callable[[Sender], Iterator[Sent]]
FLOODS: dict[str, tuple[str, Flood]] = {}


def flood(lane: str) -> Callable[[Flood], Flood]:
    """Register a flood; its docstring is its name."""

    def note(made: Flood) -> Flood:
        FLOODS[made.__name__.replace("_", "-")] = (lane, made)
        return made

    return note


def heartbeats(sender: Sender) -> Iterator[Sent]:
    """Heartbeats for no transaction that exists: what all floods are compared with."""
    while True:
        yield sender.command(r.Heartbeat((sender.random.randbytes(60),)))


def writes_journals(name: str) -> bool:
    """Whether a flood writes records to journals."""
    return name.startswith(("journal", "events"))


def compared_with(sender: Sender, made: Flood) -> Iterator[Sent]:
    """A flood as it costs Kafka alone: heartbeats for its commands, its records for journals elsewhere."""
    instead = heartbeats(sender)
    for message in made(sender):
        if message.topic == commands_topic(sender.prefix, sender.lane):
            yield next(instead)
        else:
            yield message._replace(topic=ELSEWHERE)


@flood(BAD)
def writers(sender: Sender) -> Iterator[Sent]:
    """Ever more writers of one transaction, and questions about it."""
    (txn_id,) = sender.begin(1)
    token = _token(txn_id)
    for _ in itertools.count():
        for _ in range(20):
            yield sender.command(r.Touch(token, OWN, make_writer()))
        yield sender.command(r.GetState(txn_id))


@flood(BAD)
def aborts_without_answer(sender: Sender) -> Iterator[Sent]:
    """Transactions with many writers, aborted by commands that want no answer."""
    while True:
        txn_id = make_txn_id()
        yield sender.command(r.Begin(txn_id, sender.scope, None, 600_000, bytes(32)))
        for _ in range(1_000):
            yield sender.command(r.Touch(_token(txn_id), OWN, make_writer()), headers=[])
        yield sender.command(r.Abort(_token(txn_id), "x" * 1_000), headers=[])


@flood(POOR)
def lists(sender: Sender) -> Iterator[Sent]:
    """Lists of all transactions, by a lane that may see none of them."""
    while True:
        yield sender.command(r.ListTransactions(None, True, 10_000))


@flood(BAD)
def open_lists(sender: Sender) -> Iterator[Sent]:
    """Lists of a lane's own open transactions, which are as many as it may have."""
    sender.begin(900)
    while True:
        yield sender.command(r.ListOpen(None, None, 10_000))
        yield sender.command(r.ListTransactions(None, False, 10_000))


@flood(BAD)
def lock_lists(sender: Sender) -> Iterator[Sent]:
    """Many locks, and lists of them."""
    now = sender.now()
    for txn_id in sender.begin(10, snapshot=now):
        locks = (r.TableLocks(TABLE, now, now, tuple(range(4_000)), ()),)
        sender.asked(r.LockReads(_token(txn_id), make_writer(), 1, locks))
    while True:
        yield sender.command(r.ListTableLocks(None, 10_000))


@flood(BAD)
def locks_of_nothing(sender: Sender) -> Iterator[Sent]:
    """Sets of locks that name writers and lock nothing, and commits that have to walk them."""
    while True:
        (txn_id,) = sender.begin(1, snapshot=sender.now())
        writers = [make_writer() for _ in range(1_000)]
        for writer in writers:
            yield sender.command(r.Touch(_token(txn_id), OWN, writer))
        sources = tuple(r.WriterAt(writer, 1) for writer in writers)
        for number in range(9):
            yield sender.command(r.LockReads(_token(txn_id), writers[number], 1, (), sources))
        for _ in range(200):
            yield sender.command(r.Commit(_token(txn_id), (), None, None, 1))


@flood(BAD)
def processors(sender: Sender) -> Iterator[Sent]:
    """Processors of fresh names, made and deleted."""
    for number in itertools.count():
        name = f"own/p{number}"
        yield sender.command(r.CreateProcessor(name, 8, (r.ProcessorInput(OWN, "", 0, 0),)))
        yield sender.command(r.DeleteProcessor(name, 0))


@flood(BAD)
def fresh_series(sender: Sender) -> Iterator[Sent]:
    """Series that begin with each commit, and outcomes of transactions that never were."""
    for number in itertools.count():
        yield sender.command(r.Resolve(make_txn_id(), "own"))
        txn_id = make_txn_id()
        yield sender.command(r.Begin(txn_id, "own", f"series-{number}", 600_000, bytes(32)))
        yield sender.command(r.Commit(_token(txn_id), (), None, f"series-{number}", 1, 0))


@flood(POOR)
def ahead(sender: Sender) -> Iterator[Sent]:
    """Questions of a client whose clock is ahead."""
    while True:
        us = int((time.time() + 9.9) * 1e6)
        seen = hybrid_time.from_us(us).to_bytes(8, "big")
        asks = [("ab.cid", sender.random.randbytes(16)), ("ab.reply", bytes(4)), ("ab.ht", seen)]
        yield sender.command(r.ListTransactions(None, False, 10), headers=asks)


@flood(BAD)
def snapshots(sender: Sender) -> Iterator[Sent]:
    """Transactions that read as of long ago."""
    past = sender.now() - hybrid_time.from_us(9 * 60 * 1_000_000)
    while True:
        txn_id = make_txn_id()
        yield sender.command(r.Begin(txn_id, "own", None, 600_000, bytes(32), None, past))
        yield sender.command(r.LockReads(_token(txn_id), 0, 0, tables=(TABLE,)))
        yield sender.command(r.Begin(make_txn_id(), "own", None, 600_000, bytes(32), None, 1))
        yield sender.command(r.Abort(_token(txn_id), ""))


@flood(BAD)
def ranges(sender: Sender) -> Iterator[Sent]:
    """Ranges of a table, as many as it has, and single requests of many rows."""
    now = sender.now()
    for number, txn_id in enumerate(sender.begin(10, snapshot=now)):
        span = tuple(
            r.LockedRange(b"%d-%06d" % (number, i), b"%d-%06d~" % (number, i)) for i in range(100)
        )
        locks = (r.TableLocks(TABLE, now, now, (), span),)
        sender.asked(r.LockReads(_token(txn_id), make_writer(), 1, locks))
    while True:
        yield sender.command(sender.shot(TABLE, *[sender.random.randbytes(8) for _ in range(65)]))


@flood(BAD)
def events_of_all_kinds(sender: Sender) -> Iterator[Sent]:
    """Single requests with many headers, far times, big values and none, and plain writes of these kinds."""
    random, journal = sender.random, journal_topic(OWN)
    while True:
        yield sender.command(sender.shot(OWN, b"k", headers=1_000))
        yield sender.command(sender.shot(OWN, b"k", at=253_402_300_799_999))
        yield sender.command(sender.shot(OWN, *[b""] * 1_000))
        yield Sent(journal, bytes(900_000), [], b"k")
        yield Sent(journal, b"", [("h", b"")] * 1_000, b"k", random.choice((0, 1, 1 << 61)))


@flood("open")
def open_of_all_types(sender: Sender) -> Iterator[Sent]:
    """Commands of `open`, of all types, legal and not."""
    random, kinds = (
        sender.random,
        [name for name in ATTACKS if "14 MB" not in name and "bomb" not in name],
    )
    while True:
        made = ATTACKS[random.choice(kinds)](random)
        yield sender.command(made)
        yield sender.command(r.ListOpen(None, None, 10_000))
        yield sender.command(r.DescribeStreams(None, None))
        yield sender.command(r.FindScope(f"s{random.getrandbits(20)}", True))


@flood(BAD)
def journal_bombs(sender: Sender) -> Iterator[Sent]:
    """One journal's batches of 15 KB that unpack to 480 MiB."""
    while True:
        yield Sent(journal_topic(VICTIM), bytes(480 << 20), [], b"k")
        time.sleep(2.0)


@flood(BAD)
def journal_writers(sender: Sender) -> Iterator[Sent]:
    """Batches of 40,000 records in one journal, each of another writer of no transaction."""
    journal = journal_topic(VICTIM)
    while True:
        txn_id = make_txn_id()
        for writer in range(40_000):
            header = txn_id + writer.to_bytes(8, "big") + bytes(4)
            yield Sent(journal, b"", [("ab.txn", header)], b"k")


@flood(BAD)
def journal_runs(sender: Sender) -> Iterator[Sent]:
    """Batches of 9,000 records in one journal, each of another writer: nearly as many runs as a batch may have."""
    while True:
        txn_id = make_txn_id()
        for writer in range(9_000):
            header = txn_id + writer.to_bytes(8, "big") + bytes(4)
            yield Sent(journal_topic(VICTIM), b"", [("ab.txn", header)], b"k")
        time.sleep(2 * LINGER_S)


@flood(BAD)
def journal_taken_apart(sender: Sender) -> Iterator[Sent]:
    """Batches of 700 bytes in one journal that unpack to 14 MB, whose events go to four segments."""
    keys = [b"%d" % number for number in range(16)]
    while True:
        for key in keys:
            yield Sent(journal_topic(WIDE), bytes(900_000), [], key)
        sender.flush()


@flood(BAD)
def journal_of_a_table(sender: Sender) -> Iterator[Sent]:
    """Records without a key in a table's journal, as many as fit."""
    while True:
        yield Sent(journal_topic(TABLE), b"", [])


MIXES: dict[
    str, tuple[str, int, Callable[[str, str], bool]]
] = {  # each attacker of the promise, with all that it can do in turns
    "lane": (
        BAD,
        20,
        lambda name, lane: lane == BAD and not writes_journals(name),
    ),
    "journal": (BAD, 20_000, lambda name, _: name.startswith("journal")),
    "poor": (POOR, 20, lambda _, lane: lane == POOR),
}


def mixed(name: str) -> tuple[str, Flood]:
    """All floods of one attacker, in turns of so many messages; a bomb is a turn by itself."""
    lane, most, takes = MIXES[name]

    def made(sender: Sender) -> Iterator[Sent]:
        each = [(n, one(sender)) for n, (of, one) in FLOODS.items() if takes(n, of)]
        for (
            _,
            messages,
        ) in each:  # what they need is made before any of them uses up the lane's quota
            yield next(messages)
        while True:
            for of, messages in each:
                yield from itertools.islice(messages, 1 if of == "journal-bombs" else most)

    return lane, made


# Each attacker's ten minutes.
ALL = "lane, journal, poor, open-of-all-types, events-of-all-kinds"


def named(name: str) -> tuple[str, Flood]:
    """A flood, or a mix of floods, or heartbeats: the lane of its sender, and what it sends."""
    return mixed(name) if name in MIXES else FLOODS.get(name, (BAD, heartbeats))


def _token(txn_id: bytes) -> bytes:
    return tokens.make(bytes(32), tokens.Token(txn_id, 600_000, 1, "own", BAD))


# -- the sender's process -----------------------------------------------------------------------------------


class Pace(NamedTuple):
    """How fast a flood is sent, at most. 0: no bound."""

    messages_s: float = 0.0
    bytes_s: float = 0.0  # on the wire, packed

    def due_s(self, messages: int, size: int) -> float:
        """Seconds that this much has to take."""
        return max(
            messages / self.messages_s if self.messages_s else 0.0,
            size / self.bytes_s if self.bytes_s else 0.0,
        )


def send(sender: Sender, name: str, pace: Pace, report: Path, *, compare: bool) -> None:
    """Send a flood until this process is ended; how much it sent goes to the file ``report``.

    ``compare``: send what it is compared with.
    """
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.nice(10)
    _, made = named(name)
    messages = compared_with(sender, made) if compare else made(sender)
    limit = {"message.max.bytes": 1_000_000_000, "queue.buffering.max.kbytes": 2_000_000}
    into_journal = name.startswith("journal")
    most, linger_ms = (RECORDS_S, int(1000 * LINGER_S)) if into_journal else (MESSAGES_S, 5)
    packing = {
        "compression.type": "zstd",
        "linger.ms": linger_ms,
        "batch.size": 100 << 20,
        "batch.num.messages": 1_000_000,
    }
    sent = 0  # bytes on the wire, packed

    def count_bytes(statistics: str) -> None:
        nonlocal sent
        sent = json.loads(statistics)["tx_bytes"]

    counting = {"statistics.interval.ms": 100, "stats_cb": count_bytes}
    producer = Producer(
        {"bootstrap.servers": sender.bootstrap, "log_level": 0, **limit, **packing, **counting}
    )
    sender.flush = producer.flush
    began = time.monotonic()
    for count, message in enumerate(messages, 1):
        while True:
            try:
                producer.produce(
                    message.topic, message.value, message.key,
                    0, timestamp=message.timestamp, headers=message.headers,  # type: ignore[arg-type]
                )  # fmt: skip
                break
            except BufferError:
                producer.poll(0.1)
        if count % 100 == 0 or len(message.value) > 10_000:
            producer.poll(0)
            written = report.with_suffix(".new")
            written.write_text(json.dumps([sent, count, time.monotonic() - began]))
            written.replace(report)
            due = max(count / most, pace.due_s(count, sent))
            time.sleep(max(0.0, began + due - time.monotonic()))


# -- the honest side ----------------------------------------------------------------------------------------


@dataclass
class Found:
    """What honest commits took in one phase: seconds each, sorted; and errors."""

    taken: list[float]
    errors: list[str]
    seconds: float

    @property
    def rate(self) -> float:
        """Commits a second."""
        return len(self.taken) / self.seconds

    def at(self, share: float) -> float:
        """A percentile, in seconds."""
        return (
            self.taken[min(len(self.taken) - 1, int(len(self.taken) * share))]
            if self.taken
            else 1e9
        )

    def __str__(self) -> str:
        ms = ", ".join(f"{1000 * self.at(share):,.0f}" for share in (0.5, 0.99, 1.0))
        return f"{self.rate:6.1f}/s  p50, p99, max {ms} ms"


def honest(client: anabranch.Client, seconds: float) -> Found:
    """Commit single-request transactions one after the other for so long."""
    taken, errors = [], []
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        start = time.monotonic()
        try:
            with client.begin(STREAM.partition("/")[0]) as txn:
                txn.write(STREAM, b"v", key=b"k")
                txn.commit()
        except Exception as error:  # noqa: BLE001 - it is reported
            errors.append(f"{type(error).__name__}: {error}"[:200])
        taken.append(time.monotonic() - start)
        time.sleep(PAUSE_S)
    return Found(sorted(taken), errors, time.monotonic() - began)


def resident(pid: int) -> int:
    """Bytes of a process in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Watch:
    """Memory of the controller, each quarter of a second; and its terms."""

    cluster: Cluster
    seen: list[tuple[float, int]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watch:
        self.terms = terms(self.cluster)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        began = time.monotonic()
        while not self.over.wait(0.25) and self.cluster.controller.running:
            self.seen.append((time.monotonic() - began, resident(self.cluster.controller.pid)))

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._thread.join()

    @property
    def most(self) -> int:
        """The most bytes seen."""
        return max(size for _, size in self.seen)

    def most_within(self, begin: float, end: float) -> int:
        """… in a part of the time (shares of all)."""
        last = self.seen[-1][0]
        return max([s for at, s in self.seen if begin * last <= at <= end * last] or [0])


def answers(cluster: Cluster, lane: str) -> Counter[str]:
    """The last answers to a lane: how many of each type, or code of a refusal.

    A flood whose commands are all refused as illegal shows nothing.
    """
    log = KafkaLog(cluster.bootstrap, {})
    place = TopicPartition(replies_topic(cluster.prefix, lane), 0)
    end = log.end_offsets([place], committed=False)[place]
    found: Counter[str] = Counter()
    at = max(0, end - SHOWN)
    while at < end:
        fetched = log.fetch({place: at}, max_wait=1.0, max_bytes=8 << 20, committed=True)
        if place not in fetched:
            break
        for batch in fetched[place].batches:
            for record in decode_records(batch.data):
                if record.offset >= at and record.value:
                    result = decode(record.value).result
                    refused = isinstance(result, r.Refusal)
                    found[result.code if refused else type(result).__name__] += 1
        at = fetched[place].next_offset
    return found


def terms(cluster: Cluster) -> dict[str, int]:
    """The terms that the controller says it has."""
    return dict(json.loads(cluster.controller.status_file.read_text())["terms"])


def beside(
    cluster: Cluster,
    client: anabranch.Client,
    name: str,
    seconds: float,
    seed: int,
    pace: Pace | None = None,
) -> tuple[Found, Watch, Pace]:
    """Honest commits beside a flood, the controller's memory, and how fast the flood was sent.

    ``pace``: send what the flood is compared with, at this pace.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder) / "sent", (Path(folder) / "output").open("wb")
        arguments = ["--send", name, "--bootstrap", cluster.bootstrap, "--prefix", cluster.prefix]
        arguments += ["--seed", str(seed), "--report", str(report)]
        if pace is not None:
            arguments += ["--compare", "--pace", json.dumps(pace)]
        child = start_module(
            "tests.behaviour.floods", arguments, output=output, environment=os.environ
        )
        until = time.monotonic() + 120
        while not report.exists():
            if child.poll() is not None or time.monotonic() > until:
                raise RuntimeError(
                    f"{name} sends nothing: {(Path(folder) / 'output').read_text()[-2000:]}"
                )
            time.sleep(0.1)
        with Watch(cluster) as watch:
            found = honest(client, seconds)
        sent, count, took = json.loads(report.read_text())
        child.kill()
        child.wait()
    return found, watch, Pace(count / took, sent / took)


def judge(before: Found, during: Found, compared: Found, after: Found, watch: Watch) -> list[str]:
    """What of the promises did not hold."""
    wrong = [f"an error: {error}" for error in sorted({*during.errors, *after.errors})[:3]]
    if during.at(0.99) > max(LEAST_P99_S, P99 * compared.at(0.99)):
        wrong.append(
            f"p99 {1000 * during.at(0.99):,.0f} ms, compared with {1000 * compared.at(0.99):,.0f}"
        )
    if during.rate < RATE * compared.rate:
        wrong.append(f"{during.rate:.1f} commits a second, compared with {compared.rate:.1f}")
    if after.at(0.99) > max(LEAST_P99_S, AFTER * before.at(0.99)):
        wrong.append(
            f"10 s after its end: p99 {1000 * after.at(0.99):,.0f} ms, {1000 * before.at(0.99):,.0f} before it"
        )
    early, late = watch.most_within(0.0, 0.1), watch.most_within(0.9, 1.0)
    if late > GROWTH * early + SPARE_BYTES:
        wrong.append(f"memory grew from {early >> 20} to {late >> 20} MB")
    return wrong


def prepare(cluster: Cluster) -> anabranch.Client:
    """Lanes, grants and streams; returns the honest lane's client."""
    rights = names_of(CREATORS).split(", ")
    with anabranch.connect(
        cluster.bootstrap, prefix=cluster.prefix, lane="admin", timeout=60
    ) as admin:
        for lane in (GOOD, BAD, POOR):
            admin.add_lane(lane)
        admin.grant(GOOD, "honest/*", rights)
        admin.grant(BAD, "own/*", rights)
        for stream in (STREAM, VICTIM):
            admin.create_stream(stream)
        admin.create_stream(SMALL, settings={"max.message.bytes": 20_000})
        admin.create_stream(WIDE, 4)
    with anabranch.connect(
        cluster.bootstrap, prefix=cluster.prefix, lane=BAD, timeout=60
    ) as its_own:
        its_own.create_stream(OWN)
        its_own.create_table(TABLE)
    brokers = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    for future in brokers.create_topics([NewTopic(ELSEWHERE, 1, 1)]).values():
        future.result(60)
    return anabranch.connect(cluster.bootstrap, prefix=cluster.prefix, lane=GOOD, timeout=30)


@contextmanager
def cluster_of_its_own() -> Iterator[tuple[Cluster, anabranch.Client]]:
    """A fresh broker and controller, and the honest lane's client, which has committed for a while."""
    with (
        tempfile.TemporaryDirectory(prefix="anabranch-floods-") as folder,
        EmbeddedBroker(Path(folder) / "broker") as broker,
    ):
        cluster = start_cluster(broker.bootstrap, Path(folder), trusts_open=False)
        try:
            with prepare(cluster) as client:
                honest(client, WARM_S)
                yield cluster, client
        finally:
            cluster.controller.kill()


def run(name: str, minutes: float, seed: int) -> list[str]:
    """One flood, and then what it is compared with. Prints what was seen; returns what was wrong."""
    seconds = 60 * minutes
    with cluster_of_its_own() as (cluster, client):
        before = honest(client, CALM_S)
        during, watch, pace = beside(cluster, client, name, seconds, seed)
        answered = answers(cluster, named(name)[0])
        time.sleep(AFTER_S)
        after = honest(client, CALM_S)
        lasted = cluster.controller.running and terms(cluster) == watch.terms
    with cluster_of_its_own() as (cluster, client):
        if writes_journals(name):
            like, at = name, pace._replace(bytes_s=0.0)
        else:
            like, at = "heartbeats", pace._replace(messages_s=0.0)
        compared, _, _ = beside(cluster, client, like, min(COMPARED_S, seconds), seed, at)
    wrong = judge(before, during, compared, after, watch)
    if not lasted:
        wrong.append("the controller restarted, or another term began")
    memory = [watch.most_within(0, 0.1), watch.most_within(0.9, 1), watch.most]
    first, last, most = (size >> 20 for size in memory)
    print(
        f"{name}: {pace.bytes_s / 1000:,.0f} KB/s, seed {seed}; "
        f"memory {first}, at the end {last}, at most {most} MB"
    )
    print(
        f"  answers    {', '.join(f'{count} {what}' for what, count in answered.most_common(6)) or 'none'}"
    )
    phases = {"alone": before, "beside": during, "compared": compared, "after": after}
    for what, found in phases.items():
        print(f"  {what:10} {found}")
    for problem in wrong:
        print(f"  WRONG {problem}")
    sys.stdout.flush()
    return wrong


def main() -> int:
    """``scripts/hostile floods``."""
    parser = argparse.ArgumentParser(prog="scripts/hostile floods", description=__doc__)
    parser.add_argument(
        "floods", nargs="*", help=f"of {', '.join((*FLOODS, *MIXES))}; {ALL} if none is named"
    )
    parser.add_argument("--minutes", type=float, default=0.5, help="how long each")
    parser.add_argument("--seed", type=int, default=None, help="of all chance")
    parser.add_argument("--send", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--bootstrap", default="", help=argparse.SUPPRESS)
    parser.add_argument("--prefix", default="", help=argparse.SUPPRESS)
    parser.add_argument("--compare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--pace", type=json.loads, default=(), help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, default=Path(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else int(time.time())
    if options.send is not None:
        lane, _ = named(options.send)
        sender = Sender(options.bootstrap, options.prefix, Random(seed), lane)
        pace = Pace(*options.pace)
        send(sender, options.send, pace, options.report, compare=options.compare)
        return 0
    unknown = set(options.floods) - {*FLOODS, *MIXES}
    if unknown:
        parser.error(f"no flood {', '.join(sorted(unknown))}: {', '.join((*FLOODS, *MIXES))}")
    wrong = {name: run(name, options.minutes, seed) for name in options.floods or ALL.split(", ")}
    bad = [name for name, problems in wrong.items() if problems]
    print(
        f"{len(wrong) - len(bad)} of {len(wrong)} floods cost their sender alone"
        + (f"; not {', '.join(bad)}" if bad else "")
    )
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
