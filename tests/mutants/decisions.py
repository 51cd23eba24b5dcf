"""Planted bugs in how commands are decided, in times that clients have seen, and in lanes; see `catalogue`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from anabranch.client import receipts as written
from anabranch.client.calls.admin import Administration
from anabranch.client.session import Session
from anabranch.controller import controller, durability
from anabranch.controller.lanes import Replies
from anabranch.core import journal_runs, parts
from anabranch.core import rows as k
from anabranch.core.decisions import (
    claims,
    commit,
    decide,
    merge,
    one_shot,
    times,
    transactions,
)
from anabranch.core.decisions import turn as turn_module
from anabranch.core.decisions.lanes import position_of, set_lane
from anabranch.core.decisions.transactions import answer_decided
from anabranch.core.decisions.turn import AT_END, Turn, close_round
from anabranch.core.journal_index import JournalIndex, Weighed
from anabranch.core.journal_runs import StoredRun
from anabranch.core.round import ReplyTo
from anabranch.core.state import OpenTxn, State
from anabranch.protocol import hybrid_time, limits
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.legal_names import OPEN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.protocol.schemas.records import (
    Commit,
    FeatureLevel,
    FeatureRow,
    LanePositionRow,
    Receipt,
    Register,
    SeriesRow,
    SetFeatureLevel,
    SetLane,
    Touch,
    TxnRow,
    YieldedRow,
)
from anabranch.protocol.tokens import peek
from anabranch.topics.names import replies_topic
from tests.mutants.planting import Planted, instead_of, wrapping


@instead_of(merge, "taken_runs")
def late_writes(runs: Any, extents: Mapping[int, object]) -> list[StoredRun]:
    """All of a taken writer's runs are merged, whatever its receipt says."""
    return sorted((run for run in runs if run.writer in extents), key=lambda run: run.first)


@instead_of(commit, "choose_writers")
def zombie_writers(_: object, txn: OpenTxn, command: Commit) -> tuple[Receipt, ...]:
    """A commit takes every writer that ever registered, also the dead attempts that its receipts leave out."""
    chosen = dict(txn.writers)
    for receipt in (*command.own, *(command.receipts or ())):
        known = chosen.get(receipt.writer)
        if known is None or known.sequence < receipt.sequence:
            chosen[receipt.writer] = receipt
    return tuple(chosen[writer] for writer in sorted(chosen))


def inexact_writers() -> Planted:
    """An outcome names the writers that registered, not those that were taken."""
    return patch.object(commit, "take_exactly", lambda *_: None)


@instead_of(journal_runs, "covers")
def by_sequence(one: Receipt | None, other: Receipt) -> bool:
    """Receipts are compared by their sequence, which each flush raises, not by the events that they name."""
    return not other.extents or (one is not None and one.sequence >= other.sequence)


@contextmanager
def others_receipts() -> Iterator[None]:
    """Of two committers each is told the outcome of what was taken, also if that left out its own writers."""
    with (
        patch.object(commit, "not_covered", lambda *_: []),
        patch.object(written, "not_covered", lambda *_: []),
    ):
        yield


def moving_deadline() -> Planted:
    """A commit that is sent again waits for its whole time anew."""
    return patch.object(commit, "is_waiting", lambda *_: False)


def _weighing(change: Callable[[Weighed], Weighed]) -> Planted:
    real = JournalIndex.weigh
    return patch.object(JournalIndex, "weigh", lambda *given: change(real(*given)))


def no_checksum() -> Planted:
    """Sums of checksums are not compared."""
    return _weighing(lambda w: replace(w, wrong="") if "checksum" in w.wrong else w)


def no_count() -> Planted:
    """Counts are not compared."""
    return _weighing(lambda w: replace(w, wrong="") if "count" in w.wrong else w)


@wrapping(merge, "taken_runs")
def drop_a_run(real: Any, runs: Any, extents: Any) -> Any:
    """Of several runs the last one is forgotten. (The count of what was decided betrays it: it is aborted.)"""
    found = real(runs, extents)
    return found[:-1] if len(found) > 1 else found


@instead_of(Turn, "next_timestamp")
def wall_clock_only(turn: Turn) -> int:
    """Timestamps follow the wall clock, not the highest one logged."""
    turn.hybrid_time = hybrid_time.from_us(turn.now_us)
    return turn.hybrid_time


@contextmanager
def forget_names() -> Iterator[None]:
    """A committed name is not looked up."""
    with (
        patch.object(commit, "earlier_outcome", lambda *_: None),
        patch.object(one_shot, "earlier_outcome", lambda *_: None),
        patch.object(parts, "earlier_outcome", lambda *_: None),
    ):
        yield


def forget_series() -> Planted:
    """A number is taken whatever the series has already."""

    def take_number(turn: Turn, txn: TxnRow, series: str, number: int) -> None:
        row = SeriesRow(number, txn.txn_id, -1, NO_TXN, (), txn.owner)
        turn.put(k.series_key(txn.scope, series), row)

    return patch.multiple(claims, overtaken=lambda *_: None, take_number=take_number)


