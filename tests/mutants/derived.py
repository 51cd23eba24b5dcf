"""Planted bugs in derived tables; see `catalogue`."""

from __future__ import annotations

from typing import Any

from anabranch.client.table_access import TableAccess
from anabranch.core import derivations as decisions
from anabranch.core.decisions.turn import Turn
from anabranch.core.derived_rows import READY, STATE_KEY, Function
from anabranch.core.stream_settings import Derived, derived_table
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


@instead_of(TableAccess, "_ready")
def ready_without_a_lock(self: TableAccess, name: str, _source: str | None) -> Derived:
    """A look-up does not lock which version is ready."""
    known = [self._shared.derivations.learned(table).derived for table in self._replica.tables]
    return next(
        each
        for each in known
        if each is not None
        and each.of.name == name
        and self.get(derived_table(each.of), STATE_KEY, lock=False) == READY
    )


@instead_of(TableAccess, "_entries")
def all_entries_go(
    _: TableAccess, function: Function, key: bytes, before: bytes | None, after: bytes | None
) -> dict[bytes, bytes | None]:
    """An entry that names another row is deleted."""
    former, now = function.entries(key, before), function.entries(key, after)
    return dict.fromkeys(former.keys() - now.keys()) | now
