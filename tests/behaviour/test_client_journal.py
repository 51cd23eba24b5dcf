"""Journal writers on a real broker: what `flush` promises, and that every failure is told."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    NewTopic,
)

from anabranch import errors
from anabranch.client.receipts import RECORD_OVERHEAD, WriterAccount
from anabranch.clock import SystemClock
from anabranch.infra.broker import EmbeddedBroker
from anabranch.librdkafka.admin import KafkaAdmin
from anabranch.librdkafka.journal_writer import KafkaJournal, KafkaJournals
from anabranch.librdkafka.options import Options
from anabranch.ports import TopicPartition as Place
from anabranch.protocol.partitioner import even_ranges
from anabranch.protocol.schemas.records import SegmentRange, Touched
from anabranch.topics.names import journal_topic
from anabranch.topics.rights import TOPIC, Right
from tests import secured
from tests.behaviour.steps import alter_topics
from tests.conftest import Broker

pytestmark = pytest.mark.broker

HEADERS = [("ab.txn", bytes(28))]
Row = tuple[int, bytes, bytes, list[tuple[str, bytes]], int]


class Journals:
    """Journals of a broker, and the topics to write to."""

    def __init__(self, bootstrap: str, timeout: float = 30.0) -> None:
        self.bootstrap = bootstrap
        options = Options(bootstrap, {"log_level": 0})
        self.admin = KafkaAdmin(options, SystemClock())
        self.pool = KafkaJournals(options, self.admin, SystemClock(), timeout)

    def topic(self, name: str, **config: str) -> str:
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        for future in admin.create_topics([NewTopic(name, 2, 1, config=config)]).values():
            future.result(30)
        operations = "Write", "DescribeConfigs"
        secured.grant(
            self.bootstrap,
            secured.CLIENT,
            [Right(TOPIC, name, one, "a writer's") for one in operations],
        )
        return name

    def opened(self, topic: str) -> KafkaJournal:
        journal = self.pool.writer()
        journal.open(topic, [0, 1], time.monotonic() + 30)
        return journal

    def wait_until_refused(self, topic: str, size: int) -> None:
        """Until values of so many bytes are too large for partition 1."""
        refused: list[KafkaError] = []
        producer = Producer({"bootstrap.servers": self.bootstrap})
        deadline = time.monotonic() + 30
        while not refused:
            assert time.monotonic() < deadline
            producer.produce(
                topic,
                os.urandom(size),
                partition=1,
                on_delivery=lambda error, _: refused.append(error) if error else None,
            )
            assert producer.flush(30) == 0
        assert refused[0].code() == KafkaError.MSG_SIZE_TOO_LARGE

    def stored(self, topic: str) -> list[bytes]:
        """All values, partition by partition."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": "unused",
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_uncommitted",
            }
        )
        found: list[bytes] = []
        try:
            consumer.assign([TopicPartition(topic, p, 0) for p in (0, 1)])
            open_ends = {0, 1}
            deadline = time.monotonic() + 30
            while open_ends and time.monotonic() < deadline:
                message = consumer.poll(1.0)
                if message is None:
                    continue
                error = message.error()
                if error is not None:
                    assert error.code() == KafkaError._PARTITION_EOF
                    open_ends.discard(message.partition())
                else:
                    found.append(message.value() or b"")
        finally:
            consumer.close()
        return found


@pytest.fixture
def journals(broker: Broker) -> Iterator[Journals]:
    made = Journals(broker.bootstrap)
    yield made
    made.pool.close()


def soon() -> float:
    return time.monotonic() + 30


def test_all_is_there_after_flush(journals: Journals, unique: str) -> None:
    topic = journals.topic(f"j.{unique}")
    journal = journals.opened(topic)
    values = [b"%06d" % i for i in range(50_000)]
    for i, value in enumerate(values):
        journal.write(topic, i & 1, b"k", value, HEADERS, 0)
    ends = journal.flush({Place(topic, 0): 0, Place(topic, 1): 0}, soon())
    assert ends == {Place(topic, 0): 25_000, Place(topic, 1): 25_000}
    assert journals.stored(topic) == values[::2] + values[1::2]


@pytest.mark.long
def test_bounds_hold_with_other_writers(journals: Journals, unique: str) -> None:
    topic = journals.topic(f"j.{unique}")
    first, second = journals.pool.writer(), journals.pool.writer()
    assert first.open(topic, [0], soon()).first == {0: 0}
    first.write(topic, 0, None, b"1", HEADERS, 0)
    assert first.flush({Place(topic, 0): 0}, soon()) == {Place(topic, 0): 1}
    assert second.open(topic, [0], soon()).first == {0: 1}
    second.write(topic, 0, None, b"2", HEADERS, 0)
    first.write(topic, 0, None, b"3", HEADERS, 0)
    assert second.flush({Place(topic, 0): 0}, soon())[Place(topic, 0)] >= 2
    assert first.flush({Place(topic, 0): 0}, soon())[Place(topic, 0)] == 3


