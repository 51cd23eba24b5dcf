"""Planted bugs in transactions over control partitions (`docs/inside/across.md`); see `catalogue`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from anabranch.client import session
from anabranch.controller import controller, durability
from anabranch.controller.lanes import Command, Lanes
from anabranch.controller.suspects import MAX_COMMANDS, SuspectCommands
from anabranch.core import parts
from anabranch.core import rows as k
from anabranch.core.across import coordinator, participant
from anabranch.core.across.coordinator import Step
from anabranch.core.across.messages import Meeting
from anabranch.core.across.participant import Action
from anabranch.core.decisions import merge, transactions
from anabranch.core.decisions.across import (
    coordinating,
    coordinating_one_shots,
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
from anabranch.core.state import OpenTxn
from anabranch.core.transaction_states import TRANSACTIONS
from anabranch.errors import SnapshotExpired
from anabranch.ports import LogError, OffsetOutOfRange
from anabranch.protocol import hybrid_time
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.reading import committed_log, history, snapshot, task_reader
from anabranch.topics import creation
from anabranch.topics.names import commands_topic, control_topic, status_topic
from tests.mutants import rounds
from tests.mutants.planting import wrapping

Planted = contextlib.AbstractContextManager[object]


def _send_messages(to: Any, round_: Any, state: Any) -> None:
    wall_ms, time = int(to.clock.wall() * 1000), state.round.hybrid_time
    to.send(durability.messages_of(to.prefix, to.control_partition, round_.messages, time, wall_ms))


def sent_before_the_commit() -> Planted:
    """M1: messages leave before their round is committed."""
    return rounds._before_commit(_send_messages)


def old_questions_count() -> Planted:
    """M2: a participant carries out a question of a lower round of votes."""
    real = participant.asked

    def asked(row: r.TxnRow | None, its: r.CoordinatorRow | None, ask: r.AskVote) -> Action:
        if its is not None and its.votes_round > ask.votes_round:
            its = its._replace(votes_round=ask.votes_round - 1)
        return real(row, its, ask)

    return patch.object(participant, "asked", asked)


@wrapping(SuspectCommands, "take")
def commands_come_first(right: Any, self: SuspectCommands, lanes: Lanes) -> list[Command]:
    """M4: commands are decided before messages."""
    found = lanes.next(MAX_COMMANDS, lanes.active)
    return found or right(self, lanes)


def freed_after_the_commands() -> Planted:
    """M4: what messages set free is merged after the commands of the same round."""
    return patch.object(controller, "decide_freed", lambda turn: None)


def any_vote_counts() -> Planted:
    """C1: a vote of a former round of votes counts."""
    return patch.object(coordinator, "counts", lambda votes, one: votes is not None)


@contextlib.contextmanager
def promises_are_ignored() -> Iterator[None]:
    """C2: the commit timestamp is the coordinator's alone."""
    clock = patch.object(coordinating, "raised", lambda clock, *_: clock)
    alone = patch.object(coordinating, "timestamp_of", lambda turn, _: turn.next_timestamp())
    with clock, alone:
        yield


def a_participants_time_counts() -> Planted:
    """C2: the commit timestamp is the highest one of the participants, though the coordinator's is later."""

    def highest(votes: Mapping[int, r.Vote], fresh: int) -> int:
        return max([one.timestamp for one in votes.values()], default=fresh)

    return patch.object(coordinator, "commit_timestamp", highest)


def staged_with_the_vote() -> Planted:
    """C3: a participant stages its part with its vote."""
    real = participating._prepare

    def prepare(turn: Turn, ask: r.AskVote) -> r.Revalidate | None:
        found = real(turn, ask)
        participating.commit_part(turn, ask.txn_id, 0)
        return found

    return patch.object(participating, "_prepare", prepare)


def staged_parts_date_themselves() -> Planted:
    """C3: a part that is staged is dated by its own control partition."""
    return patch.object(OpenTxn, "lacks_time", property(lambda _: False))


