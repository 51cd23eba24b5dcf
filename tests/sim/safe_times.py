"""Clients that ask for safe times, and what must hold of the answers, whoever leads and dies meanwhile."""

from __future__ import annotations

from anabranch.client.client import Client
from anabranch.ports import TopicPartition
from anabranch.protocol import hybrid_time
from anabranch.topics.names import history_topic
from tests.sim.check_log import hold
from tests.sim.ledger import SafeAnswer
from tests.sim.picture import Picture
from tests.sim.ports import SimCluster
from tests.sim.world import World
from tests.sim.writers import FINE, STREAMS


def ask_safe_time(
    world: World, cluster: SimCluster, client: Client, scope: str, answers: list[SafeAnswer]
) -> None:
    """Now, a time in the past, or one a little ahead, which has to be waited for."""
    session = client._session
    at = None
    if world.random.random() < 0.5:
        at = hybrid_time.from_us(int(client._shared.ports.clock.wall() * 1e6))
        at += world.random.randint(-3_000_000, 1_000_000) << hybrid_time.LOGICAL_BITS
    known = session.highest_timestamp
    try:
        found = session.safe_time(scope, at, session.now() + 5.0)
    except FINE as error:
        world.note("world", f"safe time: {type(error).__name__}")
        return
    hold(at is None or found == at, f"safe time: {at} was asked for, {found} answered")
    places = {stream: TopicPartition(history_topic(stream), 0) for stream in STREAMS}
    places = {s: place for s, place in places.items() if place in cluster.partitions}
    ends = {stream: cluster.partition(place).end_offset for stream, place in places.items()}
    answers.append(SafeAnswer(found, at is None, ends, known))


def check_safe_times(picture: Picture, answers: list[SafeAnswer], partitions: int) -> None:
    """What is at or below an answered time stood in the history by then; what was known before is below it."""
    for answer in answers:
        if answer.now and partitions == 1:  # else it may be another scope's time that was known
            hold(
                answer.known <= answer.timestamp,
                f"safe time {answer.timestamp}: {answer.known} was known before it was asked for",
            )
        # A history that somebody made anew ended elsewhere when it was asked.
        for stream, end in answer.ends.items():
            if stream in picture.deleted:
                continue
            for seen, record in picture.history.get(stream, ()):
                hold(
                    record.timestamp > answer.timestamp or seen.record.offset < end,
                    f"safe time {answer.timestamp}: {stream} has a record at {record.timestamp} after it, "
                    f"at offset {seen.record.offset}, from {end} on",
                )
