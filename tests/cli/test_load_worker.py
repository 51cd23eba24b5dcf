"""What one worker of `anabranch load` writes of a block."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from anabranch.cli.load_split import Block
from anabranch.cli.load_worker import Job, parse_time, write_block
from anabranch.cli.session import Target
from anabranch.errors import InvalidArgument

Written = list[tuple[bytes | None, bytes, int | None]]
JOB = Job(
    target=Target("x:1", "p", 1.0),
    token=b"",
    stream="nyc/x",
    columns=("id", "name"),
    form="json",
    key=None,
    timestamp=None,
    worker=0,
    workers=1,
)


def write(job: Job, data: bytes, line: int = 2) -> Written:
    written: Written = []
    count = write_block(Block(line, data), job, lambda *event: written.append(event))
    assert count == len(written)
    return written


def test_a_row_becomes_a_json_object() -> None:
    assert write(JOB, 'a,"x ""y"", é"\nb,\n'.encode()) == [
        (None, '{"id":"a","name":"x \\"y\\", é"}'.encode(), None),
        (None, b'{"id":"b","name":""}', None),
    ]


def test_a_row_stays_csv() -> None:
    written = write(replace(JOB, form="csv"), b'a,"x, y"\nb,z\n')
    assert [value for _, value, _ in written] == [b'a,"x, y"', b"b,z"]


def test_key_and_timestamp() -> None:
    job = replace(JOB, key="name", timestamp="id")
    assert [(key, stamp) for key, _, stamp in write(job, b"1700000000,k\n2020-01-01,\n")] == [
        (b"k", 1_700_000_000_000),
        (None, 1_577_836_800_000),
    ]


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_workers_share_the_rows_by_key_and_keep_their_order(workers: int) -> None:
    data = b"".join(b"%d,%s\n" % (n, b"k%d" % (n % 10) if n % 4 else b"") for n in range(500))
    shares = [
        write(replace(JOB, key="name", worker=n, workers=workers), data) for n in range(workers)
    ]
    rows = [json.loads(value) for share in shares for _, value, _ in share]
    assert sorted(int(row["id"]) for row in rows) == list(range(500)), "each row once"
    owners: dict[bytes, int] = {}
    for number, share in enumerate(shares):
        assert share, "every worker has something to do"
        last: dict[bytes, int] = {}
        for key, value, _ in share:
            if key is None:
                continue
            assert owners.setdefault(key, number) == number, "a key has one writer"
            place = int(json.loads(value)["id"])
            assert place > last.get(key, -1), "and its order"
            last[key] = place


def test_without_a_key_column_a_worker_writes_whole_blocks() -> None:
    assert len(write(replace(JOB, worker=1, workers=5), b"1,2\n3,4\n")) == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"1,2\n1,2,3\n", "line 8 has 3 fields; the header has 2"),
        (b'1,"a\nb"\n1\n', "line 9 has 1 fields"),
        (b"1,2\n\xff,2\n", "line 8 is not UTF-8"),
        (b'1,2\n3,"a"b\n', "line 8 is not CSV"),
    ],
)
def test_errors_name_the_line(data: bytes, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        write(JOB, data, line=7)


def test_a_time_that_is_none_names_line_and_column() -> None:
    with pytest.raises(InvalidArgument, match="line 5, column id: "):
        write(replace(JOB, timestamp="id"), b"soon,x\n", line=5)


def test_empty_lines_are_passed_over() -> None:
    assert len(write(JOB, b"1,2\n\n3,4\n\n")) == 2


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
def test_times(text: str, expected: int) -> None:
    assert parse_time(text) == expected


@pytest.mark.parametrize("text", ["", "x", "0", "-5", "nan", "inf", "1e20"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError):
        parse_time(text)
