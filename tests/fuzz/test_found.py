"""What the fuzzer, or reading with it in mind, found: each input is refused by name now, or passed over."""

from __future__ import annotations

import gzip
import io
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from anabranch.audit.report import moment_of as audit_moment_of
from anabranch.batches import compression, framing
from anabranch.batches.compression import GZIP, ZSTD, compress
from anabranch.batches.format import frame, read_header
from anabranch.batches.framing import Kind, scan_batch
from anabranch.batches.records import Record, encode_batch
from anabranch.cli.load_csv import Events, opened
from anabranch.cli.options import moment_of
from anabranch.controller.history_tail import load_tail
from anabranch.controller.leadership import fold_to_end
from anabranch.core import rows as k
from anabranch.core.state import State
from anabranch.errors import (
    InvalidArgument,
    MalformedRecord,
    UnsupportedSetting,
    UnsupportedVersion,
)
from anabranch.kafka import calls
from anabranch.kafka.calls import (
    ADD_PARTITIONS_TO_TXN,
    CREATE_TOPICS,
    METADATA,
    ConnectionBroken,
    MalformedAnswer,
)
from anabranch.kafka.settings import parse_settings
from anabranch.ports import RawBatch, TopicPartition
from anabranch.protocol import limits
from anabranch.protocol.ids import NO_TXN, TXN_HEADER, pack_txn_header
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode
from anabranch.reading.history import history_record
from anabranch.spark.options import moment
from anabranch.spark.sink.avro_rows import parse
from anabranch.spark.source.positions import from_json
from anabranch.testing.memory.table import MemoryStore
from anabranch.topics.names import history_topic, replies_topic, status_topic
from tests.fuzz.controllers import COMMANDS, STREAM, Place
from tests.fuzz.mutate import sealed

STATUS = TopicPartition(status_topic(), 0)
HISTORY = TopicPartition(history_topic(STREAM), 0)


def raw(data: bytes) -> RawBatch:
    header = read_header(data)
    return RawBatch(0, header.next_offset, memoryview(data))


def batch_of(body: bytes, codec: int, count: int) -> bytes:
    """A batch whose records are these bytes, whatever they are."""
    return frame(
        compress(codec, body),
        compression=codec,
        last_offset_delta=count - 1,
        count=count,
        base_timestamp=5,
        max_timestamp=5,
    )


# -- a controller ------------------------------------------------------------------------------------------


UNREADABLE = {
    "noise": lambda: sealed(encode_batch([Record(0, 5, b"", b"x")])[:61] + b"\xff" * 50),
    "an unknown codec": lambda: sealed(batch_of(b"x", 0, 1)[:22] + b"\x07" + batch_of(b"x", 0, 1)[23:]),
    "a packed part that is cut": lambda: sealed(encode_batch([Record(0, 5, b"", b"x")], "zstd")[:-3]),
    "a timestamp beyond 64 bits": lambda: frame(
        b"\x0c\x00\x14\x00\x01\x01\x00", compression=0, last_offset_delta=0, count=1,
        base_timestamp=(1 << 63) - 5, max_timestamp=(1 << 63) - 1,
    ),
    "a bomb": lambda: batch_of(bytes(limits.BATCH.value + 1), ZSTD, 1),
    "records without end": lambda: batch_of(b"x", GZIP, limits.BATCH_RECORDS.value + 1),
}  # fmt: skip


@pytest.mark.parametrize("what", UNREADABLE)
def test_unreadable_commands_are_passed_over(what: str) -> None:
    """They stopped the controller: it led again, read them again, and so on."""
    place = Place()
    assert place.put(COMMANDS, UNREADABLE[what]())
    place.go_on()
    assert place.controller._intake.unreadable.total() == 1


def test_commands_are_queued_within_bounds() -> None:
    """Small batches that unpack to much are taken a few at a time, and all of them."""
    place = Place()
    headers = (("ab.cid", b"1" * 16), ("ab.reply", bytes(4)))
    big = encode(r.Abort(b"x" * (8 << 20), ""))
    for _ in range(8):
        assert place.put(COMMANDS, encode_batch([Record(0, 5, b"", big, headers)], "zstd"))
    last = place.world.send(r.GetState(place.txn_id))
    most = 0
    while place.world.reply(last) is None:
        place.controller._intake.fetch(place.controller.state, 0)
        queue = place.controller._lanes.on["open"].queue
        most = max(most, sum(len(command.payload) for command in queue))
        place.controller.step(0)
    assert (8 << 20) < most < limits.QUEUED.value + (9 << 20)
    answers = place.world.committed(TopicPartition(replies_topic(), 0))
    assert len([answer for answer in answers if answer.key == b"1" * 16]) == 8


