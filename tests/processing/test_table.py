"""The folder of a worker that was killed, after rows that were not logged."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest

from anabranch.batches.records import Record
from anabranch.errors import IllegalState, NotReady
from anabranch.ports import TopicPartition, TopicSpec
from anabranch.processing import table as table_module
from anabranch.processing.state import StateReader
from anabranch.processing.table import Mark, Table, TaskTable
from anabranch.protocol.schemas.records import TaskInfo
from anabranch.reading.committed_log import CommittedLog
from anabranch.testing.memory.log import MemoryBrokers
from tests.client.doubles import ManualClock

FIRST, SECOND = Mark("id", 1, -1, 5, 0), Mark("id", 1, 7, 9, 0)
KILLED = f"""
import os, sys
from pathlib import Path
from anabranch.processing.table import Mark, Table
table = Table(Path(sys.argv[1]))
for n in range(100):
    table.write([(0, [(b"%d" % n, b"old")])], {{0: {FIRST!r}}}, logged=False)
if sys.argv[2] == "committed":
    table.write([(0, [(b"0", b"new")])], {{0: {SECOND!r}}})
os._exit(0)
"""


@pytest.mark.parametrize("until", ["restoring", "committed"])
def test_a_mark_never_outlives_its_rows(tmp_path: Path, until: str) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), until], check=True)
    table = Table(tmp_path)
    mark = table.mark(0)
    rows = dict(table.scan(0, b"", b"\xff"))
    table.close()
    assert (mark, len(rows)) == ((None, 0) if until == "restoring" else (SECOND, 100))
    assert rows.get(b"0") in (None, b"new")


@pytest.mark.parametrize(
    ("later", "error", "why"),
    [(12, NotReady, "to its end now"), (5, IllegalState, "lacks the last commit")],
)
def test_a_restore_in_silence_asks_for_the_end_again(
    tmp_path: Path, later: int, error: type[Exception], why: str
) -> None:
    """An old leader's end, below the folder's mark, was taken for a state that lacks its last commit."""
    clock = ManualClock()
    log = MemoryBrokers(clock).log("r")
    with closing(Table(tmp_path)) as table:
        reader = StateReader(CommittedLog(log, clock), table, "nyc/p", 0)
        log.create_topics([TopicSpec(reader.topic, 1)])
        topic_id, place = (
            log.topic_ids([reader.topic])[reader.topic],
            TopicPartition(reader.topic, 0),
        )
        mark = Mark(topic_id, 0, 7, 9, int(clock.wall() * 1000))
        table.write([(0, [(b"k", b"v")])], {0: mark})
        log.cluster.produce(place, [Record(0, 0, b"k", b"v")] * 5)
        ends = iter([{place: 5}, {place: later}])
        with (
            patch.object(log, "end_offsets", lambda *_, **__: next(ends)),
            patch.object(reader._feed, "_check", None),
            pytest.raises(error, match=why),
        ):
            reader.restore({0: TaskInfo(0, 1, "h", 0, 3, b"", 0, None, (), 8)}, 60, lambda: None)


def test_a_copy_past_the_end_of_the_topic_is_deleted(tmp_path: Path) -> None:
    """The topic lost records: a standby continued after what others wrote in their place, and lacked it."""
    clock = ManualClock()
    log = MemoryBrokers(clock).log("r")
    with closing(Table(tmp_path)) as table:
        reader = StateReader(CommittedLog(log, clock), table, "nyc/p", 0)
        log.create_topics([TopicSpec(reader.topic, 1)])
        topic_id = log.topic_ids([reader.topic])[reader.topic]
        mark = Mark(topic_id, 0, 7, 9, int(clock.wall() * 1000))
        table.write([(0, [(b"k", b"v")])], {0: mark})
        reader.follow([0], clock.monotonic() + 1)
        assert not list(table.scan(0, b"", b"\xff"))


def test_rows_in_memory_are_those_of_the_folder(tmp_path: Path) -> None:
    """Looked up, written and deleted at random, with room in memory for a few rows."""
    rng, expected = random.Random(0), dict[tuple[int, bytes], bytes | None]()
    with closing(Table(tmp_path)) as table, patch.object(table_module, "_KEPT_BYTES", 2000):
        rows = TaskTable(table)
        assert rows.get(1, b"k") is None
        for step in range(3000):
            task, row = rng.randrange(2), b"%d" % rng.randrange(40)
            if rng.random() < 0.3:
                value = rng.choice((None, b"%d" % step))
                rows.write([(task, [(row, value)])], {})
                expected[task, row] = value
            assert rows.get(task, row) == expected.get((task, row))
        table.write([(1, [(b"k", b"of another owner")])], {})
        rows.forget()
        assert rows.get(1, b"k") == b"of another owner"
