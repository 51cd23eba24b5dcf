"""The Spark source's decisions without a cluster: filters, ranges; options, also of the sink."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from anabranch.errors import InvalidArgument, UnknownStream
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.event_columns import SCHEMA
from anabranch.spark.clients import connect
from anabranch.spark.columns import EVENT_SCHEMA, check_schema, chosen
from anabranch.spark.jobs import options_of
from anabranch.spark.options import Options, moment
from anabranch.spark.sink.writer import BatchSink, StreamSink
from anabranch.spark.source.filters import Interval, Selection
from anabranch.spark.source.histories import Histories
from anabranch.spark.source.plan import Cutting, EventRange, streams_of
from anabranch.spark.source.reader import SnapshotReader
from anabranch.spark.source.stream_reader import StreamReader
from tests.client.world import World

# -- filters ---------------------------------------------------------------------------------------------

TIME, OFFSET = ("commit_timestamp",), ("offset",)
VALUES = StructType([StructField("value", StringType())])


@pytest.mark.parametrize(
    ("given", "exact", "offsets", "commits", "segments"),
    [
        (EqualTo(OFFSET, 5), True, (5, 5), (None, None), None),
        (GreaterThan(OFFSET, 5), True, (6, None), (None, None), None),
        (LessThanOrEqual(OFFSET, 5), True, (None, 5), (None, None), None),
        (In(OFFSET, (7, 3)), False, (3, 7), (None, None), None),
        (GreaterThanOrEqual(TIME, 5), True, (None, None), (5, None), None),
        (LessThan(TIME, 5), True, (None, None), (None, 4), None),
        (EqualNullSafe(TIME, 5), True, (None, None), (5, 5), None),
        (In(("segment",), (1, 2)), True, (None, None), (None, None), frozenset((1, 2))),
        (EqualTo(("segment",), 1), True, (None, None), (None, None), frozenset((1,))),
        (GreaterThan(("segment",), 1), False, (None, None), (None, None), None),
        (Not(EqualTo(OFFSET, 5)), False, (None, None), (None, None), None),
        (EqualTo(("timestamp",), 5), False, (None, None), (None, None), None),
        (EqualTo(("value",), b"x"), False, (None, None), (None, None), None),
        (EqualTo(("headers", "key"), "x"), False, (None, None), (None, None), None),
        (IsNotNull(OFFSET), False, (None, None), (None, None), None),
        (EqualNullSafe(OFFSET, None), False, (None, None), (None, None), None),
        (StringStartsWith(("stream",), "s"), False, (None, None), (None, None), None),
        (EqualTo(("stream",), "s/a"), True, (None, None), (None, None), None),
        (Not(In(("partition",), (1, None))), False, (None, None), (None, None), None),
    ],
)
def test_a_filter_selects_ranges(
    given: Filter,
    exact: bool,
    offsets: tuple[int | None, int | None],
    commits: tuple[int | None, int | None],
    segments: frozenset[int] | None,
) -> None:
    selection = Selection()
    assert selection.take(given) is exact
    assert selection.offsets == Interval(*offsets)
    assert selection.commits == Interval(*commits)
    assert selection.segments == segments


def test_several_filters_select_what_all_do() -> None:
    selection = Selection()
    for given in (
        Not(In(("stream",), ("s/b",))),
        LessThan(("partition",), 3),
        Not(EqualTo(("partition",), 1)),
        GreaterThan(OFFSET, 5),
        GreaterThan(OFFSET, 3),
        LessThan(OFFSET, 100),
        In(("segment",), (1, 2)),
        In(("segment",), (2, 3)),
    ):
        assert selection.take(given)
    assert (selection.has("s/a"), selection.has("s/b")) == (True, False)
    assert [p for p in range(5) if selection.has("s/a", p)] == [0, 2]
    assert selection.offsets == Interval(6, 99)
    assert selection.segments == frozenset((2,))


# -- ranges and options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "rows", "least", "expected"),
    [
        ([100, 10], 1000, 1, [100, 10]),
        ([100, 10], 50, 1, [50, 50, 10]),
        ([100], 30, 1, [25, 25, 25, 25]),
        ([100, 10], 1000, 4, [25, 25, 25, 25, 10]),
        ([3], 1000, 10, [1, 1, 1]),
        ([], 1000, 4, []),
    ],
)
def test_ranges_are_cut_into_tasks(
    lengths: list[int], rows: int, least: int, expected: list[int]
) -> None:
    whole = [EventRange("s/a", p, 7, 7 + n, low=3) for p, n in enumerate(lengths)]
    pieces = Cutting(rows, least).cut(whole)
    assert all(isinstance(piece, EventRange) and piece.low == 3 for piece in pieces)
    found = [piece for piece in pieces if isinstance(piece, EventRange)]
    assert [piece.end - piece.first for piece in found] == expected
    at = dict.fromkeys(range(len(lengths)), 7)
    for piece in found:
        assert piece.first == at[piece.partition]
        at[piece.partition] = piece.end
    assert at == {p: 7 + n for p, n in enumerate(lengths)}


def test_options_name_streams() -> None:
    assert streams_of(Options({"stream": "s/a"})) == ("s/a",)
    assert streams_of(Options({"streams": "s/a, s/b,s/a"})) == ("s/a", "s/b")
    for given in ({}, {"stream": "s/a", "streams": "s/b"}, {"stream": "nyc"}):
        with pytest.raises(InvalidArgument):
            streams_of(Options(given))


@pytest.mark.parametrize("text", ["soon", "2026-01-01T00:00:00", "-1", str(1 << 63)])
def test_other_texts_are_no_moments(text: str) -> None:
    with pytest.raises(InvalidArgument, match="option at="):
        moment("at", text)


def test_the_schema_is_that_of_the_columns() -> None:
    assert to_arrow_schema(EVENT_SCHEMA, timezone="UTC").equals(SCHEMA)
    check_schema(EVENT_SCHEMA, Options({}))
    few = {"columns": "offset,key"}
    check_schema(chosen(Options(few)), Options(few))
    with pytest.raises(InvalidArgument, match=r"leave schema\(\) out"):
        check_schema(StructType(EVENT_SCHEMA.fields[:3]), Options({}))


@pytest.mark.parametrize(
    ("section", "makers"),
    [
        ("Source", [partial(kind, schema=EVENT_SCHEMA) for kind in (SnapshotReader, StreamReader)]),
        (
            "Sink",
            [partial(kind, schema=VALUES, overwrite=False) for kind in (BatchSink, StreamSink)],
        ),
    ],
)
def test_the_page_has_every_option(section: str, makers: list[Callable[[Options], object]]) -> None:
    known = {"kafka.…"}
    for make in makers:
        with pytest.raises(InvalidArgument) as refused:
            make(Options({"stream": "s/a", "bootstrap": "b:1", "wrong": "x"}))
        _, _, listed = str(refused.value).removesuffix(" and kafka.…").partition("there are ")
        known |= set(listed.split(", "))
    page = Path(__file__).parents[2].joinpath("docs/spark.md").read_text("utf-8")
    table = page.partition(f"\n## {section}\n")[2].partition("| option |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)} == known


@pytest.mark.parametrize(
    ("given", "variable", "lane"),
    [({}, None, "open"), ({}, "etl", "etl"), ({"lane": "ops"}, "etl", "ops")],
)
def test_the_lane_reaches_tasks_and_pipelines(
    given: dict[str, str], variable: str | None, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ANABRANCH_LANE", raising=False)
    if variable is not None:
        monkeypatch.setenv("ANABRANCH_LANE", variable)
    options = Options({"bootstrap": "b:1", **given})
    connection = options.connection()
    options.check_all_used()
    monkeypatch.delenv("ANABRANCH_LANE", raising=False)  # the tasks' machines know nothing of it
    with connect(pickle.loads(pickle.dumps(connection))) as client:
        assert client.lane == lane
    assert Options(options_of(connection)).connection() == connection
    with pytest.raises(InvalidArgument, match="'ETL' is not a lane"):
        Options({"bootstrap": "b:1", "lane": "ETL"}).connection()


def test_a_planner_of_a_deleted_stream_frees_its_connections() -> None:
    world = World()
    log: Any = world.cluster.log("planner")
    log.close = Mock()
    ports = ReaderPorts(lambda _: log, lambda _: None, world.clock)  # type: ignore[arg-type, return-value]
    connection: Any = SimpleNamespace(timeout=5.0, reader_ports=lambda: ports)
    with pytest.raises(UnknownStream):
        Histories(connection, ["nyc/gone"])
    log.close.assert_called_once()
