"""Files to streams, streams to files, and the latest value of each key: on a real broker, by real jobs."""

from __future__ import annotations

import io
import json
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import anabranch
from anabranch.cli.main import app
from anabranch.errors import AnabranchError, InvalidArgument, UnknownStream
from anabranch.spark.avro_rows import avro_schema
from anabranch.spark.options import Connection
from anabranch.spark.pipelines.compact import compact
from anabranch.spark.pipelines.export import Batch, Exported, Pace, Shape, export
from anabranch.spark.pipelines.load import Events, Reading, load
from tests.spark.plain_reader import read_all, values

pytestmark = [pytest.mark.broker, pytest.mark.slow(60)]

CSV = 'id,name,at\n1,"an ""apple"", red",2013-01-01T05:00:00Z\n2,,2013-01-01T06:00:00Z\n'
NOON_MS = 1_357_041_600_000


@pytest.fixture
def connection(bootstrap: str) -> Connection:
    return Connection(bootstrap, "anabranch", 60.0, ())


@pytest.fixture
def stream(client: anabranch.Client, unique: str) -> str:
    name = f"p{unique}/events"
    client.create_stream(name, segments=2)
    return name


def commit(client: anabranch.Client, stream: str, *events: tuple[str | None, str | None]) -> int:
    """A transaction of (key, value); its commit timestamp."""
    with client.begin(stream.partition("/")[0]) as txn:
        for key, value in events:
            txn.write(
                stream,
                None if value is None else value.encode(),
                None if key is None else key.encode(),
                timestamp=NOON_MS,
            )
        return txn.commit().commit_timestamp


# -- load ------------------------------------------------------------------------------------------------


def files(folder: Path, form: str) -> str:
    """The rows 1 and 2 as a file of this format."""
    path = folder / f"rows.{form}"
    if form == "csv":
        path.write_text(CSV)
    elif form == "json":
        path.write_text('{"id": 1, "name": "an \\"apple\\", red"}\n{"id": 2}\n')
    elif form == "text":
        path.write_text("one\ntwo\n")
    else:
        table = pa.table({"id": [1, 2], "name": ['an "apple", red', None], "at": [NOON_MS] * 2})
        pq.write_table(table, path)
    return str(path)


