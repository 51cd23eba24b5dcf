"""The site's own steps (`mkdocs.yml`): README.md is its first page, links that leave docs/ become text.

Pages that follow from the code alone are made here, and are not in the tree. Diagrams are drawn if `scripts/docs`
has fetched what draws them.
"""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pymdownx.superfences import fence_code_format

ROOT = Path(__file__).parents[1]
_DRAWS = Path(sys.prefix) / "share" / "mermaid.min.js"
# Page of the site -> the command that prints it.
_MADE = {"inside/house.md": ["scripts/draw-house"], "inside/states.md": ["scripts/draw-states"]}
_OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\((?:\.\./)+(?!docs/)[^)#]*(?:#[^)]*)?\)")
_NO_PAGE = re.compile(r"(?<!!)\[([^\]]+)\]\((?!docs/|https?:|#)[^)]+\)")


def on_startup(*, command: str, **_: Any) -> None:
    """Build without the collector, which would take a third of the time: what is read stays to the end."""
    if command == "build":
        gc.disable()


def on_config(config: Any) -> Any:
    """Blocks of mermaid for the library, which the site brings along: pages load nothing from elsewhere."""
    if _DRAWS.exists():
        config.extra_javascript.append(_DRAWS.name)
        fence = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
        config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    return config


def on_files(files: Files, config: Any) -> Files:
    """README.md as the page that the site begins with, and the pages that commands print."""
    text = _NO_PAGE.sub(r"\1", (ROOT / "README.md").read_text(encoding="utf-8"))
    text = text.replace("](docs/inside/decisions)", "](inside/decisions/0001-ids-by-clients.md)")
    if _DRAWS.exists():
        files.append(File.generated(config, _DRAWS.name, abs_src_path=str(_DRAWS)))
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    for name, command in _MADE.items():
        files.append(File.generated(config, name, content=_printed(*command)))
    return files


@cache
def _printed(*command: str) -> str:
    """What a command of this tree prints."""
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/ as text: what they lead to is no part of the site. The search shows pages for users first."""
    if page.file.src_uri.startswith("inside/"):
        page.meta.setdefault("search", {"boost": 0.2})
    depth = page.file.src_uri.count("/") + 1

    def link(match: re.Match[str]) -> str:
        return match[1] if match[0].count("../") >= depth else match[0]

    return _OUTSIDE.sub(link, markdown)
