"""The in-memory log beyond the contract: its hook, its markers, compaction."""

from __future__ import annotations

import pytest

from anabranch.batches.format import check_crc, read_header
from anabranch.batches.records import Record, decode_records, encode_batch
from anabranch.ports import (
    LogBusy,
    LogError,
    LogFenced,
    LogRefused,
    LogUnavailable,
    LogUncertain,
    OffsetOutOfRange,
    TableError,
    TopicPartition,
    TopicSpec,
)
from anabranch.testing.memory.cluster import SteppedClock
from anabranch.testing.memory.log import MemoryBrokers, MemoryLog
from anabranch.testing.memory.table import MemoryStore
from anabranch.testing.memory.trouble import Kind, Trouble

TP = TopicPartition("t", 0)
OTHER = TopicPartition("t", 1)
T = 1_690_000_000_000


class Crash(BaseException):
    """Ends a process."""


class World:
    """A cluster with a log of all calls, and errors to raise at some of them."""

    def __init__(self, **options: object) -> None:
        self.clock = SteppedClock(1_700_000_000.0)
        self.calls: list[tuple[str, str]] = []
        self.raises: dict[str, BaseException] = {}
        self.cluster = MemoryBrokers(self.clock, on_call=self.on_call, **options)  # type: ignore[arg-type]
        self.cluster.create([TopicSpec("t", 2)])

    def on_call(self, process: str, name: str) -> None:
        self.calls.append((process, name))
        error = self.raises.pop(name, None)
        if error is not None:
            raise error

    def log(self, process: str = "p") -> MemoryLog:
        return self.cluster.log(process)


def one(text: str, key: str = "k") -> bytes:
    return encode_batch([Record(0, T, key.encode(), text.encode())])


def seen(world: World, partition: TopicPartition = TP) -> list[str]:
    found = world.log("reader").fetch({partition: 0}, max_wait=0, max_bytes=1 << 20, committed=True)
    if partition not in found:
        return []
    return [
        (r.value or b"").decode() for b in found[partition].batches for r in decode_records(b.data)
    ]


def test_every_call_passes_the_hook_before_and_after_its_effect() -> None:
    world = World()
    log = world.log("me")
    producer = log.producer("x", timeout=60)
    producer.append([(TP, one("a"))])
    producer.append_stream([(TP, one("b"))])
    producer.commit()
    producer.append([(TP, one("c"))])
    producer.abort()
    log.fetch({TP: 0}, max_wait=0, max_bytes=1, committed=True)
    log.end_offsets([TP], committed=True)
    log.start_offsets([TP])
    log.offsets_for_time([TP], 0)
    log.describe_topics(["t"])
    log.create_topics([TopicSpec("u", 1)])
    log.add_partitions("u", 2)
    log.delete_records({TP: 1})
    log.produce(TP, [Record(0, T, b"k", b"v")])
    log.produce_batch(TP, one("d"))
    names = [
        "producer", "append", "append", "commit", "append", "abort", "fetch", "end_offsets", "start_offsets",
        "offsets_for_time", "describe_topics", "create_topics", "add_partitions", "delete_records", "produce",
        "produce",
    ]  # fmt: skip
    assert world.calls == [("me", n + suffix) for n in names for suffix in ("", ".after")]


def test_an_empty_end_is_no_call() -> None:
    world = World()
    producer = world.log().producer("x", timeout=60)
    world.calls.clear()
    producer.append([])
    producer.commit()
    producer.abort()
    assert world.calls == []


@pytest.mark.parametrize(("name", "wanted"), [("commit", []), ("commit.after", ["a"])])
def test_an_uncertain_commit_happened_or_not(name: str, wanted: list[str]) -> None:
    world = World()
    producer = world.log().producer("x", timeout=60)
    producer.append([(TP, one("a"))])
    world.raises[name] = LogUncertain("injected")
    with pytest.raises(LogUncertain, match="injected"):
        producer.commit()
    for use in (producer.commit, producer.abort, lambda: producer.append([(TP, one("b"))])):
        with pytest.raises(LogUncertain, match="injected"):
            use()
    world.log().producer("x", timeout=60)
    assert seen(world) == wanted


@pytest.mark.parametrize(("name", "end"), [("append", 0), ("append.after", 1)])
def test_an_uncertain_append_happened_or_not(name: str, end: int) -> None:
    world = World()
    producer = world.log().producer("x", timeout=60)
    world.raises[name] = LogUncertain("injected")
    with pytest.raises(LogUncertain):
        producer.append([(TP, one("a"))])
    assert world.cluster.partitions[TP].end_offset == end
    with pytest.raises(LogUncertain):
        producer.commit()
    world.log().producer("x", timeout=60)
    assert seen(world) == []


