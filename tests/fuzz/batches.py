"""Fuzzed: record batches, in plain Python and through the compiled code's callers."""

from __future__ import annotations

from functools import partial
from typing import cast

import numpy as np

from anabranch.batches import framing
from anabranch.batches.builder import BatchBuilder
from anabranch.batches.columns_read import ColumnsBuilder
from anabranch.batches.compression import CODECS, MAX_UNPACKED_BYTES, compress, decompress
from anabranch.batches.format import read_header, split_batches
from anabranch.batches.records import decode_records
from anabranch.batches.split import Split
from anabranch.controller.intake import scan
from anabranch.core.journal_runs import StoredRun
from anabranch.ports import CorruptBatch, LogRefused, RawBatch
from anabranch.protocol.limits import Room
from anabranch.protocol.partitioner import SPACE
from anabranch.protocol.schemas.records import SegmentRange
from anabranch.testing.memory.partition import patch
from tests.fuzz.mutate import mutated_batch
from tests.fuzz.samples import batches
from tests.fuzz.target import Make, Run, Target, always

_UNPACKED = 32 << 20


def _compiled(run: Run) -> Make:
    """By compiled code, which the first call loads."""

    def make() -> Run:
        framing.warm()
        return run

    return make


def _raw(data: bytes) -> RawBatch:
    """A batch as a fetch gives it. `CorruptBatch`."""
    found = list(split_batches(data))
    if len(found) != 1 or len(found[0].data) != len(data):
        raise CorruptBatch("not one whole batch")
    return found[0]


def _blobs(data: bytes) -> None:
    end = 0
    for batch in split_batches(data):
        assert 0 <= batch.base_offset < batch.next_offset
        end += len(batch.data)
        read_header(batch.data)
    assert end <= len(data)


def _decode(data: bytes) -> None:
    batch = _raw(data)
    header = read_header(batch.data)
    records = decode_records(batch.data)
    assert len(records) == header.record_count
    offsets = [record.offset for record in records]
    assert offsets == sorted(set(offsets))
    assert all(batch.base_offset <= offset < batch.next_offset for offset in offsets)


def _scan(data: bytes) -> None:
    """A controller's handling of any journal batch raises nothing."""
    try:
        batch = _raw(data)
    except CorruptBatch:
        batch = RawBatch(0, 1, memoryview(data))
    runs = framing.scan_batch(batch)
    scanned = scan(batch, Room(), limit=MAX_UNPACKED_BYTES)
    if any(run.kind is framing.Kind.MALFORMED for run in runs):
        assert len(runs) == 1
        return
    records = decode_records(batch.data)
    assert sum(run.records for run in runs) == len(records)
    taken = sum(run.records for run in (*scanned.runs, *scanned.plain))
    assert taken + sum(scanned.rejected.values()) <= len(records)


def _patch(data: bytes) -> None:
    again = patch(data, 7, 1, 5)
    decode_records(again)


def _dense() -> list[bytes]:
    return [data for data in batches() if read_header(data).is_dense]


def _copy(data: bytes) -> None:
    batch = _raw(data)
    runs = framing.scan_batch(batch)
    if not runs or runs[0].kind is framing.Kind.MALFORMED:
        return
    builder = BatchBuilder("lz4")
    taken = sum(builder.add_from_batch(batch, run.first_delta, run.last_delta) for run in runs)
    assert taken == sum(run.records for run in runs)
    rows = [record[2:] for record in decode_records(batch.data)]
    assert [record[2:] for record in decode_records(builder.build())] == rows


_SEGMENTS = [SegmentRange(0, 0, SPACE // 3, 0), SegmentRange(1, SPACE // 3, SPACE, 1)]


def _split(data: bytes) -> None:
    batch = _raw(data)
    scanned = scan(batch, Room(), limit=MAX_UNPACKED_BYTES)
    out = Split(_SEGMENTS)
    for found in (*scanned.plain, *scanned.runs):
        out.add(batch, cast("StoredRun", found), 0)
    parts = [list(decode_records(b.data)) for made in out.done() for b in made]
    total = sum(found.records for found in (*scanned.plain, *scanned.runs))
    assert sum(map(len, parts)) == total


_EVERYTHING = np.array([[0], [(1 << 63) - 1]], dtype=np.int64)


def _columns(data: bytes) -> None:
    batch = _raw(data)
    builder = ColumnsBuilder(rows=64, size=4096)
    done = [builder.add(batch, _EVERYTHING), builder.finish()]
    records = decode_records(batch.data)
    columns = [chunk for chunk in done if chunk is not None]
    assert [int(o) for chunk in columns for o in chunk.offsets] == [x.offset for x in records]
    assert sum(chunk.keys.nulls for chunk in columns) == sum(x.key is None for x in records)


def _packed(codec: int) -> list[bytes]:
    bodies = (b"", b"x", b"abc" * 500, bytes(range(256)) * 40, bytes(100_000))
    found = [compress(codec, body) for body in bodies]
    if codec == CODECS["snappy"]:
        found += [_xerial(body) for body in bodies[1:]]
    return found


def _xerial(body: bytes) -> bytes:
    """As Java's streams frame snappy."""
    half = len(body) // 2
    blocks = [compress(CODECS["snappy"], part) for part in (body[:half], body[half:])]
    head = b"\x82SNAPPY\x00" + bytes((0, 0, 0, 1, 0, 0, 0, 1))
    return head + b"".join(len(block).to_bytes(4, "big") + block for block in blocks)


_BAD = (CorruptBatch,)
_MEMORY = 600  # a small input may unpack to much: what is allowed, twice

TARGETS = (
    Target("blobs", lambda: [b"".join(batches()[:3]), *batches()], always(_blobs), _BAD),
    Target("batches", batches, always(_decode), _BAD, mutated_batch, _MEMORY),
    Target("scan", batches, always(_scan), (), mutated_batch, _MEMORY),
    Target("scan-compiled", batches, _compiled(_scan), (), mutated_batch, _MEMORY),
    Target("patch", _dense, always(_patch), (CorruptBatch, LogRefused), mutated_batch, _MEMORY),
    Target("copy", batches, always(_copy), _BAD, mutated_batch, _MEMORY),
    Target("copy-compiled", batches, _compiled(_copy), _BAD, mutated_batch, _MEMORY),
    Target("split", batches, always(_split), _BAD, mutated_batch, _MEMORY),
    Target("split-compiled", batches, _compiled(_split), _BAD, mutated_batch, _MEMORY),
    Target("columns", batches, always(_columns), _BAD, mutated_batch, _MEMORY),
    *(
        Target(
            f"unpack-{name}",
            partial(_packed, number),
            always(partial(decompress, number, limit=_UNPACKED)),
            _BAD,
        )
        for name, number in CODECS.items()
        if number
    ),
)
