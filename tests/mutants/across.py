"""Planted bugs in transactions over control partitions (`docs/inside/across.md`); see `catalogue`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

from anabranch.core import parts
from anabranch.core.across import coordinator, participant
from anabranch.core.across.messages import Meeting
from anabranch.core.across.participant import Action
from anabranch.core.decisions import transactions
from anabranch.core.decisions.across import coordinating, holding, locking, participating, receiving
from anabranch.core.decisions.turn import Turn
from anabranch.core.locks import frozen
from anabranch.core.locks.lock_table import LockTable
from anabranch.protocol.schemas import records as r

Planted = contextlib.AbstractContextManager[object]


def any_vote_counts() -> Planted:
    """C1: a vote of a former round of votes counts."""
    return patch.object(coordinator, "counts", lambda votes, one: votes is not None)


@contextlib.contextmanager
def promises_are_ignored() -> Iterator[None]:
    """C2: the commit timestamp is the coordinator's alone."""
    clock = patch.object(coordinating, "raised", lambda clock, *_: clock)
    with clock, patch.object(coordinator, "commit_timestamp", lambda votes, fresh: fresh):
        yield


def lost_streams_are_promised() -> Planted:
    """C4: a participant votes yes again although it has lost a stream."""
    return patch.object(participating, "is_gone", lambda *_: False)


def a_refusal_aborts() -> Planted:
    """C5: a refused commit aborts the transaction."""
    real = coordinating._refuse

    def refuse(turn: Turn, txn_id: bytes) -> None:
        real(turn, txn_id)
        transactions.abort_txn(turn, txn_id, "refused")

    return patch.object(coordinating, "_refuse", refuse)


def refusals_take_nothing_back() -> Planted:
    """C5: participants stay prepared when a commit is refused."""
    return patch.object(
        coordinating, "has_asked", lambda txn: txn.pending is not None and txn.votes is not None
    )


def enlisted_at_any_time() -> Planted:
    """O1: a participant is enlisted while a commit waits."""
    return patch.object(coordinator, "may_enlist", lambda *_: True)


def over_before_all_are_done() -> Planted:
    """O2: the coordinator ends before its participants have carried the decision out."""
    return patch.object(coordinator, "is_over", lambda row, *_: row.state == "ABORT_IN_PROGRESS")


def unknown_aborts_are_forgotten() -> Planted:
    """O3: an abort of a transaction without a row leaves none."""
    return patch.dict(participant.TRANSITIONS, {("none", "abort"): Action.DONE})


def nothing_is_forged() -> Planted:
    """M3: messages without their HMAC are acted on."""
    return patch.object(receiving, "is_genuine", lambda *_: True)


def sent_once() -> Planted:
    """A message without an answer is not sent again."""
    return patch.object(coordinating, "FIRST_PAUSE_MS", 1 << 40)


def locked_tables_hold_nothing() -> Planted:
    """L1: a commit waits for holds on the tables that it writes alone."""
    return patch.object(holding, "_locked", lambda *_: ())


def all_that_meet_wait() -> Planted:
    """L2: of two votes that meet, both wait."""
    return patch.object(locking, "meet", lambda *_, decided: Meeting.WAIT)


def all_that_meet_give_way() -> Planted:
    """L2: of two votes that meet, both give way."""
    return patch.object(locking, "meet", lambda *_, decided: Meeting.AGAIN)


def own_locks_are_not_frozen() -> Planted:
    """L4: the coordinator does not compare its own locks with those that it meets."""
    return patch.object(parts, "_freezes", lambda _, ending: ending.prepare is not None)


def waiting_commits_keep_their_times() -> Planted:
    """L5: a commit that waits with a timestamp keeps it, although a vote has locked what it writes."""
    return patch.object(locking, "take_back", lambda *_: None)


def reopened_locks_stay_frozen() -> Planted:
    """C5: locks stay frozen when a vote is taken back."""
    real = LockTable.follow

    def follow(self: LockTable, txn_id: bytes, row: r.TxnRow, *, merged: bool) -> None:
        was = txn_id in self.frozen
        real(self, txn_id, row, merged=merged)
        if was:
            self.frozen[txn_id] = True
            self._note_holding(txn_id)

    return patch.object(LockTable, "follow", follow)


def staged_merges_are_not_met() -> Planted:
    """L3: a vote looks at no locks of staged merges, as a prepare of a program does."""
    return patch.object(frozen, "is_across", lambda *_: False)