@pytest.mark.parametrize("name", ["append", "append.after", "commit", "fetch", "producer.after"])
def test_a_crash_goes_through(name: str) -> None:
    world = World()
    world.raises[name] = Crash()

    def process() -> None:
        log = world.log()
        producer = log.producer("x", timeout=60)
        producer.append([(TP, one("a"))])
        producer.commit()
        log.fetch({TP: 0}, max_wait=0, max_bytes=1, committed=True)

    with pytest.raises(Crash):
        process()


def test_markers_land_later_and_not_all_at_once() -> None:
    delays = iter([0.5, 0.1])
    world = World(marker_delay=lambda: next(delays))
    producer = world.log().producer("x", timeout=60)
    producer.append([(TP, one("a")), (OTHER, one("b"))])
    producer.commit()
    assert (seen(world, TP), seen(world, OTHER)) == ([], [])
    world.clock.sleep(0.2)
    assert (seen(world, TP), seen(world, OTHER)) == ([], ["b"])
    world.clock.sleep(0.4)
    assert (seen(world, TP), seen(world, OTHER)) == (["a"], ["b"])


def test_the_same_id_waits_for_its_markers_another_does_not() -> None:
    world = World(marker_delay=0.5)
    first = world.log().producer("x", timeout=60)
    other = world.log().producer("y", timeout=60)
    start = world.clock.now
    first.append([(TP, one("a"))])
    first.commit()
    other.append([(TP, one("b"))])
    assert world.clock.now == start
    first.append([(TP, one("c"))])
    assert world.clock.now - start >= 0.5
    other.commit()
    start = world.clock.now
    world.log().producer("y", timeout=60)
    assert world.clock.now - start >= 0.49


@pytest.mark.parametrize(("version", "bumps"), [(2, 1), (0, 0)])
def test_an_end_bumps_the_epoch_or_not(version: int, bumps: int) -> None:
    world = World(transaction_version=version)
    producer = world.log().producer("x", timeout=60)
    sequences = []
    for text in "ab":
        epoch = producer.producer_epoch
        producer.append([(TP, one(text)), (TP, one(text))])
        producer.commit()
        assert producer.producer_epoch == epoch + bumps
        sequences += [
            read_header(e.data).base_sequence
            for e in world.cluster.partitions[TP].entries[-3:]
            if not e.is_control
        ]
    assert sequences == ([0, 1, 0, 1] if version == 2 else [0, 1, 2, 3])


def test_epochs_run_out_into_a_new_producer_id() -> None:
    world = World()
    producer = world.log().producer("x", timeout=60)
    state = world.cluster._transactions["x"]
    state.epoch = producer.producer_epoch = (1 << 15) - 2
    producer.append([(TP, one("a"))])
    before = producer.producer_id
    producer.commit()
    assert producer.producer_id != before
    assert producer.producer_epoch == 0
    producer.append([(TP, one("b"))])
    producer.commit()
    assert seen(world) == ["a", "b"]


def test_a_frozen_producer_is_fenced_when_it_wakes() -> None:
    world = World()
    frozen = world.log("a").producer("x", timeout=60)
    frozen.append([(TP, one("a"))])
    awake = world.log("b").producer("x", timeout=60)
    awake.append([(TP, one("b"))])
    with pytest.raises(LogFenced):
        frozen.append([(TP, one("c"))])
    awake.commit()
    assert seen(world) == ["b"]


def test_a_transaction_left_open_ends_at_its_timeout() -> None:
    world = World()
    producer = world.log().producer("x", timeout=10)
    producer.append([(TP, one("a"))])
    world.cluster.produce(TP, [Record(0, T, b"k", b"behind")])
    assert seen(world) == []
    world.clock.sleep(11)
    assert seen(world) == ["behind"]
    with pytest.raises(LogFenced):
        producer.commit()


def test_compaction_keeps_the_newest_of_each_key() -> None:
    world = World()
    for number in range(12):
        keys = [f"k{(number + i) % 5}".encode() for i in range(4)]
        world.cluster.produce(TP, [Record(0, T + number, k, b"%d" % number) for k in keys])
    world.cluster.produce(TP, [Record(0, T, b"k0", None)])
    before = _rows(world, drop=False)
    assert _rows(world, drop=True).get(b"k0") is None
    world.cluster.compact(TP)
    entries = world.cluster.partitions[TP].entries
    records = [r for e in entries for r in decode_records(e.data)]
    assert len(records) == 5
    assert {r.key: r.value for r in records} == before
    assert [r.offset for r in records] == sorted(r.offset for r in records)
    for entry in entries:
        check_crc(entry.data)
        assert read_header(entry.data).next_offset == entry.next_offset
    # Reading from any position goes on behind the gaps.
    for position in range(49):
        found = world.log().fetch({TP: position}, max_wait=0, max_bytes=1 << 20, committed=True)
        assert found[TP].next_offset == 49
    world.cluster.compact(TP, drop_tombstones=True)
    records = [r for e in world.cluster.partitions[TP].entries for r in decode_records(e.data)]
    assert {r.key for r in records} == {b"k1", b"k2", b"k3", b"k4"}


