"""Each program of the table has the same outputs, rows and errors by a driver as by a real worker."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.reading.slices import Piece
from anabranch.reading.task_reader import TaskReader
from tests.processing.test_worker import Place
from tests.testing.programs import TABLE, Row
from tests.testing.worker import Trial

# On a broker in each run; the others are in the long suite.
QUICK = ("counts", "dead-letters")


def check(row: Row, trial: Trial) -> None:
    by_driver, by_worker = trial.run()
    for found in (by_driver, by_worker) if row.by_key else ():
        for some in found.outputs.values():
            some.sort(key=lambda one: one[0] or b"")
    assert by_driver == by_worker
    assert by_driver.error.partition(":")[0] == (row.error.__name__ if row.error else "")
    values = {
        name.rpartition("-")[2]: [value for _, value, _, _ in some]
        for name, some in by_driver.outputs.items()
    }
    assert row.error or any(values.values()), "the program has no effect"
    assert {name: values[name] for name in row.wants} == row.wants


@pytest.mark.parametrize(
    "commits",
    [
        pytest.param(1, id="one by one", marks=pytest.mark.long),
        pytest.param(9, id="several at once"),
    ],
)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_worker_in_memory_does_the_same(
    row: Row, commits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``commits``: how many input transactions each read gives, at most. In memory that is one by itself."""
    cut = TaskReader.cut

    def several(*args: Any) -> list[Piece]:
        return [piece for _ in range(commits) for piece in cut(*args)]

    monkeypatch.setattr(TaskReader, "cut", several)
    place = Place(tmp_path)
    check(row, Trial(row, "nyc", place.client, tmp_path / "w", threads=False))


@pytest.mark.broker
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if row.name in QUICK else [pytest.mark.long]) for row in TABLE],
    ids=lambda row: row.name,
)
def test_a_worker_on_a_broker_does_the_same(
    row: Row, client: anabranch.Client, scope: str, tmp_path: Path
) -> None:
    check(row, Trial(row, scope, client, tmp_path / "w"))


@pytest.fixture(scope="module")
def scope() -> str:
    """A scope for all programs."""
    return f"t{uuid.uuid4().hex[:6]}"
