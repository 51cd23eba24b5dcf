"""When a handle counts as lost: a transcript of messages, questions and answers; how one is made and ends."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from anabranch.clock import SystemClock
from anabranch.errors import NotReady, WriteFailed
from anabranch.kafka.oauth_tokens import token_and_end
from anabranch.kafka.settings import TOKEN_FILE
from anabranch.librdkafka import admin, handles
from anabranch.librdkafka.admin import KafkaAdmin
from anabranch.librdkafka.command_bus import KafkaBus
from anabranch.librdkafka.groups import KafkaGroups
from anabranch.librdkafka.handles import HandleHealth, made
from anabranch.librdkafka.journal_writer import Channel, KafkaJournals
from anabranch.librdkafka.options import Options
from anabranch.librdkafka.reconnecting_consumer import LastingConsumer
from tests.client.doubles import ManualClock

ALL_DOWN = KafkaError(KafkaError._ALL_BROKERS_DOWN)
OTHER = KafkaError(KafkaError._TRANSPORT)
NO_TOKEN = KafkaException(KafkaError(KafkaError.SASL_AUTHENTICATION_FAILED))


class Brokers:
    """Answers to a handle: by brokers, by one that knows no others, or none."""

    def __init__(self) -> None:
        self.answer: str = "brokers"
        self.asked = 0

    def list_topics(self, topic: str, timeout: float) -> Any:
        """See `Handle`."""
        assert topic == "t"
        self.asked += 1
        if self.answer == "nothing":
            raise KafkaException(OTHER)
        return SimpleNamespace(brokers={1: "a"} if self.answer == "brokers" else {})


class World:
    """A handle and its health, what others are told, and the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.handle, self.other = Brokers(), Brokers()
        monkeypatch.setattr(handles, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(handles, "AdminClient", lambda config: self.other)
        self.health = HandleHealth(self.handle, {}, "t")

    def after(self, seconds: float) -> tuple[bool, int, int]:
        """(lost, how often the handle was asked so far, and another one) when so much time has passed."""
        self.now += seconds
        return self.health.lost(), self.handle.asked, self.other.asked


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_silence_alone_is_no_loss(world: World) -> None:
    assert world.after(29) == (False, 0, 0)
    assert world.after(2) == (False, 1, 0)
    assert world.after(29) == (False, 1, 0)
    world.health.answered()
    assert world.after(29) == (False, 1, 0)
    assert world.after(2) == (False, 2, 0)


@pytest.mark.parametrize("answer", ["nothing", "nobody"])
def test_a_handle_without_two_answers_is_renewed_while_another_is_answered(
    world: World, answer: str
) -> None:
    world.handle.answer = answer
    assert world.after(31) == (False, 1, 0)
    assert world.after(4) == (False, 1, 0)
    assert world.after(2) == (True, 2, 1)


def test_answered_the_second_time(world: World) -> None:
    world.handle.answer = "nothing"
    assert world.after(31) == (False, 1, 0)
    world.handle.answer = "brokers"
    assert world.after(6) == (False, 2, 0)
    world.handle.answer = "nothing"
    assert world.after(6) == (False, 2, 0)
    assert world.after(25) == (False, 3, 0)


@pytest.mark.parametrize("answer", ["nothing", "nobody"])
def test_brokers_that_are_away_for_all(world: World, answer: str) -> None:
    world.handle.answer = world.other.answer = answer
    assert world.after(31) == (False, 1, 0)
    assert [world.after(6)[0] for _ in range(10)] == [False] * 10
    assert world.other.asked == 10
    world.other.answer = "brokers"
    assert world.after(6) == (True, 12, 11)


def test_a_complaint_is_checked_soon(world: World) -> None:
    world.handle.answer = "nothing"
    world.health.complaint(OTHER)
    assert world.after(6) == (False, 0, 0)
    world.health.complaint(ALL_DOWN)
    assert world.health.complained
    assert world.after(0) == (False, 1, 0)
    assert world.after(6) == (True, 2, 1)


def test_a_complaint_that_is_over(world: World) -> None:
    world.health.complaint(ALL_DOWN)
    assert world.after(6) == (False, 1, 0)
    assert not world.health.complained
    assert world.after(6) == (False, 1, 0)


def test_without_a_topic_nothing_is_asked(world: World) -> None:
    world.health.topic = ""
    assert world.after(100) == (False, 0, 0)


class Native:
    """A handle of librdkafka whose group takes its partitions at the third look."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.did: list[str] = []
        self.told: dict[str, Any] = {}

    def subscribe(self, topics: list[str], **told: Any) -> None:
        self.told = told

    def unsubscribe(self) -> None:
        self.did.append("unsubscribe")

    def poll(self, seconds: float) -> None:
        self.did.append("poll")
        if self.did.count("poll") == 3:
            self.told["on_revoke"](self, [TopicPartition("t", 0)])

    def close(self) -> None:
        self.did.append("close")


@pytest.mark.parametrize("member", [True, False])
def test_a_member_has_left_its_group_when_its_handle_closes(member: bool) -> None:
    """A rebalance that is told in the middle of closing would keep Python's lock for ever."""
    made: list[Native] = []

    def make(config: dict[str, Any]) -> Any:
        made.append(Native(config))
        return made[-1]

    consumer = LastingConsumer({}, {}, make=make)
    lost: list[int] = []
    if member:
        nothing = Mock()
        consumer.subscribe(["t"], nothing, lambda _, places: lost.append(len(places)), nothing)
        made[0].told["on_assign"](made[0], [TopicPartition("t", 0)])
    consumer.close()
    left = ["unsubscribe", "poll", "poll", "poll", "close"]
    assert (made[0].did, lost) == ((left, [1]) if member else (["close"], []))


def test_a_broker_that_does_not_list_its_groups_is_asked_again() -> None:
    """Its error comes beside the others' groups, and is no exception by itself."""
    client = Mock(spec=["list_consumer_groups"])
    answer = SimpleNamespace(valid=[SimpleNamespace(group_id="a")], errors=[OTHER])
    client.list_consumer_groups.return_value.result.return_value = answer
    admin = SimpleNamespace(ask=lambda deadline, ask: ask(client, 1.0))
    groups = KafkaGroups(admin)  # type: ignore[arg-type]
    with pytest.raises(KafkaException):
        groups.names(1.0)
    answer.errors.clear()
    assert groups.names(1.0) == ["a"]


# -- tokens of OAUTHBEARER ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("give", "said"),
    [(partial(token_and_end, Path("/nowhere")), "No such file"), (lambda _: ("t", 1), "ended")],
)
def test_no_handle_is_made_without_a_token(give: Any, said: str) -> None:
    """confluent-kafka would wait for it, keep the reason, and blame the options."""
    kind = Mock(side_effect=NO_TOKEN)
    with pytest.raises(NotReady, match=said):
        made(kind, {"oauth_cb": give})
    assert not kind.called
    with pytest.raises(NotReady):
        made(kind, {"oauth_cb": lambda _: ("it goes in this moment", 1e12)})
    give = Mock(side_effect=[["t", 1e12], ["then", 1e12]])  # it may ask far away, or count
    first = made(lambda config: config["oauth_cb"], {"oauth_cb": give})
    assert give.call_count == 1
    assert [first(""), first("")] == [("t", 1e12), ["then", 1e12]]


