"""An older build of the product: the tree of a commit, for processes before, or next to, those of this tree.

Its own tests come with it, so `tests.workload` runs in it as it was then: what is said between processes is JSON.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest

from anabranch.infra.fetch import cache_root

ROOT = Path(__file__).resolve().parent.parent
# The last one whose rounds do not overlap. Before the first release a format may change in place
# (docs/how-to/upgrading.md): then the first commit that has the new one takes its place.
COMMIT = "aa73f38d99978c10fafc8db2f11bede6026bcdc6"
PARTS = "anabranch", "checker", "tests"


@cache
def tree() -> Path:
    """Its folder, in the cache. Skips the test where git does not have the commit."""
    unpacked = cache_root() / "older-builds" / COMMIT
    if unpacked.exists():
        return unpacked
    archive = _archive()
    unpacked.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=unpacked.parent) as folder:
        made = Path(folder, COMMIT)
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(made, filter="data")
        if not unpacked.exists():
            made.rename(unpacked)
    # Its code is compiled here: the start of a process has a deadline.
    compiles = (
        "from anabranch.batches import columns_write, framing; columns_write.warm(); framing.warm()"
    )
    subprocess.run([sys.executable, "-c", compiles], env=os.environ | _paths(unpacked), check=True)
    return unpacked


def _archive() -> bytes:
    asked = ["git", "-C", str(ROOT), "archive", "--format=tar", COMMIT, *PARTS]
    try:
        return subprocess.run(asked, capture_output=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", b"").decode().strip() or error
        pytest.skip(f"needs git, and a clone with commit {COMMIT[:8]}, whose code it runs: {why}")


def environment() -> dict[str, str]:
    """Of a process that imports from it. Modules of tests that it lacks are those of this tree."""
    return _paths(tree())


def _paths(folder: Path) -> dict[str, str]:
    # Safe path: the process must not import from the folder that it starts in.
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTHONSAFEPATH": "1"}
