"""librdkafka's answers while leaders move and brokers end do not count: it is asked again, or an error says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from anabranch.client.session import Session
from anabranch.errors import AnabranchError, NotAuthorized, NotReady
from anabranch.librdkafka.admin import KafkaAdmin
from anabranch.librdkafka.command_bus import KafkaBus
from anabranch.librdkafka.options import Options
from anabranch.protocol.schemas import records as r
from tests.client.doubles import ManualClock, scripted_ports

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
    silent: bool = False
    says: Callable[[], object] = lambda: None  # called by `poll`
    asked: list[int] = field(default_factory=list)

    def list_offsets(
        self, request: dict[TopicPartition, Any], **_: Any
    ) -> dict[TopicPartition, Future[Offset]]:
        if self.silent:
            raise TimeoutError
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
        if self.silent:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))

    def poll(self, _: float) -> int:
        self.says()
        return 0


class Admin(KafkaAdmin):
    """It stands before `Brokers`."""

    def __init__(self, brokers: Brokers, clock: ManualClock) -> None:
        super().__init__(Options("127.0.0.1:1", {}), clock)
        self._brokers = cast("AdminClient", brokers)

    def _connected(self) -> AdminClient:
        return self._brokers


@pytest.mark.parametrize(
    ("answers", "least", "end"),
    [([-1, -1, 7], 0, 7), ([NO_OFFSET] * 2 + [7], 0, 7), ([6, 9], 7, 9)],
)
def test_no_offset_and_an_old_leader_s_end_are_asked_for_again(
    answers: list[int], least: int, end: int
) -> None:
    """After the leaders were asked for anew. ``least``: what was acknowledged is below it."""
    clock = ManualClock()
    brokers = Brokers(list(answers))
    assert Admin(brokers, clock).end_offsets({PLACE: least}, clock.monotonic() + 60) == {PLACE: end}
    assert (brokers.asked, brokers.learnt) == (answers, len(answers) - 1)


def test_no_offset_for_ever() -> None:
    clock = ManualClock()
    with pytest.raises(NotReady):
        Admin(Brokers([NO_OFFSET]), clock).end_offsets({PLACE: 0}, clock.monotonic() + 60)


_CUT = "SASL SCRAM-SHA-256 mechanism handshake failed: Local: Broker transport failure"
_REFUSED = "SASL authentication error: Authentication failed"


@pytest.mark.parametrize(
    ("text", "later", "kind"),
    [(_REFUSED, False, NotAuthorized), (_REFUSED, True, NotReady), (_CUT, False, NotReady)],
)
def test_only_a_refusal_since_the_last_answer_counts(
    text: str, later: bool, kind: type[AnabranchError]
) -> None:
    """A broker that ends during a handshake is no refusal, and one of hours ago does not count."""
    clock, brokers = ManualClock(), Brokers([7], silent=True)
    admin = Admin(brokers, clock)
    error = KafkaError(KafkaError._AUTHENTICATION, text)
    if later:
        brokers.silent = False
        admin._on_error(error)
        admin.end_offsets({PLACE: 0}, clock.monotonic() + 60)
        brokers.silent = True
    else:
        brokers.says = lambda: admin._on_error(error)
    with pytest.raises(kind):
        admin.end_offsets({PLACE: 0}, clock.monotonic() + 20)


class Growing:
    """See `KafkaAdmin`: brokers' answers about control partitions, one after the other, the last one for ever."""

    def __init__(self, *counts: int) -> None:
        self.counts = list(counts)

    def partition_counts(self, topics: Iterable[str], *_: Any) -> dict[str, int]:
        return dict.fromkeys(topics, self.counts.pop(0) if len(self.counts) > 1 else self.counts[0])


def bus_of(admin: object, clock: ManualClock, lane: str = "open") -> KafkaBus:
    bus = KafkaBus(*cast("Any", (None, admin, "anabranch", lane, clock, None)))
    bus._partitions, bus._counted = 1, clock.now
    return bus


def test_a_broker_that_shows_fewer_control_partitions_is_asked_again() -> None:
    """A wrong number is returned all the same, and soon."""
    clock = ManualClock()
    bus = bus_of(Growing(1, 1, 2), clock)
    assert bus.control_partitions(clock.now + 30, least=2) == 2
    began = clock.now
    assert bus.control_partitions(clock.now + 30, least=3) == 2
    assert clock.now - began < 3


def test_a_call_to_all_control_partitions_finds_new_ones() -> None:
    """And believes no broker that shows fewer than there were."""
    clock = ManualClock()
    bus = bus_of(Growing(2, 3, 1), clock)
    assert bus.control_partitions(clock.now + 30) == 1
    clock.now += 20
    assert bus.control_partitions(clock.now + 30) == 2
    # An operator's change has to reach all that there are now.
    _, _, ports = scripted_ports(lambda _: None)
    session = Session(replace(ports, bus=bus, clock=clock))
    with patch.object(bus, "ready"), patch.object(session, "ask", Mock()):
        asked = session.ask_each(r.ListGrants(), r.GrantList, clock.now + 30)
    assert [number for number, _ in asked] == [0, 1, 2]
    clock.now += 20
    assert bus.control_partitions(clock.now + 30) == 3


def test_a_broker_that_shows_no_topics_changes_no_count() -> None:
    """It shows no topics; without them an operator has to add the lane."""
    clock = ManualClock()
    nothing = SimpleNamespace(partition_counts=lambda *_: {}, topics=lambda _: [])
    bus = bus_of(nothing, clock, "etl")
    clock.now += 20
    assert bus.control_partitions(clock.now + 30) == 1


def test_silent_brokers_change_no_count() -> None:
    """The controllers may; a call that must know of more fails."""

    def silent(topics: Iterable[str], deadline: float, *_: Any) -> dict[str, int]:
        clock.now = deadline
        raise NotReady("the brokers have not answered")

    clock = ManualClock()
    bus = bus_of(growing := Growing(1), clock)
    growing.partition_counts = silent  # type: ignore[method-assign]
    clock.now += 20
    began = clock.now
    assert [bus.control_partitions(began + 30) for _ in range(3)] == [1] * 3
    assert clock.now - began <= 2
    with pytest.raises(NotReady):
        bus.control_partitions(clock.now + 30, least=2)
