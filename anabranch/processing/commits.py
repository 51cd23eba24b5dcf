"""Commits a worker's batches (`WorkBatch`), in steps whose order matters:

1. Handlers have changed only the batch, in memory. If one fails, the batch is dropped and nothing has happened.
2. One transaction takes outputs, state and positions.
3. The worker waits for COMMITTED. If the outcome is unknown, the commit is sent again. If others aborted the
   transaction, the same bytes are committed under another id. No handler runs again: it might produce other
   values, and the next batch is already computed on these.
4. Only then are the rows written to RocksDB, which must not have rows of a commit that never happens.
5. Only then is the next commit sent; its handlers ran meanwhile, on top of this batch. If two commits were under
   way, the second could be decided while the first waits for its journals.

A batch with tables is handled after the previous one is committed: its snapshot has to include that one's rows. If
its locks are broken, it is dropped as in step 1, and handled again (`BatchConflict`).

A batch that is too big for a commit is dropped, too (`BatchTooBig`). The worker takes its tasks again, and handles
the batch's events in smaller batches.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from anabranch.backoff import Backoff
from anabranch.client.client import Client
from anabranch.client.transact import ASKED_AGAIN
from anabranch.client.transaction import Transaction
from anabranch.controller.monitor import Numbers
from anabranch.errors import (
    AnabranchError,
    AskOutcomeError,
    BeginAgainError,
    DerivationMissing,
    EventTooLarge,
    InvalidArgument,
    LocksBroken,
    OwnershipLost,
    ReservedByPrepared,
    RetryError,
    SnapshotExpired,
    TransactionAborted,
    WriteFailed,
)
from anabranch.ports import Clock, TopicPartition
from anabranch.processing.batch import BatchConflict, BatchTooBig, Limits, WorkBatch, Written
from anabranch.processing.handlers import Handlers
from anabranch.processing.program import Program
from anabranch.processing.state import StateReader
from anabranch.processing.table import Table, TaskTable
from anabranch.processing.tables import write_rows
from anabranch.protocol.schemas.records import Consumed, Derivation, TaskPosition, TaskStep
from anabranch.reading.slices import Piece
from anabranch.tracing import consuming
from anabranch.tracing import current as current_tracing
from anabranch.types import TaskOwnership

if TYPE_CHECKING:
    import pyarrow as pa

    from anabranch.client.table_transaction import TableTransaction

log = logging.getLogger("anabranch.processor")

FIRST_PAUSE_S = 0.05  # after a transient error
LONGEST_PAUSE_S = 2.0
_DOUBT_S = 60.0  # how long a commit is repeated before the tasks are taken again
_ENDS_S = 10.0  # between look-ups of the offsets from which the folder may resume reading
_ASK_S = 5.0
_REDONE = 5  # how often one commit is made again after others aborted it
_MANY = 300  # from this many on, outputs of a stream are sent as columns


class Commits:
    """Commits batches one after another, while handlers work. One thread calls `send` and `wait`.

    Any thread may `hold` them: then nothing more is sent until `admit`.
    """

    def __init__(
        self, client: Client, table: Table, state: StateReader, metrics: Numbers, limits: Limits,
        *, threads: bool,
    ) -> None:  # fmt: skip
        self._client = client
        self._table = table
        self.rows = TaskTable(table)
        self.state = state
        self._metrics = metrics
        ports = client.reader_ports()
        self._clock = ports.clock
        self._log = ports.committed_log(_ASK_S)
        self._pool = ThreadPoolExecutor(1, "commit") if threads else None
        self._future: Future[None] | None = None
        self._sending = threading.Lock()
        self._held: AnabranchError | None = None
        self._sent: WorkBatch | None = None
        self._ends_due = 0.0
        self._asked_again = 0  # how often in a row versions in force were asked for again
        self._writes_sources = False  # of derived tables: then the rows before are read
        self._limits = limits
        self._tracing = current_tracing()
        self.ran: Sequence[Derivation] = ()  # derivations whose entries the batches have
        self.ending = threading.Event()  # once set, unknown outcomes are not asked for

    def new_batch(self, task_count: int) -> WorkBatch:
        """A new batch, on top of the batch that is being committed."""
        batch = WorkBatch(self.rows if self._sent is None else self._sent, task_count, self._limits)
        batch.traces = None if self._tracing is None else set()
        return batch

    def send(self, ownership: TaskOwnership, batch: WorkBatch, consumed: Consumed) -> None:
        """Commit a batch, once the previous batch is committed.

        Raises: as `wait`, the previous commit's error; the error of `hold`.
        """
        self.wait()
        batch.set_below(self.rows)
        with self._sending:
            if self._held is not None:
                raise self._held
            if self._pool is None:
                self._commit(ownership, batch, consumed)
                return
            self._sent = batch
            self._future = self._pool.submit(self._commit, ownership, batch, consumed)

    def hold(self, error: AnabranchError) -> None:
        """Let `send` raise this error, also if it waits for the previous commit now. For any thread."""
        with self._sending:
            self._held = error

    def admit(self) -> None:
        """Send batches again."""
        with self._sending:
            self._held = None

    @property
    def is_held(self) -> bool:
        """Whether nothing is sent. For any thread."""
        return self._held is not None

    @property
    def is_under_way(self) -> bool:
        """Whether a commit has not ended, whatever its outcome. For any thread."""
        future = self._future
        return future is not None and not future.done()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the commit under way; None: without a limit. Returns whether it has ended.

        Raises: BeginAgainError, AskOutcomeError, RetryError (take the tasks again), FixCallError.
        """
        future = self._future
        if future is not None:
            if not wait([future], seconds).done:
                return False
            self._future = self._sent = None
            future.result()
        return True

    def close(self) -> None:
        """Stop, after the commit under way has ended."""
        self.ending.set()
        if self._pool is not None:
            self._pool.shutdown()
        self._log.close()

    def _commit(self, ownership: TaskOwnership, batch: WorkBatch, consumed: Consumed) -> None:
        """Commit a batch, in a span if events of its input have trace contexts."""
        if self._tracing is None or not batch.traces:
            self._commit_batch(ownership, batch, consumed)
            return
        handled = sum(n for key, n in batch.counts.items() if key[0] == "processor_events_in")
        attributes = {"messaging.batch.message_count": handled}
        name = f"process {ownership.processor}"
        with self._tracing.within(consuming(self._tracing, name, batch.traces, attributes)):
            self._commit_batch(ownership, batch, consumed)

    def _commit_batch(self, ownership: TaskOwnership, batch: WorkBatch, consumed: Consumed) -> None:
        begun = self._clock.monotonic()
        sequences = {task: step.sequence for step in consumed.steps for task in step.tasks}
        state = {
            task: self.state.records(task, rows, sequences[task])
            for task, rows in batch.rows.items()
        }
        ends = self._ends(ownership)
        timestamp = 0
        for redone in range(_REDONE + 1):
            try:
                with self._begin(ownership, batch) as txn:
                    # State goes first: if it opens the transaction, outputs can be sent as columns at once.
                    for task, rows in state.items():
                        txn.write_state(task, rows)
                    for stream, written in batch.outputs.items():
                        for run in runs_of(batch, stream, written):
                            if not isinstance(run, list):
                                txn.write_batch(stream, run)
                            elif len(run) < _MANY:
                                txn.write_many(stream, run)
                            else:
                                txn.write_batch(stream, columns_of(run))
                    if batch.tables is not None:
                        write_rows(txn, batch.tables)
                    timestamp = self._until_known(txn, consumed)
                break
            except (LocksBroken, SnapshotExpired) as error:
                raise BatchConflict.of(error) from error
            except DerivationMissing as error:
                # The batch read no rows, or another version came into force since this client asked.
                if batch.tables is None or self._asked_again == ASKED_AGAIN:
                    raise
                self._asked_again += 1
                self._writes_sources = True
                raise BatchConflict.of(error) from error
            except ReservedByPrepared as error:
                log.warning("%s: a prepared transaction holds rows: %s", ownership.processor, error)
                if batch.tables is not None:
                    raise BatchConflict.of(error) from error
                raise BeginAgainError(str(error)) from error
            except (TransactionAborted, WriteFailed) as error:
                if batch.tables is not None and batch.tables.reads is not None:
                    raise BatchConflict.of(error) from error  # another transaction reads later rows
                if redone == _REDONE:
                    raise
                log.warning("%s: the commit is made again: %s", ownership.processor, error)
            except (EventTooLarge, InvalidArgument) as error:
                tables = () if batch.tables is None else batch.tables.rows
                if self._limits.have_changed([*batch.outputs, *tables]):
                    # The batch is handled again by the new limits; then an event that is too big is refused.
                    raise BeginAgainError(str(error)) from error
                found = self._client.processor(ownership.processor).tasks
                stand = {row.task: row.sequence + 1 for row in found}
                if any(stand[task] != sequence for task, sequence in sequences.items()):
                    raise OwnershipLost(
                        f"positions of tasks are not the known ones: {error}"
                    ) from error
                if isinstance(error, EventTooLarge):
                    raise BatchTooBig.of(batch, error) from error
                raise
        marks = {
            task: self.state.mark_after(task, sequence if task in state else None, ends.get(task))
            for task, sequence in sequences.items()
        }
        self._asked_again = 0
        self.rows.write([(task, rows.items()) for task, rows in batch.rows.items()], marks)
        if batch.tables is not None:
            batch.tables.committed(timestamp)
        self._count(batch, self._clock.monotonic() - begun)

    def _begin(self, ownership: TaskOwnership, batch: WorkBatch) -> Transaction | TableTransaction:
        """The transaction of a batch; if it has read tables, that of its reads. Raises: as `BatchTables.check`.

        A batch that writes to the source of a derived table reads the rows before.
        """
        if batch.tables is not None:
            batch.tables.check()
            if self._writes_sources and batch.tables.rows:
                batch.tables.begin()
            if batch.tables.reads is not None:
                return cast("TableTransaction", batch.tables.reads)
        txn = self._client.begin(ownership.scope, ownership=ownership)
        txn.ran = self.ran
        return txn

    def _count(self, batch: WorkBatch, seconds: float) -> None:
        add = self._metrics.add
        add("processor_commits")
        self._metrics.took(seconds)
        for key, count in batch.counts.items():
            add(*key, by=count)
        for stream, written in batch.outputs.items():
            runs = runs_of(batch, stream, written)
            count = sum(len(run) if isinstance(run, list) else run.num_rows for run in runs)
            add("processor_events_out", stream, by=count)

    def _until_known(self, txn: Transaction | TableTransaction, consumed: Consumed) -> int:
        return commit_until_known(txn, consumed, self._clock, self.ending.is_set)

    def _ends(self, ownership: TaskOwnership) -> dict[int, int]:
        """End offsets of the state's partitions before a commit; empty less than `_ENDS_S` after the last look-up.

        If the commit succeeds, all records below these offsets are in the table, since this worker owned the tasks.
        So a later start may resume reading there.
        """
        now = self._clock.monotonic()
        if now < self._ends_due:
            return {}
        self._ends_due = now + _ENDS_S
        places = [TopicPartition(self.state.topic, task) for task in ownership.tasks]
        found = self._log.end_offsets(places, now + _ASK_S, committed=True)
        return {place.partition: end for place, end in found.items()}


