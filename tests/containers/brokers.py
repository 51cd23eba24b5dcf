"""Brokers in containers, for tests: ``ANABRANCH_TEST_BROKER=kafka-container`` or ``redpanda``.

``ANABRANCH_TEST_IMAGE`` names another image. The one for Kafka keeps to the conventions of Apache's:
settings from ``KAFKA_*`` variables, ``CLUSTER_ID``, started by ``/etc/kafka/docker/run``.

testcontainers and Docker's client are imported only here, and only when a container is asked for.
"""

from __future__ import annotations

import os
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.infra.fetch import KAFKA_VERSION
from anabranch.infra.settings import Membership, server_properties
from anabranch.infra.sockets import is_ready

if TYPE_CHECKING:
    from testcontainers.core.container import DockerContainer

BROKER_VARIABLE = "ANABRANCH_TEST_BROKER"
IMAGE_VARIABLE = "ANABRANCH_TEST_IMAGE"
EMBEDDED, KAFKA, REDPANDA = "embedded", "kafka-container", "redpanda"
KINDS = (EMBEDDED, KAFKA, REDPANDA)

START_DEADLINE_S = 120.0
_POLL_S = 0.05
_PORT, _OWN_PORT, _CONTROLLER_PORT = 9092, 9094, 9093
# The port that clients see is known only once the container runs, so it begins with waiting for this file.
_START = "/tmp/start-test-broker"
_WAIT = ["sh", "-c", f"while [ ! -f {_START} ]; do sleep 0.1; done; exec sh {_START}"]
_TRANSACTION_VERSION = "transaction.version"
# What the tests need of Redpanda that is otherwise by default or in its mode for containers.
_REDPANDA_SETTINGS = {
    "auto_create_topics_enabled": "false",
    "group_initial_rebalance_delay": "0",
    "group_min_session_timeout_ms": "1000",
}


class NoContainer(Exception):
    """There is no container to test with; the message says why and what to do."""


