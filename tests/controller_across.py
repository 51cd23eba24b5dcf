"""``python -m tests.controller_across controller …``: a controller whose transactions may span control partitions.

As long as that is not finished (`docs/inside/across.md`), no option of a product's controller allows it. Its clock
may be wrong, as that of `tests.shifted`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from anabranch.cli import app
from anabranch.controller import service
from anabranch.core.decisions.turn import Settings
from tests import shifted

if __name__ == "__main__":
    shifted.shift()
    changed: Any = service
    changed.Settings = partial(Settings, across=True)
    app()
