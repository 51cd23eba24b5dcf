"""What one-shots wait for beside transactions over two control partitions (`tests.core.across.waits`)."""

from __future__ import annotations

from tests.core.across.waits import OTHERS, OVER, figures


def test_few_one_shots_wait_for_a_decision() -> None:
    """At the coordinator nothing is held. At the participant most decisions are there when they are due (H9)."""
    for stream, other, most in zip(OVER, OTHERS, (1.01, 1.3), strict=True):
        (mine, _), (theirs, _) = [figures(one, 8, 8, 500) for one in (stream, other)]
        assert mine <= most * theirs, stream