def test_producers_are_used_again(journals: Journals, unique: str) -> None:
    topic = journals.topic(f"j.{unique}")
    producers = set()
    for _ in range(5):
        journal = journals.opened(topic)
        producers.add(id(journal._by_topic[topic].producer))
        journal.write(topic, 0, None, b"v", HEADERS, 0)
        journal.flush({}, soon())
        journal.discard()
        with pytest.raises(errors.WriteFailed):
            journal.flush({}, soon())
    assert len(producers) == 1
    assert len(journals.stored(topic)) == 5


def test_a_batch_that_the_broker_refuses_is_a_failure(journals: Journals, unique: str) -> None:
    topic = journals.topic(f"j.{unique}")
    journal = journals.opened(topic)
    alter_topics(journals.bootstrap, [topic], "max.message.bytes", "2000")
    journals.wait_until_refused(topic, 10_000)
    journal.write(topic, 0, None, b"small", HEADERS, 0)
    journal.write(topic, 1, None, os.urandom(10_000), HEADERS, 0)
    for _ in range(2):  # for ever
        with pytest.raises(errors.WriteFailed, match="too large"):
            journal.flush({}, soon())
    journal.discard()
    again = journals.opened(topic)  # a failed producer is not used again
    again.write(topic, 0, None, b"small", HEADERS, 0)
    again.flush({}, soon())


def test_the_largest_event_fits_a_small_topic(journals: Journals, unique: str) -> None:
    """Events that no codec packs, up to the last byte that is let through."""
    limit = 5000
    stream = f"s{unique}/small"
    journals.topic(journal_topic(stream), **{"max.message.bytes": str(limit)})
    account = WriterAccount(bytes(16), 7, journals.pool.writer())
    ranges = enumerate(even_ranges(2))
    segments = tuple(SegmentRange(n, low, high, n) for n, (low, high) in ranges)
    lane = account.add(Touched(stream, 0, segments), soon())
    room = limit - RECORD_OVERHEAD
    for i in range(1000):
        lane.write(b"%04d" % i, os.urandom(i), None, None)
    lane.write(b"most", os.urandom(room - 4), None, 1)
    with pytest.raises(errors.EventTooLarge):
        lane.write(b"more", os.urandom(room - 3), None, None)
    account.flush(soon())
    receipt = account.receipt(finished=True, seen=0)
    assert sum(extent.count for extent in receipt.extents) == 1001
    assert len(journals.stored(journal_topic(stream))) == 1001


def fatally(journal: KafkaJournal, topic: str) -> str:
    fatal = KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, "gap", True)
    journal._by_topic[topic]._on_error(fatal)
    return "gap"


def by_a_failure(journal: KafkaJournal, topic: str) -> str:
    journal._by_topic[topic].fail("something")
    return "something"


def by_its_owner(journal: KafkaJournal, topic: str) -> str:
    journal.discard()
    return "discard"


@pytest.mark.parametrize("end", [fatally, by_a_failure, by_its_owner])
def test_a_writer_that_is_ended_says_so_at_each_call(
    journals: Journals, unique: str, end: Callable[[KafkaJournal, str], str]
) -> None:
    topic = journals.topic(f"j.{unique}")
    journal = journals.opened(topic)
    why = end(journal, topic)

    def write_some() -> None:
        for _ in range(2000):  # it need not be the first
            journal.write(topic, 0, None, b"v", HEADERS, 0)

    with pytest.raises(errors.WriteFailed, match=why):
        write_some()
    with pytest.raises(errors.WriteFailed, match=why):
        journal.write_many(topic, [(0, None, b"v", HEADERS, 0)])
    with pytest.raises(errors.WriteFailed):
        journal.flush({}, soon())


@pytest.fixture(scope="module")
def unlucky_broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(quick_start=True) as broker:
        yield broker
        if broker.running:
            broker.kill()


@pytest.fixture
def own_broker(unlucky_broker: EmbeddedBroker) -> EmbeddedBroker:
    """A broker that runs, and may be paused or killed."""
    if unlucky_broker.running:
        unlucky_broker.resume()
    else:
        unlucky_broker.start()
    return unlucky_broker


