"""Creates, grows and checks topics as they are declared. No other module creates topics.

If a setting is weaker than declared, or would change stored records, the error (`TopicMisconfigured`) names it with
the value to set: no transaction is safer than its topics.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from anabranch.core.stream_settings import (
    FIXED,
    MAX_MESSAGE,
    MIN_ISR,
    REPLICATION,
    RETENTION_MS,
    TOPIC,
    check_settings,
)
from anabranch.errors import (
    AnabranchError,
    IllegalState,
    InvalidArgument,
    NotAuthorized,
    NotReady,
    TopicMisconfigured,
    TopicNotEmpty,
    count_of,
)
from anabranch.ports import (
    UNKNOWN_TOPIC_OR_PARTITION,
    Log,
    LogError,
    LogRefused,
    LogUnavailable,
    TopicInfo,
    TopicPartition,
    TopicSpec,
    answered,
)
from anabranch.protocol import limits
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.partitioner import even_ranges
from anabranch.protocol.schemas.records import StreamRow
from anabranch.topics import declarations as declared
from anabranch.topics.declarations import MAX_LONG, STREAM_SETTINGS, Setting
from anabranch.topics.names import (
    commands_topic,
    control_topic,
    history_topic,
    journal_topic,
    replies_topic,
    status_topic,
    stream_topic,
    topics_of,
)
from anabranch.topics.new_topics import NewTopics

_logger = logging.getLogger("anabranch.controller")

DEFAULT_REPLY_PARTITIONS = 8
# Brokers' error codes.
INVALID_REPLICATION_FACTOR = 38
INVALID_CONFIG = 40
POLICY_VIOLATION = 44
SMALLER_RECORDS = (
    "the topics of status and replies take messages of %d bytes, not of %d: limits follow from that"
)
SHARED_WITH_JOURNAL = frozenset((MAX_MESSAGE, MIN_ISR, "segment.bytes"))


class _Topic(NamedTuple):
    """A topic to create. ``chosen``: settings of the user, which are not replaced if brokers refuse them."""

    name: str
    partitions: int
    settings: Sequence[Setting]
    chosen: Mapping[str, str] = MappingProxyType({})


class ControlTopics(NamedTuple):
    """The existing control topics: numbers of partitions, and sizes of messages in bytes.

    ``command_bytes``: of the commands topic; ``record_bytes``: of the status and replies topics.
    """

    control_partitions: int
    reply_partitions: int
    command_bytes: int
    record_bytes: int = limits.RECORD.value


def create_control_topics(
    log: Log,
    prefix: str,
    *,
    control_partitions: int,
    replication_factor: int = -1,
    reply_partitions: int = DEFAULT_REPLY_PARTITIONS,
    max_message_bytes: int = limits.RECORD.value,
    new: NewTopics | None = None,
) -> ControlTopics:
    """Create the missing topics of commands, control, status and replies, also of lane `admin`, and check all.

    There may be more control partitions than ``control_partitions``: they were added for new scopes. New topics of
    status and replies get ``max_message_bytes``; the size that they then report counts for all controllers.

    Raises:
        TopicMisconfigured: an existing topic is not as declared; the message says what to set.
        LogRefused: the broker does not create a topic, with its reason.
        NotReady: the broker that was asked does not know a new topic (yet).
    """
    topics = _control_topics(prefix, control_partitions, reply_partitions, max_message_bytes)
    new = NewTopics() if new is None else new
    with new.undone(log, again=(TopicMisconfigured, NotReady, LogUnavailable)):
        _create(log, topics, replication_factor, new)
        infos = describe(log, [topic.name for topic in topics])
        new.refuse(_problems(topics, infos) + _growth(topics, infos))
    refuse(_lacking(topics, infos))
    if any(i.replication_factor >= 2 and MIN_ISR not in i.config for i in infos.values()):
        _logger.info(
            "the brokers report no %s: that a majority has each acknowledged write is their own rule",
            MIN_ISR,
        )
    size = infos[topics[0].name].config.get(MAX_MESSAGE, limits.COMMAND.value)
    taken = _record_bytes(topics, infos, max_message_bytes)
    if taken < max_message_bytes:
        _logger.warning(SMALLER_RECORDS, taken, max_message_bytes)
    commands, *_, replies = (infos[topic.name].partitions for topic in topics)
    return ControlTopics(commands, replies, int(size), taken)


def control_topics(
    prefix: str, control_partitions: int, reply_partitions: int = DEFAULT_REPLY_PARTITIONS
) -> dict[str, int]:
    """The numbers of partitions of the control topics that `create_control_topics` creates, by name."""
    topics = _control_topics(prefix, control_partitions, reply_partitions, limits.RECORD.value)
    return {topic.name: topic.partitions for topic in topics}


def check_control_topics(
    log: Log, prefix: str, *, control_partitions: int, max_message_bytes: int
) -> tuple[list[str], int]:
    """Check existing control topics as `create_control_topics` does, but create none.

    Returns the names of missing topics, and the size of messages that the status and replies topics take, or would
    take if they existed.

    Raises: TopicMisconfigured.
    """
    topics = _control_topics(
        prefix, control_partitions, DEFAULT_REPLY_PARTITIONS, max_message_bytes
    )
    found = log.describe_topics([topic.name for topic in topics])
    infos = {t.name: TopicInfo(t.name, t.partitions, 1, {}) for t in topics} | dict(found)
    refuse(_problems(topics, infos) + _growth(topics, infos) or _lacking(topics, infos))
    missing = [topic.name for topic in topics if topic.name not in found]
    return missing, _record_bytes(topics, infos, max_message_bytes)


def _control_topics(
    prefix: str, control_partitions: int, reply_partitions: int, max_message_bytes: int
) -> tuple[_Topic, ...]:
    of_status, of_replies = (
        declared.sized(each, max_message_bytes) for each in (declared.STATUS, declared.REPLIES)
    )
    return (
        _Topic(commands_topic(prefix), control_partitions, declared.COMMANDS),
        _Topic(commands_topic(prefix, ADMIN_LANE), control_partitions, declared.COMMANDS),
        _Topic(control_topic(prefix), control_partitions, declared.CONTROL),
        _Topic(status_topic(prefix), control_partitions, of_status),
        _Topic(replies_topic(prefix, ADMIN_LANE), 1, of_replies),
        _Topic(replies_topic(prefix), reply_partitions, of_replies),
    )


def _lacking(topics: Sequence[_Topic], infos: Mapping[str, TopicInfo]) -> list[str]:
    """The problem, if the topics of control, status and the operators' commands have too few partitions.

    They may have more than the first topic, whose partitions the controllers lead: `grow_control_topics` was
    interrupted.
    """
    counts = {t.name: infos[t.name].partitions for t in topics[:-2]}
    first, *others = counts.values()
    if min(others) >= first:
        return []
    found = ", ".join(f"{name} has {count}" for name, count in counts.items())
    grow = f"run `anabranch cluster grow --control-partitions {first}`"
    return [f"{found} partitions: {grow}, or add partitions until they are equal"]


def _growth(topics: Sequence[_Topic], infos: Mapping[str, TopicInfo]) -> list[str]:
    """How to get more control partitions, if the commands have fewer than a controller asks for."""
    asked, found = topics[0].partitions, infos[topics[0].name].partitions
    if found >= asked:
        return []
    grow = f"`anabranch cluster grow --control-partitions {asked}`"
    return [f"a cluster in use grows by {grow}, while its controllers run with {found}"]


def grow_control_topics(log: Log, prefix: str, control_partitions: int) -> None:
    """Give the topics of control partitions as many partitions. Safe to repeat; topics with more stay as they are.

    The topic of status comes first, and the commands of lane `open` last: controllers lead the partitions of that
    one, and none may be assigned a control partition that it can't log to.

    Raises: LogRefused (brokers don't add partitions, with their reason), LogUnavailable (repeat it).
    """
    for name in (
        status_topic(prefix),
        control_topic(prefix),
        commands_topic(prefix, ADMIN_LANE),
        commands_topic(prefix),
    ):
        log.add_partitions(name, control_partitions)


def _record_bytes(topics: Sequence[_Topic], infos: Mapping[str, TopicInfo], asked: int) -> int:
    """The least size of messages that the status and replies topics report; ``asked`` if they report no size."""
    return min(int(infos[t.name].config.get(MAX_MESSAGE, asked)) for t in topics[-3:])


def create_stream_topics(
    log: Log,
    stream: str,
    *,
    segments: int,
    settings: Mapping[str, str],
    adopt: bool = False,
    record_bytes: int = limits.RECORD.value,
    new: NewTopics | None = None,
) -> tuple[dict[int, int], tuple[str, ...]]:
    """Create and check a stream's three topics.

    Returns the stream's end offset by partition, and the ids of its topics: stream, journal, history (empty if
    brokers have no ids). ``adopt``: the stream's topic may have records. If an existing topic doesn't suit, no
    topic is created. An existing topic that suits gets the requested settings, and the stream's default of
    ``retention.ms``. ``record_bytes``: the size of a history's messages. ``new``: notes created topics; give the
    same object to the next try. New topics that don't suit are deleted again.

    Raises:
        NotReady: a broker lags: it still reports former topics of these names, or does not know the new ones yet.
        TopicNotEmpty: a topic has records, or had records.
        UnsupportedSetting: a setting that a stream does not support.
        InvalidArgument: an impossible number of segments or replicas, or value of a scaling setting.
        TopicMisconfigured, LogRefused: as `create_control_topics`.
    """
    check_settings(settings)
    even_ranges(segments)
    factor = int(settings.get(REPLICATION, "-1"))
    chosen = {s.name: s.value for s in declared.of_stream(stream) if s.name == RETENTION_MS}
    chosen |= {k: v for k, v in settings.items() if k in STREAM_SETTINGS and k != REPLICATION}
    shared = {k: v for k, v in chosen.items() if k in SHARED_WITH_JOURNAL}
    durable = {k: v for k, v in chosen.items() if k == MIN_ISR}
    topics = (
        _Topic(stream_topic(stream), segments, declared.of_stream(stream), chosen),
        _Topic(journal_topic(stream), segments, declared.JOURNAL, shared),
        _Topic(history_topic(stream), 1, declared.sized(declared.HISTORY, record_bytes), durable),
    )
    new = NewTopics() if new is None else new
    with new.undone(log):
        return _create_stream(log, stream, topics, factor, adopt, new)


def _create_stream(
    log: Log, stream: str, topics: Sequence[_Topic], factor: int, adopt: bool, new: NewTopics
) -> tuple[dict[int, int], tuple[str, ...]]:
    there = log.describe_topics([topic.name for topic in topics])
    unsure = [name for name, info in there.items() if not log.is_agreed(name, info.topic_id)]
    if unsure:
        raise NotReady(f"brokers don't tell the same of {', '.join(unsure)} yet; ask again")
    if not adopt and stream_topic(stream) in there:
        _check_empty(log, there[stream_topic(stream)], _ADOPT)
    elif not adopt and journal_topic(stream) in there:
        # An earlier attempt would have created the stream's topic first, so this one may be another team's.
        _check_empty(log, there[journal_topic(stream)], "delete that topic")
    asked = {
        t.name: {k: v for k, v in t.chosen.items() if there[t.name].config.get(k) != v}
        for t in topics
        if t.name in there
    }
    there = _with_settings(there, asked)
    new.refuse(_problems(topics, there) + _other_factors(log, there.values(), factor, new))
    if changes := {name: more for name, more in asked.items() if more}:
        log.alter_topics(changes)
    _create(log, topics, factor, new)
    ids = new.ids | {name: info.topic_id for name, info in there.items()}
    infos = _created(log, stream, ids, asked)
    segments = topics[0].partitions
    new.refuse(stream_problems(stream, infos, segments))
    # An existing topic may have more partitions than segments: all become the stream's.
    count = _check_width(stream, infos, segments)
    places = [TopicPartition(stream_topic(stream), p) for p in range(count)]
    ends = _ends(log, places)
    of_three = tuple(ids.get(name, "") for name in topics_of(stream))
    known = of_three if all(map(_is_id, of_three)) else ()
    return {place.partition: end for place, end in ends.items()}, known


def create_lane_topics(log: Log, prefix: str, lane: str, *, like: str, adopt: bool = False) -> None:
    """Create a lane's two topics, with as many control partitions and replicas as the topics of lane ``like``.

    ``adopt``: the topics may exist, if they are empty and have the settings of new topics.

    Raises:
        IllegalState: without ``adopt``, a topic exists; with ``adopt``, a topic has records, or other settings.
        NotReady, LogRefused: as `create_control_topics`.
    """
    own, answers = commands_topic(prefix, like), replies_topic(prefix, like)
    models = describe(log, [own, answers])
    model = models[own]
    size = int(models[answers].config.get(MAX_MESSAGE, limits.RECORD.value))
    topics = (
        _Topic(commands_topic(prefix, lane), model.partitions, declared.COMMANDS),
        _Topic(replies_topic(prefix, lane), 1, declared.sized(declared.REPLIES, size)),
    )
    there = log.describe_topics([topic.name for topic in topics])
    for name, partitions, settings, _ in topics:
        if (info := there.get(name)) is None:
            continue
        if not adopt:
            raise IllegalState(
                f"there is a topic {name}: who wrote to it is not known, so no lane is made of it. Take it "
                "away, or choose another name; adopt it (--adopt) if an earlier attempt made it"
            )
        wrong = problems(info, settings, at_least=partitions)
        if info.partitions != partitions:
            wrong.append(f"{name} has {count_of(info.partitions, 'partition')}, not {partitions:,}")
        if any(_ends(log, _places(info)).values()):
            wrong.append(f"{name} has, or had, records")
        if wrong:
            raise IllegalState(f"no lane is made of it: {'; '.join(wrong)}")
    missing = [topic for topic in topics if topic.name not in there]
    new = NewTopics()
    with new.undone(log):
        _create(log, missing, model.replication_factor, new)
        infos = describe(log, [topic.name for topic in missing]) if new.without else {}
        new.refuse(_problems(missing, infos))


def grow_lane_topic(log: Log, prefix: str, lane: str, *, like: str) -> None:
    """Give a lane's commands topic as many partitions as lane ``like`` has. Safe to repeat."""
    name, model = commands_topic(prefix, lane), commands_topic(prefix, like)
    infos = describe(log, (name, model))
    if infos[name].partitions < infos[model].partitions:
        log.add_partitions(name, infos[model].partitions)


