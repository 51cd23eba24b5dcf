"""The choice of brokers for questions that any of them may answer, and the trust in answers."""

from __future__ import annotations

import random
import socket
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import pytest

from anabranch.clock import SystemClock
from anabranch.kafka import admin as kafka_admin
from anabranch.kafka import cluster as wire_cluster
from anabranch.kafka import health
from anabranch.kafka.calls import ConnectionBroken
from anabranch.kafka.cluster import Cluster, Leader, Topic
from anabranch.kafka.connection import Connection
from anabranch.kafka.health import BrokerHealth
from anabranch.kafka.produce import BrokerLink, PendingBatch, ProducePipeline, ProduceRequest
from anabranch.kafka.sender import Sender
from anabranch.kafka.settings import parse_settings
from anabranch.kafka.transactional_producer import KafkaProducer
from anabranch.ports import LogUnavailable, TopicPartition, all_steps

BROKERS = {n: (f"broker-{n}", 9092) for n in (1, 2, 3)}
OURS, OTHER = UUID(int=1), UUID(int=2)
BLIND = UUID(int=0)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Three brokers, each of which can be connected to."""
    made = Cluster(parse_settings("broker-1:9092", {}))
    made._brokers = dict(BROKERS)
    monkeypatch.setattr(made.pool, "take", lambda address, _: address)
    monkeypatch.setattr(health, "_late", {})
    monkeypatch.setattr(made.pool, "give", lambda *_: None)
    yield made
    _join()


def _asked(cluster: Cluster, times: int) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for _ in range(times):
        with cluster.connection(None, 0.0) as connection:
            found[connection] += 1
    return found


def test_brokers_that_were_away_once_are_asked_again(cluster: Cluster) -> None:
    assert set(_asked(cluster, 99)) == set(BROKERS.values())
    for node in BROKERS:
        with pytest.raises(ConnectionBroken), cluster.connection(node, 0.0):
            raise ConnectionBroken("it restarts", sent=True)
    for node in (2, 3):
        with cluster.connection(node, 0.0):
            pass
    assert set(_asked(cluster, 99)) == {BROKERS[2], BROKERS[3]}
    cluster.health.answered(BROKERS[1])
    assert set(_asked(cluster, 99)) == set(BROKERS.values())


def test_the_choice_of_brokers_leaves_a_seeded_program_as_it_is(cluster: Cluster) -> None:
    """And a forked child chooses otherwise."""
    seeded, chance = random.getstate(), cluster.chance
    _asked(cluster, 9)
    assert random.getstate() == seeded
    cluster.after_fork()
    assert cluster.chance.getstate() != chance.getstate()


def _tell(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, told: dict[int, UUID | None]) -> None:
    """What each broker says of a topic: its id; None: there is none; `BLIND`: it knows no brokers so far."""

    def answer(address: tuple[str, int]) -> Any:
        said = told[next(node for node in told if BROKERS[node] == address)]
        topics = [SimpleNamespace(topic_id=said, error_code=3 if said is None else 0)]
        return SimpleNamespace(topics=topics, brokers=[] if said == BLIND else [*told])

    cluster._brokers = {node: BROKERS[node] for node in told}
    _answers(cluster, monkeypatch, answer)


def _answers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, answer: Callable[[tuple[str, int]], Any]
) -> None:
    """Each address answers so, whatever the question."""

    def take(address: tuple[str, int], _: float) -> Any:
        return SimpleNamespace(address=address, ask=lambda *_, **__: answer(address))

    monkeypatch.setattr(cluster.pool, "take", take)


@pytest.mark.parametrize(
    ("told", "known", "gone", "agreed"),
    [
        ({1: None, 2: None, 3: None}, False, False, False),
        ({1: None, 2: OURS, 3: None}, True, False, False),
        ({1: OTHER, 2: OTHER, 3: OTHER}, True, True, False),
        ({1: OTHER, 2: OURS, 3: OTHER}, True, False, False),
        ({1: OTHER, 2: None, 3: OTHER}, True, False, False),
        ({1: OURS, 2: OURS}, True, False, True),
        ({1: OURS, 2: None}, True, False, False),
        ({}, True, False, True),
    ],
)
def test_a_topic_is_unknown_or_another_one_by_every_brokers_word(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    told: dict[int, UUID | None],
    known: bool,
    gone: bool,
    agreed: bool,
) -> None:
    _tell(cluster, monkeypatch, told)
    exists = [SimpleNamespace(error_code=36)]
    monkeypatch.setattr(kafka_admin, "_create", lambda *_, **__: exists)
    monkeypatch.setattr(kafka_admin, "add_partitions", lambda *_, **__: False)
    monkeypatch.setattr(cluster, "refresh", lambda *_: {})
    assert kafka_admin.is_known(cluster, "t", 0.0) is known
    assert kafka_admin.is_gone(cluster, "t", 1, OURS.hex, 0.0) is gone
    assert kafka_admin.is_agreed(cluster, "t", OURS.hex, 0.0) is agreed


def test_a_broker_that_knows_no_brokers_does_not_count(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "refresh", lambda *_: {})
    for told in ({1: BLIND, 2: OTHER}, {1: OTHER, 2: BLIND}):
        _tell(cluster, monkeypatch, {**told})
        assert not kafka_admin.is_agreed(cluster, "t", OURS.hex, 0.0)
    _tell(cluster, monkeypatch, {1: BLIND, 2: OURS})
    assert kafka_admin.is_known(cluster, "t", 0.0)
    with pytest.raises(LogUnavailable, match="no brokers so far"):
        kafka_admin.is_agreed(cluster, "t", OURS.hex, 0.0)
    _tell(cluster, monkeypatch, {1: None, 2: None, 3: BLIND})
    with pytest.raises(LogUnavailable, match="no brokers so far"):
        kafka_admin.is_known(cluster, "t", 0.0)


@pytest.mark.parametrize(
    ("leads", "coordinates", "questions", "why"),
    [
        ([1, None, 2], [], 3, "another broker has its place"),
        ([1] * 9, [False, True], 2, "another broker has its place"),
        ([1] * 99, [False] * 99, None, "timed out"),
    ],
    ids=["leader", "coordinator", "it is slow"],
)
def test_a_silent_broker_is_waited_for_until_another_one_has_its_place(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    leads: list[int | None],
    coordinates: list[bool],
    questions: int | None,
    why: str,
) -> None:
    """It takes a request and does not answer; then ``leads`` and ``coordinates`` say how others answer."""
    place, asked = TopicPartition("t", 0), 0

    def refresh(names: set[str], deadline: float) -> None:
        nonlocal asked
        asked += 1
        node = leads[asked - 1]
        if node is None:
            raise LogUnavailable("nobody answers")
        cluster._topics["t"] = Topic("t", bytes(16), {0: Leader(node, asked)}, 1, 3, 3)

    monkeypatch.setattr(cluster, "refresh", refresh)
    monkeypatch.setattr(health, "SILENT_S", 0.0)
    monkeypatch.setattr(health, "ASK_AGAIN_S", 0.1 if why == "timed out" else 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        deadline = time.monotonic() + (1.0 if why == "timed out" else 60.0)
        connection = Connection(*silent.getsockname(), client_id="c", deadline=deadline)
        link = BrokerLink(1, connection)
        sent = link.open().send(0, 0, (b"",), flexible=False, deadline=deadline)
        request = ProduceRequest({place: PendingBatch(place, ())}, correlation=sent)
        coordinator = iter(coordinates + [False] * 9).__next__
        with pytest.raises(ConnectionBroken, match=why):
            ProducePipeline(cluster).read(link, request, deadline, coordinator)
        link.close()
    assert asked == questions or (questions is None and asked > 1)


@contextmanager
def _asked_of_a_server(is_let_in: bool) -> Iterator[tuple[Connection, int, socket.socket]]:
    """A connection, the correlation id of a request that was sent on it, and the server's end of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        deadline = time.monotonic() + 30
        connection = Connection(*server.getsockname(), client_id="c", deadline=deadline)
        if is_let_in:
            connection.authenticate(deadline)
        sent = connection.send(0, 0, (b"",), flexible=False, deadline=deadline)
        with server.accept()[0] as answering:
            yield connection, sent, answering
        connection.close()


