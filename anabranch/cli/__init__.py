"""The command line: `anabranch --help`.

Start in `main`, which lists all commands, or in the module of a group. Each group has one module:

- `stream` (with `apply`), `table`, `txn` (with `series`), `lane` (with `grants`, `command` and `audit-log`),
  `group`, `ledger`, `processor` (with `bridge`) and `spark` are groups of commands;
- `data` has `read`, `write` and `load`, whose CSV files `load_csv` reads;
- `controller` has `controller` and `warm`; `local` has `dev`, `broker` and `web`;
- `doctor` is a command, and so is `config`, which has the table of settings;
- `cluster` runs controllers as child processes, for `dev` and the examples.

Common code: `options` has the common options, reads their values and connects; `output` prints tables, lines and
JSON, and escapes control characters; `errors` has the exit codes.

A command is a function with annotated parameters. The function connects by `options.client()`, calls the library,
and prints the result by `print_result` or `show` for people and as JSON. Errors of the library pass through; `main`
shows them.

Commands may import all other packages, but heavy ones (Spark, Kafka's client, compiled code) only inside functions,
so that `--help` is quick. No other package of the product imports this one.
"""

from __future__ import annotations

import sys


def app() -> None:
    """Run the command line, and end the process with one of `anabranch.cli.errors.ExitCode`."""
    # Imported here, because child processes import modules of this package without typer.
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
