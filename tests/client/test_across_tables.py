"""Transactions on tables of two control partitions, by clients: in memory, each with its controller."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from anabranch.client.client import Client
from anabranch.client.replica import Replica
from anabranch.errors import CrossScope, FeatureNotEnabled, IllegalState, LocksBroken, RetryError
from anabranch.protocol.ids import control_partition_of
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.testing import MemoryCluster
from tests.tables.test_isolation import HERMITAGE, play

HERE, THERE = TABLES = ("ams/t", "ber/t")  # on control partitions 0 and 1
THREE = *TABLES, "tok/t"


def cluster_of(
    count: int = 2, *, tables: tuple[str, ...] = TABLES, level: int = LEVEL
) -> MemoryCluster:
    made = MemoryCluster(control_partitions=count, controllers=count, feature_level=level)
    with made.connect() as client:
        for number, table in enumerate(tables):
            client.create_table(table)
            with client.begin(table.partition("/")[0]) as txn:
                txn.write(table, b"100", key=b"k")
                assert control_partition_of(txn.commit().txn_id) == number % count
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


def rows(replica: Replica, tables: tuple[str, ...] = TABLES) -> dict[str, dict[bytes, bytes]]:
    with replica.snapshot() as view:
        return {table: dict(view.scan(table)) for table in tables}


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


def test_changes_that_commute_and_a_name_are_committed_once(
    cluster: MemoryCluster, client: Client
) -> None:
    def add(txn: Any) -> None:
        for table in TABLES:
            txn.add(table, b"n", 5)

    with client.replica(*TABLES) as replica:
        for _ in range(2):
            replica.transact(add, name="once")
        replica.transact(add)
        assert [its[b"n"] for its in rows(replica).values()] == [b"10", b"10"]


def test_another_process_reads_and_writes_both_and_its_locks_count(
    cluster: MemoryCluster, client: Client
) -> None:
    with client.replica(*TABLES) as replica, cluster.connect() as friend:
        for broken in (True, False):
            with replica.begin(keepalive=60) as txn, friend.replica(*TABLES) as theirs:
                with theirs.join(txn.token()) as part:
                    assert [part.get(table, b"k") for table in TABLES] == [b"100", b"100"]
                    for table in TABLES:
                        part.put(table, b"part", b"1")
                    receipt = part.finish()
                txn.put(HERE, b"own", b"1")
                if broken:
                    blind(cluster, THERE, b"k", b"100")
                    with pytest.raises(LocksBroken):
                        txn.commit([receipt])
                else:
                    assert txn.commit([receipt]).counts.committed == 3
        assert [its[b"part"] for its in rows(replica).values()] == [b"1", b"1"]


@pytest.mark.parametrize("tables", [TABLES, (HERE,), (THERE,)])
def test_positions_of_tasks_move_with_rows_of_any_control_partition(
    cluster: MemoryCluster, client: Client, tables: tuple[str, ...]
) -> None:
    """The processor is here."""
    client.create_stream("ams/in", 1)
    client.transact(lambda txn: txn.write("ams/in", b"1"))
    client.create_processor("ams/p", ["ams/in"], 1)
    with (
        client.replica(*TABLES) as replica,
        client.read(["ams/in"], ownership=client.take_tasks("ams/p")) as reader,
    ):
        until = cluster.clock.monotonic() + 20
        while not reader.cut(until, 1):
            assert cluster.clock.monotonic() < until

        def count(txn: Any) -> None:
            for table in tables:
                txn.put(table, b"k", b"%d" % (int(txn.get(table, b"k") or b"0") + 1))

        replica.transact(count, consume=reader)
        found = {table: its[b"k"] for table, its in rows(replica).items()}
        assert found == {table: b"101" if table in tables else b"100" for table in TABLES}
    with client.read(["ams/in"], ownership=client.take_tasks("ams/p")) as again:
        assert not again.cut(cluster.clock.monotonic() + 2, 1)


@pytest.mark.parametrize("tables", [TABLES, (THERE,)])
def test_what_was_read_of_both_is_frozen_while_it_is_prepared(
    cluster: MemoryCluster, client: Client, tables: tuple[str, ...]
) -> None:
    with client.replica(*TABLES) as replica, replica.begin() as txn:
        held = [txn.get(table, b"k") for table in tables]
        txn.put(THERE, b"own", held[0] or b"")
        txn.prepare()
        with client.outside(), cluster.connect(timeout=1) as other, pytest.raises(RetryError):
            other.transact(lambda its: its.write(tables[0], b"7", key=b"k"))
        assert txn.commit().counts.committed == 1
        blind(cluster, tables[0], b"k", b"8")
        assert rows(replica)[THERE][b"own"] == b"100"


def test_money_that_moves_between_tables_is_whole_in_every_snapshot(cluster: MemoryCluster) -> None:
    """Transfers that overlap, while controllers die."""
    seed = random.randrange(1 << 32)
    chance, committed, broken = random.Random(seed), 0, 0
    client, reader = cluster.connect(timeout=120), cluster.connect(timeout=120)
    with client.replica(*TABLES) as ours, reader.replica(*TABLES) as theirs:
        for step in range(12):
            count = chance.choice((1, 2, 2))
            keepalives = [chance.choice((None, None, 600)) for _ in range(count)]
            begun = [ours.begin(keepalive=keepalive) for keepalive in keepalives]
            for txn in begun:
                amount, (giver, taker) = chance.randrange(20), chance.sample(TABLES, 2)
                for table, by in ((giver, -amount), (taker, amount)):
                    txn.put(table, b"k", b"%d" % (int(txn.get(table, b"k") or b"0") + by))
            if chance.random() < 0.2:
                dead = chance.choice((0, 1))
                cluster.stop_controller(dead)
                cluster.start_controller(dead)
            for txn in begun:
                try:
                    txn.commit()
                    committed += 1
                except LocksBroken:
                    broken += 1
            found = [int(its[b"k"]) for its in rows(theirs).values()]
            assert sum(found) == 200, (seed, step, found)
    assert committed >= 12 >= broken, seed  # of two that overlap, one commits


class Step(NamedTuple):
    """A step of a transaction: it begins, reads or writes a row, or commits (``what``)."""

    who: int
    what: str
    table: str = ""
    key: bytes = b""


def history(seed: int) -> list[Step]:
    """Some transactions that overlap: each reads and writes a few rows, and commits."""
    chance, steps, left = random.Random(seed), list[Step](), dict[int, int]()
    for who in range(16):
        left[who] = chance.randint(2, 4)
        steps.append(Step(who, chance.choice(("begin", "begin", "begin long"))))
        while len(left) > chance.randint(0, 3):
            one = chance.choice(sorted(left))
            left[one] -= 1
            if left[one] >= 0:
                row = chance.choice(THREE), chance.choice((b"x", b"y"))
                steps.append(Step(one, chance.choice(("read", "write", "write")), *row))
            else:
                steps.append(Step(one, "commit"))
                del left[one]
    return steps + [Step(who, "commit") for who in sorted(left)]


def outcomes(cluster: MemoryCluster, steps: list[Step]) -> dict[str, Any]:
    """What became of each transaction, what it read, and the rows in the end."""
    begun, found = dict[int, Any](), dict[str, Any]()
    with cluster.connect(timeout=120) as client, client.replica(*THREE) as replica:
        for number, (who, what, table, key) in enumerate(steps):
            if what.startswith("begin"):
                begun[who] = replica.begin(keepalive=600 if what == "begin long" else None)
                continue
            told = ""
            try:
                if what == "read":
                    told = str(begun[who].get(table, key))
                elif what == "write":
                    begun[who].put(table, key, b"%d" % number)
                else:
                    told = str(begun[who].commit().counts.committed)
            except (LocksBroken, IllegalState):
                # It may be broken as soon as the replica knows that, or with its commit.
                told = "broken" if what == "commit" else ""
            found[f"{number} {who} {what}"] = told
        return found | rows(replica, THREE)


@pytest.mark.parametrize("seed", [0, *[soak(seed) for seed in range(1, 30)]])
def test_a_history_ends_over_three_control_partitions_as_within_one(seed: int) -> None:
    steps = history(seed)
    apart, together = (outcomes(cluster_of(count, tables=THREE), steps) for count in (3, 1))
    assert apart == together
    assert "broken" in together.values() or seed


def copy_elsewhere(replica: Replica, keepalive: float | None) -> None:
    with replica.begin(keepalive=keepalive) as txn:
        txn.put(HERE, b"own", txn.get(THERE, b"k") or b"")
        txn.commit()


def test_below_level_4_each_transaction_has_one_control_partition() -> None:
    client = cluster_of(level=3).connect()
    with client.replica(*TABLES) as replica:
        for keepalive in (None, 60):
            with pytest.raises((CrossScope, FeatureNotEnabled), match="feature --raise 4"):
                copy_elsewhere(replica, keepalive)
        replica.transact(lambda txn: txn.put(THERE, b"own", txn.get(THERE, b"k") or b""))
        assert [its.get(b"own") for its in rows(replica).values()] == [None, b"100"]
