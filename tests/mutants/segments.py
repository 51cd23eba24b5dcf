"""Planted bugs in exclusive streams: who may write to a segment, and who waits; see `catalogue`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from anabranch.core.locks import segment_locks, wait_die
from anabranch.core.locks.wait_die import Fate, Met, Spans, meets
from anabranch.core.state import State
from anabranch.protocol.schemas.records import ParticipantRow
from tests.mutants.planting import instead_of, wrapping


@instead_of(segment_locks, "meet")
def two_holders(
    txn_id: bytes,
    spans: Spans,
    holders: Mapping[bytes, Spans],
    ahead: Iterable[tuple[bytes, Spans]],
) -> Met:
    """A locked segment is locked for another transaction, too."""
    return wait_die.meet(txn_id, spans, {}, ahead)


@instead_of(segment_locks, "meet")
def younger_waits(
    txn_id: bytes,
    spans: Spans,
    holders: Mapping[bytes, Spans],
    ahead: Iterable[tuple[bytes, Spans]],
) -> Met:
    """A younger transaction waits for an older one, as an older one does."""
    met = wait_die.meet(txn_id, spans, holders, ahead)
    return met._replace(fate=Fate.WAIT) if met.fate is Fate.DIE else met


@instead_of(segment_locks, "meet")
def waiting_ones_unseen(
    txn_id: bytes,
    spans: Spans,
    holders: Mapping[bytes, Spans],
    ahead: Iterable[tuple[bytes, Spans]],
) -> Met:
    """A free segment is locked at once, although another transaction waits for it and more."""
    free = not any(other != txn_id and meets(spans, its) for other, its in holders.items())
    return Met(Fate.LOCK) if free else wait_die.meet(txn_id, spans, holders, ahead)


@wrapping(State, "rederive")
def locks_lost(real: Any, state: State) -> None:
    """A new leader does not know which segments are locked."""
    real(state)
    state.locked.clear()
    state.held.clear()


@wrapping(State, "_lock")
def locks_outlast(
    real: Any, state: State, txn_id: bytes, stream: str, row: ParticipantRow | None
) -> None:
    """A segment stays locked after its transaction."""
    if row is not None:
        real(state, txn_id, stream, row)
