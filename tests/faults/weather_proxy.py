"""Bad weather in the network: what happens to a request is a function of the seed, its connection and its place."""

from __future__ import annotations

import random
import threading
from collections import Counter

from tests.faults.proxy import Action, Cut, Delay, Held, Hold, Split
from tests.faults.proxy_frames import NAMES, Request

LONGEST_DELAY_S = 0.3
LONGEST_HOLD_S = 2.5
# Of a hundred requests so many have each fate; connections that come and go are the expensive ones.
PERCENT = {"delay": 1.0, "late answer": 1.0, "split": 2.0, "hold": 0.5, "cut": 0.4}


class Weather:
    """A policy for `Proxy`. ``kinds``: calls of which the first ones are held and cut, whatever chance says."""

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
        chance = random.Random(f"{self._seed}/{request.connection}/{request.number}")
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

    def _action(self, fate: str, chance: random.Random) -> Action | None:
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
        """From now on nothing happens, and what is held goes on."""
        with self._lock:
            self._calm = True
            for timer, held in self._held:
                timer.cancel()
                held.let_go()
