"""Promises of both makes of the table."""

from __future__ import annotations

import pytest

from anabranch.ports import Table, TableError


def test_what_is_written_is_read(table: Table) -> None:
    table.write({b"a": b"1", b"": b"empty key", b"b": b""})
    assert table.get(b"a") == b"1"
    assert table.get(b"") == b"empty key"
    assert table.get(b"b") == b""
    assert table.get(b"c") is None


def test_a_write_puts_and_deletes_at_once(table: Table) -> None:
    table.write({b"a": b"1", b"b": b"2"})
    table.write({b"a": None, b"b": b"3", b"never": None})
    assert list(table.scan(b"")) == [(b"b", b"3")]


def test_a_scan_goes_in_the_order_of_bytes_and_stops_at_its_prefix(table: Table) -> None:
    keys = [b"p\x00", b"p", b"p\xff\xff", b"pa", b"o\xff", b"q", b"\xff\xff", b"\xff"]
    table.write(dict.fromkeys(keys, b"x"))
    assert [key for key, _ in table.scan(b"p")] == [b"p", b"p\x00", b"pa", b"p\xff\xff"]
    assert [key for key, _ in table.scan(b"\xff")] == [b"\xff", b"\xff\xff"]
    assert [key for key, _ in table.scan(b"")] == sorted(keys)
    assert list(table.scan(b"nothing")) == []


def test_a_scan_back_begins_below_a_key_and_goes_down_to_the_first(table: Table) -> None:
    keys = [b"", b"a", b"p", b"p\x00", b"pa", b"p\xff\xff", b"q", b"\xff"]
    table.write({key: b"of " + key for key in keys})
    for before in (*keys, b"p\x00\x00", b"o", b"\xff\xff"):
        below = sorted((key for key in keys if key < before), reverse=True)
        assert list(table.scan_back(before)) == [(key, b"of " + key) for key in below]


def test_a_scan_back_is_of_the_time_it_was_asked_for(table: Table) -> None:
    table.write({b"k%d" % i: b"old" for i in range(5)})
    view = table.scan_back(b"k4")
    table.write({b"k1": None, b"k2": b"new", b"k33": b"new"})
    assert next(view) == (b"k3", b"old")
    table.write({b"k0": None})
    assert list(view) == [(b"k2", b"old"), (b"k1", b"old"), (b"k0", b"old")]


def test_a_scan_is_a_stable_view(table: Table) -> None:
    table.write({b"k%d" % i: b"old" for i in range(5)})
    view = table.scan(b"k")
    assert next(view) == (b"k0", b"old")
    table.write({b"k1": None, b"k2": b"new", b"k9": b"new"})
    assert list(view) == [(b"k%d" % i, b"old") for i in range(1, 5)]


def test_a_scan_is_of_the_time_it_was_asked_for(table: Table) -> None:
    table.write({b"k": b"old"})
    view = table.scan(b"k")
    table.write({b"k": b"new"})
    assert list(view) == [(b"k", b"old")]


def test_a_closed_table_refuses_all_use(table: Table) -> None:
    table.close()
    table.close()
    with pytest.raises(TableError, match="closed"):
        table.get(b"a")
    with pytest.raises(TableError, match="closed"):
        table.write({b"a": b"1"})
    with pytest.raises(TableError, match="closed"):
        table.scan(b"")
    with pytest.raises(TableError, match="closed"):
        table.scan_back(b"k")
