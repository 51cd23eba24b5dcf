"""Chunks of events become the bodies of record batches: in compiled code for big writers, else in plain Python.

A chunk is hashed, placed and framed as a whole: about 0.25 µs an event of 100 bytes compiled, 4 µs in Python.
numba takes a second to load (and some to compile, once on a machine), so that happens on a thread of its own, once
a process has written enough to make it worth while.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from zlib import crc32

from anabranch.client.ports import RecordHeaders
from anabranch.core.journal_index import CRC_MODULUS
from anabranch.core.keyspace import mix
from anabranch.topics.records import put_varint

_WORTH_COMPILING = (
    50_000  # events that a process encodes in Python before it loads the compiled code
)
_RECORD_OVERHEAD = 36  # more than the varints of a record take

_kernel: ModuleType | None = None
_loader: threading.Thread | None = None
_encoded = 0


@dataclass(slots=True)
class Slot:
    """An open batch for a partition, and the account of all that was ever added to it."""

    partition: int
    body: bytearray = field(default_factory=bytearray)
    count: int = 0
    base_timestamp: int = 0
    max_timestamp: int = 0
    events: int = 0
    crc_sum: int = 0


@dataclass(slots=True)
class Chunk:
    """Events in the order they were written. ``stamps``: Unix seconds of each write.

    ``special``: index -> (headers, timestamp) of those events that were given their own. ``nulls``: whether
    any key or value is null.
    """

    keys: list[bytes | None] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)
    stamps: list[float] = field(default_factory=list)
    special: dict[int, tuple[RecordHeaders | None, int | None]] = field(default_factory=dict)
    nulls: bool = False

    def clear(self) -> None:
        """Forget the events; the lists stay the same objects."""
        self.keys.clear()
        self.values.clear()
        self.stamps.clear()
        self.special.clear()
        self.nulls = False


class ChunkEncoder:
    """Places events by key and frames them. ``lows``: lower bounds of the key ranges, in order;
    ``slots``: the slot of each range.
    """

    def __init__(
        self, lows: Sequence[int], slots: Sequence[Slot], header: tuple[str, bytes]
    ) -> None:
        self._lows = list(lows)
        self._by_range = list(slots)
        self.slots = list({slot.partition: slot for slot in slots}.values())
        self._header = header
        self._plain = encode_headers([header])

    def encode(self, chunk: Chunk, keyless: Slot) -> None:
        """Add the chunk's events to the open batches of their slots; those without a key to ``keyless``."""
        kernel = kernel_for(len(chunk.keys))
        if kernel is None:
            self._encode_plainly(chunk, keyless)
        else:
            self._encode_compiled(kernel, chunk, keyless)

    def _headers(self, headers: RecordHeaders | None) -> bytes:
        return encode_headers([*headers, self._header]) if headers else self._plain

    def _encode_plainly(self, chunk: Chunk, keyless: Slot) -> None:
        """The oracle of the compiled code."""
        for i, (key, value) in enumerate(zip(chunk.keys, chunk.values, strict=True)):
            headers, stamp = self._plain, int(chunk.stamps[i] * 1000)
            if i in chunk.special:
                given, own = chunk.special[i]
                headers = self._headers(given)
                stamp = stamp if own is None else own
            slot, crc = keyless, 0
            if key is not None:
                crc = crc32(key)
                slot = self._by_range[bisect_right(self._lows, mix(crc)) - 1]
            if not slot.count:
                slot.base_timestamp = slot.max_timestamp = stamp
            slot.max_timestamp = max(slot.max_timestamp, stamp)
            record = bytearray(1)
            put_varint(record, stamp - slot.base_timestamp)
            put_varint(record, slot.count)
            for part in (key, value):
                put_varint(record, -1 if part is None else len(part))
                record += part or b""
            record += headers
            put_varint(slot.body, len(record))
            slot.body += record
            slot.count += 1
            slot.events += 1
            slot.crc_sum = (slot.crc_sum + crc32(value or b"", crc)) % CRC_MODULUS

    def _encode_compiled(self, kernel: ModuleType, chunk: Chunk, keyless: Slot) -> None:
        import numpy as np

        n = len(chunk.keys)
        keys, key_sizes = _flat(chunk.keys, chunk.nulls)
        values, value_sizes = _flat(chunk.values, chunk.nulls)
        stamps = (np.array(chunk.stamps) * 1000).astype(np.int64)
        heads, head_sizes = self._plain, np.empty(0, dtype=np.int32)
        if chunk.special:
            each = [self._plain] * n
            for i, (headers, own) in chunk.special.items():
                each[i] = self._headers(headers)
                if own is not None:
                    stamps[i] = own
            heads, head_sizes = b"".join(each), np.fromiter(map(len, each), np.int32, n)
        number = {slot.partition: i for i, slot in enumerate(self.slots)}
        state = np.array(
            [
                (s.count, s.base_timestamp, s.max_timestamp, s.events, s.crc_sum, 0, 0)
                for s in self.slots
            ],
            dtype=np.int64,
        )
        heads_bytes = len(heads) if chunk.special else len(heads) * n
        room = len(keys) + len(values) + heads_bytes + n * _RECORD_OVERHEAD
        out = np.empty(room, dtype=np.uint8)
        written = kernel.encode(
            np.frombuffer(keys, dtype=np.uint8),
            key_sizes,
            np.frombuffer(values, dtype=np.uint8),
            value_sizes,
            np.frombuffer(heads, dtype=np.uint8),
            head_sizes,
            stamps,
            np.array(self._lows, dtype=np.int64),
            np.array([number[s.partition] for s in self._by_range], dtype=np.int64),
            number[keyless.partition],
            state,
            np.empty(n, dtype=np.int64),
            out,
        )
        if not 0 <= written <= room:
            raise AssertionError("the room for a chunk was reckoned too small")
        data = out.data
        for slot, row in zip(self.slots, state.tolist(), strict=True):
            slot.count, slot.base_timestamp, slot.max_timestamp, slot.events, slot.crc_sum = row[:5]
            size, start = row[5:]
            slot.body += data[start : start + size]


def _flat(parts: list[bytes | None], nulls: bool) -> tuple[bytes, object]:
    """All bytes in a row, and the size of each (-1: null)."""
    import numpy as np

    if nulls:
        sizes = np.fromiter((-1 if p is None else len(p) for p in parts), np.int32, len(parts))
        return b"".join([p or b"" for p in parts]), sizes
    return b"".join(parts), np.fromiter(map(len, parts), np.int32, len(parts))  # type: ignore[arg-type]


def encode_headers(headers: RecordHeaders) -> bytes:
    """The headers of a record, their number in front."""
    out = bytearray()
    put_varint(out, len(headers))
    for name, value in headers:
        encoded = name.encode()
        put_varint(out, len(encoded))
        out += encoded
        put_varint(out, -1 if value is None else len(value))
        out += value or b""
    return bytes(out)


def kernel_for(events: int) -> ModuleType | None:
    """The compiled code if it is loaded. ``events`` more are to be encoded: enough of them get it loaded."""
    global _encoded, _loader
    if _kernel is None:
        _encoded += events
        if _encoded >= _WORTH_COMPILING and (_loader is None or not _loader.is_alive()):
            # No daemon: ending the interpreter in mid-compilation is not safe.
            _loader = threading.Thread(target=warm, name="anabranch-compile", daemon=False)
            _loader.start()
    return _kernel


def warm() -> None:
    """Load the compiled code now: 1 s, the first time on a machine some more."""
    global _kernel
    if _kernel is None and sys.byteorder == "little":
        from anabranch.client import raw_kernel

        _kernel = raw_kernel
