"""How many receipts one commit takes, and what is said of one more. Log and controller are in memory."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from anabranch.errors import EventTooLarge
from anabranch.spark.options import Options
from anabranch.spark.sink.writer import BatchSink, StreamSink, Target, Written
from anabranch.topics.names import DEFAULT_PREFIX, commands_topic
from tests.client.world import World

COLUMNS = StructType([StructField(name, StringType()) for name in ("key", "value")])
OPTIONS = {"bootstrap": "b:1", "stream": "t/s"}
LIMIT, MANY = 1_200, 16


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A cluster that takes small commands."""
    made = World()
    commands = commands_topic(DEFAULT_PREFIX)
    info = made.cluster.topics[commands]
    config = {**info.config, "max.message.bytes": str(LIMIT)}
    made.cluster.topics[commands] = replace(info, config=config)
    made.client.create_stream("t/s", segments=2)
    monkeypatch.setattr(Target, "client", property(lambda _: made.client))
    yield made
    made.client.close()


def written(sink: BatchSink | StreamSink) -> Written:
    """A task attempt that writes to both segments; of query q, batch 0."""
    batch = pa.record_batch({"key": list("abcd"), "value": ["x"] * 4})
    message = sink._target.write(sink._reservation, iter([batch]), streaming=False)
    assert isinstance(message, Written)
    return replace(message, query_id="q", batch_id="0")


def commit(kind: type[BatchSink | StreamSink], messages: list[Written], sink: BatchSink) -> None:
    if kind is BatchSink:
        sink.commit(messages)
    else:
        StreamSink(Options(OPTIONS), COLUMNS, False).commit(messages, 0)


@pytest.mark.parametrize("kind", [BatchSink, StreamSink])
def test_as_many_receipts_as_fit_and_one_more(
    world: World, kind: type[BatchSink | StreamSink]
) -> None:
    sink = BatchSink(Options(OPTIONS), COLUMNS, False)
    messages = [written(sink) for _ in range(MANY)]
    for count in range(MANY, 0, -1):
        try:
            commit(kind, messages[:count], sink)
            break
        except EventTooLarge as error:
            said = str(error)
        assert f"receipts of {count} tasks, which wrote to {2 * count} partitions in all" in said
        assert "no row is visible" in said
        assert "Write by fewer tasks (df.coalesce)" in said
        assert "max.message.bytes of the topic anabranch.commands" in said
        assert f"the commands topic takes {LIMIT - 512}" in said
        # Nothing is lost: fewer may still be committed.
        assert world.client.state(sink._reservation).state == "OPEN"
    assert len(world.events("t/s")) == 4 * count
    # One more would have been too much; a token, a name and numbers are the rest of the command.
    sizes = [len(message.receipt) - len(b"vt") for message in messages]  # without version and type
    assert LIMIT - 512 - 200 - sizes[count] < sum(sizes[:count]) < LIMIT - 512


def test_after_too_many_an_abort_leaves_nothing(world: World) -> None:
    sink = StreamSink(Options(OPTIONS), COLUMNS, False)
    messages = [written(sink) for _ in range(MANY)]
    again = pickle.loads(pickle.dumps(messages))
    with pytest.raises(EventTooLarge):
        StreamSink(Options(OPTIONS), COLUMNS, False).commit(again, 0)
    StreamSink(Options(OPTIONS), COLUMNS, False).abort(again, 0)
    assert world.client.state(sink._reservation).state == "ABORTED"
    assert world.events("t/s") == []
    assert world.client.describe("t/s").uncommitted_bytes == 0
