"""Turns the error of a failed Spark job into one of our errors.

Spark's exception contains that of a task, planner or commit as text. This module finds the class in that text, so
that a command prints one line with `UnknownStream`, and no stack.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JError
from pyspark.errors import (
    AnalysisException,
    IllegalArgumentException,
    ParseException,
    PySparkException,
)

from anabranch import errors
from anabranch.errors import (
    AnabranchError,
    AskOutcomeError,
    FixCallError,
    InvalidArgument,
    RetryError,
)

# "anabranch.errors.UnknownStream: there is no stream nyc/x", as a traceback ends.
_OURS = re.compile(r"\banabranch(?:\.\w+)+\.([A-Z]\w+): ([^\n]*)")
# "[PATH_NOT_FOUND] Path does not exist: …", as Spark's own errors begin.
_CONDITION = re.compile(r"\[([A-Z][A-Z0-9_]+(?:\.[A-Z0-9_]+)*)\] (?=([^\n]*))")
# A traceback's header; and its exception, on the first line that is not indented.
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:: [^\n]*)?$", re.MULTILINE)
# A Java exception's cause, without its stack.
_CAUSE = re.compile(r"^Caused by: [\w.$]+: (.*?)(?=\n\tat |\Z)", re.MULTILINE | re.DOTALL)
_MOST_CAUSE = 1000
# Conditions that wrap another, more specific one.
_WRAPPERS = (
    "FAILED_READ_FILE",
    "FOREACH_BATCH_",
    "TASK_WRITE_FAILED",
    "STREAM_FAILED",
    "WRITING_JOB_ABORTED",
)
# Conditions that fail again when the job is repeated, although a task raised them.
_DATA = (
    "ARITHMETIC_OVERFLOW",
    "CANNOT_PARSE",
    "CAST_",
    "FIELD_NOT_FOUND",
    "INVALID_",
    "MALFORMED_",
    "NUMERIC_VALUE_OUT_OF_RANGE",
    "PATH_NOT_FOUND",
    "UNRESOLVED_",
    "UNSUPPORTED_",
)


class JobFailed(RetryError):
    """Spark gave up a job. None of its output counts, so it can safely be repeated."""


@contextmanager
def named_failures() -> Iterator[None]:
    """Turn Spark's exceptions in the block into ours, with the original as the cause.

    Raises:
        AnabranchError: the class that a task, planner or commit raised.
        InvalidArgument: Spark refuses the call or the data.
        JobFailed: any other failure.
    """
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise failure_of(error) from error


def failure_of(error: BaseException) -> AnabranchError:
    """Our error for an error of Spark."""
    text = str(error)
    ours = [(kind, said) for kind, said in map(_known, _OURS.finditer(text)) if kind is not None]
    if ours:
        kind, said = ours[-1]  # the innermost comes last
        if issubclass(kind, RetryError):  # such as of the abort after an unknown outcome
            doubts = [found for found in ours if issubclass(found[0], AskOutcomeError)]
            kind, said = (doubts or ours)[-1]
        return kind(said.strip())
    found = [(name, said) for name, said in _CONDITION.findall(text)]
    name, said = next(
        ((name, said) for name, said in found if not name.startswith(_WRAPPERS)),
        found[0] if found else ("", _first_line(text)),
    )
    causes = _CAUSE.findall(text) if name.startswith(_WRAPPERS) else []
    if causes:
        said = f"{said.strip()}: {' '.join(causes[-1].split())[:_MOST_CAUSE]}"
    if _TRACEBACK in said:
        said = said.replace(_TRACEBACK, _raised(text))
    message = f"Spark: {said.strip()}" + (f" [{name}]" if name else "")
    refused = isinstance(error, AnalysisException | IllegalArgumentException | ParseException)
    if refused or name.startswith(_DATA):
        return InvalidArgument(message)
    return JobFailed(message)


def _known(match: re.Match[str]) -> tuple[type[AnabranchError] | None, str]:
    kind = getattr(errors, match[1], None)
    if isinstance(kind, type) and issubclass(kind, AnabranchError):
        return kind, match[2]
    if match[1].endswith("Mismatch") or match[1].startswith("Unsupported"):
        return FixCallError, f"{match[1]}: {match[2]}"
    return None, match[2]


def _raised(text: str) -> str:
    """The exception at the end of the last traceback in a text."""
    last = text[text.rindex(_TRACEBACK) + len(_TRACEBACK) :]
    found = _RAISED.search(last)
    return found[0] if found else "no message"


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "no message")
