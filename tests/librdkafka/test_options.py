"""Options of connect are passed on or refused by name, never ignored; repeated failures are logged seldom."""

from __future__ import annotations

import _thread
import logging
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import Consumer, Producer

import anabranch
from anabranch import errors
from anabranch.librdkafka import options as kafka_logging
from anabranch.librdkafka.options import Options, named_options
from anabranch.reading.iteration import check_group
from anabranch.spark.options import Options as SparkOptions
from tests.cli.conftest import COMMAND


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_idempotence", False), ("enable.idempotence", "false"), ("acks", 1), ("acks", "0"),
        ("request.required.acks", 1), ("transactional_id", "x"), ("isolation_level", "read_uncommitted"),
        ("delivery_report_only_error", False), ("partitioner", "murmur2"), ("group_id", "g"),
        ("auto_offset_reset", "latest"), ("enable_auto_commit", True), ("bootstrap_servers", "elsewhere:1"),
        ("on_delivery", print), ("allow_auto_create_topics", True), ("transaction_timeout_ms", 5),
        ("partition_assignment_strategy", "cooperative-sticky"), ("group_protocol", "consumer"),
        ("default.topic.config", {}), ("enable_partition_eof", True),
    ],
)  # fmt: skip
def test_what_would_break_a_promise_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(errors.UnsupportedSetting, match=re.escape(name).replace("_", "[_.]")):
        Options("b:1", named_options({name: value} if "." in name else None,
                                     {} if "." in name else {name: value}))  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("acks", "all"), ("acks", -1), ("enable_idempotence", True), ("isolation_level", "read_committed"),
        ("enable_auto_commit", False), ("group_protocol", "classic"),
    ],
)  # fmt: skip
def test_what_is_so_anyway_may_be_said(name: str, value: Any) -> None:
    options = Options("b:1", named_options(None, {name: value}))
    assert options.journal(1 << 20)["enable.idempotence"] is True
    assert options.journal(1 << 20)["acks"] == "all"
    assert options.reader("g", "earliest")["isolation.level"] == "read_committed"


def test_options_go_to_whom_they_are_for() -> None:
    given = {
        "security_protocol": "SSL",
        "compression_type": "zstd",
        "fetch_wait_max_ms": 7,
        "error_cb": print,
        "partition_assignment_strategy": "roundrobin",
    }
    options = Options("b:1", named_options({"client.id": "me"}, given))
    everyone = (
        options.admin(),
        options.commands(1000),
        options.replies(),
        options.journal(1000),
        options.reader("g", "latest"),
    )
    for config in everyone:
        assert (config["security.protocol"], config["client.id"]) == ("SSL", "me")
        assert config["error_cb"] is print
        assert config["allow.auto.create.topics"] is False
    assert options.journal(1000)["compression.type"] == "zstd"
    assert "compression.type" not in options.commands(1000)
    reader = options.reader("g", "latest")
    assert reader["fetch.wait.max.ms"] == 7
    assert reader["partition.assignment.strategy"] == "roundrobin"
    assert "compression.type" not in reader
    assert options.replies()["fetch.wait.max.ms"] != 7


def test_a_synonym_replaces_our_default() -> None:
    options = Options("b:1", {"compression.codec": "gzip", "queue.buffering.max.ms": 3})
    journal = options.journal(1 << 20)
    assert journal["compression.codec"] == "gzip"
    assert "compression.type" not in journal
    assert "linger.ms" not in journal


def test_a_batch_is_never_larger_than_its_topic_takes() -> None:
    assert Options("b:1", {}).journal(50_000)["batch.size"] == 50_000
    assert Options("b:1", {}).journal(50_000)["message.max.bytes"] == 50_000
    assert Options("b:1", {}).journal(1 << 30)["batch.size"] == 250_000
    small = Options("b:1", {"message.max.bytes": 2000})
    assert small.journal(50_000)["message.max.bytes"] == 2000
    sizes = [Options("b:1", {}).column_batch_bytes(limit) for limit in (50_000, 1 << 30)]
    assert sizes == [50_000, 1_000_000]
    assert small.column_batch_bytes(50_000) == 2000
    assert Options("b:1", {"batch.size": 9000}).column_batch_bytes(1 << 30) == 9000


def test_raw_connections_get_what_was_given() -> None:
    given = {
        "client.id": "me",
        "request.timeout.ms": 7000,
        "fetch.min.bytes": 5,
        "sasl.username": "u",
    }
    assert Options("b:1", given).raw() == {
        "client.id": "me",
        "request.timeout.ms": 7000,
        "sasl.username": "u",
    }


