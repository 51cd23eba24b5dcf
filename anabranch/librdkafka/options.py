"""Options of `connect`: librdkafka's, for each role. Options that would break a guarantee are refused."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from anabranch.errors import InvalidArgument, UnsupportedSetting
from anabranch.kafka.oauth_tokens import token_and_end
from anabranch.kafka.settings import OPTIONS, TOKEN_FILE, option_names
from anabranch.protocol import limits
from anabranch.protocol.legal_names import check_text

_PROMISE = "anabranch's promises rest on it"
_OWN = "anabranch chooses it"
_CALL = "give it to the call instead"
_READ = "readers commit what was processed"


# Option -> (allowed values, why others are refused). An empty set: no value is allowed.
_FIXED: dict[str, tuple[frozenset[str], str]] = {
    name: (frozenset(allowed), why)
    for why, allowed, names in (
        (_PROMISE, ("all", "-1"), "acks request.required.acks"),
        (_PROMISE, ("true",), "enable.idempotence delivery.report.only.error"),
        (_PROMISE, ("read_committed",), "isolation.level"),
        ("streams are made by create_stream", ("false",), "allow.auto.create.topics"),
        (_READ, ("false",), "enable.auto.commit enable.auto.offset.store"),
        (_READ, (), "auto.commit.enable"),
        ("readers are written for it", ("classic",), "group.protocol"),
        (
            "readers take all partitions again",
            ("range", "roundrobin", "range,roundrobin"),
            "partition.assignment.strategy",
        ),
        ("clients use no native transactions", (), "transactional.id transaction.timeout.ms"),
        ("events are placed by the hash of their key, in all languages alike", (), "partitioner"),
        ("events are placed by the hash of their key", (), "partitioner_cb"),
        ("events without a key are placed by anabranch", (), "sticky.partitioning.linger.ms"),
        ("it is the first argument of connect", (), "bootstrap.servers metadata.broker.list"),
        (f"{_CALL}: read(group=…)", (), "group.id"),
        (f"{_CALL}: read(start=…)", (), "auto.offset.reset"),
        ("give topic options by their names", (), "default_topic_conf default.topic.config"),
        (_OWN, ("false",), "enable.partition.eof"),
        (
            _OWN,
            (),
            """
            background_event_cb consume_cb dr_cb dr_msg_cb offset.store.method offset_commit_cb on_commit
            on_delivery rebalance_cb
            """,
        ),
    )
    for name in names.split()
}

_PRODUCER_ONLY = option_names(
    """
    batch.num.messages batch.size compression.codec compression.level compression.type delivery.timeout.ms
    enable.gapless.guarantee linger.ms message.send.max.retries message.timeout.ms msg_order_cmp
    queue.buffering.backpressure.threshold queue.buffering.max.kbytes queue.buffering.max.messages
    queue.buffering.max.ms queuing.strategy request.timeout.ms retries
    """
)
_CONSUMER_ONLY = option_names(
    """
    auto.commit.interval.ms check.crcs consume.callback.max.messages coordinator.query.interval.ms
    fetch.error.backoff.ms fetch.max.bytes fetch.message.max.bytes fetch.min.bytes fetch.queue.backoff.ms
    fetch.wait.max.ms group.instance.id group.protocol.type group.remote.assignor
    heartbeat.interval.ms max.partition.fetch.bytes max.poll.interval.ms partition.assignment.strategy
    queued.max.messages.kbytes queued.min.messages session.timeout.ms
    """
)
_WITH_UNDERSCORE = option_names(
    """
    log_level error_cb stats_cb throttle_cb log_cb logger oauth_cb socket_cb connect_cb closesocket_cb open_cb
    resolve_cb oauthbearer_token_refresh_cb ssl_ca ssl_key ssl_certificate ssl_engine_callback_data
    ssl.certificate.verify_cb
    """
)

# Texts that brokers compare, so librdkafka must not change them.
_NAMES = {"client.id", "client.rack", "group.instance.id", "sasl.username", "sasl.password"}

_COMMANDS = {
    "linger.ms": 0,
    # A single command is sent at once. Commands that come while one is in flight are sent together: half the work.
    "max.in.flight.requests.per.connection": 1,
    "enable.idempotence": True,
    "acks": "all",
    "message.timeout.ms": 60_000,
    "retry.backoff.ms": 20,
    "delivery.report.only.error": True,
    "socket.nagle.disable": True,
}
# Longer than the fencing of a frozen broker takes. With librdkafka's default nothing would work for a minute.
_SMALL_DEFAULTS = {"socket.timeout.ms": 10_000}
_REPLIES = {
    "group.id": "anabranch-replies",  # never joined: the partition is assigned by hand
    "isolation.level": "read_committed",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "latest",
    "fetch.wait.max.ms": 50,
    "fetch.queue.backoff.ms": 2,
    "fetch.error.backoff.ms": 50,
    "socket.nagle.disable": True,
}
# Merges are efficient from about 100 records a batch, so batches may fill for a while. A batch that fits into the
# cache of a CPU core takes an eighth less time to compress.
_BULK_DEFAULTS = {
    "linger.ms": 50,
    "batch.size": 250_000,
    "batch.num.messages": 100_000,
    "compression.type": "lz4",
    "queue.buffering.max.messages": 500_000,
    "queue.buffering.max.kbytes": 256 << 10,
}
_CODEC_OPTIONS = ("compression.type", "compression.codec")
_OTHER_CODECS = ("gzip", "none")
# Encoding columns costs little, so requests matter: bigger batches than the default take a fifth less time and CPU.
_COLUMN_BATCH_BYTES = 1_000_000
_BULK = {"enable.idempotence": True, "acks": "all", "delivery.report.only.error": True}
_READER = {
    "isolation.level": "read_committed",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": False,
}
_SYNONYMS = {
    "compression.type": "compression.codec",
    "linger.ms": "queue.buffering.max.ms",
    "fetch.message.max.bytes": "max.partition.fetch.bytes",
}


# The most bytes that a batch of events may unpack to: an option of readers, not of librdkafka.
MAX_EVENT = "max.event.bytes"
_MOST_EVENT_BYTES = 512 << 20  # controllers never accepted more


class Options:
    """Checked options, with a dict of confluent-kafka for each role."""

    def __init__(self, bootstrap: str, given: Mapping[str, Any]) -> None:
        for name in _NAMES & given.keys():
            check_text(f"option {name}", given[name])
        checked = {name: value for name, value in given.items() if _is_free(name, value)}
        self.max_event_bytes = _event_bytes(checked.pop(MAX_EVENT, limits.READ))
        self.bootstrap = bootstrap
        self._common = {
            name: value
            for name, value in checked.items()
            if name not in _PRODUCER_ONLY and name not in _CONSUMER_ONLY
        }
        self._producer = {n: v for n, v in checked.items() if n in _PRODUCER_ONLY}
        self._given = frozenset(self._producer)
        self._consumer = {n: v for n, v in checked.items() if n in _CONSUMER_ONLY}
        self._codecs = list(_OTHER_CODECS)  # to try if brokers refuse the default

    @property
    def codec(self) -> str:
        """The codec of writers' batches."""
        chosen = _merge(_BULK_DEFAULTS, self._producer)
        return next((str(chosen[n]) for n in _CODEC_OPTIONS if n in chosen), "none")

    def replace_codec(self, refused: str) -> str:
        """Use another codec from now on, because brokers refuse this codec. Returns a text for the error.

        A codec that the caller chose is not replaced.
        """
        if any(name in self._given for name in _CODEC_OPTIONS) or not self._codecs:
            return f"these brokers take no {refused}: give another compression_type to connect"
        if refused == self.codec:  # otherwise another writer has replaced it
            self._producer["compression.type"] = self._codecs.pop(0)
            logger.warning(
                "these brokers take no %s: writers use %s from now on (compression_type of connect)",
                refused,
                self.codec,
            )
        return f"these brokers take no {refused}, and {self.codec} is used from now on"

    def admin(self) -> dict[str, Any]:
        """For an admin client, and part of the options of all others."""
        return {
            "bootstrap.servers": self.bootstrap,
            "client.id": "anabranch",
            "log.connection.close": False,
            "logger": logger,
            **for_librdkafka(self._common),
        }

    def commands(self, max_bytes: int) -> dict[str, Any]:
        """For the producer of commands: the lowest delay."""
        return (
            _SMALL_DEFAULTS | self.admin() | _COMMANDS | {"message.max.bytes": _in_range(max_bytes)}
        )

    def replies(self) -> dict[str, Any]:
        return _SMALL_DEFAULTS | self.admin() | _REPLIES

    def journal(self, max_bytes: int) -> dict[str, Any]:
        """For a writer's producer: big batches. ``max_bytes``: the topic's limit for a batch."""
        chosen = _merge(_BULK_DEFAULTS, self._producer)
        limit = _in_range(min(max_bytes, self.message_max_bytes))
        chosen["batch.size"] = min(int(chosen["batch.size"]), limit)
        return self.admin() | chosen | _BULK | {"message.max.bytes": limit}

    def column_batch_bytes(self, max_bytes: int) -> int:
        """The size of a writer's batches of columns, before compression. ``max_bytes``: the topic's limit."""
        chosen = int(self._producer.get("batch.size", _COLUMN_BATCH_BYTES))
        return min(chosen, _in_range(min(max_bytes, self.message_max_bytes)))

    def raw(self) -> dict[str, Any]:
        """For a writer's connections without librdkafka: the caller's options, without our defaults."""
        return self._common | self._producer

    def raw_reader(self) -> dict[str, Any]:
        """For a reader's connections without librdkafka."""
        return dict(self._common)

    def reader(self, group: str, start: str) -> dict[str, Any]:
        """For a reader's member of its group, which fetches nothing."""
        own = {"group.id": check_text("a group's name", group), "auto.offset.reset": start}
        return self.admin() | self._consumer | _READER | own

    @property
    def message_max_bytes(self) -> int:
        """The caller's own limit for a batch."""
        return int(self._common.get("message.max.bytes", _MAX_MESSAGE_BYTES))


