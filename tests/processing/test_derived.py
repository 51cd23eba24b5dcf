"""Derived tables that workers write, in memory: as of each time a fold of the source, and no later than known."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.batches.records import Record
from anabranch.client.client import Client
from anabranch.client.session import Session
from anabranch.core.derived_rows import (
    PROGRESS_KEY,
    READY,
    STATE_KEY,
    derived_through,
    is_entry,
    of_value,
    progress_of,
    progress_row,
    with_progress,
)
from anabranch.errors import (
    DerivationMissing,
    IllegalState,
    InvalidArgument,
    NotReady,
    OwnershipLost,
    SnapshotExpired,
    UnsupportedSetting,
)
from anabranch.ports import TopicPartition
from anabranch.processing import derived
from anabranch.processing.batch import BatchTooBig
from anabranch.processing.commits import Commits
from anabranch.processing.failures import HandlerFailed
from anabranch.processing.operations.copies import copy_processor
from anabranch.processing.worker import AllTasks, Worker
from anabranch.protocol import defaults
from anabranch.protocol.ids import VERSION_HEADER, unpack_version
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.partitioner import position_of
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.tables.replica import ReadReplica
from anabranch.tables.snapshot import TableSnapshot, in_use
from anabranch.topics.names import journal_topic
from tests.client.world import World
from tests.tables.worlds import Truth, let_read, reader_ports, visible

ORDERS, BY_CITY, BY_CITY_2 = "shop/orders", "shop/orders-by-city-v1", "shop/orders-by-city-v2"
SOON_S = 0.3  # of a clock that calls move
KEYS = [b"k%d" % n for n in range(12)]
CITIES = [b"oslo", b"rome", b"bonn", b"", b"a\0b"]


def cities(_: bytes, row: bytes) -> list[bytes] | None:
    """The words of a row before the first dot."""
    return row.split(b".")[0].split(b" ") if row != b"none" else None


def fold(rows: dict[bytes, bytes]) -> dict[bytes, bytes]:
    return {of_value(v) + key: b"" for key, row in rows.items() for v in cities(key, row) or ()}


class Shop(World):
    """A table whose rows name cities, and workers in turn with it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        admin = self.connect(lane=ADMIN_LANE)
        admin.grant("open", "shop/*", "operate")
        admin.feature_level(raise_to=LEVEL)
        self.client.create_table(ORDERS, 2)
        let_read(self.client, reader_ports(self))
        self.truth = Truth(self, [ORDERS])
        self.lives = 0
        self.opened: list[ReadReplica] = []

    def app(self, version: int = 1, **more: Any) -> anabranch.DerivedTable:
        how = {"tasks": 4, "commit_interval": 0, "retries": 0} | more
        return anabranch.DerivedTable(ORDERS, "by-city", cities, version=version, **how)

    def worker(self, *tasks: int, folder: str = "", **more: Any) -> Worker:
        self.lives += 1
        app = self.app(**more)
        place = self.folder / (folder or f"w{self.lives}")
        own = AllTasks(tasks or range(app.tasks))
        return Worker(app, self.client, place, tasks=own, threads=False)

    def put(self, **rows: str | None) -> int:
        with self.client.begin("shop") as txn:
            for key, row in rows.items():
                txn.write(ORDERS, None if row is None else row.encode(), key.encode())
            return txn.commit().commit_timestamp

    def plain_write(self, key: bytes, row: bytes | None) -> None:
        """A record of a Kafka producer, in the journal's partition of its key."""
        segments = self.client.describe(ORDERS).segments
        place = next(s.partition for s in segments if s.low <= position_of(key) < s.high)
        log = self.cluster.log("producer")
        log.produce(TopicPartition(journal_topic(ORDERS), place), [Record(0, 0, key, row)])

    def replica(self, *tables: str, client: Client | None = None) -> ReadReplica:
        made = (client or self.client).replica(*(tables or (ORDERS, BY_CITY)), threads=False)
        self.opened.append(made)
        return made

    def times(self) -> list[int]:
        return sorted({t for rows in self.truth.versions(ORDERS).values() for t, _ in rows})

    def wanted(self, at: int) -> dict[bytes, bytes]:
        return fold(visible(self.truth.versions(ORDERS), at))

    def close(self) -> None:
        for each in self.opened:
            each.close()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    yield made
    made.close()


