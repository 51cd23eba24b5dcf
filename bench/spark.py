"""Spark's sink and source at local[2], beside Spark's own Kafka connector, in one run.

Rows come from ``spark.range`` with keys and values of a fixed size, half of each value noise. Sink: the DataFrame's
``save()`` (ours with the commit, so every row is readable when it ends). Source: every column of every row into
Spark's noop sink. One warm-up of each, then medians of interleaved rounds. The CPU figures are the shares of the
JVM, its Python workers, the broker and the controller meanwhile.

Not equal: our sink is one transaction, exactly once, written twice (journal, then stream); the connector's is
at least once, in no transaction. Our source gives the transaction and its commit timestamp, too.

The connector's jars are fetched from Maven with jgo, once: the newest available versions, which may be older than
Spark. Without any, figures measured elsewhere stand there, and the result says so.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]

from anabranch.infra.fetch import cache_root
from bench.setting import Place, cpu_s

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITIONS = 2
KEYS = 10_000
SIZES = (100, 1000)
# The connector's versions, the best first: not every repository has all of them with all parts.
# The token provider matters with Kerberos only; any of Spark 4 serves.
VERSIONS = ("4.3.0", "4.2.0", "4.1.1", "4.0.1", "4.0.0")
CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13"
TOKENS = "org.apache.spark:spark-token-provider-kafka-0-10_2.13"
OTHERS = ("org.apache.kafka:kafka-clients:3.9.1", "org.apache.commons:commons-pool2:2.12.1")
# The connector's figures on two cores, measured in another run.
ELSEWHERE = {"sink": "480k to 750k rows/s", "source": "355k rows/s"}
_HTTP_TIMEOUT_S = 30
# Equal to the options of anabranch's writers.
_PRODUCER = {
    "kafka.compression.type": "lz4",
    "kafka.linger.ms": "50",
    "kafka.batch.size": "250000",
    "kafka.acks": "all",
}

Job = Callable[[], None]


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Rows/s of each, medians of rounds, the CPU's parts, and the ratios ours / the connector's."""
    rounds, most = (1, 1_000_000) if quick else (3, 2_000_000)
    jars, versions = connector_jars()
    spark = _session(jars)
    try:
        sizes = {
            str(size): _measured(spark, place, size, most * 100 // size, rounds, peer=bool(jars))
            for size in SIZES
        }
    finally:
        spark.stop()
    return {
        "spark": spark.version,
        "master": "local[2]",
        "rounds": rounds,
        "connector": versions or "not to be had",
        "connector_elsewhere": {**ELSEWHERE, "note": "two cores, not measured in this run"},
        "sizes": sizes,
    }


def connector_jars() -> tuple[list[Path], list[str]]:
    """The connector's class path and its parts; empty if no version is available."""
    from jgo.maven import MavenContext

    maven = MavenContext(repo_cache=cache_root() / "bench-spark", timeout=_HTTP_TIMEOUT_S)

    def first(*coordinates: str) -> tuple[Path, str] | None:
        for coordinate in coordinates:
            try:
                return maven.create_dependency(coordinate).artifact.resolve(), coordinate
            # jgo and requests raise RuntimeError and OSError for any failure on the way.
            except (OSError, RuntimeError, AssertionError) as error:
                logging.getLogger("bench").info("%s: %s", coordinate, error)
        return None

    parts = [
        first(*(f"{CONNECTOR}:{version}" for version in VERSIONS)),
        first(*(f"{TOKENS}:{version}" for version in VERSIONS)),
        *(first(other) for other in OTHERS),
    ]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return [], []
    return [path for path, _ in found], [coordinate for _, coordinate in found]


def _session(jars: list[Path]) -> SparkSession:
    from anabranch.spark import spark_session

    spark = spark_session(
        "bench",
        "local[2]",
        {
            "spark.jars": ",".join(map(str, jars)),
            "spark.driver.memory": "4g",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
        },
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _measured(
    spark: SparkSession, place: Place, size: int, rows: int, rounds: int, *, peer: bool
) -> dict[str, Any]:
    """All four jobs in turn, on a stream and a topic of their own in each round; the first round warms up."""
    frame = _frame(spark, rows, size).persist()
    if frame.count() != rows:
        raise RuntimeError("the data is not what it should be")
    taken: dict[str, list[tuple[float, dict[str, float]]]] = {}
    for number in range(rounds + 1):
        for name, job in _jobs(spark, place, frame, peer=peer).items():
            before, started = _cpu(place), time.perf_counter()
            job()
            seconds = time.perf_counter() - started
            used = {kind: spent - before[kind] for kind, spent in _cpu(place).items()}
            if number:
                taken.setdefault(name, []).append((seconds, used))
    frame.unpersist()
    result: dict[str, Any] = {"rows": rows}
    for name, each in taken.items():
        seconds = statistics.median(seconds for seconds, _ in each)
        result[name] = {
            "rows_per_s": round(rows / seconds),
            "mb_per_s": round(rows * size / seconds / 1e6, 1),
            "all_s": [round(seconds, 2) for seconds, _ in each],
            "cpu_s": {
                kind: round(statistics.median(used[kind] for _, used in each), 2)
                for kind in each[0][1]
            },
        }
    for name in ("sink", "source"):
        if peer:
            ours, theirs = result[name], result[f"connector {name}"]
            ours["ratio"] = round(ours["rows_per_s"] / theirs["rows_per_s"], 2)
    return result


def _jobs(spark: SparkSession, place: Place, frame: DataFrame, *, peer: bool) -> dict[str, Job]:
    """The timed jobs, by name."""
    stream, topic = place.new_stream(PARTITIONS), place.new_topic(PARTITIONS)
    ours = {"bootstrap": place.bootstrap, "stream": stream}
    theirs = {"kafka.bootstrap.servers": place.bootstrap}
    jobs: dict[str, Job] = {
        "sink": lambda: _save(frame, "anabranch", ours),
        "source": lambda: _scan(spark, "anabranch", ours),
    }
    if peer:
        jobs["connector sink"] = lambda: _save(
            frame, "kafka", {**theirs, **_PRODUCER, "topic": topic}
        )
        jobs["connector source"] = lambda: _scan(
            spark, "kafka", {**theirs, "subscribe": topic, "includeHeaders": "true"}
        )
    return jobs


def _frame(spark: SparkSession, rows: int, size: int) -> DataFrame:
    """Keys and values; half of each value is noise."""
    half = size // 2
    noise = ", ".join(f"unhex(sha2(concat(id, '-{i}'), 512))" for i in range(half // 64 + 1))
    return spark.range(rows, numPartitions=PARTITIONS).selectExpr(
        f"CAST(concat('key-', id % {KEYS}) AS BINARY) AS key",
        f"concat(substring(concat({noise}), 1, {half}), "
        f"CAST(repeat('0', {size - half}) AS BINARY)) AS value",
    )


def _save(frame: DataFrame, form: str, options: Mapping[str, str]) -> None:
    frame.write.format(form).options(**options).mode("append").save()


def _scan(spark: SparkSession, form: str, options: Mapping[str, str]) -> None:
    """Read every column of every row, into nothing."""
    rows = spark.read.format(form).options(**options).load()
    rows.write.format("noop").mode("overwrite").save()


def _cpu(place: Place) -> dict[str, float]:
    """CPU seconds so far, by kind of process: the bench's children, and theirs."""
    spent = dict.fromkeys(("jvm", "python workers", "broker", "controller"), 0.0)
    for process in psutil.Process().children(recursive=True):
        try:
            used, command = cpu_s(process.pid), " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if process.pid == place.controller:
            kind = "controller"
        elif "org.apache.spark.deploy" in command:
            kind = "jvm"
        elif "pyspark" in command:
            kind = "python workers"
        elif "kafka.Kafka" in command:
            kind = "broker"
        else:
            continue
        spent[kind] += used
    return spent


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    head = [
        "what",
        "anabranch rows/s",
        "connector rows/s",
        "ratio",
        "CPU s: JVM / Python / broker / controller",
    ]
    rows = []
    for size, found in result["sizes"].items():
        for name in ("sink", "source"):
            ours, theirs = found[name], found.get(f"connector {name}")
            rows.append(
                [
                    f"{name}, {found['rows']:,} × {size} B",
                    f"{ours['rows_per_s']:,}",
                    f"{theirs['rows_per_s']:,}" if theirs else f"({ELSEWHERE[name]}, elsewhere)",
                    f"{ours['ratio']:.2f} ×" if theirs else "–",
                    " / ".join(f"{spent:.1f}" for spent in ours["cpu_s"].values()),
                ]
            )
    return head, rows
