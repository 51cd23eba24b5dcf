"""Numbers, times and names as people read them."""

from __future__ import annotations

from datetime import UTC, datetime

from anabranch.core.ids import segment_epoch, segment_number


def count_of(count: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    plural = f"{noun}es" if noun.endswith(("s", "tch", "each")) else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def segment_name(id_: int) -> str:
    """A segment as number@epoch."""
    return f"{segment_number(id_)}@{segment_epoch(id_)}"


def time_text(unix_ms: int) -> str | None:
    """Unix milliseconds as ISO 8601 in UTC; None for 0, which means "not yet"."""
    if not unix_ms:
        return None
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds")
