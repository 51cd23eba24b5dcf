"""Streams to files: on a real broker, by real jobs."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import anabranch
from anabranch.errors import InvalidArgument
from anabranch.spark import export as module
from anabranch.spark.export import Batch, Exported, Pace, Shape, _bind, _settings, _shaped, export
from anabranch.spark.options import Connection
from tests.spark.pipeline_input import commit

pytestmark = [pytest.mark.broker, pytest.mark.slow(60)]


class Table:
    """An export's folder, read as its format is meant to be read."""

    def __init__(
        self, spark: SparkSession, connection: Connection, folder: Path, form: str
    ) -> None:
        self._spark, self._connection = spark, connection
        self.folder, self.form = folder, form
        self.batches: list[Batch] = []

    def export(self, *streams: str, most: int | None = None, **more: Any) -> Exported:
        """A run to the present end."""
        shape = Shape(self.form, **more)
        self.batches = []
        return export(
            self._spark,
            self._connection,
            streams,
            str(self.folder),
            shape=shape,
            pace=Pace(most_events=most),
            progress=self.batches.append,
        )

    def rows(self) -> list[dict[str, Any]]:
        """All of it."""
        if self.form == "delta":
            from deltalake import DeltaTable

            if not self.folder.exists():
                return []
            rows: list[dict[str, Any]] = DeltaTable(self.folder).to_pyarrow_table().to_pylist()
            return rows
        return [row.asDict() for row in self._spark.read.parquet(str(self.folder)).collect()]

    def values(self) -> Counter[str]:
        """The events' values."""
        return Counter(bytes(row["value"]).decode() for row in self.rows())

    def forget(self, *, also_the_table: bool = False) -> None:
        """As after a crash: the last micro-batch is written, and Spark does not know that it is.

        ``also_the_table``: or only its files are, and the table does not know of them.
        """
        commits = self.folder / "_checkpoint" / "commits"
        last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
        (commits / str(last)).unlink()
        (commits / f".{last}.crc").unlink()
        if also_the_table:
            log = self.folder / ("_delta_log" if self.form == "delta" else "_spark_metadata")
            entry = max(path for path in log.iterdir() if path.name[0].isdigit())
            entry.unlink()
            (log / f".{entry.name}.crc").unlink(missing_ok=True)


@pytest.fixture
def table(
    request: pytest.FixtureRequest, spark: SparkSession, connection: Connection, tmp_path: Path
) -> Table:
    """Parquet, where a test does not ask for both."""
    return Table(spark, connection, tmp_path / "out", getattr(request, "param", "parquet"))


both_formats = pytest.mark.parametrize(
    "table", [pytest.param("parquet", marks=pytest.mark.soak), "delta"], indirect=True
)


@pytest.mark.long
def test_export_continues_where_it_was(client: anabranch.Client, stream: str, table: Table) -> None:
    commit(client, stream, ("a", "1"), ("b", "2"), ("c", "3"))
    commit(client, stream, ("a", "4"))
    with client.begin(stream.partition("/")[0]) as undecided:
        undecided.write(stream, b"never")
        undecided.flush()
        first = table.export(stream)
    assert (first.rows, table.values()) == (4, Counter("1234"))
    assert table.export(stream).batches == 0
    commit(client, stream, ("a", "5"))
    again = table.export(stream)
    assert (again.rows, again.query_id) == (1, first.query_id)
    assert table.values() == Counter("12345")


@both_formats
@pytest.mark.long
def test_export_repeats_a_batch_that_was_cut_off(
    client: anabranch.Client, stream: str, table: Table
) -> None:
    """Crashes before Spark's own note of the batch, and before the table's.

    Spark's own folders change under the search for files of such a batch, so it keeps out of them.
    """
    other = table.folder / "_checkpoint" / "part-0.parquet"
    other.parent.mkdir(parents=True)
    other.touch()
    os.utime(other, (0, 0))
    for lost, value in ((False, "1"), (True, "2")):
        commit(client, stream, ("a", value), ("b", value))
        table.export(stream)
        before = table.values()
        table.forget(also_the_table=lost)
        table.export(stream)
        assert table.values() == before, f"the table's note lost: {lost}"
    assert table.values() == Counter("1122")
    if table.form == "parquet":  # other readers take all files that they find
        found = pa.concat_tables(pq.read_table(f) for f in table.folder.glob("part-*"))
        assert Counter(value.decode() for value in found["value"].to_pylist()) == Counter("1122")
    assert other.exists()


