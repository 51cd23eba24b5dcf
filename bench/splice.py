"""Merging by splicing, its framing check included, against raw produce and against a copy by librdkafka.

- *splice*: fetch, CRC check, decompress, walk the framing of every record, patch, append in native
  transactions of about 100,000 records on two transactional ids in turn, as a controller does.
- *raw*: the limit. The same batches, ready in memory, in Produce requests without any transaction, up to
  five under way.
- *copy*: consume and produce with confluent-kafka in native transactions of 100,000 records, with the settings of
  evidence/splice.md. Its records have no headers, which favours it.

One partition, replication factor 1, one broker, interleaved rounds in one run, medians.
"""

from __future__ import annotations

import random
import statistics
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

from confluent_kafka import Consumer, Message, Producer
from confluent_kafka import TopicPartition as Assigned

from anabranch.batches import framing
from anabranch.batches.format import crc_of, patch_parts
from anabranch.batches.journal_refetch import JournalReaders
from anabranch.batches.splice import Piece, Splice
from anabranch.core.journal_runs import StoredRun
from anabranch.kafka import data
from anabranch.kafka.calls import PRODUCE
from anabranch.kafka.cluster import Cluster
from anabranch.kafka.connection import Connection
from anabranch.kafka.log import KafkaLog
from anabranch.kafka.settings import parse_settings
from anabranch.ports import Log, RawBatch, TopicPartition, TopicSpec
from anabranch.protocol.ids import TXN_HEADER, pack_txn_header

TXN_RECORDS = 100_000
IN_FLIGHT = 5
GOALS = {"100 B lz4": 0.9, "100 B plain": 0.6, "1 KB plain": 0.6, "1 KB lz4": 0.6}
_TXN = pack_txn_header(b"\x01" * 16, 7, 0)
_KEYS = [b"key-%06d" % i for i in range(10_000)]


@dataclass(frozen=True)
class Workload:
    """The data to merge. ``codec``: none or lz4."""

    name: str
    records: int
    size: int
    codec: str


WORKLOADS = (
    Workload("100 B plain", 1_000_000, 100, "none"),
    Workload("100 B lz4", 1_000_000, 100, "lz4"),
    Workload("1 KB plain", 100_000, 1000, "none"),
    Workload("1 KB lz4", 100_000, 1000, "lz4"),
)


