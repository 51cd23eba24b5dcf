"""Exit codes, sorted by what the caller does next, and errors in one line.

docs/cli.md shows `EXIT_CODES`; a test compares the two.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import IntEnum

from anabranch.errors import (
    AnabranchError,
    AskOutcomeError,
    BeginAgainError,
    FixCallError,
    InvariantViolation,
    NotInstalled,
    NotSupported,
    RetryError,
)
from anabranch.extras import named
from anabranch.ports import TableError


class ExitCode(IntEnum):
    """The exit codes, for scripts."""

    OK = 0
    DIFFERENCE = 1
    USAGE = 2
    RETRY = 3
    BEGIN_AGAIN = 4
    OUTCOME_UNKNOWN = 5
    ENVIRONMENT = 6
    DEFECT = 70
    INTERRUPTED = 130
    TERMINATED = 143


# Code: (meaning, what to do). The second ends every error line.
EXIT_CODES: dict[ExitCode, tuple[str, str]] = {
    ExitCode.OK: ("done", ""),
    ExitCode.DIFFERENCE: ("a check found a difference", "look at the differences shown"),
    ExitCode.USAGE: ("the call can't succeed as it is", "change the call"),
    ExitCode.RETRY: ("nothing happened, or repeating is safe", "run it again"),
    ExitCode.BEGIN_AGAIN: ("the transaction is over without effect", "begin a new transaction"),
    ExitCode.OUTCOME_UNKNOWN: (
        "the outcome is not known here",
        "ask with `anabranch txn describe ID`",
    ),
    ExitCode.ENVIRONMENT: (
        "something around it is missing: download, Java, port, disk",
        "mend that, then run it again",
    ),
    ExitCode.DEFECT: (
        "a defect in anabranch",
        "please report it, with what -v shows",
    ),
    ExitCode.INTERRUPTED: ("interrupted by Ctrl-C", ""),
    ExitCode.TERMINATED: ("ended by SIGTERM", ""),
}


class Terminated(BaseException):
    """SIGTERM came. Like KeyboardInterrupt, it passes every `except Exception`."""


class OutputClosed(Exception):
    """The reader of our output is gone: no error, and nothing more to do."""


class CheckFailed(AnabranchError):
    """A check found differences, which were shown. ``to_do``: the next step, if not that of the exit code."""

    def __init__(self, message: str, to_do: str = "") -> None:
        super().__init__(message)
        self.to_do = to_do


class NotFound(FixCallError):
    """A thing that was asked for is not there."""


class ChildFailed(AnabranchError):
    """A child process ended unexpectedly."""


DRIVERS = ("psycopg", "sqlite3")  # of databases


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as the command line shows it."""

    name: str
    message: str
    code: ExitCode
    txn_id: str | None = None
    own_step: str = ""

    @property
    def to_do(self) -> str:
        """The next step for the user."""
        return self.own_step or EXIT_CODES[self.code][1]

    def line(self) -> str:
        """One line for people."""
        lines = self.message.strip().splitlines() or ["no message"]
        text = lines[0].rstrip(" .:")
        more = " (-v shows more)" if len(lines) > 1 else ""
        known = f" [transaction {self.txn_id}]" if self.txn_id else ""
        return f"{self.name}: {text}{more}{known} -> {self.to_do}"

    def document(self) -> dict[str, object]:
        """The same for programs."""
        error: dict[str, object] = {
            "name": self.name,
            "message": self.message,
            "exit_code": int(self.code),
            "to_do": self.to_do,
        }
        if self.txn_id:
            error["txn_id"] = self.txn_id
        return {"error": error}


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit code of an exception. An unknown exception is a defect."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, Terminated):
        return ExitCode.TERMINATED
    if isinstance(error, InvariantViolation):
        return ExitCode.DEFECT
    if isinstance(error, CheckFailed):
        return ExitCode.DIFFERENCE
    if _is_environment(error):
        return ExitCode.ENVIRONMENT
    kinds: tuple[tuple[type[AnabranchError], ExitCode], ...] = (
        (FixCallError, ExitCode.USAGE),
        (RetryError, ExitCode.RETRY),
        (BeginAgainError, ExitCode.BEGIN_AGAIN),
        (AskOutcomeError, ExitCode.OUTCOME_UNKNOWN),
    )
    for kind, code in kinds:
        if isinstance(error, kind):
            return code
    return ExitCode.DEFECT


def _is_environment(error: BaseException) -> bool:
    if isinstance(error, OSError | TableError | ChildFailed | NotInstalled | NotSupported):
        return True
    # Looked up, not imported: an unloaded module can't have raised its errors.
    loaded = (sys.modules.get(name) for name in DRIVERS)
    if any(module is not None and isinstance(error, module.Error) for module in loaded):
        return True
    infra = sys.modules.get("anabranch.infra.errors")
    spark = sys.modules.get("anabranch.spark.session")
    return (infra is not None and isinstance(error, infra.InfraError)) or (
        spark is not None and isinstance(error, spark.NoJdk)
    )


def failure_of(error: BaseException) -> Failure:
    """The failure to show for an exception."""
    error = named(error)
    txn_id = getattr(error, "txn_id", None)
    return Failure(
        name=type(error).__name__,
        message=str(error) or (type(error).__doc__ or "").strip(),
        code=exit_code_of(error),
        txn_id=txn_id.hex() if isinstance(txn_id, bytes) else None,
        own_step=error.to_do if isinstance(error, CheckFailed) else "",
    )
