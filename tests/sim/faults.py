"""What may go wrong, and how often: drawn for each run, so that runs differ in kind (swarm testing)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random

from anabranch.ports import LogUnavailable, LogUncertain
from tests.sim.world import Action, Process, World


class LateEnd(LogUncertain):
    """An uncertain end whose request is still on its way: `ports.SimProducer` lets it arrive later."""


@dataclass
class Weather:
    """Rates per port call unless said otherwise; times are virtual seconds."""

    switch: float = 0.5  # another task runs first
    delay: float = 0.0
    delay_s: float = 0.05  # mean
    slow_lead: float = 0.0  # a delay at the steps of taking the lead, where a rival may come in
    crash: float = 0.0  # of controllers; more often around what makes a round durable
    freeze: float = 0.0
    freeze_s: float = 5.0  # mean
    uncertain: float = (
        0.0  # of appends and ends of native transactions; before or behind the effect
    )
    late_end: float = 0.0  # an end of a native transaction that arrives after its caller gave up
    unavailable: float = 0.0
    client_crash: float = 0.0
    client_freeze: float = 0.0
    lose_command: float = 0.0  # per command
    late_command: float = 0.0
    lose_reply: float = 0.0  # per reply
    write_uncertain: float = 0.0  # per write to a journal
    late_write: float = 0.0
    marker_delay_s: float = 0.0  # mean
    skew_s: float = 0.0  # of wall clocks, at most
    director_s: float = 8.0  # mean time between changes of who should lead
    compact_s: float = 0.0  # mean time between compactions of the status log; 0: none
    expire_s: float = 0.0  # mean time between deletions of old commands; 0: none
    checkpoint_loss: float = 0.0  # per restart: the disk is empty, or an old copy
    transaction_version: int = 2
    native_timeout_s: float = 10.0
    retention_s: float = 7 * 86_400.0
    control_partitions: int = 1
    mixed_batches: bool = False  # writers of one client share batches
    small: bool = False  # small limits, so that everything is cut in pieces
    scale_s: float = 0.0  # mean time between the scalings of a client; 0: none
    linger: float = 0.0  # how often a transaction stays open while streams are scaled
    chunk_bytes: int = 16 << 20  # bigger merges are carried aside
    collate_ms: int = 200
    cleaning: bool = False  # journals are cut, and old transactions moved, all the time
    carriers_beside: bool = False  # carriers run beside the leader's loop, not in its steps
    safe_s: float = (
        0.0  # mean time between a client's questions for safe times; 0: none. Never drawn
    )
    tight: bool = False  # streams take small batches only; sometimes an event is too large

    @classmethod
    def draw(cls, random: Random) -> Weather:
        """The weather of a run: each kind of fault may be absent, rare or frequent."""

        def some(*values: float) -> float:
            return random.choice(values)

        return cls(
            switch=some(0.2, 0.5, 0.9),
            delay=some(0, 0.005, 0.03),
            delay_s=some(0.02, 0.2, 1.0),
            slow_lead=some(0, 0, 0.3),
            crash=some(0, 0.001, 0.004),
            freeze=some(0, 0.0005, 0.003),
            freeze_s=some(0.5, 3.0, 12.0),
            uncertain=some(0, 0.005, 0.03),
            late_end=some(0, 0.01),
            unavailable=some(0, 0, 0.003, 0.01),
            client_crash=some(0, 0, 0.001),
            client_freeze=some(0, 0, 0.001),
            lose_command=some(0, 0, 0.05),
            late_command=some(0, 0, 0.05),
            lose_reply=some(0, 0, 0.05),
            write_uncertain=some(0, 0, 0.02),
            late_write=some(0, 0, 0.02),
            marker_delay_s=some(0, 0.002, 0.05, 0.5),
            skew_s=some(0, 0, 0.05, 3.0),
            director_s=some(2.0, 6.0, 20.0),
            compact_s=some(0, 3.0),
            expire_s=some(0, 0, 5.0),
            checkpoint_loss=some(0, 0.5),
            transaction_version=random.choice((2, 2, 2, 1)),
            native_timeout_s=some(2.0, 10.0, 60.0),
            retention_s=some(7 * 86_400.0, 7 * 86_400.0, 15.0),
            control_partitions=random.choice((1, 1, 1, 2)),
            mixed_batches=random.random() < 0.3,
            small=random.random() < 0.3,
            scale_s=some(0, 0.7, 2.0, 5.0),
            linger=some(0, 0.3, 0.8),
            chunk_bytes=random.choice((16 << 20, 1000, 500, 250)),
            collate_ms=random.choice((200, 0, 1000)),
            cleaning=random.random() < 0.5,
            carriers_beside=random.random() < 0.6,
            tight=random.random() < 0.15,
        )

    def __str__(self) -> str:
        usual = Weather()
        found = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return ", ".join(f"{n}={v:g}" for n, v in found if v != getattr(usual, n)) or "fair"


# Where a crash is most telling: around what makes a round, or a new lead, durable.
_TELLING = ("append", "end:", "table:rows", "producer:")
_TELLING_FACTOR = 5.0
_SLOW_LEAD_S = 1.0


class Faults:
    """Decides at each port call; silent once ``calm``."""

    def __init__(self, world: World, weather: Weather) -> None:
        self._world = world
        self._random = world.random
        self.weather = weather
        self.calm = False
        self.counts: dict[str, int] = {}

    def at(self, process: Process, call: str) -> Action | None:
        """What goes wrong at this port call, if anything."""
        if self.calm:
            return None
        action = self._at(process, call)
        if action is not None:
            self.counts[action.name] = self.counts.get(action.name, 0) + 1
        return action

    def strikes(self, rate: float, name: str) -> bool:
        """Whether a fault that is no port call's happens now."""
        if self.calm or not rate or self._random.random() >= rate:
            return False
        self.counts[name] = self.counts.get(name, 0) + 1
        self._world.note("faults", name)
        return True

    def span(self, mean_s: float) -> float:
        """A random time of that mean."""
        return self._random.expovariate(1 / mean_s) if mean_s else 0.0

    def _at(self, process: Process, call: str) -> Action | None:
        weather = self.weather
        chance = self._random.random()
        factor = _TELLING_FACTOR if call.startswith(_TELLING) else 1.0
        if process.kind == "controller":
            crash, freeze = weather.crash * factor, weather.freeze * factor
        else:
            crash, freeze = weather.client_crash, weather.client_freeze
        chance -= crash
        if chance < 0:
            return Action("crash", crash=True)
        chance -= freeze
        if chance < 0:
            return Action("freeze", freeze=self.span(weather.freeze_s))
        chance -= weather.delay
        if chance < 0:
            return Action("delay", delay=self.span(weather.delay_s))
        if call.startswith("producer:"):
            chance -= weather.slow_lead
            if chance < 0:
                return Action("slow lead", delay=self.span(_SLOW_LEAD_S))
        if process.kind == "controller":
            return self._log_trouble(call, chance)
        if call in ("fetch:replies", "end_offsets", "describe_topics"):
            chance -= weather.unavailable
            if chance < 0:
                return Action("unavailable", error=LogUnavailable("no broker answers"))
        return None

    def _log_trouble(self, call: str, chance: float) -> Action | None:
        weather = self.weather
        if call.startswith(("append", "end:")):
            chance -= weather.uncertain
            if chance < 0:
                return Action("uncertain", error=LogUncertain("no answer in time"))
        elif not call.startswith("table:"):
            chance -= weather.unavailable
            if chance < 0:
                error = LogUnavailable("no broker answers")
                return Action("unavailable", error=error)
        if call.startswith("end:") and not call.endswith(".after"):
            chance -= weather.late_end
            if chance < 0:
                return Action("late end", error=LateEnd("no answer in time"))
        return None
