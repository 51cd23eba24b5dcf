"""Planted bugs where topics of streams are deleted by hand; see `catalogue`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

from anabranch.core import rows as k
from anabranch.core.decide_lost import give_up_stream
from anabranch.core.state import State
from anabranch.core.turn import Turn
from anabranch.processors import controller, durability
from anabranch.processors.lookout import Lookout

Planted = AbstractContextManager[object]


@contextmanager
def given_up_at_once() -> Iterator[None]:
    """A stream is given up the first time that a topic of it is not found: the broker may only lag behind."""
    real = Lookout.given_up

    def given_up(self: Lookout, state: State, after_s: float) -> list[tuple[str, str]]:
        return real(self, state, 0.0)

    with patch.object(Lookout, "given_up", given_up):
        yield


@contextmanager
def finished_elsewhere() -> Iterator[None]:
    """What is being committed when a stream is given up is committed in its other streams."""

    def give_up(turn: Turn, stream: str, why: str) -> list[bytes]:
        for txn_id in sorted(turn.state.open):
            txn = turn.state.open[txn_id]
            if txn.row.state == "COMMIT_IN_PROGRESS" and len(txn.participants) > 1:
                turn.put(k.participant_key(txn_id, stream), None)
        return give_up_stream(turn, stream, why)

    with patch.object(controller, "give_up_stream", give_up):
        yield


def taken_for_the_old_one() -> Planted:
    """Events are committed wherever they come to stand, also before what was committed: in a topic made anew."""
    return patch.object(durability, "_check_behind", lambda *_: None)


@contextmanager
def lost_and_going_on() -> Iterator[None]:
    """A stream is called lost, and its transactions are not aborted."""

    def give_up(turn: Turn, stream: str, why: str) -> list[bytes]:
        kept, turn.state.open = turn.state.open, {}
        try:
            return give_up_stream(turn, stream, why)
        finally:
            turn.state.open = kept

    with patch.object(controller, "give_up_stream", give_up):
        yield
