"""The processes of `anabranch load`, real ones, with a stand-in for what they write to."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from anabranch.cli import load_worker
from anabranch.cli.errors import ChildFailed
from anabranch.cli.load_pool import LoadPlan, run_workers
from anabranch.cli.session import Target
from anabranch.errors import EventTooLarge, InvalidArgument, InvariantViolation
from tests.cli import fake_worker

PLAN = LoadPlan(
    target=Target("x:1", "p", 1.0),
    token=b"",
    stream="nyc/x",
    form="csv",
    key=None,
    timestamp=None,
    workers=2,
)
Use = Callable[[Callable[..., None]], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    yield lambda worker: monkeypatch.setattr(load_worker, "run", worker)
    assert multiprocessing.active_children() == [], "no process outlives the load"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files with unlike columns, the first of several blocks."""
    first, second = tmp_path / "a.csv", tmp_path / "b.csv"
    first.write_text("id,k\n" + "".join(f"{n},{n % 50}{'x' * 30}\n" for n in range(120_000)))
    second.write_text("k,z\n1,2\n3,4\n")
    return [first, second]


@pytest.mark.parametrize("key", [None, "k"])
def test_all_rows_are_written_once(use: Use, files: list[Path], key: str | None) -> None:
    use(fake_worker.counts)
    loaded = run_workers(replace(PLAN, key=key), files, quiet=True)
    assert (loaded.rows, loaded.files, loaded.workers) == (120_002, 2, 2)
    assert sorted(loaded.receipts) == [b"0", b"0", b"1", b"1"]


def test_a_worker_s_error_is_raised_as_what_it_is(use: Use, files: list[Path]) -> None:
    use(fake_worker.refuses)
    with pytest.raises(EventTooLarge, match="that one is too big"):
        run_workers(PLAN, files, quiet=True)


def test_an_error_nobody_expected_is_a_defect(use: Use, files: list[Path]) -> None:
    use(fake_worker.breaks)
    with pytest.raises(InvariantViolation, match="ZeroDivisionError: division by zero"):
        run_workers(PLAN, files, quiet=True)


@pytest.mark.parametrize("worker", [fake_worker.dies, fake_worker.dies_at_once])
def test_a_killed_worker_ends_the_load(
    use: Use, files: list[Path], worker: Callable[..., None]
) -> None:
    use(worker)
    with pytest.raises(ChildFailed, match="worker process"):
        run_workers(PLAN, files, quiet=True)


def test_columns_are_checked_before_anything_starts(use: Use, files: list[Path]) -> None:
    use(fake_worker.dies_at_once)
    with pytest.raises(InvalidArgument, match=r"no column 'zz' for --key: id, k"):
        run_workers(replace(PLAN, key="zz"), files, quiet=True)
    with pytest.raises(InvalidArgument, match="no column 'zz' for --timestamp"):
        run_workers(replace(PLAN, timestamp="zz"), files, quiet=True)
