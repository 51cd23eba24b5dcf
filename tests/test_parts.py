"""Parts of the long tests: each commit runs one, and a few commits run all."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys

import pytest

from tests.conftest import TOGETHER, share
from tests.parts import MINUTES, ROOT, number_of, shared, turns

# Seconds of files, as tests that take minutes have them.
SECONDS = {f"tests/a/test_{n}.py": 40.0 + 37 * n % 400 for n in range(15)}
HALF = MINUTES * 30


def commit(number: int) -> str:
    return hashlib.sha1(b"%d" % number, usedforsecurity=False).hexdigest()


def long_list(*arguments: str) -> list[str]:
    """The lines of `scripts/long --list`."""
    words = [sys.executable, "-m", "tests.parts", "--list", *arguments]
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_a_few_commits_run_every_file() -> None:
    parts = turns(SECONDS, HALF)
    assert len(parts) > 3
    ran: set[str] = set()
    for number in range(5 * len(parts)):
        ran.update(parts[number_of(commit(number), len(parts))])
    assert ran == SECONDS.keys()


def test_each_file_is_in_one_part_and_no_part_takes_too_long() -> None:
    parts = turns(SECONDS, HALF)
    assert sorted(file for part in parts for file in part) == sorted(SECONDS)
    assert max(sum(SECONDS[file] for file in part) for part in parts) <= HALF
    assert turns({"one": 3 * HALF, "other": 1.0}, HALF) == [["one"], ["other"]]
    assert turns({}, HALF) == []


def test_the_longest_file_comes_first_and_goes_where_least_is() -> None:
    seconds = {"a": 1.0, "b": 5.0, "c": 3.0, "d": 3.0}
    assert shared(seconds, 2) == [["b", "a"], ["c", "d"]]
    assert shared(seconds, 3, first=("a", "c", "d"), among=2) == [["c", "a"], ["d"], ["b"]]
    assert shared(seconds, 1, first=("c",), among=1) == [["c", "b", "d", "a"]]


def test_each_file_is_collected_by_one_worker() -> None:
    shares = [share(number, 4) for number in range(4)]
    files = [file for one in shares for file in one]
    assert sorted(files) == sorted(
        path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/test_*.py")
    )
    for folder in TOGETHER:
        assert sum(any(file.startswith(folder) for file in one) for one in shares) == 1


def test_parts_of_this_tree_have_all_its_long_files_and_one_is_chosen() -> None:
    listed = long_list("--turn", commit(1))
    files = {line.split()[0] for line in listed if line.startswith("  ")}
    assert "tests/install/test_wheel.py" in files
    assert len([line for line in listed if line.endswith("the chosen one:")]) == 1
    assert f"--turn {commit(1)[:8]}" in listed[-1]
    assert long_list("--turn", commit(1)) == listed


def test_a_turn_is_a_commit() -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        long_list("--turn", "no-such-branch")
    assert re.search(r"--turn: fatal: ", refused.value.stderr)
