"""`anabranch load`: CSV files into a stream, in one transaction."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from anabranch.cli.options import ClusterOptions, Into, LoadedAs, NewSegments, argument, option
from anabranch.cli.output import begin_task, print_json, print_line, progress_bar
from anabranch.core import defaults
from anabranch.core.legal_names import split_stream
from anabranch.errors import InvalidArgument
from anabranch.presentation.words import count_of

if TYPE_CHECKING:
    from anabranch import Result, Transaction
    from anabranch.cli.data.load_csv import Events


class Form(StrEnum):
    """The form of an event's value."""

    JSON = "json"
    CSV = "csv"


@dataclass(frozen=True)
class LoadOptions(ClusterOptions):
    """The shared options, with the timeout of a load."""

    timeout: Annotated[
        float, option("--timeout SECONDS", "Time limit of the commit and of each request.", min=1.0)
    ] = 60.0


def command(
    options: LoadOptions,
    files: Annotated[
        list[Path],
        argument(
            "FILE...",
            "CSV files with a header row; also .gz, or .zip with one CSV file in it; - is standard input.",
            exists=True,
            dir_okay=False,
            readable=True,
            allow_dash=True,
        ),
    ],
    stream: Into,
    key: Annotated[
        str | None,
        option(
            "--key COLUMN",
            "The events' key; rows of a key keep their order. An empty field is no key.",
        ),
    ] = None,
    timestamp: Annotated[
        str | None,
        option(
            "--timestamp COLUMN",
            "The events' time: ISO 8601, or seconds or milliseconds since 1970.",
        ),
    ] = None,
    form: Annotated[
        Form, option("--format", "The value: the row as a JSON object, or as CSV.")
    ] = Form.JSON,
    delimiter: Annotated[
        str, option("--delimiter CHARACTER", "Between two fields; '\\t' is a tab.")
    ] = ",",
    encoding: Annotated[str, option("--encoding NAME", "The files' encoding.")] = "utf-8",
    segments: NewSegments = None,
    name: LoadedAs = None,
) -> None:
    """Load CSV files into a stream: all rows at once, or none."""
    from anabranch.cli.data.load_csv import Events

    started = time.monotonic()
    delimiter = "\t" if delimiter == "\\t" else delimiter
    if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n':
        raise InvalidArgument(
            f"--delimiter {delimiter!r}: one ASCII character, no quote, no line's end"
        )
    events = Events(form is Form.JSON, key, timestamp, delimiter, encoding.lower())
    with options.client() as client:
        if segments is not None:
            client.create_stream(stream, segments=segments)
        else:
            client.describe(stream)
        scope, _ = split_stream(stream)
        with client.begin(scope, name=name, keepalive=defaults.TOOL_KEEPALIVE_S) as txn:
            result = txn.result
            loaded = result is None
            if result is None:
                txn.token()  # opened: `txn list` shows it, and an operator can abort it
                _write(txn, stream, files, events, quiet=options.json)
                result = txn.commit()
    document = _document(stream, result, len(files) if loaded else 0)
    document["seconds"] = round(time.monotonic() - started, 3)
    _show(document, as_json=options.json)


def _write(
    txn: Transaction, stream: str, files: Sequence[Path], events: Events, *, quiet: bool
) -> None:
    from anabranch.cli.data.load_csv import opened

    with progress_bar(quiet=quiet) as bar:
        for path in files:
            with opened(path, events) as file:
                task = begin_task(bar, path.name, file.size)
                for batch in file.batches():
                    txn.write_batch(stream, batch)
                    bar.update(task, completed=file.done)
                bar.update(task, completed=file.size)


def _document(stream: str, result: Result, files: int) -> dict[str, Any]:
    """``files``: how many were loaded now; 0: they were committed before."""
    return {
        "stream": stream,
        "txn_id": result.txn_id.hex(),
        "name": result.name,
        "already_committed": not files,
        "commit_timestamp": result.commit_timestamp,
        "rows": result.counts.committed,
        "files": files,
    }


def _show(document: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    if document["already_committed"]:
        print_line(
            f"{document['name']} was loaded before: transaction {document['txn_id']}, "
            f"{document['rows']:,} events; nothing was written now"
        )
        return
    rate = document["rows"] / max(document["seconds"], 0.001)
    print_line(
        f"{count_of(document['rows'], 'row')} of {count_of(document['files'], 'file')} "
        f"in {document['stream']}, "
        f"all at once, in {document['seconds']:.1f} s "
        f"({rate:,.0f}/s): transaction {document['txn_id']}"
    )
