"""The state of all brokers: whether each answers, its versions, and its disks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from anabranch.kafka import needs
from anabranch.kafka.wire.calls import DESCRIBE_LOG_DIRS
from anabranch.kafka.wire.cluster import Cluster
from anabranch.kafka.wire.codes import NONE, READ_CODES, error_for, meaning
from anabranch.kafka.wire.errors import ConnectionBroken
from anabranch.ports import LogError, LogRefused

_SIZES_OF = ({"topic": "", "partitions": ()},)  # no partition: only the folders are asked for

_AT_ONCE = 16


@dataclass(slots=True)
class Broker:
    """A broker's answers. ``trouble``: why it did not answer. ``too_old``: needed calls without a common version.
    ``features``: the version of native transactions, if it reports one.

    ``disks``: (path, usable bytes, all bytes, trouble) of each log folder; -1 bytes if not reported.
    ``disk_trouble``: why its disks are not known.
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
    """All brokers of the cluster, asked concurrently, so that a broker that is away does not delay others.

    ``seconds``: for each question. Raises `LogError` if no broker names any.
    """
    cluster.refresh((), cluster.deadline(seconds))
    nodes = cluster.nodes
    with ThreadPoolExecutor(min(len(nodes), _AT_ONCE)) as threads:
        return list(threads.map(lambda node: _look(cluster, node, seconds, disks), nodes))


def _code_text(code: int) -> str:
    code = int(code)
    return "" if code == NONE else str(error_for(meaning(READ_CODES, code), code, "its disks"))


def _look(cluster: Cluster, node: int, seconds: float, disks: bool) -> Broker:
    found = Broker(":".join(map(str, cluster.address(node))))
    begun = time.monotonic()
    try:
        with cluster.connection(node, cluster.deadline(seconds)) as connection:
            connection.greet(cluster.deadline(seconds))
            found.seconds = time.monotonic() - begun
            level = connection.features.get("transaction.version")
            found.features = "" if level is None else f"transaction.version {level}"
            found.too_old = needs.lacking(connection, sasl=cluster.settings.sasl is not None)
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
