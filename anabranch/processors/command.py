"""A command: taken out of its record (`command_of`), then decided (`decide_command`)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

from anabranch.batches.records import Record
from anabranch.core import hybrid_time, limits, work
from anabranch.core.decisions.decide import decide
from anabranch.core.decisions.lanes import is_read
from anabranch.core.decisions.turn import Turn, refuse
from anabranch.core.ids import (
    CORRELATION_HEADER,
    REPLY_HEADER,
    TIME_HEADER,
    WAIT_HEADER,
    command_digest,
)
from anabranch.core.legal_names import OPEN_LANE
from anabranch.core.round import ReplyTo
from anabranch.errors import AnabranchError, InvalidArgument
from anabranch.schemas.codec import TYPES, decode
from anabranch.schemas.records import AdoptScope

Key = tuple[str, int]  # a command's lane and offset

_RECORD_BYTES = 300  # about how many bytes a queued command takes besides its payload


@dataclass(slots=True)
class Command:
    """A record of a lane's commands, or of the control topic."""

    offset: int
    to: ReplyTo | None
    payload: bytes = field(repr=False)
    native: bool  # sent inside a native transaction
    lane: str = OPEN_LANE
    control: bool = False  # a record of the control topic, which only controllers write
    unanswered: bool = False  # its headers for the reply are unusable
    seen: bytes | None = None  # the hybrid time that its sender has seen, not parsed
    charge: int = work.SMALL  # the units of work that it cost, once it is decided

    @property
    def key(self) -> Key:
        """The command's lane and offset. In the control topic, the offset is negated, so it is below 0."""
        return self.lane, -1 - self.offset if self.control else self.offset

    @property
    def weight(self) -> int:
        """About how many bytes it takes in a queue."""
        return len(self.payload) + _RECORD_BYTES


def weight_of(commands: Iterable[Command]) -> int:
    """About how many bytes these commands take in a queue."""
    return sum([command.weight for command in commands])


def decide_command(turn: Turn, command: Command) -> None:
    """Decide a command. If the payload is not a command, the reply is a refusal."""
    size = len(command.payload)
    (turn.lane, turn.at), turn.command_bytes = command.key, size
    turn.size += size
    turn.charged += work.COMMAND
    if turn.state.lanes and not command.control and not is_read(turn.state, command.lane):
        return  # a command before it in this round blocked its lane, so it counts as not read
    try:
        _check_size(turn, command.payload)
        record = decode(command.payload)
        if size > work.FEW_BYTES:
            turn.charge(work.of_parts(record))
        turn.seen = None if command.seen is None else hybrid_time.parse(command.seen)
    except AnabranchError as error:
        turn.reply(command.to, refuse(error))
        return
    refusal = None
    if isinstance(record, AdoptScope) != command.control:
        refusal = InvalidArgument("controllers send each other AdoptScope only, clients never do")
    elif command.native and not command.control:
        # Commands are read before native transactions end: this one could take effect, and then be aborted.
        refusal = InvalidArgument("send commands outside of native transactions")
    if refusal is not None:
        turn.reply(command.to, refuse(refusal))
        return
    decide(turn, record, command.to)


def _check_size(turn: Turn, payload: bytes) -> None:
    if len(payload) <= limits.COMMAND.value:
        return
    big = TYPES.get(payload[1]) in limits.BIG
    limit = limits.COMMAND._replace(value=turn.settings.command_bytes) if big else limits.COMMAND
    limit.check(len(payload), f"a command {name_of(payload)}")


def name_of(payload: bytes) -> str:
    """The name of a command's type, from its undecoded payload."""
    found = TYPES.get(payload[1]) if len(payload) > 1 else None
    return "unreadable" if found is None else found.__name__


def command_of(record: Record, native: bool, lane: str, reply_partitions: int) -> Command:
    """Make the command of a record. Without the two headers for the reply, no client waits for one."""
    headers = dict(record.headers)
    correlation_id = headers.get(CORRELATION_HEADER)
    partition = headers.get(REPLY_HEADER)
    payload = record.value or b""
    to = None
    if correlation_id and partition is not None and len(partition) == 4:
        number = struct.unpack(">i", partition)[0]
        known = 0 <= number < reply_partitions
        if known and len(correlation_id) <= limits.CORRELATION_ID.value:
            to = ReplyTo(
                correlation_id, number, command_digest(payload), lane, WAIT_HEADER in headers
            )
    unanswered = to is None and (correlation_id is not None or partition is not None)
    seen = headers.get(TIME_HEADER)
    return Command(record.offset, to, payload, native, lane, unanswered=unanswered, seen=seen)
