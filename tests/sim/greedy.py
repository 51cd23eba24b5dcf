"""A client that takes as much for one transaction as it is given, of each thing that a transaction may hold."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from anabranch.batches.records import Record, encode_batch
from anabranch.client.client import Client
from anabranch.ports import TopicPartition
from anabranch.protocol.hybrid_time import from_us
from anabranch.protocol.ids import CORRELATION_HEADER, REPLY_HEADER
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode
from anabranch.topics.names import commands_topic
from tests.sim.ledger import Ledger
from tests.sim.ports import SimCluster
from tests.sim.world import World
from tests.sim.writers import SCOPE, TABLES, create_tables

_EACH = 90  # more than a transaction may have of anything in runs with such clients
_KEEPALIVE_MS = 3_000
_TIMEOUT_S = 5.0
_LONG_AGO_S = 90.0  # more than snapshots may have in such runs
_WAIT_MS = 1_000


class Greedy:
    """One of a client's process, in its lane."""

    def __init__(self, world: World, cluster: SimCluster, ledger: Ledger, lane: str) -> None:
        self._world, self._cluster, self._ledger, self._lane = world, cluster, ledger, lane

    @property
    def _random(self) -> Random:
        return self._world.random

    def take_all(self, client: Client) -> None:
        """Begin a transaction, and send without a pause what adds to it; it goes stale soon."""
        session = client._session
        create_tables(self._world, client)
        self._begin_late(client)
        deadline = session.now() + _TIMEOUT_S
        txn_id, secret = session.new_txn_id(SCOPE, deadline), session.new_secret()
        snapshot = session.highest_timestamp
        begin = r.Begin(txn_id, SCOPE, None, _KEEPALIVE_MS, secret, snapshot=snapshot)
        session.begin(begin, deadline)
        token = session.token_of(begin)
        touched = session.touch(token, TABLES[0], 1, deadline)
        partition = touched.segments[0].partition
        kinds = [self._writers(token), self._locks(token, snapshot), self._spans(token, snapshot)]
        kinds += [self._sources(token), self._receipts(token, txn_id, partition)]
        self._random.shuffle(kinds)
        for commands in [*kinds, self._askers(token, txn_id, partition)]:
            self._send(int.from_bytes(txn_id[:2], "big"), list(commands))

    def _begin_late(self, client: Client) -> None:
        """Begin one that reads a table at a snapshot from long ago."""
        session = client._session
        txn_id = session.new_txn_id(SCOPE, session.now() + _TIMEOUT_S)
        snapshot = from_us(int((self._world.wall_s - _LONG_AGO_S) * 1e6))
        begin = r.Begin(txn_id, SCOPE, None, _KEEPALIVE_MS, session.new_secret(), snapshot=snapshot)
        reads = r.LockReads(session.token_of(begin), 1, 0, (), tables=(TABLES[0],))
        self._send(int.from_bytes(txn_id[:2], "big"), [begin, reads])

    def _writers(self, token: bytes) -> Iterator[object]:
        for writer in range(2, _EACH):
            yield r.Touch(token, TABLES[0], writer)
            yield r.LabelWriter(token, writer, "l" * 64)

    def _receipts(self, token: bytes, txn_id: bytes, partition: int) -> Iterator[object]:
        for writer in range(1, _EACH):
            extents = (r.Extent(TABLES[0], partition, 0, 1, 1, 7),)
            yield r.Register(token, r.Receipt(txn_id, writer, 1, True, extents))

    def _locks(self, token: bytes, since: int) -> Iterator[object]:
        """A few of each set."""
        for number in range(1, _EACH):
            points = tuple(sorted(self._random.getrandbits(60) for _ in range(3)))
            yield r.LockReads(token, 1, number, (r.TableLocks(TABLES[0], since, 0, points, ()),))

    def _spans(self, token: bytes, since: int) -> Iterator[object]:
        for number in range(1, _EACH):
            low = b"z%04d" % (2 * number)
            spans = (r.LockedRange(low, low + b"1"),)
            yield r.LockReads(token, 2, number, (r.TableLocks(TABLES[1], since, 0, (), spans),))

    def _sources(self, token: bytes) -> Iterator[object]:
        """Sets that lock nothing, and name writers."""
        for number in range(1, _EACH):
            named = tuple(r.WriterAt(writer, 1) for writer in range(1, 5))
            yield r.LockReads(token, 3, number, (), named)

    def _askers(self, token: bytes, txn_id: bytes, partition: int) -> Iterator[object]:
        """They wait for an event that never comes."""
        extents = (r.Extent(TABLES[0], partition, 1 << 40, (1 << 40) + 1, 1, 7),)
        receipt = r.Receipt(txn_id, 1, 2, True, extents)
        for _ in range(_EACH // 4):
            yield r.Commit(token, (), (receipt,), None, _WAIT_MS)

    def _send(self, partition: int, commands: list[object]) -> None:
        now_ms = self._world.wall_ms
        records = [
            Record(0, now_ms, None, encode(command), self._headers()) for command in commands
        ]
        place = TopicPartition(commands_topic(self._ledger.prefix, self._lane), partition)
        self._cluster.send(place, encode_batch(records))

    def _headers(self) -> tuple[tuple[str, bytes], ...]:
        return (CORRELATION_HEADER, self._random.randbytes(16)), (REPLY_HEADER, bytes(4))
