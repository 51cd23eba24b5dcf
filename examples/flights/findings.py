"""What the processes of a run said, and the checks' common form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.flights.historian import Epoch
from examples.flights.order_check import OrderReport
from examples.flights.rows import StreamReport


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was checked: ``seen`` in words, and how it differs from what had to be."""

    title: str
    seen: str
    differences: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no difference."""
        return not self.differences


@dataclass(frozen=True, slots=True)
class Killed:
    """A controller that was killed: when, and when another one led (None: never)."""

    name: str
    at: float
    taken_over_at: float | None
    by: str | None


@dataclass
class Findings:
    """Everything that the processes of a run said. Times are of the monotonic clock.

    ``counts``: rows of each stream. ``dead``: the label of the killed writer; ``dead_flushed`` how
    many rows it had flushed. ``outcome``: what the committer said; ``again`` the same asked by name.
    ``scaled``: to how many segments the flights were scaled, and ``scaled_at`` when.
    """

    counts: Mapping[str, int]
    transactions_stream: str
    txn_id: str
    driver_ended_at: float
    dead: str
    dead_flushed: int
    raw_rows: int
    raw_is_program: bool
    outcome: Mapping[str, Any]
    again: Mapping[str, Any]
    ticks: Mapping[str, Sequence[int]]
    plain: Mapping[str, Any]
    reader: Mapping[str, Any]
    transactions: Sequence[Mapping[str, Any]]
    streams: Sequence[StreamReport]
    killed_writing: Killed
    killed_deciding: Killed | None
    doomed_rows: int
    doomed_txn_id: str
    doomed_state: str
    scaled: Sequence[int]
    scaled_at: Sequence[float]
    epochs: Sequence[Epoch]
    ordered: OrderReport
    observers: Sequence[str] = field(default=("plain consumer", "reader of events"))


def few(texts: Iterable[str], limit: int = 5) -> list[str]:
    """The first of them, and how many more there are."""
    found = list(texts)
    if len(found) <= limit:
        return found
    return [*found[:limit], f"and {len(found) - limit:,} more"]
