"""A real broker's log and producer while connections fail. (The simulator does it to the memory log.)"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from anabranch.kafka import calls, data, transactional_producer
from anabranch.kafka import connection as wire
from anabranch.kafka.calls import (
    ADD_PARTITIONS_TO_TXN,
    CREATE_PARTITIONS,
    END_TXN,
    FETCH,
    FIND_COORDINATOR,
    INIT_PRODUCER_ID,
    LIST_OFFSETS,
    METADATA,
    PRODUCE,
    Api,
)
from anabranch.kafka.log import KafkaLog
from anabranch.kafka.lost_markers import Open
from anabranch.kafka.needs import look_at
from anabranch.ports import (
    LogBusy,
    LogError,
    LogFenced,
    LogRefused,
    LogUnavailable,
    LogUncertain,
    Producer,
    TopicPartition,
)
from tests.contract.conftest import Maker, deleter
from tests.contract.helpers import (
    answers,
    append_and_commit,
    batch,
    committed_values,
    stable_values,
    until,
    wait_stable,
    write,
)
from tests.contract.proxy import Proxy

pytestmark = pytest.mark.broker


@pytest.fixture(params=["kafka-v2", pytest.param("kafka-v0", marks=pytest.mark.soak)])
def maker(request: pytest.FixtureRequest) -> Iterator[Maker]:
    """Brokers only, with little patience."""
    fixture = "broker" if request.param == "kafka-v2" else "broker_tv0"
    bootstrap = request.getfixturevalue(fixture).bootstrap
    options = {"request.timeout.ms": 3000, "socket.connection.setup.timeout.ms": 3000}
    now_ms = int(time.time() * 1000)
    made = Maker(
        request.param,
        lambda: KafkaLog(bootstrap, options, in_sessions=True),
        now_ms,
        deleter(bootstrap),
    )
    yield made
    made.close()


def by_kip_890(producer: Producer) -> bool:
    """Whether an abort begins a new epoch."""
    return bool(getattr(producer, "is_v2"))  # noqa: B009 the Kafka port's own


@pytest.mark.parametrize(
    ("way", "happened"), [("lose_answer", True), ("lose_request", False), ("close_before", False)]
)
def test_a_commit_that_is_lost_is_uncertain(
    maker: Maker, proxy: Proxy, way: str, happened: bool
) -> None:
    (tp,) = maker.topic()
    name = maker.new_id()
    producer = maker.producer(name)
    producer.append([(tp, batch("a"))])
    getattr(proxy.faults, way).add(END_TXN.key)
    append = partial(producer.append, [(tp, batch("b"))])
    for use in (producer.commit, producer.commit, producer.abort, append):
        with pytest.raises(LogUncertain):
            use()
    again = maker.producer(name)
    append_and_commit(again, [(tp, batch("c"))])
    assert stable_values(maker.log(), tp) == (["a", "c"] if happened else ["c"])


@pytest.mark.parametrize("way", ["lose_request", "lose_answer", "close_before"])
@pytest.mark.parametrize("first", [False, True], ids=["in the middle", "at first"])
def test_an_append_that_is_lost(maker: Maker, proxy: Proxy, way: str, first: bool) -> None:
    """It may have arrived. With KIP-890 an abort makes that harmless, and the producer goes on."""
    one, two = maker.topic(2)
    name = maker.new_id()
    producer = maker.producer(name)
    if not first:
        producer.append([(one, batch("a"))])
    getattr(proxy.faults, way).add(PRODUCE.key)
    lost, over = (
        (LogUnavailable, LogRefused) if by_kip_890(producer) else (LogUncertain, LogUncertain)
    )
    with pytest.raises(lost) as caught:
        producer.append([(one, batch("b")), (two, batch("c")), (one, batch("d"))])
    assert caught.value.topics == {one.topic}
    for use in (producer.commit, lambda: producer.append([(one, batch("x"))])):
        with pytest.raises(over):
            use()
    if by_kip_890(producer):
        producer.abort()
    else:
        with pytest.raises(LogUncertain):
            producer.abort()
        producer = maker.producer(name)
    append_and_commit(producer, [(two, batch("e"))])
    assert stable_values(maker.log(), one) == []
    assert stable_values(maker.log(), two) == ["e"]


@pytest.mark.soak
def test_no_append_of_an_ended_producer_arrives_later(maker: Maker, proxy: Proxy) -> None:
    (tp,) = maker.topic()
    name = maker.new_id()
    producer = maker.producer(name)

    def many() -> Iterator[tuple[TopicPartition, bytes]]:
        for number in range(8):
            if number == 4:
                proxy.faults.lose_request.add(PRODUCE.key)
            yield tp, batch(f"never {number}")

    with pytest.raises(LogUnavailable if by_kip_890(producer) else LogUncertain):
        producer.append_stream(many())
    if by_kip_890(producer):
        producer.abort()
    else:
        producer = maker.producer(name)
    append_and_commit(producer, [(tp, batch("a"))])
    assert stable_values(maker.log(), tp) == ["a"]


@pytest.mark.soak
def test_an_abort_says_nothing_of_a_transaction_before(
    maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its markers were lost on a partition that the aborted one has not reached."""
    one, two = maker.topic(2)
    log: Any = maker.log()
    producer = log.producer(maker.new_id(), timeout=60)
    producer.append([(one, batch("a")), (two, batch("b"))])
    before = Open(producer.producer_epoch, 0)
    producer.commit()
    for link in producer._pipeline.links.values():
        link.checked.clear()
    found = {two: before}
    monkeypatch.setattr(
        transactional_producer,
        "open_on",
        lambda _, __, places, ___: {p: found[p] for p in places if p in found},
    )
    with pytest.raises(LogRefused, match="lacks a marker"):
        producer.append_stream([(place, batch("never")) for place in (one, one, two)])
    found.clear()
    producer.abort()
    assert log._cluster.ended[producer.producer_id, two] is True
    producer.close()


