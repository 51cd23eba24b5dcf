"""The idempotent producer on a real broker: everything once and in order, whatever connections and leaders do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator

import pytest
from confluent_kafka.admin import AdminClient

from anabranch.batches.builder import BatchBuilder
from anabranch.batches.format import Packed, read_header
from anabranch.infra.broker import EmbeddedBroker
from anabranch.kafka import data
from anabranch.kafka.calls import INIT_PRODUCER_ID, PRODUCE
from anabranch.kafka.cluster import Cluster, Leader
from anabranch.kafka.idempotent_producer import JournalProducer
from anabranch.kafka.log import KafkaLog
from anabranch.kafka.settings import parse_settings
from anabranch.ports import (
    LogError,
    LogRefused,
    LogUnavailable,
    LogUncertain,
    TopicPartition,
    TopicSpec,
)
from tests.conftest import Broker
from tests.contract.conftest import Maker, deleter
from tests.contract.helpers import answers, read_all, values
from tests.contract.proxy import Proxy
from tests.waiting import wait_until

pytestmark = pytest.mark.broker


class Bench:
    """A producer, and a log to see what it stored."""

    def __init__(self, bootstrap: str, answer_s: float = 3.0, request_bytes: int = 8 << 20) -> None:
        given = {
            "request.timeout.ms": round(answer_s * 1000),
            "anabranch.max.request.bytes": request_bytes,
        }
        self.bootstrap = bootstrap
        self.cluster = Cluster(parse_settings(bootstrap, given))
        self.maker = Maker(
            "kafka", lambda: KafkaLog(bootstrap), int(time.time() * 1000), deleter(bootstrap)
        )
        self.producer = JournalProducer(self.cluster, soon())
        self._made = 0

    def topic(self, partitions: int = 1, **config: str) -> list[TopicPartition]:
        return self.maker.topic(partitions, **config)

    def append(self, partition: TopicPartition, *texts: str) -> None:
        self.producer.append(partition, packed(*texts), soon())

    def flush(self) -> None:
        self.producer.flush(soon())

    def stored(self, partition: TopicPartition) -> list[str]:
        return values(read_all(self.maker.log(), partition, committed=False)[0])

    def close(self) -> None:
        self.producer.close()
        self.cluster.close()
        self.maker.close()


def soon() -> float:
    return time.monotonic() + 30


def packed(*texts: str) -> Packed:
    """A batch of these values, not framed yet."""
    builder = BatchBuilder()
    for text in texts:
        builder.add(b"k", text.encode(), (), int(time.time() * 1000))
    batch = builder.build()
    header = read_header(batch)
    records = batch[61:]
    return Packed(records, 0, len(texts), header.base_timestamp, header.max_timestamp)


@pytest.fixture
def bench(broker: Broker) -> Iterator[Bench]:
    made = Bench(broker.bootstrap)
    yield made
    made.close()


def write_some(bench: Bench, partitions: list[TopicPartition], batches: int = 6) -> list[str]:
    """Batches for each partition, in turn; the expected records in each."""
    texts = [f"{i}{half}" for i in range(batches) for half in "ab"]
    for i in range(batches):
        for partition in partitions:
            bench.append(partition, f"{i}a", f"{i}b")
    return texts


# -- the usual ------------------------------------------------------------------------------------------


def test_everything_is_stored_in_order_by_one_producer_id(bench: Bench) -> None:
    partitions = bench.topic(3)
    texts = write_some(bench, partitions)
    bench.flush()
    assert bench.producer.waiting == 0
    for partition in partitions:
        assert bench.stored(partition) == texts
        batches, _ = read_all(bench.maker.log(), partition, committed=True)
        headers = [read_header(batch.data) for batch in batches]
        assert {header.producer_id for header in headers} == {bench.producer.producer_id}
        assert [header.base_sequence for header in headers] == [0, 2, 4, 6, 8, 10]
        assert not any(header.is_transactional for header in headers)
    bench.flush()  # nothing to wait for


def test_a_request_has_its_limit(broker: Broker, proxy: Proxy) -> None:
    bench = Bench(broker.bootstrap, request_bytes=1000)
    partitions = bench.topic(5)
    for partition in partitions:
        bench.append(partition, "x" * 600)
    bench.flush()
    assert [bench.stored(partition) for partition in partitions] == [["x" * 600]] * 5
    assert proxy.faults.seen.count(PRODUCE.key) == 5
    bench.close()


def test_one_request_is_under_way_and_the_next_gathers(bench: Bench, proxy: Proxy) -> None:
    partitions = bench.topic(4)
    proxy.faults.lose_request.add(PRODUCE.key)  # the first
    for partition in partitions:
        bench.append(partition, "a")
    (link,) = bench.producer._pipeline.links.values()
    (under_way,) = link.in_flight
    assert (list(under_way.batches), list(link.next.batches)) == (partitions[:1], partitions[1:])
    bench.flush()
    assert [bench.stored(partition) for partition in partitions] == [["a"]] * 4
    assert (
        proxy.faults.seen.count(PRODUCE.key) == 3
    )  # the lost one again, and the other three at once


@pytest.mark.soak
def test_older_brokers_are_spoken_to_in_their_versions(
    broker: Broker, lowest_versions: set[tuple[int, int]]
) -> None:
    bench = Bench(broker.bootstrap)
    (partition,) = bench.topic()
    texts = write_some(bench, [partition])
    bench.flush()
    assert bench.stored(partition) == texts
    assert {(PRODUCE.key, 7), (INIT_PRODUCER_ID.key, 0)} <= lowest_versions
    bench.close()


# -- connections ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["lose_answer", "close_before", "lose_request"])
def test_what_is_lost_is_sent_again_and_stored_once(bench: Bench, proxy: Proxy, way: str) -> None:
    one, two, three = bench.topic(3)
    bench.append(one, "0a", "0b")
    bench.flush()
    getattr(proxy.faults, way).add(PRODUCE.key)
    texts = write_some(bench, [two, three, one])
    bench.flush()
    assert not getattr(proxy.faults, way)
    assert bench.stored(one) == ["0a", "0b", *texts]
    assert bench.stored(two) == bench.stored(three) == texts


@pytest.mark.soak
def test_connections_that_the_broker_closed_do_no_harm(bench: Bench, proxy: Proxy) -> None:
    partitions = bench.topic(2)
    for i in range(3):
        for partition in partitions:
            bench.append(partition, str(i))
        proxy.cut_all()
        bench.flush()
        proxy.cut_all()
    for partition in partitions:
        assert bench.stored(partition) == ["0", "1", "2"]


@pytest.mark.parametrize("way", ["lose_answer", "close_before"])
def test_initialising_is_tried_again(broker: Broker, proxy: Proxy, way: str) -> None:
    getattr(proxy.faults, way).add(INIT_PRODUCER_ID.key)
    bench = Bench(broker.bootstrap)
    assert proxy.faults.seen.count(INIT_PRODUCER_ID.key) == 2
    assert bench.producer.producer_id >= 0
    bench.close()


@pytest.mark.soak
def test_without_a_broker_there_is_no_producer() -> None:
    cluster = Cluster(parse_settings("127.0.0.1:1", {}))
    with pytest.raises(LogUnavailable):
        JournalProducer(cluster, time.monotonic() + 0.3)


def test_another_thread_can_end_it(broker: Broker, proxy: Proxy) -> None:
    bench = Bench(broker.bootstrap, answer_s=60)
    (partition,) = bench.topic()
    proxy.faults.lose_request.add(PRODUCE.key)
    bench.append(partition, "never")
    found: list[LogError] = []

    def flush() -> None:
        try:
            bench.producer.flush(time.monotonic() + 60)
        except LogError as error:
            found.append(error)

    def is_busy() -> bool:
        is_free = bench.producer._busy.acquire(blocking=False)
        if is_free:
            bench.producer._busy.release()
        return not is_free

    thread = threading.Thread(target=flush)
    thread.start()
    wait_until(is_busy, pause=0.001)
    bench.producer.interrupt("enough")
    thread.join(30)
    assert not thread.is_alive()
    assert "enough" in str(found[0])
    assert bench.stored(partition) == []
    bench.close()


@pytest.mark.soak
def test_a_broker_that_comes_back_has_everything_once() -> None:
    with EmbeddedBroker(quick_start=True) as broker:
        bench = Bench(broker.bootstrap, answer_s=10)
        partitions = bench.topic(2)
        texts = []
        for i in range(200):
            if i == 100:
                broker.kill()
                threading.Thread(target=broker.start).start()
            for partition in partitions:
                bench.producer.append(partition, packed(f"{i}"), time.monotonic() + 60)
            texts.append(str(i))
        bench.flush()
        for partition in partitions:
            assert bench.stored(partition) == texts
        bench.close()
        broker.kill()


# -- answers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "only"),
    [
        (3, -1),
        (5, 1),
        (6, -1),
        (6, 1),
        (7, 1),
        (13, 1),
        (19, -1),
        (20, 1),
        (46, -1),
        (56, 1),
        (74, 1),
        (100, 1),
    ],
)
def test_what_may_pass_is_sent_again_and_stored_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, code: int, only: int
) -> None:
    partitions = bench.topic(3)
    left = answers(monkeypatch, code, 3, only)
    texts = write_some(bench, partitions)
    bench.flush()
    assert left == [0]
    for partition in partitions:
        assert bench.stored(partition) == texts


def test_batches_keep_their_order_when_leaders_move(
    bench: Bench, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes, of which each look at the metadata shows another one as the leader; both are this broker.

    The first request, to one of them, is lost, while the other one says that it is not the leader.
    """
    partitions = [one for one in bench.topic(4) if one.partition != 2]
    bench.cluster.leaders(partitions, soon())
    (address,) = bench.cluster._brokers.values()
    moves = [0]

    def forget(_: object) -> None:
        moves[0] += 1

    def leaders(wanted: Iterable[TopicPartition], _: float) -> dict[TopicPartition, Leader]:
        return {one: Leader((one.partition + moves[0]) % 2, 0) for one in wanted}

    monkeypatch.setattr(bench.cluster, "forget", forget)
    monkeypatch.setattr(bench.cluster, "leaders", leaders)
    monkeypatch.setattr(bench.cluster, "address", lambda _: address)
    left = answers(monkeypatch, 6, 13)
    proxy.faults.lose_request.add(PRODUCE.key)
    texts = write_some(bench, partitions, batches=30)
    bench.flush()
    assert left == [0]
    assert not proxy.faults.lose_request
    for partition in partitions:
        assert bench.stored(partition) == texts
    assert bench.producer._homes == {one: (one.partition + moves[0]) % 2 for one in partitions}