@pytest.mark.parametrize(
    "text", ["", " ", " g", "\n", "\u3000g", "g\0h", "g" * 32_768, "ü" * 16_384, "\ud800"]
)
@pytest.mark.parametrize("name", ["group.id", "client.id", "sasl.password"])
def test_a_text_that_librdkafka_would_change_is_refused(name: str, text: str) -> None:
    """librdkafka would end the process for a group's name that has only blanks."""
    what = "a group" if name == "group.id" else "option"
    calls: dict[str, list[Callable[[], object]]] = {
        "group.id": [
            lambda: check_group(text),
            lambda: Options("b:1", {}).reader(text, "error"),
        ]
    }
    for call in calls.get(name, [lambda: Options("b:1", {name: text})]):
        with pytest.raises(errors.InvalidArgument, match=what):
            call()


@pytest.mark.parametrize("text", ["g", "g ", "a b", "ü" * 16_383, "g\n"])
def test_texts_that_it_takes_as_they_are(text: str) -> None:
    assert check_group(text) == text
    assert Options("b:1", {"client.id": text}).admin()["client.id"] == text
    assert Options("b:1", {}).reader(text, "error")["group.id"] == text


def _of_gevent() -> None:
    """Stands in for a function of `_thread`, as `monkey_patch` does; gevent has a test of its own."""


@pytest.mark.parametrize("library", ["eventlet.green.thread"])
@pytest.mark.parametrize("call", ["start_new_thread", "allocate_lock"])
def test_threads_that_are_greenlets_are_refused(
    monkeypatch: pytest.MonkeyPatch, library: str, call: str
) -> None:
    monkeypatch.setattr(_of_gevent, "__module__", library)
    with monkeypatch.context() as patched:
        patched.setattr(_thread, call, _of_gevent)
        with pytest.raises(errors.NotSupported, match="thread=False"):
            anabranch.connect("127.0.0.1:1")
    monkeypatch.setattr(time, "sleep", _of_gevent)  # as with thread=False
    anabranch.connect("127.0.0.1:1").close()


def test_the_same_option_twice_is_refused() -> None:
    with pytest.raises(errors.UnsupportedSetting, match="twice"):
        named_options({"client.id": "a"}, {"client_id": "b"})


@pytest.mark.parametrize("name", ["no_such_option", "ssl_cipher_suites", "broker_address_family"])
def test_what_can_not_be_honoured_everywhere_is_refused_at_once(name: str) -> None:
    with pytest.raises(errors.UnsupportedSetting, match=name.replace("_", r"\.")):
        anabranch.connect("127.0.0.1:1", config={name.replace("_", "."): 3})


def test_no_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANABRANCH_BOOTSTRAP", raising=False)
    with pytest.raises(errors.InvalidArgument, match="ANABRANCH_BOOTSTRAP"):
        anabranch.connect()


def test_the_environment_names_the_cluster_to_python_and_to_commands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "kafka.properties"
    file.write_text("# ours\nclient.id=from-file\nlinger.ms=7\nsasl.password=x=y\n")
    file.chmod(0o600)
    values = {"BOOTSTRAP": "b:1", "PREFIX": "other", "LANE": "etl", "KAFKA_FILE": str(file)}
    for name, value in values.items():
        monkeypatch.setenv(f"ANABRANCH_{name}", value)
    asked: list[tuple[Any, ...]] = []

    def connect_to(*given: Any, **_: Any) -> Any:
        asked.append(given)
        return nullcontext()

    monkeypatch.setattr("anabranch.client.connect.connect_to", connect_to)
    anabranch.connect()
    anabranch.connect("c:2", prefix="p", lane="l", client_id="mine")
    options = {"client.id": "from-file", "linger.ms": "7", "sasl.password": "x=y"}
    assert asked == [
        ("b:1", "other", "etl", options),
        ("c:2", "p", "l", options | {"client.id": "mine"}),
    ]
    monkeypatch.setattr("anabranch.librdkafka.admin.no_broker", lambda _: "")
    CliRunner().invoke(COMMAND, ["series", "list", "nyc"])
    assert asked[2] == asked[0]
    assert SparkOptions({}).connection().librdkafka == tuple(options.items())
    assert SparkOptions({"prefix": "p"}).connection().prefix == "p"
    assert SparkOptions({}).connection().prefix == "other"


