"""Tables, JSON and progress, as all commands print them."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from anabranch.cli.errors import OutputClosed
from anabranch.shown.words import count_of as count_of
from anabranch.shown.words import time_text as time_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from anabranch.reading.tasks.lag import Lag


def print_json(document: object) -> None:
    """Print one JSON document, or one line of a stream of them."""
    print_line(json.dumps(document, ensure_ascii=False))


def print_result(document: object, line: str, *, as_json: bool) -> None:
    """Print the document as JSON, or the line that says the same for people."""
    if as_json:
        print_json(document)
    else:
        print_line(line)


def print_line(text: str) -> None:
    """Print a plain, unwrapped line.

    `OutputClosed` if its reader is gone (``anabranch read ... | head``).
    """
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise OutputClosed from error


def console(*, to_stderr: bool = False) -> Console:
    """A rich console on the present standard output (or error)."""
    from rich.console import Console

    file = sys.stderr if to_stderr else sys.stdout
    # A table in a file or pipe is not cut to a terminal's width.
    width = None if file.isatty() else 200
    return Console(file=file, width=width, highlight=False)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, numbers to the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", header_style="bold")
    cells = [list(row) for row in rows]
    for index, column in enumerate(columns):
        numbers = bool(cells) and all(isinstance(row[index], int | float) for row in cells)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(show_cell(cell)) for cell in row))
    console().print(table)


def show_cell(value: object) -> str:
    """The text of a table's value."""
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3f}"
    return str(value)


def progress_bar(*, quiet: bool) -> Progress:
    """A progress bar on standard error; hidden if ``quiet`` or without a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console(to_stderr=True),
        transient=True,
        disable=quiet or not sys.stderr.isatty(),
    )


def bytes_document(**data: bytes | None) -> dict[str, Any]:
    """Bytes as JSON: a name's as text, or as ``name_base64`` if they are no UTF-8."""
    document: dict[str, Any] = {}
    for name, some in data.items():
        try:
            document[name] = None if some is None else some.decode("utf-8")
        except UnicodeDecodeError:
            document[f"{name}_base64"] = base64.b64encode(some or b"").decode("ascii")
    return document


def bytes_text(data: bytes) -> str:
    r"""Bytes as a part of a line: a backslash, and all that is no printable UTF-8, as `\\`, `\t`, `\n`, `\xff`."""
    text = data.decode("utf-8", "surrogateescape")
    return "".join(c if c.isprintable() and c != "\\" else _escaped(c) for c in text)


@lru_cache(1024)  # one text for all of a kind: a value may have millions
def _escaped(one: str) -> str:
    if "\udc80" <= one <= "\udcff":  # a byte that is no UTF-8
        return f"\\x{ord(one) - 0xDC00:02x}"
    return repr(one)[1:-1]


def lag_document(lag: Lag | None) -> dict[str, Any]:
    """A lag as JSON; None: it can't be told."""
    if lag is None:
        return {"events_behind": None, "seconds_behind": None, "exact": None}
    seconds = round(lag.age_s(time.time()), 3)
    return {"events_behind": lag.events, "seconds_behind": seconds, "exact": lag.exact}
