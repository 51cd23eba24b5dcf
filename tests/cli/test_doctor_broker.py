"""`anabranch doctor --broker`: what it says of a cluster that gives all it needs, and of one that does not."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from anabranch.cli import doctor, options
from anabranch.cli.doctor import State
from anabranch.cli.options import Target
from anabranch.controller import service
from anabranch.controller.config import ControllerOptions
from anabranch.errors import NotAuthorized
from anabranch.infra.broker import EmbeddedBroker
from anabranch.kafka import admin, calls
from anabranch.kafka.calls import CREATE_TOPICS, Api
from anabranch.kafka.cluster import Cluster
from anabranch.kafka.connection import Connection
from anabranch.kafka.idempotent_producer import JournalProducer
from anabranch.kafka.log import KafkaLog
from anabranch.kafka.probe import FAILS, LOSS, WORKS
from anabranch.kafka.transactional_producer import KafkaProducer
from anabranch.ports import LogRefused, TopicInfo
from anabranch.protocol.legal_names import STATE
from anabranch.topics.creation import create_control_topics
from anabranch.topics.rights import GROUP, TOPIC, Right, controller_rights
from tests.cli.conftest import Run
from tests.conftest import Broker
from tests.secured import secured_broker

pytestmark = [pytest.mark.broker, pytest.mark.unsecured]
Patch = Callable[[pytest.MonkeyPatch], None]
DESCRIBE = "DescribeConfigs"
Rows = dict[str, list[dict[str, str]]]


def without(*names: str) -> Patch:
    """Brokers that do not offer these calls."""
    greet = Connection.greet
    keys = {getattr(calls, name).key for name in names}

    def patched(self: Connection, deadline: float) -> None:
        greet(self, deadline)
        self.versions = {key: of for key, of in self.versions.items() if key not in keys}

    return lambda patch: patch.setattr(Connection, "greet", patched)


def makes_topics_in_dry_runs(patch: pytest.MonkeyPatch) -> None:
    ask = Connection.ask

    def patched(self: Connection, api: Api, deadline: float, /, **fields: Any) -> Any:
        if api is CREATE_TOPICS:
            fields["validate_only"] = False
        return ask(self, api, deadline, **fields)

    patch.setattr(Connection, "ask", patched)


def says_a_lower_end(patch: pytest.MonkeyPatch) -> None:
    """As brokers do that take the begin of the last batch for its end."""
    list_offsets = admin.list_offsets

    def patched(*given: Any, **more: Any) -> Any:
        found = list_offsets(*given, **more)
        return {place: max(0, end - 2) for place, end in found.items()}

    patch.setattr(admin, "list_offsets", patched)


def takes_gzip_alone(patch: pytest.MonkeyPatch) -> None:
    append = JournalProducer.append

    def patched(self: JournalProducer, partition: Any, batch: Any, deadline: float) -> None:
        if batch.codec > 1:
            raise LogRefused("the broker does not know the codec", 76)
        append(self, partition, batch, deadline)

    patch.setattr(JournalProducer, "append", patched)


def keeps_no_transactions_in_compacted_topics(patch: pytest.MonkeyPatch) -> None:
    append = KafkaProducer.append

    def patched(self: KafkaProducer, batches: Any) -> list[int]:
        if any(place.topic.endswith(STATE) for place, _ in batches):
            raise LogRefused("the broker takes no native transactions in compacted topics", 87)
        return append(self, batches)

    patch.setattr(KafkaProducer, "append", patched)


def fences_nothing(patch: pytest.MonkeyPatch) -> None:
    producer, count = KafkaLog.producer, iter(range(100))

    def patched(self: KafkaLog, transactional_id: str, *, timeout: float) -> KafkaProducer:
        return producer(self, f"{transactional_id}.{next(count)}", timeout=timeout)

    patch.setattr(KafkaLog, "producer", patched)


def deletes_by_time_always(patch: pytest.MonkeyPatch) -> None:
    describe = admin.describe_topics

    def patched(*given: Any) -> Mapping[str, TopicInfo]:
        found = describe(*given)
        for info in found.values():
            if info.config.get("retention.ms") == "-1":
                info.config["retention.ms"] = "604800000"  # type: ignore[index]
        return found

    patch.setattr(admin, "describe_topics", patched)


def takes_8_mib(patch: pytest.MonkeyPatch) -> None:
    describe = admin.describe_topics

    def patched(*given: Any) -> Mapping[str, TopicInfo]:
        found = describe(*given)
        for info in found.values():
            if int(info.config.get("max.message.bytes", 0)) > 8 << 20:
                info.config["max.message.bytes"] = str(8 << 20)  # type: ignore[index]
        return found

    patch.setattr(admin, "describe_topics", patched)


def nothing(patch: pytest.MonkeyPatch) -> None:
    del patch


def ask(run: Run, bootstrap: str, prefix: str, *more: str) -> tuple[int, Rows]:
    """The exit code, and the rows by need."""
    done = run(
        "doctor", "--broker", "--json", "--cluster-prefix", prefix, *more, bootstrap=bootstrap
    )
    rows: Rows = {}
    for row in json.loads(done.stdout)["rows"]:
        rows.setdefault(row["need"], []).append(row)
    return done.exit_code, rows


@pytest.mark.parametrize(
    ("patch", "code", "need", "state", "told"),
    [
        # What is for SASL alone is no loss.
        pytest.param(
            without("SASL_HANDSHAKE", "SASL_AUTHENTICATE"), 0, "calls", WORKS, ["all"], id="gives all"
        ),
        pytest.param(
            without("ADD_PARTITIONS_TO_TXN", "END_TXN", "DESCRIBE_CONFIGS"), 1, "calls", FAILS,
            ["no AddPartitionsToTxn, EndTxn: needed for", "no DescribeConfigs: needed for"],
            id="lacks needed calls",
        ),
        pytest.param(
            without("DELETE_RECORDS", "INCREMENTAL_ALTER_CONFIGS", "DESCRIBE_PRODUCERS", "CREATE_PARTITIONS"), 0,
            "calls", LOSS,
            [
                "no DeleteRecords: journals are never cut", "are refused: settings stay",
                "no DescribeProducers: a marker", "can't be scaled beyond",
            ],
            id="lacks other calls",
            marks=pytest.mark.long,
        ),
        *[
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (says_a_lower_end, 1, "ends of partitions", FAILS, ["is 1, after it has acknowledged"]),
                (makes_topics_in_dry_runs, None, "dry runs", LOSS, ["a dry run makes the topic"]),
                (deletes_by_time_always, 1, "a stream's topics", FAILS, ["retention.ms=604800000"]),
                (takes_gzip_alone, 0, "compression", LOSS, ["taken: none, gzip"]),
                (takes_8_mib, 0, "size", LOSS, ["take messages of 8388608 bytes, not of 16777216: limits"]),
                (
                    keeps_no_transactions_in_compacted_topics, 1, "native transactions", FAILS,
                    ["in compacted topics"],
                ),
                (fences_nothing, 1, "fencing", FAILS, ["can still write"]),
            )
        ],
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_what_a_cluster_gives(
    run: Run,
    broker: Broker,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
    patch: Patch,
    code: int | None,
    need: str,
    state: str,
    told: list[str],
) -> None:
    with monkeypatch.context() as patched:
        patch(patched)
        found, rows = ask(run, broker.bootstrap, unique)
    for words in told:
        assert any(row["state"] == state and words in row["found"] for row in rows[need]), rows
    assert code in (None, found), rows
    if code == 0:
        others = [row for name, of in rows.items() if name not in (need, "calls") for row in of]
        assert {row["need"] for row in others if row["state"] != WORKS} <= {"replicas"}, rows
    left = AdminClient({"bootstrap.servers": broker.bootstrap}).list_topics(timeout=10).topics
    assert [name for name in left if name.startswith(unique)] == []


@pytest.mark.long
def test_the_answer_is_for_the_options_of_the_controller(
    run: Run, broker: Broker, unique: str
) -> None:
    small = "--max-message-bytes", str(5 << 20)
    code, rows = ask(run, broker.bootstrap, unique, "--control-partitions", "3", *small)
    assert code == 0
    assert rows["control topics"][0]["found"].startswith("6 topics, 21 partitions")
    assert rows["size"][0]["found"] == "a record of 5 MiB is taken"

    with closing(KafkaLog(broker.bootstrap)) as log:
        create_control_topics(log, unique, control_partitions=1)
        log.add_partitions(f"{unique}.control", 3)  # as growth does before it adds commands

        def refused(partitions: str) -> str:
            code, rows = ask(run, broker.bootstrap, unique, "--control-partitions", partitions)
            assert code == 1
            (row,) = rows[f"topics of {unique}"]
            assert (row["state"], row["to_do"]) == (FAILS, "set them as it says")
            return str(row["found"])

        assert f"{unique}.commands: it has 1 partition; add some until it has 2" in refused("2")
        log.add_partitions(f"{unique}.commands", 2)
        assert "control has 3, " in refused("1")


@pytest.fixture(scope="module")
def limited() -> Iterator[EmbeddedBroker]:
    limits = {"transaction.max.timeout.ms": "10000", "group.min.session.timeout.ms": "7000"}
    with EmbeddedBroker(properties=limits, quick_start=True) as broker:
        yield broker
        broker.kill()


@pytest.mark.soak
def test_time_outs_that_a_broker_does_not_take(
    run: Run, limited: EmbeddedBroker, unique: str
) -> None:
    code, rows = ask(run, limited.bootstrap, unique)
    assert code == 1
    wrong = {need: of[0]["found"] for need, of in rows.items() if of[0]["state"] == FAILS}
    assert wrong.keys() == {"transaction time-out", "groups"}
    assert "--native-timeout is above" in wrong["transaction time-out"]
    assert "--session-timeout 6 s is not within" in wrong["groups"]
    assert rows["transaction time-out"][0]["to_do"] == "give controllers --native-timeout 10"
    _, rows = ask(run, limited.bootstrap, unique, "--native-timeout", "9")
    assert rows["transaction time-out"][0]["state"] == WORKS


@pytest.mark.parametrize(
    ("patch", "timeout_s", "told"),
    [
        (
            without("ADD_PARTITIONS_TO_TXN"),
            60,
            "no AddPartitionsToTxn: needed for writing a commit",
        ),
        (without("DELETE_RECORDS"), 9, ""),
    ],
)
def test_a_controller_ends_before_it_makes_anything(
    broker: Broker,
    unique: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    patch: Patch,
    timeout_s: int,
    told: str,
) -> None:
    patch(monkeypatch)
    options = ControllerOptions(
        broker.bootstrap, data_dir=tmp_path, prefix=unique, native_timeout_s=timeout_s
    )
    controller = service.ControllerService(options)
    begun = time.monotonic()
    prepared = asyncio.run(controller._prepared())
    left = AdminClient({"bootstrap.servers": broker.bootstrap}).list_topics(timeout=10).topics
    made = [name for name in left if name.startswith(unique)]
    if told:
        assert time.monotonic() - begun < 60, "it waits"
        assert (prepared, made) == (False, [])
        assert type(controller.failure) is LogRefused
        assert told in str(controller.failure)
    else:
        assert prepared, controller.failure
        assert len(made) == 6
        assert controller._lacks == ("DeleteRecords",)


@pytest.mark.soak
def test_the_process_ends_with_an_exit_code(
    limited: EmbeddedBroker, unique: str, tmp_path: Path
) -> None:
    words = (
        "controller",
        "-b",
        limited.bootstrap,
        "--cluster-prefix",
        unique,
        "--data-dir",
        str(tmp_path),
    )
    done = subprocess.run(
        [sys.executable, "-m", "anabranch.cli", *words],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == service.EXIT_ENVIRONMENT, output
    assert "ERROR   LogRefused: initialise" in output
    assert "--native-timeout is above the brokers' transaction.max.timeout.ms" in output
    assert "; --native-timeout 10 is taken" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("patch", "state", "told"),
    [
        (nothing, State.OK, "offers all that is needed"),
        (without("SASL_AUTHENTICATE"), State.OK, "offers all that is needed"),
        (without("DELETE_RECORDS"), State.WARN, "no DeleteRecords: journals are never cut"),
        (without("DESCRIBE_LOG_DIRS"), State.WARN, "no DescribeLogDirs: `doctor` does not see"),
        (
            without("DESCRIBE_CONFIGS"),
            State.BAD,
            "no DescribeConfigs: needed for making the topics",
        ),
    ],
)
def test_the_short_check_has_the_findings_of_the_long_one(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, patch: Patch, state: str, told: str
) -> None:
    patch(monkeypatch)
    target = Target(broker.bootstrap, "p", 5.0)
    with closing(Cluster(options.raw_settings(target))) as cluster:
        _, row, *_ = doctor._brokers(cluster, target)
    assert row.state == state
    assert row.found.startswith(told)
    shown = options.losses_of(target)
    assert shown == [row.found] * (state == State.WARN), "as `stream list` shows it"


@pytest.mark.long
def test_rights_that_are_missing(run: Run, unique: str, tmp_path: Path) -> None:
    """The probe says which right it lacks; with those of docs/how-to/brokers.md it tries all."""
    whole = list(controller_rights(unique))
    hidden = next(r for r in whole if (r.name, r.operation) == (f"{unique}.status", DESCRIBE))
    probes = [
        Right(TOPIC, f"{unique}-probe-", operation, "", prefixed=True)
        for operation in ("Create", "Read", "Write", "Alter", "AlterConfigs", "Delete", DESCRIBE)
    ] + [Right(GROUP, f"{unique}-probe-", "Read", "", prefixed=True)]
    with secured_broker(tmp_path, "ann") as secured:
        secured.grant("ann", [right for right in whole if right != hidden])
        options = secured.options("ann")
        given = [word for name, value in options.items() for word in ("-X", f"{name}={value}")]
        controller = service.ControllerService(
            ControllerOptions(
                secured.bootstrap, data_dir=tmp_path / "data", prefix=unique, kafka=options
            )
        )
        assert not asyncio.run(controller._prepared())
        assert type(controller.failure) is NotAuthorized
        assert f"the right DescribeConfigs on the topic {hidden.name} is" in str(controller.failure)

        code, rows = ask(run, secured.bootstrap, unique, *given)
        assert code == 1
        assert "the right Describe on the topic is missing" in rows["control topics"][0]["found"]
        assert "grant it" in rows["control topics"][0]["to_do"]
        secured.grant("ann", [*probes, hidden])
        code, rows = ask(run, secured.bootstrap, unique, *given)
        assert code == 0, rows
        (calls_,) = rows["calls"]
        assert calls_["state"] == WORKS, "SASL is in use"
    assert {need for need, of in rows.items() if of[0]["state"] != WORKS} == {"replicas"}


def test_brokers_that_are_away(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ANSWER_S", 0.2)
    code, rows = ask(run, "127.0.0.1:1", "p")
    assert code == 1
    assert rows["brokers"][0]["state"] == FAILS