def low_numbers() -> Planted:
    """A number below the highest is taken, if it is not the highest itself."""
    real = claims.overtaken

    def overtaken(turn: Turn, txn: TxnRow, series: str, number: int) -> YieldedRow | None:
        found = real(turn, txn, series, number)
        return found if found is not None and found.highest == number else None

    def take_number(turn: Turn, txn: TxnRow, series: str, number: int) -> None:
        row = SeriesRow(number, txn.txn_id, -1, NO_TXN, (), txn.owner)
        turn.put(k.series_key(txn.scope, series), row)

    return patch.multiple(claims, overtaken=overtaken, take_number=take_number)


def any_secret() -> Planted:
    """A repeated Begin brings the token, whatever secret it shows."""
    return patch.object(transactions, "compare_digest", lambda *_: True)


def no_mac() -> Planted:
    """A token is taken whoever made it."""
    return patch.object(turn_module, "is_genuine", lambda *_: True)


def no_right() -> Planted:
    """A token is good for everything."""
    return patch.object(turn_module, "check_right", lambda *_: None)


def no_end() -> Planted:
    """A token is good for ever."""
    return patch.object(turn_module, "peek", lambda data: replace(peek(data), not_after_ms=0))


def no_lane() -> Planted:
    """A token is good in every lane."""
    return patch.object(turn_module, "peek", lambda data: replace(peek(data), lanes=frozenset()))


def uncounted_tries() -> Planted:
    """A command that can't be decided is tried again for ever."""
    return patch.object(limits, "TRIES", limits.TRIES._replace(value=1 << 10))


# -- times that clients have seen ------------------------------------------------------------------


def _observing(observed: Callable[[Turn, Any], int]) -> Planted:
    return patch.object(decide, "observed", observed)


def seen_ignored() -> Planted:
    """What a client has seen does not raise the clock of a control partition."""
    return _observing(lambda turn, _: turn.hybrid_time)


def seen_without_bound() -> Planted:
    """What a client has seen raises the clock, however far ahead it is."""
    return _observing(lambda turn, _: max(turn.hybrid_time, turn.seen or 0))


def writers_seen_nothing() -> Planted:
    """A commit exceeds what its committer has seen, not what its writers have."""

    def observed(turn: Turn, command: Any) -> int:
        return (
            turn.hybrid_time
            if isinstance(command, Register | Touch)
            else times.observed(turn, command)
        )

    return _observing(observed)


def bare_tokens() -> Planted:
    """A token says what its maker had seen when the transaction began, not when the token was given away."""
    return patch.object(Session, "token_as_of_now", lambda _, token, __: token)


def no_commit_wait() -> Planted:
    """An answer does not wait until the clocks are past its commit."""
    return patch.object(Replies, "_due_us", lambda *_: 0)


# -- how lanes are read and answered ---------------------------------------------------------------


def backlog() -> Planted:
    """An unblocked lane goes on where it stood: what was sent while it was blocked is carried out."""

    def unblock(turn: Turn, command: SetLane, to: ReplyTo | None) -> None:
        stood = position_of(turn.state, command.lane)
        set_lane(turn, command, to)
        if turn.state.lane_positions.get(command.lane) == AT_END != stood:
            turn.put(k.lane_position_key(command.lane), LanePositionRow(stood))

    return patch.dict(decide._DECISIONS, {SetLane: unblock})


def answers_to_all() -> Planted:
    """The answers to all lanes go to the topic of `open`."""
    return patch.object(durability, "replies_topic", lambda prefix, lane: replies_topic(prefix))


@instead_of(controller, "close_round")
def positions_unlogged(turn: Turn, commands: int, control: int, lanes: Any, **more: Any) -> Any:
    """How far lanes are decided is not logged: a successor decides their commands again."""
    return close_round(turn, commands, control, {}, **more)


def open_alone_is_read() -> Planted:
    """Silence is judged once the commands of `open` are read, also of other lanes' transactions."""
    return patch.object(transactions, "_heartbeats_of", lambda *_: {OPEN_LANE})


def levels_are_not_checked() -> Planted:
    """Commands and rows of a feature level are accepted and logged before the level is raised."""
    return patch.object(State, "check_level", lambda *_: None)


def any_level_is_set() -> Planted:
    """The feature level becomes whatever number is asked for."""

    def set_any(turn: Turn, command: SetFeatureLevel, to: ReplyTo | None) -> None:
        level = turn.state.feature_level if command.level is None else command.level
        turn.put(k.FEATURE_KEY, FeatureRow(level, turn.now_ms))
        turn.reply(to, FeatureLevel(level, LEVEL))

    return patch.dict(decide._DECISIONS, {SetFeatureLevel: set_any})


def grown_without_rights() -> Planted:
    """A new control partition does not get the lanes and grants of the others."""
    return patch.object(Administration, "_make_alike", lambda *_: None)


def used_too_early() -> Planted:
    """New scopes get control partitions that were added and are not ready yet."""
    return patch.object(
        Turn, "control_partitions", property(lambda turn: turn.settings.control_partitions)
    )


@wrapping(commit, "_decide")
def answered_too_early(real: Any, turn: Turn, txn: OpenTxn, *given: Any) -> None:
    """A commit counts as decided while an abort is possible."""
    real(turn, txn, *given)
    answer_decided(turn, turn.row(txn.row.txn_id))


def rows_of_any_level() -> Planted:
    """A leader accepts a status log with rows of a higher feature level than the log has."""
    return patch.object(State, "_check_row_level", lambda *_: None)
