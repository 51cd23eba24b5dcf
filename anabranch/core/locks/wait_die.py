"""The order in which transactions lock segments of an exclusive stream: wait-die, by age.

A transaction that meets an older one, which has locked the segment or waits for it, *dies*: it is aborted. One that
meets younger ones alone waits. So a transaction only ever waits for younger ones, wherever they meet: no wait is
part of a cycle. While one waits, no younger one gets in before it, so the oldest of all is never aborted and never
starves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from anabranch.core.across.messages import age

Span = tuple[int, int]  # positions of keys: from the first, up to the second without it
Spans = tuple[Span, ...]


class Fate(Enum):
    """The answer to a transaction that asks for segments."""

    LOCK = "lock"
    WAIT = "wait"
    DIE = "die"


class Met(NamedTuple):
    """The answer to a transaction, and the oldest one that it met; no bytes if it met none."""

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
