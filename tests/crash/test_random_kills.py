"""SIGKILLs of the leader at random moments, and of writers: nothing is lost, twice, or half there."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.ports import Log
from tests.conftest import Broker
from tests.crash.oracle import check_answers, check_stream, read_status, read_stream
from tests.workload.children import wait_more
from tests.workload.crew import SEED, Crew
from tests.workload.leaders import Forked
from tests.workload.writers import Plan
from tests.workload.zygote import Child, Zygote

KILLS = int(os.environ.get("ANABRANCH_KILLS", "500"))
FEW = 10  # fewer commits show nothing; how many there are is the machine's speed


def kill_one(crew: Crew, leaders: Forked, children: list[Child]) -> None:
    """Kill a client at whatever it does; another one follows."""
    victim = crew.chance.choice(children)
    assert victim.running, f"{victim.spec.name} ended by itself: {victim.events[-2:]}"
    victim.kill()
    leaders.killed[type(victim.spec).__name__] += 1
    crew.again(victim)


@pytest.mark.broker
@pytest.mark.soak
@pytest.mark.timeout(300 + 10 * KILLS)
def test_random_kills(
    broker: Broker, zygote: Zygote, log: Log, tmp_path: Path, measured: Callable[[str], None]
) -> None:
    print(f"ANABRANCH_SEED={SEED}")
    chance = random.Random(SEED)
    crew = Crew(zygote, broker.bootstrap, tmp_path, chance)
    crew.plan = Plan(threads=4, forgotten=1.0)
    leaders = Forked(zygote, broker.bootstrap, tmp_path, crew.prefix, chance)
    try:
        crew.start(leaders, crew.writers(2, 2))
        for kill in range(KILLS):
            leaders.kill()
            if kill % 4 == 3:
                kill_one(crew, leaders, crew.clients)
        wait_more(crew.commits)
        crew.finish()
        leaders.end()
    finally:
        crew.close()
    for stream in crew.streams:
        check_stream(read_stream(log, stream))
    check_answers(log, crew.prefix)
    terms = read_status(log, crew.prefix).terms
    crew.judged(measured, f"killed: {dict(leaders.killed)}, {len(terms)} terms")
    assert crew.commits() > FEW, "too little was done under the kills"
