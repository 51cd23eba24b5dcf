"""The generated parts of docs/cli.md; ``python -m tests.cli.reference`` writes them.

The page has tables of the exit codes and of the options that many commands have, each between its mark and
``<!-- end -->``. A command's section ends with a list of what only this command takes. A test compares both.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer.main

from anabranch.cli.errors import EXIT_CODES
from anabranch.cli.main import app

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
# An option of at least this many commands is said once.
_MANY = 12
_TABLE = re.compile(r"(<!-- (exit codes|common options) -->\n).*?<!-- end -->\n", re.DOTALL)
_SECTION = re.compile(
    r"(?P<head>^### `anabranch (?P<command>[a-z -]+)`\n)(?P<text>.*?)"
    r"(?:^- `[^\n]*\n)*\n*(?=^#|\Z)",
    re.DOTALL | re.MULTILINE,
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


@dataclass(frozen=True)
class Line:
    """An argument or an option, as the page shows it."""

    name: str
    help: str
    default: str


def lines_of(command: Any) -> list[Line]:
    """A command's arguments and options."""
    found = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            name = f"`{parameter.metavar}`"
            default = "" if parameter.required or parameter.nargs < 0 else "all"
        else:
            name = ", ".join(f"`{each}`" for each in parameter.opts + parameter.secondary_opts)
            name += f" {parameter.metavar}" if parameter.metavar else ""
            default = _default(parameter)
        variable = f" `${parameter.envvar}`" if parameter.envvar else ""
        found.append(Line(name, " ".join((parameter.help or "").split()) + variable, default))
    return found


def _default(parameter: Any) -> str:
    if parameter.required:
        return "needed"
    value = parameter.default
    if value is None or value is False or value == ():
        return ""
    return f"`{value}`"


@cache
def common() -> dict[str, Line]:
    """The options that are said once, by name: what most of the commands say that have them."""
    having: dict[str, Counter[Line]] = defaultdict(Counter)
    for command in commands().values():
        for line in lines_of(command):
            if line.name.startswith("`-"):
                having[line.name][line] += 1
    return {
        name: said.most_common(1)[0][0] for name, said in having.items() if said.total() >= _MANY
    }


def common_row(said: Line) -> str:
    """An option with its default, the commands that have another default, and those that have the option."""
    having: list[str] = []
    lacking: list[str] = []
    others: dict[str, list[str]] = defaultdict(list)
    for name, command in commands().items():
        line = next((line for line in lines_of(command) if line.name == said.name), None)
        (having if line else lacking).append(f"`{name}`")
        if line and line.help == said.help and line.default != said.default:
            others[line.default].append(f"`{name}`")
    default = "; ".join([said.default, *(f"{d} of {', '.join(of)}" for d, of in others.items())])
    of = ", ".join(having)
    if len(lacking) < len(having):
        of = f"all but {', '.join(lacking)}" if lacking else "all"
    return f"| {said.name} | {said.help} | {default} | {of} |"


def common_table() -> str:
    """The options that many commands have, and which have them."""
    rows = ["| option | | default | commands |", "|---|---|---|---|"]
    return "\n".join(rows + [common_row(said) for said in common().values()]) + "\n"


def own_list(command: Any) -> str:
    """What a command takes beside the common options."""
    rows = []
    for line in lines_of(command):
        said = common().get(line.name)
        if said and said.help == line.help:
            continue
        default = {"": "", "needed": " Needed."}.get(line.default, f" Default: {line.default}.")
        rows.append(f"- {line.name}: {line.help}{default}\n")
    return "".join(rows)


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

    def table(match: re.Match[str]) -> str:
        body = codes_table() if match[2] == "exit codes" else common_table()
        return f"{match[1]}{body}<!-- end -->\n"

    def section(match: re.Match[str]) -> str:
        own = own_list(known[match["command"]])
        text = match["text"].strip("\n")
        return (
            match["head"] + "\n\n".join(part for part in (text, own) if part).strip("\n") + "\n\n"
        )

    return _SECTION.sub(section, _TABLE.sub(table, page)).rstrip("\n") + "\n"


def described(page: str) -> set[str]:
    """The commands that the page has a section of."""
    return {match["command"] for match in _SECTION.finditer(page)}


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
