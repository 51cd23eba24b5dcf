"""One round, as data: rows of the status log, replies, journal ops, merges and new stream epochs.

A *round* is one native transaction of a leader, with many decisions and their merges. A turn fills a `Round`. The
shell appends it, finds the offsets of the merged events, and sends the replies after the commit
(`controller.durability` has the order).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anabranch.core.command_events import NO_EVENTS, SomeEvents
from anabranch.core.journal_runs import StoredRun
from anabranch.protocol.legal_names import OPEN_LANE
from anabranch.protocol.schemas import records as r


class Landed(NamedTuple):
    """The place of a part's events in the stream's partition: first offset, last offset + 1, number of records.

    An empty part has all 0. Offsets in between may be markers, but not another part's events.
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

    ``source``: the journal partition of the runs. ``staged``: where a staged merge has copied the events.
    """

    segment_id: int
    partition: int
    runs: tuple[StoredRun, ...] = ()
    events: SomeEvents = NO_EVENTS
    source: int = -1
    staged: Landed | None = None


class StreamCommit(NamedTuple):
    """A transaction's merge into one stream, or a commit of plain writes.

    The records of ``plain`` writes are placed by key into ``layout``; each of its segments has an empty part, and
    the history names only the parts that get records.
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

    ``starts``: partition -> its first offset, if that differs from the partition's end in the history. ``again``:
    this is the active epoch, logged again so that the history can be truncated up to the new record.
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
    """The *asker* of a command, to which the reply is sent.

    ``partition``: of the lane's reply topic. ``command``: the command's digest. ``held``: whether the reply is
    delayed by commit wait. ``decided``: whether a commit is answered at its decision, before its merge.
    """

    correlation_id: bytes
    partition: int
    command: bytes
    lane: str = OPEN_LANE
    held: bool = False
    decided: bool = False

    @classmethod
    def of(cls, asker: r.Asker) -> ReplyTo:
        """The asker that a row names."""
        return cls(
            asker.correlation_id,
            asker.reply_partition,
            asker.command,
            asker.lane,
            asker.held,
            asker.decided,
        )

    @property
    def row(self) -> r.Asker:
        """The asker, as a row names it."""
        return r.Asker(
            self.correlation_id, self.partition, self.command, self.lane, self.held, self.decided
        )

    @property
    def asker(self) -> bytes:
        """Bytes that are the same for all copies of a command."""
        return self.lane.encode() + b"/" + self.correlation_id


Answer = tuple[ReplyTo, Any]


class Message(NamedTuple):
    """A record for another leader. ``secret``: the key of its HMAC; None: it has no HMAC."""

    receiver: int  # its control partition
    record: Any
    secret: bytes | None


@dataclass(slots=True)
class Round:
    """Everything that a turn decided, in order."""

    rows: dict[bytes, bytes | None] = field(default_factory=dict)
    replies: list[Answer] = field(default_factory=list)
    ops: list[tuple[str, int, r.JournalOp]] = field(default_factory=list)  # stream, partition, op
    history: list[Step] = field(default_factory=list)  # of all streams, by rising timestamps
    audit: list[r.AuditRow] = field(default_factory=list)  # for the controller's own log
    # For the controller's own log: texts about transactions that expired while a lane could not be read.
    unread: list[str] = field(default_factory=list)
    reserved: list[str] = field(default_factory=list)  # streams in which a staged merge begins
    # The time up to which no stream of the control partition gets another commit; 0: there are no holds.
    safe: int = 0
    # Sent when the round is on the log, as replies are: what they say is then true for good.
    messages: list[Message] = field(default_factory=list)
    # Sent before the round is written, and even if it is not: answers that follow from what is logged already, and
    # messages that state nothing.
    facts: list[Answer] = field(default_factory=list)
    questions: list[Message] = field(default_factory=list)
    # Why messages of other leaders were not acted on.
    ignored: list[str] = field(default_factory=list)

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
        return [step for step in self.history if isinstance(step, StreamCommit)]

    @property
    def epochs(self) -> list[NewEpoch]:
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

        Answers alone also need a native commit: it proves that no later leader decided meanwhile.
        """
        return not (self.rows or self.replies or self.messages)
