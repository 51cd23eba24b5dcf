"""The members' notes against the source: what is out of order, missing or foreign is found."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any
from zlib import crc32

from examples.flights.events import Kind
from examples.flights.order_check import OrderCheck, OrderReport
from examples.flights.order_reader import Note, digest_of
from examples.flights.source import Row
from examples.flights.ticker import END

KEYS = (b"N1", b"N2", None)
VALUES = [b"row %d" % n for n in range(9)]


def rows() -> list[Row]:
    return [Row(n, KEYS[n % 3], lambda value=value: value, None) for n, value in enumerate(VALUES)]  # type: ignore[misc]


def note(at: float, row: int = -1, **changes: Any) -> Note:
    """Of a row, or of a small transaction."""
    key: bytes | None = b"N1"
    if row >= 0:
        key, value, kind = KEYS[row % 3], VALUES[row], Kind.BIG
    else:
        value, kind = b"small", Kind.SMALL
    base = Note(at, 0, int(at * 10), 0, 5, digest_of(key), crc32(value), kind)
    return base._replace(**changes)


def small(at: float, number: int, within: int = 0, **changes: Any) -> Note:
    return note(at, number=number, within=within, **changes)


GOOD = [small(1, 0, 0, commit_timestamp=4), *(note(2 + n, n) for n in range(9)), small(30, 1)]


def check(*members: list[Note]) -> OrderReport:
    return OrderCheck(rows()).check(members)


def test_all_in_order() -> None:
    report = check(GOOD)
    assert (report.rows, report.expected, report.keys) == (9, 9, 2)
    assert report.differences == ()
    assert report.smalls == ((0, 1), (1, 1))
    assert (report.moved, report.shared, report.repeated) == (0, 0, 0)
    assert OrderReport.from_document(asdict(report)) == report


def test_members_are_taken_together_by_time() -> None:
    moved = [n._replace(segment_id=7) if n.at > 6 else n for n in GOOD]
    report = check([n for n in moved if n.at > 6], [n for n in moved if n.at <= 6])
    assert report.differences == ()
    assert (report.moved, report.shared) == (2, 2)


def test_what_comes_again_is_no_difference() -> None:
    again = [n._replace(at=n.at + 50) for n in GOOD[2:5]]
    report = check(GOOD, again)
    assert report.differences == ()
    assert report.repeated == 3


def swapped(one: int, other: int) -> list[Note]:
    """Both rows come at each other's time."""
    times = {one: GOOD[other].at, other: GOOD[one].at}
    return [n._replace(at=times.get(i, n.at)) for i, n in enumerate(GOOD)]


def test_a_row_out_of_order_is_found() -> None:
    assert any("N1 has another row" in text for text in check(swapped(1, 4)).differences)
    assert check(swapped(3, 6)).differences == (), "rows without a key have no order"
    assert check(swapped(1, 2)).differences == (), "nor have rows of different keys"


def test_a_row_that_is_missing_or_twice_is_found() -> None:
    missing = check([n for i, n in enumerate(GOOD) if i != 7])
    assert missing.differences == ("the last 1 rows of N1 did not come",)
    keyless = check([n for i, n in enumerate(GOOD) if i != 3])
    assert keyless.differences == ("1 rows without a key did not come",)
    for at in (7, 3):
        twice = check([*GOOD, GOOD[at]._replace(at=40.0, offset=999)])
        assert twice.difference_count == 1


def test_small_ones_have_an_order_too() -> None:
    late = check([*GOOD, small(31, 0, 1)])
    assert any("small event 0 after 1" in text for text in late.differences)
    assert check([*GOOD, small(31, 1, 1)]).differences == ()
    assert check([*GOOD, small(31, END, 0)]).differences == ()


def test_commit_time_goes_never_back() -> None:
    back = check([*GOOD, small(31, 2, commit_timestamp=3)])
    assert any("goes back in commit time" in text for text in back.differences)


def test_what_nobody_committed_is_found() -> None:
    assert check([*GOOD, note(31, kind=Kind.DOOMED)]).difference_count == 1


def test_notes_are_kept_in_files(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_bytes(b"".join(each.to_bytes() for each in GOOD))
    assert list(Note.read(path)) == GOOD
