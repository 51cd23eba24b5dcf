"""Bases over a real controller and the log in memory: what begins at one shows what the whole log showed."""

from __future__ import annotations

import contextlib
import random
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from anabranch.cli import options
from anabranch.cli import table as table_commands
from anabranch.cli.main import app
from anabranch.client.calls import compact
from anabranch.client.client import Client
from anabranch.errors import (
    IllegalState,
    NotAuthorized,
    NotInstalled,
    NotReady,
    RetryError,
    SnapshotExpired,
    UnknownStream,
)
from anabranch.extras import command_of
from anabranch.ports import LogUnavailable, TopicPartition
from anabranch.protocol.hybrid_time import from_s, to_text
from anabranch.protocol.ids import txn_text
from anabranch.tables import follow
from anabranch.tables.replica import ReadReplica
from anabranch.topics.names import history_topic, stream_topic
from tests.client.world import World
from tests.reading.test_ordered_reader import Member
from tests.tables.test_replica import KEYS, check, write
from tests.tables.worlds import Truth, as_it_lies, let_read, operator, put, reader_ports, replica

ONE, TWO = "bank/one", "bank/two"
BASE = "bank/one-base"


@pytest.fixture
def world() -> World:
    made = World()
    for table in (ONE, TWO):
        made.client.create_table(table, 2, {"table.history.ms": 2000})
    return made


def compacted(client: Client, truth: Truth, table: str = ONE, **how: Any) -> Any:
    truth.versions(table)  # a base is of an earlier time
    return client.compact_table(table, plain_readers_lose_history=True, **how)


def written(world: World, rounds: int = 5, rows: int = 20, table: str = ONE) -> None:
    """Each row is written so often, a second apart."""
    for i in range(rounds):
        with world.client.begin("bank") as txn:
            for key in range(rows):
                txn.write(table, None if (key + i) % 7 == 0 else b"%d" % i, b"k%d" % key)
            txn.commit()
        world.clock.sleep(1)


def first_offset(world: World, topic: str) -> int:
    """The first offset of a topic, of all partitions together."""
    log = world.cluster.log("reader")
    places = [TopicPartition(topic, p) for p in range(world.cluster.topics[topic].partitions)]
    return sum(log.start_offsets(places).values())


def loaded(world: World, truth: Truth, folder: Path | None = None) -> ReadReplica:
    """A replica of all that is committed."""
    found = replica(world, truth, [ONE], folder, history_ms=1 << 40)
    found.snapshot(timeout=300).close()
    return found


def agrees(world: World, truth: Truth, base: Any) -> None:
    """A new replica shows all that it is promised to show."""
    with loaded(world, truth) as found:
        assert found._store.marks[ONE].floor == base.timestamp
        for commit in [*world.commits(ONE), base]:
            check(found, truth, max(base.timestamp, commit.timestamp))
        with pytest.raises(SnapshotExpired):
            found.snapshot(at=base.timestamp - 1)


