"""How far a query is behind, from what Spark reports of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from anabranch.errors import MalformedRecord
from anabranch.spark import lag
from anabranch.spark.source.positions import Position, to_json


def source(at: Any, latest: Any) -> dict[str, Any]:
    return {"endOffset": at, "latestOffset": latest, "numInputRows": 1}


def test_offsets_that_are_not_read_yet_by_stream() -> None:
    at = to_json({"s/a": Position(5, {0: 10, 1: 7}), "s/left": Position(1, {0: 3})})
    latest = to_json(
        {
            "s/a": Position(9, {0: 15, 1: 7, 2: 4}),  # a partition that a scaling added
            "s/new": Position(0, {0: 2}),
        }
    )
    assert lag(source(json.dumps(at), json.dumps(latest))) == {"s/a": 9, "s/new": 2}
    assert lag(source(at, latest)) == {"s/a": 9, "s/new": 2}
    assert lag(source(str(at), str(latest))) == {"s/a": 9, "s/new": 2}  # PySpark 4.0, 4.1
    # What was read when the ends were asked for may be beyond them.
    assert lag(source(latest, at)) == {"s/a": 0, "s/left": 3}


@pytest.mark.parametrize("gone", ["endOffset", "latestOffset"])
@pytest.mark.parametrize("nothing", [None, "", "null"])
def test_what_is_not_known_yet(gone: str, nothing: str | None) -> None:
    assert lag(source("{}", "{}") | {gone: nothing}) is None


@pytest.mark.parametrize("other", ["7", '"x"', "[1]", "{", '{"topic":{"0":7}}'])
def test_another_source(other: str) -> None:
    with pytest.raises(MalformedRecord):
        lag(source(other, other))
