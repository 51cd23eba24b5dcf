"""The question before a step that can't be undone."""

from __future__ import annotations

import sys

import typer

from anabranch.errors import InvalidArgument


def confirm(warning: str, *, yes: bool) -> None:
    """Return if the user agrees: by ``--yes``, or by an answer at a terminal.

    Raises: InvalidArgument, without a terminal or after a no; nothing was changed.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgument(f"{warning} Give --yes to do it")
    if not typer.confirm(f"{warning} Do it?", err=True):
        raise InvalidArgument("not done: nothing was changed")
