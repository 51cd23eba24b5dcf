"""Topics and offsets: the rare calls of `KafkaLog`. Each may raise `Again`, for `Cluster.repeat`."""

from __future__ import annotations

import datetime as dt
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from anabranch.kafka import calls, codes, data
from anabranch.kafka.calls import (
    CREATE_PARTITIONS,
    CREATE_TOPICS,
    DELETE_RECORDS,
    DELETE_TOPICS,
    DESCRIBE_CONFIGS,
    INCREMENTAL_ALTER_CONFIGS,
    LIST_OFFSETS,
    ConnectionBroken,
)
from anabranch.kafka.cluster import Again, Cluster, raise_or_again
from anabranch.kafka.codes import NONE
from anabranch.ports import (
    NOT_AUTHORIZED,
    OFFSET_OUT_OF_RANGE,
    UNKNOWN_TOPIC_OR_PARTITION,
    LogError,
    LogRefused,
    LogUnavailable,
    TopicInfo,
    TopicPartition,
    TopicSpec,
)
from anabranch.waits import here

log = logging.getLogger("anabranch.kafka")

_TOPIC_RESOURCE = 2
# operations on a setting (KIP-339)
_SET = 0
_DELETE = 1
_METADATA_PAUSE_S = 0.02
_SHOWN_S = 2.0  # brokers show a change by another broker within this time
EARLIEST = -2
DELETE_BY_ID_FROM = 6  # version of DeleteTopics


def _timeout(cluster: Cluster) -> dt.timedelta:
    return dt.timedelta(seconds=cluster.settings.request_timeout)


def list_offsets(
    cluster: Cluster,
    partitions: Sequence[TopicPartition],
    timestamp: int,
    deadline: float,
    *,
    committed: bool,
    failed: MutableMapping[TopicPartition, LogError] | None = None,
    sure: bool = False,
) -> dict[TopicPartition, int]:
    """The offset for a timestamp (-1 latest, -2 earliest) of each partition; -1 without such an offset.

    ``failed`` receives the errors of partitions that can't be asked; if None, the errors are raised. ``sure``: ask
    leaders with the newest epoch that a replica knows, so that a former leader refuses.
    """
    found: dict[TopicPartition, int] = {}
    groups = cluster.groups(partitions, deadline, failed)
    if sure:
        cluster.ask_replicas({place.topic for place in partitions}, deadline)
        led = [place for group in groups.values() for place in group]
        groups = cluster.groups(led, deadline, failed)
    for node, group in groups.items():
        try:
            answer = _ask_offsets(cluster, node, group, timestamp, committed, deadline)
        except ConnectionBroken as error:
            if failed is None:
                raise
            cluster.forget({p.topic for p in group})
            failed.update({p: LogUnavailable(str(error), (p.topic,)) for p in group})
            continue
        for topic in answer.topics:
            for partition in topic.partitions:
                code = int(partition.error_code)
                key = TopicPartition(str(topic.name), int(partition.partition_index))
                if code == NONE:
                    found[key] = int(partition.offset)
                    continue
                cluster.forget((key.topic,))
                what = f"offsets of {key.topic}"
                if failed is None:
                    raise_or_again(codes.READ_CODES, code, what, topics=(key.topic,))
                else:
                    meant = codes.meaning(codes.READ_CODES, code)
                    failed[key] = codes.error_for(meant, code, what, topics=(key.topic,))
    return found


def _ask_offsets(
    cluster: Cluster,
    node: int,
    group: Sequence[TopicPartition],
    timestamp: int,
    committed: bool,
    deadline: float,
) -> Any:
    with cluster.connection(node, cluster.soon(deadline)) as connection:
        return connection.ask(
            LIST_OFFSETS,
            cluster.soon(deadline),
            replica_id=-1,
            isolation_level=data.READ_COMMITTED if committed else data.READ_UNCOMMITTED,
            topics=[
                {
                    "name": topic,
                    "partitions": [
                        {
                            "partition_index": number,
                            "current_leader_epoch": cluster.epoch(TopicPartition(topic, number)),
                            "timestamp": timestamp,
                        }
                        for number in numbers
                    ],
                }
                for topic, numbers in calls.by_topic(group).items()
            ],
        )


