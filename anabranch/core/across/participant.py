"""A participant's answer to a message of its coordinator, and the promise that is logged with it.

A message may come late, twice, out of order, or from a former leader: the table says what each one means in each
state. A participant ends only by a decision of its coordinator (O2), and never decides alone. The *promise* is the
participant's `CoordinatorRow`; ``promise`` is None while nothing of the transaction is logged here.
`core.decisions.across.participating` calls these functions, and carries out the actions that they return.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

from anabranch.errors import InvariantViolation, check
from anabranch.protocol.schemas import records as r


class Action(Enum):
    """How a participant answers a message."""

    VOTE = "check whether it can commit; log the vote, or answer that it can't yet, or can't"
    PROMISE = "it is prepared already: log the round of votes, with a timestamp if one is asked for, and answer"
    REOPEN = "drop the vote: log it as open, with the round of votes, and answer"
    ANSWER = "nothing changes: answer from the rows"
    ABORT = "log it as aborted, and answer that this is done"
    STAGE = "log that it commits; its timestamp follows when its merge is staged"
    MERGE = "log the commit timestamp; merge when the holds let it go, and then answer"
    DONE = "answer that it is done"
    PASS = "an old message: do nothing"
    IMPOSSIBLE = "no coordinator says this"


Known = Literal["none", "OPEN", "PREPARED", "FINALIZE_IN_PROGRESS", "COMMITTED", "ABORTED"]
Said = Literal[
    "vote",  # asked for a vote of a higher round of votes, or again in the same one
    "reopen",  # in a higher round of votes
    "reopen_again",  # in the same one
    "old",  # any question of a lower round of votes
    "abort",
    "commit",  # with its timestamp
    "commit_later",  # … which follows
]
_ORDER: tuple[Known, ...] = (
    "none", "OPEN", "PREPARED", "FINALIZE_IN_PROGRESS", "COMMITTED", "ABORTED",
)  # fmt: skip
_A = Action

# fmt: off
_TABLE: dict[Said, tuple[Action, ...]] = {
    # none, OPEN, PREPARED, FINALIZE_IN_PROGRESS, COMMITTED, ABORTED
    "vote":         (_A.VOTE, _A.VOTE, _A.PROMISE, _A.PROMISE, _A.PASS, _A.ANSWER),
    # Also without a row: a question that was overtaken must find the higher round of votes.
    "reopen":       (_A.REOPEN, _A.REOPEN, _A.REOPEN, _A.IMPOSSIBLE, _A.PASS, _A.ANSWER),
    "reopen_again": (_A.PASS, _A.ANSWER, _A.PASS, _A.PASS, _A.PASS, _A.ANSWER),
    "old":          (_A.PASS, _A.PASS, _A.PASS, _A.PASS, _A.PASS, _A.PASS),
    # Also without a row: a question that was overtaken must find that it is aborted (O3).
    "abort":        (_A.ABORT, _A.ABORT, _A.ABORT, _A.IMPOSSIBLE, _A.IMPOSSIBLE, _A.DONE),
    "commit":       (_A.IMPOSSIBLE, _A.IMPOSSIBLE, _A.MERGE, _A.MERGE, _A.DONE, _A.IMPOSSIBLE),
    "commit_later": (_A.IMPOSSIBLE, _A.IMPOSSIBLE, _A.STAGE, _A.ANSWER, _A.PASS, _A.IMPOSSIBLE),
}
# fmt: on
TRANSITIONS: dict[tuple[Known, Said], Action] = {
    (known, said): action
    for said, row in _TABLE.items()
    for known, action in zip(_ORDER, row, strict=True)
}


def known_as(row: r.TxnRow | None) -> Known:
    """The state of the table for a transaction's row."""
    if row is None:
        return "none"
    if row.state == "ABORT_IN_PROGRESS":
        return "ABORTED"
    if row.state == "COMMIT_IN_PROGRESS":
        raise InvariantViolation("a participant is decided by its coordinator alone")
    return row.state


