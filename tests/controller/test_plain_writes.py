"""Plain writes through the controller loop, over the in-memory log."""

from __future__ import annotations

import threading
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from anabranch.batches.journal_refetch import MOST_KEPT
from anabranch.batches.records import Record, encode_batch
from anabranch.controller.controller import Controller
from anabranch.ports import LogRefused, LogUnavailable, TopicPartition
from anabranch.protocol import limits
from anabranch.protocol.ids import NO_TXN, OP_HEADER
from anabranch.protocol.limits import AHEAD_MS, LATEST, LEAST_MESSAGE
from anabranch.protocol.schemas.codec import decode
from anabranch.protocol.schemas.records import (
    CommitRecord,
    CreateStream,
    FindScope,
    Outcome,
)
from anabranch.testing.memory.partition import Partition
from anabranch.topics.names import history_topic, journal_topic, stream_topic
from tests.controller.world import World

STREAM = "nyc/flights"
LIMIT = 20_000  # bytes of a batch in the stream's topic


@pytest.fixture
def world() -> World:
    return World()


def put(world: World, partition: int, *values: bytes, times: Sequence[int] = ()) -> None:
    """One batch in the journal."""
    records = [
        Record(0, times[i] if times else 1_000 + i, b"key-%d" % i, v, ())
        for i, v in enumerate(values)
    ]
    put_batch(world, encode_batch(records), partition)


def put_batch(world: World, batch: bytes, partition: int = 0) -> None:
    world.cluster.produce_batch(TopicPartition(journal_topic(STREAM), partition), batch)


def seen(world: World, segments: int = 2) -> list[bytes]:
    return sorted(
        record.value or b""
        for partition in range(segments)
        for record in world.committed(TopicPartition(stream_topic(STREAM), partition))
    )


def commits(world: World) -> list[CommitRecord]:
    records = world.committed(TopicPartition(history_topic(STREAM), 0))
    found = [decode(record.value or b"") for record in records]
    return [record for record in found if isinstance(record, CommitRecord)]


def play(controller: Controller, steps: int = 12) -> None:
    for _ in range(steps):
        controller.step(0.0)


def led(world: World, *, segments: int = 2, **settings: str) -> Controller:
    controller = world.led()
    world.ask(controller, FindScope("nyc", True))
    named = {name.replace("_", "."): value for name, value in settings.items()}
    world.ask(controller, CreateStream(STREAM, segments, named))
    return controller


def test_a_round_with_a_one_shot_puts_them_into_one_batch(world: World) -> None:
    controller = led(world)
    put(world, 0, b"a", b"b", b"c")
    put(world, 1, b"d")
    assert isinstance(world.ask(controller, world.one_shot(STREAM, b"key-0", b"one-shot")), Outcome)
    play(controller)
    assert seen(world) == [b"a", b"b", b"c", b"d", b"one-shot"]
    found = commits(world)
    assert [c.txn_id == NO_TXN for c in found] in ([False, True], [True, False])
    for commit in found:
        assert all(part.count > 0 for part in commit.segments)
    counts = Counter({c.txn_id: sum(p.count for p in c.segments) for c in found})
    assert sorted(counts.values()) == [1, 4]
    for partition in range(2):
        log = world.cluster.partition(TopicPartition(stream_topic(STREAM), partition))
        assert sum(not entry.is_control for entry in log.entries) == 1


def test_what_the_stream_refuses_is_passed_over_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings are as they must be, and the broker refuses the data: it is counted, all else is committed."""
    controller = led(world)
    check = Partition.check

    def checked(partition: Partition, data: bytes, now_ms: int) -> object:
        if partition.name.topic == stream_topic(STREAM) and len(data) > LIMIT:
            raise LogRefused("too large", 10, (partition.name.topic,))
        return check(partition, data, now_ms)

    monkeypatch.setattr(Partition, "check", checked)
    put(world, 0, b"before")
    put(world, 0, b"x" * 3 * LIMIT)
    put(world, 0, b"after")
    put(world, 1, b"beside")
    play(controller, 30)
    assert seen(world) == [b"after", b"before", b"beside"]
    assert controller.state.plain == {(STREAM, 0): 3, (STREAM, 1): 1}
    controller.update_metrics()
    assert controller.metrics.values["plain_writes_refused"] == {(): 1}
    put(world, 0, b"later")
    play(controller)
    assert seen(world) == [b"after", b"before", b"beside", b"later"]


def test_a_refusal_that_names_no_topic_costs_no_data(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker with another version of Produce refuses so: the controller leads again until a write succeeds."""
    controller = led(world)
    check, refusing = Partition.check, True

    def checked(partition: Partition, data: bytes, now_ms: int) -> object:
        if refusing and partition.name.topic == stream_topic(STREAM):
            raise LogRefused("UNSUPPORTED_VERSION", 35)
        return check(partition, data, now_ms)

    monkeypatch.setattr(Partition, "check", checked)
    put(world, 0, b"a", b"b")
    put(world, 1, b"c")
    asked = world.send(world.one_shot(STREAM, b"key-0", b"one-shot"))
    for _ in range(8):
        with pytest.raises(LogUnavailable):
            play(controller)
        controller.lead()
    assert world.reply(asked) is None
    refusing = False
    play(controller, 30)
    assert seen(world) == [b"a", b"b", b"c", b"one-shot"]
    assert isinstance(world.reply(asked), Outcome)


