"""One snapshot of three control partitions against one of a single one: three streams each, ``at`` now.

In turn, in one run: the cluster idle, and beside one-shots (8 in flight, over all three control partitions). One
controller process leads all three, so their leaders share an interpreter, and all share two cores. The longest one
beside one-shots shows that no snapshot is starved.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import anabranch
from bench import setting
from bench.partitions import streams_apart

PARTITIONS = 3
SNAPSHOTS, QUICK_SNAPSHOTS, WARM_UPS = 600, 150, 50
IN_FLIGHT = 8
GOAL = 2.0


def run(*, quick: bool = False) -> dict[str, Any]:
    """A row for each load."""
    rows = []
    with (
        setting.place("--control-partitions", str(PARTITIONS)) as place,
        anabranch.connect(place.bootstrap, timeout=60) as client,
    ):
        apart = streams_apart(client, PARTITIONS)
        scope = apart[0].partition("/")[0]
        one = [f"{scope}/{name}" for name in "abc"]
        for stream in one[1:]:
            client.create_stream(stream, 1)
        count = QUICK_SNAPSHOTS if quick else SNAPSHOTS
        for name in ("idle", "beside one-shots"):
            load = (
                nullcontext()
                if name == "idle"
                else setting.loaded(place.bootstrap, apart, IN_FLIGHT)
            )
            with load:
                rows.append({"load": name} | _measure(client, one, apart, count))
    return {"snapshots": count, "goal_at_most": GOAL, "rows": rows}


def _measure(
    client: anabranch.Client, one: Sequence[str], apart: Sequence[str], count: int
) -> dict[str, float]:
    took: dict[str, list[float]] = {"one": [], "three": []}
    for number in range(WARM_UPS + count):
        for name, streams in (("one", one), ("three", apart)):
            before = time.perf_counter()
            client.snapshot(streams)
            if number >= WARM_UPS:
                took[name].append((time.perf_counter() - before) * 1000)
    found: dict[str, float] = {}
    for name, times in took.items():
        times.sort()
        found |= {f"{name}_p50_ms": setting.percentile(times, 0.5)}
        found |= {f"{name}_p99_ms": setting.percentile(times, 0.99), f"{name}_most_ms": times[-1]}
    return found | {"ratio": found["three_p50_ms"] / found["one_p50_ms"]}


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    head = [
        "snapshot of now", "one: p50, ms", "p99", "longest", "three: p50, ms", "p99", "longest", "of one", "goal",
    ]  # fmt: skip
    names = [f"{one}_{figure}_ms" for one in ("one", "three") for figure in ("p50", "p99", "most")]
    rows = [
        [
            row["load"],
            *[f"{row[name]:.1f}" for name in names],
            f"{row['ratio']:.2f} ×",
            f"≤ {GOAL} ×",
        ]
        for row in result["rows"]
    ]
    return head, rows
