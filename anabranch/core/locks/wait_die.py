"""The order in which transactions lock segments of an exclusive stream: wait-die, by age.

A transaction that meets an older one, which has locked the segment or waits for it, *dies*: it is aborted. One that
meets younger ones alone waits. So a transaction only ever waits for younger ones, wherever they meet: no wait is
part of a cycle. While one waits, no younger one gets in before it, so the oldest of all is never aborted and never
starves.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from anabranch.core.across.messages import age

Span = tuple[int, int]  # positions of keys: from the first, up to the second without it
Spans = tuple[Span, ...]


class Held:
    """The keys that transactions have locked of a stream, in their order. No two transactions have locked a key."""

    def __init__(self) -> None:
        self._lows: list[int] = []
        self._spans: dict[int, tuple[int, bytes]] = {}  # by their lowest position: end, transaction
        self._lows_of: dict[bytes, list[int]] = {}

    def lock(self, txn_id: bytes, spans: Spans) -> None:
        """Note that a transaction has locked these spans."""
        for low, end in spans:
            if low not in self._spans:
                insort(self._lows, low)
            self._spans[low] = end, txn_id
            self._lows_of.setdefault(txn_id, []).append(low)

    def free(self, txn_id: bytes) -> None:
        """Note that a transaction has locked nothing any more."""
        for low in self._lows_of.pop(txn_id, ()):
            del self._spans[low]
            del self._lows[bisect_left(self._lows, low)]

    def of(self, spans: Spans) -> dict[bytes, Spans]:
        """The transactions that have locked keys of these spans, and which of their spans these are."""
        found: dict[bytes, Spans] = {}
        for low, end in spans:
            at = max(0, bisect_right(self._lows, low) - 1)
            for begin in self._lows[at : bisect_left(self._lows, end)]:
                until, txn_id = self._spans[begin]
                if low < until:
                    found[txn_id] = (*found.get(txn_id, ()), (begin, until))
        return found


class Fate(Enum):
    """The answer to a transaction that asks for segments."""

    LOCK = "lock"
    WAIT = "wait"
    DIE = "die"


class Met(NamedTuple):
    """The answer to a transaction, and the id of the oldest transaction that it met (empty: it met none)."""

    fate: Fate
    by: bytes = b""


def meet(
    txn_id: bytes,
    spans: Spans,
    holders: Mapping[bytes, Spans],
    ahead: Iterable[tuple[bytes, Spans]],
) -> Met:
    """The answer to a transaction that asks for these spans of keys.

    ``holders``: what transactions have locked. ``ahead``: the transactions that wait and came before it. Segments
    are compared by their keys, because scalings change segments, and keys keep their positions.
    """
    others = (*holders.items(), *ahead)
    met = [other for other, its in others if other != txn_id and meets(spans, its)]
    if not met:
        return Met(Fate.LOCK)
    by = min(met, key=age)
    return Met(Fate.DIE if age(by) < age(txn_id) else Fate.WAIT, by)


def meets(some: Spans, others: Spans) -> bool:
    """Whether two sets of spans have a position in common."""
    return any(low < end and begin < high for low, high in some for begin, end in others)