@pytest.mark.parametrize(
    ("form", "events", "expected"),
    [
        (
            "csv",
            Events(key=("id",), timestamp="at"),
            {
                b"1": ({"id": "1", "name": 'an "apple", red'}, 1_357_016_400_000),
                b"2": ({"id": "2"}, 1_357_020_000_000),
            },
        ),
        (
            "json",
            Events(key=("name", "id")),
            {
                b'["an \\"apple\\", red",1]': ({"id": 1, "name": 'an "apple", red'}, None),
                b"[null,2]": ({"id": 2}, None),
            },
        ),
        (
            "parquet",
            Events(key=("id",), timestamp="at"),
            {
                b"1": ({"id": 1, "name": 'an "apple", red'}, NOON_MS),
                b"2": ({"id": 2}, NOON_MS),
            },
        ),
    ],
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


def test_load_under_a_name_happens_once(
    spark: SparkSession, connection: Connection, stream: str, tmp_path: Path
) -> None:
    path = files(tmp_path, "csv")
    first = load(spark, connection, [path], stream, name="once")
    again = load(spark, connection, [path, path], stream, name="once")
    assert (first.already_committed, again.already_committed) == (False, True)
    assert (again.txn_id, again.rows, again.commit_timestamp) == (
        first.txn_id,
        2,
        first.commit_timestamp,
    )
    other = load(spark, connection, [path], stream, name="another")
    assert other.txn_id != first.txn_id
    assert len(read_all(connection.bootstrap, stream)) == 4


def test_load_keeps_the_order_of_each_key_if_asked(
    spark: SparkSession, connection: Connection, stream: str, tmp_path: Path
) -> None:
    for number in range(3):  # three tasks; each key's rows are in all of them
        lines = [f"k{i % 5},{(i * 7 + number * 331) % 999:03}" for i in range(300)]
        (tmp_path / f"{number}.csv").write_text("\n".join(["key,at", *lines]) + "\n")
    load(
        spark,
        connection,
        [str(tmp_path / "*.csv")],
        stream,
        events=Events(key=("key",), order_by=("at",)),
    )
    order: dict[bytes | None, list[str]] = {}
    for event in read_all(connection.bootstrap, stream):
        order.setdefault(event.key, []).append(json.loads(event.value or b"")["at"])
    assert sum(map(len, order.values())) == 900
    assert all(times == sorted(times) for times in order.values())


def test_load_of_nothing_leaves_the_name_free(
    spark: SparkSession, connection: Connection, stream: str, tmp_path: Path
) -> None:
    (tmp_path / "empty.csv").write_text("id,name\n")
    empty = load(spark, connection, [str(tmp_path / "empty.csv")], stream, name="n")
    assert (empty.rows, empty.txn_id) == (0, None)
    full = load(spark, connection, [files(tmp_path, "csv")], stream, name="n")
    assert (full.rows, full.already_committed) == (2, False)


@pytest.mark.parametrize(
    ("text", "events", "error", "says"),
    [
        (None, Events(), InvalidArgument, "does not exist"),
        ("id,name\n1,a\n2\n", Events(), InvalidArgument, "alformed"),
        ("id,name\n1,a\n", Events(key=("nmae",)), InvalidArgument, "there are id, name"),
        ("id,at\n1,noon\n", Events(timestamp="at"), InvalidArgument, "noon"),
        ("id,name\n1,a\n", Events(encoding="raw"), InvalidArgument, "encoding=raw takes"),
    ],
    ids=["no file", "a short row", "no such key", "no time", "no value"],
)
def test_load_refuses_what_is_wrong_and_writes_nothing(
    spark: SparkSession,
    connection: Connection,
    stream: str,
    tmp_path: Path,
    text: str | None,
    events: Events,
    error: type[AnabranchError],
    says: str,
) -> None:
    path = tmp_path / "rows.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(error, match=says):
        load(spark, connection, [str(path)], stream, events=events, name="refused")
    assert read_all(connection.bootstrap, stream) == []


def test_load_needs_its_stream(
    spark: SparkSession, connection: Connection, stream: str, tmp_path: Path
) -> None:
    with pytest.raises(UnknownStream):
        load(spark, connection, [files(tmp_path, "csv")], stream + "-other")


# -- export ----------------------------------------------------------------------------------------------


class Table:
    """An export's folder, read as its format is meant to be read."""

    def __init__(
        self, spark: SparkSession, connection: Connection, folder: Path, form: str
    ) -> None:
        self._spark, self._connection = spark, connection
        self.folder, self._form = folder, form
        self.batches: list[Batch] = []

    def export(self, *streams: str, most: int | None = None, **more: Any) -> Exported:
        """A run to the end of what is there."""
        shape = Shape(self._form, **more)
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
        if self._form == "delta":
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
            log = self.folder / ("_delta_log" if self._form == "delta" else "_spark_metadata")
            entry = max(path for path in log.iterdir() if path.name[0].isdigit())
            entry.unlink()
            (log / f".{entry.name}.crc").unlink(missing_ok=True)


@pytest.fixture
def table(
    request: pytest.FixtureRequest, spark: SparkSession, connection: Connection, tmp_path: Path
) -> Table:
    """Parquet, where a test does not ask for both."""
    return Table(spark, connection, tmp_path / "out", getattr(request, "param", "parquet"))


both_formats = pytest.mark.parametrize("table", ["parquet", "delta"], indirect=True)


def test_export_goes_on_where_it_was(client: anabranch.Client, stream: str, table: Table) -> None:
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
def test_export_repeats_a_batch_that_was_cut_off(
    client: anabranch.Client, stream: str, table: Table
) -> None:
    """Crashes before Spark's own note of the batch, and before the table's."""
    for lost, value in ((False, "1"), (True, "2")):
        commit(client, stream, ("a", value), ("b", value))
        table.export(stream)
        before = table.values()
        table.forget(also_the_table=lost)
        table.export(stream)
        assert table.values() == before, f"the table's note lost: {lost}"
    assert table.values() == Counter("1122")


def test_a_micro_batch_is_made_of_whole_transactions(
    client: anabranch.Client, stream: str, table: Table
) -> None:
    for size in (3, 2, 2, 9, 1):
        commit(client, stream, *((f"k{i}", f"{size}") for i in range(size)))
    table.export(stream, most=4)
    assert [batch.rows for batch in table.batches] == [3, 4, 9, 1]
    assert len(table.rows()) == 17


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


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    yield from (value if isinstance(value, dict) else value.asDict()).items()


def test_export_ends_at_a_value_that_does_not_fit(
    client: anabranch.Client, stream: str, table: Table
) -> None:
    commit(client, stream, ("a", '{"n": 1}'))
    table.export(stream, schema="n INT")
    commit(client, stream, ("a", '{"n": "one"}'))
    with pytest.raises(InvalidArgument, match="Malformed"):
        table.export(stream, schema="n INT")
    assert len(table.rows()) == 1


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


# -- compact ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class History:
    """A stream, and the commit timestamps of a few transactions that write and delete keys, over a scaling."""

    stream: str
    moments: list[int]


@pytest.fixture(scope="module")
def history(client: anabranch.Client) -> History:
    """Tests only read it."""
    stream = f"history{uuid.uuid4().hex[:8]}/events"
    client.create_stream(stream, segments=2)
    found = [
        commit(client, stream, ("a", "a1"), ("b", "b1"), (None, "x"), ("a", "a2"), ("c", "c1")),
        commit(client, stream, ("b", None), ("d", "d1")),
    ]
    client.scale(stream, segments=3)
    found.append(commit(client, stream, ("b", "b2"), ("d", None), ("a", "a3"), ("a", "a4")))
    return History(stream, found)


LATEST = [
    {"a": "a2", "b": "b1", "c": "c1"},
    {"a": "a2", "c": "c1", "d": "d1"},
    {"a": "a4", "b": "b2", "c": "c1"},
]


@pytest.mark.parametrize("moment", [0, 1, 2])
def test_compact_is_as_of_a_commit(
    spark: SparkSession, connection: Connection, history: History, moment: int, tmp_path: Path
) -> None:
    to, at = str(tmp_path / "latest"), history.moments[moment]
    found = compact(spark, connection, history.stream, to=to, at=at)
    assert (found.at, found.keyless) == (at, 1)
    assert (found.events, found.keys) == ((5, 7, 11)[moment], len(LATEST[moment]))
    rows = spark.read.parquet(to).collect()
    assert {bytes(row.key).decode(): bytes(row.value).decode() for row in rows} == LATEST[moment]
    assert len(rows) == len(LATEST[moment])


def test_compact_into_another_stream_is_one_transaction(
    spark: SparkSession, connection: Connection, client: anabranch.Client, history: History
) -> None:
    stream, into = history.stream, history.stream + "-latest"
    found = compact(spark, connection, stream, into=into, segments=2, name="c")
    again = compact(spark, connection, stream, into=into, name="c")
    assert (found.at > history.moments[-1], found.keys, found.already_committed) == (True, 3, False)
    assert (again.already_committed, again.txn_id) == (True, found.txn_id)
    events = read_all(connection.bootstrap, into)
    assert {(e.key or b"").decode(): (e.value or b"").decode() for e in events} == LATEST[2]
    assert (len(events), {event.timestamp for event in events}) == (3, {NOON_MS})
    assert found.txn_id is not None
    assert client.state(found.txn_id).counts.committed == 3


def test_compact_refuses(
    spark: SparkSession, connection: Connection, history: History, tmp_path: Path
) -> None:
    stream, to = history.stream, str(tmp_path / "latest")
    refused: list[tuple[dict[str, Any], type[AnabranchError]]] = [
        ({}, InvalidArgument),
        ({"to": to, "into": "a/b"}, InvalidArgument),
        ({"into": stream}, InvalidArgument),
        ({"into": stream + "-none"}, UnknownStream),
    ]
    for arguments, error in refused:
        with pytest.raises(error):
            compact(spark, connection, stream, **arguments)
    compact(spark, connection, stream, to=to, at=history.moments[0])
    with pytest.raises(InvalidArgument, match="exists"):
        compact(spark, connection, stream, to=to)
    compact(spark, connection, stream, to=to, overwrite=True)
    assert spark.read.parquet(to).count() == len(LATEST[2])


# -- the commands ----------------------------------------------------------------------------------------


@pytest.fixture
def command(spark: SparkSession, bootstrap: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `anabranch spark …` on this process' session; (exit code, standard output, standard error)."""
    monkeypatch.setenv("ANABRANCH_BOOTSTRAP", bootstrap)

    def run(*arguments: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, ["spark", *arguments])
        return done.exit_code, done.stdout, done.stderr

    return run


def test_the_commands_from_file_to_file(command: Any, unique: str, tmp_path: Path) -> None:
    stream, path, out = f"c{unique}/rows", files(tmp_path, "csv"), str(tmp_path / "out")
    options = ("--stream", stream, "--segments", "2", "--key", "id", "--name", "n")
    code, said, _ = command("load", path, *options)
    assert (code, said.startswith(f"2 rows in {stream}, all at once: transaction ")) == (0, True)
    code, said, _ = command("load", path, *options, "--json")
    document = json.loads(said)
    assert (code, document["already_committed"], document["rows"]) == (0, True, 2)

    code, said, progress = command("export", "-s", stream, "--to", out, "--partition-by", "segment")
    assert (code, said) == (0, f"2 events to {out} in 1 micro-batch\n")
    assert progress.startswith("micro-batch 0: 2 events")
    code, said, _ = command("export", "-s", stream, "--to", out, "--partition-by", "segment")
    assert (code, said) == (0, f"nothing new for {out}\n")

    code, said, _ = command("compact", "-s", stream, "--to", out + "-latest", "--json")
    document = json.loads(said)
    assert (code, document["events"], document["keys"], document["to"]) == (
        0,
        2,
        2,
        out + "-latest",
    )


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (
            ("load", "/no/such.csv", "-s", "STREAM"),
            2,
            "InvalidArgument: Spark: Path does not exist",
        ),
        (("load", "/no/such.csv", "-s", "STREAM-x"), 2, "UnknownStream: "),
        (("load", "x.csv", "-s", "STREAM", "--conf", "x"), 2, "InvalidArgument: --conf 'x'"),
        (("export", "-s", "STREAM-x", "--to", "TMP/out"), 2, "UnknownStream: "),
        (("export", "-s", "STREAM", "--to", "TMP/o", "--partition-by", "x"), 2, "no column x"),
        (("compact", "-s", "STREAM"), 2, "InvalidArgument: give a folder or a stream"),
        (("compact", "-s", "STREAM-x", "--to", "TMP/out"), 2, "UnknownStream: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_command_ends_with_one_line_and_its_code(
    command: Any, stream: str, tmp_path: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    words = [a.replace("STREAM", stream).replace("TMP", str(tmp_path)) for a in arguments]
    ended, out, error = command(*words)
    assert (ended, out) == (code, "")
    assert says in error
    assert len(error.splitlines()) == 1
