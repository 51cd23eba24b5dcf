"""Reads the lines of a history's files into operations, each a request (``ask``) and its answer (``told``)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checker.recorder import SUFFIX

Entry = tuple[str, int, dict[str, Any]]  # file, line from 1, the parsed line

OK, FAILED, UNKNOWN = "ok", "failed", "unknown"
STATES = (
    "open",
    "prepared",
    "committing",
    "committed",
    "aborting",
    "aborted",
    "unknown",
    "expired",
)
MODES = ("raw", "ordered", "transactions")
ASYNCHRONOUS = "asynchronous"  # a worker derives it, after the commits of its source
DERIVED_TYPES = ("index", "unique", "totals", ASYNCHRONOUS)
TOPICS = ("stream", "journal", "history")  # of a stream

_Types = tuple[type, ...]
_TEXT: _Types = (str,)
_TEXT_OR_NULL: _Types = (str, type(None))
_NUMBER: _Types = (int,)
_NUMBER_OR_NULL: _Types = (int, type(None))
_LIST: _Types = (list,)

# Each `what` -> the fields of the request, and those of an answer with ``ok``.
_FIELDS: dict[str, tuple[dict[str, _Types], dict[str, _Types]]] = {
    "begin": ({"txn": _TEXT, "scope": _TEXT}, {"txn_id": _TEXT_OR_NULL}),
    "write": ({"txn": _TEXT, "writer": _TEXT, "stream": _TEXT, "events": _LIST}, {}),
    "finish": ({"txn": _TEXT, "writer": _TEXT}, {}),
    "commit": (
        {"txn": _TEXT, "writers": (list, type(None))},
        {"txn_id": _TEXT, "timestamp": _NUMBER, "committed": _NUMBER},
    ),
    "abort": ({"txn": _TEXT}, {}),
    "take": ({"processor": _TEXT, "ownership": _TEXT, "tasks": _LIST}, {}),
    "near": ({"scopes": _LIST}, {}),
    "drained": ({"processor": _TEXT, "streams": _LIST}, {}),
    "outcomes": ({"commands": _LIST, "outcomes": _LIST}, {}),
    "total": ({"tables": _LIST, "changes": _LIST, "total": _NUMBER}, {}),
    "derivation": (
        {
            "table": _TEXT,
            "source": _TEXT,
            "name": _TEXT,
            "version": _NUMBER,
            "type": _TEXT,
            "fields": _LIST,
        },
        {},
    ),
    "end_derivation": ({"table": _TEXT}, {}),
    "look_up_total": (
        {"txn": _TEXT, "table": _TEXT, "derivation": _TEXT, "value": _TEXT},
        {"sum": _NUMBER, "count": _NUMBER},
    ),
    "state": ({"txn_id": _TEXT}, {"state": _TEXT, "timestamp": _NUMBER_OR_NULL}),
    "plain": ({"stream": _TEXT, "events": _LIST}, {}),
    "scale": ({"stream": _TEXT}, {}),
    "delete": ({"stream": _TEXT, "topic": _TEXT}, {}),
    "truncate": ({"stream": _TEXT, "until": _NUMBER}, {}),
    "open": (
        {
            "reader": _TEXT,
            "mode": _TEXT,
            "streams": _LIST,
            "group": _TEXT_OR_NULL,
            "starts": (str, int),
        },
        {},
    ),
    "poll": ({"reader": _TEXT}, {"events": _LIST}),
    "position": ({"reader": _TEXT}, {}),
    "resume": ({"reader": _TEXT, "places": _LIST}, {}),
    "caught_up": ({"reader": _TEXT}, {}),
    "close": ({"reader": _TEXT}, {}),
    "snapshot": (
        {"snapshot": _TEXT, "streams": _LIST, "asked_for": _NUMBER_OR_NULL},
        {"timestamp": _NUMBER},
    ),
    "snapshot_read": ({"snapshot": _TEXT, "stream": _TEXT}, {"events": _LIST}),
    "read": ({"table": _TEXT}, {"low": _TEXT, "high": _TEXT_OR_NULL, "rows": (list, type(None))}),
    "changes": ({"table": _TEXT, "start": _NUMBER_OR_NULL}, {"until": _NUMBER, "rows": _LIST}),
    "log": (
        {"stream": _TEXT, "partition": _NUMBER},
        {"start": _NUMBER, "end": _NUMBER, "events": _LIST},
    ),
    "commits": ({"stream": _TEXT}, {"records": _LIST}),
}


class BrokenHistory(Exception):
    """The history is malformed, so nothing can be judged; the message begins with ``file:line``."""

    def __init__(self, file: str, line: int, why: str) -> None:
        super().__init__(f"{file}:{line}: {why}")


@dataclass(slots=True, eq=False)
class Operation:
    """A request and its answer.

    ``at``, ``told_at``: nanoseconds, of the request and of the answer. Without an answer, ``told_at`` and
    ``told_line`` are None, and ``outcome`` is ``unknown``.
    """

    file: str
    line: int
    at: int
    what: str
    asked: dict[str, Any]
    outcome: str = UNKNOWN
    told_at: int | None = None
    told_line: int | None = None
    told: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        """Whether the answer says that it took effect."""
        return self.outcome == OK

    @property
    def result(self) -> dict[str, Any]:
        """The fields of an answer with ``ok``."""
        return self.told or {}

    @property
    def where(self) -> str:
        """``file:line`` of the request."""
        return f"{self.file}:{self.line}"

    @property
    def told_where(self) -> str:
        """``file:line`` of the answer; of the request, if there is no answer."""
        return f"{self.file}:{self.told_line or self.line}"

    def ended_before(self, other: Operation) -> bool:
        """Whether its answer surely came before the other's request.

        Equal times in different files decide nothing: either may be first.
        """
        if self.told_at is None or self.told_line is None:
            return False
        if self.file == other.file:
            return self.told_line < other.line
        return self.told_at < other.at

    def broken(self, why: str) -> BrokenHistory:
        """An error about this operation, for the caller to raise."""
        return BrokenHistory(self.file, self.line, f"{self.what}: {why}")


def read_folder(folder: Path) -> Iterator[Entry]:
    """All lines of a folder's files.

    Raises:
        BrokenHistory: a line is no JSON object (except for an incomplete last line), or there is no file.
    """
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise BrokenHistory(str(folder), 0, f"there is no file *{SUFFIX}")
    for file in files:
        yield from read_file(file)


def read_file(file: Path) -> Iterator[Entry]:
    """The lines of one file. Raises: as `read_folder`."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return  # incomplete: its process was killed while writing it
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise BrokenHistory(file.name, number, f"no JSON: {error}") from None
            if not isinstance(entry, dict):
                raise BrokenHistory(file.name, number, "no JSON object")
            yield file.name, number, entry


