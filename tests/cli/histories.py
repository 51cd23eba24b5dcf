"""Histories of streams, for what draws and lists them."""

from __future__ import annotations

import random
from itertools import pairwise

from anabranch.core import segments as seg
from anabranch.protocol.hybrid_time import from_us
from anabranch.protocol.ids import segment_id, segment_number
from anabranch.protocol.partitioner import SPACE
from anabranch.protocol.schemas.records import (
    CommitRecord,
    EpochRecord,
    EpochSegment,
    KeyRange,
    SegmentCommit,
    SegmentEnd,
    SegmentRange,
)

START_US = 1_790_000_000_000_000
HALF = SPACE // 2


def rolled_history() -> list[EpochRecord | CommitRecord]:
    """A segment is split, then a transaction that is older commits."""
    one = EpochSegment(0, 0, SPACE, 0, 0)
    upper = EpochSegment(segment_id(1, 1), 0, HALF, 0, 17)
    lower = EpochSegment(segment_id(1, 2), HALF, SPACE, 1, 30)
    again = EpochSegment(segment_id(2, 0), 0, SPACE, 0, 40)
    back = (
        EpochSegment(segment_id(3, 1), 0, HALF, 0, 4041),
        EpochSegment(segment_id(3, 2), HALF, SPACE, 1, 50),
    )
    at = iter(from_us(START_US + 1_500_000 * i) for i in range(99))

    def epoch(
        number: int, reference: int, *segments: EpochSegment, sealed: int = -1
    ) -> EpochRecord:
        ends = (SegmentEnd(sealed, 17),) if sealed >= 0 else ()
        return EpochRecord(number, reference, next(at), segments, ends, (), -1)

    def commit(number: int, *parts: tuple[EpochSegment, int]) -> CommitRecord:
        found = tuple(SegmentCommit(s.segment_id, s.partition, 0, n, n) for s, n in parts)
        return CommitRecord(bytes([number]) * 16, number, next(at), found, (), -1)

    return [
        epoch(0, 0, one),
        commit(0, (one, 3)),
        commit(0, (one, 7)),
        epoch(1, 1, upper, lower, sealed=0),
        commit(1, (upper, 4), (lower, 6)),
        epoch(2, 0, again),
        commit(2, (again, 4000)),
        epoch(3, 1, *back),
    ]


def random_history(epochs: int, seed: int) -> tuple[list[EpochRecord], list[CommitRecord]]:
    """Splits, merges and transactions rolled in, as they come."""
    chance = random.Random(seed)
    layouts: dict[int, tuple[SegmentRange, ...]] = {}
    records: list[EpochRecord] = []
    commits: list[CommitRecord] = []
    now_us, next_number, present = START_US, 3, 0

    def put(reference: int, layout: tuple[SegmentRange, ...]) -> None:
        nonlocal now_us
        now_us += chance.randrange(1, 10**7)
        number = len(records)
        layouts[number] = layout
        made = tuple(EpochSegment(s.segment_id, s.low, s.high, s.partition, 0) for s in layout)
        records.append(EpochRecord(number, reference, from_us(now_us), made, (), (), -1))
        for _ in range(chance.randrange(30)):
            now_us += chance.randrange(1, 10**5)
            parts = tuple(
                SegmentCommit(s.segment_id, s.partition, 0, 1, chance.randrange(1, 10**6))
                for s in chance.sample(layout, chance.randint(1, len(layout)))
            )
            txn_id = chance.randbytes(16) if chance.random() < 0.9 else bytes(16)
            commits.append(CommitRecord(txn_id, number, from_us(now_us), parts, (), -1))

    put(0, seg.create(next_number))
    while len(records) < epochs:
        layout, number = layouts[present], len(records)
        if present and chance.random() < 0.4:
            copied = chance.choice([r.reference_epoch for r in records])
            for reference in (copied, present):
                places = seg.place(layouts[reference], {}, (), 999)
                assert places is not None
                put(reference, seg.duplicate(layouts[reference], len(records), places))
            continue
        at = chance.randrange(len(layout))
        old = layout[at : at + chance.randint(1, 3)]
        cuts = sorted({old[0].low, old[-1].high, chance.randrange(old[0].low, old[-1].high)})
        ranges = [KeyRange(a, b) for a, b in pairwise(cuts)]
        newest = layouts[number - 1]
        numbers = [segment_number(s.segment_id) for s in old]
        made = seg.scale(
            newest,
            numbers,
            ranges,
            epoch=number,
            next_number=next_number,
            idle=sorted(set(range(999)) - {s.partition for s in newest}),
        )
        assert made is not None
        next_number += len(ranges)
        put(number, made)
        present = number
    return records, commits
