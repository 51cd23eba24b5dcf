"""`anabranch command`: the commands that controllers set aside."""

from __future__ import annotations

from dataclasses import asdict

from anabranch.cli.options import App, OperatorOptions
from anabranch.cli.output import print_json, print_table, time_text

app = App(no_args_is_help=True, help="See which commands were set aside.")


@app.callback()
def root() -> None:
    """See which commands were set aside."""


@app.command("list")
def list_commands(options: OperatorOptions) -> None:
    """Show how far each control partition is with its commands, which it set aside, and what it keeps."""
    with options.client() as client:
        found = client.commands()
    if options.json:
        print_json({"control_partitions": [asdict(each) for each in found]})
        found.check()
        return
    print_table(
        "Commands",
        ("control partition", "position", "waiting", "set aside", "open transactions", "outcomes"),
        (
            (
                *(c.control_partition, c.position, c.end - c.position, len(c.set_aside)),
                *(c.open_transactions, c.outcomes),
            )
            for c in found
        ),
    )
    if any(c.set_aside for c in found):
        print_table(
            "Set aside",
            ("control partition", "lane", "offset", "when", "what", "reason"),
            (
                (
                    c.control_partition,
                    row.lane,
                    row.offset,
                    time_text(row.at_ms),
                    row.what,
                    row.reason,
                )
                for c in found
                for row in c.set_aside
            ),
        )
    found.check()
