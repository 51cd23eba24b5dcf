"""A replica with its thread, and own writes of a long transaction, on a real broker."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import anabranch
from anabranch.client.own_writes import ReadBack
from anabranch.clock import SystemClock
from anabranch.tables.replica import ReadReplica, ReplicaSettings
from tests.cluster import Cluster, start_cluster
from tests.conftest import Broker

N = 20_000
SOON_S = 60.0
MOVED_S = 240.0


class Known:
    """`SafeTimes` of one writer that waits for its commits."""

    def __init__(self) -> None:
        self.last_timestamp = 0
        self.last: dict[str, int] = {}

    def safe(
        self, tables: Sequence[str], at: int, _deadline: float
    ) -> tuple[int, Mapping[str, int]]:
        return max(at, self.last_timestamp), {t: self.last.get(t, 0) for t in tables}

    def base(self, _table: str, _deadline: float) -> None:
        return None

    def oldest_snapshot(self, _table: str, _deadline: float) -> int:
        return 0

    def wrote(self, result: anabranch.Result, *tables: str) -> int:
        assert result.commit_timestamp is not None
        self.last_timestamp = result.commit_timestamp
        self.last |= dict.fromkeys(tables, result.commit_timestamp)
        return result.commit_timestamp


def test_a_replica_on_a_broker(cluster: Cluster, unique: str, tmp_path: Path) -> None:
    """A big commit, small ones, a closed folder, and commits that come meanwhile."""
    one, two = f"{unique}/one", f"{unique}/two"
    known, clock = Known(), SystemClock()
    with anabranch.connect(cluster.bootstrap) as client:
        for table in (one, two):
            client.create_stream(table, 2)
        ports = client._reading.readers().ports
        settings = ReplicaSettings(tables=[one, two], cluster_id="c", folder=tmp_path)
        with client.begin(unique) as txn:
            txn.write_many(one, ((b"%d" % i, b"k%05d" % i) for i in range(N)))
            first = known.wrote(txn.commit(), one)
        with ReadReplica(ports, known, settings) as found:
            with found.snapshot() as snapshot:
                assert sum(1 for _ in snapshot.scan(one)) == N
                assert snapshot.get(one, b"k00007") == b"7"
            for i in range(20):
                with client.begin(unique) as txn:
                    txn.write(one, None, b"k%05d" % i)
                    txn.write(two, b"%d" % i, b"k%05d" % i)
                    known.wrote(txn.commit(), one, two)
                with found.snapshot() as snapshot:
                    assert snapshot.get(one, b"k%05d" % i) is None
                    assert [k for k, _ in snapshot.scan(two)][-1] == b"k%05d" % i
            assert found.lag()[one].seconds < 60
        with client.begin(unique) as txn:
            txn.write(two, b"late", b"k")
            known.wrote(txn.commit(), two)
        with ReadReplica(ports, known, settings) as found:
            with found.snapshot() as now, found.snapshot(at=first) as then:
                assert now.get(two, b"k") == b"late"
                assert [k for k, _ in now.scan(one, limit=1)] == [b"k00020"]
                assert [k for k, _ in then.scan(one, limit=1)] == [b"k00000"]
            found.wait(first, {}, clock.monotonic())


@pytest.fixture
def moving(broker: Broker, unique: str, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of its own that moves runs for little."""
    made = start_cluster(
        broker.bootstrap, tmp_path, f"moving{unique}", ("--move-bytes", str(256 << 10))
    )
    yield made
    made.controller.kill()


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_own_writes_of_two_writers_are_what_the_commit_brings(moving: Cluster, unique: str) -> None:
    """While clean-up moves them, and the table is scaled, so that the commit rolls."""
    scope, table = f"o{unique}", f"o{unique}/t"
    chance = random.Random("own writes")
    wrote: dict[bytes, bytes | None] = {}

    def write(handle: anabranch.Transaction | anabranch.Writer, count: int) -> None:
        for _ in range(count):
            key = b"k%04d" % chance.randrange(600)
            wrote[key] = None if chance.random() < 0.1 else os.urandom(100)
            handle.write(table, wrote[key], key)

    with anabranch.connect(moving.bootstrap, prefix=moving.prefix, timeout=60) as client:
        client.create_table(table, 2)
        txn = client.begin(scope)
        ports = client._reading.readers().ports
        own = ReadBack(txn, client._session, ports, lambda: time.monotonic() + SOON_S, "all")

        def check() -> None:
            found = dict(own.scan(table, b"", None))
            assert {key: row.value for key, row in found.items()} == wrote
            some = chance.sample(sorted(found), 20)
            assert [own.get(table, key) for key in some] == [found[key] for key in some]
            assert own.get(table, b"nothing") is None

        write(txn, 800)
        check()
        with client.join(txn.token()) as writer:
            txn.flush()  # in this order, on the log, too
            write(writer, 800)
        own.refresh()
        check()
        by = {row.by for _, row in own.scan(table, b"", None)}
        receipt = writer.finish().record
        assert {(w.writer, w.sequence) for w in by if w} == {(receipt.writer, receipt.sequence)}
        client.scale(table, 3)
        places = {
            (e.partition, e.end)
            for x in client.state(txn.token("all")).writers
            for e in x.record.extents
        }
        until = time.monotonic() + MOVED_S
        while any(client.describe(table).low_water.get(p, 0) < end for p, end in places):
            assert time.monotonic() < until, "nothing moves"
            with client.begin(scope) as young:
                young.token()
                young.write_many(table, ((os.urandom(120), b"y%d" % n) for n in range(3_000)))
                young.commit()
            write(txn, 1)
            check()
        assert txn.commit().counts.committed > 1_600
        with client.replica(table) as replica, replica.snapshot() as now:
            rows = {k: v for k, v in now.scan(table) if k.startswith(b"k")}
        assert rows == {key: value for key, value in wrote.items() if value is not None}
        own.close()
