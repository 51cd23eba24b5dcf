"""Planted bugs in the library of readers and writers; see `catalogue`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from anabranch.client import options, readers, snapshot
from anabranch.client.snapshot import SnapshotPlan
from anabranch.core.order import StreamOrder

Planted = AbstractContextManager[object]
EARLY = 300_000 << 12  # hybrid time, 0.3 s


def stale_cut() -> Planted:
    """A snapshot has the offsets of 0.3 s before its timestamp."""
    real = snapshot.take

    def take(opts: Any, admin: Any, streams: Any, timestamp: int, deadline: float) -> SnapshotPlan:
        plan = real(opts, admin, streams, timestamp - EARLY, deadline)
        return SnapshotPlan(timestamp, plan.cuts)

    return patch.object(readers, "take", take)


def uneven_cut() -> Planted:
    """Of a snapshot's streams the last one is cut later: to the end that it has by then."""
    real = snapshot._cut

    def cut(search: Any, admin: Any, stream: str, timestamp: int, deadline: float) -> Any:
        found = search.as_of("end")
        later = found.record.timestamp if found is not None else timestamp
        return real(search, admin, stream, max(timestamp, later), deadline)

    return patch.object(snapshot, "_cut", cut)


def no_waiting() -> Planted:
    """Readers take a segment before its predecessors are read."""
    return patch.object(StreamOrder, "readable", lambda *_: True)


def read_uncommitted() -> Planted:
    """Readers see what native transactions appended that were aborted, or are not ended."""
    return patch.dict(options._READER, {"isolation.level": "read_uncommitted"})
