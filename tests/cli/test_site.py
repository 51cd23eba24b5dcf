"""The site of docs/: it builds without a warning, and loads nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import DOCS, ROOT

_LOADED = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=[\"']?(https?://|//)", re.I
)


@pytest.mark.soak
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {
        path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")
    }
    assert [name for name, text in pages.items() if _LOADED.search(text)] == []
    assert "receipts=[writer.finish()]" in re.sub("<[^>]+>", "", pages["index.html"])
    for name in (
        "Client.begin",
        "Transaction.commit",
        "Writer.finish",
        "TableTransaction.insert",
        "errors.OutcomeUnknown",
        "types.Event",
    ):
        assert (
            f'id="anabranch.{name}"' in pages["reference/index.html"]
            or f'.{name}"' in pages["reference/index.html"]
        )
    for path in DOCS.glob("*.md"):
        assert path.stem in ("index",) or f"{path.stem}/index.html" in pages, path
    assert 'id="anabranchcore"' in pages["inside/house/index.html"]
    assert "FINALIZE_IN_PROGRESS --&gt; COMMITTED" in pages["inside/states/index.html"]
    assert "<td>answer before the commit</td>" in pages["inside/mutants/index.html"]
