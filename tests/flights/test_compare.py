"""What came is noted as it was, compared with a table, and measured over time."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from examples.flights.compare import Compared, Wanted, compare
from examples.flights.measure import measure_ticks, rows_seen, rows_written
from examples.flights.notes import (
    DOOMED_MARK,
    END,
    NO_KEY,
    NOTE,
    RAW,
    Kind,
    Notebook,
    Small,
    digest_of,
    kind_of,
    read_notes,
)
from examples.flights.source import Row

Event = tuple[bytes | None, bytes, int | None]

TABLE: list[Event] = [
    (b"a", b"a1", 5),
    (b"b", b"b1", 5),
    (b"a", b"a2", 5),
    (None, b"n1", 5),
    (b"a", b"a3", 5),
    (None, b"n1", 5),
]


def wanted(events: list[Event]) -> Wanted:
    return Wanted(
        Row(number, key, lambda value=value: value, time)  # type: ignore[misc]
        for number, (key, value, time) in enumerate(events)
    )


def against(table: list[Event], events: list[Event]) -> Compared:
    came = np.zeros(len(events), NOTE)
    for at, (key, value, stamp) in enumerate(events):
        came["key"][at], came["value"][at] = digest_of(key), digest_of(value)
        came["stamp"][at], came["offset"][at] = stamp or 0, at
    return compare(wanted(table), came)


def test_equal_is_equal() -> None:
    assert against(TABLE, TABLE) == Compared(6, [])
    assert (wanted(TABLE).count, wanted(TABLE).keys) == (6, 2)


def test_only_the_order_of_a_key_counts() -> None:
    shuffled = [TABLE[5], TABLE[1], TABLE[0], TABLE[3], TABLE[2], TABLE[4]]
    assert against(TABLE, shuffled) == Compared(6, [])


def changed(place: int, *event: Event) -> list[Event]:
    return [*TABLE[:place], *event, *TABLE[place + 1 :]]


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (TABLE[:-1], ["no key: 1 of 2 rows came, not just"]),
        ([*TABLE, TABLE[3]], ["no key: 3 of 2 rows came, not just"]),
        (changed(3, (None, b"n1", 6)), ["no key: 2 of 2 rows came, not just"]),
        (TABLE[1:], ["key a: 2 of 3 rows came, number 1 has another"]),
        (changed(4), ["key a: 2 of 3 rows came, the last ones are missing"]),
        ([*TABLE, TABLE[0]], ["key a: 4 of 3 rows came, number 4 is one too many", "offset 6"]),
        (changed(2, TABLE[0]), ["key a: 3 of 3 rows came, number 2 has another", "offset 2"]),
        (changed(1, (b"b", b"other", 5)), ["key b: 1 of 1 rows came, number 1 has another"]),
        (changed(1, (b"b", b"b1", 6)), ["key b: 1 of 1 rows came, number 1 has another"]),
        (changed(1, (b"zz", b"b1", 5)), ["key b: 0 of 1", "a key that no row has"]),
        (changed(1, (b"a", b"b1", 5)), ["key a: 4 of 3", "key b: 0 of 1"]),
        ([], ["key a: 0 of 3", "key b: 0 of 1", "no key: 0 of 2"]),
    ],
)
def test_differences_are_found_and_named(events: list[Event], words: list[str]) -> None:
    found = against(TABLE, events)
    assert found.differences
    for word in words:
        assert word in "\n".join(found.differences)


def test_times_are_not_compared_where_the_writer_sets_none() -> None:
    table: list[Event] = [(b"a", b"a1", None), (None, b"n", None)]
    assert against(table, [(b"a", b"a1", 77), (None, b"n", 78)]) == Compared(2, [])


def test_each_event_has_a_kind() -> None:
    small = Small(3, 0, 2, 1.5)
    assert Small.from_bytes(small.to_bytes()) == small
    assert kind_of(small.to_bytes()) is Kind.SMALL
    assert kind_of(b'{"carrier": "UA"}') is Kind.BIG
    assert kind_of(DOOMED_MARK + b'{"carrier": "UA"}') is Kind.DOOMED
    assert kind_of(b"what") is kind_of(None) is Kind.OTHER


@pytest.mark.parametrize("value", [b"small", b"small {}", b"small [", b'{"number": 1}'])
def test_what_is_no_small_event(value: bytes) -> None:
    with pytest.raises(ValueError):
        Small.from_bytes(value)


def test_notes(tmp_path: Path) -> None:
    path, small = tmp_path / "x.notes", Small(7, 1, 3, 11.5)
    with closing(Notebook(path, "nyc")) as book:
        big = ("nyc/weather", b"JFK", b"{}", [("ab.txn", b"x"), ("by", b"worker-1")], 5)
        assert book.add(*big, partition=1, offset=2, segment=1 << 32, committed=1 << 62) is None
        assert (
            book.add("nyc/flights", None, small.to_bytes(), None, 6, partition=0, offset=3) == small
        )
        end = Small(END, 0, 1, 20.0)
        assert book.add("nyc/flights", None, end.to_bytes(), [], 7, partition=0, offset=4) == end
    one, other = read_notes(path)  # not the last transaction
    assert 0 < one["at"] <= other["at"]
    assert one.tolist()[1:] == (
        *(1, Kind.BIG, 1, 2, 1 << 32, 1 << 62, digest_of(b"JFK"), digest_of(b"{}"), 5),
        *(0, 0, 0, 0.0, b"worker-1"),
    )
    assert other.tolist()[1:8] == (0, Kind.SMALL, 0, 3, 0, 0, NO_KEY)
    assert other.tolist()[9:] == (6, 7, 1, 3, 11.5, RAW)


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


def test_times_of_small_commits_are_summed_up() -> None:
    ticks = [{"began": 2.0 + n, "seconds": n / 100} for n in range(1, 11)]
    found = measure_ticks(ticks, 2.0)
    assert (found["count"], found["p50_s"], found["max_s"]) == (10, 0.06, 0.1)
    assert found["series"][0] == [1.0, 0.01]
    assert measure_ticks([], 2.0) == {"count": 0}