def test_the_configuration_file_names_it_where_the_environment_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, password = tmp_path / "anabranch.toml", tmp_path / "password"
    password.write_text("hush\n")
    file.write_text(
        'bootstrap = "f:1"\nlane = "etl"\n[controller]\nmax_open = 7\n'
        f'[kafka]\nclient.id = "me"\nlinger.ms = 7\nsasl.password_file = "{password}"\n'
    )
    for name in ("BOOTSTRAP", "PREFIX", "LANE", "KAFKA_FILE"):
        monkeypatch.delenv(f"ANABRANCH_{name}", raising=False)
    monkeypatch.setenv("ANABRANCH_CONFIG", str(file))
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "anabranch.client.connect.connect_to", lambda *given, **_: asked.append(given)
    )
    options = {"client.id": "me", "linger.ms": "7", "sasl.password": "hush"}
    anabranch.connect()
    assert SparkOptions({}).connection().librdkafka == tuple(options.items())
    assert SparkOptions({}).connection().lane == "etl"
    monkeypatch.setenv("ANABRANCH_LANE", "of-the-environment")
    anabranch.connect("own:1", client_id="mine")
    assert asked == [
        ("f:1", "anabranch", "etl", options),
        ("own:1", "anabranch", "of-the-environment", options | {"client.id": "mine"}),
    ]
    assert caplog.messages == []
    file.write_text('bootstrap = "f:1"\n[kafka]\nsasl.password = "hush"\n')
    file.chmod(0o604)
    anabranch.connect()
    assert [one for one in caplog.messages if f"chmod 600 {file}" in one]
    for text, said in (
        ('bootsrap = "f:1"\n', "line 1: bootsrap is unknown: did you mean bootstrap?"),
        ("bootstrap = 1\n", "line 1: bootstrap must be a text"),
        ('[kafka]\n\nclient.idd = "x"\n', "line 3: client.idd is not known"),
    ):
        file.write_text(text)
        with pytest.raises((errors.InvalidArgument, errors.UnsupportedSetting), match=said):
            anabranch.connect("own:1")


def test_an_options_file_that_all_may_read_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "kafka.properties"
    file.write_text(
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\nsasl.username=a\nsasl.password=secret\n"
    )
    monkeypatch.setenv("ANABRANCH_KAFKA_FILE", str(file))
    for mode, expected in ((0o604, 1), (0o600, 0)):
        file.chmod(mode)
        caplog.clear()
        anabranch.connect("127.0.0.1:1").close()
        warned = [one for one in caplog.messages if f"chmod 600 {file}" in one]
        assert len(warned) == expected
    file.write_text("sasl.password hush\n")
    with pytest.raises(errors.InvalidArgument, match="NAME=VALUE") as refused:
        anabranch.connect("127.0.0.1:1")
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    "arguments", [{"timeout": 0}, {"timeout": -1}, {"one_shot_bytes": -1}, {"prefix": "a.b"}]
)
def test_arguments_out_of_range(arguments: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgument):
        anabranch.connect("127.0.0.1:1", **arguments)


def test_no_broker_is_not_ready() -> None:
    with (
        anabranch.connect("127.0.0.1:1", timeout=0.5, log_level=0) as client,
        pytest.raises((errors.NotReady, errors.DeadlineExceeded)),
    ):
        client.streams()


def test_everything_public_is_there() -> None:
    for name in anabranch.__all__:
        assert getattr(anabranch, name) is not None
    assert set(anabranch.__all__) <= set(dir(anabranch))
    with pytest.raises(AttributeError):
        anabranch.no_such_name  # noqa: B018


# -- log lines -----------------------------------------------------------------------------------------

LINE = "%s [%s] %s"
AWAY = "[thrd:b:1/1]: b:1/1: Connect to ipv4#b:1 failed: Connection refused (after %dms in state CONNECT)"


def test_failures_of_one_kind_are_logged_now_and_then() -> None:
    now = 100.0
    seldom = kafka_logging.Seldom(lambda: now)

    def said(facility: str, client: str, text: str) -> str | None:
        record = logging.LogRecord("x", 40, "", 0, LINE, (facility, client, text), None)
        return record.getMessage() if seldom.filter(record) else None

    first = said("FAIL", "a#1", AWAY % 0)
    assert first == f"FAIL [a#1] {AWAY % 0}"
    assert [said("FAIL", "a#1", AWAY % n) for n in range(1, 5)] == [None] * 4
    for other in (("FAIL", "a#2", AWAY % 0), ("FAIL", "a#1", "[thrd:b:2/2]: gone"), ("X", "a", "")):
        assert said(*other) == LINE % other
    assert said("X", "a", "") is not None, "no failure: always"
    now += kafka_logging.EVERY_S
    assert said("FAIL", "a#1", AWAY % 9) == f"FAIL [a#1] {AWAY % 9} (and 4 more)"
    assert said("FAIL", "a#1", AWAY % 9) is None


@pytest.mark.parametrize("kind", [Producer, Consumer])
def test_failures_of_librdkafka_are_logged_once(
    kind: type[Producer] | type[Consumer], caplog: pytest.LogCaptureFixture
) -> None:
    """confluent-kafka's log lines have the form that the filter knows."""
    options = Options("127.0.0.1:1", {"reconnect.backoff.max.ms": 20, "reconnect.backoff.ms": 10})
    config = options.commands(1_000_000) if kind is Producer else options.reader("g", "earliest")
    made = kind(config)
    for _ in range(10):
        made.poll(0.1)
    made.close()
    told = [r.getMessage() for r in caplog.records if r.name == kafka_logging.logger.name]
    refused = [line for line in told if line.startswith("FAIL") and "Connection refused" in line]
    assert len(refused) == 1, told
