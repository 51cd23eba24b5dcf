"""`anabranch spark`: audit, load, export and compact on Spark. Only the commands import PySpark."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from anabranch import logs
from anabranch.cli.errors import CheckFailed
from anabranch.cli.ledger import TABLE, Table, ledger_of
from anabranch.cli.options import (
    App,
    At,
    ClusterOptions,
    Into,
    LoadedAs,
    LogFormat,
    NewSegments,
    argument,
    option,
    parse_kafka,
)
from anabranch.cli.output import (
    Column,
    Grid,
    Row,
    print_note,
    print_result,
)
from anabranch.errors import NotReady, count_of
from anabranch.presentation.rows import time_text
from anabranch.protocol import hybrid_time
from anabranch.topics.names import commands_topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from anabranch.audit.report import AuditReport
    from anabranch.spark.compact import Compacted
    from anabranch.spark.export import Batch, Exported
    from anabranch.spark.load import Loaded
    from anabranch.spark.options import Connection


app = App(no_args_is_help=True, help="Audit, load, export and compact on Spark.")
Master = Annotated[
    str | None,
    option(
        "--master URL",
        "Spark's master URL (default: as Spark is configured, else local[*]).",
    ),
]
Conf = Annotated[
    list[str] | None,
    option(
        "--conf NAME=VALUE",
        "A setting of Spark, such as spark.driver.memory=4g. Repeatable.",
    ),
]
JobTimeout = Annotated[
    float,
    option("--timeout SECONDS", "Time limit of each request to the cluster.", min=0.1),
]
JOB_TIMEOUT_S = 60.0
MOST_LEDGER_ROWS = 1_000_000  # that an audit compares, the oldest


@dataclass(frozen=True)
class _SparkOptions:
    """Options of the Spark session."""

    master: Master = None
    conf: Conf = None


# A dataclass begins with the fields of its last base.
@dataclass(frozen=True)
class JobOptions(ClusterOptions, _SparkOptions):
    """The options of every command of this group."""

    timeout: JobTimeout = JOB_TIMEOUT_S
    log_format: LogFormat = "text"

    def session(self, app_name: str) -> SparkSession:
        """A Spark session, quiet unless ``verbose``.

        Raises:
            NotInstalled: PySpark is missing.
            NoJdk: Spark finds no JDK 17 or later.
        """
        from anabranch.spark import spark_session

        level = "WARN" if self.verbose else "OFF"
        log4j = Path(__file__).with_name("spark-log4j2.properties")
        if logs.is_json():
            log4j = log4j.with_name("spark-log4j2-json.properties")
            logs.take_other_lines("anabranch.spark.processes")  # of Java, and of Spark's workers
        settings = {
            "spark.ui.enabled": "false",
            "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={log4j} -Danabranch.log={level}",
        }
        warnings.filterwarnings(
            "ignore", "PySpark does not yet fully support pandas", FutureWarning
        )
        conf = parse_kafka(self.conf, "--conf")
        spark = spark_session(app_name, self.master, settings | conf)
        spark.sparkContext.setLogLevel(level)
        return spark

    def connection(self) -> Connection:
        """The cluster of the options. `InvalidArgument` if they name none; `NotReady`: it does not answer.

        The cluster is asked first, because Spark takes long to start.
        """
        from anabranch.client.connect import reader_ports
        from anabranch.spark.options import Connection

        target = self.target()
        ports = reader_ports(target.bootstrap, target.kafka)
        try:
            with closing(ports.committed_log(target.timeout)) as source:
                deadline = ports.clock.monotonic() + target.timeout
                source.partition_counts([commands_topic(target.prefix, target.lane)], deadline)
        except NotReady as error:
            raise NotReady(f"no broker answers at {target.bootstrap}: {error}") from error
        settings = tuple(sorted(target.kafka.items()))
        return Connection(target.bootstrap, target.prefix, target.timeout, settings, target.lane)


@app.command("audit")
def audit(
    options: JobOptions,
    stream: Annotated[
        list[str],
        option(
            "--stream -s SCOPE/STREAM",
            "A stream, or a scope for all its streams, of one control partition. Repeatable.",
        ),
    ],
    at: At = None,
    report: Annotated[
        Path | None, option("--report FILE", "Also write the report to this file, as JSON.")
    ] = None,
    complete: Annotated[
        bool, option("--complete", "Also exit with 1 if something is not checkable.")
    ] = False,
    database: Annotated[
        str | None,
        option(
            "--database URL", "Also compare a ledger's rows: postgresql://…, or an SQLite file."
        ),
    ] = None,
    table: Table = TABLE,
) -> None:
    """Check from the log that streams have exactly the committed events, each once and in order.

    The exit code is 1 if it finds a breach.
    """
    place = options.connection()
    spark = options.session("anabranch audit")
    from anabranch.audit.report import moment_of
    from anabranch.audit.run import audit as run

    rows = () if database is None else ledger_of(database, table).rows(MOST_LEDGER_ROWS)
    found = run(spark, place, stream, moment_of(at), rows)
    if report is not None:
        report.write_text(found.to_json() + "\n", encoding="utf-8")
    _show(found, as_json=options.json)
    if found.breaches:
        raise CheckFailed(f"the audit found {count_of(found.breaches, 'breach')}")
    unchecked = [check.name for check in found.checks if check.unchecked]
    if complete and unchecked:
        raise CheckFailed(f"not all of {', '.join(unchecked)} is checkable: the evidence is gone")


def _show(report: AuditReport, *, as_json: bool) -> None:
    """Print a table of the checks and one of the breaches; or JSON."""
    from anabranch.audit.report import CHECKS, MOST_EXAMPLES

    title = (
        f"{', '.join(report.streams)} as of {hybrid_time.to_text(report.at)}: "
        f"{count_of(report.transactions, 'commit')}, {count_of(report.events, 'event')}"
    )
    document = report.document()
    columns = (
        Column("check", "name"),
        Column("what holds", lambda row: f"each {CHECKS[row['name']].holds}"),
        "examined",
        Column("", "what"),
        Column("not checkable", "unchecked"),
        "breaches",
    )
    parts: list[str | Grid] = [Grid(title, document["checks"], columns), *report.notes]
    parts += [
        f"{g.stream}, partition {g.partition}: no event is left below offset {g.low:,}; some or all of its "
        f"{count_of(g.events, 'event')} are gone"
        for g in report.gone
    ]
    parts += [
        f"{count_of(waiting.count, 'transaction')} PREPARED, the oldest since {time_text(waiting.since_ms)}, "
        f"to be ended by {f'the secret of SHA-256 {waiting.by}' if waiting.by else 'their tokens'}"
        for waiting in report.prepared
    ]
    broken = [check for check in report.checks if check.breaches]
    if broken:
        examples = [asdict(one) | {"check": each.name} for each in broken for one in each.examples]
        title = f"Breaches, at most {MOST_EXAMPLES} of each check and stream"
        where = Column("where", _where)
        parts.append(
            Grid(title, examples, ("check", "stream", "transaction", where, "expected", "found"))
        )
    parts += [f"{each.name} concerns {each.severity}: {each.to_do}" for each in broken]
    print_result(document, *parts, as_json=as_json)


def _where(example: Row) -> str | None:
    if example["partition"] is None:
        return None
    offset = "" if example["offset"] is None else f"@{example['offset']}"
    return f"{example['partition']}{offset}"


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
    files: Annotated[list[str], argument("FILE...", "Files, folders or patterns.")],
    stream: Into,
    form: Annotated[
        FileForm, option("--format", "The files' format. CSV files have a header row.")
    ] = FileForm.CSV,
    schema: Annotated[
        str | None,
        option(
            "--schema DDL",
            "The columns, such as 'id BIGINT, name STRING' (default: the files'; CSV: texts).",
        ),
    ] = None,
    read_option: Annotated[
        list[str] | None,
        option(
            "--read-option NAME=VALUE",
            "An option of Spark's reader, such as sep=; or encoding=ISO-8859-1. Repeatable.",
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
            "The column of the events' times.",
        ),
    ] = None,
    order_by: Annotated[
        str | None,
        option("--order-by COLUMNS", "Write the rows of each key in the order of these columns."),
    ] = None,
    encoding: Annotated[
        ValueForm,
        option("--encoding", "The value: the row as JSON or Avro; raw: the columns key and value."),
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
        list[str], option("--stream -s SCOPE/STREAM", "A stream to export. Repeatable.")
    ],
    to: Annotated[str, option("--to DIR", "The folder for the files.")],
    form: Annotated[TableForm, option("--format", "The files' format.")] = TableForm.PARQUET,
    partition_by: Annotated[
        str | None,
        option(
            "--partition-by COLUMNS",
            "Columns whose values become folders: segment, stream, … or date, the day of the event's time.",
        ),
    ] = None,
    schema: Annotated[
        str | None, option("--schema DDL", "Values are JSON objects: write these fields.")
    ] = None,
    once: Annotated[
        bool,
        option("--once/--continuous", "Export the present events, or keep exporting until Ctrl-C."),
    ] = True,
    interval: Annotated[
        float,
        option("--interval SECONDS", "Seconds between micro-batches of --continuous.", min=0.0),
    ] = 1.0,
    transactions: Annotated[
        Whole, option("--transactions", "Whether a big transaction may be split.")
    ] = Whole.WHOLE,
    most_events: Annotated[
        int | None, option("--max-events", "At most this many in a micro-batch.", min=1)
    ] = None,
    start: Annotated[
        str,
        option(
            "--start WHERE",
            "Where the first call starts: begin, end, a commit timestamp, or an ISO 8601 time.",
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
            "Stop, or continue, if events were deleted before their export.",
        ),
    ] = True,
) -> None:
    """Export committed transactions to files, each once and whole. The next call continues."""
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
        bool, option("--overwrite", "With --to: replace an existing folder.")
    ] = False,
    segments: Annotated[
        int | None, option("--segments", "With --into: create that stream first.", min=1)
    ] = None,
    name: Annotated[
        str | None, option("--name", "With --into: a name that is committed only once.")
    ] = None,
) -> None:
    """Write the latest value of each key, as of a commit timestamp; a null value deletes its key.

    Events without a key are left out, and counted.
    """
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
        print_note(f"micro-batch {batch.number}: {count_of(batch.rows, 'event')}")

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
            f"{loaded.name} was loaded earlier: transaction {_hex(loaded.txn_id)}, "
            f"{count_of(loaded.rows, 'event')}; nothing was written now"
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
    from anabranch.protocol import hybrid_time

    if compacted.already_committed:
        return (
            f"committed earlier: transaction {_hex(compacted.txn_id)}, "
            f"{count_of(compacted.keys, 'event')}; nothing was written now"
        )
    keyless = f", {compacted.keyless:,} without a key left out" if compacted.keyless else ""
    return (
        f"{count_of(compacted.keys, 'key')} of {count_of(compacted.events, 'event')} of "
        f"{compacted.stream} as of {hybrid_time.to_text(compacted.at)} in {compacted.to}{keyless}"
    )
