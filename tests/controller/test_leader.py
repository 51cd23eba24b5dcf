"""A leader's thread over the in-memory log: what makes it fail, how long it pauses, and when others may try."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from anabranch.batches.records import Record, encode_batch
from anabranch.controller.controller import Controller
from anabranch.controller.leader import ASIDE_S, PATIENCE_S, Leader
from anabranch.controller.rocksdb_table import size_on_disk
from anabranch.core.decisions.turn import Settings
from anabranch.core.rows import ROUND_KEY, STATUS, scope_key
from anabranch.librdkafka import groups
from anabranch.librdkafka.groups import Membership
from anabranch.ports import LogFenced, LogRefused, LogUnavailable, TopicInfo, TopicPartition
from anabranch.protocol.schemas.codec import encode
from anabranch.protocol.schemas.records import FindScope
from anabranch.testing.memory.log import MemoryLog
from anabranch.testing.memory.producer import MemoryProducer
from anabranch.testing.memory.table import MemoryStore
from anabranch.topics.names import status_topic
from tests.controller.world import World

DEADLINE_S = 30.0


def made(world: World, folder: Path = Path(), **how: Any) -> Leader:
    """A leader of the world's control partition."""
    given = {"on_change": lambda: None, "on_failure": lambda _: None} | how
    return Leader(
        lambda: world.cluster.log("c"),
        world.clock,
        Settings(0, 1, "anabranch"),
        folder=folder,
        leader="c",
        native_timeout=60,
        **given,
    )


def leading(world: World, folder: Path) -> list[Exception]:
    """Let a leader begin until it leads, and stop it. What has made it fail."""
    led, failures = threading.Event(), list[Exception]()

    def changed() -> None:
        if leader.leading:
            led.set()

    def failed(error: Exception) -> None:
        failures.append(error)
        led.set()

    leader = made(world, folder, on_change=changed, on_failure=failed)
    leader.start()
    assert led.wait(DEADLINE_S), "it does not lead"
    assert leader.stop(DEADLINE_S)
    return failures


def test_brokers_that_are_away_when_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    assert size_on_disk(tmp_path / "table") == 0
    assert leading(world, tmp_path / "table") == []
    assert size_on_disk(tmp_path / "table") > 0
    calls: Counter[str] = Counter()

    def away(process: str, name: str) -> None:
        calls[name] += 1
        if process == "c" and name in ("describe_topics", "end_offsets") and calls[name] == 1:
            raise LogUnavailable(f"{name}: nobody there")

    world.cluster.on_call = away
    describe, empty = MemoryLog.describe_topics, iter([True])

    def described(log: MemoryLog, names: list[str]) -> dict[str, TopicInfo]:
        """A broker that was away does not know of the topics at first."""
        found = describe(log, names)
        return {} if next(empty, False) else found

    monkeypatch.setattr(MemoryLog, "describe_topics", described)
    assert leading(world, tmp_path / "table") == []
    assert calls["describe_topics"] >= 3
    assert calls["end_offsets"] >= 2