def test_adding_partitions_that_is_lost_is_uncertain(maker: Maker, proxy: Proxy) -> None:
    if maker.name == "kafka-v2":
        pytest.skip("Produce adds them")
    (tp,) = maker.topic()
    producer = maker.producer()
    proxy.faults.lose_answer.add(ADD_PARTITIONS_TO_TXN.key)
    with pytest.raises(LogUncertain):
        producer.append([(tp, batch("a"))])
    with pytest.raises(LogUncertain):
        producer.commit()


@pytest.mark.parametrize("api", [INIT_PRODUCER_ID, FIND_COORDINATOR])
def test_initialising_is_tried_again(maker: Maker, proxy: Proxy, api: Api) -> None:
    (tp,) = maker.topic()
    for way in (proxy.faults.lose_answer, proxy.faults.close_before):
        way.add(api.key)
        producer = maker.producer()
        assert api.key not in way
        append_and_commit(producer, [(tp, batch("a"))])


@pytest.mark.parametrize("api", [FETCH, METADATA, LIST_OFFSETS])
def test_reading_is_tried_again(maker: Maker, proxy: Proxy, api: Api) -> None:
    (tp,) = maker.topic()
    write(maker.log(), maker, [(tp, batch("a"))])
    for way in (proxy.faults.lose_answer, proxy.faults.close_before):
        way.add(api.key)
        log = maker.log()
        assert committed_values(log, tp) == ["a"]
        assert log.end_offsets([tp], committed=True) == {tp: 2}
        assert api.key not in way


@pytest.mark.soak
def test_a_leader_of_an_older_epoch_is_not_believed(maker: Maker) -> None:
    """Metadata and offsets of a broker that is behind; a topic made again begins with epoch 0."""
    (tp,) = maker.topic()
    log: Any = maker.log()
    log.end_offsets([tp], committed=False)
    newest = log._cluster._newest[log._cluster.topic_ids[tp.topic]]
    known = newest[tp.partition]
    newest[tp.partition] = known._replace(epoch=known.epoch + 1)
    log._cluster.forget((tp.topic,))
    asks: list[Callable[[], object]] = [
        lambda: log.end_offsets([tp], committed=False),
        lambda: log.start_offsets([tp]),
        lambda: log.fetch({tp: 0}, max_wait=0.1, max_bytes=1, committed=False),
    ]
    for ask in asks:
        with pytest.raises(LogUnavailable):
            ask()
    newest[tp.partition] = known
    log._cluster.forget((tp.topic,))
    assert log.end_offsets([tp], committed=False) == {tp: 0}