def test_a_successor_with_an_empty_table_takes_the_position_of_the_log(world: World) -> None:
    first = led(world)
    put(world, 0, b"a", b"b")
    play(first)
    put(world, 0, b"c")
    second = world.led()
    put(world, 1, b"d")
    play(second)
    assert seen(world) == [b"a", b"b", b"c", b"d"]


NOW_MS = 1_000_000_000  # of the world's clock
FAR = 1_735_689_600_000_000  # microseconds, given as milliseconds
# Retention, times of a batch's records, and the places of those that are committed.
TIMES: dict[str, tuple[int, list[int], list[int]]] = {
    "out of range": (-1, [5, FAR, -2, 1 << 62, LATEST + 1], [0]),
    "none, and the first and the last that is legal": (-1, [-1, 0, 1, LATEST], [0, 1, 2, 3]),
    "all are bad": (-1, [FAR, FAR + 1], []),
    "all are below": (-1, [-2, -(1 << 62)], []),
    "the last ones": (-1, [1, 2, FAR, FAR], [0, 1]),
    "an hour ahead": (1_000, [NOW_MS + AHEAD_MS, NOW_MS], [0, 1]),
    "a little more": (1_000, [NOW_MS, NOW_MS + AHEAD_MS + 1, NOW_MS + 1], [0, 2]),
    "a week's retention": (604_800_000, [NOW_MS + 604_800_000, NOW_MS + 604_800_001], [0]),
    "a year ahead, no retention": (-1, [NOW_MS + 31_536_000_000], [0]),
}


@pytest.mark.parametrize("what", TIMES)
@pytest.mark.parametrize("idle", [False, True])
def test_times_that_no_stream_takes_are_rejected_alone(world: World, what: str, idle: bool) -> None:
    """This holds also if the last commit is long ago: then the clock decides what is ahead."""
    retention, times, stay = TIMES[what]
    if idle:
        world.clock.now -= 864_000
    controller = led(world, retention_ms=str(retention))
    world.clock.now = NOW_MS / 1000
    values = [b"%d" % i for i in range(len(times))]
    put(world, 0, *values, times=times)
    put(world, 0, b"later")
    play(controller)
    assert seen(world) == sorted([values[i] for i in stay] + [b"later"])
    found = controller._intake.index.rejected[STREAM]
    assert found == Counter({"bad_time": len(times) - len(stay)} if len(stay) < len(times) else {})
    assert controller.state.plain[STREAM, 0] == len(times) + 1


EMPTY = [Record(0, 5, b"k", b"", ((OP_HEADER, b""),) * (n % 2)) for n in range(10_001)]
OTHER = "nyc/other"
RUNS = 6_000  # of a dear batch
MOST = 1_000_000  # bytes of a batch in the stream's topic: 16 times as much may come packed
ZEROS = Record(0, 5, b"k", bytes(MOST - 1_000))
# A batch in a journal: its records; how many are rejected, and why.
PACKED: dict[str, tuple[list[Record], dict[str, int]]] = {
    "as much as may be": ([ZEROS] * 16, {}),
    "more": ([ZEROS] * 17, {"malformed_batch": 17}),
    "as big an event as may be": ([ZEROS._replace(value=bytes(MOST - 69))], {}),
    "a bigger one among others": (
        [ZEROS, ZEROS._replace(value=bytes(MOST - 68)), ZEROS],
        {"too_large": 1},
    ),
    "the headers make it bigger": ([ZEROS._replace(headers=(("h", bytes(1_000)),))], {"too_large": 1}),
    "as many runs as may be": (EMPTY[:-1], {"bad_header": 5_000}),
    "another one": (EMPTY, {"malformed_batch": 10_001}),
}  # fmt: skip


@pytest.mark.parametrize("what", PACKED)
def test_what_a_packed_batch_may_hold(world: World, what: str) -> None:
    """Only so much of it is unpacked, whatever the rest is; what is before and after it is committed."""
    records, wrong = PACKED[what]
    controller = led(world, max_message_bytes=str(MOST))
    put(world, 0, b"before")
    put_batch(world, encode_batch(records, "zstd"))
    put(world, 0, b"after")
    play(controller)
    assert controller._intake.index.rejected[STREAM] == Counter(wrong)
    taken = len(seen(world)) - 2
    assert taken == len(records) - sum(wrong.values())
    assert {b"before", b"after"} <= set(seen(world))


