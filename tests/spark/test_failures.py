"""What a caller gets of a failed job: Spark's exceptions by name, and of a commit with too many receipts."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest
from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.errors.exceptions.base import StreamingQueryException
from pyspark.sql.types import StringType, StructField, StructType

from anabranch import Client
from anabranch.errors import (
    AnabranchError,
    EventTooLarge,
    InvalidArgument,
    NotReady,
    OutcomeUnknown,
    UnknownStream,
)
from anabranch.spark.failures import JobFailed, failure_of, named_failures
from anabranch.spark.jobs import saved
from anabranch.spark.options import Options
from anabranch.spark.sink.writer import BatchSink, StreamSink, Target, Written
from anabranch.topics.names import DEFAULT_PREFIX, commands_topic
from tests.client.world import World

IN_A_PLANNER = """[PYTHON_DATA_SOURCE_ERROR] Failed to plan Python data source anabranch in Python: Traceback (most recent call last):
  File "/x/pyspark/worker.py", line 1, in main
anabranch.errors.NotReady: no controller answers
The above exception was the direct cause of the following exception:
anabranch.errors.UnknownStream: there is no stream nyc/x
 SQLSTATE: 38000"""  # noqa: E501
NOT_OURS = """[PYTHON_DATA_SOURCE_ERROR] Failed to create Python data source instance: Traceback (most recent call last):
  File "/x/pyspark/worker.py", line 1, in main
    import anabranch
KeyError: 'anabranch'
During handling of the above exception, another exception occurred:
Traceback (most recent call last):
  File "/x/pyspark/worker.py", line 2, in main
ModuleNotFoundError: No module named 'anabranch'
hint: install it
 SQLSTATE: 38000
\tat org.apache.spark.sql.errors.QueryCompilationErrors$.x(QueryCompilationErrors.scala:1)"""  # noqa: E501
IN_A_TASK = """[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: [MALFORMED_RECORD_IN_PARSING.WITHOUT_SUGGESTION] Malformed records are detected in record parsing: [null].
Parse Mode: FAILFAST."""  # noqa: E501
IN_A_COMMIT = (
    "[WRITING_JOB_ABORTED] Writing job aborted.\nanabranch.errors.OutcomeUnknown: ask later"
)

IN_AN_ABORT = f"{IN_A_COMMIT}\n\tSuppressed: x\nanabranch.errors.NotReady: no controller answers"


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (AnalysisException(IN_A_PLANNER), UnknownStream, "there is no stream nyc/x"),
        (PySparkException(IN_A_COMMIT), OutcomeUnknown, "ask later"),
        (
            AnalysisException(NOT_OURS),
            InvalidArgument,
            "instance: ModuleNotFoundError: No module named 'anabranch' [PYTHON_DATA_SOURCE_ERROR]",
        ),
        (
            StreamingQueryException(IN_A_TASK),
            InvalidArgument,
            "Spark: Malformed records are detected in record parsing: [null]. [MALFORMED_RECORD_IN_PARSING",
        ),
        (
            AnalysisException("[PATH_NOT_FOUND] Path does not exist: file:/x. SQLSTATE: 42K03"),
            InvalidArgument,
            "Spark: Path does not exist: file:/x. SQLSTATE: 42K03 [PATH_NOT_FOUND]",
        ),
        (
            PySparkException("[STREAM_FAILED] Query [id = 1] terminated with exception: no space"),
            JobFailed,
            "Spark: Query [id = 1] terminated with exception: no space [STREAM_FAILED]",
        ),
        (PySparkException(IN_AN_ABORT), OutcomeUnknown, "ask later"),
        (Py4JError("\nAn error occurred while calling o1.x"), JobFailed, "An error occurred"),
    ],
    ids=["planner", "commit", "not ours", "task", "analysis", "query", "abort", "gateway"],
)
def test_an_error_of_spark_s_gets_its_innermost_name(
    error: Exception, kind: type[AnabranchError], says: str
) -> None:
    found = failure_of(error)
    assert type(found) is kind
    assert says in str(found)
    with pytest.raises(kind) as raised, named_failures():
        raise error
    assert raised.value.__cause__ is error


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), named_failures():
        raise KeyError("mine")


COLUMNS = StructType([StructField(name, StringType()) for name in ("key", "value")])
OPTIONS = {"bootstrap": "b:1", "stream": "t/s"}
LIMIT = 1_200
MANY = 16


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A cluster in memory that takes small commands; sinks use its client."""
    made = World()
    commands = commands_topic(DEFAULT_PREFIX)
    info = made.cluster.topics[commands]
    config = {**info.config, "max.message.bytes": str(LIMIT)}
    made.cluster.topics[commands] = replace(info, config=config)
    made.client.create_stream("t/s", segments=2)
    monkeypatch.setattr(Target, "client", property(lambda _: made.client))
    yield made
    made.client.close()


@pytest.mark.parametrize("commits", [True, False])
def test_rows_that_a_failed_job_committed_are_committed(world: World, commits: bool) -> None:
    def save() -> None:
        with world.client.begin("t", name="load-1") as txn:
            txn.write("t/s", b"x")
            if commits:
                txn.commit()
        raise PySparkException("[WRITING_JOB_ABORTED] Writing job aborted.")

    if commits:
        result, failed = saved(world.client, "t", "load-1", save)
        assert result is not None
        assert (result.counts.committed, failed) == (1, True)
    else:
        with pytest.raises(JobFailed):
            saved(world.client, "t", "load-1", save)


def test_without_an_answer_the_outcome_is_unknown(world: World) -> None:
    def save() -> None:
        world.client.close()

    with pytest.raises(OutcomeUnknown, match="run it again with --name load-1"):
        saved(world.client, "t", "load-1", save)


def test_an_abort_without_an_answer_hides_no_error_of_the_job(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = BatchSink(Options(OPTIONS), COLUMNS, False)
    sink.abort([])
    monkeypatch.setattr(Client, "abort", _unanswered)
    sink.abort([])


def _unanswered(*_: object) -> None:
    raise NotReady("no controller answers")


# -- how many receipts one commit takes --------------------------------------------------------------------


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
def test_a_commit_takes_the_receipts_that_fit_into_its_command(
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
