"""Parts that records of several kinds have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

TxnState = Literal[
    "OPEN",
    "COMMIT_IN_PROGRESS",
    "FINALIZE_IN_PROGRESS",
    "COMMITTED",
    "ABORT_IN_PROGRESS",
    "ABORTED",
]
StreamState = Literal[
    "CREATING",
    "ACTIVE",
    "LOST",
    "RECOVERING",
    "FORGETTING",
    "FORGOTTEN",  # without a row: never logged
]
ShownStreamState = Literal[StreamState, "WAITING"]  # not readable or writable now: never logged


@dataclass(frozen=True, slots=True)
class Extent:
    """One writer's records in one journal partition."""

    stream: str
    partition: int
    first: int
    end: int
    count: int
    crc_sum: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """Cumulative account of one writer; of two, the one with the higher sequence wins."""

    txn_id: bytes
    writer: int
    sequence: int
    finished: bool
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """A segment of a stream epoch and the keys it holds."""

    segment_id: int
    low: int
    high: int
    partition: int


@dataclass(frozen=True, slots=True)
class KeyRange:
    """A range of key positions."""

    low: int
    high: int


class TaskPosition(NamedTuple):
    """Up to where a task has consumed an input of its processor."""

    input: int
    record: int
    timestamp: int
    segment: int = -1
    offset: int = -1


@dataclass(frozen=True, slots=True)
class TaskStep:
    """A step of tasks that stand alike, by one commit."""

    tasks: tuple[int, ...]
    sequence: int
    positions: tuple[TaskPosition, ...]


@dataclass(frozen=True, slots=True)
class Consumed:
    """Positions of tasks that a commit moves together with its events."""

    processor: str
    tenure: bytes = field(repr=False)
    steps: tuple[TaskStep, ...]


@dataclass(frozen=True, slots=True)
class ProcessorInput:
    """An input of a processor."""

    stream: str
    topic_id: str
    record: int
    timestamp: int
