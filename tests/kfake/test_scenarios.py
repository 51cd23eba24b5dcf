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
from anabranch.errors import AnabranchError, DeadlineExceeded, WriteFailed
from tests.cluster import ControllerProcess, start_cluster
from tests.conftest import need_go
from tests.kfake.kinds import KINDS, LIAR, NO_CODEC, UNFIT, Kind
from tests.kfake.server import Kfake
from tests.kfake.steps import BIG, ROOT, STEPS, Place, Refused

pytestmark = [pytest.mark.broker, pytest.mark.slow(2)]

QUICK = ("Redpanda from 25.3, 3 brokers",)
QUICK_UNFIT = ("no transactions", "settings not shown", "no room for a stream", "short ends")
# What a kind can't do at all -> what the refusal names.
REFUSED = {("WarpStream", "altering"): "IncrementalAlterConfigs"}
KINDS_HERE = tuple(KINDS)
# Kinds that take fewer codecs than writers begin with -> the codec that is used from then on.
CODECS = {"Event Hubs": "gzip"}
# What works with a loss: need -> words of the doctor's rows. With one broker, `replicas` come along.
LOST: dict[str, dict[str, tuple[str, ...]]] = {
    "WarpStream": {
        "calls": (
            "no DeleteRecords: journals are never cut",
            "no IncrementalAlterConfigs: ",
            "no DescribeProducers: ",
            "no DescribeLogDirs: ",
        )
    },
    "Confluent Cloud": {"size": ("messages of 8388608 bytes, not of 16777216",)},
    "MSK Serverless": {"size": ("messages of 8388608 bytes, not of 16777216",)},
    "Event Hubs": {"compression": ("taken: none, gzip",)},
    "no codec": {"compression": ("taken: none",)},
    "dry runs make topics": {"dry runs": ("makes the topic",)},
    "dry runs are bare": {
        "calls": ("no DeleteRecords: ", "no DescribeProducers, DescribeTransactions: ")
    },
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
_TIMES = ("transaction.max.timeout.ms", "--native-timeout")
_ALL_TOPICS = {_CONTROL, _STREAM, _TABLE}
NAMED = {
    "no transactions": Unfit({"calls"}, 6, ("no AddPartitionsToTxn, EndTxn: needed for",)),
    "no groups": Unfit({"calls"}, 6, ("no JoinGroup: needed for",)),
    "no settings": Unfit({"calls"}, 6, ("no DescribeConfigs: needed for",)),
    "an old Fetch": Unfit({"calls"}, 6, ("no Fetch: needed for",)),
    "short time-outs": Unfit({"transaction time-out"}, 6, _TIMES),
    "few partitions": Unfit({_CONTROL, _TABLE}, 6, ("number of partitions (4)",)),
    "a policy": Unfit({_CONTROL}, 6, ("POLICY_VIOLATION", "retention.ms", "limit of 3600000")),
    "small messages": Unfit(_ALL_TOPICS, 6, ("max.message.bytes", "limit of 2097152")),
    "settings not shown": Unfit(_ALL_TOPICS, 2, ("the right DescribeConfigs on the topic",)),
    "time always deletes": Unfit({_CONTROL}, 2, ("retention.ms=3600000; set",)),
    "deletions are forgotten": Unfit({_CONTROL, _TABLE}, 2, ("delete.retention.ms=3600000; set",)),
    "no room for a stream": Unfit({_STREAM, _TABLE}, None, ("number of partitions (15)",)),
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
        pytest.param(name, marks=pytest.mark.soak if kind.brokers > 1 else ())
        for name, kind in (KINDS | {"no codec": NO_CODEC}).items()
    ],
)
def test_the_doctor_says_what_works(name: str, tmp_path: Path) -> None:
    need_go()
    with Kfake(KINDS.get(name, NO_CODEC), tmp_path) as broker:
        code, rows = doctor(broker.bootstrap)
        assert topics(broker.bootstrap) == []
        one = "," not in broker.bootstrap
    assert code == 0, rows
    lost = LOST.get(name, {}) | ({"replicas": ("1 of each partition",)} if one else {})
    assert in_state(rows, "works with a loss") == lost.keys()
    assert in_state(rows, "does not work") == set()
    for need, words in lost.items():
        found = " ".join(row["found"] for row in rows if row["need"] == need)
        assert [word for word in words if word not in found] == []


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
    [pytest.param(name, marks=() if name in QUICK_UNFIT else pytest.mark.soak) for name in NAMED],
)
def test_an_unfit_cluster_is_named_before_a_topic_is_made(name: str, tmp_path: Path) -> None:
    need_go()
    fails, exits, named = NAMED[name]
    with Kfake(UNFIT[name], tmp_path) as broker:
        code, rows = doctor(broker.bootstrap)
        assert code == 1, rows
        assert in_state(rows, "does not work") == fails
        for row in rows:
            if row["state"] == "does not work":
                assert [word for word in named if word not in row["found"]] == [], row
        assert topics(broker.bootstrap) == []
        if exits is None:
            return
        controller = ControllerProcess(broker.bootstrap, tmp_path / "controller").start()
        try:
            code = controller.ended()
        except subprocess.TimeoutExpired:
            pytest.fail(f"it neither leads nor ends: {controller.log_file.read_text()[-2000:]}")
        finally:
            controller.kill()
        words = controller.log_file.read_text()
        assert code == exits, words
        assert [word for word in named if word not in words] == [], words
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
    with (
        Kfake(LIAR, tmp_path) as broker,
        place_on(broker, tmp_path, FEW, timeout=10, patience=15) as place,
    ):
        with suppress(AnabranchError, Refused):
            STEPS[step](place)
        for stream in place.streams:
            assert place.committed(stream).total() % whole == 0


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


def topics(bootstrap: str) -> list[str]:
    """All topics of a cluster but the brokers' own."""
    found = AdminClient({"bootstrap.servers": bootstrap}).list_topics(timeout=30).topics
    return sorted(name for name in found if not name.startswith("__"))


def doctor(bootstrap: str) -> tuple[int, list[dict[str, str]]]:
    """The exit code of `anabranch doctor --broker`, and its rows: each says what to do, unless it works."""
    words = "doctor", "--broker", "--json", "--bootstrap", bootstrap
    done = subprocess.run(
        [sys.executable, "-m", "anabranch.cli", *words],
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
