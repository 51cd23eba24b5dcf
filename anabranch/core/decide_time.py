"""Decisions on time: which timestamps are safe, so that a snapshot at one stays what it is.

A timestamp is safe when all commits at or below it are on the log and all later ones exceed it. Timestamps rise
from the hybrid time of the state, which each round logs in its `RoundRow`. So it is enough that this one has
reached the timestamp when the answer is logged, in the same round: for this leader and for all after it.
"""

from __future__ import annotations

from anabranch.core import hybrid_time
from anabranch.core.decide_admin import check_served
from anabranch.core.round import ReplyTo
from anabranch.core.turn import Turn
from anabranch.errors import InvalidArgument, NotReady
from anabranch.schemas.records import SafeTime, SafeTimeIs


def safe_time(turn: Turn, command: SafeTime, to: ReplyTo | None) -> None:
    """Make a timestamp safe. One that is still to come is refused as `NotReady`: ask again.

    No request moves hybrid time beyond the clock, or all commits after it would be dated ahead.
    """
    check_served(turn, command.scope)
    present = max(turn.hybrid_time, hybrid_time.from_us(turn.now_us))
    at = present if command.at is None else command.at
    if not 0 <= at <= hybrid_time.MAX:
        raise InvalidArgument(f"timestamp {at}: a hybrid time, or null for now")
    if at > present:
        ahead_ms = (hybrid_time.to_us(at) - hybrid_time.to_us(present)) / 1000
        raise NotReady(
            f"the time {hybrid_time.to_text(at)} is not reached yet: {ahead_ms:,.0f} ms are missing "
            "by the controller's clock"
        )
    turn.hybrid_time = max(turn.hybrid_time, at)
    turn.reply(to, SafeTimeIs(command.scope, at))
