"""One snapshot of streams and tables of several control partitions, each with a controller, in memory."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from anabranch.client.client import Client
from anabranch.client.replica import Replica
from anabranch.errors import DeadlineExceeded, NotReady
from anabranch.protocol import hybrid_time
from anabranch.protocol.ids import control_partition_of
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.reading.history import SafeTimeOf
from anabranch.reading.snapshot import Mode
from anabranch.testing import MemoryCluster
from anabranch.testing.memory.cluster import SteppedClock

SCOPES = ("ams", "ber", "cdg")  # on control partitions 0, 1 and 2
TABLES = [f"{scope}/t" for scope in SCOPES]
KEYS = [b"a", b"b", b"c"]
AHEAD_US = 5_000_000


class Ahead:
    """The clock of a controller that is ahead of the others."""

    def __init__(self, real: SteppedClock) -> None:
        self.real, self.monotonic, self.sleep = real, real.monotonic, real.sleep

    def wall(self) -> float:
        return self.real.wall() + AHEAD_US / 1e6


class Place:
    """A cluster with three control partitions, and what was committed there."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster(control_partitions=3, controllers=3)
        # The writer and the reader learn nothing from each other.
        self.writer, self.reader = self.cluster.connect(), self.cluster.connect()
        for table in TABLES:
            self.writer.create_table(table)
        self.done: list[tuple[int, str, bytes, bytes]] = []
        for number, table in enumerate(TABLES):
            assert control_partition_of(self.put(self.writer, table, b"a", b"0")) == number

    def put(self, client: Client, table: str, key: bytes, value: bytes) -> bytes:
        with client.begin(table.partition("/")[0]) as txn:
            txn.write(table, value, key=key)
            result = txn.commit()
        assert result.commit_timestamp is not None
        self.done.append((result.commit_timestamp, table, key, value))
        return result.txn_id

    def hasten(self, table: str) -> None:
        """Let the hybrid time of a table's control partition run ahead of the others by seconds."""
        other = self.cluster.connect()
        other.observe(hybrid_time.from_us(int(self.cluster.clock.wall() * 1e6) + AHEAD_US))
        self.put(other, table, b"c", b"ahead")

    def rows(self, at: int) -> dict[tuple[str, bytes], bytes]:
        """The rows as of a time, by the commits' answers."""
        done = sorted(each for each in self.done if each[0] <= at)
        return {(table, key): value for _, table, key, value in done}

    def newest(self) -> int:
        return max(self.done)[0]


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def rows(place: Place) -> Iterator[Replica]:
    with place.reader.replica(*TABLES) as replica:
        yield replica


def read(client: Client, plan: str) -> dict[tuple[str, bytes], bytes]:
    found = client.open_snapshot(plan)
    return {(t, e.key or b""): e.value or b"" for t in TABLES for e in found.read(t)}