class Bench:
    """One workload's topics, and the three ways to get from one to the other."""

    def __init__(self, bootstrap: str, workload: Workload) -> None:
        self.bootstrap = bootstrap
        self.workload = workload
        self.log = KafkaLog(bootstrap)
        name = f"bench-splice-{uuid.uuid4().hex[:8]}"
        made = [f"{name}-{part}" for part in ("source", "plain", "splice", "raw", "copy")]
        config = {"retention.ms": "-1"}
        self.log.create_topics([TopicSpec(topic, 1, config) for topic in made])
        self.source, self.plain, self.spliced, self.raw_target, self.copied = (
            TopicPartition(topic, 0) for topic in made
        )
        self._fill(self.source.topic, [(TXN_HEADER, _TXN)])
        self._fill(self.plain.topic, None)
        self.batches = self._read()
        self.runs = self._scan_all()
        self.producers = [self.log.producer(f"{name}-{i}", timeout=120) for i in range(2)]

    def _fill(self, topic: str, headers: list[tuple[str, str | bytes | None]] | None) -> None:
        """Write the source with librdkafka's defaults: batches of up to 1 MB."""
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "linger.ms": 100,
                "compression.type": self.workload.codec,
                "queue.buffering.max.messages": 2_000_000,
                "enable.idempotence": True,
            }
        )
        # Half of each value is noise: like real events, lz4 compresses them to about a half.
        noise = random.Random(self.workload.size)
        half = self.workload.size // 2
        tail = b"0123456789abcdef" * (half // 16 + 1)
        for i in range(self.workload.records):
            value = noise.randbytes(half) + tail[: self.workload.size - half]
            producer.produce(topic, value, _KEYS[i % len(_KEYS)], headers=headers)
            if i % 10_000 == 0:
                producer.poll(0)
        producer.flush()

    def _read(self) -> list[RawBatch]:
        batches: list[RawBatch] = []
        position = 0
        while position < self.workload.records:
            found = self.log.fetch(
                {self.source: position}, max_wait=1, max_bytes=8 << 20, committed=False
            )
            position = found[self.source].next_offset
            batches += found[self.source].batches
        return batches

    def _scan_all(self) -> list[list[StoredRun]]:
        """Runs in groups of about 100,000 records: one native transaction each."""
        groups: list[list[StoredRun]] = [[]]
        count = 0
        for batch in self.batches:
            (run,) = framing.scan_batch(batch)
            groups[-1].append(
                StoredRun(
                    writer=0,
                    first=batch.base_offset,
                    end=batch.next_offset,
                    records=run.records,
                    crc_sum=0,
                    batch_base=batch.base_offset,
                    batch_size=len(batch.data),
                    pure=run.pure,
                    batch_crc=crc_of(batch.data),
                )
            )
            count += run.records
            if count >= TXN_RECORDS:
                groups.append([])
                count = 0
        return [group for group in groups if group]

    # -- the three ways -------------------------------------------------------------------------------

    def splice(self) -> float:
        """Seconds of a merge by splicing, with the framing check of every record."""
        looking = _Looking(self.log)
        readers = JournalReaders(cast(Log, looking), ahead=True)
        start = time.perf_counter()
        for turn, group in enumerate(self.runs):
            producer = self.producers[turn % 2]
            merge = Splice(readers, self.spliced, [Piece(self.source, group)])
            merge.note(producer.append_stream(merge.batches()))
            (landed,) = merge.landed()
            assert landed.records == sum(run.records for run in group)
            producer.commit()
        looking.end()
        seconds = time.perf_counter() - start
        readers.close()
        return seconds

    def raw(self) -> float:
        """Seconds of producing the same batches from memory."""
        cluster = Cluster(parse_settings(self.bootstrap, {}))
        deadline = cluster.deadline()
        leader = cluster.leaders([self.raw_target], deadline)[self.raw_target]
        connection = cluster.pool.take(cluster.address(leader.node), deadline)
        version = connection.version(PRODUCE)
        requests = [
            data.produce_request(
                version,
                None,
                30_000,
                {self.raw_target: patch_parts(batch.data, -1, -1, -1, transactional=False)},
                cluster.topic_ids,
            )
            for batch in self.batches
        ]
        start = time.perf_counter()
        under_way: deque[int] = deque()
        for parts in requests:
            if len(under_way) == IN_FLIGHT:
                self._acknowledged(connection, version, under_way.popleft(), cluster)
            under_way.append(
                connection.send(PRODUCE.key, version, parts, flexible=True, deadline=deadline)
            )
        while under_way:
            self._acknowledged(connection, version, under_way.popleft(), cluster)
        seconds = time.perf_counter() - start
        connection.close()
        cluster.close()
        return seconds

    def _acknowledged(
        self, connection: Connection, version: int, correlation: int, cluster: Cluster
    ) -> None:
        body = connection.receive(correlation, cluster.deadline())
        answer = data.produce_answer(version, body, cluster.topic_names)[self.raw_target]
        assert answer.error == 0, answer

    def copy(self) -> float:
        """Seconds of a transactional copy by the ordinary client."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": "unused",
                "enable.auto.commit": False,
                "fetch.queue.backoff.ms": 2,
                "queued.min.messages": 1_000_000,
                "queued.max.messages.kbytes": 1 << 20,
                "fetch.message.max.bytes": 8 << 20,
            }
        )
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "transactional.id": f"bench-copy-{uuid.uuid4().hex[:8]}",
                "linger.ms": 5,
                "batch.size": 1_000_000,
                "retry.backoff.ms": 1,
                "compression.type": self.workload.codec,
                "queue.buffering.max.messages": 1_000_000,
                "queue.buffering.max.kbytes": 1 << 20,
            }
        )
        producer.init_transactions(30)
        consumer.assign([Assigned(self.plain.topic, 0, 0)])
        start = time.perf_counter()
        done = in_transaction = 0
        producer.begin_transaction()
        while done < self.workload.records:
            messages: list[Message] = consumer.consume(10_000, 1.0)
            for message in messages:
                producer.produce(self.copied.topic, message.value(), message.key())
            producer.poll(0)
            done += len(messages)
            in_transaction += len(messages)
            if in_transaction >= TXN_RECORDS or done >= self.workload.records:
                producer.commit_transaction(60)
                producer.begin_transaction()
                in_transaction = 0
        seconds = time.perf_counter() - start
        producer.abort_transaction(60)
        consumer.close()
        return seconds

    def close(self) -> None:
        """Free the connections."""
        for producer in self.producers:
            producer.close()
        self.log.close()


class _Looking:
    """The log; a thread of its own checks the framing of every fetched record."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._pool = ThreadPoolExecutor(1)
        self._looks: list[Future[None]] = []

    def fetch(self, positions: Mapping[TopicPartition, int], **how: Any) -> Any:
        """`anabranch.ports.Log.fetch`, with the check of the fetched records begun."""
        found = self._log.fetch(positions, **how)
        for fetched in found.values():
            self._looks += [self._pool.submit(_look, batch) for batch in fetched.batches]
        return found

    def end(self) -> None:
        """Wait for unfinished checks."""
        for look in self._looks:
            look.result()
        self._pool.shutdown()


def _look(batch: RawBatch) -> None:
    (run,) = framing.scan_batch(batch)
    assert run.pure
    assert run.txn == _TXN


def run_on(
    bootstrap: str, *, quick: bool = False, workloads: Sequence[Workload] = WORKLOADS
) -> dict[str, Any]:
    """Records a second of each way on each workload, and splice's share of the limit with its goal."""
    framing.warm()
    rounds = 2 if quick else 5
    return {
        "rounds": rounds,
        "transaction_records": TXN_RECORDS,
        "workloads": {each.name: _measure(bootstrap, each, rounds) for each in workloads},
    }


def _measure(bootstrap: str, workload: Workload, rounds: int) -> dict[str, Any]:
    bench = Bench(bootstrap, workload)
    ways: list[tuple[str, Callable[[], float]]] = [
        ("splice", bench.splice),
        ("raw", bench.raw),
        ("copy", bench.copy),
    ]
    seconds: dict[str, list[float]] = {name: [] for name, _ in ways}
    # The first round does not count: the broker compiles its hot paths.
    for number in range(rounds + 1):
        turn = number % len(ways)
        for name, way in ways[turn:] + ways[:turn]:
            passed = way()
            if number:
                seconds[name].append(passed)
    bench.close()
    rates = {n: round(workload.records / statistics.median(s)) for n, s in seconds.items()}
    return {
        "records": workload.records,
        "batches": len(bench.batches),
        "records_per_s": rates,
        "all_s": {name: [round(one, 4) for one in some] for name, some in seconds.items()},
        "of_raw": round(rates["splice"] / rates["raw"], 3),
        "of_copy": round(rates["splice"] / rates["copy"], 2),
        "goal_of_raw": GOALS[workload.name],
    }
