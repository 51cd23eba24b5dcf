"""Planted bugs in how lanes are read and answered; see `catalogue`."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from anabranch.controller import controller, durability
from anabranch.core import rows as k
from anabranch.core.decisions import decide, transactions
from anabranch.core.decisions.lanes import position_of, set_lane
from anabranch.core.decisions.turn import AT_END, Turn, close_round
from anabranch.core.round import ReplyTo
from anabranch.protocol.legal_names import OPEN_LANE
from anabranch.protocol.schemas.records import LanePositionRow, SetLane
from anabranch.topics.names import replies_topic
from tests.mutants.planting import Planted, instead_of


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
