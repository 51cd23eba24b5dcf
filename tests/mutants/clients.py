"""Planted bugs in the library of readers and writers; see `catalogue`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock, patch

from anabranch.client import session
from anabranch.client.calls import reading as client_reading
from anabranch.client.transaction import Transaction
from anabranch.client.writer import Writer
from anabranch.errors import AnabranchError, DeadlineExceeded
from anabranch.librdkafka.command_bus import Gathering, KafkaBus, Queued
from anabranch.ports import LogError, OffsetOutOfRange, TopicPartition
from anabranch.reading import ordered_reader as ordered
from anabranch.reading import snapshot
from anabranch.reading.commit_index import DELETED, NO_SEGMENT, CommitIndex, StreamOrder
from anabranch.reading.committed_log import CommittedLog
from anabranch.reading.feed import Feed
from anabranch.reading.history import HistorySearch
from anabranch.reading.ordered_reader import Starting, Step
from tests.mutants.planting import Planted, instead_of, wrapping

EARLY = 300_000 << 12  # hybrid time, 0.3 s


def doubt_after_sending() -> Planted:
    """A commit is in doubt once it was waited for in vain, not from the moment when it is sent."""

    def forgetful(name: str) -> Any:
        real = getattr(Transaction, name)

        def commit(handle: Any, *given: Any, **named: Any) -> Any:
            before = handle.state
            try:
                return real(handle, *given, **named)
            except AnabranchError:
                raise
            except BaseException:  # KeyboardInterrupt, or the simulator's own
                handle.state = before
                raise

        return commit

    names = ("_commit_one_shot", "_commit_open")
    planted: Planted = patch.multiple(Transaction, **{name: forgetful(name) for name in names})
    return planted


@wrapping(client_reading, "take")
def stale_cut(real: Any, source: Any, streams: Any, timestamp: int, *more: Any) -> Any:
    """A snapshot has the offsets of 0.3 s before its timestamp."""
    plan = real(source, streams, timestamp - EARLY, *more)
    return plan._replace(timestamp=timestamp)


@wrapping(CommittedLog, "end_offsets")
def unsure_ends(
    real: Any, log: CommittedLog, places: Any, deadline: float, *, committed: bool = False
) -> Any:
    """Any broker's answer about where a partition ends is believed, also a former leader's."""
    asked = log.raw.end_offsets

    def of_any_broker(*given: Any, sure: bool, **more: Any) -> Any:
        return asked(*given, **more)

    with patch.object(log.raw, "end_offsets", of_any_broker):
        return real(log, places, deadline, committed=committed)


@wrapping(CommittedLog, "_ask")
def bare_errors(real: Any, log: CommittedLog, *given: Any) -> Any:
    """If brokers don't answer a question in time, the caller gets their own error, not one of the library's."""
    try:
        return real(log, *given)
    except AnabranchError as error:
        raise (error.__cause__ if isinstance(error.__cause__, LogError) else error) from None


@contextmanager
def taken_and_refused() -> Iterator[None]:
    """The first write of an event says "call again", although it has queued the event."""
    given = set[bytes | None]()

    def refusing(real: Any) -> Any:
        def write(handle: Any, stream: str, value: bytes | None = None, *more: Any) -> None:
            real(handle, stream, value, *more)
            if value not in given:
                given.add(value)
                raise DeadlineExceeded("no room in the queue; call again")

        return write

    with (
        patch.object(Transaction, "write", refusing(Transaction.write)),
        patch.object(Writer, "write", refusing(Writer.write)),
    ):
        yield


@wrapping(snapshot, "_cut")
def uneven_cut(real: Any, source: Any, stream: str, timestamp: int, *more: Any) -> Any:
    """Of a snapshot's streams the last one is cut later: to the end that it has by then."""
    found = HistorySearch(source, stream, 5.0).as_of("end")
    later = found.record.timestamp if found is not None else timestamp
    return real(source, stream, max(timestamp, later), *more)


