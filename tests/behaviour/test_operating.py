"""A controller as its operator meets it: on a read-only file system, started wrongly, watched over HTTP."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

import anabranch
from anabranch.clock import SystemClock
from anabranch.controller.metrics import NUMBERS
from anabranch.errors import NotAuthorized, NotReady
from anabranch.infra.broker import EmbeddedBroker
from anabranch.infra.sockets import free_port
from anabranch.librdkafka import groups
from anabranch.librdkafka.admin import KafkaAdmin
from anabranch.librdkafka.groups import KafkaGroupMember
from anabranch.librdkafka.journal_writer import KafkaJournals
from anabranch.librdkafka.options import Options
from anabranch.ports import TopicPartition
from tests.cluster import ControllerProcess
from tests.conftest import Broker
from tests.waiting import wait_until

pytestmark = pytest.mark.broker
ROOT = Path(__file__).parents[2]

# Root may write anywhere, but for what its bounding set lacks (CAP_DAC_OVERRIDE); it ends with its owner.
WITHOUT_POWERS = """
import ctypes, os, signal, sys
prctl = ctypes.CDLL(None).prctl
prctl(1, signal.SIGKILL)
if os.geteuid() == 0:
    assert prctl(24, 1, 0, 0, 0) == 0
os.execv(sys.executable, [sys.executable, "-m", "anabranch.cli", *sys.argv[1:]])
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A broker that asks for rights to topics and groups with rules."""
    properties = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    folder = tmp_path_factory.mktemp("operating") / "broker"
    with EmbeddedBroker(folder, properties=properties, quick_start=True) as started:
        yield started


@pytest.fixture(scope="module")
def controller(
    broker: Broker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControllerProcess]:
    """Tests share it, and leave it the lead."""
    port = free_port()
    folder = tmp_path_factory.mktemp("controller")
    started = ControllerProcess(
        broker.bootstrap,
        folder / "one",
        prefix=f"p{port}",
        arguments=("--http", f"127.0.0.1:{port}", "--log-json"),
    ).start()
    try:
        started.wait_leading()
        yield started
    finally:
        assert started.process is not None
        started.process.terminate()
        started.process.wait(30)


def get(controller: ControllerProcess, path: str) -> tuple[int, str]:
    try:
        with urlopen(f"http://{controller.arguments[1]}/{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_what_an_operator_sees(controller: ControllerProcess) -> None:
    with anabranch.connect(controller.bootstrap, prefix=controller.prefix) as client:
        stream = f"s{controller.prefix}/a"
        client.create_stream(stream)
        with client.begin(f"s{controller.prefix}") as txn:
            txn.write(stream, b"v")
            txn.commit()
        with pytest.raises(anabranch.errors.StreamExists):
            client.create_stream(stream, segments=3)
    wanted = [
        'anabranch_refusals_total{code="StreamExists",control_partition="0"} 1.0',
        'anabranch_streams{control_partition="0",state="ACTIVE"} 1.0',
        'anabranch_term{control_partition="0"} 1.0',
    ]
    until = time.monotonic() + 30
    while not set(wanted) <= set((page := get(controller, "metrics")[1]).splitlines()):
        assert time.monotonic() < until, page
        time.sleep(0.1)
    rounds = float(re.findall(r"^anabranch_rounds_total\S* (\S+)", page, re.M)[0])
    assert rounds >= 3
    assert f'anabranch_round_seconds_bucket{{control_partition="0",le="+Inf"}} {rounds}' in page
    assert all(f"# HELP anabranch_{name}" in page for name in NUMBERS)
    assert [get(controller, path) for path in ("live", "ready")] == [(200, "ok\n")] * 2
    assert get(controller, "other")[0] == 404
    status = json.loads(controller.status_file.read_text())["written_at"]
    renewed = controller.status_file
    wait_until(lambda: json.loads(renewed.read_text())["written_at"] != status)
    said = [json.loads(line) for line in controller.log_file.read_text().splitlines()]
    assert any("leading, term 1" in line["message"] for line in said)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]{12}Z", x["time"]) for x in said)


def start(broker: Broker, data: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "anabranch.cli", "controller", "-b", broker.bootstrap]
    command += ["--data-dir", str(data), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.parametrize(
    "what",
    [
        "address",
        *(pytest.param(what, marks=pytest.mark.long) for what in ("folder", "file", "port")),
    ],
)
def test_what_is_wrong_is_said_when_it_starts(
    broker: Broker, controller: ControllerProcess, tmp_path: Path, what: str
) -> None:
    same = ("--cluster-prefix", controller.prefix)
    file = tmp_path / "file"
    file.touch()
    fresh = tmp_path / "two"
    data, arguments, code, text = {
        "folder": (
            controller.folder / "data",
            same,
            6,
            rf"FolderInUse: .* by pid {controller.pid}:",
        ),
        "file": (file / "data", same, 6, "FolderUnusable: the folder .*: Not a directory"),
        "address": (
            fresh,
            ("--http", "localhost"),
            2,
            "InvalidArgument: --http 'localhost' is not",
        ),
        "port": (fresh, controller.arguments[:2], 6, "PortTaken: port [0-9]+ is in use"),
    }[what]
    done = start(broker, data, *arguments)
    assert (done.returncode, bool(re.search(text, done.stderr))) == (code, True), done.stderr
    assert "Traceback" not in done.stderr
    assert controller.leading() == [0]


@pytest.mark.soak
def test_a_standby_logs_who_leads(
    broker: Broker, controller: ControllerProcess, tmp_path: Path
) -> None:
    second = ControllerProcess(broker.bootstrap, tmp_path / "two", controller.prefix).start()
    try:
        until = time.monotonic() + 60
        wanted = rf"standing by; \S+/{controller.pid}/\d+ led last, term 1"
        while not re.search(wanted, second.log_file.read_text()):
            assert second.running
            assert time.monotonic() < until
            time.sleep(0.1)
    finally:
        assert second.process is not None
        second.process.terminate()
        second.process.wait(30)


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="the powers of root are Linux's")
def test_it_merges_from_a_read_only_package_without_a_home(broker: Broker, tmp_path: Path) -> None:
    place = tmp_path / "read-only"
    shutil.copytree(
        ROOT / "anabranch", place / "anabranch", ignore=shutil.ignore_patterns("__pycache__")
    )
    for folder, _, _ in os.walk(place):
        os.chmod(folder, 0o555)  # noqa: S103
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA", "ANABRANCH"))}
    environment |= {"PYTHONPATH": str(place), "HOME": str(place)}
    status, log = tmp_path / "status.json", tmp_path / "log"
    command = [sys.executable, "-c", WITHOUT_POWERS, "controller", "-b", broker.bootstrap]
    command += ["--cluster-prefix", "readonly", "--data-dir", str(tmp_path / "data")]
    command += ["--status-file", str(status)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, cwd=tmp_path
        )
    try:
        until = time.monotonic() + 110
        while not status.exists() or not json.loads(status.read_text())["leading"]:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        with anabranch.connect(broker.bootstrap, prefix="readonly") as client:
            client.create_stream("read-only/a")
            with client.begin("read-only", keepalive=60) as txn:
                txn.token()
                for i in range(5_000):
                    txn.write("read-only/a", b"%d" % i)
                assert txn.commit().counts.committed == 5_000
        assert process.poll() is None
    finally:
        process.terminate()
        process.wait(30)
        for folder, _, _ in os.walk(place):
            os.chmod(folder, 0o755)  # noqa: S103
    assert list((tmp_path / "data/compiled").rglob("*.nbc"))
    assert "WARNING" not in log.read_text()


def allow(broker: EmbeddedBroker, topic: str, *operations: AclOperation) -> None:
    """Create a topic of which everybody may do just that."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(20)
    bindings = [
        AclBinding(
            ResourceType.TOPIC,
            topic,
            ResourcePatternType.LITERAL,
            "User:*",
            "*",
            operation,
            AclPermissionType.ALLOW,
        )
        for operation in operations
    ]
    for done in admin.create_acls(bindings).values():
        done.result(20)


