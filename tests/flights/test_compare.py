"""Comparing what came with a table finds every kind of difference."""

from __future__ import annotations

import numpy as np
import pytest

from examples.flights.compare import Compared, Wanted, compare
from examples.flights.notes import NOTE, digest_of
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
