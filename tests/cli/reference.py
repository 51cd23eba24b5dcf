"""The generated parts of docs/cli.md; ``python -m tests.cli.reference`` writes them.

Between ``<!-- options: COMMAND -->`` (or ``<!-- exit codes -->``) and ``<!-- end -->`` stands what the
command line says of itself, and a test holds the two together.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer.main

from anabranch.cli.errors import EXIT_CODES
from anabranch.cli.main import app

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
_PART = re.compile(
    r"<!-- (options: (?P<command>[a-z -]+)|exit codes) -->\n.*?<!-- end -->\n", re.DOTALL
)


@cache
def commands() -> dict[str, Any]:
    """Every command that does something, by its words after ``anabranch``."""

    def walk(group: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from walk(command, (*words, name))
            else:
                yield " ".join((*words, name)), command

    return dict(walk(typer.main.get_command(app), ()))


def options_table(command: Any) -> str:
    """A command's arguments and options as a table."""
    rows = ["| option | | default |", "|---|---|---|"]
    for parameter in command.params:
        names = parameter.opts + parameter.secondary_opts
        if parameter.param_type_name == "argument":
            name, default = (
                f"`{parameter.metavar}`",
                "" if parameter.required or parameter.nargs < 0 else "all",
            )
        else:
            name = ", ".join(f"`{each}`" for each in names)
            if parameter.metavar:
                name += f" {parameter.metavar}"
            default = _default(parameter)
        help_text = " ".join((parameter.help or "").split())
        variable = f" `${parameter.envvar}`" if parameter.envvar else ""
        rows.append(f"| {name} | {help_text}{variable} | {default} |")
    return "\n".join(rows) + "\n"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "needed"
    value = parameter.default
    if value is None or value is False or value == ():
        return ""
    return f"`{value}`"


def codes_table() -> str:
    """The exit codes as a table."""
    rows = ["| code | meaning | what to do |", "|---|---|---|"]
    rows += [
        f"| {int(code)} | {meaning} | {to_do} |" for code, (meaning, to_do) in EXIT_CODES.items()
    ]
    return "\n".join(rows) + "\n"


def renewed(page: str) -> str:
    """The page with its generated parts as they should be."""
    known = commands()

    def part(match: re.Match[str]) -> str:
        start = match[0].split("\n", 1)[0]
        name = match["command"]
        body = codes_table() if name is None else options_table(known[name])
        return f"{start}\n{body}<!-- end -->\n"

    return _PART.sub(part, page)


def described(page: str) -> set[str]:
    """The commands that the page has a table of."""
    return {match["command"] for match in _PART.finditer(page) if match["command"]}


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
