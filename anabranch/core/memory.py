"""State that a leader keeps only in memory; a new leader starts without it.

A turn changes its own *draft* of a part. `LeaderMemory.follow` applies the drafts when the turn's round is on the
log, or had nothing to log. So a round that is not written has no effect. Times are monotonic ms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, Protocol, Self, TypeVar, cast

from anabranch.core.across.holds import Holds
from anabranch.core.command_events import CommandEvents
from anabranch.core.journal_index import Place
from anabranch.core.locks.recent_writes import RecentWrites, RecentWritesDraft
from anabranch.core.locks.table_writes import Write
from anabranch.core.round import ReplyTo
from anabranch.core.state import OpenTxn, State
from anabranch.core.stream_states import ACTIVE, FORGETTING, FORGOTTEN, LOST, state_of
from anabranch.protocol.ids import control_partition_of, txn_text
from anabranch.protocol.schemas import records as r

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")


class DraftMap(Generic[K, V]):
    """A dict, or a draft: a turn's changes to another dict (``over``)."""

    __slots__ = ("over", "rows")

    def __init__(self, over: DraftMap[K, V] | None = None) -> None:
        self.over = over
        self.rows: dict[K, V | None] = {}

    def get(self, key: K, default: D) -> V | D:
        if key in self.rows:
            found = self.rows[key]
            return default if found is None else found
        return default if self.over is None else self.over.get(key, default)

    def put(self, key: K, value: V | None) -> None:
        """Set a value; None removes the key."""
        if value is None and self.over is None:
            self.rows.pop(key, None)
        else:
            self.rows[key] = value

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever put, or everything was removed and that was applied."""
        return not self.rows and (self.over is None or self.over.is_empty)

    def as_dict(self) -> dict[K, V]:
        if self.over is None:
            return cast("dict[K, V]", {**self.rows})  # `put` leaves no None there
        rows = self.over.as_dict()
        for key, value in self.rows.items():
            if value is None:
                rows.pop(key, None)
            else:
                rows[key] = value
        return rows

    def follow(self, draft: DraftMap[K, V]) -> None:
        """Apply the changes of a draft of this."""
        for key, value in draft.rows.items():
            self.put(key, value)

    def forget(self, is_gone: Callable[[K], bool]) -> None:
        for key in [key for key in self.rows if is_gone(key)]:
            self.put(key, None)

    def rebase(self) -> None:
        """Continue over the map below the draft that this is over: that draft was applied to it."""
        if self.over is not None and self.over.over is not None:
            self.over = self.over.over


class Part:
    """A part of the memory. Its fields are `DraftMap`s, or values that are replaced and never changed in place."""

    __slots__: tuple[str, ...] = ()

    def draft(self) -> Self:
        """A copy that a turn may change."""
        values = [getattr(self, name) for name in self.__slots__]
        return type(self)(*[DraftMap(v) if type(v) is DraftMap else v for v in values])

    def follow(self, draft: Self) -> None:
        """Apply the changes of a draft of this."""
        for name in self.__slots__:
            value = getattr(draft, name)
            if type(value) is not DraftMap:
                setattr(self, name, value)
            elif value.rows:
                getattr(self, name).follow(value)

    def rebase(self) -> None:
        """Continue over the memory to which the draft below this one was applied."""
        for name in self.__slots__:
            value = getattr(self, name)
            if type(value) is DraftMap:
                value.rebase()


@dataclass(slots=True)
class Keepalives(Part):
    """The last sign of life of each open transaction (``heard``), and the time of the next check for silent ones.

    ``since_ms``: the beginning of this leadership, which counts as a sign of life. ``helpers``: lanes other than
    the owner's that sent a transaction's heartbeats.
    """

    since_ms: int
    heard: DraftMap[bytes, int] = field(default_factory=DraftMap)
    helpers: DraftMap[bytes, tuple[str, ...]] = field(default_factory=DraftMap)
    next_check_ms: int = 0

    def last(self, txn_id: bytes) -> int:
        return self.heard.get(txn_id, self.since_ms)


Who = bytes | Place  # a transaction, or the plain writes of a journal partition


class Waiting(NamedTuple):
    """The wait of a commit for frozen locks: since when, and when the commit last tried.

    ``on``: the oldest of the transactions that it waits for, each with the table. ``writes``: its writes by table;
    of a big one only the table is kept. ``freezes``: whether its own locks would be frozen, too. ``held_since_ms``:
    since when it has waited for prepared transactions; the time of the last try, if it waits for none.
    """

    since_ms: int
    heard_ms: int
    held_since_ms: int
    on: tuple[tuple[bytes, str], ...]
    writes: tuple[tuple[str, Write], ...]
    freezes: bool


Why = Literal[
    "torn",  # a journal lost records of the transaction
    "stream",  # one of its streams is in trouble, or lost
    "refused",  # a broker refuses its data
    "journal",  # this leader has not read its journals that far yet
    "staging",  # its data is being staged
    "others",  # it is to be staged, and other staged merges have the partitions
    "partitions",  # a stream has too few partitions for it
    "locks",  # it would break frozen locks, or others would break its own
    "validation",  # its locks have to be validated again
    "rolls",  # one of its streams had a rolling commit within `collate_ms`
    "hold",  # a commit with an earlier timestamp is not merged, or not decided, on one of its streams
    "timestamp",  # its part here is ready, and other control partitions are not
]
STUCK: frozenset[Why] = frozenset(("torn", "stream", "refused"))  # these waits may last for hours
_TEXTS: dict[Why, str] = {
    "torn": "a journal lost records of it",
    "refused": "{on}",
    "journal": "the journal of {on} is read first",
    "staging": "its merge is being staged",
    "others": "another staged merge has the free partitions of {on}",
    "partitions": "{on} has too few partitions, and gets more",
    "locks": "it waits for frozen locks (`anabranch txn locks`)",
    "validation": "its locks have to be revalidated",
    "rolls": "{on} rolled a moment ago",
    "hold": "a commit with an earlier timestamp is merged into {on} first",
    "timestamp": "the merges of other control partitions are being staged",
}


class Wait(NamedTuple):
    """The reason why a decided transaction is not merged yet.

    ``since_ms``: the beginning of the wait; -1 if not known. ``until_ms``: the time of the next check. ``on``: the
    stream that it waits for, or a broker's error.
    """

    why: Why
    since_ms: int
    until_ms: int
    on: str = ""


@dataclass(slots=True)
class Merging(Part):
    """Waits of decided commits, and times before which a stream is left as it is.

    ``may_roll_ms``: the time of the next rolling commit. ``may_grow_ms``: when to ask for partitions again.
    ``waiting``: commits that wait for frozen locks.
    """

    waits: DraftMap[bytes, Wait] = field(default_factory=DraftMap)
    may_roll_ms: DraftMap[str, int] = field(default_factory=DraftMap)
    may_grow_ms: DraftMap[str, int] = field(default_factory=DraftMap)
    waiting: DraftMap[Who, Waiting] = field(default_factory=DraftMap)

    def wait(self, txn_id: bytes, why: Why, now_ms: int, ms: int, on: str = "") -> None:
        """Let a decided transaction wait for ``ms``. A known reason that says more than this one is kept."""
        known, since_ms = self.waits.get(txn_id, None), now_ms
        if known is not None:
            if known.why == "torn" or (known.why == "refused" and why in ("staging", "stream")):
                why, on = known.why, known.on
            if known.why == why:
                since_ms = known.since_ms
        self.waits.put(txn_id, Wait(why, since_ms, now_ms + ms, on))

    def look_now(self, txn_id: bytes) -> None:
        """Let the next turn check the merge of a transaction."""
        known = self.waits.get(txn_id, None)
        if known is not None:
            self.waits.put(txn_id, known._replace(until_ms=0))

    def forget_txn(self, txn_id: bytes) -> None:
        self.waits.put(txn_id, None)
        self.waiting.put(txn_id, None)

    def forget_stream(self, stream: str) -> None:
        self.may_roll_ms.put(stream, None)
        self.may_grow_ms.put(stream, None)
        self.waiting.forget(lambda who: who[0] == stream)


@dataclass(slots=True)
class Cleaning(Part):
    """When and where journals and histories are truncated.

    ``next_ms``: the next check. ``cuttable_ms``: since when a journal partition can be truncated. ``spare``: offset
    before which a history names only deleted events. ``crowded``: journal partitions from which runs may have to
    move; ``may_move_ms``: not before this time.
    """

    next_ms: int = 0
    cuttable_ms: DraftMap[Place, int] = field(default_factory=DraftMap)
    spare: DraftMap[str, int] = field(default_factory=DraftMap)
    crowded: tuple[Place, ...] = ()
    may_move_ms: DraftMap[Place, int] = field(default_factory=DraftMap)

    def forget_stream(self, stream: str) -> None:
        self.spare.put(stream, None)
        self.crowded = tuple(place for place in self.crowded if place[0] != stream)
        self.may_move_ms.forget(lambda place: place[0] == stream)
        self.cuttable_ms.forget(lambda place: place[0] == stream)


Row = tuple[str, int]  # a table, and the fingerprint of a key


class TurnAsker(NamedTuple):
    """A transaction that has a turn at a row, or waits for it; only its own lane can end that.

    ``until_ms``: when the turn, or the wait, ends at the latest. ``tables``: the tables that the answer is about.
    ``waited``: whether its turn did not come in the round in which it asked.
    """

    txn_id: bytes
    lane: str
    until_ms: int
    tables: tuple[str, ...]
    to: ReplyTo | None
    waited: bool = False


class RowQueue(NamedTuple):
    """The transactions that want one row: the ``holder`` of the turn, and the ``waiting`` ones, oldest first.

    ``lane``: the lane that had the last turn. ``warned``: one-shots without a turn that were answered once, in this
    turn, that others wait for the row.
    """

    holder: TurnAsker | None
    waiting: tuple[TurnAsker, ...]
    lane: str
    warned: tuple[bytes, ...] = ()


@dataclass(slots=True)
class RowTurns(Part):
    """Turns at rows at which transactions conflict. ``lanes``: how many a lane has, or waits for."""

    queues: DraftMap[Row, RowQueue] = field(default_factory=DraftMap)
    lanes: DraftMap[str, int] = field(default_factory=DraftMap)


class SegmentAsk(NamedTuple):
    """A touch that waits until segments of an exclusive stream are free.

    ``spans``: their keys. ``until_ms``: when it is answered at the latest. The place in the line is kept for a
    while after that, without an asker, so that the client can ask again. ``by``: the transaction that it met.
    ``let_plain``: the segments were free, and plain writes came first.
    """

    txn_id: bytes
    lane: str
    segments: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    until_ms: int
    to: ReplyTo | None
    by: bytes = b""
    let_plain: bool = False

    @property
    def waits(self) -> bool:
        """Whether it has waited in an earlier turn."""
        return bool(self.by) or self.let_plain


@dataclass(slots=True)
class SegmentAsks(Part):
    """Touches that wait for segments of exclusive streams, by stream, in the order in which they came.

    ``plain_since``: by stream, since when plain writes have waited for locked segments, Unix milliseconds.
    """

    by_stream: DraftMap[str, tuple[SegmentAsk, ...]] = field(default_factory=DraftMap)
    plain_since: DraftMap[str, int] = field(default_factory=DraftMap)


@dataclass(slots=True)
class Histories(Part):
    """The number of commits in each stream's history since its last EPOCH record."""

    since_epoch: DraftMap[str, int] = field(default_factory=DraftMap)


