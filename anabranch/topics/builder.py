"""Temporary."""

from __future__ import annotations

from anabranch.ports import RawBatch
from anabranch.topics.records import Record, decode_records, encode_batch


class BatchBuilder:
    """Collects records into one batch."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self.size_estimate = 61

    @property
    def count(self) -> int:
        return len(self._records)

    def add(self, key, value, headers, timestamp_ms):  # type: ignore
        self._records.append(Record(0, timestamp_ms, key, value, tuple(headers)))
        self.size_estimate += 30 + len(key or b"") + len(value or b"")

    def add_from_batch(self, raw: RawBatch, first_delta: int, last_delta: int) -> None:
        for r in decode_records(raw.data):
            if first_delta <= r.offset - raw.base_offset <= last_delta:
                self.add(r.key, r.value, r.headers, r.timestamp_ms)

    def build(self) -> bytes:
        return encode_batch(self._records)
