"""Automatic scaling by the controller loop: the load of what rounds merge splits, joins and follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise

import pytest

from anabranch.batches.records import Record
from anabranch.controller.controller import Controller
from anabranch.ports import LogRefused, TopicPartition
from anabranch.protocol.partitioner import SPACE, position_of, tiles
from anabranch.protocol.schemas.records import (
    Commit,
    CreateStream,
    Event,
    FindScope,
    OneShot,
    SegmentRange,
    StreamList,
)
from anabranch.topics.names import journal_topic, stream_topic
from tests.controller.world import World

STREAM = "nyc/flights"
HALF = SPACE // 2
POLICY = {"scale.events.per.second": "100", "scale.cooldown.ms": "1000"}
STEP_S = 0.25


class Driver:
    """A stream with a policy, and a load on it, in the world's own time."""

    def __init__(self, segments: int, **settings: str) -> None:
        self.world = World()
        self.controller = self.world.led()
        self.world.ask(self.controller, FindScope("nyc", True))
        named = {name.replace("_", "."): value for name, value in settings.items()}
        made = self.world.ask(self.controller, CreateStream(STREAM, segments, POLICY | named))
        assert isinstance(made, StreamList)
        self.written: list[tuple[bytes, bytes]] = []
        self._keys = _keys()

    @property
    def segments(self) -> tuple[SegmentRange, ...]:
        return self.controller.state.streams[STREAM].segments

    @property
    def epoch(self) -> int:
        return self.controller.state.streams[STREAM].stream_epoch

    def keys(self, low: int, high: int, number: int) -> list[bytes]:
        """So many new keys with positions in [low, high)."""
        found: list[bytes] = []
        while len(found) < number:
            key = next(self._keys)
            if low <= position_of(key) < high:
                found.append(key)
        return found

    def run(self, seconds: float, write: Callable[[], None]) -> None:
        """``write`` four times a second; the loop turns after each, and when nothing comes."""
        for _ in range(round(seconds / STEP_S)):
            write()
            self.controller.step(0)
            self.controller.step(0)
            self.world.clock.sleep(STEP_S)

    def one_shots(self, low: int, high: int, rate: float) -> Callable[[], None]:
        def write() -> None:
            keys = self.keys(low, high, round(rate * STEP_S))
            self.written += [(key, b"v") for key in keys]
            events = tuple(Event(STREAM, -1, key, b"v", (), -1) for key in keys)
            self.world.send(OneShot(self.world.txn_id(), "nyc", None, events))

        return write

    def open_transaction(self, low: int, high: int, events: int) -> Commit:
        """A transaction that is written; the command to commit it."""
        txn_id, token, touched = self.world.begin(self.controller, STREAM, keepalive_ms=30_000)
        rows = [(key, b"v") for key in self.keys(low, high, events)]
        self.written += rows
        receipt = self.world.write(
            txn_id, 1, STREAM, touched.segments, rows, epoch=touched.stream_epoch
        )
        return Commit(token, (), (receipt,), None, 1000)

    def commit(self, command: Commit) -> None:
        done = self.world.ask(self.controller, command, steps=8)
        assert done.state == "COMMITTED"

    def transactions(self, low: int, high: int, rate: float) -> Callable[[], None]:
        return lambda: self.commit(self.open_transaction(low, high, round(rate * STEP_S)))

    def plain_writes(self, low: int, high: int, rate: float) -> Callable[[], None]:
        def write() -> None:
            keys = self.keys(low, high, round(rate * STEP_S))
            self.written += [(key, b"v") for key in keys]
            where = TopicPartition(journal_topic(STREAM), 0)
            self.world.cluster.produce(where, [Record(0, 1, key, b"v", ()) for key in keys])

        return write

    def check_nothing_is_lost(self) -> None:
        row = self.controller.state.streams[STREAM]
        seen = [
            (record.key, record.value)
            for partition in range(row.partitions)
            for record in self.world.committed(TopicPartition(stream_topic(STREAM), partition))
        ]
        assert sorted(seen) == sorted(self.written)
        assert tiles([(s.low, s.high) for s in row.segments])


def _keys() -> Iterator[bytes]:
    return (b"key-%d" % n for n in count())


def idle() -> None:
    pass


Kind = Callable[[Driver, int, int, float], Callable[[], None]]
KINDS: Sequence[Kind] = (Driver.one_shots, Driver.transactions, Driver.plain_writes)


@pytest.mark.parametrize("kind", KINDS, ids=["one-shots", "transactions", "plain writes"])
def test_the_hot_segment_is_split_and_no_other(kind: Kind) -> None:
    driver = Driver(2)
    cold = driver.segments[1]
    driver.run(12, kind(driver, 0, HALF, 400))
    assert [s for s in driver.segments if s.low >= HALF] == [cold]
    hot = [s for s in driver.segments if s.high <= HALF]
    assert 3 <= len(hot) <= 8
    rested = driver.epoch
    driver.run(8, kind(driver, 0, HALF, 400))
    assert driver.epoch == rested
    driver.check_nothing_is_lost()


