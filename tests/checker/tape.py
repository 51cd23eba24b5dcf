"""Histories in memory: what a recorder would have written, with a clock of its own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from checker import Report, judge_entries
from checker.reading import Entry


class Tape:
    """Entries of several files. ``at``: the time of the next one; each is one later than the one before,
    but for one after ``stands_still``."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.at = 0
        self.stands_still = False
        self._ops: Counter[str] = Counter()
        self._lines: defaultdict[str, int] = defaultdict(int)

    def ask(self, file: str, what: str, **more: Any) -> int:
        """Returns the operation's number."""
        self._ops[file] += 1
        self._put(file, {"op": self._ops[file], "kind": "ask", "what": what, **more})
        return self._ops[file]

    def told(self, file: str, op: int, outcome: str = "ok", **more: Any) -> None:
        """The fields of its answer."""
        self._put(file, {"op": op, "kind": "told", "outcome": outcome, **more})

    def do(self, file: str, what: str, told: dict[str, Any] | None = None, **more: Any) -> None:
        """An operation that nothing comes between; it is ok."""
        self.told(file, self.ask(file, what, **more), **(told or {}))

    def _put(self, file: str, entry: dict[str, Any]) -> None:
        self.at += not self.stands_still
        self.stands_still = False
        self._lines[file] += 1
        self.entries.append((file, self._lines[file], {"at": self.at, **entry}))

    # Short forms, of stream s/a and process p, as most cases need them.

    def begin(self, txn: str, txn_id: str | None, file: str = "p") -> None:
        """A stream's name in scope s."""
        self.do(file, "begin", {"txn_id": txn_id}, txn=txn, scope="s")

    def write(
        self,
        txn: str,
        *ids: str,
        writer: str = "w",
        key: str | None = "k",
        file: str = "p",
        stream: str = "s/a",
    ) -> None:
        """Events of one key."""
        events = [[key, one] for one in ids]
        self.do(file, "write", txn=txn, writer=writer, stream=stream, events=events)

    def commit(
        self,
        txn: str,
        txn_id: str,
        timestamp: int,
        committed: int,
        file: str = "p",
        writers: Sequence[str] | None = ("w",),
        **more: Any,
    ) -> None:
        """Asked and told."""
        told = {"txn_id": txn_id, "timestamp": timestamp, "committed": committed}
        told |= {name: more.pop(name) for name in ("replayed", "left_out") if name in more}
        names = list(writers) if writers is not None else None
        self.do(file, "commit", told, txn=txn, writers=names, **more)

    def open(
        self,
        reader: str,
        mode: str,
        group: str | None = None,
        starts: str | int = "start",
        file: str = "r",
        streams: Sequence[str] = ("s/a",),
    ) -> None:
        """A reader."""
        more: dict[str, Any] = {
            "mode": mode,
            "streams": list(streams),
            "group": group,
            "starts": starts,
        }
        self.do(file, "open", reader=reader, **more)

    def poll(self, reader: str, *rows: list[Any], file: str = "r") -> None:
        """The events given to it, as `row` makes them."""
        self.do(file, "poll", {"events": list(rows)}, reader=reader)

    def log(
        self, partition: int, *rows: list[Any], stream: str = "s/a", start: int = 0, end: int = 100
    ) -> None:
        """``rows``: offset, key, id, transaction id."""
        told = {"start": start, "end": end, "events": list(rows)}
        self.do("end", "log", told, stream=stream, partition=partition)

    def commits(self, *records: list[Any], stream: str = "s/a") -> None:
        """``records``: offset, timestamp, ids, ranges."""
        self.do("end", "commits", {"records": list(records)}, stream=stream)

    def judge(self) -> Report:
        """The verdict."""
        return judge_entries(self.entries)


def row(
    name: str,
    offset: int,
    txn_id: str | None,
    timestamp: int | None = None,
    partition: int = 0,
    key: str | None = "k",
    stream: str = "s/a",
) -> list[Any]:
    """An event that a reader was given."""
    return [stream, partition, offset, key, name, txn_id, timestamp]
