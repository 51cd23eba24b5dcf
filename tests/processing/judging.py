"""What a trial of a processor left: its outputs, its state in the log, and its workers' folders.

All of it is compared with a fold of the input. No history has that: it depends on what the processor computes.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anabranch
from anabranch.batches.records import decode_records
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicPartition
from anabranch.processing.table import Table
from anabranch.protocol.legal_names import state_stream
from anabranch.protocol.schemas.records import ProcessorInfo
from anabranch.reading.store_lookup import FIRST_STORE
from anabranch.topics.names import stream_topic
from tests.processing.program import CUT_BYTES, TASKS, Fold, task_of
from tests.processing.writing import Writing

Seen = tuple[float, anabranch.Event]  # by the monotonic clock

_NUMBERS = 2  # bytes of an incarnation, and of a store's number
_EVENT_BYTES = 150  # of an input's event, at least, as a reader counts


class Found:
    """What is there after a trial."""

    def __init__(
        self, writing: Writing, seen: Iterable[Seen], info: ProcessorInfo, folders: Iterable[Path]
    ) -> None:
        """``folders``: of workers that have ended."""
        self.writing = writing
        self.seen = list(seen)
        self.info = info
        self.folders = list(folders)

    def told(self) -> str:
        """For people."""
        writing, commits = self.writing, len({event.txn_id for _, event in self.seen})
        done = ", ".join(f"{count} {what}" for what, count in sorted(writing.done.items()))
        return (
            f"{writing.written:,} events in {len(writing.committed):,} transactions, {len(self.seen):,} outputs in "
            f"{commits:,} commits; {done}; seed {writing.seed}"
        )

    def check(self) -> None:
        """All of it is a fold of what was written. Raises: AssertionError."""
        fold = self.writing.fold()
        out, times, late = (self._of(name) for name in ("out", "times", "late"))
        for key in fold.out.keys() | out.keys():
            _same("outputs", key, out.get(key, []), fold.out.get(key, []))
        for key in fold.times.keys() | times.keys():
            _same("times", key, times.get(key, []), fold.times.get(key, []))
        found = Counter((key, row["n"]) for key, rows in late.items() for row in rows)
        assert found == Counter(fold.late), "late events"
        self._check_whole()
        self._check_state(fold)

    def check_tables(self, client: anabranch.Client) -> None:
        """The table that all tasks add to, and what was joined, are a fold, too. Raises: AssertionError."""
        fold = self.writing.joined()
        joined = [row for rows in self._of("joined").values() for row in rows]
        assert len(joined) == len(fold.joined), f"{len(joined)} joined of {len(fold.joined)}"
        wrong = [row for row in joined if fold.joined.get(row[0]) != row[1]]
        assert not wrong, f"{len(wrong)} events have another commit's rate: {wrong[:5]}"
        table = f"{self.writing.scope}/groups"
        values: dict[bytes, int] = {}
        for event in client.snapshot(table).read(table):
            value = int(event.value or b"0")
            assert value >= values.get(event.key or b"", 0), f"{event.key!r} went back to {value}"
            values[event.key or b""] = value
        assert values == fold.groups, "the table of all tasks"

    def _of(self, name: str) -> dict[bytes, list[Any]]:
        stream = f"{self.writing.scope}/{name}"
        found: dict[bytes, list[Any]] = defaultdict(list)
        for _, event in self.seen:
            if event.stream == stream:
                found[event.key or b""].append(json.loads(event.value or b""))
        return found

    def _check_whole(self) -> None:
        """A task's outputs of one input transaction are of one commit, unless that one is big."""
        commits: dict[int, bytes | None] = {}
        for _, event in self.seen:
            if event.stream.endswith("/out"):
                commits[json.loads(event.value or b"")[-1]] = event.txn_id
        whole = 0
        for _, given in self.writing.committed:
            if len(given) * _EVENT_BYTES > CUT_BYTES:
                continue
            by_task: dict[int, set[bytes | None]] = defaultdict(set)
            for one in given:
                by_task[task_of(one.key)].add(commits[one.number])
            torn = {task: len(some) for task, some in by_task.items() if len(some) > 1}
            assert not torn, f"a transaction of {len(given)} events is torn, by task: {torn}"
            whole += 1
        assert whole

    def _check_state(self, fold: Fold) -> None:
        """The rows in the log are those of the fold; those in folders, where they say so, the same."""
        state = self._state()
        stores = {name: FIRST_STORE + n for n, name in enumerate(self.info.stores)}
        rows = {row: value for some in state.values() for row, value in some.items()}

        def of(name: str) -> dict[bytes, bytes]:
            prefix = stores[name].to_bytes(_NUMBERS, "big")
            return {row[_NUMBERS:]: v for row, v in rows.items() if row.startswith(prefix)}

        assert {k: json.loads(v) for k, v in of("sums").items()} == fold.sums
        spans = {
            (k[8:], int.from_bytes(k[:8], "big")): json.loads(v) for k, v in of("spans").items()
        }
        assert spans == fold.spans
        assert {k: int.from_bytes(v, "big") for k, v in of("quiet").items()} == fold.timers
        sequences = {task.task: task.state_sequence for task in self.info.tasks}
        fresh = 0
        for folder in self.folders:
            table = Table(folder)
            for task in range(TASKS):
                mark = table.mark(task)
                if mark is not None and mark.sequence == sequences[task]:
                    assert dict(table.scan(task, b"", b"\xff\xff\xff")) == state[task], (
                        f"folder, {task}"
                    )
                    fresh += 1
            table.close()
        assert fresh >= TASKS

    def _state(self) -> dict[int, dict[bytes, bytes]]:
        """Task -> its rows, by the state's topic."""
        topic = stream_topic(state_stream(self.info.processor))
        prefix = self.info.incarnation.to_bytes(_NUMBERS, "big")
        head = prefix + bytes(_NUMBERS)
        found: dict[int, dict[bytes, bytes]] = defaultdict(dict)
        log = KafkaLog(self.writing.bootstrap)
        places = [TopicPartition(topic, task) for task in range(TASKS)]
        ends, at = log.end_offsets(places, committed=True), dict.fromkeys(places, 0)
        while at:
            answer = log.fetch(at, max_wait=0.5, max_bytes=8 << 20, committed=True)
            for place, fetched in answer.items():
                for batch in fetched.batches:
                    for record in decode_records(batch.data):
                        if record.key is None or record.key == head:
                            continue
                        rows = found[place.partition]
                        assert record.key.startswith(prefix)
                        if record.value is None:
                            rows.pop(record.key[_NUMBERS:], None)
                        else:
                            rows[record.key[_NUMBERS:]] = record.value
                at[place] = fetched.next_offset
            at = {place: offset for place, offset in at.items() if offset < ends[place]}
        log.close()
        return found


def _same(what: str, key: bytes, found: list[Any], wanted: list[Any]) -> None:
    if found == wanted:
        return
    first = next(
        (i for i, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]),
        min(len(found), len(wanted)),
    )
    raise AssertionError(
        f"{what} of {key!r}: {len(found)} instead of {len(wanted)}; from {first} on {found[first : first + 4]} "
        f"instead of {wanted[first : first + 4]}"
    )
