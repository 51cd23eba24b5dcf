"""Option ``columns``: the same rows with fewer columns, told by the history where it can."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from anabranch.errors import InvalidArgument
from anabranch.reading.event_columns import PLACES
from anabranch.reading.ranges import RangeReader
from anabranch.spark.columns import chosen
from anabranch.spark.options import Options
from anabranch.spark.source.reader import SnapshotReader
from tests.spark.source_world import Seen, World

pytestmark = pytest.mark.broker


def rows(world: World, **given: Any) -> list[tuple[Any, ...]]:
    """The rows of all tasks, without Spark."""
    streams = f"{world.events},{world.other}"
    options = Options(
        {name: str(v) for name, v in given.items()}
        | {"bootstrap": world.bootstrap, "streams": streams}
    )
    reader = SnapshotReader(options, chosen(options))
    return [
        tuple(row.values())
        for task in reader.partitions()
        for batch in reader.read(task)
        for row in batch.to_pylist()
    ]


def expected(events: list[Seen], columns: str) -> list[tuple[Any, ...]]:
    return [tuple(getattr(event, name) for name in columns.split(",")) for event in events]


@pytest.mark.parametrize(
    "cut",
    [{}, pytest.param({"rowsperpartition": 7}, marks=pytest.mark.soak)],
    ids=["whole", "in sevens"],
)
@pytest.mark.parametrize(
    ("columns", "fetched"),
    [
        (",".join(PLACES), None),  # where a marker lies among events, these are
        ("commit_timestamp,partition,txn_id", False),
        ("value,offset", True),
    ],
)
def test_fewer_columns_of_the_same_rows(
    world: World,
    columns: str,
    fetched: bool | None,
    cut: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    fetch = RangeReader._fetch

    def spied(self: RangeReader, *args: Any) -> Any:
        asked.append(args)
        return fetch(self, *args)

    monkeypatch.setattr(RangeReader, "_fetch", spied)
    low, high = (world.results[i].commit_timestamp for i in (3, -2))
    found = rows(world, columns=columns, **cut)
    part = rows(world, columns=columns, start=low, end=high, **cut)
    if fetched is not None and not cut:
        assert bool(asked) == fetched
    assert sorted(found, key=repr) == sorted(expected(world.expected, columns), key=repr)
    between = [e for e in world.expected if low < (e.commit_timestamp or 0) <= high]
    assert sorted(part, key=repr) == sorted(expected(between, columns), key=repr)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"columns": "key,valu"}, "no column valu; there are key, value"),
        ({"at": 5, "end": 5}, "options at and end mean the same"),
    ],
)
def test_what_is_wrong_is_said(world: World, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        rows(world, **options)


@pytest.mark.soak
def test_counted_by_spark(spark: SparkSession, world: World) -> None:
    read = spark.read.format("anabranch").option("bootstrap", world.bootstrap)
    frame = read.options(streams=f"{world.events},{world.other}", columns="stream").load()
    assert frame.columns == ["stream"]
    found = {row.stream: row["count"] for row in frame.groupBy("stream").count().collect()}
    assert found == {
        name: sum(e.stream == name for e in world.expected) for name in (world.events, world.other)
    }
