"""The notebooks of docs/notebooks, each in a kernel of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.cli.cluster import child_environment
from tests.cluster import Cluster
from tests.pages import DOCS

pytestmark = [pytest.mark.broker, pytest.mark.unsecured]
# In a process of its own: nbclient's loops and sockets outlive it, which this suite takes for an error.
RUN = """
import sys, nbformat, nbclient
nbclient.NotebookClient(nbformat.read(sys.argv[1], as_version=4), timeout=100).execute()
"""


@pytest.mark.soak
@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run(path: Path, cluster: Cluster, tmp_path: Path) -> None:
    environment = child_environment({"ANABRANCH_BOOTSTRAP": cluster.bootstrap})
    done = subprocess.run(
        [sys.executable, "-c", RUN, path],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=115,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_they_are_kept_without_outputs() -> None:
    for path in DOCS.rglob("*.ipynb"):
        assert '"output_type"' not in path.read_text()
