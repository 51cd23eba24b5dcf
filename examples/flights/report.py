"""The final report of a run: a table, or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from anabranch.cli.output import console, print_json
from examples.flights.findings import Check


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a run. ``timeline``: seconds since the start, and what happened then.

    ``picture``: the file with the drawing of the flights' epochs.
    """

    checks: Sequence[Check]
    timeline: Sequence[tuple[float, str]]
    seconds: float
    folder: str | None = None
    picture: str | None = None
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def document(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "seconds": round(self.seconds, 2),
            "folder": self.folder,
            "picture": self.picture,
            "checks": [asdict(check) | {"ok": check.ok} for check in self.checks],
            "timeline": [
                {"seconds": round(at, 2), "what": what} for at, what in sorted(self.timeline)
            ],
            "measured": self.measured,
        }


def show_report(report: Report, *, as_json: bool) -> None:
    if as_json:
        print_json(report.document())
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(title_justify="left", show_lines=False, pad_edge=False)
    table.add_column("")
    table.add_column("what was checked", overflow="fold")
    table.add_column("what was seen", overflow="fold")
    for check in report.checks:
        seen = Text(check.seen)
        for difference in check.differences:
            seen.append(f"\n{difference}", style="bold red")
        mark = Text("ok", style="green") if check.ok else Text("NO", style="bold red")
        table.add_row(mark, check.title, seen)
    out = console()
    out.print(table)
    wrong = sum(1 for check in report.checks if not check.ok)
    if wrong:
        out.print(f"[bold red]{wrong} of {len(report.checks)} checks found differences[/bold red]")
    else:
        out.print(f"All {len(report.checks)} checks hold. {report.seconds:.0f} s.")
    if report.picture:
        out.print(f"The flights' stream, drawn: {report.picture}", soft_wrap=True)
    if report.folder:
        out.print(f"Data and logs: {report.folder}", soft_wrap=True)