@pytest.mark.parametrize("keys", [1, 50])
def test_a_packed_batch_stays_packed(world: World, keys: int) -> None:
    """However few bytes it has, and if it is taken apart for two segments, too."""
    controller = led(world)
    made = [Record(n, 5, b"%d" % (n % keys), bytes(8_000)) for n in range(50)]
    put_batch(world, encode_batch(made, "zstd"))
    play(controller)
    assert seen(world) == [bytes(8_000)] * 50
    partitions = (world.cluster.partition(TopicPartition(stream_topic(STREAM), p)) for p in (0, 1))
    size = sum(len(entry.data) for one in partitions for entry in one.entries)
    assert size < 10_000


def test_no_more_is_unpacked_than_a_batch_may_hold(world: World) -> None:
    """A batch of some KB took the memory of what it unpacks to, and as much again to be merged."""
    controller = led(world, max_message_bytes=str(LEAST_MESSAGE.value))
    bomb = encode_batch([Record(0, 5, b"k", bytes(32 << 20))], "zstd")
    for _ in range(3):
        put_batch(world, bomb)
    tracemalloc.start()
    try:
        play(controller)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 8 << 20
    assert controller._intake.index.rejected[STREAM] == {"malformed_batch": 3}


def test_a_dear_journal_waits_for_others_and_is_read_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass takes one such batch. Once its stream is in debt, it takes none as long as others wait."""
    controller = led(world)
    world.ask(controller, CreateStream(OTHER, 1, {}))
    asked: list[int] = []  # of the dear journal, but for what merges read again
    fetch = controller.log.fetch

    def noted(positions: dict[TopicPartition, int], **how: Any) -> Any:
        if (
            len(positions) > 1
            and (journal := TopicPartition(journal_topic(STREAM), 0)) in positions
        ):
            asked.append(positions[journal])
        return fetch(positions, **how)

    monkeypatch.setattr(controller.log, "fetch", noted)

    def position(stream: str) -> int:
        return controller._intake.index.positions.get((stream, 0), 0)

    def passes(count: int, *, command: bool = False) -> int:
        """How many batches of the dear journal these passes index."""
        before = position(STREAM)
        for _ in range(count):
            if command:
                world.send(FindScope("nyc", False))
            controller.step(0.0)
        return (position(STREAM) - before) // RUNS

    def put(stream: str, count: int, runs: int) -> None:
        place = TopicPartition(journal_topic(stream), 0)
        for _ in range(count):
            world.cluster.produce_batch(place, encode_batch(EMPTY[:runs]))

    put(STREAM, 20, RUNS)
    asked.clear()
    assert passes(1, command=True) == 1
    put(OTHER, 1, 1)
    assert passes(1, command=True) == 1
    assert position(OTHER) == 1, "it was charged less"
    assert passes(3, command=True) == 0, "the dear one owes by now"
    put(OTHER, 1, 1)
    assert passes(1) == 0
    assert position(OTHER) == 2
    world.clock.now += 0.1
    assert passes(3) == 0, "a command may come again soon"
    world.clock.now += 1.0
    assert passes(3) == 3, "no other needs the leader"
    assert passes(2, command=True) == 0
    world.clock.now += 20.0
    assert passes(2, command=True) == 2, "its debt is paid off"
    assert asked == [0], "what waits is not fetched again"
    controller.update_metrics()
    assert controller.metrics.values["journal_work"][(STREAM,)] > 14 * RUNS
    assert controller.metrics.values["journal_debt"].keys() == {(STREAM,)}
    world.clock.now += 1.0
    passes(20)
    assert (position(STREAM), len(seen(world))) == (20 * RUNS, 20 * RUNS // 2)


def test_what_is_indexed_in_calm_times_is_no_debt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A big load that nobody waited for holds up no plain write once commands come."""
    rate = 100
    monkeypatch.setattr(limits, "JOURNAL_WORK", limits.JOURNAL_WORK._replace(value=rate))
    controller = led(world)
    world.clock.now += 1.1
    for _ in range(1_000):
        put_batch(world, encode_batch(EMPTY[:30]))
    play(controller, steps=100)
    meter = controller._intake.journals.meters[STREAM]
    assert meter.used > 50_000
    world.send(FindScope("nyc", False))
    controller.step(0.0)
    assert meter.debt <= limits.PASS_WORK.value + rate, "the first pass found no debt"


