"""An audit's report: the table of all checks, the number of rows that each examined, and examples of breaches."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC
from typing import Any, NamedTuple

from anabranch.errors import InvalidArgument
from anabranch.protocol import hybrid_time

MOST_EXAMPLES = 10  # for each check and stream

EVENTS = "events"  # readers get events that are wrong, missing or additional
RECORDS = "records"  # only records about the events disagree
REPORT = "report it as a defect, and keep the topics until it is understood"
STRANGER = "let only controllers write to the topic (docs/security.md); the record itself stays"
COMPARE = "compare the row with `anabranch txn describe`; correct the data of the database by hand"


class Kind(NamedTuple):
    """A check: the unit that it counts, what has to hold, what a breach concerns, and what to do about it."""

    what: str
    holds: str
    severity: str = EVENTS
    to_do: str = REPORT


# By name, in the order of the report.
CHECKS: dict[str, Kind] = {
    "history-record": Kind(
        "records", "is an EPOCH or COMMIT record under its key", RECORDS, STRANGER
    ),
    "history-chain": Kind("records", "`previous` is the offset of the record before", RECORDS),
    "history-time": Kind("records", "has a later timestamp than the record before", RECORDS),
    "epochs": Kind(
        "epochs", "tiles all keys and continues the epoch before; a duplicate is equal", RECORDS
    ),
    "commit-once": Kind(
        "commits", "is the only COMMIT record of its transaction in the stream", RECORDS
    ),
    "commit-place": Kind("ranges", "is in an open segment of the active epoch", RECORDS),
    "commit-ranges": Kind("ranges", "follows the range before it on its partition", RECORDS),
    "vectors": Kind("entries", "is the end of the ranges so far", RECORDS),
    "event-header": Kind(
        "events", "has one ab.txn header of 28 bytes, or none that begins with ab.", to_do=STRANGER
    ),
    "event-aborted": Kind("events", "does not belong to an aborted transaction"),
    "event-unknown": Kind("events", "belongs to a transaction with a COMMIT record"),
    "event-outside": Kind("events", "is in a range of its transaction, if that is committed"),
    "event-plain": Kind(
        "events", "is in a range of a plain commit, if it is a plain write", to_do=STRANGER
    ),
    "event-transaction": Kind("events", "has the id that the COMMIT record of its range has"),
    "event-count": Kind("ranges", "has as many events as its COMMIT record says"),
    "event-key": Kind("events", "has a key of its segment's range"),
    "event-epoch": Kind("events", "was placed by the reference epoch that it was merged into"),
    "status-history": Kind("transactions", "is in a history if it is COMMITTED in the status log"),
    "status-missing": Kind("transactions", "is in the status log if it is in a history", RECORDS),
    "status-state": Kind(
        "transactions", "is COMMITTED in the status log if it is in a history", RECORDS
    ),
    "status-time": Kind("transactions", "has the same commit timestamp in both", RECORDS),
    "status-seen": Kind(
        "transactions", "has a later commit timestamp than all that its writers had seen"
    ),
    "status-count": Kind(
        "transactions", "has as many events in all streams together as its row says"
    ),
    "across": Kind(
        "parts", "ended as its transaction did on the other control partitions, at the same time"
    ),
    "receipt": Kind("receipts", "has the count and checksums of the writer's events in the stream"),
    "journal-content": Kind("writers", "has each of its journal records once in the stream"),
    "journal-order": Kind("writers", "has the events of each key in the journal's order"),
    "plain-content": Kind(
        "records", "is in the stream as often as in the journal, if it is committed"
    ),
    "ledger": Kind("rows", "says how its transaction ended", to_do=COMPARE),
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
    """The result of a check (`Kind`). ``unchecked``: rows without enough evidence; they don't count as passed."""

    name: str
    what: str
    severity: str
    to_do: str
    examined: int
    unchecked: int
    breaches: int
    examples: tuple[Example, ...]


@dataclass(frozen=True, slots=True)
class Gone:
    """A partition's events below offset ``low`` are gone. ``events``: how many the ranges that begin there had."""

    stream: str
    partition: int
    low: int
    events: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """Prepared transactions. ``by``: the SHA-256 of the secret that ends them, hexadecimal; empty: no secret.

    ``since_ms``: when the oldest was prepared, in Unix milliseconds.
    """

    by: str
    count: int
    since_ms: int


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The report. ``at``: the hybrid time up to which status and history were compared. ``gone``: deleted events.

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
        return sum(check.breaches for check in self.checks)

    def check(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"at_text": hybrid_time.to_text(self.at), "breaches": self.breaches}

    def to_json(self) -> str:
        """The report as one line of JSON."""
        return json.dumps(self.document(), ensure_ascii=False)


def moment_of(text: str | None) -> int | None:
    """A hybrid time from a number, or from a time in ISO 8601 (without a zone: UTC). None stays None.

    Raises: InvalidArgument (the text is neither).
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
