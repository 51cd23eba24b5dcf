"""What other clients, old ones and wrong ones send: it must change nothing and never be seen in a stream."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from zlib import crc32

from anabranch.batches.records import Record, encode_batch
from anabranch.ports import LogError, TopicPartition
from anabranch.protocol import hybrid_time
from anabranch.protocol.ids import (
    CORRELATION_HEADER,
    REPLY_HEADER,
    TIME_HEADER,
    TXN_HEADER,
    make_txn_id,
    pack_txn_header,
)
from anabranch.protocol.partitioner import even_ranges, position_of
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode
from anabranch.topics.names import commands_topic, journal_topic
from anabranch.types import Receipt
from tests.sim.ledger import NOISE, Deal, Ledger
from tests.sim.ports import FOREIGN_ID, SimCluster
from tests.sim.recorded import recorded_plain
from tests.sim.world import World

FOREIGN_REASON = "by an aborted native transaction"
PLAIN_KEYS = (b"k0", b"k1", b"k2", b"k3", None)


class Noise:
    """Makes it. ``tokens``: of transactions that were begun."""

    def __init__(self, world: World, cluster: SimCluster, ledger: Ledger) -> None:
        self._world = world
        self._cluster = cluster
        self._ledger = ledger
        self.tokens: list[tuple[bytes, Deal]] = []

    @property
    def _random(self) -> Random:
        return self._world.random

    def make(self, _: object) -> None:
        """One kind of it."""
        self._random.choice(
            (self._plain_write, self._foreign_write, self._foreign_command, self._garbage)
        )()

    def _plain_write(self) -> None:
        """No noise at all: they commit by themselves, whatever partition they are in."""
        random = self._random
        stream = self._any_stream()
        info = self._cluster.topics.get(journal_topic(stream))
        if info is None:
            return
        partition = random.randrange(info.partitions)
        keys = [random.choice(PLAIN_KEYS) for _ in range(random.choice((1, 1, 2, 5)))]
        self._write_plainly(stream, partition, keys)

    def burst(self) -> None:
        """Plain writes in several batches at once: they wait together in one journal partition."""
        random = self._random
        stream = self._any_stream()
        info = self._cluster.topics.get(journal_topic(stream))
        if info is None:
            return
        partition, keys = random.randrange(info.partitions), random.sample(PLAIN_KEYS, 2)
        for _ in range(random.randint(2, 4)):
            self._write_plainly(stream, partition, keys)

    def _any_stream(self) -> str:
        """One whose topics always take what is acknowledged in its journal."""
        limited = self._ledger.limited
        return self._random.choice([s for s in self._ledger.streams if s not in limited])

    def _write_plainly(self, stream: str, partition: int, keys: Sequence[bytes | None]) -> None:
        told = [self._ledger.plainly(stream, partition, key) for key in keys]
        events = [(event.key, event.value) for event in told]
        recorded_plain(self._ledger, self._cluster, stream, partition, events)

    def _foreign_write(self) -> None:
        """A WRITE of a known transaction by a writer without receipt, or in a wrong place, or natively."""
        if not self.tokens:
            return
        _, deal = self._random.choice(self.tokens)
        writer = self._random.getrandbits(62)
        epoch = self._random.choice((0, 0, 0, 1))
        header = (TXN_HEADER, pack_txn_header(deal.txn_id or b"", writer, epoch))
        key = self._random.choice((b"k0", b"k1", b"k2"))
        right = [low <= position_of(key) < high for low, high in even_ranges(2)].index(True)
        partition = right if self._random.random() < 0.7 else 1 - right
        self._to_journal(partition, key, (header,), native=self._random.random() < 0.3)

    def _to_journal(
        self,
        partition: int,
        key: bytes | None,
        headers: tuple[tuple[str, bytes], ...],
        *,
        native: bool = False,
    ) -> None:
        place = TopicPartition(journal_topic("s/a"), partition)
        data = self._batch(key, NOISE, headers)
        if native:
            self._natively(place, data)
        else:
            self._cluster.send(place, data)

    def _foreign_command(self) -> None:
        """An abort sent inside a native transaction, which is aborted itself: it must have no effect."""
        if not self.tokens:
            return
        token, deal = self._random.choice(self.tokens)
        command = encode(r.Abort(token, FOREIGN_REASON))
        number = int.from_bytes((deal.txn_id or b"\0\0")[:2], "big")
        place = TopicPartition(commands_topic(self._ledger.prefix), number)
        self._natively(place, self._batch(None, command, ()))

    def _natively(self, place: TopicPartition, data: bytes) -> None:
        log = self._cluster.log_of(self._world.current)
        with suppress(LogError):
            producer = log.producer(FOREIGN_ID, timeout=5.0)
            producer.append([(place, data)])
            if self._random.random() < 0.5:
                self._world.sleep(self._random.expovariate(1.0))
                producer.abort()

    def _garbage(self) -> None:
        place = TopicPartition(commands_topic(self._ledger.prefix), 0)
        self._cluster.send(place, self._batch(None, self._random.randbytes(20), ()))

    def _batch(
        self, key: bytes | None, value: bytes, headers: tuple[tuple[str, bytes], ...]
    ) -> bytes:
        now_ms = self._world.wall_ms
        return encode_batch([Record(0, now_ms, key, value, headers)])

    # -- false receipts, late commands ----------------------------------------------------------------

    def falsify(self, receipts: Sequence[tuple[Receipt, int]]) -> Receipt | None:
        """A receipt that says more, less or other than was written."""
        true = [receipt.record for receipt, _ in receipts if receipt.record.extents]
        if not true:
            return None
        record = self._random.choice(true)
        extent = record.extents[0]
        changed = self._random.choice(
            (
                replace(extent, count=extent.count + 1),
                replace(extent, crc_sum=extent.crc_sum ^ 1),
                replace(extent, count=extent.count - 1, crc_sum=max(extent.crc_sum - 1, 0)),
            )
        )
        # The newest, so that it counts even if a later one was registered.
        newest = record.sequence + 1000
        return Receipt(replace(record, sequence=newest, extents=(changed, *record.extents[1:])))

    def new_id(self, scope: str) -> bytes | None:
        """An id that nobody uses, on the scope's control partition as others found it."""
        known = [deal.txn_id for _, deal in self.tokens if deal.txn_id and deal.scope == scope]
        if not known:
            return None
        partition = int.from_bytes(known[0][:2], "big")
        now_ms = self._world.wall_ms
        return make_txn_id(partition, now_ms, self._random.getrandbits(64))

    def send_scaling_twice(self, stream: str) -> None:
        """The same command two or three times over, as a client does that hears nothing."""
        count = self._random.randint(1, 4)
        command = encode(r.Scale(stream, count, (), ()))
        correlation_id = self._random.randbytes(16)
        told = hybrid_time.to_bytes(hybrid_time.from_us(int(self._world.wall_s * 1e6)))
        headers = (
            (CORRELATION_HEADER, correlation_id),
            (REPLY_HEADER, bytes(4)),
            (TIME_HEADER, told),
        )
        for _ in range(self._random.choice((2, 2, 3))):
            number = crc32(b"s") % self._cluster.faults.weather.control_partitions
            place = TopicPartition(commands_topic(self._ledger.prefix), number)
            self._cluster.send(place, self._batch(None, command, headers))
            self._world.sleep(self._random.expovariate(4.0))

    def send_one_shot(self, txn_id: bytes) -> None:
        """A one-shot that comes after its id was resolved."""
        event = r.Event("s/b", -1, b"k0", NOISE, (), -1)
        command = encode(r.OneShot(txn_id, "s", None, (event,)))
        place = TopicPartition(
            commands_topic(self._ledger.prefix), int.from_bytes(txn_id[:2], "big")
        )
        self._cluster.send(place, self._batch(None, command, ()))
