"""Which inputs a cut may take from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.reading.task_reader import TaskReader


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_input_that_is_filled_by_a_look_at_another_counts(order: tuple[int, int]) -> None:
    """Else a newer record of the other would be taken before its own: a cut would tear a transaction of both."""
    late: Any = SimpleNamespace(feed=SimpleNamespace(records=[]))
    early: Any = SimpleNamespace(feed=SimpleNamespace(records=[7]))

    class Reader(TaskReader):
        def __init__(self) -> None:
            self._inputs = [(late, early)[each] for each in order]

        def __del__(self) -> None:
            pass

        def _is_complete(self, one: Any, until: float) -> bool:
            late.feed.records[:] = [3, 7]
            return True

    ready = Reader()._ready(0.0)
    assert min(ready, key=lambda one: one.feed.records[0]) is late
