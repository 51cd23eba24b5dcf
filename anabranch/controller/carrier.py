"""Staged merges: a decided transaction that is too big for one round is carried, in chunks, to reserved partitions.

One history record publishes all of it in the end. `docs/inside/epochs.md` says why. `durability` has the order in
which a chunk becomes durable. `leadership` initialises the carriers' transactional ids together with the leader's
own, and says why.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import NamedTuple

from anabranch.batches.builder import BatchBuilder
from anabranch.batches.journal_refetch import JournalReaders
from anabranch.batches.packer import batch_limit
from anabranch.batches.splice import Piece, Splice
from anabranch.controller.durability import native_transaction
from anabranch.core import rows as k
from anabranch.core.decisions.merge import runs_to_stage
from anabranch.core.decisions.prepared import needed
from anabranch.core.journal_index import JournalIndex, extents_by_place
from anabranch.core.journal_runs import StoredRun
from anabranch.core.memory import Merging, Why
from anabranch.core.state import State
from anabranch.ports import (
    Log,
    LogBusy,
    LogError,
    LogRefused,
    LogUnavailable,
    Producer,
    RecordsGone,
    Table,
    TopicPartition,
)
from anabranch.protocol.schemas.codec import encode
from anabranch.protocol.schemas.records import StagedMergeRow
from anabranch.topics.names import journal_topic, stream_topic

log = logging.getLogger("anabranch.controller")

RETRY_MS = 10_000  # the wait before a refused chunk is tried again
# `close` waits this long for chunks under way: less than `service.STOP_LEADER_S`.
_JOIN_S = 15.0
Key = tuple[bytes, str, int]  # transaction, stream, segment number


@dataclass(slots=True)
class Job:
    """A segment to carry: its row as logged, and the runs that are not carried yet.

    ``limit``: the most bytes of a batch of that stream.
    """

    row: StagedMergeRow
    runs: deque[StoredRun]
    limit: int

    @property
    def key(self) -> Key:
        return self.row.txn_id, self.row.stream, self.row.number


class _Refused(NamedTuple):
    """A chunk of the job ``key`` could not be carried, and changed nothing.

    ``key`` None: no chunk, but the check for native transactions that never got their markers failed.
    """

    key: Key | None
    error: LogError


class Carrier:
    """Carries one chunk after the other, by two transactional ids in turn. If an id is busy, the other one is used.

    Only one thread at a time may use it. No second thread fetches ahead: one made merges about a tenth
    faster, but small commits waited longer meanwhile.
    """

    def __init__(
        self,
        log: Log,
        status: TopicPartition,
        producers: Sequence[Producer],
        chunk_bytes: int,
    ) -> None:
        self._log = log
        self._readers = JournalReaders(log)
        self._status = status
        self._producers = producers
        self._in_turn = list(producers)  # without one whose markers can't be written
        self._chunk_bytes = chunk_bytes
        self._turn = 0

    def chunk(self, job: Job, wall_ms: int) -> StagedMergeRow:
        """Carry the next chunk of a job. Returns the job's row, logged with the new cursor.

        Raises:
            LogRefused, LogUnavailable: the chunk can't be carried now; nothing happened, drop the job.
            LogError: the leader has to become leader again.
        """
        runs: list[StoredRun] = []
        size = 0
        while job.runs and size < self._chunk_bytes:
            runs.append(job.runs.popleft())
            size += runs[-1].batch_size
        self._turn += 1
        producer = self._in_turn[self._turn % len(self._in_turn)]
        row = job.row
        source = TopicPartition(journal_topic(row.stream), row.source)
        target = TopicPartition(stream_topic(row.stream), row.partition)
        splice = Splice(self._readers, target, [Piece(source, runs)], limit=job.limit)
        try:
            with native_transaction(producer):
                splice.note(producer.append_stream(splice.batches()))
                landed = splice.landed()[0]
                moved = replace(
                    row,
                    cursor=runs[-1].first + 1 if runs else row.cursor,
                    first=landed.first if row.first < 0 else row.first,
                    end=landed.end if runs else row.end,
                    count=row.count + landed.records,
                    done=not job.runs,
                )
                key = k.staged_merge_key(row.txn_id, row.stream, row.number)
                builder = BatchBuilder()
                builder.add(key, encode(moved), (), wall_ms)
                producer.append([(self._status, builder.build())])
        except LogBusy as error:
            self._renew_readers()
            alone = len(self._in_turn) == 1
            self._in_turn = [one for one in self._producers if one is not producer] or [producer]
            if alone:
                raise
            log.warning("%s", error)
            job.runs.extendleft(reversed(runs))
            return self.chunk(job, wall_ms)
        except (LogRefused, LogUnavailable):
            self._renew_readers()  # the next job's journal may be a new one
            raise
        job.row = moved
        if moved.done:
            self._renew_readers()
        return moved

    def check(self, partitions: Sequence[TopicPartition]) -> None:
        """Do the same as `Lease.check`, for this carrier's ids."""
        for producer in self._producers:
            producer.check(partitions)

    def _renew_readers(self) -> None:
        """Drop everything that readers have fetched."""
        self._readers = JournalReaders(self._log)


