"""What a commit claims, and what one is told that comes too late: numbers of a series, and names.

A *series* is numbered commits of a scope: a commit takes its number if that is above all before. It takes it when
it is decided, and gives it back if it is aborted after all. Until it is merged no other commit of its series is
decided, so a series is committed in the order of its numbers. Where a series stands is never forgotten.

A commit that gives way to an earlier one aborts its transaction. What it gave way to is kept as long as that
transaction's own outcome, so that the command is answered the same when it comes again, wherever the series or the
name has gone since.
"""

from __future__ import annotations

from anabranch.core import rows as k
from anabranch.core.ids import NO_TXN
from anabranch.core.turn import Turn
from anabranch.errors import AlreadyCommitted, NotReady, check
from anabranch.schemas.records import Outcome, PendingCommitRow, SeriesRow, YieldedRow

_NONE = -1  # no number, as rows say it


def overtaken(turn: Turn, scope: str, series: str, number: int) -> YieldedRow | None:
    """What a commit of this number has to give way to. `NotReady` while one of the series is being committed."""
    row = turn.state.series(scope, series)
    if row is None:
        return None
    if row.txn_id in turn.state.open:
        raise NotReady(
            f"number {row.number} of the series {series!r} is being committed: ask again for the outcome"
        )
    if row.number < number:
        return None
    return YieldedRow(series, number, row.number, row.txn_id)


def take_number(turn: Turn, scope: str, series: str, number: int, txn_id: bytes) -> None:
    """Make this the series' highest number: its commit is decided."""
    before = turn.state.series(scope, series)
    if before is None:
        row = SeriesRow(number, txn_id, _NONE, NO_TXN)
    else:
        check(before.number < number, f"a series goes from {before.number} to {number}")
        row = SeriesRow(number, txn_id, before.number, before.txn_id)
    turn.put(k.series_key(scope, series), row)


def give_back(turn: Turn, scope: str, pending: PendingCommitRow | None) -> None:
    """A commit is aborted: if it was decided, its series stands where it stood before."""
    if pending is None or not pending.decided or pending.number is None or pending.name is None:
        return
    row = turn.state.series(scope, pending.name)
    check(row is not None and row.number == pending.number, "a decided commit lost its number")
    if row is not None:
        before = SeriesRow(row.earlier_number, row.earlier_txn_id, _NONE, NO_TXN)
        gone = row.earlier_number == _NONE
        turn.put(k.series_key(scope, pending.name), None if gone else before)


def reason(yielded: YieldedRow) -> str:
    """Why a transaction is aborted whose commit gave way."""
    by = yielded.txn_id.hex()
    if yielded.number is None:
        return f"the name {yielded.name!r} was committed before by {by}"
    if yielded.number == yielded.highest:
        return (
            f"number {yielded.number} of the series {yielded.name!r} was committed before by {by}"
        )
    return (
        f"the series {yielded.name!r} was at number {yielded.highest} before, committed by {by}: "
        f"{yielded.number} comes too late"
    )


def answer(turn: Turn, yielded: YieldedRow) -> Outcome | None:
    """What a commit is told that gave way: the earlier transaction's outcome.

    `AlreadyCommitted` where that is another number's, or not known any more; None if it was a name's.
    """
    if yielded.number in (None, yielded.highest):
        row = turn.state.txn_row(yielded.txn_id)
        if row is not None:
            return turn.outcome(row)
        if yielded.number is None:
            return None
    raise AlreadyCommitted(f"{reason(yielded)}; this transaction is aborted")
