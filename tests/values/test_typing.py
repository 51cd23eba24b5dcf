"""Types reach the reader: mypy and pyright agree with each `assert_type`, and refuse each line marked WRONG."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("typed.py")
ROOT = FILE.parents[2]
WRONG = {i for i, line in enumerate(FILE.read_text().splitlines(), 1) if line.endswith("# WRONG")}


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "checker",
    [["mypy", "--strict"], ["pyright", "--pythonpath", sys.executable]],
    ids=lambda given: given[0],
)
def test_only_the_wrong_lines_are_refused(checker: list[str]) -> None:
    command = [sys.executable, "-m", *checker, str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    found = re.findall(r"typed\.py:(\d+):.*error", done.stdout)
    assert {int(line) for line in found} == WRONG, done.stdout + done.stderr
