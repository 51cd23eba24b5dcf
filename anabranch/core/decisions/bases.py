"""Decisions on bases. A base is all rows of a table as of a time, in a companion stream; new replicas start there.

A base is published in three steps: the table's row logs the intent, `base_published` logs the base, and then the
shell truncates the versions that the base replaces. A new leader continues at the next step.
"""

from __future__ import annotations

from anabranch.core import rows as k
from anabranch.core.decisions.scopes import active_stream, consuming, oldest_snapshot
from anabranch.core.decisions.streams import begin_change, change_of, idle_row, stream_changed
from anabranch.core.decisions.times import admit_change
from anabranch.core.decisions.turn import Turn
from anabranch.core.round import ReplyTo
from anabranch.core.stream_settings import BASE
from anabranch.errors import IllegalState, InvalidArgument, NotReady
from anabranch.protocol import limits
from anabranch.protocol.hybrid_time import from_s, to_s, to_text
from anabranch.protocol.ids import txn_text
from anabranch.protocol.legal_names import base_stream, split_stream
from anabranch.protocol.schemas import records as r


def publish_base(turn: Turn, command: r.PublishBase, to: ReplyTo | None) -> None:
    """Log the intent to publish a base of a table. Repeating it is harmless."""
    row = idle_row(turn, command.table, to)
    if row is None:
        return
    if command.table not in turn.state.tables:
        raise InvalidArgument(f"{command.table} is no table")
    companion = active_stream(turn, base_stream(command.table))
    if companion.settings.get(BASE) != command.table:
        raise IllegalState(f"{companion.stream} is a stream of its own, and no table's companion")
    known = turn.state.bases.get(command.table)
    repeated = known is not None and (known.timestamp, known.txn_id) == (
        command.timestamp,
        command.txn_id,
    )
    if not repeated:
        _check(turn, command, row, known)
    admit_change(turn, k.stream_key(row.stream), to)
    if not repeated:
        turn.audit_later(command, row.stream, f"{command.table} as of {to_text(command.timestamp)}")
    begin_change(turn, row, change_of(row, command.timestamp, command.txn_id), to)


def _check(turn: Turn, command: r.PublishBase, row: r.StreamRow, known: r.BaseRow | None) -> None:
    """Check that the transaction is a base, and that nothing needs the events that the base replaces.

    The rows of the base are not checked: only lanes that may operate the table can write to the companion stream.

    Raises: IllegalState, InvalidArgument, NotReady.
    """
    table, at, txn_id = command.table, command.timestamp, command.txn_id
    companion = base_stream(table)
    if known is not None and at <= known.timestamp:
        raise IllegalState(f"{table} begins at a later base, of {to_text(known.timestamp)}")
    if at < 1 or at != from_s(to_s(at)):
        raise InvalidArgument(f"timestamp {at}: a base is as of a whole second")
    oldest = oldest_snapshot(turn, row)
    if at > oldest:
        raise NotReady(
            f"{table} has to be readable from {to_text(oldest)} on, before {to_text(at)}: ask later"
        )
    if lagging := _lagging(turn, table, at):
        raise IllegalState(
            f"what was committed to {table} up to {to_text(at)} would be lost to processors "
            f"{limits.cut(', '.join(lagging))}: let their workers come so far, or reset or delete them "
            "(`anabranch processor reset`, `delete`)"
        )
    txn, series = turn.state.txn_row(txn_id), turn.state.series(row_scope(table), companion)
    into = set(turn.state.participants(txn_id))  # empty is refused: any lane may commit no events
    if txn is None or txn.state != "COMMITTED" or into != {companion}:
        raise IllegalState(f"{txn_text(txn_id)} is no base: commit one to {companion} alone")
    if series is None or (series.number, series.txn_id) != (to_s(at), txn_id):
        raise IllegalState(
            f"{txn_text(txn_id)} is not number {to_s(at)}, the last one, of the series {companion!r}: make "
            "another base"
        )


def _lagging(turn: Turn, table: str, at: int) -> list[str]:
    """The processors that have a task which has not consumed all commits up to a time: texts, with their lanes."""
    until = min(at, turn.state.tables[table].last)
    return [
        f"{name} of lane {row.owner}"
        for name, row in consuming(turn, table).items()
        for number, one in enumerate(row.inputs)
        if one.stream == table
        and any(_consumed_through(turn, row, t, number) < until for t in range(row.tasks))
    ]


def _consumed_through(turn: Turn, row: r.ProcessorRow, task: int, number: int) -> int:
    """The time up to which a task has consumed all of an input."""
    known = turn.state.tasks.get((row.processor, task))
    for position in known.positions if known is not None else ():
        if position.input == number:
            # A position with a segment is in the middle of that commit.
            return position.timestamp - (position.segment >= 0)
    return row.inputs[number].timestamp


def row_scope(stream: str) -> str:
    return split_stream(stream)[0]


def base_published(turn: Turn, stream: str, position: int, last: int) -> None:
    """Log the base that the table's row asks for: new replicas start there, and older versions may be deleted.

    ``position``: offset in the history after all commits that the base has. ``last``: timestamp of the newest of
    these; 0 if the history does not have it any more.
    """
    row = turn.state.streams[stream]
    change, before = row.change, turn.state.bases.get(stream)
    if change is None or change.base is None:
        return
    txn = turn.state.txn_row(change.base)
    if txn is None:
        stream_changed(
            turn,
            stream,
            IllegalState("the outcome of the base is not kept any more: make another one"),
        )
        return
    last = last or (before.last if before is not None else 0)
    base = r.BaseRow(
        timestamp=change.until,
        txn_id=txn.txn_id,
        commit_timestamp=txn.commit_timestamp,
        rows=txn.committed,
        position=position,
        last=last,
    )
    turn.put(k.base_key(stream), base)
    turn.audited(stream, done=True)


def is_published(base: r.BaseRow | None, change: r.StreamChange) -> bool:
    """Whether the shell may delete events for a change: the change publishes no base, or its base is logged."""
    wanted = change.until, change.base
    return change.base is None or (base is not None and (base.timestamp, base.txn_id) == wanted)
