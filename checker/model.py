"""The contents of a history: events, transactions, the log, readers, snapshots. `checker.build` fills it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from checker.reading import ASYNCHRONOUS, FAILED, Operation

PLAIN = "0" * 32  # the transaction id of commits of plain writes


@dataclass(slots=True, eq=False)
class Event:
    """An event that a client asked to write. ``is_deletion``: of a table's row; then its id is made by the checker.

    ``txn``: None for a plain event. ``writer``: whose events keep an order; for a plain event a producer that
    promises one; None: unknown, as several writers of the transaction deleted the row. ``part``, ``rank``,
    ``offset``: its place in the log; ``part`` None: the log lacks it. ``record``: the record of the stream's
    history that names it. ``timestamp``: of its commit, if known. ``is_adrift``: it is in the log, but its
    transaction can never be committed, because one of its topics was deleted.
    """

    id: str
    stream: str
    key: str | None
    op: Operation
    index: int
    txn: Txn | None
    writer: str | None
    part: Part | None = None
    rank: int = -1
    offset: int = -1
    record: Record | None = None
    timestamp: int | None = None
    is_adrift: bool = False
    is_deletion: bool = False

    @property
    def line(self) -> Part | None:
        """The sequence in which readers of events get it."""
        return self.part

    def asked_after(self, op: Operation) -> bool:
        """Whether each of its possible commits was requested after that operation had ended."""
        if self.txn is None:
            return op.ended_before(self.op)
        return all(op.ended_before(commit) for commit in self.txn.candidates)

    def __str__(self) -> str:
        return f"{self.id} of {self.stream}"


@dataclass(slots=True, eq=False)
class Part:
    """A partition of a stream, read at the end. ``items``: its events in the order of their offsets."""

    stream: str
    partition: int
    op: Operation
    start: int
    end: int
    items: list[Event] = field(default_factory=list)
    passed_over: set[int] = field(
        default_factory=set
    )  # offsets of deletions by an unknown transaction

    def __str__(self) -> str:
        return f"{self.stream}[{self.partition}]"


@dataclass(slots=True, eq=False)
class Record:
    """A commit record of a history. ``ids``: empty for plain writes. ``ranges``: (partition, first, end)."""

    line: Chronicle
    rank: int
    offset: int
    timestamp: int
    ids: tuple[str, ...]
    ranges: list[tuple[int, int, int]]
    events: list[Event] = field(default_factory=list)

    def asked_after(self, op: Operation) -> bool:
        """`Event.asked_after`, for all its events."""
        return all(event.asked_after(op) for event in self.events)

    def __str__(self) -> str:
        return f"the commit at {self.timestamp} of {self.line.stream}"


@dataclass(slots=True, eq=False)
class Chronicle:
    """A stream's history topic. ``is_cut``: its beginning is deleted."""

    stream: str
    op: Operation
    is_cut: bool
    items: list[Record] = field(default_factory=list)

    def __str__(self) -> str:
        return self.stream


@dataclass(slots=True, eq=False)
class Answer:
    """An answer about a transaction. ``events``: how many are committed; ``left_out``: how many are left out, if
    the answer says so.
    """

    op: Operation
    state: str
    timestamp: int | None = None
    events: int | None = None
    left_out: int | None = None


@dataclass(slots=True, eq=False)
class Txn:
    """A transaction. ``handle`` and ``scope`` are empty if only its id is known.

    ``is_committed``, ``timestamp``: by any answer or the log; None: unknown. ``records``: in the histories of its
    streams. ``gave_way``: requests that were answered with the outcome of an earlier transaction of the same name
    or number.
    """

    handle: str
    scope: str = ""
    txn_id: str | None = None
    begin: Operation | None = None
    events: list[Event] = field(default_factory=list)
    commits: list[Operation] = field(default_factory=list)
    aborts: list[Operation] = field(default_factory=list)
    finishes: dict[str, Operation] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    gave_way: list[Operation] = field(default_factory=list)
    is_committed: bool | None = None
    timestamp: int | None = None
    _candidates: list[Operation] | None = None

    @property
    def candidates(self) -> list[Operation]:
        """Its requests to commit that may have taken effect."""
        if self._candidates is None:
            self._candidates = [op for op in self.commits if op.outcome != FAILED]
        return self._candidates

    @property
    def is_prepared(self) -> bool:
        """Whether a request prepared it, so that its coordinator decides."""
        return any(op.asked.get("prepares") for op in self.commits)

    @property
    def first_asked(self) -> Operation | None:
        """The first of the candidates, by time."""
        return min(self.candidates, key=lambda op: op.at, default=None)

    def answered(self, *states: str) -> list[Answer]:
        return [answer for answer in self.answers if answer.state in states]

    def __str__(self) -> str:
        return f"transaction {self.handle or self.txn_id}"


