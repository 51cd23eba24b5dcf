"""What an open transaction wrote, read back from journals: held against what its commit then brings."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from anabranch.batches.records import Record
from anabranch.client import own_writes
from anabranch.client.own_writes import Local, ReadBack, Written
from anabranch.client.session import Session
from anabranch.client.transaction import Transaction
from anabranch.client.writer import Writer
from anabranch.controller import cleanup as moving
from anabranch.core.decisions.cleanup import PlacedRun, runs_to_move
from anabranch.core.decisions.turn import Settings, Turn
from anabranch.core.journal_index import Place
from anabranch.errors import NotAuthorized, NotReady, TransactionAborted
from anabranch.ports import TopicPartition
from anabranch.protocol.ids import TXN_HEADER, TXN_ID_SIZE, pack_txn_header, unpack_txn_header
from anabranch.protocol.schemas import records as r
from anabranch.testing.memory import cluster
from anabranch.topics.names import journal_topic
from tests.client.world import World
from tests.tables.worlds import reader_ports

TABLE = "bank/t"
KEYS = [b"a", b"a\0", b"b", b"c\xff", b"d"]
OFTEN: dict[str, Any] = {"clean_ms": 0, "clean_records": 1, "clean_bytes": 1, "move_bytes": 2_000}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Journals are cut as soon as they can be, and runs move for little."""
    monkeypatch.setattr(cluster, "Settings", partial(Settings, **OFTEN))
    made = World()
    made.client.create_table(TABLE, 2)
    return made


class Play:
    """One long transaction, others that come and go, and reads of it."""

    def __init__(self, world: World, seed: object, writers: Any) -> None:
        self.world, self.chance = world, random.Random(f"own/{seed}")
        self.txn: Transaction = world.client.begin("bank", keepalive=36_000)
        self.own = self.reading(self.txn, writers)
        self.count, self.patience = 0, 30.0
        self.wrote: dict[bytes, int] = {}  # by whom the rows of the commit are

    def reading(
        self, handle: Transaction | Writer, writers: Any = "own", places: Any = None
    ) -> ReadBack:
        places = places or self.world.client._session
        ports, clock = reader_ports(self.world), self.world.clock
        return ReadBack(handle, places, ports, lambda: clock.monotonic() + self.patience, writers)

    def write(self, by: Transaction | Writer, count: int) -> dict[bytes, bytes | None]:
        rows: dict[bytes, bytes | None] = {}
        for _ in range(count):
            self.count += 1
            key = self.chance.choice(KEYS)
            rows[key] = None if self.chance.random() < 0.2 else b"%d" % self.count
            by.write(TABLE, rows[key], key)
        return rows

    def join(self) -> Writer:
        return self.world.client.join(self.txn.token("all"))

    def noise(self) -> None:
        """Rejected records under the header of this transaction, and one that comes and goes: runs move."""
        log, topic = self.world.cluster.log("noise"), journal_topic(TABLE)
        if self.txn.txn_id is not None:
            for partition in (0, 1):
                headers = ((TXN_HEADER, pack_txn_header(self.txn.txn_id, self.writer, 9)),)
                records = [Record(0, 1, key, b"rejected", headers) for key in KEYS]
                log.produce(TopicPartition(topic, partition), records)
        for _ in range(3):
            with self.world.client.begin("bank") as young:
                young.token()
                for _ in range(20):
                    young.write(TABLE, b"y" * 100, b"young%d" % self.chance.randrange(9))
                young.commit()

    @property
    def writer(self) -> int:
        return self.txn._writer.number if self.txn._writer is not None else 0

    @property
    def moved(self) -> int:
        """How many runs lie elsewhere than they were written."""
        assert self.world.controller is not None
        txn = self.world.controller._state.open[self.txn.txn_id or b""]
        return sum(len(row.runs) for row in txn.moved.values())

    def rows(self, low: bytes = b"", high: bytes | None = None, **how: Any) -> list[Any]:
        found = self.own.scan(TABLE, low, high, **how)
        return [(key, row.value) for key, row in found]

    def get(self, key: bytes) -> Written | None:
        return self.own.get(TABLE, key)

    def committed(self, *receipts: Any) -> dict[bytes, bytes | None]:
        """Commit; the last row of each key that the merge brought."""
        assert self.txn.txn_id is not None
        self.txn.commit(receipts or None)
        found: dict[bytes, bytes | None] = {}
        for event in self.world.events(TABLE):
            ids = [value for name, value in event.headers if name == TXN_HEADER]
            if ids and (ids[0] or b"")[:TXN_ID_SIZE] == self.txn.txn_id:
                found[event.key or b""] = event.value
                self.wrote[event.key or b""] = unpack_txn_header(ids[0] or b"")[1]
        return found


