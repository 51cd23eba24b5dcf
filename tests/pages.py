"""Runs the blocks of a page as its reader would: `python` in one namespace, `console` in a shell.

A `python` block with a title is a file for the commands after it. Lines below a `$ ` command are its output; `…` is
any text, and alone on its line any lines. `<!-- not run: WHY -->` before a block leaves it out. The cluster of the
test takes the place of `anabranch dev`, and this tree of `pip install`.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import chdir
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from anabranch.cli.cluster import child_environment
from anabranch.cli.main import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_BLOCK = re.compile(
    r'(?:<!-- not run: (?P<why>[^\n]+) -->\n)?^```(?P<kind>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)
_ADDRESS = re.compile(r"\b(?:localhost|127\.0\.0\.1):9092\b")
_GIVEN = ("anabranch dev", "pip install ")
# Neither given by the test, nor for a shell, nor with a signal's handler.
_ALONE = re.compile(r"anabranch (?!dev|bridge)[^|&;<>$()#]+")
_END = "\x1e"  # between the outputs of commands
_DEADLINE_S = 110


@dataclass(frozen=True)
class Block:
    """A fenced block; ``why``: the reason why it does not run."""

    kind: str
    title: str | None
    text: str
    why: str | None

    @cached_property
    def commands(self) -> list[tuple[str, str]]:
        """Of a `console` block: each command, and the output that the page shows."""
        parts = re.split(r"^\$ ", self.text, flags=re.MULTILINE)
        assert parts[0] == "", f"output without a command: {parts[0]}"
        found = []
        for part in parts[1:]:
            command, _, output = re.sub(r"\\\n", "", part).partition("\n")
            found.append((command, output))
        return found


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    for match in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield Block(match["kind"], match["title"], match["text"], match["why"])


def run_page(page: Path, bootstrap: str, folder: Path, names: Mapping[str, Any]) -> None:
    """Run all blocks in ``folder``; ``names``: what its python finds."""
    namespace = {**names}
    for number, block in enumerate(blocks(page)):
        text = _ADDRESS.sub(bootstrap, block.text)
        if block.why is not None:
            continue
        if block.title is not None:
            (folder / block.title).write_text(text)
        elif block.kind == "python":
            with chdir(folder):
                exec(compile(text, f"{page.name}, block {number}", "exec"), namespace)  # noqa: S102
        elif block.kind == "console":
            _run(Block("console", None, text, None), bootstrap, folder)


def _run(block: Block, bootstrap: str, folder: Path) -> None:
    environment = child_environment({"ANABRANCH_BOOTSTRAP": bootstrap, "COLUMNS": "120"})
    for alone, some in groupby(block.commands, lambda command: bool(_ALONE.fullmatch(command[0]))):
        if not alone:
            _in_shell(list(some), environment, folder)
            continue
        for command, shown in some:  # in this process, which is quicker
            with chdir(folder):
                ended = CliRunner().invoke(app, shlex.split(command)[1:], env=environment)
            _check(command, shown, ended.stdout, str(ended.exit_code), ended.stderr)


def _in_shell(
    commands: list[tuple[str, str]], environment: Mapping[str, str], folder: Path
) -> None:
    lines = []
    for command, _ in commands:
        lines += [":" if command.startswith(_GIVEN) else command, f"printf '{_END}%s{_END}' $?"]
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=folder, env={**environment, "PATH": path}, capture_output=True, text=True, timeout=_DEADLINE_S,
    )  # fmt: skip
    told = done.stdout.split(_END)
    ran = "".join(f"$ {command}\n" for command, _ in commands)
    assert len(told) > 2 * len(commands), f"a command ended the shell: {ran}"
    for (command, shown), output, code in zip(commands, told[::2], told[1::2], strict=False):
        if not command.startswith(_GIVEN):
            _check(command, shown, output, code, done.stderr)


def _check(command: str, shown: str, output: str, code: str, errors: str) -> None:
    about = f"$ {command}\n{output}\n{errors}"
    assert code == "0", f"exit code {code}: {about}"
    assert _pattern(shown).fullmatch(output), f"{about}\nthe page shows:\n{shown}"


def _pattern(shown: str) -> re.Pattern[str]:
    lines = shown.splitlines()
    if not lines:
        return re.compile(r".*", re.DOTALL)  # the page leaves the output out
    texts = (
        r"(?:[^\n]*\n)*?" if line == "…" else re.escape(line).replace("…", r"[^\n]*") + r" *\n"
        for line in lines
    )
    return re.compile("".join(texts))
