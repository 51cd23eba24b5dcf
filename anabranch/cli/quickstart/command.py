"""The command: its options, and what it does with them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli.options import Bootstrap, Json, Kafka, Verbose


def command(
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
    """See a transaction outlive its processes: a minute or two, and every row is checked.

    Starts a broker (or uses --bootstrap) and two controllers. One transaction over five streams is
    begun by one process, written by five others and committed by yet another, while small
    transactions commit on the same streams, one stream is scaled twice, and readers look on. A writer
    is killed, and the leading controller twice. At the end every stream is compared with its source,
    row by row, and so is what a group of readers got in order; any difference makes the exit code 1.
    """
    from anabranch.cli.errors import ExitCode
    from anabranch.cli.quickstart.display import make_display
    from anabranch.cli.quickstart.report import show_report
    from anabranch.cli.quickstart.run import Settings, run_quickstart
    from anabranch.cli.session import parse_kafka
    from anabranch.errors import InvalidArgument

    if picture is not None and not picture.parent.is_dir():
        raise InvalidArgument(f"--picture {picture}: there is no folder {picture.parent}")
    settings = Settings(bootstrap, parse_kafka(kafka), rows, keep, picture)
    with make_display(quiet=json) as display:
        report = run_quickstart(settings, display)
    show_report(report, as_json=json)
    if not report.ok:
        raise typer.Exit(ExitCode.DIFFERENCE)
