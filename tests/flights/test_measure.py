"""Series over time, from what the processes said."""

from __future__ import annotations

from examples.flights.measure import measure_ticks, rows_seen, rows_written


def test_rows_of_all_workers_add_up() -> None:
    workers = {
        "a": [{"at": 10.0, "rows": 5}, {"at": 11.0, "rows": 10}],
        "b": [{"at": 10.5, "rows": 7}, {"at": 11.01, "rows": 8}],
    }
    assert rows_written(workers, 10.0) == [[0.0, 5], [0.5, 12], [1.0, 17], [1.01, 18]]


def test_points_too_close_are_left_out_but_not_the_last() -> None:
    said = [{"at": 1.0 + n / 100, "big": n} for n in range(101)]
    series = rows_seen(said, 1.0)
    assert series[0] == [0.0, 0]
    assert series[-1] == [1.0, 100]
    assert len(series) == 5


def test_before_the_first_event_nothing_is_seen() -> None:
    assert rows_seen([{"at": 3.0}], 1.0) == [[2.0, 0]]
    assert rows_seen([], 1.0) == []


def test_small_commits() -> None:
    ticks = [{"began": 2.0 + n, "seconds": n / 100} for n in range(1, 11)]
    found = measure_ticks(ticks, 2.0)
    assert (found["count"], found["p50_s"], found["max_s"]) == (10, 0.06, 0.1)
    assert found["series"][0] == [1.0, 0.01]
    assert measure_ticks([], 2.0) == {"count": 0}
