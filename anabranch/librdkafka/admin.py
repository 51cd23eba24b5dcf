"""Admin requests of clients: partitions, size limits and end offsets of topics, ACLs."""

from __future__ import annotations

import logging
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ClusterMetadata,
    ResourcePatternType,
    ResourceType,
)
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._listoffsets import OffsetSpec

from anabranch.backoff import Backoff
from anabranch.errors import DeadlineExceeded, IllegalState, NotAuthorized, NotReady
from anabranch.kafka.settings import addresses
from anabranch.librdkafka.handles import made, with_error_callback
from anabranch.librdkafka.options import Options
from anabranch.ports import Clock
from anabranch.topics.rights import CLUSTER, GROUP, THE_CLUSTER, TOPIC, TRANSACTIONAL_ID, Acl, Right
from anabranch.waits import here

log = logging.getLogger("anabranch.client")

# Kafka's default, used where this client may not read the setting.
DEFAULT_MAX_MESSAGE_BYTES = 1_048_588
_LIMIT = "max.message.bytes"
_LIMIT_S = 2.0  # how long a limit is cached: it may be raised, or the topic replaced
_MISSING = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)  # noqa: SLF001
_FORBIDDEN = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED)
_TRY_S = 5.0
# Short, so that the caller soon knows of errors of authentication, after which librdkafka tries again.
_FIRST_TRY_S = 1.0
_LEAST_S = 0.05
GRACE_S = 1.0
_LOOK_S = 1.0
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5
_TOKEN_PAUSE_S = 1.0  # a provider may limit failed attempts
_KINDS = {
    TOPIC: ResourceType.TOPIC,
    GROUP: ResourceType.GROUP,
    TRANSACTIONAL_ID: ResourceType.TRANSACTIONAL_ID,
    CLUSTER: ResourceType.BROKER,  # librdkafka's name of it
}
_WORDS = {kind: word for word, kind in _KINDS.items()}
_OPERATIONS = {one.name.replace("_", "").lower(): one for one in AclOperation}

_TOO_LOW = (
    "the brokers say that {0}[{1}] ends at {2}, but they have acknowledged all up to {3}. If that lasts, they "
    "answer wrongly, and other brokers are needed: `anabranch doctor --broker` tries it"
)

T = TypeVar("T")
P = TypeVar("P", bound=tuple[str, int])