@dataclass(slots=True, eq=False)
class Reader:
    """A reader and its operations in order; ``end``: the last answered one."""

    name: str
    mode: str
    streams: tuple[str, ...]
    group: str | None
    starts: str | int
    op: Operation
    polls: list[Operation] = field(default_factory=list)
    positions: list[Operation] = field(default_factory=list)
    resumes: list[Operation] = field(default_factory=list)
    caught_up: list[Operation] = field(default_factory=list)
    closed: Operation | None = None


class EntryCommit(NamedTuple):
    """What a commit wrote to a derived table: keys and rows (None: deleted), the last of each key."""

    timestamp: int
    ids: tuple[str, ...]
    rows: dict[str, str | None]


class EntryEvent(NamedTuple):
    """An event of a table that a worker derives. ``of``: the commit of the source that it is of; None: of none."""

    timestamp: int
    key: str
    row: str | None
    of: int | None


@dataclass(slots=True, eq=False)
class Derivation:
    """A version of a derived table. ``fields``: the parts of a row's id, split at ``/``, that are its values.
    ``number``: the part that totals by value add up.

    ``parts``: its log, by partition; ``records``: its history. ``changes``: what each commit wrote, in order;
    ``events``: each event of an asynchronous one, in the order of commits.
    ``states``: when its state changed, and to what. ``ended``: the first answer that it is not in force any more.
    ``is_read``: whether log and history are whole.
    """

    table: str
    source: str
    name: str
    version: int
    type: str
    fields: tuple[int, ...]
    number: int
    op: Operation
    parts: dict[int, Operation] = field(default_factory=dict)
    records: Operation | None = None
    changes: list[EntryCommit] = field(default_factory=list)
    events: list[EntryEvent] = field(default_factory=list)
    states: list[tuple[int, str]] = field(default_factory=list)
    ended: Operation | None = None
    is_read: bool = True

    @property
    def unique(self) -> bool:
        """Whether no two rows may have one value."""
        return self.type == "unique"

    def values(self, row: str | None) -> set[str]:
        """The values of a row with this id; None: there is no row."""
        parts = [] if row is None else row.split("/")
        found = {parts[number] for number in self.fields if number < len(parts)}
        return found - {"-"}

    def number_of(self, row: str) -> int:
        """The number of a row with this id."""
        return int(row.split("/")[self.number])

    def is_ready(self, at: int) -> bool:
        """Whether look-ups at a time read it."""
        states = [state for timestamp, state in self.states if timestamp <= at]
        return states[-1:] == ["ready"]

    def is_stateless(self, at: int) -> bool:
        """Whether its state was not written up to a time."""
        return not any(timestamp <= at for timestamp, _ in self.states)

    def __str__(self) -> str:
        return f"version {self.version} of {self.name} of {self.source}"


@dataclass(slots=True, eq=False)
class Snapshot:
    label: str
    streams: tuple[str, ...]
    op: Operation
    reads: list[Operation] = field(default_factory=list)


