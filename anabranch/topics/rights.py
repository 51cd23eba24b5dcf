"""All rights that controllers and clients need of brokers with an authorizer, as data: each with its reason.

Read, Write, Delete and Alter bring Describe along, so hardly a row has it. Spelled as ``kafka-acls`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

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

TOPIC, GROUP, TRANSACTIONAL_ID = "topic", "group", "transactional-id"


class Right(NamedTuple):
    """One operation of a role on a resource. ``prefixed``: on all resources whose names begin so."""

    kind: str
    name: str
    operation: str
    why: str
    prefixed: bool = False


def controller_rights(prefix: str = DEFAULT_PREFIX, *scopes: str) -> Iterator[Right]:
    """A controller's. ``scopes``: those whose streams it may make, commit to and shorten."""
    made = (commands_topic, control_topic, status_topic, replies_topic)
    names = [topic(prefix) for topic in made]
    for name in names:
        yield Right(TOPIC, name, "Create", "make it, at the first start of all")
        yield Right(TOPIC, name, "DescribeConfigs", "check its settings, at each start")
    commands, control, status, replies = names
    yield Right(TOPIC, commands, "Read", "carry out what clients ask")
    yield Right(TOPIC, control, "Read", "hear other controllers")
    yield Right(TOPIC, control, "Write", "speak to other controllers")
    yield Right(TOPIC, status, "Read", "know what was decided before")
    yield Right(TOPIC, status, "Write", "log what is decided")
    yield Right(TOPIC, replies, "Read", "end transactions there that brokers left open")
    yield Right(TOPIC, replies, "Write", "answer clients")
    yield Right(GROUP, controllers_group(prefix), "Read", "share control partitions")
    yield Right(
        TRANSACTIONAL_ID, of_transactions(prefix), "Write", "lead: one round, one transaction", True
    )
    for scope in scopes:
        yield from scope_rights(scope)


def scope_rights(scope: str) -> Iterator[Right]:
    """A controller's on a scope's streams."""
    for operation, why in (
        ("Create", "make a new stream's three topics"),
        ("DescribeConfigs", "check their settings"),
        ("Read", "read journals and histories"),
        ("Write", "commit"),
        ("Alter", "add partitions, when a stream is scaled"),
        ("Delete", "shorten journals and histories, and forget a stream"),
    ):
        yield Right(TOPIC, of_scope(scope), operation, why, True)


def client_rights(prefix: str = DEFAULT_PREFIX) -> Iterator[Right]:
    """The rights of a client that asks controllers: writers, operators, readers of snapshots."""
    yield Right(TOPIC, commands_topic(prefix), "Write", "ask controllers")
    yield Right(TOPIC, replies_topic(prefix), "Read", "hear their answers")


def writer_rights(*streams: str) -> Iterator[Right]:
    """A writer's, besides those of a client."""
    for stream in streams:
        journal = journal_topic(stream)
        yield Right(TOPIC, journal, "Write", "write events")
        yield Right(TOPIC, journal, "DescribeConfigs", "know how big an event may be")


def reader_rights(groups: Iterable[str], *streams: str) -> Iterator[Right]:
    """A reader's."""
    for stream in streams:
        yield Right(TOPIC, stream_topic(stream), "Read", "read committed events")
        yield Right(TOPIC, history_topic(stream), "Read", "know their order and transactions")
    for group in groups:
        yield Right(GROUP, group, "Read", "share a stream, keep positions")
