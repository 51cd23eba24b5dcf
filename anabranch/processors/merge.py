"""Merging: a round's events and journal runs become record batches of the streams, in commit order.

Big pure batches are spliced (copied as they are, design §8); small and mixed ones, and the events of one-shots,
are put together into bigger batches. Everything is a stream of batches, so that a big merge never lies whole in
memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from anabranch.core import hybrid_time
from anabranch.core.ids import TXN_HEADER, pack_txn_header
from anabranch.core.plan import Landed, Part, Round, StreamCommit
from anabranch.ports import Log, TopicPartition
from anabranch.processors.journal_reader import JournalReader
from anabranch.topics.builder import BatchBuilder
from anabranch.topics.names import journal_topic, stream_topic

# Below this a batch of its own costs more than taking it apart (evidence/splice.md).
MIN_SPLICED_RECORDS = 100
BATCH_BYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class Placed:
    """A batch for a stream's partition, and which parts' records it holds, in order.

    ``parts``: ((index of the commit in the round, index of its part), number of records).
    """

    partition: TopicPartition
    data: bytes
    parts: tuple[tuple[tuple[int, int], int], ...]


class Merge:
    """The data batches of a round, and where they landed."""

    def __init__(self, log: Log, round_: Round) -> None:
        self._log = log
        self._round = round_
        self._placed: list[Placed] = []
        self.landed: dict[tuple[int, int], Landed] = {}

    def batches(self) -> Iterator[Placed]:
        """Partition by partition, each in commit order."""
        queues: dict[tuple[str, int], list[tuple[tuple[int, int], StreamCommit, Part]]] = {}
        for i, commit in enumerate(self._round.commits):
            for j, part in enumerate(commit.parts):
                place = (commit.stream, part.partition)
                queues.setdefault(place, []).append(((i, j), commit, part))
        for (stream, partition), queue in queues.items():
            yield from _partition_batches(self._log, stream, partition, queue)

    def note(self, placed: Placed, base_offset: int) -> None:
        """The log said where a batch stands."""
        offset = base_offset
        for place, records in placed.parts:
            former = self.landed.get(place)
            first = former.first if former else offset
            total = records + (former.records if former else 0)
            self.landed[place] = Landed(first, offset + records, total)
            offset += records


class _Packer:
    """Collects records for one partition until a batch is full."""

    def __init__(self, partition: TopicPartition) -> None:
        self._partition = partition
        self._builder = BatchBuilder()
        self._parts: list[tuple[tuple[int, int], int]] = []

    def count(self, place: tuple[int, int], records: int) -> None:
        if self._parts and self._parts[-1][0] == place:
            records += self._parts.pop()[1]
        self._parts.append((place, records))

    @property
    def builder(self) -> BatchBuilder:
        return self._builder

    @property
    def full(self) -> bool:
        return self._builder.size_estimate >= BATCH_BYTES

    def flush(self) -> Iterator[Placed]:
        if self._builder.count:
            yield Placed(self._partition, self._builder.build(), tuple(self._parts))
            self._builder = BatchBuilder()
            self._parts = []


def _partition_batches(
    log: Log,
    stream: str,
    partition: int,
    queue: Iterable[tuple[tuple[int, int], StreamCommit, Part]],
) -> Iterator[Placed]:
    target = TopicPartition(stream_topic(stream), partition)
    packer = _Packer(target)
    reader = JournalReader(log, TopicPartition(journal_topic(stream), partition))
    for place, commit, part in queue:
        if part.events:
            yield from _pack_events(packer, place, commit, part)
        for run in part.runs:
            raw = reader.batch(run.batch_base)
            if run.pure and run.records >= MIN_SPLICED_RECORDS:
                yield from packer.flush()
                yield Placed(target, bytes(raw.data), ((place, run.records),))
                continue
            packer.builder.add_from_batch(
                raw, run.first - run.batch_base, run.end - 1 - run.batch_base
            )
            packer.count(place, run.records)
            if packer.full:
                yield from packer.flush()
    yield from packer.flush()


def _pack_events(
    packer: _Packer, place: tuple[int, int], commit: StreamCommit, part: Part
) -> Iterator[Placed]:
    header = (TXN_HEADER, pack_txn_header(commit.txn_id, 0, commit.stream_epoch))
    only = (header,)
    now = hybrid_time.to_ms(commit.timestamp)
    for event in part.events:
        packer.builder.add(
            event.key,
            event.value,
            (*((h.key, h.value) for h in event.headers), header) if event.headers else only,
            event.timestamp if event.timestamp >= 0 else now,
        )
        packer.count(place, 1)
        if packer.full:
            yield from packer.flush()