@pytest.mark.parametrize(
    ("size", "is_let_in", "why"),
    [
        (1 << 20, False, "closed the connection"),
        ((1 << 20) + 1, False, "a frame of 1048577 bytes"),
        ((1 << 30) - 1, False, "a frame of"),
        ((1 << 30) - 1, True, "closed the connection"),
        ((1 << 30) + 1, True, "a frame of"),
    ],
)
def test_an_answer_that_is_only_announced_costs_nothing(
    size: int, is_let_in: bool, why: str
) -> None:
    """Before the broker has let us in, whoever answers in its place may say no more than 1 MiB."""
    with _asked_of_a_server(is_let_in) as (connection, sent, answering):
        answering.recv(100)
        answering.sendall(size.to_bytes(4, "big") + sent.to_bytes(4, "big"))
        answering.close()
        tracemalloc.start()
        try:
            with pytest.raises(ConnectionBroken, match=why):
                connection.receive(sent, time.monotonic() + 30)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("size", [4, (1 << 20) - 1, 1 << 20, (3 << 20) + 5])
def test_an_answer_of_any_size_comes_whole(size: int) -> None:
    body = random.Random(size).randbytes(size - 4)
    with _asked_of_a_server(True) as (connection, sent, answering):
        whole = size.to_bytes(4, "big") + sent.to_bytes(4, "big") + body
        writer = threading.Thread(target=answering.sendall, args=(whole,))
        writer.start()
        assert connection.receive(sent, time.monotonic() + 30) == body
        writer.join()


