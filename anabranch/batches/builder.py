"""Building record batches: from events, and from records of other batches."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from anabranch.batches.compression import compress, decompress
from anabranch.batches.format import HEADER_SIZE, BatchHeader, Buffer, frame, read_header
from anabranch.batches.framing import kernels_for
from anabranch.batches.records import codec_number, decode_body, put_varint
from anabranch.errors import InvalidArgument
from anabranch.ports import CorruptBatch, RawBatch

Headers = Sequence[tuple[str, bytes | None]]
Row = tuple[bytes | None, bytes | None, Headers, int]  # key, value, headers, Unix milliseconds

_TABLE_SIZE = 4096
# A copied record's first three numbers may get longer, by 4, 9 and 4 bytes at most.
COPY_GROWTH = 17
_COPY_GUESS = 512


def _varint(value: int) -> bytes:
    out = bytearray()
    put_varint(out, value)
    return bytes(out)


_VARINTS = [_varint(value) for value in range(_TABLE_SIZE)]
_NULL = _varint(-1)
_NO_HEADERS = _varint(0)


def _size(size: int) -> bytes:
    return _VARINTS[size] if size < _TABLE_SIZE else _varint(size)


class _LastBody(threading.local):
    """The batch that this thread unpacked last: its runs are usually copied one after the other."""

    def __init__(self) -> None:
        self.data: object = None
        self.body: Buffer = b""
        # The place where copying stopped: all lower offset deltas are before it.
        self.at = 0
        self.next_delta = 0


_last = _LastBody()


class Mark(NamedTuple):
    """A builder's state, to return to."""

    size: int
    records: int
    base_timestamp: int
    max_timestamp: int


