"""The report: anomalies that the judges found, and how much they judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

KINDS = (
    "lost-write",
    "aborted-read",
    "dirty-read",
    "duplicate",
    "torn-transaction",
    "undeleted",
    "int-send-order",
    "ext-send-order",
    "int-poll-order",
    "ext-poll-order",
    "poll-skip",
    "non-monotone-timestamps",
    "snapshot-not-prefix",
    "lost-update",
    "write-skew",
    "false-conflict",
    "wrong-change",
    "wrong-entry",
    "two-of-a-value",
    "mixed-versions",
    "unseen-commit",
    "changed-answer",
    "consumed-twice",
    "consume-order",
    "unconsumed",
    "fenced-commit",
    "no-outcome",
    "two-outcomes",
    "wrong-total",
    "unexplained",
)
EXAMPLES = 20  # of one kind that are kept; the rest is only counted


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A breach of a promise: no sequence of whole transactions explains what clients saw.

    ``kind``: one of `KINDS`. ``evidence``: ``file:line`` of the operations that contradict each other.
    """

    kind: str
    text: str
    evidence: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}: {self.text} ({', '.join(self.evidence)})"


@dataclass
class Report:
    """The verdict on a history.

    ``anomalies``: the first `EXAMPLES` of each kind. ``totals``: how many there are of each kind. ``counts``: how
    many things each check judged: 0 shows that it judged nothing.
    """

    anomalies: list[Anomaly] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        return not self.totals

    @property
    def kinds(self) -> set[str]:
        return set(self.totals)

    def add(self, kind: str, text: str, evidence: Iterable[str]) -> None:
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no kind of anomaly")
        self.totals[kind] += 1
        if self.totals[kind] <= EXAMPLES:
            self.anomalies.append(Anomaly(kind, text, tuple(dict.fromkeys(evidence))))

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "counts": dict(self.counts),
            "totals": {kind: self.totals[kind] for kind in KINDS if self.totals[kind]},
            "anomalies": [
                {"kind": one.kind, "text": one.text, "evidence": list(one.evidence)}
                for one in self.anomalies
            ],
        }

    def show(self, console: Console, examples: int = 5) -> None:
        """Print tables of judged things and anomalies, and some examples of each kind."""
        judged = Table("judged", "count", title="What was judged")
        for name, count in self.counts.items():
            judged.add_row(name, f"{count:,}")
        console.print(judged)
        if self.ok:
            console.print("No anomaly.")
            return
        found = Table("anomaly", "count", title="What was found")
        for kind in KINDS:
            if self.totals[kind]:
                found.add_row(kind, f"{self.totals[kind]:,}")
        console.print(found)
        shown: Counter[str] = Counter()
        for one in self.anomalies:
            shown[one.kind] += 1
            if shown[one.kind] <= examples:
                console.print(f"[bold]{one.kind}[/bold]: {escape(one.text)}")
                for where in one.evidence:
                    console.print(f"    {escape(where)}", soft_wrap=True)
