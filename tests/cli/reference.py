"""The generated parts of docs/cli.md and configuration.md; ``python -m tests.cli.reference`` writes them.

The page has tables of the exit codes and of the options that many commands have, and lists of the options of a
group, each between its mark and ``<!-- end -->``. The first paragraph of a command's section is the command's
help, and its last list has the command's other options and arguments. A test compares all of them.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer.main

from anabranch.cli.config import settings_of
from anabranch.cli.errors import EXIT_CODES
from anabranch.cli.main import app

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
SETTINGS = PAGE.with_name("configuration.md")
_SETTINGS = re.compile(r"(<!-- settings -->\n).*?(?=<!-- end -->\n)", re.DOTALL)
# An option of at least this many commands is said once.
_MANY = 12
# The same within one of these groups.
_GROUPS = ("table", "ledger", "spark")
_MANY_OF_GROUP = 3
# The sections of these commands don't repeat the options that they share with another command.
_SHARING = {
    "doctor": "controller",
    "broker": "dev",
    "table create": "stream create",
    "spark load": "load",
}
# The page says once what a time is, and that an option with `...` can be repeated.
_TIME = "a commit timestamp or an ISO 8601 time"
_WIDTH = 120
_TABLE = re.compile(
    r"(<!-- (exit codes|common options|options of (?P<group>\w+)) -->\n).*?<!-- end -->\n",
    re.DOTALL,
)
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
            default = ""
        else:
            name = ", ".join(f"`{each}`" for each in parameter.opts + parameter.secondary_opts)
            name += f" {parameter.metavar}" if parameter.metavar else ""
            name += "..." if parameter.multiple else ""
            default = _default(parameter)
        variable = f" `${parameter.envvar}`" if parameter.envvar else ""
        text = as_code(" ".join((parameter.help or "").split()))
        text = text.replace(_TIME, "a time").removesuffix(" Repeatable.")
        found.append(Line(name, text + variable, default))
    return found


def as_code(text: str) -> str:
    """A help text with its options in backticks."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"(?<![\w-])--[a-z][a-z-]*", r"`\g<0>`", part) for part in parts[::2]]
    return "`".join(parts)


def help_of(command: Any) -> str:
    """A command's help as one paragraph."""
    text = as_code(" ".join(command.help.split()))
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _default(parameter: Any) -> str:
    if parameter.required:
        return "needed"
    value = parameter.default
    if value is None or isinstance(value, bool) or value == ():
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
        (having if line else lacking).append(name)
        if line and line.help == said.help and line.default != said.default:
            others[line.default].append(name)
    default = "; ".join([said.default, *(f"{d} of {listed(of)}" for d, of in others.items())])
    of = listed(having)
    if len(lacking) < len(having):
        of = f"all but {listed(lacking)}" if lacking else "all"
    return f"| {said.name} | {said.help} | {default} | {of} |"


def listed(names: list[str]) -> str:
    """The commands, with those of a group together."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        group, _, last = name.rpartition(" ")
        groups[group or name].append(last if group else "")
    words = ((group, "/".join(filter(None, lasts))) for group, lasts in groups.items())
    return ", ".join(f"`{' '.join(filter(None, each))}`" for each in words)


def common_table() -> str:
    """The options that many commands have, and which have them."""
    rows = ["| option | | default | commands |", "|---|---|---|---|"]
    return "\n".join(rows + [common_row(said) for said in common().values()]) + "\n"


@cache
def of_group(group: str) -> dict[Line, list[str]]:
    """The options that are said once for a group, with the commands that have them."""
    having: dict[Line, list[str]] = defaultdict(list)
    for name in members(group):
        for line in own_lines(name):
            if line.name.startswith("`-"):
                having[line].append(name)
    return {line: names for line, names in having.items() if len(names) >= _MANY_OF_GROUP}


def members(group: str) -> list[str]:
    """The commands of a group."""
    return [name for name in commands() if name.startswith(f"{group} ")]


def group_list(group: str) -> str:
    """The options of a group; without names of commands, if all have them."""
    rows = []
    for line, names in of_group(group).items():
        of = "" if names == members(group) else f" Of {listed(names)}."
        rows.append(line_text(line, of))
    return "".join(rows)


def own_lines(name: str) -> list[Line]:
    """What a command takes besides the common options."""
    shared = lines_of(commands()[_SHARING[name]]) if name in _SHARING else []
    return [
        line
        for line in lines_of(commands()[name])
        if line not in shared
        and not (line.name in common() and common()[line.name].help == line.help)
    ]


def own_list(name: str) -> str:
    """What a command takes besides the common options and those of its group."""
    group = name.partition(" ")[0]
    said = of_group(group) if group in _GROUPS else {}
    lines = [line for line in own_lines(name) if line not in said]
    named = [line.name for line in lines if line.help == _named(line.name)]
    first = f"- {' '.join(named)}\n" if named else ""
    return first + "".join(line_text(line) for line in lines if line.name not in named)


def _named(name: str) -> str:
    """The help of an argument that says no more than its name, such as `SCOPE/STREAM`."""
    return f"The {name.strip('`').rpartition('/')[2].lower()}."


def line_text(line: Line, more: str = "") -> str:
    """An item of a list."""
    default = f" ({line.default})" if line.default else ""
    return f"- {line.name}{default}: {line.help}{more}\n"


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
        if match["group"]:
            body = group_list(match["group"])
        else:
            body = codes_table() if match[2] == "exit codes" else common_table()
        return f"{match[1]}{body}<!-- end -->\n"

    def section(match: re.Match[str]) -> str:
        name = match["command"]
        _, _, text = match["text"].strip("\n").partition("\n\n")
        parts = (help_of(known[name]), text.strip("\n"), own_list(name))
        return match["head"] + "\n\n".join(filter(None, parts)).strip("\n") + "\n\n"

    return _SECTION.sub(section, _TABLE.sub(table, page)).rstrip("\n") + "\n"


def with_settings(page: str) -> str:
    """docs/configuration.md with the table of settings as it should be."""
    rows = ["| key | option | variable | default |", "|---|---|---|---|"]
    for each in settings_of(typer.main.get_command(app)).values():
        default = "`false`" if each.parameter.default is False else _default(each.parameter)
        secret = ", secret" if each.is_secret else ""
        rows.append(f"| `{each.name}` | `{each.option}`{secret} | `{each.variable}` | {default} |")
    return _SETTINGS.sub(lambda found: found[1] + "\n".join(rows) + "\n", page)


def described(page: str) -> set[str]:
    """The commands that the page has a section of."""
    return {match["command"] for match in _SECTION.finditer(page)}


if __name__ == "__main__":
    for page, renew in ((PAGE, renewed), (SETTINGS, with_settings)):
        page.write_text(renew(page.read_text(encoding="utf-8")), encoding="utf-8")
        sys.stdout.write(f"wrote {page}\n")
