"""Numbers, times and names as people read them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from anabranch.core.ids import segment_epoch, segment_number
from anabranch.errors import AnabranchError


def count_of(count: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    plural = f"{noun}es" if noun.endswith(("s", "tch", "each")) else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def events_of(count: Callable[[], tuple[int, int, bool]]) -> str:
    """How many events ``count`` tells (a `Lag`), as far as that can be told."""
    try:
        events, _, is_exact = count()
    except AnabranchError:  # the stream may be LOST
        return "an unknown number of events"
    return f"{'' if is_exact else 'about '}{count_of(events, 'event')}"


def topic_id_of(ask: Callable[[], str]) -> str:
    """The id that ``ask`` tells of a stream's topic, by which streams of one name differ; empty if it can't."""
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