class KafkaAdmin:
    """Admin requests of one client, which connects at the first one. Thread-safe."""

    def __init__(self, options: Options, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._lock = here().lock()
        self._client: AdminClient | None = None
        # By topic: when the limit expires, and the limit.
        self._limits: dict[str, tuple[float, int]] = {}
        self._closed = False
        self._answered = False  # whether the last request was answered
        self._in_doubt = False  # whether the brokers that librdkafka knows may be gone
        self._denied = ""  # why the brokers refused this client
        self._untrusted = ""  # … and why this client refused the brokers' certificate

    def partition_counts(
        self, topics: Sequence[str], deadline: float, rights: Mapping[str, AclOperation] = {}
    ) -> dict[str, int]:
        """The number of partitions of each of these topics that exists.

        ``rights``: topic -> the operations that this client needs there. If one is missing, it raises
        `NotAuthorized` at once; otherwise the first command would fail only at its deadline.
        """
        return self.ask(deadline, self._counts(topics, rights))

    def _counts(
        self, topics: Iterable[str], rights: Mapping[str, AclOperation] = {}
    ) -> Callable[[AdminClient, float], dict[str, int]]:
        def ask(client: AdminClient, seconds: float) -> dict[str, int]:
            names = TopicCollection(list(topics))
            futures = client.describe_topics(
                names, request_timeout=seconds, include_authorized_operations=bool(rights)
            )
            found: dict[str, int] = {}
            for topic, future in futures.items():
                try:
                    described = here().result(future, seconds + GRACE_S)
                except KafkaException as error:
                    if error.args[0].code() in _FORBIDDEN:
                        raise NotAuthorized(
                            f"the right Describe on the topic {topic} is missing"
                        ) from error
                    if error.args[0].code() not in _MISSING:
                        raise
                    continue
                found[topic] = len(described.partitions)
                may, needed = described.authorized_operations, rights.get(topic)
                if may and needed is not None and needed not in may:
                    raise NotAuthorized(
                        f"the right {needed.name.capitalize()} on the topic {topic} is missing"
                    )
            return found

        return ask

    def max_message_bytes(self, topics: Sequence[str], deadline: float) -> dict[str, int]:
        """The largest batch that each topic accepts, cached for `_LIMIT_S`; Kafka's default if not readable."""
        now, never = self._clock.monotonic(), (0.0, 0)
        unknown = [topic for topic in topics if self._limits.get(topic, never)[0] <= now]

        def ask(client: AdminClient, seconds: float) -> dict[str, int]:
            resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in unknown]
            futures = client.describe_configs(resources, request_timeout=seconds)
            found: dict[str, int] = {}
            for resource, future in futures.items():
                try:
                    entry = here().result(future, seconds + GRACE_S).get(_LIMIT)
                except KafkaException as error:
                    if error.args[0].code() not in _FORBIDDEN:
                        raise
                    entry = None
                found[resource.name] = int(entry.value) if entry else DEFAULT_MAX_MESSAGE_BYTES
            return found

        if unknown:
            limits = self.ask(deadline, ask)
            self._limits |= {topic: (now + _LIMIT_S, limit) for topic, limit in limits.items()}
        return {topic: self._limits[topic][1] for topic in topics}

    def cluster_id(self, topic: str, deadline: float) -> str:
        """The brokers' id of their cluster. ``topic``: a topic that this client may describe."""
        return self.ask(
            deadline,
            lambda client, seconds: str(_listed(client, seconds, topic).cluster_id),
        )

    def topics(self, deadline: float) -> list[str]:
        """All topics that the brokers show this client."""
        return self.ask(deadline, lambda client, seconds: list(_listed(client, seconds).topics))

    def end_offsets(self, least: Mapping[P, int], deadline: float) -> dict[tuple[str, int], int]:
        """The high watermarks. ``least``: partition -> the least possible watermark, from acknowledgements.

        A former leader may return a lower watermark; then all are asked for again. If a watermark is still too low
        at the deadline, `NotReady` names it.
        """
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        request = {TopicPartition(t, p): latest for t, p in least}
        low: dict[P, int] = {}

        def ask(client: AdminClient, seconds: float) -> dict[tuple[str, int], int]:
            low.clear()
            futures = client.list_offsets(request, request_timeout=seconds)
            try:
                found = {
                    (place.topic, place.partition): here().result(future, seconds + GRACE_S).offset
                    for place, future in futures.items()
                }
            except KafkaException:
                # librdkafka reports "no leaders" for a topic that it may not describe.
                self._counts({place.topic for place in request})(client, seconds)
                raise
            low.update(
                {p: found[p] for p, acknowledged in least.items() if found[p] < acknowledged}
            )
            if low:
                raise TimeoutError
            return found

        try:
            return self.ask(deadline, ask) if request else {}
        except NotReady as error:
            for place, end in low.items():
                if end >= 0:
                    # At first, and while leaders move, librdkafka may return -1001 without an error.
                    raise NotReady(_TOO_LOW.format(*place, end, least[place])) from error
            raise

    def allow(self, acls: Iterable[Acl], deadline: float) -> None:
        """Add ACLs. Raises `NotAuthorized`, `IllegalState`."""
        wanted = [binding_of(acl) for acl in acls]

        def ask(client: AdminClient, seconds: float) -> None:
            with _needs("Alter"):
                for done in client.create_acls(wanted, request_timeout=seconds).values():
                    here().result(done, seconds + GRACE_S)

        self.ask(deadline, ask)

    def listed(self, deadline: float) -> list[Acl]:
        """The ACLs of the brokers. Raises `NotAuthorized`, `IllegalState`."""

        def ask(client: AdminClient, seconds: float) -> list[Acl]:
            with _needs("Describe"):
                asked = client.describe_acls(everything(), request_timeout=seconds)
                found = here().result(asked, seconds + GRACE_S)
            if not found:  # librdkafka raises no error if the brokers have no authorizer
                raise IllegalState(
                    "the brokers keep no rules: they have no authorizer, or only super.users may do anything"
                )
            return [acl for one in found if (acl := acl_of(one))]

        return self.ask(deadline, ask)

    def ask(self, deadline: float, ask: Callable[[AdminClient, float], T]) -> T:
        """Ask until there is an answer: leaders may be moving, and brokers learn of new topics late."""
        pauses, trouble = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, self._clock), ""
        while True:
            if self._closed:
                raise IllegalState("the client is closed")
            try:
                client = self._connected()
            except NotReady:  # a token may come later
                if self._clock.monotonic() + _TOKEN_PAUSE_S >= deadline:
                    raise
                self._clock.sleep(_TOKEN_PAUSE_S)
                continue
            # An error from before the last answer is over, though its callback may come now.
            if self._answered:
                client.poll(0)
                self._denied = ""
            left = deadline - self._clock.monotonic()
            if left <= 0 and trouble:
                raise self._not_ready(trouble)
            if left <= 0:
                raise DeadlineExceeded("no time was left to ask the brokers; call again with more")
            try:
                if self._in_doubt:
                    trouble = self._refresh(client, deadline) or trouble
                    continue
                patience = max(_FIRST_TRY_S, min(_TRY_S, left / 2) if self._answered else 0.0)
                found = ask(client, max(min(left, patience), _LEAST_S))
                self._answered = True
                return found
            except TimeoutError:
                trouble = "no answer"
            except KafkaException as error:
                if error.args[0].code() in _FORBIDDEN:
                    raise NotAuthorized(f"the brokers refuse: {error.args[0].str()}") from error
                trouble = error.args[0].str()
            self._in_doubt = True
            client.poll(0)  # for `_on_error`
            if self._denied and not self._answered:
                denied, self._denied = self._denied, ""
                raise NotAuthorized(f"the brokers don't let this client in: {denied}")
            if not pauses.sleep(deadline):
                raise self._not_ready(trouble)

    def _not_ready(self, trouble: str) -> NotReady:
        why = trouble if self._answered else here().run(lambda: no_broker(self._options.bootstrap))
        where = self._options.bootstrap
        if not why and self._untrusted:
            why = (
                f"the certificate of what listens at {where} is not trusted; see ssl.ca.location, and whether "
                f"it is of that host: {self._untrusted}"
            )
        if not why:
            why = f"what listens at {where} does not answer as a broker; see security.protocol"
        return NotReady(f"the brokers can't be asked: {why}")

    def _refresh(self, client: AdminClient, deadline: float) -> str:
        """Refresh the metadata after a request without an answer.

        Otherwise librdkafka continues to send requests to a broker that was killed. If a call has no time left for
        this, the next call begins with it. So clients with short timeouts find other brokers, too.

        A client without an answer is replaced: it may have lost all brokers for good (decision 0010). Returns why
        there was none.
        """
        self._in_doubt = False
        try:
            left = deadline - self._clock.monotonic()
            _listed(client, max(min(left, _TRY_S), _LEAST_S))
            self._answered = True
        except KafkaException as error:
            log.debug("metadata: %s", error)
            self._answered = False
            with self._lock:
                if self._client is client:
                    self._client = None
            return str(error.args[0].str())
        return ""

    def _connected(self) -> AdminClient:
        with self._lock:
            if self._client is None:
                # A reference cycle would keep the threads alive.
                on_error = weakref.WeakMethod(self._on_error)
                config = with_error_callback(
                    self._options.admin(), lambda error: (on_error() or _ignore)(error)
                )
                self._client = made(AdminClient, config)
            return self._client

    def _on_error(self, error: KafkaError) -> None:
        # librdkafka also reports a handshake that a stopping broker cut off this way, with another text.
        refused = error.code() == KafkaError._AUTHENTICATION  # noqa: SLF001
        if refused and "Local: " not in error.str():
            self._denied = error.str()
        if error.code() == KafkaError._SSL and "certificate verify failed" in error.str():  # noqa: SLF001
            self._untrusted = error.str()

    def close(self) -> None:
        """Make no more requests."""
        self._closed = True

    @property
    def native(self) -> object:
        """The admin client of confluent-kafka, if it was made."""
        return self._client


