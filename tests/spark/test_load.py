"""Files to streams: on a real broker, by real jobs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import fastavro
import pytest
from pyspark.sql import SparkSession

from anabranch.errors import AnabranchError, InvalidArgument, UnknownStream
from anabranch.spark.failures import JobFailed
from anabranch.spark.load import Events, Reading, load
from anabranch.spark.options import Connection
from anabranch.spark.sink.avro_rows import avro_schema
from tests.plain_reader import read_all, values
from tests.spark.pipeline_input import NOON_MS, files

pytestmark = [pytest.mark.broker, pytest.mark.slow(60)]


APPLE = 'an "apple", red'
# format, events; key -> (value, timestamp)
ROWS: list[tuple[str, Events, dict[bytes, tuple[dict[str, Any], int | None]]]] = [
    ("csv", Events(key=("id",), timestamp="at"),
     {b"1": ({"id": "1", "name": APPLE}, 1_357_016_400_000), b"2": ({"id": "2"}, 1_357_020_000_000)}),
    ("json", Events(key=("name", "id")),
     {b'["an \\"apple\\", red",1]': ({"id": 1, "name": APPLE}, None), b"[null,2]": ({"id": 2}, None)}),
    ("parquet", Events(key=("id",), timestamp="at"),
     {b"1": ({"id": 1, "name": APPLE}, NOON_MS), b"2": ({"id": 2}, NOON_MS)}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "events", "expected"),
    [ROWS[0], *(pytest.param(*row, marks=pytest.mark.long) for row in ROWS[1:])],
)
def test_load_makes_events_of_rows(
    spark: SparkSession,
    connection: Connection,
    stream: str,
    tmp_path: Path,
    form: str,
    events: Events,
    expected: dict[bytes, tuple[dict[str, Any], int | None]],
) -> None:
    found = load(
        spark, connection, [files(tmp_path, form)], stream, reading=Reading(form), events=events
    )
    assert (found.rows, found.already_committed) == (2, False)
    seen = {event.key: event for event in read_all(connection.bootstrap, stream)}
    assert seen.keys() == expected.keys()
    for key, (value, timestamp) in expected.items():
        row = json.loads(seen[key].value or b"")
        assert {name: row[name] for name in row if name != "at"} == value
        assert timestamp in (None, seen[key].timestamp)


@pytest.mark.soak
def test_load_writes_lines_as_they_are_and_rows_as_avro(
    spark: SparkSession, connection: Connection, stream: str, tmp_path: Path
) -> None:
    raw = Events(encoding="raw")
    load(spark, connection, [files(tmp_path, "text")], stream, reading=Reading("text"), events=raw)
    assert values(connection.bootstrap, stream) == [b"one", b"two"]

    avro = stream + "-avro"
    path = files(tmp_path, "parquet")
    load(
        spark,
        connection,
        [path],
        avro,
        reading=Reading("parquet"),
        events=Events(encoding="avro"),
        segments=1,
    )
    schema = fastavro.parse_schema(json.loads(avro_schema(spark.read.parquet(path).schema)))
    rows = [
        fastavro.schemaless_reader(io.BytesIO(value or b""), schema, None)
        for value in values(connection.bootstrap, avro)
    ]
    assert sorted(row["id"] for row in rows if isinstance(row, dict)) == [1, 2]


@pytest.mark.long
def test_load_under_a_name_happens_once(
    spark: SparkSession, connection: Connection, stream: str, tmp_path: Path
) -> None:
    path = files(tmp_path, "csv")
    first = load(spark, connection, [path], stream, name="once")
    again = load(spark, connection, [path, path], stream, name="once")
    assert (first.already_committed, again.already_committed) == (False, True)
    assert (again.txn_id, again.commit_timestamp) == (first.txn_id, first.commit_timestamp)
    assert again.rows == 2
    other = load(spark, connection, [path], stream, name="another")
    assert other.txn_id != first.txn_id
    assert len(read_all(connection.bootstrap, stream)) == 4


@pytest.mark.soak
def test_load_keeps_the_order_of_each_key_if_asked(
    spark: SparkSession, connection: Connection, stream: str, tmp_path: Path
) -> None:
    for number in range(3):  # three tasks; each key's rows are in all of them
        lines = [f"k{i % 5},{(i * 7 + number * 331) % 999:03}" for i in range(300)]
        (tmp_path / f"{number}.csv").write_text("\n".join(["key,at", *lines]) + "\n")
    events = Events(key=("key",), order_by=("at",))
    load(spark, connection, [str(tmp_path / "*.csv")], stream, events=events)
    order: dict[bytes | None, list[str]] = {}
    for event in read_all(connection.bootstrap, stream):
        order.setdefault(event.key, []).append(json.loads(event.value or b"")["at"])
    assert sum(map(len, order.values())) == 900
    assert all(times == sorted(times) for times in order.values())


@pytest.mark.soak
def test_load_of_nothing_leaves_the_name_free(
    spark: SparkSession, connection: Connection, stream: str, tmp_path: Path
) -> None:
    (tmp_path / "empty.csv").write_text("id,name\n")
    empty = load(spark, connection, [str(tmp_path / "empty.csv")], stream, name="n")
    assert (empty.rows, empty.txn_id) == (0, None)
    full = load(spark, connection, [files(tmp_path, "csv")], stream, name="n")
    assert (full.rows, full.already_committed) == (2, False)


# Refused by the driver, and by a task.
QUICK = "no such key", "no time"
# what is wrong: the file, events, error, what it says
WRONG: dict[str, tuple[str | None, Events, type[AnabranchError], str]] = {
    "no file": (None, Events(), InvalidArgument, "does not exist"),
    "a short row": ("id,name\n1,a\n2\n", Events(), InvalidArgument, "alformed"),
    "no such key": ("id,name\n1,a\n", Events(key=("nmae",)), InvalidArgument, "there are id, name"),
    "no time": ("id,at\n1,noon\n", Events(timestamp="at"), InvalidArgument, "noon"),
    "no value": ("id,name\n1,a\n", Events(encoding="raw"), InvalidArgument, "encoding=raw takes"),
    "a text in Latin-1": (
        "id,name\n1,\xc4rger\n", Events(), InvalidArgument, "column name is not UTF-8.*encoding="
    ),
    "a name in Latin-1": ("id,\xc4\n1,a\n", Events(), InvalidArgument, "name is not UTF-8"),
    "equal columns": ("id,name,id\n1,a,2\n", Events(), JobFailed, "header.*id, name, id"),
    "no time, in Avro": ("id,name\n1,a\n", Events(timestamp="name", encoding="avro"), InvalidArgument, "'a'"),
}  # fmt: skip


@pytest.mark.parametrize(
    "what",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in WRONG],
)
def test_load_refuses_what_is_wrong_and_writes_nothing(
    spark: SparkSession, connection: Connection, empty: str, tmp_path: Path, what: str
) -> None:
    text, events, error, says = WRONG[what]
    path = tmp_path / "rows.csv"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(error, match=says):
        load(spark, connection, [str(path)], empty, events=events, name="refused")
    assert read_all(connection.bootstrap, empty) == []


@pytest.mark.soak
def test_load_takes_lines_in_quotes_and_times_of_digits(
    spark: SparkSession, connection: Connection, stream: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    rows = '1,"two\nlines, and a comma",1700000000\n2,\xc4,1700000000123\n'
    path.write_text("id,text,at\n" + rows, encoding="latin-1")
    reading = Reading(options={"encoding": "ISO-8859-1"})
    load(spark, connection, [str(path)], stream, reading=reading, events=Events(timestamp="at"))
    found = sorted(
        (json.loads(event.value or b"").get("text"), event.timestamp)
        for event in read_all(connection.bootstrap, stream)
    )
    assert found == [("two\nlines, and a comma", 1_700_000_000_000), ("\xc4", 1_700_000_000_123)]


def test_load_needs_its_stream(spark: SparkSession, connection: Connection, tmp_path: Path) -> None:
    with pytest.raises(UnknownStream):
        load(spark, connection, [files(tmp_path, "csv")], "empty/other")
