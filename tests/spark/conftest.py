"""A Spark session for the tests of this folder, on two threads of this machine.

It ends with the test process. Without a JDK these tests fail, with the message that says how to get one.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import anabranch
from anabranch.spark import spark_session
from anabranch.spark.clients import close_clients
from anabranch.spark.columns import EVENT_SCHEMA
from anabranch.spark.options import Connection, Options
from anabranch.spark.source.stream_reader import StreamReader
from tests.cluster import Cluster
from tests.spark import small_jvm
from tests.spark.sink_place import Place, place_in
from tests.spark.source_world import World, build

FOLDER = Path(__file__).parent
TIMEOUT_S = 600  # a JVM starts in 5 s, or in a minute next to four others


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of this folder get more time than others, unless they say themselves how much."""
    for item in items:
        if FOLDER in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def own_clients(cluster: Cluster) -> Iterator[None]:
    """The clients that sinks and sources make in this process: closed before the cluster ends."""
    yield
    close_clients()


@pytest.fixture(scope="session")
def spark(own_clients: None) -> Iterator[SparkSession]:
    """A session with the format registered, which ends before the cluster does. Tests share it; those that kill
    a JVM start their own process."""
    folder = tempfile.mkdtemp(prefix="anabranch-spark-")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    settings = small_jvm.settings(folder) | small_jvm.PLANS
    settings["spark.python.daemon.module"] = "tests.spark.warm_daemon"
    session = spark_session("tests", "local[2]", settings)
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def bootstrap(cluster: Cluster) -> str:
    """The cluster's address."""
    return cluster.bootstrap


@pytest.fixture
def connection(bootstrap: str) -> Connection:
    """As pipelines take it."""
    return Connection(bootstrap, "anabranch", 60.0, ())


@pytest.fixture
def stream(client: anabranch.Client, unique: str) -> str:
    """A stream of two segments, with nothing in it."""
    name = f"p{unique}/events"
    client.create_stream(name, segments=2)
    return name


@pytest.fixture(scope="session")
def empty(client: anabranch.Client) -> str:
    """A stream to which no test may write."""
    client.create_stream("empty/events")
    return "empty/events"


@pytest.fixture
def place(own_clients: None, cluster: Cluster, client: anabranch.Client, unique: str) -> Place:
    """A stream of three segments, alone in its scope."""
    return place_in(cluster.bootstrap, client, f"sink{unique}")


@pytest.fixture(scope="session")
def world(cluster: Cluster, client: anabranch.Client) -> World:
    """Streams with everything in them that a source has to get right. Tests only read them."""
    return build(cluster.bootstrap, client, "source")


@pytest.fixture
def source(bootstrap: str, world: World) -> Iterator[Callable[..., StreamReader]]:
    """Makes planners of streaming queries, of the world's streams if no option names others."""
    made = []

    def make(**options: str | int) -> StreamReader:
        given = {name: str(value) for name, value in options.items()}
        if "stream" not in given:
            given.setdefault("streams", f"{world.events},{world.other}")
        made.append(StreamReader(Options({"bootstrap": bootstrap} | given), EVENT_SCHEMA))
        return made[-1]

    yield make
    for reader in made:
        reader.stop()
