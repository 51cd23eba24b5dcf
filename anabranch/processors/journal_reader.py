"""Reading given batches of a journal again, in rising order, with few fetches."""

from __future__ import annotations

from collections import deque

from anabranch.errors import check
from anabranch.ports import Log, LogUnavailable, RawBatch, TopicPartition

_FETCH_BYTES = 4 << 20
_EMPTY_FETCHES = 20


class JournalReader:
    """Batches of one journal partition by base offset; asked for in rising order it reads ahead."""

    def __init__(self, log: Log, partition: TopicPartition) -> None:
        self._log = log
        self._partition = partition
        self._ahead: deque[RawBatch] = deque()
        self._last: RawBatch | None = None

    def batch(self, base_offset: int) -> RawBatch:
        """The batch that begins at this offset."""
        if self._last is not None and self._last.base_offset == base_offset:
            return self._last  # several runs of a mixed batch
        while self._ahead and self._ahead[0].base_offset < base_offset:
            self._ahead.popleft()
        if not self._ahead or self._ahead[0].base_offset > base_offset:
            self._fetch(base_offset)
        self._last = self._ahead.popleft()
        check(
            self._last.base_offset == base_offset,
            f"no batch of {self._partition} begins at {base_offset}",
        )
        return self._last

    def _fetch(self, position: int) -> None:
        for _ in range(_EMPTY_FETCHES):
            fetched = self._log.fetch(
                {self._partition: position}, max_wait=0.5, max_bytes=_FETCH_BYTES, committed=False
            ).get(self._partition)
            if fetched is not None and fetched.batches:
                self._ahead = deque(fetched.batches)
                return
        raise LogUnavailable(f"{self._partition} gives no batch at {position}")
