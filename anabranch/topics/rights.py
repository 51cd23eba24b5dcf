"""The rights that controllers and clients need at brokers with an authorizer, as data, each with its reason.

Read, Write, Delete and Alter include Describe, so few rows have it. Operations are spelled as in ``kafka-acls``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.topics.names import (
    DEFAULT_PREFIX,
    commands_topic,
    control_topic,
    controllers_group,
    history_topic,
    journal_topic,
    of_scope,
    of_transactions,
    replies_topic,
    status_topic,
    stream_topic,
)

TOPIC = "topic"
GROUP = "group"
TRANSACTIONAL_ID = "transactional-id"
CLUSTER = "cluster"
THE_CLUSTER = "kafka-cluster"  # the name of the cluster as a resource


class Right(NamedTuple):
    """An operation on a resource that a role needs. ``prefixed``: on all resources whose name begins so."""

    kind: str
    name: str
    operation: str
    why: str
    prefixed: bool = False


class Acl(NamedTuple):
    """A rule of the brokers: this principal (``User:etl``) has this right, or is denied it."""

    principal: str
    right: Right
    allowed: bool = True


def controller_rights(prefix: str = DEFAULT_PREFIX, *scopes: str) -> Iterator[Right]:
    """A controller's rights. ``scopes``: whose streams it may create, commit to and truncate."""
    commands, replies = commands_topic(prefix), replies_topic(prefix)
    control, status = control_topic(prefix), status_topic(prefix)
    of_admin = commands_topic(prefix, ADMIN_LANE), replies_topic(prefix, ADMIN_LANE)
    for name in (commands, control, status, replies, *of_admin):
        yield Right(TOPIC, name, "Create", "create it at the first start")
    for name in (control, status):
        yield Right(TOPIC, name, "DescribeConfigs", "check its settings")
    for name in (commands, replies):
        yield Right(TOPIC, name, "DescribeConfigs", "check their settings", True)
    yield Right(TOPIC, commands, "Read", "read commands", True)
    yield Right(TOPIC, control, "Read", "read messages of controllers")
    yield Right(TOPIC, control, "Write", "send messages to controllers")
    yield Right(TOPIC, status, "Read", "restore the state")
    yield Right(TOPIC, status, "Write", "log decisions")
    yield Right(TOPIC, replies, "Write", "send replies", True)
    yield Right(GROUP, controllers_group(prefix), "Read", "share control partitions")
    yield Right(
        TRANSACTIONAL_ID,
        of_transactions(prefix),
        "Write",
        "run native transactions",
        True,
    )
    for scope in scopes:
        yield from scope_rights(scope)


def scope_rights(scope: str) -> Iterator[Right]:
    for operation, why in (
        ("Create", "create a stream's three topics"),
        ("DescribeConfigs", "check their settings"),
        ("Read", "read journals and histories"),
        ("Write", "commit"),
        ("Alter", "add partitions when a stream is scaled"),
        ("AlterConfigs", "alter a stream's settings"),
        ("Delete", "truncate journals and histories, delete a stream's topics"),
    ):
        yield Right(TOPIC, of_scope(scope), operation, why, True)


def client_rights(prefix: str = DEFAULT_PREFIX, lane: str = OPEN_LANE) -> Iterator[Right]:
    """The rights of a client that sends commands by a lane: writers, operators, readers of snapshots."""
    yield Right(TOPIC, commands_topic(prefix, lane), "Write", "send commands")
    yield Right(TOPIC, replies_topic(prefix, lane), "Read", "read replies")


def lane_maker_rights(prefix: str = DEFAULT_PREFIX) -> Iterator[Right]:
    """The rights of an operator who adds lanes, besides those of a client of lane ``admin``."""
    for name in (commands_topic(prefix), replies_topic(prefix)):
        yield Right(TOPIC, name, "Create", "create a lane's topics", True)
        yield Right(
            TOPIC, name, "DescribeConfigs", "copy the settings of other lanes' topics", True
        )
    grow = "check that they are new; add partitions"
    yield Right(TOPIC, commands_topic(prefix), "Alter", grow, True)
    see = "check that they are new"
    yield Right(TOPIC, replies_topic(prefix), "Describe", see, True)
    yield Right(CLUSTER, THE_CLUSTER, "Alter", "grant and list ACLs")


def writer_rights(*streams: str) -> Iterator[Right]:
    """A writer's rights, besides those of a client."""
    for stream in streams:
        journal = journal_topic(stream)
        yield Right(TOPIC, journal, "Write", "write events")
        yield Right(TOPIC, journal, "DescribeConfigs", "read the limit of an event's size")


def reader_rights(groups: Iterable[str], *streams: str) -> Iterator[Right]:
    for stream in streams:
        yield Right(TOPIC, stream_topic(stream), "Read", "read committed events")
        yield Right(TOPIC, history_topic(stream), "Read", "read their order and transactions")
    for group in groups:
        yield Right(GROUP, group, "Read", "join the group, commit positions")


def watcher_rights(groups: Iterable[str], *streams: str) -> Iterator[Right]:
    """The rights to see the lag of consumer groups. Resetting a group needs a reader's rights."""
    for stream in streams:
        yield Right(TOPIC, stream_topic(stream), "Describe", "read its first and last offsets")
        yield Right(
            TOPIC,
            history_topic(stream),
            "Read",
            "count what was committed since",
        )
    for group in groups:
        yield Right(GROUP, group, "Describe", "list members and offsets")


def doctor_rights() -> Iterator[Right]:
    """The rights of `doctor`, besides those of a client."""
    yield Right(CLUSTER, THE_CLUSTER, "Describe", "check the brokers' disks")


def by_resource(found: Iterable[Right]) -> Iterator[tuple[Right, list[Right]]]:
    """Group rights by resource, topics first."""

    def resource(right: Right) -> tuple[object, ...]:
        return right.kind != TOPIC, right.kind, right.name, right.prefixed

    for _, group in groupby(sorted(found, key=resource), key=resource):
        same = list(group)
        yield same[0], same


def acl_commands(principal: str, found: Iterable[Right]) -> Iterator[str]:
    """The ``kafka-acls`` commands that grant rights: one for all resources of a kind with the same operations.

    In the commands, ``$ADMIN`` is a variable for the options that name the brokers and the credentials.
    """
    together: dict[tuple[str, bool, tuple[str, ...]], list[str]] = {}
    for first, same in by_resource(found):
        key = first.kind, first.prefixed, tuple(right.operation for right in same)
        together.setdefault(key, []).append(first.name)
    for (kind, prefixed, operations), names in together.items():
        words = [f"kafka-acls.sh $ADMIN --add --allow-principal {principal}"]
        words += [f"--operation {operation}" for operation in operations]
        words += ["--cluster"] if kind == CLUSTER else [f"--{kind} {name}" for name in names]
        words += ["--resource-pattern-type prefixed"] if prefixed else []
        yield " ".join(words)