def between(rows: dict[bytes, bytes | None], low: bytes, high: bytes | None) -> list[Any]:
    return [(k, rows[k]) for k in sorted(rows) if low <= k and (high is None or k < high)]


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(6, 12))]
)
def test_all_that_finished_writers_wrote(world: World, seed: int) -> None:
    """The merge is the judge: under scalings, moves, rejected records, and reads in between."""
    play = Play(world, seed, "all")
    sequences: dict[int, int] = {}
    moved = 0
    for step in range(play.chance.randint(4, 9)):
        writer = play.join()
        for _ in range(play.chance.randint(1, 3)):
            play.write(
                play.txn if play.chance.random() < 0.4 else writer, play.chance.randint(1, 9)
            )
            if play.chance.random() < 0.5:
                writer.flush()
            if play.chance.random() < 0.4:
                play.noise()
        if step % 3 == 1:
            world.client.scale(TABLE, play.chance.randint(1, 4))
        finished = writer.finish()
        if play.chance.random() < 0.5:
            play.own.refresh()
            play.get(play.chance.choice(KEYS))
        sequences[finished.writer] = finished.record.sequence
        moved = max(moved, play.moved)
    unfinished = play.join()
    play.write(unfinished, 9)
    unfinished.flush()
    play.own.refresh()
    found = dict(play.own.scan(TABLE, b"", None))
    low, high = sorted(play.chance.sample(KEYS, 2))
    some, back = play.rows(low, high), play.rows(low, None, reverse=True)
    each = {key: play.get(key) for key in KEYS}
    rows = play.committed(
        *(x for x in world.client.state(play.txn.token("all")).writers if x.finished)
    )
    by = {
        w: None if w == play.writer else r.WriterAt(w, sequences.get(w, 0))
        for w in play.wrote.values()
    }
    assert found == {k: Written(rows[k], by[play.wrote[k]]) for k in rows}
    assert list(found) == sorted(rows)
    assert some == between(rows, low, high)
    assert back == between(rows, low, None)[::-1]
    assert each == {k: found.get(k) for k in KEYS}
    assert moved or seed % 3, "the case is not met"
    play.own.close()


class Places:
    """The controller's word; ``after`` is called when an answer of `list_runs` is on its way."""

    def __init__(self, session: Session) -> None:
        self.state, self._list = session.state, session.list_runs
        self.asked: list[int] = []
        self.after: Callable[[], None] | None = None

    def list_runs(self, *given: Any) -> r.RunList:
        told = self._list(*given)
        self.asked.append(len(told.runs))
        if self.after is not None:
            self.after()
        return told


