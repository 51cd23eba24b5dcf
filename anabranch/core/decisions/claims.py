"""The claims of commits (names, and numbers of a series), and the answer to a claim that comes too late.

A commit in a *series* takes a number that is higher than all earlier numbers. The number is taken when the commit
is decided, and given back if the transaction is aborted after all. Until it is merged, no other commit of the
series is decided, so a series commits in the order of its numbers. A series is never forgotten.

If a claim comes too late, its commit *gives way* to the earlier commit: the transaction is aborted, and the answer
is the outcome of the earlier one. The row of the earlier claim is kept for as long as the outcome of the aborted
transaction, so that a repeated command gets the same answer whatever happens to the name.

A name or a series belongs to the lane that took it. Both are unique in the whole scope, so a lane may take a free
name or series only with the right to write to the whole scope. For the series of a table's companion, the lane
needs the right to operate the table instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from anabranch import errors
from anabranch.core import rows as k
from anabranch.core import work
from anabranch.core.authorize import Right, check_right, of_scope, rights_of, table_of
from anabranch.core.decisions import quotas
from anabranch.core.decisions.prepared import held
from anabranch.core.decisions.scopes import check_served
from anabranch.core.decisions.times import admit_change, is_repeated
from anabranch.core.decisions.turn import Turn
from anabranch.core.round import ReplyTo
from anabranch.core.state import OpenTxn
from anabranch.errors import check
from anabranch.protocol import limits
from anabranch.protocol.hybrid_time import to_ms
from anabranch.protocol.ids import NO_TXN, made_ms_of, txn_text
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE, check_name
from anabranch.protocol.schemas import records as r

_NONE = -1  # in rows: no number
MAX_JUMP = 1 << 32
MAX_RUNS = 64  # runs of consecutive numbers that the row of a series lists


class Claimant(Protocol):
    """A transaction that claims a number: its row, or its commit that is being decided."""

    @property
    def txn_id(self) -> bytes: ...

    @property
    def scope(self) -> str: ...

    @property
    def owner(self) -> str: ...


def check_jump(turn: Turn, txn: Claimant, series: str | None, number: int | None) -> None:
    """Check that the transaction may claim this number at all.

    A number far beyond the series is refused, because the numbers in between could never commit.

    Raises: InvalidArgument (also at the lane's quota of series), NameTaken (another lane's series), NotAuthorized.
    """
    if series is None or number is None:
        return
    row = _series_of(turn, txn, series)
    if row is None:
        quotas.check_series(turn, txn.owner)
    at = 0 if row is None else row.number
    if number - max(at, 0) > MAX_JUMP:
        raise errors.InvalidArgument(
            f"number {number} is more than {MAX_JUMP} beyond the series {series!r}, which is at {at}: "
            "give a nearer one, or let an operator move the series (`anabranch series set`)"
        )


def check_free(turn: Turn, lane: str, scope: str, name: str) -> None:
    """`NotAuthorized` unless a lane may take a free name of a scope, or begin a series of that name."""
    if table := table_of(turn.state, name):
        check_right(turn.state, lane, Right.OPERATE, table)
        return
    try:
        check_right(turn.state, lane, Right.WRITE, of_scope(scope))
    except errors.NotAuthorized as error:
        raise errors.NotAuthorized(
            f"{error}. A name or a series is the whole scope's; an operator gives lane {lane!r} a series by "
            f"`anabranch series set {scope} {name!r} -1 --owner {lane}`"
        ) from error


def taken(scope: str, name: str) -> errors.NameTaken:
    return errors.NameTaken(
        f"another lane has the name {name!r} in scope {scope!r}: choose another one. Who may operate the scope "
        "sees its transaction (`anabranch txn list --finished`) and ends an open one (`anabranch txn abort`); the "
        "name of a committed one is free when its outcome is forgotten"
    )


def list_series(turn: Turn, command: r.ListSeries, to: ReplyTo | None) -> None:
    """List one series, or the series of a scope that the lane may see, in falling order of names.

    The number of series in one answer is bounded.
    """
    check_served(turn, command.scope)
    rights = rights_of(turn.state, turn.lane, of_scope(command.scope))
    all_of_them = bool(rights & (Right.OPERATE | Right.SERIES))
    until = b"\xff" if command.before is None else command.before.encode()
    if command.series is not None:
        one = turn.state.series(command.scope, command.series)
        if one is not None and not all_of_them and one.owner not in ("", turn.lane):
            one = None
        below = iter(() if one is None else ((command.series.encode(), one),))
    elif all_of_them:
        below = turn.state.rows_below(k.series_key(command.scope, ""), until)
    else:
        below = turn.state.series_below(turn.lane, command.scope, until)
    found: list[r.SeriesInfo] = []
    for name, row in below:
        turn.charge(work.LOOK)
        if len(found) == limits.LIST_ROWS.value:
            turn.reply(to, r.SeriesList(tuple(found), True))
            return
        found.append(_info(turn, command.scope, name.decode(), row))
    turn.reply(to, r.SeriesList(tuple(found), False))


def _info(turn: Turn, scope: str, series: str, row: r.SeriesRow) -> r.SeriesInfo:
    taken_ms = made_ms_of(row.txn_id)
    if row.txn_id == NO_TXN:
        change = turn.state.last_change(k.series_key(scope, series))
        taken_ms = 0 if change is None else to_ms(change.timestamp)
    return r.SeriesInfo(series, row.number, row.txn_id, row.runs, row.owner, taken_ms)


def _answer(turn: Turn, scope: str, series: str, to: ReplyTo | None) -> None:
    row = turn.state.series(scope, series)
    turn.reply(to, r.SeriesList(() if row is None else (_info(turn, scope, series, row),), False))


def set_series(turn: Turn, command: r.SetSeries, to: ReplyTo | None) -> None:
    """Set a series to a number, or give it to a lane, if it is still at the number that the operator saw."""
    check_served(turn, command.scope)
    check_name(command.series)
    if not _NONE <= command.number < 1 << 63:
        raise errors.InvalidArgument(f"number {command.number}: -1 to 2^63 - 1 are allowed")
    row = turn.state.series(command.scope, command.series)
    thing = k.series_key(command.scope, command.series)
    if is_repeated(turn, thing, to):  # made before; commits may have moved the series since
        _answer(turn, command.scope, command.series, to)
        return
    if command.owner not in (None, "", OPEN_LANE, ADMIN_LANE, *turn.state.lanes):
        raise errors.UnknownLane(
            f"there is no lane {command.owner!r}: make it (`anabranch lane add`)"
        )
    if row is not None and row.txn_id in turn.state.prepared:
        raise held(row.txn_id, f"the series {command.series!r}")
    if row is not None and row.txn_id in turn.state.open:
        raise errors.NotReady(f"number {row.number} of it is being committed: ask again")
    at = row.number if row is not None and row.number != _NONE else None
    wanted = command.number if command.number != _NONE else None
    if at not in (wanted, command.expected):
        raise errors.IllegalState(
            f"the series {command.series!r} is not at the number that you saw: list it again "
            "(`anabranch series list`)"
        )
    admit_change(turn, thing, to)
    before = "" if row is None else row.owner
    owner = before if command.owner is None else command.owner
    if (at, before) != (wanted, owner):
        runs = _up_to(row.runs, command.number) if row is not None else ()
        if row is not None and at == wanted:
            row = replace(row, owner=owner)
        elif wanted is None:  # the series belongs to the lane, and has no number yet
            row = r.SeriesRow(_NONE, NO_TXN, _NONE, NO_TXN, (), owner) if command.owner else None
        else:  # a number set by an operator counts as committed
            runs = runs if runs and runs[-1] == wanted else _more(runs, wanted)
            row = r.SeriesRow(wanted, NO_TXN, _NONE, NO_TXN, runs, owner)
        turn.put(thing, row)
        what = f"{command.scope} {command.series!r}: {at} becomes {wanted}"
        turn.audit(command, what if owner == before else f"{what}, of lane {owner or 'none'}")
    _answer(turn, command.scope, command.series, to)


def overtaken(turn: Turn, txn: Claimant, series: str, number: int) -> r.YieldedRow | None:
    """The claim to which a commit of this number gives way, or None.

    Raises: NotReady while a number is being committed, ReservedByPrepared while one is prepared; NameTaken and
    NotAuthorized as `check_jump`.
    """
    row = _series_of(turn, txn, series)
    if row is None:
        return None
    if row.txn_id in turn.state.prepared:
        raise held(row.txn_id, f"number {row.number} of the series {series!r}")
    if row.txn_id in turn.state.open:
        raise errors.NotReady(
            f"number {row.number} of the series {series!r} is being committed: ask again for the outcome"
        )
    if row.number < number:
        return None
    return r.YieldedRow(series, number, row.number, row.txn_id)


def _series_of(turn: Turn, txn: Claimant, series: str) -> r.SeriesRow | None:
    """The row of a series, None if it has no row. Raises NameTaken and NotAuthorized as `check_jump`."""
    row = turn.state.series(txn.scope, series)
    if row is None or not row.owner:
        check_free(turn, txn.owner, txn.scope, series)
    elif row.owner != txn.owner:
        raise errors.NameTaken(
            f"another lane has the series {series!r} of scope {txn.scope!r}: choose another name, or let an "
            f"operator see whose it is (`anabranch series list {txn.scope}`) and give it to lane {txn.owner!r} "
            f"(`anabranch series set {txn.scope} {series!r} NUMBER --owner {txn.owner}`); nothing was changed"
        )
    return row


def take_number(turn: Turn, txn: Claimant, series: str, number: int) -> None:
    """Make this the highest number of the series, because its commit is decided."""
    before = turn.state.series(txn.scope, series)
    if before is None:
        row = r.SeriesRow(number, txn.txn_id, _NONE, NO_TXN, (number, number), txn.owner)
    else:
        check(before.number < number, f"a series goes from {before.number} to {number}")
        runs = _more(before.runs, number)
        row = r.SeriesRow(number, txn.txn_id, before.number, before.txn_id, runs, before.owner)
    turn.put(k.series_key(txn.scope, series), row)


def _more(runs: tuple[int, ...], number: int) -> tuple[int, ...]:
    """The runs and a number that is higher than all of them. Above `MAX_RUNS`, the two lowest runs become one."""
    if runs and runs[-1] == number - 1:
        return (*runs[:-1], number)
    if len(runs) == 2 * MAX_RUNS:
        runs = (runs[0], *runs[3:])
    return (*runs, number, number)


def _up_to(runs: tuple[int, ...], number: int) -> tuple[int, ...]:
    """The runs without numbers higher than this one."""
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return tuple(n for first, last in pairs if first <= number for n in (first, min(last, number)))


def give_back(turn: Turn, txn: OpenTxn) -> None:
    """Set a series back to the number before, if the commit of an aborted transaction was decided."""
    scope, pending = txn.row.scope, txn.pending
    if pending is None or not pending.decided or pending.number is None or pending.name is None:
        return
    row = turn.state.series(scope, pending.name)
    check(row is not None and row.number == pending.number, "a decided commit lost its number")
    if row is not None:
        runs = _up_to(row.runs, row.earlier_number)
        number = row.earlier_number
        before = r.SeriesRow(number, row.earlier_txn_id, _NONE, NO_TXN, runs, row.owner)
        gone = number == _NONE
        turn.put(k.series_key(scope, pending.name), None if gone else before)


def reason(yielded: r.YieldedRow) -> str:
    """The reason for aborting a transaction whose commit gave way."""
    by = yielded.txn_id.hex() if yielded.txn_id != NO_TXN else "an operator (series set)"
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


def answer(turn: Turn, yielded: r.YieldedRow, late: r.TxnRow) -> r.Outcome | None:
    """The answer to the commit of ``late``, which gave way: the earlier transaction's outcome.

    `AlreadyCommitted` if the earlier commit has another number, belongs to another lane, or is not known any more.
    For a claim of a name, the latter two cases return None instead. Raises also as `earlier`.
    """
    if yielded.number in (None, yielded.highest):
        row = turn.state.txn_row(yielded.txn_id)
        if row is not None and row.owner == late.owner:
            return earlier(turn, row, moves=late.consumes is not None)
        if yielded.number is None:
            return None
    raise errors.AlreadyCommitted(f"{reason(yielded)}; this transaction is aborted")


def earlier(turn: Turn, row: r.TxnRow, *, moves: bool) -> r.Outcome:
    """The outcome of an earlier commit (``row``), to which a later one gave way.

    Raises `AlreadyCommitted` if the later commit moves positions (``moves``): its worker would take the answer
    COMMITTED to mean that the positions have moved.
    """
    if moves:
        raise errors.AlreadyCommitted(
            f"transaction {txn_text(row.txn_id)} has committed that name or number before; this one is aborted, "
            "and its positions did not move: commit these alone"
        )
    return turn.outcome(row)
