"""What the clients of a run did and were told: the checks hold the log against it.

Every event's value tells where it is from, ``deal/writer/number`` (see `Deal.event`), so that each one found in a
stream can be traced back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from anabranch.batches.records import Record, decode_records
from anabranch.core import rows as k
from anabranch.core.stream_states import LOST
from anabranch.errors import AnabranchError
from anabranch.ledger.book import Row
from anabranch.ports import TopicPartition
from anabranch.protocol.ids import CORRELATION_HEADER, control_partition_of
from anabranch.protocol.legal_names import OPEN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode
from anabranch.protocol.tokens import peek
from anabranch.reading.snapshot import StreamCut
from anabranch.topics.names import history_topic, status_topic, stream_topic
from anabranch.types import Result

if TYPE_CHECKING:
    from tests.sim.recording import History

Places = list[tuple[int, int]]  # partition, offset
Native = tuple[int, int]  # producer id and epoch
LIFE = "s/life"  # a stream that is deleted over and over (`tests.sim.lives`)
NOISE = b"noise"  # values that must never be seen in a stream
_ABORTS = ("ABORTED", "ABORT_IN_PROGRESS")  # the latter: not yet everywhere
LEFT_OUT = "left out, as their stream is LOST: "


class Told(NamedTuple):
    """An event that a writer gave to the library."""

    stream: str
    key: bytes | None
    value: bytes


class SafeAnswer(NamedTuple):
    """A timestamp that was answered.

    ``ends``: stream -> the end of its history when the answer came, of what was to become visible too.
    ``known``: the highest timestamp that the client knew of before it asked.
    """

    timestamp: int
    now: bool
    ends: dict[str, int]
    known: int


@dataclass
class WriterLog:
    """One writer: its events in order; whether it said it was finished."""

    label: str
    told: list[Told] = field(default_factory=list)
    finishing: bool = False  # it has said so; maybe nobody heard
    finished_at: float | None = None  # the controller has answered
    flushed: list[int] = field(default_factory=list)  # after so many events there was a receipt

    @property
    def part(self) -> str:
        """What the history calls the writer now: a new name after each receipt, since any may be committed."""
        return f"{self.label}.{len(self.flushed)}" if self.label != "own" else "own"

    def parts(self, count: int | None = None) -> list[str]:
        """The names of what a receipt for so many events takes; None: of all."""
        if self.label == "own":
            return ["own"]
        taken = [i for i, at in enumerate(self.flushed) if count is None or at <= count]
        return [f"{self.label}.{i}" for i in taken]


@dataclass
class Attempt:
    """One call of commit. ``receipts``: writer label -> events, exactly; None: all finished writers."""

    sent: float
    own: tuple[str, int] | None  # the committing handle's writer and how many events it had written
    receipts: dict[str, int] | None
    finished: frozenset[str]  # known to be finished before it
    name: str | None = None
    is_false: bool = False  # a receipt says what is not so
    number: int | None = None
    ended: float | None = None
    result: Result | None = None
    error: AnabranchError | None = None
    in_doubt: bool = False  # a call of it ended without an answer


@dataclass
class PlainTold:
    """An event that a program which knows nothing wrote to a journal partition. ``offset`` -1: not arrived."""

    stream: str
    partition: int
    key: bytes | None
    value: bytes
    offset: int = -1


class Given(NamedTuple):
    """An event of an input that a worker was given, and the output that it made of it."""

    stream: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    output: bytes


@dataclass
class Workplace:
    """A processor. ``is_over``: it can't go on, as events or topics of its inputs are gone."""

    name: str
    inputs: tuple[str, ...]
    tasks: int
    start: str
    stores: tuple[str, ...] = ()
    made: bool = False
    is_over: bool = False

    def inputs_in(self, streams: Iterable[str]) -> set[str]:
        """Which inputs are among these streams."""
        return set(self.inputs) & set(streams)


