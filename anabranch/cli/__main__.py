"""``python -m anabranch.cli``: the command line without an installed script."""

from __future__ import annotations

from anabranch.cli import app

if __name__ == "__main__":
    app()