def test_a_run_that_moves_before_it_is_read_is_asked_for_again(world: World) -> None:
    play = Play(world, "moves", "own")
    places = Places(world.client._session)
    play.own = play.reading(play.txn, places=places)
    wrote = play.write(play.txn, 9)
    play.txn.flush()

    def move() -> None:
        """Until the runs that were listed are not there any more."""
        places.after = None
        assert play.txn._writer is not None
        accounts = play.txn._writer._account.lanes[TABLE].accounts
        due = {p: a.end for p, a in accounts.items() if a.count}
        while any(world.client.describe(TABLE).low_water.get(p, 0) < due[p] for p in due):
            play.noise()
            world.clock.sleep(1)

    places.after = move
    assert play.rows() == between(wrote, b"", None)
    assert len(places.asked) >= 2
    assert play.moved

    # Only what is new is asked for, and only if there is something.
    places.asked.clear()
    assert play.get(b"no such key") is None
    assert places.asked == []
    wrote |= play.write(play.txn, 1)
    assert play.rows() == between(wrote, b"", None)
    assert places.asked == [1]

    # It moves each time.
    play.write(play.txn, 1)
    log, topic = world.cluster.log("gone"), journal_topic(TABLE)
    both = [TopicPartition(topic, partition) for partition in (0, 1)]
    places.after = lambda: log.delete_records(log.end_offsets(both, committed=False))
    play.patience = 3.0
    with pytest.raises(NotReady, match="can't be read back"):
        play.get(b"a")


def test_a_moved_copy_after_a_later_write_is_not_the_newest(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = Play(world, "copies", "own")

    def first_alone(turn: Turn, place: Place) -> list[PlacedRun]:
        found = runs_to_move(turn, place)
        return [x for x in found if x.txn_id == play.txn.txn_id][: not play.moved]

    monkeypatch.setattr(moving, "runs_to_move", first_alone)
    for value in (b"old", b"new"):
        play.txn.write(TABLE, value, b"a")
        play.txn.flush()
    while not play.moved:
        play.noise()
    assert play.get(b"a") == Written(b"new")
    assert play.committed() == {b"a": b"new"}


def test_a_joined_writer_reads_its_own_alone(world: World) -> None:
    play = Play(world, "joined", "own")
    play.write(play.txn, 5)
    with world.client.join(play.txn.token()) as writer:
        own = play.reading(writer)
        assert own.get(TABLE, b"a") is None
        writer.write(TABLE, b"1", b"a")
        writer.write(TABLE, None, b"b")
        assert own.get(TABLE, b"a") == Written(b"1")
        assert own.get(TABLE, b"b") == Written(None)
        writer.finish()
        own.refresh()
        assert list(own.scan(TABLE, b"", None)) == [(b"a", Written(b"1")), (b"b", Written(None))]
    strange = play.reading(world.client.join(play.txn.token()), "all")
    with pytest.raises(NotAuthorized, match="state"):
        strange.get(TABLE, b"a")
    play.txn.abort()
    with pytest.raises(TransactionAborted):
        play.get(b"a")
    own.close()
    own.close()


@pytest.mark.parametrize("seed", range(5))
def test_own_rows_that_are_too_many_for_memory(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, rows = random.Random(f"spilled/{seed}"), dict[bytes, bytes | None]()
    monkeypatch.setattr(own_writes, "OWN_BYTES", 2_000)
    monkeypatch.setattr(own_writes, "_AT_ONCE", 3)
    local = Local()
    for number in range(300):
        key = b"%d" % chance.randrange(60)
        rows[key] = None if chance.random() < 0.2 else b"%d" % number
        local.put(TABLE, key, rows[key])
        if number % 20 == 0:
            low, high = sorted(chance.sample([*sorted(rows), b"", b"a"], 2))
            found = [(k, row.value) for k, row in local.scan(TABLE, low, high)]
            assert found == between(rows, low, high)
            back = [(k, row.value) for k, row in local.scan(TABLE, low, None, reverse=True)]
            assert back == between(rows, low, None)[::-1]
            asked = [b"%d" % n for n in range(60)]
            wanted = [Written(rows[k]) if k in rows else None for k in asked]
            assert [local.get(TABLE, k) for k in asked] == wanted
    assert local._spilled is not None
    assert local.get("bank/other", b"1") is None
    local.close()
    local.close()
