"""The broker that leads the status log is lost between two rounds that overlap; clients' outcomes stay true.

A leader is frozen where its append or end is sent and not answered yet. Then the broker is killed, and the leader
goes on: it has to find the next leader of the partition, and whether its round has happened.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

import pytest

from anabranch.infra.cluster import EmbeddedCluster
from tests.crash.test_overlapping_rounds import CUT_S, CUTS, FREEZES, loaded
from tests.faults.test_faults import leader_of
from tests.workload.zygote import Zygote

LOSSES = max(2, CUTS // 10)
SENT = [at for at in FREEZES if at.phase == "sent"]
pytestmark = [pytest.mark.broker, pytest.mark.soak, pytest.mark.timeout(120 + 60 * LOSSES)]


def test_the_status_log_changes_its_leader_between_two_rounds(
    three_brokers: EmbeddedCluster, zygote: Zygote, tmp_path: Path, measured: Callable[[str], None]
) -> None:
    with loaded(zygote, three_brokers.bootstrap, tmp_path, measured) as (load, leaders):
        for at in islice(cycle(SENT), LOSSES):
            leaders.last.kill()  # two live leaders would fence each other for a while
            leader = leaders.fork(at.point(1))
            leader.wait_leading(CUT_S)
            load.wait_more()
            leader.arm()
            leader.wait_stopped(CUT_S)
            lost = three_brokers.node(leader_of(three_brokers, f"{leaders.prefix}.status"))
            lost.kill()
            leader.go_on()
            load.wait_more()
            lost.start()
