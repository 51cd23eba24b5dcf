"""What one-shots wait for beside transactions over two control partitions (`tests.core.across.waits`)."""

from __future__ import annotations

from tests.core.across.waits import OTHERS, OVER, figures


def test_few_one_shots_wait_for_a_decision() -> None:
    """At the participant most decisions are there when they are due (H9). Without that, it is 1.5 times."""
    (held, *_), (other, *_) = [figures(streams[1], 8, 4, 300) for streams in (OVER, OTHERS)]
    assert held <= 1.2 * other
