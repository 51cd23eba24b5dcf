"""The command line: `anabranch --help`. The commands are modules beside this one."""

from __future__ import annotations


def app() -> None:
    """Run the command line, and end the process with one of `anabranch.cli.errors.ExitCode`."""
    # Imported here: child processes import modules of this package, and need no command line.
    from anabranch.cli.main import app as commands

    commands()
