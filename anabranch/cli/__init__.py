"""The command line: `anabranch --help`.

A module has the commands that it is named after: `stream` has `anabranch stream`, `txn` has `anabranch txn` and
`series`, `lane` also `command` and `audit-log`, `local` has `dev`, `broker` and `web`. Folders are `data` (read,
write, load), `processor` and `spark`. `main` puts the commands together and ends with their exit code (`errors`);
`options` has all common options and reads their values, `session` connects, and `output` alone prints.

Commands may import every other package, but heavy ones (Spark, Kafka's client, compiled code) only inside of
functions, so that `--help` is quick. No other package of the product imports this one.
"""

from __future__ import annotations

import sys


def app() -> None:
    """Run the command line, and end the process with one of `anabranch.cli.errors.ExitCode`."""
    # Imported here: child processes import modules of this package, and need no command line.
    from anabranch.cli.errors import failure_of
    from anabranch.cli.output import show_failure
    from anabranch.errors import NotInstalled
    from anabranch.extras import need

    try:
        need("typer", "rich")
    except NotInstalled as error:
        failure = failure_of(error)
        show_failure(failure, as_json="--json" in sys.argv)
        sys.exit(failure.code)
    from anabranch.cli.main import app as commands

    commands()
