"""Which broker coordinates the controllers' native transactions, or a group of readers, and when it is at work.

Kafka keeps both in topics of its own: the leader of a partition coordinates what hashes to it, and appends there
all that it does.
"""

from __future__ import annotations

import struct
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient

from anabranch.topics.names import transactional_ids

TRANSACTIONS = "__transaction_state"
GROUPS = "__consumer_offsets"
BUSY_S = 15.0
_ASK_S = 30.0
_TRY_S = 5.0
# States in Kafka's TransactionLogValue; the end of one is no work in hand.
_STATES = {1: "ongoing", 2: "prepare-commit", 3: "prepare-abort"}
# version, producer id, epoch, timeout: then the state. Versions 0 and 1 have the same beginning.
_BEFORE_STATE = struct.calcsize(">hqhi")

T = TypeVar("T")


def java_hash(text: str) -> int:
    """``String.hashCode`` without its sign, as Kafka takes it (of text in ASCII)."""
    number = 0
    for letter in text:
        number = (31 * number + ord(letter)) & 0xFFFFFFFF
    signed = number - (1 << 32) if number >= 1 << 31 else number
    return 0 if signed == -(1 << 31) else abs(signed)


def state_of(message: Message) -> tuple[str, str | None]:
    """Transactional id, and what is under way in it, of a record of the transactions' topic."""
    key, value = message.key(), message.value()
    if not isinstance(key, bytes) or len(key) < 4:
        return "", None
    (length,) = struct.unpack_from(">h", key, 2)
    name = key[4 : 4 + length].decode()
    if value is None or len(value) <= _BEFORE_STATE:
        return name, None
    return name, _STATES.get(value[_BEFORE_STATE])


def wait_transaction(bootstrap: str, prefix: str, seconds: float = BUSY_S) -> tuple[int, str]:
    """The node that coordinates the leader's transactions, and what it has in hand; ``idle`` at the deadline."""
    ids = transactional_ids(0, prefix)

    def work(message: Message) -> str | None:
        name, state = state_of(message)
        return state if name in ids else None

    # A and B may have two coordinators: the one that does something first.
    return _wait_work(bootstrap, TRANSACTIONS, ids, work, seconds)


def wait_group(bootstrap: str, group: str, seconds: float = BUSY_S) -> tuple[int, str]:
    """The node that coordinates a group, and what it is about; ``idle`` at the deadline."""
    name = group.encode()

    def work(message: Message) -> str | None:
        key = message.key()
        if not isinstance(key, bytes) or name not in key:
            return None
        # Versions 0 and 1 of the key are positions; above, the group itself.
        return "positions" if key[:2] <= b"\0\1" else "members"

    return _wait_work(bootstrap, GROUPS, (group,), work, seconds)


def _wait_work(
    bootstrap: str,
    topic: str,
    names: tuple[str, ...],
    work: Callable[[Message], str | None],
    seconds: float,
) -> tuple[int, str]:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"watch-{uuid.uuid4().hex}",
            "enable.auto.commit": False,
            "auto.offset.reset": "latest",
            "fetch.wait.max.ms": 10,
            "log_level": 0,
        }
    )

    def ends(wanted: list[int]) -> list[TopicPartition]:
        places = [TopicPartition(topic, partition) for partition in wanted]
        return [
            TopicPartition(topic, p.partition, consumer.get_watermark_offsets(p, _TRY_S)[1])
            for p in places
        ]

    try:
        leaders = _again(lambda: _leaders(admin, topic))
        wanted = sorted({java_hash(name) % len(leaders) for name in names})
        consumer.assign(_again(lambda: ends(wanted)))
        until = time.monotonic() + seconds
        at, found = wanted[0], "idle"
        while found == "idle" and time.monotonic() < until:
            message = consumer.poll(0.05)
            if message is not None and message.error() is None and (state := work(message)):
                at, found = message.partition() or 0, state
        return _again(lambda: _leaders(admin, topic))[at], found
    finally:
        consumer.close()


def _leaders(admin: AdminClient, topic: str) -> dict[int, int]:
    """Partition -> node."""
    found = admin.list_topics(topic, timeout=_TRY_S).topics[topic]
    if found.error is not None:
        raise KafkaException(found.error)
    return {number: int(partition.leader) for number, partition in found.partitions.items()}


def _again(ask: Callable[[], T]) -> T:
    """Leaders may be moving since the fault before."""
    until = time.monotonic() + _ASK_S
    while True:
        try:
            return ask()
        except KafkaException as error:
            if time.monotonic() > until:
                raise AssertionError(f"waited {_ASK_S:.0f} s for a coordinator: {error}") from error
            time.sleep(0.2)