@pytest.mark.parametrize("rounds", [False, True], ids=["without a round", "with rounds between"])
@pytest.mark.parametrize(
    ("error", "pauses", "asides"),
    [
        # Longer each time, and others may try after each 30 s.
        (ValueError("a defect"), [1, 2, 4, 8, 16, 32, 60, 60], {5, 6, 7}),
        # At the first pace for 10 s.
        (
            LogUnavailable("nobody there"),
            [*[0.2] * 52, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 60],
            {58, 60},
        ),
        (LogFenced("another one leads"), [1] * 40, set()),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_pauses_after_failures(
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    pauses: list[float],
    asides: set[int],
    rounds: bool,
) -> None:
    world = World()
    asked: list[tuple[int, float]] = []
    leader = made(world, on_stuck=lambda seconds: asked.append((len(found), seconds)))
    found: list[float] = []

    def pause(seconds: float) -> None:
        found.append(seconds)
        world.clock.sleep(seconds)
        if len(found) == len(pauses):
            leader._stop.set()

    def lead(controller: Controller) -> None:
        controller.rounds += rounds
        raise error

    monkeypatch.setattr(leader, "_pause", pause)
    monkeypatch.setattr(Controller, "lead", lead)
    leader._loop(world.cluster.log("c"), MemoryStore().open("c"))
    assert leader.metrics.values["leadership_failures"] == {(type(error).__name__,): len(pauses)}
    if not rounds:
        assert found == pytest.approx(pauses)
        assert asked == [(at, ASIDE_S) for at in sorted(asides)]
    else:
        assert asked == []
        assert found[:8] == pytest.approx(pauses[:8]), "a defect stays one"


@pytest.mark.parametrize("code", [35, 50, 44])
def test_a_refusal_that_does_not_pass_ends_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    world = World()
    begun = world.clock.monotonic()

    def lead(controller: Controller) -> None:
        raise LogRefused("refused", code)

    def pause(leader: Leader, seconds: float) -> None:
        world.clock.sleep(seconds)
        if world.clock.monotonic() > begun + 2 * PATIENCE_S:
            leader._stop.set()

    failures: list[Exception] = []
    monkeypatch.setattr(Controller, "lead", lead)
    monkeypatch.setattr(Leader, "_pause", pause)
    leader = made(world, tmp_path / "table", on_failure=failures.append)
    leader.start()
    leader._thread.join(DEADLINE_S)
    ended = [str(one) for one in failures]
    assert ended == (["refused"] if code != 44 else [])
    waited = world.clock.monotonic() - begun
    assert (waited < 1.5 * PATIENCE_S) == bool(ended), "brokers that are upgraded get some time"
    assert waited > PATIENCE_S
    said = [record.getMessage() for record in caplog.records]
    assert said == ["control partition 0: refused"] * (1 + len(ended))


class Consumer:
    """A consumer of a group: when it entered and left, by the clock."""

    done: list[tuple[str, float]] = []  # noqa: RUF012 a test has its own
    fails: Exception | None = None

    def __init__(self, *_: Any) -> None: ...

    def subscribe(self, *_: Any, **__: Any) -> None:
        self.done.append(("in", time.monotonic()))

    def unsubscribe(self) -> None:
        self.done.append(("out", time.monotonic()))

    def poll(self, timeout: float) -> None:
        if self.fails is not None:
            raise self.fails
        time.sleep(min(timeout, 0.01))

    def close(self) -> None: ...


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Membership:
    monkeypatch.setattr(Consumer, "done", [])
    monkeypatch.setattr(groups, "LastingConsumer", Consumer)
    return Membership(
        "", group="g", topic="t", session_timeout_s=6, options={},
        on_gained=lambda _: None, on_lost=lambda _: None,
    )  # fmt: skip


def test_a_member_in_trouble_leaves_the_group_for_a_time(member: Membership) -> None:
    member.start()
    asked = time.monotonic()
    member.stand_aside(0.3)
    until = asked + DEADLINE_S
    while len(Consumer.done) < 3:
        assert time.monotonic() < until, "it does not come back"
        time.sleep(0.01)
    member.stop(DEADLINE_S)
    assert [what for what, _ in Consumer.done] == ["in", "out", "in"]
    assert Consumer.done[2][1] - asked >= 0.3


def test_whatever_ends_the_group_s_thread_is_known(
    member: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ControllerService._watch` ends a process by it: otherwise it would stay up without a control partition."""
    monkeypatch.setattr(Consumer, "fails", RuntimeError("can't start new thread"))
    member.start()
    member.stop(DEADLINE_S)
    assert str(member.error) == "can't start new thread"


def test_a_late_leader_does_not_wait_for_the_open_round_of_a_dead_rival() -> None:
    world = World()
    late, rival = world.controller("late"), world.controller("rival")
    asked = 0

    def rival_comes(process: str, name: str) -> None:
        nonlocal asked
        asked += (process, name) == ("late", "end_offsets")
        if asked == 2:  # behind its ids, and before it folds
            world.cluster.on_call = None
            rival.lead()
            assert rival.lease is not None
            left_open = encode_batch([Record(0, 0, ROUND_KEY, encode(rival.state.round))])
            rival.lease.next_producer().append([(TopicPartition(status_topic(), 0), left_open)])

    world.cluster.on_call = rival_comes
    before = world.clock.now
    with pytest.raises(LogUnavailable, match="could not be read"):
        late.lead()
    assert world.clock.now - before < 10
    late.lead()
    assert late.lease is not None
    assert late.lease.term == 2


def test_a_leader_that_failed_inside_a_round_hands_nothing_over() -> None:
    """Its state is ahead of the log, and a rival may have but one of its ids yet."""
    world = World()
    controller = world.led("c")

    def fenced(process: str, name: str) -> None:
        if name == "append":
            raise LogFenced("a rival came")

    before = world.committed(TopicPartition(status_topic(), 0))
    world.cluster.on_call = fenced
    with pytest.raises(LogFenced):
        world.ask(controller, FindScope("s", True))
    world.cluster.on_call = None
    controller.hand_over()
    assert world.committed(TopicPartition(status_topic(), 0)) == before
    assert controller.table.get(STATUS + scope_key("s")) is None


def test_a_leadership_that_fails_leaves_no_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    world, open_now = World(), 0
    begin, close = MemoryLog.producer, MemoryProducer.close

    def counted(log: MemoryLog, transactional_id: str, *, timeout: float) -> MemoryProducer:
        nonlocal open_now
        open_now += 1
        return begin(log, transactional_id, timeout=timeout)

    def closed(producer: MemoryProducer) -> None:
        nonlocal open_now
        open_now -= 1
        close(producer)

    monkeypatch.setattr(MemoryLog, "producer", counted)
    monkeypatch.setattr(MemoryProducer, "close", closed)
    first = world.led("first")
    first.resign()
    second = world.controller("second")

    def check(*_: object) -> None:
        raise LogRefused("a broker that does not know it", 3)

    monkeypatch.setattr(MemoryProducer, "check", check)
    with pytest.raises(LogRefused):
        second.lead()
    assert open_now == 0
