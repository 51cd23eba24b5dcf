"""Decisions on derivations: who may write to their tables, and when a version comes into force
(docs/inside/decisions/0057-derived-tables.md).

The leader does not run the function. A writer says which versions it ran, and each version in
force has to be among them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from anabranch import errors
from anabranch.core import rows as k
from anabranch.core import work
from anabranch.core.decisions.scopes import active_stream
from anabranch.core.decisions.turn import Turn
from anabranch.core.memory import way_to_end
from anabranch.core.state import State
from anabranch.core.stream_settings import (
    DERIVE,
    check_derivation,
    derived_from,
    derived_table,
    in_force,
    is_by_worker,
    versions_of,
    whole_version,
)
from anabranch.protocol.ids import txn_text
from anabranch.protocol.schemas import records as r

LEVEL = 3  # the feature level of derivations


def check(state: State, stream: str, ran: Collection[r.Derivation]) -> None:
    """Raise `DerivationMissing` unless a writer that ran these versions may write to the stream."""
    for due in state.derivations.get(stream, ()):
        if due not in state.derivations.get(due.source, ()) and not is_asynchronous(state, stream):
            raise errors.DerivationMissing(
                f"{stream} has the rows of {text_of(due)}, which is not in force"
            )
        if due not in ran:
            what = "is the source" if due.source == stream else "has the rows"
            raise errors.DerivationMissing(
                f"{stream} {what} of {text_of(due)}: write {due.source} by a client that has the function of this "
                "version (`client.derive`), in a transaction of a replica; plain writes and other clients can't"
            )


def is_asynchronous(state: State, table: str) -> bool:
    """Whether the workers of a processor write the rows of a derived table."""
    row = state.streams.get(table)
    return row is not None and is_by_worker(row.settings)


def check_changes(state: State, changes: Iterable[r.RowChange]) -> None:
    """Raise `DerivationMissing` for `add`, `min` and `max`: their sender does not know the row."""
    for change in changes:
        if change.table in state.derivations:
            raise errors.DerivationMissing(
                f"{change.table} is the source of a derivation, or derived: `put` the row; `add`, `min` and `max` "
                "don't know it"
            )


def resolved(row: r.StreamRow, command: r.AlterStream) -> dict[str, str]:
    """The settings of a stream after a command, in which ``+2`` or ``-1`` adds a version or takes it away.

    A command names one version. So a command that is late, or sent twice, changes no other version.

    Raises: UnsupportedSetting, InvalidArgument.
    """
    settings = {n: v for n, v in row.settings.items() if n not in command.unset}
    settings |= command.settings
    changes, unset = in_force(command.settings), in_force(dict.fromkeys(command.unset, ""))
    others = len(command.settings) > 1 or command.unset or command.description is not None
    if unset or (changes and others):
        raise errors.UnsupportedSetting(
            f"{row.stream}: a version of a derivation comes or goes by a command of its own, as +2 or -1"
        )
    for setting in changes:
        check_derivation(setting.removeprefix(DERIVE))
        text = command.settings[setting]
        sign = text[:1]
        if sign not in ("+", "-"):
            raise errors.InvalidArgument(
                f"{setting}={text}: +2 adds version 2, -1 takes version 1 away"
            )
        version = whole_version(setting, text[1:])
        now = set(versions_of(row.settings, setting.removeprefix(DERIVE)))
        now = now | {version} if sign == "+" else now - {version}
        del settings[setting]
        if now:
            settings[setting] = ",".join(map(str, sorted(now)))
    return settings


def check_in_force(turn: Turn, row: r.StreamRow, settings: dict[str, str]) -> None:
    """Check new settings of a source. A version comes into force when no open transaction writes there without it.

    Raises: InvalidArgument, IllegalState, NotReady, FeatureNotEnabled; UnknownStream, StreamLost.
    """
    for name in sorted(
        each.removeprefix(DERIVE) for each in in_force(row.settings) | in_force(settings)
    ):
        before, after = versions_of(row.settings, name), versions_of(settings, name)
        added, gone = set(after) - set(before), set(before) - set(after)
        if len(added) + len(gone) > 1 or (added and before and max(added) < max(before)):
            raise errors.IllegalState(
                f"{row.stream} has versions {list(before)} of derivation {name!r} in force, so next can't be "
                f"{list(after)}: add one higher version, or take one away"
            )
        for version in added:
            turn.state.check_enabled(LEVEL, "a derivation")
            _check_begin(turn, r.Derivation(row.stream, name, version))


def _check_begin(turn: Turn, new: r.Derivation) -> None:
    source, table = new.source, derived_table(new)
    found = derived_from(active_stream(turn, table).settings)
    if found is None or found.of != new:
        raise errors.InvalidArgument(
            f"{table} is no table of {text_of(new)}: `client.derive` makes it"
        )
    turn.charge(work.of_items(len(turn.state.open)))
    for txn in turn.state.open.values():
        if source in txn.participants:
            txn_id = txn.row.txn_id
            raise errors.NotReady(
                f"transaction {txn_text(txn_id)} writes to {source} without {text_of(new)}: wait for it, or end it "
                f"(`{way_to_end(turn.state, txn_id)}`)"
            )
    if any(stream == source for stream, _ in turn.index.plain_waiting(turn.state)):
        raise errors.NotReady(f"plain writes to {source} are not committed yet: ask again")


def pass_plain_writes(turn: Turn, stream: str) -> None:
    """Pass over the plain writes that were rejected while derivations were in force.

    Otherwise a successor that reads the journal again would commit them.
    """
    for (name, partition), end in list(turn.index.positions.items()):
        if name == stream:
            refused = turn.state.plain_refused.get((name, partition), 0)
            row = r.PlainRow(name, partition, end, refused)
            turn.put(k.plain_key(name, partition), row)


def source_of(state: State, table: str) -> str:
    """The source whose derivation in force has its rows in a table; empty for other streams."""
    for due in state.derivations.get(table, ()):
        if due.source != table and due in state.derivations.get(due.source, ()):
            return due.source
    return ""


def text_of(derivation: r.Derivation) -> str:
    """A derivation, for a message."""
    return f"derivation {derivation.name!r} of {derivation.source}, version {derivation.version}"
