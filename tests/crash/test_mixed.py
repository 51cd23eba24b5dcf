"""Scalings and transactions mixed on one stream, under SIGKILLs of controllers, writers and group readers.

The checker judges the log, and what the members of the group were given. The oracle judges epochs and key ranges.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.ports import Log
from checker.recorder import SUFFIX, Recorder
from tests.conftest import Broker
from tests.crash.oracle import check_stream, figures, read_status, read_stream
from tests.crash.reshaping import check_nothing_left
from tests.workload.crew import SEED, Crew
from tests.workload.leaders import Forked
from tests.workload.readers import Read
from tests.workload.writers import Plan, Write
from tests.workload.zygote import Child, Zygote

SCALINGS = int(os.environ.get("ANABRANCH_SCALINGS", "200"))
TRANSACTIONS = int(os.environ.get("ANABRANCH_TRANSACTIONS", "2000"))
KILL_EVERY_S = 1.5
MOST_SEGMENTS = 6
CHUNK_BYTES = 16 << 10  # a big transaction has more
BUSY_S = 10.0
TAIL_BYTES = 4_000
KINDS = {"one_shot": 2, "short": 6, "long": 3, "crowd": 1, "big": 1, "aborted": 1}


def scale_evenly(crew: Crew, stop: threading.Event) -> None:
    """Spread the scalings over the transactions."""
    recorder = Recorder(crew.history / f"scaler{SUFFIX}")
    with crew.connect() as client:
        while crew.scalings < SCALINGS and not stop.is_set():
            if crew.commits() * SCALINGS >= crew.scalings * TRANSACTIONS:
                crew.scale(client, recorder, MOST_SEGMENTS)
            stop.wait(0.02)


def busy(crew: Crew, readers: list[Child]) -> list[Child]:
    """Readers that were given events just now; all of them if none is for a while."""
    until = time.monotonic() + BUSY_S
    while time.monotonic() < until:
        found = [
            child
            for child in readers
            if b'"events": [[' in tail(crew.history / f"{child.spec.name}{SUFFIX}")
        ]
        if found:
            return found
        time.sleep(0.05)
    return readers


def tail(history: Path) -> bytes:
    """The last lines of a history."""
    with history.open("rb") as file:
        file.seek(max(0, history.stat().st_size - TAIL_BYTES))
        return b"".join(file.read().splitlines()[-3:])


def kill_one(crew: Crew, leaders: Forked, children: list[Child]) -> None:
    """Kill a client at whatever it does; another one follows."""
    victim = crew.chance.choice(children)
    assert victim.running, f"{victim.spec.name} ended by itself: {victim.events[-2:]}"
    victim.kill()
    leaders.killed[type(victim.spec).__name__] += 1
    crew.again(victim)


def stir(crew: Crew, leaders: Forked) -> None:
    """Kill, mostly controllers, until everything is scaled and committed."""
    kinds = (leaders.kill, Read, leaders.kill, Write)
    kills = 0
    next_kill = time.monotonic() + KILL_EVERY_S
    while crew.commits() < TRANSACTIONS or crew.scalings < SCALINGS:
        time.sleep(0.05)
        if time.monotonic() < next_kill:
            continue
        kind = kinds[kills % len(kinds)]
        if kind is Read:
            kill_one(crew, leaders, busy(crew, crew.of(Read)))
        elif kind is Write:
            kill_one(crew, leaders, crew.of(Write))
        else:
            leaders.kill()
        kills += 1
        next_kill = time.monotonic() + crew.chance.uniform(0.5, 1.5) * KILL_EVERY_S


@pytest.mark.broker
@pytest.mark.soak
@pytest.mark.timeout(120 + 3 * SCALINGS + TRANSACTIONS)
def test_scalings_and_transactions_under_kills(
    broker: Broker,
    zygote: Zygote,
    log: Log,
    tmp_path: Path,
    measured: Callable[[str], None],
) -> None:
    print(f"ANABRANCH_SEED={SEED}")
    chance = random.Random(SEED)
    crew = Crew(zygote, broker.bootstrap, tmp_path, chance, ("mixed",))
    crew.plan = Plan(kinds=KINDS, threads=4, keepalive=3.0, plain=0, segments=1)
    how = {"chunk_bytes": CHUNK_BYTES, "threads": True, "tidy": True}
    leaders = Forked(zygote, broker.bootstrap, tmp_path, crew.prefix, chance, how=how)
    stop = threading.Event()
    scaler = threading.Thread(target=scale_evenly, args=(crew, stop))
    try:
        crew.start(leaders, [*crew.writers(2), *[crew.reader("ordered", grouped=True)] * 4])
        scaler.start()
        stir(crew, leaders)
        scaler.join()
        crew.finish()
        leaders.end()
    finally:
        stop.set()
        crew.close()
    (name,) = crew.streams
    stream = read_stream(log, name)
    check_stream(stream)
    check_nothing_left(log, crew.prefix, name)
    terms = len(read_status(log, crew.prefix).terms)
    crew.judged(measured, f"{figures(stream)}; killed: {dict(leaders.killed)}, {terms} terms")