def delete_records(cluster: Cluster, before: Mapping[TopicPartition, int], deadline: float) -> None:
    """Move the log start offsets up."""
    for node, group in cluster.groups(before, deadline).items():
        with cluster.connection(node, deadline) as connection:
            topics = [
                {
                    "name": topic,
                    "partitions": [
                        {"partition_index": n, "offset": before[TopicPartition(topic, n)]}
                        for n in numbers
                    ],
                }
                for topic, numbers in calls.by_topic(group).items()
            ]
            answer = connection.ask(
                DELETE_RECORDS, deadline, topics=topics, timeout=_timeout(cluster)
            )
        for topic in answer.topics:
            for partition in topic.partitions:
                code = int(partition.error_code)
                # The log starts after the offset already, or the offset is after its end.
                if code == OFFSET_OUT_OF_RANGE:
                    raise LogRefused(f"delete records of {topic.name}: no such offset", code)
                if code != NONE:
                    cluster.forget((str(topic.name),))
                    what = f"delete records of {topic.name}"
                    raise_or_again(
                        codes.DELETE_RECORDS_CODES, code, what, topics=(str(topic.name),)
                    )


def replicas_of_new(cluster: Cluster, topic: str, factor: int, deadline: float) -> int | None:
    """`anabranch.ports.Log.replicas_of_new`."""
    if factor < 0 and cluster.heeds_dry_runs is False:
        return cluster.replicas_of_new
    if factor >= 0:
        topic = _own_name(topic)  # there may be a topic of that name
    answer, made = _dry_create(cluster, TopicSpec(topic, 1, {}, factor), deadline)
    if made is not None:
        return made
    if int(answer.error_code) == codes.TOPIC_ALREADY_EXISTS:
        return 1  # the topic was created meanwhile: this creation was refused
    # Answers have it from version 5 on, if this client may see the configuration.
    if int(getattr(answer, "topic_config_error_code", NONE)) in NOT_AUTHORIZED:
        return None
    return max(0, int(getattr(answer, "replication_factor", 0)))


def create_topics(
    cluster: Cluster, specs: Sequence[TopicSpec], made: MutableMapping[str, str], deadline: float
) -> None:
    """Create topics; existing topics are left alone.

    ``made`` receives the new topics, even if others are refused or not created yet, with their ids (in answers from
    version 7 on).
    """
    answers = _ask_to_create(cluster, specs, deadline, dry=False)
    for topic in answers:
        if int(topic.error_code) == NONE:
            topic_id = getattr(topic, "topic_id", None)
            made[str(topic.name)] = "" if topic_id is None else str(topic_id.hex)
    _check_created(cluster, answers, deadline)


def _own_name(topic: str) -> str:
    """A name that no other client uses."""
    return f"{topic[:200]}.{uuid.uuid4().hex}"


def _dry_create(cluster: Cluster, spec: TopicSpec, deadline: float) -> tuple[Any, int | None]:
    """The answer to a dry run of a creation; and None, or the replicas of a topic that the dry run created.

    Some brokers create the topic in a dry run, too. Such a topic is deleted again.
    """
    if cluster.heeds_dry_runs:
        return _create(cluster, [spec], deadline, dry=True)[0], None
    answer, again = (_create(cluster, [spec], deadline, dry=True)[0] for _ in range(2))
    if not _made_by_first(answer, again) or heeds_dry_runs(cluster, spec.name, deadline):
        return answer, None  # another client may have created it in between
    return answer, _delete_made(cluster, spec.name, deadline)


def heeds_dry_runs(cluster: Cluster, topic: str, deadline: float) -> bool:
    """Whether brokers create nothing in a dry run. To find out, create a topic of an unused name in dry runs."""
    if cluster.heeds_dry_runs is None:
        spec = TopicSpec(_own_name(topic), 1)
        try:
            answers = [_create(cluster, [spec], deadline, dry=True)[0] for _ in range(2)]
        except LogRefused:  # brokers that check rights support dry runs
            cluster.heeds_dry_runs = True
            return True
        made = _made_by_first(*answers)
        if made:
            cluster.replicas_of_new = _delete_made(cluster, spec.name, deadline)
        cluster.heeds_dry_runs = not made
    return cluster.heeds_dry_runs


def _made_by_first(first: Any, second: Any) -> bool:
    """Whether the second of two dry runs finds a topic that the first did not find."""
    found = int(first.error_code), int(second.error_code)
    return found == (NONE, codes.TOPIC_ALREADY_EXISTS)


