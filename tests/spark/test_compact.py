"""The latest value of each key, as files or as a stream: on a real broker, by real jobs."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import anabranch
from anabranch.errors import AnabranchError, InvalidArgument, UnknownStream
from anabranch.spark.compact import compact
from anabranch.spark.options import Connection
from tests.plain_reader import read_all
from tests.spark.pipeline_input import NOON_MS, commit

pytestmark = [pytest.mark.broker, pytest.mark.slow(60)]


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


@pytest.mark.long
@pytest.mark.parametrize("moment", range(len(LATEST)))
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


@pytest.mark.soak
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


@pytest.mark.long
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
