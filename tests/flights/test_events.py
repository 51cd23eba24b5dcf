"""The run's events tell by themselves what they are."""

from __future__ import annotations

import pytest

from examples.flights.events import (
    DOOMED_MARK,
    RAW,
    Kind,
    Small,
    kind_of,
    writer_of,
)
from examples.flights.observers import Sightings
from examples.flights.ticker import END


def test_kinds() -> None:
    small = Small(3, 0, 2, 1.5)
    assert Small.from_bytes(small.to_bytes()) == small
    assert kind_of(small.to_bytes()) is Kind.SMALL
    assert kind_of(b'{"carrier": "UA"}') is Kind.BIG
    assert kind_of(DOOMED_MARK + b'{"carrier": "UA"}') is Kind.DOOMED
    assert kind_of(b"what") is Kind.OTHER
    assert kind_of(None) is Kind.OTHER


@pytest.mark.parametrize("value", [b"small", b"small {}", b"small [", b'{"number": 1}'])
def test_what_is_no_small_event(value: bytes) -> None:
    with pytest.raises(ValueError):
        Small.from_bytes(value)


def test_writers() -> None:
    assert writer_of([("ab.txn", b"x"), ("by", b"worker-1")]) == "worker-1"
    assert writer_of([("ab.txn", b"x")]) == RAW
    assert writer_of(None) == RAW


def test_sightings() -> None:
    seen = Sightings()
    seen.see("s", b'{"a": 1}', [("by", b"worker-1")], 10.0)
    seen.see("s", b'{"a": 2}', None, 11.0)
    small = Small(0, 0, 2, 11.5)
    assert seen.see("s", small.to_bytes(), None, 12.0) == small
    seen.see("s", Small(0, 1, 2, 11.5).to_bytes(), None, 13.0)
    seen.see("t", small.to_bytes(), None, 12.25)
    end = seen.see("s", Small(END, 0, 1, 20.0).to_bytes(), None, 21.0)
    assert end is not None
    assert end.number == END
    assert seen.totals() == {"big": 2, "small": 3}, "the last transaction is not counted"
    report = seen.report()
    assert report["writers"] == {"worker-1": 1, RAW: 1}
    assert report["delays"] == [[11.5, 0.5], [11.5, 0.75]], "one for each stream"
    assert {(s["stream"], s["kind"]): (s["count"], s["first"], s["last"]) for s in report["seen"]} == {
        ("s", "big"): (2, 10.0, 11.0),
        ("s", "small"): (2, 12.0, 13.0),
        ("t", "small"): (1, 12.25, 12.25),
    }  # fmt: skip