def _delete_made(cluster: Cluster, topic: str, deadline: float) -> int:
    """Delete a topic that was created in a dry run; returns the number of its replicas."""
    until = min(deadline, time.monotonic() + _SHOWN_S)
    while (found := cluster.refresh([topic], deadline).get(topic)) is None:
        if time.monotonic() >= until:
            raise Again(
                LogUnavailable(f"{topic} was made in a dry run, and is not shown", (topic,))
            )
        here().sleep(_METADATA_PAUSE_S)
    made = TopicInfo(topic, found.partitions, found.replication_factor, {}, found.topic_id.hex())
    delete_topics(cluster, [made], deadline)
    log.info("the broker makes topics in dry runs: %s is deleted again", topic)
    while topic in cluster.refresh([topic], deadline) and time.monotonic() < until:
        here().sleep(_METADATA_PAUSE_S)
    return found.replication_factor


def _create(
    cluster: Cluster, specs: Sequence[TopicSpec], deadline: float, *, dry: bool
) -> Sequence[Any]:
    answers = _ask_to_create(cluster, specs, deadline, dry=dry)
    _check_created(cluster, answers, deadline)
    return answers


def _ask_to_create(
    cluster: Cluster, specs: Sequence[TopicSpec], deadline: float, *, dry: bool
) -> Sequence[Any]:
    with cluster.changing(deadline) as connection:
        answer = connection.ask(
            CREATE_TOPICS,
            deadline,
            topics=[
                {
                    "name": spec.name,
                    "num_partitions": spec.partitions,
                    "replication_factor": spec.replication_factor,
                    "assignments": (),
                    "configs": [{"name": n, "value": value} for n, value in spec.config.items()],
                }
                for spec in specs
            ],
            timeout=_timeout(cluster),
            validate_only=dry,
        )
    return tuple(answer.topics)


def _check_created(cluster: Cluster, answers: Iterable[Any], deadline: float) -> None:
    for topic in answers:
        code, name = int(topic.error_code), str(topic.name)
        if code in (NONE, codes.TOPIC_ALREADY_EXISTS):
            continue
        _leave_to_controller(cluster, code, deadline)
        detail = str(topic.error_message) if topic.error_message else None
        raise_or_again(codes.CREATE_CODES, code, f"create topic {name}", detail, (name,))


def topics_shown(cluster: Cluster, deadline: float) -> set[str]:
    """All topics that any broker shows. A broker that does not answer is skipped if another broker answers."""
    cluster.refresh((), deadline)
    found, away = set[str](), []
    for node in cluster.nodes:
        try:
            shown = cluster.metadata(None, node, cluster.soon(deadline)).topics
            found |= {str(topic.name) for topic in shown if int(topic.error_code) == NONE}
        except ConnectionBroken as error:
            away.append(error)
    if len(away) == len(cluster.nodes):
        raise LogUnavailable(f"topics of brokers: {'; '.join(map(str, away))}")
    return found


def _leave_to_controller(cluster: Cluster, code: int, deadline: float) -> None:
    """Ask the cluster's own controller from now on, if a broker answers that only it changes topics.

    Brokers of KRaft pass changes on to the controller. Brokers with ZooKeeper, and others, don't.
    """
    if code == codes.NOT_CONTROLLER:
        cluster.leaves_changes(deadline)


def delete_topics(cluster: Cluster, topics: Sequence[TopicInfo], deadline: float) -> None:
    """Delete topics by their ids, and forget their leaders. A missing topic is no error.

    Brokers without topic ids (before Kafka 2.8) get the names.
    """
    with cluster.changing(deadline) as connection:
        version = connection.version(DELETE_TOPICS)
        by_id = version >= DELETE_BY_ID_FROM and all(topic.topic_id.strip("0") for topic in topics)
        version = version if by_id else min(version, DELETE_BY_ID_FROM - 1)
        ids = [uuid.UUID(topic.topic_id) for topic in topics] if by_id else ()
        answer = connection.ask(
            DELETE_TOPICS,
            deadline,
            version=version,
            topics=[{"name": None, "topic_id": topic_id} for topic_id in ids],
            topic_names=tuple(topic.name for topic in topics),
            timeout=_timeout(cluster),
        )
    names = [topic.name for topic in topics]
    cluster.forget(names)
    for result in answer.responses:
        code = int(result.error_code)
        if code in (NONE, UNKNOWN_TOPIC_OR_PARTITION, codes.UNKNOWN_TOPIC_ID):
            continue
        _leave_to_controller(cluster, code, deadline)
        message = getattr(result, "error_message", None)  # from version 5 on
        detail = str(message) if message else None
        raise_or_again(codes.DELETE_CODES, code, f"delete topics {', '.join(names)}", detail)


