"""Comparing a stream with its table finds every kind of difference."""

from __future__ import annotations

import json

import pytest

from examples.flights.rows import SHOWN, RowCheck, StreamReport
from examples.flights.source import Row

Event = tuple[bytes | None, bytes, int | None]


def row(number: int, key: bytes | None, value: bytes, timestamp: int | None = 5) -> Row:
    return Row(number, key, lambda: value, timestamp)


TABLE = [
    row(0, b"a", b"a1"),
    row(1, b"b", b"b1"),
    row(2, b"a", b"a2"),
    row(3, None, b"n1"),
    row(4, b"a", b"a3"),
    row(5, None, b"n1"),
]
GOOD: list[Event] = [(r.key, r.value(), r.timestamp) for r in TABLE]


def compare(events: list[Event]) -> RowCheck:
    check = RowCheck(TABLE)
    for number, (key, value, timestamp) in enumerate(events):
        check.take(key, value, timestamp, f"t[0]@{number}")
    check.finish()
    return check


def test_equal_is_equal() -> None:
    check = compare(GOOD)
    assert (check.expected, check.matched, check.keys) == (6, 6, 2)
    assert check.differences.count == 0


def test_only_the_order_of_a_key_counts() -> None:
    shuffled = [GOOD[5], GOOD[1], GOOD[0], GOOD[3], GOOD[2], GOOD[4]]
    assert compare(shuffled).differences.count == 0


def changed(place: int, *event: Event) -> list[Event]:
    return [*GOOD[:place], *event, *GOOD[place + 1 :]]


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (GOOD[:-1], ["1 rows without a key are missing"]),
        (GOOD[1:], ["row 2 of key a comes where row 1 should"]),
        (changed(4), ["the last 1 rows of key a are missing"]),
        ([*GOOD, GOOD[0]], ["t[0]@6: row 1 of key a comes again, or too late, after row 3"]),
        ([*GOOD, GOOD[3]], ["t[0]@6: no row without a key (any more) is n1"]),
        (changed(1, (b"b", b"other", 5)), ["no row of key b has the value other"]),
        (changed(1, (b"zz", b"b1", 5)), ["no row has the key zz"]),
        (changed(1, (b"b", b"b1", 6)), ["row 1 of key b has the time 6, not 5"]),
        (changed(3, (None, b"n1", 6)), ["no row without a key (any more) is n1"]),
        ([GOOD[2], GOOD[0], GOOD[1], *GOOD[3:]], ["row 2 of key a comes where row 1 should"]),
        ([], ["the last 3 rows of key a", "the last 1 rows of key b", "2 rows without"]),
    ],
)
def test_differences_are_found_and_named(events: list[Event], words: list[str]) -> None:
    check = compare(events)
    text = "\n".join(check.differences.shown)
    assert check.differences.count >= len(words)
    for word in words:
        assert word in text


def test_a_value_moved_to_another_key_is_found() -> None:
    check = compare(changed(1, (b"a", b"b1", 5)))
    assert "no row of key a has the value b1" in check.differences.shown[0]


def test_times_are_not_compared_where_the_writer_sets_none() -> None:
    check = RowCheck([row(0, b"a", b"a1", None), row(1, None, b"n", None)])
    check.take(b"a", b"a1", 77, "x")
    check.take(None, b"n", 78, "x")
    check.finish()
    assert (check.matched, check.differences.count) == (2, 0)


def test_many_differences_are_counted_and_some_shown() -> None:
    check = RowCheck([])
    for number in range(100):
        check.take(b"k", b"v%d" % number, None, "x")
    assert check.differences.count == 100
    assert len(check.differences.shown) == SHOWN


def test_long_values_are_cut() -> None:
    check = RowCheck([])
    check.take(b"k", b"v", None, "x")
    check.take(None, b"v" * 10_000, None, "x")
    assert max(len(text) for text in check.differences.shown) < 200


def test_a_report_survives_json() -> None:
    report = StreamReport(
        stream="nyc/x",
        expected=3,
        matched=2,
        keys=1,
        differences=("one",),
        difference_count=4,
        smalls={7: (3, 3)},
        kinds={"big": 2},
        writers={"worker-1": 2},
    )
    assert StreamReport.from_document(json.loads(json.dumps(report.document()))) == report
