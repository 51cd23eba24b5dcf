"""A broker that has just started names no brokers: clients ask again, and continue.

librdkafka takes that for the truth, and often never connects again (decision 0010).
Plain consumers next to ours show that it happens in the same minute.
"""

from __future__ import annotations

import importlib
import io
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from kio.serial import entity_reader, entity_writer

import anabranch
from anabranch.librdkafka import handles
from anabranch.librdkafka.groups import Membership
from anabranch.librdkafka.reconnecting_consumer import LastingConsumer
from anabranch.topics.names import stream_topic
from tests.cluster import ControllerProcess
from tests.faults.network_proxy import Network, start_network
from tests.faults.proxy import Action, Change
from tests.faults.proxy_frames import METADATA, Request
from tests.waiting import wait_until

_DEADLINE_S = 60.0
_WINDOWS_S = (0.5, 1.0, 2.0, 0.5)  # each makes about a fifth of plain consumers deaf
_PLAIN = 8
_OURS = 8
_MEMBERS = 4
_UNKNOWN_TOPIC = 3
_FLEXIBLE = 9  # the first version of Metadata with tags in its answer's header
pytestmark = [pytest.mark.broker, pytest.mark.soak]


class Blindness:
    """While ``blind`` is set, answers to Metadata name no broker, as those of a broker that has just started.

    It has not read the cluster's metadata yet, and knows no topics (KRaft; seen on restarts of 4.3.1, and of others
    in librdkafka #5301). ``answered``: one was given.
    """

    def __init__(self) -> None:
        self.blind = threading.Event()
        self.answered = threading.Event()

    def __call__(self, request: Request) -> Action | None:
        if request.api == METADATA and self.blind.is_set():
            return Change(self._nobody)
        return None

    def _nobody(self, request: Request, answer: bytes) -> bytes:
        """The answer (a frame) without brokers, and with topics that are not known."""
        module = importlib.import_module(f"kio.schema.metadata.v{request.version}.response")
        # After the length, the correlation id, the tags.
        body = 9 if request.version >= _FLEXIBLE else 8
        found = entity_reader(module.MetadataResponse)(answer[body:], 0)[0]
        topics = tuple(
            replace(topic, error_code=type(topic.error_code)(_UNKNOWN_TOPIC), partitions=())
            for topic in found.topics
        )
        out = io.BytesIO()
        entity_writer(module.MetadataResponse)(out, replace(found, brokers=(), topics=topics))
        frame = answer[4:body] + out.getvalue()
        self.answered.set()
        return len(frame).to_bytes(4, "big") + frame


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """A broker behind the proxy, and a controller that always gets true answers."""
    folder = tmp_path_factory.mktemp("blind")
    with (
        start_network() as made,
        ControllerProcess(made.direct, folder) as controller,
    ):
        controller.wait_leading()
        yield made


@pytest.fixture
def blindness(network: Network) -> Blindness:
    """Of this test alone."""
    network.proxy.policy = made = Blindness()
    return made


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "SILENCE_S", 3.0)
    monkeypatch.setattr(handles, "SUSPECT_S", 1.0)


def _commit(client: anabranch.Client, stream: str, value: bytes) -> None:
    """Through the journal, so that all of a client's producers are used."""
    with client.begin(stream.partition("/")[0]) as txn:
        txn.write(stream, value)
        txn.token()
        txn.commit(timeout=_DEADLINE_S)


class Polled:
    """A consumer, plain or ours, that a thread polls; what it read."""

    def __init__(self, consumer: Consumer | LastingConsumer) -> None:
        self.consumer = consumer
        self.first = consumer.native if isinstance(consumer, LastingConsumer) else consumer
        self.values: set[bytes | None] = set()

    @property
    def renewed(self) -> bool:
        """Whether it has another handle now."""
        return isinstance(self.consumer, LastingConsumer) and self.consumer.native is not self.first

    def run(self, stop: threading.Event) -> None:
        """Until it is stopped."""
        while not stop.is_set():
            message = self.consumer.poll(0.1)
            if message is not None and message.error() is None:
                self.values.add(message.value())
        self.consumer.close()


