"""Comparing receipts, the same for clients and controllers. This module is quick to import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from anabranch.schemas.records import Extent, Receipt

CRC_MODULUS = 1 << 63


def covers(one: Receipt | None, other: Receipt) -> bool:
    """Whether a receipt has all events of another receipt of the same writer, whichever of the two was made first.

    A flush without new writes raises the sequence, and the end, too, if other writers wrote to the journal.
    """
    if not other.extents:
        return True
    if one is None:
        return False
    has = {(extent.stream, extent.partition): extent for extent in one.extents}
    return all(
        (whole := has.get((part.stream, part.partition))) is not None and _is_within(part, whole)
        for part in other.extents
    )


def _is_within(part: Extent, whole: Extent) -> bool:
    """Whether one extent has all records of another: records are counted from the first, so equal counts mean the
    same.
    """
    if whole.first > part.first:
        return False
    if whole.count == part.count:
        return whole.crc_sum == part.crc_sum
    return whole.count > part.count and whole.end >= part.end


def not_covered(wanted: Iterable[Receipt], taken: Mapping[int, Receipt]) -> list[int]:
    """Writers of ``wanted`` whose events are not all taken."""
    return [each.writer for each in wanted if not covers(taken.get(each.writer), each)]
