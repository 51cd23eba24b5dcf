"""Guesses where a stream's next batches land, so that the history can be written together with the data.

A leader appends to a stream's partitions in one native transaction after the other, and each leaves one marker
behind its data. So the next batch lands right behind the marker, unless the marker is late or another program
wrote. Then the broker returns other offsets, and the attempt is aborted. A guess is only ever a hint.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.batches.format import read_header
from anabranch.ports import TopicPartition
from anabranch.processors.merge import Placed

MOST_SKIPPED = 1024  # rounds without an attempt while attempts keep failing
_MARKER = 1


class OffsetGuess:
    """The guesses of one leader; kept from term to term."""

    def __init__(self) -> None:
        self._next: dict[TopicPartition, int] = {}
        self._skip = 0
        self._failures = 0
        self.misses = 0  # in all

    def guess(self, batches: Sequence[Placed]) -> list[int] | None:
        """The offsets that the batches should get, in their order; None: not known, so wait for them."""
        if self._skip:
            self._skip -= 1
            return None
        coming: dict[TopicPartition, int] = {}
        bases = []
        for partition, data in batches:
            base = coming.get(partition, self._next.get(partition))
            if base is None:
                return None
            bases.append(base)
            coming[partition] = base + read_header(data, whole=False).record_count
        return bases

    def hit(self) -> None:
        """An attempt went as guessed."""
        self._failures = 0

    def miss(self) -> None:
        """An attempt failed. If that goes on, attempts get rare: each costs an aborted native transaction."""
        self._failures += 1
        self.misses += 1
        self._skip = min(1 << self._failures, MOST_SKIPPED)

    def committed(self, batches: Sequence[Placed], bases: Sequence[int]) -> None:
        """A native transaction with these small batches is committed; none if its data was big."""
        if not batches:
            self._next.clear()
        for (partition, data), base in zip(batches, bases, strict=True):
            records = read_header(data, whole=False).record_count
            self._next[partition] = base + records + _MARKER
