"""Transactions through journals to an exclusive stream, against the same to another stream: one client, then eight.

A transaction opens, writes 100 events of 100 bytes with one key, and commits; the next one begins at once. One
client alone: both streams in turn, in one run, medians of rounds; CPU is that of a transaction, in all three
processes. Then eight threads of one client, with the same key: `transact` begins again after a pause when an older
transaction has the segment (wait-die). ``fewest``: transactions of the slowest thread, of the mean. Then the same
over two leaders: the streams are at another control partition than their transactions. One controller process leads
both. Not equal: the eight write side by side to the other stream, and one after the other to the exclusive one.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import anabranch
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from bench import setting
from bench.partitions import streams_apart
from bench.setting import Place, cpu_s, noise_values, side_by_side

EVENTS, SIZE, CLIENTS = 100, 100, 8
GOAL = 0.9
LIMIT_S = 120.0
EXCLUSIVE, OTHER = "exclusive", "shared"
WITHIN, OVER = "", " over two leaders"


def run(*, quick: bool = False) -> dict[str, Any]:
    """Transactions a second of one client, and of eight, and their ratios (goal of one client: at least 0.9)."""
    rounds, seconds = (2, 2.5) if quick else (7, 6.0)
    with (
        setting.place("--control-partitions", "2") as place,
        anabranch.connect(place.bootstrap, timeout=60) as client,
    ):
        with anabranch.connect(place.bootstrap, lane=ADMIN_LANE) as operator:
            operator.feature_level(raise_to=LEVEL)
        scopes = [stream.partition("/")[0] for stream in streams_apart(client, 2)]
        client.create_stream(f"{scopes[0]}/{EXCLUSIVE}", exclusive=True)
        client.create_stream(f"{scopes[0]}/{OTHER}")
        homes = {WITHIN: scopes[0], OVER: scopes[1]}
        found: dict[str, list[dict[str, float]]] = {}
        for number in range(rounds + 1):
            names = [EXCLUSIVE, OTHER] if number % 2 else [OTHER, EXCLUSIVE]
            for clients in (1, CLIENTS):
                for where, home in homes.items():
                    for name in names:
                        load = clients, home, f"{scopes[0]}/{name}"
                        its = _measure(place, client, load, seconds)
                        if number:  # the first round warms up
                            found.setdefault(f"{name} {clients}{where}", []).append(its)
    medians = {
        side: {name: statistics.median(each[name] for each in its) for name in its[0]}
        for side, its in found.items()
    }
    return {"events": EVENTS, "rounds": rounds, "goal": GOAL, "sides": medians}


def _measure(
    place: Place, client: anabranch.Client, load: tuple[int, str, str], seconds: float
) -> dict[str, float]:
    """``load``: how many at a time, the scope of their transactions, and the stream."""
    clients, home, stream = load
    events = [(value, b"key") for value in noise_values(SIZE)[:EVENTS]]
    committed, again = [0] * clients, [0] * clients
    processes = os.getpid(), place.controller, place.broker
    before, start = sum(map(cpu_s, processes)), time.perf_counter()

    def work(number: int) -> None:
        while time.perf_counter() < start + seconds:

            def write(txn: anabranch.Transaction) -> None:
                again[number] += 1
                txn.token()
                txn.write_many(stream, events)

            client.transact(write, scope=home, timeout=LIMIT_S)
            again[number] -= 1
            committed[number] += 1

    side_by_side(work, clients)
    took, count = time.perf_counter() - start, max(1, sum(committed))
    return {
        "rate": sum(committed) / took,
        "again": sum(again) / count,
        "fewest": min(committed) * clients / count,
        "cpu_ms": (sum(map(cpu_s, processes)) - before) / count * 1000,
    }


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    head = ["", "transactions/s", "of the other stream", "goal", "begun again", "fewest", "CPU, ms"]
    rows = []
    for where in (WITHIN, OVER):
        for clients in (1, CLIENTS):
            others = result["sides"][f"{OTHER} {clients}{where}"]
            for name in (EXCLUSIVE, OTHER):
                its = result["sides"][f"{name} {clients}{where}"]
                ratio = f"{its['rate'] / others['rate']:.2f} ×" if name == EXCLUSIVE else ""
                goal = f"≥ {GOAL} ×" if name == EXCLUSIVE and clients == 1 else ""
                figures = [f"{its['again']:.2f}", f"{its['fewest']:.2f}", f"{its['cpu_ms']:.1f}"]
                side = f"{name}, {clients} at a time{where}"
                rows.append([side, f"{its['rate']:.0f}", ratio, goal, *figures])
    return head, rows
