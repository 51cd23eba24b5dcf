"""Columns made of record batches by compiled code: the same as the plain decoder's records, or the same refusal."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.batches import columns_read
from anabranch.batches.columns_read import Binary, Columns, ColumnsBuilder
from anabranch.batches.format import HEADER_SIZE, frame, read_header
from anabranch.batches.records import (
    Record,
    decode_records,
    encode_batch,
)
from anabranch.ports import CorruptBatch, RawBatch
from anabranch.protocol.ids import TXN_HEADER, TXN_ID_SIZE
from anabranch.testing.memory.partition import encode_sparse, with_base_offset
from tests.batches.strategies import ANY_BATCH, CODECS, mutated, raw, records
from tests.batches.test_format import edited
from tests.batches.test_records import MALFORMED
from tests.conftest import some

columns_read.warm()  # here, that no test of hypothesis takes so long
ALL = np.array([[0], [1 << 62]], dtype=np.int64)


def values(column: Binary) -> list[bytes | None]:
    """A column's values, by nothing but its arrays."""
    data, ends = column.data.tobytes(), column.ends.tolist()
    valid = [True] * (len(ends) - 1) if column.valid is None else column.valid.astype(bool).tolist()
    assert ends[0] == 0
    assert ends[-1] == len(data)
    assert valid.count(False) == column.nulls
    return [
        data[first:end] if there else None
        for first, end, there in zip(ends, ends[1:], valid, strict=False)
    ]


def rows(chunks: Iterable[Columns]) -> list[tuple[Record, bytes | None]]:
    """Records, without headers of ours, and their transaction ids."""
    out = []
    for columns in chunks:
        names = [name or b"" for name in values(columns.names)]
        pairs = list(zip(names, values(columns.header_values), strict=True))
        assert columns.ascii_names == all(name.isascii() for name in names)
        at = columns.header_ends.tolist()
        for row, (offset, timestamp, key, value, txn) in enumerate(
            zip(
                columns.offsets.tolist(),
                columns.timestamps.tolist(),
                values(columns.keys),
                values(columns.values),
                values(columns.txns),
                strict=True,
            )
        ):
            headers = tuple(
                (name.decode("utf-8", "surrogateescape"), data)
                for name, data in pairs[at[row] : at[row + 1]]
            )
            out.append((Record(offset, timestamp, key, value, headers), txn))
    return out


def expected(data: bytes) -> list[tuple[Record, bytes | None]]:
    """The same of the plain decoder."""
    out = []
    for record in decode_records(data):
        txn = None
        for name, value in record.headers:
            if name == TXN_HEADER and value is not None and len(value) >= TXN_ID_SIZE:
                txn = value[:TXN_ID_SIZE]
        headers = tuple(pair for pair in record.headers if pair[0] not in ("ab.txn", "ab.op"))
        out.append((record._replace(headers=headers), txn))
    return out


def built(batches: Iterable[bytes], wanted: np.ndarray = ALL, rows: int = 100) -> list[Columns]:
    """The chunks that a builder makes of batches."""
    builder = ColumnsBuilder(rows, 10_000)
    chunks = [builder.add(raw(data), wanted) for data in batches]
    chunks.append(builder.finish())
    return [chunk for chunk in chunks if chunk is not None]


@given(st.lists(st.tuples(records(), st.sampled_from(CODECS)), max_size=5), st.integers(1, 50))
def test_columns_are_the_records(
    made: list[tuple[list[Record], str | None]], chunk_rows: int
) -> None:
    base = 0
    batches = []
    for batch, codec in made:
        batches.append(with_base_offset(encode_batch(batch, codec), base))
        base += len(batch)
    chunks = built(batches, rows=chunk_rows)
    assert rows(chunks) == [row for data in batches for row in expected(data)]
    assert all(len(chunk) for chunk in chunks)


@given(records(), st.integers(0, 1 << 40), st.integers(0, 5), st.data())
def test_offsets_with_gaps_stay(
    made: list[Record], base: int, behind: int, data: st.DataObject
) -> None:
    kept = [r._replace(offset=base + r.offset) for r in made if data.draw(st.booleans())]
    batch = encode_sparse(kept, base_offset=base, next_offset=base + len(made) + behind)
    assert rows(built([batch])) == expected(batch)