@dataclass(frozen=True)
class ContainerBroker:
    """A broker in a container."""

    bootstrap: str
    container: DockerContainer

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of its output."""
        out, err = self.container.get_logs()
        return "\n".join((out + err).decode(errors="replace").splitlines()[-lines:])


def kind_from_environment() -> str:
    """Which kind of broker the tests are to use.

    Raises:
        NoContainer: there is no such kind.
    """
    kind = os.environ.get(BROKER_VARIABLE) or EMBEDDED
    if kind not in KINDS:
        raise NoContainer(f"{BROKER_VARIABLE}={kind}: must be one of {', '.join(KINDS)}")
    return kind


def check_engine() -> None:
    """Whether a Docker engine answers.

    Raises:
        NoContainer: none does, or a package is missing.
    """
    wanted = f"{BROKER_VARIABLE}={os.environ.get(BROKER_VARIABLE)} needs a Docker engine"
    try:
        import docker
        import testcontainers  # noqa: F401
    except ImportError as error:
        raise NoContainer(f"{wanted} and the package testcontainers: {error}") from error
    try:
        engine = docker.from_env()
        try:
            engine.ping()
        finally:
            engine.close()
    except docker.errors.DockerException as error:
        raise NoContainer(
            f"{wanted}, and none answers ({error}). Start one, point DOCKER_HOST to it, or run "
            "`scripts/test-container`, which brings one; without the variable the tests use the "
            "embedded broker"
        ) from error


@contextmanager
def start_broker(kind: str, *, transaction_version: int | None = None) -> Iterator[ContainerBroker]:
    """A broker in a container, removed at the end.

    Args:
        kind: `KAFKA` or `REDPANDA`.
        transaction_version: feature level, of Kafka only; None: as the image formats it.

    Raises:
        NoContainer: the image is not there and can't be pulled, or its broker did not serve in time.
    """
    if kind == REDPANDA:
        with _redpanda() as broker:
            yield broker
        return
    with _kafka() as broker:
        if transaction_version is not None:
            set_transaction_version(broker.bootstrap, transaction_version)
        yield broker


def set_transaction_version(bootstrap: str, level: int) -> None:
    """Bring the feature to that level, and wait until clients see it."""
    from tests.infra.kafka import finalized_features, update_feature

    if finalized_features(bootstrap).get(_TRANSACTION_VERSION, 0) == level:
        return
    update_feature(bootstrap, _TRANSACTION_VERSION, level)
    until = time.monotonic() + START_DEADLINE_S
    while finalized_features(bootstrap).get(_TRANSACTION_VERSION, 0) != level:
        if time.monotonic() > until:
            raise NoContainer(f"{bootstrap} does not come to {_TRANSACTION_VERSION}={level}")
        time.sleep(_POLL_S)


# -- Kafka ----------------------------------------------------------------------------------------------


@contextmanager
def _kafka() -> Iterator[ContainerBroker]:
    from testcontainers.core.container import DockerContainer

    image = os.environ.get(IMAGE_VARIABLE) or f"apache/kafka:{KAFKA_VERSION}"
    # Kafka's form of an id; as an argument, it must not begin with a dash.
    cluster_id = "A" + urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]
    container = DockerContainer(image).with_command(_WAIT).with_exposed_ports(_PORT)
    container.with_envs(**kafka_variables(), CLUSTER_ID=cluster_id)
    # As the embedded broker of tests has it: in a few minutes a second compiler costs more than it brings.
    container.with_env("KAFKA_HEAP_OPTS", "-Xmx512m")
    container.with_env("KAFKA_JVM_PERFORMANCE_OPTS", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1")
    with _running(container, image):
        host, port = container.get_container_host_ip(), container.get_exposed_port(_PORT)
        advertised = f"PLAINTEXT://{host}:{port},BROKER://127.0.0.1:{_OWN_PORT}"
        script = f"export KAFKA_ADVERTISED_LISTENERS={advertised}\nexec /etc/kafka/docker/run\n"
        container.copy_into_container(script.encode(), _START)
        broker = ContainerBroker(f"{host}:{port}", container)
        _await(broker, image, cluster_id)
        yield broker


def kafka_variables() -> dict[str, str]:
    """The embedded broker's properties with listeners that suit a container, as an image of Kafka takes them.

    ``a.b_c-d`` is ``KAFKA_A_B__C___D``.
    """
    properties = server_properties(
        data=Path("/var/lib/kafka/data"),
        port=_PORT,
        membership=Membership(1, {1: _CONTROLLER_PORT}),
        extra={},
    )
    del properties["advertised.listeners"]
    # The broker's connections to itself bypass the port that only clients outside can reach.
    properties |= {
        "listeners": f"PLAINTEXT://0.0.0.0:{_PORT},BROKER://127.0.0.1:{_OWN_PORT},"
        f"CONTROLLER://127.0.0.1:{_CONTROLLER_PORT}",
        "inter.broker.listener.name": "BROKER",
        "listener.security.protocol.map": (
            "PLAINTEXT:PLAINTEXT,BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT"
        ),
    }
    return {
        "KAFKA_" + name.replace("_", "__").replace("-", "___").replace(".", "_").upper(): value
        for name, value in properties.items()
    }


def _await(broker: ContainerBroker, image: str, cluster_id: str) -> None:
    host, _, port = broker.bootstrap.rpartition(":")
    until = time.monotonic() + START_DEADLINE_S
    while not is_ready(host, int(port), cluster_id):
        broker.container.reload()
        if broker.container.status == "exited" or time.monotonic() > until:
            raise NoContainer(f"the broker of {image} does not serve:\n{broker.log_tail()}")
        time.sleep(_POLL_S)


# -- Redpanda -------------------------------------------------------------------------------------------


@contextmanager
def _redpanda() -> Iterator[ContainerBroker]:
    from testcontainers.community.kafka import RedpandaContainer

    image = os.environ.get(IMAGE_VARIABLE)
    container = RedpandaContainer(image) if image else RedpandaContainer()
    with _running(container, container.image, timeout=int(START_DEADLINE_S)):
        for name, value in _REDPANDA_SETTINGS.items():
            done = container.exec(["rpk", "cluster", "config", "set", name, value])
            if done.exit_code != 0:
                said = done.output.decode(errors="replace")
                raise NoContainer(f"{container.image}: rpk cluster config set {name}: {said}")
        yield ContainerBroker(container.get_bootstrap_server(), container)


# -- containers -----------------------------------------------------------------------------------------


@contextmanager
def _running(container: DockerContainer, image: str, **options: int) -> Iterator[None]:
    """Start it, and remove it at the end, with what it has written."""
    from docker.errors import DockerException

    try:
        try:
            container.start(**options)
        except (DockerException, TimeoutError) as error:
            raise NoContainer(
                f"no container of {image}: {error}. `docker pull` it where a registry can be "
                f"reached, or name another image in {IMAGE_VARIABLE}"
            ) from error
        yield
    finally:
        container.stop()
