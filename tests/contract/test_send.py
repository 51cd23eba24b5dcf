"""Batches that are sent without waiting: they come, or cost only themselves."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from anabranch.kafka import health, sender
from anabranch.kafka.calls import API_VERSIONS, METADATA, PRODUCE
from anabranch.kafka.log import KafkaLog
from anabranch.ports import Log, LogError, LogRefused, TopicPartition, TopicSpec
from tests.conftest import Broker
from tests.contract.conftest import Maker, deleter
from tests.contract.helpers import PATIENCE_S, batch, committed_values, until
from tests.contract.proxy import Proxy
from tests.faults.proxy import Change, Delay
from tests.faults.proxy_frames import Request

NOWHERE = TopicPartition("contract.nowhere", 0)
NOT_LEADER = b"\x00\x06"
_CODE_AT = 31  # of the first partition, in a frame with an answer to Produce 13
Batches = Sequence[tuple[TopicPartition, bytes]]


@pytest.fixture
def kafka(broker: Broker, proxy: Proxy) -> Iterator[tuple[Maker, KafkaLog]]:
    """A broker behind the proxy, and a log of it."""
    address = broker.bootstrap
    maker = Maker("kafka-v2", lambda: KafkaLog(address), 0, deleter(address))
    log = KafkaLog(address)
    yield maker, log
    log.close()
    maker.close()


def told(log: Log, batches: Batches, place: TopicPartition) -> LogError:
    """Send, and go on until this place's failure is known."""
    failed: dict[TopicPartition, LogError] = {}
    log.send(batches, failed)

    def is_known() -> bool:
        log.send([], failed)
        return place in failed

    until(is_known)
    assert failed.keys() == {place}
    return failed[place]


def arrives(log: Log, place: TopicPartition, values: list[str]) -> None:
    """Go on until these values are there, in any order, each at least once."""

    def are_there() -> bool:
        failed: dict[TopicPartition, LogError] = {}
        log.send([], failed)
        assert failed == {}
        return set(committed_values(log, place)) == set(values)

    until(are_there, lambda: committed_values(log, place))


def test_what_is_sent_comes_whatever_transactions_are_open(maker: Maker, log: Log) -> None:
    one, two, other = maker.topic(3)
    maker.producer().append([(other, batch("open"))])
    failed: dict[TopicPartition, LogError] = {}
    log.send([(one, batch("a")), (two, batch("b")), (one, batch("c"))], failed)
    log.send([(one, batch("d"))], failed)
    assert failed == {}
    arrives(log, one, ["a", "c", "d"])
    arrives(log, two, ["b"])


def test_a_refusal_is_given_and_costs_no_others(
    maker: Maker, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "KEPT_S", 2.0)
    (well,) = maker.topic()
    (small,) = maker.topic(max_message_bytes="500")
    refused = told(log, [(small, batch("x" * 600)), (well, batch("a"))], small)
    assert isinstance(refused, LogRefused)
    assert refused.error == 10
    gone = told(log, [(NOWHERE, batch("x")), (well, batch("b"))], NOWHERE)
    assert NOWHERE.topic in str(gone)
    arrives(log, well, ["a", "b"])


@pytest.mark.broker
@pytest.mark.parametrize("way", ["lose_answer", "lose_request", "close_before", "moved"])
def test_what_is_in_doubt_is_sent_again(
    kafka: tuple[Maker, KafkaLog], proxy: Proxy, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "ANSWER_S", 0.5)
    maker, log = kafka
    (place,) = maker.topic()
    if way == "moved":
        proxy.faults.other[PRODUCE.key] = Change(not_leader)
    else:
        getattr(proxy.faults, way).add(PRODUCE.key)
    log.send([(place, batch("a"))], {})
    asked = proxy.faults.seen.count(METADATA.key)

    def is_sent_again() -> bool:
        log.send([], {})
        return proxy.faults.seen.count(PRODUCE.key) >= 2

    until(is_sent_again)
    assert proxy.faults.seen.count(METADATA.key) > asked, "who leads is asked again"
    arrives(log, place, ["a"])


