"""Numbers in rows: decimal integers of 64 bits, which codecs for JSON and text read, too, and changes to them."""

from __future__ import annotations

import re

from anabranch.errors import NotANumber, NumberOverflow
from anabranch.protocol.limits import LEAST_NUMBER, MOST_NUMBER, NUMBER_BYTES
from anabranch.protocol.schemas.records import ChangeKind

_INTEGER = re.compile(rb"0|-?[1-9][0-9]*")


def number_in(value: bytes | None) -> int | None:
    """The number in a row; None if there is no row. Raises: NotANumber."""
    if value is None:
        return None
    if len(value) <= NUMBER_BYTES and _INTEGER.fullmatch(value):
        number = int(value)
        if LEAST_NUMBER <= number <= MOST_NUMBER:
            return number
    raise NotANumber(
        f"the row is {value!r:.100}, which is no decimal integer of 64 bits: `put` one"
    )


def changed(kind: ChangeKind, before: int | None, number: int) -> int:
    """The number in a row after a change. ``before``: None if there is no row. Raises: NumberOverflow."""
    if kind == "ADD":
        total = (before or 0) + number
        if LEAST_NUMBER <= total <= MOST_NUMBER:
            return total
        raise NumberOverflow(f"{before} and {number} make a number of more than 64 bits")
    if before is None:
        return number
    return min(before, number) if kind == "MIN" else max(before, number)
