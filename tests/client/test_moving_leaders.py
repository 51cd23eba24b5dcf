"""What librdkafka answers about offsets while leaders move is no answer: it is asked again, or an error says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from anabranch.errors import NotReady
from anabranch.librdkafka.admin import KafkaAdmin
from anabranch.librdkafka.group_member import CommittedConsumer
from anabranch.librdkafka.options import Options
from anabranch.librdkafka.reconnecting_consumer import LastingConsumer
from tests.client.doubles import ManualClock

NO_OFFSET = -1001
PLACE = ("topic", 0)


@dataclass
class Offset:
    """As `ListOffsetsResultInfo`."""

    offset: int


@dataclass
class Brokers:
    """An `AdminClient` that gives one offset after the other, the last one for ever."""

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


ASK: tuple[Callable[[KafkaAdmin, float], dict[tuple[str, int], int]], ...] = (
    lambda admin, deadline: admin.end_offsets([PLACE], deadline),
    lambda admin, deadline: admin.start_offsets([PLACE], deadline),
)


@pytest.mark.parametrize("nothing", [-1, NO_OFFSET])
@pytest.mark.parametrize("ask", ASK, ids=["end", "start"])
def test_no_offset_is_asked_for_again(
    nothing: int, ask: Callable[[KafkaAdmin, float], dict[tuple[str, int], int]]
) -> None:
    """After the leaders were asked for anew, by which such questions go."""
    clock = ManualClock()
    brokers = Brokers([nothing, nothing, 7])
    assert ask(Admin(brokers, clock), clock.monotonic() + 60) == {PLACE: 7}
    assert (brokers.asked, brokers.learnt) == ([nothing, nothing, 7], 2)


@pytest.mark.parametrize("ask", ASK, ids=["end", "start"])
def test_no_offset_for_ever(
    ask: Callable[[KafkaAdmin, float], dict[tuple[str, int], int]],
) -> None:
    clock = ManualClock()
    with pytest.raises(NotReady):
        ask(Admin(Brokers([NO_OFFSET]), clock), clock.monotonic() + 60)


@dataclass
class Found:
    """As the `TopicPartition` of an answer, which has an error perhaps."""

    offset: int
    error: KafkaError | None = None


class Searched:
    """A `Consumer` that is asked for an offset by time."""

    def __init__(self, answer: int | KafkaError, *, raised: bool = False) -> None:
        self._answer = answer
        self._raised = raised

    def offsets_for_times(self, places: Sequence[TopicPartition], timeout: float) -> list[Found]:
        assert (len(places), places[0].offset) == (1, 1000)
        if self._raised:
            raise KafkaException(self._answer)
        if isinstance(self._answer, KafkaError):
            return [Found(NO_OFFSET, self._answer)]
        return [Found(self._answer)]


def search(found: Searched) -> int | None:
    consumer = CommittedConsumer.__new__(CommittedConsumer)
    consumer.native = cast("LastingConsumer", found)
    return consumer.offset_for_time("topic", 1000, 5.0)


def test_a_search_by_time() -> None:
    assert search(Searched(12)) == 12
    assert search(Searched(0)) == 0
    assert search(Searched(-1)) is None  # nothing is as late


@pytest.mark.parametrize(
    "code", [KafkaError._NOENT, KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError._TIMED_OUT]
)
@pytest.mark.parametrize("raised", [False, True], ids=["told", "raised"])
def test_a_search_by_time_without_a_leader(code: int, raised: bool) -> None:
    """Not "nothing is as late", by which a reader would begin at the end."""
    with pytest.raises(NotReady, match="topic can't be searched by time"):
        search(Searched(KafkaError(code), raised=raised))
