"""The audit's report on the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anabranch.cli.output import print_line, print_table
from anabranch.core import hybrid_time

if TYPE_CHECKING:
    from anabranch.audit.report import AuditReport, Example


def show(report: AuditReport, *, as_json: bool) -> None:
    """Print a table of the checks and one of the breaches; or JSON."""
    from anabranch.audit.report import CHECKS, MOST_EXAMPLES

    if as_json:
        print_line(report.to_json())
        return
    title = (
        f"{', '.join(report.streams)} as of {hybrid_time.to_text(report.at)}: "
        f"{report.transactions:,} commits, {report.events:,} events"
    )
    print_table(
        title,
        ("check", "what holds", "examined", "", "not checkable", "breaches"),
        [
            (c.name, CHECKS[c.name][1], c.examined, c.what, c.unchecked, c.breaches)
            for c in report.checks
        ],
    )
    for note in report.notes:
        print_line(note)
    for g in report.gone:
        print_line(
            f"{g.stream}, partition {g.partition}: nothing is left below offset {g.low:,}: some or all of "
            f"{g.events:,} events are gone"
        )
    if report.breaches:
        print_table(
            f"Breaches, at most {MOST_EXAMPLES} of each kind and stream",
            ("check", "stream", "transaction", "where", "expected", "found"),
            [
                (c.name, e.stream, e.transaction or "-", _where(e), e.expected, e.found)
                for c in report.checks
                for e in c.examples
            ],
        )


def _where(example: Example) -> str:
    if example.partition is None:
        return "-"
    offset = "" if example.offset is None else f"@{example.offset}"
    return f"{example.partition}{offset}"