def alter_topics(
    cluster: Cluster, changes: Mapping[str, Mapping[str, str | None]], deadline: float, *, dry: bool
) -> None:
    """Set settings of topics, or reset them to the brokers' defaults (None).

    ``dry``: change nothing, and ask whether the brokers allow the change.
    """
    if not changes:
        return
    with cluster.connection(None, deadline) as connection:
        try:
            connection.version(INCREMENTAL_ALTER_CONFIGS)
        except LogRefused as error:
            raise LogRefused(
                "this cluster can't alter topics: they keep the settings that they were made with "
                f"({error})",
                error.error,
            ) from error
        answer = connection.ask(
            INCREMENTAL_ALTER_CONFIGS,
            deadline,
            resources=[
                {
                    "resource_type": _TOPIC_RESOURCE,
                    "resource_name": topic,
                    "configs": [
                        {"name": n, "config_operation": _SET if v else _DELETE, "value": v}
                        for n, v in settings.items()
                    ],
                }
                for topic, settings in changes.items()
            ],
            validate_only=dry,
        )
    for result in answer.responses:
        code, topic = int(result.error_code), str(result.resource_name)
        if code != NONE:
            detail = str(result.error_message) if result.error_message else None
            raise_or_again(codes.ALTER_CODES, code, f"alter {topic}", detail, topics=(topic,))


def count_partitions(cluster: Cluster, topic: str, deadline: float) -> int:
    """The present number of a topic's partitions. `LogRefused`: there is no such topic."""
    cluster.forget((topic,))
    # Repeats until the broker knows a new topic.
    cluster.leaders((TopicPartition(topic, 0),), deadline)
    found = cluster.refresh((topic,), deadline).get(topic)
    if found is None:
        raise LogRefused(f"{topic} does not exist", UNKNOWN_TOPIC_OR_PARTITION)
    return found.partitions


def is_gone(cluster: Cluster, topic: str, partitions: int, topic_id: str, deadline: float) -> bool:
    """`anabranch.ports.Log.is_gone`: the quorum's controller answers both dry runs.

    If brokers carry out dry runs, all of them are asked for the topic instead.
    """
    nodes = cluster.nodes
    if topic_id:
        ids = [_id(cluster, topic, node, deadline) for node in nodes]
        if ids and all(found not in (None, "", topic_id) for found in ids):
            return True
    if not heeds_dry_runs(cluster, topic, deadline):
        return bool(nodes) and all(
            _count(cluster, topic, node, deadline) < partitions for node in nodes
        )
    answers = _create(cluster, [TopicSpec(topic, partitions)], deadline, dry=True)
    if int(answers[0].error_code) == NONE:
        return True
    if not add_partitions(cluster, topic, partitions, deadline, dry=True):
        return False
    # For some brokers it is no error if there are as many partitions already.
    shown = cluster.refresh([topic], deadline).get(topic)
    return shown is None or shown.partitions < partitions


def _count(cluster: Cluster, topic: str, node: int, deadline: float) -> int:
    """The number of the topic's partitions at one broker; 0 without the topic."""
    shown = cluster.metadata([topic], node, deadline).topics[0]
    code = int(shown.error_code)
    if code not in (NONE, UNKNOWN_TOPIC_OR_PARTITION):
        raise_or_again(codes.READ_CODES, code, f"partitions of {topic}", topics=(topic,))
    return len(shown.partitions)


def is_known(cluster: Cluster, topic: str, deadline: float) -> bool:
    """`anabranch.ports.Log.is_known`: one broker that knows the topic is enough."""
    if topic in cluster.refresh([topic], deadline):
        return True
    return _any_says(cluster, topic, deadline, lambda id_: id_ is not None) or not cluster.nodes


def is_agreed(cluster: Cluster, topic: str, topic_id: str, deadline: float) -> bool:
    """`anabranch.ports.Log.is_agreed`: one broker without the topic, or with another id, is enough for a no."""
    return not _any_says(cluster, topic, deadline, lambda id_: id_ not in ("", topic_id))


def _any_says(
    cluster: Cluster, topic: str, deadline: float, says: Callable[[str | None], bool]
) -> bool:
    """Whether ``says`` is true for any broker's `_id`.

    `LogUnavailable`: it is true for no broker that answers, and some broker does not answer.
    """
    nodes, away = cluster.nodes, None
    for number, node in enumerate(nodes):
        share = (deadline - time.monotonic()) / (len(nodes) - number)
        try:
            if says(_id(cluster, topic, node, cluster.deadline(share))):
                return True
        except ConnectionBroken as error:
            away = error
    if away is not None:  # not asked again: the caller may continue without it
        raise LogUnavailable(f"what is known of {topic}: {away}", (topic,)) from away
    return False


