"""Consumer groups for operators: listing, describing and moving them, by Kafka's admin requests."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException
from confluent_kafka import TopicPartition as Place

from anabranch.errors import IllegalState, InvalidArgument, NotAuthorized
from anabranch.librdkafka.admin import GRACE_S, KafkaAdmin
from anabranch.ports import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from confluent_kafka.admin import AdminClient

EMPTY = ("empty", "dead")  # states without members
_IN_USE = (
    KafkaError.NON_EMPTY_GROUP,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.REBALANCE_IN_PROGRESS,
)


class KafkaGroups:
    """`anabranch.reading.committed_log.Groups` on confluent-kafka."""

    def __init__(self, admin: KafkaAdmin) -> None:
        self._admin = admin

    def names(self, deadline: float) -> list[str]:
        def ask(client: AdminClient, seconds: float) -> list[str]:
            found = client.list_consumer_groups(request_timeout=seconds).result(seconds + GRACE_S)
            for error in found.errors:  # one for each failed broker; never raised by the library
                raise KafkaException(error)
            return sorted(one.group_id for one in found.valid)

        return self._admin.ask(deadline, ask)

    def state(self, group: str, deadline: float) -> tuple[str, tuple[str, ...]]:
        def ask(client: AdminClient, seconds: float) -> tuple[str, tuple[str, ...]]:
            with _told(group, "Describe"):
                futures = client.describe_consumer_groups([group], request_timeout=seconds)
                found = futures[group].result(seconds + GRACE_S)
            members = tuple(f"{one.client_id} ({one.host.lstrip('/')})" for one in found.members)
            return found.state.name.lower(), members

        return self._admin.ask(deadline, ask)

    def offsets(self, group: str, deadline: float) -> dict[TopicPartition, int]:
        def ask(client: AdminClient, seconds: float) -> dict[TopicPartition, int]:
            wanted = [ConsumerGroupTopicPartitions(group)]
            with _told(group, "Describe"):
                futures = client.list_consumer_group_offsets(wanted, request_timeout=seconds)
                found = futures[group].result(seconds + GRACE_S).topic_partitions
            return {TopicPartition(p.topic, p.partition): p.offset for p in found if p.offset >= 0}

        return self._admin.ask(deadline, ask)

    def move(self, group: str, offsets: Mapping[TopicPartition, int], deadline: float) -> None:
        if self.state(group, deadline)[0] not in EMPTY:
            raise _in_use(group)
        wanted = [Place(*place, offset) for place, offset in offsets.items()]

        def ask(client: AdminClient, seconds: float) -> None:
            with _told(group, "Read"):
                futures = client.alter_consumer_group_offsets(
                    [ConsumerGroupTopicPartitions(group, wanted)], request_timeout=seconds
                )
                for place in futures[group].result(seconds + GRACE_S).topic_partitions:
                    if place.error is not None:
                        raise KafkaException(place.error)

        self._admin.ask(deadline, ask)


@contextmanager
def _told(group: str, right: str) -> Iterator[None]:
    """Convert errors about a group into errors that say what to do."""
    try:
        yield
    except KafkaException as error:
        code = error.args[0].code()
        if code == KafkaError.GROUP_AUTHORIZATION_FAILED:
            raise NotAuthorized(f"the right {right} on the group {group} is missing") from error
        if code == KafkaError.INVALID_GROUP_ID:
            raise InvalidArgument(f"{group!r} is not a group's name") from error
        if code in _IN_USE:
            raise _in_use(group) from error
        raise


def _in_use(group: str) -> IllegalState:
    return IllegalState(f"members are in the group {group}: stop them first; nothing was changed")
