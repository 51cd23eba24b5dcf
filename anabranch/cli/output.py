"""Tables, JSON and progress, as all commands print them."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from anabranch.cli.errors import OutputClosed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


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


def count_of(count: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    plural = f"{noun}es" if noun.endswith(("s", "tch", "each")) else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


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


def put_bytes(document: dict[str, Any], name: str, data: bytes | None) -> None:
    """Add ``name`` as text, or ``name_base64`` if the bytes are no UTF-8."""
    try:
        document[name] = None if data is None else data.decode("utf-8")
    except UnicodeDecodeError:
        document[f"{name}_base64"] = base64.b64encode(data or b"").decode("ascii")


def time_text(unix_ms: int) -> str | None:
    """Unix milliseconds as ISO 8601 in UTC; None for 0, which means "not yet"."""
    if not unix_ms:
        return None
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds")