def what_is_decided_later_is_aborted() -> Planted:
    """C4: an abort is accepted while the merges of a decided transaction are staged."""
    place = ("FINALIZE_IN_PROGRESS", "begin_abort")
    return patch.dict(TRANSACTIONS.transitions, {place: "ABORT_IN_PROGRESS"})


def asked_before_all_have_reopened() -> Planted:
    """C6: votes are asked for again although a participant is prepared with the former receipts."""
    return patch.object(coordinating, "may_ask", lambda *_: True)


def prepared_before_all_have_voted() -> Planted:
    """A transaction is prepared for its program before all have voted."""
    real = coordinator.next_step

    def at_once(*given: Any, **more: Any) -> Step:
        early = more["prepares"] and not more["decided"]
        return Step.PREPARE if early else real(*given, **more)

    return patch.object(coordinator, "next_step", at_once)


def committed_without_a_word() -> Planted:
    """What a program has prepared is committed without its word."""
    real = coordinator.next_step
    return patch.object(
        coordinator, "next_step", lambda *given, **more: real(*given, **{**more, "prepares": False})
    )


def votes_wait_for_holds() -> Planted:
    """H3: a vote waits while a stream of it is held."""
    real = participating._prepare

    def prepare(turn: Turn, ask: r.AskVote) -> r.Revalidate | None:
        holding.check_free(turn, ask.txn_id, turn.state.participants(ask.txn_id))
        return real(turn, ask)

    return patch.object(participating, "_prepare", prepare)


def timestamps_of_any_partition() -> Planted:
    """H8: two control partitions may give the same timestamp."""

    def next_timestamp(self: Turn) -> int:
        self.hybrid_time = hybrid_time.next_after(self.hybrid_time, self.now_us)
        return self.hybrid_time

    return patch.object(Turn, "next_timestamp", next_timestamp)


@contextlib.contextmanager
def any_time_is_accepted() -> Iterator[None]:
    """T1: a message raises the clock as far as it likes."""

    def raised(clock: int, brought: int, *_: int) -> int:
        return max(clock, brought)

    with patch.object(receiving, "raised", raised), patch.object(coordinating, "raised", raised):
        yield


def the_lowest_answer_is_the_snapshot() -> Planted:
    """T2: a snapshot is as of the lowest answer, and nobody is asked again."""

    def instant(answers: Mapping[int, int], _: int, at: int | None = None) -> tuple[int, list[int]]:
        return min(answers.values()) if at is None else at, []

    return patch.object(session, "instant", instant)


@contextlib.contextmanager
def records_speak_for_other_streams() -> Iterator[None]:
    """T4: readers cut at the time of a record, whatever is held elsewhere."""

    def time_of(record: Any) -> int:
        found: int = record.timestamp
        return found

    cut, read = (patch.object(at, "safe_time_in", time_of) for at in (snapshot, task_reader))
    with cut, read, patch.object(history, "safe_time_in", time_of):
        yield


@wrapping(committed_log.CommittedLog, "_unread")
def late_followers_are_believed(
    right: Any, self: Any, topic: str, error: LogError, left: float
) -> None:
    """T5: an offset that a late follower does not have yet counts as deleted."""
    if isinstance(error, OffsetOutOfRange):
        raise SnapshotExpired(str(error)) from error
    right(self, topic, error, left)


def changes_are_no_locks() -> Planted:
    """L5: a row that a one-shot changes is not locked by its vote."""
    return patch.object(
        parts_of_one_shots, "row_changes", SimpleNamespace(locked_with=lambda locks, _: locks)
    )


def commands_grow_first() -> Planted:
    """G1: the topic of commands grows before that of status."""

    def grow(log: Any, prefix: str, control_partitions: int) -> None:
        for name in (
            commands_topic(prefix),
            status_topic(prefix),
            control_topic(prefix),
            commands_topic(prefix, ADMIN_LANE),
        ):
            log.add_partitions(name, control_partitions)

    return patch.object(creation, "grow_control_topics", grow)


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
        coordinating, "has_asked", lambda txn: txn.pending is not None and txn.votes_row is not None
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