def is_staging(state: State) -> bool:
    """Whether a segment is being carried, or still has to be carried."""
    return any(
        not staged.done
        for txn_id in state.committing
        for staged in state.open[txn_id].staged_merges.values()
    )


def carriers_of(
    log: Log,
    status: TopicPartition,
    pairs: Sequence[Sequence[Producer]],
    chunk_bytes: int,
) -> list[Carrier]:
    """A carrier for each pair of producers; a pair that waits for markers has none."""
    return [Carrier(log, status, pair, chunk_bytes) for pair in pairs if pair]


class Carriers:
    """All carriers of a leader. Without ``threads``, each call of `take` carries one chunk for each carrier.

    Threads take turns, so that one chunk is carried at a time: two at once were not faster on one broker, and
    rounds of small commits waited longer.
    """

    def __init__(
        self,
        carriers: Sequence[Carrier],
        *,
        threads: bool,
    ) -> None:
        # Transactions with a chunk that may be on its way: at least the transactions of the last `sync`.
        self.staging: set[bytes] = set()
        self._each = carriers
        self._jobs: dict[Key, Job] = {}
        self._waiting: deque[Job] = deque()
        self._todo: queue.SimpleQueue[tuple[Job | None, int] | None] = queue.SimpleQueue()
        self._unchecked: deque[Sequence[TopicPartition]] = deque()
        self._results: queue.SimpleQueue[StagedMergeRow | _Refused | Exception] = (
            queue.SimpleQueue()
        )
        self._failed: list[_Refused] = []
        self._not_before_ms: dict[Key, int] = {}  # refused jobs; wall clock
        self._stop = threading.Event()
        self._one_chunk = threading.Lock()
        self._threads = (
            [
                threading.Thread(  # its lines in the log have the leader's fields
                    target=copy_context().run,
                    args=(self._run, carrier),
                    name=f"carrier-{i}",
                    daemon=True,
                )
                for i, carrier in enumerate(carriers)
            ]
            if threads
            else []
        )
        for thread in self._threads:
            thread.start()

    def sync(
        self, state: State, index: JournalIndex, wall_ms: int, usable: Callable[[str], bool]
    ) -> None:
        """Begin the staged merges that are logged and that no carrier has yet.

        ``usable``: whether a stream's topics can be used. Nothing is carried to an unusable stream. Nothing of a
        transaction with an unusable stream is carried, unless the transaction is prepared.
        """
        self._begin(state, index, wall_ms, usable)
        self.staging.clear()
        self.staging.update(txn_id for txn_id, _, _ in self._jobs)

    def _begin(
        self, state: State, index: JournalIndex, wall_ms: int, usable: Callable[[str], bool]
    ) -> None:
        for txn_id in state.committing:
            txn = state.open[txn_id]
            if not txn.staged_merges or txn.pending is None:
                continue
            if not index.covers(needed(state, txn.pending)):
                continue  # a new leader still reads the journals
            # A prepared transaction leaves LOST streams out, so each of its streams is carried by itself.
            whole = txn.pending.prepare is None
            if whole and not all(usable(stream) for stream in txn.participants):
                continue
            wanted = [
                row
                for (stream, number), row in txn.staged_merges.items()
                if not row.done
                and usable(stream)
                and (key := (txn_id, stream, number)) not in self._jobs
                and self._not_before_ms.get(key, 0) <= wall_ms
            ]
            extents = extents_by_place(txn.pending.writers if wanted else ())
            for row in wanted:
                limit = batch_limit(state.streams[row.stream].settings)
                job = Job(row, deque(runs_to_stage(index, row, extents)), limit)
                self._jobs[job.key] = job
                if self._threads:
                    self._todo.put((job, wall_ms))
                else:
                    self._waiting.append(job)

    def take(self, wall_ms: int) -> list[StagedMergeRow]:
        """Rows that carriers advanced since the last call, in order. Raises the error that ended a carrier.

        A refused chunk is tried again later: its commit is decided, and it must not stop other merges.
        """
        rows = []
        if not self._threads:
            for carrier in self._each[: len(self._waiting)]:
                job = self._waiting.popleft()
                self._results.put(done := _chunk(carrier, job, wall_ms))
                if isinstance(done, StagedMergeRow) and not done.done:
                    self._waiting.append(job)
        while True:
            try:
                result = self._results.get_nowait()
            except queue.Empty:
                break
            if isinstance(result, Exception):
                raise result
            if isinstance(result, StagedMergeRow):
                rows.append(result)
                if result.done:
                    self._forget((result.txn_id, result.stream, result.number))
            else:
                self._failed.append(result)
                if result.key is not None:
                    log.warning("a staged merge can't continue now: %s", result.error)
                    self._forget(result.key)
                    self._not_before_ms[result.key] = wall_ms + RETRY_MS
        return rows

    def take_up(
        self, state: State, table: Table, merging: Merging, wall_ms: int, now_ms: int
    ) -> list[LogError]:
        """Apply the rows that carriers advanced to state and table. Returns the errors of chunks not carried.

        ``now_ms``: monotonic, as in memory.
        """
        rows = self.take(wall_ms)
        for row in rows:
            state.apply(k.staged_merge_key(row.txn_id, row.stream, row.number), row)
            wait = merging.waits.get(row.txn_id, None)
            if row.done or (wait is not None and wait.why in ("torn", "refused")):
                merging.waits.put(row.txn_id, None)
        if rows:
            table.write(state.take_changes())
        failed, self._failed = self._failed, []
        for key, error in failed:
            if key is not None:
                why: Why = "torn" if isinstance(error, RecordsGone) else "refused"
                merging.wait(key[0], why, now_ms, 0, str(error))
        return [refused.error for refused in failed]

    def forget(self, ended: Collection[bytes]) -> None:
        """Drop transactions that ended."""
        for key in [key for key in self._not_before_ms if key[0] in ended]:
            del self._not_before_ms[key]

    def _forget(self, key: Key) -> None:
        self._jobs.pop(key, None)
        self._not_before_ms.pop(key, None)

    def close(self) -> bool:
        """Stop after the chunks under way. False: a chunk did not end in time, and may still be committed."""
        self._stop.set()
        for _ in self._threads:
            self._todo.put(None)
        until = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def check(self, partitions: Sequence[TopicPartition]) -> None:
        """End native transactions that lack a marker in these partitions, once no chunk is under way."""
        self._unchecked.append(partitions)
        if self._threads:
            self._todo.put((None, 0))
        else:
            self._end_lost()

    @property
    def idle(self) -> bool:
        """Whether no result waits for `take`."""
        return self._results.empty()

    def _end_lost(self) -> None:
        while self._unchecked:
            partitions = self._unchecked.popleft()
            for carrier in self._each:
                try:
                    carrier.check(partitions)
                except (LogRefused, LogUnavailable) as error:
                    self._results.put(_Refused(None, error))

    def _run(self, carrier: Carrier) -> None:
        while (work := self._todo.get()) is not None:
            job, wall_ms = work
            try:
                while not self._stop.is_set():
                    with self._one_chunk:
                        self._end_lost()
                        if job is None:
                            break
                        result = _chunk(carrier, job, wall_ms)
                    self._results.put(result)
                    if isinstance(result, _Refused) or result.done:
                        break
            except Exception as error:  # noqa: BLE001 the leader raises it
                self._results.put(error)
                return


def _chunk(carrier: Carrier, job: Job, wall_ms: int) -> StagedMergeRow | _Refused:
    try:
        return carrier.chunk(job, wall_ms)
    except (LogRefused, LogUnavailable) as error:
        return _Refused(job.key, error)
