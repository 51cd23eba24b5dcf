"""`anabranch spark`: pipelines on Spark. Only the commands import PySpark."""

from __future__ import annotations

import warnings
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from anabranch.cli.errors import CheckFailed
from anabranch.cli.ledger import TABLE, Table, ledger_of
from anabranch.cli.options import App, At, ClusterOptions, option
from anabranch.cli.output import Column, Row, print_json, print_line, print_table
from anabranch.cli.session import parse_kafka
from anabranch.core import hybrid_time
from anabranch.errors import NotReady
from anabranch.presentation.words import count_of, time_text
from anabranch.topics.names import commands_topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from anabranch.audit.report import AuditReport
    from anabranch.spark.options import Connection

app = App(no_args_is_help=True, help="Pipelines on Spark.")
Master = Annotated[
    str | None,
    option(
        "--master URL",
        "Spark's master URL (default: the one that Spark is configured for, else local[*]).",
    ),
]
Conf = Annotated[
    list[str] | None,
    option(
        "--conf NAME=VALUE",
        "A setting of Spark's, such as spark.driver.memory=4g. May be repeated.",
    ),
]
JobTimeout = Annotated[
    float,
    option(
        "--timeout SECONDS", "Time limit of each request to the cluster, not of the job.", min=0.1
    ),
]
JOB_TIMEOUT_S = 60.0
MOST_LEDGER_ROWS = 1_000_000  # that an audit compares, the oldest


@dataclass(frozen=True)
class _SparkOptions:
    """The Spark to run on, and its settings."""

    master: Master = None
    conf: Conf = None


# A dataclass begins with the fields of its last base.
@dataclass(frozen=True)
class JobOptions(ClusterOptions, _SparkOptions):
    """The options of every command of this group."""

    timeout: JobTimeout = JOB_TIMEOUT_S

    def session(self, app_name: str) -> SparkSession:
        """A session of Spark, quiet unless ``verbose``.

        Raises:
            NotInstalled: PySpark is missing.
                NoJdk: Spark finds no JDK 17 or later.
        """
        from anabranch.spark import spark_session

        level = "WARN" if self.verbose else "OFF"
        log4j = Path(__file__).with_name("spark-log4j2.properties")
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
            "A stream to audit, or a scope for all its streams; of one control partition. May be repeated.",
        ),
    ],
    at: At = None,
    report: Annotated[
        Path | None, option("--report FILE", "Write the report there too, as JSON.")
    ] = None,
    complete: Annotated[
        bool, option("--complete", "Exit with 1 also if something is not checkable.")
    ] = False,
    database: Annotated[
        str | None,
        option(
            "--database URL", "Compare a ledger's rows, too: of postgresql://…, or an SQLite file."
        ),
    ] = None,
    table: Table = TABLE,
) -> None:
    """Prove from the log that streams hold what was committed, once, in order, and nothing else."""
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

    if as_json:
        print_json(report.document())
        return
    title = (
        f"{', '.join(report.streams)} as of {hybrid_time.to_text(report.at)}: "
        f"{report.transactions:,} commits, {report.events:,} events"
    )
    document = report.document()
    columns = (
        Column("check", "name"),
        Column("what holds", lambda row: CHECKS[row["name"]][1]),
        "examined",
        Column("", "what"),
        Column("not checkable", "unchecked"),
        "breaches",
    )
    print_table(title, document["checks"], columns)
    for note in report.notes:
        print_line(note)
    for g in report.gone:
        print_line(
            f"{g.stream}, partition {g.partition}: nothing is left below offset {g.low:,}: some or all of "
            f"{g.events:,} events are gone"
        )
    for waiting in report.prepared:
        print_line(
            f"{count_of(waiting.count, 'transaction')} PREPARED, the oldest since {time_text(waiting.since_ms)}, "
            f"to be ended by {f'the secret of SHA-256 {waiting.by}' if waiting.by else 'their tokens'}"
        )
    examples = [
        example | {"check": check["name"]}
        for check in document["checks"]
        for example in check["examples"]
    ]
    if examples:
        print_table(
            f"Breaches, at most {MOST_EXAMPLES} of each kind and stream",
            examples,
            ("check", "stream", "transaction", Column("where", _where), "expected", "found"),
        )


def _where(example: Row) -> str | None:
    if example["partition"] is None:
        return None
    offset = "" if example["offset"] is None else f"@{example['offset']}"
    return f"{example['partition']}{offset}"
