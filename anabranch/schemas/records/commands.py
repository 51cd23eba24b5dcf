"""Commands, on the commands topic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.schemas.records.parts import Consumed, KeyRange, ProcessorInput, Receipt


class EventHeader(NamedTuple):
    """A header of an event."""

    key: str
    value: bytes | None


class Event(NamedTuple):
    """An event inside a one-shot commit."""

    stream: str
    segment_id: int
    key: bytes | None
    value: bytes | None
    headers: tuple[EventHeader, ...]
    timestamp: int


@dataclass(frozen=True, slots=True)
class FindScope:
    """Command to control partition 0, the directory: which control partition serves a scope?"""

    scope: str
    create: bool
    near: str | None = None


@dataclass(frozen=True, slots=True)
class CreateStream:
    """Command: create a stream; answered again if it exists with equal settings."""

    stream: str
    segments: int
    settings: Mapping[str, str]
    adopt: bool = False


@dataclass(frozen=True, slots=True)
class ForgetStream:
    """Command: take a LOST stream away, with what is left of its topics. Repeating it is harmless."""

    stream: str


@dataclass(frozen=True, slots=True)
class RecoverStream:
    """Command: take back a LOST stream whose old topics are there. Repeating it is harmless."""

    stream: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Command: change the segments of a stream. A repeated command is answered as the first was."""

    stream: str
    segments: int
    seal: tuple[int, ...]
    ranges: tuple[KeyRange, ...]


@dataclass(frozen=True, slots=True)
class DescribeStreams:
    """Command: describe one stream, or all of a scope, or all of this control partition."""

    scope: str | None
    stream: str | None
    after: str | None = None


@dataclass(frozen=True, slots=True)
class Begin:
    """Command: begin a transaction under an id that the client made. Repeating it is harmless."""

    txn_id: bytes
    scope: str
    name: str | None
    keepalive_ms: int
    secret: bytes = field(repr=False)
    tenure: bytes | None = None


@dataclass(frozen=True, slots=True)
class Touch:
    """Command: register a stream with a transaction before the first write to it."""

    token: bytes = field(repr=False)
    stream: str
    writer: int = 0


@dataclass(frozen=True, slots=True)
class Register:
    """Command: register a writer's receipt."""

    token: bytes = field(repr=False)
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Commit:
    """Command: commit. Repeating it is harmless."""

    token: bytes = field(repr=False)
    own: tuple[Receipt, ...]
    receipts: tuple[Receipt, ...] | None
    name: str | None
    wait_ms: int
    number: int | None = None
    consumed: Consumed | None = None


class OneShot(NamedTuple):
    """Command: a whole transaction in one command. Repeating it is harmless."""

    txn_id: bytes
    scope: str
    name: str | None
    events: tuple[Event, ...]
    consumed: Consumed | None = None


@dataclass(frozen=True, slots=True)
class Settle:
    """Command: abort a transaction whose merge can't go on as a stream of it is LOST. Repeating is harmless."""

    token: bytes = field(repr=False)
    reason: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Command: abort. Repeating it is harmless."""

    token: bytes = field(repr=False)
    reason: str


@dataclass(frozen=True, slots=True)
class Resolve:
    """Command: the outcome of a transaction; where there is none, it is aborted first."""

    txn_id: bytes
    scope: str
    token: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class GetState:
    """Command: the state of a transaction, changing nothing."""

    txn_id: bytes
    token: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Command: these transactions live. Answered only if some of them is not open (any more)."""

    tokens: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class AdoptScope:
    """Command from the directory (control partition 0) to the partition that serves a new scope."""

    scope: str
    lane: str


@dataclass(frozen=True, slots=True)
class ListTransactions:
    """Command: list transactions."""

    scope: str | None
    include_finished: bool
    limit: int
    before: bytes | None = None


@dataclass(frozen=True, slots=True)
class ListSeries:
    """Command: list the series of a scope, the last name first."""

    scope: str
    series: str | None
    before: str | None


@dataclass(frozen=True, slots=True)
class SetSeries:
    """Command: set a series to a number, for an operator. Repeating it is harmless."""

    scope: str
    series: str
    expected: int | None
    number: int


@dataclass(frozen=True, slots=True)
class SafeTime:
    """Command: make a timestamp safe: all commits up to it are on the log, later ones exceed it."""

    scope: str
    at: int | None


@dataclass(frozen=True, slots=True)
class ListCommands:
    """Command: how far a control partition is with its commands, and which of them it set aside."""


@dataclass(frozen=True, slots=True)
class SetLane:
    """Command: make a lane, or change it. Repeating it is harmless."""

    lane: str
    blocked: bool
    topic_ids: tuple[str, ...]
    quotas: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ListLanes:
    """Command: list the lanes."""


@dataclass(frozen=True, slots=True)
class SetGrant:
    """Command: set the rights of a lane on a pattern. Repeating it is harmless."""

    lane: str
    pattern: str
    rights: int


@dataclass(frozen=True, slots=True)
class ListGrants:
    """Command: list the grants."""


@dataclass(frozen=True, slots=True)
class ListAudit:
    """Command: list the admin commands that were carried out, the newest first."""

    before: bytes | None = None


@dataclass(frozen=True, slots=True)
class CreateProcessor:
    """Command: make a processor; answered again if it exists with equal tasks and inputs. New stores are added."""

    processor: str
    tasks: int
    inputs: tuple[ProcessorInput, ...]
    stores: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ResetProcessor:
    """Command: let a processor begin again; its tasks have no tenure then. Repeating it is harmless."""

    processor: str
    resets: int
    inputs: tuple[ProcessorInput, ...]
    keep_state: bool


@dataclass(frozen=True, slots=True)
class DeleteProcessor:
    """Command: take a processor away, with its state. Repeating it is harmless."""

    processor: str
    resets: int


@dataclass(frozen=True, slots=True)
class Take:
    """Command: take tasks of a processor; no other tenure commits for them any more. Repeating it is harmless."""

    processor: str
    tenure: bytes = field(repr=False)
    holder: str
    tasks: tuple[int, ...]
    terms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Command: give up tasks; repeating it is harmless."""

    processor: str
    tenure: bytes = field(repr=False)
    tasks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DescribeProcessors:
    """Command: list the processors of a scope; or describe one, and its tasks."""

    scope: str
    processor: str | None = None
    after: str | None = None
    task: int = 0
