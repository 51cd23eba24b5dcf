"""Spark's exceptions, as they came, and what a caller is told."""

from __future__ import annotations

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.errors.exceptions.base import StreamingQueryException

from anabranch.errors import AnabranchError, InvalidArgument, OutcomeUnknown, UnknownStream
from anabranch.spark.failures import JobFailed, failure_of, named_failures

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
        (Py4JError("\nAn error occurred while calling o1.x"), JobFailed, "An error occurred"),
    ],
    ids=["planner", "commit", "not ours", "task", "analysis", "query", "gateway"],
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