@pytest.mark.broker
def test_a_slow_answer_is_not_waited_for(
    kafka: tuple[Maker, KafkaLog], proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "ANSWER_S", 30.0)  # a stop of the machine is no frozen broker
    maker, log = kafka
    (place,) = maker.topic()
    proxy.faults.other[PRODUCE.key] = Delay(2 * sender.CALL_S, answer=True)
    log.send([(place, batch("a"))], {})
    arrives(log, place, ["a"])
    log.send([(place, batch("b"))], {})  # behind it, and no answer is there yet
    arrives(log, place, ["a", "b"])
    assert committed_values(log, place) == ["a", "b"], "a call that waits gives up, and sends again"
    assert proxy.faults.seen.count(PRODUCE.key) == 2


@pytest.mark.broker
def test_a_topic_in_the_place_of_another_gets_nothing_unasked(
    kafka: tuple[Maker, KafkaLog], proxy: Proxy
) -> None:
    """The caller is told first: it knows which topic is meant."""
    maker, log = kafka
    (place,) = maker.topic()
    log.send([(place, batch("a"))], {})
    arrives(log, place, ["a"])
    maker.delete(place.topic)
    until(lambda: place.topic not in log.describe_topics([place.topic]))
    log.create_topics([TopicSpec(place.topic, 1, {"retention.ms": "-1"})])
    proxy.cut_all()  # leaders are asked for, too
    told(log, [(place, batch("b"))], place)
    log.send([(place, batch("c"))], {})
    arrives(log, place, ["c"])


@pytest.mark.soak
@pytest.mark.broker
@pytest.mark.parametrize(
    "calls", [range(100), (PRODUCE.key, API_VERSIONS.key)], ids=["all", "one of several brokers"]
)
def test_a_frozen_broker_costs_what_is_for_it(
    kafka: tuple[Maker, KafkaLog],
    proxy: Proxy,
    calls: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No call takes long, memory has a bound, and once the broker goes on, so do batches."""
    monkeypatch.setattr(sender, "ANSWER_S", 0.3)
    monkeypatch.setattr(sender, "KEPT_S", 1.0)
    monkeypatch.setattr(sender, "KEPT_BYTES", 50_000)
    monkeypatch.setattr(health, "SKIPPED_S", 0.5)
    monkeypatch.setattr(health, "LONGEST_SKIPPED_S", 1.0)
    maker, log = kafka
    (place,) = maker.topic()
    log.send([(place, batch("a"))], {})
    arrives(log, place, ["a"])
    proxy.faults.frozen = calls
    waited = []
    end = time.monotonic() + 4.0
    while time.monotonic() < end:
        began = time.monotonic()
        log.send([(place, batch("x" * 5_000))], {})
        waited.append(time.monotonic() - began)
        time.sleep(0.005)
        kept = sum(one.size for one in log._sender._kept)
        links = log._sender._pipeline.links.values()
        under_way = [request for link in links for request in link.in_flight]
        assert kept <= 50_000
        assert sum(request.size for request in under_way) <= sender.IN_FLIGHT_BYTES
    slow = [seconds for seconds in waited if seconds > 0.2]
    assert 1 <= len(slow) <= 8, "connections and metadata are asked for now and then"
    assert max(slow) < 10 * sender.CALL_S
    proxy.faults.frozen = ()
    time.sleep(1.5)  # until what is kept is too old
    monkeypatch.setattr(sender, "KEPT_S", PATIENCE_S)
    log.send([(place, batch("b"))], {})

    def is_there() -> bool:
        log.send([], {})
        return committed_values(log, place)[-1] == "b"

    until(is_there)


def not_leader(_: Request, answer: bytes) -> bytes:
    return answer[:_CODE_AT] + NOT_LEADER + answer[_CODE_AT + 2 :]
