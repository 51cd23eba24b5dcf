"""Planted bugs in derived tables that workers write; see `catalogue`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabranch.core.decisions import ownership
from anabranch.errors import InvalidArgument
from anabranch.processing import derived
from anabranch.processing.commits import FirstEvents
from anabranch.processing.derived import DerivedTable
from anabranch.protocol.schemas.records import TaskPosition
from anabranch.reading.task_reader import TaskReader
from anabranch.tables import follow
from anabranch.tables import store as stores
from anabranch.tables.follow import Follower
from anabranch.tables.store import Rows
from anabranch.types import TaskOwnership
from tests.mutants.planting import instead_of, wrapping


@instead_of(follow, "derived_through")
def any_task_counts(progress: Mapping[bytes, int]) -> int:
    """A derived table counts as complete when one worker has come so far."""
    return max(progress.values(), default=0)


@wrapping(TaskReader, "through")
def left_counts(right: Any, self: TaskReader, stream: str, _left: object = ()) -> int:
    """Input that is left for the next commit counts as derived."""
    found: int = right(self, stream)
    return found


@wrapping(Rows, "add_derived")
def own_times(
    right: Any, self: Rows, number: int, txn_id: bytes, at: int, events: Any, *more: Any
) -> Any:
    """Entries have the commit timestamps of their worker."""
    with patch_version(at, txn_id):
        return right(self, number, txn_id, at, events, *more)


@wrapping(Follower, "observe")
def source_is_not_asked(
    right: Any, self: Follower, timestamp: int, last: Mapping[str, int]
) -> bool:
    """The newest commit of the derived table proves that it is complete, whatever its source has."""
    found: bool = right(self, timestamp, last)
    for table in self._sources:
        if self.last[table] >= last.get(table, 1 << 64):
            self.complete[table] = max(self.complete[table], timestamp)
    return found


@instead_of(ownership, "is_asynchronous")
def derived_twice(*_: object) -> bool:
    """A processor that derives a table can be reset."""
    return False


@instead_of(DerivedTable, "check_created")
def over_old_rows(*_: object) -> None:
    """A new processor derives into a table that has rows."""


@instead_of(derived, "_unpacked")
def row_before_is_unknown(_: bytes) -> frozenset[bytes]:
    """Entries of the row before stay."""
    return frozenset()


@wrapping(DerivedTable, "_base")
def any_base(right: Any, self: DerivedTable, client: Any) -> Any:
    """A processor begins with the base that its source has by now."""
    try:
        return right(self, client)
    except InvalidArgument:
        return client.describe(self.of.source).base


@wrapping(FirstEvents, "_commit")
def positions_at_once(
    right: Any, self: FirstEvents, ownership: TaskOwnership, batch: Any, of: Any, _: Any
) -> Any:
    """The first commit of a base's rows gives the tasks their positions."""
    begin = (TaskPosition(n, at.record, at.timestamp) for n, at in enumerate(ownership.inputs))
    return right(self, ownership, batch, of, tuple(begin))


@wrapping(Follower, "_begin")
def before_the_base(right: Any, self: Follower, deadline: float) -> Any:
    """A table that begins with a base can be read as of earlier times."""
    self._floors = {}
    return right(self, deadline)


def patch_version(at: int, txn_id: bytes) -> Any:
    """Let each event name this commit."""
    return instead_of(stores, "unpack_version")(lambda _: (at, txn_id))()
