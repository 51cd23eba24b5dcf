"""Long and big transactions on tables, on a real broker: registered and frozen locks, killed controllers."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import Producer

import anabranch
from anabranch import Receipt
from anabranch.client.replica import Replica
from anabranch.client.table_transaction import TableTransaction
from anabranch.errors import IllegalState, InvalidArgument, LocksBroken, WritersUnfinished
from anabranch.ports import Log
from anabranch.protocol.schemas import records as r
from anabranch.topics.names import journal_topic
from tests.behaviour.test_tables import bank, put, tables
from tests.cluster import Cluster
from tests.crash.raw import Raw, make_txn_id

pytestmark = [pytest.mark.broker, pytest.mark.unsecured]
__all__ = ["bank", "tables"]  # fixtures

LOCKS = 1_000
LOCKS_S = float(os.environ.get("ANABRANCH_LOCKS_S", "20"))  # by hand: 1800
AT_ONCE = 200
TAKEOVERS = 3


@pytest.fixture
def elsewhere(cluster: Cluster, tables: tuple[str, str]) -> Iterator[Replica]:
    """A replica of another process's client."""
    with anabranch.connect(cluster.bootstrap) as client, client.replica(*tables) as replica:
        yield replica


def by_journal(client: anabranch.Client, table: str, key: bytes) -> None:
    with client.begin(table.partition("/")[0]) as txn:
        txn.token()
        txn.write(table, b"7", key=key)
        txn.commit()


def plainly(cluster: Cluster, table: str, key: bytes) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap})
    producer.produce(journal_topic(table), key=key, value=b"7", partition=0)
    producer.flush()
    time.sleep(1)  # a controller commits it


class Long(NamedTuple):
    """A transaction whose parts and locks were there before its controller was killed."""

    table: str
    other: str
    txn: TableTransaction
    token: bytes
    receipt: Receipt


HOW = ("nothing", "one-shot", "journal", "plain", "deleted", "scaled")


@pytest.fixture(scope="module")
def replicas(
    client: anabranch.Client, cluster: Cluster
) -> Iterator[tuple[list[str], Replica, Replica]]:
    """Two tables for each case, and two processes' replicas of them all."""
    scope = uuid.uuid4().hex[:8]
    names = [f"{scope}/{name}-{how}" for how in HOW for name in "ab"]
    for name in names:
        client.create_table(name, 2)
    with (
        anabranch.connect(cluster.bootstrap) as second,
        client.replica(*names) as bank,
        second.replica(*names) as elsewhere,
    ):
        yield names, bank, elsewhere


@pytest.fixture(scope="module")
def long_ones(
    client: anabranch.Client, cluster: Cluster, replicas: tuple[list[str], Replica, Replica]
) -> dict[str, Long]:
    """One for each case, all open when the controller is killed."""
    names, bank, elsewhere = replicas
    found = {}
    for how, table, other in zip(HOW, names[::2], names[1::2], strict=True):
        put(client, table, **{f"k{n}": n for n in range(20)})
        bank.snapshot().close()
        txn = bank.begin(keepalive=60)
        assert txn.get(table, b"k1") == b"1"
        token = txn.token()
        part = elsewhere.join(token, label="elsewhere")
        assert part.timestamp == txn.timestamp
        assert part.get(table, b"k2") == b"2"
        assert [key for key, _ in part.scan(table, b"k15", b"k18")] == [b"k15", b"k16", b"k17"]
        part.put(other, b"sum", b"3")
        assert part.get(other, b"sum") == b"3"
        receipt = part.finish()
        assert part.finish() == receipt
        gone = elsewhere.join(token)
        gone.lock(table, b"k3")
        gone.flush()
        gone.discard()
        found[how] = Long(table, other, txn, token, receipt)
    cluster.controller.kill()
    cluster.controller.start().wait_leading()
    return found


