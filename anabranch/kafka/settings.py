"""Settings of raw connections, including TLS, by librdkafka's names. Others are refused."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.errors import UnsupportedSetting
from anabranch.kafka.oauth_tokens import ClientCredentials, KeptToken, TokenFile, of_callback
from anabranch.kafka.sasl import SCRAM, Mechanism, OAuthBearer, Plain, Scram

log = logging.getLogger("anabranch.kafka")

_CA = "ssl.ca.location"
_CERTIFICATE = "ssl.certificate.location"
_KEY = "ssl.key.location"
# An option of anabranch: librdkafka gets the token by a callback instead (`librdkafka.options`).
TOKEN_FILE = "anabranch.oauthbearer.token.file"
CALLBACK = "oauth_cb"  # confluent-kafka's own


def option_names(text: str) -> frozenset[str]:
    """Names of options, given with blanks between."""
    return frozenset(text.split())


# librdkafka's options that only tune its own clients: accepted and ignored. All others that are not in `_KNOWN`
# are refused by name.
CLIENT_ONLY = option_names(
    """
    acks batch.num.messages batch.size broker.address.ttl compression.codec compression.level compression.type
    connections.max.idle.ms debug delivery.timeout.ms enable.idempotence enable.metrics.push error_cb
    fetch.error.backoff.ms fetch.max.bytes fetch.message.max.bytes fetch.min.bytes fetch.queue.backoff.ms
    fetch.wait.max.ms linger.ms log.connection.close log.queue log.thread.name log_cb log_level logger
    max.in.flight max.in.flight.requests.per.connection max.partition.fetch.bytes message.max.bytes
    message.send.max.retries message.timeout.ms metadata.max.age.ms partitioner queue.buffering.max.kbytes
    queue.buffering.max.messages queue.buffering.max.ms queued.max.messages.kbytes queued.min.messages
    receive.message.max.bytes reconnect.backoff.jitter.ms reconnect.backoff.max.ms reconnect.backoff.ms retries
    retry.backoff.max.ms socket.keepalive.enable socket.max.fails socket.nagle.disable
    socket.receive.buffer.bytes socket.send.buffer.bytes statistics.interval.ms stats_cb
    sticky.partitioning.linger.ms throttle_cb topic.metadata.propagation.max.ms
    topic.metadata.refresh.fast.interval.ms topic.metadata.refresh.interval.ms topic.metadata.refresh.sparse
    """
)


class Tls:
    """TLS contexts, from files that are read again when they change. Thread-safe.

    Open connections keep the contents that they were opened with.
    """

    def __init__(self, options: Mapping[str, str], *, check_names: bool) -> None:
        """``options`` by librdkafka's names. Raises `OSError` for a missing or wrong file."""
        self._options = dict(options)
        self._check_names = check_names
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """The context for the next connection; the former context while changed files can't be read (yet)."""
        with self._lock:
            try:
                # Checked before loading, so that a change in between is seen next time.
                seen = self._stamps()
                if seen != self._seen:
                    self._context = self._load()
                    self._seen = seen
                    log.info("TLS files have changed: new connections use the new ones")
            except OSError as error:
                log.warning("changed TLS files can't be used, the old ones are: %s", error)
            return self._context

    def _stamps(self) -> list[tuple[int, int, int]]:
        found = [os.stat(self._options[n]) for n in (_CA, _CERTIFICATE, _KEY) if n in self._options]
        return [(one.st_mtime_ns, one.st_size, one.st_ino) for one in found]

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._options.get(_CA))
        context.check_hostname = self._check_names
        if _CERTIFICATE in self._options:
            # Without a password OpenSSL would ask at the terminal.
            password = self._options.get("ssl.key.password", "")
            context.load_cert_chain(
                self._options[_CERTIFICATE], self._options.get(_KEY), lambda: password
            )
        return context


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of connections to brokers. Times in seconds. ``rack``: the reader's, for brokers that select
    replicas by it.

    ``request_timeout``: limit of one answer. ``retry_backoff``: the wait before a retry that needs new metadata.
    ``max_request_bytes``: limit of the batches in one Produce request, about; a bigger batch is sent alone.
    """

    bootstrap: tuple[tuple[str, int], ...]
    client_id: str = "anabranch"
    request_timeout: float = 30.0
    connect_timeout: float = 10.0
    retry_backoff: float = 0.05
    max_request_bytes: int = 8 << 20
    rack: str = ""
    tls: Tls | None = None
    sasl: Mechanism | None = None


def parse_settings(bootstrap: str | Settings, options: Mapping[str, object]) -> Settings:
    """Settings from ``host:port,…`` and librdkafka's options; settings are returned unchanged.

    Raises:
        UnsupportedSetting: an option that raw connections can't honour, or a value that can't be read.
    """
    if isinstance(bootstrap, Settings):
        return bootstrap
    values: dict[str, object] = {}
    refused = []
    security: dict[str, str] = {}
    callback: Callable[..., Any] | None = None
    for name, value in options.items():
        if name in _KNOWN:
            field, read = _KNOWN[name]
            try:
                values[field] = read(value)
            except ValueError as error:
                raise UnsupportedSetting(f"{name}={value!r}: {error}") from None
        elif name in _SECURITY:
            security[name] = str(value)
        elif name == CALLBACK and callable(value):
            callback = value
        elif name != "bootstrap.servers" and name not in CLIENT_ONLY:
            refused.append(name)
    if refused:
        raise UnsupportedSetting(
            f"{', '.join(sorted(refused))}: not known, or not to be honoured where anabranch speaks to brokers "
            "itself; leave it out (docs/security.md says what TLS and SASL need)"
        )
    secured, named = _protocol(security)
    sasl = _sasl(security, callback) if named else None
    if (callback or TOKEN_FILE in security) and not isinstance(sasl, OAuthBearer):
        raise UnsupportedSetting(
            f"{CALLBACK} and {TOKEN_FILE} are for sasl.mechanism=OAUTHBEARER: leave them out"
        )
    return Settings(
        addresses(bootstrap),
        tls=_tls(security) if secured else None,
        sasl=sasl,
        **values,  # type: ignore[arg-type]
    )


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
    "client.rack": ("rack", str),
    "request.timeout.ms": ("request_timeout", _seconds),
    "socket.timeout.ms": ("request_timeout", _seconds),
    "socket.connection.setup.timeout.ms": ("connect_timeout", _seconds),
    "retry.backoff.ms": ("retry_backoff", _seconds),
    "anabranch.max.request.bytes": ("max_request_bytes", _positive_int),
}
_OIDC = ("token.endpoint.url", "client.id", "client.secret", "scope", "extensions")
_SECURITY = option_names(
    """
    security.protocol ssl.ca.location ssl.certificate.location ssl.key.location ssl.key.password
    ssl.endpoint.identification.algorithm https.ca.location sasl.mechanism sasl.mechanisms sasl.username
    sasl.password sasl.oauthbearer.config sasl.oauthbearer.method
    """
) | {TOKEN_FILE, *(f"sasl.oauthbearer.{name}" for name in _OIDC)}
# All that `parse_settings` takes from a file.
OPTIONS = CLIENT_ONLY | _SECURITY | _KNOWN.keys()
_PROTOCOLS = ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl")
_MECHANISMS = ("PLAIN", *SCRAM, "OAUTHBEARER")


def _protocol(options: Mapping[str, str]) -> tuple[bool, bool]:
    """Whether TLS is used, and whether SASL is. Options of an unused one of the two are refused."""
    protocol = options.get("security.protocol", "plaintext").lower()
    if protocol not in _PROTOCOLS:
        raise UnsupportedSetting(
            f"security.protocol={protocol}: only {', '.join(_PROTOCOLS[:-1])} and {_PROTOCOLS[-1]}"
        )
    secured, named = protocol.endswith("ssl"), protocol.startswith("sasl")
    for spoken, start, needed in (
        (secured, ("ssl.",), "ssl"),
        (named, ("sasl.", TOKEN_FILE), "sasl_ssl"),
    ):
        others = sorted(name for name in options if name.startswith(start))
        if others and not spoken:
            raise UnsupportedSetting(f"{', '.join(others)} without security.protocol={needed}")
    return secured, named


def _tls(options: Mapping[str, str]) -> Tls:
    check = options.get("ssl.endpoint.identification.algorithm", "https").lower()
    if check not in ("https", "none"):
        raise UnsupportedSetting(f"ssl.endpoint.identification.algorithm={check}: https or none")
    try:
        return Tls(options, check_names=check == "https")
    except (OSError, ValueError) as error:
        raise UnsupportedSetting(f"the TLS files can't be read: {error}") from error


def _sasl(options: Mapping[str, str], callback: Callable[..., Any] | None) -> Mechanism:
    name = options.get("sasl.mechanism", options.get("sasl.mechanisms", "GSSAPI")).upper()
    if name == "OAUTHBEARER":
        return _oauthbearer(options, callback)
    if name not in _MECHANISMS:
        raise UnsupportedSetting(
            f"sasl.mechanism={name}: give one of {', '.join(_MECHANISMS)}, on a listener of the "
            "brokers that has it"
        )
    user, password = _needed(options, name, "sasl.username", "sasl.password")
    return Plain(user, password) if name == "PLAIN" else Scram(name, user, password)


def _oauthbearer(options: Mapping[str, str], callback: Callable[..., Any] | None) -> Mechanism:
    method = options.get("sasl.oauthbearer.method", "default").lower()
    extensions = _extensions(options.get("sasl.oauthbearer.extensions", ""))
    if callback is not None and method == "default":
        token = of_callback(callback, options.get("sasl.oauthbearer.config", ""))
        return OAuthBearer("the bearer of oauth_cb's token", token, extensions)
    if TOKEN_FILE in options and method == "default":
        path = Path(options[TOKEN_FILE])
        return OAuthBearer(f"the bearer of {path}", TokenFile(path), extensions)
    if TOKEN_FILE in options or method != "oidc":
        raise UnsupportedSetting(
            f"OAUTHBEARER needs {TOKEN_FILE}, {CALLBACK} (of clients in Python), or "
            "sasl.oauthbearer.method=oidc with client credentials"
        )
    url, client, secret = _needed(
        options, "oidc", *(f"sasl.oauthbearer.{name}" for name in _OIDC[:3])
    )
    if not url.lower().startswith(("https://", "http://")):
        raise UnsupportedSetting("sasl.oauthbearer.token.endpoint.url is no http(s) address")
    scope = options.get("sasl.oauthbearer.scope", "")
    try:
        token = KeptToken(
            ClientCredentials(url, client, secret, scope, options.get("https.ca.location"))
        )
    except (OSError, ValueError) as error:
        raise UnsupportedSetting(f"https.ca.location can't be read: {error}") from error
    return OAuthBearer(client, token, extensions)


def _needed(options: Mapping[str, str], what: str, *names: str) -> list[str]:
    if missing := [name for name in names if not options.get(name)]:
        raise UnsupportedSetting(f"{what} needs {' and '.join(missing)}")
    for name in names:
        # Non-UTF-8 bytes of an argument become lone surrogates; a null would end a field of PLAIN.
        if not options[name].isprintable():
            raise UnsupportedSetting(f"{name} is not plain text")
    return [options[name] for name in names]


def _extensions(text: str) -> dict[str, str]:
    """``name=value,…`` of RFC 7628."""
    pairs = dict(part.strip().partition("=")[::2] for part in text.split(",") if part.strip())
    if not all(name.isalpha() and value.isprintable() for name, value in pairs.items()):
        raise UnsupportedSetting("sasl.oauthbearer.extensions is not name=value,…")
    return pairs


def addresses(bootstrap: str) -> tuple[tuple[str, int], ...]:
    """The brokers' hosts and ports. `UnsupportedSetting` names a malformed part."""
    found = []
    for part in bootstrap.split(","):
        # librdkafka allows a protocol before the host.
        text = part.strip().rpartition("://")[2]
        host, _, port = text.rpartition(":")
        if not text:
            continue
        number = int(port) if port.isdecimal() and len(port) < 10 else 0
        if not host or not 0 < number <= _MOST_PORT:
            raise UnsupportedSetting(f"bootstrap.servers: {part!r} is not host:port")
        try:
            host.encode("idna")
        except UnicodeError as error:
            raise UnsupportedSetting(f"bootstrap.servers: {part!r} is no host: {error}") from None
        found.append((host.strip("[]"), number))
    if not found:
        raise UnsupportedSetting("bootstrap.servers names no broker")
    return tuple(found)
