"""Receipts as clients and controllers judge them alike: quick to import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from anabranch.schemas.records import Receipt

CRC_MODULUS = 1 << 63


def left_behind(wanted: Iterable[Receipt], taken: Mapping[int, Receipt]) -> list[int]:
    """Writers of ``wanted`` that are not taken with at least these receipts."""
    return [
        receipt.writer
        for receipt in wanted
        if receipt.extents
        and (found := taken.get(receipt.writer)) != receipt
        and (found is None or found.sequence <= receipt.sequence)
    ]
