"""Reading given batches of a journal again, in rising order, with few fetches; ahead, if asked to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from anabranch.errors import check
from anabranch.ports import Log, LogError, LogUnavailable, RawBatch, TopicPartition

# Enough for a round trip to be cheap; little enough that the broker stores while we fetch the next.
FETCH_BYTES = 2 << 20
_FETCH_WAIT_S = 0.5
_EMPTY_FETCHES = 20


class JournalReaders:
    """A reader for each journal partition, kept from merge to merge.

    ``ahead``: fetch the batches behind those asked for on a helper thread, while the caller works. Not
    for the in-memory log, whose calls hand control to a scheduler.
    """

    def __init__(
        self, log: Log, *, ahead: bool = False, on_batch: Callable[[RawBatch], None] | None = None
    ) -> None:
        """``on_batch`` is shown every batch that is read, on the thread that reads it."""
        self._log = log
        self._on_batch = on_batch
        self._readers: dict[TopicPartition, JournalReader] = {}
        self._pool = ThreadPoolExecutor(1, "anabranch-read-ahead") if ahead else None

    def of(self, partition: TopicPartition) -> JournalReader:
        """The partition's reader."""
        found = self._readers.get(partition)
        if found is None:
            found = self._readers[partition] = JournalReader(
                self._log, partition, self._pool, self._on_batch
            )
        return found

    def close(self) -> None:
        """End the helper thread; a fetch under way is waited for."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


class JournalReader:
    """Batches of one journal partition by base offset. Memory: two fetches."""

    def __init__(
        self,
        log: Log,
        partition: TopicPartition,
        pool: ThreadPoolExecutor | None = None,
        on_batch: Callable[[RawBatch], None] | None = None,
    ) -> None:
        self._on_batch = on_batch
        self._log = log
        self._partition = partition
        self._pool = pool
        self._here: deque[RawBatch] = deque()
        self._coming: tuple[int, Future[deque[RawBatch]]] | None = None

    def batch(self, base_offset: int) -> RawBatch:
        """The batch that begins at this offset; quick if asked for in rising order.

        Raises:
            LogUnavailable: nothing is there, or no leader.
            InvariantViolation: no batch begins there.
        """
        while self._here and self._here[0].base_offset < base_offset:
            self._here.popleft()
        if not self._here or self._here[0].base_offset > base_offset:
            self._here = self._take(base_offset)
        # It stays: several runs may be of one batch.
        batch = self._here[0]
        check(
            batch.base_offset == base_offset,
            f"no batch of {self._partition} begins at {base_offset}",
        )
        return batch

    def _take(self, position: int) -> deque[RawBatch]:
        coming, self._coming = self._coming, None
        found = None
        if coming is not None:
            # Also if it is of no use: two fetches of one partition at once would compete.
            try:
                ready = coming[1].result()
            except LogError:
                # Nobody asked for it yet; what is asked for now fails by itself, if it does.
                ready = deque()
            if ready and coming[0] <= position < ready[-1].next_offset:
                while ready[0].base_offset < position:
                    ready.popleft()
                found = ready
        if found is None:
            found = self._fetch(position)
        if not found:
            raise LogUnavailable(f"{self._partition} gives no batch at {position}")
        if self._pool is not None:
            following = found[-1].next_offset
            self._coming = following, self._pool.submit(self._fetch_once, following, 0.0)
        return found

    def _fetch(self, position: int) -> deque[RawBatch]:
        for _ in range(_EMPTY_FETCHES):
            found = self._fetch_once(position, _FETCH_WAIT_S)
            if found:
                return found
        return deque()

    def _fetch_once(self, position: int, max_wait: float) -> deque[RawBatch]:
        found = self._log.fetch(
            {self._partition: position}, max_wait=max_wait, max_bytes=FETCH_BYTES, committed=False
        ).get(self._partition)
        batches = found.batches if found is not None else ()
        if self._on_batch is not None:
            for batch in batches:
                self._on_batch(batch)
        return deque(batches)