class Member:
    """A controller's membership in a group of its own; which control partitions it is given."""

    def __init__(self, bootstrap: str, group: str, topic: str) -> None:
        self.held: set[int] = set()
        self.membership = Membership(
            bootstrap,
            group=group,
            topic=topic,
            session_timeout_s=6.0,
            options={"topic.metadata.refresh.interval.ms": "50", "log_level": "0"},
            on_gained=self.held.update,
            on_lost=self.held.difference_update,
        )


def _ignore(*_: Any) -> None:
    pass


def _consumers(bootstrap: str, topic: str, group: str) -> tuple[list[Polled], list[Polled]]:
    """Plain ones and ours; of each every second in a group of its own, the others are assigned partitions."""
    common = {"bootstrap.servers": bootstrap, "log_level": 0}
    asks = (50, 200, 1000)
    plain, ours = [], []
    for number in range(_PLAIN + _OURS):
        config: dict[str, Any] = {
            **common,
            "group.id": f"{group}-{number}",
            "topic.metadata.refresh.interval.ms": asks[number % 3],
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": 6000,  # after which a group misses a member that left no word
            "error_cb": _ignore,
        }
        made: Consumer | LastingConsumer
        if number < _PLAIN:
            made = Consumer(config)
            plain.append(Polled(made))
        else:
            made = LastingConsumer(config, common)
            ours.append(Polled(made))
        if number % 2:
            made.subscribe([topic], on_assign=_ignore, on_revoke=_ignore, on_lost=_ignore)
        else:
            made.assign([TopicPartition(topic, 0, 0)])
    return plain, ours


def test_our_consumers_outlive_it(network: Network, blindness: Blindness, unique: str) -> None:
    stream = f"b{unique}/events"
    topic = stream_topic(stream)
    stop, ours_stop = threading.Event(), threading.Event()
    with (
        anabranch.connect(network.direct) as client,
        ThreadPoolExecutor(_PLAIN + _OURS) as threads,
    ):
        client.create_stream(stream)
        _commit(client, stream, b"before")
        plain, ours = _consumers(network.proxied, topic, unique)
        everybody = [*plain, *ours]
        members = [Member(network.proxied, f"{unique}-m{n}", topic) for n in range(_MEMBERS)]
        for member in members:
            member.membership.start()
        runs = [threads.submit(polled.run, stop) for polled in plain]
        runs += [threads.submit(polled.run, ours_stop) for polled in ours]
        try:
            wait_until(lambda: all(b"before" in p.values for p in everybody), _DEADLINE_S)
            wait_until(lambda: all(m.held == {0} for m in members), _DEADLINE_S)
            for seconds in _WINDOWS_S:
                blindness.blind.set()
                time.sleep(seconds)
                blindness.blind.clear()
                time.sleep(1.0)
            _commit(client, stream, b"after")
            wait_until(lambda: all(b"after" in p.values for p in ours), _DEADLINE_S)
            wait_until(lambda: all(m.held == {0} for m in members), _DEADLINE_S)
            stop.set()
            deaf = [polled for polled in plain if b"after" not in polled.values]
            assert deaf, "no plain consumer was struck: this shows nothing"
            assert any(p.renewed for p in ours), "none of ours was made anew: this shows nothing"
        finally:
            stop.set()
            ours_stop.set()
            for member in members:
                member.membership.stop(_DEADLINE_S)
        assert not any(m.membership.alive or m.membership.error for m in members)
        for run in runs:
            run.result(_DEADLINE_S)


def test_a_client_outlives_it(network: Network, blindness: Blindness, unique: str) -> None:
    """Commands, replies and reading: all of a client's handles on librdkafka get such answers, and continue."""
    stream = f"b{unique}/events"
    often = {"topic.metadata.refresh.interval.ms": 200, "metadata.max.age.ms": 1000}
    with anabranch.connect(network.proxied, config=often) as client:
        client.create_stream(stream)
        _commit(client, stream, b"before")
        for seconds in _WINDOWS_S:
            blindness.answered.clear()
            blindness.blind.set()
            assert blindness.answered.wait(_DEADLINE_S), "nobody asked"
            time.sleep(seconds)
            blindness.blind.clear()
            time.sleep(1.0)
        _commit(client, stream, b"after")
        with client.read(stream, group=unique, timeout=_DEADLINE_S) as reader:
            events = iter(reader)
            assert [next(events).value, next(events).value] == [b"before", b"after"]
