"""The asyncio client against the blocking one: one-shots of 10 events at 64 in flight, and a stream read through.

In turn, each in this process: 64 tasks of one event loop, and 64 threads. CPU is that of the process, for a commit
or an event. Goal: ≥ 0.9 of the blocking client's commits.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from typing import Any

import anabranch
import anabranch.aio
from bench.oneshot import EVENTS, VALUE, measure
from bench.setting import Place, cpu_s, percentile

IN_FLIGHT = 64
LEAST_RATIO = 0.9
READ = 100_000
Figures = dict[str, float]


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Medians of rounds in turn, and their ratios."""
    rounds, seconds = (3, 3.0) if quick else (7, 8.0)
    stream = place.new_stream(segments=2)
    source = place.new_stream(segments=2)
    found: dict[str, list[Figures]] = {"blocking": [], "aio": []}
    with anabranch.connect(place.bootstrap) as client:
        with client.begin(source.partition("/")[0]) as txn:
            txn.write_many(source, [(VALUE, b"%d" % i) for i in range(READ)])
            txn.commit(timeout=60)
        _threads(client, stream, seconds)
        _read(client, source)
        for number in range(rounds):
            for side in sorted(found, reverse=bool(number % 2)):
                if side == "blocking":
                    figures = _threads(client, stream, seconds) | _read(client, source)
                else:
                    figures = asyncio.run(_tasks(place.bootstrap, stream, source, seconds))
                found[side].append(figures)
    sides = {
        side: {key: statistics.median(one[key] for one in of) for key in of[0]}
        for side, of in found.items()
    }
    ratios = {key: sides["aio"][key] / figure for key, figure in sides["blocking"].items()}
    return {"in_flight": IN_FLIGHT, "rounds": rounds, "seconds_each": seconds} | {
        **sides,
        "ratios": ratios,
        "goals": {"least_rate_ratio": LEAST_RATIO},
    }


def _threads(client: anabranch.Client, stream: str, seconds: float) -> Figures:
    scope = stream.partition("/")[0]

    def commit() -> None:
        with client.begin(scope) as txn:
            for i in range(EVENTS):
                txn.write(stream, VALUE, key=b"key-%d" % i)
            txn.commit()

    found = measure([commit] * IN_FLIGHT, seconds, {"client": os.getpid()})
    return {key: found[key] for key in ("per_s", "p50_ms", "p99_ms", "cpu_us_client")}


def _read(client: anabranch.Client, source: str) -> Figures:
    began, spent = time.perf_counter(), -cpu_s(os.getpid())
    with client.snapshot(source).read(source) as reader:
        count = sum(1 for _ in reader)
    return _reading(count, time.perf_counter() - began, spent + cpu_s(os.getpid()))


def _reading(count: int, seconds: float, cpu: float) -> Figures:
    return {"read_per_s": count / seconds, "cpu_us_read": cpu / count * 1e6}


async def _tasks(bootstrap: str, stream: str, source: str, seconds: float) -> Figures:
    scope = stream.partition("/")[0]
    took: list[float] = []
    async with anabranch.aio.connect(bootstrap) as client:

        async def commit() -> None:
            async with client.begin(scope) as txn:
                for i in range(EVENTS):
                    await txn.write(stream, VALUE, key=b"key-%d" % i)
                await txn.commit()

        async def work() -> None:
            while (begun := time.perf_counter()) < end:
                await commit()
                took.append(time.perf_counter() - begun)

        await commit()  # connections and metadata are not timed
        spent = -cpu_s(os.getpid())
        start = time.perf_counter()
        end = start + seconds
        await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
        elapsed = time.perf_counter() - start
        cpu = spent + cpu_s(os.getpid())
        began, spent = time.perf_counter(), -cpu_s(os.getpid())
        async with (await client.snapshot(source)).read(source) as reader:
            count = 0
            async for _ in reader:
                count += 1
        figures = _reading(count, time.perf_counter() - began, spent + cpu_s(os.getpid()))
    took.sort()
    return figures | {
        "per_s": len(took) / elapsed,
        "p50_ms": percentile(took, 0.5) * 1000,
        "p99_ms": percentile(took, 0.99) * 1000,
        "cpu_us_client": cpu / len(took) * 1e6,
    }


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    titles = {
        "per_s": "commits/s",
        "p50_ms": "p50, ms",
        "p99_ms": "p99, ms",
        "cpu_us_client": "CPU of a commit, µs",
        "read_per_s": "events read/s",
        "cpu_us_read": "CPU of an event, µs",
    }
    rows = []
    for key, title in titles.items():
        figures = [f"{result[side][key]:,.1f}" for side in ("aio", "blocking")]
        goal = f"≥ {LEAST_RATIO} ×" if key == "per_s" else ""
        rows.append([title, *figures, f"{result['ratios'][key]:.2f} ×", goal])
    return ["", "aio", "blocking", "ratio", "goal"], rows
