"""The examples of docs/client.md, in order, against a real broker and controller."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster

pytestmark = pytest.mark.broker

PAGE = Path(__file__).parents[2] / "docs" / "client.md"


def test_the_examples_of_the_page_run(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(examples) >= 10
    names: dict[str, Any] = {"bootstrap": cluster.bootstrap}
    for number, example in enumerate(examples):
        exec(compile(example, f"docs/client.md, example {number}", "exec"), names)  # noqa: S102
    printed = capsys.readouterr().out
    assert "done before:" in printed
    assert "b'ann' b'3 apples'" in printed
    assert len(printed.splitlines()) > 1000
