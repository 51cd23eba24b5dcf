"""The former release: the wheel of a commit, for processes before, or next to, those of this tree.

The wheel is built from that commit, and installed without its dependencies: those of this tree serve both. Its own
tests come with it, so `tests.workload` runs in it as it was then: what is said between processes is JSON.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from anabranch.infra.fetch import cache_root

ROOT = Path(__file__).resolve().parent.parent
# The commit that set the version of the last release. The next release's takes its place (CONTRIBUTING.md).
COMMIT = (ROOT / "tests" / "former_release.txt").read_text("utf-8").strip()
WHEEL = "site"
JUDGES = "checker", "tests"


@cache
def tree() -> Path:
    """Its folder, in the cache. Skips the test where git does not have the commit."""
    made = cache_root() / "former-releases" / COMMIT
    if made.exists():
        return made
    archive = _archive()
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        source, new = Path(folder, "source"), Path(folder, "new")
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            # Python before 3.11.4 has no such filter; the archive is git's.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(source)
        _install(source, new / WHEEL)
        for name in JUDGES:
            (source / name).rename(new / name)
        if not made.exists():
            new.rename(made)
    return made


@cache
def _compile() -> None:
    """Compile its code, once: the start of a process has a deadline."""
    done = tree() / "compiled"
    if not done.exists():
        compiles = "from anabranch.batches import columns_write, framing; columns_write.warm(); framing.warm()"
        _run("-c", compiles, environment=_paths(tree()))
        done.touch()


def _archive() -> bytes:
    asked = ["git", "-C", str(ROOT), "archive", "--format=tar", COMMIT]
    try:
        return subprocess.run(asked, capture_output=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", b"").decode().strip() or error
        pytest.skip(f"needs git, and a clone with commit {COMMIT[:8]}, whose wheel it runs: {why}")


def _install(source: Path, site: Path) -> None:
    _run("-m", "hatchling", "build", "-t", "wheel", "-d", "dist", folder=source)
    (wheel,) = (source / "dist").glob("*.whl")
    offline = "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"
    _run("-m", "pip", "install", *offline, "--target", site, wheel)


def _run(*words: str | Path, folder: Path = ROOT, environment: Mapping[str, str] = {}) -> None:
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=os.environ | dict(environment),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def environment(*, compiled: bool = True) -> dict[str, str]:
    """Of a process that imports from it. Modules of tests that it lacks are those of this tree.

    ``compiled``: whether the process runs compiled code.
    """
    if compiled:
        _compile()
    return _paths(tree())


def _paths(folder: Path) -> dict[str, str]:
    # Safe path: the process must not import from the folder that it starts in.
    paths = map(str, (folder / WHEEL, folder, ROOT))
    return {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