@pytest.mark.parametrize("code", [2, 10, 18, 29, 32, 45, 47, 59, 87, 9999, -1])
def test_anything_else_ends_it_for_good(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (partition,) = bench.topic()
    answers(monkeypatch, code, 1)
    bench.append(partition, "a")
    with pytest.raises(LogError, match=rf"\({code}\)"):
        bench.flush()
    assert bench.producer.failure is not None
    for use in (bench.flush, lambda: bench.append(partition, "b")):
        with pytest.raises(LogError, match=rf"\({code}\)"):
            use()
    assert bench.stored(partition) == ["a"]


def test_the_broker_itself_refuses_what_is_too_large(bench: Bench) -> None:
    (partition,) = bench.topic(max_message_bytes="1000")
    bench.append(partition, "x" * 2000)
    with pytest.raises(LogRefused, match="MESSAGE_TOO_LARGE"):
        bench.flush()


@pytest.mark.soak
def test_waiting_ends_at_the_deadline(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    (partition,) = bench.topic()
    bench.append(partition, "first")  # a busy machine takes its time over the first request
    bench.flush()
    answers(monkeypatch, 19, 1_000_000)
    bench.append(partition, "a")
    started = time.monotonic()
    with pytest.raises(LogUncertain, match=r"before the deadline.*NOT_ENOUGH_REPLICAS"):
        bench.producer.flush(started + 3.0)
    assert time.monotonic() - started < 20


def test_a_partition_that_does_not_exist_is_refused(bench: Bench) -> None:
    (partition,) = bench.topic()
    with pytest.raises(LogRefused, match="does not exist"):
        bench.append(partition._replace(partition=1), "a")
    with pytest.raises(LogUncertain, match="does not exist"):
        bench.append(partition, "a")


@pytest.mark.parametrize("whose", ["one writer", "the next writer"])
def test_a_topic_that_is_made_anew_is_another_one(bench: Bench, whose: str) -> None:
    """Its partitions would take later batches of a writer, and never have the earlier ones."""
    (partition,) = bench.topic()
    bench.append(partition, "a")
    bench.flush()
    admin = AdminClient({"bootstrap.servers": bench.bootstrap})
    admin.delete_topics([partition.topic])[partition.topic].result(30)
    log = bench.maker.log()
    log.create_topics([TopicSpec(partition.topic, 1, {})])
    if whose == "the next writer":
        bench.producer.forget()
        bench.append(partition, "b")
        bench.flush()
        assert bench.stored(partition) == ["b"]
        return
    bench.append(partition, "b")
    with pytest.raises(LogUncertain, match="created again"):
        bench.flush()
    # Up to Kafka 4.0 a batch names its topic by name, and is stored before the offset tells.
    assert bench.stored(partition) in ([], ["b"])


def test_an_interrupted_call_ends_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    (partition,) = bench.topic()

    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    bench.append(partition, "a")
    monkeypatch.setattr(data, "produce_answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.flush()
    with pytest.raises(LogUncertain, match="interrupted"):
        bench.flush()
