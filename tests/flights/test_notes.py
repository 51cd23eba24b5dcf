"""The run's events tell by themselves what they are, and notes of them come back as they were."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from examples.flights.notes import (
    DOOMED_MARK,
    END,
    NO_KEY,
    RAW,
    Kind,
    Notebook,
    Small,
    digest_of,
    kind_of,
    read_notes,
)


def test_kinds() -> None:
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