@dataclass(eq=False)
class History:
    operations: list[Operation]
    events: dict[str, Event] = field(default_factory=dict)
    txns: dict[str, Txn] = field(default_factory=dict)
    by_id: dict[str, Txn] = field(default_factory=dict)
    parts: dict[tuple[str, int], Part] = field(default_factory=dict)
    unread: set[tuple[str, int]] = field(default_factory=set)  # (stream, partition) not read
    chronicles: dict[str, Chronicle] = field(default_factory=dict)
    readers: dict[str, Reader] = field(default_factory=dict)
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    logs: list[Operation] = field(default_factory=list)
    histories: list[Operation] = field(default_factory=list)
    states: list[Operation] = field(default_factory=list)
    takes: list[Operation] = field(default_factory=list)
    drained: list[Operation] = field(default_factory=list)
    outcomes: list[Operation] = field(default_factory=list)
    totals: list[Operation] = field(default_factory=list)
    near: dict[str, str] = field(
        default_factory=dict
    )  # scope -> first scope of its control partition
    deleted: dict[tuple[str, str], Operation] = field(default_factory=dict)  # (stream, topic)
    truncations: dict[str, list[Operation]] = field(default_factory=dict)  # by stream
    tables: set[str] = field(default_factory=set)  # streams that are tables
    deletions: dict[tuple[str, str], list[Event]] = field(default_factory=dict)  # by table and key
    reads: list[Operation] = field(default_factory=list)
    changes: list[Operation] = field(default_factory=list)
    totals_read: list[Operation] = field(default_factory=list)
    derivations: dict[str, Derivation] = field(default_factory=dict)  # by derived table
    entries: Counter[str] = field(default_factory=Counter)  # of derived tables, by transaction id

    _logged: set[str] | None = None
    _starts: dict[str, bool] | None = None

    @property
    def all_txns(self) -> list[Txn]:
        """Transactions with a handle, and those of which only the id is known."""
        return [*self.txns.values(), *(txn for txn in self.by_id.values() if not txn.handle)]

    def is_whole(self, stream: str) -> bool:
        """Whether the stream's log was read whole at the end (or deleted): then no other event is in it."""
        if self._logged is None:
            left_out = {stream for stream, _ in self.unread - self.parts.keys()}
            gone = {stream for stream, topic in self.deleted if topic == "stream"}
            self._logged = ({stream for stream, _ in self.parts} | gone) - left_out
        return stream in self._logged

    def is_trimmed(self, stream: str, event: Event | None = None) -> bool:
        """Whether the beginning of one of the stream's partitions, or its whole topic, was deleted.

        ``event``: a deleted topic does not count for an event that was requested later.
        """
        if self._starts is None:
            self._starts = {}
            for (name, _), part in self.parts.items():
                self._starts[name] = self._starts.get(name, False) or part.start > 0
        return self._starts.get(stream, False) or self._went(stream, event)

    def was_deleted(
        self, stream: str, partition: int, offset: int, event: Event | None = None
    ) -> bool:
        """Whether the event at an offset may have been deleted, or its topic. ``event``: as in `is_trimmed`."""
        part = self.parts.get((stream, partition))
        return (part is not None and offset < part.start) or self._went(stream, event)

    def _went(self, stream: str, event: Event | None) -> bool:
        deletion = self.deleted.get((stream, "stream"))
        return deletion is not None and (event is None or not event.asked_after(deletion))

    def was_there(self, read: Operation) -> bool:
        """Whether a reading of a snapshot had ended before its topic was deleted."""
        stream = read.asked["stream"]
        deletions = [self.deleted.get((stream, topic)) for topic in ("stream", "history")]
        return all(op is None or read.ended_before(op) for op in deletions)

    def is_spoiled(self, stream: str) -> bool:
        """Whether one of its topics was deleted: then its plain writes need not be committed any more."""
        return any(name == stream for name, _ in self.deleted)

    def is_due(self, event: Event) -> bool:
        """Whether log and snapshots must have an event that a commit took, if retention deleted nothing."""
        if event.is_adrift:
            return False
        return event.part is not None or not self.may_be_left_out(event)

    def may_be_left_out(self, event: Event) -> bool:
        """Whether its transaction may be committed without it, as the stream lost a topic.

        A prepared transaction may, and one over several control partitions, whose coordinator may decide before it
        hears of the loss.
        """
        txn = event.txn
        if txn is None or not self.is_spoiled(event.stream):
            return False
        if not (txn.is_prepared or self.is_spread(txn)):
            return False
        return all(answer.left_out != 0 for answer in txn.answered("committed"))

    def knows(self, source: str, name: str) -> bool:
        """Whether it is known when each version of a derivation was ready."""
        its = [d for d in self.derivations.values() if (d.source, d.name) == (source, name)]
        return all(each.is_read for each in its)

    def ready(self, source: str, name: str, at: int) -> list[Derivation]:
        """The versions of a derivation that look-ups at a time read: one, if all is well.

        An asynchronous one is read before it has a state, until a version is ready.
        """
        its = [d for d in self.derivations.values() if (d.source, d.name) == (source, name)]
        stateless = [d for d in its if d.type == ASYNCHRONOUS and d.is_stateless(at)]
        first = sorted(stateless, key=lambda each: each.version)[:1]
        return [each for each in its if each.is_ready(at)] or first

    def clock_of(self, name: str) -> str:
        """The clock of a scope or stream: scopes of one control partition have the same, and share transactions."""
        scope = name.split("/")[0]
        return self.near.get(scope, scope)

    def is_spread(self, txn: Txn) -> bool:
        """Whether a transaction is over several control partitions: those of its streams and of its scope."""
        names = {txn.scope, *[event.stream for event in txn.events]} - {""}
        return len({self.clock_of(name) for name in names}) > 1

    def clocks_of(self, txn: Txn) -> list[str]:
        """The clocks of a transaction's scope, and of all streams in which it is: its time is later by each."""
        names = {txn.scope, *[record.line.stream for record in txn.records]} - {""}
        return sorted({self.clock_of(name) for name in names})
