"""The site's own steps (`mkdocs.yml`): README.md is its first page, links that leave docs/ become text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\((?:\.\./)+(?!docs/)[^)#]*(?:#[^)]*)?\)")
_NO_PAGE = re.compile(r"(?<!!)\[([^\]]+)\]\((?!docs/|https?:|#)[^)]+\)")


def on_files(files: Files, config: Any) -> Files:
    """README.md as the page that the site begins with."""
    text = _NO_PAGE.sub(r"\1", (ROOT / "README.md").read_text(encoding="utf-8"))
    text = text.replace("](docs/decisions)", "](decisions/0001-ids-by-clients.md)")
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/ as text: what they lead to is no part of the site."""
    depth = page.file.src_uri.count("/") + 1

    def link(match: re.Match[str]) -> str:
        return match[1] if match[0].count("../") >= depth else match[0]

    return _OUTSIDE.sub(link, markdown)
