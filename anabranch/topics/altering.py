"""Alters the settings of a stream's topics, with the same checks as at its creation. No other module does this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from anabranch.core.stream_settings import FIXED, MAX_MESSAGE, MIN_ISR, TOPIC
from anabranch.errors import InvalidArgument
from anabranch.ports import Log, TopicInfo
from anabranch.schemas.records import StreamRow
from anabranch.topics import declarations as declared
from anabranch.topics.creation import SHARED_WITH_JOURNAL, describe_grown, refuse, stream_problems


def alter_stream_topics(
    log: Log, row: StreamRow, *, former: Mapping[str, str], check: Callable[[], None]
) -> None:
    """Give a stream's topics the settings in its row. Safe to repeat. ``former``: the settings before this change.

    Nothing is altered unless brokers accept all of it. ``check``: called just before; may raise.

    Raises:
        InvalidArgument: ``max.message.bytes`` would be lowered: the stream must take what its journal took.
        TopicMisconfigured, NotReady, LogRefused: as `create_stream_topics`.
    """
    infos = describe_grown(log, row.stream, row.partitions)
    altered = (TOPIC.keys() - FIXED) & (row.settings.keys() | former.keys())
    if row.settings.get(MAX_MESSAGE) == former.get(MAX_MESSAGE):
        altered -= {MAX_MESSAGE}  # an operator may have raised it, which stays
    wanted = {name: _wanted(row, name, infos) for name in altered}
    kinds = altered, altered & SHARED_WITH_JOURNAL, altered & {MIN_ISR}
    changes, after = {}, {}
    # A broker may still report settings from before the last alteration, so all are sent, and both sizes count.
    least = int(former.get(MAX_MESSAGE) or 0)
    for (topic, info), names in zip(infos.items(), kinds, strict=True):
        to_be = {name: wanted[name] for name in names}
        config = {n: v for n, v in {**info.config, **to_be}.items() if v is not None}
        after[topic] = replace(info, config=config)
        changes[topic] = to_be
        size, now = (int(c.get(MAX_MESSAGE, 0)) for c in (config, info.config))
        now = max(now, least) if MAX_MESSAGE in names else now
        if size < now:
            raise InvalidArgument(
                f"{MAX_MESSAGE} of {topic} is {now} and can only be raised: what its journal has taken must fit"
            )
    refuse(stream_problems(row.stream, after, row.partitions))
    check()
    log.alter_topics({topic: change for topic, change in changes.items() if change})


def _wanted(row: StreamRow, name: str, infos: Mapping[str, TopicInfo]) -> str | None:
    """The value that a setting should have; None: the brokers' default."""
    if name in row.settings:
        return row.settings[name]
    if name == MIN_ISR:
        return "2" if min(info.replication_factor for info in infos.values()) >= 2 else "1"
    return next((s.value for s in declared.of_stream(row.stream) if s.name == name), None)
