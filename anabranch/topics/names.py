"""Names of topics, groups and transactional ids. No other module spells them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from anabranch.errors import InvalidArgument
from anabranch.protocol.legal_names import OPEN_LANE, split_stream

DEFAULT_PREFIX = "anabranch"


def commands_topic(prefix: str = DEFAULT_PREFIX, lane: str = OPEN_LANE) -> str:
    return f"{prefix}.commands" + ("" if lane == OPEN_LANE else f".{lane}")


def control_topic(prefix: str = DEFAULT_PREFIX) -> str:
    """The topic of controllers' messages to each other."""
    return f"{prefix}.control"


def replies_topic(prefix: str = DEFAULT_PREFIX, lane: str = OPEN_LANE) -> str:
    return f"{prefix}.replies" + ("" if lane == OPEN_LANE else f".{lane}")


def prefixes_of(topics: Iterable[str], lane: str = OPEN_LANE) -> list[str]:
    """The prefixes with which both topics of a lane are among these topics, the default prefix first."""
    names, end = set(topics), commands_topic("", lane)
    found = sorted(
        (name.removesuffix(end) for name in names if name.endswith(end)),
        key=lambda prefix: (prefix != DEFAULT_PREFIX, prefix),
    )
    return [prefix for prefix in found if replies_topic(prefix, lane) in names]


def status_topic(prefix: str = DEFAULT_PREFIX) -> str:
    return f"{prefix}.status"


def controllers_group(prefix: str = DEFAULT_PREFIX) -> str:
    """The consumer group whose assignment suggests which controller should lead a control partition."""
    return f"{prefix}.controllers"


def transactional_ids(control_partition: int, prefix: str = DEFAULT_PREFIX) -> tuple[str, ...]:
    """The transactional ids of a control partition: two that rounds use in turn, and some to replace a busy id."""
    return tuple(f"{prefix}.control.{control_partition}.{letter}" for letter in "abcdef")


def carrier_ids(
    control_partition: int, number: int, prefix: str = DEFAULT_PREFIX
) -> tuple[str, str]:
    """The two transactional ids of a carrier, which makes staged merges."""
    base = f"{prefix}.control.{control_partition}.carrier.{number}"
    return f"{base}.a", f"{base}.b"


def of_transactions(prefix: str = DEFAULT_PREFIX) -> str:
    """The prefix of all transactional ids."""
    return f"{prefix}.control."


def of_scope(scope: str) -> str:
    """The prefix of the names of all topics of a scope's streams."""
    return f"{scope}."


@lru_cache(1 << 16)  # more than a controller's streams: else loops over all would miss each time
def stream_topic(stream: str) -> str:
    """'nyc/flights' -> 'nyc.flights': the topic of committed events."""
    scope, name = split_stream(stream)
    return f"{scope}.{name}"


def journal_topic(stream: str) -> str:
    """'nyc/flights' -> 'nyc.flights.journal': events of transactions, plain writes and participant ops."""
    return stream_topic(stream) + ".journal"


def history_topic(stream: str) -> str:
    """'nyc/flights' -> 'nyc.flights.history': EPOCH and COMMIT records."""
    return stream_topic(stream) + ".history"


def topics_of(stream: str) -> tuple[str, str, str]:
    """A stream's three topics: stream, journal, history; the order of `StreamRow.topic_ids`."""
    return stream_topic(stream), journal_topic(stream), history_topic(stream)


def mirror_group(processor: str) -> str:
    """'nyc/delays' -> 'nyc.delays': the consumer group that shows a processor's positions to tools."""
    return stream_topic(processor)


def check_prefix(prefix: str) -> str:
    """Return the prefix if it can't collide with a stream's topic (scope.stream). Raises: InvalidArgument."""
    if not prefix or not all(c.isalnum() or c in "_-" for c in prefix):
        raise InvalidArgument(f"topic prefix {prefix!r}: letters, digits, _ and - only")
    return prefix
