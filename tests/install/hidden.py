"""Packages that a process can't import, as if they were not installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

_HIDE = """
import sys
class Hider:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hider())
"""


def run_without(packages: Iterable[str], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that lacks these packages."""
    text = _HIDE.format(packages=set(packages)) + code
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=100, check=False
    )