@given(records(), st.lists(st.integers(0, 25), max_size=8, unique=True).map(sorted))
def test_only_wanted_offsets_are_taken(made: list[Record], edges: list[int]) -> None:
    data = encode_batch(made)
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    wanted = np.array(pairs, dtype=np.int64).reshape(-1, 2).T.copy()
    taken = {offset for first, end in pairs for offset in range(first, end)}
    assert rows(built([data], wanted)) == [r for r in expected(data) if r[0].offset in taken]


def same_or_refused(data: bytes) -> None:
    """The columns are the decoder's records, or both refuse; whatever lies behind the batch in memory."""
    try:
        wanted = expected(data)
    except CorruptBatch:
        wanted = None
    for behind in (b"\x00" * 40, b"\xff" * 40):
        header = read_header(data)
        view = memoryview(data + behind)[: len(data)]
        batch = RawBatch(header.base_offset, header.next_offset, view)
        builder = ColumnsBuilder(100, 10_000)
        if wanted is None:
            with pytest.raises(CorruptBatch):
                builder.add(batch, ALL)
        else:
            chunk = builder.add(batch, ALL) or builder.finish()
            assert rows([] if chunk is None else [chunk]) == wanted


@given(*ANY_BATCH)
def test_any_bytes_are_read_as_the_general_way_reads_them(
    body: bytes, count: int, last: int, base: int
) -> None:
    same_or_refused(
        frame(
            body,
            compression=0,
            last_offset_delta=last,
            count=count,
            base_timestamp=base,
            max_timestamp=0,
        )
    )


@settings(max_examples=some(600))
@given(records(max_size=5), st.data())
def test_mutated_records(made: list[Record], data: st.DataObject) -> None:
    whole = encode_batch(made)
    header = read_header(whole)
    same_or_refused(
        frame(
            mutated(whole[HEADER_SIZE:], data),
            compression=0,
            last_offset_delta=header.last_offset_delta,
            count=header.record_count,
            base_timestamp=header.base_timestamp,
            max_timestamp=header.max_timestamp,
        )
    )


@pytest.mark.parametrize("case", MALFORMED)
def test_what_the_decoder_refuses_is_refused(case: str) -> None:
    builder = ColumnsBuilder(100, 10_000)
    good = encode_batch([Record(0, 5, b"k", b"v", (("h", b"x"),))])
    assert builder.add(raw(good), ALL) is None
    with pytest.raises(CorruptBatch):
        builder.add(raw(MALFORMED[case]), ALL)
    rest = builder.finish()  # nothing of the bad one, and the good one whole
    assert rest is not None
    assert rows([rest]) == expected(good)


def test_log_append_time_gives_all_records_the_batchs_time() -> None:
    data = edited(
        encode_batch([Record(i, 100 + i, None, b"v") for i in range(3)]),
        attributes=0x08,
        max_timestamp=777,
    )
    (chunk,) = built([data])
    assert chunk.timestamps.tolist() == [777] * 3


def test_a_batch_that_compaction_emptied_brings_nothing() -> None:
    assert built([encode_sparse([], base_offset=3, next_offset=9)]) == []


def test_more_headers_and_bytes_than_a_chunk_has_room_for() -> None:
    few = encode_batch([Record(i, 0, b"k", b"v", (("a", b"1"),)) for i in range(10)])
    many = encode_batch(
        [Record(i, 0, None, b"x" * 30, (("h", None), ("", b"")) * 40) for i in range(1000)], "zstd"
    )
    batches = [few, with_base_offset(many, 10), with_base_offset(few, 1010)]
    chunks = built(batches)
    assert rows(chunks) == [row for data in batches for row in expected(data)]
    assert [len(chunk) for chunk in chunks] == [10, 1000, 10]


def test_a_bomb_is_refused() -> None:
    data = encode_batch([Record(0, 0, None, b"\x00" * 2_000_000)], "lz4")
    builder = ColumnsBuilder()
    with pytest.raises(CorruptBatch, match="unpacks to more"):
        builder.add(raw(data), ALL, limit=1_000_000)
    chunk = builder.add(raw(data), ALL, limit=3_000_000) or builder.finish()
    assert chunk is not None
    assert rows([chunk]) == expected(data)