@pytest.mark.soak
def test_idle_connections_that_the_broker_closed_do_no_harm(maker: Maker, proxy: Proxy) -> None:
    (tp,) = maker.topic()
    log = maker.log()
    producer = maker.producer()
    for text in "abc":
        producer.append([(tp, batch(text))])
        proxy.cut_all()
        producer.commit()
        proxy.cut_all()
    wait_stable(log, {tp})
    proxy.cut_all()
    assert committed_values(log, tp) == ["a", "b", "c"]


@pytest.mark.soak
def test_without_a_broker_calls_end_at_their_deadline(
    maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = KafkaLog("127.0.0.1:1", {"request.timeout.ms": 300})
    for call in (
        lambda: log.end_offsets([TopicPartition("t", 0)], committed=False),
        lambda: log.fetch({TopicPartition("t", 0): 0}, max_wait=0.1, max_bytes=1, committed=False),
        lambda: log.producer("x", timeout=60),
        lambda: log.describe_topics(["t"]),
    ):
        started = time.monotonic()
        with pytest.raises(LogUnavailable):
            call()
        assert time.monotonic() - started < 20
    log.close()
    with pytest.raises(LogUnavailable, match="closed"):
        log.end_offsets([TopicPartition("t", 0)], committed=False)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (47, LogFenced),
        (90, LogFenced),
        (49, LogFenced),
        (10, LogRefused),
        (32, LogRefused),
        (87, LogRefused),
        (2, LogRefused),
        (29, LogRefused),
        (3, LogUncertain),
        (6, LogUncertain),
        (7, LogUncertain),
        (20, LogUncertain),
        (45, LogUncertain),
        (48, LogUncertain),
        (120, LogUncertain),
        (9999, LogUncertain),
        (-1, LogUncertain),
    ],
)
def test_what_brokers_say_of_an_append(
    maker: Maker, monkeypatch: pytest.MonkeyPatch, code: int, error: type[LogError]
) -> None:
    (tp,) = maker.topic()
    producer = maker.producer()
    answers(monkeypatch, code, 1)
    if error is LogUncertain and by_kip_890(producer):
        error = LogUnavailable
    with pytest.raises(error, match=rf"\({code}\)"):
        producer.append([(tp, batch("a"))])
    if error in (LogRefused, LogUnavailable):
        producer.abort()
        append_and_commit(producer, [(tp, batch("a"))])
    else:
        with pytest.raises(error):
            producer.commit()