@pytest.mark.soak
def test_a_micro_batch_is_made_of_whole_transactions(
    client: anabranch.Client, stream: str, table: Table
) -> None:
    for size in (3, 2, 2, 9, 1):
        commit(client, stream, *((f"k{i}", f"{size}") for i in range(size)))
    table.export(stream, most=4)
    assert [batch.rows for batch in table.batches] == [3, 4, 9, 1]
    assert len(table.rows()) == 17


@pytest.mark.soak
@both_formats
def test_export_partitions_and_takes_values_apart(
    spark: SparkSession, client: anabranch.Client, stream: str, table: Table
) -> None:
    other = stream + "-2"
    client.create_stream(other)
    commit(client, stream, ("a", '{"n": 1, "s": "x"}'), ("b", None))
    commit(client, other, ("c", '{"n": 2, "more": []}'))
    by = ("date", "stream")
    table.export(stream, other, partition_by=by, schema="n INT, s STRING")
    folders = {path.relative_to(table.folder) for path in table.folder.rglob("*.parquet")}
    names = {"/".join(path.parts[-3:-1]) for path in folders}
    assert names == {
        f"date=2013-01-01/stream={name.replace('/', '%2F')}" for name in (stream, other)
    }
    found = {bytes(row["key"]): row["value"] for row in table.rows()}
    plain = {key: value and dict(_fields(value)) for key, value in found.items()}
    assert plain == {b"a": {"n": 1, "s": "x"}, b"b": None, b"c": {"n": 2, "s": None}}
    assert Counter(row["stream"] for row in table.rows()) == {stream: 2, other: 1}
    assert {str(row["date"]) for row in table.rows()} == {"2013-01-01"}


@pytest.mark.soak
def test_the_date_is_of_utc(spark: SparkSession) -> None:
    with _settings(spark, {"spark.sql.session.timeZone": "Asia/Tokyo"}):
        frame = spark.sql("select timestamp'2013-01-01 23:00:00Z' as timestamp")
        rows = _shaped(frame, Shape(partition_by=["date"])).collect()
    assert [str(row["date"]) for row in rows] == ["2013-01-01"]


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    yield from (value if isinstance(value, dict) else value.asDict()).items()


@pytest.mark.soak
def test_export_ends_at_a_value_that_does_not_fit(
    client: anabranch.Client, stream: str, table: Table
) -> None:
    commit(client, stream, ("a", '{"n": 1}'))
    table.export(stream, schema="n INT")
    commit(client, stream, ("a", '{"n": "one"}'))
    with pytest.raises(InvalidArgument, match="Malformed"):
        table.export(stream, schema="n INT")
    assert len(table.rows()) == 1