def test_without_a_token_a_lost_handle_is_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.handle.answer = "nothing"
    monkeypatch.setattr(handles, "AdminClient", Mock(side_effect=NO_TOKEN))
    assert [world.after(31)[0], world.after(6)[0]] == [False, False]
    old, new = Mock(), Mock()
    old.poll.return_value, old.position.return_value = None, []
    consumer = LastingConsumer({}, {}, make=Mock(side_effect=[old, NO_TOKEN, new]))
    monkeypatch.setattr(HandleHealth, "lost", lambda _: True)
    for handle in (old, new):
        assert consumer.poll(0) is None
        assert consumer.native is handle


def test_a_call_waits_for_a_token_until_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, file = ManualClock(), tmp_path / "token"
    options = Options("127.0.0.1:1", {TOKEN_FILE: str(file)})
    client = Mock(**{"list_topics.return_value.topics": {"t": 1}})
    monkeypatch.setattr(admin, "AdminClient", lambda _: client)
    asked = KafkaAdmin(options, clock)
    with pytest.raises(NotReady, match="No such file"):
        asked.topics(clock.now + 2)
    assert clock.now <= 1002
    bus = KafkaBus(*cast("Any", (options, asked, "p", "open", clock, None)))
    bus._producer = old = Mock()
    assert not bus._renew_producer(old), "the thread that hears answers goes on"
    assert bus._producer is old
    journals = KafkaJournals(options, asked, clock, 3.0)
    journals.writer()  # of a transaction that has begun
    with pytest.raises(NotReady, match="No such file"):
        journals.take(1000)

    def come() -> None:
        file.write_text("t")

    clock.on_sleep = come
    assert asked.topics(clock.now + 2) == ["t"]


