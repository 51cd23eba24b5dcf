"""Every kind of hostile command once, under load; `scripts/hostile` goes on for longer."""

from __future__ import annotations

import pytest

from tests.behaviour.attacks import ATTACKS
from tests.behaviour.hostile import run
from tests.cluster import Cluster

pytestmark = pytest.mark.broker


@pytest.mark.soak
@pytest.mark.parametrize("own_cluster", [()], indirect=True)
def test_hostile_commands_stop_no_other_client(own_cluster: Cluster) -> None:
    """No leader restarts, no commit is slow, and memory stays level."""
    seen = run(own_cluster, 5.0, seed=7, each=500)
    assert seen.problems == []
    assert seen.commands >= 500 * (len(ATTACKS) - 1)