def pair(entries: Iterable[Entry]) -> list[Operation]:
    """The operations, in the order of their requests within each file.

    Raises:
        BrokenHistory: a field is missing or of a wrong type, a number is used twice, time goes back, or an answer
            has no request.
    """
    operations: list[Operation] = []
    open_ones: dict[tuple[str, int], Operation] = {}
    asked: set[tuple[str, int]] = set()
    last: dict[str, int] = {}
    for file, line, entry in entries:
        at, op, kind = (_field(file, line, entry, name, types) for name, types in _ENVELOPE)
        if at < last.get(file, at):
            raise BrokenHistory(file, line, f"time goes back: {at} after {last[file]}")
        last[file] = at
        if kind == "ask":
            if (file, op) in asked:
                raise BrokenHistory(file, line, f"operation {op} is asked twice")
            what = _field(file, line, entry, "what", _TEXT)
            if what not in _FIELDS:
                raise BrokenHistory(file, line, f"unknown what: {what!r}")
            for name, types in _FIELDS[what][0].items():
                _field(file, line, entry, name, types)
            operation = Operation(file, line, at, what, entry)
            asked.add((file, op))
            open_ones[file, op] = operation
            operations.append(operation)
        elif kind == "told":
            found = open_ones.pop((file, op), None)
            if found is None:
                raise BrokenHistory(file, line, f"operation {op} was not asked, or told before")
            outcome = _field(file, line, entry, "outcome", _TEXT)
            if outcome not in (OK, FAILED, UNKNOWN):
                raise BrokenHistory(file, line, f"unknown outcome: {outcome!r}")
            if outcome == OK:
                for name, types in _FIELDS[found.what][1].items():
                    _field(file, line, entry, name, types)
            found.outcome, found.told_at, found.told_line, found.told = outcome, at, line, entry
        else:
            raise BrokenHistory(file, line, f"unknown kind: {kind!r}")
    return operations


_ENVELOPE = (("at", _NUMBER), ("op", _NUMBER), ("kind", _TEXT))


def _field(file: str, line: int, entry: dict[str, Any], name: str, types: _Types) -> Any:
    if name not in entry:
        raise BrokenHistory(file, line, f"{name!r} is missing")
    value = entry[name]
    if not isinstance(value, types) or isinstance(value, bool):
        raise BrokenHistory(file, line, f"{name!r} is {type(value).__name__}")
    return value
