"""A table of scenarios: kinds of brokers by steps of a user. Each step works, or is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

import anabranch
from anabranch.errors import AnabranchError, TransactionAborted, WriteFailed
from anabranch.kafka.log import KafkaLog
from anabranch.kafka.wire.cluster import Cluster
from anabranch.ports import TopicPartition, TopicSpec
from anabranch.topics.names import journal_topic
from tests.cluster import ControllerProcess, start_cluster, words
from tests.conftest import need_go
from tests.kfake.kinds import FORGETTING, KINDS, LIAR, UNFIT
from tests.kfake.server import ADMIN, Kfake
from tests.kfake.steps import BIG, ROOT, STEPS, Place, Refused

pytestmark = [pytest.mark.broker, pytest.mark.slow(2)]

QUICK = ("Redpanda from 25.3, 3 brokers",)
# What a kind can't do at all -> what the refusal names.
REFUSED = {("WarpStream", "altering"): "IncrementalAlterConfigs"}
KINDS_HERE = tuple(KINDS)
# Kinds that take fewer codecs than writers begin with -> the codec that is used from then on.
CODECS = {"Event Hubs": "gzip"}
# Each loss that the doctor names on a kind: the need, and a word of what it found. Nothing else is lost there.
ONE_REPLICA = ("replicas", "is lost with its broker")
NO_CUT = ("calls", "no DeleteRecords: journals are never cut")
LOST = {
    "nothing missing": {ONE_REPLICA},
    "Redpanda before 25.3, 1 broker": {ONE_REPLICA},
    "Redpanda from 25.3, 1 broker": {ONE_REPLICA},
    "WarpStream": {
        NO_CUT,
        ("calls", "no IncrementalAlterConfigs"),
        ("calls", "no DescribeProducers"),
        ("calls", "no DescribeLogDirs"),
    },
    "Event Hubs": {
        ("a stream's topics", "does not report retention.ms and retention.bytes"),
        ("a table's topics", "does not report retention.ms and retention.bytes"),
        ONE_REPLICA,
        ("compression", "not taken: snappy, lz4, zstd; taken: none, gzip"),
        ("alter settings", "altered, and the broker does not report it"),
    },
    "dry runs make topics": {("dry runs", "a dry run makes the topic"), ONE_REPLICA},
    "dry runs are bare": {NO_CUT, ("calls", "no DescribeProducers"), ONE_REPLICA},
}
# Clusters that can't carry a controller: what is said of each, by the controller and by the doctor.
NAMED = {
    "no transactions": ("AddPartitionsToTxn", "EndTxn"),
    "short time-outs": ("transaction.max.timeout.ms", "--native-timeout"),
    "few partitions": ("partitions (4)",),
    "a policy": ("retention.ms", "3600000"),
    "settings not shown": ("DescribeConfigs",),
    "topics not shown": ("right Describe",),
    "no right to make topics": ("right Create",),
    "no right to transactions": ("right Write", "transactional id"),
}
FEW = 400


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in KINDS_HERE
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    """A column of the table."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def kfake(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kfake]:
    """A broker of the kind, until its steps are done."""
    need_go()
    with Kfake(KINDS[kind], tmp_path_factory.mktemp("kfake")) as broker:
        yield broker


@pytest.fixture(scope="module")
def look(kfake: Kfake) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """What the doctor says before the controller is started, and the topics that there are afterwards."""
    return doctor(kfake), topics(kfake)


@pytest.fixture(scope="module")
def place(
    kfake: Kfake,
    look: object,  # before the controller
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Place]:
    """The broker with a controller that leads."""
    with place_on(kfake, tmp_path_factory.mktemp("place"), FEW) as made:
        yield made


