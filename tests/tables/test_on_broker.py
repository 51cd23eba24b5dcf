"""A replica with its thread on a real broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import anabranch
from anabranch.clock import SystemClock
from anabranch.tables.replica import Replica
from tests.cluster import Cluster

N = 20_000


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
        ports = client._readers().ports
        with client.begin(unique) as txn:
            txn.write_many(one, ((b"%d" % i, b"k%05d" % i) for i in range(N)))
            first = known.wrote(txn.commit(), one)
        with Replica(ports, known, [one, two], "c", folder=tmp_path) as found:
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
        with Replica(ports, known, [one, two], "c", folder=tmp_path) as found:
            with found.snapshot() as now, found.snapshot(at=first) as then:
                assert now.get(two, b"k") == b"late"
                assert [k for k, _ in now.scan(one, limit=1)] == [b"k00020"]
                assert [k for k, _ in then.scan(one, limit=1)] == [b"k00000"]
            found.wait(first, {}, clock.monotonic())