def test_a_batch_of_too_many_runs_is_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 1 MB could cut into a million runs: 17 s and 700 MB."""
    most = 1000
    monkeypatch.setattr(framing, "MAX_RUNS", most)
    headers = [((TXN_HEADER, pack_txn_header(bytes(16), writer, 0)),) for writer in (1, 2)]
    records = [Record(i, 5, None, None, headers[i % 2]) for i in range(most + 1)]
    (run,) = scan_batch(raw(encode_batch(records)))
    assert (run.kind, run.records) == (Kind.MALFORMED, most + 1)
    assert len(scan_batch(raw(encode_batch(records[:most])))) == most


def test_a_control_batch_is_never_spliced() -> None:
    header = ((TXN_HEADER, bytes(28)),)
    data = encode_batch([Record(0, 5, None, b"v", header)])
    (run,) = scan_batch(raw(data))
    assert run.pure
    (run,) = scan_batch(raw(sealed(data[:22] + b"\x20" + data[23:])))
    assert not run.pure


def test_room_for_a_giant_is_freed() -> None:
    giant = compress(ZSTD, bytes(compression._KEPT_SCRATCH_BYTES + 1))
    compression.decompress(ZSTD, giant)
    assert len(compression._scratch.room) > compression._KEPT_SCRATCH_BYTES
    assert compression.decompress(ZSTD, compress(ZSTD, b"small")) == b"small"
    assert len(compression._scratch.room) <= compression._KEPT_SCRATCH_BYTES


# -- what only controllers write ---------------------------------------------------------------------------


NOT_READ = (MalformedRecord, UnsupportedVersion)
SCOPE_ROW = encode(r.ScopeRow("nyc", 0, ""))
TXN_KEY = k.txn_key(b"t" * 16)
FOREIGN_ROWS = {
    "noise under a key of no transaction": (k.scope_key("x"), b"hello"),
    "a row of another type": (k.ROUND_KEY, SCOPE_ROW),
    "a command": (k.scope_key("x"), encode(r.FindScope("x", True))),
    "a scope that is no text": (k.scope_key("x") + b"\xff", SCOPE_ROW),
    "a key of an unknown type": (NO_TXN + b"\xee", SCOPE_ROW),
    "a key that ends before its type": (NO_TXN, SCOPE_ROW),
    "a term of a longer key": (k.TERM_KEY + b"x", encode(r.TermRow(9, "me", 0, False))),
    "noise for a transaction": (TXN_KEY, b"hello"),
    "a transaction that is a scope": (TXN_KEY, SCOPE_ROW),
}


@pytest.mark.parametrize("what", FOREIGN_ROWS)
def test_foreign_status_rows_are_named_and_can_be_deleted(what: str) -> None:
    """The error names the key and what to do; doing it helps, and nothing is left in the table."""
    key, value = FOREIGN_ROWS[what]
    place = Place()
    log, clock = place.world.cluster.log("x"), place.world.clock
    store = MemoryStore().open("x")
    place.world.cluster.produce(STATUS, [Record(0, 5, key, value)])
    state = State(store)
    for _ in range(2):
        with pytest.raises(NOT_READ, match=f"{key.hex()}.*null value"):
            fold_to_end(log, store, state, clock, STATUS)
    place.world.cluster.produce(STATUS, [Record(0, 5, key, None)])
    fold_to_end(log, store, state, clock, STATUS)
    assert place.txn_id in state.open
    assert store.get(k.STATUS + key) is None


@pytest.mark.parametrize("value", [b"", b"hello", SCOPE_ROW, encode(r.ScopeRow("x", 1, ""))])
def test_foreign_history_records_are_named(value: bytes) -> None:
    place = Place()
    place.world.cluster.produce(HISTORY, [Record(0, 5, None, value)])
    with pytest.raises(NOT_READ, match=r"nyc\.flights\.history has a record at offset 2"):
        load_tail(place.world.cluster.log("x"), place.world.clock, STREAM)
    with pytest.raises(NOT_READ, match=r"a\.b\.history has a record at offset 0"):
        history_record("a.b.history", Record(0, 0, None, value))


# -- brokers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "version", "body"),
    [
        # Arrays that claim 2^31 items: kio makes room for them, or the process ends.
        (ADD_PARTITIONS_TO_TXN, 0, "0000000005746f7069630000000100000064ffff"),
        (ADD_PARTITIONS_TO_TXN, 1, "000000050000000100007f00000001"),
        (METADATA, 12, "00000000ffffffff7f"),
        (METADATA, 5, "000000007fffffff"),
        (CREATE_TOPICS, 2, "00000000" + "00000001" + "0002c3"),
        (METADATA, 12, ""),
    ],
)
def test_broken_answers_are_refused_as_a_broken_connection(
    api: Any, version: int, body: str
) -> None:
    with pytest.raises(MalformedAnswer) as raised:
        calls.answer(api, version, bytes.fromhex(body))
    assert isinstance(raised.value, ConnectionBroken)  # repeated like any call that broke


# -- people ------------------------------------------------------------------------------------------------


def _position(after: float, vector: dict[str, int]) -> dict[str, Any]:
    return {"a/b": {"after": after, "vector": vector}}


REFUSED: list[tuple[Callable[[Any], object], Any, type[Exception], str]] = [
    *(
        (read, text, InvalidArgument, "commit timestamp")
        for read in (moment_of, audit_moment_of, partial(moment, "at"))
        for text in ("9" * 5000, "²", "1e5", "")
    ),
    *(
        (lambda address: parse_settings(address, {}), f"b:{port}", UnsupportedSetting, "host:port")
        for port in ("²", "0", "65536", "9" * 5000, "-1")
    ),
    (
        lambda value: parse_settings("b:1", {"retry.backoff.ms": value}), "7" * 400,
        UnsupportedSetting, r"retry\.backoff\.ms",
    ),
    *(
        (parse, text, InvalidArgument, "avroschema")
        for text in ('{"type": "fixed", "name": "x"}', '{"type": "array"}', "{}", "[" * 5000, "3")
    ),
    *(
        (from_json, position, MalformedRecord, "no position of this source")
        for position in (
            _position(float("inf"), {}), _position(1e30, {}), _position(1 << 63, {}), _position(-2, {}),
            _position(0, {"-1": 5}), _position(0, {str(1 << 31): 5}), _position(0, {"0": -1}),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("read", "given", "error", "says"), REFUSED, ids=[str(row[1])[:40] for row in REFUSED]
)
def test_a_value_out_of_bounds_is_refused(
    read: Callable[[Any], object], given: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        read(given)


def _zip(method: int, data: bytes = b"a,b\n1,2\n" * 50) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("x.csv", data)
    return out.getvalue()


def _broken_inside(data: bytes) -> bytes:
    """The same with bytes in the middle turned over."""
    at = len(data) // 3
    return data[:at] + bytes(b ^ 0xFF for b in data[at : at + 8]) + data[at + 8 :]


PACKED = {
    "x.gz": _broken_inside(gzip.compress(bytes(range(256)) * 50)),
    "deflated.zip": _broken_inside(_zip(zipfile.ZIP_DEFLATED)),
    "bzip2.zip": _broken_inside(_zip(zipfile.ZIP_BZIP2)),
    "lzma.zip": _broken_inside(_zip(zipfile.ZIP_LZMA)),
    "method.zip": _zip(zipfile.ZIP_STORED).replace(
        b"\x14\x00\x00\x00\x00\x00", b"\x14\x00\x00\x00\x63\x00"
    ),
    "encrypted.zip": _zip(zipfile.ZIP_STORED).replace(
        b"\x14\x00\x00\x00\x00\x00", b"\x14\x00\x01\x00\x00\x00"
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_broken_packed_files_are_refused_by_name(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(PACKED[name])
    with pytest.raises(InvalidArgument, match=name), opened(file, Events()) as csv:
        list(csv.batches())


@pytest.mark.parametrize(
    ("data", "why"),
    [
        # each line end was counted from the beginning: hours
        (b'"' + b"\n" * (2 << 20), "a quote is opened in or after line 1 and never closed"),
        (b'"' + b"x" * 200_000 + b'"y,b\n1,2\n', "line 1 is not CSV"),
    ],
)
def test_broken_header_rows_are_refused(data: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_bytes(data)
    with pytest.raises(InvalidArgument, match=why), opened(file, Events()):
        pass
