"""Transactions over two control partitions, by clients: in memory, each control partition with its controller."""

from __future__ import annotations

import random
import sqlite3
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NoReturn

import pytest

from anabranch.client.client import Client
from anabranch.client.session import Copy, Session
from anabranch.client.transaction import Transaction
from anabranch.errors import (
    CrossScope,
    EventTooLarge,
    NotAuthorized,
    NotReady,
    OutcomeUnknown,
    TransactionAborted,
    WritersUnfinished,
)
from anabranch.ledger import Ledger
from anabranch.protocol.ids import control_partition_of
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.testing import MemoryCluster

HERE, THERE = STREAMS = ("ams/s", "ber/s")  # on control partitions 0 and 1
BOTH = 0, 1


def cluster_of(feature_level: int = LEVEL) -> MemoryCluster:
    made = MemoryCluster(control_partitions=2, controllers=2, feature_level=feature_level)
    with made.connect() as client:
        for number, stream in enumerate(STREAMS):
            client.create_stream(stream, 2)
            alone = client.transact(lambda txn, to=stream: txn.write(to, b"0", key=b"first"))  # type: ignore[misc]
            assert control_partition_of(alone.txn_id) == number
    return made


@pytest.fixture
def cluster() -> MemoryCluster:
    return cluster_of()


@pytest.fixture
def client(cluster: MemoryCluster) -> Client:
    return cluster.connect()


def events(client: Client) -> dict[bytes, list[tuple[str, int]]]:
    """Value -> stream and timestamp of each event that a snapshot of both streams shows."""
    snapshot = client.snapshot(STREAMS)
    found: dict[bytes, list[tuple[str, int]]] = {}
    for stream in STREAMS:
        for event in snapshot.read(stream):
            if event.value != b"0":
                found.setdefault(event.value or b"", []).append((stream, event.commit_timestamp))
    return found


@pytest.mark.parametrize("home", BOTH)
@pytest.mark.parametrize("wait", ["merged", "decided"])
def test_what_two_processes_write_to_both_is_there_at_one_time(
    cluster: MemoryCluster, client: Client, home: int, wait: str
) -> None:
    with client.begin(STREAMS[home].partition("/")[0]) as txn, cluster.connect() as other:
        txn.write(STREAMS[home], b"own", key=b"k")
        txn.write(STREAMS[1 - home], b"own", key=b"k")
        with other.join(txn.token(), label="helper") as writer:
            writer.write(
                STREAMS[1 - home], b"theirs", key=b"k"
            )  # the other control partition first
            writer.write(STREAMS[home], b"theirs", key=b"k")
            writer.flush()
            writer.write(STREAMS[1 - home], b"theirs too", key=b"k")
        receipt = writer.finish()
        assert events(client) == {}
        result = txn.commit([receipt], wait=wait)  # type: ignore[arg-type]
        whole = txn.merged()
    assert (result.commit_timestamp, whole.is_merged) == (whole.commit_timestamp, True)
    assert whole.counts.committed == 5
    at = whole.commit_timestamp
    assert {value: sorted(places) for value, places in events(client).items()} == {
        b"own": [(HERE, at), (THERE, at)],
        b"theirs": [(HERE, at), (THERE, at)],
        b"theirs too": [(STREAMS[1 - home], at)],
    }


