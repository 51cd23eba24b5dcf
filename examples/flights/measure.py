"""The measurements of a run, as series over time, for its JSON and the README's picture. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from examples.flights.checks import percentile
from examples.flights.notes import Kind, Notes, of_kind
from examples.flights.processes import Message

STEP_S = 0.25


def measure_ticks(ticks: Sequence[Message], started: float) -> dict[str, Any]:
    """The small transactions: commit times, and the slow ones."""
    seconds = [tick["seconds"] for tick in ticks]
    if not seconds:
        return {"count": 0}
    return {
        "count": len(seconds),
        "p50_s": round(percentile(seconds, 50), 4),
        "p90_s": round(percentile(seconds, 90), 4),
        "max_s": round(max(seconds), 4),
        "series": [
            [round(tick["began"] - started, 2), round(tick["seconds"], 3)] for tick in ticks
        ],
    }


def rows_written(workers: Mapping[str, Iterable[Message]], started: float) -> list[list[float]]:
    """(seconds, rows that the workers wrote so far), every `STEP_S` seconds and at the end."""
    marks = sorted(
        (message["at"] - started, name, message["rows"])
        for name, messages in workers.items()
        for message in messages
    )
    latest: dict[str, int] = {}
    series: list[list[float]] = []
    for at, name, rows in marks:
        latest[name] = rows
        series.append([round(at, 2), sum(latest.values())])
    return _thinned(series)


def rows_seen(notes: Notes, started: float) -> list[list[float]]:
    """(seconds, events of the big transaction that an observer saw so far), each `STEP_S` from the first on."""
    seen = np.sort(of_kind(notes, Kind.BIG)["at"]) - started
    if not len(seen):
        return [[0.0, 0]]
    steps = np.arange(seen[0] - STEP_S, seen[-1] + STEP_S, STEP_S)
    counts = np.searchsorted(seen, steps, side="right")
    return [
        [0.0, 0],
        *([round(at, 2), n] for at, n in zip(steps.tolist(), counts.tolist(), strict=True)),
    ]


def _thinned(series: list[list[float]]) -> list[list[float]]:
    """The series without points that are closer than `STEP_S` to the point before, except the last one."""
    kept: list[list[float]] = []
    for index, point in enumerate(series):
        last = index == len(series) - 1
        if not kept or last or point[0] - kept[-1][0] >= STEP_S:
            kept.append(point)
    return kept
