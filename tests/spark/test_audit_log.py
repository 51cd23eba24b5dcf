"""How the audit reads: its compiled walk is its plain Python one; tasks get fair shares."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from anabranch.audit import kernel, log
from anabranch.audit.log import Span, cut, share
from anabranch.audit.report import CHECKS, moment_of
from anabranch.audit.run import _Audit, _cuts, audit
from anabranch.audit.tables import scopes_of
from anabranch.batches.format import HEADER_SIZE, read_header
from anabranch.batches.records import Record, encode_batch
from anabranch.cli.errors import ExitCode
from anabranch.cli.main import app
from anabranch.core.stream_states import LOST
from anabranch.errors import InvalidArgument, NotReady, UnknownStream
from anabranch.kafka.log import KafkaLog
from anabranch.ports import RawBatch, TopicPartition
from anabranch.protocol import hybrid_time
from anabranch.protocol.schemas.codec import encode
from anabranch.protocol.schemas.records import ForgottenRow
from anabranch.reading.committed_log import CommittedLog
from anabranch.spark.options import Connection
from anabranch.testing.memory.partition import with_base_offset
from anabranch.topics.names import stream_topic
from tests.client.world import World
from tests.conftest import some

TXN = b"t" * 28
HEADERS: dict[str, tuple[tuple[tuple[str, bytes | None], ...], int]] = {
    "none": ((), log.PLAIN),
    "the user's": ((("n", b"1"), ("ü", None), ("n", b"")), log.PLAIN),
    "ab.txn": ((("a", b"x"), ("ab.txn", TXN), ("b", b"y")), log.WRITE),
    "ab.txn too short": ((("ab.txn", TXN[1:]),), log.BAD),
    "ab.txn null": ((("ab.txn", None),), log.BAD),
    "ab.txn twice": ((("ab.txn", TXN), ("ab.txn", TXN)), log.BAD),
    "ab.op": ((("ab.op", b""),), log.OP),
    "ab.op and ab.txn": ((("ab.op", b""), ("ab.txn", TXN)), log.BAD),
    "another": ((("ab.cid", b"1"),), log.BAD),
    "almost ours": ((("ab", b"1"), ("abx", b"2"), ("AB.txn", b"3"), ("\udcff", b"")), log.PLAIN),
}
SPAN = Span("nyc/a", "nyc.a", 3, 110, 580, committed=True)


def batch_of(records: list[Record], **more: str) -> RawBatch:
    first = records[0].offset
    data = with_base_offset(encode_batch(records, **more), first)
    return RawBatch(first, records[-1].offset + 1, memoryview(data))


def both_ways(batch: RawBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    header = read_header(batch.data)
    rows = list(log._rows_of(SPAN, batch, native=header.is_transactional))
    return log._walked(SPAN, batch, header), log._from_rows(SPAN, rows)


@pytest.mark.parametrize("case", HEADERS)
def test_each_header_has_its_kind(case: str) -> None:
    headers, kind = HEADERS[case]
    walked, plain = both_ways(batch_of([Record(200, 5, b"k", b"v", headers)]))
    assert walked.column("kind").to_pylist() == [kind]
    assert walked.equals(plain)


@pytest.mark.parametrize("codec", [None, "lz4", "zstd", "gzip", "snappy"])
def test_big_batches_are_walked_as_small_ones_are_decoded(codec: str | None) -> None:
    chance = random.Random(7)
    records = [
        Record(
            100 + n,
            chance.choice((0, 1 << 40, 1_700_000_000_000)),
            chance.choice((None, b"", b"key", chance.randbytes(300))),
            chance.choice((None, b"", b"value", chance.randbytes(9000))),
            chance.choice(list(HEADERS.values()))[0],
        )
        for n in range(500)
    ]
    walked, plain = both_ways(batch_of(records, compression=codec) if codec else batch_of(records))
    walked.validate(full=True)
    assert walked.equals(plain)
    assert walked.column("offset").to_pylist() == list(range(110, 580))


@settings(max_examples=some(300), deadline=None)
@given(st.data())
def test_damaged_bytes_are_malformed_or_read(data: st.DataObject) -> None:
    """Damage of any kind is called so, or reads as something: nothing outside is touched."""
    records = [Record(100 + n, n, b"key", b"v" * n, HEADERS["ab.txn"][0]) for n in range(20)]
    whole = batch_of(records).data
    body = bytearray(bytes(whole)[HEADER_SIZE:])
    for at in data.draw(st.lists(st.integers(0, len(body) - 1), max_size=3)):
        body[at] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.integers(0, len(body)))]
    room = kernel.room(20, len(body))
    count = kernel.walk(np.frombuffer(bytes(body), dtype=np.uint8), 20, 100, 0, 0, 1 << 40, *room)
    assert count == kernel.MALFORMED or count == 20


@pytest.mark.parametrize(
    ("sizes", "least", "tasks"),
    [
        ([], 4, 0),
        ([5], 4, 1),
        ([1] * 100, 4, 4),
        ([log.SPAN_OFFSETS] * 9, 4, 9),
        ([3 * log.SPAN_OFFSETS, 1, 1], 2, 4),
    ],
)
def test_many_small_spans_share_a_task(sizes: list[int], least: int, tasks: int) -> None:
    spans = [
        piece
        for n, size in enumerate(sizes)
        for piece in cut(Span("nyc/a", "nyc.a", n, 10, 10 + size, committed=True))
    ]
    shares = share(spans, least)
    assert len(shares) == tasks
    assert sorted(span for each in shares for span in each) == sorted(spans)
    loads = [sum(span.end - span.first for span in each) for each in shares]
    assert max(loads, default=0) - min(loads, default=0) <= log.SPAN_OFFSETS


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        (None, None),
        ("7238556053504000000", 7238556053504000000),
        ("2026-01-01T00:00:00Z", hybrid_time.from_us(1767225600000_000)),
        ("2026-01-01T01:00:00+01:00", hybrid_time.from_us(1767225600000_000)),
        ("2026-01-01", hybrid_time.from_us(1767225600000_000)),
    ],
)
def test_a_moment_is_a_timestamp_or_a_time(text: str | None, moment: int | None) -> None:
    assert moment_of(text) == moment
    with pytest.raises(InvalidArgument, match="commit timestamp"):
        moment_of("yesterday")


def test_the_docs_name_every_check() -> None:
    page = Path(__file__).parents[2] / "docs" / "spark.md"
    section = page.read_text(encoding="utf-8").partition("\n## Audit\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z]+-[a-z]+|across|epochs|vectors|receipt|ledger)`", section))
    assert named & set(CHECKS) == set(CHECKS)


@pytest.mark.parametrize(
    ("home", "said"), [("/nowhere", "does not run"), (None, "there is no java")]
)
def test_without_a_jdk_the_command_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str | None, said: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(CommittedLog, "partition_counts", lambda *_: {})  # the brokers are there
    if home is None:
        monkeypatch.delenv("JAVA_HOME", raising=False)
    else:
        monkeypatch.setenv("JAVA_HOME", home)
    result = CliRunner().invoke(app, ["spark", "audit", "--stream", "nyc/a", "-b", "nowhere:1"])
    assert result.exit_code == ExitCode.ENVIRONMENT
    assert said in result.stderr
    assert "openjdk-17-jdk" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_audit_is_of_a_stream_at_least() -> None:
    nowhere = Connection("nowhere:1", "anabranch", 1.0, ())
    with pytest.raises(InvalidArgument, match="stream"):
        audit(cast("SparkSession", None), nowhere, [])  # before Spark is asked for anything


def test_a_deletion_hides_what_was_committed_before_it_and_a_loss_all() -> None:
    world = World()
    for name in ("t/lost", "t/there", "t/again"):
        world.client.create_stream(name)
    assert world.controller is not None
    rows = dict(world.controller.state.streams)
    rows["t/lost"] = replace(rows["t/lost"], state=LOST)
    forgotten = [(encode(ForgottenRow(name, 1)), 1_000_000) for name in ("t/gone", "t/again")]
    there = scopes_of(0, 7, [*((encode(row), 1) for row in rows.values()), *forgotten])
    deleted = hybrid_time.from_us(4_600_000_000)  # and an hour
    assert there.streams == ("t/again", "t/there")
    assert there.again == {"t/again"}
    assert there.partitions == {"t/there": 1, "t/again": 1}
    assert there.gone == {"t/gone": deleted, "t/lost": hybrid_time.MAX}
    assert _cuts({}, {"t/there": 0}, there) == there.gone


def test_a_broker_that_lags_hides_no_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.client.create_stream("t/a")
    nowhere = Connection("nowhere:1", "anabranch", 1.0, ())
    source = world.cluster.log("audit")
    run = _Audit(cast("SparkSession", None), nowhere, cast("KafkaLog", source), None)
    places = partial(run._places, topic=stream_topic)
    assert places({"t/a": 1}) == [TopicPartition("t.a", 0)]
    with pytest.raises(NotReady, match=r"all partitions of t\.a \(yet\): run it again"):
        places({"t/a": 2})
    with pytest.raises(UnknownStream, match="is gone"):
        places({"t/b": 1})
    monkeypatch.setattr(source, "is_known", lambda _: True)
    with pytest.raises(NotReady):
        places({"t/b": 1})
