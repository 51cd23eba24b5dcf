"""A journal that is cut and moved over the in-memory log, under leaders that may die at every call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from anabranch.batches.records import Record
from anabranch.controller.controller import Controller
from anabranch.core.decisions.turn import Settings
from anabranch.ports import TopicPartition
from anabranch.protocol.ids import TXN_HEADER, pack_txn_header, unpack_txn_header
from anabranch.protocol.partitioner import record_checksum
from anabranch.protocol.schemas.records import (
    Begin,
    Commit,
    DescribeStreams,
    Extent,
    Outcome,
    Receipt,
    StreamInfo,
    Touch,
    Touched,
)
from anabranch.topics.names import journal_topic, stream_topic
from tests.controller.world import World
from tests.core.labels import SECRET, Begun
from tests.failpoints import failing
from tests.memory.table import MemoryStore

STREAM = "nyc/flights"
JOURNAL = TopicPartition(journal_topic(STREAM), 0)
BYTES = 20_000  # what a young transaction writes, about
MOVE_BYTES = 200_000
CHUNK = 25_000  # a young one is not staged, an old one is, and is moved in two steps
ENOUGH = 3 * MOVE_BYTES // BYTES // 2


class Killed(BaseException):
    """The process is dead from here on."""


@dataclass
class Play:
    """A world with one stream of one segment, and a leader that is followed by another when it dies.

    ``hook`` may raise `Killed` at any call of the leader. ``keeps_table``: its successor has its table.
    """

    keeps_table: bool = True
    hook: Callable[[str, str], None] = lambda name, phase: None
    settings: dict[str, Any] = field(default_factory=dict)
    world: World = field(default_factory=World)
    deaths: int = 0
    tokens: dict[bytes, bytes] = field(default_factory=dict)
    written: dict[bytes, dict[int, list[bytes]]] = field(default_factory=dict)
    extents: dict[bytes, dict[int, Extent]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = MemoryStore()
        self.lead()
        self.world.stream(self.controller, STREAM, 1)

    def lead(self) -> None:
        """A new leader."""
        if self.keeps_table:
            self.store.release()
        else:
            self.store = MemoryStore()
        name = f"c{self.deaths}"
        given = {
            "clean_ms": 1, "clean_records": 1, "move_bytes": MOVE_BYTES, "chunk_bytes": CHUNK,
        } | self.settings  # fmt: skip
        self.controller = Controller(
            failing(self.world.cluster.log(name), lambda c, p: self.hook(c, p)),
            failing(self.store.open(name), lambda c, p: self.hook(c, p)),
            self.world.clock,
            Settings(0, 1, "anabranch", reply_partitions=8, trusts_open=True, **given),
            leader=name,
        )
        self.controller.lead()

    def step(self) -> None:
        """One pass, and some time; if the leader dies of it, there is another one."""
        try:
            self.controller.step(0)
        except Killed:
            self._succeed()
        self.world.clock.now += 0.3

    def _succeed(self) -> None:
        while True:
            self.deaths += 1
            try:
                self.lead()
            except Killed:
                continue
            return

    def ask(self, command: Any) -> Any:
        """The answer to a command, which is sent again: an answer is lost with its leader."""
        correlation_id = self.world.send(command)
        for number in range(20):
            if number == 10:
                self.world.send(command, again=correlation_id)
            self.step()
            answer = self.world.reply(correlation_id)
            if answer is not None:
                return answer
        raise AssertionError(f"no answer to {command}")

    def begin(self, keepalive_ms: int = 30_000_000) -> bytes:
        """An open transaction that has touched the stream."""
        txn_id = self.world.txn_id()
        begun = self.ask(Begin(txn_id, "nyc", None, keepalive_ms, SECRET))
        assert isinstance(begun, Begun)
        self.tokens[txn_id] = begun.token
        assert isinstance(self.ask(Touch(begun.token, STREAM)), Touched)
        return txn_id

    def write(self, *records: tuple[bytes, int, bytes]) -> None:
        """One journal batch of (transaction, writer, value)."""
        made = [
            Record(0, 1, b"k", value, ((TXN_HEADER, pack_txn_header(txn_id, writer, 0)),))
            for txn_id, writer, value in records
        ]
        base = self.world.cluster.produce(JOURNAL, made)
        for offset, (txn_id, writer, value) in enumerate(records, start=base):
            self.written.setdefault(txn_id, {}).setdefault(writer, []).append(value)
            crc = record_checksum(b"k", value)
            before = self.extents.setdefault(txn_id, {}).get(writer)
            self.extents[txn_id][writer] = (
                Extent(STREAM, 0, offset, offset + 1, 1, crc)
                if before is None
                else Extent(
                    STREAM, 0, before.first, offset + 1, before.count + 1,
                    (before.crc_sum + crc) % (1 << 63),
                )
            )  # fmt: skip

    def commit(self, txn_id: bytes) -> Any:
        receipts = tuple(
            Receipt(txn_id, writer, 1, True, (extent,))
            for writer, extent in self.extents.get(txn_id, {}).items()
        )
        return self.ask(Commit(self.tokens[txn_id], receipts, (), None, 60_000))

    def come_and_go(self, count: int) -> None:
        """So many transactions that write about `BYTES` and commit."""
        for _ in range(count):
            txn_id = self.begin()
            self.write((txn_id, 1, bytes(BYTES)))
            outcome = self.commit(txn_id)
            assert isinstance(outcome, Outcome), outcome
            assert outcome.state == "COMMITTED"

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @property
    def start(self) -> int:
        """The journal's first offset."""
        log = self.world.cluster.log("ask")
        return log.start_offsets([JOURNAL])[JOURNAL]

    @property
    def end(self) -> int:
        log = self.world.cluster.log("ask")
        return log.end_offsets([JOURNAL], committed=False)[JOURNAL]

    def info(self) -> StreamInfo:
        (info,) = self.ask(DescribeStreams(None, STREAM)).streams
        assert isinstance(info, StreamInfo)
        return info

    def committed(self, txn_id: bytes) -> dict[int, list[bytes]]:
        """A transaction's events in the stream, by writer, in order."""
        found: dict[int, list[bytes]] = {}
        topic = stream_topic(STREAM)
        for partition in range(self.world.cluster.topics[topic].partitions):
            for record in self.world.committed(TopicPartition(topic, partition)):
                owner, writer, _ = unpack_txn_header(dict(record.headers)[TXN_HEADER] or b"")
                if owner == txn_id:
                    found.setdefault(writer, []).append(record.value or b"")
        return found


OLD = 459


def old_transaction(play: Play) -> bytes:
    """One whose data lies in front: in a batch of others', in small ones of two writers, in one to be spliced."""
    other, old = play.begin(), play.begin()
    play.write((other, 9, b"o1"), (old, 1, b"a0"), (old, 2, b"b0"), (other, 9, b"o2"))
    for i in range(1, 4):
        play.write((old, 1, b"a%d" % i))
        play.write((old, 2, b"b%d" % i))
    for big in range(3):
        play.write(*[(old, 1, b"%d-%90d" % (big, i)) for i in range(150)])
    play.write((old, 2, b"b-last"))
    assert play.commit(other).committed == 2
    return old


def long_after(play: Play) -> int:
    """More comes and goes than an old transaction may keep; where the journal was meanwhile."""
    middle = play.end
    play.come_and_go(ENOUGH)
    play.steps(10)
    return middle
