"""`anabranch spark load`, `export` and `compact`: from options to the pipelines, and their output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from anabranch.cli.options import At, Into, LoadedAs, NewSegments, argument, option
from anabranch.cli.output import print_note, print_result
from anabranch.cli.session import parse_kafka
from anabranch.cli.spark.commands import JobOptions, app
from anabranch.presentation.words import count_of

if TYPE_CHECKING:
    from anabranch.spark.compact import Compacted
    from anabranch.spark.export import Batch, Exported
    from anabranch.spark.load import Loaded

__all__ = ["app"]

Stream = Annotated[str, option("--stream -s SCOPE/STREAM", "The stream.")]


class FileForm(StrEnum):
    """File formats that Spark reads itself."""

    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"
    ORC = "orc"
    TEXT = "text"


class ValueForm(StrEnum):
    """The form of an event's value."""

    JSON = "json"
    AVRO = "avro"
    RAW = "raw"


class TableForm(StrEnum):
    """File formats of an export."""

    PARQUET = "parquet"
    DELTA = "delta"


class Whole(StrEnum):
    """The units of a micro-batch."""

    WHOLE = "whole"
    SPLIT = "split"


@app.command("load")
def load(
    options: JobOptions,
    files: Annotated[
        list[str], argument("FILE...", "Files, folders or patterns that Spark reads.")
    ],
    stream: Into,
    form: Annotated[
        FileForm, option("--format", "The files' format. CSV files have a header row.")
    ] = FileForm.CSV,
    schema: Annotated[
        str | None,
        option(
            "--schema DDL",
            "The files' columns, such as 'id BIGINT, name STRING' (default: from the files; CSV: texts).",
        ),
    ] = None,
    read_option: Annotated[
        list[str] | None,
        option(
            "--read-option NAME=VALUE",
            "An option of Spark's reader, such as sep=; or encoding=ISO-8859-1. May be repeated.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        option(
            "--key COLUMNS",
            "The events' key: one column, or several with commas (then a JSON array).",
        ),
    ] = None,
    timestamp: Annotated[
        str | None,
        option(
            "--timestamp COLUMN",
            "The events' time: a timestamp, ISO 8601, or seconds or milliseconds since 1970.",
        ),
    ] = None,
    order_by: Annotated[
        str | None,
        option("--order-by COLUMNS", "Write the rows of each key in the order of these columns."),
    ] = None,
    encoding: Annotated[
        ValueForm,
        option("--encoding", "The value: the row as JSON or Avro; raw: columns key and value."),
    ] = ValueForm.JSON,
    segments: NewSegments = None,
    name: LoadedAs = None,
) -> None:
    """Load files into a stream with Spark: all rows at once, or none."""
    place = options.connection()
    reader = parse_kafka(read_option, "--read-option")
    spark = options.session("anabranch load")
    from anabranch.spark.load import Events, Reading
    from anabranch.spark.load import load as run

    loaded = run(
        spark,
        place,
        files,
        stream,
        reading=Reading(form.value, schema, reader),
        events=Events(encoding.value, _words(key), timestamp, _words(order_by)),
        name=name,
        segments=segments,
    )
    print_result(_document(loaded, _LOADED), _load_line(loaded), as_json=options.json)


@app.command("export")
def export(
    options: JobOptions,
    stream: Annotated[
        list[str], option("--stream -s SCOPE/STREAM", "A stream to export. May be repeated.")
    ],
    to: Annotated[str, option("--to DIR", "The folder for the files.")],
    form: Annotated[TableForm, option("--format", "The files' format.")] = TableForm.PARQUET,
    partition_by: Annotated[
        str | None,
        option(
            "--partition-by COLUMNS",
            "A folder for each value: segment, stream, … or date, the day of the event's time.",
        ),
    ] = None,
    schema: Annotated[
        str | None, option("--schema DDL", "Values are JSON objects: write these fields of them.")
    ] = None,
    once: Annotated[
        bool,
        option("--once/--continuous", "Export what is there now, then end; or go on until Ctrl-C."),
    ] = True,
    interval: Annotated[
        float,
        option("--interval SECONDS", "Seconds between micro-batches of --continuous.", min=0.0),
    ] = 1.0,
    transactions: Annotated[
        Whole, option("--transactions", "Whether a big transaction may be split.")
    ] = Whole.WHOLE,
    most_events: Annotated[
        int | None, option("--max-events", "At most so many in a micro-batch.", min=1)
    ] = None,
    start: Annotated[
        str,
        option(
            "--start WHERE",
            "The first time: begin, end, a commit timestamp, or a time with its zone.",
        ),
    ] = "begin",
    checkpoint: Annotated[
        str | None,
        option(
            "--checkpoint DIR", "The folder of the position (default: DIR/_checkpoint of --to)."
        ),
    ] = None,
    strict: Annotated[
        bool,
        option(
            "--strict/--lossy",
            "If events are gone that were not exported (by retention, or with a stream that was deleted and made "
            "again): end, or go on without them.",
        ),
    ] = True,
) -> None:
    """Export committed transactions to files, each once and whole; the next call goes on."""
    place = options.connection()
    spark = options.session("anabranch export")
    from anabranch.spark.export import Pace, Shape
    from anabranch.spark.export import export as run

    exported = run(
        spark,
        place,
        stream,
        to,
        shape=Shape(form.value, _words(partition_by), schema),
        pace=Pace(once, interval, most_events, transactions is Whole.WHOLE, start, strict),
        checkpoint=checkpoint,
        progress=_progress(quiet=options.json),
    )
    print_result(asdict(exported), _export_line(exported), as_json=options.json)


