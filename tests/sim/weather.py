"""The weather of a run: what may go wrong, how often, and how much is done; drawn for each run, so that runs
differ in kind (swarm testing)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

FAIR = "fair"


@dataclass
class Weather:
    """Rates per port call unless said otherwise; times are virtual seconds."""

    switch: float = 0.5  # another task runs first
    delay: float = 0.0
    delay_s: float = 0.05  # mean
    slow_lead: float = 0.0  # a delay at the steps of taking the lead, where a rival may come in
    torn_lead: float = 0.0  # a long one when A is taken and B is not. Never drawn
    torn_lead_s: float = 3.0  # mean
    crash: float = 0.0  # of controllers; more often around what makes a round durable
    freeze: float = 0.0
    freeze_s: float = 5.0  # mean
    blind: float = (
        0.0  # a freeze where commands are fetched: it reads on before it writes. Never drawn
    )
    uncertain: float = (
        0.0  # of appends and ends of native transactions; before or behind the effect
    )
    late_end: float = 0.0  # an end of a native transaction that arrives after its caller gave up
    overlap_s: float = 0.02  # how long rounds of a leader overlap before other work has its turn
    answered: float = (
        0.5  # how often the answer to an append or end is there when its leader asks for it
    )
    late_answer: float = 0.0  # … and its leader has to wait for it, while others do more
    no_answer: float = 0.0  # … or gets none; the request arrived, arrives later, or never does
    unavailable: float = 0.0
    client_crash: float = 0.0  # of readers too
    client_freeze: float = 0.0
    lose_command: float = 0.0  # per command
    late_command: float = 0.0
    double_command: float = 0.0  # it arrives a second time, later
    lose_reply: float = 0.0  # per reply
    write_uncertain: float = 0.0  # per write to a journal
    late_write: float = 0.0
    hide: float = (
        0.0  # per partition of a fetch: what is new there comes later than what is elsewhere
    )
    hide_journals: float = 0.0  # the same, of journals alone. Never drawn
    marker_delay_s: float = 0.0  # mean
    lose_markers: float = 0.0  # a partition without a leader gets none, ever
    skew_s: float = 0.0  # of wall clocks, at most
    jump_s: float = 0.0  # mean time between jumps of a process's wall clock; 0: none
    apart_s: float = 3600.0  # how far ahead a time may be that clients have seen. Never drawn
    error_s: float = (
        0.0  # the error that controllers think their clocks have; 0: no commit wait. Never drawn
    )
    hop_s: float = 0.0  # mean time between commits that follow others in another scope; 0: none
    lives_s: float = 0.0  # mean time between steps in the lives of a stream that is deleted over and over; 0: none
    jump_by_s: float = 3.0  # then it stands anywhere within so much of the true time
    slow_disk: float = 0.0  # per write of a table
    slow_disk_s: float = 0.5  # mean
    full_disk: float = 0.0  # per write of a table: refused, as all others until there is room again
    full_disk_s: float = 3.0  # mean
    director_s: float = 8.0  # mean time between changes of who should lead
    compact_s: float = 0.0  # mean time between compactions of the status log; 0: none
    expire_s: float = 0.0  # mean time between deletions of old commands; 0: none
    retain_s: float = 0.0  # mean time between passes of the brokers' retention; 0: none
    lose_s: float = 0.0  # mean time until somebody deletes a topic of a stream; 0: nobody does
    lag_s: float = 0.0  # mean time until brokers do not know a stream's topic for a while; 0: never
    lost_after_s: float = 5.0  # a stream whose topic is missing for so long is given up
    # Mean times until a topic of one stream comes into trouble that lasts; 0: it never does. See `trouble`.
    leaderless_s: float = 0.0
    few_replicas_s: float = 0.0
    failed_disk_s: float = 0.0
    refusing_s: float = 0.0
    denying_s: float = 0.0
    stale_s: float = 0.0  # a broker that leads no more answers one machine
    stale_reads_s: float = 0.0  # … answers all readers. Never drawn
    small_limit_s: float = 0.0
    control_s: float = 0.0  # the same of a control topic's partition, for a moment
    # So long a stream is in trouble at the end, and who else waits is listed; see `hour`. Never drawn.
    hour_s: float = 0.0
    trouble_for_s: float = 15.0  # so long it lasts after all other faults have ended
    interrupt: float = 0.0  # per port call of a client's begin, flush or commit
    refusals: float = 0.0  # of jobs: a one-shot to a stream that is being made
    two_committers: float = 0.0  # of transactions with helpers
    prepared: float = 0.0  # of transactions by journals: a database decides
    bursts: float = (
        0.0  # of jobs: many one-shots at once, so that rounds follow each other, and overlap
    )
    repeats: float = 0.0  # share of client processes that repeat calls and ask for receipts again
    offsets_expire_s: float = (
        0.0  # mean time between expiries of offsets that no member subscribes to
    )
    poison_s: float = 0.0  # mean time between a client's commands that nobody can mean; 0: none
    raising_s: float = 0.0  # … that make a controller's code fail
    hostile_s: float = 0.0  # … that make streams with settings that can't work
    greedy_s: float = 0.0  # … that take as much for one transaction as they are given
    checkpoint_loss: float = 0.0  # per restart: the disk is empty, or an old copy
    transaction_version: int = 2
    native_timeout_s: float = 10.0
    retention_s: float = 7 * 86_400.0
    control_partitions: int = 1
    # Scopes are at control partitions of their own, and transactions have streams and tables of several.
    across: bool = False
    # Faults begin once a client has found or created all streams, and what strikes per call is rarer (`gentler`).
    gentle: bool = False
    # How often a message between leaders is lost; it is late, or doubled, as often. At least the rates of commands.
    messages: float = 0.0
    grow_s: float = (
        0.0  # mean time until an operator adds a control partition, with a new scope; 0: never
    )
    mixed_batches: bool = False  # writers of one client share batches
    small: bool = False  # small limits, so that everything is cut in pieces
    scale_s: float = 0.0  # mean time between the scalings of a client; 0: none
    linger: float = 0.0  # how often a transaction stays open while streams are scaled
    chunk_bytes: int = 16 << 20  # bigger merges are staged
    collate_ms: int = 200
    cleaning: bool = False  # journals are cut, and old transactions moved, all the time
    carriers_beside: bool = False  # carriers run beside the leader's loop, not in its steps
    safe_s: float = (
        0.0  # mean time between a client's questions for safe times; 0: none. Never drawn
    )
    plain_s: float = (
        0.0  # mean time between a client's bursts of plain writes; 0: none. Never drawn
    )
    numbered: float = 0.0  # of the commits without a name: a number besides the usual. Never drawn
    tight: bool = False  # streams take small batches only; sometimes an event is too large
    # Lanes beside `open` and `admin`, which an operator makes; 0: none.
    lanes: int = 0
    rights_s: float = 0.0  # mean time between the operator's blocks of lanes, and grants taken away
    lane_s: float = 0.0  # mean time until a lane's topic comes into trouble that lasts
    # How much is done.
    machines: int = 2  # of controllers
    clients: int = 2
    jobs: int = 8  # of a client, at most
    streams: int = 3
    readers: int = 0  # processes that read, each in a way of its own
    # Processes that work on the tasks of processors; besides what befalls clients, these rates strike them.
    workers: int = 0
    worker_crash: float = 0.0
    worker_freeze: float = 0.0
    rows: float = 0.0  # of their commits: rows of tables, read with locks and written
    tables: int = 0  # processes with replicas of tables
    counters: int = 0  # processes that add to rows of a table
    chains: int = 0  # processes whose tasks change the same rows
    derivers: int = 0  # processes that write a table with derived tables
    later: int = 0  # processes with workers that derive a table after the commits of its source
    work_s: float = 40.0  # faults and new work end then, at the latest

    @classmethod
    def draw(cls, random: Random) -> Weather:
        """The weather of a run: each kind of fault may be absent, rare or frequent."""
        state = random.getstate()
        own = random.random()
        random.setstate(state)
        drawn = cls(**_draw_first(random))
        # What came later has chance of its own, so that the other draws of a seed stay.
        drawn = drawn.changed(_draw_topics(Random(f"{own}/topics")))
        drawn = drawn.changed(_draw_trouble(Random(f"{own}/what lasts")))
        drawn = drawn.changed(_draw_lanes(Random(f"{own}/lanes")))
        drawn = drawn.changed(_draw_workers(Random(f"{own}/workers")))
        drawn = drawn.changed({"prepared": Random(f"{own}/prepared").choice((0.0, 0.0, 0.3, 0.8))})
        drawn = drawn.changed(_draw_across(Random(f"{own}/across")))
        if not drawn.across:
            drawn = drawn.changed({"gentle": Random(f"{own}/gentle").random() < 1 / 3})
        hops = Random(f"{own}/time").choice((0.0, 1.0)) if drawn.control_partitions > 1 else 0.0
        lives = Random(f"{own}/lives").choice((0.0, 0.0, 0.3, 1.0))
        tables = Random(f"{own}/tables").choice((0, 0, 0, 1, 2))
        repeats = Random(f"{own}/repeats").choice((0.0, 0.0, 1.0))
        others = {"lives_s": lives, "tables": tables, "repeats": repeats}
        others["counters"] = Random(f"{own}/counters").choice((0, 0, 0, 1, 2))
        others["chains"] = Random(f"{own}/chains").choice((0, 0, 0, 1, 2))
        others["derivers"] = Random(f"{own}/derivers").choice((*[0] * 12, 1, 2))
        others["later"] = Random(f"{own}/later").choice((*[0] * 12, 1, 2))
        others |= _draw_overlaps(Random(f"{own}/overlaps"))
        others["greedy_s"] = Random(f"{own}/greedy").choice((0.0, 0.0, 0.0, 0.0, 0.0, 3.0))
        return drawn.changed({"hop_s": hops, **others})

    def gentler(self) -> Weather:
        """With faults that are rarer and shorter.

        At the usual rates little is done before the faults end: a fifth of the commits within one control
        partition, and hardly any over several, which take many calls of several leaders.
        """
        found = {name: getattr(self, name) / 5 for name in _PER_CALL}
        most = {"marker_delay_s": 0.05, "jump_by_s": 5.0, "freeze_s": 3.0, "delay_s": 0.2}
        found |= {name: min(getattr(self, name), value) for name, value in most.items()}
        return self.changed(found)

    def changed(self, values: Mapping[str, float]) -> Weather:
        """With these instead."""
        return replace(self, **values)  # type: ignore[arg-type]

    def differences(self, other: Weather) -> list[str]:
        """What is not as in the other one, each ``name=value``."""
        return [
            f"{field.name}={number(getattr(self, field.name))}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        ]

    def __str__(self) -> str:
        return ", ".join(self.differences(Weather())) or "fair"


# Kinds of trouble, and of what clients may do wrong, each with its values.
_KINDS: dict[str, tuple[float, ...]] = {
    "leaderless_s": (2.0, 8.0),
    "few_replicas_s": (2.0, 8.0),
    "failed_disk_s": (2.0, 8.0),
    "refusing_s": (2.0, 8.0),
    "denying_s": (2.0, 8.0),
    "stale_s": (2.0, 8.0),
    "small_limit_s": (2.0, 8.0),
    "control_s": (3.0, 10.0),
    "interrupt": (0.01, 0.05),
    "refusals": (0.3,),
    "two_committers": (0.5,),
    "offsets_expire_s": (2.0,),
    "poison_s": (1.0, 5.0),
    "raising_s": (2.0, 8.0),
    "hostile_s": (3.0,),
}
# With big transactions that are staged, and journals that are cut.
HOUR: dict[str, float] = {"hour_s": 3600.0, "machines": 2, "chunk_bytes": 250, "cleaning": True}
_NO_LANES: dict[str, float] = {"lanes": 0, "rights_s": 0.0, "lane_s": 0.0}
CLEAR: dict[str, float] = (
    dict.fromkeys(_KINDS, 0.0)
    | _NO_LANES
    | {
        "workers": 0,
        "rows": 0.0,
        "prepared": 0,
        "hop_s": 0.0,
        "lives_s": 0.0,
        "tables": 0,
        "repeats": 0.0,
    }
    | {"counters": 0, "chains": 0, "derivers": 0, "later": 0}
    | {"across": False, "grow_s": 0.0, "messages": 0.0, "gentle": False}
    | {"greedy_s": 0.0, "hour_s": 0.0, "bursts": 0.0, "late_answer": 0.0, "no_answer": 0.0}
)  # none of it


def _draw_first(random: Random) -> dict[str, Any]:
    """What all runs may have. The order of draws is a part of what a seed means."""

    def some(*values: float) -> float:
        return random.choice(values)

    return {
        "switch": some(0.2, 0.5, 0.9),
        "delay": some(0, 0.005, 0.03),
        "delay_s": some(0.02, 0.2, 1.0),
        "slow_lead": some(0, 0, 0.3),
        "crash": some(0, 0.001, 0.004),
        "freeze": some(0, 0.0005, 0.003),
        "freeze_s": some(0.5, 3.0, 12.0),
        "uncertain": some(0, 0.005, 0.03),
        "late_end": some(0, 0.01),
        "unavailable": some(0, 0, 0.003, 0.01),
        "client_crash": some(0, 0, 0.001),
        "client_freeze": some(0, 0, 0.001),
        "lose_command": some(0, 0, 0.05),
        "late_command": some(0, 0, 0.05),
        "double_command": some(0, 0, 0.05),
        "lose_reply": some(0, 0, 0.05),
        "write_uncertain": some(0, 0, 0.02),
        "late_write": some(0, 0, 0.02),
        "hide": some(0, 0, 0.05, 0.3),
        "marker_delay_s": some(0, 0.002, 0.05, 0.5),
        "skew_s": some(0, 0, 0.05, 3.0),
        "jump_s": some(0, 0, 3.0),
        "jump_by_s": some(2.0, 30.0, 600.0),
        "slow_disk": some(0, 0, 0.02, 0.2),
        "slow_disk_s": some(0.05, 1.0),
        "full_disk": some(0, 0, 0.01),
        "full_disk_s": some(0.5, 5.0),
        "director_s": some(2.0, 6.0, 20.0),
        "compact_s": some(0, 3.0),
        "expire_s": some(0, 0, 5.0),
        "checkpoint_loss": some(0, 0.5),
        "transaction_version": random.choice((2, 2, 2, 1)),
        "native_timeout_s": some(2.0, 10.0, 60.0),
        "retention_s": some(7 * 86_400.0, 7 * 86_400.0, 15.0),
        "control_partitions": random.choice((1, 1, 1, 2)),
        "mixed_batches": random.random() < 0.3,
        "small": random.random() < 0.3,
        "scale_s": some(0, 0.7, 2.0, 5.0),
        "linger": some(0, 0.3, 0.8),
        "chunk_bytes": random.choice((16 << 20, 1000, 500, 250)),
        "collate_ms": random.choice((200, 0, 1000)),
        "cleaning": random.random() < 0.5,
        "carriers_beside": random.random() < 0.6,
        "tight": random.random() < 0.15,
        "machines": random.choice((1, 2, 2, 3)),
        "clients": random.choice((1, 2, 3)),
        "jobs": random.randint(4, 8),
        "readers": random.choice((0, 1, 2, 3)),
        "work_s": float(random.randint(10, 40)),
        "retain_s": some(0, 0, 1.5, 6.0),
    }


def _draw_topics(random: Random) -> dict[str, float]:
    """How often somebody deletes a topic, and how often a broker does not know one."""
    return {
        "lose_s": random.choice((0, 0, 0, 0, 0, 5.0, 12.0)),
        "lag_s": random.choice((0, 0, 0, 0, 3.0)),
    }


def _draw_trouble(random: Random) -> dict[str, float]:
    """One kind of what lasts, or two, in four runs of five."""
    chosen = random.sample(sorted(_KINDS), random.choice((0, 1, 1, 2, 2)))
    values = {kind: random.choice(_KINDS[kind]) for kind in chosen}
    values |= {"trouble_for_s": random.choice((11.0, 11.0, 11.0, 30.0))}
    return values | {"lose_markers": random.choice((0.0, 1.0))}


def _draw_lanes(random: Random) -> dict[str, float]:
    """Lanes, in three runs of five."""
    if random.random() < 0.4:
        return _NO_LANES
    rights_s, lane_s = random.choice((0.0, 1.5, 4.0)), random.choice((0.0, 0.0, 2.0, 8.0))
    return {"lanes": random.choice((1, 2, 3)), "rights_s": rights_s, "lane_s": lane_s}


def _draw_across(random: Random) -> dict[str, float]:
    """Transactions over control partitions, in one run of four; in a third of these runs the cluster grows, too.

    In two thirds of them messages between leaders are spoiled at a rate of their own.
    """
    if random.random() < 0.75:
        return {}
    grow_s = random.choice((0.0, 0.0, 3.0))
    return {
        "across": True,
        "grow_s": grow_s,
        "control_partitions": random.choice((1, 2) if grow_s else (2, 2, 3)),
        "messages": random.choice((0.0, 0.05, 0.2)),
        "gentle": random.random() < 0.8,
    }


_PER_CALL = (
    "delay", "slow_lead", "crash", "freeze", "uncertain", "late_end", "unavailable", "late_answer", "no_answer",
    "client_crash", "client_freeze", "worker_crash", "worker_freeze", "hide", "slow_disk", "full_disk",
)  # fmt: skip


def _draw_overlaps(random: Random) -> dict[str, float]:
    """Rounds that overlap often, in half of the runs, and what becomes of their requests' answers."""
    return {
        "bursts": random.choice((0.0, 0.0, 0.2, 0.6)),
        "overlap_s": random.choice((0.02, 1.0)),
        "answered": random.choice((0.0, 0.5, 1.0)),
        "late_answer": random.choice((0.0, 0.0, 0.05, 0.3)),
        "no_answer": random.choice((0.0, 0.0, 0.0, 0.01, 0.05)),
    }


def _draw_workers(random: Random) -> dict[str, float]:
    """Workers, in one run of three."""
    return {
        "workers": random.choice((0, 0, 0, 0, 0, 0, 1, 2, 3)),
        "worker_crash": random.choice((0.0, 0.001, 0.004)),
        "worker_freeze": random.choice((0.0, 0.002, 0.006)),
        "rows": random.choice((0.0, 0.5, 0.9)),
    }


def parse(given: Iterable[str]) -> dict[str, float]:
    """Changes of a weather, each ``name=value``, as `Weather.differences` has them; "fair": all is as usual.

    Raises:
        ValueError: there is no such thing.
    """
    usual = {field.name: getattr(Weather(), field.name) for field in fields(Weather)}
    values: dict[str, float] = {}
    for text in given:
        name, _, value = text.strip().partition("=")
        if text == FAIR:
            values |= usual
            continue
        if name not in usual:
            raise ValueError(f"no such weather: {name!r}; there is {', '.join(usual)}")
        values[name] = type(usual[name])(float(value))
    return values


def number(value: float) -> str:
    """Short, and exact."""
    return repr(float(value)).removesuffix(".0")
