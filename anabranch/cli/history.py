"""A stream's history, read as any Kafka client can: its epochs and what was committed in them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anabranch.errors import DeadlineExceeded, FixCallError
from anabranch.schemas.records import CommitRecord, EpochRecord

if TYPE_CHECKING:
    from anabranch.cli.session import Target

_LOG = logging.getLogger("anabranch.client")


@dataclass(slots=True)
class History:
    """The newest epochs of a stream, oldest first, and their commits in order."""

    epochs: list[EpochRecord] = field(default_factory=list)
    commits: list[CommitRecord] = field(default_factory=list)

    def add(self, record: EpochRecord | CommitRecord, last: int) -> None:
        """Add a record; of more than ``last`` epochs the oldest is dropped, with its commits."""
        if isinstance(record, CommitRecord):
            self.commits.append(record)
            return
        if self.epochs and self.epochs[-1].stream_epoch == record.stream_epoch:
            return  # it is said again
        self.epochs.append(record)
        if len(self.epochs) > last:
            del self.epochs[:-last]
            first = self.epochs[0].stream_epoch
            self.commits = [c for c in self.commits if c.stream_epoch >= first]

    def of_epoch(self, stream_epoch: int) -> list[CommitRecord]:
        """The commits of an epoch."""
        return [c for c in self.commits if c.stream_epoch == stream_epoch]


def read_history(target: Target, stream: str, *, last: int) -> History:
    """The last so many epochs of a stream that exists.

    Raises:
        DeadlineExceeded: the end was not reached within the target's timeout.
    """
    history = History()
    for record in _records(target, stream):
        history.add(record, last)
    return history


def _records(target: Target, stream: str) -> Iterator[EpochRecord | CommitRecord]:
    from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

    from anabranch.librdkafka.options import Options
    from anabranch.schemas.codec import decode
    from anabranch.topics.names import history_topic

    # Partitions are assigned by hand: no group is joined.
    config = Options(target.bootstrap, target.kafka).reader("anabranch-history", "earliest")
    consumer = Consumer(config | {"enable.partition.eof": True}, logger=_LOG)
    deadline = time.monotonic() + target.timeout
    try:
        consumer.assign([TopicPartition(history_topic(stream), 0, OFFSET_BEGINNING)])
        while True:
            for message in consumer.consume(1000, 0.2):
                error = message.error()
                if error is None:
                    record = decode(message.value() or b"")
                    if isinstance(record, EpochRecord | CommitRecord):
                        yield record
                elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
                    return
                elif error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED or error.fatal():
                    raise FixCallError(f"can't read {message.topic()}: {error}")
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"the history of {stream} could not be read to its end in {target.timeout:g} s: "
                    "give a longer --timeout"
                )
    finally:
        consumer.close()