@dataclass(frozen=True, slots=True)
class FirstEvents:
    """Handles what comes before the inputs, for tasks that have consumed nothing, such as the rows of a base.

    The last commit gives the tasks their positions, so that it happens once; what comes before may be repeated.
    """

    app: Program
    client: Client
    commits: Commits
    handlers: Handlers

    def handle(self, ownership: TaskOwnership, still_wanted: Callable[[], None]) -> TaskOwnership:
        """Returns the ownership with the tasks as they are then.

        ``still_wanted``: called often; raises if the tasks are to be left. Raises: as the program's `first_events`,
        `Handlers.handle` and `Commits.wait`.
        """
        fresh = {task for task, info in ownership.tasks.items() if not info.positions}
        has_any = False
        for events, of_events in self.app.first_events(self.client, fresh):
            has_any, left = True, [Piece(events[0].stream, 0, events, of_events)]
            while left:
                still_wanted()
                batch = self.commits.new_batch(self.app.tasks)
                # A limit after a batch that was too big stays, as all this begins again after the next such batch.
                left = self.handlers.handle_part(batch, left)
                if batch.rows or batch.outputs:
                    of = batch.rows.keys() or set(of_events)
                    ownership = self._commit(ownership, batch, of, ())
        if not has_any:
            return ownership
        begin = [TaskPosition(n, at.record, at.timestamp) for n, at in enumerate(ownership.inputs)]
        batch = self.commits.new_batch(self.app.tasks)
        return self._commit(ownership, batch, fresh, tuple(begin))

    def _commit(
        self, ownership: TaskOwnership, batch: WorkBatch, of: Iterable[int],
        positions: tuple[TaskPosition, ...],
    ) -> TaskOwnership:  # fmt: skip
        """Commit a batch with these tasks' next sequences, and with positions, if there are any."""
        self.handlers.close_batch(batch)
        tasks, steps = dict(ownership.tasks), list[TaskStep]()
        for task in sorted(of):
            known = tasks[task]
            tasks[task] = replace(
                known, sequence=known.sequence + 1, positions=positions or known.positions
            )
            steps.append(TaskStep((task,), known.sequence + 1, positions))
        consumed = Consumed(self.app.name, ownership.fencing_token, tuple(steps))
        self.commits.send(ownership, batch, consumed)
        self.commits.wait()
        return replace(ownership, tasks=tasks)


