"""One commit round, as it is written to the log: rows, replies, journal ops, merges and history records.

A `Round` is data. The shell appends it in one native transaction, returns the offsets of the merged events, and
sends the replies after the commit (`controller.durability` has the order). `history_records` makes a history's
records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anabranch.core.journal_runs import StoredRun
from anabranch.protocol.legal_names import OPEN_LANE
from anabranch.protocol.schemas import records as r


class Landed(NamedTuple):
    """The place of a part's events in the stream's partition: first offset, last offset + 1, number of records.

    An empty part has all 0. Offsets in between may be markers, never another part's.
    """

    first: int
    end: int
    records: int


class PlainWrites(NamedTuple):
    """Plain writes that a commit takes from a journal partition: whole runs, in order."""

    source: int
    runs: tuple[StoredRun, ...]


class Part(NamedTuple):
    """A transaction's events for one segment: runs of a journal partition, or events of a one-shot.

    ``source``: the journal partition of the runs. ``staged``: the place of events that a staged merge has copied.
    """

    segment_id: int
    partition: int
    runs: tuple[StoredRun, ...] = ()
    events: tuple[r.Event, ...] = ()
    source: int = -1
    staged: Landed | None = None


class StreamCommit(NamedTuple):
    """A transaction's merge into one stream, or a commit of plain writes.

    ``plain``: writes without a transaction id. Their records are placed by key into ``layout``; each of its
    segments has an empty part, and only parts that get records are in the history.
    """

    txn_id: bytes
    stream: str
    stream_epoch: int
    timestamp: int
    parts: tuple[Part, ...]
    plain: tuple[PlainWrites, ...] = ()
    layout: tuple[r.SegmentRange, ...] = ()


class NewEpoch(NamedTuple):
    """An epoch to write to a stream's history.

    ``starts``: partition -> its first offset, unless that is the known end. ``again``: this is the active epoch,
    logged once more so that the history can be truncated up to it.
    """

    stream: str
    stream_epoch: int
    reference_epoch: int
    timestamp: int
    segments: tuple[r.SegmentRange, ...]
    sealed: tuple[r.SegmentRange, ...] = ()
    starts: Mapping[int, int] = {}
    again: bool = False


Step = NewEpoch | StreamCommit


class ReplyTo(NamedTuple):
    """The asker of a command: its correlation id, its lane's partition of replies, and the command's digest.

    ``held``: the answer waits until every clock is past the commit (commit wait).
    """

    correlation_id: bytes
    partition: int
    command: bytes
    lane: str = OPEN_LANE
    held: bool = False

    @classmethod
    def of(cls, asker: r.Asker) -> ReplyTo:
        """The asker that a row names."""
        return cls(
            asker.correlation_id, asker.reply_partition, asker.command, asker.lane, asker.held
        )

    @property
    def row(self) -> r.Asker:
        """The asker, as a row names it."""
        return r.Asker(self.correlation_id, self.partition, self.command, self.lane, self.held)

    @property
    def asker(self) -> bytes:
        """The bytes that a repeated command has in common with the first."""
        return self.lane.encode() + b"/" + self.correlation_id


Answer = tuple[ReplyTo, Any]


@dataclass(slots=True)
class Round:
    """Everything that a pass of the controller decided, in order."""

    rows: dict[bytes, bytes | None] = field(default_factory=dict)
    replies: list[Answer] = field(default_factory=list)
    ops: list[tuple[str, int, r.JournalOp]] = field(default_factory=list)  # stream, partition, op
    history: list[Step] = field(default_factory=list)  # of all streams, by rising timestamps
    commands: list[tuple[int, Any]] = field(default_factory=list)  # to other control partitions
    audit: list[r.AuditRow] = field(default_factory=list)  # for the controller's log
    unread: list[str] = field(
        default_factory=list
    )  # transactions that expired while a lane could not be read
    reserved: list[str] = field(default_factory=list)  # streams in which a staged merge begins

    @property
    def streams(self) -> list[str]:
        """The streams whose history this round continues, in order."""
        return list(dict.fromkeys([step.stream for step in self.history]))

    @property
    def touched(self) -> list[str]:
        """The streams to whose topics this round writes, in order."""
        return list(dict.fromkeys([*self.streams, *[stream for stream, _, _ in self.ops]]))

    @property
    def commits(self) -> list[StreamCommit]:
        """The merges."""
        return [step for step in self.history if isinstance(step, StreamCommit)]

    @property
    def epochs(self) -> list[NewEpoch]:
        """The new stream epochs."""
        return [step for step in self.history if isinstance(step, NewEpoch)]

    @property
    def merged(self) -> set[bytes]:
        """The transactions that this round merges."""
        return {commit.txn_id for commit in self.commits if not commit.plain}

    @property
    def plain_runs(self) -> int:
        """The number of runs of plain writes that this round commits."""
        return sum(len(writes.runs) for commit in self.commits for writes in commit.plain)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to log or to answer.

        Answers also need a native commit: it proves that they are true.
        """
        return not (self.rows or self.replies or self.commands)
