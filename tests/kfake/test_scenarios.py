"""A table of scenarios: kinds of brokers by steps of a user. Each step works, or is refused by name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from confluent_kafka.admin import AdminClient

import anabranch
from anabranch.errors import AnabranchError, DeadlineExceeded, TransactionAborted, WriteFailed
from anabranch.kafka.cluster import Cluster
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicPartition, TopicSpec
from anabranch.topics.names import journal_topic
from tests.cluster import ControllerProcess, start_cluster, words
from tests.conftest import need_go
from tests.kfake.kinds import FORGETTING, KINDS, LIAR, NO_CODEC, UNFIT, Kind
from tests.kfake.server import ADMIN, Kfake
from tests.kfake.steps import BIG, ROOT, STEPS, Place, Refused

pytestmark = [pytest.mark.broker, pytest.mark.slow(2)]

QUICK = ("Redpanda from 25.3, 3 brokers",)
# Steps that begin at a broker: the others rest on these calls, and users take them on Kafka in tests/behaviour.
QUICK_STEPS = ("one-shots", "merge", "take-over")
QUICK_UNFIT = ("short time-outs", "no room for a stream")
# What a kind can't do at all -> what the refusal names.
REFUSED = {("WarpStream", "altering"): "this cluster can't alter topics: they keep the settings"}
KINDS_HERE = tuple(KINDS)
# Kinds that take fewer codecs than writers begin with -> the codec that is used from then on.
CODECS = {"Event Hubs": "gzip"}
# Each loss that the doctor names on a kind: the need, and a word of what it found. Nothing else is lost there.
ONE_REPLICA = ("replicas", "is lost with its broker")
NO_CUT = ("calls", "no DeleteRecords: journals are never cut")
SMALLER = ("size", "messages of 8388608 bytes, not of 16777216")
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
    "Confluent Cloud": {SMALLER},
    "MSK Serverless": {SMALLER},
    "Event Hubs": {
        ("a stream's topics", "does not report retention.ms and retention.bytes"),
        ("a table's topics", "does not report retention.ms and retention.bytes"),
        ONE_REPLICA,
        ("compression", "not taken: snappy, lz4, zstd; taken: none, gzip"),
        ("alter settings", "altered, and the broker does not report it"),
    },
    "no codec": {ONE_REPLICA, ("compression", "taken: none")},
    "dry runs make topics": {("dry runs", "a dry run makes the topic"), ONE_REPLICA},
    "dry runs are bare": {NO_CUT, ("calls", "no DescribeProducers"), ONE_REPLICA},
}


class Unfit(NamedTuple):
    """What is said of a cluster that can't carry a controller. ``fails``: the needs of the doctor's rows.

    ``code``: the exit code of a controller; None: it leads, and no stream can be made, or believed.
    ``words``: in these rows, and the controller's last words.
    """

    fails: set[str]
    code: int | None
    words: tuple[str, ...]


_CONTROL, _STREAM, _TABLE = "control topics", "a stream's topics", "a table's topics"
_TIMES = ("transaction.max.timeout.ms", "--native-timeout 10")
_ROOM = "let the cluster have 6 topics and 13 partitions"
_ALL_TOPICS = {_CONTROL, _STREAM, _TABLE}
_OWN = {"topics of anabranch"}
_OF_IDS = {"transaction time-out", "native transactions", "fencing"}
NAMED = {
    "no transactions": Unfit({"calls"}, 6, ("no AddPartitionsToTxn, EndTxn: needed for",)),
    "no groups": Unfit({"calls"}, 6, ("no JoinGroup: needed for",)),
    "no settings": Unfit({"calls"}, 6, ("no DescribeConfigs: needed for",)),
    "an old Fetch": Unfit({"calls"}, 6, ("no Fetch: needed for",)),
    "short time-outs": Unfit({"transaction time-out"}, 6, _TIMES),
    "few partitions": Unfit({_CONTROL, _TABLE}, 6, ("number of partitions (4)", _ROOM)),
    "a policy": Unfit(
        _ALL_TOPICS, 6, ("POLICY_VIOLATION", "limit of 3600000", "let brokers take retention.ms=")
    ),
    "small messages": Unfit(
        _ALL_TOPICS, 6, ("limit of 2097152", "let brokers take max.message.bytes=4194304")
    ),
    "settings not shown": Unfit(_ALL_TOPICS, 2, ("the right DescribeConfigs on the topic",)),
    "topics not shown": Unfit(_ALL_TOPICS | _OWN, 2, ("right Describe",)),
    "no right to make topics": Unfit(_ALL_TOPICS | _OWN, 2, ("right Create",)),
    "no right to transactions": Unfit(_OF_IDS, 2, ("right Write", "transactional id")),
    "time always deletes": Unfit(_ALL_TOPICS, 2, ("retention.ms=3600000; set",)),
    "deletions are forgotten": Unfit({_CONTROL, _TABLE}, 2, ("delete.retention.ms=3600000; set",)),
    "no room for a stream": Unfit({_STREAM, _TABLE}, None, ("number of partitions (15)", _ROOM)),
    "short ends": Unfit(
        {"ends of partitions"}, None, ("is 1, after it has acknowledged all up to 3",)
    ),
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
def place(
    kfake: Kfake,
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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.soak if kind.brokers > 1 else pytest.mark.long)
        for name, kind in (KINDS | {"no codec": NO_CODEC}).items()
    ],
)
def test_the_doctor_says_what_works(name: str, tmp_path: Path) -> None:
    need_go()
    with Kfake(KINDS.get(name, NO_CODEC), tmp_path) as broker:
        code, rows = doctor(broker)
        assert topics(broker) == []
    assert code == 0, rows
    lost = [row for row in rows if row["state"] != "works"]
    named = LOST.get(name, set())
    assert len(lost) == len(named), lost
    for need, word in named:
        assert any(row["need"] == need and word in row["found"] for row in lost), (need, lost)


@pytest.mark.parametrize(
    "step",
    [pytest.param(step, marks=() if step in QUICK_STEPS else pytest.mark.long) for step in STEPS],
)
def test_each_step_works_or_is_refused_on_each_kind(kind: str, place: Place, step: str) -> None:
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
    [pytest.param(name, marks=() if name in QUICK_UNFIT else pytest.mark.soak) for name in NAMED],
)
def test_an_unfit_cluster_is_named_before_a_topic_is_made(name: str, tmp_path: Path) -> None:
    need_go()
    fails, exits, named = NAMED[name]
    with Kfake(UNFIT[name], tmp_path) as broker:
        code, rows = doctor(broker)
        assert code == 1, rows
        assert in_state(rows, "does not work") == fails
        for row in rows:
            if row["state"] == "does not work":
                said = f"{row['found']}; {row['to_do']}"
                assert [word for word in named if word not in said] == [], row
        assert topics(broker) == []
        if exits is None:
            return
        code, log = ended(broker, tmp_path)
        assert code == exits, log
        assert [word for word in named if word not in log] == [], log
        assert topics(broker) == []


@pytest.mark.parametrize(
    ("kind", "replicas", "said"),
    [
        # It lets a controller make topics, and then not look at them.
        (
            UNFIT["settings not shown"],
            "1",
            "; these new topics are deleted again: anabranch.commands",
        ),
        pytest.param(
            KINDS["nothing missing"],
            "3",
            "INVALID_REPLICATION_FACTOR (38)",
            marks=pytest.mark.soak,
        ),
    ],
    ids=["settings not shown", "too few brokers"],
)
def test_new_topics_of_a_controller_that_ends_are_taken_away(
    kind: Kind, replicas: str, said: str, tmp_path: Path
) -> None:
    need_go()
    with Kfake(kind, tmp_path) as broker:
        begun = time.monotonic()
        code, log = ended(broker, tmp_path, "--replication-factor", replicas)
        assert code != 0
        assert time.monotonic() - begun < ENDS_S, "also where code is compiled for the first time"
        assert said in log
        assert "loading compiled code" not in log
        assert log.count("WARNING") <= 1, log
        assert topics(broker) == []


@pytest.mark.soak
def test_topics_that_are_always_deleted_by_time(tmp_path: Path) -> None:
    """A controller can lead there. Each new stream is refused, and leaves nothing."""
    need_go()
    with Kfake(FORGETTING, tmp_path) as broker:
        code, rows = doctor(broker)
        assert code == 1, rows
        assert "retention.ms" in str(rows)
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
    with (
        Kfake(LIAR, tmp_path) as broker,
        place_on(broker, tmp_path, FEW, timeout=10, patience=15) as place,
    ):
        with suppress(AnabranchError, Refused):
            STEPS[step](place)
        for stream in place.streams:
            assert place.committed(stream).total() % whole == 0


@pytest.mark.long
def test_an_end_that_is_too_low_is_named(tmp_path: Path) -> None:
    need_go()
    with Kfake(LIAR, tmp_path) as broker, place_on(broker, tmp_path, FEW) as place:
        stream = place.stream(f"{place.scope()}/lied", segments=1)
        with place.client.begin(stream.partition("/")[0]) as txn:
            for i in range(50):
                txn.write(stream, b"%d" % i, key=b"k")
            with pytest.raises(DeadlineExceeded) as told:
                txn.flush(timeout=4)
            txn.abort()
        named = re.search(
            r"\.lied\.journal\[0\] ends at (\d+), but they have acknowledged all up to (\d+)\.",
            str(told.value),
        )
        assert named, told.value
        assert int(named[1]) < int(named[2])
        assert place.committed(stream).total() == 0


def ended(broker: Kfake, folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit code of a controller that can't lead there, and its log."""
    given = (*arguments, *words(broker.options()))
    controller = ControllerProcess(broker.bootstrap, folder / "controller", arguments=given).start()
    try:
        return controller.ended(), controller.log_file.read_text()
    except subprocess.TimeoutExpired:
        pytest.fail(f"it neither leads nor ends: {controller.log_file.read_text()[-2000:]}")
    finally:
        controller.kill()


def topics(broker: Kfake) -> list[str]:
    """All topics of a cluster but the brokers' own."""
    options: dict[str, str | int | float | bool] = {
        "bootstrap.servers": broker.bootstrap,
        **broker.options(ADMIN),
    }
    found = AdminClient(options).list_topics(timeout=30).topics
    return sorted(name for name in found if not name.startswith("__"))


def doctor(broker: Kfake) -> tuple[int, list[dict[str, str]]]:
    """The exit code of `anabranch doctor --broker`, and its rows: each says what to do, unless it works."""
    asked = ["doctor", "--broker", "--json", "--bootstrap", broker.bootstrap]
    done = subprocess.run(
        [sys.executable, "-m", "anabranch.cli", *asked, *words(broker.options())],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    assert done.stdout, done.stderr
    rows: list[dict[str, str]] = json.loads(done.stdout)["rows"]
    for row in rows:
        assert row.keys() == {"need", "state", "found", "to_do"}
        assert all((row["need"], row["found"])), row
        assert bool(row["to_do"]) == (row["state"] != "works"), row
    return done.returncode, rows


def in_state(rows: list[dict[str, str]], state: str) -> set[str]:
    """The needs of the rows in a state."""
    return {row["need"] for row in rows if row["state"] == state}
