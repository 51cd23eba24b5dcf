"""An EndTxn that is held in the network, and delivered in the next native transaction (KAFKA-17754).

Plain librdkafka shows the known anomaly, with every ``transaction.version``; ours must not, with any.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

import anabranch
from anabranch.kafka import transactional_producer
from anabranch.kafka.log import KafkaLog
from anabranch.kafka.transactional_producer import KafkaProducer
from anabranch.ports import (
    LogFenced,
    LogRefused,
    LogUnavailable,
    LogUncertain,
    TopicPartition,
    TopicSpec,
)
from tests.cluster import ControllerProcess
from tests.contract.helpers import batch, wait_stable
from tests.crash.oracle import read_status
from tests.faults.network_proxy import Network, start_network
from tests.faults.proxy import Before, Held, Hold, Rules
from tests.faults.proxy_frames import (
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    INIT_PRODUCER_ID,
    PRODUCE,
    Request,
)
from tests.infra.kafka import finalized_features
from tests.workload.last import Log

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

# INVALID_PRODUCER_EPOCH, PRODUCER_FENCED
FENCED = (47, 90)
BOTH = (0, 1)
ROUNDS = 4
# To our producer 1 is as 0, and what it does with 0 the cases above show.
VERSIONS = (*(pytest.param(old, marks=pytest.mark.soak) for old in (0, 1)), 2)


def later(*case: object) -> pytest.ParameterSet:
    """A case that its neighbours stand for in the test command."""
    return pytest.param(*case, marks=pytest.mark.soak)


@pytest.fixture(scope="module")
def networks() -> Iterator[Callable[[int], Network]]:
    """A broker for each ``transaction.version``, started when the first test asks for it."""
    started: dict[int, Network] = {}
    with ExitStack() as stack:

        def start(version: int) -> Network:
            if version not in started:
                network = stack.enter_context(start_network(version))
                found = finalized_features(network.proxied).get("transaction.version", 0)
                assert found == version
                client = AdminClient({"bootstrap.servers": network.proxied})
                brokers = client.list_topics(timeout=30).brokers
                assert {broker.port for broker in brokers.values()} == {network.proxy.port}
                started[version] = network
            return started[version]

        yield start


@pytest.fixture
def network(networks: Callable[[int], Network], version: int) -> Iterator[Network]:
    """With no rules yet."""
    found = networks(version)
    found.proxy.policy = Rules()
    yield found
    found.proxy.policy = None


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stops for a second costs no append: no round is repeated here."""
    monkeypatch.setattr(transactional_producer, "LEADER_S", 15.0)


@pytest.fixture
def topic(network: Network, unique: str) -> str:
    """A topic of two partitions."""
    log = KafkaLog(network.direct)
    log.create_topics([TopicSpec(unique, 2, {"retention.ms": "-1"})])
    log.close()
    return unique


def hold(
    network: Network, api: int, transactional_id: str | None = None, size: int = 0, **how: bool
) -> Held:
    """Hold the next request of an api; if given, of a transactional id, and of at least ``size`` bytes."""
    held = Held()
    rules = network.proxy.policy
    assert isinstance(rules, Rules)
    rules.add(
        lambda request: (
            request.api == api
            and transactional_id in (None, request.transactional_id)
            and request.size >= size
        ),
        Hold(held, **how),
    )
    return held


def values(network: Network, topic: str, partitions: Iterable[int] = BOTH) -> list[str]:
    """All that is committed, partition by partition, as any consumer reads it."""
    wait_for_markers(network, topic, partitions)
    with closing(Log(network.direct)) as log:
        messages = [one for number in partitions for one in log.read(topic, number)[2]]
    return [(one.value() or b"").decode() for one in messages]


def wait_for_markers(network: Network, topic: str, partitions: Iterable[int]) -> None:
    """EndTxn is answered before the partitions have its markers."""
    log = KafkaLog(network.direct)
    wait_stable(log, {TopicPartition(topic, number) for number in partitions})
    log.close()


# -- the baseline ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "end"),
    [later(0, "commit"), later(1, "commit"), (2, "commit"), later(0, "abort"), later(2, "abort")],
)
def test_librdkafka_tears_a_transaction(network: Network, topic: str, end: str) -> None:
    """N is ended, that request is held, its retry succeeds; N+1 is torn by the held one.

    Whoever sees this fail because librdkafka has learned KIP-890: rejoice, and mend the decision record.
    """
    producer = Producer(
        {
            "bootstrap.servers": network.proxied,
            "transactional.id": topic,
            "linger.ms": 0,
            "log_level": 0,
        }
    )
    held = hold(network, END_TXN, topic, cut=True)
    ends: dict[str, Callable[[float], None]] = {
        "commit": producer.commit_transaction,
        "abort": producer.abort_transaction,
    }
    other = "abort" if end == "commit" else "commit"
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"N.0", partition=0)
    producer.produce(topic, b"N.1", partition=1)
    assert producer.flush(30) == 0
    ends[end](30)  # answered: ok
    assert held.caught, "its first request should have been held"
    producer.begin_transaction()
    producer.produce(topic, b"M.0", partition=0)
    assert producer.flush(30) == 0
    assert held.deliver_end() == 0, "the broker takes it for the end of N+1"
    producer.produce(topic, b"M.1", partition=1)
    assert producer.flush(30) == 0
    ends[other](30)  # answered: ok
    if end == "commit":
        # N+1 was aborted, as its client was answered; half of it can be read.
        assert values(network, topic) == ["N.0", "M.0", "N.1"]
    else:
        # N+1 was committed, as its client was answered; half of it is lost.
        assert values(network, topic) == ["M.1"]