@pytest.mark.long
def test_a_folder_belongs_to_its_checkpoint(
    spark: SparkSession, connection: Connection, client: anabranch.Client, stream: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Spark's file sink would leave out what a new checkpoint counts from 0."""
    commit(client, stream, ("a", "1"))
    to = str(tmp_path / "out")
    export(spark, connection, [stream], to)
    with pytest.raises(InvalidArgument, match="another checkpoint"):
        export(spark, connection, [stream], to, checkpoint=str(tmp_path / "other"))
    elsewhere = str(tmp_path / "elsewhere")
    export(spark, connection, [stream], elsewhere)
    for folder, place in ((to, elsewhere), (str(tmp_path / "new"), to)):
        with pytest.raises(InvalidArgument, match="is not the checkpoint of"):
            export(spark, connection, [stream], folder, checkpoint=f"{place}/_checkpoint")
    other = stream + "-other"
    client.create_stream(other)
    with pytest.raises(InvalidArgument, match=f"the checkpoint is of {stream}, not of {other}"):
        export(spark, connection, [other], to)


@pytest.mark.long
def test_two_checkpoints_that_exported_nothing_differ(spark: SparkSession, tmp_path: Path) -> None:
    to, own, other = (str(tmp_path / name) for name in ("out", "out/_checkpoint", "other"))
    _bind(spark, to, own)
    _bind(spark, to, other)
    (tmp_path / "out" / "_spark_metadata").mkdir()
    _bind(spark, to, other)
    with pytest.raises(InvalidArgument, match="is not the checkpoint"):
        _bind(spark, to, own)


@pytest.mark.soak
@pytest.mark.parametrize(
    "table", ["parquet", pytest.param("delta", marks=pytest.mark.soak)], indirect=True
)
def test_of_two_first_exports_at_once_one_succeeds(
    spark: SparkSession,
    connection: Connection,
    client: anabranch.Client,
    stream: str,
    table: Table,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another begins when one has listed the folder, then when it has taken it, each by its own checkpoint."""
    commit(client, stream, ("a", "1"))
    to, other = str(table.folder), str(table.folder.with_name("other"))
    for name in ("_names", "_bind"):
        real = getattr(module, name)

        def and_then(*given: Any, real: Any = real, name: str = name) -> Any:
            monkeypatch.setattr(module, name, real)
            found = real(*given)
            _bind(spark, to, other)
            return found

        monkeypatch.setattr(module, name, and_then)
        with pytest.raises(InvalidArgument, match="begins at this moment"):
            table.export(stream)
        assert len(list(table.folder.glob("_export-*"))) == 1
        shutil.rmtree(table.folder)
        shutil.rmtree(other)
    own = _bind(spark, to, f"{to}/_checkpoint")
    assert table.export(stream).query_id == own[0]
    assert table.values() == Counter("1")


@pytest.mark.soak
def test_export_leaves_the_files_of_others(
    client: anabranch.Client, stream: str, table: Table
) -> None:
    """Only where it puts files itself may one be of a batch that was cut off."""
    day = table.folder / "date=2013-01-01"
    places = {
        "archive": True,
        "": True,
        "date=2013-01-01/_spark_metadata": True,
        "date=1999-01-01": False,
    }
    files = {table.folder / below / "part-0.parquet": stays for below, stays in places.items()}
    first = next(iter(files))
    _old(first)
    commit(client, stream, ("a", "1"))
    with pytest.raises(InvalidArgument, match="other files"):
        table.export(stream, partition_by=["date"])
    assert [path.name for path in table.folder.iterdir()] == ["archive"]
    first.unlink()
    table.export(stream, partition_by=["date"])
    for file in (*files, day / "part-0.parquet"):
        _old(file)
    commit(client, stream, ("a", "2"))
    table.export(stream, partition_by=["date"])
    assert {file: file.exists() for file in files} == files
    assert (day / "part-0.parquet").exists(), "a table of its own is in this folder"


def _old(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    os.utime(file, (0, 0))


@pytest.mark.soak
def test_export_continues_until_it_is_interrupted(
    spark: SparkSession, connection: Connection, client: anabranch.Client, stream: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    seen: list[Batch] = []

    def interrupt(batch: Batch) -> None:
        seen.append(batch)
        if len(seen) == 1:
            commit(client, stream, ("a", "2"))
        else:
            raise KeyboardInterrupt

    commit(client, stream, ("a", "1"))
    with pytest.raises(KeyboardInterrupt):
        export(
            spark,
            connection,
            [stream],
            str(tmp_path / "out"),
            pace=Pace(once=False, interval=0.1),
            progress=interrupt,
        )
    assert [batch.rows for batch in seen] == [1, 1]
    assert spark.streams.active == []