NEVER_MS = 1 << 62


class Sent(NamedTuple):
    """A message that is repeated until it is answered: since when it is sent, and when it is sent again."""

    asks: tuple[int, str]  # the round of votes, and what is asked
    since_ms: int
    next_ms: int
    pause_ms: int


class Quiet(NamedTuple):
    """Nothing is to be sent for a transaction until this time, while it has these rows."""

    rows: tuple[object, ...]
    until_ms: int


class WaitingCommand(NamedTuple):
    """A touch, or a `LockReads`, that waits for the coordinator of its transaction to say whether it may.

    ``size``: of the command, bytes.
    """

    command: r.Touch | r.LockReads
    lane: str
    to: ReplyTo | None
    until_ms: int
    size: int


class WaitingPart(NamedTuple):
    """A part of a one-shot that waits for its coordinator's question. ``size``: of its command, bytes.

    ``refusal``: why the command was refused when it came; then it waits without its events, to be a vote *no*.
    """

    command: r.OneShot
    lane: str
    to: ReplyTo | None
    until_ms: int
    size: int
    refusal: r.Refusal | None = None


class AskedShot(NamedTuple):
    """A one-shot whose coordinator has asked for votes, and has logged nothing of it yet.

    ``seen``: as in `Turn`, when the command was decided first. ``until_ms``: when it is logged even if votes are
    missing. ``size``: of its command, bytes.
    """

    command: r.OneShot
    lane: str
    to: ReplyTo | None
    seen: int | None
    until_ms: int
    size: int