# -- our own native transactions ------------------------------------------------------------------------


@pytest.fixture
def make_producer(network: Network, topic: str) -> Iterator[Callable[[], KafkaProducer]]:
    """Producers of one transactional id, each with a log of its own."""
    logs: list[KafkaLog] = []
    producers: list[KafkaProducer] = []

    def make() -> KafkaProducer:
        logs.append(KafkaLog(network.proxied))
        producers.append(logs[-1].producer(topic, timeout=60))
        return producers[-1]

    yield make
    for producer in producers:
        producer.close()
    for log in logs:
        log.close()


def put(topic: str, partition: int, text: str) -> list[tuple[TopicPartition, bytes]]:
    return [(TopicPartition(topic, partition), batch(text))]


# The client gives up because its connection is cut or, where that is False, after its time-out.
CASES = [
    later(0, "commit", True),
    later(1, "commit", True),
    (2, "commit", True),
    later(0, "abort", True),
    (2, "abort", True),
    later(0, "produce", True),
    (2, "produce", True),
    later(0, "add", True),
    later(0, "commit", False),
]


@pytest.mark.parametrize(("version", "what", "cut"), CASES)
def test_what_is_held_touches_no_later_transaction(
    network: Network,
    topic: str,
    make_producer: Callable[[], KafkaProducer],
    version: int,
    what: str,
    cut: bool,
) -> None:
    api = {"produce": PRODUCE, "add": ADD_PARTITIONS_TO_TXN}.get(what, END_TXN)
    first = make_producer()
    first.append(put(topic, 0, "N.0"))
    if what in ("commit", "abort"):
        first.append(put(topic, 1, "N.1"))
    held = hold(network, api, topic, cut=cut)
    steps: dict[str, Callable[[], object]] = {"commit": first.commit, "abort": first.abort}
    same = first.is_v2 and what == "produce"  # after its abort it continues
    with pytest.raises(LogUnavailable if same else LogUncertain):
        steps.get(what, lambda: first.append(put(topic, 1, "N.1")))()
    with pytest.raises(LogRefused if same else LogUncertain):
        first.commit()  # no retry, on any connection
    if same:
        first.abort()
    second = first if same else make_producer()
    assert second.is_v2 == (version == 2)
    second.append(put(topic, 0, "M.0"))
    if api == END_TXN:
        assert held.deliver_end() in FENCED
    else:
        held.deliver()
    second.append(put(topic, 1, "M.1"))
    second.commit()
    assert values(network, topic) == ["M.0", "M.1"]


@pytest.mark.parametrize("version", [pytest.param(0, marks=pytest.mark.soak), 2])
def test_a_held_initialisation_fences_but_tears_nothing(
    network: Network, topic: str, make_producer: Callable[[], KafkaProducer]
) -> None:
    """InitProducerId carries no epoch: a late one ends whatever is open, and the producer learns it."""
    held = hold(network, INIT_PRODUCER_ID, topic, cut=True)
    first = make_producer()
    assert held.caught, "its first request should have been held"
    first.append(put(topic, 0, "N.0"))
    held.deliver()
    with pytest.raises((LogFenced, LogUncertain)):  # noqa: PT012 - either may be the first to fail
        first.append(put(topic, 1, "N.1"))
        first.commit()
    second = make_producer()
    second.append(put(topic, 0, "M.0") + put(topic, 1, "M.1"))
    second.commit()
    assert values(network, topic) == ["M.0", "M.1"]


@pytest.mark.parametrize("version", [pytest.param(0, marks=pytest.mark.soak), 2])
def test_a_second_copy_of_a_commit(
    network: Network, topic: str, make_producer: Callable[[], KafkaProducer], version: int
) -> None:
    """What the broker itself protects from, and from which version on. TCP brings nothing twice."""
    producer = make_producer()
    held = hold(network, END_TXN, topic, copy=True)
    producer.append(put(topic, 0, "N.0"))
    producer.commit()
    producer.append(put(topic, 0, "M.0"))
    error = held.deliver_end()
    if version < 2:
        assert error == 0, "it commits whatever is open under the same epoch"
        return
    assert error in FENCED
    producer.append(put(topic, 1, "M.1"))
    producer.abort()
    assert values(network, topic) == ["N.0"]


