"""What simulation has found, each as a short play of its own: a seed means something else after every change."""

from __future__ import annotations

import pytest

from anabranch.ports import LogFenced
from anabranch.processors.memory_table import MemoryStore
from anabranch.schemas import records as r
from tests.processors.world import World
from tests.sim.simulation import simulate


def test_what_a_zombie_read_of_the_journals_is_read_again() -> None:
    """A leader that is fenced, and does not know it yet, goes on reading journals with an old state.

    It takes the writes of newer transactions for strangers'. When it leads again it must read them again, or
    these can never be committed.
    """
    world = World()
    zombie = world.controller("zombie", store=MemoryStore())
    zombie.lead()
    world.stream(zombie, "nyc/a", segments=1)
    successor = world.controller("successor")
    successor.lead()
    txn_id = world.txn_id()
    begun = world.ask(successor, r.Begin(txn_id, "nyc", None, 60_000))
    touched = world.ask(successor, r.Touch(begun.token, "nyc/a"))
    receipt = world.write(txn_id, 1, "nyc/a", touched.segments, [(b"k", b"v")])
    with pytest.raises(LogFenced):
        zombie.step(0)  # it reads commands and journals; only its round is refused
    zombie.lead()
    outcome = world.ask(zombie, r.Commit(begun.token, (receipt,), (), None, 1000))
    assert isinstance(outcome, r.Outcome), outcome
    assert (outcome.state, outcome.committed) == ("COMMITTED", 1)


def test_merges_fit_into_the_batches_that_their_streams_take() -> None:
    """A decided transaction was aborted, because what its merge put together was refused as too large."""
    for seed in range(15):
        report = simulate(seed, tight=True)
        assert not report.violation, str(report)
