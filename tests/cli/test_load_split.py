"""Blocks of whole records: nothing lost, nothing cut, whatever quotes and packing there are."""

from __future__ import annotations

import csv
import gzip
import io
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cli.load_split import Block, opened, record_end
from anabranch.errors import InvalidArgument

FIELDS = st.text(st.sampled_from('ab",\n\r é'), max_size=6)
ROWS = st.lists(st.lists(FIELDS, min_size=3, max_size=3), max_size=30)


def written(rows: list[list[str]], line_end: str = "\n") -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator=line_end).writerows([["x", "y", "z"], *rows])
    return out.getvalue().encode()


def parsed(data: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(data.decode(), newline="")))


def blocks_of(path: Path, size: int) -> list[Block]:
    with opened(path, size) as source:
        return list(source.blocks(size))


@given(rows=ROWS, size=st.integers(1, 40), line_end=st.sampled_from(["\n", "\r\n"]))
def test_blocks_hold_whole_records_and_all_of_them(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], size: int, line_end: str
) -> None:
    data = written(rows, line_end)
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    path.write_bytes(data)
    with opened(path, size) as source:
        assert source.columns == ["x", "y", "z"]
        blocks = list(source.blocks(size))
    body = b"".join(block.data for block in blocks)
    assert data.endswith(body)
    assert [row for block in blocks for row in parsed(block.data)] == parsed(data)[1:]
    before = len(data) - len(body)
    for block in blocks:
        assert block.line == 1 + data[:before].count(b"\n")
        before += len(block.data)


@given(data=st.binary(max_size=60).map(lambda b: b.translate(bytes([34, 10, 97, 44] * 64))))
def test_record_end_is_the_last_line_end_outside_of_quotes(data: bytes) -> None:
    expected = 0
    for at, byte in enumerate(data):
        if byte == 10 and data[:at].count(b'"') % 2 == 0:
            expected = at + 1
    assert record_end(data) == expected


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".csv.zip"])
def test_packed_files_give_the_same(tmp_path: Path, suffix: str) -> None:
    data = written([["1", "2", "3"], ["4", "five\nlines", "6"]])
    path = tmp_path / f"rows{suffix}"
    if suffix.endswith(".gz"):
        path.write_bytes(gzip.compress(data))
    elif suffix.endswith(".zip"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("__MACOSX/._rows.csv", b"junk")
            archive.writestr("folder/rows.csv", data)
    else:
        path.write_bytes(data)
    assert blocks_of(path, 8)[0].line == 2
    assert b"".join(block.data for block in blocks_of(path, 8)) == data.split(b"\n", 1)[1]


def test_progress_is_told_in_bytes_as_stored(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(written([["1", "2", "3"]] * 100))
    with opened(path, 50) as source:
        seen = [source.done for _ in source.blocks(50)]
        assert source.size == path.stat().st_size
    assert seen == sorted(seen)
    assert 0 < seen[0] < seen[-1] == path.stat().st_size


def test_a_byte_order_mark_is_not_part_of_a_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"\xef\xbb\xbfx,y\n1,2\n")
    with opened(path) as source:
        assert source.columns == ["x", "y"]


def test_a_header_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"x,y")
    assert blocks_of(path, 10) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"\n1,2\n", "is empty"),
        (b"x,y,x\n", "names a column twice: x"),
        (b"x,\xff\n", "not UTF-8"),
        (b'x,y\n1,"2\n3,4\n', "never closed"),
    ],
)
def test_what_is_no_csv_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(data)
    with pytest.raises(InvalidArgument, match=message):
        blocks_of(path, 10)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("rows.csv.gz", b"x,y\n1,2\n", "can't be unpacked"),
        ("rows.zip", b"x,y\n1,2\n", "can't be unpacked"),
        ("rows.csv.gz", gzip.compress(b"x,y\n" * 1000, mtime=0)[:-20], "can't be unpacked"),
    ],
)
def test_what_is_not_packed_as_it_says_is_refused(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InvalidArgument, match=message):
        blocks_of(tmp_path / name, 10)


@pytest.mark.parametrize("count", [0, 2])
def test_a_zip_holds_one_csv_file(tmp_path: Path, count: int) -> None:
    with zipfile.ZipFile(tmp_path / "rows.zip", "w") as archive:
        for number in range(count):
            archive.writestr(f"{number}.csv", b"x\n")
    with pytest.raises(InvalidArgument, match=f"holds {count} CSV files"):
        blocks_of(tmp_path / "rows.zip", 10)