@pytest.mark.soak
@pytest.mark.parametrize("how", HOW)
def test_several_processes_and_a_controller_that_is_killed(
    client: anabranch.Client,
    cluster: Cluster,
    replicas: tuple[list[str], Replica, Replica],
    long_ones: dict[str, Long],
    how: str,
) -> None:
    """Locks of a part that is finished, and of one that is gone, count as the beginner's own."""
    _, bank, elsewhere = replicas
    table, other, begun, token, receipt = long_ones[how]
    with begun as txn:
        locks = client.system("locks", table.partition("/")[0])
        [row] = [row for row in locks if (row.txn_id, row.table) == (txn.txn_id, table)]
        assert row == (txn.txn_id, table, 3, 1, False, False, (), ())
        txn.put(table, b"mine", b"1")
        put(client, table, others=1)
        if how == "one-shot":
            put(client, table, k2=7)
        elif how == "journal":
            by_journal(client, table, b"k3")
        elif how == "plain":
            plainly(cluster, table, b"k1")
        elif how == "deleted":
            put(client, table, k17=None)
        elif how == "scaled":
            with anabranch.connect(cluster.bootstrap) as operator:  # inside its own it is refused
                operator.scale(table, 3)
        if how in ("nothing", "scaled"):
            result = txn.commit([receipt])
            assert result.counts.committed == 2
            assert txn.commit() == result
        else:
            with pytest.raises(LocksBroken) as caught:
                txn.commit([receipt])
            assert (caught.value.table, len(caught.value.by)) == (table, 16)
            assert caught.value.key in (b"k1", b"k2", b"k3", b"k17")
            with pytest.raises(LocksBroken):
                txn.put(table, b"mine", b"2")
            with pytest.raises(LocksBroken):
                elsewhere.join(token)
    with bank.snapshot() as now:
        committed = how in ("nothing", "scaled")
        assert (now.get(other, b"sum") is not None) == committed
        assert (now.get(table, b"mine") is not None) == committed


def test_it_begins_short_and_becomes_long(
    client: anabranch.Client, tables: tuple[str, str], bank: Replica, elsewhere: Replica
) -> None:
    table, other = tables
    put(client, table, a=1, b=2)
    bank.snapshot().close()
    with bank.begin() as txn:
        txn.put(table, b"c", b"3")
        before = txn.txn_id
        assert before is None
        txn.put(other, b"big", b"x" * (300 << 10))
        assert txn.txn_id is not None, "its writes are more than a command takes"
        txn.delete(table, b"b")
        assert list(txn.scan(table)) == [(b"a", b"1"), (b"c", b"3")]
        assert list(txn.scan(table, reverse=True, limit=1)) == [(b"c", b"3")]
        txn.flush()
        assert client.state(txn.txn_id).state == "OPEN"
        with elsewhere.join(txn.token()) as part:
            assert part.get(table, b"a") == b"1"
        assert txn.commit().counts.committed == 3
    with pytest.raises(IllegalState):
        part.get(table, b"a")


@pytest.mark.long
def test_how_long_ones_end(
    client: anabranch.Client, tables: tuple[str, str], bank: Replica, elsewhere: Replica
) -> None:
    table, other = tables
    put(client, table, a=1, b=2)
    bank.snapshot().close()
    # Who only reads ends well, broken or not.
    with bank.begin(keepalive=60) as txn:
        assert txn.get(table, b"a") == b"1"
        txn.flush()
        put(client, table, a=5)
        scope = table.partition("/")[0]
        told = client.system("transactions", scope, limit=1)[0]
        assert (told.txn_id, told.snapshot) == (txn.txn_id, txn.timestamp)
        assert str(told.broken).startswith(f"{table} b'a' was read")
        seen = [(row.table, row.broken) for row in client.system("locks", scope)]
        assert seen == [
            (table, True),
            (other, True),
        ]  # the other one is read, and nothing of it is locked
        assert txn.get(table, b"b") == b"2"
        assert txn.commit().commit_timestamp == txn.timestamp
    # The first write of a broken one is refused, by name.
    with bank.begin(keepalive=60) as txn:
        assert txn.get(table, b"a") == b"5"
        txn.flush()
        put(client, table, a=6)
        with pytest.raises(LocksBroken) as caught:
            txn.put(other, b"x", b"1")
        assert (caught.value.table, caught.value.key) == (table, b"a")
    # The first committer wins.
    with bank.begin(keepalive=60, isolation="snapshot") as txn:
        txn.get(table, b"a")
        txn.put(table, b"b", b"3")
        txn.flush()
        put(client, table, a=7)
        txn.commit()
    # A commit takes the parts that it names, and the locks of all.
    with bank.begin(keepalive=60) as txn:
        part = elsewhere.join(txn.token())
        part.put(other, b"y", b"1")
        part.flush()
        with pytest.raises(WritersUnfinished):
            txn.commit()
        txn.put(other, b"x", b"2")
        assert txn.commit([]).counts.left_out == 1
    with client.begin(table.partition("/")[0]) as plain, pytest.raises(InvalidArgument):
        elsewhere.join(plain.token())


