"""The folder of a worker that was killed, after rows that were not logged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.processing.table import Mark, Table

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