@wrapping(client_reading, "take")
def early_difference(
    real: Any, source: Any, streams: Any, at: int, deadline: float, since: int | None
) -> Any:
    """A difference begins with the offsets of 0.3 s before its start."""
    early = None if since is None else max(0, since - EARLY)
    return real(source, streams, at, deadline, early)


@instead_of(client_reading, "newest")
def latest_of_the_oldest(source: Any, streams: Any, deadline: float) -> tuple[int, bool]:
    """The latest of several streams is as of the newest commit that each of them has passed."""
    return min(snapshot.newest(source, [stream], deadline) for stream in streams)


def late_position() -> Planted:
    """A position begins an event behind the one that was given out last."""
    given_to = property(lambda step: step.offsets[step._given - 1] + 2 if step._given else 0)
    return patch.object(Step, "given_to", given_to)


@wrapping(client_reading, "group_progress")
def hasty_copy(real: Any, ports: Any, group: str, streams: Any, safe: int, timeout: float) -> Any:
    """A copy counts as whole at the time of the first commit that it lacks."""
    return min(safe, real(ports, group, streams, safe, timeout) + 1)


def no_waiting() -> Planted:
    """Readers take a segment before its predecessors are read."""
    return patch.object(StreamOrder, "readable", lambda *_: True)


@wrapping(CommitIndex, "_unnamed")
def deleted_are_adopted(real: Any, index: CommitIndex, *place: int) -> Any:
    """Events that a reader holds and whose history retention cut are given as if older than the stream."""
    span = real(index, *place)
    return span._replace(segment_id=NO_SEGMENT) if span.segment_id == DELETED else span


@wrapping(CommittedLog, "__init__")
def read_uncommitted(real: Any, source: CommittedLog, raw: Any, *more: Any) -> None:
    """Readers see what native transactions appended that were aborted, or are not ended."""
    real(source, raw, *more)
    source.raw = Mock(wraps=raw)
    source.raw.fetch = lambda *given, **how: raw.fetch(*given, **how | {"committed": False})


@wrapping(Starting, "in_group")
def partitions_of_a_new_group(real: Any, starting: Starting, consumer: Any, own: Any) -> Any:
    """A group's new partitions begin where a new group would: at the end, for one that asked for that."""
    found = real(starting, consumer, own)
    if found is None:
        return None
    places = {p: TopicPartition(starting._topic, p) for p in found}
    known = consumer.committed(places.values())
    alone = starting.alone()
    return found | {
        p: max(at, alone.get(p, 0)) for p, at in found.items() if places[p] not in known
    }


@instead_of(Feed, "_pass_over")
def stale_leader_believed(feed: Feed, error: OffsetOutOfRange) -> bool:
    """A broker that lacks an offset sends a reader to the beginning of the log, though that is no higher."""
    place = error.partition
    if feed._gone is not None:
        feed._gone(place, error.position)
    feed._positions[place] = feed._log.start_offsets([place])[place]
    return True


def strangers_read() -> Planted:
    """Readers take a record for committed that nobody committed."""
    return patch.object(ordered, "_ours", lambda _span, _block, _low, high: high)


def any_answer() -> Planted:
    """A client believes what comes under its correlation id, whichever command it answers."""

    class Whichever(bytes):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = bytes.__hash__

    return patch.object(session, "command_digest", lambda payload: Whichever())


@instead_of(Gathering, "due")
def nobody_sends(self: Gathering, correlation_id: bytes) -> None:
    """Gathered commands wait for as many as were answered, however few come."""


@instead_of(KafkaBus, "_wake_next")
def next_sleeps_on(self: KafkaBus) -> None:
    """Of answers that arrive together, only one is given to its caller."""
    if self._arrived:
        correlation_id, reply = self._arrived.popleft()
        self._answer(correlation_id, reply)
    self._arrived.clear()


@instead_of(KafkaBus, "_produce_all")
def last_command_alone(self: KafkaBus, commands: list[Queued]) -> None:
    """Of commands that gathered, only the last one is sent."""
    for command in commands[-1:]:
        self._produce(command)
