"""Pages and notebooks that people learn from, run block by block against a real broker and controller."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from anabranch.cli.cluster import child_environment
from tests.cluster import Cluster
from tests.pages import DOCS, ROOT, blocks, run_page

pytestmark = pytest.mark.broker

# What has to be printed, besides what the page itself shows.
CALLS = {
    "README.md": ["N14228", "N24211"],
    "docs/tour.md": ["b'5'"],
    "docs/values.md": ["ann 3"],
    "docs/client.md": ["done before:", "b'ann' b'3 apples'"],
    "docs/asyncio.md": ["b'N14228' b'landed'", "committed: 100", "seats left: b'97'", "1 event is"],
}
QUICK = ["docs/tutorial.md"]
COMMANDS = [*QUICK, "docs/testing.md", "docs/concepts.md"]
COMMANDS += [f"docs/how-to/{path.name}" for path in sorted((DOCS / "how-to").glob("*.md"))]
# Blocks that are no code, and what else a page may show.
KINDS = {
    "python",
    "py",
    "console",
    "",
    "text",
    "mermaid",
    "properties",
    "dockerfile",
    "yaml",
    "toml",
    "sql",
}
KINDS |= {"java"}  # programs of other systems


@pytest.mark.parametrize("name", CALLS)
def test_calls_run(
    name: str, cluster: Cluster, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_page(ROOT / name, cluster.bootstrap, tmp_path, {"bootstrap": cluster.bootstrap})
    printed = capsys.readouterr().out
    assert [text for text in CALLS[name] if text not in printed] == []


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    """All pages of commands run in CI's turns, the first of them in each run."""
    return [] if name in QUICK else [pytest.mark.long]


@pytest.mark.unsecured
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=marks_of(name)) for name in COMMANDS],
)
def test_commands_run(
    name: str, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An installation names the plugin by its entry point; this tree may be newer.
    monkeypatch.setenv("PYTEST_PLUGINS", "anabranch.testing.pytest_plugin")
    run_page(ROOT / name, cluster.bootstrap, tmp_path, {"bootstrap": cluster.bootstrap})


@pytest.mark.parametrize("name", [*CALLS, *COMMANDS])
def test_no_block_is_left_out_by_its_name(name: str) -> None:
    assert {block.kind for block in blocks(ROOT / name)} <= KINDS


def test_a_block_that_fails_is_an_error(cluster: Cluster, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for text in ("$ false", "$ echo one\ntwo", "$ echo one; exit 3", "$ cat no-file"):
        page.write_text(f"```console\n{text}\n```\n")
        with pytest.raises(AssertionError, match=r"\$ "):
            run_page(page, cluster.bootstrap, tmp_path, {})
    name = uuid.uuid4().hex
    page.write_text(
        f'```python title="a.py"\nprint("{name}")\n```\n```console\n$ python a.py\n{name[:9]}…\n```\n'
    )
    run_page(page, cluster.bootstrap, tmp_path, {})


# In a process of its own: nbclient's loops and sockets outlive it, which this suite takes for an error.
RUN = """
import sys, nbformat, nbclient
nbclient.NotebookClient(nbformat.read(sys.argv[1], as_version=4), timeout=100).execute()
"""


@pytest.mark.soak
@pytest.mark.unsecured
@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run(path: Path, cluster: Cluster, tmp_path: Path) -> None:
    environment = child_environment({"ANABRANCH_BOOTSTRAP": cluster.bootstrap})
    done = subprocess.run(
        [sys.executable, "-c", RUN, path],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=115,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_notebooks_are_kept_without_outputs() -> None:
    for path in DOCS.rglob("*.ipynb"):
        assert '"output_type"' not in path.read_text()
