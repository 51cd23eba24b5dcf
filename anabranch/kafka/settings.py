"""Settings of the raw connection, named as librdkafka names them. What can't be honoured is refused."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from anabranch.errors import UnsupportedSetting

# librdkafka's options that only tune its own clients: without meaning here, so they are accepted and
# ignored. Everything else that is not in `_KNOWN` is refused by name.
CLIENT_ONLY = frozenset(
    {
        "acks",
        "batch.num.messages",
        "batch.size",
        "compression.codec",
        "compression.level",
        "compression.type",
        "debug",
        "delivery.timeout.ms",
        "enable.idempotence",
        "fetch.error.backoff.ms",
        "fetch.max.bytes",
        "fetch.message.max.bytes",
        "fetch.min.bytes",
        "fetch.queue.backoff.ms",
        "fetch.wait.max.ms",
        "linger.ms",
        "log.connection.close",
        "log.queue",
        "log.thread.name",
        "log_level",
        "max.in.flight",
        "max.in.flight.requests.per.connection",
        "max.partition.fetch.bytes",
        "message.max.bytes",
        "message.send.max.retries",
        "message.timeout.ms",
        "metadata.max.age.ms",
        "partitioner",
        "queue.buffering.max.kbytes",
        "queue.buffering.max.messages",
        "queue.buffering.max.ms",
        "queued.max.messages.kbytes",
        "queued.min.messages",
        "receive.message.max.bytes",
        "retries",
        "socket.keepalive.enable",
        "socket.nagle.disable",
        "statistics.interval.ms",
        "sticky.partitioning.linger.ms",
        "topic.metadata.refresh.interval.ms",
    }
)


@dataclass(frozen=True, slots=True)
class Settings:
    """How to reach the brokers. Times in seconds.

    ``request_timeout``: how long one answer may take. ``retry_backoff``: the wait before a retry that
    needs new metadata. ``max_request_bytes``: batches of about so many bytes go into one Produce
    request; a bigger single batch goes alone.
    """

    bootstrap: tuple[tuple[str, int], ...]
    client_id: str = "anabranch"
    request_timeout: float = 30.0
    connect_timeout: float = 10.0
    retry_backoff: float = 0.05
    max_request_bytes: int = 8 << 20
    tls: ssl.SSLContext | None = None


def parse_settings(bootstrap: str, options: Mapping[str, object]) -> Settings:
    """Settings from ``host:port,…`` and librdkafka's options.

    Raises:
        UnsupportedSetting: an option that this path can't honour, or a value it can't read.
    """
    values: dict[str, object] = {}
    refused = []
    security: dict[str, str] = {}
    for name, value in options.items():
        if name in _KNOWN:
            field, read = _KNOWN[name]
            try:
                values[field] = read(value)
            except ValueError as error:
                raise UnsupportedSetting(f"{name}={value!r}: {error}") from None
        elif name in _SECURITY:
            security[name] = str(value)
        elif name != "bootstrap.servers" and name not in CLIENT_ONLY:
            refused.append(name)
    if refused:
        raise UnsupportedSetting(
            f"not supported by the raw log connection: {', '.join(sorted(refused))}"
        )
    return Settings(addresses(bootstrap), tls=_tls(security), **values)  # type: ignore[arg-type]


_MOST = (1 << 31) - 1
_MOST_PORT = (1 << 16) - 1


def _positive_int(value: object) -> int:
    number = int(str(value))
    if not 0 < number <= _MOST:
        raise ValueError(f"a number from 1 to {_MOST} is needed")
    return number


def _seconds(value: object) -> float:
    return _positive_int(value) / 1000


_KNOWN: dict[str, tuple[str, Callable[[object], object]]] = {
    "client.id": ("client_id", str),
    "request.timeout.ms": ("request_timeout", _seconds),
    "socket.timeout.ms": ("request_timeout", _seconds),
    "socket.connection.setup.timeout.ms": ("connect_timeout", _seconds),
    "retry.backoff.ms": ("retry_backoff", _seconds),
    "anabranch.max.request.bytes": ("max_request_bytes", _positive_int),
}
_SECURITY = frozenset(
    {
        "security.protocol",
        "ssl.ca.location",
        "ssl.certificate.location",
        "ssl.key.location",
        "ssl.key.password",
        "ssl.endpoint.identification.algorithm",
    }
)


def _tls(options: Mapping[str, str]) -> ssl.SSLContext | None:
    protocol = options.get("security.protocol", "plaintext").lower()
    if protocol == "plaintext":
        others = sorted(set(options) - {"security.protocol"})
        if others:
            raise UnsupportedSetting(f"{', '.join(others)} without security.protocol=ssl")
        return None
    if protocol != "ssl":
        raise UnsupportedSetting(f"security.protocol={protocol}: only plaintext and ssl")
    check = options.get("ssl.endpoint.identification.algorithm", "https").lower()
    if check not in ("https", "none"):
        raise UnsupportedSetting(f"ssl.endpoint.identification.algorithm={check}: https or none")
    try:
        context = ssl.create_default_context(cafile=options.get("ssl.ca.location"))
        context.check_hostname = check == "https"
        if "ssl.certificate.location" in options:
            context.load_cert_chain(
                options["ssl.certificate.location"],
                options.get("ssl.key.location"),
                options.get("ssl.key.password"),
            )
    except (OSError, ssl.SSLError) as error:
        raise UnsupportedSetting(f"the TLS files can't be read: {error}") from error
    return context


def addresses(bootstrap: str) -> tuple[tuple[str, int], ...]:
    """The brokers' hosts and ports. `UnsupportedSetting` names what is none."""
    found = []
    for part in bootstrap.split(","):
        # librdkafka allows a protocol in front.
        text = part.strip().rpartition("://")[2]
        host, _, port = text.rpartition(":")
        if not text:
            continue
        number = int(port) if port.isdecimal() and len(port) < 10 else 0
        if not host or not 0 < number <= _MOST_PORT:
            raise UnsupportedSetting(f"bootstrap.servers: {part!r} is not host:port")
        found.append((host.strip("[]"), number))
    if not found:
        raise UnsupportedSetting("bootstrap.servers names no broker")
    return tuple(found)
