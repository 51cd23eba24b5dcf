"""Planted bugs in derived tables; see `catalogue`."""

from __future__ import annotations

from typing import Any

from anabranch.client.calls import derivations as building
from anabranch.client.row_chain import Member
from anabranch.client.table_access import TableAccess
from anabranch.core import derivations as decisions
from anabranch.core.decisions.turn import Turn
from anabranch.core.derived_rows import (
    BUILDING,
    PROGRESS_KEY,
    READY,
    STATE_KEY,
    AnyFunction,
    Function,
    Totals,
    total_of,
)
from anabranch.protocol.schemas.records import Derivation
from tests.mutants.planting import instead_of, wrapping


def _unlocked(self: TableAccess, table: str, key: bytes) -> bytes | None:
    own = self._own.get(table, key)
    return self._view.get(table, key) if own is None else own.value


@instead_of(decisions, "check")
def any_writer(*_: object) -> None:
    """Writers need not run the functions of a source."""


@instead_of(decisions, "_check_begin")
def in_force_at_once(_turn: Turn, _new: Derivation) -> None:
    """A version comes into force while transactions write without it."""


@instead_of(TableAccess, "_locked")
def unlocked(self: TableAccess, table: str, key: bytes) -> bytes | None:
    """The row before, and the entry of a unique value, are read without a lock."""
    return _unlocked(self, table, key)


@wrapping(TableAccess, "_locked")
def unlocked_entries(right: Any, self: TableAccess, table: str, key: bytes) -> Any:
    """The entry of a unique value is read without a lock."""
    if self._shared.derivations.learned(table).derived is None:
        return right(self, table, key)
    return _unlocked(self, table, key)


@instead_of(TableAccess, "check_unique")
def values_occur_twice(*_: object) -> None:
    """A unique value is not looked for."""


@wrapping(TableAccess, "_find_ready")
def ready_without_a_lock(right: Any, self: TableAccess, *given: Any) -> Any:
    """A look-up does not lock which version is ready."""
    found = right(self, *given)
    self._locks._points.get(found.table, set()).discard(STATE_KEY)
    return found


@instead_of(TableAccess, "_entries")
def all_entries_go(
    self: TableAccess, function: Function, key: bytes, before: bytes | None, after: bytes | None
) -> dict[bytes, bytes | None]:
    """An entry that names another row is deleted."""
    former, now = function.entries(key, before), function.entries(key, after)
    come = {entry: now[entry] for entry in now.keys() - former.keys()}
    if function.unique:
        self.check_unique(function, come, key)
    return dict.fromkeys(former.keys() - now.keys()) | come


@instead_of(TableAccess, "added")
def unlocked_totals(self: TableAccess, function: Totals, changes: Any) -> dict[bytes, Any]:
    """A total that changes is read without a lock."""
    table = function.table
    return {
        entry: function.added(entry, _unlocked(self, table, entry), change)
        for entry, change in changes.items()
    }


@wrapping(TableAccess, "_state")
def states_unlocked(right: Any, self: TableAccess, table: str) -> Any:
    """A writer does not lock the state of totals."""
    found = right(self, table)
    self._locks._points.get(table, set()).discard(STATE_KEY)
    return found


@wrapping(TableAccess, "_was_added")
def progress_unlocked(right: Any, self: TableAccess, function: Totals, *given: Any) -> Any:
    """A writer of a row that totals don't have yet does not lock the progress of the build."""
    found = right(self, function, *given)
    self._locks._points.get(function.table, set()).discard(PROGRESS_KEY)
    return found


@instead_of(TableAccess, "_was_added")
def always_added(*_: object) -> bool:
    """The row before is taken away from totals that don't have it yet."""
    return True


@wrapping(TableAccess, "_was_added")
def sent_counts(right: Any, self: TableAccess, function: Totals, key: bytes, since: int) -> Any:
    """While totals are built, the row of a commit under way counts as one that they have."""
    member: Member | None = self._member
    if member is not None and member.newest(function.of.source, key) is not None:
        return True
    return right(self, function, key, since)


@instead_of(TableAccess, "unchanged")
def added_twice(self: TableAccess, table: str, key: bytes, _since: int) -> bytes | None:
    """A build adds rows that writers have added since it began."""
    return self._locked(table, key)


@instead_of(building, "_begin")
def begins_with_rows(txn: Any, made: AnyFunction) -> bytes | None:
    """A build of totals begins with a table that has some."""
    state: bytes | None = txn.get(made.table, STATE_KEY)
    if state is None:
        state = BUILDING + b"0123456789abcdef"
        txn.write_entries(made.of, ((STATE_KEY, state),))
    return None if state == READY else state


@wrapping(Totals, "added")
def empty_groups_stay(right: Any, self: Totals, entry: bytes, row: Any, change: Any) -> Any:
    """The total of a group without rows stays."""
    found = right(self, entry, row, change)
    return (
        b"%d %d" % tuple(map(sum, zip(total_of(row), change, strict=True)))
        if found is None
        else found
    )