def test_an_impossible_host_name_is_no_connection() -> None:
    """Brokers tell hosts, too."""
    with pytest.raises(ConnectionBroken, match=r"no connection to broker\.\.internal:1"):
        Connection("broker..internal", 1, client_id="c", deadline=time.monotonic() + 9)


PLACE = TopicPartition("t", 0)


def _metadata(topics: Mapping[str, UUID], leader: Leader, nodes: Iterable[int]) -> Any:
    """An answer of these topics, each with one partition, which is on all of these nodes."""
    replicas = [*nodes]
    part = SimpleNamespace(replica_nodes=replicas, isr_nodes=replicas, partition_index=0)
    part.leader_id, part.leader_epoch = leader
    found = [
        SimpleNamespace(name=name, topic_id=topic_id, error_code=0, partitions=[part])
        for name, topic_id in topics.items()
    ]
    brokers = [SimpleNamespace(node_id=n, host=f"broker-{n}", port=9092) for n in replicas]
    return SimpleNamespace(topics=found, brokers=brokers)


def _lead(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    told: dict[int, Leader | None],
    late: Mapping[int, threading.Event] = MappingProxyType({}),
) -> list[int]:
    """What each broker says of a leader, and after what; None: it does not answer. Returns who was asked."""
    asked = []

    def metadata(names: list[str], node: int | None, _: float, *, background: bool = False) -> Any:
        node = node or next(iter(told))
        asked.append(node)
        with cluster.connection(node, 0.0, background=background):
            if node in late:
                assert late[node].wait(60)
            said = told[node]
            if said is None:
                raise ConnectionBroken("it does not answer")
        return _metadata(dict.fromkeys(names, OURS), said, told)

    monkeypatch.setattr(cluster, "metadata", metadata)
    return asked


@pytest.mark.parametrize("sending", [False, True])
@pytest.mark.parametrize(
    ("said", "leads"),
    [(Leader(2, 6), 2), (Leader(2, 4), 1), (None, 1)],
    ids=["a new leader", "an older one", "nothing"],
)
def test_a_leader_may_be_cut_off_so_another_broker_is_asked_now_and_then(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    said: Leader | None,
    leads: int,
    sending: bool,
) -> None:
    asked = _lead(cluster, monkeypatch, {1: Leader(1, 5), 2: said, 3: said})
    monkeypatch.setattr(Sender, "_place", lambda *_: None)
    sender = Sender(cluster)
    most = 3 if said is None else 2
    for later, led, questions in ((0.0, 1, 1), (5.0, 1, 1), (6.0, leads, most), (0.0, leads, most)):
        _age(cluster, later)
        if sending:
            sender.send([(PLACE, b"")], {})
        else:
            cluster.groups([PLACE], time.monotonic() + 5, {})
        _join()
        leader = cluster.leader(PLACE)
        assert leader is not None
        assert leader.node == led
        assert len(asked) == questions
        assert 1 not in asked[1:]
    assert not cluster.health._failed


