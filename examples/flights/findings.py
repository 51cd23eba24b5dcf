"""The messages and notes of a run's processes, and the common form of checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from examples.flights.compare import Wanted
from examples.flights.historian import Epoch
from examples.flights.notes import Notes


@dataclass(frozen=True, slots=True)
class Check:
    """One check: the observed facts in words, and their differences from the expected ones."""

    title: str
    seen: str
    differences: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
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
    """All messages and notes of a run. Times are of the monotonic clock.

    ``streams``: their names; the first one is scaled. ``wanted``: the rows of each. ``dead``: the label of the
    killed writer; ``dead_flushed``: how many rows it had flushed. ``outcome``: the committer's message; ``again``:
    the outcome asked by name. ``scaled``: (segments, time) of each scaling. ``txn_ids``: of the transactions that
    the reader of whole transactions got. ``clerks``: the reports of the roles that moved money between accounts;
    ``audit``: that of the role that added the accounts up. ``log``: the notes of a plain consumer that read
    everything at the end.
    """

    streams: Sequence[str]
    wanted: Sequence[Wanted]
    txn_id: str
    driver_ended_at: float
    dead: bytes
    dead_flushed: int
    raw_rows: int
    raw_is_program: bool
    outcome: Mapping[str, Any]
    again: Mapping[str, Any]
    ticks: Mapping[str, Sequence[int]]
    txn_ids: Sequence[str | None]
    killed_writing: Killed
    killed_deciding: Killed | None
    doomed_rows: int
    doomed_txn_id: str
    doomed_state: str
    scaled: Sequence[tuple[int, float]]
    epochs: Sequence[Epoch]
    plain: Notes
    reader: Notes
    whole: Notes
    members: Sequence[Notes]
    log: Notes
    clerks: Sequence[Mapping[str, Any]]
    audit: Mapping[str, Any]

    @property
    def observers(self) -> dict[str, Notes]:
        """The notes of each observer that watched during the run, event by event."""
        return {"plain consumer": self.plain, "reader of events": self.reader}


def few(texts: Iterable[str], limit: int = 5) -> list[str]:
    found = list(texts)
    if len(found) <= limit:
        return found
    return [*found[:limit], f"and {len(found) - limit:,} more"]
