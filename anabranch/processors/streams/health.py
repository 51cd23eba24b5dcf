"""Topics as brokers' metadata tell of them: for streams in trouble, and for lanes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

from anabranch.backoff import Backoff
from anabranch.core import limits
from anabranch.core.stream_settings import MAX_MESSAGE, MIN_ISR
from anabranch.ports import (
    CORRUPT_MESSAGE,
    INVALID_RECORD,
    INVALID_TIMESTAMP,
    MESSAGE_TOO_LARGE,
    UNSUPPORTED_COMPRESSION_TYPE,
    Clock,
    Log,
    LogError,
    LogRefused,
    TopicInfo,
)

log = logging.getLogger("anabranch.controller")

# Codes by which a broker refuses records; two are RECORD_LIST_TOO_LARGE and UNSUPPORTED_FOR_MESSAGE_FORMAT. Other
# codes refuse the topic.
DATA_CODES = frozenset(
    (
        CORRUPT_MESSAGE,
        MESSAGE_TOO_LARGE,
        18,
        INVALID_TIMESTAMP,
        43,
        UNSUPPORTED_COMPRESSION_TYPE,
        INVALID_RECORD,
    )
)

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0
QUIET_S = 10.0  # after this long without trouble a pause is short again


def new_pauses(clock: Clock) -> Backoff:
    """The pauses of a topic, or a stream, that fails."""
    return Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, clock, quiet_s=QUIET_S)


def refuses_data(error: LogError) -> bool:
    """Whether brokers refused records for their content."""
    return isinstance(error, LogRefused) and error.error in DATA_CODES


class Described(NamedTuple):
    """Topics as they are. ``forbidden``: those that may not be seen, and the reason."""

    found: dict[str, TopicInfo]
    forbidden: dict[str, str]


def describe(source: Log, witness: str, topics: Iterable[str]) -> Described | None:
    """The topics as they are; None if that can't be told. An answer without the witness does not count."""
    left, forbidden = set(topics), dict[str, str]()
    while True:
        try:
            found = source.describe_topics([witness, *sorted(left)])
        except LogRefused as error:
            if not error.topics & left:
                log.warning("topics can't be looked at now: %s", error)
                return None
            forbidden |= dict.fromkeys(error.topics & left, str(error))
            left -= error.topics
        except LogError as error:
            log.warning("topics can't be looked at now: %s", error)
            return None
        else:
            if witness in found:
                return Described(found, forbidden)
            log.warning("topics can't be looked at now: a broker does not know %s", witness)
            return None


def gone(topic: str, info: TopicInfo | None, partitions: int, topic_id: str) -> str:
    """The reason why a topic is not there, or is not the one that it was; empty: it is."""
    if info is None:
        return f"there is no topic {topic}"
    if topic_id and info.topic_id != topic_id:
        return f"topic {topic} is another one: it was deleted and created again"
    if info.partitions < partitions:
        return f"topic {topic} has only {info.partitions} partitions"
    return ""


def unwell(info: TopicInfo, partitions: int) -> str:
    """The reason why these partitions of a topic can't be written to; empty if none is known."""
    leaderless = [partition for partition in info.leaderless if partition < partitions]
    if leaderless:
        return f"{info.name}[{leaderless[0]}] has no leader"
    least = int(info.config.get(MIN_ISR, "1"))
    if 0 <= info.in_sync < least:
        return f"{info.name} has {info.in_sync} replicas in sync, {MIN_ISR} is {least}"
    # Brokers apply it to markers of native transactions, too: a round would never end.
    least = limits.LEAST_MESSAGE.value
    size = int(info.config.get(MAX_MESSAGE, least))
    if size < least:
        return f"{info.name} takes batches of {size:,} bytes only; set {MAX_MESSAGE} to {least} or more"
    return ""
