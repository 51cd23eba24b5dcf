"""Planted bugs in what is done with times that clients have seen; see `catalogue`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from anabranch.client.session import Session
from anabranch.controller.lanes import Replies
from anabranch.core.decisions import decide, times
from anabranch.core.decisions.turn import Turn
from anabranch.protocol.schemas.records import Register, Touch

Planted = AbstractContextManager[object]


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