@contextmanager
def _needs(right: str) -> Iterator[None]:
    """Convert errors: they name the missing right on the cluster, or the missing authorizer."""
    try:
        yield
    except KafkaException as error:
        code = error.args[0].code()
        if code == KafkaError.CLUSTER_AUTHORIZATION_FAILED:
            raise NotAuthorized(
                f"the right {right} on the cluster {THE_CLUSTER} is missing"
            ) from error
        if code == KafkaError.SECURITY_DISABLED:
            raise IllegalState("the brokers have no authorizer, and so no rules") from error
        raise


def _listed(client: AdminClient, seconds: float, topic: str | None = None) -> ClusterMetadata:
    """Metadata of the brokers, and of a topic (None: of all)."""
    return here().run(partial(client.list_topics, *((topic,) if topic else ()), timeout=seconds))


def _ignore(_: KafkaError) -> None:
    """The error callback once this object is gone."""


def no_broker(bootstrap: str) -> str:
    """Why each address can't be reached within `_LOOK_S`; empty if something listens at an address."""
    given = addresses(bootstrap)
    with ThreadPoolExecutor(len(given)) as pool:
        found = list(pool.map(_obstacle, given))
    return "" if "" in found else "; ".join(found)


def _obstacle(address: tuple[str, int]) -> str:
    try:
        socket.create_connection(address, timeout=_LOOK_S).close()
    except socket.gaierror:
        why = "the host is not known"
    except OSError as error:
        why = error.strerror or str(error)
    else:
        return ""
    return f"no broker answers at {address[0]}:{address[1]}: {why}"


def binding_of(acl: Acl) -> AclBinding:
    """The ACL in librdkafka's form."""
    right = acl.right
    return AclBinding(
        _KINDS[right.kind],
        right.name,
        ResourcePatternType.PREFIXED if right.prefixed else ResourcePatternType.LITERAL,
        acl.principal,
        "*",
        _OPERATIONS[right.operation.lower()],
        AclPermissionType.ALLOW if acl.allowed else AclPermissionType.DENY,
    )


def acl_of(found: AclBinding) -> Acl | None:
    """The ACL in anabranch's form; None for a kind that anabranch does not use."""
    if found.restype not in _WORDS:
        return None
    name = AclOperation(found.operation).name
    operation = "".join(word.capitalize() for word in name.split("_"))
    prefixed = found.resource_pattern_type == ResourcePatternType.PREFIXED
    right = Right(_WORDS[found.restype], found.name, operation, "", prefixed)
    return Acl(found.principal, right, found.permission_type == AclPermissionType.ALLOW)


def everything() -> AclBindingFilter:
    """A filter that matches all ACLs."""
    every: Callable[..., AclBindingFilter] = AclBindingFilter  # its annotations lack None
    any_pattern, any_permission = ResourcePatternType.ANY, AclPermissionType.ANY
    return every(ResourceType.ANY, None, any_pattern, None, None, AclOperation.ANY, any_permission)
