"""The records of the wire protocol as frozen dataclasses, one for each ``*.avsc`` of `anabranch.schemas`.

A test holds the two equal, field by field; what each field means stands in the schema's ``doc``. Those that
come in great numbers are named tuples: they are made four times as fast. All are imported from here,
wherever among these modules they are written down.
"""

from __future__ import annotations

from dataclasses import is_dataclass

from anabranch.schemas.records.commands import (
    Abort,
    AdoptScope,
    Begin,
    Commit,
    CreateStream,
    DescribeStreams,
    Event,
    EventHeader,
    FindScope,
    GetState,
    Heartbeat,
    ListTransactions,
    OneShot,
    Register,
    Resolve,
    SafeTime,
    Scale,
    Touch,
)
from anabranch.schemas.records.history import (
    CommitRecord,
    EpochRecord,
    EpochSegment,
    Position,
    SegmentCommit,
    SegmentEnd,
)
from anabranch.schemas.records.journal import (
    JournalOp,
    ParticipantOp,
)
from anabranch.schemas.records.parts import (
    Extent,
    KeyRange,
    Receipt,
    SegmentRange,
    TxnState,
)
from anabranch.schemas.records.replies import (
    Alive,
    Begun,
    Outcome,
    Refusal,
    Registered,
    Reply,
    SafeTimeIs,
    ScopeInfo,
    StreamInfo,
    StreamList,
    Touched,
    TransactionList,
)
from anabranch.schemas.records.rows import (
    CarryRow,
    EpochRow,
    LowWaterRow,
    MovedRow,
    MovedRun,
    NameRow,
    ParticipantRow,
    PendingCommitRow,
    PlainRow,
    RoundRow,
    Scaling,
    ScopeRow,
    SeriesRow,
    StreamRow,
    TermRow,
    TxnRow,
    WriterRow,
    YieldedRow,
)

__all__ = [
    "Abort",
    "AdoptScope",
    "Alive",
    "Begin",
    "Begun",
    "CarryRow",
    "Commit",
    "CommitRecord",
    "CreateStream",
    "DescribeStreams",
    "EpochRecord",
    "EpochRow",
    "EpochSegment",
    "Event",
    "EventHeader",
    "Extent",
    "FindScope",
    "GetState",
    "Heartbeat",
    "JournalOp",
    "KeyRange",
    "ListTransactions",
    "LowWaterRow",
    "MovedRow",
    "MovedRun",
    "NameRow",
    "OneShot",
    "Outcome",
    "ParticipantOp",
    "ParticipantRow",
    "PendingCommitRow",
    "PlainRow",
    "Position",
    "Receipt",
    "Refusal",
    "Register",
    "Registered",
    "Reply",
    "Resolve",
    "RoundRow",
    "SafeTime",
    "SafeTimeIs",
    "Scale",
    "Scaling",
    "ScopeInfo",
    "ScopeRow",
    "SegmentCommit",
    "SegmentEnd",
    "SegmentRange",
    "SeriesRow",
    "StreamInfo",
    "StreamList",
    "StreamRow",
    "TermRow",
    "Touch",
    "Touched",
    "TransactionList",
    "TxnRow",
    "TxnState",
    "WriterRow",
    "YieldedRow",
    "is_record",
]


def is_record(cls: type) -> bool:
    """Whether a class of this package is a record of the protocol."""
    return is_dataclass(cls) or issubclass(cls, tuple)