def _rows(world: World, *, drop: bool) -> dict[bytes | None, bytes | None]:
    rows = {}
    for entry in world.cluster.partitions[TP].entries:
        for record in decode_records(entry.data):
            rows[record.key] = record.value
    return {k: v for k, v in rows.items() if v is not None} if drop else rows


def test_compaction_leaves_what_is_undecided_and_takes_what_is_aborted() -> None:
    world = World()
    producer = world.log().producer("x", timeout=60)
    producer.append([(TP, one("old"))])
    producer.commit()
    producer.append([(TP, one("aborted"))])
    producer.abort()
    other = world.log().producer("y", timeout=60)
    other.append([(TP, one("open"))])
    world.cluster.compact(TP)
    assert seen(world) == ["old"]
    other.commit()
    assert seen(world) == ["old", "open"]
    world.cluster.compact(TP)
    assert seen(world) == ["open"]
    # A producer's last batch stays, empty: its sequence must not be forgotten.
    assert any(
        not decode_records(e.data) for e in world.cluster.partitions[TP].entries if not e.is_control
    )
    assert world.cluster.partitions[TP].end_offset == 6


def test_a_waiting_fetch_moves_the_clock_and_sees_what_comes() -> None:
    world = World()
    log = world.log()
    start = world.clock.now
    assert log.fetch({TP: 0}, max_wait=3, max_bytes=1, committed=True) == {}
    assert world.clock.now - start == pytest.approx(3)


def test_a_store_has_one_owner_and_outlives_it() -> None:
    store = MemoryStore()
    calls: list[str] = []
    table = store.open("a", on_call=lambda _, name: calls.append(name))
    with pytest.raises(TableError, match="open in a"):
        store.open("b")
    table.write({b"k": b"1"})
    kept = store.snapshot()
    table.write({b"k": b"2", b"l": b"3"})
    assert calls == ["table.write", "table.write.after"] * 2
    store.release()
    with pytest.raises(TableError):
        table.write({b"k": b"zombie"})
    again = store.open("b")
    assert again.get(b"k") == b"2"
    table.close()
    assert again.get(b"k") == b"2"
    store.restore(kept)
    assert list(again.scan(b"")) == [(b"k", b"1")]
    again.close()
    store.open("c")


def test_a_write_cut_off_before_its_effect_is_not_there() -> None:
    store = MemoryStore()
    raises: dict[str, BaseException] = {"table.write": Crash()}

    def on_call(_: str, name: str) -> None:
        if name in raises:
            raise raises.pop(name)

    table = store.open("a", on_call=on_call)
    with pytest.raises(Crash):
        table.write({b"k": b"1"})
    assert store.snapshot() == {}
    raises["table.write.after"] = Crash()
    with pytest.raises(Crash):
        table.write({b"k": b"1"})
    assert store.snapshot() == {b"k": b"1"}


@pytest.mark.parametrize(
    ("kind", "on_read", "on_append", "is_marked"),
    [
        (Kind.LEADERLESS, LogUnavailable, LogUnavailable, True),  # nothing was sent there
        (Kind.FEW_REPLICAS, None, LogRefused, False),
        (Kind.FAILED_DISK, None, LogUncertain, False),
        (Kind.REFUSING, None, LogRefused, True),
        (Kind.DENYING, LogRefused, LogRefused, True),
        (Kind.STALE, OffsetOutOfRange, LogUncertain, True),
    ],
)
def test_a_partition_in_trouble_says_so_and_all_others_work(
    kind: Kind, on_read: type[LogError] | None, on_append: type[LogError], is_marked: bool
) -> None:
    world = World()
    log, other = world.log("me"), world.log("you")
    world.cluster.produce_batch(TP, one("a"))
    world.cluster.produce_batch(OTHER, one("b"))
    world.cluster.troubles[TP] = Trouble(kind, process="me" if kind is Kind.STALE else "")
    failed: dict[TopicPartition, LogError] = {}
    positions = {TP: 1, OTHER: 0}
    found = log.fetch(positions, max_wait=0, max_bytes=1 << 20, committed=True, failed=failed)
    assert list(found) == [OTHER]
    assert {place: type(error) for place, error in failed.items()} == (
        {TP: on_read} if on_read else {}
    )
    producer = log.producer("x", timeout=60)
    with pytest.raises(on_append) as raised:
        producer.append([(OTHER, one("c")), (TP, one("d"))])
    assert raised.value.topics == {"t"}
    if is_marked:
        other.producer("x", timeout=60)
    else:
        with pytest.raises(LogBusy):
            other.producer("x", timeout=60)
    world.cluster.troubles.clear()
    other.producer("x", timeout=60)
    assert seen(world) == ["a"]
