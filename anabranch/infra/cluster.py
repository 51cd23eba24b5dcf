"""`EmbeddedCluster`: several embedded brokers with replication, for tests that lose a broker."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from anabranch.infra.broker import POLL_S, START_TIMEOUT_S, EmbeddedBroker
from anabranch.infra.errors import BrokerNotRunning, FolderMismatch, StartDeadlinePassed
from anabranch.infra.settings import Membership
from anabranch.infra.sockets import HOST, free_ports, is_ready
from anabranch.infra.storage import new_cluster_id

_FACTS = "cluster.json"


class EmbeddedCluster:
    """Nodes numbered from 1, each a KRaft broker and controller, as a context manager.

    Each partition has up to three replicas; an acknowledged write is on two of them, and there is no unclean leader
    election. So one of three nodes may fail at a time. All nodes end with the process that started them.

    >>> with EmbeddedCluster(3) as cluster:
    ...     connect(cluster.bootstrap)
    ...     cluster.node(2).kill()
    """

    def __init__(
        self,
        brokers: int = 3,
        folder: Path | str | None = None,
        *,
        ports: Sequence[int] = (),
        racks: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        heap_mb: int = 256,
        quick_start: bool = False,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Start nothing yet.

        Args:
            brokers: how many, 1 to 9.
            folder: is kept, and a later cluster of this size may use it; None: a temporary one, removed at `stop`.
            ports: the brokers' ports; empty: any free ones.
            racks: the brokers' racks, in turn; then followers serve readers of their rack.
            properties, heap_mb, quick_start, start_timeout_s: of each `EmbeddedBroker`.

        Raises:
            ValueError: an argument out of its range, or ports for another number of brokers.
        """
        if not 1 <= brokers <= 9:
            raise ValueError(f"brokers must be 1 to 9, not {brokers}")
        if ports and len(set(ports)) != brokers:
            raise ValueError(f"{brokers} brokers need as many ports, not {list(ports)}")
        self._given_folder = Path(folder).absolute() if folder is not None else None
        self._folder = self._given_folder or Path(tempfile.mkdtemp(prefix="anabranch-cluster-"))
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._id = self._cluster_id(brokers)
        self._start_timeout_s = start_timeout_s
        chosen = free_ports(2 * brokers)
        voters = {n: chosen.pop() for n in range(1, brokers + 1)}
        self.nodes: dict[int, EmbeddedBroker] = {
            n: EmbeddedBroker(
                self._folder / f"node-{n}",
                port=ports[n - 1] if ports else chosen.pop(),
                properties=_in_rack(racks, n) | dict(properties or {}),
                heap_mb=heap_mb,
                quick_start=quick_start,
                start_timeout_s=start_timeout_s,
                membership=Membership(
                    n, voters, self._folder if self._given_folder is None else None, self._id
                ),
            )
            for n in voters
        }

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<EmbeddedCluster {self.bootstrap} folder {self._folder}>"

    @property
    def bootstrap(self) -> str:
        """``host:port,…`` of all nodes. Restarts keep it."""
        return ",".join(node.bootstrap for node in self.nodes.values())

    @property
    def folder(self) -> Path:
        """The folder of the nodes' folders."""
        return self._folder

    @property
    def running(self) -> list[int]:
        """The numbers of the nodes whose processes exist (a paused one does)."""
        return [n for n, node in self.nodes.items() if node.running]

    def node(self, number: int) -> EmbeddedBroker:
        """A node, to kill, pause, resume, restart or start. Raises: BrokerNotRunning (there is no such node)."""
        try:
            return self.nodes[number]
        except KeyError:
            raise BrokerNotRunning(f"there is no node {number}, but {list(self.nodes)}") from None

    def start(self) -> None:
        """Start all stopped nodes concurrently: a majority has to run before any node serves.

        Waits until each node lists all the others, because librdkafka forgets a broker that an answer omits.

        Raises: as `EmbeddedBroker.start` (a paused node does not answer); then the nodes started here are stopped.
        """
        new = [node for node in self.nodes.values() if not node.running]
        try:
            self._each(EmbeddedBroker.start, new)
            self._each(self._await_others, list(self.nodes.values()) if new else [])
        except BaseException:
            if len(new) == len(self.nodes):
                self.stop()
            self._each(_stop_soon, [node for node in new if node.running])
            raise

    def stop(self) -> None:
        """Shut all nodes down, and remove a temporary folder."""
        # The last node waits for a majority in vain, so it gets little time.
        self._each(_stop_soon, [node for node in self.nodes.values() if node.running])
        if self._given_folder is None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End all nodes by SIGKILL. The folder stays."""
        self._each(EmbeddedBroker.kill, [node for node in self.nodes.values() if node.running])

    def _each(self, action: Callable[[EmbeddedBroker], None], nodes: list[EmbeddedBroker]) -> None:
        if nodes:
            with ThreadPoolExecutor(len(nodes)) as pool:
                list(pool.map(action, nodes))

    def _await_others(self, node: EmbeddedBroker) -> None:
        ports = [other.port for other in self.nodes.values()]
        until = time.monotonic() + self._start_timeout_s
        while not is_ready(HOST, node.port, self._id, others=ports):
            if time.monotonic() > until:
                raise StartDeadlinePassed(
                    f"{node} did not show the others within {self._start_timeout_s:g} s",
                    log=node.log,
                    log_tail=node.log_tail(),
                )
            time.sleep(POLL_S)

    def _cluster_id(self, brokers: int) -> str:
        """The cluster's id, kept in its folder. Raises: FolderMismatch (made for another number of brokers)."""
        path = self._folder / _FACTS
        if path.exists():
            facts = json.loads(path.read_text(encoding="utf-8"))
            if facts["brokers"] != brokers:
                raise FolderMismatch(
                    f"{self._folder} is of {facts['brokers']} brokers, not {brokers}: give another folder"
                )
            return str(facts["cluster_id"])
        cluster_id = new_cluster_id()
        path.write_text(
            json.dumps({"cluster_id": cluster_id, "brokers": brokers}) + "\n", encoding="utf-8"
        )
        return cluster_id


def _in_rack(racks: Sequence[str], number: int) -> dict[str, str]:
    if not racks:
        return {}
    return {
        "broker.rack": racks[(number - 1) % len(racks)],
        "replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector",
    }


def _stop_soon(node: EmbeddedBroker) -> None:
    node.stop(timeout_s=5.0)
