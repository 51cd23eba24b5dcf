"""The folder of a worker that was killed, after rows that were not logged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.ports import TopicSpec
from anabranch.processing.state import StateReader
from anabranch.processing.table import Mark, Table
from anabranch.reading.committed_log import CommittedLog
from tests.client.doubles import ManualClock
from tests.memory.log import MemoryCluster

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


@pytest.mark.parametrize("has_id", [True, False])
def test_an_old_leader_s_end_keeps_the_folder(tmp_path: Path, has_id: bool) -> None:
    """The end lies below what the rows were read from. Another topic, which has no id, is thrown away."""
    clock = ManualClock()
    log = MemoryCluster(clock).log("r")
    table = Table(tmp_path)
    reader = StateReader(CommittedLog(log, clock), table, "nyc/p", 0)
    log.create_topics([TopicSpec(reader.topic, 1)])
    topic_id = log.topic_ids([reader.topic])[reader.topic] if has_id else ""
    reader._topic_id = topic_id
    mark = Mark(topic_id, 0, 7, 9, int(clock.wall() * 1000))
    table.write([(0, [(b"k", b"v")])], {0: mark})
    reader.follow([0], clock.monotonic() + 1)
    kept = list(table.scan(0, b"", b"\xff"))
    table.close()
    assert kept == [(b"k", b"v")] * has_id
