"""RocksDB's table: what its errors say, and what is there after a reopening."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.ports import TableError
from anabranch.processors.rocksdb_table import RocksTable


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
        "from anabranch.processors.rocksdb_table import RocksTable\n"
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
        "from anabranch.processors.rocksdb_table import RocksTable\n"
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
    table = RocksTable(tmp_path)
    error = table._error(Exception("IO error: No space left on device: x.log"), "written")
    assert "the disk of" in str(error)
    table.close()


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
