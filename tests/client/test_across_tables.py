"""Transactions on tables of two control partitions, by clients: in memory, each with its controller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from anabranch.client.client import Client
from anabranch.client.replica import Replica
from anabranch.errors import LocksBroken
from anabranch.protocol.ids import control_partition_of
from anabranch.testing import MemoryCluster
from tests.tables.test_isolation import HERMITAGE, play

HERE, THERE = TABLES = ("ams/t", "ber/t")  # on control partitions 0 and 1


def cluster_of(*, across: bool = True) -> MemoryCluster:
    made = MemoryCluster(control_partitions=2, controllers=2, across=across)
    with made.connect() as client:
        for number, table in enumerate(TABLES):
            client.create_table(table)
            with client.begin(table.partition("/")[0]) as txn:
                txn.write(table, b"100", key=b"k")
                assert control_partition_of(txn.commit().txn_id) == number
    return made


@pytest.fixture
def cluster() -> MemoryCluster:
    return cluster_of()


@pytest.fixture
def client(cluster: MemoryCluster) -> Client:
    return cluster.connect()


def soak(*given: Any) -> Any:
    return pytest.param(*given, marks=pytest.mark.soak)


def blind(cluster: MemoryCluster, table: str, key: bytes, value: bytes) -> None:
    with cluster.connect() as other:
        other.transact(lambda txn: txn.write(table, value, key=key))


def rows(replica: Replica) -> dict[str, dict[bytes, bytes]]:
    with replica.snapshot() as view:
        return {table: dict(view.scan(table)) for table in TABLES}


@pytest.mark.parametrize("keepalive", [None, 60])
@pytest.mark.parametrize("broken", ["", HERE, THERE])
def test_reads_and_writes_of_both_are_one_transaction(
    cluster: MemoryCluster, client: Client, keepalive: float | None, broken: str
) -> None:
    with client.replica(*TABLES) as replica, replica.begin(keepalive=keepalive) as txn:
        held = {table: int(txn.get(table, b"k") or b"0") for table in TABLES}
        txn.put(HERE, b"own", b"%d" % held[THERE])
        txn.put(THERE, b"own", b"%d" % held[HERE])
        if broken:
            blind(cluster, broken, b"k", b"7")
            with pytest.raises(LocksBroken) as caught:
                txn.commit()
            assert (caught.value.table, caught.value.key) == (broken, b"k")
            assert all(b"own" not in its for its in rows(replica).values())
        else:
            assert txn.commit().counts.committed == 2
            assert [its[b"own"] for its in rows(replica).values()] == [b"100", b"100"]
    cluster.advance(10)
    assert client.open_transactions() == []


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Client, Replica]]:
    with cluster_of().connect() as client, client.replica(*TABLES) as replica:
        yield client, replica


@pytest.mark.parametrize(
    ("isolation", "keepalive"),
    [
        ("serializable", None),
        soak("serializable", 60),
        soak("snapshot", None),
        soak("snapshot", 60),
    ],
)
@pytest.mark.parametrize("name", HERMITAGE)
def test_each_anomaly_of_hermitage_is_prevented_across_two(
    both: tuple[Client, Replica], name: str, isolation: str, keepalive: float | None
) -> None:
    """Rows with even keys are here, the others there."""
    client, replica = both
    for table, first in ((HERE, b"2"), (THERE, b"1")):
        with client.begin(table.partition("/")[0]) as txn:
            for key in (b"1", b"2", b"3", b"4", b"9", b"k", b"own"):
                txn.write(table, b"%d0" % int(first) if key == first else None, key=key)
            txn.commit()
    play(replica, name, TABLES, isolation=isolation, keepalive=keepalive)