def commit_until_known(
    txn: Transaction | TableTransaction,
    consumed: Consumed,
    clock: Clock,
    is_ending: Callable[[], bool] = lambda: False,
) -> int:
    """Commit, and repeat that while the outcome is unknown. Returns the commit timestamp."""
    give_up = clock.monotonic() + _DOUBT_S
    pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, clock)
    while True:
        try:
            return txn.commit(consumed=consumed).commit_timestamp
        except WriteFailed:
            raise
        except (AskOutcomeError, RetryError) as error:
            if clock.monotonic() >= give_up or is_ending():
                raise
            log.info("%s: the commit is asked for again: %s", consumed.processor, error)
        pauses.sleep()


def runs_of(
    batch: WorkBatch, stream: str, written: list[Any]
) -> Iterator[list[Written] | pa.RecordBatch]:
    """The outputs of a stream in order: lists of events, and Arrow batches."""
    if stream not in batch.batched:
        yield written
        return
    for is_event, run in groupby(written, lambda one: isinstance(one, tuple)):
        if is_event:
            yield list(run)
        else:
            yield from run


def columns_of(events: Sequence[Written]) -> pa.RecordBatch:
    """Outputs as an Arrow batch for `Transaction.write_batch`, which is faster for many outputs."""
    import pyarrow as pa

    values, keys, headers, times = zip(*events, strict=True)
    columns = {
        "value": pa.array(values, pa.binary()),
        "key": pa.array(keys, pa.binary()),
        "timestamp": pa.array(times, pa.int64()),
    }
    if any(headers):
        pairs = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
        columns["headers"] = pa.array(
            [[{"key": name, "value": value} for name, value in some or ()] for some in headers],
            pairs,
        )
    return pa.record_batch(columns)
