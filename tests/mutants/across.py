"""Planted bugs in transactions over control partitions (`docs/inside/across.md`); see `catalogue`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from anabranch.core import parts
from anabranch.core import rows as k
from anabranch.core.across import coordinator, participant
from anabranch.core.across.messages import Meeting
from anabranch.core.across.participant import Action
from anabranch.core.decisions import merge, transactions
from anabranch.core.decisions.across import (
    coordinating,
    holding,
    locking,
    participating,
    parts_of_one_shots,
    receiving,
)
from anabranch.core.decisions.turn import Turn
from anabranch.core.locks import frozen
from anabranch.core.locks.lock_table import LockTable
from anabranch.core.round import ReplyTo
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
    return patch.multiple(coordinating, FIRST_PAUSE_MS=1 << 40, MOST_FIRST_MS=1 << 40)


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


# -- one-shots -------------------------------------------------------------------------------------------


def questions_prove_themselves() -> Planted:
    """M3: a first question is proven by the secret that it brings, without the client's command."""
    real = receiving._ignored

    def ignored(turn: Turn, message: receiving.Message, *rest: Any) -> str:
        why = real(turn, message, *rest)
        return "" if why == "forged" and isinstance(message, r.AskVote) else why

    return patch.object(receiving, "_ignored", ignored)


def parts_are_logged_at_once() -> Planted:
    """A participant logs its part when the command comes, before it is asked for its vote."""
    real = parts_of_one_shots._wait

    def wait(turn: Turn, command: r.OneShot, to: ReplyTo | None) -> None:
        real(turn, command, to)
        row = parts_of_one_shots._row_of(turn, command, command.scope, turn.lane)
        turn.put(k.txn_key(command.txn_id), row)

    return patch.object(parts_of_one_shots, "_wait", wait)


def early_questions_are_dropped() -> Planted:
    """A question that comes before its command waits for the coordinator to repeat it."""
    return patch.object(parts_of_one_shots, "keep_early", lambda *_: None)


def repeated_commands_begin_again() -> Planted:
    """A copy of a command at the coordinator is taken for a new one."""
    return patch.object(
        parts_of_one_shots,
        "_begin_again",
        lambda turn, row, command, to: parts_of_one_shots._begin(turn, command, to),
    )


def refused_one_shots_stay_open() -> Planted:
    """A one-shot is reopened when its commit is refused, and nobody ends it."""
    return patch.object(coordinating, "shot_of", lambda *_: None)


def one_shots_join_what_rolls() -> Planted:
    """Events of a one-shot are merged while the layout of a rolling commit is current."""
    real = merge._Layouts.close

    def close(self: merge._Layouts, streams: Any = None) -> None:
        if streams is None:
            real(self)

    return patch.object(merge._Layouts, "close", close)
