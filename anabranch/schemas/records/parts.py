"""What records of several kinds are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    "FORGOTTEN",  # it has no row: never logged
]
ShownStreamState = Literal[StreamState, "WAITING"]  # it can't be read or written now: never logged


@dataclass(frozen=True, slots=True)
class Extent:
    """What one writer wrote to one journal partition."""

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
