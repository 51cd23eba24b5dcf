"""Rows of `anabranch doctor` about topics: replicas that are behind, a topic or a right that is missing."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from anabranch.cli.doctor import State, _topics
from anabranch.cli.options import Target
from anabranch.kafka.cluster import NO_TOPIC_ID, Cluster, Topic
from anabranch.kafka.settings import parse_settings
from anabranch.ports import LogRefused
from anabranch.topics.names import commands_topic, replies_topic

COMMANDS, REPLIES = commands_topic("p", "open"), replies_topic("p", "open")


class Answering(Cluster):
    """Brokers that say this of the topics; None: the client has no right to ask."""

    def __init__(self, in_sync: dict[str, int] | None) -> None:
        super().__init__(parse_settings("b:1", {}))
        self.in_sync = in_sync

    def refresh(self, names: Iterable[str], deadline: float) -> dict[str, Topic]:
        if self.in_sync is None:
            raise LogRefused("TOPIC_AUTHORIZATION_FAILED", 29)
        found = {name: self.in_sync[name] for name in names if name in self.in_sync}
        return {name: Topic(name, NO_TOPIC_ID, {}, 1, 3, count) for name, count in found.items()}


@pytest.mark.parametrize(
    ("in_sync", "states", "told"),
    [
        ({COMMANDS: 3, REPLIES: 3}, [State.OK, State.OK], "3 of 3 replicas in sync"),
        ({COMMANDS: 3, REPLIES: 2}, [State.OK, State.WARN], "2 of 3 replicas in sync"),
        ({COMMANDS: 3}, [State.OK, State.BAD], "it is not there, or may not be seen"),
        (None, [State.BAD], "TOPIC_AUTHORIZATION_FAILED"),
    ],
)
def test_topics(in_sync: dict[str, int] | None, states: list[str], told: str) -> None:
    rows = list(_topics(Answering(in_sync), Target("b:1", "p", 1.0)))
    assert [row.state for row in rows] == states
    assert told in rows[-1].found
    assert [bool(row.to_do) for row in rows] == [state != State.OK for state in states]