@contextmanager
def place_on(
    broker: Kfake, folder: Path, events: int, timeout: float = 60, patience: float = 120
) -> Iterator[Place]:
    """A controller and clients on a broker; they end with the `with`."""
    quick = "--session-timeout", "2"
    cluster = start_cluster(broker.bootstrap, folder, arguments=quick)
    with (
        closing(anabranch.connect(broker.bootstrap, timeout=timeout)) as client,
        closing(anabranch.connect(broker.bootstrap, timeout=timeout, lane="admin")) as operator,
    ):
        try:
            yield Place(cluster, client, operator, folder, events, patience)
        finally:
            cluster.controller.kill()


def test_the_doctor_says_what_works(
    kind: str, look: tuple[subprocess.CompletedProcess[str], list[str]]
) -> None:
    said, left = look
    assert said.returncode == 0, said.stdout + said.stderr
    assert left == []
    lost = [row for row in json.loads(said.stdout)["rows"] if row["state"] != "works"]
    named = LOST.get(kind, set())
    assert len(lost) == len(named), lost
    for need, word in named:
        assert any(row["need"] == need and word in row["found"] for row in lost), (need, lost)


@pytest.mark.parametrize("step", STEPS)
def test_steps(kind: str, place: Place, step: str) -> None:
    named = REFUSED.get((kind, step))
    if named is None:
        takes(kind, place, step)
        return
    with pytest.raises(Refused) as refused:
        STEPS[step](place)
    assert named in str(refused.value)


def takes(kind: str, place: Place, step: str) -> None:
    """A step works. Where the kind takes fewer codecs, each process writes once more, as the error says."""
    try:
        STEPS[step](place)
    except WriteFailed as error:
        if CODECS.get(kind, "no codec") not in str(error):
            raise
        STEPS[step](place)


