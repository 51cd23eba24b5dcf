"""Quarantined commands, which no leader can carry out: they are logged and skipped, so that others are served.

`processors.suspects` finds them by the rounds that fail.
"""

from __future__ import annotations

from itertools import islice

from anabranch.core import limits
from anabranch.core import rows as k
from anabranch.core.decisions.turn import Turn
from anabranch.core.legal_names import OPEN_LANE
from anabranch.core.round import ReplyTo
from anabranch.schemas.records import CommandList, ListCommands, QuarantineRow, SuspectRow

_REASON = 256  # characters: one answer has many of them


def suspect(turn: Turn, lane: str, offset: int, end: int, tries: int) -> None:
    """Log that these commands will be tried alone, so that the log names them if the leader dies of them."""
    turn.put(k.SUSPECT_KEY, SuspectRow(offset, end, tries, lane))


def quarantine(turn: Turn, lane: str, offset: int, what: str, reason: str) -> None:
    """Log that a command, or a batch of them, is quarantined. Above the limit the oldest row is forgotten."""
    known = turn.state.quarantined
    for key in list(islice(known, max(0, len(known) + 1 - limits.QUARANTINED.value))):
        turn.put(k.quarantine_key(*k.quarantine_at(key)), None)
    reason = limits.cut(reason, _REASON)
    row = QuarantineRow(offset, turn.wall_ms, what, reason, lane)
    turn.put(k.quarantine_key(lane, offset), row)


def list_commands(turn: Turn, command: ListCommands, to: ReplyTo | None) -> None:
    """Answer with the position in the commands, the quarantined ones, and the number of transactions kept."""
    found = tuple(turn.state.quarantined.values())
    here = turn.at is not None and turn.lane == OPEN_LANE
    position = turn.at + 1 if here and turn.at is not None else turn.state.round.commands_offset
    seen = turn.memory.lanes.get(OPEN_LANE)
    end = max(seen.end if seen is not None else 0, position)
    kept = len(turn.state.open), turn.state.outcomes
    turn.reply(to, CommandList(position, end, found, *kept))
