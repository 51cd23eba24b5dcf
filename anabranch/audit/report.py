"""An audit's report: its checks by name, how much each examined, and examples of breaches."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC
from typing import Any

from anabranch.core import hybrid_time
from anabranch.errors import InvalidArgument

MOST_EXAMPLES = 10  # of a check and a stream

# Name: (what is counted, what has to hold), in the order of the report.
CHECKS: dict[str, tuple[str, str]] = {
    "history-record": ("records", "the history holds EPOCH and COMMIT records, under their keys"),
    "history-chain": ("records", "`previous` names the record before"),
    "history-time": ("records", "timestamps rise"),
    "epochs": ("epochs", "each tiles all keys and continues the one before; a duplicate is one"),
    "commit-once": ("commits", "a transaction has one COMMIT record in a stream"),
    "commit-place": ("ranges", "they lie in open segments of the active epoch"),
    "commit-ranges": ("ranges", "they follow each other on their partition"),
    "vectors": ("entries", "they are the ends of the ranges so far"),
    "event-header": ("events", "one ab.txn header of 28 bytes, or none that begins with ab."),
    "event-aborted": ("events", "none is of an aborted transaction"),
    "event-unknown": ("events", "none is of a transaction that no COMMIT record names"),
    "event-outside": ("events", "none of a committed transaction lies outside its ranges"),
    "event-plain": ("events", "no plain one lies outside the ranges of plain commits"),
    "event-transaction": ("events", "each carries the id that the COMMIT record of its range says"),
    "event-count": ("ranges", "they hold as many events as their COMMIT record says"),
    "event-key": ("events", "the key lies in the segment's range"),
    "event-epoch": ("events", "they were placed by the reference epoch that they were merged into"),
    "status-history": ("transactions", "what is COMMITTED in the status log is in a history"),
    "status-missing": ("transactions", "what is in a history is known to the status log"),
    "status-state": ("transactions", "what is in a history is COMMITTED in the status log"),
    "status-time": ("transactions", "both have the same commit timestamp"),
    "status-seen": (
        "transactions",
        "the commit timestamp is above all that their writers had seen",
    ),
    "status-count": ("transactions", "events of all streams together are as many as the row says"),
    "receipt": ("receipts", "a taken writer's events have its receipt's count and checksums"),
    "journal-content": ("writers", "the journal's records are the stream's events, each once"),
    "journal-order": ("writers", "the events of a key are in the order of the journal"),
    "plain-content": ("records", "plain writes that are committed are in the stream"),
    "ledger": ("rows", "what a ledger's rows say is how their transactions ended"),
}


@dataclass(frozen=True, slots=True)
class Example:
    """A breach. ``transaction``: hexadecimal; empty for plain writes, and without a transaction."""

    stream: str
    transaction: str
    partition: int | None
    offset: int | None
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class Check:
    """One check. ``unchecked``: things whose evidence is missing; they do not count as passed."""

    name: str
    what: str
    examined: int
    unchecked: int
    breaches: int
    examples: tuple[Example, ...]


@dataclass(frozen=True, slots=True)
class Gone:
    """A partition's events below offset ``low`` are gone; ``events``: of the ranges that begin there."""

    stream: str
    partition: int
    low: int
    events: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """Prepared transactions. ``by``: the SHA-256 of the secret that ends them, hexadecimal; empty: without one.

    ``since_ms``: Unix milliseconds, when the oldest was prepared.
    """

    by: str
    count: int
    since_ms: int


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The report. ``at``: status and history agree up to this hybrid time. ``gone``: deleted events.

    ``prepared``: of the whole control partition, with any streams.
    """

    streams: tuple[str, ...]
    at: int
    transactions: int
    events: int
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = field(default=())
    gone: tuple[Gone, ...] = ()
    prepared: tuple[Prepared, ...] = ()

    @property
    def breaches(self) -> int:
        """Breaches of all checks together."""
        return sum(check.breaches for check in self.checks)

    def check(self, name: str) -> Check:
        """One check by its name."""
        return next(check for check in self.checks if check.name == name)

    def document(self) -> dict[str, Any]:
        """The report as JSON."""
        return asdict(self) | {"at_text": hybrid_time.to_text(self.at), "breaches": self.breaches}

    def to_json(self) -> str:
        """The report as one line of JSON."""
        return json.dumps(self.document(), ensure_ascii=False)


def moment_of(text: str | None) -> int | None:
    """A hybrid time from a number, or from a time in ISO 8601 (without a zone: UTC). None stays None.

    Raises:
        InvalidArgument: the text is neither.
    """
    if text is None:
        return None
    moment = hybrid_time.read_moment(text)
    if moment is None:
        raise InvalidArgument(
            f"--at {text!r}: a commit timestamp (a number) or a time such as 2026-01-31T12:00:00Z"
        )
    if isinstance(moment, int):
        return moment
    return hybrid_time.from_datetime(moment if moment.tzinfo else moment.replace(tzinfo=UTC))
