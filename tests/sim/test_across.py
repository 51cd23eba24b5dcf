"""Simulated runs whose transactions have streams of two control partitions, and planted bugs that such runs find.

``python -m tests.sim.test_across`` looks for seeds anew, as each change of the simulator changes what a seed plays.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest

from anabranch.controller import durability
from anabranch.core.across import coordinator
from anabranch.protocol.schemas import records as r
from tests.mutants import rounds
from tests.mutants.catalogue import OVER
from tests.sim.simulation import Report, simulate
from tests.sim.weather import CLEAR

ACROSS: dict[str, Any] = {**CLEAR, **OVER}
Plant = Callable[[], AbstractContextManager[object]]


def run(seed: int, bug: AbstractContextManager[object] | None = None) -> Report:
    return simulate(seed, bug=bug, **ACROSS)


def _send_messages(to: Any, round_: Any, state: Any) -> None:
    wall_ms, time = int(to.clock.wall() * 1000), state.round.hybrid_time
    to.send(durability.messages_of(to.prefix, to.control_partition, round_.messages, time, wall_ms))


def m1_a_message_leaves_before_its_round_is_committed() -> AbstractContextManager[object]:
    return rounds._before_commit(_send_messages)


def c2_the_timestamp_is_a_participants() -> AbstractContextManager[object]:
    def highest(votes: dict[int, r.Vote], fresh: int) -> int:
        return max([one.timestamp for one in votes.values()], default=fresh)

    return patch.object(coordinator, "commit_timestamp", highest)


# The seed that finds each. C1 (a vote of an earlier round of votes counts) was not found in 30 seeds; the model in
# `tests/core/across` finds it.
PLANTED: dict[Plant, int] = {
    m1_a_message_leaves_before_its_round_is_committed: 0,
    c2_the_timestamp_is_a_participants: 2,
}


@pytest.mark.slow(4)
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(2, 3), id="one"),
        pytest.param(range(100), id="many", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_a_transaction_over_two_control_partitions_has_one_outcome(seeds: range) -> None:
    """One outcome and one timestamp, though controllers die, and messages are lost, late or doubled."""
    for seed in seeds:
        report = run(seed)
        assert not report.violation, str(report)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant) -> None:
    assert run(PLANTED[plant], plant()).violation


if __name__ == "__main__":
    for planted in PLANTED:
        found = next((seed for seed in range(100) if run(seed, planted()).violation), None)
        print(planted.__name__, found, flush=True)
