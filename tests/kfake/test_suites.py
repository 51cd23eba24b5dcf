"""The suites over kfake: what it lacks is listed with reasons, and a given cluster is for one worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import need_go
from tests.kfake.kinds import KINDS
from tests.kfake.lacks import lacks

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
        cwd=ROOT,
    )


@pytest.mark.long
def test_each_lack_is_a_test() -> None:
    names = {f"tests/{name}" for kind in KINDS.values() for name in lacks(kind)}
    files = sorted({name.partition("::")[0] for name in names})
    found = run("--collect-only", "-m", "", *files).stdout.splitlines()
    assert names <= set(found)


def test_workers_do_not_share_a_given_cluster() -> None:
    ended = run("-n2", "--bootstrap", "localhost:1", "tests/contract/test_send.py")
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR, ended.stdout
    assert "one cluster is for one worker" in ended.stderr


@pytest.mark.soak
@pytest.mark.broker
@pytest.mark.slow(120)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("suite", "kind"),
    [
        ("contract", "nothing missing"),
        ("contract", "Redpanda before 25.3, 1 broker"),
        ("contract", "WarpStream"),
        ("behaviour", "WarpStream"),
    ],
)
def test_suites_over_kfake(suite: str, kind: str) -> None:
    need_go()
    marks = "broker and not soak and not long"
    ended = run("-m", marks, "--kfake", kind, "-p", "no:xdist", f"tests/{suite}")
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert " passed" in ended.stdout
