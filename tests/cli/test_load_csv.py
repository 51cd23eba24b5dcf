"""CSV files as events: nothing lost, nothing cut, whatever quotes and packing there are; errors name the line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cli import load_csv
from anabranch.cli.load_csv import BLOCK_BYTES, Events, opened, parse_time
from anabranch.errors import InvalidArgument

BIG = b"2" * 200_000  # Python's csv module takes 131,072 characters by default
FIELDS = st.text(st.sampled_from('ab",\\\n\r\x00 é'), max_size=6)
ROWS = st.lists(st.lists(FIELDS, min_size=3, max_size=3), max_size=30)


def written(rows: list[list[str]], line_end: str = "\n") -> bytes:
    out = io.StringIO(newline="")
    # A carriage return is quoted of itself only where it is part of the line's end.
    writer = csv.writer(out, lineterminator=line_end, quoting=csv.QUOTE_ALL)
    if "\r" in line_end:
        writer = csv.writer(out, lineterminator=line_end)
    writer.writerows([["x", "y", "z"], *rows])
    return out.getvalue().encode()


def parsed(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline="")))


def events_of(path: Path, events: Events, block_bytes: int = BLOCK_BYTES) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_csv, "BLOCK_BYTES", block_bytes)
        with opened(path, events) as file:
            return [row for batch in file.batches() for row in batch.to_pylist()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.csv"


def load(path: Path, data: bytes, events: Events = Events()) -> list[dict[str, Any]]:  # noqa: B008 - frozen
    path.write_bytes(data)
    return events_of(path, events)


@given(rows=ROWS, size=st.integers(1, 200), line_end=st.sampled_from(["\n", "\r\n"]))
def test_every_row_is_one_event(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], size: int, line_end: str
) -> None:
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    path.write_bytes(written(rows, line_end))
    expected = [dict(zip("xyz", row, strict=True)) for row in rows]
    found = [event["value"] for event in events_of(path, Events(), size)]
    assert [json.loads(value) for value in found] == expected
    assert found == [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in expected]
    found = [event["value"] for event in events_of(path, Events(as_json=False), size)]
    assert [parsed(value) for value in found] == [[row] for row in rows]


@pytest.mark.parametrize("size", range(64, 84))
def test_line_ends_in_fields_stay_where_a_block_ends(path: Path, size: int) -> None:
    rows = [["\r\n" * 8, "\n\r\r\n", 'a"\r\n'], ["\r", "\r\r\n", "\r\n\\"]] * 20
    path.write_bytes(written(rows, "\r\n"))
    found = [json.loads(event["value"]) for event in events_of(path, Events(), size)]
    assert [list(row.values()) for row in found] == rows


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".csv.zip"])
def test_packed_files_give_the_same(tmp_path: Path, suffix: str) -> None:
    data = b"\xef\xbb\xbf" + written([["1", "2", "3"], ["4", "five\nlines", "6"]] * 10_000)
    path = tmp_path / f"rows{suffix}"
    if suffix.endswith(".gz"):
        path.write_bytes(gzip.compress(data))
    elif suffix.endswith(".zip"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("__MACOSX/._rows.csv", b"junk")
            archive.writestr("folder/rows.csv", data)
    else:
        path.write_bytes(data)
    found = [json.loads(event["value"]) for event in events_of(path, Events(), 1 << 16)]
    assert found[:2] == [{"x": "1", "y": "2", "z": "3"}, {"x": "4", "y": "five\nlines", "z": "6"}]
    assert len(found) == 20_000


@pytest.mark.parametrize("data", [b"x,y", b"x,y\n", b'"x","y"\r\n\r\n'])
def test_a_header_without_rows(path: Path, data: bytes) -> None:
    assert load(path, data) == []


def test_a_row_of_one_field_stays_a_line(path: Path) -> None:
    found = load(path, b'x\n""\n\na\n"a,b"\n', Events(as_json=False))
    assert [event["value"] for event in found] == ['""', "a", '"a,b"']


def test_key_and_timestamp(path: Path) -> None:
    events = Events(key="name", timestamp="id")
    found = load(path, b"id,name\n1700000000,k\n2020-01-01,\n", events)
    assert [(event["key"], event["timestamp"]) for event in found] == [
        ("k", 1_700_000_000_000),
        (None, 1_577_836_800_000),
    ]


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-16"])
@pytest.mark.parametrize("is_input", [False, True])
def test_other_delimiters_encodings_and_standard_input(
    path: Path, monkeypatch: pytest.MonkeyPatch, delimiter: str, encoding: str, is_input: bool
) -> None:
    text = f'x{delimiter}y\n1,0{delimiter}é\n"a{delimiter}""b\n"{delimiter}5" by\n'
    events = Events(delimiter=delimiter, encoding=encoding)
    path.write_bytes(text.encode(encoding))
    if is_input:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode(encoding))))
        path = Path("-")
    found = [json.loads(event["value"]) for event in events_of(path, events)]
    assert found == [{"x": "1,0", "y": "é"}, {"x": f'a{delimiter}"b\n', "y": '5" by'}]


def test_columns_are_checked_before_anything_is_read(path: Path) -> None:
    for events, option in ((Events(key="zz"), "--key"), (Events(timestamp="zz"), "--timestamp")):
        with pytest.raises(InvalidArgument, match=rf"no column 'zz' for {option}: id, k"):
            load(path, b"id,k\n1,2\n", events)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b'x,y\n5" by 3",2\n', '{"x":"5\\" by 3\\"","y":"2"}'),
        (b'x,y\n1,a"b\n', '{"x":"1","y":"a\\"b"}'),
        (b'"x",y\n"""1""","2"', '{"x":"\\"1\\"","y":"2"}'),
    ],
)
def test_quotes_in_fields_without_quotes_are_taken(path: Path, data: bytes, value: str) -> None:
    assert [event["value"] for event in load(path, data)] == [value]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("size", [7, 100, BLOCK_BYTES])
def test_an_odd_quote_changes_no_other_row(path: Path, size: int, suffix: str) -> None:
    data = b"\xef\xbb\xbfx,y\n" + b'1,"a\n""b"\n' * 50 + b'5",2\n' + b'1,"a\n""b"\r\n\n' * 50
    packed = path.with_name(f"{path.name}{suffix}")
    packed.write_bytes(gzip.compress(data) if suffix else data)
    found = [json.loads(event["value"]) for event in events_of(packed, Events(), size)]
    usual = [{"x": "1", "y": 'a\n"b'}] * 50
    assert found == [*usual, {"x": '5"', "y": "2"}, *usual]


TIMED, LATIN = Events(timestamp="id"), Events(encoding="latin-1")
# The file, how it is read, and words of the error.
ERRORS: list[tuple[bytes, Events, str]] = [
    (b"", Events(), "is empty"),
    (b"\n1,2\n", Events(), "is empty"),
    (b"x,y,x\n", Events(), "names a column twice: x"),
    (b"x,\xff\n", Events(), "rows.csv: line 1 is not UTF-8"),
    (b'"x"y,z\n', Events(), "rows.csv: line 1 is not CSV"),
    (b'x,y\n1,"2\n3,4\n', Events(), "a quote is opened in or after line 2 and never closed"),
    (b"x,y\n\n1,2\n1,2,3\n", Events(), "rows.csv: line 4 has 3 fields; the header has 2"),
    (b'x,y\n1,"a\nb"\n1\n', Events(), "line 4 has 1 fields"),
    (b"x,y\n1\n", LATIN, r"/rows.csv: line 2 has 1 fields"),
    (b"x,y\n1,2\n\xff,2\n", Events(), "line 3 is not UTF-8"),
    (b"x,y\n1,\xe9\n", Events(), r"rows.csv: line 2 is not UTF-8; give its --encoding"),
    (b"x,y\n1,\xe9\n", Events(encoding="ascii"), r"rows.csv: line 2 is not ascii"),
    (b"x,y\n", Events(encoding="klingon"), "klingon: Python knows no such encoding"),
    (b"x;y\n1;2\n", Events(key="x"), r"is the delimiter ';' \(--delimiter\)"),
    (b'x,y\n1,2\n3,"a"b\n', Events(), "line 3 is not CSV"),
    (b'x,y\n1,"2"\n3"4,"a" \n', Events(), "line 3 is not CSV"),
    (b"x,y\n" + BIG + b",2\n3\n", Events(), "line 3 has 1 fields; the header has 2"),
    (b'x,y\n5" pipe,1\n' + BIG + b",2\n3\n", Events(), "line 4 has 1 fields; the header has 2"),
    (b'x,y\n5" pipe,1\n' + 11 * BIG + b",2\n", Events(), "line 3 is longer than 1 MB"),
    (b"x,y\n1," + 40 * BIG, Events(), "line 2 is longer than 1 MB"),
    *(
        (b"id,x\n1700000000,x\n" + time + b",x\n", TIMED, "line 3, column id: ")
        for time in (b"1969-12-31T23:59:59Z", b"-1", b"1e15", b"253402300800000", b"soon")
    ),
]


@pytest.mark.parametrize(("data", "events", "message"), ERRORS)
def test_errors_name_the_line(
    path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, events: Events, message: str
) -> None:
    monkeypatch.setattr(load_csv, "MAX_RECORD_BYTES", 1 << 20)
    with pytest.raises(InvalidArgument, match=message) as error:
        load(path, data, events)
    assert str(path) in str(error.value) or "klingon" in message


@pytest.mark.parametrize("name", [b"x", BIG])
@pytest.mark.parametrize("other", [b"pipe", b'5" pipe'])
@pytest.mark.parametrize("big_first", [False, True])
def test_a_big_field_is_loaded_whatever_else_there_is(
    path: Path, name: bytes, other: bytes, big_first: bool
) -> None:
    rows = [BIG + b",1", other + b",2"][:: 1 if big_first else -1]
    found = load(path, b"\n".join([name + b",y", *rows, b""]))
    values = [json.loads(event["value"])[name.decode()] for event in found]
    assert values == [row.rpartition(b",")[0].decode() for row in rows]


@pytest.mark.parametrize("rows", [0, 200_000])
def test_an_error_after_many_rows(path: Path, rows: int) -> None:
    path.write_bytes(b"x,y\n" + b'"1","2\n3"\n' * rows + b'4,"5"6\n')
    with pytest.raises(InvalidArgument, match=f"line {2 * rows + 2} is not CSV"):
        events_of(path, Events())


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("rows.csv.gz", b"x,y\n1,2\n", "can't be unpacked"),
        ("rows.zip", b"x,y\n1,2\n", "can't be unpacked"),
        ("rows.csv.gz", gzip.compress(b"x,y\n" * 100_000, mtime=0)[:-20], "can't be unpacked"),
    ],
)
def test_what_is_not_packed_as_it_says_is_refused(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        load(tmp_path / name, data)


@pytest.mark.parametrize("count", [0, 2])
def test_a_zip_holds_one_csv_file(tmp_path: Path, count: int) -> None:
    with zipfile.ZipFile(tmp_path / "rows.zip", "w") as archive:
        for number in range(count):
            archive.writestr(f"{number}.csv", b"x\n")
    with pytest.raises(InvalidArgument, match=f"holds {count} CSV files"):
        events_of(tmp_path / "rows.zip", Events())


def test_a_file_that_is_left_early_is_closed(path: Path) -> None:
    path.write_bytes(b"x,y\n" + b"1,2\n" * 2_000_000)
    with opened(path, Events()) as file:
        batch = next(file.batches())
        assert isinstance(batch, pa.RecordBatch)
        assert 0 < file.done < path.stat().st_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2013-01-01T10:00:00Z", 1_357_034_400_000),
        ("2013-01-01T10:00:00+02:00", 1_357_027_200_000),
        ("2013-01-01 10:00:00", 1_357_034_400_000),
        (" 1357034400 ", 1_357_034_400_000),
        ("1357034400.5", 1_357_034_400_500),
        ("1357034400123", 1_357_034_400_123),
    ],
)
def test_a_time_is_read_from_each_format(text: str, expected: int) -> None:
    assert parse_time(text) == expected


@pytest.mark.parametrize("text", ["", "x", "0", "-5", "nan", "inf", "1e20", "1969-12-31"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError):
        parse_time(text)