def late_commits_need_no_promise() -> Planted:
    """O4: a part that was left out commits without a prepare timestamp that covers the commit."""
    right = participant.decided

    def decided(row: r.TxnRow | None, decision: r.Decide, **known: Any) -> Action:
        return right(row, decision, **{**known, "promised": None})

    return patch.object(participant, "decided", decided)


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
    """L4: the coordinator does not check its own locks against the frozen locks of other transactions."""
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


def refused_ones_are_forgotten() -> Planted:
    """S1: a one-shot that is refused after the first votes leaves the parts of others prepared."""

    def forget(turn: Turn, shot: Any) -> None:
        turn.across.asked_shots.put(shot.command.txn_id, None)

    return patch.object(coordinating_one_shots, "end_shot", forget)


def frozen_locks_refuse_both() -> Planted:
    """S2: a one-shot whose votes have come is refused for frozen locks, whichever is older."""

    def check(turn: Turn, ending: parts.Ending) -> bool:
        ending.at_once = ending.prepare is None
        return parts.check(turn, ending)

    its = SimpleNamespace(check=check, Ending=parts.Ending)
    return patch.object(coordinating_one_shots, "parts", its)


def nobody_asks_for_decisions() -> Planted:
    """S3: a participant does not ask for a decision that does not come."""
    return patch.object(parts_of_one_shots, "ask_decisions", lambda _: None)


def unknown_ones_are_not_answered() -> Planted:
    """S4: a coordinator that does not know a one-shot says nothing."""
    return patch.object(coordinating_one_shots, "on_ask_decision", lambda *_: None)


def unknown_ids_are_not_used_up() -> Planted:
    """S4: an unknown id stays free although a participant gets an abort of it."""
    return patch.object(coordinating_one_shots, "_use_up", lambda *_: None)


def questions_prove_themselves() -> Planted:
    """M5: a first question is proven by the secret that it brings, without the client's command."""
    real = receiving._why_ignored

    def ignored(turn: Turn, message: receiving.Message, *rest: Any) -> str:
        why = real(turn, message, *rest)
        return "" if why == "forged" and isinstance(message, r.AskVote) else why

    return patch.object(receiving, "_why_ignored", ignored)


def parts_are_logged_at_once() -> Planted:
    """S5: a participant logs its part when the command comes, before it is asked for its vote."""
    real = parts_of_one_shots.wait_for_question

    def wait(turn: Turn, command: r.OneShot, to: ReplyTo | None) -> None:
        real(turn, command, to)
        row = parts_of_one_shots.row_of(turn, command, command.scope, turn.lane)
        turn.put(k.txn_key(command.txn_id), row)

    return patch.object(parts_of_one_shots, "wait_for_question", wait)


def early_questions_are_dropped() -> Planted:
    """A question that comes before its command waits for the coordinator to repeat it."""
    return patch.object(parts_of_one_shots, "keep_early", lambda *_: None)


def repeated_commands_begin_again() -> Planted:
    """A copy of a command at the coordinator is taken for a new one."""
    return patch.object(
        coordinating_one_shots,
        "_begin_again",
        lambda turn, row, command, to: coordinating_one_shots._begin(turn, command, to),
    )


def refused_one_shots_stay_open() -> Planted:
    """S6: a one-shot is reopened when its commit is refused, and nobody ends it."""
    return patch.object(coordinating, "shot_of", lambda *_: None)


def one_shots_join_what_rolls() -> Planted:
    """Events of a one-shot are merged while the layout of a rolling commit is current."""
    real = merge._Layouts.close

    def close(self: merge._Layouts, streams: Any = None) -> None:
        if streams is None:
            real(self)

    return patch.object(merge._Layouts, "close", close)
