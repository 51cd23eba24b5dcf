"""The options of `scripts/run`. Exit codes are those of `anabranch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli.errors import ExitCode
from anabranch.cli.main import Commands
from anabranch.cli.options import Bootstrap, Json, Kafka, Verbose, parse_kafka
from anabranch.errors import InvalidArgument
from examples.flights import run
from examples.flights.display import make_display
from examples.flights.report import show_report

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    subcommand_metavar="",
)


@app.callback(invoke_without_command=True)
def flights(
    bootstrap: Bootstrap = None,
    kafka: Kafka = None,
    rows: Annotated[
        int | None,
        typer.Option("--rows", min=500, help="At most so many rows of each table (default: all)."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the folder with data and logs, and say where.")
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            metavar="FILE",
            help="Where to draw the flights' epochs, as SVG (default: a new temporary file).",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run a transaction that outlives its processes: a minute or two, and every row is checked.

    Starts a broker (or uses --bootstrap) and two controllers. One transaction over five streams is
    begun by one process, written by five others and committed by yet another. Meanwhile small transactions
    commit on the same streams, one stream is scaled twice, readers look on, and two processes move money between
    rows of a table, whose total is right at every snapshot. A writer is killed, and the
    leading controller twice. At the end every stream and the events of a group of readers are compared with
    the source, row by row; any difference makes the exit code 1.
    """
    if picture is not None and not picture.parent.is_dir():
        raise InvalidArgument(f"--picture {picture}: there is no folder {picture.parent}")
    settings = run.Settings(bootstrap, parse_kafka(kafka), rows, keep, picture)
    with make_display(quiet=json) as display:
        report = run.run_flights(settings, display)
    show_report(report, as_json=json)
    if not report.ok:
        raise typer.Exit(ExitCode.DIFFERENCE)


if __name__ == "__main__":
    app(prog_name="scripts/run")
