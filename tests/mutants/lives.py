"""Planted bugs where streams are altered, truncated and deleted; see `catalogue`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

from anabranch.client import session
from anabranch.controller import history_tail
from anabranch.controller import stream_topics as topics
from anabranch.controller.stream_topics import Done, StreamTopics
from anabranch.core.decisions.streams import stream_changed, stream_forgotten
from anabranch.core.state import State
from anabranch.ports import Clock, Log, TopicPartition
from anabranch.protocol.hybrid_time import MAX
from anabranch.protocol.schemas.records import ChangedRow, StreamRow
from anabranch.reading.committed_log import CommittedLog


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
