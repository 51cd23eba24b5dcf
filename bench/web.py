"""1,000 one-shots a second with and without `anabranch web` and ten browsers; page loads with 10,000 open.

In turn, at the same rate of commits on both sides, because a controller takes more CPU for a commit if it decides
fewer of them in a round. With: ten clients of server-sent events on seven pages, events among them, and a page
load each second. Goal: the controller's CPU for a commit ≤ 1.05 of without. Page loads, with 1,000 streams: each
load a poll of its own. Goal: ≤ 300 ms.
"""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import anabranch
from bench.setting import Place, begin_and_touch, cpu_s, loaded, percentile

IN_FLIGHT = 64
A_SECOND = 1000.0
PAGES = ("/", "/streams", "/transactions", "/groups", "/controllers")
PAUSE_S = 1.1  # a page is asked for again after a second


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Medians of rounds in turn, their ratios, and the loads of pages."""
    rounds, seconds, open_ones = (2, 4.0, 500) if quick else (6, 15.0, 10_000)
    many = 20 if quick else 1000
    streams = [place.new_stream(segments=2) for _ in range(4)]
    looked_at = (*PAGES, f"/streams/{streams[0]}", f"/streams/{streams[0]}/events")
    found: dict[str, list[Measured]] = {"without": [], "with": []}
    cpu: list[float] = []
    for number in range(rounds):
        for side in ("without", "with") if number % 2 else ("with", "without"):
            if side == "with":
                with (
                    _web(place.bootstrap) as (host, process),
                    _looked_at(host, looked_at),
                ):
                    before = cpu_s(process)
                    found[side].append(_measure(place, streams, seconds))
                    cpu.append((cpu_s(process) - before) / seconds)
            else:
                found[side].append(_measure(place, streams, seconds))
    p50, p99, spent = (
        {side: statistics.median(each[at] for each in of) for side, of in found.items()}
        for at in range(3)
    )
    # What changes between rounds is in both sides of a round.
    pairs = zip(found["with"], found["without"], strict=True)
    spent_ratio = statistics.median(a.cpu_us / b.cpu_us for a, b in pairs)
    with anabranch.connect(place.bootstrap, timeout=60) as client:
        threads = [
            threading.Thread(target=_open, args=(client, streams[i % 4], open_ones // 8))
            for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number in range(many - 4):
            client.create_stream(f"{streams[0].partition('/')[0]}/many-{number}")
    opened = (*looked_at, "/transactions?limit=1000", "/transactions?show=finished")
    with _web(place.bootstrap) as (host, _):
        loads = {path: _loads(host, path, 5 if quick else 20) for path in opened}
    return {
        "rounds": rounds,
        "seconds_each": seconds,
        "p50_ms": p50,
        "p99_ms": p99,
        "p50_ratio": p50["with"] / p50["without"],
        "p99_ratio": p99["with"] / p99["without"],
        "cpu_us": spent,
        "cpu_us_ratio": spent_ratio,
        "goal": 1.05,
        "streams": many,
        "cpu_of_web": statistics.median(cpu),
        "open_transactions": open_ones,
        "page_ms": loads,
        "page_goal_ms": 300,
    }


class Measured(NamedTuple):
    """Of one-shots: milliseconds, and microseconds of the controller's CPU for each."""

    p50_ms: float
    p99_ms: float
    cpu_us: float


def _measure(place: Place, streams: list[str], seconds: float) -> Measured:
    with loaded(place.bootstrap, streams, IN_FLIGHT, a_second=A_SECOND) as load:
        time.sleep(seconds / 5)  # connections are made in the first part
        first, before = len(load.calls), cpu_s(place.controller)
        time.sleep(seconds * 4 / 5)
        spent, calls = cpu_s(place.controller) - before, load.calls[first:]
    took = sorted(each for _, each in calls)
    cpu_us = spent / len(calls) * 1e6
    return Measured(percentile(took, 0.5) * 1000, percentile(took, 0.99) * 1000, cpu_us)


@contextmanager
def _web(bootstrap: str) -> Iterator[tuple[str, int]]:
    """A web process that has answered: its address and its process id."""
    line = [sys.executable, "-m", "anabranch.cli", "web", "-b", bootstrap, "--port", "0", "--json"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            host = json.loads(process.stdout.readline())["url"].split("/")[2]
            _load(host, "/")
            yield host, process.pid
        finally:
            process.terminate()


@contextmanager
def _looked_at(host: str, pages: tuple[str, ...]) -> Iterator[None]:
    """Ten browsers on these pages, and a page load each second: a process of their own, as they are at home."""
    line = [sys.executable, "-m", "bench.web", host, *pages]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as browsers:
        try:
            yield
        finally:
            seen = int(browsers.communicate()[0])
    if seen < 20:
        raise RuntimeError(f"the browsers saw {seen} lines")


def look_on(host: str, pages: Sequence[str]) -> int:
    """Ten browsers until standard input ends; how many lines they saw."""
    seen: list[int] = []

    def look(path: str) -> None:
        connection = http.client.HTTPConnection(host, timeout=60)
        connection.request("GET", path, headers={"Accept": "text/event-stream"})
        answer = connection.getresponse()
        while line := answer.readline():
            seen.append(len(line))

    def scrape() -> None:
        while True:
            _load(host, "/streams")
            time.sleep(1.0)

    calls = [partial(look, pages[i % len(pages)]) for i in range(10)] + [scrape]
    for call in calls:
        threading.Thread(target=call, daemon=True).start()
    sys.stdin.read()
    return len(seen)


def _load(host: str, path: str) -> float:
    began = time.perf_counter()
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.status}: {text[-400:]}")
    return (time.perf_counter() - began) * 1000


def _loads(host: str, path: str, count: int) -> dict[str, float]:
    took = []
    for _ in range(count):
        time.sleep(PAUSE_S)
        took.append(_load(host, path))
    return {"p50": statistics.median(took), "worst": max(took)}


def _open(client: anabranch.Client, stream: str, count: int) -> None:
    for _ in range(count):
        begin_and_touch(client, stream)


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    rows = [
        [
            f"one-shots, {name}",
            f"{result[f'{name}_ms']['without']:.1f} ms",
            f"{result[f'{name}_ms']['with']:.1f} ms",
            f"{result[f'{name}_ratio']:.3f} ×",
            "≤ 1.05 ×",
        ]
        for name in ("p50", "p99")
    ]
    rows.append(
        [
            "the controller's CPU for each",
            f"{result['cpu_us']['without']:.0f} µs",
            f"{result['cpu_us']['with']:.0f} µs",
            f"{result['cpu_us_ratio']:.3f} ×",
            "≤ 1.05 ×",
        ]
    )
    rows.append(["the web process", "", f"{result['cpu_of_web']:.3f} cores", "", ""])
    for path, found in result["page_ms"].items():
        many = f"{result['open_transactions']:,} open, {result['streams']:,} streams"
        rows.append(
            [
                f"page {path}, {many}",
                "",
                f"{found['p50']:.0f} ms",
                f"worst {found['worst']:.0f}",
                "≤ 300 ms",
            ]
        )
    return ["", "without", "with", "ratio", "goal"], rows


if __name__ == "__main__":
    sys.stdout.write(str(look_on(sys.argv[1], sys.argv[2:])))
