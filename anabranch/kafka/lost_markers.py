"""Native transactions without a marker, because the brokers have dropped it (KAFKA-20734).

A coordinator of Kafka 4.1 to 4.3 treats a partition without a leader as deleted: it writes no marker there, and
marks the transaction as complete. The transaction stays open in the partition: it blocks readers, and the
producer's next transaction would end it with its own outcome. So before a producer appends to a partition for the
first time under a leader, it asks for its own open transactions there, and ends them as they were decided.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from anabranch.kafka import calls
from anabranch.kafka.calls import DESCRIBE_PRODUCERS, DESCRIBE_TRANSACTIONS, MalformedAnswer
from anabranch.kafka.codes import NONE
from anabranch.kafka.connection import Connection
from anabranch.ports import TOPIC_AUTHORIZATION_FAILED, TopicPartition

log = logging.getLogger("anabranch.kafka")

_OUTCOMES = {
    "PrepareCommit": True,
    "CompleteCommit": True,
    "PrepareAbort": False,
    "CompleteAbort": False,
}


class Open(NamedTuple):
    """A native transaction that is open on a partition: its producer's epoch, and where it begins."""

    epoch: int
    first: int


def open_on(
    connection: Connection, producer_id: int, partitions: Iterable[TopicPartition], deadline: float
) -> dict[TopicPartition, Open]:
    """A producer's open native transactions on partitions of this leader; old brokers report none."""
    if DESCRIBE_PRODUCERS.key not in connection.versions:
        return {}
    topics = [
        {"name": name, "partition_indexes": numbers}
        for name, numbers in calls.by_topic(partitions).items()
    ]
    found = connection.ask(DESCRIBE_PRODUCERS, deadline, topics=topics)
    for topic in found.topics:
        if any(part.error_code == TOPIC_AUTHORIZATION_FAILED for part in topic.partitions):
            _warn(str(topic.name))
    return {
        TopicPartition(str(topic.name), int(part.partition_index)): Open(
            int(state.producer_epoch), int(state.current_txn_start_offset)
        )
        for topic in found.topics
        for part in topic.partitions
        if int(part.error_code) == NONE
        for state in part.active_producers
        if int(state.producer_id) == producer_id and int(state.current_txn_start_offset) >= 0
    }


@cache
def _warn(topic: str) -> None:
    """Warn once in a process: the trouble matters when brokers lose a marker, and not otherwise."""
    log.warning(
        "the right Read on the topic %s is missing: a marker that brokers lose there will not be missed",
        topic,
    )


class LastOutcome:
    """The outcome of a transactional id's last native transaction, from its coordinator.

    The coordinator is asked at each try to initialise the id: the first try ends an ongoing transaction, and the
    last try, which succeeds, comes after that transaction's end.
    """

    def __init__(self) -> None:
        self._commits: bool | None = None
        self._epoch = -1

    def ask(self, connection: Connection, transactional_id: str, deadline: float) -> None:
        """Ask, before the id is initialised (again)."""
        if DESCRIBE_TRANSACTIONS.key not in connection.versions:
            return
        self._commits = None
        asked = (transactional_id,)
        try:
            found = connection.ask(DESCRIBE_TRANSACTIONS, deadline, transactional_ids=asked)
        except MalformedAnswer:
            return  # kio can't decode an id without a native transaction
        for state in found.transaction_states:
            if int(state.error_code) == NONE:
                self._commits = _OUTCOMES.get(str(state.transaction_state))
                self._epoch = int(state.producer_epoch) - 1  # the end raised the epoch

    def known(self) -> bool:
        """Whether there was a native transaction, and no process has initialised the id since then."""
        return self._commits is not None

    def of(self, epoch: int) -> bool | None:
        """Whether the native transaction (of KIP-890) with that epoch is committed; None if not known."""
        return self._commits if epoch == self._epoch else None