@pytest.mark.parametrize("kind", KINDS, ids=["one-shots", "transactions", "plain writes"])
@pytest.mark.parametrize(
    "policy", [{"scale_segment_bytes": "10000"}, {"scale_bytes_per_second": "1000"}]
)
def test_bytes_and_fullness_count_too(kind: Kind, policy: dict[str, str]) -> None:
    driver = Driver(1, scale_events_per_second=str(10**9), **policy)
    driver.run(6, kind(driver, 0, SPACE, 400))
    assert len(driver.segments) >= 2
    driver.check_nothing_is_lost()


def test_idle_neighbours_are_joined_down_to_the_least_where_there_is_a_policy() -> None:
    driver = Driver(6, scale_min_segments="2")
    driver.world.ask(driver.controller, CreateStream("nyc/weather", 3, {}))
    driver.run(15, idle)
    assert driver.epoch == 0, "nothing is joined before it was quiet for four cool-downs, or long"
    driver.run(10, idle)
    assert len(driver.segments) == 2
    driver.run(20, idle)
    assert driver.epoch == 1
    assert driver.controller.state.streams["nyc/weather"].stream_epoch == 0


def test_an_older_transaction_rolls_in_and_disturbs_nothing() -> None:
    driver = Driver(1)
    old = driver.open_transaction(0, SPACE, 5_000)
    driver.run(14, driver.one_shots(0, SPACE, 400))
    reference = driver.controller.state.streams[STREAM].reference_epoch
    assert reference > 0
    driver.commit(old)
    assert driver.epoch == reference + 2, "its layout came once more, and then this one"
    driver.run(3, driver.one_shots(0, SPACE, 400))
    row = driver.controller.state.streams[STREAM]
    assert row.reference_epoch == reference, "what went into its old segments is no load of these"
    driver.check_nothing_is_lost()


def test_segments_are_cut_by_their_keys() -> None:
    """All load lies in a 64th of the keys, and that is cut at once: no even parts of the whole before."""
    driver = Driver(1, scale_cooldown_ms="4000")
    driver.run(6, driver.one_shots(0, SPACE // 64, 400))
    assert driver.epoch == 1
    *inner, last = [s.high for s in driver.segments]
    assert len(inner) == 3
    assert all(0 < high < SPACE // 64 for high in inner)
    assert last == SPACE


def test_few_known_keys_don_t_hide_many_unknown_ones() -> None:
    """A transaction's keys are not looked at: one key of small commits must not pass for all of the load."""
    driver = Driver(1)
    (key,) = driver.keys(0, SPACE, 1)
    bulk = driver.transactions(0, SPACE, 800)

    def write() -> None:
        events = tuple(Event(STREAM, -1, key, b"v", (), -1) for _ in range(20))
        driver.written += [(key, b"v")] * 20
        driver.world.send(OneShot(driver.world.txn_id(), "nyc", None, events))
        bulk()

    driver.run(8, write)
    assert len(driver.segments) >= 4
    driver.check_nothing_is_lost()


def test_a_new_leader_begins_afresh_and_scales() -> None:
    driver = Driver(1)
    driver.run(1.5, driver.one_shots(0, SPACE, 400))
    successor: Controller = driver.world.led("d")
    driver.controller = successor
    before = driver.epoch
    driver.run(0.75, driver.one_shots(0, SPACE, 400))
    assert driver.epoch == before, "its segments are young for this leader"
    driver.run(8, driver.one_shots(0, SPACE, 400))
    assert len(driver.segments) >= 3
    driver.check_nothing_is_lost()


def test_a_refused_growth_is_asked_for_once_a_cooldown() -> None:
    driver = Driver(1, scale_cooldown_ms="4000")
    asked: list[float] = []

    def refuse(topic: str, partitions: int) -> None:
        asked.append(driver.world.clock.monotonic())
        raise LogRefused("no more partitions", 37)

    grow = driver.controller.log.add_partitions
    driver.controller.log.add_partitions = refuse  # type: ignore[method-assign]
    driver.run(20, driver.one_shots(0, SPACE, 400))
    (whole,) = driver.segments
    assert (whole.low, whole.high) == (0, SPACE)
    assert driver.controller.state.streams[STREAM].scaling is None
    assert 2 <= len(asked) <= 5
    assert all(b - a >= 4 for a, b in pairwise(asked))
    driver.controller.log.add_partitions = grow  # type: ignore[method-assign]
    driver.run(10, driver.one_shots(0, SPACE, 400))
    assert len(driver.segments) >= 3
    driver.check_nothing_is_lost()
