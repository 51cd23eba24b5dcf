"""Tables, JSON and progress, as all commands print them.

This is the one place that prints. Names, reasons and events come from other people, so nothing that a terminal
would act on gets through: it is escaped here, whatever a command prints.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from anabranch.cli.errors import Failure, OutputClosed
from anabranch.shown.words import count_of as count_of
from anabranch.shown.words import time_text as time_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from anabranch.reading.tasks.lag import Lag


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


def show(failure: Failure, *, as_json: bool) -> None:
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


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, numbers to the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(escaped(title)), title_justify="left", header_style="bold")
    cells = [list(row) for row in rows]
    for index, column in enumerate(columns):
        numbers = bool(cells) and all(isinstance(row[index], int | float) for row in cells)
        table.add_column(
            Text(escaped(column)), justify="right" if numbers else "left", overflow="fold"
        )
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
    return escaped(str(value))


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