@pytest.mark.parametrize("code", [51, 19, 14, 15, 16])
def test_a_first_append_waits_for_the_transaction_before(
    maker: Maker, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    one, two = maker.topic(2)
    producer = maker.producer()
    left = answers(monkeypatch, code, 4)
    # The broker did store it: that it is asked again and stores nothing twice is what makes it safe.
    assert producer.append([(one, batch("a")), (two, batch("b"))]) == [0, 0]
    assert left == [0]
    producer.commit()
    assert stable_values(maker.log(), one) == ["a"]
    assert stable_values(maker.log(), two) == ["b"]


def test_waiting_for_the_transaction_before_has_a_deadline(
    maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tp,) = maker.topic()
    producer = maker.producer()
    real = data.produce_answer
    answers(monkeypatch, 51, 1_000_000)
    # Before transaction.version 2 the coordinator says so, and the leader's word means something else.
    is_v2 = by_kip_890(producer)
    with pytest.raises(LogBusy if is_v2 else LogUncertain):
        producer.append([(tp, batch("a"))])
    if not is_v2:
        return
    monkeypatch.setattr(data, "produce_answer", real)
    assert producer.append([(tp, batch("a"))]) == [0]


def test_later_appends_do_not_wait(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    (tp,) = maker.topic()
    producer = maker.producer()
    producer.append([(tp, batch("a"))])
    answers(monkeypatch, 19, 1)
    with pytest.raises(LogRefused) as caught:
        producer.append([(tp, batch("b"))])
    assert caught.value.error == 19
    assert caught.value.topics == {tp.topic}


@pytest.mark.parametrize("code", [6, 74, 75, 5, 9, 100, 3, 56, 78])
def test_fetches_follow_the_leader(
    maker: Maker, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (tp,) = maker.topic()
    write(maker.log(), maker, [(tp, batch("a"))])
    log = maker.log()
    real = data.fetch_answer
    left = [3]

    def changed(*args: object) -> data.FetchAnswer:
        answer = real(*args)  # type: ignore[arg-type]
        if left[0]:
            left[0] -= 1
            parts = {tp: a._replace(error=code) for tp, a in answer.parts.items()}
            return answer._replace(parts=parts)
        return answer

    monkeypatch.setattr(data, "fetch_answer", changed)
    found = log.fetch({tp: 0}, max_wait=0.2, max_bytes=1000, committed=True)
    assert left == [0]
    assert found[tp].batches[0].base_offset == 0


@pytest.mark.parametrize("loss", ["lose_answer", "close_before"])
def test_growing_a_topic_is_repeated(maker: Maker, proxy: Proxy, loss: str) -> None:
    (tp,) = maker.topic()
    log = maker.log()
    getattr(proxy.faults, loss).add(CREATE_PARTITIONS.key)
    log.add_partitions(tp.topic, 3)
    assert proxy.faults.seen.count(CREATE_PARTITIONS.key) == 2
    assert log.describe_topics([tp.topic])[tp.topic].partitions == 3


@pytest.mark.soak
def test_older_brokers_are_spoken_to_in_their_versions(
    maker: Maker, monkeypatch: pytest.MonkeyPatch, lowest_versions: set[tuple[int, int]]
) -> None:
    """As far down as the code goes: other Kafka-compatible logs speak these."""
    # Without KIP-890 in the highest version, transactions are those of KIP-98.
    greet = wire.Connection.greet

    def old(self: wire.Connection, deadline: float) -> None:
        greet(self, deadline)
        self.features.clear()

    monkeypatch.setattr(wire.Connection, "greet", old)
    log = maker.log()
    one, two = maker.topic(2)
    info = log.describe_topics([one.topic])[one.topic]
    assert info.config["retention.ms"] == "-1"
    producer = maker.producer()
    for number in range(3):
        producer.append([(one, batch(f"{number}")), (two, batch("x")), (one, batch("y"))])
        (producer.abort if number == 1 else producer.commit)()
    wait_stable(log, {one, two})
    assert committed_values(log, one) == ["0", "y", "2", "y"]
    assert log.start_offsets([one]) == {one: 0}
    assert log.offsets_for_time([one], 1) == {one: 0}
    log.delete_records({one: 1})
    assert log.start_offsets([one]) == {one: 1}
    assert log.replicas_of_new("new") == 0, "answers have it from version 5 on"
    log.add_partitions(one.topic, 3)
    assert log.describe_topics([one.topic])[one.topic].partitions == 3
    log.alter_topics({one.topic: {"retention.ms": "7"}})
    until(lambda: log.describe_topics([one.topic])[one.topic].config["retention.ms"] == "7")
    log.delete_topics([log.describe_topics([two.topic])[two.topic]])
    known = {api.key for api in vars(calls).values() if isinstance(api, Api)}
    without_sasl = known - {calls.SASL_HANDSHAKE.key, calls.SASL_AUTHENTICATE.key}
    looks = {18, calls.DESCRIBE_LOG_DIRS.key}  # the greeting; and `doctor`, below
    assert {key for key, _ in lowest_versions} == without_sasl - looks
    assert isinstance(log, KafkaLog)
    (broker,) = look_at(log._cluster, 10.0)
    assert (broker.trouble, broker.too_old, broker.disk_trouble) == ("", (), "")
