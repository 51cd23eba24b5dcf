"""librdkafka's answers about offsets while leaders move do not count: it is asked again, or an error says so."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from anabranch.errors import NotReady
from anabranch.librdkafka.admin import KafkaAdmin
from anabranch.librdkafka.options import Options
from tests.client.doubles import ManualClock

NO_OFFSET = -1001
PLACE = ("topic", 0)


@dataclass
class Offset:
    """As `ListOffsetsResultInfo`."""

    offset: int


@dataclass
class Brokers:
    """An `AdminClient` that gives one offset after the other, the last one again and again."""

    answers: list[int]
    learnt: int = 0
    asked: list[int] = field(default_factory=list)

    def list_offsets(
        self, request: dict[TopicPartition, Any], **_: Any
    ) -> dict[TopicPartition, Future[Offset]]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.asked.append(answer)
        found = {}
        for place in request:
            future: Future[Offset] = Future()
            future.set_result(Offset(answer))
            found[place] = future
        return found

    def list_topics(self, **_: Any) -> None:
        self.learnt += 1

    def poll(self, _: float) -> int:
        return 0


class Admin(KafkaAdmin):
    """It stands before `Brokers`."""

    def __init__(self, brokers: Brokers, clock: ManualClock) -> None:
        super().__init__(Options("127.0.0.1:1", {}), clock)
        self._client = cast("AdminClient", brokers)


@pytest.mark.parametrize("nothing", [-1, NO_OFFSET])
def test_no_offset_is_asked_for_again(nothing: int) -> None:
    """After the leaders were asked for anew, by which such questions go."""
    clock = ManualClock()
    brokers = Brokers([nothing, nothing, 7])
    assert Admin(brokers, clock).end_offsets({PLACE: 0}, clock.monotonic() + 60) == {PLACE: 7}
    assert (brokers.asked, brokers.learnt) == ([nothing, nothing, 7], 2)


def test_an_old_leader_s_end_is_no_answer() -> None:
    """What was acknowledged lies above it."""
    clock = ManualClock()
    brokers = Brokers([6, 9])
    assert Admin(brokers, clock).end_offsets({PLACE: 7}, clock.monotonic() + 60) == {PLACE: 9}
    assert (brokers.asked, brokers.learnt) == ([6, 9], 1)


def test_no_offset_for_ever() -> None:
    clock = ManualClock()
    with pytest.raises(NotReady):
        Admin(Brokers([NO_OFFSET]), clock).end_offsets({PLACE: 0}, clock.monotonic() + 60)
