"""Segments and key ranges as people write them: ``3@1``, ``0x40000000:0x80000000``."""

from __future__ import annotations

from anabranch.core.ids import segment_epoch, segment_id, segment_number
from anabranch.core.keyspace import SPACE
from anabranch.errors import InvalidArgument


def segment_name(id_: int) -> str:
    """A segment as number@epoch."""
    return f"{segment_number(id_)}@{segment_epoch(id_)}"


def parse_segment(text: str) -> int:
    """The id of a segment given as number@epoch, or as the id itself. Else `InvalidArgument`."""
    number, at, epoch = text.partition("@")
    try:
        if not at:
            found = int(text, 0)
            if 0 <= found < 1 << 63:
                return found
        elif 0 <= int(number) < 1 << 31 and 0 <= int(epoch) < 1 << 31:
            return segment_id(int(epoch), int(number))
    except ValueError:
        pass
    raise InvalidArgument(
        f"--seal {text!r} is no segment: write NUMBER@EPOCH, as `anabranch stream describe` does, or an id"
    )


def parse_range(text: str) -> tuple[int, int]:
    """(low, high) of ``LOW:HIGH``, hexadecimal with 0x or decimal. Else `InvalidArgument`."""
    low, _, high = text.partition(":")
    try:
        found = int(low, 0), int(high, 0)
    except ValueError:
        found = (0, 0)
    if 0 <= found[0] < found[1] <= SPACE:
        return found
    raise InvalidArgument(
        f"--range {text!r} is no range of keys: write LOW:HIGH with 0 <= LOW < HIGH <= {SPACE:#x}"
    )
