"""The layout of a stream's picture: its segments through the epochs, and the width of each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

from anabranch.core.ids import segment_epoch, segment_number
from anabranch.schemas.records import EpochRecord, EpochSegment

LEFT, RIGHT = 78.0, 46.0  # margins
NARROW, WIDE = 1080.0, 3200.0  # of the picture; few epochs are stretched, many compressed


@dataclass(slots=True)
class Arm:
    """A segment, and the epochs (their places in the history) in which it was open."""

    segment: EpochSegment
    first: int
    last: int
    rolled: bool

    @property
    def number(self) -> int:
        return segment_number(self.segment.segment_id)

    @property
    def name(self) -> str:
        return f"{self.number}@{segment_epoch(self.segment.segment_id)}"


def rolled_of(epochs: Sequence[EpochRecord]) -> list[bool]:
    """Which epochs are copies of a layout that is not the present one."""
    present = epochs[0].reference_epoch
    found = []
    for epoch in epochs:
        if epoch.reference_epoch == epoch.stream_epoch:
            present = epoch.stream_epoch
        found.append(epoch.reference_epoch != present)
    return found


def arms_of(epochs: Sequence[EpochRecord], rolled: Sequence[bool]) -> list[Arm]:
    """All segments, in the order in which they open."""
    arms: list[Arm] = []
    open_arms: dict[int, Arm] = {}
    for at, epoch in enumerate(epochs):
        now = {}
        for segment in epoch.segments:
            arm = open_arms.get(segment.segment_id)
            if arm is None:
                arm = Arm(segment, at, at, rolled[at])
                arms.append(arm)
            arm.last = at
            now[segment.segment_id] = arm
        open_arms = now
    return arms


def columns_of(counts: Sequence[int]) -> tuple[list[float], float]:
    """The left edge of each epoch (and the right one of the last), and the width of the flow between two."""
    least = 118.0 if len(counts) <= 10 else 44.0 if len(counts) <= 40 else 16.0
    widths = [least + min(150.0, 9 * sqrt(count)) for count in counts]
    total = sum(widths)
    factor = min(max(1.0, (NARROW - LEFT - RIGHT) / total), (WIDE - LEFT - RIGHT) / total)
    bounds = [LEFT]
    for width in widths:
        bounds.append(bounds[-1] + width * factor)
    gap = min(46.0, 0.5 * min(b - a for a, b in pairwise(bounds)))
    return bounds, gap
