"""The entrance to all decisions: `decide` decides one command, `decide_due` all that is due without a command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anabranch.core.authorize import RULES
from anabranch.core.decisions import (
    bases,
    claims,
    cleanup,
    commit,
    lanes,
    merge,
    one_shot,
    ownership,
    questions,
    scale,
    scopes,
    streams,
    transactions,
    writers,
)
from anabranch.core.decisions.across import (
    coordinating,
    coordinating_one_shots,
    deciding,
    forcing,
    holding,
    joining,
    parts_of_one_shots,
    receiving,
)
from anabranch.core.decisions.times import check_waits, observed
from anabranch.core.decisions.turn import Turn, attempt
from anabranch.core.locks import registering, row_turns, segment_locks
from anabranch.core.memory import NEVER_MS
from anabranch.core.round import ReplyTo
from anabranch.errors import AnabranchError, MalformedRecord, check
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import TYPES

_DECISIONS: dict[type, Callable[[Turn, Any, ReplyTo | None], None]] = {
    r.FindScope: scopes.find_scope,
    r.AdoptScope: scopes.adopt_scope,
    r.CreateStream: streams.create_stream,
    r.DescribeStreams: scopes.describe_streams,
    r.ForgetStream: streams.forget_stream,
    r.DeleteStream: streams.forget_stream,
    r.RecoverStream: streams.recover_stream,
    r.AlterStream: streams.alter_stream,
    r.TruncateStream: streams.truncate_stream,
    r.PublishBase: bases.publish_base,
    r.Scale: scale.scale,
    r.Begin: transactions.begin,
    r.Touch: segment_locks.touch_locked,
    r.Register: writers.register,
    r.Heartbeat: transactions.heartbeat,
    r.Abort: transactions.abort,
    r.Force: forcing.force,
    r.GetState: questions.get_state,
    r.Resolve: transactions.resolve,
    r.ListTransactions: questions.list_transactions,
    r.ListOpen: questions.list_open,
    r.ListRuns: questions.list_runs,
    r.LabelWriter: writers.label,
    r.LockReads: joining.lock_reads,
    r.ListLocks: registering.list_locks,
    r.ListTableLocks: questions.list_table_locks,
    r.ListCommands: lanes.list_commands,
    r.Commit: commit.commit,
    r.OneShot: coordinating_one_shots.one_shot,
    r.TakeTurn: row_turns.take,
    r.PrepareEvents: one_shot.prepare_events,
    r.SafeTime: questions.safe_time,
    r.ListSeries: claims.list_series,
    r.SetSeries: claims.set_series,
    r.SetGrant: lanes.set_grant,
    r.ListGrants: lanes.list_grants,
    r.ListAudit: lanes.list_audit,
    r.SetLane: lanes.set_lane,
    r.ListLanes: lanes.list_lanes,
    r.CreateProcessor: ownership.create_processor,
    r.TakeTasks: ownership.take,
    r.ReleaseTasks: ownership.release,
    r.AlterProcessor: ownership.alter_processor,
    r.CopyProcessor: ownership.copy_processor,
    r.ResetProcessor: ownership.reset_processor,
    r.DeleteProcessor: ownership.delete_processor,
    r.DescribeProcessors: ownership.describe_processors,
    r.SetFeatureLevel: lanes.set_feature_level,
    r.DescribeLeader: lanes.describe_leader,
}
# Commands that are questions: without an asker there is nothing to decide.
_QUESTIONS = (
    r.DescribeLeader, r.DescribeStreams, r.DescribeProcessors, r.GetState, r.ListAudit, r.ListCommands,
    r.ListGrants, r.ListLanes, r.ListLocks, r.ListOpen, r.ListSeries, r.ListTableLocks, r.ListTransactions,
)  # fmt: skip
_ONE_SHOT = next(bytes((number,)) for number, cls in TYPES.items() if cls is r.OneShot)
_QUESTION_TYPES = {bytes((number,)) for number, cls in TYPES.items() if cls in _QUESTIONS}
check(_DECISIONS.keys() <= RULES.keys(), "a command is not in core.authorize: who may send it?")

DECIDED_LEVEL = 4  # the feature level from which rows name askers of the decision alone
CHECK_MS = 250  # how often silent transactions are checked, and old outcomes if no transaction ends


def is_question(payload: bytes) -> bool:
    """Whether an encoded command is a question: it writes nothing, so the log's feature level allows any."""
    return payload[1:2] in _QUESTION_TYPES


