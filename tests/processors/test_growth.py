"""Growing the topics of a stream while some of the brokers are away."""

from __future__ import annotations

import time

import pytest

from anabranch.core.state import State
from anabranch.errors import AnabranchError, NotReady
from anabranch.ports import LogUnavailable
from anabranch.processors.growth import Growth
from anabranch.schemas.records import Scale
from anabranch.topics.memory import MemoryLog
from anabranch.topics.wire.codes import CREATE_CODES, GROW_CODES, Act, meaning
from tests.processors.world import World

INVALID_REPLICATION_FACTOR = 38


def test_too_few_brokers_for_a_new_partition_may_pass() -> None:
    """The topic has its replicas, so that there were brokers enough; for a new topic nobody knows."""
    assert meaning(GROW_CODES, INVALID_REPLICATION_FACTOR).act is Act.RETRY
    assert meaning(CREATE_CODES, INVALID_REPLICATION_FACTOR).act is Act.REFUSED


def test_brokers_that_are_away_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(log: MemoryLog, topic: str, partitions: int) -> None:
        raise LogUnavailable("two of three")

    world = World()
    controller = world.controller()
    controller.lead()
    world.stream(controller, "s/a", 1)
    monkeypatch.setattr(MemoryLog, "add_partitions", away)
    with pytest.raises(LogUnavailable):
        world.ask(controller, Scale("s/a", 3, (), ()))
    state = State(controller.table)
    growth = Growth(world.cluster.log("g"), threads=True)
    until = time.monotonic() + 30
    found: list[tuple[str, int | AnabranchError]] = []
    while not found and time.monotonic() < until:
        found = list(growth.step(state))
    growth.close()
    assert [(stream, type(error)) for stream, error in found] == [("s/a", NotReady)]
