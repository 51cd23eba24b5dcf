"""`anabranch series`: list numbered commits' series, and move one."""

from __future__ import annotations

from typing import Annotated

from anabranch.cli.options import App, ClusterOptions, OperatorOptions, Yes, argument, confirm
from anabranch.cli.output import print_json, print_line, print_table

app = App(no_args_is_help=True, help="List and set the series of numbered commits.")
Scope = Annotated[str, argument("SCOPE", "The scope.")]


@app.command("list")
def list_series(options: ClusterOptions, scope: Scope) -> None:
    """List the series of a scope: the highest number of each, and the transaction that has it."""
    with options.client() as client:
        found = client.series(scope)
    rows = [{"series": s.series, "number": s.number, "txn_id": s.txn_id.hex()} for s in found]
    if options.json:
        print_json({"series": rows})
    else:
        print_table(
            "Series", ("series", "number", "transaction"), (tuple(row.values()) for row in rows)
        )


@app.command("set")
def set_series(
    options: OperatorOptions,
    scope: Scope,
    series: Annotated[str, argument("SERIES", "The series' name.")],
    number: Annotated[int, argument("NUMBER", "Its latest number from now on.", min=-1)],
    yes: Yes = False,
) -> None:
    """Move a series to a number: the next commit must have a higher one (-1: any).

    For a series that was moved, by mistake or not. Set too low, numbers are committed twice; set too
    high, the numbers up to there are never committed. Needs the right series on the scope.
    """
    with options.client() as client:
        stands = next((info.number for info in client.series(scope, series)), None)
        before = "has no commit" if stands is None else f"stands at {stands}"
        confirm(
            f"The series {series!r} {before}. It will stand at {number}: only numbers above can be committed.",
            yes=yes,
        )
        client.set_series(scope, series, number, expected=stands)
    if options.json:
        print_json({"series": series, "number": number, "before": stands})
    else:
        print_line(f"{series} stands at {number}; it {before} before")
