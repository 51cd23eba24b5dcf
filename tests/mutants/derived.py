"""Planted bugs in derived tables; see `catalogue`."""

from __future__ import annotations

from typing import Any

from anabranch.client.table_access import TableAccess
from anabranch.core import derivations as decisions
from anabranch.core.decisions.turn import Turn
from anabranch.core.derived_rows import STATE_KEY, Function
from anabranch.core.stream_settings import derived_table
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


@wrapping(TableAccess, "_ready")
def ready_without_a_lock(right: Any, self: TableAccess, *given: Any) -> Any:
    """A look-up does not lock which version is ready."""
    found = right(self, *given)
    self._locks._points.get(derived_table(found.of), set()).discard(STATE_KEY)
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
