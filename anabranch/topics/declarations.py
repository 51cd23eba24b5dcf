"""All topics, declared as data: settings and why. They are created and checked from here only.

A setting that is weaker than declared, or that would change what is stored, is refused by name with what to
set (`TopicMisconfigured`): a transaction that survives everything but its topics is worth nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from anabranch.core.keyspace import even_ranges
from anabranch.errors import TopicMisconfigured, UnsupportedSetting
from anabranch.ports import Log, TopicInfo, TopicPartition, TopicSpec
from anabranch.topics.names import (
    commands_topic,
    history_topic,
    journal_topic,
    replies_topic,
    status_topic,
    stream_topic,
)

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
MAX_LONG = (1 << 63) - 1
DEFAULT_REPLY_PARTITIONS = 8


@dataclass(frozen=True, slots=True)
class Setting:
    """A topic setting: what we create, what we accept, and why."""

    name: str
    value: str
    accepts: Callable[[str], bool]
    why: str


def _is(name: str, value: str, why: str) -> Setting:
    return Setting(name, value, lambda found: found == value, why)


def _at_least(name: str, value: int, why: str) -> Setting:
    return Setting(name, str(value), lambda found: int(found) >= value, why)


def _forever(name: str, why: str) -> Setting:
    return Setting(name, "-1", lambda found: int(found) < 0, why)


_VERBATIM = _is("compression.type", "producer", "spliced batches are stored as they come")
_CREATE_TIME = _is("message.timestamp.type", "CreateTime", "events carry their own time")
_ANY_FUTURE = _at_least(
    "message.timestamp.after.max.ms", MAX_LONG, "an event's own time may be ahead of the broker's"
)
_ANY_PAST = _at_least("message.timestamp.before.max.ms", MAX_LONG, "events may be old")
_BIG_RECORDS = 16 << 20

COMMANDS: tuple[Setting, ...] = (
    _is("cleanup.policy", "delete", "requests are not keyed"),
    _at_least("retention.ms", HOUR_MS, "a request must be there until a controller reads it"),
    _CREATE_TIME,
)
REPLIES: tuple[Setting, ...] = (
    _is("cleanup.policy", "delete", "answers are not keyed"),
    _at_least("retention.ms", 10 * 60_000, "an answer must be there until its client reads it"),
    _at_least("max.message.bytes", _BIG_RECORDS, "an answer lists a transaction's writers"),
    _CREATE_TIME,
)
STATUS: tuple[Setting, ...] = (
    _is("cleanup.policy", "compact", "it is the changelog of the status table"),
    _at_least("delete.retention.ms", DAY_MS, "a checkpoint must see a deletion before it goes"),
    _at_least("max.message.bytes", _BIG_RECORDS, "a row names all writers of a commit"),
    _CREATE_TIME,
)
JOURNAL: tuple[Setting, ...] = (
    _is("cleanup.policy", "delete", "the controller deletes what nobody needs"),
    _forever("retention.ms", "an open transaction may be old; time must not delete its writes"),
    _forever("retention.bytes", "an open transaction may be big"),
    _VERBATIM,
    _CREATE_TIME,
    _ANY_FUTURE,
    _ANY_PAST,
)
HISTORY: tuple[Setting, ...] = (
    _is("cleanup.policy", "delete", "each record is a step of the stream"),
    _forever("retention.ms", "readers find their way by it"),
    _forever("retention.bytes", "readers find their way by it"),
    _at_least("max.message.bytes", _BIG_RECORDS, "a record names every segment"),
    _CREATE_TIME,
    _ANY_FUTURE,
    _ANY_PAST,
)
STREAM: tuple[Setting, ...] = (
    Setting(
        "cleanup.policy",
        "delete",
        lambda found: found == "delete",
        "compaction would tear transactions apart",
    ),
    _VERBATIM,
    _CREATE_TIME,
    _ANY_FUTURE,
    _ANY_PAST,
)
# What a user may choose for a stream.
STREAM_SETTINGS = frozenset(
    (
        "retention.ms",
        "retention.bytes",
        "segment.bytes",
        "segment.ms",
        "max.message.bytes",
        "min.insync.replicas",
        "replication.factor",
    )
)
_SHARED_WITH_JOURNAL = frozenset(("max.message.bytes", "min.insync.replicas", "segment.bytes"))
_CREATED_ONLY = {
    "commands": {"retention.ms": str(7 * DAY_MS)},
    "replies": {"retention.ms": str(HOUR_MS)},
    "status": {
        "delete.retention.ms": str(7 * DAY_MS),
        "segment.ms": str(HOUR_MS),
        "segment.bytes": str(64 << 20),
        "min.cleanable.dirty.ratio": "0.2",
    },
}


def create_control_topics(
    log: Log,
    prefix: str,
    *,
    control_partitions: int,
    replication_factor: int = -1,
    reply_partitions: int = DEFAULT_REPLY_PARTITIONS,
) -> tuple[int, int]:
    """Create what is missing of commands, status and replies, and check all.

    Returns (control partitions, reply partitions) as they are. More control partitions than asked for are
    fine: they were added to serve new scopes.
    """
    declared = (
        (commands_topic(prefix), control_partitions, COMMANDS, _CREATED_ONLY["commands"]),
        (status_topic(prefix), control_partitions, STATUS, _CREATED_ONLY["status"]),
        (replies_topic(prefix), reply_partitions, REPLIES, _CREATED_ONLY["replies"]),
    )
    _create(log, [_spec(n, p, s, more, replication_factor) for n, p, s, more in declared])
    infos = log.describe_topics([name for name, *_ in declared])
    for name, partitions, settings, _ in declared:
        check_topic(infos[name], settings, at_least=partitions)
    commands, status = (infos[name].partitions for name, *_ in declared[:2])
    if commands != status:
        raise TopicMisconfigured(
            f"{declared[0][0]} has {commands} partitions and {declared[1][0]} {status}: add partitions "
            "until they are equal"
        )
    return commands, infos[declared[2][0]].partitions


def create_stream_topics(
    log: Log, stream: str, *, segments: int, settings: Mapping[str, str]
) -> dict[int, int]:
    """Create and check a stream's three topics; returns the stream's end offset on each partition."""
    unknown = sorted(set(settings) - STREAM_SETTINGS)
    if unknown:
        raise UnsupportedSetting(
            f"a stream has no setting {', '.join(unknown)}; it takes {', '.join(sorted(STREAM_SETTINGS))}"
        )
    even_ranges(segments)
    chosen = {k: v for k, v in settings.items() if k != "replication.factor"}
    shared = {k: v for k, v in chosen.items() if k in _SHARED_WITH_JOURNAL}
    durable = {k: v for k, v in chosen.items() if k == "min.insync.replicas"}
    factor = int(settings.get("replication.factor", -1))
    names = stream_topic(stream), journal_topic(stream), history_topic(stream)
    _create(
        log,
        [
            _spec(names[0], segments, STREAM, chosen, factor),
            _spec(names[1], segments, JOURNAL, shared, factor),
            _spec(names[2], 1, HISTORY, durable, factor),
        ],
    )
    infos = log.describe_topics(names)
    check_topic(infos[names[0]], STREAM, at_least=segments)
    check_topic(infos[names[1]], JOURNAL, at_least=segments)
    check_topic(infos[names[2]], HISTORY, at_least=1)
    partitions = [TopicPartition(names[0], p) for p in range(infos[names[0]].partitions)]
    ends = log.end_offsets(partitions, committed=False)
    return {tp.partition: end for tp, end in ends.items()}


def _create(log: Log, specs: Sequence[TopicSpec]) -> None:
    known = log.describe_topics([spec.name for spec in specs])
    missing = [spec for spec in specs if spec.name not in known]
    if missing:
        log.create_topics(missing)


def _spec(
    name: str,
    partitions: int,
    settings: Sequence[Setting],
    more: Mapping[str, str],
    replication_factor: int,
) -> TopicSpec:
    config = {setting.name: setting.value for setting in settings} | dict(more)
    return TopicSpec(name, partitions, config, replication_factor)


def check_topic(info: TopicInfo, settings: Sequence[Setting], *, at_least: int) -> None:
    """`TopicMisconfigured`, naming every setting that is wrong and what to set."""
    wrong = []
    if info.partitions < at_least:
        wrong.append(f"it has {info.partitions} partitions; add some until it has {at_least}")
    for setting in settings:
        found = info.config.get(setting.name)
        if found is not None and not setting.accepts(found):
            wrong.append(f"{setting.name}={found}; set {setting.value} ({setting.why})")
    if info.replication_factor >= 2 and info.config.get("min.insync.replicas") == "1":
        wrong.append(
            f"min.insync.replicas=1 with replication factor {info.replication_factor}; set 2 (an "
            "acknowledged write must survive the loss of a broker)"
        )
    if wrong:
        raise TopicMisconfigured(f"topic {info.name}: " + "; ".join(wrong))
