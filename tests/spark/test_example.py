"""examples/spark_pipeline.py: its rows although its query is killed, and the end of that query with its owner."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from pyspark.sql import SparkSession

import anabranch
from tests.plain_reader import read_all
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "spark_pipeline.py"
DEADLINE_S = 90.0
# As far as the driver sees, a JVM that takes long to start.
JAVA = """\
#!/bin/sh
case "$*" in
    *-version*) echo 'openjdk version "17.0.1" 2021-10-19' >&2; exit ;;
esac
echo $$ >"$PID_FILE.new"
mv "$PID_FILE.new" "$PID_FILE"
exec sleep 600
"""
OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, "examples")
import spark_pipeline
spark_pipeline._start_join(spark_pipeline.Plan("127.0.0.1:1", Path(sys.argv[1])))
time.sleep(600)
"""


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The example, as a module."""
    spec = importlib.util.spec_from_file_location("spark_pipeline_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.broker
@pytest.mark.soak
@pytest.mark.timeout(900)
def test_rows_are_those_of_pandas_although_the_query_is_killed(
    spark: SparkSession,
    client: anabranch.Client,
    bootstrap: str,
    example: Any,
    unique: str,
    tmp_path: Path,
    measured: Callable[[str], None],
) -> None:
    plan = example.Plan(bootstrap, tmp_path, scope=f"nyc{unique}", slice_days=7, kills=2)
    said: list[str] = []
    seen = example.run(spark, plan, said.append)
    assert seen["differences"] == 0, (seen["examples"], said)
    assert seen["rows_equal"], said
    # As many as there are in the files: a comparison of nothing with nothing says nothing.
    assert (seen["flights"], seen["weather"], seen["rows"]) == (12_067, 987, 2_287)
    assert (seen["kills"], seen["transactions"]) == (2, 2), said

    # The stream itself, as a plain consumer has it: each carrier's hour once.
    stream = plan.stream("carrier_hours")
    events = read_all(bootstrap, stream)
    assert Counter(event.key for event in events).most_common(1)[0][1] == 1
    assert len(events) == seen["rows"]
    # Loads that are repeated write nothing.
    assert example.load(spark, plan, example.read_source(plan)) == 2
    assert len(read_all(bootstrap, plan.stream("flights"))) == seen["flights"] + 1
    measured(
        f"real pipeline: {seen['flights'] + seen['weather']:,} events, {seen['rows']:,} rows, "
        f"{seen['micro_batches']} micro-batches, {seen['kills']} kills in {seen['seconds']} s"
    )


# -- the end of its query ----------------------------------------------------------------------------------


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has started the query, with a JVM that notes who it is."""
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(JAVA)
    java.chmod(0o700)
    more = {"JAVA_HOME": str(tmp_path / "java"), "PID_FILE": str(tmp_path / "jvm")}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | more,
        stdin=subprocess.DEVNULL,
    ) as process:
        yield process
        process.kill()


@pytest.mark.long
@pytest.mark.slow(5)
def test_the_query_ends_with_its_owner(owner: subprocess.Popen[bytes], tmp_path: Path) -> None:
    wait_until((tmp_path / "jvm").exists, DEADLINE_S)
    (driver,) = psutil.Process(owner.pid).children()
    jvm = int((tmp_path / "jvm").read_text())
    everything = [driver, *driver.children(recursive=True)]
    assert jvm in {process.pid for process in everything}
    owner.kill()
    try:
        wait_until(lambda: not any(map(runs, everything)), DEADLINE_S)
    finally:
        for process in filter(runs, everything):
            process.kill()


def runs(process: psutil.Process) -> bool:
    """A zombie does not run."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
