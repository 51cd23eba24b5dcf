"""The log of a run as it stands at the end, read from the brokers' memory without any port."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anabranch.batches.records import Record
from anabranch.core import rows as k
from anabranch.core.state import State
from anabranch.core.transaction_states import born
from anabranch.ports import TopicPartition
from anabranch.protocol.ids import (
    DIRECTORY,
    NO_TXN,
    TXN_HEADER,
    control_partition_of,
    is_marked,
    unpack_txn_header,
)
from anabranch.protocol.legal_names import OPEN_LANE, split_stream
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode
from anabranch.testing.memory.log import MemoryBrokers
from anabranch.testing.memory.table import MemoryStore
from anabranch.topics.names import (
    history_topic,
    journal_topic,
    replies_topic,
    status_topic,
    stream_topic,
)
from tests.core.tables import txn_rows
from tests.sim.retention import KeptPartition
from tests.sim.topics import BY_HAND
from tests.sim.world import Violation


class Seen(NamedTuple):
    """A record that readers of committed data see. ``native``: (producer id, epoch) of its batch."""

    record: Record
    base_offset: int
    native: tuple[int, int]


def visible(cluster: MemoryBrokers, place: TopicPartition, *, graves: bool = True) -> list[Seen]:
    """All that a reader of committed data sees of a partition, or saw before it was deleted.

    ``graves``: of topics of that name that were deleted, too. What somebody put there by hand is left out.
    """
    lives = list(getattr(cluster, "graves", {}).get(place, ())) if graves else []
    if place in cluster.partitions:
        lives.append(cluster.partition(place))
    return [
        Seen(record, entry.base_offset, (entry.producer_id, entry.producer_epoch))
        for partition in lives
        for stable in [partition.stable_offset]
        for entry in [
            *(partition.gone if isinstance(partition, KeptPartition) else []),
            *partition.entries,
        ]
        if entry.next_offset <= stable and not entry.is_control and not entry.is_aborted
        for record in entry.records
        if record.value != BY_HAND
    ]


def fold(
    cluster: MemoryBrokers,
    place: TopicPartition,
    before: int | None = None,
    *,
    start: int = 0,
    store: MemoryStore | None = None,
) -> MemoryStore:
    """A table folded from the status log alone; from nothing, unless a ``store`` and a ``start`` are given."""
    store = store or MemoryStore()
    table = store.open("fold")
    state = State(table)
    for seen in visible(cluster, place):
        if start <= seen.record.offset and (before is None or seen.record.offset < before):
            state.fold_row(seen.record.key or b"", seen.record.value)
    table.write(state.take_changes())
    table.close()
    return store


FOLDED = (k.STATUS, k.OPEN, k.FINISHED, k.META)


def folded_rows(store: MemoryStore) -> dict[bytes, bytes]:
    """The rows that follow from the status log."""
    return {key: v for key, v in store.snapshot().items() if key[:1] in FOLDED}


STUCK = ("COMMIT_IN_PROGRESS", "FINALIZE_IN_PROGRESS")


def stuck_of(state: State, deleted: Mapping[str, str]) -> set[bytes]:
    """Those that stay, as a topic was deleted (`docs/inside/decisions/0011`): merges that were being carried, and
    big ones that wait for the spare partitions that these keep; and those whose journal may have been made anew.
    """
    carried = {
        txn_id: txn
        for txn_id, txn in state.open.items()
        if txn.row.state == "FINALIZE_IN_PROGRESS" and deleted.keys() & txn.participants.keys()
    }
    kept = {stream for txn in carried.values() for stream in txn.participants}
    # A journal made anew that never comes to be as long as receipts say is not told from one that is late.
    short = {stream for stream, topic in deleted.items() if topic == "journal"}
    waiting = {
        txn_id
        for txn_id, txn in state.open.items()
        if txn.row.state == "COMMIT_IN_PROGRESS" and (kept | short) & txn.participants.keys()
    }
    return carried.keys() | waiting


def histories_of(found: Iterable[Seen]) -> list[tuple[Seen, Any]]:
    """With what is said there."""
    return [(seen, decode(seen.record.value or b"")) for seen in found]


@dataclass
class Placed:
    """An event in a stream: where it lies and whose it says it is (`NO_TXN`: a plain write)."""

    stream: str
    partition: int
    offset: int
    native: tuple[int, int]
    record: Record
    txn_id: bytes
    writer: int


def placed(
    cluster: MemoryBrokers, stream: str, number: int, *, graves: bool = True
) -> list[Placed]:
    """The events in a partition of a stream, as `visible` has them."""
    found = []
    for seen in visible(cluster, TopicPartition(stream_topic(stream), number), graves=graves):
        ours = [v for name, v in seen.record.headers if name == TXN_HEADER]
        txn_id, writer, _ = unpack_txn_header(ours[0] or b"") if ours else (NO_TXN, 0, 0)
        offset = seen.record.offset
        found.append(Placed(stream, number, offset, seen.native, seen.record, txn_id, writer))
    return found


@dataclass
class Picture:
    """Everything that the checks look at."""

    events: dict[tuple[str, int], list[Placed]] = field(default_factory=dict)
    history: dict[str, list[tuple[Seen, Any]]] = field(default_factory=dict)
    rows: dict[bytes, r.TxnRow] = field(default_factory=dict)
    # The rows of their parts at other control partitions, by these.
    parts: dict[bytes, dict[int, r.TxnRow]] = field(default_factory=lambda: defaultdict(dict))
    spread: set[bytes] = field(default_factory=set)  # transactions over several control partitions
    # Stream -> epoch, also of those forgotten, unless the log was compacted. Each control partition forgets alone.
    participants: dict[bytes, dict[str, int]] = field(default_factory=dict)
    epoch_rows: dict[str, set[int]] = field(default_factory=dict)
    left_over: list[str] = field(default_factory=list)  # rows that only an unfinished one needs
    # Control partition and thing -> the commands that changed it, in order.
    changes: dict[tuple[int, bytes], list[bytes]] = field(default_factory=lambda: defaultdict(list))
    carriers: set[int] = field(default_factory=set)  # producer ids that staged merges aside
    carried: set[bytes] = field(default_factory=set)  # their transactions
    cut: int = 0  # low waters that were logged
    history_low: dict[str, int] = field(default_factory=dict)  # those of histories
    starts: dict[tuple[str, int], int] = field(default_factory=dict)  # where streams begin
    retired: set[tuple[str, int]] = field(default_factory=set)  # partitions that are used no more
    moved: int = 0  # the same of rows that say where an old transaction was moved to
    chunks: int = 0  # so many times a carrier moved on
    topic_partitions: dict[str, int] = field(default_factory=dict)
    row_natives: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    processors: dict[str, r.ProcessorRow] = field(default_factory=dict)
    tasks: dict[tuple[str, int], r.TaskRow] = field(default_factory=dict)
    streams: dict[str, r.StreamRow] = field(default_factory=dict)
    scopes: dict[str, int] = field(default_factory=dict)  # scope -> control partition
    horizons: dict[int, int] = field(default_factory=dict)  # control partition -> forgotten up to
    replies: list[tuple[Seen, r.Reply]] = field(default_factory=list)
    unfinished: list[r.TxnRow] = field(default_factory=list)
    deleted: dict[str, str] = field(default_factory=dict)  # stream -> which topic, by outside hands
    stuck: set[bytes] = field(default_factory=set)  # decided, and can't be merged for that
    left_out: Mapping[bytes, list[str]] = field(default_factory=dict)  # see `Ledger`

    @classmethod
    def take(
        cls,
        cluster: MemoryBrokers,
        prefix: str,
        control_partitions: int,
        carriers: Iterable[int] = (),
        deleted: Mapping[str, str] | None = None,
        left_out: Mapping[bytes, list[str]] | None = None,
    ) -> Picture:
        """Read everything."""
        picture = cls(carriers=set(carriers), deleted=dict(deleted or {}), left_out=left_out or {})
        for number in range(control_partitions):
            place = TopicPartition(status_topic(prefix), number)
            table = fold(cluster, place).open("picture")
            state = State(table)
            picture.streams.update(state.streams)
            if number == DIRECTORY:
                picture.scopes = dict(state.scopes)
            picture.processors.update(state.processors)
            picture.tasks.update(state.tasks)
            picture.horizons[number] = state.round.expired_ms
            picture.unfinished += [txn.row for txn in state.open.values()]
            for row in txn_rows(state):
                if control_partition_of(row.txn_id) == number:
                    picture.rows[row.txn_id] = row
                    if state.partition_rows(row.txn_id):
                        picture.spread.add(row.txn_id)
                else:
                    picture.parts[row.txn_id][number] = row
            picture.stuck |= stuck_of(state, picture.deleted)
            picture._read_rows(state)
            for seen in visible(cluster, place):
                key = seen.record.key or b""
                is_own = control_partition_of(key) == number
                if len(key) == 17 and key[-1] == k.Entry.TXN and is_own:
                    picture.row_natives[key[:16]] = seen.native
                elif k.split_key(key)[1] is k.Entry.STAGED_MERGE:
                    picture.chunks += seen.native[0] in picture.carriers
                elif k.split_key(key)[1] is k.Entry.LOW_WATER:
                    picture.cut += 1
                elif k.split_key(key)[1] is k.Entry.MOVED:
                    picture.moved += seen.record.value is not None
                elif seen.record.value and k.split_key(key)[1] is k.Entry.PARTICIPANT:
                    pinned = decode(seen.record.value)
                    epochs = picture.participants.setdefault(key[:16], {})
                    epochs[pinned.stream] = pinned.reference_epoch
                elif seen.record.value and k.split_key(key)[1] is k.Entry.CHANGED:
                    picture.changes[number, key].append(decode(seen.record.value).asker)
        for stream in picture.streams:
            for topic in (stream_topic(stream), journal_topic(stream)):
                known = [*cluster.partitions, *getattr(cluster, "graves", {})]
                count = sum(place.topic == topic for place in dict.fromkeys(known))
                picture.topic_partitions[topic] = count
            picture._read_stream(cluster, stream, picture.topic_partitions[stream_topic(stream)])
        picture._add_one_shots_of_tasks()
        number = 0
        while (place := TopicPartition(replies_topic(prefix), number)) in cluster.partitions:
            for seen in visible(cluster, place):
                picture.replies.append((seen, decode(seen.record.value or b"")))
            number += 1
        return picture

    def _add_one_shots_of_tasks(self) -> None:
        """What a row would say of each: one-shots that move positions leave none."""
        kept = [txn_id.hex() for txn_id in self.rows if is_marked(txn_id)]
        if kept:
            raise Violation(f"one-shots that moved positions have left rows: {kept[:3]}")
        for _, seen, record in self.commits():
            if is_marked(record.txn_id):
                count = sum(segment.count for segment in record.segments)
                known = self.rows.get(record.txn_id)
                row = born(
                    "one_shot", record.txn_id, 0, scope="", commit_timestamp=record.timestamp,
                    committed=count + (known.committed if known else 0), owner=OPEN_LANE,
                )  # fmt: skip
                self.rows[record.txn_id] = row
                self.row_natives[record.txn_id] = seen.native
                self.participants[record.txn_id] = {}

    def _read_rows(self, state: State) -> None:
        for row in txn_rows(state):
            self.participants.setdefault(row.txn_id, {}).update(state.participants(row.txn_id))
            if row.txn_id in self.stuck:
                continue
            for key in state.row_keys(row.txn_id):
                _, entry, _ = k.split_key(key)
                if entry in (k.Entry.PENDING_COMMIT, k.Entry.STAGED_MERGE, k.Entry.MOVED):
                    self.left_over.append(f"{entry.name} of {row.txn_id.hex()} ({row.state})")
        self.retired |= {(name, n) for name in state.streams for n in state.retired(name)}
        for (stream, partition), low in state.low_water.items():
            if partition == k.HISTORY:
                self.history_low[stream] = low
        for stream, epochs in state.epochs.items():
            self.epoch_rows[stream] = set(epochs)

    def _read_stream(self, cluster: MemoryBrokers, stream: str, partitions: int) -> None:
        for number in range(partitions):
            found = placed(cluster, stream, number)
            place = TopicPartition(stream_topic(stream), number)
            if place in cluster.partitions:
                self.starts[stream, number] = cluster.partitions[place].start_offset
            self.carried |= {event.txn_id for event in found if event.native[0] in self.carriers}
            self.events[stream, number] = [e for e in found if self._is_due(e)]
        history = visible(cluster, TopicPartition(history_topic(stream), 0))
        self.history[stream] = histories_of(history)

    def _is_due(self, event: Placed) -> bool:
        """Whether it counts. A merge that is stuck, settled, or leaves out this stream may have carried chunks."""
        if event.txn_id in self.stuck:
            return False
        is_carried = event.native[0] in self.carriers
        row = self.rows.get(event.txn_id)
        if is_carried and row is not None and row.state == "ABORTED":
            return (event.stream, event.partition) not in self.retired
        return not (is_carried and event.stream in left_out(self, event.txn_id))

    def commits(self) -> list[tuple[str, Seen, r.CommitRecord]]:
        """All COMMIT records."""
        return [
            (stream, seen, record)
            for stream, found in self.history.items()
            for seen, record in found
            if isinstance(record, r.CommitRecord)
        ]

    def knows_part(self, txn_id: bytes, stream: str) -> bool:
        """Whether the stream's control partition has the transaction's rows."""
        number = self.scopes[split_stream(stream)[0]]
        is_own = number == control_partition_of(txn_id)
        return txn_id in self.rows if is_own else number in self.parts.get(txn_id, ())

    def is_forgotten(self, txn_id: bytes) -> bool:
        """Whether the outcome is older than the retention."""
        number, made_ms = int.from_bytes(txn_id[:2], "big"), int.from_bytes(txn_id[2:8], "big")
        return txn_id not in self.rows and made_ms <= self.horizons.get(number, 0)


def left_out(picture: Picture, txn_id: bytes | None) -> set[str]:
    """The LOST streams that a prepared transaction was committed without. Its row may be forgotten."""
    said = picture.left_out.get(txn_id or b"", ())
    return {stream for streams in said for stream in streams.split(", ")} & picture.deleted.keys()
