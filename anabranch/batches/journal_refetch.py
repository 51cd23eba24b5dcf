"""Fetching given batches of a journal again, in rising order and with few requests, optionally ahead.

Merges use it, and transactions that read back their own writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from anabranch.batches.format import crc_of
from anabranch.ports import (
    CorruptBatch,
    Log,
    LogError,
    LogUnavailable,
    OffsetOutOfRange,
    RawBatch,
    RecordsGone,
    TopicPartition,
    answered,
)

# Big enough for few round trips, and small enough that the broker stores one while the next is fetched.
FETCH_BYTES = 2 << 20
# The most fetches ahead. They continue between two native transactions.
MAX_AHEAD = 4
MOST_KEPT = 4
_FETCH_WAIT_S = 0.5
_EMPTY_FETCHES = 6

_Batches = Sequence[RawBatch]


class JournalReaders:
    """A reader for each journal partition. Readers stay for the next merge, with the fetched batches that remain.

    ``ahead``: fetch following batches on a helper thread while the caller works. Don't use ``ahead`` with the
    in-memory log, whose calls pass control to a scheduler.
    """

    def __init__(self, log: Log, *, ahead: bool = False) -> None:
        self._log = log
        self._readers: dict[TopicPartition, JournalReader] = {}
        self._fetcher = ThreadPoolExecutor(1, "anabranch-read-ahead") if ahead else None

    def of(self, partition: TopicPartition) -> JournalReader:
        """The partition's reader."""
        found = self._readers.pop(partition, None)
        if found is None:
            found = JournalReader(self._log, partition, self._fetcher)
        self._readers[partition] = found  # now the most recently used one
        return found

    def trim(self) -> None:
        """Drop all readers except the `MOST_KEPT` that were used last."""
        for partition in list(self._readers)[:-MOST_KEPT]:
            del self._readers[partition]

    def close(self) -> None:
        """End the helper thread, after a fetch under way."""
        if self._fetcher is not None:
            self._fetcher.shutdown(cancel_futures=True)


class JournalReader:
    """Batches of one journal partition by base offset. Memory: `MAX_AHEAD` + 1 fetches."""

    def __init__(
        self,
        log: Log,
        partition: TopicPartition,
        fetcher: ThreadPoolExecutor | None = None,
    ) -> None:
        self._log = log
        self._partition = partition
        self._fetcher = fetcher
        self._here: deque[RawBatch] = deque()
        # Fetches ahead, in order; each begins where the one before ends.
        self._coming: deque[Future[_Batches]] = deque()
        # The number of fetches ahead: each useful one raises it, so that few are wasted by jumps.
        self._depth = 1

    def batch(self, base_offset: int, crc: int = 0) -> RawBatch:
        """The batch that begins at this offset; fast in rising order.

        ``crc``: the CRC that its header must have (0: any), because a journal that was deleted and created again
        may have other records at the offset.

        Raises: LogUnavailable (there is no batch yet, or no leader), RecordsGone (no batch or another batch begins
        there, or the journal begins after it).
        """
        while self._here and self._here[0].base_offset < base_offset:
            self._here.popleft()
        if not self._here or self._here[0].base_offset > base_offset:
            self._here = deque(self._take(base_offset))
            while len(self._here) > 1 and self._here[0].base_offset < base_offset:
                self._here.popleft()
        # The batch stays here, because several runs may belong to it.
        batch = self._here[0]
        if batch.base_offset != base_offset:
            raise RecordsGone(f"no batch of {self._partition} begins at {base_offset}")
        if crc and crc_of(batch.data) != crc:
            raise RecordsGone(f"another batch of {self._partition} is at {base_offset}")
        return batch

    def _take(self, position: int) -> _Batches:
        found = self._take_ahead(position)
        if found is None:
            self._depth = 1
            found = self._fetch(position)
        if not found:
            what = f"{self._partition} gives no batch at {position}"
            raise LogUnavailable(what, (self._partition.topic,))
        self._go_ahead(found[-1].next_offset)
        return found

    def _take_ahead(self, position: int) -> _Batches | None:
        """The batches from ``position`` on, if they were fetched ahead."""
        while self._coming:
            # Even a useless fetch is awaited: two concurrent fetches of one partition would compete.
            try:
                ready = self._coming.popleft().result()
            except LogError:
                # The fetch ahead failed, and not the present request, which raises its own error, if any.
                continue
            if ready and ready[0].base_offset <= position < ready[-1].next_offset:
                self._depth = min(self._depth + 1, MAX_AHEAD)
                return ready
        return None

    def _go_ahead(self, following: int) -> None:
        """Keep the right number of fetches under way; the first of them starts at ``following``."""
        if self._fetcher is None:
            return
        while len(self._coming) < self._depth:
            before = self._coming[-1] if self._coming else None
            self._coming.append(self._fetcher.submit(self._fetch_following, before, following))

    def _fetch_following(self, before: Future[_Batches] | None, following: int) -> _Batches:
        """Fetch from where the fetch ``before`` ends (this thread has finished it), or from ``following``."""
        if before is not None:
            found = before.result()
            if not found:
                return ()
            following = found[-1].next_offset
        return self._fetch_once(following, 0.0)

    def _fetch(self, position: int) -> _Batches:
        for _ in range(_EMPTY_FETCHES):
            try:
                found = self._fetch_once(position, _FETCH_WAIT_S)
            except OffsetOutOfRange as error:
                # A lagging broker gives the same answer: its log ends before the position.
                starts = self._log.start_offsets([self._partition], failed={})
                if starts.get(self._partition, 0) <= position:
                    raise LogUnavailable(str(error), error.topics) from error
                raise RecordsGone(error) from error
            if found:
                return found
        return ()

    def _fetch_once(self, position: int, max_wait: float) -> _Batches:
        # Raise at once if there is no leader: waiting would delay all other merges.
        try:
            found = answered(
                lambda failed: self._log.fetch(
                    {self._partition: position},
                    max_wait=max_wait,
                    max_bytes=FETCH_BYTES,
                    committed=False,
                    failed=failed,
                )
            ).get(self._partition)
        except CorruptBatch as error:
            raise LogUnavailable(str(error), (self._partition.topic,)) from error
        return found.batches if found is not None else ()
