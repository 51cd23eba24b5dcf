"""The records of the wire protocol as frozen dataclasses, one for each ``*.avsc`` of `anabranch.schemas`.

A test holds the two equal, field by field; the schema's ``doc`` says what each field means. Frequent records are
named tuples: they are made four times as fast. Import all from here.
"""

from __future__ import annotations

from dataclasses import is_dataclass

from anabranch.schemas.records.commands import Abort as Abort
from anabranch.schemas.records.commands import AdoptScope as AdoptScope
from anabranch.schemas.records.commands import Begin as Begin
from anabranch.schemas.records.commands import Commit as Commit
from anabranch.schemas.records.commands import CreateProcessor as CreateProcessor
from anabranch.schemas.records.commands import CreateStream as CreateStream
from anabranch.schemas.records.commands import DeleteProcessor as DeleteProcessor
from anabranch.schemas.records.commands import DescribeProcessors as DescribeProcessors
from anabranch.schemas.records.commands import DescribeStreams as DescribeStreams
from anabranch.schemas.records.commands import Event as Event
from anabranch.schemas.records.commands import EventHeader as EventHeader
from anabranch.schemas.records.commands import FindScope as FindScope
from anabranch.schemas.records.commands import ForgetStream as ForgetStream
from anabranch.schemas.records.commands import GetState as GetState
from anabranch.schemas.records.commands import Heartbeat as Heartbeat
from anabranch.schemas.records.commands import ListAudit as ListAudit
from anabranch.schemas.records.commands import ListCommands as ListCommands
from anabranch.schemas.records.commands import ListGrants as ListGrants
from anabranch.schemas.records.commands import ListLanes as ListLanes
from anabranch.schemas.records.commands import ListSeries as ListSeries
from anabranch.schemas.records.commands import ListTransactions as ListTransactions
from anabranch.schemas.records.commands import OneShot as OneShot
from anabranch.schemas.records.commands import RecoverStream as RecoverStream
from anabranch.schemas.records.commands import Register as Register
from anabranch.schemas.records.commands import Release as Release
from anabranch.schemas.records.commands import ResetProcessor as ResetProcessor
from anabranch.schemas.records.commands import Resolve as Resolve
from anabranch.schemas.records.commands import SafeTime as SafeTime
from anabranch.schemas.records.commands import Scale as Scale
from anabranch.schemas.records.commands import SetGrant as SetGrant
from anabranch.schemas.records.commands import SetLane as SetLane
from anabranch.schemas.records.commands import SetSeries as SetSeries
from anabranch.schemas.records.commands import Settle as Settle
from anabranch.schemas.records.commands import Take as Take
from anabranch.schemas.records.commands import Touch as Touch
from anabranch.schemas.records.history import CommitRecord as CommitRecord
from anabranch.schemas.records.history import EpochRecord as EpochRecord
from anabranch.schemas.records.history import EpochSegment as EpochSegment
from anabranch.schemas.records.history import JournalOp as JournalOp
from anabranch.schemas.records.history import ParticipantOp as ParticipantOp
from anabranch.schemas.records.history import Position as Position
from anabranch.schemas.records.history import SegmentCommit as SegmentCommit
from anabranch.schemas.records.history import SegmentEnd as SegmentEnd
from anabranch.schemas.records.parts import Consumed as Consumed
from anabranch.schemas.records.parts import Extent as Extent
from anabranch.schemas.records.parts import KeyRange as KeyRange
from anabranch.schemas.records.parts import ProcessorInput as ProcessorInput
from anabranch.schemas.records.parts import Receipt as Receipt
from anabranch.schemas.records.parts import SegmentRange as SegmentRange
from anabranch.schemas.records.parts import ShownStreamState as ShownStreamState
from anabranch.schemas.records.parts import StreamState as StreamState
from anabranch.schemas.records.parts import TaskPosition as TaskPosition
from anabranch.schemas.records.parts import TaskStep as TaskStep
from anabranch.schemas.records.parts import TxnState as TxnState
from anabranch.schemas.records.replies import Alive as Alive
from anabranch.schemas.records.replies import AuditList as AuditList
from anabranch.schemas.records.replies import Begun as Begun
from anabranch.schemas.records.replies import CommandList as CommandList
from anabranch.schemas.records.replies import GrantList as GrantList
from anabranch.schemas.records.replies import LaneInfo as LaneInfo
from anabranch.schemas.records.replies import LaneList as LaneList
from anabranch.schemas.records.replies import Outcome as Outcome
from anabranch.schemas.records.replies import ProcessorInfo as ProcessorInfo
from anabranch.schemas.records.replies import ProcessorList as ProcessorList
from anabranch.schemas.records.replies import Refusal as Refusal
from anabranch.schemas.records.replies import Registered as Registered
from anabranch.schemas.records.replies import Reply as Reply
from anabranch.schemas.records.replies import SafeTimeIs as SafeTimeIs
from anabranch.schemas.records.replies import ScopeInfo as ScopeInfo
from anabranch.schemas.records.replies import SeriesInfo as SeriesInfo
from anabranch.schemas.records.replies import SeriesList as SeriesList
from anabranch.schemas.records.replies import StreamInfo as StreamInfo
from anabranch.schemas.records.replies import StreamList as StreamList
from anabranch.schemas.records.replies import TaskInfo as TaskInfo
from anabranch.schemas.records.replies import Touched as Touched
from anabranch.schemas.records.replies import TransactionList as TransactionList
from anabranch.schemas.records.rows import AuditRow as AuditRow
from anabranch.schemas.records.rows import CarryRow as CarryRow
from anabranch.schemas.records.rows import EpochRow as EpochRow
from anabranch.schemas.records.rows import ForgottenRow as ForgottenRow
from anabranch.schemas.records.rows import GrantRow as GrantRow
from anabranch.schemas.records.rows import LanePositionRow as LanePositionRow
from anabranch.schemas.records.rows import LaneRow as LaneRow
from anabranch.schemas.records.rows import LowWaterRow as LowWaterRow
from anabranch.schemas.records.rows import MovedRow as MovedRow
from anabranch.schemas.records.rows import MovedRun as MovedRun
from anabranch.schemas.records.rows import NameRow as NameRow
from anabranch.schemas.records.rows import ParticipantRow as ParticipantRow
from anabranch.schemas.records.rows import PendingCommitRow as PendingCommitRow
from anabranch.schemas.records.rows import PlainRow as PlainRow
from anabranch.schemas.records.rows import ProcessorRow as ProcessorRow
from anabranch.schemas.records.rows import RetiredRow as RetiredRow
from anabranch.schemas.records.rows import RoundRow as RoundRow
from anabranch.schemas.records.rows import Scaling as Scaling
from anabranch.schemas.records.rows import ScopeRow as ScopeRow
from anabranch.schemas.records.rows import SeriesRow as SeriesRow
from anabranch.schemas.records.rows import SetAsideRow as SetAsideRow
from anabranch.schemas.records.rows import StreamRow as StreamRow
from anabranch.schemas.records.rows import SuspectRow as SuspectRow
from anabranch.schemas.records.rows import TaskRow as TaskRow
from anabranch.schemas.records.rows import TermRow as TermRow
from anabranch.schemas.records.rows import TxnRow as TxnRow
from anabranch.schemas.records.rows import WriterRow as WriterRow
from anabranch.schemas.records.rows import YieldedRow as YieldedRow


def is_record(cls: type) -> bool:
    """Whether a class of this package is a record of the protocol."""
    return is_dataclass(cls) or issubclass(cls, tuple)