def steps(worker: Worker, count: int = 8) -> None:
    for _ in range(count):
        try:
            worker.step()
        except BatchTooBig as error:
            worker.begin_again(error)


def entries(view: TableSnapshot, table: str = BY_CITY) -> dict[bytes, bytes]:
    return {key: row for key, row in view.scan(table) if is_entry(key)}


def version_of(view: TableSnapshot) -> int:
    found = in_use(view, "by-city")
    assert found is not None
    return found.of.version


def check_all_times(shop: Shop, replica: ReadReplica) -> None:
    """As of each commit of the source, and just before it, the derived table is its fold."""
    for timestamp in shop.times():
        for at in (timestamp - 1, timestamp):
            with replica.snapshot(at=at) as view:
                assert entries(view) == shop.wanted(at), at


# -- rules --------------------------------------------------------------------------------------------------


def test_all_tasks_have_to_be_covered() -> None:
    known: dict[bytes, int] = {}
    key, row = progress_row((0, 2), 4, 70)
    assert (progress_of(key, row), is_entry(key)) == (70, False)
    known = with_progress(known, key, 70)
    assert derived_through(known) == 0
    known = with_progress(known, progress_row((1, 3), 4, 50)[0], 50)
    assert derived_through(known) == 50
    known = with_progress(known, progress_row((1,), 4, 90)[0], 90)
    assert derived_through(known) == 50
    known = with_progress(known, progress_row((3,), 4, 60)[0], 60)
    assert derived_through(known) == 60
    known = with_progress(known, progress_row(range(4), 4, 80)[0], 80)
    assert derived_through(known) == 80
    assert len(known) == 2  # of all tasks, and of task 1, which is further
    assert derived_through(with_progress(known, progress_row((0, 2), 4, 10)[0], 10)) == 80


def test_no_other_row_is_progress() -> None:
    for value in (b"", b"\0", b"\1", b"\0\1", b"\xff"):
        assert is_entry(of_value(value) + b"k")
        assert progress_of(of_value(value) + b"k", b"12345678") == 0
    assert progress_of(STATE_KEY, READY) == progress_of(PROGRESS_KEY + b"\0\4\1", None) == 0


# -- folds --------------------------------------------------------------------------------------------------


def test_entries_have_the_times_of_their_source(shop: Shop) -> None:
    with closing(shop.worker()) as worker:
        first = shop.put(k0="oslo", k1="oslo rome")
        then = shop.put(k0="rome", k1=None)
        shop.plain_write(b"k2", b"bonn")
        last = shop.put(k0="rome.2")
        steps(worker)
        replica = shop.replica()
        check_all_times(shop, replica)
        with replica.snapshot(at=first) as view:
            assert list(view.lookup("by-city", b"oslo")) == [
                (b"k0", b"oslo"),
                (b"k1", b"oslo rome"),
            ]
        with replica.snapshot(at=then) as view:
            assert list(view.lookup("by-city", b"oslo")) == []
            assert view.get_version(BY_CITY, b"rome\0\0k0").timestamp == then
        with replica.snapshot() as view:
            assert view.timestamp >= last
            assert list(view.lookup("by-city", b"bonn")) == [(b"k2", b"bonn")]
        # One commit of the worker had several of the source; the last one changed no entry.
        changes = [e for e in shop.events(BY_CITY) if is_entry(e.key or b"")]
        assert len(changes) == 8
        times = [unpack_version(dict(e.headers)[VERSION_HEADER])[0] for e in changes]
        assert last not in times
        assert shop.client.check_derivation(ORDERS, "by-city", cities) == []