@dataclass
class Deal:
    """A transaction, or what was meant to be one."""

    label: str
    scope: str
    kind: str  # "one-shot", "journal"
    name: str | None = None
    number: int | None = None  # of the series that all numbered ones are of
    txn_id: bytes | None = None
    keepalive_ms: int = 0
    begun: bool = False  # a controller has said so
    opened: bool = False  # more than one command
    streams: Sequence[str] = ()
    writers: dict[str, WriterLog] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    aborted_at: float | None = None  # an abort was answered
    lane: str = OPEN_LANE  # that it is of
    named_result: Result | None = None  # the name was committed before it began
    finals: list[tuple[str, int]] = field(default_factory=list)  # (state, timestamp) that were told
    consumed: r.Consumed | None = None  # of a worker: the stretch that it commits
    ownership: str = ""  # … as the history knows it
    given: list[Given] = field(
        default_factory=list
    )  # … and its events, in the order in which it got them
    rows: int = 0  # of tables, that it writes
    tallied: int = 0  # events that it counts in a row

    @property
    def claims(self) -> bool:
        """Whether another transaction's outcome may be its answer."""
        return self.name is not None or self.number is not None

    def writer(self, label: str) -> WriterLog:
        """A new writer."""
        return self.writers.setdefault(label, WriterLog(label))

    def event(self, writer: WriterLog, stream: str, key: bytes | None, size: int = 0) -> Told:
        """Note the writer's next event, of so many bytes at least."""
        value = f"{self.label}/{writer.label}/{len(writer.told)}".encode()
        told = Told(stream, key, value + b" " + b"." * size if size else value)
        writer.told.append(told)
        return told

    def attempt(
        self,
        now: float,
        own: str | None,
        receipts: dict[str, int] | None,
        *,
        name: str | None = None,
        is_false: bool = False,
    ) -> Attempt:
        """Note a call of commit that is about to be made."""
        finished = {w.label for w in self.writers.values() if w.finished_at is not None}
        mine = (own, len(self.writers[own].told)) if own is not None else None
        made = Attempt(now, mine, receipts, frozenset(finished), name, is_false, self.number)
        self.attempts.append(made)
        return made


@dataclass
class Answers:
    """What was answered about instants; `tests.sim.instants.check_instants` judges it.

    ``differences``: stream, since, at, events. ``copies``: stream, as of when it is whole, the group's offsets.
    """

    differences: list[tuple[str, int, int, Places]] = field(default_factory=list)
    copies: list[tuple[str, int, dict[TopicPartition, int]]] = field(default_factory=list)


