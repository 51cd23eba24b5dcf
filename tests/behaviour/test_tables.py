"""Tables on a real broker: money by threads, takeovers, changes, indexes, bases."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

import anabranch
from anabranch.client.replica import Replica
from anabranch.errors import (
    IllegalState,
    InvalidArgument,
    LocksBroken,
    NotAuthorized,
    SnapshotExpired,
)
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.topics.names import journal_topic
from tests.cluster import Cluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.unsecured]


@pytest.fixture
def tables(client: anabranch.Client, unique: str) -> tuple[str, str]:
    names = f"{unique}/a", f"{unique}/b"
    for name in names:
        client.create_table(name, 2)
    return names


@pytest.fixture
def bank(client: anabranch.Client, tables: tuple[str, str]) -> Iterator[Replica]:
    with client.replica(*tables) as replica:
        yield replica


def put(client: anabranch.Client, table: str, **rows: int | None) -> int:
    """Blind writes by a transaction of their own; the commit timestamp."""
    with client.outside(), client.begin(table.partition("/")[0]) as txn:
        for key, value in rows.items():
            txn.write(table, None if value is None else b"%d" % value, key=key.encode())
        return txn.commit().commit_timestamp


# -- many at once ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_clients_that_add_to_one_row(
    client: anabranch.Client, operator: anabranch.Client, tables: tuple[str, str]
) -> None:
    """None tries again; a blind write in between counts, too; a Kafka reader sees whole numbers."""
    operator.feature_level(raise_to=LEVEL)
    table, other = tables

    def add(replica: Replica, times: int) -> None:
        for number in range(times):
            with replica.begin() as txn:
                txn.add(table, b"n", 1)
                txn.max(other, b"most", number)
                txn.commit()

    with client.replica(*tables) as one, client.replica(*tables) as two:
        put(client, table, n=1_000)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: add((one, two)[n % 2], 25), range(8)))
        with two.snapshot() as view:
            assert (view.get(table, b"n"), view.get(other, b"most")) == (b"1200", b"24")
    with client.changes(table, until="end") as changes:
        seen = [int(change.after or b"") for change in changes]
    assert seen == list(range(1_000, 1_201))


@pytest.mark.long
def test_each_client_of_a_hot_row_commits(
    client: anabranch.Client,
    other: anabranch.Client,
    operator: anabranch.Client,
    tables: tuple[str, str],
    bank: Replica,
) -> None:
    """Two clients of four threads add to one row: no addition is lost, and none waits for long."""
    table, _ = tables
    operator.feature_level(raise_to=LEVEL)
    put(client, table, hot=0)

    def add(txn: Any) -> None:
        txn.put(table, b"hot", b"%d" % (int(txn.get(table, b"hot")) + 1))

    def work(replica: Replica) -> float:
        slowest = 0.0
        for _ in range(10):
            began = time.monotonic()
            replica.transact(add)
            slowest = max(slowest, time.monotonic() - began)
        return slowest

    with other.replica(table) as others, ThreadPoolExecutor(8) as pool:
        slowest = max(pool.map(work, [bank, others] * 4))
    assert bank.snapshot().get(table, b"hot") == b"80"
    assert slowest < 10


@pytest.mark.soak
def test_money_by_threads_scaled_and_taken_over(
    client: anabranch.Client, cluster: Cluster, tables: tuple[str, str], bank: Replica
) -> None:
    """The total holds at every timestamp, and a row never falls below its limit in the other table."""
    seed = random.randrange(1 << 32)
    accounts, limits = tables
    keys = [f"k{i}" for i in range(6)]
    put(client, accounts, **dict.fromkeys(keys, 100))
    put(client, limits, **dict.fromkeys(keys, 0))
    first = bank.snapshot().timestamp
    done: list[int] = []
    problems: list[BaseException] = []

    def move(chance: random.Random) -> Callable[[Any], None]:
        source, target = (key.encode() for key in chance.sample(keys, 2))
        amount = chance.randrange(1, 60)

        def transfer(txn: Any) -> None:
            has, low = int(txn.get(accounts, source)), int(txn.get(limits, source))
            if chance.random() < 0.2:
                if has >= amount:
                    txn.put(limits, source, b"%d" % amount)
            elif has - amount >= low:
                txn.put(accounts, source, b"%d" % (has - amount))
                txn.put(accounts, target, b"%d" % (int(txn.get(accounts, target)) + amount))

        return transfer

    def work(number: int) -> None:
        chance = random.Random(f"{seed}/{number}")
        try:
            for _ in range(25):
                done.append(bank.transact(move(chance), timeout=60).commit_timestamp)
        except BaseException as error:  # noqa: BLE001 - told below
            problems.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    client.scale(accounts, 3)
    client.scale(limits, 1)
    for thread in threads:
        thread.join()
    assert not problems, f"seed {seed}: {problems[0]!r}"
    with client.replica(*tables) as fresh:
        for at in sorted({first, *done}):
            with bank.snapshot(at=at) as then, fresh.snapshot(at=at) as other:
                held = {k: int(v) for k, v in then.scan(accounts)}
                lows = {k: int(v) for k, v in then.scan(limits)}
                assert sum(held.values()) == 600, f"seed {seed} at {at}"
                assert all(held[k] >= lows[k] for k in held), f"seed {seed} at {at}: write skew"
                assert dict(other.scan(accounts)) == dict(then.scan(accounts)), (
                    f"seed {seed} at {at}"
                )


def test_all_ways_to_write_reach_a_table(
    client: anabranch.Client, cluster: Cluster, tables: tuple[str, str], bank: Replica
) -> None:
    table = tables[0]
    scope = table.partition("/")[0]
    with client.begin(scope) as txn:
        txn.token()  # by the journal
        txn.write(table, b"1", key=b"journal")
        txn.commit()
    with client.begin(scope) as txn:
        txn.write(table, b"2", key=b"prepared")
        txn.prepare()
        with bank.begin() as reader:
            assert reader.get(table, b"prepared") is None
            txn.commit()
            reader.put(table, b"other", b"x")
            with pytest.raises(LocksBroken):
                reader.commit()
    # A plain producer knows nothing of keys.
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    for key in (b"plain", None, b"", b"l" * 70_000):
        producer.produce(journal_topic(table), b"3", key, partition=0)
    assert producer.flush(20) == 0
    wanted = {b"journal": b"1", b"plain": b"3", b"prepared": b"2"}
    until = time.monotonic() + 20
    found: dict[bytes, bytes] = {}
    rejected: dict[str, int] = {}
    while (found, rejected) != (wanted, {"bad_key": 3}) and time.monotonic() < until:
        with bank.snapshot() as now:
            found = dict(now.scan(table))
        rejected = dict(client.describe(table).rejected)
    assert found == wanted
    assert rejected == {"bad_key": 3}


def test_the_next_try_sees_the_commit_that_broke_its_locks(
    client: anabranch.Client, cluster: Cluster, tables: tuple[str, str], bank: Replica
) -> None:
    """No answer told this client of it, and the other table is not complete up to it."""
    table, other = tables
    put(client, table, k=1)
    bank.snapshot().close()
    before = bank.timestamp
    with anabranch.connect(cluster.bootstrap) as stranger:
        put(stranger, table, k=2)
    wait_until(lambda: bank.complete[table] > before, 30)
    assert bank.complete[table] > bank.timestamp, "the case is not met"
    bank.transact(lambda txn: txn.put(other, b"x", txn.get(table, b"k") or b""), timeout=10)
    with bank.snapshot() as now:
        assert now.get(other, b"x") == b"2"


@pytest.mark.soak
def test_a_folder_is_kept_and_is_for_one(
    client: anabranch.Client, tables: tuple[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "bank"
    put(client, tables[0], k=1)
    with client.replica(*tables, folder=folder) as bank:
        bank.snapshot().close()
        with pytest.raises(IllegalState, match="can't be opened"):
            client.replica(*tables, folder=folder)
    (other := tmp_path / "other").mkdir()
    (other / "mine.txt").touch()
    with pytest.raises(IllegalState, match=r"no replica's.*new or empty"):
        client.replica(*tables, folder=other)
    assert [found.name for found in other.iterdir()] == ["mine.txt"]
    put(client, tables[0], k=2)
    with client.replica(*tables, folder=folder) as bank, bank.snapshot() as now:
        assert now.get(tables[0], b"k") == b"2"


@pytest.mark.soak
def test_a_takeover_costs_no_transaction(
    client: anabranch.Client, cluster: Cluster, tables: tuple[str, str], bank: Replica
) -> None:
    """A new leader remembers nothing, so each lock is checked again; none is broken by that."""
    accounts = tables[0]
    put(client, accounts, a=0, b=0)
    stop = threading.Event()
    calls: list[int] = []
    problems: list[BaseException] = []

    def count(key: bytes) -> None:
        def add(txn: Any) -> None:
            calls.append(1)
            txn.put(accounts, key, b"%d" % (int(txn.get(accounts, key)) + 1))

        try:
            while not stop.is_set():
                bank.transact(add, timeout=60)
        except BaseException as error:  # noqa: BLE001 - told below
            problems.append(error)

    def wait_for_more() -> None:
        enough, until = len(calls) + 40, time.monotonic() + 60
        while len(calls) < enough and not problems:
            assert time.monotonic() < until
            time.sleep(0.01)

    threads = [threading.Thread(target=count, args=(key,)) for key in (b"a", b"b")]
    for thread in threads:
        thread.start()
    wait_for_more()
    cluster.controller.kill()
    cluster.controller.start().wait_leading()
    wait_for_more()
    stop.set()
    for thread in threads:
        thread.join()
    assert not problems, problems[0]
    with bank.snapshot() as now:
        total = sum(int(value) for _, value in now.scan(accounts))
    assert total == len(calls), "a function was called again, though nobody wrote its row"


# -- changes ----------------------------------------------------------------------------------------------

Row = tuple[int, bytes, bytes | None, bytes | None]


def rows_of(changes: Any) -> list[Row]:
    return [(c.commit_timestamp, c.key, c.before, c.after) for c in changes]


def folded(client: anabranch.Client, table: str, timeout: float = 1.0) -> list[Row]:
    """The same by a program of ten lines, from the stream."""
    rows: dict[bytes, bytes | None] = {}
    found: list[Row] = []
    with client.read_transactions(table, timeout=timeout) as reader:
        for committed in reader:
            last = {event.key or b"": event.value for event in committed.events}
            for key in sorted(last):
                found.append((committed.commit_timestamp, key, rows.get(key), last[key]))
            rows |= last
    return found


@pytest.mark.long
def test_changes_are_what_a_fold_of_the_stream_says(
    client: anabranch.Client, tables: tuple[str, str], tmp_path: Path
) -> None:
    table, scope = tables[0], tables[0].partition("/")[0]
    chance = random.Random("changes")
    times = []
    for number in range(40):
        with client.begin(scope) as txn:
            for each in range(chance.randint(1, 6)):
                value = None if chance.random() < 0.2 else b"%d.%d" % (number, each)
                txn.write(table, value, key=b"k%d" % chance.randrange(8))
            if number % 10 == 3:
                txn.token()  # by the journal
            times.append(txn.commit().commit_timestamp)
        if number == 20:
            client.scale(table, 3)
    expected = folded(client, table)
    assert len({row[0] for row in expected}) == 40
    with client.changes(table, timeout=1.0, before=True) as whole:
        assert rows_of(whole) == expected
    with client.changes(table, until="end") as plain:
        assert rows_of(plain) == [(at, key, None, after) for at, key, _, after in expected]
    since, until = times[10], times[30]
    for between, wanted in (
        ((since, until), [row for row in expected if since < row[0] <= until]),
        ((since, until - 1), [row for row in expected if since < row[0] < until]),
        ((since, since), []),
    ):
        with client.changes(table, start=between[0], until=between[1], before=True) as some:
            assert rows_of(some) == wanted, between
    # A group goes on with the transaction in hand; the folder is kept.
    given: list[Row] = []
    options: dict[str, Any] = {"group": f"{scope}-audit", "before": True, "folder": tmp_path / "f"}
    for _ in range(3):
        with client.changes(table, timeout=8.0, **options) as part:
            for change in part:
                given += rows_of([change])
                if len({row[0] for row in given}) % 15 == 0:
                    break
    with client.changes(table, timeout=2.0, **options) as rest:
        given += rows_of(rest)
    assert sorted(set(given)) == expected
    assert len(given) <= len(expected) + 3 * 6
    bad: list[tuple[dict[str, Any], str]] = [
        ({"group": "g", "until": "end"}, "no group"),
        ({"start": "end", "until": "end"}, "a start that is a time"),
        ({"start": until, "until": since}, "later than"),
        ({"folder": tmp_path / "f"}, "before=True"),
    ]
    for arguments, why in bad:
        with pytest.raises(InvalidArgument, match=why):
            client.changes(table, **arguments)
    client.create_stream(f"{scope}/stream")
    with pytest.raises(InvalidArgument, match="no table"):
        client.changes(f"{scope}/stream")


@pytest.mark.soak
def test_a_new_group_at_the_end_misses_nothing(client: anabranch.Client, unique: str) -> None:
    table, idle, dies = f"{unique}/rows", f"{unique}-idle", f"{unique}-dies"
    client.create_table(table)
    put(client, table, before=1)
    with client.changes(table, idle, 0.5, "end") as none:
        assert list(none) == []
    with client.changes(table, dies, 20.0, "end") as some, ThreadPoolExecutor(1) as other:
        put(client, table, first=2)
        later = other.submit(next, some)
        while not later.done():
            put(client, table, more=3)
        worked_on = later.result().key
    for group, key in ((idle, b"first"), (dies, worked_on)):
        with client.changes(table, group, 20.0, "end") as again:
            assert next(again).key == key, "what was never processed comes again"


def test_indexes(client: anabranch.Client, tables: tuple[str, str], tmp_path: Path) -> None:
    one, two = tables
    first = put(client, one, ann=1, bob=2, cat=1)
    last = put(client, one, ann=2, bob=None)
    index: dict[str, Any] = {"number": (one, lambda _, row: row), "none": (two, lambda *_: None)}
    folder = tmp_path / "rows"
    with (
        client.replica(*tables, folder=folder, index=index) as bank,
        bank.snapshot(at=first) as then,
        bank.snapshot(at=last) as now,
    ):
        assert list(then.lookup("number", b"1")) == [(b"ann", b"1"), (b"cat", b"1")]
        assert list(now.lookup("number", b"1")) == [(b"cat", b"1")]
        assert list(now.lookup("number", b"2", limit=9)) == [(b"ann", b"2")]
        assert list(now.lookup("none", b"2")) == []
        with pytest.raises(InvalidArgument, match="no index 'other'"):
            now.lookup("other", b"")
    # Other names: the folder is loaded again.
    index = {"key": (one, lambda key, _: [key])}
    with (
        client.replica(*tables, folder=folder, index=index) as bank,
        bank.snapshot(at=first) as then,
    ):
        assert list(then.lookup("key", b"bob")) == [(b"bob", b"2")]
    bad: list[tuple[Any, str]] = [
        ({"n": lambda *_: None}, "several tables"),
        ({"n": ("s/x", lambda *_: None)}, "not in this replica"),
        ({"n": (one, 7)}, "no function"),
    ]
    for wrong, why in bad:
        with pytest.raises(InvalidArgument, match=why):
            client.replica(*tables, index=wrong)
    broken: list[tuple[Any, str]] = [
        (lambda *_: 7, "gave 7 for row"),
        (lambda *_: "text", "give bytes"),
    ]
    for function, why in broken:
        with (
            client.replica(one, index={"n": function}) as bank,
            pytest.raises(InvalidArgument, match=why),
        ):
            bank.snapshot(timeout=20.0)
    failing: Any = {"n": lambda *_: int("no number")}
    with client.replica(one, index=failing) as bank, pytest.raises(ValueError) as raised:
        bank.snapshot(timeout=20.0)
    assert "in the function of index 'n', for row" in raised.value.__notes__[0]


# -- bases ------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_a_group_that_reads_changes_loses_none(
    client: anabranch.Client, operator: anabranch.Client, unique: str
) -> None:
    table, audit, rows = f"{unique}/told", f"audit-{unique}", f"rows-{unique}"
    client.create_table(table, 2, {"table.history.ms": 0})
    put(client, table, **{f"k{n}": n for n in range(30)})
    put(client, table, k0=None, k1=100)
    with client.changes(table, audit, 10.0) as changes:
        seen = [next(changes) for _ in range(5)]  # it is in its first transaction
    time.sleep(1.2)  # bases are of whole seconds
    with pytest.raises(InvalidArgument, match="plain_readers_lose_history"):
        operator.compact_table(table)
    with pytest.raises(IllegalState, match=audit):
        operator.compact_table(table, plain_readers_lose_history=True)
    with client.changes(table, audit, 1.0) as changes:
        seen += list(changes)
    with client.read(table, rows, timeout=5.0) as reader:
        assert len([next(reader) for _ in range(20)]) == 20
    with pytest.raises(IllegalState, match=rows):
        operator.compact_table(table, plain_readers_lose_history=True)
    with client.read(table, rows, timeout=3.0) as reader:
        assert len(list(reader)) in (12, 13)  # the last one given comes again
    assert {(c.key, c.after) for c in seen} >= {(b"k0", None), (b"k1", b"100"), (b"k2", b"2")}
    with pytest.raises(NotAuthorized, match="operate"):
        client.compact_table(table, plain_readers_lose_history=True)
    base = operator.compact_table(table, plain_readers_lose_history=True)
    shown = {row.table: row.base for row in client.system("tables", table.partition("/")[0])}
    assert shown[table] == base.timestamp
    last = put(client, table, k0=7)
    with client.changes(table, audit, 1.0) as changes:
        assert [(c.key, c.commit_timestamp) for c in changes] == [(b"k0", last)]
    with pytest.raises(SnapshotExpired, match="are deleted, as it was compacted"):
        list(client.changes(table, until="end"))
    later = list(client.changes(table, start=base.timestamp, until="end", before=True))
    assert [(c.key, c.before, c.after) for c in later] == [(b"k0", None, b"7")]
