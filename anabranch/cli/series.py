"""`anabranch series`: list numbered commits' series, and move one."""

from __future__ import annotations

from typing import Annotated

from anabranch.cli.options import (
    App,
    ClusterOptions,
    OperatorOptions,
    Yes,
    argument,
    confirm,
    option,
)
from anabranch.cli.output import print_json, print_line, print_table, time_text

app = App(no_args_is_help=True, help="List and set the series of numbered commits.")
Scope = Annotated[str, argument("SCOPE", "The scope.")]


@app.command("list")
def list_series(options: ClusterOptions, scope: Scope) -> None:
    """List the series of a scope: the highest number of each, the transaction with it, its owner, since when."""
    with options.client() as client:
        found = client.series(scope)
    rows = [
        {
            "series": s.series,
            "number": s.number,
            "txn_id": s.txn_id.hex(),
            "owner": s.owner,
            "taken_at": time_text(s.taken_ms),
        }
        for s in found
    ]
    if options.json:
        print_json({"series": rows})
    else:
        columns = ("series", "number", "transaction", "owner", "since")
        print_table("Series", columns, (tuple(row.values()) for row in rows))


@app.command("set")
def set_series(
    options: OperatorOptions,
    scope: Scope,
    series: Annotated[str, argument("SERIES", "The series' name.")],
    number: Annotated[int, argument("NUMBER", "Its latest number from now on.", min=-1)],
    owner: Annotated[
        str | None, option("--owner LANE", "The lane that has it from now on; '': none.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Move a series to a number: the next commit must have a higher one (-1: any); or give it to a lane.

    For a series that was moved, by mistake or not, or that another lane took. Set too low, numbers are committed
    twice; set too high, the numbers up to there are never committed. Needs the right series on the scope.
    """
    with options.client() as client:
        at = next((s.number for s in client.series(scope, series) if s.number >= 0), None)
        before = "has no commit" if at is None else f"is at {at}"
        confirm(
            f"The series {series!r} {before}. It will be at {number}: only numbers above can be committed.",
            yes=yes,
        )
        client.set_series(scope, series, number, expected=at, owner=owner)
    if options.json:
        print_json({"series": series, "number": number, "before": at})
    else:
        print_line(f"{series} is at {number}; before: {'no commit' if at is None else at}")