def lane_topic_ids(log: Log, prefix: str, lane: str) -> tuple[str, ...]:
    """The ids of a lane's commands and replies topics. Raises: as `describe`."""
    names = commands_topic(prefix, lane), replies_topic(prefix, lane)
    infos = describe(log, names)
    return tuple(infos[name].topic_id for name in names)


_ADOPT = (
    "adopt the topic (adopt=True, `stream create --adopt`): readers then get what is in it, as part of no "
    "transaction"
)


def _places(topic: TopicInfo) -> list[TopicPartition]:
    return [TopicPartition(topic.name, p) for p in range(topic.partitions)]


def _ends(log: Log, places: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
    return answered(lambda failed: log.end_offsets(places, committed=False, failed=failed))


def _check_empty(log: Log, topic: TopicInfo, way: str) -> None:
    """Raise `TopicNotEmpty` if records were ever written: streams get none before their creation ends.

    ``way``: what the user may do instead of choosing another name.
    """
    places = _places(topic)
    ends = _ends(log, places)
    if any(ends.values()):
        starts = answered(lambda failed: log.start_offsets(places, failed=failed))
        left = sum(end - starts[place] for place, end in ends.items())
        had = f"has {left:,} records" if left else "had records, deleted by now,"
        raise TopicNotEmpty(
            f"{topic.name} {had} that anabranch did not write: choose another name, or {way}"
        )


def refusal_of(error: LogRefused) -> AnabranchError:
    """The error for a client if the broker refuses to create or grow a stream's topics."""
    if error.error == INVALID_REPLICATION_FACTOR:
        return NotReady(
            f"too few brokers are up: {error}; start some, or ask for fewer replicas ({REPLICATION})"
        )
    if error.error == UNKNOWN_TOPIC_OR_PARTITION:
        return NotReady(f"{error} (yet, or any more); ask again")
    return (NotAuthorized if error.forbidden else InvalidArgument)(f"the broker refused: {error}")


def grow_stream_topics(log: Log, stream: str, partitions: int) -> None:
    """Grow a stream's topics to ``partitions``, and check them. Partitions are never removed.

    Safe to repeat; topics with more partitions stay as they are. No partition is read: once the topics have grown,
    any client may make plain writes to new partitions, so a partition in trouble must not make this call fail.

    Raises:
        LogRefused: a topic does not exist (error 3); or the broker does not grow it, with its reason.
        NotReady: the topics have grown, but the broker that answered does not show it yet.
        TopicMisconfigured: as `create_stream_topics`.
    """
    # The journal grows last: plain writes to its new partitions can't be merged without the stream's partitions.
    for name in (stream_topic(stream), journal_topic(stream)):
        log.add_partitions(name, partitions)
    refuse(stream_problems(stream, describe_grown(log, stream, partitions), partitions))


def describe_grown(log: Log, stream: str, partitions: int) -> dict[str, TopicInfo]:
    """A stream's topics, which have grown to ``partitions``. Raises: NotReady (the broker does not show it yet)."""
    infos = describe(log, topics_of(stream))
    grown = stream_topic(stream), journal_topic(stream)
    behind = [name for name in grown if infos[name].partitions < partitions]
    if behind:  # a broker that lags
        raise NotReady(
            f"a broker does not show all {partitions:,} partitions of {' and '.join(behind)} yet; ask again"
        )
    return infos


def _with_settings(
    infos: Mapping[str, TopicInfo], settings: Mapping[str, Mapping[str, str]]
) -> dict[str, TopicInfo]:
    """The topics as they will be with these settings."""
    return {
        name: replace(info, config={**info.config, **settings.get(name, {})})
        for name, info in infos.items()
    }


def _other_factors(log: Log, infos: Iterable[TopicInfo], asked: int, new: NewTopics) -> list[str]:
    """The problems of topics with other numbers of replicas than ``asked`` (-1: any).

    Some brokers show the same number for each topic, whatever is asked for: with them another number is no problem.
    ``new``: topics that were created with ``asked`` replicas.
    """
    other = [info for info in infos if asked not in (-1, info.replication_factor)]
    if not other or any(info.name in new.ids for info in other) or not _heeds(log, other[0], asked):
        return []
    return [
        f"{info.name}: it has {count_of(info.replication_factor, 'replica')}; give it {asked}, as {REPLICATION} "
        "asks for"
        for info in other
    ]


def _heeds(log: Log, info: TopicInfo, factor: int) -> bool:
    """Whether brokers would create this topic with ``factor`` replicas, not with as many as it has."""
    try:
        return log.replicas_of_new(info.name, factor) != info.replication_factor
    except LogRefused as error:
        if error.forbidden:
            raise
        return True


def _created(
    log: Log, stream: str, ids: Mapping[str, str], altered: Mapping[str, Mapping[str, str]]
) -> dict[str, TopicInfo]:
    """A stream's three topics, which have these ids.

    ``altered``: settings that brokers accepted just now; a broker may still report the former ones.
    """
    infos = _with_settings(describe(log, topics_of(stream)), altered)
    other = [n for n, i in infos.items() if _is_id(i.topic_id) and i.topic_id != ids.get(n)]
    if other:
        raise NotReady(f"a broker does not show the new {' and '.join(other)} yet; ask again")
    return infos


def _check_width(stream: str, infos: Mapping[str, TopicInfo], partitions: int) -> int:
    """The number of the stream's partitions. Raises: TopicMisconfigured (the journal has fewer partitions)."""
    target, journal = infos[stream_topic(stream)], infos[journal_topic(stream)]
    if partitions <= journal.partitions < target.partitions:
        raise TopicMisconfigured(
            f"{journal.name}: it has {count_of(journal.partitions, 'partition')} and {target.name} "
            f"{target.partitions:,}; add some until they are equal (a segment's writers write to the journal "
            "partition of its number)"
        )
    return target.partitions


def problems(info: TopicInfo, settings: Sequence[Setting], *, at_least: int) -> list[str]:
    """The problems of a topic: each setting by name, with the value to set and why.

    A setting that the broker does not report is not checked: the broker has no such setting, or one rule for all.
    """
    wrong = []
    if info.partitions < at_least:
        wrong.append(
            f"it has {count_of(info.partitions, 'partition')}; add some until it has {at_least:,}"
        )
    for setting in settings:
        name = setting.name if setting.name in info.config else setting.formerly
        found = info.config.get(name)
        if found is not None and not setting.accepts(found):
            wrong.append(f"{name}={found}; set {setting.value} ({setting.why})")
    size, least = int(info.config.get(MAX_MESSAGE, MAX_LONG)), limits.LEAST_MESSAGE.value
    if size < least:
        wrong.append(
            f"{MAX_MESSAGE}={size}; set {least} or more (brokers hold the markers of native transactions against "
            "it, and without one its controller can't lead)"
        )
    in_sync = int(info.config.get(MIN_ISR, info.replication_factor))
    if info.replication_factor >= 2 and in_sync < 2:
        wrong.append(
            f"{MIN_ISR}={in_sync} with replication factor {info.replication_factor}; set 2 (an "
            "acknowledged write must survive the loss of a broker)"
        )
    if in_sync > info.replication_factor:
        wrong.append(
            f"{MIN_ISR}={in_sync} with replication factor {info.replication_factor}; set "
            f"{info.replication_factor} (else no write is ever acknowledged)"
        )
    return [f"{info.name}: {problem}" for problem in wrong]


def _problems(topics: Sequence[_Topic], infos: Mapping[str, TopicInfo]) -> list[str]:
    """The problems of those topics that are in ``infos``."""
    there = [topic for topic in topics if topic.name in infos]
    return [w for t in there for w in problems(infos[t.name], t.settings, at_least=t.partitions)]


def stream_problems(stream: str, infos: Mapping[str, TopicInfo], partitions: int) -> list[str]:
    """Problems of a stream's three topics, each as a text of `problems`."""
    target, journal, history = (infos[name] for name in topics_of(stream))
    wrong = [
        *problems(target, declared.of_stream(stream), at_least=partitions),
        *problems(journal, declared.JOURNAL, at_least=partitions),
        *problems(history, declared.HISTORY, at_least=1),
    ]
    for name, why in declared.AS_JOURNAL:
        due = journal.config.get(name, "0")
        if int(target.config.get(name, due)) < int(due):
            wrong.append(
                f"{target.name}: {name}={target.config[name]} is less than its journal's; set {due} ({why})"
            )
    return wrong


def refuse(wrong: Sequence[str]) -> None:
    """Raise `TopicMisconfigured` if there are problems."""
    if wrong:
        raise TopicMisconfigured("; ".join(wrong))


def _is_id(topic_id: str) -> bool:
    """Whether the broker knows the topic's id: older brokers give zeros, or nothing."""
    return bool(topic_id.strip("0-"))


def _create(log: Log, topics: Sequence[_Topic], factor: int, new: NewTopics) -> None:
    """Create missing topics, without declared settings that brokers refuse. The caller checks the result."""
    known = log.describe_topics([topic.name for topic in topics])
    missing = {topic.name: topic for topic in topics if topic.name not in known}
    specs = [_spec(log, topic, factor) for topic in missing.values()]
    first: LogRefused | None = None
    asked = _settings(specs)
    while specs:
        try:
            new.note(log.create_topics(specs))
            break
        except LogError as error:
            new.note(error.made)
            if not isinstance(error, LogRefused):
                raise
            again = _otherwise(specs, missing, error)
            if again is None:
                error.to_do = _due(specs, missing, error)
                raise
            first = first or error
            specs = again
    if first is not None:
        new.note({}, without=first)
        _say(frozenset(asked - _settings(specs)), frozenset(_settings(specs) - asked), first)


_said: set[object] = set()  # what this process has logged: it is the same for each new stream


def _say(
    without: frozenset[tuple[str, str]], having: frozenset[tuple[str, str]], why: LogRefused
) -> None:
    """Log once which settings new topics lack, and what they have instead."""
    if (without, having) in _said:
        return
    _said.add((without, having))
    parts = {"some topics are made without": without, "with": having}
    texts = [
        f"{word} {', '.join(f'{name}={value}' for name, value in sorted(settings))}"
        for word, settings in parts.items()
        if settings
    ]
    _logger.warning("%s: %s", why, "; ".join(texts))


def _settings(specs: Sequence[TopicSpec]) -> set[tuple[str, str]]:
    return {setting for spec in specs for setting in spec.config.items()}


def _otherwise(
    specs: Sequence[TopicSpec], topics: Mapping[str, _Topic], refused: LogRefused
) -> list[TopicSpec] | None:
    """The specs with another value in place of the refused value, or without that setting.

    None: something else was refused, or a policy allows no value: without the setting, the topic would follow the
    brokers' defaults, which may change. A policy that names no setting may be a policy for sizes.
    """
    mine, values = _refused(specs, refused)
    if not values and refused.error == POLICY_VIOLATION:
        values = {n: v for spec in mine for n, v in spec.config.items() if n == MAX_MESSAGE}
    if not values or any(topics[spec.name].chosen.keys() & values.keys() for spec in mine):
        return None
    settings = {s.name: s for spec in mine for s in topics[spec.name].settings}
    known = "unknown" not in words_of(refused).lower()
    instead = {
        name: _next(settings[name], value) if known and name in settings else None
        for name, value in values.items()
    }
    free = {name for name, setting in settings.items() if setting.free}
    if refused.error == POLICY_VIOLATION and any(
        instead[n] is None for n in values if n not in free
    ):
        return None
    return [_changed(spec, topics[spec.name].chosen, values, instead) for spec in specs]


def _refused(
    specs: Sequence[TopicSpec], refused: LogRefused
) -> tuple[list[TopicSpec], dict[str, str]]:
    """The specs that a refusal concerns, and the settings that it names, with their values."""
    mine = [spec for spec in specs if not refused.topics or spec.name in refused.topics]
    if refused.error not in (INVALID_CONFIG, POLICY_VIOLATION):
        return mine, {}
    values, said = {n: v for spec in mine for n, v in spec.config.items()}, words_of(refused)
    named = [n for n in values if re.search(rf"(?<![\w.]){re.escape(n)}(?!\w|\.\w)", said)]
    return mine, {name: values[name] for name in named}


def words_of(refused: LogRefused) -> str:
    """The broker's text in a refusal, without the topic's name."""
    return str(refused).partition(": ")[2]


def _due(specs: Sequence[TopicSpec], topics: Mapping[str, _Topic], refused: LogRefused) -> str:
    """The refused settings, as a text that asks brokers to allow them. Empty if the user chose another value."""
    mine, values = _refused(specs, refused)
    for topic in (topics[spec.name] for spec in mine):
        due = {setting.name: setting.value for setting in topic.settings}
        if any(topic.chosen.get(name, due.get(name)) != due.get(name) for name in values):
            return ""
    pairs = " and ".join(f"{name}={value}" for name, value in sorted(values.items()))
    return f"let brokers take {pairs}" if pairs else ""


def _changed(
    spec: TopicSpec,
    chosen: Mapping[str, str],
    refused: Mapping[str, str],
    instead: Mapping[str, str | None],
) -> TopicSpec:
    """The spec with values from ``instead`` for the refused settings; None: without the setting."""
    config = dict(spec.config)
    for name, value in instead.items():
        if name not in chosen and config.get(name) == refused[name]:
            config.pop(name)
            config |= {} if value is None else {name: value}
    return TopicSpec(spec.name, spec.partitions, config, spec.replication_factor)


def _next(setting: Setting, value: str) -> str | None:
    """The value to try after brokers refused this one."""
    values = (setting.value, *setting.instead, None)
    return values[values.index(value) + 1] if value in values[:-1] else None


def _spec(log: Log, topic: _Topic, factor: int) -> TopicSpec:
    """The spec for a topic. If there are two or more replicas, two have to be in sync; the default is one."""
    config = {setting.name: setting.value for setting in topic.settings} | dict(topic.chosen)
    if MIN_ISR not in config:
        replicas = log.replicas_of_new(topic.name) if factor < 0 else factor
        if replicas is None:
            raise NotAuthorized(f"the right DescribeConfigs on the topic {topic.name} is missing")
        if replicas:
            config[MIN_ISR] = "2" if replicas >= 2 else "1"
    return TopicSpec(topic.name, topic.partitions, config, factor)


def describe(log: Log, names: Sequence[str]) -> dict[str, TopicInfo]:
    """These topics, in this order. Raises: NotReady (the broker does not know one of them, perhaps not yet)."""
    infos = log.describe_topics(names)
    missing = sorted(set(names) - set(infos))
    if missing:
        raise NotReady(f"{', '.join(missing)}: not found (yet, or any more); ask again")
    return infos


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
    # A broker may still report the settings before the last alteration: all settings are sent, both sizes count.
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
