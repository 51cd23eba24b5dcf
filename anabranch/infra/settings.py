"""The server properties and JVM options of the embedded broker, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from anabranch.infra.free_ports import HOST
from anabranch.infra.secure import SecureListener

NODE_ID = 1
_PLAIN = "-._/,;@$()[]{}*+"
_COLLECTOR = re.compile(r"-XX:\+Use\w+GC")

# What the broker object itself decides: given as an extra property, it would break that.
_OWN = frozenset(
    {
        "advertised.listeners",
        "controller.listener.names",
        "controller.quorum.voters",
        "inter.broker.listener.name",
        "listener.security.protocol.map",
        "listeners",
        "log.dir",
        "log.dirs",
        "metadata.log.dir",
        "node.id",
        "process.roles",
    }
)

_DEFAULTS = {
    # One broker can't keep more than one replica.
    "default.replication.factor": "1",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    # 50 partitions by default: seconds at the first use, and as many open files.
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.num.partitions": "1",
    # Groups: no wait for further members at the first join, and quick failure detection on demand.
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.min.heartbeat.interval.ms": "200",
    # A killed broker can register again only when the session of its former life has run out. That
    # and the heartbeats go from this process to itself, so there is no network to be patient with.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    # Topics are declared, never made by a typing error.
    "auto.create.topics.enable": "false",
    # 128 MB of a small heap by default.
    "log.cleaner.dedupe.buffer.size": "16777216",
    # A minute by default: test suites make and delete many topics.
    "log.segment.delete.delay.ms": "1000",
}


@dataclass(frozen=True, slots=True)
class Membership:
    """A node's place in a cluster of several.

    ``voters``: node id -> port of its controller. ``temporary``: what to remove if the owner dies.
    """

    node_id: int
    cluster_id: str
    voters: Mapping[int, int]
    temporary: Path | None = None

    @property
    def controller_port(self) -> int:
        """This node's own."""
        return self.voters[self.node_id]

    def properties(self) -> dict[str, str]:
        """Instead of the defaults above: replicas, and leaders that soon go back to where they belong."""
        replicas = str(min(3, len(self.voters)))
        in_sync = str(min(2, len(self.voters)))
        return {
            "default.replication.factor": replicas,
            "min.insync.replicas": in_sync,
            "offsets.topic.replication.factor": replicas,
            "transaction.state.log.replication.factor": replicas,
            "transaction.state.log.min.isr": in_sync,
            "share.coordinator.state.topic.replication.factor": replicas,
            "share.coordinator.state.topic.min.isr": in_sync,
            "unclean.leader.election.enable": "false",
            # Five minutes by default: after a restart a node would lead nothing for so long.
            "leader.imbalance.check.interval.seconds": "5",
            "leader.imbalance.per.broker.percentage": "0",
        }


def server_properties(
    *,
    data: Path,
    port: int,
    controller_port: int,
    extra: Mapping[str, str],
    membership: Membership | None = None,
    proxied: tuple[int, str] | None = None,
    secure: tuple[int, SecureListener] | None = None,
) -> dict[str, str]:
    """The broker's properties; those in ``extra`` replace the defaults.

    ``proxied``: a port where a proxy comes in, and the proxy's own ``host:port``, which clients are told there.
    ``secure``: a port, and what listens there.

    Raises:
        ValueError: ``extra`` holds one that the broker object decides itself.
    """
    node_id = membership.node_id if membership else NODE_ID
    voters = membership.voters if membership else {NODE_ID: controller_port}
    own = {
        "process.roles": "broker,controller",
        "node.id": str(node_id),
        # A static quorum: a dynamic one would keep the controller's port in its log, and the port
        # may be another one at the next start.
        "controller.quorum.voters": ",".join(f"{n}@{HOST}:{p}" for n, p in voters.items()),
        "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": str(data),
    }
    if proxied is not None:
        inner_port, address = proxied
        own["listeners"] += f",PROXIED://{HOST}:{inner_port}"
        own["advertised.listeners"] += f",PROXIED://{address}"
        own["listener.security.protocol.map"] += ",PROXIED:PLAINTEXT"
    if secure is not None:
        for name, value in secure[1].properties(f"{HOST}:{secure[0]}").items():
            own[name] = f"{own[name]},{value}" if name in own else value
    check_extra(extra)
    return own | _DEFAULTS | (membership.properties() if membership else {}) | dict(extra)


def check_extra(extra: Mapping[str, str]) -> None:
    """Refuses properties that the broker object decides itself.

    Raises:
        ValueError: naming them.
    """
    if taken := sorted(_OWN & extra.keys()):
        raise ValueError(f"{', '.join(taken)}: set by the embedded broker itself")


def properties_text(properties: Mapping[str, str]) -> str:
    """``properties`` as the text of a Java properties file."""
    return "".join(f"{_escape(name)}={_escape(value)}\n" for name, value in properties.items())


def _escape(text: str) -> str:
    """Only letters, digits and a few signs as they are: such a file is ISO-8859-1 to Java."""
    units = text.encode("utf-16-be")
    codes = [int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2)]
    return "".join(
        chr(code)
        if code < 128 and (chr(code).isalnum() or chr(code) in _PLAIN)
        else f"\\u{code:04x}"
        for code in codes
    )


def jvm_options(
    *, heap_mb: int, quick_start: bool, archive: Path | None, extra: Sequence[str] = ()
) -> list[str]:
    """Options of the broker's JVM; ``extra`` comes last, and may choose another garbage collector.

    ``archive`` is a class-data archive to start from (see `anabranch.infra.archive`); the JVM
    ignores one that does not fit. ``quick_start`` compiles with the first tier only: a quicker
    start for less throughput.
    """
    options = [
        f"-Xmx{heap_mb}m",
        "-XX:+ExitOnOutOfMemoryError",
        # Statistics in a file of /tmp: a slow disk there would stall the JVM.
        "-XX:-UsePerfData",
        "-Djava.awt.headless=true",
        "-Dlog4j2.configurationFile=" + Path(__file__).with_name("log4j2.properties").as_uri(),
    ]
    if not any(_COLLECTOR.fullmatch(option) for option in extra):
        # Two collectors at once are an error.
        options.append("-XX:+UseSerialGC")
    if quick_start:
        options.append("-XX:TieredStopAtLevel=1")
    if archive is not None:
        options += [f"-XX:SharedArchiveFile={archive}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]
    return [*options, *extra]
