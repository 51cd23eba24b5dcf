"""Merging: a round's events and journal runs become record batches of the streams, in commit order.

`anabranch.batches.splice` copies batches or puts them together; this module says what goes where, and notes where
it landed. Everything is a stream of batches, so that a big merge is never whole in memory; only plain writes are,
which the round bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from anabranch.batches.journal_refetch import JournalReaders
from anabranch.batches.packer import DEFAULT_LIMIT
from anabranch.batches.splice import Piece, Splice
from anabranch.batches.split import Split
from anabranch.core import hybrid_time
from anabranch.core.ids import TXN_HEADER, pack_txn_header
from anabranch.core.round import Landed, NewEpoch, Part, Round, StreamCommit
from anabranch.ports import RawBatch, TopicPartition
from anabranch.topics.names import journal_topic, stream_topic

Placed = tuple[TopicPartition, bytes | memoryview]


class Merge:
    """The data batches of a round, and where they landed.

    Take the batches of `batches` in their order, append them, and give `note` the base offsets in that order.
    """

    def __init__(
        self, readers: JournalReaders, round_: Round, limits: Mapping[str, int] | None = None
    ) -> None:
        """``limits``: the most bytes of a batch, by stream; others have the default."""
        queues: dict[tuple[str, int], list[tuple[tuple[int, int], Piece]]] = {}
        limits = limits or {}
        for i, commit in enumerate(round_.history):
            if isinstance(commit, NewEpoch):
                continue
            pieces = _pieces(readers, commit, limits.get(commit.stream, DEFAULT_LIMIT))
            for j, part, piece in pieces:
                queue = queues.setdefault((commit.stream, part.partition), [])
                queue.append(((i, j), piece))
        self._splices = [
            (
                [place for place, _ in queue],
                Splice(
                    readers,
                    TopicPartition(stream_topic(stream), partition),
                    [piece for _, piece in queue],
                    limit=limits.get(stream, DEFAULT_LIMIT),
                ),
            )
            for (stream, partition), queue in queues.items()
        ]
        self._yielded: list[Splice] = []

    def batches(self) -> Iterator[Placed]:
        """Partition by partition, each in commit order; made as they are taken."""
        for _, splice in self._splices:
            for placed in splice.batches():
                self._yielded.append(splice)
                yield placed

    def note(self, base_offsets: Sequence[int]) -> None:
        """Take in the base offsets of the batches, as far as they were appended."""
        done, self._yielded = (
            self._yielded[: len(base_offsets)],
            self._yielded[len(base_offsets) :],
        )
        for splice, base in zip(done, base_offsets, strict=True):
            splice.note((base,))

    def landed(self) -> dict[tuple[int, int], Landed]:
        """(index of the commit in the round's history, index of its part) -> its place."""
        found: dict[tuple[int, int], Landed] = {}
        for places, splice in self._splices:
            found.update(zip(places, splice.landed(), strict=True))
        return found


def _pieces(
    readers: JournalReaders, commit: StreamCommit, limit: int
) -> Iterator[tuple[int, Part, Piece]]:
    """The pieces to append for a commit's parts, by the parts' indexes."""
    if commit.plain:
        for j, batches in enumerate(_split(readers, commit, limit)):
            if batches:
                yield j, commit.parts[j], Piece(batches=batches)
        return
    header = (TXN_HEADER, pack_txn_header(commit.txn_id, 0, commit.stream_epoch))
    only = (header,)  # one tuple for all: it is encoded once
    for j, part in enumerate(commit.parts):
        if part.carried is None:  # else it is in the stream already
            yield j, part, _piece(commit, part, only)


def _split(readers: JournalReaders, commit: StreamCommit, limit: int) -> list[list[RawBatch]]:
    """The batches that plain writes bring to each segment."""
    split = Split(commit.layout, limit)
    for writes in commit.plain:
        reader = readers.of(TopicPartition(journal_topic(commit.stream), writes.source))
        keyless = split.keyless(writes.source)
        for run in writes.runs:
            split.add(reader.batch(run.batch_base, run.batch_crc), run, keyless)
    return split.done()


def _piece(commit: StreamCommit, part: Part, only: tuple[tuple[str, bytes]]) -> Piece:
    if part.runs:
        return Piece(
            source=TopicPartition(journal_topic(commit.stream), part.source), runs=part.runs
        )
    now = hybrid_time.to_ms(commit.timestamp)
    return Piece(
        events=[
            (key, value, (*own, *only) if own else only, stamp if stamp >= 0 else now)
            for _, _, key, value, own, stamp in part.events
        ]
    )
