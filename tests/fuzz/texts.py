"""Fuzzed: what people give: options, times, ranges, schemas, CSV files, checkpoints of Spark."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import types as t

from anabranch.cli.load_csv import Events, opened, parse_time
from anabranch.cli.options import moment_of, parse_kafka, parse_range, parse_segment
from anabranch.errors import InvalidArgument, MalformedRecord, UnsupportedSetting
from anabranch.kafka.settings import parse_settings
from anabranch.protocol.legal_names import check_scope, split_stream
from anabranch.reading.committed_log import StreamIds
from anabranch.reading.history import check_at
from anabranch.reading.snapshot import SnapshotPlan, StreamCut
from anabranch.spark.options import Options, moment
from anabranch.spark.sink import avro_rows
from anabranch.spark.sink.encoding import encoding_of
from anabranch.spark.source import positions
from anabranch.spark.source.plan import streams_of
from tests.fuzz.target import Make, Run, Target, always

_MOMENTS = "2026-03-01T12:00:00+00:00", "2026-03-01T12:00:00.123456Z"


def _on_text(take: Callable[[str], object]) -> Make:
    return always(lambda data: take(data.decode("utf-8", "replace")))


def _texts(*texts: str) -> list[bytes]:
    return [text.encode() for text in texts]


def _at(text: str) -> None:
    check_at(moment_of(text))


def _spark_moment(text: str) -> None:
    check_at(moment("at", text))


def _time(text: str) -> None:
    milliseconds = parse_time(text)
    assert -(1 << 63) <= milliseconds < 1 << 63


def _segment(text: str) -> None:
    assert 0 <= parse_segment(text) < 1 << 63


def _range(text: str) -> None:
    low, high = parse_range(text)
    assert low < high


def _addresses(text: str) -> None:
    name, _, rest = text.partition("\n")
    option, _, value = rest.partition("=")
    parse_settings(name, {option: value} if option else {})


_ROW = t.StructType(
    [
        t.StructField("k", t.StringType()),
        t.StructField("n", t.LongType()),
        t.StructField("d", t.DecimalType(10, 2)),
        t.StructField("a", t.ArrayType(t.DoubleType())),
    ]
)


def _options(text: str) -> None:
    options = Options(parse_kafka([line for line in text.split("\n") if line]))
    options.connection()
    options.number("rows", 5)
    options.seconds("timeout", 5)
    streams_of(options)
    encoding_of(options, _ROW, by_column=False)
    options.check_all_used()


def _schema(text: str) -> None:
    avro_rows.check_fits(_ROW, text)
    avro_rows.AvroRows(text, _ROW.fields)


def _positions(text: str) -> None:
    """Spark gives back what it kept, as JSON is read."""
    try:
        offset: Any = json.loads(text)
    except (ValueError, RecursionError):
        return
    if isinstance(offset, dict):
        found = positions.from_json(offset)
        assert positions.from_json(positions.to_json(found)) == found
        for position in found.values():
            assert all(0 <= p < 1 << 31 for p in position.vector)
            assert all(0 <= o < 1 << 63 for o in (position.after + 1, *position.vector.values()))


def _position_seeds() -> list[bytes]:
    made = {"a/b": positions.Position(7, {0: 5, 1: 1 << 62}), "a/c": positions.BEGIN}
    return _texts(json.dumps(positions.to_json(made)))


def _file(name: str, take: Callable[[Path], object]) -> Run:
    """The input as a file in memory (or nearly so)."""
    folder = Path(tempfile.mkdtemp(prefix="anabranch-fuzz-file-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = folder / name

    def run(data: bytes) -> None:
        file.write_bytes(data)
        os.chmod(file, 0o600)
        take(file)

    return run


def _load(file: Path) -> None:
    with opened(file, Events()) as csv:
        first, last = csv.columns[0], csv.columns[-1]
    for events in (Events(key=first, timestamp=last), Events(as_json=False)):
        with opened(file, events) as csv:
            for _ in csv.batches():
                pass


_CSV = b"\xef\xbb\xbfid,when\n" + b"".join(
    b'%d,"2026-03-01T12:00:0%d"\r\n' % (i, i % 10) for i in range(20)
)
_WIDE = b"id,when\n" + b'"' + b"\n" * 300 + b'",1700000000\n'


def _packed(name: str) -> list[bytes]:
    import gzip
    import io
    import zipfile

    if name == "gz":
        return [gzip.compress(data, mtime=0) for data in (_CSV, _WIDE)]
    if name == "zip":
        found = []
        methods = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA
        for method in methods:
            out = io.BytesIO()
            with zipfile.ZipFile(out, "w", method) as archive:
                archive.writestr(zipfile.ZipInfo("a.csv"), _CSV, method)
            found.append(out.getvalue())
        return found
    return [_CSV, _WIDE]


def _snapshot_positions() -> list[bytes]:
    ids = StreamIds("f" * 32, "07" * 16)
    cuts = {"a/b": StreamCut({0: 7, 1: 1 << 62}, {0: 5, 1: 0}, 9, ids), "a/c": StreamCut({}, {}, 0)}
    return _texts(SnapshotPlan(1 << 60, cuts).to_text(), SnapshotPlan(9, cuts, 3).to_text())


_BAD = (InvalidArgument,)
_SCHEMA = avro_rows.avro_schema(_ROW)

TARGETS = (
    Target(
        "option-at",
        lambda: _texts("now", "7250000000000000000", *_MOMENTS),
        _on_text(_at),
        _BAD,
    ),
    Target("spark-moment", lambda: _texts(_MOMENTS[0]), _on_text(_spark_moment), _BAD),
    Target(
        "load-times",
        lambda: _texts(*_MOMENTS, "1700000000", "1700000000000.5"),
        _on_text(_time),
        (ValueError,),
    ),
    Target("segments", lambda: _texts("3@1", "0x5", "7"), _on_text(_segment), _BAD),
    Target("ranges", lambda: _texts("0:0x80000000"), _on_text(_range), _BAD),
    Target("streams", lambda: _texts("nyc/flights"), _on_text(split_stream), _BAD),
    Target("scopes", lambda: _texts("nyc"), _on_text(check_scope), _BAD),
    Target(
        "addresses",
        lambda: _texts("b:9092,ssl://[::1]:9093\nclient.id=x", "b:1\nretry.backoff.ms=7"),
        _on_text(_addresses),
        (UnsupportedSetting,),
    ),
    Target(
        "spark-options",
        lambda: _texts("bootstrap=b:1\ntimeout=5\nstream=a/b\nencoding=json\nkeycolumn=k"),
        _on_text(_options),
        _BAD,
    ),
    Target("avro-schemas", lambda: _texts(_SCHEMA), _on_text(_schema), _BAD),
    Target("snapshot-positions", _snapshot_positions, _on_text(SnapshotPlan.of_text), _BAD),
    Target("positions", _position_seeds, _on_text(_positions), (MalformedRecord,)),
    *(
        Target(
            f"load-{name}",
            partial(_packed, name),
            partial(_file, f"x.{name}", _load),
            _BAD,
        )
        for name in ("csv", "gz", "zip")
    ),
)