def test_each_snapshot_has_all_that_was_answered_and_never_changes(
    place: Place, rows: Replica
) -> None:
    """One control partition after the other is the one with the highest time."""
    chance, plans, former = random.Random("across"), list[tuple[str, int]](), 0
    for step in range(60):
        if step % 20 == 10:
            place.hasten(TABLES[step // 20])
        for number in range(chance.randrange(3)):
            value = b"%d-%d" % (step, number)
            place.put(place.writer, chance.choice(TABLES), chance.choice(KEYS), value)
        answered = place.newest()
        if step % 2:
            mode: Mode = "latest" if step % 4 == 1 else "snapshot"
            snapshot = place.reader.snapshot(TABLES, mode=mode)
            at = snapshot.timestamp
            plans.append((snapshot.plan().to_text(), at))
        else:
            with rows.snapshot() as view:
                at = view.timestamp
                found = {(t, key): row for t in TABLES for key, row in view.scan(t)}
            assert found == place.rows(at), step
        assert at >= max(answered, former), step
        former = at
    for plan, at in plans:
        assert read(place.reader, plan) == place.rows(at)
        again = place.reader.snapshot(TABLES, at)
        assert again.plan().to_text() == plan


def test_a_difference_continues_where_the_snapshot_before_it_ended(place: Place) -> None:
    seen, at = list[bytes](), 0
    for step in range(12):
        if step % 4 == 1:
            place.hasten(TABLES[step // 4])
        place.put(place.writer, TABLES[step % 3], b"k", b"%d" % step)
        found = place.reader.snapshot(TABLES, since=at or None, mode="latest")
        at = found.timestamp
        seen += [e.value or b"" for table in TABLES for e in found.read(table)]
    assert sorted(seen) == sorted(value for *_, value in place.done)


def test_a_processor_reads_the_commits_of_all_its_inputs_in_order(place: Place) -> None:
    """Each cut ends at a time that is safe everywhere: what comes later has later timestamps."""
    client, found = place.reader, list[int]()
    client.create_processor("ams/p", TABLES, 1)
    with client.read(TABLES, ownership=client.take_tasks("ams/p")) as reader:
        for step in range(12):
            if step % 4 == 1:
                place.hasten(TABLES[step // 4])
            place.put(place.writer, TABLES[step % 3], b"k", b"%d" % step)
            until = place.cluster.clock.monotonic() + 5
            while len(found) < len(place.done):
                pieces = reader.cut(until, 1)
                found += [piece.timestamp for piece in pieces for _ in piece.events]
                assert place.cluster.clock.monotonic() < until, step
        assert found == sorted(at for at, *_ in place.done)
        assert not reader.cut(place.cluster.clock.monotonic() + 1, 1)
        place.cluster.stop_controller(2)
        for table in TABLES[:2]:
            place.put(place.writer, table, b"k", b"late")
        began = place.cluster.clock.monotonic()
        assert not reader.cut(began + 5, 1), "T2 may have an earlier one"
        waited = place.cluster.clock.monotonic() - began
        assert waited == pytest.approx(5, abs=1), "not for each input: a worker's session is 6 s"
        place.cluster.start_controller(2)
        assert len(reader.cut(place.cluster.clock.monotonic() + 20, 1 << 20)) == 2


def test_a_processor_whose_lane_writes_to_no_input_reads_though_clocks_are_apart(
    place: Place,
) -> None:
    """It can't raise the slow controllers' clocks: it reads a commit when these have reached its time."""
    with place.cluster.connect(lane=ADMIN_LANE) as operator:
        operator.add_lane("viewer")
        for scope, rights in zip(SCOPES, [("process",), (), ()], strict=True):
            operator.grant("viewer", f"{scope}/*", ("describe", "safe-time", *rights))
    client, fast = place.cluster.connect(lane="viewer"), place.cluster.controllers[1]
    client.create_processor("ams/p", TABLES, 1)
    fast.clock = Ahead(place.cluster.clock)
    clock, found = place.cluster.clock, list[int]()
    with client.read(TABLES, ownership=client.take_tasks("ams/p")) as reader:
        for step in range(3):
            for table in TABLES:
                place.put(place.cluster.connect(), table, b"k", b"%d" % step)
            until = clock.monotonic() + 2 * AHEAD_US / 1e6
            while len(found) < len(place.done):
                assert clock.monotonic() < until, step
                found += [p.timestamp for p in reader.cut(clock.monotonic() + 0.5, 1 << 20)]
    assert found == sorted(at for at, *_ in place.done)


def test_a_processor_begins_at_the_end_though_a_controllers_clock_is_ahead(place: Place) -> None:
    place.writer.create_stream("ber/other")
    place.hasten("ber/other")
    inputs = place.reader.create_processor("ams/late", TABLES, 1, start="end").inputs
    assert max(each.timestamp for each in inputs) == place.done[2][0]


def test_a_processor_asks_once_for_many_commits(place: Place) -> None:
    place.reader.create_processor("ams/p", TABLES, 1)
    for number in range(60):
        place.put(place.writer, TABLES[number % 3], b"k", b"%d" % number)
    ownership = place.reader.take_tasks("ams/p")
    with place.reader.read(TABLES, ownership=ownership) as reader:
        began = place.cluster.clock.monotonic()
        assert len(reader.cut(began + 5, 1 << 20)) == len(place.done)
        assert place.cluster.clock.monotonic() < began + 0.1, "a question takes 0.01 s"
        ask, asked = reader._safe.ask, list[float]()

        def busy(at: int | None, deadline: float) -> int:
            asked.append(deadline)
            assert len(asked) == 1, "a cut does not wait for commits that come meanwhile"
            found = ask(at, deadline)
            place.put(place.writer, TABLES[0], b"k", b"second")
            return found

        reader._safe = SafeTimeOf(True, busy)
        place.put(place.writer, TABLES[1], b"k", b"first")
        assert reader.cut(began + 5, 1 << 20)


def test_a_time_to_come_is_waited_for_at_each_control_partition(place: Place) -> None:
    place.hasten(TABLES[1])
    now = hybrid_time.from_us(int(place.cluster.clock.wall() * 1e6))
    soon = now + hybrid_time.from_us(2_000_000)
    assert place.reader.snapshot(TABLES, soon).timestamp == soon
    with pytest.raises(NotReady, match="not reached yet"):
        place.reader.snapshot(TABLES, now + hybrid_time.from_us(60_000_000), timeout=20)


def test_a_control_partition_without_a_controller_is_waited_for(place: Place) -> None:
    place.cluster.stop_controller(2)
    with pytest.raises(
        DeadlineExceeded, match="control partition 2: no controller answered SafeTime"
    ):
        place.reader.snapshot(TABLES, timeout=5)
    assert place.reader.snapshot(TABLES[:2]).timestamp
    place.cluster.start_controller(2)
    assert place.reader.snapshot(TABLES).timestamp >= place.newest()
