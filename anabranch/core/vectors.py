"""Vectors of history records (`docs/protocol.md`, section 13): the end of each partition as of a record.

In a stream of few partitions each record has its vector. In a wide one only EPOCH records and one of `EVERY`
records have it: a COMMIT record between them tells where its own events end, and where the last record with a
vector is. A reader finds that one in one step, and the records from there on tell the rest.
"""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.schemas.records import CommitRecord, EpochRecord, Position

Record = EpochRecord | CommitRecord

FEW = 16  # up to this many partitions, each record has its vector
EVERY = 64  # with more, at least one of this many records in a row
OWN = -1  # ``vector_at`` of a record with a vector; OWN - n: n records before, in the same batch


def has_vector(record: Record) -> bool:
    """Whether the record tells the ends of all partitions."""
    return isinstance(record, EpochRecord) or record.vector_at == OWN


def vector_place(offset: int, record: Record) -> int:
    """The offset of the last record with a vector, as of this one, which stands at ``offset``."""
    at = OWN if isinstance(record, EpochRecord) else record.vector_at
    return at if at >= 0 else offset + at - OWN


def told(record: Record) -> Iterable[Position]:
    """The ends that the record tells by itself: of all partitions, or of those that its commit moved."""
    if isinstance(record, EpochRecord) or record.vector_at == OWN:
        return record.vector
    return [Position(part.partition, part.end) for part in record.segments]


def positions(vector: dict[int, int]) -> tuple[Position, ...]:
    """The vector as a record has it."""
    new = tuple.__new__
    return tuple([new(Position, place) for place in sorted(vector.items())])


def completed(record: Record, since: Iterable[Record]) -> Record:
    """The record with its vector. ``since``: the records from its `vector_place` up to itself."""
    if isinstance(record, EpochRecord):
        return record
    vector: dict[int, int] = {}
    for one in since:
        vector.update(told(one))
    return record._replace(vector=positions(vector), vector_at=OWN)