@pytest.mark.soak
def test_what_others_wrote_is_read_once_they_finished(
    client: anabranch.Client, tables: tuple[str, str], bank: Replica, elsewhere: Replica
) -> None:
    """Reads from them bind: a commit without them is refused."""
    table = tables[0]
    put(client, table, a=1, k=1)
    bank.snapshot().close()
    with bank.begin(writers="all") as txn:
        txn.put(table, b"k", b"mine")
        txn.delete(table, b"a")
        token = txn.token("all")
        assert list(txn.scan(table)) == [(b"k", b"mine")]
        with elsewhere.join(token, writers="all") as part:
            part.put(table, b"x", b"theirs")
            part.put(table, b"k", b"theirs")
            assert list(part.scan(table)) == [(b"a", b"1"), (b"k", b"theirs"), (b"x", b"theirs")]
            assert txn.get(table, b"x") is None
        left = elsewhere.join(token)
        left.put(table, b"y", b"not finished")
        left.flush()
        assert txn.get(table, b"x") is None, "not before it asks again"
        txn.refresh()
        assert list(txn.scan(table)) == [(b"k", b"theirs"), (b"x", b"theirs")]
        txn.put(table, b"k", b"last")
        assert txn.get(table, b"k") == b"last"
        with pytest.raises(WritersUnfinished, match="read"):
            txn.commit(receipts=[])
        assert txn.commit(receipts=[part.finish()]).counts.left_out == 1
    with bank.snapshot() as now:
        assert dict(now.scan(table)) == {b"k": b"last", b"x": b"theirs"}
    with pytest.raises(InvalidArgument, match="own or all"):
        bank.begin(writers="none")  # type: ignore[arg-type]


class Busy(threading.Thread):
    """Others' blind one-shots into a table, ``AT_ONCE`` at a time, as fast as they are answered."""

    def __init__(self, raw: Raw, table: str) -> None:
        super().__init__(daemon=True)
        self._raw, self._table = raw, table
        self._over = threading.Event()
        self.committed = 0
        self.states: set[str] = set()

    def run(self) -> None:
        scope = self._table.partition("/")[0]
        while not self._over.is_set():
            shots = []
            for n in range(AT_ONCE):
                key = b"other%d" % ((self.committed + n) % 10_000)
                event = r.Event(self._table, -1, key, b"%d" % n, (), -1)
                shots.append(r.OneShot(make_txn_id(), scope, None, (event,)))
            self.states |= {told.state for told in self._raw.ask_all(shots, deadline_s=60)}
            self._raw.answers.clear()
            self.committed += AT_ONCE

    def end(self) -> None:
        self._over.set()
        self.join(60)


