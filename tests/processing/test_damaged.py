"""A worker's folder whose files are damaged is emptied, and the state is read from the log again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from anabranch.errors import IllegalState, NotReady
from anabranch.ports import TableError
from anabranch.processing.table import Table
from anabranch.processing.worker import Worker
from tests.processing.test_tables import Shop
from tests.processing.test_tables import counting as counting_rows
from tests.processing.test_worker import Place, counting

KEYS = [b"%04d" % number for number in range(2000)]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def work_until(worker: Worker, is_done: Callable[[], bool]) -> None:
    """Run the worker until something holds."""
    step = worker.step

    def stepped() -> None:
        step()
        worker._commits.wait()
        if is_done():
            worker.stop.set()

    worker.step = stepped  # type: ignore[method-assign]
    worker.run()
    worker.stop = threading.Event()
    worker.step = step  # type: ignore[method-assign]


def overwrite(folder: Path, kind: str) -> None:
    found = [path for path in folder.iterdir() if path.name.endswith(kind) or path.name == kind]
    assert found
    for path in found:
        size = path.stat().st_size
        path.write_bytes(path.read_bytes()[: size // 8] + b"\xa5" * (size - size // 8))


def counts(worker: Worker) -> set[bytes | None]:
    return {worker._table.get(0, worker._app.stores["seen"].prefix + key) for key in KEYS}


@pytest.mark.parametrize("kind", [".sst", "CURRENT", "missing"])
def test_a_damaged_folder_is_emptied_and_restored(place: Place, kind: str) -> None:
    place.write(*KEYS)
    with closing(place.worker(counting())) as worker:
        work_until(worker, lambda: worker.metrics.total("processor_events_in") == len(KEYS))
    with closing(Table(place.folder / "w")) as table:
        assert table.mark(0) is not None
        table._rows.flush()
    if kind == "missing":
        for path in (place.folder / "w").glob("*.sst"):
            path.unlink()
    else:
        overwrite(place.folder / "w", kind)
    place.write(*KEYS)
    with closing(place.worker(counting())) as worker:
        work_until(worker, lambda: worker.metrics.total("processor_events_in") == len(KEYS))
        assert counts(worker) == {b"2"}
        assert worker.metrics.total("processor_folders_emptied") == 1
        assert worker.metrics.total("processor_restored_rows") > len(KEYS)


def test_a_folder_that_is_damaged_again_and_again_stops_the_worker(place: Place) -> None:
    place.write(*KEYS)
    with closing(place.worker(counting())) as worker:

        def bad(_: bytes) -> Any:
            raise Exception("Corruption: planted")

        def broken() -> None:
            worker._table._get = bad  # type: ignore[assignment]

        empty = worker.on_damage

        def emptied(error: Any) -> None:
            empty(error)
            broken()

        worker.on_damage = emptied
        broken()
        with pytest.raises(TableError, match="planted"):
            worker.run()
        assert worker.metrics.total("processor_folders_emptied") == 3


def test_a_folder_in_use_is_left_alone(place: Place) -> None:
    place.write(*KEYS)
    with closing(place.worker(counting())) as worker:
        work_until(worker, lambda: worker.metrics.total("processor_events_in") == len(KEYS))
        with pytest.raises(IllegalState, match="folder of its own"):
            Table(place.folder / "w")
        assert counts(worker) == {b"1"}


class Damaged:
    """A replica's folder in which no row can be found."""

    def __init__(self, real: Any, folder: Path) -> None:
        self._real, self._folder = real, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def iter(self) -> Damaged:
        return self

    def seek(self, _: bytes) -> None:
        """Find nothing."""

    def valid(self) -> bool:
        return False

    def status(self) -> None:
        raise Exception(f"Corruption: planted in {self._folder}/000008.sst")  # as rocksdict does


def test_an_emptied_folder_of_tables_waits_for_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(tmp_path)
    unreachable = iter([NotReady("planted")] * 2)
    shop.write(*KEYS[:200])
    with closing(shop.worker(counting_rows(shop))) as worker:
        work_until(worker, lambda: len(shop.events("nyc/out")) == 200)
        real = shop.client.replica

        def replica(*tables: str, **more: Any) -> Any:
            if (error := next(unreachable, None)) is not None:
                raise error
            return real(*tables, **more)

        monkeypatch.setattr(shop.client, "replica", replica)
        store = worker._shared.tables.replica._store  # type: ignore[union-attr]
        (folder,) = {path.parent for path in (shop.folder / "w" / "tables").rglob("CURRENT")}
        store._db = Damaged(store._db, folder)
        shop.write(*KEYS[:200])
        work_until(worker, lambda: len(shop.events("nyc/out")) == 400)
        assert worker.metrics.values["processor_taken_again"] == {("NotReady",): 2}
        assert worker.metrics.total("processor_folders_emptied") == 1
    assert set(shop.rows().values()) == {2}


@pytest.mark.parametrize("kind", [".sst", "CURRENT", "at work"])
def test_a_damaged_folder_of_tables_is_emptied_alone(tmp_path: Path, kind: str) -> None:
    shop = Shop(tmp_path)
    app = counting_rows(shop)

    def handled() -> int:
        return len(shop.events("nyc/out"))

    shop.write(*KEYS[:200])
    with closing(shop.worker(app)) as worker:
        work_until(worker, lambda: handled() == 200)
    (folder,) = {path.parent for path in (shop.folder / "w" / "tables").rglob("CURRENT")}
    if kind != "at work":
        overwrite(folder, kind)
    shop.write(*KEYS[:200])
    with closing(shop.worker(app)) as worker:
        if kind == "at work":
            store = worker._shared.tables.replica._store  # type: ignore[union-attr]
            store._db = Damaged(store._db, folder)
        work_until(worker, lambda: handled() == 400)
        assert worker.metrics.total("processor_folders_emptied") == 1
        assert worker._table.emptied == 0
    assert set(shop.rows().values()) == {2}
    assert not shop.dead()
