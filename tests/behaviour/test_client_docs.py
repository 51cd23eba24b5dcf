"""The examples of docs/client.md and README.md, in order, against a real broker and controller."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster

pytestmark = pytest.mark.broker

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "client.md"
README = ROOT / "README.md"


def test_the_examples_of_the_page_run(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    examples = _examples(PAGE)
    assert len(examples) >= 10
    names: dict[str, Any] = {"bootstrap": cluster.bootstrap}
    for number, example in enumerate(examples):
        exec(compile(example, f"docs/client.md, example {number}", "exec"), names)  # noqa: S102
    printed = capsys.readouterr().out
    assert "done before:" in printed
    assert "b'ann' b'3 apples'" in printed
    assert len(printed.splitlines()) > 1000


def test_the_examples_of_the_readme_run(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """But for those that need a session of Spark, which tests/spark has."""
    examples = [x for x in _examples(README) if "spark" not in x]
    assert examples
    for number, example in enumerate(examples):
        code = example.replace("localhost:9092", cluster.bootstrap)
        code = code.replace("shop.db", str(tmp_path / "shop.db"))
        exec(compile(code, f"README.md, example {number}", "exec"), {})  # noqa: S102
    printed = capsys.readouterr().out
    assert "N14228" in printed
    assert "N24211" in printed


def _examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