def catch_up(turn: Turn, payload: bytes) -> None:
    """Log which one-shots are done, before an encoded command that may ask for them: any but a one-shot.

    So a client that was answered finds its one-shot COMMITTED.
    """
    if turn.across.done_ms != NEVER_MS and payload[1:2] != _ONE_SHOT:
        coordinating.log_done(turn)


def decide(turn: Turn, command: Any, to: ReplyTo | None) -> None:
    """Decide one command, if its lane has the right. A refusal is answered and changes nothing."""
    if to is None and isinstance(command, _QUESTIONS):
        return
    if to is not None and to.decided and turn.state.feature_level < DECIDED_LEVEL:
        to = to._replace(decided=False)  # rows can't say it yet: it is answered when it is merged
    rule = RULES.get(type(command))
    decision = _DECISIONS.get(type(command))

    def run() -> None:
        former = turn.hybrid_time
        try:
            if rule is not None:
                rule(turn.state, turn.lane, command)
            if decision is None:
                raise MalformedRecord(f"{type(command).__name__} is not a command")
            turn.hybrid_time = observed(turn, command)
            if to is not None and to.held and isinstance(command, r.Commit | r.OneShot):
                check_waits(turn)
            decision(turn, command, to)
        except AnabranchError as error:
            turn.hybrid_time = former
            if isinstance(command, r.OneShot) and command.secret is not None:
                parts_of_one_shots.keep_refusal(turn, command, to, error)
            raise

    attempt(turn, to, run)


def decide_due(turn: Turn, *, judge_silence: bool) -> int | None:
    """Decide what is due: plain writes, commits, merges, stale transactions, old outcomes, journals to truncate.

    ``judge_silence``: whether `LeaderMemory.lanes` is up to date, so that silent transactions can be aborted
    without missing an unread heartbeat. Returns the new `Turn.expired_ms`, or None if that does not change.
    """
    if turn.holds.in_use:
        holding.give_back(turn)
    # Plain writes go to the active layouts, which are the current ones while nothing is merged.
    merge.commit_plain(turn)
    commit.advance_commits(turn)
    _decide_asked(turn)
    deciding.advance(turn)
    if turn.holds.in_use:
        _decide_shots(turn)
    if turn.holds.freed:
        holding.look_again(turn)
    receiving.advance(turn)
    row_turns.advance(turn)
    is_check_due = turn.now_ms >= turn.keepalives.next_check_ms
    if is_check_due:
        turn.keepalives.next_check_ms = turn.now_ms + CHECK_MS
        if judge_silence:
            transactions.abort_stale(turn)
    most = transactions.PURGE_SHARE * turn.finished
    if is_check_due:
        most += turn.settings.purge_per_look
    horizon = transactions.forget_outcomes(turn, most) if most else None
    if is_check_due:
        transactions.abort_old(turn)
        segment_locks.abort_long(turn)
        transactions.forget_audit(turn)
        cleanup.clean_up(turn)
    segment_locks.advance(turn)  # after all that ends transactions
    return horizon


def decide_freed(turn: Turn) -> None:
    """Merge commits that messages of other leaders have set free, and take the steps of commits that they allow.

    The controller calls this between messages and commands, so that no command waits for such a commit.
    """
    commit.advance_commits(turn)
    _decide_asked(turn)
    deciding.advance(turn)


def _decide_asked(turn: Turn) -> None:
    """Decide the one-shots again whose first votes from other control partitions have come, or are late."""
    if turn.across.on and not turn.across.asked_shots.is_empty:
        for shot in coordinating_one_shots.shots_to_decide(turn):
            turn.lane, turn.seen, turn.command_bytes = shot.lane, shot.seen, shot.size
            decide(turn, shot.command, shot.to)


def _decide_shots(turn: Turn) -> None:
    """Decide the one-shots again that have waited for a hold.

    After a broker refused a round, they are not decided: they end as `NotReady`, and their clients send them again.
    When they come again as commands, the leader can find the one whose events the broker refuses.
    """
    if turn.merge_limit is not None:
        return
    for shot in holding.shots_to_decide(turn):
        turn.lane, turn.seen, turn.command_bytes = shot.lane, shot.seen, shot.size
        decide(turn, shot.command, shot.to)
