"""Every kind of hostile command once, under load; `scripts/hostile` goes on for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.behaviour.attacks import ATTACKS
from tests.behaviour.hostile import run
from tests.cluster import start_cluster
from tests.conftest import Broker

pytestmark = pytest.mark.broker


@pytest.mark.soak
def test_others_are_served(broker: Broker, unique: str, tmp_path: Path) -> None:
    """No leader restarts, no commit is slow, and memory stays level."""
    cluster = start_cluster(broker.bootstrap, tmp_path, f"p{unique}")
    try:
        seen = run(cluster, 5.0, seed=7, each=500)
    finally:
        cluster.controller.kill()
    assert seen.problems == []
    assert seen.commands >= 500 * (len(ATTACKS) - 1)
