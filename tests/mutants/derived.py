"""Planted bugs in derived tables; see `catalogue`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any
from unittest.mock import patch

from anabranch.client.calls import derivations as building
from anabranch.client.row_chain import Member
from anabranch.client.table_access import TableAccess
from anabranch.client.table_transaction import TableTransaction
from anabranch.core import derivations as decisions
from anabranch.core.decisions import streams
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
from anabranch.core.journal_index import JournalIndex
from anabranch.core.state import State
from anabranch.core.stream_settings import DERIVE, in_force, versions_of
from anabranch.errors import DerivationMissing
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.records import Derivation
from tests.mutants.planting import instead_of, wrapping


def _unlocked(self: TableAccess, table: str, key: bytes) -> bytes | None:
    own = self._own.get(table, key)
    return self._view.get(table, key) if own is None else own.value


@instead_of(decisions, "check")
def any_writer(*_: object) -> None:
    """Writers need not run the functions of a source."""


@instead_of(decisions, "check")
def any_writer_of_rows(state: State, stream: str, ran: Collection[Derivation]) -> None:
    """Writers need not run the functions of a source, but those of what they write to derived tables."""
    for due in state.derivations.get(stream, ()):
        if due.source != stream and due not in ran:
            raise DerivationMissing(stream)


@instead_of(decisions, "check")
def any_version(state: State, stream: str, ran: Collection[Derivation]) -> None:
    """A writer of a version that has ended may write its entries."""
    for due in state.derivations.get(stream, ()):
        if due not in ran:
            raise DerivationMissing(stream)


@wrapping(JournalIndex, "add")
def plain_writes_are_taken(
    right: Any, self: JournalIndex, state: State, *more: Any, **named: Any
) -> Any:
    """Plain writes to a source are committed."""
    with patch.object(state, "derivations", {}):
        return right(self, state, *more, **named)


@instead_of(decisions, "check_changes")
def changes_are_taken(*_: object) -> None:
    """A source takes additions."""


@wrapping(streams, "resolved")
def a_version_is_set(right: Any, row: r.StreamRow, command: r.AlterStream) -> dict[str, str]:
    """A command that takes a version away leaves the next one alone, whichever there are by then."""
    found: dict[str, str] = right(row, command)
    for setting in in_force(command.settings):
        text = command.settings[setting]
        there = versions_of(row.settings, setting.removeprefix(DERIVE))
        higher = [version for version in there if version > int(text[1:])]
        if text[0] == "-" and higher:
            found[setting] = str(min(higher))
    return found


@wrapping(building._Piece, "_put")
def builds_without_locks(right: Any, self: Any, txn: TableTransaction, *more: Any) -> None:
    """A build does not lock the rows whose entries it writes."""
    get = txn.get
    with patch.object(txn, "get", lambda *of: get(*of, lock=False)):
        right(self, txn, *more)


@wrapping(building, "_switch")
def nothing_is_retired(
    right: Any, txn: TableTransaction, made: Function, _: Iterable[Derivation], state: bytes
) -> None:
    """A switch leaves the former version ready."""
    right(txn, made, (), state)


@instead_of(building, "_begin")
def ready_at_once(txn: TableTransaction, made: Function) -> bytes | None:
    """A version is ready when its build begins."""
    state = txn.get(made.table, STATE_KEY)
    if state is None:
        txn.write_entries(made.of, ((STATE_KEY, READY),))
        return READY
    return None


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
