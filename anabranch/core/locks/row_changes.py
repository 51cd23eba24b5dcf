"""Changes to rows that commute: a number is added to a row, or the row becomes the lower or the higher of both.

Such a change takes no lock. The row's new value is decided together with the commit's timestamp, from the row just
below that timestamp. This is the number that an earlier change made of the row, if no later commit may have written
it; else the client's `base`, with the proof that a lock needs. If neither is certain, the client has to revalidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from anabranch.core import work
from anabranch.core.command_events import CommandEvents, SomeEvents
from anabranch.core.decisions.turn import Turn
from anabranch.core.locks.numbers import changed, number_in
from anabranch.core.locks.recent_writes import Number
from anabranch.core.locks.table_writes import fingerprint
from anabranch.errors import InvalidArgument, NotANumber, NumberOverflow
from anabranch.protocol import limits
from anabranch.protocol.limits import LEAST_NUMBER
from anabranch.protocol.schemas import records as r

# Each change is decoded, placed twice, looked up in the recent writes, and encoded.
_ITEMS = 4

Placed = Mapping[str, list[tuple[r.SegmentRange, SomeEvents]]]  # by stream


def check_changes(command: r.OneShot) -> None:
    """Raise `InvalidArgument` for changes that are wrong whatever the rows are."""
    changes = command.changes
    limits.ROW_CHANGES.check(len(changes), "a transaction")
    rows = {(change.table, change.key) for change in changes}
    if len(rows) < len(changes):
        raise InvalidArgument("a transaction changes each row once")
    tables = {change.table for change in changes}
    if missing := sorted(tables - {locks.table for locks in command.locks}):
        raise InvalidArgument(
            f"locks name each table whose rows are changed: {missing[0]} is missing"
        )
    if not command.events:
        return
    events = CommandEvents.of(command.events)
    if tables.isdisjoint(run.stream for run in events.runs):
        return
    for event in events:
        if (event.stream, event.key) in rows:
            raise InvalidArgument(
                f"{event.stream} {event.key!r:.100} is changed and written by one transaction: do one of both"
            )


def locked_with(
    locks: tuple[r.TableLocks, ...], changes: Sequence[r.RowChange]
) -> tuple[r.TableLocks, ...]:
    """The locks of a transaction that is frozen before it is merged: a changed row counts as locked.

    The vote decides the row's number, so no other transaction may write it until the end (`docs/inside/across.md`,
    L5).
    """
    points: dict[str, set[int]] = {}
    for change in changes:
        points.setdefault(change.table, set()).add(fingerprint(change.key))
    return tuple(
        one._replace(points=tuple(sorted({*one.points, *points[one.table]})))
        if one.table in points
        else one
        for one in locks
    )


def events_of(turn: Turn, command: r.OneShot) -> CommandEvents:
    """The events of a command, and one event for each change, with the longest value. Raises: InvalidArgument."""
    check_changes(command)
    turn.charge(work.of_items(_ITEMS * len(command.changes)))
    longest = _events(command, [LEAST_NUMBER] * len(command.changes))
    if not command.events:
        return CommandEvents.of(longest)
    return CommandEvents.of(command.events).followed_by(longest)


def _events(command: r.OneShot, values: Iterable[int]) -> list[r.Event]:
    return [
        r.Event(change.table, -1, change.key, b"%d" % value, (), -1)
        for change, value in zip(command.changes, values, strict=True)
    ]


def values_of(
    turn: Turn, changes: Sequence[r.RowChange], locked: Sequence[r.TableLocks]
) -> list[int] | None:
    """The new numbers in the changed rows; None: the client has to revalidate. ``locked``: its locks; they hold.

    Raises: NotANumber, NumberOverflow.
    """
    recent = turn.recent_writes
    before: list[int | None] = []
    unsure: dict[str, set[int]] = {}
    for change in changes:
        number = recent.number((change.table, change.key))
        if number is None:
            unsure.setdefault(change.table, set()).add(fingerprint(change.key))
        before.append(number)
    for locks in locked:
        points = tuple(sorted(unsure.get(locks.table, ())))
        bases = r.TableLocks(locks.table, locks.since, locks.last, points, ())
        if points and not recent.holds(bases, turn.state.tables[locks.table].last):
            return None
    return [_changed(change, number) for change, number in zip(changes, before, strict=True)]


def _changed(change: r.RowChange, known: int | None) -> int:
    """The number in a row after a change. ``known``: the number before; None: that of the client's ``base``."""
    try:
        before = number_in(change.base) if known is None else known
        return changed(change.kind, before, change.number)
    except (NotANumber, NumberOverflow) as error:
        raise type(error)(f"{change.table} {change.key!r:.100}: {error}") from error


def with_values(command: r.OneShot, values: Iterable[int], placed: Placed) -> CommandEvents:
    """The events of `events_of`, with these values in the changed rows."""
    of = next(some.of for by_segment in placed.values() for _, some in by_segment)
    return of.with_last(_events(command, values))


def filled(command: r.OneShot, values: Iterable[int], placed: Placed) -> Placed:
    """The events of `events_of` after they were placed, with these values in the changed rows."""
    events = with_values(command, values, placed)
    return {
        stream: [(segment, SomeEvents(events, some.numbers)) for segment, some in by_segment]
        for stream, by_segment in placed.items()
    }


def keep(turn: Turn, command: r.OneShot, values: Iterable[int], timestamp: int) -> None:
    """Remember the numbers that a commit left in its rows, for the next changes."""
    for change, value in zip(command.changes, values, strict=True):
        turn.recent_writes.keep_number((change.table, change.key), Number(value, timestamp))