def test_what_a_processor_has_not_consumed_stays(world: World) -> None:
    """One task is up to date, the other one never began: then it comes, too."""
    let_read(world.client, reader_ports(world))
    truth = Truth(world, [ONE])
    world.client.create_processor("bank/p", ONE, tasks=2)

    def consume(*tasks: int) -> int:
        ownership = world.client.take_tasks("bank/p", tasks)
        with world.client.read(ONE, ownership=ownership, timeout=3.0) as reader:
            count = len(list(reader))
            with world.client.begin("bank", ownership=ownership) as txn:
                txn.commit(consumed=reader.consumed())
        return count

    written(world, rounds=2)
    count = consume(0)
    world.clock.sleep(10)
    with pytest.raises(IllegalState, match="would be lost to processors bank/p"):
        compacted(operator(world), truth)
    assert count + consume(1) == 40
    assert compacted(operator(world), truth).rows == 18


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))]
)
def test_new_replicas_show_what_the_whole_log_showed(
    seed: int, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bases while others write, compactors that die, old folders; small batches, and errors of brokers."""
    monkeypatch.setattr(follow, "BATCH_ROWS", 3)
    chance = random.Random(seed)
    truth = Truth(world, [ONE, TWO])
    client, bases = operator(world), 0
    for _ in range(30):
        kind = chance.choices(["write", "compact", "scale", "folder"], [4, 3, 1, 3])[0]
        world.clock.sleep(chance.choice([0, 0.5, 2]))
        if kind == "write":
            write(world, chance, KEYS[:-1])
        elif kind == "scale":
            world.client.scale(
                chance.choice([ONE, BASE][: 1 + bool(bases)]), chance.choice([1, 2, 3])
            )
        elif kind == "compact":
            dies = chance.random() < 0.3

            def meanwhile(_: int, dies: bool = dies) -> None:
                write(world, chance, KEYS[:-1])
                if dies:
                    raise ZeroDivisionError

            with contextlib.suppress(NotReady, ZeroDivisionError):
                base = compacted(client, truth, progress=meanwhile)
                bases += 1
                agrees(world, truth, base)
        else:
            now = tmp_path / str(chance.randrange(3))  # some were not used for long
            with replica(world, truth, [ONE, TWO], now, history_ms=2000) as found:
                odds = chance.choice([0, 0.1])

                def fault(_: str, odds: float = odds) -> BaseException | None:
                    return LogUnavailable("gone") if chance.random() < odds else None

                for _ in range(chance.choice([3, 30])):
                    world.fault = fault
                    with contextlib.suppress(RetryError):
                        found.step(world.clock.now)
                    world.fault = None
                    if not found._store.loading and found.timestamp:
                        check(found, truth, found.timestamp)
    world.clock.sleep(9)
    agrees(world, truth, compacted(client, truth))
    assert bases
    for name in tmp_path.iterdir():
        with replica(world, truth, [ONE, TWO], name) as found, found.snapshot(timeout=300) as view:
            check(found, truth, view.timestamp)


def test_a_base_is_what_the_floor_shows_and_the_log_goes_below_it(world: World) -> None:
    """Row at 10, again at 60: the base of now would have nothing that shows 10 at 55."""
    truth = Truth(world, [ONE])
    written(world, 2)
    before = truth.last(ONE, 1 << 63)
    world.clock.sleep(1)
    middle = from_s(int(world.clock.wall()))
    world.clock.sleep(1)
    written(world, 1)
    base = compacted(operator(world), truth)
    assert before <= base.timestamp <= middle
    agrees(world, truth, base)
    with loaded(world, truth) as found, found.snapshot(at=middle) as view:
        assert view.get(ONE, b"k1") == b"1"
        seen = next(view.versions(ONE, b"k1"))
        mine = next(c for c in world.commits(BASE))
        assert (seen.timestamp, base.rows) == (before, sum(s.count for s in mine.segments))
        assert seen.txn_id not in (mine.txn_id, bytes(16)), "its own, not the compactor's"
    info = world.client.describe(ONE)
    assert (info.base, info.oldest_snapshot > base.timestamp) == (base, True)
    assert first_offset(world, stream_topic(ONE)) > 0
    again = compacted(operator(world), truth)
    assert again == base, "nothing new is to be gained"
    world.clock.sleep(60)
    later = compacted(operator(world), truth)
    assert later.timestamp > base.timestamp
    assert [c.txn_id for c in world.commits(BASE)][-1] == later.txn_id
    starts = first_offset(world, stream_topic(BASE))
    assert starts >= base.rows, "the base before is deleted"
    agrees(world, truth, later)


def test_two_compactors_make_one(world: World) -> None:
    truth = Truth(world, [ONE])
    written(world)
    one, two = operator(world), operator(world)
    inner: list[Any] = []

    def at_once(_: int) -> None:
        if not inner:
            inner.append(compacted(two, truth))

    base = compacted(one, truth, progress=at_once)
    assert [base] == inner
    assert len(world.commits(BASE)) == 1
    agrees(world, truth, base)


def test_an_empty_table_and_one_of_a_row(world: World) -> None:
    truth = Truth(world, [ONE])
    client = operator(world)
    with pytest.raises(NotReady, match="younger"):
        compacted(client, truth)
    for value in (b"v", None):
        put(world.client, ONE, value, b"k")
        world.clock.sleep(9)
        base = compacted(client, truth)
        assert base.rows == 1
        agrees(world, truth, base)
        with loaded(world, truth) as found, found.snapshot() as view:
            assert list(view.scan(ONE)) == ([] if value is None else [(b"k", value)])


def test_compaction_needs_a_right_and_names_the_transaction_that_blocks_it(world: World) -> None:
    """A lane without the right is given no other reason; an open transaction that reads is named, and its end.

    Once there is a base, too: a call that can do nothing fails.
    """
    truth, client = Truth(world, [ONE]), operator(world)
    world.client._shared.ports = replace(
        world.client._shared.ports, readers=client._shared.ports.readers
    )
    with pytest.raises(NotAuthorized):
        compacted(world.client, truth)
    with client.replica(ONE, threads=False) as found:
        txn = found.begin(keepalive=600.0)
        txn.get(ONE, b"k")
        txn.flush()
        written(world)
        world.clock.sleep(9)
        with pytest.raises(NotReady, match=f"yet: transaction {txn_text(txn.txn_id or b'')} "):
            compacted(client, truth)
        txn.abort()
        txn = found.begin(keepalive=600.0)
        txn.get(ONE, b"k")
        txn.flush()
        world.clock.sleep(9)
        base = compacted(client, truth)
        (blocker,) = client.describe(ONE).blockers
        assert (blocker.name, blocker.lane) == (txn_text(txn.txn_id or b""), "admin")
        with pytest.raises(
            NotReady, match=f"base of .* already.*{blocker.name} of lane admin, .*{blocker.ends}"
        ):
            compacted(client, truth)
        txn.abort()
        assert compacted(client, truth).timestamp > base.timestamp


def test_a_missing_package_is_named_with_its_extra(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = operator(world)
    for package, call in (
        ("pyarrow", lambda: compacted(client, Truth(world, [ONE]))),
        ("rocksdict", lambda: client.replica(ONE)),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        named = f"{package} is not installed.*{re.escape(command_of('tables'))}"
        with pytest.raises(NotInstalled, match=named):
            call()


def test_a_folder_from_before_the_base_is_loaded_from_it(world: World, tmp_path: Path) -> None:
    """Deleted since: nothing in the base says so."""
    truth = Truth(world, [ONE])
    put(world.client, ONE, b"v", b"gone", b"stays")
    loaded(world, truth, tmp_path).close()
    put(world.client, ONE, None, b"gone")
    world.clock.sleep(9)
    base = compacted(operator(world), truth)
    with loaded(world, truth, tmp_path) as found, found.snapshot() as view:
        assert list(view.scan(ONE)) == [(b"stays", b"v")]
        assert found._store.marks[ONE].floor == base.timestamp


@pytest.mark.parametrize("stop", ["flush", "no flush"])
def test_a_crash_while_a_base_is_laid_down_shows_nothing_of_it(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    monkeypatch.setattr(follow, "BATCH_ROWS", 3)
    truth = Truth(world, [ONE])
    written(world)
    world.clock.sleep(9)
    compacted(operator(world), truth)
    found = replica(world, truth, [ONE], tmp_path / "a")
    found.step(world.clock.now)
    assert not found.timestamp
    assert list(found._store.rows(found._store.marks[ONE].number, b"", None, 1 << 63))
    if stop == "flush":
        found._store._db.flush()
    (tmp_path / "b").mkdir()
    as_it_lies(tmp_path / "a" / "rows", tmp_path / "b" / "rows")
    found.close()
    world.clock.sleep(9)
    for key in (b"k1", b"k2"):
        put(world.client, ONE, None, key)
    world.clock.sleep(9)
    base = compacted(operator(world), truth)
    with loaded(world, truth, tmp_path / "b") as found:
        check(found, truth, found.timestamp)
        assert found._store.marks[ONE].floor == base.timestamp


def test_a_base_is_laid_down_though_each_second_step_fails(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading resumes where it was, also after restarts; a later base is laid down from its beginning."""
    monkeypatch.setattr(follow, "BATCH_ROWS", 3)
    truth = Truth(world, [ONE])
    world.client.scale(ONE, 8)  # a part of the base for each
    written(world, 2)
    world.clock.sleep(9)
    compacted(operator(world), truth)
    numbers: set[int] = set()
    open_ = replica(world, truth, [ONE], tmp_path, history_ms=1 << 40)

    def steps(count: int) -> None:
        for number in range(count):
            fails = Mock(side_effect=NotReady("gone") if number % 2 else None)
            monkeypatch.setattr(follow.Follower, "_check_same", fails)
            with contextlib.suppress(RetryError):
                open_.step(world.clock.now)
            numbers.update(mark.number for mark in open_._store.marks.values())

    steps(3)
    assert open_._store.marks[ONE].base
    put(world.client, ONE, None, b"k1")
    world.clock.sleep(9)
    base = compacted(operator(world), truth)
    steps(4)
    open_.close()
    open_ = replica(world, truth, [ONE], tmp_path, history_ms=1 << 40)
    steps(16)
    assert open_.timestamp >= base.timestamp, "it was begun from nothing each time"
    check(open_, truth, open_.timestamp)
    assert numbers == {1, 2}, "two bases"
    open_.close()
    runs_of = partial(follow.base_runs, reader_ports(world).committed_log(30.0), ONE, base, 30.0)
    all_ = [(run.partition, run.stretch.segment_id, run.offsets) for run in runs_of()]
    laid = {f"{where}/{part}": (1, offsets[0] + 1) for where, part, offsets in all_}
    rest = [(run.partition, run.stretch.segment_id, run.offsets) for run in runs_of(laid)]
    assert rest == [(where, part, offsets[1:]) for where, part, offsets in all_ if offsets[1:]]


def test_a_replica_that_a_base_overtakes_is_loaded_from_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """It is loaded again, and a waiting snapshot raises no error."""
    truth = Truth(world, [ONE])
    found = replica(world, truth, [ONE], None)
    written(world, 1)
    found.snapshot().close()
    written(world, 3)
    world.clock.sleep(9)
    base = compacted(operator(world), truth)
    with found.snapshot(timeout=60) as view:
        check(found, truth, view.timestamp)
        assert found._store.marks[ONE].floor == base.timestamp
    found.close()
    assert "retention" not in caplog.text  # nothing is lost


def test_a_difference_that_ends_at_the_beginning_is_empty(world: World) -> None:
    written(world, 1)
    with operator(world).changes(ONE, until=0) as reader:
        assert list(reader) == []


def test_a_group_of_changes_resumes_with_the_rows_before(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last change counts as processed only when the next one is asked for, and has to come again."""
    group, ports = Member(), reader_ports(world)
    ports = replace(ports, member=lambda _: group)
    let_read(world.client, ports)
    written(world, rounds=6, rows=1)
    one = partial(world.client.changes, ONE, "audit", 1.0, before=True, folder=tmp_path / "f")
    how = partial(world.client._reading.read_replica, threads=False)
    monkeypatch.setattr(world.client._reading, "read_replica", how)
    last = None
    for count in (3, 1):
        with one() as reader:
            group.gained([TopicPartition(history_topic(ONE), 0)])
            *_, found = islice(reader, count)
            assert reader._rows is not None
            for _ in range(20):
                reader._rows.step(world.clock.now)
            assert reader._rows._store.marks[ONE].floor, "it is swept"
        assert last in (None, found)
        last = found


def test_a_difference_of_a_table_without_commits_ends(world: World) -> None:
    let_read(world.client, reader_ports(world))
    for rows in (0, 2):
        written(world, rounds=bool(rows), rows=rows)
        with world.client.changes(ONE, timeout=1.0, until="end") as reader:
            assert len(list(reader)) == rows
    world.clock.sleep(9)
    base = compacted(operator(world), Truth(world, [ONE]))
    place = TopicPartition(history_topic(ONE), 0)
    world.cluster.log("cleaner").delete_records({place: base.position})
    with (
        world.client.changes(ONE, timeout=1.0, until="end") as reader,
        pytest.raises(SnapshotExpired, match="it was compacted"),
    ):
        list(reader)


def test_a_group_whose_first_call_fails_has_no_position(world: World) -> None:
    group = Member()
    ports = replace(reader_ports(world), member=lambda _: group)
    let_read(world.client, ports)

    def changes(start: str | int = "begin") -> list[bytes]:
        with world.client.changes(ONE, "audit", 1.0, start) as reader:
            group.gained([TopicPartition(history_topic(ONE), 0)])
            return [change.key for change in reader]

    written(world)
    world.clock.sleep(9)
    base = compacted(operator(world), Truth(world, [ONE]))
    to = to_text(base.timestamp)
    with pytest.raises(SnapshotExpired, match=f"up to {to}.*group reset audit {ONE} --to {to}"):
        changes()
    assert not group.offsets
    written(world, 1, 1)
    assert changes(base.timestamp) == [b"k0"]
    assert group.offsets


@pytest.mark.parametrize("raised", [0, 1000])
def test_the_biggest_row_has_room_in_a_base(world: World, raised: int) -> None:
    """It is bigger there. ``raised``: the table's limit, after the first base."""
    truth, client, table = Truth(world, [ONE]), operator(world), ONE
    if raised:
        table = "bank/small"
        client.create_table(table, 1, {"table.history.ms": 2000, "max.message.bytes": 20_000})
    for size in (20_000, 20_000 + raised) if raised else (1_048_588,):
        if size > 20_000 and raised:
            client.alter_stream(table, {"max.message.bytes": size})
        put(client, table, b"x" * (size - 129), b"k")
        world.clock.sleep(9)
        assert compacted(client, truth, table).rows == 1


def test_the_watch_continues_after_errors(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controllers fail over while it looks; of one table no events can be counted."""
    monkeypatch.setattr(compact, "LEAST_ROWS", 1)
    client = operator(world)
    for name in (ONE, TWO):
        client.alter_stream(name, {"table.compact.ratio": 2})
        written(world, table=name)
    count, naps = client.count_events, iter(range(2))

    def counted(stream: str) -> Any:
        if stream == ONE:
            raise UnknownStream("it is lost")
        return count(stream)

    def nap(_: float) -> None:
        if next(naps, None) is None:
            raise KeyboardInterrupt
        world.clock.sleep(9)

    streams = Mock(side_effect=[NotReady("no controller leads"), *[client.streams(None)] * 2])
    monkeypatch.setattr(client, "streams", streams)
    monkeypatch.setattr(client, "count_events", counted)
    monkeypatch.setattr(options, "connected", lambda _: nullcontext(client))
    monkeypatch.setattr(table_commands, "time", Mock(sleep=nap))
    line = ["table", "compact", "--watch", "--plain-readers-lose-history", "--bootstrap=x:1"]
    assert CliRunner().invoke(app, line).exit_code == 130
    assert [client.describe(name).base is not None for name in (ONE, TWO)] == [False, True]
    assert streams.call_count == 3
    monkeypatch.setattr(client, "system", lambda *_, **__: [])  # it is deleted meanwhile
    monkeypatch.setattr(client, "count_events", count)
    told = CliRunner().invoke(app, ["table", "describe", ONE, "--bootstrap=x:1"])
    assert "UnknownStream" in told.stderr
