"""Spark's exceptions, as they came, and what a caller is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.errors.exceptions.base import StreamingQueryException
from pyspark.sql.types import StringType, StructField, StructType

from anabranch import Client
from anabranch.errors import (
    AnabranchError,
    InvalidArgument,
    NotReady,
    OutcomeUnknown,
    UnknownStream,
)
from anabranch.spark.failures import JobFailed, failure_of, named_failures
from anabranch.spark.jobs import saved
from anabranch.spark.options import Options
from anabranch.spark.sink.writer import BatchSink, Target
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
def test_an_error_of_sparks_is_told_by_its_innermost_name(
    error: Exception, kind: type[AnabranchError], says: str
) -> None:
    found = failure_of(error)
    assert type(found) is kind
    assert says in str(found)
    with pytest.raises(kind) as raised, named_failures():
        raise error
    assert raised.value.__cause__ is error


def test_what_is_not_sparks_passes() -> None:
    with pytest.raises(KeyError), named_failures():
        raise KeyError("mine")


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    made.client.create_stream("t/s")
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


def test_rows_that_nobody_can_ask_about_are_unknown(world: World) -> None:
    def save() -> None:
        world.client.close()

    with pytest.raises(OutcomeUnknown, match="run it again with --name load-1"):
        saved(world.client, "t", "load-1", save)


def test_an_abort_without_an_answer_hides_no_error_of_the_job(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "client", property(lambda _: world.client))
    columns = StructType([StructField("value", StringType())])
    sink = BatchSink(Options({"bootstrap": "b:1", "stream": "t/s"}), columns, False)
    sink.abort([])
    monkeypatch.setattr(Client, "abort", _unanswered)
    sink.abort([])


def _unanswered(*_: object) -> None:
    raise NotReady("no controller answers")
