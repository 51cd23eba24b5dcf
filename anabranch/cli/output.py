"""Tables, JSON and progress, as all commands print them.

This is the one place that prints. Names, reasons and events come from other people, so nothing that a terminal
would act on gets through: it is escaped here, whatever a command prints.
"""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from anabranch.cli.errors import Failure, OutputClosed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

Row = Mapping[str, Any]

# C0, DEL and C1, ends of lines, controls of writing direction; and surrogates, which can't be encoded.
_ACTS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str) -> str:
    r"""A text, with what a terminal would act on as `\n`, `\x1b`, `\u202e`."""
    return _ACTS.sub(lambda found: repr(found[0])[1:-1], text)


def _json(document: object, file: Any) -> str:
    """JSON of the same value, with what a terminal would act on, and what ``file`` can't encode, as `\\u....`."""
    is_utf = (getattr(file, "encoding", None) or "utf-8").lower().startswith("utf")
    text = json.dumps(document, ensure_ascii=not is_utf)
    return _ACTS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def take_any_text() -> None:
    """Let standard output escape what its encoding lacks: an event or a name must not end a command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def print_json(document: object) -> None:
    """Print one JSON document, or one line of a stream of them."""
    _write(_json(document, sys.stdout))


def print_result(document: object, *lines: str, as_json: bool) -> None:
    """Print the document as JSON, or the lines that say the same for people."""
    if as_json:
        print_json(document)
        return
    for line in lines:
        print_line(line)


def print_line(*cells: str) -> None:
    """Print a plain, unwrapped line; between two cells is a tab, and in none of them.

    `OutputClosed` if its reader is gone (``anabranch read ... | head``).
    """
    _write("\t".join(map(escaped, cells)))


def _write(text: str) -> None:
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise OutputClosed from error


def print_note(text: str) -> None:
    """Print a line on standard error."""
    sys.stderr.write(escaped(text) + "\n")
    sys.stderr.flush()


def show_failure(failure: Failure, *, as_json: bool) -> None:
    """Print a failure on standard error, in one line."""
    if as_json:
        sys.stderr.write(_json(failure.document(), sys.stderr) + "\n")
    else:
        print_note(failure.line())


def show_traceback(error: BaseException) -> None:
    """Print where an exception comes from on standard error."""
    for part in traceback.format_exception(error):
        for line in part.rstrip("\n").split("\n"):
            print_note(line)


def is_agreed(question: str) -> bool:
    """Ask a user at a terminal."""
    import typer

    return typer.confirm(escaped(question), err=True)


class _LogLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(escaped, super().format(record).split("\n")))


def log_to_stderr(level: int = logging.WARNING, form: str = logging.BASIC_FORMAT) -> None:
    """Let the log go to standard error, unless the program that runs this command has one already."""
    handler = logging.StreamHandler()
    handler.setFormatter(_LogLines(form))
    logging.basicConfig(level=level, handlers=[handler])


def console(*, to_stderr: bool = False) -> Console:
    """A rich console on the present standard output (or error)."""
    from rich.console import Console

    file = sys.stderr if to_stderr else sys.stdout
    # A table in a file or pipe is not cut to a terminal's width.
    width = None if file.isatty() else 200
    return Console(file=file, width=width, highlight=False)


class Column(NamedTuple):
    """A column of a table. ``value``: a key of the rows, or what it makes of a row."""

    title: str
    value: str | Callable[[Row], object]


Columns = Sequence[str | Column]


def show(
    name: str,
    rows: Iterable[Row],
    columns: Columns,
    *,
    as_json: bool,
    title: str | None = None,
    **more: Sequence[str],
) -> None:
    """Print a list: as JSON with all that its rows have, or as a table of some columns.

    ``name``: of the list in the document. A column that is a key of the rows has it as its title, too.
    ``title``: of the table (default: as ``name``). ``more``: lines about the list, each kind with its name in JSON.
    """
    found = list(rows)
    if as_json:
        print_json({name: found, **more})
        return
    print_table(_title(name).capitalize() if title is None else title, found, columns)
    for lines in more.values():
        for line in lines:
            print_line(line)


def print_table(title: str, rows: Iterable[Row], columns: Columns) -> None:
    """Print some columns of rows as a table, numbers to the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(escaped(title)), title_justify="left", header_style="bold")
    chosen = [Column(_title(one), one) if isinstance(one, str) else one for one in columns]
    cells = [
        [row[value] if isinstance(value, str) else value(row) for _, value in chosen]
        for row in rows
    ]
    for column, values in zip(
        chosen, zip(*cells, strict=True) if cells else ((),) * len(chosen), strict=True
    ):
        numbers = bool(values) and all(
            isinstance(value, int | float) and not isinstance(value, bool) for value in values
        )
        heading = Text(escaped(column.title))
        table.add_column(heading, justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(escaped(cell_text(cell))) for cell in row))
    console().print(table)


def print_fields(title: str, document: Row) -> None:
    """Print one thing as a table of its fields."""
    rows = [{"name": _title(name), "value": value} for name, value in document.items()]
    print_table(title, rows, (Column("", "name"), "value"))


def _title(key: str) -> str:
    return key.replace("_", " ")


def cell_text(value: object) -> str:
    """A value as a table shows it: `-` if it is empty."""
    if value is None or (not value and isinstance(value, str | list | tuple | Mapping)):
        return "-"
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.3f}"
        case list() | tuple():
            return ", ".join(map(cell_text, value))
        case Mapping():
            return ", ".join(f"{name}: {cell_text(each)}" for name, each in sorted(value.items()))
    return str(value)


def progress_bar(*, quiet: bool) -> Progress:
    """A progress bar on standard error; hidden if ``quiet`` or without a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console(to_stderr=True),
        transient=True,
        disable=quiet or not sys.stderr.isatty(),
    )


def begin_task(bar: Progress, name: str, total: float | None) -> TaskID:
    """Add a task to a progress bar."""
    return bar.add_task(escaped(name), total=total)
