"""Journals in memory: what writers wrote, and true or bent accounts of it."""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

from anabranch.core.journal_index import JournalIndex
from anabranch.core.journal_runs import CRC_MODULUS, Run
from anabranch.core.state import State
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.schemas import records as r
from tests.core.labels import Labels
from tests.core.tables import Memory


class Written(NamedTuple):
    """A batch in a journal partition: records of one writer."""

    run: Run
    checksums: tuple[int, ...]


class Journals(Labels):
    """The journals of a control partition, and their index."""

    table: Memory
    state: State
    index: JournalIndex

    def __init__(self) -> None:
        super().__init__()
        self.journals: dict[tuple[str, int], list[Written]] = {}
        self.plain_runs: dict[tuple[str, int], list[Run]] = {}
        self.ends: dict[tuple[str, int], int] = {}
        self.held = False  # journals are not read
        self.sequences: dict[int, int] = {}

    def write(
        self,
        label: str,
        writer: str,
        stream: str = "nyc/a",
        count: int = 1,
        *,
        partition: int = 0,
        epoch: int = 0,
        keys: tuple[int, int] = (-1, -1),
        size: int | None = None,
        digest: bytes = b"",
        latest: int = 0,
    ) -> Run:
        """One batch of a writer's records in a journal; read in the next turn, unless held."""
        place = (stream, partition)
        first = self.ends.get(place, 0)
        self.ends[place] = first + count
        seed = crc32(f"{label} {writer} {stream} {partition} {first}".encode()) << 31
        checksums = tuple((seed + i * 2_654_435_761) % CRC_MODULUS for i in range(count))
        run = Run(
            txn_id=self.id(label),
            writer=self.writer(writer),
            stream_epoch=epoch,
            first=first,
            end=first + count,
            records=count,
            crc_sum=sum(checksums) % CRC_MODULUS,
            low=keys[0],
            high=keys[1],
            batch_base=first,
            batch_size=100 * count if size is None else size,
            pure=True,
            digest=digest,
            latest=latest,
        )
        self.journals.setdefault(place, []).append(Written(run, checksums))
        return run

    def write_plainly(
        self,
        stream: str = "nyc/a",
        count: int = 1,
        *,
        partition: int = 0,
        size: int | None = None,
        digest: bytes = b"",
    ) -> Run:
        """One batch of plain records in a journal; read in the next turn, unless held."""
        place = (stream, partition)
        first = self.ends.get(place, 0)
        self.ends[place] = first + count
        size = 100 * count if size is None else size
        run = Run(NO_TXN, 0, -1, first, first + count, count, 0, 0, 9, first, size, pure=True)
        run = run._replace(digest=digest)
        self.plain_runs.setdefault(place, []).append(run)
        return run

    def read_journals(self) -> None:
        """Index all that was written, unless the journals are held."""
        if self.held:
            return
        for (stream, partition), end in self.ends.items():
            place = (stream, partition)
            start = self.index.positions.get(place, 0)
            if end > start:
                written = [batch.run for batch in self.journals.get(place, ())]
                runs = [run for run in written if run.first >= start]
                plain = [run for run in self.plain_runs.get(place, ()) if run.first >= start]
                size = sum(run.batch_size for run in (*runs, *plain))
                changes = self.index.add(
                    self.state, stream, partition, runs, end, plain=plain, size=size
                )
                self.table.write(changes)

    def receipt(
        self,
        label: str,
        writer: str,
        *,
        finished: bool = True,
        sequence: int | None = None,
        loose: int = 0,
        count: int = 0,
        crc: int = 0,
    ) -> r.Receipt:
        """A true account of all that a writer wrote; ``loose``, ``count`` and ``crc`` bend it."""
        txn_id, w = self.id(label), self.writer(writer)
        if sequence is None:
            sequence = self.sequences[w] = self.sequences.get(w, 0) + 1
        extents = []
        for (stream, partition), batches in sorted(self.journals.items()):
            mine = [b for b in batches if (b.run.txn_id, b.run.writer) == (txn_id, w)]
            if mine:
                extents.append(
                    r.Extent(
                        stream=stream,
                        partition=partition,
                        first=max(0, mine[0].run.first - loose),
                        end=mine[-1].run.end + loose,
                        count=sum(b.run.records for b in mine) + count,
                        crc_sum=(sum(b.run.crc_sum for b in mine) + crc) % CRC_MODULUS,
                    )
                )
        return r.Receipt(txn_id, w, sequence, finished, tuple(extents))