class Ledger:
    """All of a run. Kept outside of all processes: no crash takes it away."""

    def __init__(self, prefix: str, streams: Iterable[str], history: History) -> None:
        self.prefix = prefix
        self.history = history
        self.names_are_kept = True  # the outcomes of names are never forgotten
        self.readers: list[str] = []  # and snapshots, as the history knows them
        self.streams = list(streams)  # more come when the cluster grows
        self.deals: dict[str, Deal] = {}
        self.highest = 0  # number that a commit has asked for
        self.plain: dict[bytes, PlainTold] = {}  # by value
        self.heard: dict[bytes, list[float]] = defaultdict(list)  # commands that arrived, by id
        self.doubled: set[str] = set()  # deals whose one-shot the network delivers twice
        self.doubled_commits: set[bytes] = set()  # … and ids of those whose commit it does
        self.stale: dict[bytes, list[float]] = defaultdict(list)  # rounds that found it stale
        self.terms: dict[int, list[float]] = defaultdict(list)  # by control partition
        self._undecided: dict[Native, list[tuple[list[Any], object]]] = defaultdict(list)
        self.happened: set[Native] = set()  # native transactions that were committed
        self.carriers: set[int] = set()  # producer ids that staged merges aside
        self.safe_answers: list[SafeAnswer] = []
        self.final_answers: list[tuple[bytes, str, int]] = []  # answers about other ids
        self.snapshots: list[tuple[str, StreamCut, Places]] = []  # those that were read whole
        self.instants = Answers()  # about differences, and copies
        self.deleted: dict[str, str] = {}  # stream -> which topic of it somebody deleted
        self.lagged: set[str] = set()  # streams that some broker did not know for a while
        self.troubled: set[str] = set()  # streams that were in trouble for long
        self.limited: set[str] = set()  # … whose topics take hardly anything for a while
        self.poisoned = False  # somebody sent commands that nobody can mean
        self.lanes: set[str] = set()  # those that were made
        self.blocked: set[str] = set()  # … and blocked once
        self.workplaces: dict[str, Workplace] = {}  # by name
        self.ownerships = 0  # that were asked for
        self.numbers: dict[bytes, int] = {}  # what values of states say
        self.never: set[bytes] = set()  # ids of one-shots that came while their lane was blocked
        self.asked: dict[bytes, str] = {}  # correlation id -> the lane that it came by
        self._born: dict[bytes, str] = {}  # transaction -> the lane of its first command
        self.prepared: set[str] = set()  # deals that a database decides
        self.words: dict[bytes, bool] = {}  # … and its first word: whether to commit
        self.rows: dict[bytes, Row] = {}  # of its table; `tests.sim.prepared.Session`
        self.held: dict[bytes, object] = {}  # rows of sessions that have not committed
        self.lost: dict[str, list[float]] = defaultdict(list)  # stream -> rounds that gave it up
        self.late: dict[str, list[float]] = defaultdict(list)  # … and that wrote to it after that
        # Prepared ones that were committed without LOST streams -> these, as their rows said.
        self.left_out: dict[bytes, list[str]] = defaultdict(list)
        self.spread: list[bytes] = []  # transactions over several control partitions

    def hear_plain(self, offset: int, records: Iterable[Record]) -> None:
        """Records have arrived in a journal, from this offset on."""
        for at, record in enumerate(records, offset):
            told = self.plain.get(record.value or b"")
            if told is not None:
                told.offset = at

    def plainly(self, stream: str, partition: int, key: bytes | None) -> PlainTold:
        """Note a plain write that is about to be sent."""
        told = PlainTold(stream, partition, key, b"plain/%d" % len(self.plain))
        self.plain[told.value] = told
        return told

    def open(self, scope: str, kind: str, name: str | None = None, keepalive: float = 0.0) -> Deal:
        """Note a new transaction."""
        label = f"t{len(self.deals)}"
        deal = Deal(label, scope, kind, name, keepalive_ms=int(keepalive * 1000))
        deal.streams = self.streams
        self.deals[label] = deal
        return deal

    def number(self, deal: Deal, step: int) -> int:
        """Note the number that this transaction's commits claim: so far from the highest one asked for."""
        deal.number = max(0, self.highest + step)
        self.highest = max(self.highest, deal.number)
        return deal.number

    def hear(self, now: float, records: Iterable[Record], lane: str, number: int) -> None:
        """Commands of a lane have arrived at a control partition.

        Those of other lanes than a transaction's own may wait. A coordinator hears of no touch elsewhere.
        """
        for record in records:
            self.asked[dict(record.headers).get(CORRELATION_HEADER) or b""] = lane
            try:
                match command := decode(record.value or b""):
                    case r.Begin():
                        named = [command.txn_id]
                    case r.Touch() | r.Register() | r.Commit():
                        named = [peek(command.token).txn_id]
                    case r.Heartbeat():
                        named = [peek(token).txn_id for token in command.tokens]
                    case _:
                        named = []
            except AnabranchError:  # garbage, with a token or as a whole
                continue
            for txn_id in named:
                is_heard = control_partition_of(txn_id) == number
                if self._born.setdefault(txn_id, lane) == lane and is_heard:
                    self.heard[txn_id].append(now)

    def see_status(
        self, now: float, native: Native, partition: TopicPartition, data: bytes
    ) -> None:
        """Status rows are appended in a native transaction; they count once that is committed."""
        lost = [stream for stream, rounds in self.lost.items() if rounds]
        for stream in lost if native[0] not in self.carriers else ():
            if partition.topic in (stream_topic(stream), history_topic(stream)):
                self._undecided[native].append((self.late[stream], now))
        if partition.topic != status_topic(self.prefix):
            return
        for record in decode_records(data):
            if record.key is None or record.value is None:
                continue
            _, entry, _ = k.split_key(record.key)
            if entry is k.Entry.TERM:
                self._undecided[native].append((self.terms[partition.partition], now))
            elif entry is k.Entry.TXN:
                row = decode(record.value)
                is_own = partition.partition == control_partition_of(row.txn_id)
                if row.state in _ABORTS and row.reason.startswith("stale") and is_own:
                    self._undecided[native].append((self.stale[row.txn_id], now))
                for part in row.reason.split("; "):  # of several control partitions
                    _, says_so, streams = part.partition(LEFT_OUT)
                    if says_so:
                        self._undecided[native].append((self.left_out[row.txn_id], streams))
            elif entry is k.Entry.PARTITION:
                self._undecided[native].append((self.spread, record.key[:16]))
            elif entry is k.Entry.STREAM:
                row = decode(record.value)
                if row.state == LOST:
                    self._undecided[native].append((self.lost[row.stream], now))

    def double(self, records: Iterable[Record]) -> None:
        """Commands arrive a second time, and who sent them does not know."""
        for record in records:
            command = decode(record.value or b"")
            if isinstance(command, r.OneShot):
                self.doubled |= self._labels(command)
            elif isinstance(command, r.Commit):
                self.doubled_commits.add(peek(command.token).txn_id)

    def _labels(self, shot: r.OneShot) -> set[str]:
        """The deals of a one-shot, found by its events: the handle may have forgotten the id that was sent."""
        found = [self.deal_of(event.value) for event in shot.events if event.value is not None]
        return {origin[0].label for origin in found if origin is not None}

    def is_final(self, deal: Deal) -> bool:
        """Whether a refusal of its commit says that it is never committed: one command, of one client."""
        return deal.kind == "one-shot" and not deal.opened and deal.label not in self.doubled

    def settle(self, native: Native, *, commit: bool) -> None:
        """A native transaction has ended."""
        if commit:
            self.happened.add(native)
        for known, found in self._undecided.pop(native, ()):
            if commit:
                known.append(found)

    def deal_of(self, value: bytes) -> tuple[Deal, WriterLog, int] | None:
        """Where an event is from."""
        parts = value.decode(errors="replace").partition(" ")[0].split("/")
        deal = self.deals.get(parts[0])
        if len(parts) != 3 or deal is None or parts[1] not in deal.writers:
            return None
        return deal, deal.writers[parts[1]], int(parts[2])
