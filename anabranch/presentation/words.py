"""Numbers, times and names as people read them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache

from anabranch.core.ids import segment_epoch, segment_number
from anabranch.errors import AnabranchError


def count_of(count: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    plural = f"{noun}es" if noun.endswith(("s", "tch", "each")) else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def events_of(count: Callable[[], tuple[int, int, bool]]) -> str:
    """The number of events that ``count`` (as of a `Lag`) returns, in words that also fit an unknown number."""
    try:
        events, _, is_exact = count()
    except AnabranchError:  # the stream may be LOST
        return "an unknown number of events"
    return f"{'' if is_exact else 'about '}{count_of(events, 'event')}"


def topic_id_of(ask: Callable[[], str]) -> str:
    """The topic id of a stream, which distinguishes streams of one name; empty if ``ask`` fails."""
    try:
        return ask()
    except AnabranchError:  # the stream may be LOST
        return ""


def segment_name(id_: int) -> str:
    """A segment as number@epoch."""
    return f"{segment_number(id_)}@{segment_epoch(id_)}"


def time_text(unix_ms: int) -> str | None:
    """Unix milliseconds as ISO 8601 in UTC; None for 0, which means "not yet"."""
    if not unix_ms:
        return None
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds")


def span_text(seconds: float) -> str:
    """A span of time in one unit: ``90s``, ``5m``, ``3h``, ``2d``."""
    whole = max(0, int(seconds))
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if whole >= 2 * size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def bytes_text(data: bytes) -> str:
    r"""Bytes as text in a line: a backslash, and all but printable UTF-8, as `\\`, `\t`, `\n` or `\xff`."""
    text = data.decode("utf-8", "surrogateescape")
    return "".join(c if c.isprintable() and c != "\\" else _escaped(c) for c in text)


@lru_cache(1024)  # a value may have millions of equal characters
def _escaped(one: str) -> str:
    if "\udc80" <= one <= "\udcff":  # a byte that is not UTF-8
        return f"\\x{ord(one) - 0xDC00:02x}"
    return repr(one)[1:-1]