def test_while_it_waits_it_is_listed_once_and_then_its_timeline_has_each_part(
    cluster: MemoryCluster, client: Client
) -> None:
    reader = cluster.connect(timeout=8)
    with client.begin("ams", keepalive=600) as txn:
        txn.write(HERE, b"own", key=b"k")
        txn.write(THERE, b"own", key=b"k")
        txn.flush()
        assert txn.txn_id is not None
        with client.outside():
            assert [one.info.txn_id for one in reader.open_transactions()] == [txn.txn_id]
            (part,) = reader.open_transaction(txn.txn_id).partitions
        assert (part.partition, part.scopes, part.state) == (1, ("ber",), "OPEN")
        cluster.stop_controller(0)
        with client.outside():
            (alone,) = reader.open_transactions()
        assert alone.info.txn_id == txn.txn_id, "as the participant has it"
        cluster.start_controller(0)
        txn.commit()
    assert [one.txn_id for one in client.transactions(finished=True)].count(txn.txn_id) == 1
    (part,) = client.open_transaction(txn.txn_id).partitions
    assert (part.partition, part.scopes, part.state) == (1, ("ber",), "COMMITTED")
    timeline = client.timeline(txn.txn_id).steps
    assert "the votes of control partition 1" in {step.waited_for for step in timeline}
    steps = {step.what: step.about for step in timeline}
    assert steps["part opened"] == "control partition 1: ber"
    assert steps["part ended"] == "control partition 1"
    order = ["part opened", "commit asked", "votes asked", "decided", "part ended", "merged"]
    assert [what for what in steps if what in order] == order


def test_a_writer_elsewhere_that_did_not_finish_refuses_the_commit_until_it_has(
    cluster: MemoryCluster, client: Client
) -> None:
    with client.begin("ams") as txn, cluster.connect() as other:
        txn.write(HERE, b"own", key=b"k")
        writer = other.join(txn.token())
        writer.write(THERE, b"theirs", key=b"k")
        for _ in range(2):
            with pytest.raises(WritersUnfinished):
                txn.commit()
            assert events(client) == {}
        writer.write(THERE, b"more", key=b"k")
        writer.finish()
        txn.write(THERE, b"own", key=b"k")
        assert txn.commit().counts.committed == 4
    assert {value: len(places) for value, places in events(client).items()} == {
        b"own": 2,
        b"theirs": 1,
        b"more": 1,
    }


def test_after_an_abort_nothing_is_there_and_late_writers_hear_of_it(
    cluster: MemoryCluster, client: Client
) -> None:
    with client.begin("ams") as txn, cluster.connect() as other:
        txn.write(HERE, b"own", key=b"k")
        txn.write(THERE, b"own", key=b"k")
        late = other.join(txn.token())
        txn.abort("why not")
        with pytest.raises(TransactionAborted):
            late.write(THERE, b"late", key=b"k")
    cluster.advance(10)
    assert events(client) == {}
    assert client.open_transactions() == []


def test_below_feature_level_4_only_the_write_is_refused() -> None:
    client = cluster_of(3).connect()
    with client.begin("ams") as txn:
        txn.write(HERE, b"own", key=b"k")
        with pytest.raises(CrossScope, match="'ams' is on control partition 0 and 'ber' on 1"):
            txn.write(THERE, b"own", key=b"k")
        assert txn.commit().counts.committed == 1
    assert list(events(client)) == [b"own"]


def test_a_ledger_decides_for_all_control_partitions(
    cluster: MemoryCluster, client: Client, tmp_path: Path
) -> None:
    """The process ends when its database has committed; recovery commits the transaction everywhere."""
    ledger = Ledger(lambda: sqlite3.connect(tmp_path / "ledger.db"))
    ledger.create(client)
    with (
        suppress(ZeroDivisionError),
        cluster.connect() as other,
        other.begin("ams", keepalive=600) as txn,
        ledger.commit(txn) as cursor,
    ):
        txn.write(HERE, b"own", key=b"k")
        txn.write(THERE, b"own", key=b"k")
        cursor.execute("create table t (n)")
        txn.commit = _die  # type: ignore[method-assign]
    cluster.advance(1_000)
    (found,) = client.prepared()
    assert found.counts.committed == 2
    assert events(client) == {}
    assert ledger.recover(client, older_than=0).committed == [found.txn_id]
    assert len(events(client)[b"own"]) == 2


def _die(*_: object, **__: object) -> NoReturn:
    raise ZeroDivisionError