@pytest.mark.soak
def test_a_missing_right_is_named_at_once(guarded: EmbeddedBroker) -> None:
    allow(guarded, "rights.hidden", AclOperation.ALTER_CONFIGS)
    allow(guarded, "rights.journal", AclOperation.DESCRIBE)
    options, clock = Options(guarded.bootstrap, {}), SystemClock()
    admin = KafkaAdmin(options, clock)
    begun = time.monotonic()
    deadline = begun + 60
    while True:  # the broker takes up its rights a moment later
        try:
            admin.end_offsets({("rights.hidden", 0): 0}, deadline)
        except NotAuthorized as error:
            assert "right Describe on the topic rights.hidden" in str(error)  # noqa: PT017
            break
    with pytest.raises(NotAuthorized, match=r"right Describe on the topic rights\.hidden"):
        admin.partition_counts(["rights.hidden"], deadline)
    needed = {"rights.journal": AclOperation.WRITE}
    with pytest.raises(NotAuthorized, match=r"right Write on the topic rights\.journal"):
        admin.partition_counts(["rights.journal"], deadline, needed)
    writer = KafkaJournals(options, admin, clock, 30).writer()
    writer.open("rights.journal", [0], deadline)
    writer.write("rights.journal", 0, None, b"v", [], 1)
    with pytest.raises(NotAuthorized, match=r"right Write on the topic .*: rights\.journal"):
        writer.flush({("rights.journal", 0): 0}, deadline)  # type: ignore[dict-item]
    assert time.monotonic() - begun < 20


