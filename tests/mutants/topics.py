"""Planted bugs in what is done about topics that are gone, and in changes of streams; see `catalogue`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

from anabranch.client import session
from anabranch.controller import controller, durability, history_tail, topic_trouble
from anabranch.controller import stream_topics as topics
from anabranch.controller.background import LostMarkerSweep
from anabranch.controller.carrier import Carriers
from anabranch.controller.cleanup import Histories
from anabranch.controller.leadership import Lease
from anabranch.controller.stream_topics import Done, StreamTopics
from anabranch.controller.topic_trouble import TopicTrouble
from anabranch.core import rows as k
from anabranch.core.decisions.streams import give_up_stream, stream_changed, stream_forgotten
from anabranch.core.decisions.turn import Turn
from anabranch.core.state import State
from anabranch.ports import Clock, Log, LogError, TopicGone, TopicInfo, TopicPartition
from anabranch.protocol.hybrid_time import MAX
from anabranch.protocol.schemas.records import ChangedRow, StreamRow
from anabranch.reading.committed_log import CommittedLog
from anabranch.testing.memory.producer import MemoryProducer
from tests.mutants.planting import Planted


@contextmanager
def given_up_at_once() -> Iterator[None]:
    """A stream is given up the first time that a broker does not find a topic of it, which may only lag behind."""
    real = TopicTrouble.given_up

    def given_up(self: TopicTrouble, state: State, after_s: float) -> list[tuple[str, str]]:
        return real(self, state, 0.0)

    with (
        patch.object(TopicTrouble, "given_up", given_up),
        patch.object(TopicTrouble, "_is_gone", lambda *_: True),  # the quorum does not lag behind
    ):
        yield


@contextmanager
def finished_elsewhere() -> Iterator[None]:
    """What is being committed when a stream is given up is committed in its other streams."""

    def give_up(turn: Turn, stream: str, why: str) -> list[bytes]:
        for txn_id in sorted(turn.state.open):
            txn = turn.state.open[txn_id]
            if txn.row.state == "COMMIT_IN_PROGRESS" and len(txn.participants) > 1:
                turn.put(k.participant_key(txn_id, stream), None)
        return give_up_stream(turn, stream, why)

    with patch.object(controller, "give_up_stream", give_up):
        yield


def taken_for_the_old_one() -> Planted:
    """Events are committed wherever they come to stand, also before what was committed: in a topic made anew."""
    return patch.object(durability, "_check_behind", lambda *_: None)


@contextmanager
def lost_and_going_on() -> Iterator[None]:
    """A stream is called lost, and its transactions are not aborted."""

    def give_up(turn: Turn, stream: str, why: str) -> list[bytes]:
        kept, turn.state.open = turn.state.open, {}
        try:
            return give_up_stream(turn, stream, why)
        finally:
            turn.state.open = kept

    with patch.object(controller, "give_up_stream", give_up):
        yield


@contextmanager
def all_wait_for_one() -> Iterator[None]:
    """A stream that can't be reached or written is not left out: what it is in fails, again and again."""
    real = TopicTrouble.find

    def find(self: TopicTrouble, state: State, *errors: LogError) -> bool:
        gone = [error for error in errors if isinstance(error, TopicGone)]
        return len(gone) == len(errors) and real(self, state, *gone)

    with (
        patch.object(TopicTrouble, "find", find),
        patch.object(topic_trouble, "unwell", lambda *_: ""),
        patch.object(TopicTrouble, "_note_all", _note_none),
    ):
        yield


def _note_none(*_: object) -> bool:
    return False


@contextmanager
def trouble_taken_for_loss() -> Iterator[None]:
    """A stream that can't be reached for long is given up, as if its topics were gone."""
    gone, unwell = topic_trouble.gone, topic_trouble.unwell

    def is_gone(topic: str, info: TopicInfo | None, partitions: int, topic_id: str) -> str:
        why = gone(topic, info, partitions, topic_id)
        return why if why or info is None else unwell(info, partitions)

    with (
        patch.object(topic_trouble, "gone", is_gone),
        patch.object(TopicTrouble, "_is_gone", lambda *_: True),
    ):
        yield


def every_refusal_is_final() -> Planted:
    """Whatever the brokers refuse is taken for the data's fault: for want of a right, too."""
    return patch.object(topic_trouble, "DATA_CODES", range(200))


def busy_ids_are_used_again() -> Planted:
    """A transactional id whose markers can't be written is used again for the next round but one."""
    return patch.object(Lease, "leave_out", lambda *_: None)


def left_open() -> Planted:
    """A native transaction whose marker the brokers lost stays open in that partition."""
    return patch.object(MemoryProducer, "check", lambda *_: None)


def quiet_streams_stay() -> Planted:
    """No leader looks at a stream that no round comes to: what lacks a marker there stays open."""
    return patch.object(LostMarkerSweep, "_compare", lambda *_: {})


def idle_streams_stay() -> Planted:
    """Streams that fail the check of each minute are left alone: an idle one without its topic stays ACTIVE."""
    return patch.object(
        Histories, "missed", property(lambda _: set(), lambda *_: None), create=True
    )


def carriers_never_look() -> Planted:
    """A carrier's id ends what lacks a marker with its next chunk there only, which may never come."""
    return patch.object(Carriers, "check", lambda *_: None)


# -- streams that are altered, truncated and deleted -----------------------------------------------


@contextmanager
def late_copies() -> Iterator[None]:
    """A command that sets something is carried out whatever time its sender knows, so a late copy is, too."""
    real = State.last_change

    def known(state: State, thing: bytes) -> ChangedRow | None:
        last = real(state, thing)
        return None if last is None else replace(last, timestamp=0)

    with patch.object(State, "last_change", known):
        yield


@contextmanager
def copies_know_more() -> Iterator[None]:
    """While a copy of a command that sets something has no answer, the next copy is sent as a new command."""
    with patch.object(session, "SETS", ()):
        yield


@contextmanager
def told_before_it_is_done() -> Iterator[None]:
    """A change of a stream's topics is told as soon as it is logged, and nothing is done."""

    def change(_: StreamTopics, row: StreamRow, base: object) -> Done:
        return partial(stream_changed, stream=row.stream)

    with patch.object(StreamTopics, "_change", change):
        yield


@contextmanager
def deleted_to_the_end() -> Iterator[None]:
    """A stream is truncated up to its newest commit, whatever time was said."""
    real = history_tail.events_until

    def until(log: Log, clock: Clock, stream: str, _: int) -> dict[TopicPartition, int]:
        return real(log, clock, stream, MAX)

    with patch.object(topics, "events_until", until):
        yield


@contextmanager
def positions_of_any_stream() -> Iterator[None]:
    """A position is accepted for any stream of the name."""
    with patch.object(CommittedLog, "expect", lambda *_: None):
        yield


@contextmanager
def topics_stay() -> Iterator[None]:
    """A deleted stream's row goes, and its topics stay."""

    def delete(_: StreamTopics, row: StreamRow) -> Done:
        return partial(stream_forgotten, stream=row.stream)

    with patch.object(StreamTopics, "_delete", delete):
        yield
