"""What goes wrong at each port call.

Whether a fault strikes is no draw from a sequence: it follows from the seed, the process, the call's name and how
often that process has made it. So each fault has a name of its own, and one of them can be left out without
changing which others may strike: that is how a failing run is cut down (`shrink`), and how a list of faults
replays.
"""

from __future__ import annotations

from collections import defaultdict
from hashlib import blake2b
from random import Random

from anabranch.ports import LogUnavailable, LogUncertain
from tests.sim.weather import Weather
from tests.sim.world import Action, Interrupt, Process, World


class LateEnd(LogUncertain):
    """An uncertain end whose request is still on its way: `ports.SimProducer` lets it arrive later."""


# Where a crash is most telling: around what makes a round, or a new lead, durable.
_TELLING = ("append", "end:", "send:", "table:rows", "producer:")
_TELLING_FACTOR = 5.0
_SLOW_LEAD_S = 1.0
_LATE_ANSWER_S = 0.3
_QUESTIONS = frozenset(("end_offsets", "describe_topics", "committed", "commit offsets"))


class Faults:
    """Decides at each port call; silent until ``awake``, and once ``calm``."""

    def __init__(self, world: World, weather: Weather, only: frozenset[str] | None = None) -> None:
        """``only``: the faults that may strike, by their names of 8 digits; None: all that the weather brings."""
        self._world = world
        self._only = only
        self._calls: dict[str, int] = defaultdict(int)
        self.weather = weather.gentler() if weather.gentle else weather
        self.awake = not weather.gentle
        self.calm = False
        self.counts: dict[str, int] = {}
        self.struck: dict[str, str] = {}  # name -> what, when and where

    def at(self, process: Process, call: str) -> Action | None:
        """What goes wrong at this port call, if anything."""
        if self.calm or not self.awake:
            return None
        key = self._key(process.name, call)
        action = self._at(process, call, _chance(key), key)
        return action if action is not None and self._note(key, action.name) else None

    def strikes(self, rate: float, name: str, who: str = "") -> bool:
        """Whether a fault that is no port call's happens now. ``who``: whose it is, of the running process."""
        if self.calm or not self.awake or not rate:
            return False
        key = self._key(who or self._world.running_name, name)
        if _chance(key) >= rate or not self._note(key, name):
            return False
        self._world.note("faults", name)
        return True

    def span(self, mean_s: float) -> float:
        """A random time of that mean."""
        return self._world.random.expovariate(1 / mean_s) if mean_s else 0.0

    def process(self, name: str, kind: str) -> Process:
        """A process with clocks as wrong as the weather has them; the wall clock jumps now and then."""
        skew, random = self.weather.skew_s, self._world.random
        skewed, offset = random.uniform(-skew, skew), random.uniform(0, 1000)
        process = Process(name, kind, skew=skewed, offset=offset)
        self.jump_clock(process)
        return process

    def jump_clock(self, process: Process) -> None:
        """Let a process's wall clock jump now and then."""
        weather = self.weather
        if not weather.jump_s:
            return

        def jump() -> None:
            if self.calm or process.dead:
                return
            by_s = self._world.random.uniform(-weather.jump_by_s, weather.jump_by_s)
            if self.strikes(1.0, "clock jump", process.name):
                process.skew = by_s
            self._world.later(self.span(weather.jump_s), jump)

        self._world.later(self.span(weather.jump_s), jump)

    def _key(self, who: str, what: str) -> str:
        call = f"{self._world.seed}/{who}/{what}"
        self._calls[call] += 1
        return f"{call}/{self._calls[call]}"

    def _note(self, key: str, name: str) -> bool:
        """Whether this one may strike."""
        digits = _digest(key).hex()[:8]
        if self._only is not None and digits not in self._only:
            return False
        self.struck[digits] = f"{self._world.now:.3f} s: {name} at {key.partition('/')[2]}"
        self.counts[name] = self.counts.get(name, 0) + 1
        return True

    def _at(self, process: Process, call: str, chance: float, key: str) -> Action | None:
        weather = self.weather
        factor = _TELLING_FACTOR if call.startswith(_TELLING) else 1.0
        if process.kind == "controller":
            crash, freeze = weather.crash * factor, weather.freeze * factor
            freeze += weather.blind if call.startswith("fetch:commands") else 0.0
        else:
            crash, freeze = weather.client_crash, weather.client_freeze
            if process.kind == "worker":
                crash, freeze = crash + weather.worker_crash, freeze + weather.worker_freeze
        chance -= crash
        if chance < 0:
            return Action("crash", crash=True)
        chance -= freeze
        if chance < 0:
            return Action("freeze", freeze=_span(key, weather.freeze_s))
        chance -= weather.delay
        if chance < 0:
            return Action("delay", delay=_span(key, weather.delay_s))
        if call.startswith("producer:"):
            chance -= weather.slow_lead
            if chance < 0:
                return Action("slow lead", delay=_span(key, _SLOW_LEAD_S))
        if call == "table:rows":
            chance -= weather.slow_disk
            if chance < 0:
                return Action("slow disk", delay=_span(key, weather.slow_disk_s))
        if call.endswith(".sent"):
            return self._answer_trouble(call, chance, key)
        if process.kind == "controller":
            return self._log_trouble(call, chance)
        if self._world.may_interrupt and not call.startswith("produce:journal"):
            chance -= weather.interrupt  # what is sent to journals is sent by another thread
            if chance < 0:
                return Action("interrupt", error=Interrupt())
        asks = call == "fetch:replies" if process.kind == "client" else call.startswith("fetch:")
        if asks or call in _QUESTIONS:
            chance -= weather.unavailable
            if chance < 0:
                return Action("unavailable", error=LogUnavailable("no broker answers"))
        return None

    def _answer_trouble(self, call: str, chance: float, key: str) -> Action | None:
        """What becomes of the answer to a request that was sent while its leader did other work."""
        chance -= self.weather.late_answer
        if chance < 0:
            return Action("late answer", delay=_span(key, _LATE_ANSWER_S))
        chance -= self.weather.no_answer
        if chance < 0:
            kind = LateEnd if call.startswith("end:") else LogUncertain
            return Action("no answer", error=kind("no answer in time"))
        return None

    def _log_trouble(self, call: str, chance: float) -> Action | None:
        weather = self.weather
        if call.startswith(("append", "end:")):
            chance -= weather.uncertain
            if chance < 0:
                return Action("uncertain", error=LogUncertain("no answer in time"))
        elif not call.startswith(("table:", "send:")):
            chance -= weather.unavailable
            if chance < 0:
                error = LogUnavailable("no broker answers")
                return Action("unavailable", error=error)
        if call.startswith("end:") and not call.endswith(".after"):
            chance -= weather.late_end
            if chance < 0:
                return Action("late end", error=LateEnd("no answer in time"))
        return None


def _digest(key: str) -> bytes:
    return blake2b(key.encode(), digest_size=12).digest()


def _chance(key: str) -> float:
    """From 0 to 1, of this key for ever."""
    return int.from_bytes(_digest(key)[4:], "big") / (1 << 64)


def _span(key: str, mean_s: float) -> float:
    return Random(key).expovariate(1 / mean_s)