def test_a_command_among_plain_writes_waits_for_little(world: World) -> None:
    """Passes within a second after one index a tenth of what passes do in calm times; another is decided then."""
    controller = led(world)
    for _ in range(800):
        put_batch(world, encode_batch(EMPTY[:30]))
    dearest = 70  # units of such a batch, and a little more

    def units(*, command: bool = False) -> int:
        """What a pass spends on the journal. It decides the command that came before it."""
        asked = world.send(FindScope("nyc", False)) if command else None
        before = controller.metrics.values["journal_work"].get((STREAM,), 0)
        controller.step(0.0)
        controller.update_metrics()
        assert asked is None or world.reply(asked) is not None
        return int(controller.metrics.values["journal_work"][STREAM,] - before)

    calm, busy = limits.PASS_WORK.value, limits.BUSY_PASS_WORK.value
    controller.update_metrics()
    world.clock.now += 1.0
    assert units() >= calm
    assert units(command=True) >= calm, "its own pass: its commit may need what is indexed"
    assert busy <= units(command=True) < busy + dearest
    assert busy <= units(command=True) < busy + dearest
    world.clock.now += 0.9
    assert busy <= units() < busy + dearest, "a command may come again soon"
    world.clock.now += 0.2
    assert units() >= calm


def test_a_round_with_a_command_commits_few_plain_writes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is each one within a second after it; in calm times a round commits all that is there."""
    monkeypatch.setattr(limits, "BUSY_ROUND", limits.BUSY_ROUND._replace(value=1_000))
    controller = led(world)
    controller.step(0.0)

    def committed(*, command: bool = False) -> int:
        """How many of 20 plain writes of 100 bytes the next round commits."""
        for _ in range(20):
            put(world, 0, bytes(100))
        if command:
            world.send(FindScope("nyc", False))
        before = len(seen(world))
        controller.step(0.0)
        return len(seen(world)) - before

    world.clock.now += 1.1
    assert [committed(), committed()] == [20, 20]
    assert 5 < committed(command=True) < 10
    world.clock.now += 0.9
    assert 5 < committed() < 10
    world.clock.now += 0.2
    assert committed() > 40, "with the rest of the last ones"


def test_what_a_merge_fetched_is_for_the_next_ones(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal that many rounds take from is fetched once for all; the leader keeps so much of few journals."""
    monkeypatch.setattr(limits, "BUSY_ROUND", limits.BUSY_ROUND._replace(value=1_000))
    controller = led(world, segments=MOST_KEPT + 2)
    journals = [TopicPartition(journal_topic(STREAM), n) for n in range(MOST_KEPT + 2)]
    fetched = Counter[TopicPartition]()
    fetch = controller.log.fetch

    def noted(positions: dict[TopicPartition, int], **how: Any) -> Any:
        fetched.update(list(positions) if len(positions) == 1 else ())
        return fetch(positions, **how)

    monkeypatch.setattr(controller.log, "fetch", noted)
    rounds = controller.rounds
    for journal in journals:
        for _ in range(20):
            put(world, journal.partition, bytes(100))
        world.send(FindScope("nyc", False))
        play(controller)
    assert len(seen(world, len(journals))) == 20 * len(journals)
    assert controller.rounds - rounds >= 3 * len(journals)
    assert {journal: fetched[journal] for journal in journals} == dict.fromkeys(journals, 1)
    assert controller._background is not None
    assert list(controller._background.journals._readers) == journals[-MOST_KEPT:]


def test_what_reads_ahead_ends_with_the_lead(world: World) -> None:
    def read_ahead() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name.startswith("anabranch-read-ahead")]

    controller = led(world)
    controller.threads = True
    for value in (b"first", b"second"):
        controller.lead()
        background = controller._background
        put(world, 0, value)
        play(controller)
        assert read_ahead()
        controller.resign()
        assert background is not None
        assert not read_ahead(), "though there is still something that has it"
    assert seen(world) == [b"first", b"second"]


def test_rejected_records_are_named_at_once_and_then_each_minute(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> list[str]:
        controller.step(0.0)
        controller.step(0.0)
        found = [record.message for record in caplog.records if "rejected" in record.message]
        caplog.clear()
        return [line.partition(";")[0] for line in found]

    controller = led(world)
    journal = journal_topic(STREAM)
    put(world, 0, b"good")
    assert lines() == []
    put(world, 0, b"a", b"b", times=[FAR, FAR])
    put(world, 1, b"c", times=[FAR])
    assert lines() == [
        f"{journal}: records rejected: 2 of partition 0 as bad_time, 1 of partition 1 as bad_time"
    ]
    record = Record(0, 5, b"k", b"tagged", (("ab.variant", b"x"),))
    for _ in range(3):
        put_batch(world, encode_batch([record]), 1)
        assert lines() == [], "not within a minute"
    world.clock.now += 60
    assert lines() == [f"{journal}: records rejected: 3 of partition 1 as bad_header"]
    world.clock.now += 60
    assert lines() == []
    assert seen(world) == [b"good"]