def act(shop: Shop, chance: random.Random, workers: list[Worker]) -> str:
    """Something that happens to the source or to a worker."""
    what = chance.choice(["put"] * 5 + ["plain"] * 3 + ["step"] * 6 + ["scale", "kill", "move"])
    if what == "put":
        rows = {chance.choice(KEYS).decode(): row_of(chance) for _ in range(chance.randint(1, 4))}
        with shop.client.begin("shop") as txn:
            for key, row in rows.items():
                for _ in range(chance.randint(1, 2)):  # a transaction may write a row twice
                    txn.write(ORDERS, row, key.encode())
                    row = row_of(chance)
            txn.commit()
    elif what == "plain":
        shop.plain_write(chance.choice(KEYS), row_of(chance))
    elif what == "step":
        chance.choice(workers).step()
    elif what == "scale":
        table = chance.choice([ORDERS, BY_CITY])
        shop.client.scale(table, chance.randint(1, 4))
    elif what == "kill":  # without `close`: its tasks stay taken
        at = chance.randrange(len(workers))
        tasks = sorted(workers[at]._member.wanted)
        workers[at]._table.close()
        workers[at] = shop.worker(*tasks)
    else:  # tasks move between workers, as after a rebalance
        middle = chance.randint(1, 3)
        for worker, own in zip(workers, (range(middle), range(middle, 4)), strict=True):
            worker._member = AllTasks(own)
    return what


def row_of(chance: random.Random) -> bytes | None:
    words = b" ".join(chance.sample(CITIES, chance.randint(1, 2)))
    return chance.choice([None, b"none", words, words, words + b".%d" % chance.randint(0, 9)])


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 12))]
)
def test_as_of_each_time_it_is_a_fold(shop: Shop, seed: int) -> None:
    """Whatever happens, a snapshot is either the fold of the source as of its time, or refused."""
    chance = random.Random(seed)
    workers = [shop.worker(0, 1), shop.worker(2, 3)]
    replica, looked = shop.replica(), 0
    for _ in range(60):
        try:
            act(shop, chance, workers)
        except anabranch.errors.BeginAgainError:  # as `Worker.run` does
            for worker in workers:
                worker._drop()
        try:
            with replica.snapshot(timeout=SOON_S) as view:
                assert entries(view) == shop.wanted(view.timestamp)
            looked += 1
        except NotReady:
            if replica.timestamp:
                with replica.snapshot(fresh=False) as view:
                    assert entries(view) == shop.wanted(view.timestamp)
                looked += 1
    for worker in workers:
        worker._drop()
        steps(worker, 12)
    assert looked
    check_all_times(shop, replica)
    check_all_times(shop, shop.replica())  # one that reads it all at once
    for worker in workers:
        worker.close()


def test_a_read_waits_for_the_worker(shop: Shop) -> None:
    with closing(shop.worker()) as worker:
        first = shop.put(k0="oslo")
        steps(worker)
        replica = shop.replica()
        with replica.snapshot() as view:
            assert view.timestamp >= first
        later = shop.put(k0="rome")
        with pytest.raises(NotReady, match=BY_CITY):
            replica.snapshot(at=later, timeout=SOON_S)
        with replica.snapshot(fresh=False) as view:
            assert first <= view.timestamp < later
            assert list(view.lookup("by-city", b"oslo")) == [(b"k0", b"oslo")]
        steps(worker)
        with replica.snapshot(at=later) as view:
            assert list(view.lookup("by-city", b"rome")) == [(b"k0", b"rome")]


def test_tasks_without_events_do_not_delay_reads(shop: Shop) -> None:
    first, second = shop.worker(0, 1), shop.worker(2, 3)
    with closing(first), closing(second):
        at = shop.put(k0="oslo")  # of one task
        steps(first)
        steps(second)
        with shop.replica().snapshot(at=at) as view:
            assert entries(view) == shop.wanted(at)


def test_a_large_transaction_is_read_whole(shop: Shop) -> None:
    """It is derived in several commits, and is not complete before the last one."""
    with closing(shop.worker(cut_bytes=300)) as worker:
        at = shop.put(**{f"k{n}": f"oslo.{n:0100}" for n in range(40)})
        replica, seen = shop.replica(), set[int]()
        for _ in range(30):
            worker.step()
            try:
                with replica.snapshot(at=at, timeout=SOON_S) as view:
                    seen.add(len(entries(view)))
            except NotReady:
                seen.add(0)
        assert seen == {0, 40}
        assert len([c for c in shop.commits(BY_CITY) if c.timestamp > at]) > 3