@pytest.mark.soak
@pytest.mark.parametrize("name", KINDS_HERE)
def test_a_merge_of_many_events(name: str, tmp_path: Path) -> None:
    need_go()
    with Kfake(KINDS[name], tmp_path) as broker, place_on(broker, tmp_path, BIG // 2) as place:
        takes(name, place, "merge")


@pytest.mark.soak
def test_a_broker_is_killed_within_a_transaction(tmp_path: Path) -> None:
    """It comes back on its data: what was acknowledged is there."""
    need_go()
    broker = Kfake(KINDS["nothing missing"], tmp_path, keeps=True)
    with broker, place_on(broker, tmp_path, FEW) as place:
        scope = place.scope()
        stream = place.stream(f"{scope}/kept")
        with place.client.begin(scope, keepalive=120) as txn:
            for i in range(200):
                if i == 100:
                    txn.flush()
                    broker.kill()
                    broker.start()
                txn.write(stream, b"%d" % i, key=b"k%d" % (i % 7))
            txn.commit(timeout=120)
        assert place.committed(stream) == Counter(b"%d" % i for i in range(200))


@pytest.mark.soak
def test_what_time_deleted_from_a_journal_is_not_committed_in_part(tmp_path: Path) -> None:
    """The broker does not report its retention, so that a stream can be made; then it deletes."""
    need_go()
    with Kfake(KINDS["Event Hubs"], tmp_path) as broker, place_on(broker, tmp_path, FEW) as place:
        stream = place.stream("near/orders")
        gzip = anabranch.connect(broker.bootstrap, compression_type="gzip")
        with closing(gzip) as client, closing(KafkaLog(broker.bootstrap)) as log:
            with client.begin("near", keepalive=120) as txn:
                txn.token()  # it opens
                for i in range(FEW):
                    txn.write(stream, b"%d" % i, key=b"k%d" % (i % 7))
                txn.flush()
                ends = [TopicPartition(journal_topic(stream), n) for n in range(2)]
                log.delete_records(log.end_offsets(ends, committed=False))
                txn.write(stream, b"later", key=b"k")
                with pytest.raises(TransactionAborted, match="journal records are gone"):
                    txn.commit(timeout=60)
            assert place.committed(stream) == Counter()
            with client.begin("near") as txn:
                txn.write(stream, b"next", key=b"k")
                txn.commit()
        assert place.committed(stream) == Counter([b"next"])


def test_changes_of_topics_go_to_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three brokers say that another one is the controller: it is asked from the first such answer on."""
    need_go()
    refused = []
    learn = Cluster.leaves_changes

    def leaves_changes(cluster: Cluster, deadline: float) -> None:
        refused.append(deadline)
        learn(cluster, deadline)

    monkeypatch.setattr(Cluster, "leaves_changes", leaves_changes)
    with Kfake(KINDS["nothing missing, 3 brokers"], tmp_path) as broker:
        with closing(KafkaLog(broker.bootstrap)) as log:
            for n in range(10):
                log.create_topics([TopicSpec(f"t{n}", 1)])
                log.add_partitions(f"t{n}", 2)
                log.delete_topics(list(log.describe_topics([f"t{n}"]).values()))
        assert len(refused) == 1
        assert topics(broker) == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "no transactions" else pytest.mark.soak)
        for name in NAMED
    ],
)
def test_an_unfit_cluster_is_named_before_a_topic_is_made(name: str, tmp_path: Path) -> None:
    need_go()
    with Kfake(UNFIT[name], tmp_path) as broker:
        said = doctor(broker)
        assert said.returncode == 1, said.stdout + said.stderr
        assert [word for word in NAMED[name] if word not in said.stdout] == [], said.stdout
        sign_in = words(broker.options())
        controller = ControllerProcess(
            broker.bootstrap, tmp_path / "controller", arguments=sign_in
        ).start()
        try:
            code = controller.ended()
        except subprocess.TimeoutExpired:
            pytest.fail(f"it neither leads nor ends: {controller.log_file.read_text()[-2000:]}")
        finally:
            controller.kill()
        log = controller.log_file.read_text()
        assert code != 0
        assert [word for word in NAMED[name] if word not in log] == [], log
        assert topics(broker) == []


@pytest.mark.soak
def test_topics_that_are_always_deleted_by_time(tmp_path: Path) -> None:
    """A controller can lead there. Each new stream is refused, and leaves nothing."""
    need_go()
    with Kfake(FORGETTING, tmp_path) as broker:
        said = doctor(broker)
        assert said.returncode == 1, said.stdout + said.stderr
        assert "retention.ms" in said.stdout, said.stdout
        with place_on(broker, tmp_path, FEW) as place:
            before = topics(broker)
            with pytest.raises(AnabranchError, match=r"retention\.ms=604800000; set -1"):
                place.stream("near/orders")
            assert topics(broker) == before


@pytest.mark.soak
@pytest.mark.parametrize(
    ("step", "whole"),
    [("one-shots", 1), ("two processes", 2 * FEW), ("merge", 2 * FEW), ("readers", 20)],
)
def test_ends_that_are_too_low_are_never_believed(step: str, whole: int, tmp_path: Path) -> None:
    """The broker's ends are below what it has acknowledged. A step is right, or ends with an error."""
    need_go()
    with Kfake(LIAR, tmp_path) as broker:
        said = doctor(broker)
        assert said.returncode == 1, said.stdout + said.stderr
        assert "acknowledged" in said.stdout, said.stdout
        with place_on(broker, tmp_path, FEW, timeout=10, patience=15) as place:
            with suppress(AnabranchError, Refused):
                STEPS[step](place)
            for stream in place.streams:
                assert place.committed(stream).total() % whole == 0


def topics(broker: Kfake) -> list[str]:
    """All topics of a cluster but the brokers' own."""
    options: dict[str, str | int | float | bool] = {
        "bootstrap.servers": broker.bootstrap,
        **broker.options(ADMIN),
    }
    found = AdminClient(options).list_topics(timeout=30).topics
    return sorted(name for name in found if not name.startswith("__"))


def doctor(broker: Kfake) -> subprocess.CompletedProcess[str]:
    """`anabranch doctor --broker --json`."""
    command = [sys.executable, "-m", "anabranch.cli", "doctor", "--broker", "--json"]
    return subprocess.run(
        [*command, "--bootstrap", broker.bootstrap, *words(broker.options())],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