class EarlyAsk(NamedTuple):
    """A question for a vote that came before the part of the one-shot. Nothing proves it yet."""

    ask: r.AskVote
    payload: bytes
    mac: bytes | None
    seen: int
    until_ms: int


def lately_ms(before_ms: int, took_ms: int) -> int:
    """About how long something takes lately: a longer time counts at once, a shorter one slowly."""
    return max(took_ms, (7 * before_ms + took_ms) // 8)


@dataclass(slots=True)
class Across(Part):
    """Memory of transactions over several control partitions (`core.decisions.across`).

    At a coordinator: ``votes`` and ``sent``: votes that count, and messages without an answer, by transaction and
    participant. ``done``: messages `Done` that are not logged yet; ``done_ms``: when they are logged at the latest.
    ``answered``: those who were answered because of messages in ``done``. ``answer_ms``: about how long the answers
    of other leaders have taken lately. ``held_ms``: since when there is a vote with a timestamp. ``again_ms``: when
    new votes may be asked for. ``exactly``: commits that name all their writers. ``quiet``: transactions for which
    no message is due now. ``asked_shots``: one-shots that are not logged yet. ``unknown_ms``: transactions that are
    unknown here, and since when a participant has asked for the decision.

    At a participant:
    ``waiting_commands``: commands that wait for the coordinator's leave to join, by transaction and scope.
    ``waiting_asks``: questions for votes that can't be answered yet.
    ``waiting_parts`` and ``early_asks``: commands of one-shots, and questions for votes about them, that wait for
    each other.
    ``undecided``: logged parts of one-shots without a decision, and when this leader asks for it.
    ``decision_ms``: about how many milliseconds have passed lately from a vote to its decision.

    ``on``: whether there may be such transactions at all; if not, turns share this without a draft.
    """

    on: bool = False
    votes: DraftMap[tuple[bytes, int], r.Vote] = field(default_factory=DraftMap)
    sent: DraftMap[tuple[bytes, int, str], Sent] = field(default_factory=DraftMap)
    done: DraftMap[tuple[bytes, int], r.Done] = field(default_factory=DraftMap)
    done_ms: int = NEVER_MS
    answer_ms: int = 0
    decision_ms: int = 0
    answered: DraftMap[bytes, tuple[ReplyTo, ...]] = field(default_factory=DraftMap)
    held_ms: DraftMap[bytes, int] = field(default_factory=DraftMap)
    again_ms: DraftMap[bytes, int] = field(default_factory=DraftMap)
    exactly: DraftMap[bytes, bool] = field(default_factory=DraftMap)
    quiet: DraftMap[bytes, Quiet] = field(default_factory=DraftMap)
    waiting_commands: DraftMap[tuple[bytes, str], tuple[WaitingCommand, ...]] = field(
        default_factory=DraftMap
    )
    waiting_asks: DraftMap[bytes, r.AskVote] = field(default_factory=DraftMap)
    waiting_parts: DraftMap[bytes, WaitingPart] = field(default_factory=DraftMap)
    early_asks: DraftMap[bytes, EarlyAsk] = field(default_factory=DraftMap)
    asked_shots: DraftMap[bytes, AskedShot] = field(default_factory=DraftMap)
    unknown_ms: DraftMap[bytes, int] = field(default_factory=DraftMap)
    undecided: DraftMap[bytes, Sent] = field(default_factory=DraftMap)


def across_of(state: State, *, on: bool) -> Across:
    """The memory of a new leader. ``on``: `Settings.across`."""
    found = Across(on=on or bool(state.coordinated or state.promised))
    for txn_id in state.promised:
        found.undecided.put(txn_id, Sent((0, ""), 0, 0, 0))  # the first turn asks at once
    return found


class Drafts(NamedTuple):
    """The drafts of one turn."""

    keepalives: Keepalives
    merging: Merging
    cleaning: Cleaning
    histories: Histories
    row_turns: RowTurns
    holds: Holds
    across: Across
    segment_asks: SegmentAsks
    recent_writes: RecentWritesDraft

    def draft(self) -> Drafts:
        """Drafts for the next turn, while the round of these ones is being written."""
        return _drafts_of(self)

    def rebase(self) -> None:
        """Note that the drafts which these ones are over were applied (`LeaderMemory.follow`)."""
        for part in self:
            part.rebase()


class LaneSeen(Protocol):
    """A lane whose commands are read, as decisions see it.

    ``end``: the last known end offset of its commands. ``read_ms``: all commands that existed at this time are
    decided, at the latest by this round. ``well_ms``: the last time that they were readable; the leader checks this
    when a transaction is silent. ``trouble``: why they can't be read; empty if they can.
    """

    end: int
    read_ms: int
    well_ms: int
    trouble: str

    def usage(self) -> Mapping[str, int]:
        """Units of work that this leader charged to the lane in all, and those that the lane still owes."""
        ...


@dataclass(slots=True)
class LeaderMemory:
    """All that decisions see in addition to the state and the journal index.

    ``written``: writes of transactions with a staged merge, by table; computed from the index on first use. The
    shell sets the last five fields. ``waiting``: streams in trouble, and why. ``staging``: transactions of which a
    chunk is being copied. ``foreign``: stream -> number of foreign records. ``lanes``: not blocked.
    ``busy_us``: microseconds of processor time of the leader's thread; 0: not known.
    """

    keepalives: Keepalives
    merging: Merging = field(default_factory=Merging)
    cleaning: Cleaning = field(default_factory=Cleaning)
    histories: Histories = field(default_factory=Histories)
    row_turns: RowTurns = field(default_factory=RowTurns)
    holds: Holds = field(default_factory=Holds)
    across: Across = field(default_factory=Across)
    segment_asks: SegmentAsks = field(default_factory=SegmentAsks)
    recent_writes: RecentWrites = field(default_factory=RecentWrites)
    written: dict[bytes, dict[str, Write]] = field(default_factory=dict)
    waiting: Mapping[str, str] = field(default_factory=dict)
    staging: Collection[bytes] = ()
    foreign: Mapping[str, int] = field(default_factory=dict)
    lanes: Mapping[str, LaneSeen] = field(default_factory=dict)
    busy_us: int = 0

    def draft(self) -> Drafts:
        """Make the drafts for a turn."""
        return _drafts_of(self)

    def follow(self, drafts: Drafts, ended: Iterable[bytes], forgotten: Iterable[str]) -> None:
        """Apply a turn's drafts, and drop the transactions that ended and the streams that were forgotten."""
        self.keepalives.follow(drafts.keepalives)
        self.merging.follow(drafts.merging)
        self.cleaning.follow(drafts.cleaning)
        self.histories.follow(drafts.histories)
        self.row_turns.follow(drafts.row_turns)
        if drafts.holds.in_use or self.holds.in_use:
            self.holds.follow(drafts.holds)
        if (
            self.across.on and drafts.across is not self.across
        ):  # a turn before it was on has no draft
            self.across.follow(drafts.across)
        self.segment_asks.follow(drafts.segment_asks)
        self.recent_writes.follow(drafts.recent_writes)
        for txn_id in ended:
            self.keepalives.heard.put(txn_id, None)
            self.keepalives.helpers.put(txn_id, None)
            self.merging.forget_txn(txn_id)
            self.written.pop(txn_id, None)
        for stream in forgotten:
            self.merging.forget_stream(stream)
            self.cleaning.forget_stream(stream)
            self.histories.since_epoch.put(stream, None)
            self.recent_writes.forget(stream)


def _drafts_of(parts: LeaderMemory | Drafts) -> Drafts:
    return Drafts(
        parts.keepalives.draft(),
        parts.merging.draft(),
        parts.cleaning.draft(),
        parts.histories.draft(),
        parts.row_turns.draft(),
        parts.holds.draft(),
        parts.across.draft() if parts.across.on else parts.across,
        parts.segment_asks.draft(),
        parts.recent_writes.draft(),
    )


def is_usable(state: State, waiting: Mapping[str, str], stream: str) -> bool:
    """Whether a stream's topics can be read and written, as far as is known."""
    row = state.streams.get(stream)
    return row is not None and row.state == ACTIVE and stream not in waiting


def is_gone(state: State, stream: str) -> bool:
    """Whether a stream is LOST, being forgotten, or forgotten. A stream that is being recovered is not gone."""
    return state_of(state.streams.get(stream)) in (LOST, FORGETTING, FORGOTTEN)


def unusable(state: State, waiting: Mapping[str, str], txn: OpenTxn) -> str:
    """A stream that a decided transaction has to wait for, or an empty text.

    A prepared transaction does not wait for LOST streams, nor for streams from which nothing is taken.
    """
    prepared = txn.pending is not None and txn.pending.prepare is not None
    due = {stream for _, stream, _ in txn.due} if prepared else txn.participants.keys()
    if prepared and not due and (kept := state.prepared_row(txn.row.txn_id)) is not None:
        due = {run.stream for run in CommandEvents.of(kept.events).runs}
    for stream in sorted(due & txn.participants.keys()):
        if not is_usable(state, waiting, stream) and not (prepared and is_gone(state, stream)):
            return stream
    return ""


def wait_of(state: State, memory: LeaderMemory, txn_id: bytes) -> Wait | None:
    """Why a decided transaction is not merged yet; None if no reason is known."""
    txn = state.open.get(txn_id)
    if txn is None or txn.row.state not in ("COMMIT_IN_PROGRESS", "FINALIZE_IN_PROGRESS"):
        return None
    known = memory.merging.waits.get(txn_id, None)
    if known is not None and known.why == "torn":
        return known
    stream = unusable(state, memory.waiting, txn)
    if stream:
        since_ms = -1 if known is None or known.why not in STUCK else known.since_ms
        return Wait("stream", since_ms, 0, stream)
    if known is not None and known.why == "stream":
        return None  # the stream is usable again: the next check merges it
    return known


def wait_text(memory: LeaderMemory, wait: Wait) -> str:
    """The reason for a wait, for people."""
    if wait.why == "stream":
        return f"{wait.on}: {memory.waiting.get(wait.on, 'a topic of it is gone')}"
    if wait.why == "hold" and (entry := memory.holds.open_on(wait.on)) is not None:
        coordinator = control_partition_of(entry.txn_id)
        return f"it waits for the decision of control partition {coordinator} on {wait.on}"
    return _TEXTS[wait.why].format(on=wait.on)


def way_to_end(state: State, txn_id: bytes) -> str:
    """The shell command by which an operator ends an open transaction."""
    by_hand = f"anabranch txn force {txn_text(txn_id)}"
    if txn_id in state.prepared:
        return f"{by_hand} --outcome commit|abort"
    txn = state.open[txn_id]
    if txn.row.state != "FINALIZE_IN_PROGRESS":
        return f"anabranch txn abort {txn_text(txn_id)}"
    is_prepared = txn.pending is not None and txn.pending.prepare is not None
    return f"{by_hand} --outcome abort" if is_prepared else by_hand


def trouble_of(state: State, memory: LeaderMemory, txn_id: bytes) -> str:
    """The reason why a decided transaction makes no progress by itself; empty if none is known."""
    wait = wait_of(state, memory, txn_id)
    if wait is None or wait.why not in STUCK:
        return ""
    return (
        f"its commit is decided, but its merge makes no progress: {wait_text(memory, wait)}; "
        f"`{way_to_end(state, txn_id)}` ends it"
    )