def test_a_commit_is_one_command_after_a_pause_and_grows_with_a_backlog(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pause a commit was so big that it went by journals: begin, and two rounds at its end."""
    monkeypatch.setattr(shop, "client", shop.new_client(one_shot_bytes=defaults.ONE_SHOT_BYTES))
    row = " ".join(f"{m:08000}" for m in range(5))  # 40 KB of entries, and as much state

    def commits_of(rows: int) -> int:
        written = [shop.put(**{f"{rows}-{n}": row}) for n in range(rows)]
        before = len(shop.commits(BY_CITY))
        steps(worker)
        shop.replica().snapshot(at=written[-1]).close()
        return len(shop.commits(BY_CITY)) - before

    with closing(shop.worker(commit_interval=1)) as worker:
        with monkeypatch.context() as opening:
            opening.setattr(Session, "begin", None)
            assert commits_of(4) == 2
        assert commits_of(14) == 4


def test_input_that_is_left_is_not_derived_yet(shop: Shop) -> None:
    """A commit may be full before all the input that was read is handled."""
    cities = " ".join(f"city{n}" for n in range(20))
    with closing(shop.worker(cut_bytes=2_000)) as worker:
        at = [shop.put(**{f"k{n}": cities}) for n in range(6)][-1]
        replica, seen = shop.replica(), set[int]()
        for _ in range(20):
            worker.step()
            try:
                with replica.snapshot(at=at, timeout=SOON_S) as view:
                    seen.add(len(entries(view)))
            except NotReady:
                seen.add(0)
        assert seen == {0, 120}


def test_a_table_that_was_compacted_is_read_from_its_base(shop: Shop) -> None:
    with closing(shop.worker()) as worker:
        shop.put(k0="oslo", k1="rome")
        shop.put(k0="rome")
        steps(worker)
        shop.clock.sleep(4000)  # longer than versions are kept
        shop.put(k1="bonn", k2="oslo")
        steps(worker)
        admin = shop.connect(lane=ADMIN_LANE)
        let_read(admin, reader_ports(shop), 30.0)
        base = admin.compact_table(BY_CITY, plain_readers_lose_history=True)
        at = shop.put(k2=None)
        steps(worker)
        replica = shop.replica(BY_CITY)
        for time in (base.timestamp, at - 1, at):
            with replica.snapshot(at=time) as view:
                assert entries(view) == shop.wanted(time)
        with pytest.raises(SnapshotExpired):
            replica.snapshot(at=base.timestamp - 1)


# -- versions -----------------------------------------------------------------------------------------------


def test_a_higher_version_is_switched_at_one_timestamp(shop: Shop) -> None:
    with closing(shop.worker()) as old, closing(shop.worker(version=2)) as new:
        first = shop.put(k0="oslo")
        steps(old)
        replica = shop.replica(ORDERS, BY_CITY, BY_CITY_2)
        with pytest.raises(NotReady, match=BY_CITY_2):
            shop.client.rebuild(ORDERS, "by-city", timeout=SOON_S)
        steps(new)
        with replica.snapshot(at=first) as view:
            assert version_of(view) == 1
        assert shop.client.rebuild(ORDERS, "by-city") == BY_CITY_2
        switched = shop.commits(BY_CITY_2)[-1].timestamp
        assert switched == shop.commits(BY_CITY)[-1].timestamp
        for _ in range(2):
            shop.put(k1="rome")
            steps(old)
            steps(new)
        for at, version in ((switched - 1, 1), (switched, 2)):
            with replica.snapshot(at=at) as view:
                assert version_of(view) == version
        with shop.replica().snapshot() as view, pytest.raises(DerivationMissing):
            list(view.lookup("by-city", b"oslo"))
        assert shop.client.check_derivation(ORDERS, "by-city", cities) == []


def test_a_check_does_not_wait_for_a_former_worker(shop: Shop) -> None:
    with closing(shop.worker()) as old, closing(shop.worker(version=2)) as new:
        shop.put(k0="oslo")
        steps(old)
        steps(new)
        shop.client.rebuild(ORDERS, "by-city")
        shop.put(k0="rome")
        steps(new)
        assert shop.client.check_derivation(ORDERS, "by-city", cities, timeout=SOON_S) == []


def test_a_check_ends_at_its_timeout(shop: Shop) -> None:
    with closing(shop.worker()) as worker:
        steps(worker)
        shop.put(k0="oslo")
        begun = shop.clock.monotonic()
        with pytest.raises(NotReady, match=BY_CITY):
            shop.client.check_derivation(ORDERS, "by-city", cities, timeout=SOON_S)
        assert shop.clock.monotonic() < begun + 10 * SOON_S


# -- refusals -----------------------------------------------------------------------------------------------


def test_what_a_worker_cannot_promise_is_refused(shop: Shop) -> None:
    with pytest.raises(InvalidArgument, match="refuse a value"):
        anabranch.DerivedTable(ORDERS, "by-city", cities, unique=True)
    with pytest.raises(InvalidArgument, match="unique"):
        shop.client.derive(ORDERS, "by-city", cities, unique=True, asynchronous=True)
    app = shop.app()
    app.on(app.input("shop/others"))(print)
    with pytest.raises(InvalidArgument, match="nothing else"):
        app.check()
    shop.client.create_stream("shop/stream")
    with pytest.raises(InvalidArgument, match="no table"):
        shop.client.derive("shop/stream", "by-city", cities, asynchronous=True)
    shop.client.derive(ORDERS, "by-city", cities)
    with pytest.raises(IllegalState, match="in force"):
        shop.worker(version=2)


def test_a_derived_table_is_no_source(shop: Shop) -> None:
    shop.client.derive(ORDERS, "by-city", cities, asynchronous=True)
    with pytest.raises(UnsupportedSetting, match="no source"):
        shop.client.derive(BY_CITY, "again", cities, asynchronous=True)


def test_its_rows_have_no_locks(shop: Shop) -> None:
    with closing(shop.worker()) as worker:
        shop.put(k0="oslo")
        steps(worker)
        with shop.client.replica(ORDERS, BY_CITY, threads=False) as replica, replica.begin() as txn:
            reads: list[Callable[[], object]] = [
                lambda: txn.get(BY_CITY, b"oslo\0\0k0"),
                lambda: list(txn.scan(BY_CITY)),
                lambda: list(txn.lookup("by-city", b"oslo")),
                lambda: txn.lock(BY_CITY),
            ]
            for read in reads:
                with pytest.raises(InvalidArgument, match="locked"):
                    read()
            assert txn.get(BY_CITY, b"oslo\0\0k0", lock=False) == b""


def test_a_lookup_in_a_transaction_is_refused_with_either_isolation(shop: Shop) -> None:
    with closing(shop.worker()) as worker:
        shop.put(k0="oslo")
        steps(worker)
        shop.client.rebuild(ORDERS, "by-city")
        steps(worker)
        with (
            shop.client.replica(ORDERS, BY_CITY, threads=False) as replica,
            replica.begin(isolation="snapshot") as txn,
        ):
            txn.put(ORDERS, b"k0", b"rome")
            with pytest.raises(InvalidArgument, match="derived by a worker"):
                txn.lookup("by-city", b"oslo")


def test_a_later_version_by_writers_is_looked_up_in_transactions(shop: Shop) -> None:
    with closing(shop.worker()) as worker:
        shop.put(k0="oslo")
        steps(worker)
        shop.client.derive(ORDERS, "by-city", cities, version=2)
        steps(worker)
        tables = (ORDERS, BY_CITY, BY_CITY_2)
        with shop.client.replica(*tables, threads=False) as replica, replica.begin() as txn:
            txn.put(ORDERS, b"k0", b"rome")
            assert list(txn.lookup("by-city", b"oslo")) == []
            assert list(txn.lookup("by-city", b"rome")) == [(b"k0", b"rome")]


def test_only_its_worker_writes_it(shop: Shop) -> None:
    with closing(shop.worker()) as worker:
        shop.put(k0="oslo")
        steps(worker)
        with shop.client.begin("shop") as txn:
            txn.write(BY_CITY, b"", b"oslo\0\0x")
            with pytest.raises(DerivationMissing, match=BY_CITY):
                txn.commit()
        log = shop.cluster.log("producer")
        plain = Record(0, 0, b"oslo\0\0y", b"")
        log.produce(TopicPartition(journal_topic(BY_CITY), 0), [plain])
        shop.put(k0="rome")
        steps(worker)
        check_all_times(shop, shop.replica())


def test_nothing_is_derived_twice(shop: Shop) -> None:
    with closing(shop.worker()) as worker:
        shop.put(k0="oslo")
        steps(worker)
    client = shop.connect(lane=ADMIN_LANE)
    let_read(client, reader_ports(shop), 30.0)
    with pytest.raises(IllegalState, match="higher version"):
        client.reset_processor(BY_CITY, start="begin")
    with pytest.raises(IllegalState, match="processor"):
        client.delete_stream(BY_CITY)
    client.delete_processor(BY_CITY)
    with pytest.raises(IllegalState, match="earlier processor"):
        shop.worker()
    client.delete_processor(BY_CITY)
    client.delete_stream(BY_CITY)
    with closing(shop.worker()) as worker:
        steps(worker)
        check_all_times(shop, shop.replica())


def test_a_derived_table_keeps_its_input(shop: Shop) -> None:
    """Otherwise a worker that sees its input dropped and added again lacks changes, or derives them twice."""
    client = shop.connect(lane=ADMIN_LANE)
    let_read(client, reader_ports(shop), 30.0)
    client.create_stream("shop/other")
    with closing(shop.worker()) as worker:
        shop.put(k0="oslo")
        steps(worker)
        with suppress(IllegalState):
            client.alter_processor(BY_CITY, add=["shop/other"], start="end", drop=[ORDERS])
        shop.put(k0="rome")
        with suppress(IllegalState, InvalidArgument):
            client.alter_processor(BY_CITY, add=[ORDERS], start="end", drop=["shop/other"])
        shop.put(k1="bonn")
        try:
            steps(worker)
        except OwnershipLost:
            worker._drop()
            steps(worker)
        check_all_times(shop, shop.replica())
        with pytest.raises(IllegalState, match="derives a table"):
            client.alter_processor(BY_CITY, add=["shop/other"], start="end")


def test_a_derived_table_keeps_its_positions(shop: Shop) -> None:
    """A copy of an old savepoint would derive changes again that the table has."""
    client, kept = shop.connect(lane=ADMIN_LANE), "shop/kept"
    let_read(client, reader_ports(shop), 30.0)
    with closing(shop.worker()) as worker:
        for row in ("oslo", "rome"):
            shop.put(k0=row)
            steps(worker)
            if row == "oslo":
                copy_processor(client, BY_CITY, kept, savepoint=True)
                worker._drop()
        shop.put(k0="oslo")
        steps(worker)
    client.delete_processor(BY_CITY)
    with suppress(IllegalState):
        copy_processor(client, kept, BY_CITY)
        with closing(shop.worker()) as worker:
            steps(worker)
    check_all_times(shop, shop.replica())
    with pytest.raises(IllegalState, match="derives a table"):
        copy_processor(client, kept, BY_CITY)


def test_a_worker_of_a_deleted_processor_does_not_derive_again(shop: Shop) -> None:
    with closing(shop.worker()) as worker:
        shop.put(k0="oslo")
        shop.put(k0="rome")
        steps(worker)
        before = len(shop.events(BY_CITY))
        client = shop.connect(lane=ADMIN_LANE)
        let_read(client, reader_ports(shop), 30.0)
        client.delete_processor(BY_CITY)
        with pytest.raises(IllegalState, match="earlier processor"):
            shop.worker()  # which made the processor again
        shop.clock.sleep(100)
        with pytest.raises(IllegalState, match="earlier processor"):
            worker.run()
        assert len(shop.events(BY_CITY)) == before


def compacted(shop: Shop) -> int:
    """Compact the orders. Returns the time of the base."""
    shop.clock.sleep(4000)  # longer than versions are kept
    shop.put(k9="last")
    admin = shop.connect(lane=ADMIN_LANE)
    let_read(admin, reader_ports(shop), 30.0)
    return admin.compact_table(ORDERS, plain_readers_lose_history=True).timestamp


def test_a_source_that_was_compacted_is_derived_from_its_base(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a worker that dies after the second of the commits of the base's rows, and then by another one."""
    first = shop.put(k0="oslo", k1="rome", k2="rome", k3="bonn")
    second = shop.put(k0="oslo rome", k3=None)
    base = compacted(shop)
    then = {b"k0": b"oslo rome", b"k1": b"rome", b"k2": b"rome"}
    now = {b"k0": b"oslo rome", b"k1": b"oslo", b"k9": b"last"}
    written, commit = [0], Commits.send

    def send(self: Commits, *of: Any) -> None:
        if written[0] == 2:
            raise NotReady("killed")
        written[0] += 1
        commit(self, *of)

    with monkeypatch.context() as patched, closing(shop.worker(tasks=1)) as worker:
        patched.setattr(Commits, "send", send)
        patched.setattr(derived, "_AT_ONCE", 1)
        shop.put(k1="oslo")
        with pytest.raises(NotReady, match="killed"):
            steps(worker)
    with closing(shop.worker(tasks=1)) as worker:
        steps(worker)
        last = shop.put(k2=None)
        steps(worker)
        replica = shop.replica()
        for at, rows in (
            (base, then),
            (last - 1, now | {b"k2": b"rome"}),
            (last, now),
        ):
            with replica.snapshot(at=at) as view:
                assert entries(view) == fold(rows), at
        with replica.snapshot() as view:
            versions = [view.get_version(BY_CITY, key).timestamp for key in sorted(entries(view))]
            assert (second in versions, first in versions) == (True, False)
        assert shop.client.check_derivation(ORDERS, "by-city", cities) == []
        with pytest.raises(SnapshotExpired):
            shop.replica(BY_CITY).snapshot(at=base - 1)
        seen = [(e.key, e.value) for e in shop.events(BY_CITY) if is_entry(e.key or b"")]
        assert len(seen) == len(set(seen))  # each entry came once, and went once


def test_a_base_whose_state_is_too_big_for_a_commit_is_derived_in_several(shop: Shop) -> None:
    shop.put(**{f"k{n}": f"oslo.{n}" for n in range(100)})
    compacted(shop)
    controller = shop.controllers[0]
    controller.settings = replace(controller.settings, chunk_bytes=1000)
    with closing(shop.worker(tasks=1)) as worker:
        steps(worker, 16)
        assert worker.metrics.total("processor_taken_again") > 0
        assert shop.client.check_derivation(ORDERS, "by-city", cities) == []


def test_a_base_that_moved_before_the_processor_was_made_is_refused(shop: Shop) -> None:
    shop.put(k0="oslo")
    compacted(shop)
    shop.client.derive(ORDERS, "by-city", cities, asynchronous=True)
    compacted(shop)
    with pytest.raises(InvalidArgument, match="delete the processor"):
        shop.worker()


def test_a_client_that_had_a_function_rebuilds_for_workers(shop: Shop) -> None:
    shop.client.derive(ORDERS, "by-city", cities)
    shop.client.drop_derivation(ORDERS, "by-city")
    with closing(shop.worker(version=2)) as worker:
        shop.put(k0="oslo")
        steps(worker)
        assert shop.client.rebuild(ORDERS, "by-city") == BY_CITY_2


def test_a_function_that_fails_stops_the_worker(shop: Shop) -> None:
    def fails(key: bytes, _: bytes) -> bytes:
        raise ValueError(key)

    app = anabranch.DerivedTable(ORDERS, "by-city", fails, commit_interval=0, retries=0, tasks=1)
    own = AllTasks([0])
    with closing(Worker(app, shop.client, shop.folder / "w", tasks=own, threads=False)) as worker:
        at = shop.put(k0="oslo")
        with pytest.raises(HandlerFailed, match="k0"):
            steps(worker)
        with pytest.raises(NotReady, match=BY_CITY):
            shop.replica().snapshot(at=at, timeout=SOON_S)


def test_drop_derivation_is_not_for_workers(shop: Shop) -> None:
    shop.client.derive(ORDERS, "by-city", cities, asynchronous=True)
    with pytest.raises(InvalidArgument, match="in force"):
        shop.client.drop_derivation(ORDERS, "by-city")


def test_changes_have_no_rows_before(shop: Shop) -> None:
    with closing(shop.worker()), pytest.raises(InvalidArgument, match="by a worker"):
        shop.client.changes(BY_CITY, before=True)
