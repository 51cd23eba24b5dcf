"""The readme of wheel and sdist: README.md, its links and pictures made absolute.

An index shows nothing by a relative path. The repository's address is ``$ANABRANCH_REPOSITORY`` in a build; without
one, pictures are left out, and links become their text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)]+)\)")


def readme(text: str, repository: str | None, version: str) -> str:
    """The readme's text for an index."""

    def absolute(found: re.Match[str]) -> str:
        picture, label, path = found.groups()
        if repository is None:
            return "" if picture else label
        kind = "raw" if picture else "blob"
        return f"{picture}[{label}]({repository.rstrip('/')}/{kind}/v{version}/{path})"

    return _LINK.sub(absolute, text)


class CustomMetadataHook(MetadataHookInterface):
    """Hatchling's hook."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the readme in."""
        text = Path(self.root, "README.md").read_text("utf-8")
        repository = os.environ.get("ANABRANCH_REPOSITORY") or None
        metadata["urls"] = {"Repository": repository} if repository else {}
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": readme(text, repository, metadata["version"]),
        }