@pytest.mark.soak
@pytest.mark.timeout(LOCKS_S + 120)
def test_a_thousand_locks_during_other_commits_and_takeovers(
    client: anabranch.Client,
    cluster: Cluster,
    tables: tuple[str, str],
    bank: Replica,
    log: Log,
    measured: Callable[[str], None],
) -> None:
    """Two transactions read a thousand rows; a row that the second one read, too, is written meanwhile."""
    table, other = tables
    keys = [b"k%04d" % n for n in range(LOCKS)]
    put(client, table, changed=1, **{key.decode(): 1 for key in keys})
    bank.snapshot().close()
    busy = Busy(Raw(cluster.bootstrap, "anabranch", log).start(), table)
    with bank.begin(keepalive=60) as holds, bank.begin(keepalive=60) as breaks:
        for txn, more in ((holds, []), (breaks, [b"changed"])):
            for key in keys[len(more) :] + more:
                assert txn.get(table, key) == b"1"
            txn.put(other, b"sum of %d" % len(more), b"%d" % LOCKS)
            txn.flush()
        began = time.monotonic()
        busy.start()
        for n in range(TAKEOVERS):
            time.sleep(max(0.0, began + LOCKS_S * (n + 1) / (TAKEOVERS + 1) - time.monotonic()))
            if n == 1:
                put(client, table, changed=2)
            cluster.controller.kill()
            cluster.controller.start().wait_leading()
        time.sleep(max(0.0, began + LOCKS_S - time.monotonic()))
        with pytest.raises(LocksBroken) as caught:
            breaks.commit()
        committed = holds.commit()
    took = time.monotonic() - began
    busy.end()
    assert (caught.value.table, caught.value.key) == (table, b"changed")
    assert committed.counts.committed == 1
    assert busy.states == {"COMMITTED"}
    with bank.snapshot() as now:
        assert dict(now.scan(other)) == {b"sum of 0": b"%d" % LOCKS}
    rate = busy.committed / took
    measured(
        f"{LOCKS:,} locks for {took:.0f} s beside {rate:,.0f} commits/s, {TAKEOVERS} takeovers"
    )


__all__ = ["bank", "tables"]  # fixtures

ROWS = int(os.environ.get("ANABRANCH_BIG_ROWS", "200000"))  # by hand: more
PART = 50_000


@pytest.mark.long
def test_only_writes_to_frozen_rows_wait(
    client: anabranch.Client,
    tables: tuple[str, str],
    bank: Replica,
    measured: Callable[[str], None],
) -> None:
    table, other = tables
    scope = table.partition("/")[0]
    put(client, table, locked=1, free=1)
    bank.snapshot().close()
    with bank.begin(keepalive=300) as txn, ThreadPoolExecutor(1) as beside:
        assert txn.get(table, b"locked") == b"1"
        values = [os.urandom(100) for _ in range(PART)]
        with client.join(txn.token()) as writer:
            for at in range(0, ROWS, PART):
                keys = np.char.mod("%016d", np.arange(at, at + PART))
                columns = {"key": pa.array(keys).cast(pa.binary()), "value": values}
                writer.write_batch(other, pa.table(columns))
            receipt = writer.finish()
        before = [free_row(client, table) for _ in range(100)]
        took, waits, ended = [], None, beside.submit(txn.commit, [receipt], timeout=900)
        while not ended.done():
            took.append(free_row(client, table))
            if waits is None and any(row.frozen for row in client.system("locks", scope)):
                waits = ThreadPoolExecutor(1).submit(written, client, table)
        result = ended.result()
    assert waits is not None, "the commit was too quick to be seen frozen"
    at, waited = waits.result()
    assert at > (result.commit_timestamp or 0)
    with bank.snapshot(at=result.commit_timestamp) as then:
        assert then.get(table, b"locked") == b"1", "what was read holds up to the commit"
        assert then.get(other, b"%016d" % (ROWS - 1)) is not None
    p99 = [np.percentile(seconds, 99) * 1e3 for seconds in (before, took)]
    measured(
        f"{ROWS:,} rows: waited {waited:.2f} s; others p99 {p99[0]:.0f} ms before, {p99[1]:.0f} meanwhile"
    )
    assert client.system("locks", scope) == []


def written(client: anabranch.Client, table: str) -> tuple[int, float]:
    """Write the locked row: when that was committed, and how long it took, in seconds."""
    began = time.monotonic()
    with client.begin(table.partition("/")[0]) as txn:
        txn.write(table, b"2", key=b"locked")
        result = txn.commit(timeout=900)
    return result.commit_timestamp or 0, time.monotonic() - began


def free_row(client: anabranch.Client, table: str) -> float:
    """Seconds that a write of a row that nobody locked takes."""
    began = time.monotonic()
    put(client, table, free=2)
    return time.monotonic() - began
