"""Tables, JSON and progress. This is the only module that prints.

Names, reasons and events come from other people, so control characters are escaped here, whatever a command prints.
"""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from anabranch import logs
from anabranch.cli.errors import Failure, OutputClosed
from anabranch.logs import escaped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.text import Text

Row = Mapping[str, Any]

_log = logging.getLogger("anabranch.cli")


def _json(document: object, file: Any) -> str:
    """JSON with control characters, and characters that ``file`` can't encode, written as `\\u....`."""
    is_utf = (getattr(file, "encoding", None) or "utf-8").lower().startswith("utf")
    text = json.dumps(document, ensure_ascii=not is_utf)
    return logs.ACTS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def take_any_text() -> None:
    """Escape characters that the encoding of standard output lacks: an event or a name must not fail a command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def print_json(document: object) -> None:
    """Print one JSON document, or one line of a stream of them."""
    _write(_json(document, sys.stdout))


# Colours of states at a terminal; rich leaves them out if $NO_COLOR is set.
_STYLES = {
    **dict.fromkeys(("ACTIVE", "COMMITTED", "Stable", "ok"), "green"),
    **dict.fromkeys(("OPEN", "PREPARED", "CREATING", "ALTERING", "warn", "not checked"), "yellow"),
    **dict.fromkeys(("FINALIZE_IN_PROGRESS", "ABORT_IN_PROGRESS"), "cyan"),
    **dict.fromkeys(("ABORTED", "LOST", "DELETING", "bad", "fails"), "red"),
}
_ID = re.compile("[0-9a-f]{32}")
_MS_TIME = re.compile(r"([0-9-]{10}T[0-9:]{8})\.[0-9]{3}\+00:00")
_LEAST_CELL = 8  # characters of a column that may be folded


class Column(NamedTuple):
    """A column of a table. ``value``: a key of the rows, or a function of a row.

    ``are_numbers``: whether its texts are numbers.
    """

    title: str
    value: str | Callable[[Row], object]
    are_numbers: bool = False


Columns = Sequence[str | Column]


class Grid(NamedTuple):
    """A table. A column that is only a key of the rows has the key as its title."""

    title: str
    rows: Iterable[Row]
    columns: Columns


def print_result(document: object, *parts: str | Grid | tuple[str, ...], as_json: bool) -> None:
    """Print the document as JSON, or tables and lines for people. A tuple is a line of cells."""
    if as_json:
        print_json(document)
        return
    for part in parts:
        if isinstance(part, Grid):
            print_table(*part)
        elif isinstance(part, tuple):
            print_line(*part)
        else:
            print_line(part)


def print_headings(cells: Sequence[str]) -> None:
    """Print the headings of lines of cells, if people read them at a terminal."""
    if sys.stdout.isatty():
        _write("\t".join(cells))


def print_line(*cells: str) -> None:
    """Print cells as one line that is not wrapped, with a tab between two cells.

    Raises: OutputClosed if the reader has closed the pipe, as in ``anabranch read ... | head``.
    """
    _write("\t".join(map(escaped, cells)))


def _write(text: str) -> None:
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise OutputClosed from error


def print_note(text: str) -> None:
    """Print a line on standard error; a line of the log if that is JSON."""
    if logs.is_json():
        _log.info("%s", text)
        return
    sys.stderr.write(escaped(text) + "\n")
    sys.stderr.flush()


def show_failure(failure: Failure, *, as_json: bool) -> None:
    """Print a failure on standard error, in one line; a line of the log if that is JSON."""
    if logs.is_json():
        _log.error("%s", failure.line(), extra=failure.document())
    elif as_json:
        sys.stderr.write(_json(failure.document(), sys.stderr) + "\n")
    else:
        print_note(failure.line())


def show_traceback(error: BaseException) -> None:
    """Print the traceback of an exception on standard error."""
    if logs.is_json():
        _log.error("%r", error, exc_info=error)
        return
    for part in traceback.format_exception(error):
        for line in part.rstrip("\n").split("\n"):
            print_note(line)


def is_agreed(question: str) -> bool:
    """Ask the user at a terminal."""
    import typer

    return typer.confirm(escaped(question), err=True)


def console(*, to_stderr: bool = False) -> Console:
    """A rich console on standard output or standard error as they are now."""
    from rich.console import Console

    file = sys.stderr if to_stderr else sys.stdout
    # A table in a file or pipe does not have a terminal's width.
    width = None if file.isatty() else 200
    return Console(file=file, width=width, highlight=False)


def show(
    name: str,
    rows: Iterable[Row],
    columns: Columns,
    *,
    as_json: bool,
    title: str | None = None,
    **more: Sequence[str],
) -> None:
    """Print a list: as JSON with all fields of its rows, or as a table with some columns.

    ``name``: of the list in the JSON document. ``title``: of the table; by default the name. ``more``: lines about
    the list, by their names in the document.
    """
    found = list(rows)
    table = Grid(_title(name).capitalize() if title is None else title, found, columns)
    lines = (line for each in more.values() for line in each)
    print_result({name: found, **more}, table, *lines, as_json=as_json)


def print_table(title: str, rows: Iterable[Row], columns: Columns) -> None:
    """Print rows as a table, with numbers aligned to the right.

    If the terminal is too narrow, columns without content are left out, and times are shown in seconds. If that is
    not enough, each row becomes several lines.
    """
    from rich.table import Table
    from rich.text import Text

    chosen = [Column(_title(one), one) if isinstance(one, str) else one for one in columns]
    cells = [
        [row[value] if isinstance(value, str) else value(row) for _, value, _ in chosen]
        for row in rows
    ]
    shown = [
        _Shown(
            escaped(column.title),
            [escaped(cell_text(row[at])) for row in cells],
            bool(cells) and all(column.are_numbers or _is_number(row[at]) for row in cells),
        )
        for at, column in enumerate(chosen)
    ]
    screen = console()
    if sum(one.width + 3 for one in shown) + 1 > screen.width:
        shown = [one.shortened() for one in shown if one.says_something]
        if sum(one.least_width + 3 for one in shown) + 1 > screen.width:
            _print_rows(screen, title, shown)
            return
    table = Table(title=Text(escaped(title)), title_justify="left", header_style="bold")
    for one in shown:
        side: Literal["left", "right"] = "right" if one.are_numbers else "left"
        table.add_column(Text(one.title), justify=side, overflow="fold", no_wrap=one.has_ids)
    for row in zip(*(one.cells for one in shown), strict=True):
        table.add_row(*map(_coloured, row))
    screen.print(table)


class _Shown(NamedTuple):
    """A column of a table as texts."""

    title: str
    cells: list[str]
    are_numbers: bool

    @property
    def width(self) -> int:
        return max(map(len, (self.title, *self.cells)))

    @property
    def has_ids(self) -> bool:
        """Whether it has ids of transactions: these stay whole, so that they can be copied."""
        return any(map(_ID.fullmatch, self.cells))

    @property
    def least_width(self) -> int:
        return self.width if self.has_ids else min(self.width, _LEAST_CELL)

    @property
    def says_something(self) -> bool:
        """Whether any cell is neither empty nor 0; so is a column without cells."""
        return not self.cells or not {"-", "0"}.issuperset(self.cells)

    def shortened(self) -> _Shown:
        """The same with times in seconds."""
        return self._replace(cells=[_MS_TIME.sub(r"\1Z", cell) for cell in self.cells])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _coloured(cell: str) -> Text:
    from rich.text import Text

    return Text(cell, style=_STYLES.get(cell, ""))


def _print_rows(screen: Console, title: str, columns: Sequence[_Shown]) -> None:
    """Print each row as lines of a heading and a cell, which the terminal may wrap."""
    from rich.text import Text

    screen.print(Text(escaped(title), style="italic"))
    size = max((len(one.title) for one in columns), default=0)
    for row in zip(*(one.cells for one in columns), strict=True):
        for one, cell in zip(columns, row, strict=True):
            heading = Text(f"{one.title:{size}}  ", style="bold")
            screen.print(heading + _coloured(cell), soft_wrap=True)
        screen.print()


def fields_of(title: str, document: Row) -> Grid:
    """A table of the fields of one thing."""
    rows = [{"name": _title(name), "value": value} for name, value in document.items()]
    return Grid(title, rows, (Column("", "name"), "value"))


def _title(key: str) -> str:
    return key.replace("_", " ")


def cell_text(value: object) -> str:
    """A value as tables show it; `-` if it is empty."""
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
        disable=quiet or logs.is_json() or not sys.stderr.isatty(),
    )


def begin_task(bar: Progress, name: str, total: float | None) -> TaskID:
    """Add a task to a progress bar."""
    return bar.add_task(escaped(name), total=total)
