"""Records and batches for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from anabranch.batches.format import read_header
from anabranch.batches.records import Record
from anabranch.core.journal_runs import StoredRun
from anabranch.ports import RawBatch
from anabranch.protocol.ids import OP_HEADER, TXN_HEADER, pack_txn_header

CODECS = (None, "gzip", "snappy", "lz4", "zstd")

_DATA = st.none() | st.binary(max_size=40)
# Few values, so that neighbours often agree.
_TXN_VALUES = [pack_txn_header(bytes([i]) * 16, i - 1, 0) for i in range(3)]
_OURS = st.one_of(
    st.tuples(st.just(TXN_HEADER), st.sampled_from(_TXN_VALUES)),
    st.tuples(st.just(TXN_HEADER), st.none() | st.binary(max_size=30)),
    st.tuples(st.just(OP_HEADER), _DATA),
    st.tuples(st.sampled_from(("ab.", "ab.x", "ab.txnx", "ab.tx", "ab.opp")), _DATA),
)
# Bytes that are no UTF-8 stand as surrogates, as `anabranch.batches.records` has them.
_NAMES = st.text(max_size=8) | st.binary(max_size=5).map(
    lambda b: b.decode("utf-8", "surrogateescape")
)
_HEADER = st.tuples(_NAMES, _DATA)
_HEADERS = st.one_of(
    st.just(()),
    st.tuples(st.tuples(st.just(TXN_HEADER), st.sampled_from(_TXN_VALUES))),
    st.lists(_OURS | _HEADER, max_size=4).map(tuple),
)


def records(max_size: int = 20) -> st.SearchStrategy[list[Record]]:
    """Records with offsets 0, 1, 2, …, with all kinds of headers, old, equal and odd timestamps."""
    one = st.builds(
        Record,
        offset=st.just(0),
        timestamp_ms=st.integers(-1, 1 << 41) | st.just(1_700_000_000_000),
        key=_DATA,
        value=_DATA,
        headers=_HEADERS,
    )
    return st.lists(one, min_size=1, max_size=max_size).map(
        lambda made: [record._replace(offset=i) for i, record in enumerate(made)]
    )


def raw(data: bytes) -> RawBatch:
    """A batch as a fetch gives it."""
    header = read_header(data)
    return RawBatch(header.base_offset, header.next_offset, memoryview(data))


# A body, the number of its records and the last offset delta of its header, and a base timestamp.
ANY_BATCH = (
    st.binary(max_size=80),
    st.integers(-2, 12),
    st.integers(-2, 12),
    st.integers(-(1 << 63), (1 << 63) - 1),
)


def mutated(body: bytes, data: st.DataObject, most: int = 3) -> bytes:
    """The body after some changes: a byte is another one, or none, or several; or the rest is cut off."""
    out = bytearray(body)
    for _ in range(data.draw(st.integers(1, most))):
        at = data.draw(st.integers(0, len(out) - 1))
        match data.draw(st.integers(0, 3)):
            case 0 | 1:
                out[at] = data.draw(st.integers(0, 255) | st.sampled_from([0, 1, 2, 3, 128, 255]))
            case 2:
                out[at:] = b"\x00"
            case _:
                out[at : at + 1] = data.draw(st.binary(max_size=4))
        out = out or bytearray(1)
    return bytes(out)


def stored_run(
    batch_base: int, first: int, end: int, records: int, pure: bool, batch_crc: int = 0
) -> StoredRun:
    """A run of the index, of which only what is copied matters."""
    return StoredRun(0, first, end, records, 0, batch_base, 0, pure, batch_crc=batch_crc)