def test_a_leader_that_names_itself_is_confirmed_by_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain topics are asked for every ten seconds, perhaps of it alone."""
    _lead(cluster, monkeypatch, {1: Leader(1, 5), 2: Leader(2, 6), 3: Leader(2, 6)})
    for _ in range(3):
        cluster.refresh(["t"], time.monotonic() + 5)
        _age(cluster, 9)
        cluster.groups([PLACE], time.monotonic() + 5)
        _join()
    assert cluster.leader(PLACE) == Leader(2, 6)


def test_a_leader_is_not_asked_whether_it_still_leads(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if each broker leads something; and no thread for it is no error."""
    names = ["a", "b", "c"]
    asked: set[tuple[str, int]] = set()

    def ask(names: list[str], node: int, *_: Any, **__: Any) -> Any:
        asked.update((name, node) for name in names)
        return SimpleNamespace(topics=[], brokers=[node])

    monkeypatch.setattr(cluster, "metadata", ask)
    for n, name in enumerate(names, 1):
        cluster._topics[name] = Topic(name, OURS.bytes, {0: Leader(n, 1)}, 1, 3, 3)
    cluster.health.confirmed.update(dict.fromkeys(names, time.monotonic() - 11))
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError))
        cluster.confirm_leaders(names)
    for _ in range(5):
        _age(cluster, 11)
        cluster.confirm_leaders(names)
        _join()
    assert {name for name, _ in asked} == set(names)
    assert not asked & {("a", 1), ("b", 2), ("c", 3)}


