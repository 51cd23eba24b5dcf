"""Writers: transactions of every kind, alone and with helpers in other processes, and plain events."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message, Producer

import anabranch
from anabranch.errors import AlreadyCommitted
from anabranch.topics.names import journal_topic
from anabranch.types import Receipt
from checker.recorder import SUFFIX, Recorder, Unknown
from tests.workload.children import Ending, put, repeat, run_threads
from tests.workload.recording import (
    PATIENCE,
    TROUBLE,
    RecordedTransaction,
    Row,
    ask_state,
    by_stream,
    write_all,
)
from tests.workload.zygote import Spec, say

COLUMN_ROWS = 900
HELPERS_S = 4.0
ATTEMPTS = 4  # of a number that is not committed
PLAIN_KEYS = 4
BURST = 20  # plain events of one key, each in a batch of its own

# Kind of transaction -> weight.
ALL_KINDS = {
    "one_shot": 6,
    "short": 4,
    "long": 2,
    "team": 4,
    "attempts": 1,
    "crowd": 1,
    "numbered": 2,
    "big": 1,
    "columns": 1,
    "aborted": 1,
    "forgotten": 1,
    "ask": 1,
}


@dataclass(frozen=True)
class Plan:
    """What a process of writers does. Times are in seconds.

    ``kinds``: weights of the methods of `Writer`. ``keys``: of all writers together, so that their order counts.
    ``big``: events of each flush of a big transaction. ``keepalive``: of transactions; ``forgotten``: of those that
    are left. ``plain``: the longest pause between plain writes; 0: no plain writes. ``segments``: of each stream at
    first, which is how many journal partitions plain writes use.
    """

    kinds: Mapping[str, int] = field(default_factory=lambda: ALL_KINDS)
    threads: int = 3
    keys: int = 12
    big: int = 250
    keepalive: float = 10.0
    forgotten: float = 3.0
    plain: float = 2.0
    segments: int = 2
    call: float = 30.0


@dataclass(frozen=True)
class Write(Spec):
    """A process of writers, until SIGTERM; then it finishes the work in hand."""

    streams: tuple[str, ...] = ()
    spool: str = ""
    seed: int = 0
    plan: Plan = field(default_factory=Plan)

    run = "tests.workload.writers:write"


@dataclass(frozen=True)
class Help(Write):
    """A process that joins the transactions of teams, until SIGTERM.

    It finds tokens in files of the spool, and leaves receipts there, as tasks of a batch job would.
    """

    run = "tests.workload.writers:help_out"


def connect(spec: Spec, seconds: float) -> anabranch.Client:
    return anabranch.connect(spec.bootstrap, prefix=spec.prefix, timeout=seconds, config=PATIENCE)


def write(number: int, given: dict[str, Any]) -> int:
    """Run the process of a `Write`."""
    spec = Write(**given | {"plan": Plan(**given["plan"])})
    ending = Ending()
    recorder = Recorder(Path(spec.spool) / f"{spec.name}{SUFFIX}")
    with connect(spec, spec.plan.call) as client:
        bodies = []
        for thread in range(spec.plan.threads):
            writer = Writer(number, client, recorder, spec, thread, ending)
            bodies.append(partial(repeat, number, ending, writer.one, TROUBLE))
        if spec.plan.plain:
            plain = PlainWriter(recorder, spec)
            bodies.append(partial(repeat, number, ending, partial(plain.one, ending), TROUBLE))
        return run_threads(number, bodies)


@dataclass
class Writer:
    """One transaction after the other, by one thread."""

    number: int
    client: anabranch.Client
    recorder: Recorder
    spec: Write
    thread: int
    ending: Ending
    _transactions: int = 0
    _rows: int = 0
    _series_number: int = 0
    _known: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(f"{self.spec.seed}/{self.thread}")
        self._name = f"{self.spec.name}.{self.thread}"

    def one(self) -> None:
        """Do something of a kind that the plan weighs."""
        kinds = self.spec.plan.kinds
        (kind,) = self._chance.choices(list(kinds), list(kinds.values()))
        getattr(self, kind)()

    # -- kinds ------------------------------------------------------------------------------------------

    def one_shot(self) -> None:
        with self._begun(None) as txn:
            txn.write(self.rows(20))
            self._commit(txn)

    def short(self) -> None:
        """Some writes, which mostly are several runs of a journal."""
        with self._opened() as txn:
            for _ in range(self._chance.randint(1, 3)):
                txn.write(self.rows(10))
                if self._chance.random() < 0.5:
                    txn.txn.flush()
            self._commit(txn)

    def long(self) -> None:
        """Streams scale meanwhile."""
        with self._opened() as txn:
            for _ in range(3):
                txn.write(self.rows(20))
                time.sleep(self._chance.uniform(0.1, 1.0))
            self._commit(txn)

    def crowd(self) -> None:
        """Some that were open while streams scaled commit together."""
        together = time.monotonic() + self._chance.uniform(0.3, 1.2)

        def one(txn: RecordedTransaction) -> None:
            with contextlib.suppress(*TROUBLE):
                txn.txn.flush()
                time.sleep(max(0.0, together - time.monotonic()))
                self._commit(txn)

        with contextlib.ExitStack() as begun, ThreadPoolExecutor(3) as pool:
            txns = [begun.enter_context(self._opened()) for _ in range(3)]
            for txn in txns:
                txn.write(self.rows(4))
            list(pool.map(one, txns))

    def big(self) -> None:
        with self._opened() as txn:
            for _ in range(3):
                txn.write(self.rows(self.spec.plan.big, least=self.spec.plan.big))
                txn.txn.flush()
            self._commit(txn)

    def columns(self) -> None:
        """Through the library's own producer, in place of librdkafka's."""
        with self._opened() as txn:
            for _ in range(3):
                for stream, rows in by_stream(self.rows(COLUMN_ROWS, least=COLUMN_ROWS)).items():
                    table = pa.table(
                        {"key": [row.key for row in rows], "value": [row.value for row in rows]}
                    )
                    listed = [[row.key, row.id] for row in rows]
                    asked = {"txn": txn.handle, "writer": "own", "stream": stream}
                    with self.recorder.asking("write", **asked, events=listed):
                        txn.txn.write_batch(stream, table)
                txn.txn.flush()
            self._commit(txn)

    def team(self) -> None:
        """This process and helpers, of which any may die. Writers whose receipts come in time are taken."""
        with self._opened() as txn:
            names = [f"h{n}" for n in range(self._chance.randint(1, 2))]
            for name in names:
                count = self._chance.choice((1, 7, 120))
                task = json.dumps([txn.txn.token().hex(), txn.handle, name, count])
                put(Path(self.spec.spool) / f"{txn.handle}.{name}.task", task)
            txn.write(self.rows(30))
            receipts: dict[str, bytes] = {}
            until = time.monotonic() + HELPERS_S
            while len(receipts) < len(names) and time.monotonic() < until:
                for name in names:
                    path = Path(self.spec.spool) / f"{txn.handle}.{name}.receipt"
                    if name not in receipts and path.exists():
                        receipts[name] = bytes.fromhex(path.read_text())
                time.sleep(0.01)
            self._commit(txn, others=list(receipts), receipts=list(receipts.values()))

    def attempts(self) -> None:
        """A task is tried twice: all of the first attempt is registered, and it is not taken."""
        with self._opened() as txn:
            token = txn.txn.token()
            txn.write(self.rows(3))
            receipts: list[Receipt | bytes] = []
            for name in ("dead", "second"):
                writer = self.client.join(token)
                write_all(self.recorder, writer, (txn.handle, name), self.rows(3))
                if name == "dead":
                    writer.flush()
                    writer.discard()
                else:
                    with self.recorder.asking("finish", txn=txn.handle, writer=name):
                        receipts.append(writer.finish())
            self._commit(txn, others=["second"], receipts=receipts)

    def numbered(self) -> None:
        """Try a number until it is committed, as a batch job does; mostly once more, which must give way."""
        self._series_number += 1
        left = ATTEMPTS
        while left and not self.ending.is_set():
            left -= 1
            with contextlib.suppress(*TROUBLE), self._opened() as txn:
                txn.write(self.rows(15))
                self._commit(txn, series=f"{self._name}.s", number=self._series_number)
                left = min(left, self._chance.choice((0, 1, 1)))

    def aborted(self) -> None:
        with self._opened() as txn:
            txn.write(self.rows(20))
            if self._chance.random() < 0.7:
                txn.txn.flush()
            txn.abort()

    def forgotten(self) -> None:
        with self._begun(self.spec.plan.forgotten) as txn:
            txn.write(self.rows(20))
            txn.txn.flush()

    def ask(self) -> None:
        """Ask for the state of an earlier transaction."""
        if self._known:
            ask_state(self.recorder, self.client, self._chance.choice(self._known), final=False)

    # -- parts ------------------------------------------------------------------------------------------

    def rows(self, most: int, least: int = 1) -> list[Row]:
        """New events, most of them of the first stream."""
        found = []
        for _ in range(self._chance.randint(least, most)):
            self._rows += 1
            is_first = len(self.spec.streams) == 1 or self._chance.random() < 0.7
            stream = (
                self.spec.streams[0] if is_first else self._chance.choice(self.spec.streams[1:])
            )
            key = f"key-{self._chance.randrange(self.spec.plan.keys)}"
            found.append(Row(stream, key, f"{self._name}.{self._rows}"))
        return found

    def _opened(self) -> contextlib.AbstractContextManager[RecordedTransaction]:
        return self._begun(self.spec.plan.keepalive)

    @contextlib.contextmanager
    def _begun(self, keepalive: float | None) -> Iterator[RecordedTransaction]:
        """Begin a transaction (None: a one-shot); one that an error leaves open becomes stale."""
        self._transactions += 1
        handle = f"{self._name}.t{self._transactions}"
        scope = self.spec.streams[0].partition("/")[0]
        txn = RecordedTransaction(self.recorder, self.client, scope, handle)
        txn.begin(keepalive)
        try:
            if txn.txn.txn_id is not None:
                self._known.append(txn.txn.txn_id)
            yield txn
        finally:
            txn.forget()

    def _commit(self, txn: RecordedTransaction, **how: Any) -> None:
        result = txn.commit(**how)
        self._known.append(result.txn_id)
        say(self.number, "commit")


class PlainWriter:
    """A producer that knows nothing of transactions."""

    def __init__(self, recorder: Recorder, spec: Write) -> None:
        self._recorder = recorder
        self._spec = spec
        self._chance = random.Random(f"{spec.seed}/plain")
        self._rows = 0
        self._producers = 0
        self._producer: Producer | None = None

    def one(self, ending: Ending) -> None:
        """Write some events to a stream; pause."""
        ending.wait(self._chance.uniform(0.02, self._spec.plan.plain))
        stream = self._chance.choice(self._spec.streams)
        is_burst = self._chance.random() < 0.3
        only = self._chance.randrange(PLAIN_KEYS)
        rows = []
        for _ in range(BURST if is_burst else self._chance.randint(1, 5)):
            self._rows += 1
            # Keys of its own: plain writes and transactions have no order.
            number = only if is_burst else self._chance.randrange(PLAIN_KEYS)
            key = f"{self._spec.name}.p{number}"
            rows.append(Row(stream, key, f"{self._spec.name}.plain.{self._rows}"))
        self._write(stream, rows, is_burst=is_burst)

    def _write(self, stream: str, rows: Sequence[Row], *, is_burst: bool) -> None:
        producer = self._producer or self._connect()
        errors: list[KafkaError | None] = []

        def delivered(error: KafkaError | None, _: Message) -> None:
            errors.append(error)

        name = f"{self._spec.name}.producer.{self._producers}"
        listed = [[row.key, row.id] for row in rows]
        with self._recorder.asking("plain", stream=stream, events=listed, producer=name):
            self._producer = None  # its sequence may have a hole, or it failed for good
            try:
                for row in rows:
                    key = row.key.encode()
                    producer.produce(
                        journal_topic(stream),
                        row.value,
                        key,
                        crc32(key) % self._spec.plan.segments,
                        on_delivery=delivered,
                    )
                    if is_burst or self._chance.random() < 0.5:
                        producer.flush(5.0)  # so that there are several batches
            except KafkaException as error:
                raise Unknown(f"not taken: {error}") from error
            producer.flush(self._spec.plan.call)
            if len(errors) < len(rows) or any(errors):
                raise Unknown(f"{len(errors)} of {len(rows)} answered, {errors[:1]}")
            self._producer = producer

    def _connect(self) -> Producer:
        self._producers += 1
        return Producer(
            {
                "bootstrap.servers": self._spec.bootstrap,
                "enable.idempotence": True,
                "acks": "all",
                "linger.ms": 5,
                "message.timeout.ms": 60_000,
                "log_level": 0,
                **PATIENCE,
            }
        )


# -- helpers --------------------------------------------------------------------------------------------


def help_out(number: int, given: dict[str, Any]) -> int:
    """Run the process of a `Help`."""
    spec = Help(**given | {"plan": Plan(**given["plan"])})
    ending = Ending()
    spool = Path(spec.spool)
    recorder = Recorder(spool / f"{spec.name}{SUFFIX}")
    with connect(spec, spec.plan.call) as client:

        def take(thread: int) -> None:
            for path in sorted(spool.glob("*.task")):
                mine = path.with_suffix(f".{spec.name}-{thread}")
                with contextlib.suppress(FileNotFoundError):  # another one was quicker
                    path.rename(mine)
                    _help_with(client, recorder, spec, json.loads(mine.read_text()))
            time.sleep(0.02)

        # The writer may commit, or have committed, without this helper.
        expected = (*TROUBLE, AlreadyCommitted)
        bodies: list[Callable[[], None]] = [
            partial(repeat, number, ending, partial(take, thread), expected)
            for thread in range(spec.plan.threads)
        ]
        return run_threads(number, bodies)


def _help_with(
    client: anabranch.Client, recorder: Recorder, spec: Help, task: tuple[str, str, str, int]
) -> None:
    token, handle, name, count = task
    chance = random.Random(f"{spec.seed}/{handle}/{name}")
    rows = [
        Row(
            spec.streams[0] if chance.random() < 0.7 else spec.streams[-1],
            f"key-{chance.randrange(spec.plan.keys)}",
            f"{handle}.{name}.{n}",
        )
        for n in range(count)
    ]
    with client.join(bytes.fromhex(token)) as writer:
        write_all(recorder, writer, (handle, name), rows)
        with recorder.asking("finish", txn=handle, writer=name):
            receipt = writer.finish()
    put(Path(spec.spool) / f"{handle}.{name}.receipt", receipt.to_bytes().hex())
