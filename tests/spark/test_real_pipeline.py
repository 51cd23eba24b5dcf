"""examples/spark_pipeline.py: two weeks of flights and weather, the query killed twice, every row checked."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark.sql import SparkSession

import anabranch
from tests.spark.plain_reader import read_all

pytestmark = [pytest.mark.broker, pytest.mark.soak, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "spark_pipeline.py"


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
