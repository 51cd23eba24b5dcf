"""Bytes in the journals: how many there are, and how many of them open transactions need, by partition.

The counts are in memory and follow the journal index batch by batch, so that limits and clean-up need no scan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

Place = tuple[str, int]  # stream, journal partition

_STEP_BYTES = 4 << 10
_STEPS = 2_048


@dataclass(slots=True)
class Stay:
    """A transaction's data in a journal partition.

    ``low``: the least present base offset of its batches there. ``size``: their bytes, about.
    """

    low: int
    size: int


@dataclass(slots=True)
class Uncommitted:
    """The data of open transactions in the journals.

    Call ``ended`` only when a transaction's end is on the log, because the round may fail before.
    """

    stays: dict[bytes, dict[Place, Stay]] = field(default_factory=dict)
    by_stream: Counter[str] = field(default_factory=Counter)  # bytes
    total: int = 0  # bytes
    refused: set[bytes] = field(default_factory=set)  # transactions with rejected records

    def add(self, txn_id: bytes, place: Place, batch_base: int, size: int) -> None:
        """Count a run that the index keeps."""
        stays = self.stays.setdefault(txn_id, {})
        stay = stays.get(place)
        if stay is None:
            stays[place] = Stay(batch_base, size)
        else:
            stay.low = min(stay.low, batch_base)
            stay.size += size
        self.by_stream[place[0]] += size
        self.total += size

    def size_of(self, txn_ids: Iterable[bytes]) -> int:
        """The bytes of some transactions."""
        stays = (self.stays.get(txn_id, {}) for txn_id in txn_ids)
        return sum(stay.size for found in stays for stay in found.values())

    def moved(self, txn_id: bytes, place: Place, low: int) -> None:
        """Some runs of a transaction moved. ``low``: the least base offset of all of them now."""
        self.stays[txn_id][place].low = low

    def ended(self, txn_ids: Iterable[bytes]) -> None:
        """Drop transactions that ended."""
        for txn_id in txn_ids:
            self.refused.discard(txn_id)
            for place, stay in self.stays.pop(txn_id, {}).items():
                self.by_stream[place[0]] -= stay.size
                self.total -= stay.size


class Read:
    """The number of bytes between two offsets of a journal partition, as far as this leader has read it.

    The number is exact to 4 KiB, or to a two-thousandth of the whole. Bytes before ``start`` are not counted, so
    data may be moved later than necessary, but never sooner.
    """

    def __init__(self, start: int) -> None:
        """``start``: the offset from which this leader reads."""
        self._ends = [start]
        self._totals = [0]

    def add(self, next_offset: int, size: int) -> None:
        """Count ``size`` bytes more, up to ``next_offset``."""
        total = self._totals[-1] + size
        step = max(_STEP_BYTES, (total - self._totals[0]) // _STEPS)
        if len(self._ends) > 1 and total - self._totals[-2] < step:
            self._ends[-1], self._totals[-1] = next_offset, total
        else:
            self._ends.append(next_offset)
            self._totals.append(total)

    def between(self, first: int, end: int) -> int:
        """Bytes from one offset up to another, about."""
        return max(0, self._total(end) - self._total(first))

    def _total(self, offset: int) -> int:
        at = bisect_right(self._ends, offset) - 1
        return self._totals[at] if at >= 0 else self._totals[0]

    def forget(self, below: int) -> None:
        """Drop offsets below this one, which no caller asks for any more."""
        at = bisect_right(self._ends, below) - 1
        if at > 0:
            del self._ends[:at], self._totals[:at]


@dataclass(slots=True)
class Use:
    """The needed part of a journal partition: its first offset, and its bytes."""

    low: int
    size: int = 0


def uses(uncommitted: Uncommitted, open_txns: Iterable[bytes]) -> dict[Place, Use]:
    """The use of each journal partition in which one of these transactions has data."""
    found: dict[Place, Use] = {}
    for txn_id in open_txns:
        for place, stay in uncommitted.stays.get(txn_id, {}).items():
            use = found.get(place)
            if use is None:
                found[place] = Use(stay.low, stay.size)
            else:
                use.low = min(use.low, stay.low)
                use.size += stay.size
    return found