def for_librdkafka(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options for librdkafka: a token file becomes a callback, and topics are not auto-created.

    Otherwise producers and admin clients would recreate deleted topics.
    """
    found = {"allow.auto.create.topics": False, **given}
    file = found.pop(TOKEN_FILE, None)
    return found if file is None else {"oauth_cb": partial(token_and_end, Path(str(file))), **found}


_MIN_MESSAGE_BYTES = 1000  # librdkafka's range of message.max.bytes
_MAX_MESSAGE_BYTES = 1_000_000_000


def _in_range(max_bytes: int) -> int:
    return max(_MIN_MESSAGE_BYTES, min(max_bytes, _MAX_MESSAGE_BYTES))


def _event_bytes(given: Any) -> int:
    if not str(given).isdecimal() or not 0 < int(given) <= _MOST_EVENT_BYTES:
        raise InvalidArgument(f"{MAX_EVENT}={given!r}: a whole number, 1 to {_MOST_EVENT_BYTES:,}")
    return int(given)


def named_options(config: Mapping[str, Any] | None, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """All options under librdkafka's names. Raises `UnsupportedSetting` if an option is given twice."""
    found = dict(config or {})
    for keyword, value in keywords.items():
        as_it_is = keyword in _WITH_UNDERSCORE or keyword in _FIXED
        name = keyword if as_it_is else keyword.replace("_", ".")
        if name in found:
            raise UnsupportedSetting(f"{name} is given twice")
        found[name] = value
    return found


def _is_free(name: str, value: Any) -> bool:
    """Whether the caller may choose the value; False if it equals a fixed value. Raises for another value."""
    if name not in _FIXED:
        return True
    allowed, why = _FIXED[name]
    if str(value).lower() not in allowed:
        said = f"only {' or '.join(sorted(allowed))}: " if allowed else ""
        raise UnsupportedSetting(f"{name}={value!r} is refused; {said}{why}")
    return len(allowed) > 1 and "acks" not in name


def check_option(name: str, value: str) -> None:
    """Check an option of a file by itself. Raises `UnsupportedSetting` for what no connection takes."""
    if _is_free(name, value) and name not in (
        known := _PRODUCER_ONLY | _CONSUMER_ONLY | OPTIONS | {MAX_EVENT}
    ):
        near = get_close_matches(name, known, 1)
        raise UnsupportedSetting(
            f"{name} is not known, or not to be honoured where anabranch speaks to brokers itself"
            + (f": did you mean {near[0]}?" if near else "; leave it out")
        )


def _merge(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults, replaced by the given options; a synonym also replaces a default."""
    merged = dict(defaults)
    for name in list(merged):
        synonym = _SYNONYMS.get(name)
        if synonym is not None and synonym in given:
            del merged[name]
    return merged | dict(given)


# -- log lines of librdkafka --------------------------------------------------------------------------

EVERY_S = 30.0
_REPEATED = frozenset(("FAIL", "ERROR", "REQTMOUT"))
_MOST_KINDS = 1000

logger = logging.getLogger("anabranch.kafka")


class Seldom(logging.Filter):
    """Passes a new failure at once, then every 30 seconds with the number of omitted lines.

    While a broker is away, librdkafka logs each attempt to connect, several times a second. Two lines are the same
    if facility, client and thread are (each broker has a thread).
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._logged: dict[tuple[str, str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log the record. Its format is ``"%s [%s] %s" % (facility, client, text)``."""
        args = record.args
        if not isinstance(args, tuple) or len(args) != 3:
            return True
        if args[0] == "GETPID" and str(args[2]).endswith("retrying"):
            return False  # normal while brokers start; a later line reports it if it lasts
        if args[0] not in _REPEATED:
            return True
        facility, client, text = map(str, args)
        kind = facility, client, text.partition("]")[0]
        now = self._monotonic()
        with self._lock:
            if len(self._logged) >= _MOST_KINDS:
                self._logged.clear()
            since, left_out = self._logged.get(kind, (now - EVERY_S, 0))
            if now - since < EVERY_S:
                self._logged[kind] = since, left_out + 1
                return False
            self._logged[kind] = now, 0
        if left_out:
            record.msg = f"{record.msg} (and %d more)"
            record.args = (*args, left_out)
        return True


logger.addFilter(Seldom())
