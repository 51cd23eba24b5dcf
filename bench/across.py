"""One snapshot of three control partitions against one of a single one: three streams each, ``at`` now.

In turn, in one run: the cluster idle, and beside one-shots (8 in flight, over all three control partitions). One
controller process leads all three, so their leaders share an interpreter, and all share two cores.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import anabranch
from anabranch.protocol.ids import control_partition_of
from bench import setting

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
        apart = [f"across-{number}/a" for number in range(PARTITIONS)]
        one = [f"across-0/{name}" for name in "abc"]
        for stream in {*apart, *one}:
            client.create_stream(stream, 1)
        served = {control_partition_of(_commit(client, stream)) for stream in apart}
        if len(served) != PARTITIONS:
            raise RuntimeError(f"the streams are on control partitions {sorted(served)}")
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


def _commit(client: anabranch.Client, stream: str) -> bytes:
    return client.transact(lambda txn: txn.write(stream, b"v", key=b"k")).txn_id


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
        found |= {f"{name}_p99_ms": setting.percentile(times, 0.99)}
    return found | {"ratio": found["three_p50_ms"] / found["one_p50_ms"]}


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    head = ["snapshot of now", "one: p50, ms", "p99", "three: p50, ms", "p99", "of one", "goal"]
    names = ("one_p50_ms", "one_p99_ms", "three_p50_ms", "three_p99_ms")
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