def test_what_a_writer_does_once_its_client_is_closed_has_a_name() -> None:
    journals = KafkaJournals(Options("127.0.0.1:1", {"log_level": 0}), Mock(), SystemClock(), 3.0)
    writer, channel = journals.writer(), journals.take(1000)
    writer._channels[1000] = writer._by_topic["t"] = channel
    writer._produce["t"] = channel.producer.produce
    journals.close()
    with pytest.raises(WriteFailed, match="the client was closed"):
        writer.flush({}, 0.0)
    with pytest.raises(WriteFailed, match="the client was closed"):
        writer.write_many("t", [])
    channel.poll(0, flush=True)  # a flush that began before
    with pytest.raises(WriteFailed, match="the client was closed"):
        channel.learn("t", 1, SystemClock(), SystemClock().monotonic() + 3)  # … or an opening
    writer.discard()


def _refuse(channel: Channel) -> None:
    message = Mock(**{"topic.return_value": "t", "partition.return_value": 0})
    channel._undelivered(KafkaError(KafkaError.UNSUPPORTED_COMPRESSION_TYPE), message)


def test_a_codec_that_brokers_lack_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    options = Options("127.0.0.1:1", {"log_level": 0})
    journals = KafkaJournals(options, Mock(), SystemClock(), 3.0)
    journals.writer()  # a spare producer
    taken = [journals.take(1000) for _ in range(2)]
    journals.give_back(spare := journals.take(1000))
    for codec, channel in zip(("gzip", "gzip"), taken, strict=True):
        _refuse(channel)
        assert channel.failure == (
            f"a write to t[0] failed: these brokers take no lz4, and {codec} is used from now on"
        )
    _refuse(taken[0])  # another batch of it
    assert journals.columns()._pool.codec == options.journal(1000)["compression.type"] == "gzip"
    _refuse(channel := journals.take(1000))
    assert channel is not spare
    assert options.journal(1000)["compression.type"] == "none"
    _refuse(last := journals.take(1000))
    assert str(last.failure).endswith("take no none: give another compression_type to connect")
    said = [r.getMessage().partition(":")[2] for r in caplog.records if "take no" in r.getMessage()]
    assert len(said) == 2
    journals.close()


@pytest.mark.parametrize("name", ["compression.type", "compression.codec"])
def test_a_codec_that_was_chosen_stays(name: str) -> None:
    options = Options("127.0.0.1:1", {"log_level": 0, name: "zstd"})
    journals = KafkaJournals(options, Mock(), SystemClock(), 3.0)
    _refuse(channel := journals.take(1000))
    assert channel.failure == (
        "a write to t[0] failed: these brokers take no zstd: give another compression_type to connect"
    )
    assert options.codec == "zstd"
    journals.close()


def test_a_bus_that_could_not_start_keeps_its_handles_and_closes_them() -> None:
    known = Mock(**{"end_offsets.side_effect": NotReady("later")})
    known.partition_counts = lambda names, *_: dict.fromkeys(names, 1)
    known.max_message_bytes = lambda names, *_: dict.fromkeys(names, 1000)
    options = Options("127.0.0.1:1", {"log_level": 0})
    bus = KafkaBus(*cast("Any", (options, known, "p", "open", SystemClock(), os.urandom)))
    made = []
    for _ in range(2):
        with pytest.raises(NotReady, match="later"):
            bus.ready(SystemClock().monotonic() + 3)
        made.append((bus._consumer, bus._producer))
    assert made[0] == made[1]
    bus.close()
    assert made[0][0] is not None
    with pytest.raises(RuntimeError, match="closed"):
        made[0][0].native.poll(0)
    assert bus._producer is None
