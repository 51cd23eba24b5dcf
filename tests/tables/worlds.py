"""Replicas over a cluster in memory, and a naive model of versions to hold them against."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anabranch.client.client import Client
from anabranch.errors import NotReady
from anabranch.ports import TopicPartition
from anabranch.protocol.hybrid_time import from_us
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.records import BaseRow
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.iteration import Readers
from anabranch.tables.replica import ReadReplica, ReplicaSettings
from anabranch.testing.memory.client import memory_client
from anabranch.testing.memory.cluster import CLIENT
from anabranch.topics.names import stream_topic
from tests.client.world import World

Versions = dict[bytes, list[tuple[int, bytes | None]]]  # rising


def visible(versions: Versions, at: int) -> dict[bytes, bytes]:
    """The rows that are there at a time, in the order of keys."""
    found = {}
    for key in sorted(versions):
        rows = [value for timestamp, value in versions[key] if timestamp <= at]
        if rows and rows[-1] is not None:
            found[key] = rows[-1]
    return found


def as_it_lies(folder: Path, copy: Path) -> Path:
    """A copy of an open folder, as a crash would leave it. RocksDB may change its files meanwhile."""
    while True:
        with contextlib.suppress(shutil.Error, FileNotFoundError):
            before = _state(folder)
            shutil.copytree(folder, copy)
            if _state(folder) == before:
                (copy / "LOCK").unlink()
                return copy
        shutil.rmtree(copy, ignore_errors=True)


def _state(folder: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times: a file that is made is empty at first."""
    found = ((file.name, file.stat()) for file in folder.iterdir())
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


class Truth:
    """What the log of a `World` says: the controller's word, and all versions."""

    def __init__(self, world: World, tables: Sequence[str]) -> None:
        self._world = world
        self._tables = tables
        self.last_timestamp = 0
        self._known: dict[str, dict[int, dict[bytes, bytes | None]]] = {}
        self.oldest = 0  # snapshot of open transactions

    def versions(self, table: str) -> Versions:
        """All of a table, by its COMMIT records alone; also what was deleted since the last call."""
        known = self._known.setdefault(table, {})
        events = {
            (p, e.offset): e
            for p in range(self._world.cluster.topics[stream_topic(table)].partitions)
            for e in self._world._read(TopicPartition(stream_topic(table), p))
        }
        for commit in self._world.commits(table):
            if commit.timestamp in known:
                continue
            rows: dict[bytes, bytes | None] = {}
            for part in commit.segments:
                for offset in range(part.first, part.end):
                    event = events.get((part.partition, offset))
                    if event is not None and event.key is not None:
                        rows[event.key] = event.value
            known[commit.timestamp] = rows
        found: Versions = {}
        for timestamp, rows in sorted(known.items()):
            for key, value in rows.items():
                found.setdefault(key, []).append((timestamp, value))
        return found

    def last(self, table: str, at: int) -> int:
        self.versions(table)
        return max((time for time in self._known[table] if time <= at), default=0)

    def oldest_snapshot(self, table: str, _deadline: float) -> int:
        return self.oldest

    def safe(
        self, tables: Sequence[str], at: int, _deadline: float
    ) -> tuple[int, Mapping[str, int]]:
        """`SafeTimes`: nothing is under way here."""
        now = max([at, *(self.last(table, 1 << 63) for table in self._tables)])
        if at > from_us(int(self._world.clock.wall() * 1e6)):
            raise NotReady("not yet: it is still to come")
        return now, {table: self.last(table, now) for table in tables}

    def base(self, table: str, _deadline: float) -> BaseRow | None:
        """`SafeTimes`: as the controller describes it."""
        return self._world.client.describe(table).base


def reader_ports(world: World) -> ReaderPorts:
    """A reader's ports on a world."""

    def no_member(*_: object) -> Any:
        raise NotImplementedError

    return ReaderPorts(lambda _: world.cluster.log(CLIENT), no_member, world.clock)


def let_read(client: Client, ports: ReaderPorts, timeout: float = 10.0) -> None:
    """Give a client in memory its readers."""
    client._shared.ports = replace(client._shared.ports, readers=Readers(ports, timeout))


def put(client: Client, table: str, value: bytes | None, *keys: bytes) -> int:
    """Write rows of this value in one transaction; its commit timestamp."""
    with client.begin("bank") as txn:
        for key in keys:
            txn.write(table, value, key)
        return txn.commit().commit_timestamp


def operator(world: World) -> Client:
    """A client that may compact tables."""
    log, entropy = world.cluster.log(CLIENT), world._entropy
    made = memory_client(log, world.clock, entropy, lane=ADMIN_LANE, one_shot_bytes=4096)
    let_read(made, reader_ports(world), 30.0)
    return made


def replica(
    world: World, truth: Truth, tables: Sequence[str], folder: Path | None, **how: Any
) -> ReadReplica:
    """A replica that moves when somebody waits."""
    settings = ReplicaSettings(
        tables=tables, cluster_id="test", folder=folder, threaded=False, **how
    )
    return ReadReplica(reader_ports(world), truth, settings)