@app.command("compact")
def compact(
    options: JobOptions,
    stream: Stream,
    to: Annotated[str | None, option("--to DIR", "Write a folder of Parquet files.")] = None,
    into: Annotated[
        str | None, option("--into SCOPE/STREAM", "Write to another stream, in one transaction.")
    ] = None,
    at: At = None,
    overwrite: Annotated[
        bool, option("--overwrite", "With --to: replace a folder that is there.")
    ] = False,
    segments: Annotated[
        int | None, option("--segments", "With --into: create that stream first.", min=1)
    ] = None,
    name: Annotated[
        str | None, option("--name", "With --into: a name that is committed only once.")
    ] = None,
) -> None:
    """Write the latest value of each key, as of a commit timestamp; a null value deletes its key."""
    place = options.connection()
    spark = options.session("anabranch compact")
    from anabranch.audit.report import moment_of
    from anabranch.spark.compact import compact as run

    compacted = run(
        spark,
        place,
        stream,
        to=to,
        into=into,
        at=moment_of(at),
        overwrite=overwrite,
        name=name,
        segments=segments,
    )
    print_result(_document(compacted, _COMPACTED), _compact_line(compacted), as_json=options.json)


# -- output ----------------------------------------------------------------------------------------------


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def _progress(*, quiet: bool) -> Callable[[Batch], None] | None:
    """Print a line for each micro-batch on standard error."""
    if quiet:
        return None

    def say(batch: Batch) -> None:
        print_note(f"micro-batch {batch.number}: {batch.rows:,} events")

    return say


_LOADED = ("stream", "txn_id", "name", "already_committed", "commit_timestamp", "rows")
_COMPACTED = ("stream", "at", "to", "txn_id", "already_committed", "events", "keyless", "keys")


def _document(done: Loaded | Compacted, names: Sequence[str]) -> dict[str, Any]:
    """The fields of these names as JSON, in their order."""
    return {name: getattr(done, name) for name in names} | {"txn_id": _hex(done.txn_id)}


def _hex(txn_id: bytes | None) -> str | None:
    return None if txn_id is None else txn_id.hex()


def _load_line(loaded: Loaded) -> str:
    if loaded.already_committed:
        return (
            f"{loaded.name} was loaded before: transaction {_hex(loaded.txn_id)}, "
            f"{loaded.rows:,} events; nothing was written now"
        )
    if loaded.txn_id is None:
        return f"no row: nothing was written to {loaded.stream}"
    return (
        f"{count_of(loaded.rows, 'row')} in {loaded.stream}, all at once: "
        f"transaction {_hex(loaded.txn_id)}"
    )


def _export_line(exported: Exported) -> str:
    if not exported.batches:
        return f"nothing new for {exported.to}"
    return (
        f"{count_of(exported.rows, 'event')} to {exported.to} "
        f"in {count_of(exported.batches, 'micro-batch')}"
    )


def _compact_line(compacted: Compacted) -> str:
    from anabranch.core import hybrid_time

    if compacted.already_committed:
        return (
            f"committed before: transaction {_hex(compacted.txn_id)}, "
            f"{compacted.keys:,} events; nothing was written now"
        )
    keyless = f", {compacted.keyless:,} without a key left out" if compacted.keyless else ""
    return (
        f"{count_of(compacted.keys, 'key')} of {count_of(compacted.events, 'event')} of "
        f"{compacted.stream} as of {hybrid_time.to_text(compacted.at)} in {compacted.to}{keyless}"
    )
