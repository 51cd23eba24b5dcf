"""Planted bugs in the wait for prepare timestamps (`docs/inside/across.md`, section 6); see `catalogue`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import SimpleNamespace
from unittest.mock import patch

from anabranch.controller import controller
from anabranch.core.across.holds import Holds
from anabranch.core.decisions.across import coordinating, holding
from anabranch.core.decisions.turn import Turn
from anabranch.core.locks import conflicts
from anabranch.core.state import State
from anabranch.protocol.schemas.records import TableTime, Vote
from tests.core import harness

Planted = contextlib.AbstractContextManager[object]


def nobody_waits() -> Planted:
    """H1: commits are merged although a stream of theirs is held."""
    return patch.object(Holds, "first", lambda *_: None)


def ties_are_free() -> Planted:
    """H1: of two commits with one timestamp, any may be merged first."""

    def may_go(self: Holds, streams: Iterable[str], at: int, txn_id: bytes = b"") -> object:
        for stream in streams:
            for entry in self.on([stream]):
                ahead = entry.timestamp < at if entry.fixed else entry.timestamp <= at
                if entry.txn_id != txn_id and ahead:
                    return stream, entry
        return None

    return patch.object(Holds, "first", may_go)


def all_streams_are_held() -> Planted:
    """H2: a prepared transaction holds streams that it does not write."""
    real = Holds.put

    def put(self: Holds, txn_id: bytes, streams: Iterable[str], entry: object) -> None:
        wider = streams if entry is None else ("nyc/a", "nyc/b", "nyc/plain")
        real(self, txn_id, wider, entry)  # type: ignore[arg-type]

    return patch.object(Holds, "put", put)


def no_timestamp_is_taken() -> Planted:
    """H4: a commit that waits gets its timestamp when it is merged."""

    def admit(
        self: Holds,
        txn_id: bytes,
        streams: Collection[str],
        locked: Iterable[str],
        now_ms: int,
        fresh: int,
    ) -> int | None:
        return fresh if self.may_go(fresh, txn_id, (*streams, *locked)) else None

    return patch.object(Holds, "admit", admit)


def timestamps_are_kept() -> Planted:
    """H4: a commit that waits keeps its timestamp until it is merged."""
    return patch.object(Holds, "expire", lambda *_: [])


def each_time_is_safe() -> Planted:
    """H5: a time is called safe although a commit before it is left to be merged."""
    return patch.object(holding, "is_safe", lambda *_: True)


def epochs_come_late() -> Planted:
    """H6: the EPOCH record of a held stream has a later time than the commits that follow."""
    return patch.object(holding, "epoch_time", lambda turn, stream, fresh: fresh)


@contextlib.contextmanager
def what_comes_is_not_asked() -> Iterator[None]:
    """H9: whether a commit is before a prepare timestamp is checked with hybrid time, and it gets a later one."""
    real = Turn.coming_timestamp

    def next_timestamp(self: Turn) -> int:
        self.hybrid_time = real(self)
        return self.hybrid_time

    checks = patch.object(Turn, "coming_timestamp", lambda self: self.hybrid_time + 1)
    with checks, patch.object(Turn, "next_timestamp", next_timestamp):
        yield


def promises_are_timestamps() -> Planted:
    """H9: the commit timestamp is a prepare timestamp, which the participant may give to another commit."""

    def timestamp_of(turn: Turn, votes: Mapping[int, Vote]) -> int:
        at = max([turn.next_timestamp(), *[vote.timestamp for vote in votes.values()]])
        turn.hybrid_time = max(turn.hybrid_time, at)
        return at

    return patch.object(coordinating, "timestamp_of", timestamp_of)


@contextlib.contextmanager
def locks_wait_for_nobody() -> Iterator[None]:
    """L1: a commit does not wait for entries on the tables that it locks."""
    named = SimpleNamespace(named=lambda locks: [])
    with patch.object(holding, "conflicts", named), patch.object(holding, "_locked", lambda *_: ()):
        yield


def held_tables_are_told() -> Planted:
    """T3: the newest commit of a held table is reported, as if the table were complete."""

    def table_times(turn: Turn, tables: Iterable[str], *_: int) -> tuple[TableTime, ...]:
        known = turn.state.tables
        return tuple(TableTime(table, known[table].last) for table in tables if table in known)

    return patch.object(conflicts, "table_times", table_times)


@contextlib.contextmanager
def successors_hold_nothing() -> Iterator[None]:
    """A new leader does not hold the streams of what was promised before."""
    empty: Callable[[State], Holds] = lambda state: Holds()  # noqa: E731
    with patch.object(controller, "holds_of", empty), patch.object(harness, "holds_of", empty):
        yield
