"""A table of scenarios: kinds of brokers by steps of a user. Each step works, or is refused by name."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

import anabranch
from anabranch.errors import AnabranchError, WriteFailed
from tests.cluster import ControllerProcess, start_cluster
from tests.conftest import need_go
from tests.kfake.kinds import KINDS, LIAR, UNFIT, Kind
from tests.kfake.server import Kfake
from tests.kfake.steps import BIG, ROOT, STEPS, Place, Refused

pytestmark = [pytest.mark.broker, pytest.mark.slow(2)]

QUICK = ("Redpanda from 25.3, 3 brokers",)
# What a kind can't do at all -> what the refusal names.
REFUSED = {("WarpStream", "altering"): "IncrementalAlterConfigs"}
KINDS_HERE = tuple(KINDS)
# Kinds that take fewer codecs than writers begin with -> the codec that is used from then on.
CODECS = {"Event Hubs": "gzip"}
# Calls that a kind lacks, and that the product can go on without: the doctor names them.
LOST = {
    "WarpStream": ("DeleteRecords", "IncrementalAlterConfigs", "DescribeProducers"),
    "dry runs are bare": ("DeleteRecords",),
}
# Clusters that can't carry a controller: what is said of each, by the controller and by the doctor.
NAMED = {
    "no transactions": ("AddPartitionsToTxn", "EndTxn"),
    "short time-outs": ("transaction.max.timeout.ms", "--native-timeout"),
    "few partitions": ("partitions (4)",),
    "a policy": ("retention.ms", "3600000"),
    "settings not shown": ("DescribeConfigs",),
}
FEW = 400
ENDS_S = 20.0  # 10 of its own, and as much to start Python on a busy machine


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
    return doctor(kfake.bootstrap), topics(kfake.bootstrap)


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
    lost = LOST.get(kind, ())
    assert [call for call in lost if call not in said.stdout] == [], said.stdout


@pytest.mark.parametrize("step", STEPS)
def test_steps(kind: str, place: Place, step: str) -> None:
    named = REFUSED.get((kind, step))
    if named is None:
        try:
            STEPS[step](place)
        except WriteFailed as error:
            # Of each process, the first writer is refused; it is written once more, as the error says.
            if CODECS.get(kind, "no codec") not in str(error):
                raise
            STEPS[step](place)
        return
    with pytest.raises(Refused) as refused:
        STEPS[step](place)
    assert named in str(refused.value)


@pytest.mark.soak
@pytest.mark.parametrize("name", KINDS_HERE)
def test_a_merge_of_many_events(name: str, tmp_path: Path) -> None:
    need_go()
    with Kfake(KINDS[name], tmp_path) as broker, place_on(broker, tmp_path, BIG // 2) as place:
        STEPS["merge"](place)


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
        said = doctor(broker.bootstrap)
        assert said.returncode == 1, said.stdout + said.stderr
        assert [word for word in NAMED[name] if word not in said.stdout] == [], said.stdout
        controller = ControllerProcess(broker.bootstrap, tmp_path / "controller").start()
        try:
            code = controller.ended()
        except subprocess.TimeoutExpired:
            pytest.fail(f"it neither leads nor ends: {controller.log_file.read_text()[-2000:]}")
        finally:
            controller.kill()
        words = controller.log_file.read_text()
        assert code != 0
        assert [word for word in NAMED[name] if word not in words] == [], words
        assert topics(broker.bootstrap) == []


@pytest.mark.parametrize(
    ("kind", "replicas", "said"),
    [
        # It lets a controller make topics, and then not look at them.
        (
            UNFIT["settings not shown"],
            "1",
            "; these new topics are deleted again: anabranch.commands",
        ),
        (KINDS["nothing missing"], "3", "INVALID_REPLICATION_FACTOR (38)"),
    ],
    ids=["settings not shown", "too few brokers"],
)
def test_new_topics_of_a_controller_that_ends_are_taken_away(
    kind: Kind, replicas: str, said: str, tmp_path: Path
) -> None:
    need_go()
    asked = "--replication-factor", replicas
    with Kfake(kind, tmp_path) as broker:
        controller = ControllerProcess(
            broker.bootstrap, tmp_path / "controller", arguments=asked
        ).start()
        begun = time.monotonic()
        try:
            assert controller.ended() != 0
        finally:
            controller.kill()
        assert time.monotonic() - begun < ENDS_S, "also where code is compiled for the first time"
        words = controller.log_file.read_text()
        assert said in words
        assert "loading compiled code" not in words
        assert words.count("WARNING") <= 1, words
        assert topics(broker.bootstrap) == []


@pytest.mark.soak
@pytest.mark.parametrize(
    ("step", "whole"),
    [("one-shots", 1), ("two processes", 2 * FEW), ("merge", 2 * FEW), ("readers", 20)],
)
def test_ends_that_are_too_low_are_never_believed(step: str, whole: int, tmp_path: Path) -> None:
    """The broker's ends are below what it has acknowledged. A step is right, or ends with an error."""
    need_go()
    with Kfake(LIAR, tmp_path) as broker:
        said = doctor(broker.bootstrap)
        assert said.returncode == 1, said.stdout + said.stderr
        assert "acknowledged" in said.stdout, said.stdout
        with place_on(broker, tmp_path, FEW, timeout=10, patience=15) as place:
            with suppress(AnabranchError, Refused):
                STEPS[step](place)
            for stream in place.streams:
                assert place.committed(stream).total() % whole == 0


def topics(bootstrap: str) -> list[str]:
    """All topics of a cluster but the brokers' own."""
    found = AdminClient({"bootstrap.servers": bootstrap}).list_topics(timeout=30).topics
    return sorted(name for name in found if not name.startswith("__"))


def doctor(bootstrap: str) -> subprocess.CompletedProcess[str]:
    """`anabranch doctor --broker`."""
    return subprocess.run(
        [sys.executable, "-m", "anabranch.cli", "doctor", "--broker", "--bootstrap", bootstrap],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
