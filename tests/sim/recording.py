"""What a run did and saw, in the format of `docs/inside/checker.md`; the clock is virtual time."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from anabranch.batches.records import Record
from anabranch.protocol.ids import NO_TXN, VERSION_HEADER, unpack_version
from checker import Report, judge_entries
from checker.recorder import SUFFIX, Recorder
from tests.sim.picture import Placed, Seen
from tests.sim.world import World

Part = tuple[
    str, int, int, int, Sequence[Placed]
]  # stream, partition, start and end offset, events
FINAL = "final"  # the history of what the log holds at the end


class MemoryRecorder(Recorder):
    """See `Recorder`; its entries stay in memory."""

    def __init__(self, history: History) -> None:
        self._clock = history.clock
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self.entries: list[dict[str, Any]] = []

    def close(self) -> None:
        """Nothing is to be closed."""

    def _put(self, entry: dict[str, Any]) -> None:
        self.entries.append({"at": self._clock(), **entry})


class History:
    """All of a run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._last = 0
        self.of: dict[str, MemoryRecorder] = {}  # by process

    def clock(self) -> int:
        """Virtual nanoseconds; no two are the same."""
        self._last = max(self._last + 1, int(self._world.now * 1e9))
        return self._last

    @property
    def here(self) -> MemoryRecorder:
        """The recorder of the process that runs."""
        return self.named(self._world.running_name)

    def named(self, name: str) -> MemoryRecorder:
        """The recorder of a process."""
        if name not in self.of:
            self.of[name] = MemoryRecorder(self)
        return self.of[name]

    def write(self, folder: Path) -> None:
        """As files, for ``python -m checker``."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, recorder in self.of.items():
            lines = [json.dumps(entry) + "\n" for entry in recorder.entries]
            (folder / f"{name}{SUFFIX}").write_text("".join(lines))

    def judged(self) -> Report:
        """The checker's verdict."""
        return judge_entries(
            (name, number, entry)
            for name, recorder in self.of.items()
            for number, entry in enumerate(recorder.entries, 1)
        )

    def read_log(
        self,
        parts: Iterable[Part],
        histories: Mapping[str, tuple[int, Sequence[tuple[Seen, Any]]]],
        tables: Sequence[str] = (),
        derived: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """The last readings. ``histories``: of each stream the start offset and the records.

        ``derived``: the types of derived tables.
        """
        final = self.named(FINAL)
        for stream, partition, start, end, placed in parts:
            named = whole if stream in derived else in_table if stream in tables else in_stream
            events = [
                [
                    event.offset,
                    *named(event.record),
                    None if event.txn_id == NO_TXN else event.txn_id.hex(),
                    *([version_of(event.record)] if derived.get(stream) == "asynchronous" else []),
                ]
                for event in placed
                if event.offset >= start  # the rest is deleted
            ]
            more = {"table": True} if stream in tables else {}
            with final.asking("log", stream=stream, partition=partition, **more) as told:
                told |= {"start": start, "end": end, "events": events}
        for stream, (first, found) in histories.items():
            records = []
            for seen, record in found:
                if hasattr(record, "txn_id") and seen.record.offset >= first:
                    ids = [] if record.txn_id == NO_TXN else [record.txn_id.hex()]
                    ranges = [[p.partition, p.first, p.end] for p in record.segments]
                    records.append([seen.record.offset, record.timestamp, ids, ranges])
            with final.asking("commits", stream=stream) as told:
                told |= {"start": first, "records": records}


def in_stream(record: Record) -> tuple[str | None, str]:
    """Key and id of an event."""
    return text(record.key), event_id(record.value)


def in_table(record: Record) -> tuple[str | None, str | None]:
    """Key and id of a row; the id of a deletion is None."""
    return text(record.key), None if record.value is None else event_id(record.value)


def whole(record: Record) -> tuple[str, str | None]:
    """Key and row of an entry of a derived table, whose order of texts is that of bytes."""
    row = record.value
    return (record.key or b"").decode("latin-1"), None if row is None else row.decode("latin-1")


def version_of(record: Record) -> int | None:
    """The commit of the source that an entry is of; None for a row that is no entry."""
    packed = dict(record.headers).get(VERSION_HEADER)
    return None if packed is None else unpack_version(packed)[0]


def text(key: bytes | None) -> str | None:
    """A key, as histories have it."""
    return None if key is None else key.decode()


def event_id(value: bytes | None) -> str:
    """An event's id, by its value."""
    return (value or b"").decode(errors="replace").partition(" ")[0]
