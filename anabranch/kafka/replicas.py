"""Fetches under way, and the replica to fetch a partition from: its leader, or one in our rack (KIP-392)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from anabranch.kafka.wire.connection import Connection, readable
from anabranch.ports import TopicPartition

_NEAR_S = 300.0  # then the leader is asked again, as Kafka's own consumer does
_LEADER_S = 5.0  # so long the leader serves what a follower could not


@dataclass(slots=True)
class Asked:
    """A fetch under way to one broker."""

    node: int
    connection: Connection
    address: tuple[str, int]
    version: int
    correlation: int
    positions: dict[TopicPartition, int]


def ready(waiting: Sequence[Asked], deadline: float | None) -> list[Asked]:
    """The requests whose answer has begun to arrive. Waits for one until ``deadline`` (None: not at all)."""
    buffered = [one for one in waiting if one.connection.buffered()]
    if buffered:
        return buffered
    if deadline is not None and len(waiting) == 1:
        # Reading waits by itself.
        return list(waiting)
    wait = 0.0 if deadline is None else max(0.0, deadline - time.monotonic())
    found = readable([one.connection for one in waiting], wait)
    if not found and deadline is not None:
        return list(waiting)  # too late: reading raises it
    return [one for one in waiting if one.connection.fileno() in found]


class Replicas:
    """The followers that leaders have named. A follower that can't serve a partition is passed over for a while."""

    def __init__(self, rack: str) -> None:
        """``rack``: the reader's; empty: leaders serve all."""
        self._rack = rack
        # A follower, or None for the leader itself; until when (monotonic seconds).
        self._chosen: dict[TopicPartition, tuple[int | None, float]] = {}

    def named(self, place: TopicPartition, node: int) -> None:
        """The leader has named this follower."""
        self._chosen[place] = node, time.monotonic() + _NEAR_S

    def fails(self, places: Iterable[TopicPartition], node: int) -> bool:
        """A broker can't serve these. True if it was a follower of one: leaders are asked then."""
        until = time.monotonic() + _LEADER_S
        followed = [place for place in places if self._chosen.get(place, (None,))[0] == node]
        self._chosen |= dict.fromkeys(followed, (None, until))
        return bool(followed)

    def groups(self, by_leader: dict[int, list[TopicPartition]]) -> dict[int, list[TopicPartition]]:
        """The partitions by the broker to ask, given by their leaders."""
        if not self._chosen:
            return by_leader
        now = time.monotonic()
        self._chosen = {p: chosen for p, chosen in self._chosen.items() if chosen[1] > now}
        groups: dict[int, list[TopicPartition]] = {}
        for leader, places in by_leader.items():
            for place in places:
                follower, _ = self._chosen.get(place, (None, 0.0))
                groups.setdefault(leader if follower is None else follower, []).append(place)
        return groups

    def rack_for(self, places: Iterable[TopicPartition]) -> str:
        """The rack to tell a broker; none if it has to serve one of these itself."""
        chosen = self._chosen
        return "" if any(p in chosen and chosen[p][0] is None for p in places) else self._rack
