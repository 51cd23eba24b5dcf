"""Controllers' CPU of a commit with 1, 2 and 4 control partitions that share nothing, 300 commits a second at each.

One-shots of ten events to a stream of each control partition, due at fixed times: each of eight threads of a
control partition commits every 27 ms. Each number of control partitions has a cluster of its own; one controller
process leads all of them. The CPU of a commit includes what the leaders do without commits; ``idle``: that alone,
in a second. Then with 64 in flight, without a pause: the rate of this process, and what one whole core would carry.

Not equal: clusters with more control partitions get more commits from the same two cores, which broker and client
share, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import anabranch
from bench import setting
from bench.oneshot import measure

COUNTS = (1, 2, 4)
RATE = 300  # commits a second of a control partition
THREADS = 8  # of a control partition
IN_FLIGHT = 64  # of all
GOAL = 1.05


def run(*, quick: bool = False) -> dict[str, Any]:
    """A row for each number of control partitions; the goal is for the CPU of a commit, against that with one."""
    seconds, warm_s = (4.0, 4.0) if quick else (20.0, setting.WARM_S)
    rows = []
    for count in COUNTS:
        with (
            setting.place("--control-partitions", str(count)) as place,
            anabranch.connect(place.bootstrap, timeout=60) as client,
        ):
            rows.append({"partitions": count} | _measure(place, client, count, seconds, warm_s))
    for row in rows:
        row["ratio"] = row["paced_cpu_us"] / rows[0]["paced_cpu_us"]
    return {"rate_each": RATE, "seconds": seconds, "goal_at_most": GOAL, "rows": rows}


def streams_apart(client: anabranch.Client, count: int, name: str = "a") -> list[str]:
    """Make a stream at each of ``count`` control partitions. Raises: RuntimeError (scopes are elsewhere)."""
    streams = [f"apart-{number}/{name}" for number in range(2 * count)]
    for stream in streams:
        client.create_stream(stream, 2)
    served = client.control_partitions(streams)
    found = {place: stream for stream, place in reversed(served.items())}
    if len(found) != count:
        raise RuntimeError(f"the streams are on control partitions {served}")
    return [found[number] for number in sorted(found)]


def _measure(
    place: setting.Place, client: anabranch.Client, count: int, seconds: float, warm_s: float
) -> dict[str, float]:
    streams = streams_apart(client, count)
    commits = [setting.one_shots(client, [s], 1_000_003 * i) for i, s in enumerate(streams)]
    unpaced = commits * (IN_FLIGHT // count)
    measure(unpaced, warm_s)
    parts = {"controller": place.controller, "broker": place.broker, "client": os.getpid()}
    before = setting.cpu_s(place.controller)
    time.sleep(2.0)
    idle = (setting.cpu_s(place.controller) - before) / 2.0
    _paced(streams, client, 1.0)
    before, start = setting.cpu_s(place.controller), time.perf_counter()
    done = _paced(streams, client, seconds)
    paced_cpu_us = (setting.cpu_s(place.controller) - before) / done * 1e6
    paced = done / (time.perf_counter() - start)
    most = measure(unpaced, seconds, parts)
    return {
        "idle_ms": idle * 1000,
        "paced_per_s": paced,
        "paced_cpu_us": paced_cpu_us,
        "most_per_s": most["per_s"],
        "most_cpu_us": most["cpu_us_controller"],
        "one_core_per_s": 1e6 / most["cpu_us_controller"],
    }


def _paced(streams: Sequence[str], client: anabranch.Client, seconds: float) -> int:
    """Commit to each stream at the rate. Returns the number of commits."""
    counts = [0] * (len(streams) * THREADS)
    start = time.perf_counter()

    def work(number: int) -> None:
        commit = setting.one_shots(client, [streams[number // THREADS]], 1_000_003 * number)
        due = start + number % THREADS / RATE
        while due < start + seconds:
            time.sleep(max(0.0, due - time.perf_counter()))
            commit()
            counts[number] += 1
            due += THREADS / RATE

    setting.side_by_side(work, len(counts))
    return sum(counts)


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    head = [
        "control partitions", "commits/s", "controller's CPU of a commit", "of one", "goal", "idle, CPU in 1 s",
        "64 in flight", "CPU of a commit", "one core would carry",
    ]  # fmt: skip
    rows = [
        [
            str(row["partitions"]),
            f"{row['paced_per_s']:,.0f}",
            f"{row['paced_cpu_us']:,.0f} µs",
            f"{row['ratio']:.2f} ×",
            f"≤ {GOAL} ×",
            f"{row['idle_ms']:.0f} ms",
            f"{row['most_per_s']:,.0f}/s",
            f"{row['most_cpu_us']:,.0f} µs",
            f"{row['one_core_per_s']:,.0f}/s",
        ]
        for row in result["rows"]
    ]
    return head, rows
