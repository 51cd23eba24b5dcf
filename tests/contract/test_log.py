"""Promises of every make of the log: reading, topics, offsets."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from anabranch.ports import (
    Log,
    LogError,
    LogRefused,
    OffsetOutOfRange,
    TopicInfo,
    TopicPartition,
    TopicSpec,
)
from tests.contract.conftest import Maker
from tests.contract.helpers import (
    append_and_commit,
    batch,
    committed_values,
    delete,
    read_all,
    until,
    values,
    wait_stable,
    write,
)


def test_a_topic_is_created_once(maker: Maker, log: Log) -> None:
    (first, _) = maker.topic(2, retention_ms="-1")
    log.create_topics([TopicSpec(first.topic, 5, {"retention.ms": "1000"})])
    info = log.describe_topics([first.topic])[first.topic]
    assert info.partitions == 2
    assert info.config["retention.ms"] == "-1"


def test_a_topic_is_described_with_its_defaults(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic()
    (other,) = maker.topic()
    found = log.describe_topics([tp.topic, "contract.no-such-topic", other.topic])
    assert sorted(found) == sorted([tp.topic, other.topic])
    info = found[tp.topic]
    assert info.replication_factor == 1
    assert info.config["compression.type"] == "producer"
    assert info.config["cleanup.policy"] == "delete"
    # An hour since Kafka 4.0.
    assert info.config["message.timestamp.after.max.ms"] in ("3600000", str((1 << 63) - 1))
    assert info.topic_id
    assert info.topic_id != found[other.topic].topic_id


def test_no_topics_are_no_calls(log: Log) -> None:
    log.create_topics([])
    assert log.describe_topics([]) == {}
    assert log.fetch({}, max_wait=0, max_bytes=1, committed=True) == {}
    assert log.end_offsets([], committed=True) == {}


def test_a_wrong_setting_is_refused(log: Log, maker: Maker) -> None:
    if maker.name.startswith("memory"):
        pytest.skip("the memory log does not judge settings")
    with pytest.raises(LogRefused, match="retention") as caught:
        log.create_topics([TopicSpec("contract.wrong", 1, {"retention.ms": "soon"})])
    assert caught.value.error == 40


def test_an_empty_partition(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic()
    assert log.start_offsets([tp]) == {tp: 0}
    assert log.end_offsets([tp], committed=True) == {tp: 0}
    assert log.offsets_for_time([tp], 0) == {tp: None}
    assert log.fetch({tp: 0}, max_wait=0, max_bytes=1 << 20, committed=True) == {}


def test_a_position_outside_the_log_is_refused(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic()
    write(log, maker, [(tp, batch("a", "b"))])
    with pytest.raises(OffsetOutOfRange) as caught:
        log.fetch({tp: 17}, max_wait=0, max_bytes=1 << 20, committed=True)
    assert caught.value.partition == tp
    assert caught.value.position == 17
    log.delete_records({tp: 1})
    with pytest.raises(OffsetOutOfRange):
        log.fetch({tp: 0}, max_wait=0, max_bytes=1 << 20, committed=False)


def test_a_batch_that_spans_the_position_comes_whole(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic()
    write(log, maker, [(tp, batch("a", "b", "c")), (tp, batch("d"))])
    fetched = log.fetch({tp: 2}, max_wait=1, max_bytes=1 << 20, committed=True)[tp]
    assert [(b.base_offset, b.next_offset) for b in fetched.batches] == [(0, 3), (3, 4)]
    fetched = log.fetch({tp: 3}, max_wait=1, max_bytes=1 << 20, committed=True)[tp]
    assert [b.base_offset for b in fetched.batches] == [3]


def test_fetching_continues_after_what_it_passed(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic()
    write(log, maker, [(tp, batch("a"))])
    fetched = log.fetch({tp: 0}, max_wait=1, max_bytes=1 << 20, committed=True)[tp]
    # The marker is passed, now or with the next fetch.
    assert fetched.next_offset in (1, 2)
    assert fetched.log_start_offset == 0
    assert fetched.high_watermark >= fetched.last_stable_offset >= 1
    _, position = read_all(log, tp, committed=True)
    assert position == log.end_offsets([tp], committed=True)[tp] == 2


def test_a_small_limit_brings_one_batch_at_least(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic()
    big = batch(*("x" * 1000 for _ in range(20)))
    write(log, maker, [(tp, big), (tp, big), (tp, big)])
    fetched = log.fetch({tp: 0}, max_wait=1, max_bytes=100, committed=True)[tp]
    assert [b.base_offset for b in fetched.batches] == [0]
    assert len(values(read_all(log, tp, committed=True, max_bytes=100)[0])) == 60


def test_no_partition_starves(maker: Maker, log: Log) -> None:
    partitions = maker.topic(3)
    big = batch("x" * 5000)
    write(log, maker, [(tp, big) for tp in partitions for _ in range(3)])
    positions = dict.fromkeys(partitions, 0)
    seen: set[TopicPartition] = set()
    for _ in range(12):
        found = log.fetch(positions, max_wait=1, max_bytes=6000, committed=True)
        # Positions stay: a caller that asks for everything again must still see everything.
        seen.update(found)
    assert seen == set(partitions)


def test_waiting_ends_with_the_first_data(maker: Maker, log: Log) -> None:
    one, two = maker.topic(2)
    write(log, maker, [(two, batch("a"))])
    started = time.monotonic()
    found = log.fetch({one: 0, two: 0}, max_wait=20, max_bytes=1 << 20, committed=True)
    assert list(found) == [two]
    assert time.monotonic() - started < 10


def test_waiting_ends_at_its_limit(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic()
    started = time.monotonic()
    assert log.fetch({tp: 0}, max_wait=0.2, max_bytes=1 << 20, committed=True) == {}
    passed = time.monotonic() - started
    assert passed < 5
    if maker.name.startswith("kafka"):
        assert passed >= 0.15


def test_offsets_for_a_time(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic()
    t = maker.now_ms - 10_000_000
    write(log, maker, [(tp, batch("a", "b", "c", timestamps=(t, t + 10, t + 5)))])
    write(log, maker, [(tp, batch("d", timestamps=(t + 20,)))])
    assert log.offsets_for_time([tp], t - 5) == {tp: 0}
    assert log.offsets_for_time([tp], t) == {tp: 0}
    assert log.offsets_for_time([tp], t + 1) == {tp: 1}
    assert log.offsets_for_time([tp], t + 10) == {tp: 1}
    # A marker has a timestamp too, the time of its making.
    assert log.offsets_for_time([tp], t + 11) == {tp: 3}
    assert log.offsets_for_time([tp], maker.now_ms + 100_000_000) == {tp: None}


def test_deleting_records_moves_the_start(maker: Maker, log: Log) -> None:
    (tp,) = maker.topic()
    write(log, maker, [(tp, batch("a", "b")), (tp, batch("c", "d"))])
    log.delete_records({tp: 3})
    assert log.start_offsets([tp]) == {tp: 3}
    assert [v for v in values(read_all(log, tp, committed=True, start=3)[0]) if v >= "d"] == ["d"]
    log.delete_records({tp: 1})
    assert log.start_offsets([tp]) == {tp: 3}
    with pytest.raises(LogRefused) as caught:
        log.delete_records({tp: 999})
    assert caught.value.error == 1


def test_all_may_be_deleted(maker: Maker, log: Log) -> None:
    """As retention does with an unused partition: its offsets go on."""
    (tp,) = maker.topic()
    write(log, maker, [(tp, batch("a", "b"))])
    end = log.end_offsets([tp], committed=False)[tp]
    log.delete_records({tp: end})
    assert log.start_offsets([tp]) == log.end_offsets([tp], committed=True) == {tp: end}
    assert log.fetch({tp: end}, max_wait=0, max_bytes=1 << 20, committed=True) == {}
    with pytest.raises(OffsetOutOfRange):
        log.fetch({tp: end - 1}, max_wait=0, max_bytes=1 << 20, committed=True)
    assert log.offsets_for_time([tp], 0) == {tp: None}
    assert write(log, maker, [(tp, batch("c"))]) == [end]
    fetched = log.fetch({tp: end}, max_wait=1, max_bytes=1 << 20, committed=True)[tp]
    assert values(fetched.batches) == ["c"]
    assert fetched.log_start_offset == end


def test_half_a_batch_is_deleted(maker: Maker, log: Log) -> None:
    """The batch still comes whole; times are looked for in the rest."""
    (tp,) = maker.topic()
    t = maker.now_ms - 10_000_000
    write(log, maker, [(tp, batch("a", "b", "c", timestamps=(t, t + 10, t + 20)))])
    log.delete_records({tp: 1})
    fetched = log.fetch({tp: 1}, max_wait=1, max_bytes=1 << 20, committed=True)[tp]
    assert [(b.base_offset, b.next_offset) for b in fetched.batches] == [(0, 3)]
    assert fetched.log_start_offset == 1
    assert log.offsets_for_time([tp], t) == {tp: 1}


def test_what_is_open_may_be_deleted(maker: Maker, log: Log) -> None:
    """Retention ignores transactions: the rest of a native transaction is committed, or not."""
    (tp,) = maker.topic()
    kept, dropped = maker.producer(), maker.producer()
    kept.append([(tp, batch("a"))])
    dropped.append([(tp, batch("b"))])
    dropped.append([(tp, batch("c"))])
    kept.append([(tp, batch("d"))])
    log.delete_records({tp: 2})
    assert log.start_offsets([tp]) == {tp: 2}
    assert log.end_offsets([tp], committed=True) == {tp: 2}
    assert log.fetch({tp: 2}, max_wait=0, max_bytes=1 << 20, committed=True) == {}
    dropped.abort()
    kept.commit()
    wait_stable(log, {tp})
    assert values(read_all(log, tp, committed=True, start=2)[0]) == ["d"]


def test_an_unknown_topic_is_refused(log: Log) -> None:
    missing = TopicPartition("contract.no-such-topic", 0)
    for call in (
        partial(log.end_offsets, [missing], committed=False),
        partial(log.add_partitions, missing.topic, 2),
    ):
        with pytest.raises(LogRefused) as caught:
            call()
        assert caught.value.error == 3
    assert log.describe_topics([missing.topic]) == {}


def test_partitions_that_fail_are_given_with_the_offsets_of_the_others(
    maker: Maker, log: Log
) -> None:
    (tp,) = maker.topic()
    write(log, maker, [(tp, batch("a"))])
    missing = TopicPartition("contract.no-such-topic", 0)
    failed: dict[TopicPartition, LogError] = {}
    assert log.start_offsets([tp, missing], failed=failed) == {tp: 0}
    assert failed.pop(missing).topics == {missing.topic}
    assert log.end_offsets([tp, missing], committed=False, failed=failed) == {tp: 2}
    assert failed.pop(missing).topics == {missing.topic}
    assert not failed


def test_whether_a_topic_is_gone(maker: Maker, log: Log) -> None:
    topic = maker.topic(2)[0].topic
    known = log.describe_topics([topic])[topic].topic_id
    assert not log.is_gone(topic, 2, known)
    assert not log.is_gone(topic, 1, "")
    assert log.is_gone(topic, 2, "f" * 32)
    assert log.is_gone(topic, 3, known)
    assert log.is_gone("contract.no-such-topic", 1, known)
    assert log.is_known(topic)
    assert not log.is_known("contract.no-such-topic")
    assert log.is_agreed(topic, known)
    assert not log.is_agreed(topic, "f" * 32)
    assert not log.is_agreed("contract.no-such-topic", known)


def test_topics_settings_are_altered_or_not_at_all(maker: Maker, log: Log) -> None:
    one, other = maker.topic()[0].topic, maker.topic(max_message_bytes="2000000")[0].topic

    def values(name: str) -> list[str]:
        infos = log.describe_topics([one, other])
        return [infos[topic].config[name] for topic in (one, other)]

    def become(name: str, wanted: list[str]) -> None:
        until(lambda: values(name) == wanted, lambda: values(name))

    default = values("max.message.bytes")[0]
    for _ in range(2):
        log.alter_topics({one: {"retention.ms": "7"}, other: {"max.message.bytes": None}})
        become("retention.ms", ["7", "-1"])
        become("max.message.bytes", [default, default])
    with pytest.raises(LogRefused):
        log.alter_topics(
            {one: {"retention.ms": "8"}, "contract.no-such-topic": {"segment.ms": "9"}}
        )
    become("retention.ms", ["7", "-1"])
    log.alter_topics({})


def test_a_topic_grows(maker: Maker, log: Log) -> None:
    (old,) = maker.topic(1, max_message_bytes="2000000")
    new = [TopicPartition(old.topic, number) for number in (1, 2)]
    others = maker.log()
    # They know the topic from before.
    assert others.end_offsets([old], committed=True) == {old: 0}
    writer = maker.producer()
    append_and_commit(writer, [(old, batch("a"))])
    log.add_partitions(old.topic, 3)
    info = log.describe_topics([old.topic])[old.topic]
    assert info.partitions == 3
    assert info.config["max.message.bytes"] == "2000000"
    assert writer.append([(new[0], batch("b")), (old, batch("c"))])[0] == 0
    writer.commit()
    assert others.fetch({new[1]: 0}, max_wait=0, max_bytes=1 << 20, committed=True) == {}
    wait_stable(others, {old, *new})
    assert committed_values(others, new[0]) == ["b"]
    assert committed_values(log, old) == ["a", "c"]
    assert log.end_offsets(new, committed=True)[new[1]] == 0


def test_a_topic_never_shrinks(maker: Maker, log: Log) -> None:
    topic = maker.topic(3)[0].topic
    write(log, maker, [(TopicPartition(topic, 2), batch("a"))])
    for partitions in (3, 2, 0):
        log.add_partitions(topic, partitions)
        assert log.describe_topics([topic])[topic].partitions == 3
    assert committed_values(log, TopicPartition(topic, 2)) == ["a"]


def test_a_deleted_topic_is_gone_and_one_made_anew_is_left(maker: Maker, log: Log) -> None:
    place = maker.topic()[0]
    topic = place.topic
    write(log, maker, [(place, batch("old"))])
    old = log.describe_topics([topic])[topic]
    delete(log, topic)
    log.create_topics([TopicSpec(topic, 1, {"retention.ms": "-1"})])
    write(log, maker, [(place, batch("new"))])
    log.delete_topics([old])  # by its id: it is not there, and that is fine
    assert log.describe_topics([topic])[topic].topic_id not in ("", old.topic_id)
    assert committed_values(log, place) == ["new"]
    log.delete_topics([TopicInfo("contract.no-such-topic", 1, 1, {}, old.topic_id)])


def test_many_grow_a_topic_at_once(maker: Maker, log: Log) -> None:
    topic = maker.topic()[0].topic
    with ThreadPoolExecutor(6) as pool:
        wanted = (2, 4, 3, 4, 2, 4)
        for partitions, done in [
            (n, pool.submit(maker.log().add_partitions, topic, n)) for n in wanted
        ]:
            done.result()
            assert log.describe_topics([topic])[topic].partitions >= partitions
    assert log.describe_topics([topic])[topic].partitions == 4
    last = TopicPartition(topic, 3)
    write(log, maker, [(last, batch("a"))])
    assert committed_values(log, last) == ["a"]
