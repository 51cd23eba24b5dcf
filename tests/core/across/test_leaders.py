"""Transactions over control partitions, by the leaders' real decisions; messages are passed by hand."""

from __future__ import annotations

import pytest

from anabranch.protocol.schemas import records as r
from tests.core.across.leaders import Leaders, losing


def assert_committed_once(leaders: Leaders, *streams: str) -> None:
    """Each stream has transaction A once, all at one timestamp."""
    merges = leaders.merges()
    assert sorted(merges) == sorted(streams)
    times = {at for its in merges.values() for _, at in its}
    assert [len(its) for its in merges.values()] == [1] * len(streams)
    assert len(times) == 1


def test_one_transaction_over_two_control_partitions() -> None:
    leaders = Leaders()
    leaders.begin()
    leaders.seen.clear()
    assert leaders.commit() == ""
    assert leaders.settle() == "[commit A] A COMMITTED 2"
    assert leaders.seen == [
        "0>1 AskVote TIMESTAMP 1", "1>0 Vote YES 1 at p", "0>1 Decide COMMIT", "1>0 Done",
    ]  # fmt: skip
    assert_committed_once(leaders, "nyc/a", "ber/a")
    assert leaders.states() == ["COMMITTED", "COMMITTED"]
