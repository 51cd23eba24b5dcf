"""A leader's thread over the in-memory log: brokers that can't be asked yet are no reason to end."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest

from anabranch.core.turn import Settings
from anabranch.ports import LogUnavailable, TopicInfo
from anabranch.processors.leader import Leader
from anabranch.topics.memory import MemoryLog
from tests.processors.world import KEY, World

DEADLINE_S = 30.0


def leading(world: World, folder: Path) -> list[Exception]:
    """Let a leader begin until it leads, and stop it. What has made it fail."""
    led, failures = threading.Event(), list[Exception]()

    def changed() -> None:
        if leader.leading:
            led.set()

    def failed(error: Exception) -> None:
        failures.append(error)
        led.set()

    leader = Leader(
        lambda: world.cluster.log("c"),
        world.clock,
        Settings(0, 1, "anabranch", KEY),
        folder=folder,
        leader="c",
        native_timeout=60,
        on_change=changed,
        on_failure=failed,
    )
    leader.start()
    assert led.wait(DEADLINE_S), "it does not lead"
    assert leader.stop(DEADLINE_S)
    return failures


def test_brokers_that_are_away_when_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    assert leading(world, tmp_path / "table") == []
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
