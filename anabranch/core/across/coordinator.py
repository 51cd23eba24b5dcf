"""The coordinator's next step after a vote, and the messages that it still has to send.

`docs/inside/across.md`, section 5, has the rules. Votes are kept in memory: a successor asks again, and gets the
same ones. The round of votes (`VotesRow`) is logged, and so is the decision, before anything is sent because of it.
A `PartitionRow` is the row of one participant. `core.decisions.across` calls these functions, and does what they
return.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Literal, NamedTuple

from anabranch.protocol.schemas import records as r

Votes = Mapping[int, r.Vote]  # by participant
HELD_MS = 100  # how long timestamps are kept while votes are missing; then they are taken back


class Step(Enum):
    """The next step, by the votes so far."""

    WAIT = "votes are missing"
    TIMESTAMPS = "ask for timestamps, in the same round of votes"
    TAKE_BACK = (
        "ask for votes without timestamps, in the next round of votes, so that nothing is held"
    )
    AGAIN = "take all promises back in the next round of votes, and ask again later"
    REFUSE = "reopen the participants in the next round of votes, and answer with the refusal"
    DECIDE = "log the commit timestamp, and merge the coordinator's own part"
    DECIDE_LATER = "log that it commits: the timestamp follows when all merges are staged"
    PREPARE = "log that it is prepared: all have voted, and somebody else decides"


def counts(votes_row: r.VotesRow | None, vote: r.Vote) -> bool:
    """Whether a vote counts: only one of the present round of votes does (C1)."""
    return votes_row is not None and votes_row.votes_round == vote.votes_round


def next_step(asks: r.Asks, partitions: Mapping[int, r.PartitionRow], votes: Votes, *, late: bool,
              held_ms: int, decided: bool, own_stages: bool = False, prepares: bool = False) -> Step:  # fmt: skip
    """The coordinator's next step.

    ``asks``: its question in the present round of votes. ``votes``: the votes that count. ``late``: whether the
    command's deadline has passed. ``held_ms``: how long ago the first vote with a timestamp came. ``decided``:
    whether it is logged that the transaction commits, without a timestamp yet; then no vote is a no, and there
    is no way back (C4). ``own_stages``: whether the coordinator's own part has to be staged, and is not yet.
    ``prepares``: whether the transaction is only prepared; then no timestamp is asked for.
    """
    if asks == "REOPEN":
        return Step.WAIT
    answers = {vote.answer for vote in votes.values()}
    some_dated = any(vote.timestamp for vote in votes.values())
    if not decided and ("NO" in answers or late):
        return Step.REFUSE
    if "AGAIN" in answers:
        return Step.AGAIN
    if votes.keys() < partitions.keys() or answers - {"YES"}:
        if some_dated and held_ms >= HELD_MS:
            return Step.TAKE_BACK
        return Step.WAIT
    if prepares and not decided:
        return Step.PREPARE
    if all(vote.timestamp for vote in votes.values()) and not own_stages:
        return Step.DECIDE
    if own_stages or any(vote.stages for vote in votes.values()):
        if some_dated:
            return Step.TAKE_BACK
        return Step.WAIT if decided else Step.DECIDE_LATER
    return Step.TIMESTAMPS if asks == "VOTE" else Step.WAIT


def raise_round(votes_row: r.VotesRow | None, asks: r.Asks) -> r.VotesRow:
    """The next round of votes, which is logged before it is asked for (C1)."""
    return r.VotesRow(1 if votes_row is None else votes_row.votes_round + 1, asks)


def with_timestamps(votes_row: r.VotesRow) -> r.VotesRow:
    """The same round of votes, with timestamps. They are never taken back within a round of votes."""
    return votes_row._replace(asks="TIMESTAMP")


def commit_timestamp(votes: Votes, fresh: int) -> int:
    """The commit timestamp: not below any prepare timestamp, nor below what the coordinator would give (C2)."""
    return max([fresh, *[vote.timestamp for vote in votes.values()]])


class Due(NamedTuple):
    """A message that a participant has not answered yet."""

    partition: int
    what: Literal["ask", "commit", "commit_later", "abort"]


def may_enlist(row: r.TxnRow, pending: r.PendingCommitRow | None) -> bool:
    """Whether a participant may be added: not while a commit waits, nor after the decision (O1)."""
    return row.state == "OPEN" and pending is None


def due(
    row: r.TxnRow,
    votes_row: r.VotesRow | None,
    partitions: Mapping[int, r.PartitionRow],
    votes: Votes,
) -> Iterator[Due]:
    """The messages that the coordinator still has to send, by its rows (M1). ``votes``: of the present round."""
    not_done = [number for number, participant in partitions.items() if not participant.done]
    if row.state in ("ABORT_IN_PROGRESS", "ABORTED"):
        yield from (Due(number, "abort") for number in not_done)
        return
    if row.state == "FINALIZE_IN_PROGRESS" and row.commit_timestamp:
        yield from (Due(number, "commit") for number in not_done)
        return
    if votes_row is None or row.state in ("PREPARED", "COMMITTED"):
        return
    for number in not_done:
        last = votes.get(number)
        is_unready = last is None or last.stages or last.answer != "YES"
        if row.state == "FINALIZE_IN_PROGRESS" and is_unready:
            yield Due(number, "commit_later")
        if _lacks(votes_row.asks, last):
            yield Due(number, "ask")


def _lacks(asks: r.Asks, last: r.Vote | None) -> bool:
    """Whether the last vote of a participant is not what the coordinator asks for."""
    if last is None or asks == "REOPEN":
        return last is None
    return last.answer != "YES" or last.stages or (asks == "TIMESTAMP" and not last.timestamp)


def is_over(row: r.TxnRow, votes_row: r.VotesRow, partitions: Mapping[int, r.PartitionRow]) -> bool:
    """Whether a decided transaction is finished everywhere, so that COMMITTED or ABORTED is logged (O2)."""
    own_is_done = votes_row.own_merged or row.state != "FINALIZE_IN_PROGRESS"
    return own_is_done and all(participant.done for participant in partitions.values())
