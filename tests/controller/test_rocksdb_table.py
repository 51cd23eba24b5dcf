"""RocksDB's table: what its errors say, and what is there after a reopening."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from anabranch.controller.rocksdb_table import RocksTable
from anabranch.ports import TableError
from anabranch.processing.table import Table
from anabranch.tables.rocks import Walk, table_error
from anabranch.tables.store import Rows, Store


def test_rows_are_there_after_reopening(tmp_path: Path) -> None:
    table = RocksTable(tmp_path / "deep" / "folder")
    table.write({b"k%d" % i: b"v" * i for i in range(1000)})
    table.close()
    assert stat.S_IMODE((tmp_path / "deep" / "folder").stat().st_mode) == 0o700, "rows hold secrets"
    table = RocksTable(tmp_path / "deep" / "folder")
    assert sum(1 for _ in table.scan(b"k")) == 1000
    table.close()


def test_rows_are_there_after_a_kill(tmp_path: Path) -> None:
    code = (
        "import os, pathlib\n"
        "from anabranch.controller.rocksdb_table import RocksTable\n"
        f"table = RocksTable(pathlib.Path({str(tmp_path)!r}))\n"
        "table.write({b'a': b'1', b'b': b'2'})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    table = RocksTable(tmp_path)
    assert list(table.scan(b"")) == [(b"a", b"1"), (b"b", b"2")]
    table.close()


def test_a_folder_in_use_is_named(tmp_path: Path) -> None:
    table = RocksTable(tmp_path)
    with pytest.raises(TableError, match="open in another process") as caught:
        RocksTable(tmp_path)
    assert str(tmp_path) in str(caught.value)
    table.close()
    code = (
        "import pathlib\n"
        "from anabranch.controller.rocksdb_table import RocksTable\n"
        f"RocksTable(pathlib.Path({str(tmp_path)!r}))\n"
    )
    table = RocksTable(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "open in another process" in done.stderr
    table.close()


def test_a_broken_table_says_that_it_can_be_deleted(tmp_path: Path) -> None:
    RocksTable(tmp_path).close()
    (tmp_path / "CURRENT").write_text("junk")
    with pytest.raises(TableError, match="delete the folder"):
        RocksTable(tmp_path)


def test_a_folder_that_can_not_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TableError, match="can't be opened"):
        RocksTable(tmp_path / "file" / "folder")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    error = table_error(Exception("IO error: No space left on device: x.log"), tmp_path, "written")
    assert "the disk of" in str(error)


def test_an_iterator_outlives_the_table_without_harm(tmp_path: Path) -> None:
    table = RocksTable(tmp_path)
    table.write({b"a": b"1", b"b": b"2"})
    view = table.scan(b"")
    next(view)
    table.close()
    rest = []
    try:
        rest = list(view)
    except TableError:
        return
    assert rest == [(b"b", b"2")]


KEYS = [b"%06d" % n for n in range(3000)]
Walks = list[Callable[[], Iterator[Any]]]


def _leader(folder: Path) -> tuple[RocksTable, Walks]:
    table = RocksTable(folder)
    if table.get(KEYS[0]) is None:
        table.write({key: os.urandom(100) for key in KEYS})
        table._opened().flush()
    return table, [lambda: table.scan(b""), lambda: table.scan_back(b"1")]


def _worker(folder: Path) -> tuple[Table, Walks]:
    table = Table(folder)
    if table.get(3, KEYS[0]) is None:
        table.write([(3, [(key, os.urandom(100)) for key in KEYS])], {}, logged=False)
        table.flush()
    return table, [lambda: table.scan(3, b"", b"\xff")]


def _replica(folder: Path) -> tuple[Store, Walks]:
    store = Store(folder, "c")
    if not store.marks:
        number, rows = store.begin("s/a", "id").number, Rows()
        rows.add(number, b"t" * 16, 1, KEYS, [os.urandom(100) for _ in KEYS])
        store.write(rows)
        store.end_loading()
    number = store.marks["s/a"].number
    ways: Walks = [
        lambda: store.rows(number, b"", None, 9),
        lambda: store.stamped(number, 9),
        lambda: store.scan(number, b"", None, 9),
        lambda: store.scan(number, b"", None, 9, reverse=True),
    ]
    return store, ways


@pytest.mark.parametrize("opened", [_leader, _worker, _replica])
def test_no_walk_takes_a_damaged_block_for_the_end(
    tmp_path: Path, opened: Callable[[Path], tuple[Any, Walks]]
) -> None:
    folder = tmp_path / "rows"
    table, walks = opened(folder)
    with closing(table):
        assert {sum(1 for _ in walk()) for walk in walks} == {len(KEYS)}
    file = max(folder.glob("*.sst"), key=lambda file: file.stat().st_size)
    with file.open("r+b") as block:
        block.seek(file.stat().st_size // 2)
        block.write(bytes(64))
    table, walks = opened(folder)
    caught = []
    for walk in walks[:2]:  # by `items` of rocksdict
        with pytest.raises(TableError, match="Close it and open it again") as error:
            list(walk())
        caught.append(error)
    table.close()
    table, walks = opened(folder)  # the tracebacks keep no lock
    for at in range(2, len(walks)):
        try:
            list(walks[at]())
            pytest.fail("it was taken for the end")
        except TableError:
            table.close()
            table, walks = opened(folder)
    table.close()


def test_a_walk_to_the_end_is_of_one_moment(tmp_path: Path) -> None:
    """What is written or deleted meanwhile is no missing row."""
    table = RocksTable(tmp_path)
    assert [list(table.scan(b"")), list(table.scan_back(b"c"))] == [[], []]
    table.write({b"b": b"1", b"c": b"2"})
    walks = [table.scan(b""), table.scan_back(b"d"), table.scan_back(b"c"), table.scan(b"d")]
    table.write({b"a": b"0", b"b": None, b"c": None, b"d": b"3"})
    found = [[key for key, _ in walk] for walk in walks]
    assert found == [[b"b", b"c"], [b"c", b"b"], [b"b"], []]
    for backwards in (False, True):  # an error that passes: nothing but the rows tells of it
        walk = Walk(table._opened(), tmp_path, b"d" if backwards else b"", backwards=backwards)
        walk.rows = islice(walk.rows, 1)
        with pytest.raises(TableError, match="rows are missing"):
            list(walk)
    table.close()
