"""Topics that an operator deletes and makes again: the in-memory log behaves as a broker."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from anabranch.kafka import cluster, coordinator
from anabranch.ports import (
    Log,
    LogRefused,
    LogUnavailable,
    LogUncertain,
    OffsetOutOfRange,
    TopicGone,
    TopicPartition,
    TopicSpec,
)
from tests.contract.conftest import Maker
from tests.contract.helpers import (
    PATIENCE_S,
    append_and_commit,
    batch,
    committed_values,
    read_all,
    stable_values,
    until,
    values,
    write,
)


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that is not known need not be waited for for long: no broker here lags behind."""
    for module in (cluster, coordinator):
        monkeypatch.setattr(module, "UNKNOWN_TOPIC_S", 0.2)


def delete(maker: Maker, topic: str) -> None:
    """Until a new handle does not know it any more."""
    maker.delete(topic)
    until(lambda: topic not in maker.log().describe_topics([topic]))


def make_anew(maker: Maker, topic: str) -> None:
    delete(maker, topic)
    maker.log().create_topics([TopicSpec(topic, 1, {"retention.ms": "-1"})])


def test_reading_a_deleted_topic_raises_its_name(maker: Maker, log: Log) -> None:
    gone, kept = *maker.topic(), *maker.topic()
    write(log, maker, [(gone, batch("a")), (kept, batch("b"))])
    before = log.describe_topics([gone.topic])[gone.topic]
    delete(maker, gone.topic)
    fresh = maker.log()  # what a handle keeps in mind must not matter
    calls: list[Callable[[], object]] = [
        lambda: fresh.end_offsets([gone, kept], committed=False),
        lambda: _fetch_on(log, {gone: 0, kept: 0}),
    ]
    for call in calls:
        with pytest.raises(TopicGone) as caught:
            call()
        assert (caught.value.topic, caught.value.lost, caught.value.error) == (gone.topic, False, 3)
    with pytest.raises(LogRefused):
        fresh.add_partitions(gone.topic, 3)
    assert committed_values(fresh, kept) == ["b"]
    fresh.create_topics([TopicSpec(gone.topic, 1, {"retention.ms": "-1"})])
    after = maker.log().describe_topics([gone.topic])[gone.topic]
    assert after.partitions == 1
    assert maker.name.startswith("memory") or after.topic_id != before.topic_id
    assert maker.log().end_offsets([gone], committed=False) == {gone: 0}
    with pytest.raises(OffsetOutOfRange):
        maker.log().fetch({gone: 1}, max_wait=0, max_bytes=1000, committed=True)


def _fetch_on(log: Log, positions: dict[TopicPartition, int]) -> None:
    """A handle that knew the topic may bring others' data first."""
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        log.fetch(positions, max_wait=0.1, max_bytes=1000, committed=True)


@pytest.mark.parametrize("anew", [False, True], ids=["deleted", "made anew"])
def test_a_native_transaction_outlives_a_topic_that_it_wrote_to(
    maker: Maker, log: Log, anew: bool
) -> None:
    """Its end comes through, whatever else it wrote is there, and its id can be used again."""
    gone, kept = *maker.topic(), *maker.topic()
    producer = maker.producer()
    producer.append([(gone, batch("lost")), (kept, batch("a"))])
    (make_anew if anew else delete)(maker, gone.topic)
    producer.commit()
    append_and_commit(producer, [(kept, batch("b"))])
    assert stable_values(log, kept) == ["a", "b"]
    if anew:
        place = TopicPartition(gone.topic, 0)
        fresh = maker.log()
        assert values(read_all(fresh, place, committed=False)[0]) == []
        write(fresh, maker, [(place, batch("new"))])
        assert committed_values(fresh, place) == ["new"]


def test_an_append_to_a_deleted_topic_raises_its_name(maker: Maker, log: Log) -> None:
    """Whoever had the topic in mind can't tell what became of it; whoever had not, knows that nothing happened."""
    gone, kept = *maker.topic(), *maker.topic()
    name = maker.new_id()
    delete(maker, gone.topic)
    producer = maker.producer(name)
    with pytest.raises(TopicGone) as caught:
        producer.append([(kept, batch("never")), (gone, batch("never"))])
    assert caught.value.topic == gone.topic
    producer.abort()
    append_and_commit(producer, [(kept, batch("a"))])
    assert stable_values(log, kept) == ["a"]


def test_an_append_to_a_topic_that_goes_away_meanwhile(maker: Maker, log: Log) -> None:
    gone, kept = *maker.topic(), *maker.topic()
    name = maker.new_id()
    producer = maker.producer(name)
    append_and_commit(producer, [(gone, batch("a")), (kept, batch("b"))])
    delete(maker, gone.topic)
    with pytest.raises((TopicGone, LogUncertain, LogUnavailable)) as caught:
        producer.append([(kept, batch("never")), (gone, batch("never"))])
    assert caught.value.topics == {gone.topic}
    again = maker.producer(name)
    append_and_commit(again, [(kept, batch("c"))])
    assert stable_values(log, kept) == ["b", "c"]
