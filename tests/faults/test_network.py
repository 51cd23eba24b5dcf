"""The product behind a network that delays, cuts, splits and holds what is said: clients and controllers alike.

One broker; all connections but those of the final reading go through the proxy. The history of what everybody
asked and was told is judged by the checker.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, cast

import pytest

import checker
from anabranch import errors
from tests.crash.zygote import Zygote
from tests.faults.acting import CALL_S
from tests.faults.network_proxy import start_network
from tests.faults.proxy_frames import (
    END_TXN,
    FETCH,
    FIND_COORDINATOR,
    INIT_PRODUCER_ID,
    LIST_OFFSETS,
    METADATA,
    PRODUCE,
)
from tests.faults.team import Team
from tests.faults.weather_proxy import Weather

if TYPE_CHECKING:
    from anabranch.infra.cluster import EmbeddedCluster

SEED = int(os.environ.get("ANABRANCH_SEED", time.time_ns() % 1_000_000))
STORM_S = float(os.environ.get("ANABRANCH_STORM_S", "120"))
LONGER_S = 110.0
LEAST = 10  # commits; the storm goes on until they are told
# What the machine may add to a deadline.
SLACK_S = 15.0
KINDS = frozenset(
    {PRODUCE, FETCH, METADATA, LIST_OFFSETS, FIND_COORDINATOR, INIT_PRODUCER_ID, END_TXN}
)
# What of a history is a call of the library with a deadline.
CALLS = frozenset({"begin", "write", "finish", "commit", "abort", "state", "scale", "snapshot"})
pytestmark = [pytest.mark.broker, pytest.mark.soak, pytest.mark.timeout(300 + 3 * STORM_S)]


@dataclass
class Behind:
    """All that `Team` has to know of a cluster whose brokers nobody kills."""

    bootstrap: str


def test_bad_weather(tmp_path: Path, measured: Callable[[str], None]) -> None:
    print(f"ANABRANCH_SEED={SEED}")
    began = time.monotonic()
    weather = Weather(str(SEED), KINDS)
    readers = [("ordered", True), ("transactions", False), ("raw", False), ("snapshots", False)]
    with Zygote() as zygote, start_network() as network:
        behind = Behind(network.proxied)
        team = Team(zygote, cast("EmbeddedCluster", behind), tmp_path, Random(SEED), readers)
        try:
            team.start()
            network.proxy.policy = weather
            scaler = threading.Thread(target=team.scale)
            scaler.start()
            stormy = time.monotonic()
            while (lasted := time.monotonic() - stormy) < STORM_S + LONGER_S:
                if lasted > STORM_S and not weather.missing() and team.commits() > LEAST:
                    break
                time.sleep(0.1)
            weather.calm()
            team.over()
            scaler.join()
            # Who judges reads past the proxy.
            behind.bootstrap = network.direct
            team.finish()
        finally:
            weather.calm()
            team.close()
    report = checker.judge(team.history)
    measured(
        f"bad weather: {team.told} commits told, {team.scalings} scalings, {dict(weather.done)} in "
        f"{time.monotonic() - began:.0f} s; troubles {dict(team.troubles)}; {dict(report.counts)}; "
        f"seed {SEED}"
    )
    assert not weather.missing(), "not every kind of call was held and cut"
    assert not team.defects, team.defects[:3]
    assert not report.anomalies, "\n".join(map(str, report.anomalies[:5]))
    assert team.told > LEAST, "too little was done"
    check_calls(team.history)


def check_calls(history: Path) -> None:
    """Every call of the library ended by its deadline, and by a documented error if not well."""
    for path in history.glob("*.history"):
        asked = {}
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if entry["kind"] == "ask":
                asked[entry["op"]] = entry
                continue
            ask = asked.pop(entry["op"])
            if ask["what"] not in CALLS:
                continue
            seconds = (entry["at"] - ask["at"]) / 1e9
            assert seconds < CALL_S + SLACK_S, f"{path.name}: {seconds:.1f} s of {ask}"
            if "why" in entry:
                kind = getattr(errors, entry["why"].partition(":")[0], None)
                assert isinstance(kind, type), f"{path.name}: {ask} ended by {entry}"
                assert issubclass(kind, errors.AnabranchError), entry
                assert not issubclass(kind, errors.InvariantViolation), entry
