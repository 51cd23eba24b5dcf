"""The askers of a commit, which wait for its answer and are stored in its row."""

from __future__ import annotations

from dataclasses import replace

from anabranch.core import limits
from anabranch.core.round import ReplyTo
from anabranch.errors import NotReady
from anabranch.schemas.records import PendingCommitRow


def is_waiting(pending: PendingCommitRow | None, to: ReplyTo | None) -> bool:
    """Whether the asker is among those that wait for the commit."""
    if pending is None or to is None:
        return False
    waiting = zip(pending.lanes, pending.reply_partitions, pending.correlation_ids, strict=True)
    return (to.lane, to.partition, to.correlation_id) in waiting


def join_waiting(pending: PendingCommitRow | None, to: ReplyTo | None) -> PendingCommitRow:
    """Add an asker to the row; a repeated command is not added twice."""
    if pending is None:
        pending = PendingCommitRow((), (), (), (), False, (), None, None, 0)
    if to is None or is_waiting(pending, to):
        return pending
    if len(pending.correlation_ids) >= limits.WAITERS.value:
        raise NotReady(f"{limits.WAITERS.value:,} wait for the outcome already: ask again")
    return replace(
        pending,
        correlation_ids=(*pending.correlation_ids, to.correlation_id),
        reply_partitions=(*pending.reply_partitions, to.partition),
        lanes=(*pending.lanes, to.lane),
        commands=(*pending.commands, to.command),
        held=(*pending.held, *((to.correlation_id,) if to.held else ())),
    )


def without_askers(pending: PendingCommitRow) -> PendingCommitRow:
    """The row of a commit without askers, because these are answered."""
    return replace(pending, correlation_ids=(), reply_partitions=(), lanes=(), commands=(), held=())
