"""How cost grows with the number of streams, and with the segments of the stream written to.

One-shots of ten events, eight in flight, to ten streams in turn, while there are 10, 100 and 1,000 streams of one
segment in all (``--quick``: 10, 50 and 200); then, with another broker and controller, to one stream of 1, 64 and
1,024 segments (1, 16 and 64), whose keys go to all of them. All other streams are idle. Beside latencies: CPU
seconds a second of the controller process, and its resident memory, at rest before the load and under it. Each
stream has three topics; a row has the time to create its additional streams, eight at a time. Ratios are to the
first row of the three.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil  # type: ignore[import-untyped]

import anabranch
from bench.oneshot import measure
from bench.setting import Place, cpu_s, one_shots, place

STREAMS, QUICK_STREAMS = (10, 100, 1_000), (10, 50, 200)
SEGMENTS, QUICK_SEGMENTS = (1, 64, 1_024), (1, 16, 64)
SECONDS, QUICK_SECONDS = 10.0, 3.0
WRITTEN = 10
IN_FLIGHT = 8
CREATED_AT_ONCE = 8
CREATE_TIMEOUT_S = 300.0
REST_S = 2.0  # the broker and the controller finish earlier work
RATIOS = ("per_s", "p50_ms", "p99_ms", "cpu_rest", "cpu_load", "cpu_ms_each", "mb_rest", "mb_load")


def run(*, quick: bool = False) -> dict[str, Any]:
    """Rows by streams and by segments, each with ratios to the first of its kind."""
    seconds = QUICK_SECONDS if quick else SECONDS
    return {
        "in_flight": IN_FLIGHT,
        "seconds_each": seconds,
        "streams": _with_ratios(_by_streams(QUICK_STREAMS if quick else STREAMS, seconds)),
        "segments": _with_ratios(_by_segments(QUICK_SEGMENTS if quick else SEGMENTS, seconds)),
    }


def _by_streams(counts: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    rows = []
    with place() as there, anabranch.connect(there.bootstrap) as client:
        names: list[str] = []
        for count in counts:
            new = [f"bench/many{i}" for i in range(len(names), count)]
            created = _create(client, new, 1)
            names += new
            found = _costs(there, client, names[:WRITTEN], seconds)
            rows.append({"streams": count, "segments": 1, "created_s": created, **found})
    return rows


def _by_segments(counts: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    rows = []
    with place() as there, anabranch.connect(there.bootstrap) as client:
        for number, segments in enumerate(counts, 1):
            stream = f"bench/wide{segments}"
            created = _create(client, [stream], segments)
            found = _costs(there, client, [stream], seconds)
            rows.append({"streams": number, "segments": segments, "created_s": created, **found})
    return rows


def _create(client: anabranch.Client, streams: Sequence[str], segments: int) -> float:
    """Create streams, some at a time; seconds until all exist."""

    def create(stream: str) -> None:
        client.create_stream(stream, segments, timeout=CREATE_TIMEOUT_S)

    start = time.perf_counter()
    with ThreadPoolExecutor(CREATED_AT_ONCE) as pool:
        list(pool.map(create, streams))
    return time.perf_counter() - start


def _costs(
    there: Place, client: anabranch.Client, streams: Sequence[str], seconds: float
) -> dict[str, float]:
    """The controller's costs at rest and under load, and latencies under load."""
    process = psutil.Process(there.controller)
    commits = [one_shots(client, streams, i * 1_000_003) for i in range(IN_FLIGHT)]
    measure(commits, seconds)  # hot paths are compiled; connections are open
    time.sleep(REST_S)
    start, cpu = time.perf_counter(), cpu_s(there.controller)
    time.sleep(seconds)
    cpu_rest = (cpu_s(there.controller) - cpu) / (time.perf_counter() - start)
    mb_rest = process.memory_info().rss / 1e6
    start, cpu = time.perf_counter(), cpu_s(there.controller)
    found = measure(commits, seconds)
    cpu_load = (cpu_s(there.controller) - cpu) / (time.perf_counter() - start)
    return {
        **found,
        "cpu_rest": cpu_rest,
        "cpu_load": cpu_load,
        "cpu_ms_each": cpu_load / found["per_s"] * 1000,
        "mb_rest": mb_rest,
        "mb_load": process.memory_info().rss / 1e6,
    }


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first = rows[0]
    return [
        {**row, "of_first": {key: row[key] / first[key] if first[key] else 0.0 for key in RATIOS}}
        for row in rows
    ]


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows; below each row but the first of its kind its multiples of the first."""
    head = ["streams, segments", "made in", "/s", "p50 / p99 ms", "CPU rest / load", "CPU ms each"]
    head += ["MB rest / load"]
    rows = []
    for kind in ("streams", "segments"):
        for i, row in enumerate(result[kind]):
            name = f"{row['streams']:,}, {row['segments']:,}"
            rows.append([name, f"{row['created_s']:.1f} s", *_cells(row, (0, 1, 3, 2, 0))])
            if i:
                rows.append(["", "", *(f"{cell} ×" for cell in _cells(row["of_first"], (2,) * 5))])
    return head, rows


def _cells(row: dict[str, float], digits: Sequence[int]) -> list[str]:
    pairs = (("per_s",), ("p50_ms", "p99_ms"), ("cpu_rest", "cpu_load"), ("cpu_ms_each",))
    return [
        " / ".join(f"{row[key]:,.{places}f}" for key in keys)
        for keys, places in zip((*pairs, ("mb_rest", "mb_load")), digits, strict=True)
    ]
