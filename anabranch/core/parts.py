"""The parts of a commit, and the steps of each part.

A commit by journals, a one-shot and a prepare all go through the same list of parts, `PARTS`. A commit may have any
parts together, so no step asks which other parts the commit has. Each part has two steps. Its *check* may refuse
the commit, and changes no row. Its *hold* runs when the commit is decided or prepared, and takes a name, a number,
tasks or locks: from then on no other commit gets them. Two more steps are elsewhere: positions move in the round of
the merge (`positions.merged`), and a transaction that is aborted after all gives back everything that it holds
(`transactions.GIVE_BACK`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

from anabranch.core import rows as k
from anabranch.core.decisions import claims, positions, prepared
from anabranch.core.decisions.across import locking
from anabranch.core.decisions.transactions import earlier_outcome, supersede
from anabranch.core.decisions.turn import Turn
from anabranch.core.journal_index import Weighed
from anabranch.core.locks import conflicts, frozen, locked_segments, registering, row_changes
from anabranch.core.locks.lock_table import held_by
from anabranch.core.locks.row_changes import Placed
from anabranch.core.locks.table_writes import Write
from anabranch.protocol.ids import is_marked
from anabranch.protocol.schemas import records as r

Step = Callable[[Turn, "Ending"], None]

TOGETHER_LEVEL = 3  # the feature level that allows any parts together


@dataclass(slots=True, kw_only=True)
class Ending:
    """A commit or a prepare while it is being decided.

    ``named``: the name that its transaction has already. ``check_events``: checks its events, and sets ``weighed``
    (events in journals) or ``placed`` (events in the command). ``writes``: returns its writes by table; called only
    if a lock may need them. ``locks``: the locks in the command (a long transaction has registered its locks
    before). ``follows``: the rows that were read as commits under way write them. ``changes``: its changes of rows;
    their check sets ``values``. ``at_once``: whether it is merged in this round, and has no parts at other
    control partitions. ``freezes``: whether the locks of a commit that has such parts are frozen by this check, and
    not by a later one. ``pending``: the row that keeps a prepare until its coordinator decides, if it needs one.
    ``events``: the events that a prepare keeps.

    ``gains``: fields that the row of its transaction gets by what the parts hold. ``holds``: the steps of its parts
    that `hold` takes; `check` finds them.

    If the commit is not carried out, a check sets one of two fields: ``instead`` (an earlier commit has the name or
    number), or ``again`` (the client has to validate its locks again).
    """

    txn_id: bytes
    scope: str
    owner: str
    named: str | None
    name: str | None
    number: int | None
    consumed: r.Consumed | None
    prepare: r.Prepare | None
    check_events: Callable[[Turn, Ending], None]
    writes: Callable[[Turn, Ending], Mapping[str, Write]]
    locks: tuple[r.TableLocks, ...] = ()
    follows: tuple[r.FollowedRows, ...] = ()
    changes: tuple[r.RowChange, ...] = ()
    at_once: bool = False
    freezes: bool = True
    pending: r.PendingCommitRow | None = None
    events: tuple[r.Event, ...] = ()
    weighed: Weighed | None = None
    placed: Placed = field(default_factory=dict)
    values: Sequence[int] = ()
    gains: dict[str, Any] = field(default_factory=dict)
    holds: Sequence[Step] = ()
    instead: r.YieldedRow | None = None
    again: r.Revalidate | None = None


def check(turn: Turn, ending: Ending) -> bool:
    """Whether the commit may be decided now. If not, the answer is in ``ending.instead`` or ``ending.again``.

    Raises: the errors of all checks in `PARTS`; OwnershipLost and UnknownProcessor before all others.
    """
    check_level(turn, ending, ending.txn_id, locks=ending.locks, at_once=ending.at_once)
    checks, ending.holds = _steps(
        consumed=ending.consumed is not None,
        name=ending.name is not None,
        changes=bool(ending.changes),
        prepare=ending.prepare is not None,
    )
    for step in checks:
        step(turn, ending)
        if ending.instead is not None or ending.again is not None:
            return False
    return True


def hold(turn: Turn, ending: Ending) -> None:
    """Put what the parts hold. Call it after `check`; then put the transaction's row, with ``ending.gains``."""
    for take in ending.holds:
        take(turn, ending)


def check_level(
    turn: Turn,
    wanted: Ending | r.Commit,
    txn_id: bytes,
    *,
    locks: Sequence[r.TableLocks] = (),
    at_once: bool = False,
) -> None:
    """Raise `FeatureNotEnabled` if the commit has two parts that level 2 does not accept together.

    One of the two is positions or a coordinator. ``locks``: the locks in the command.
    """
    moves, prepares = wanted.consumed is not None, wanted.prepare is not None
    if not moves and not prepares:
        return
    has_locks = bool(locks or turn.state.locks.of(txn_id).rows)
    together = (
        has_locks and prepares,
        has_locks and moves and at_once,
        moves and prepares,
        moves and wanted.name is not None,
    )
    if any(together):
        turn.state.check_enabled(TOGETHER_LEVEL, "a commit with these parts together")


# -- positions of tasks ---------------------------------------------------------------------------------


