"""The command line: `anabranch --help`. The commands are modules beside this one."""

from __future__ import annotations

import sys


def app() -> None:
    """Run the command line, and end the process with one of `anabranch.cli.errors.ExitCode`."""
    # Imported here: child processes import modules of this package, and need no command line.
    from anabranch.cli.errors import failure_of
    from anabranch.cli.output import show
    from anabranch.errors import NotInstalled
    from anabranch.extras import need

    try:
        need("typer", "rich")
    except NotInstalled as error:
        failure = failure_of(error)
        show(failure, as_json="--json" in sys.argv)
        sys.exit(failure.code)
    from anabranch.cli.main import app as commands

    commands()