class BatchBuilder:
    """Collects records into one batch: base offset 0, no producer, ready for `Producer.append`.

    ``compression``: none, gzip, snappy, lz4 or zstd. Timestamps are stored relative to the first timestamp.
    """

    def __init__(self, compression: str | None = None) -> None:
        self._codec = codec_number(compression)
        self._body = bytearray()
        self._count = 0
        self._base_timestamp = 0
        self._max_timestamp = 0

    @property
    def count(self) -> int:
        return self._count

    @property
    def size_estimate(self) -> int:
        """The batch's size in bytes before compression."""
        return HEADER_SIZE + len(self._body)

    def mark(self) -> Mark:
        """The present state, for `rewind`."""
        return Mark(len(self._body), self._count, self._base_timestamp, self._max_timestamp)

    def rewind(self, mark: Mark) -> None:
        """Remove all that was added since the mark."""
        del self._body[mark.size :]
        self._count, self._base_timestamp, self._max_timestamp = mark[1:]

    def add(
        self, key: bytes | None, value: bytes | None, headers: Headers, timestamp_ms: int
    ) -> None:
        self.add_all(((key, value, headers, timestamp_ms),))

    def add_all(self, rows: Iterable[Row], limit: int = sys.maxsize) -> int:
        """Add records until `size_estimate` reaches ``limit``; returns their number. Further rows are not taken.

        A tuple of headers that consecutive records share is encoded once.
        """
        body, count, room, table = self._body, self._count, limit - HEADER_SIZE, _VARINTS
        base, newest = self._base_timestamp, self._max_timestamp
        shared: Headers | None = None
        encoded = b""
        try:
            for key, value, headers, timestamp in rows:
                if count == 0:
                    base = newest = timestamp
                elif timestamp > newest:
                    newest = timestamp
                shift = timestamp - base
                if key is None:
                    key_size, key = _NULL, b""
                else:
                    size = len(key)
                    key_size = table[size] if size < _TABLE_SIZE else _varint(size)
                if value is None:
                    value_size, value = _NULL, b""
                else:
                    size = len(value)
                    value_size = table[size] if size < _TABLE_SIZE else _varint(size)
                if headers is not shared:
                    encoded = _encode_headers(headers) if headers else _NO_HEADERS
                    shared = headers if type(headers) is tuple else None
                record = b"".join(
                    (
                        b"\x00",
                        table[shift] if 0 <= shift < _TABLE_SIZE else _varint(shift),
                        table[count] if count < _TABLE_SIZE else _varint(count),
                        key_size,
                        key,
                        value_size,
                        value,
                        encoded,
                    )
                )
                size = len(record)
                body += table[size] if size < _TABLE_SIZE else _varint(size)
                body += record
                count += 1
                if len(body) >= room:
                    break
        finally:
            added = count - self._count
            self._count, self._base_timestamp, self._max_timestamp = count, base, newest
        return added

    def add_from_batch(self, batch: RawBatch, first_delta: int, last_delta: int) -> int:
        """Add the records of another batch with these offset deltas, both included. Returns their number.

        Timestamps are kept, even if the broker has set them; keys, values and headers are copied as they are.
        Copying the runs of one batch in rising order walks it once. Records are not fully checked here, because
        `anabranch.batches.framing.scan_batch` has checked them. Raises `CorruptBatch`, and adds nothing, if the
        batch can't be read.
        """
        header = read_header(batch.data)
        if header.is_control:
            raise CorruptBatch("a control batch has no records to take")
        if last_delta < first_delta:
            return 0
        body = _unpacked(batch, header)
        kernels = kernels_for(header.record_count)
        if kernels is None:
            before = self._count
            for record in decode_body(bytes(body), header):
                if first_delta <= record.offset - header.base_offset <= last_delta:
                    self.add(record.key, record.value, record.headers, record.timestamp_ms)
            return self._count - before
        import numpy as np

        if first_delta < _last.next_delta:
            _last.at = 0
        bytes_in = np.frombuffer(body, dtype=np.uint8)
        records = min(last_delta - first_delta + 1, header.record_count)
        enough = len(body) - _last.at + records * COPY_GROWTH
        room = min(records * _COPY_GUESS, enough)
        while True:
            out = np.empty(room, dtype=np.uint8)
            state = np.array(
                (_last.at, 0, self._count, 0, self._base_timestamp, self._max_timestamp),
                dtype=np.int64,
            )
            result = kernels.copy.copy(
                bytes_in,
                first_delta,
                last_delta,
                header.base_timestamp,
                header.max_timestamp,
                header.is_log_append_time,
                out,
                state,
            )
            if result != kernels.copy.NO_ROOM or room == enough:
                break
            room = enough
        if result != 0:
            raise CorruptBatch(f"the batch at offset {header.base_offset} can't be taken apart")
        at, size, self._count, copied, self._base_timestamp, self._max_timestamp = state.tolist()
        _last.at, _last.next_delta = at, last_delta + 1
        self._body += out[:size].data
        return int(copied)

    def add_encoded(self, copy: Callable[[Any, Any], int], at: int, out: Any) -> int:
        """Let compiled code add records, from place ``at`` on; returns where it stopped.

        ``copy`` gets ``out``, an array of bytes to fill, and the state of a copy
        (`anabranch.batches.kernels.copy`). Raises `CorruptBatch`, and adds nothing, if it returns an error.
        """
        import numpy as np

        state = np.array(
            (at, 0, self._count, 0, self._base_timestamp, self._max_timestamp), dtype=np.int64
        )
        if copy(out, state) != 0:
            raise CorruptBatch("records that can't be taken apart")
        at, size, self._count, _, self._base_timestamp, self._max_timestamp = state.tolist()
        self._body += out[:size].data
        return int(at)

    def build(self) -> bytes:
        """The batch. Raises `InvalidArgument` if it has no records."""
        if not self._count:
            raise InvalidArgument("a batch has at least one record")
        return frame(
            compress(self._codec, self._body),
            compression=self._codec,
            last_offset_delta=self._count - 1,
            count=self._count,
            base_timestamp=self._base_timestamp,
            max_timestamp=self._max_timestamp,
        )


def _encode_headers(headers: Headers) -> bytes:
    out = [_size(len(headers))]
    for name, value in headers:
        encoded = name.encode("utf-8", "surrogateescape")
        out += (_size(len(encoded)), encoded)
        out += (_NULL,) if value is None else (_size(len(value)), value)
    return b"".join(out)


def _unpacked(batch: RawBatch, header: BatchHeader) -> Buffer:
    if _last.data is not batch.data:
        # Compared by identity: the reference keeps the object alive, so that its address is not used again.
        _last.data = None
        _last.body = decompress(header.compression, memoryview(batch.data)[HEADER_SIZE:])
        _last.data = batch.data
        _last.at = _last.next_delta = 0
    return _last.body
