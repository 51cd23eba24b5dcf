"""Series over time, from what the processes said."""

from __future__ import annotations

import numpy as np

from examples.flights.measure import measure_ticks, rows_seen, rows_written
from examples.flights.notes import NOTE, Kind


def test_rows_of_all_workers_add_up() -> None:
    workers = {
        "a": [{"at": 10.0, "rows": 5}, {"at": 11.0, "rows": 10}],
        "b": [{"at": 10.5, "rows": 7}, {"at": 11.01, "rows": 8}],
    }
    assert rows_written(workers, 10.0) == [[0.0, 5], [0.5, 12], [1.0, 17], [1.01, 18]]


def test_rows_seen_are_counted_by_the_step() -> None:
    notes = np.zeros(102, NOTE)
    notes["at"] = [*(3.0 + n / 100 for n in range(101)), 2.0]
    notes["kind"][-1] = Kind.SMALL
    series = rows_seen(notes, 1.0)
    assert series[:3] == [[0.0, 0], [1.75, 0], [2.0, 1]]
    assert series[-1] == [3.0, 101]
    assert len(series) == 7
    assert rows_seen(notes[:0], 1.0) == [[0.0, 0]]


def test_small_commits() -> None:
    ticks = [{"began": 2.0 + n, "seconds": n / 100} for n in range(1, 11)]
    found = measure_ticks(ticks, 2.0)
    assert (found["count"], found["p50_s"], found["max_s"]) == (10, 0.06, 0.1)
    assert found["series"][0] == [1.0, 0.01]
    assert measure_ticks([], 2.0) == {"count": 0}