def _check_positions(turn: Turn, ending: Ending) -> None:
    if ending.consumed is not None:
        positions.judge(turn, ending.consumed, ending.txn_id, ending.scope, ending.owner)


def _hold_positions(turn: Turn, ending: Ending) -> None:
    if ending.consumed is not None:
        if not is_marked(ending.txn_id):  # a one-shot with a marked id leaves no row
            ending.gains["consumes"] = positions.digest_of(ending.consumed)
        if not ending.at_once:
            positions.begin_moving(turn, ending.consumed, ending.txn_id)


# -- a name, or a number of a series --------------------------------------------------------------------


def _check_claim(turn: Turn, ending: Ending) -> None:
    name, number = ending.name, ending.number
    if name is None or (number is None and name == ending.named):
        return
    if number is not None:
        ending.instead = claims.overtaken(turn, ending, name, number)
        return
    earlier = earlier_outcome(turn, ending.scope, name, ending.owner)
    ending.instead = earlier and r.YieldedRow(name, None, -1, earlier.txn_id)


def _hold_claim(turn: Turn, ending: Ending) -> None:
    name = ending.name
    if name is None:
        return
    if ending.number is not None:
        claims.take_number(turn, ending, name, ending.number)
    elif name != ending.named:
        supersede(turn, ending.scope, name, ending.txn_id)
        ending.gains["name"] = name


# -- locks on what was read -----------------------------------------------------------------------------


def _check_locks(turn: Turn, ending: Ending) -> None:
    """Check that the locks hold until now, and that the locks of a prepare can be frozen."""
    txn_id = ending.txn_id
    txn = turn.state.open.get(txn_id)
    if txn is not None:
        ending.again = conflicts.to_revalidate(turn, txn_id)
        writers = () if ending.pending is None else ending.pending.writers
        if ending.again is None:
            conflicts.check_conflicts(turn, txn, writers)
    elif ending.locks or ending.follows:
        ending.again = conflicts.judge(turn, ending.locks, ending.follows)
    if ending.again is not None:
        return
    if ending.placed and turn.state.exclusive:
        locked_segments.check_free(turn, ending.placed, locks=ending.prepare is not None)
    if _freezes(turn, ending):
        locks = row_changes.locked_with(ending.locks, ending.changes)
        if locks:
            more = held_by(r.ReadLockRow(locks, ()))
            registering.check_room(turn, ending.owner, locks, more)
        frozen.check_prepare(turn, txn_id, partial(ending.writes, turn, ending), locks)
    elif ending.at_once:
        frozen.check_free(turn, txn_id, partial(ending.writes, turn, ending))


def _freezes(turn: Turn, ending: Ending) -> bool:
    """Whether the locks are frozen now: it is prepared, or decided with parts at other control partitions."""
    if ending.prepare is not None:
        return True
    return ending.freezes and not ending.at_once and locking.is_across(turn, ending.txn_id)


def _hold_locks(turn: Turn, ending: Ending) -> None:
    locks = row_changes.locked_with(ending.locks, ending.changes)
    if locks and _freezes(turn, ending):
        key = k.read_lock_key(ending.txn_id, 0, 1)  # no writer has the number 0
        turn.put(key, r.ReadLockRow(locks, ()))


# -- changes of rows that commute -----------------------------------------------------------------------


def _check_changes(turn: Turn, ending: Ending) -> None:
    if ending.changes:
        values = row_changes.values_of(turn, ending.changes, ending.locks)
        if values is None:
            ending.again = conflicts.again(turn, ending.locks)
        else:
            ending.values = values


# -- a coordinator that decides later -------------------------------------------------------------------


def _check_coordinator(turn: Turn, ending: Ending) -> None:
    if ending.prepare is not None:
        prepared.check_count(turn, ending.owner)
        if ending.weighed is not None:
            prepared.check_room(turn, ending.txn_id, ending.weighed)


def _hold_coordinator(turn: Turn, ending: Ending) -> None:
    if ending.prepare is not None:
        prepared.log_prepared(
            turn,
            ending.txn_id,
            ending.pending,
            r.PreparedRow(ending.prepare, turn.wall_ms, ending.events),
        )


class Part(NamedTuple):
    """The steps of a part until the commit is decided. ``hold``: None if the part holds nothing.

    ``asked_by``: the field of `Ending` that asks for the part; None: each commit has it.
    """

    asked_by: str | None
    check: Step
    hold: Step | None = None


# In the order of the checks. If the name was committed before, that is answered before any lock is checked. Commits
# without reads have the part of the locks, too: their writes may break frozen locks of others.
PARTS: tuple[Part, ...] = (
    Part("consumed", _check_positions, _hold_positions),
    Part(None, lambda turn, ending: ending.check_events(turn, ending)),
    Part("name", _check_claim, _hold_claim),
    Part(None, _check_locks, _hold_locks),
    Part("changes", _check_changes),
    Part("prepare", _check_coordinator, _hold_coordinator),
)


@cache
def _steps(**has: bool) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The checks, and the holds, of a commit that has these parts: an absent part costs nothing."""
    parts = [part for part in PARTS if part.asked_by is None or has[part.asked_by]]
    holds = [part.hold for part in parts if part.hold is not None]
    return tuple([part.check for part in parts]), tuple(holds)
