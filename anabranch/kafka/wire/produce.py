"""A Produce request and its answer on a connection."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from anabranch.batches.format import Buffer
from anabranch.kafka.wire import data
from anabranch.kafka.wire.calls import PRODUCE
from anabranch.kafka.wire.cluster import Cluster
from anabranch.kafka.wire.connection import Connection
from anabranch.ports import TopicPartition


def send_produce(
    cluster: Cluster,
    connection: Connection,
    version: int,
    transactional_id: str | None,
    batches: Mapping[TopicPartition, Sequence[Buffer]],
    deadline: float,
) -> int:
    """Send one batch for each partition, given as buffers in a row; the answer's correlation id.

    The partitions' topics must be known to ``cluster``. Raises `ConnectionBroken`.
    """
    parts = data.produce_request(
        version,
        transactional_id,
        round(cluster.settings.request_timeout * 1000),
        batches,
        cluster.topic_ids,
    )
    return connection.send(
        PRODUCE.key,
        version,
        parts,
        flexible=version >= PRODUCE.flexible_from,
        deadline=deadline,
    )


def read_produced(
    cluster: Cluster,
    connection: Connection,
    version: int,
    correlation: int,
    partitions: Collection[TopicPartition],
    deadline: float,
) -> dict[TopicPartition, data.Produced]:
    """The answer about all these partitions.

    Raises:
        ConnectionBroken: the answer did not come.
        MalformedAnswer: it is not about all of them, or no answer at all.
    """
    body = connection.receive(correlation, deadline)
    answers = data.produce_answer(version, body, cluster.topic_names)
    missing = partitions - answers.keys()
    if missing:
        raise data.MalformedAnswer(f"no answer about {sorted(missing)[0]}")
    return answers
