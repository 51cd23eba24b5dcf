"""The product on a network that delays, cuts, splits and holds messages of clients and controllers.

One broker; all connections but those of the final reading go through the proxy. The checker judges the history.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from anabranch import errors
from tests.faults.network_proxy import start_network
from tests.faults.proxy import Action, Cut, Delay, Held, Hold, Split
from tests.faults.proxy_frames import (
    END_TXN,
    FETCH,
    FIND_COORDINATOR,
    INIT_PRODUCER_ID,
    LIST_OFFSETS,
    METADATA,
    NAMES,
    PRODUCE,
    Request,
)
from tests.workload.crew import SEED, Crew
from tests.workload.leaders import Services
from tests.workload.readers import MODES
from tests.workload.zygote import Zygote

STORM_S = float(os.environ.get("ANABRANCH_STORM_S", "120"))
LONGER_S = 110.0
LEAST = 10  # commits; the storm lasts until they are answered
# What the machine may add to a deadline.
SLACK_S = 15.0
KINDS = frozenset(
    {PRODUCE, FETCH, METADATA, LIST_OFFSETS, FIND_COORDINATOR, INIT_PRODUCER_ID, END_TXN}
)
# What of a history is a call of the library with a deadline.
CALLS = frozenset({"begin", "write", "finish", "commit", "abort", "state", "scale", "snapshot"})
pytestmark = [pytest.mark.broker, pytest.mark.soak, pytest.mark.timeout(300 + 3 * STORM_S)]


LONGEST_DELAY_S = 0.3
LONGEST_HOLD_S = 2.5
# How many of a hundred requests have each fate; connections that come and go are the expensive ones.
PERCENT = {"delay": 1.0, "late answer": 1.0, "split": 2.0, "hold": 0.5, "cut": 0.4}


class Weather:
    """A policy for `Proxy`: what happens to a request is a function of the seed, its connection and its place.

    ``kinds``: calls of which the first ones are held and cut, whatever chance says."""

    def __init__(self, seed: str, kinds: frozenset[int]) -> None:
        self._seed = seed
        self._due: dict[int, list[str]] = {
            kind: ["cut after", "cut before", "hold and cut", "hold"] for kind in kinds
        }
        self._held: list[tuple[threading.Timer, Held]] = []
        self._lock = threading.Lock()
        self._calm = False
        self.done: Counter[str] = Counter()

    def __call__(self, request: Request) -> Action | None:
        chance = Random(f"{self._seed}/{request.connection}/{request.number}")
        with self._lock:
            if self._calm:
                return None
            due = self._due.get(request.api)
            # Not all at once: a round needs several of these calls.
            if due and chance.random() < 0.2:
                fate = due.pop()
            else:
                fate = chance.choices([*PERCENT, ""], [*PERCENT.values(), 100.0])[0]
            action = self._action(fate, chance)
            if action is not None:
                self.done[f"{type(action).__name__} {NAMES.get(request.api, request.api)}"] += 1
        return action

    def _action(self, fate: str, chance: Random) -> Action | None:
        if fate.startswith("hold"):
            held = Held()
            timer = threading.Timer(chance.uniform(0.05, LONGEST_HOLD_S), held.let_go)
            timer.daemon = True
            timer.start()
            self._held.append((timer, held))
            return Hold(held, cut=fate == "hold and cut" or chance.random() < 0.5)
        if fate.startswith("cut"):
            after = fate == "cut after" or (fate == "cut" and chance.random() < 0.5)
            return Cut(after=after, within=chance.choice((0, 0, 1, 5, 30)))
        if fate == "split":
            return Split(chance.randint(1, 9))
        if fate in ("delay", "late answer"):
            return Delay(chance.uniform(0.0, LONGEST_DELAY_S), answer=fate == "late answer")
        return None

    def missing(self) -> set[str]:
        """What of ``kinds`` has not happened yet."""
        with self._lock:
            return {f"{fate} {NAMES[kind]}" for kind, due in self._due.items() for fate in due}

    def calm(self) -> None:
        """From now on nothing happens; held requests are delivered."""
        with self._lock:
            self._calm = True
            for timer, held in self._held:
                timer.cancel()
                held.let_go()


def test_no_promise_breaks_in_a_bad_network(
    tmp_path: Path, measured: Callable[[str], None]
) -> None:
    print(f"ANABRANCH_SEED={SEED}")
    weather = Weather(str(SEED), KINDS)
    with Zygote() as zygote, start_network() as network:
        crew = Crew(zygote, network.proxied, tmp_path, Random(SEED))
        readers = [crew.reader(mode, grouped=mode == "ordered") for mode in MODES]
        try:
            services = Services(crew.bootstrap, tmp_path, crew.prefix)
            crew.start(services, [*crew.writers(2, 2), *readers])
            network.proxy.policy = weather
            scaler = threading.Thread(target=crew.keep_scaling)
            scaler.start()
            stormy = time.monotonic()
            while (lasted := time.monotonic() - stormy) < STORM_S + LONGER_S:
                if lasted > STORM_S and not weather.missing() and crew.commits() > LEAST:
                    break
                time.sleep(0.1)
            weather.calm()
            crew.over.set()
            scaler.join()
            crew.bootstrap = network.direct  # the end is read past the proxy
            crew.finish()
        finally:
            weather.calm()
            crew.close()
    crew.judged(measured, f"bad weather, {dict(weather.done)}")
    assert not weather.missing(), "not every kind of call was held and cut"
    assert crew.commits() > LEAST, "too little was done"
    check_calls(crew)


def check_calls(crew: Crew) -> None:
    """Every call of the library ended by its deadline, well or by a documented error."""
    for path in crew.history.glob("*.history"):
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
            assert seconds < crew.plan.call + SLACK_S, f"{path.name}: {seconds:.1f} s of {ask}"
            if "why" in entry:
                why = entry["why"].removeprefix("Unknown: ")
                kind = getattr(errors, why.partition(":")[0], None)
                assert isinstance(kind, type), f"{path.name}: {ask} ended by {entry}"
                assert issubclass(kind, errors.AnabranchError), entry
                assert not issubclass(kind, errors.InvariantViolation), entry