def _id(cluster: Cluster, topic: str, node: int, deadline: float) -> str | None:
    """The topic's id at a broker; empty if the broker has no ids, None if it does not know the topic.

    `ConnectionBroken`: as `Cluster.metadata`.
    """
    shown = cluster.metadata([topic], node, deadline).topics[0]
    if int(shown.error_code) == UNKNOWN_TOPIC_OR_PARTITION:
        return None
    topic_id = getattr(shown, "topic_id", None) if int(shown.error_code) == NONE else None
    return str(topic_id.hex) if topic_id is not None else ""


def add_partitions(
    cluster: Cluster, topic: str, partitions: int, deadline: float, *, dry: bool = False
) -> bool:
    """Ask for this number of partitions in all. False if the topic has as many already."""
    with cluster.changing(deadline) as connection:
        answer = connection.ask(
            CREATE_PARTITIONS,
            deadline,
            topics=[{"name": topic, "count": partitions, "assignments": None}],
            timeout=_timeout(cluster),
            validate_only=dry,
        )
    grown = False
    for result in answer.results:
        code = int(result.error_code)
        grown |= code == NONE
        # Another client added them, or an earlier attempt whose answer was lost.
        if code in (NONE, codes.INVALID_PARTITIONS):
            continue
        # Some brokers use this code for it, as for other requests.
        if code == codes.INVALID_REQUEST and _has(cluster, topic, partitions, deadline):
            continue
        _leave_to_controller(cluster, code, deadline)
        detail = str(result.error_message) if result.error_message else None
        raise_or_again(codes.GROW_CODES, code, f"add partitions to {topic}", detail)
    return grown


def _has(cluster: Cluster, topic: str, partitions: int, deadline: float) -> bool:
    """Whether a broker soon shows this number of partitions."""
    until = min(deadline, time.monotonic() + _SHOWN_S)
    while True:
        found = cluster.refresh([topic], deadline).get(topic)
        if found is not None and found.partitions >= partitions:
            return True
        if time.monotonic() >= until:
            return False
        here().sleep(_METADATA_PAUSE_S)


def wait_for_leaders(
    cluster: Cluster, names: Iterable[str], deadline: float, *, at_least: int = 1
) -> None:
    """Return when all partitions of these topics have leaders that serve them.

    A new topic or partition is in the metadata before its leader serves it, and a native transaction can't wait for
    that: an append without a leader is uncertain. ``at_least``: the least number of partitions, because the broker
    may not know new partitions yet.
    """
    wanted = set(names)
    while True:
        found = cluster.refresh(wanted, deadline)
        if len(found) == len(wanted) and all(
            len(topic.leaders) == topic.partitions >= at_least for topic in found.values()
        ):
            break
        if time.monotonic() > deadline:
            raise LogUnavailable(f"no leaders yet: {', '.join(sorted(wanted))}")
        here().sleep(_METADATA_PAUSE_S)
    partitions = [TopicPartition(n, p) for n, topic in found.items() for p in topic.leaders]
    cluster.repeat(
        "leaders of new topics",
        deadline,
        lambda: list_offsets(cluster, partitions, EARLIEST, committed=False, deadline=deadline),
    )


def describe_topics(
    cluster: Cluster, names: Sequence[str], deadline: float
) -> dict[str, TopicInfo]:
    """Partitions, replication and effective settings of the topics that exist."""
    topics = cluster.refresh(names, deadline)
    if not topics:
        return {}
    with cluster.connection(None, deadline) as connection:
        answer = connection.ask(
            DESCRIBE_CONFIGS,
            cluster.soon(deadline),
            resources=[
                {
                    "resource_type": _TOPIC_RESOURCE,
                    "resource_name": name,
                    "configuration_keys": None,
                }
                for name in topics
            ],
        )
    found = {}
    for result in answer.results:
        code = int(result.error_code)
        name = str(result.resource_name)
        if code == UNKNOWN_TOPIC_OR_PARTITION:
            continue
        if code != NONE:
            raise_or_again(codes.SETTINGS_CODES, code, f"settings of {name}", topics=(name,))
        topic = topics.get(name)
        if topic is None:
            raise Again(LogUnavailable(f"settings of {name}, not asked for"))
        config = {str(c.name): str(c.value) for c in result.configs if c.value is not None}
        found[name] = TopicInfo(
            name,
            topic.partitions,
            topic.replication_factor,
            config,
            topic.topic_id.hex(),
            tuple(p for p in range(topic.partitions) if p not in topic.leaders),
            topic.in_sync,
        )
    return {name: found[name] for name in names if name in found}
