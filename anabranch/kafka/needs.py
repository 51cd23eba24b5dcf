"""The calls that anabranch needs of a cluster: what each is for, what is lost without it, which brokers lack it.

This table is the only list of needed calls. docs/inside/decisions/0039-what-a-broker-must-give.md explains it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from anabranch.kafka import calls
from anabranch.kafka.calls import DESCRIBE_LOG_DIRS, Api, ConnectionBroken
from anabranch.kafka.cluster import Cluster
from anabranch.kafka.codes import NONE, READ_CODES, error_for, meaning
from anabranch.kafka.connection import Connection
from anabranch.ports import LogError, LogRefused

_ANY_VERSION = (1 << 15) - 1
_SIZES_OF = ({"topic": "", "partitions": ()},)  # no partition: only the folders are asked for
_AT_ONCE = 16  # brokers that are asked concurrently


def _by_librdkafka(key: int, name: str) -> Api:
    """A call made by librdkafka, which chooses the version itself."""
    return Api(key, "", name, 0, _ANY_VERSION, 0)


class Need(NamedTuple):
    """Calls that belong together. ``use``: what they are for.

    ``lost``: what does not work without them; empty if no controller could be leader, or no stream be created.
    """

    name: str
    calls: tuple[Api, ...]
    use: str
    lost: str = ""


SASL = Need("sign in", (calls.SASL_HANDSHAKE, calls.SASL_AUTHENTICATE), "signing in by SASL")
CUT = Need(
    "cut journals",
    (calls.DELETE_RECORDS,),
    "deleting what no transaction needs any more",
    "journals are never cut: they keep all that was ever written",
)
ALTER = Need(
    "alter settings",
    (calls.INCREMENTAL_ALTER_CONFIGS,),
    "`stream alter`, `table compact`",
    "`stream alter` and `table compact` are refused: settings stay as they were at creation",
)
MARKERS = Need(
    "lost markers",
    (calls.DESCRIBE_PRODUCERS, calls.DESCRIBE_TRANSACTIONS),
    "finding a native transaction that lacks its marker",
    "a marker that brokers lose is not looked for: readers of that partition then wait until an operator ends it",
)
GROW = Need(
    "grow",
    (calls.CREATE_PARTITIONS,),
    "scaling a stream to more segments than it has partitions",
    "streams can't be scaled beyond the partitions that they were made with",
)
DELETE = Need(
    "delete topics",
    (calls.DELETE_TOPICS,),
    "deleting a stream with its topics",
    "topics of deleted streams stay, and the operator has to delete them",
)
CALLS = (
    Need(
        "records",
        (calls.API_VERSIONS, calls.METADATA, calls.PRODUCE, calls.FETCH, calls.LIST_OFFSETS),
        "reading and writing",
    ),
    Need(
        "topics",
        (calls.CREATE_TOPICS, calls.DESCRIBE_CONFIGS),
        "making the topics of controllers and streams, and checking that they are safe",
    ),
    Need(
        "native transactions",
        (
            calls.FIND_COORDINATOR,
            calls.INIT_PRODUCER_ID,
            calls.ADD_PARTITIONS_TO_TXN,
            calls.END_TXN,
        ),
        "writing a commit round as a whole or not at all",
    ),
    Need(
        "groups",
        (
            _by_librdkafka(11, "JoinGroup"),
            _by_librdkafka(14, "SyncGroup"),
            _by_librdkafka(12, "Heartbeat"),
            _by_librdkafka(13, "LeaveGroup"),
            _by_librdkafka(8, "OffsetCommit"),
            _by_librdkafka(9, "OffsetFetch"),
        ),
        "sharing control partitions among controllers, and streams among readers",
    ),
    SASL,
    CUT,
    ALTER,
    GROW,
    DELETE,
    MARKERS,
    Need(
        "disks",
        (calls.DESCRIBE_LOG_DIRS,),
        "`doctor`'s rows about disks, and the bytes of `stream list`",
        "`doctor` does not see how full the brokers' disks are, nor `stream list` the bytes of streams",
    ),
)
BROKERS_PAGE = "docs/how-to/brokers.md"


def lacking(connection: Connection, *, sasl: bool) -> tuple[str, ...]:
    """The needed calls that this broker does not offer in a supported version.

    ``sasl``: whether clients authenticate by SASL.
    """
    found = []
    for need in CALLS:
        if need is SASL and not sasl:
            continue
        for api in need.calls:
            try:
                connection.version(api)
            except LogRefused:
                found.append(api.name)
    return tuple(found)


def _met_by(need: Need, lacks: Collection[str]) -> list[str]:
    return [api.name for api in need.calls if api.name in lacks]


def obstacles(lacks: Collection[str]) -> list[str]:
    """The unmet needs that are required, as text. ``lacks``: names of calls that are not offered."""
    needs = ((need, _met_by(need, lacks)) for need in CALLS if not need.lost)
    return [f"no {', '.join(names)}: needed for {need.use}" for need, names in needs if names]


def losses(lacks: Collection[str]) -> list[str]:
    """The losses without these calls, as text: ``no DeleteRecords: journals are never cut``."""
    needs = ((need, _met_by(need, lacks)) for need in CALLS if need.lost)
    return [f"no {', '.join(names)}: {need.lost}" for need, names in needs if names]


def lost_calls(lacks: Collection[str]) -> tuple[str, ...]:
    """The optional calls among these; each is a loss."""
    return tuple(name for need in CALLS if need.lost for name in _met_by(need, lacks))


@dataclass(slots=True)
class Broker:
    """A broker's answers.

    ``trouble``: why it did not answer. ``too_old``: needed calls without a common version. ``features``: the
    version of native transactions, if it reports one. ``disks``: (path, usable bytes, all bytes, trouble) of each
    log folder; -1 bytes if not reported. ``disk_trouble``: why its disks are not known.
    """

    address: str
    seconds: float = 0.0
    trouble: str = ""
    too_old: tuple[str, ...] = ()
    features: str = ""
    disks: tuple[tuple[str, int, int, str], ...] = ()
    disk_trouble: str = ""


def lacking_of(brokers: Iterable[Broker]) -> set[str]:
    """The needed calls that one of these brokers, at least, does not offer."""
    return {name for broker in brokers for name in broker.too_old}


def look_at(cluster: Cluster, seconds: float, *, disks: bool = True) -> list[Broker]:
    """Ask all brokers of the cluster concurrently, so that a broker that is away does not delay others.

    ``seconds``: the longest wait for each answer. Raises `LogError` if no broker names the cluster's brokers.
    """
    cluster.refresh((), cluster.deadline(seconds))
    nodes = cluster.nodes
    with ThreadPoolExecutor(min(len(nodes), _AT_ONCE)) as threads:
        return list(threads.map(lambda node: _ask_broker(cluster, node, seconds, disks), nodes))


def sizes_of(cluster: Cluster, topics: Collection[str], seconds: float) -> dict[str, int]:
    """The bytes of topics, by the largest replica of each partition.

    ``seconds``: the longest wait for each answer. Topics that no broker may show to this client are missing, and
    brokers that don't answer are left out. Raises `LogError` if no broker names the cluster's brokers.
    """
    known = cluster.refresh(topics, cluster.deadline(seconds))
    asked = tuple(
        {"topic": name, "partitions": tuple(range(topic.partitions))}
        for name, topic in known.items()
    )

    def ask(node: int) -> list[tuple[str, int, int]]:
        with (
            suppress(LogError, ConnectionBroken),
            cluster.connection(node, cluster.deadline(seconds)) as connection,
        ):
            answer = connection.ask(DESCRIBE_LOG_DIRS, cluster.deadline(seconds), topics=asked)
            return [
                (str(topic.name), int(part.partition_index), int(part.partition_size))
                for folder in answer.results
                for topic in folder.topics
                for part in topic.partitions
                if not part.is_future_key  # a copy that is being moved to another folder
            ]
        return []

    found: dict[str, dict[int, int]] = {}
    with ThreadPoolExecutor(min(len(cluster.nodes), _AT_ONCE)) as threads:
        for name, partition, size in chain.from_iterable(threads.map(ask, cluster.nodes)):
            sizes = found.setdefault(name, {})
            sizes[partition] = max(size, sizes.get(partition, 0))
    return {name: sum(sizes.values()) for name, sizes in found.items()}


def _code_text(code: int) -> str:
    code = int(code)
    return "" if code == NONE else str(error_for(meaning(READ_CODES, code), code, "its disks"))


def _ask_broker(cluster: Cluster, node: int, seconds: float, disks: bool) -> Broker:
    found = Broker(":".join(map(str, cluster.address(node))))
    begun = time.monotonic()
    try:
        with cluster.connection(node, cluster.deadline(seconds)) as connection:
            connection.greet(cluster.deadline(seconds))
            found.seconds = time.monotonic() - begun
            level = connection.features.get("transaction.version")
            found.features = "" if level is None else f"transaction.version {level}"
            found.too_old = lacking(connection, sasl=cluster.settings.sasl is not None)
            if not disks or DESCRIBE_LOG_DIRS.name in found.too_old:
                return found
            try:
                answer = connection.ask(
                    DESCRIBE_LOG_DIRS, cluster.deadline(seconds), topics=_SIZES_OF
                )
            except LogRefused as error:
                found.disk_trouble = str(error)
                return found
            found.disk_trouble = _code_text(getattr(answer, "error_code", NONE))
            found.disks = tuple(
                (
                    str(one.log_dir),
                    int(getattr(one, "usable_bytes", -1)),
                    int(getattr(one, "total_bytes", -1)),
                    _code_text(one.error_code),
                )
                for one in answer.results
            )
    except (LogError, ConnectionBroken) as error:
        found.trouble = str(error)
    return found
