"""The server properties and JVM options of the embedded broker, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from anabranch.infra.sockets import HOST

_PLAIN = "-._/,;@$()[]{}*+"
_COLLECTOR = re.compile(r"-XX:\+Use\w+GC")

# Properties that the broker object sets: another value would break it.
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
    # Kafka's default is 50 partitions: that takes seconds at the first use, and 50 open files.
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.num.partitions": "1",
    # Groups: no wait for further members at the first join, and quick failure detection on request.
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.min.heartbeat.interval.ms": "200",
    # A killed broker can register again only after its former session. No network delays its heartbeats, so the
    # session may be short.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    # Kafka's default is 0.5 s, which causes a third of an idle broker's load.
    "metadata.max.idle.interval.ms": "5000",
    # Topics are declared, so that a mistyped name creates none.
    "auto.create.topics.enable": "false",
    # A partition's two index files begin with this size, and the system may fill them with zeros at the first
    # append (Kafka's default is 10 MB; then 64 new partitions took 3 s). This is enough for segments of 700 MB.
    "log.index.size.max.bytes": "2097152",
    # Kafka's default is 128 MB, much of a small heap.
    "log.cleaner.dedupe.buffer.size": "16777216",
    # Kafka's default is a minute: test suites make and delete many topics.
    "log.segment.delete.delay.ms": "1000",
}


@dataclass(frozen=True, slots=True)
class Membership:
    """A node's place in its cluster, which may have only this node.

    ``voters``: node id -> port of its controller. ``temporary``: a folder to remove if the owner dies.
    ``cluster_id``: None: a new one when the folder is formatted.
    """

    node_id: int
    voters: Mapping[int, int]
    temporary: Path | None = None
    cluster_id: str | None = None

    @property
    def controller_port(self) -> int:
        return self.voters[self.node_id]

    def properties(self) -> dict[str, str]:
        """For up to three replicas, two of them in sync, and for leaders that soon return to their brokers."""
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
            # Kafka's default is five minutes, during which a restarted node would lead no partition.
            "leader.imbalance.check.interval.seconds": "5",
            "leader.imbalance.per.broker.percentage": "0",
        }


def server_properties(
    *,
    data: Path,
    port: int,
    membership: Membership,
    extra: Mapping[str, str],
    proxied: tuple[int, str] | None = None,
    secure: tuple[int, SecureListener] | None = None,
) -> dict[str, str]:
    """The broker's properties; properties in ``extra`` replace the defaults.

    ``proxied``: a port for a proxy, and the proxy's own ``host:port``, which is advertised there.
    ``secure``: a port, and its listener. Raises: as `check_extra`.
    """
    own = {
        "process.roles": "broker,controller",
        "node.id": str(membership.node_id),
        # A static quorum: a dynamic one would keep the controller's port in its log, and the next start may use
        # another port.
        "controller.quorum.voters": ",".join(
            f"{n}@{HOST}:{p}" for n, p in membership.voters.items()
        ),
        "listeners": (
            f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{membership.controller_port}"
        ),
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
    return own | _DEFAULTS | membership.properties() | dict(extra)


def check_extra(extra: Mapping[str, str]) -> None:
    """Raise `ValueError` for properties that `EmbeddedBroker` sets itself."""
    if taken := sorted(_OWN & extra.keys()):
        raise ValueError(f"{', '.join(taken)}: set by the embedded broker itself")


def properties_text(properties: Mapping[str, str]) -> str:
    """The text of a Java properties file."""
    return "".join(f"{_escape(name)}={_escape(value)}\n" for name, value in properties.items())


def _escape(text: str) -> str:
    """Escape all but letters, digits and a few signs: Java reads such a file as ISO-8859-1."""
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

    ``archive``: as of `find_archive`; the JVM ignores one that does not fit. ``quick_start``: compile with the
    first tier only, which starts sooner and has less throughput.
    """
    options = [
        f"-Xmx{heap_mb}m",
        "-XX:+ExitOnOutOfMemoryError",
        # Its statistics are in a file under /tmp; a slow disk there would stall the JVM.
        "-XX:-UsePerfData",
        "-Djava.awt.headless=true",
        "-Dlog4j2.configurationFile=" + Path(__file__).with_name("log4j2.properties").as_uri(),
    ]
    if not any(_COLLECTOR.fullmatch(option) for option in extra):
        # Two collectors are an error.
        options.append("-XX:+UseSerialGC")
    if quick_start:
        options.append("-XX:TieredStopAtLevel=1")
    if archive is not None:
        options += [f"-XX:SharedArchiveFile={archive}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]
    return [*options, *extra]


_LOGIN = "org.apache.kafka.common.security"
_PREFIX = "listener.name.secure."


@dataclass(frozen=True, slots=True)
class SecureListener:
    """A listener with SASL, over TLS if there is a key. The plain listener stays.

    ``users``: name -> password (no commas), for PLAIN and SCRAM; SCRAM's are written when the folder is formatted.
    OAUTHBEARER accepts any unsigned token: for tests only. ``key``: PEM file of the private key (PKCS #8) and its
    certificates. ``client_ca``: PEM file of the authority for clients' certificates, which are then required.
    """

    users: Mapping[str, str] = field(repr=False)
    key: Path | None = None
    client_ca: Path | None = None

    def properties(self, address: str) -> dict[str, str]:
        """Server properties. The caller appends the first three to the broker's own properties of these names."""
        plain = "".join(f' user_{user}="{password}"' for user, password in self.users.items())
        scram = f"{_LOGIN}.scram.ScramLoginModule required;"
        found = {
            "listeners": f"SECURE://{address}",
            "advertised.listeners": f"SECURE://{address}",
            "listener.security.protocol.map": (
                f"SECURE:{'SASL_SSL' if self.key else 'SASL_PLAINTEXT'}"
            ),
            f"{_PREFIX}sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
            f"{_PREFIX}plain.sasl.jaas.config": (
                f"{_LOGIN}.plain.PlainLoginModule required{plain};"
            ),
            f"{_PREFIX}scram-sha-256.sasl.jaas.config": scram,
            f"{_PREFIX}scram-sha-512.sasl.jaas.config": scram,
            f"{_PREFIX}oauthbearer.sasl.jaas.config": (
                f"{_LOGIN}.oauthbearer.OAuthBearerLoginModule required"
                ' unsecuredLoginStringClaim_sub="broker";'
            ),
        }
        for name, file in (("keystore", self.key), ("truststore", self.client_ca)):
            if file is not None:
                found[f"{_PREFIX}ssl.{name}.type"] = "PEM"
                found[f"{_PREFIX}ssl.{name}.location"] = str(file)
        if self.client_ca is not None:
            found[f"{_PREFIX}ssl.client.auth"] = "required"
        return found

    def format_arguments(self) -> list[str]:
        """Arguments for formatting the broker's folder."""
        return [
            word
            for user, password in self.users.items()
            for kind in ("SCRAM-SHA-256", "SCRAM-SHA-512")
            for word in ("--add-scram", f"{kind}=[name={user},password={password}]")
        ]
