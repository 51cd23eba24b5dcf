"""How much was read of a journal, and how much lies there uncommitted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.journal.usage import Read, Uncommitted
from tests.core.cleaning import PLACE


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9_000)), max_size=60))
def test_bytes_between_offsets(batches: list[tuple[int, int]]) -> None:
    read, at, ends, total = Read(7), 7, [7], [0]
    for count, size in batches:
        at += count
        read.add(at, size)
        ends.append(at)
        total.append(total[-1] + size)
    assert read.between(7, at) == total[-1]
    assert read.between(at, 7) == 0
    for i, low_end in enumerate(ends):
        for j in range(i, len(ends)):
            exact = total[j] - total[i]
            assert abs(read.between(low_end, ends[j]) - exact) <= 2 * (4 << 10) + 9_000
    read.forget(ends[len(ends) // 2])
    later = ends[len(ends) // 2 :]
    for place in later:
        assert read.between(place, at) <= total[-1]


def test_read_stays_small() -> None:
    read = Read(0)
    for n in range(1, 50_000):
        read.add(n, 100_000)
    assert len(read._ends) < 25_000
    assert read.between(25_000, 49_999) == pytest.approx(25_000 * 100_000, rel=0.01)


def test_staged_adds_up() -> None:
    uncommitted = Uncommitted()
    uncommitted.add(b"A", PLACE, 5, 10)
    uncommitted.add(b"A", PLACE, 3, 1)
    uncommitted.add(b"B", PLACE, 9, 100)
    assert uncommitted.stays[b"A"][PLACE].low == 3
    assert (uncommitted.total, uncommitted.by_stream["nyc/a"]) == (111, 111)
    uncommitted.ended([b"A", b"never seen"])
    assert (uncommitted.total, uncommitted.by_stream["nyc/a"]) == (100, 100)