@contextmanager
def without_describe(broker: EmbeddedBroker, group: str) -> Iterator[None]:
    """While this is open, no client may describe the group."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    pattern = ResourceType.GROUP, group, ResourcePatternType.LITERAL, "User:*", "*"
    rules = [
        AclBinding(*pattern, AclOperation.ALL, AclPermissionType.ALLOW),
        AclBinding(*pattern, AclOperation.DESCRIBE, AclPermissionType.DENY),
    ]
    for done in admin.create_acls(rules).values():
        done.result(20)
    yield
    any_of = AclBindingFilter(*pattern, AclOperation.ANY, AclPermissionType.ANY)
    for gone in admin.delete_acls([any_of]).values():
        gone.result(20)
    wait_until(lambda: not admin.describe_acls(any_of).result(20))


@pytest.mark.soak
def test_a_group_without_the_right_is_named_at_once(
    guarded: EmbeddedBroker, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that knows its coordinator is refused the offsets, another one the search for it."""
    group = f"g{unique}"
    AdminClient({"bootstrap.servers": guarded.bootstrap}).create_topics([NewTopic(group, 1, 1)])[
        group
    ].result(20)
    monkeypatch.setattr(groups, "_ASK_S", 2.0)
    place, options = TopicPartition(group, 0), Options(guarded.bootstrap, {})

    def ask(member: KafkaGroupMember) -> None:
        try:
            member.committed([place])
        except NotReady:
            member.serve(0.1)  # librdkafka says the rest only where it is polled

    def is_named(member: KafkaGroupMember) -> bool:
        begun = time.monotonic()
        try:
            ask(member)
        except NotAuthorized as error:
            assert f"right Read on the group {group}" in str(error)  # noqa: PT017
            assert time.monotonic() - begun < 15
            return True
        return False

    with closing(KafkaGroupMember(options, group)) as known:
        assert known.committed([place]) == {}
        with without_describe(guarded, group):
            for member in (known, KafkaGroupMember(options, group)):
                with closing(member):
                    wait_until(partial(is_named, member))


@pytest.mark.soak
def test_brokers_that_do_not_answer_are_named_with_the_cause() -> None:
    port = free_port()
    options: Mapping[str, str] = {}
    admin = KafkaAdmin(Options(f"127.0.0.1:{port},no.such.invalid:1", options), SystemClock())
    with pytest.raises(NotReady) as caught:
        admin.partition_counts(["a"], time.monotonic() + 1)
    assert f"no broker answers at 127.0.0.1:{port}: Connection refused" in str(caught.value)
    assert "no broker answers at no.such.invalid:1: the host is not known" in str(caught.value)