def asked(row: r.TxnRow | None, promise: r.CoordinatorRow | None, ask: r.AskVote) -> Action:
    """The action after a question. ``promise``: what was promised so far."""
    before = -1 if promise is None else promise.votes_round
    said: Said = "vote"
    if ask.votes_round < before:
        said = "old"
    elif ask.asks == "REOPEN":
        said = "reopen" if ask.votes_round > before else "reopen_again"
    if row is not None and row.state == "FINALIZE_IN_PROGRESS" and row.commit_timestamp:
        return Action.PASS  # the question is older than the decision
    forced = promise is not None and promise.forced
    if forced and said != "old" and known_as(row) == "COMMITTED":
        return Action.PROMISE  # an operator presumed that it commits
    return TRANSITIONS[known_as(row), said]


def decided(
    row: r.TxnRow | None,
    decision: r.Decide,
    *,
    forgotten: bool = False,
    forced: bool = False,
    promised: int | None = None,
) -> Action:
    """The action after a decision.

    ``forgotten``: whether the id is so old that its row may have been purged. An unfinished one is never purged, so
    the decision was carried out. ``forced``: whether an operator ended it here, perhaps in another way.
    ``promised``: the prepare timestamp of the part; 0: it has none; None: not known. If an operator ended the
    transaction without this part, other commits may have been merged here below that time, or at any time if it has
    none (O4).
    """
    if row is None and forgotten:
        return Action.DONE
    if row is not None and forced:
        return Action.DONE if row.state in ("COMMITTED", "ABORTED") else Action.PASS
    if row is not None and row.state == "FINALIZE_IN_PROGRESS" and row.commit_timestamp:
        check(decision.verdict == "COMMIT", "a decided commit is aborted")
        return Action.PASS  # it waits to be merged
    said: Said = "abort"
    at = decision.timestamp
    is_open = row is not None and row.state in ("PREPARED", "FINALIZE_IN_PROGRESS")
    if is_open and at and promised is not None and not 0 < promised <= at:
        return Action.PASS  # an operator ends it
    if decision.verdict == "COMMIT":
        said = "commit" if at else "commit_later"
    return TRANSITIONS[known_as(row), said]


def next_promise(
    former: r.CoordinatorRow | None, ask: r.AskVote, *, staged: bool, fresh: int
) -> r.CoordinatorRow:
    """The promise of a yes. ``former``: what was promised before; ``fresh``: later than all timestamps given here.

    A timestamp is kept within its round of votes, however often it is asked for, and taken back by a higher one.
    A merge that has to be staged gets none before that (``staged`` False).
    """
    is_same_round = former is not None and former.votes_round == ask.votes_round
    kept = former.prepare_timestamp if former is not None and is_same_round else 0
    if ask.asks == "TIMESTAMP" and staged and not kept:
        kept = fresh
    return r.CoordinatorRow(ask.votes_round, kept, staged)


def reopened(promise: r.CoordinatorRow | None, ask: r.AskVote) -> r.CoordinatorRow:
    """The row after a promise is taken back."""
    if promise is None:
        return r.CoordinatorRow(ask.votes_round)
    return promise._replace(votes_round=ask.votes_round, prepare_timestamp=0)


def vote(
    txn_id: bytes, partition: int, promise: r.CoordinatorRow, answer: r.VoteAnswer, *,
    committed: int = 0, left_out: int = 0, error: r.Refusal | None = None,
    revalidate: r.Revalidate | None = None,
) -> r.Vote:  # fmt: skip
    """The message with a vote, as the rows have it (M2)."""
    return r.Vote(
        txn_id,
        partition,
        promise.votes_round,
        answer,
        promise.prepare_timestamp if answer == "YES" else 0,
        answer == "YES" and not promise.staged,
        committed,
        left_out,
        error,
        revalidate,
    )
