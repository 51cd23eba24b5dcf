"""What can't be undone is asked for once more."""

from __future__ import annotations

import sys

import typer

from anabranch.errors import InvalidArgument


def confirm(warning: str, *, yes: bool) -> None:
    """Go on only if somebody wants it: with ``--yes``, or by an answer at a terminal.

    Raises: InvalidArgument, if nobody can be asked, or says no; nothing was changed.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgument(f"{warning} Give --yes to do it")
    if not typer.confirm(f"{warning} Do it?", err=True):
        raise InvalidArgument("not done: nothing was changed")