@pytest.mark.long
@pytest.mark.parametrize("many", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_full_queue_only_slows_down(journals: Journals, unique: str, many: bool) -> None:
    options = Options(journals.bootstrap, {"queue.buffering.max.messages": 100})
    pool = KafkaJournals(options, journals.admin, SystemClock(), 30)
    topic = journals.topic(f"j.{unique}")
    journal = pool.writer()
    journal.open(topic, [0, 1], soon())
    rows: list[Row] = [(i & 1, b"k", b"%06d" % i, HEADERS, 0) for i in range(5000)]
    if many:
        for i in range(0, 5000, 1000):
            journal.write_many(topic, iter(rows[i : i + 1000]))
    else:
        for row in rows:
            journal.write(topic, *row)
    ends = journal.flush({Place(topic, 0): 0, Place(topic, 1): 0}, soon())
    assert ends == {Place(topic, 0): 2500, Place(topic, 1): 2500}
    values = [row[2] for row in rows]
    assert journals.stored(topic) == values[::2] + values[1::2]
    pool.close()


def test_a_producer_is_ready_before_its_topic_is_known(journals: Journals, unique: str) -> None:
    topic = journals.topic(f"j.{unique}")
    journal, *_others = [journals.pool.writer() for _ in range(10)]
    (ready,) = journals.pool._spare  # one, however many writers
    journal.open(topic, [0, 1], soon())
    assert journal._by_topic[topic] is ready
    journal.write(topic, 0, None, b"v", HEADERS, 0)
    assert journal.flush({Place(topic, 0): 0}, soon()) == {Place(topic, 0): 1}


@pytest.mark.soak
def test_a_ready_producer_that_does_not_fit_is_not_used(journals: Journals, unique: str) -> None:
    small = journals.topic(f"j.small-{unique}", **{"max.message.bytes": "5000"})
    usual = journals.topic(f"j.usual-{unique}")
    journal = journals.pool.writer()
    journals.pool._spare[0].fail("something")
    for topic in (small, usual):
        journal.open(topic, [0, 1], soon())
        journal.write(topic, 0, None, b"v", HEADERS, 0)
    journal.flush({}, soon())
    assert journals.pool._spare == []
    assert journal._by_topic[small].max_bytes == 5000
    assert journal._by_topic[usual].failure is None


@pytest.mark.soak
def test_no_answer_is_a_failure_for_ever(own_broker: EmbeddedBroker, unique: str) -> None:
    journals = Journals(own_broker.bootstrap)
    topic = journals.topic(f"j.{unique}")
    journal = journals.opened(topic)
    journal.write(topic, 0, None, b"1", HEADERS, 0)
    journal.flush({}, soon())
    own_broker.pause()
    journal.write(topic, 0, None, b"2", HEADERS, 0)
    started = time.monotonic()
    with pytest.raises(errors.WriteFailed, match="not acknowledged"):
        journal.flush({}, started + 1)
    assert 0.9 < time.monotonic() - started < 15
    own_broker.resume()
    with pytest.raises(errors.WriteFailed):
        journal.flush({}, soon())
    started = time.monotonic()
    journal.discard()
    journals.pool.close()
    assert time.monotonic() - started < 15


@pytest.mark.soak
def test_a_broker_that_comes_back_has_everything_once(
    own_broker: EmbeddedBroker, unique: str
) -> None:
    journals = Journals(own_broker.bootstrap)
    topic = journals.topic(f"j.{unique}")
    journal = journals.opened(topic)
    values = [b"%06d" % i for i in range(30_000)]
    for i, value in enumerate(values):
        if i == 15_000:
            time.sleep(0.06)  # batches are on their way
            own_broker.kill()
            own_broker.start()
        journal.write(topic, i & 1, b"k", value, HEADERS, 0)
    journal.flush({Place(topic, 0): 0}, time.monotonic() + 60)
    assert journals.stored(topic) == values[::2] + values[1::2]
    journals.pool.close()


@pytest.mark.soak
def test_a_dead_broker_does_not_hold_up_the_end(own_broker: EmbeddedBroker, unique: str) -> None:
    """Neither of one writer nor of all. (The last test: the broker stays dead.)"""
    both = [Journals(own_broker.bootstrap) for _ in range(2)]
    topic = both[0].topic(f"j.{unique}")
    discarded, closed = (journals.opened(topic) for journals in both)
    own_broker.kill()
    for journal in (discarded, closed):
        for i in range(1000):
            journal.write(topic, i & 1, None, b"v", HEADERS, 0)
    for end in (discarded.discard, both[1].pool.close):
        started = time.monotonic()
        end()
        assert time.monotonic() - started < 15