# -- the product ----------------------------------------------------------------------------------------


def hold_a_round(network: Network, *, cut: bool) -> tuple[Held, list[int]]:
    """Hold the next commit of a round, and deliver it inside the next native transaction of the same id.

    Returns it, and a list for the error code of its late answer.
    """
    rules = network.proxy.policy
    assert isinstance(rules, Rules)
    held, late = Held(), list[int]()

    def is_commit(request: Request) -> bool:
        return request.api == END_TXN and request.end is not None and request.end.commit

    def is_next(request: Request) -> bool:
        return (
            held.request is not None
            and request.api == PRODUCE
            and request.transactional_id == held.request.transactional_id
        )

    rules.add(is_commit, Hold(held, cut=cut))
    # The data is appended; its producer does not know yet.
    rules.add(is_next, Before(lambda: late.append(held.deliver_end())))
    return held, late


@pytest.mark.soak
@pytest.mark.parametrize("version", [2])
def test_an_append_in_doubt_costs_no_lead(
    network: Network, unique: str, version: int, tmp_path: Path
) -> None:
    """The round is aborted and decided again by the same leader; what was held is stored nowhere.

    The events are too many for the request with the controller's own records, so only their stream is in doubt.
    """
    stream, prefix = f"{unique}/events", f"p{unique}"
    with (
        ControllerProcess(network.proxied, tmp_path / "c", prefix) as one,
        anabranch.connect(network.direct, prefix=prefix, timeout=60) as client,
    ):
        one.wait_leading()
        client.create_stream(stream, segments=2)
        for number in range(ROUNDS):
            # The client does not go through the proxy, so that these are the controller's.
            held = hold(network, PRODUCE, size=300_000, cut=True)
            with client.begin(unique) as txn:
                if number % 2:
                    txn.token()
                for part in range(4):
                    big = f"{number}.{part} {random.randbytes(200_000).hex()}"
                    txn.write(stream, big.encode(), key=b"%d" % part)
                txn.commit()
            assert held.wait_caught().transactional_id
            held.let_go()
        log = KafkaLog(network.direct)
        terms = read_status(log, prefix).terms
        log.close()
    seen = sorted(value.split()[0] for value in values(network, stream.replace("/", ".")))
    assert seen == sorted(f"{number}.{part}" for number in range(ROUNDS) for part in range(4))
    assert len(terms) == 1


@pytest.mark.long
@pytest.mark.parametrize("version", VERSIONS)
def test_commit_rounds_stay_whole(
    network: Network, unique: str, version: int, tmp_path: Path
) -> None:
    """Rounds whose EndTxn comes late, then a takeover from a controller that died meanwhile."""
    stream = f"{unique}/events"
    prefix = f"p{unique}"
    numbers = itertools.count(1)

    def controller() -> ControllerProcess:
        return ControllerProcess(
            network.proxied,
            tmp_path / f"c{next(numbers)}",
            prefix,
            ("--session-timeout", "1"),
        )

    committed: list[str] = []
    lates: list[list[int]] = []
    with (
        controller() as one,
        anabranch.connect(network.direct, prefix=prefix, timeout=60) as client,
    ):
        one.wait_leading()
        client.create_stream(stream, segments=2)

        def write(name: str, *, journal: bool) -> anabranch.Transaction:
            txn = client.begin(unique)
            if journal:
                txn.token()
            for part in range(4):
                txn.write(stream, f"{name}.{part}".encode(), key=b"%d" % part)
            return txn

        for number in range(ROUNDS):
            name = f"t{number}"
            txn = write(name, journal=number % 3 > 0)
            held, late = hold_a_round(network, cut=True)
            lates.append(late)
            if number % 3 == 2:
                txn.abort()
            else:
                txn.commit()
                committed.append(name)
            assert held.caught
        for _ in range(len(lates)):
            if all(lates):
                break
            # The next native transaction of the same id may be a later round.
            write("t", journal=False).commit()
            committed.append("t")
        assert all(code in FENCED for late in lates for code in late), lates
        assert all(lates), lates

        last = write("last", journal=True)
        held, late = hold_a_round(network, cut=False)
        commit = threading.Thread(target=last.commit)
        commit.start()
        held.wait_caught()
        one.kill()
        with controller() as two:
            two.wait_leading()
            commit.join(60)
            assert not commit.is_alive()
            segments = {part.partition for part in client.describe(stream).segments}
        assert late
        assert late[0] in FENCED
        committed.append("last")

    seen = sorted(values(network, stream.replace("/", "."), segments))
    assert seen == sorted(f"{name}.{part}" for name in committed for part in range(4))
    assert len(segments) == 2
