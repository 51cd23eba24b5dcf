"""Exit codes, grouped by what the caller does next, and errors as one line."""

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


# Code: (meaning, what to do). An error line ends with what to do.
EXIT_CODES: dict[ExitCode, tuple[str, str]] = {
    ExitCode.OK: ("done", ""),
    ExitCode.DIFFERENCE: (
        "a check found a difference, or there is no such row",
        "see the differences above",
    ),
    ExitCode.USAGE: ("the command can't succeed as it is", "fix the command"),
    ExitCode.RETRY: ("nothing was changed, or it is safe to repeat", "repeat the command"),
    ExitCode.BEGIN_AGAIN: ("the transaction has ended without effect", "begin a new transaction"),
    ExitCode.OUTCOME_UNKNOWN: (
        "the outcome is not known yet",
        "ask with `anabranch txn describe ID`",
    ),
    ExitCode.ENVIRONMENT: (
        "the environment lacks something: a package, Java, a port, disk space",
        "provide it, then repeat the command",
    ),
    ExitCode.DEFECT: (
        "a defect in anabranch",
        "please report it, with the output of -v",
    ),
    ExitCode.INTERRUPTED: ("interrupted by Ctrl-C", ""),
    ExitCode.TERMINATED: ("ended by SIGTERM", ""),
}


class Terminated(BaseException):
    """SIGTERM was received. As with KeyboardInterrupt, `except Exception` does not catch it."""


class OutputClosed(Exception):
    """The reader of standard output has closed it. This is not an error."""


class CheckFailed(AnabranchError):
    """A check found differences, which were shown. ``to_do``: the next step (default: that of the exit code)."""

    def __init__(self, message: str, to_do: str = "") -> None:
        super().__init__(message)
        self.to_do = to_do


class NotFound(CheckFailed):
    """The requested row does not exist."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "check the key")


class ChildFailed(AnabranchError):
    """A child process ended unexpectedly, or did not start in time."""

    to_do = "correct what its log says, then repeat the command"


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
        """The failure as JSON, for programs."""
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
    """The exit code of an exception. Unknown exceptions are defects."""
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
    # Not imported: a module that is not loaded can't have raised an error.
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
        own_step=getattr(error, "to_do", ""),
    )