def test_ages_of_topics_come_together(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _lead(cluster, monkeypatch, dict.fromkeys(BROKERS, Leader(1, 5)))
    places = [TopicPartition(f"t{n}", 0) for n in range(100)]
    cluster.groups(places, time.monotonic() + 5, {})
    for n, place in enumerate(places):
        cluster.health.confirmed[place.topic] -= n / 10
    asked.clear()
    for _ in range(200):
        _age(cluster, 0.01)
        cluster.groups(places, time.monotonic() + 5, {})
        _join()
    assert 1 <= len(asked) <= 2


def _age(cluster: Cluster, later: float) -> None:
    told = cluster.health.confirmed
    told.update({topic: then - later for topic, then in told.items()})


def _join() -> None:
    for thread in threading.enumerate():
        if thread.name == "leaders":
            thread.join()


def test_a_broker_that_knows_no_brokers_is_not_believed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    _lead(cluster, monkeypatch, {1: Leader(1, 5)})
    answers = [SimpleNamespace(topics=[], brokers=[]), cluster.metadata(["t"], 1, 0.0)]
    monkeypatch.setattr(cluster, "metadata", partial(Cluster.metadata, cluster))
    _answers(cluster, monkeypatch, lambda _: answers.pop(0))
    assert cluster.refresh(["t"], time.monotonic() + 5).keys() == {"t"}
    assert cluster.nodes == [1]


@pytest.mark.parametrize(
    ("said", "leads", "asked_then"),
    [
        ({2: Leader(1, 5), 3: Leader(2, 6)}, 2, [1, 3]),
        ({2: None, 3: Leader(3, 6)}, 3, [1, 2]),
        ({}, 1, []),
    ],
    ids=["a new leader", "one is away", "one replica"],
)
def test_ends_that_are_sure_are_asked_with_the_newest_epoch(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    said: dict[int, Leader | None],
    leads: int,
    asked_then: list[int],
) -> None:
    asked = _lead(cluster, monkeypatch, {1: Leader(1, 5), **said})
    epochs: list[tuple[int, int]] = []

    def ends(_: Cluster, node: int, *__: Any) -> Any:
        epochs.append((node, cluster.epoch(PLACE)))
        return SimpleNamespace(topics=[])

    monkeypatch.setattr(kafka_admin, "_ask_offsets", ends)
    for questions in ([1, *said], asked_then):
        asked.clear()
        deadline = time.monotonic() + 5
        kafka_admin.list_offsets(
            cluster, [PLACE], -1, committed=False, deadline=deadline, sure=True
        )
        assert sorted(asked) == questions
    assert epochs == [(leads, 6 if said else 5)] * 2


def test_a_silent_replica_is_waited_for_once_and_a_slow_one_always(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a late answer counts when it comes; then that one is waited for again."""
    told: dict[int, Leader | None] = dict.fromkeys(BROKERS, Leader(1, 5))
    silent = threading.Event()
    late: dict[int, threading.Event] = {}
    asked = _lead(cluster, monkeypatch, told, late)
    cluster.refresh(["t"], time.monotonic() + 5)
    asked.clear()
    late[3] = silent
    monkeypatch.setattr(health, "WAIT_S", 0.2)
    cluster.ask_replicas(["t"], time.monotonic() + 60)
    fresh = BrokerHealth(SystemClock())
    assert fresh.unanswered(BROKERS[3]), "a fresh log would wait again"
    monkeypatch.setattr(health, "WAIT_S", 60.0)
    monkeypatch.setattr(health, "LATE_S", 60.0)
    told[2] = Leader(2, 6)
    cluster.ask_replicas(["t"], time.monotonic() + 500)  # not for 3
    assert (cluster.leader(PLACE), asked.count(3)) == (Leader(2, 6), 1)
    told[3] = Leader(3, 8)
    silent.set()
    _join()
    assert cluster.leader(PLACE) == Leader(3, 8)
    for node, newest in ((2, Leader(2, 9)), (3, Leader(3, 10))):
        told[node] = newest
        cluster.ask_replicas(["t"], time.monotonic() + 500)
        assert cluster.leader(PLACE) == newest
    assert not cluster.health._failed


def test_the_leader_is_asked_in_time_though_a_replica_is_silent(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    _lead(cluster, monkeypatch, dict.fromkeys(BROKERS, Leader(1, 5)))
    cluster.refresh(["t"], time.monotonic() + 5)
    with monkeypatch.context() as silent:
        silent.setattr(threading.Thread, "join", lambda _, timeout: waits.append(timeout))
        cluster.ask_replicas(["t"], time.monotonic() + 1)
    assert [wait <= 0.5 for wait in waits] == [True, True]


def test_topics_that_were_are_forgotten_an_hour_later(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then a request of theirs may be under way."""
    ids = map(UUID, (n.to_bytes(16, "big").hex() for n in range(1, 99)))
    there: dict[str, UUID] = {}

    def answer(_: tuple[str, int]) -> Any:
        return _metadata(there, Leader(1, 1), BROKERS)

    _answers(cluster, monkeypatch, answer)
    now = [0.0]
    monkeypatch.setattr(wire_cluster, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for n in range(20):  # made and deleted, and one made again and again
        there = {f"t{n}": next(ids), "again": next(ids)}
        cluster.refresh(there, 5.0)
        there = {"again": there["again"]}
        cluster.refresh([f"t{n}"], 5.0)
    assert len(cluster.topic_names) == len(cluster._newest) == 40
    now[0] = wire_cluster._GONE_S
    cluster.refresh(["again"], 1e9)
    assert cluster.topic_ids == {"again": there["again"].bytes}
    assert [*cluster.topic_names.values()] == ["again"]
    assert (len(cluster._newest), [*cluster.health.confirmed]) == (1, ["again"])


def test_an_id_whose_epochs_are_used_up_leaves_nothing(cluster: Cluster) -> None:
    """Brokers give another one then (KIP-890)."""
    producer: Any = KafkaProducer.__new__(KafkaProducer)
    coordinator = SimpleNamespace(producer_id=7, is_v2=True, end=lambda commit: iter(()))
    producer._cluster, producer._coordinator = cluster, coordinator
    producer._sequences, producer._added, producer._appended = Mock(), set(), {PLACE}
    all_steps(producer._end(commit=True))
    assert cluster.ended == {(7, PLACE): True}
    producer._appended = {PLACE._replace(partition=1)}

    def renewed(*, commit: bool) -> Iterator[None]:
        coordinator.producer_id = 8
        yield from ()

    coordinator.end = renewed
    all_steps(producer._end(commit=False))
    assert cluster.ended == {}