def test_positions_move_with_what_is_written_elsewhere(
    cluster: MemoryCluster, client: Client
) -> None:
    client.create_processor("ams/p", HERE, tasks=1)
    for number in (1, 2, 3):
        client.transact(lambda txn, value=b"%d" % number: txn.write(HERE, value, key=b"k"))  # type: ignore[misc]
    read = []
    for _ in range(2):  # the second worker goes on behind the first one
        with client.read(HERE, timeout=1.0, ownership=client.take_tasks("ams/p")) as reader:
            for event in islice(reader, 2):
                read.append(event.value)
                out = client.transact(
                    lambda txn, value=event.value: txn.write(THERE, b"out" + value, key=b"k"),  # type: ignore[misc]
                    consume=reader,
                )
                assert control_partition_of(out.txn_id) == 0
    assert read == [b"0", b"1", b"2", b"3"], "the first is of the fixture"
    made = {value: len(places) for value, places in events(client).items()}
    assert [made[b"out" + value] for value in read if value is not None] == [1] * 4


def test_streams_that_wait_for_a_dead_coordinator_hold_up_no_others(
    cluster: MemoryCluster, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies when the participant has voted."""
    client.create_table("ber/rows")
    client.create_table("ber/free")
    reader = cluster.connect(timeout=5)
    reader.snapshot(STREAMS)  # it knows the scopes: the one that dies has the directory, too
    step = cluster.step

    def die_after_the_vote() -> None:
        step()
        if 0 in cluster.controllers and cluster.controllers[1]._memory.holds.in_use:
            cluster.stop_controller(0)

    monkeypatch.setattr(cluster.clock, "on_sleep", die_after_the_vote)
    with client.begin("ams", keepalive=600) as txn:
        txn.write(HERE, b"own", key=b"k")
        txn.write("ber/rows", b"own", key=b"k")
        with pytest.raises(OutcomeUnknown):
            txn.commit(timeout=5)
        monkeypatch.setattr(cluster.clock, "on_sleep", step)
        with client.outside():
            reader.transact(lambda other: other.write("ber/free", b"1", key=b"k"))
        with reader.replica("ber/free") as free, free.snapshot() as view:
            assert view.get("ber/free", b"k") == b"1"
        assert reader.snapshot([THERE, "ber/free"]).timestamp
        with pytest.raises(NotReady, match="control partition 1 are held below"):
            reader.snapshot(["ber/rows", "ber/free"])
        cluster.start_controller(0)
        at = txn.commit(timeout=60).commit_timestamp
    with client.replica("ber/rows", "ber/free") as rows, rows.snapshot() as view:
        assert view.get("ber/rows", b"k") == b"own"
        assert view.timestamp >= (at or 0)


def test_money_that_moves_between_control_partitions_is_whole_in_every_snapshot(
    cluster: MemoryCluster,
) -> None:
    """While controllers die: each commit that is answered is in all later snapshots, in both streams or in none."""
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    client, reader = cluster.connect(timeout=120), cluster.connect(timeout=120)
    held, former = dict.fromkeys(STREAMS, 100), 0

    def look() -> None:
        nonlocal former
        snapshot = reader.snapshot(STREAMS)
        last = {s: [int(e.value or 0) for e in snapshot.read(s)][-1] for s in STREAMS}
        assert sum(last.values()) in (0, 200), (seed, last)
        assert snapshot.timestamp >= former, seed
        former = snapshot.timestamp

    for step in range(40):
        amount = chance.randrange(20)
        held[HERE] -= amount
        held[THERE] += amount
        with client.begin(chance.choice(("ams", "ber")), keepalive=600) as txn:
            for stream in chance.sample(STREAMS, 2):
                txn.write(stream, b"%d" % held[stream], key=b"k")
            if chance.random() < 0.2:
                dead = chance.choice(BOTH)
                cluster.stop_controller(dead)
                cluster.start_controller(dead)
            at = txn.commit().commit_timestamp
        look()
        assert former >= (at or 0), (seed, step)


@pytest.mark.parametrize("home", BOTH)
@pytest.mark.parametrize("wait", ["merged", "decided"])
def test_a_short_transaction_over_both_is_one_command_to_each(
    client: Client, home: int, wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.begin("ams") as first:  # by this the client learns that it may
        first.write(THERE, b"0", key=b"k")
        first.commit()
    commands, send = [], Session._first_copy

    def noted(session: Session, number: int, command: object, *rest: object) -> Copy:
        commands.append(type(command).__name__)
        return send(session, number, command, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "_first_copy", noted)

    def write(txn: Transaction) -> None:
        for number in range(3):
            for stream in STREAMS:
                txn.write(stream, b"%d!" % number, key=b"k%d" % number)

    done = client.transact(write, scope=STREAMS[home].partition("/")[0], wait=wait)  # type: ignore[arg-type]
    monkeypatch.undo()
    (whole,) = client.finished([done.txn_id])
    at = whole.commit_timestamp
    assert (done.commit_timestamp, whole.counts.committed, commands) == (at, 6, ["OneShot"] * 2)
    assert control_partition_of(whole.txn_id) == home
    found = {value: sorted(places) for value, places in events(client).items()}
    assert found == {b"%d!" % number: [(HERE, at), (THERE, at)] for number in range(3)}
    assert client.open_transactions() == []


def test_the_merge_of_a_short_transaction_that_was_decided_can_be_awaited(client: Client) -> None:
    for name in (None, "daily"):
        with client.begin("ams") as txn:  # the second one is a one-shot
            for stream in STREAMS:
                txn.write(stream, b"1", key=b"k")
            decided = txn.commit(name=name, wait="decided")
            whole = txn.merged()
        assert (decided.is_merged, whole.is_merged) == (False, True)
        assert decided.commit_timestamp == whole.commit_timestamp


def test_short_transactions_are_committed_once_while_controllers_die(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(1 << 32)
    chance, step = random.Random(seed), cluster.step

    def die_now_and_then() -> None:
        step()
        if chance.random() < 0.1:
            dead = chance.choice(BOTH)
            cluster.stop_controller(dead)
            cluster.start_controller(dead)

    client = cluster.connect(timeout=120)
    monkeypatch.setattr(cluster.clock, "on_sleep", die_now_and_then)
    for number in range(12):

        def write(txn: Transaction, number: int = number) -> None:
            for stream in chance.sample(STREAMS, 2):
                txn.write(stream, b"%d!" % number, key=b"k")

        client.transact(write)
    monkeypatch.setattr(cluster.clock, "on_sleep", step)
    found = events(client)
    assert sorted(found) == sorted(b"%d!" % number for number in range(12)), seed
    assert {len(places) for places in found.values()} == {2}, seed
    assert all(len({at for _, at in places}) == 1 for places in found.values()), seed
    assert client.open_transactions() == []


def test_what_the_other_control_partition_refuses_is_named_at_once(
    cluster: MemoryCluster, client: Client
) -> None:
    client.create_stream("ber/small", 1, {"max.message.bytes": 16_384})
    client.transact(write_both)  # from now on it sends one command to each
    txn = client.begin("ams")
    txn.write(HERE, b"big", key=b"k")
    txn.write("ber/small", bytes(20_000), key=b"k")
    for _ in range(2):
        with pytest.raises(EventTooLarge):
            txn.commit()
    assert txn.state == "open", "it may be aborted, or committed again"
    txn.abort()
    with cluster.connect(lane=ADMIN_LANE) as operator:
        operator.add_lane("ams")
        for stream in STREAMS:
            operator.grant("ams", stream, ["write", "describe"])
        with cluster.connect(lane="ams") as other:
            other.transact(write_both)
            operator.revoke("ams", THERE, ["write"])
            since = cluster.clock.now
            with pytest.raises(NotAuthorized, match="write"):
                other.transact(write_both)
            assert cluster.clock.now < since + 1
    assert [len(places) for places in events(client).values()] == [4]


def write_both(txn: Transaction) -> None:
    for stream in STREAMS:
        txn.write(stream, b"both", key=b"k")
