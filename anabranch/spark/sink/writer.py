"""Writes a batch as one transaction, exactly once (`docs/spark.md`, "Sink").

The planner makes a sink, which reserves a transaction and begins nothing. Spark pickles the sink to the tasks. Each
task joins, writes, and returns its receipt. The driver commits exactly the receipts that Spark passes to it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

import anabranch
from anabranch.client.reservation import Reservation
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    EventTooLarge,
    IllegalState,
    InvalidArgument,
    OutcomeUnknown,
    RetryError,
    TransactionAborted,
    UnknownTransaction,
    check,
)
from anabranch.protocol import defaults
from anabranch.protocol.legal_names import check_name, check_scope, split_stream
from anabranch.spark.api import DataSourceStreamArrowWriter
from anabranch.spark.clients import client_of
from anabranch.spark.options import Connection, Options
from anabranch.spark.sink.encoding import Encoding, encoding_of
from anabranch.topics.names import commands_topic
from anabranch.types import Receipt, Result

DEFAULT_SINK = "0"
# Local properties that Spark sets for the tasks of a micro-batch.
QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"

# Folders that Spark's driver makes and removes; this variable names them to its Python workers.
LOCAL_DIRS = "SPARK_LOCAL_DIRS"
# A query has at least one of these options, unless its checkpoint is named at random. Queries of one driver differ
# in them.
_OWN = ("checkpointlocation", "queryname")

log = logging.getLogger("anabranch.spark")
# No other code can set it in Spark's workers. The lines appear if worker logging is on.
log.setLevel(logging.INFO)
# Streams that this process has found before. Spark makes a planner for every micro-batch.
_seen: set[tuple[Connection, str]] = set()


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """A task attempt's receipt, as bytes. Query and batch are None in a batch job."""

    reservation: Reservation
    receipt: bytes
    rows: int
    query_id: str | None
    batch_id: str | None


@dataclass(frozen=True)
class NothingWritten(WriterCommitMessage):
    """The message of an attempt without rows, or of a job under whose name a transaction has committed already."""


@dataclass(frozen=True)
class Target:
    """The checked options of a sink, plain data that Spark sends to the tasks."""

    connection: Connection
    scope: str
    stream: str | None
    keepalive: float
    encoding: Encoding

    @property
    def client(self) -> anabranch.Client:
        return client_of(self.connection)

    def reserve(self, name: str | None = None) -> Reservation:
        """Reserve a batch's transaction. Raises: UnknownScope, UnknownStream, NotReady, UnsupportedSetting."""
        if self.stream is not None and (self.connection, self.stream) not in _seen:
            self.client.describe(self.stream)
            _seen.add((self.connection, self.stream))
        return self.client.reserve(self.scope, name, self.keepalive)

    def write(
        self, reservation: Reservation, batches: Iterator[pa.RecordBatch], *, streaming: bool
    ) -> WriterCommitMessage:
        """Write all rows of a task attempt. After an error none of them counts."""
        query_id, batch_id = _query_and_batch() if streaming else (None, None)
        events = self.encoding.encoder(self.stream)
        rows = 0
        writer = self.client.join(reservation, heartbeat=True)
        with writer, _Patience(self.client, reservation, writer, self.keepalive) as patience:
            for batch in batches:
                if batch.num_rows:
                    patience.end()
                    for stream, some in events(batch):
                        rows += writer.write_batch(stream, some)
            patience.end()
            if not rows:
                return NothingWritten()
            receipt = writer.finish()
        return Written(reservation, receipt.to_bytes(), rows, query_id, batch_id)


class _Patience:
    """Sends heartbeats while a task waits for its first row, if other tasks have begun the transaction.

    Otherwise the transaction could become stale once all other tasks have ended. A thread sends them, because the
    task is blocked.
    """

    def __init__(
        self,
        client: anabranch.Client,
        reservation: Reservation,
        writer: anabranch.Writer,
        keepalive: float,
    ) -> None:
        self._client = client
        self._reservation = reservation
        self._writer = writer
        self._pause = keepalive / 4
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="anabranch-patience", daemon=True)

    def __enter__(self) -> _Patience:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop: the writer sends its own heartbeats from now on."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(self._pause):
            try:
                if self._client.state(self._reservation).state == "OPEN":
                    self._writer.open()
                    return
            except UnknownTransaction:
                continue  # not begun, so it can't become stale
            except AnabranchError as error:
                log.info("waiting for rows: %s", error)


class BatchSink(DataSourceArrowWriter):
    """``df.write``: writes the DataFrame as one transaction, once per ``name`` while outcomes are retained."""

    def __init__(self, options: Options, schema: StructType, overwrite: bool) -> None:
        """Raises: FixCallError, if options or columns are wrong; NotReady."""
        if overwrite:
            raise InvalidArgument(
                'mode("overwrite"): a stream is only appended to: use mode("append"), or another stream'
            )
        self._name = options.text("name")
        check_name(self._name)
        self._target = target_of(options, schema)
        self._reservation = self._target.reserve(self._name)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        try:
            return self._target.write(self._reservation, iterator, streaming=False)
        except AlreadyCommitted:
            if self._name is None:
                raise
            return NothingWritten()

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Commit the accepted attempts' writes; when this returns, they are committed.

        Raises: TransactionAborted (no row is visible: repeat the job), OutcomeUnknown, FixCallError.
        """
        receipts = _receipts(messages, self._reservation)
        if not receipts:
            log.info("nothing to commit")
            return
        timeout = self._target.connection.timeout
        client = self._target.client
        try:
            result = client.commit(
                self._reservation,
                receipts,
                self._name,
                timeout=timeout * (1 - defaults.RESOLVE_SHARE),
            )
        except (OutcomeUnknown, RetryError) as error:
            self._resolve(client, error, timeout * defaults.RESOLVE_SHARE)
            return
        except TransactionAborted as error:
            raise TransactionAborted(f"no row is visible, run it again; {error}") from error
        except EventTooLarge as error:
            raise EventTooLarge(_too_many(receipts, self._target, error)) from error
        _log_commit(result, self._reservation)

    def _resolve(self, client: anabranch.Client, error: AnabranchError, timeout: float) -> None:
        """Resolve the outcome, because for Spark an error means a job without effect."""
        try:
            client.abort(self._reservation, "Spark's commit was not answered", timeout=timeout)
        except AlreadyCommitted as committed:
            if committed.result is not None:
                _log_commit(committed.result, self._reservation)
            return
        except AnabranchError:
            raise OutcomeUnknown(
                f"whether transaction {self._reservation} is committed is not known: ask `anabranch txn "
                f"describe {self._reservation}` before you run the job again (with option name a repeat is "
                f"always safe); {error}",
                txn_id=self._reservation.txn_id,
            ) from error
        raise TransactionAborted(
            f"not committed within option timeout, and aborted: no row is visible, run it again; {error}"
        ) from error

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Abort, so that nothing remains, and a transaction that no task began can't begin.

        If no controller answers, it becomes stale later: Spark would report an error here in place of the job's.
        Raises: AlreadyCommitted (only the reply to the commit was lost), OutcomeUnknown (perhaps it was).
        """
        try:
            self._target.client.abort(self._reservation, "Spark aborted the job")
        except RetryError as error:
            log.warning("transaction %s is not aborted: %s", self._reservation, error)
        except AlreadyCommitted as error:
            raise AlreadyCommitted(
                f"the job failed after its commit: its rows are visible, don't run it again (transaction "
                f"{self._reservation})",
                result=error.result,
            ) from error


class StreamSink(DataSourceStreamArrowWriter):
    """``df.writeStream``: writes each micro-batch as one transaction, exactly once.

    Spark makes one sink for the tasks of a micro-batch, and another for the commit, which gets only their messages.
    """

    def __init__(self, options: Options, schema: StructType, overwrite: bool) -> None:
        """Raises: FixCallError, if options or columns are wrong."""
        if overwrite:
            raise InvalidArgument(
                'outputMode("complete"): a stream is only appended to: use outputMode("append")'
            )
        self._sink = options.text("sink", DEFAULT_SINK) or DEFAULT_SINK
        self._target = target_of(options, schema)
        self._handover = Handover(options)
        self._away: RetryError | None = None
        try:
            self._reservation = self._target.reserve()
        except RetryError as error:  # only tasks need it; this sink may be for an abort
            self._away = error

    def __getstate__(self) -> dict[str, Any]:
        """The copy for the tasks, which may begin the transaction from now on. Raises: RetryError."""
        if self._away is not None:
            raise self._away
        self._handover.leave(self._reservation)
        return self.__dict__

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._target.write(self._reservation, iterator, streaming=True)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Commit the accepted attempts' writes, unless the batch is committed already.

        Raises: FixCallError; RetryError, OutcomeUnknown and TransactionAborted, after which the query can be
        started again: nothing is lost or doubled.
        """
        written = _written(messages)
        if not written:
            log.info("batch %d: nothing to commit", batchId)
            return
        first = written[0]
        receipts = _receipts(messages, first.reservation)
        check(
            all((m.query_id, m.batch_id) == (first.query_id, str(batchId)) for m in written),
            f"messages of batch {batchId} are of several queries or batches: "
            + ", ".join(sorted({f"{m.query_id} {m.batch_id}" for m in written})),
        )
        series = f"spark/{first.query_id}/{self._sink}"
        try:
            result = self._target.client.commit(first.reservation, receipts, series, batchId)
        except AlreadyCommitted as error:
            self._check_own(series, batchId, error)
            return
        except (OutcomeUnknown, RetryError, TransactionAborted) as error:
            raise type(error)(
                f"batch {batchId}: start the query again, it is safe; {error}"
            ) from error
        except EventTooLarge as error:
            raise EventTooLarge(_too_many(receipts, self._target, error)) from error
        if not result.counts.committed:  # a numbered batch always has events
            by = f"its number was committed without events, by {result.txn_id.hex()}"
            raise AlreadyCommitted(f"{by}; {self._ways(series, batchId)}", result=result)
        _log_commit(result, first.reservation)

    def _check_own(self, series: str, batch: int, error: AlreadyCommitted) -> None:
        """Return if the batch's number was committed earlier.

        If the series was moved beyond the number instead, raise: skipping the batch would lose its rows.
        """
        for info in self._target.client.series(self._target.scope, series):
            runs = zip(info.runs[::2], info.runs[1::2], strict=True)
            if any(first <= batch <= last for first, last in runs):
                log.info("batch %d of %s is committed already", batch, series)
                return
        raise AlreadyCommitted(f"{error}; {self._ways(series, batch)}") from error

    def _ways(self, series: str, batch: int) -> str:
        command = f"anabranch series set {self._target.scope} {series}"
        return (
            f"no row of batch {batch} is visible, and somebody moved its series. To commit the batch: `{command} "
            f"{batch - 1}`; to continue without it: `{command} {batch}`. Then start the query again"
        )

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Abort, also if no message names the transaction. Best effort, as `BatchSink.abort`."""
        named = {message.reservation for message in _written(messages)}
        left = self._handover.find()
        for reservation in named if left is None else named | {left}:
            try:
                self._target.client.abort(reservation, f"Spark aborted batch {batchId}")
            except RetryError as error:
                log.warning("transaction %s is not aborted: %s", reservation, error)
            except AlreadyCommitted:
                log.warning("transaction %s is committed: nothing to abort", reservation)


def target_of(options: Options, schema: StructType) -> Target:
    """The options of a sink, checked without a request to the cluster. Raises: InvalidArgument."""
    if options.text("path"):
        raise InvalidArgument("a path means nothing here: give option stream=scope/name")
    stream, scope = options.text("stream"), options.text("scope")
    if stream is not None and scope is not None:
        raise InvalidArgument("give option stream, or scope and a column 'stream', not both")
    if stream is not None:
        scope = split_stream(stream)[0]
    elif scope is None:
        raise InvalidArgument(
            "where to? Give option stream=scope/name, or scope=… and a column 'stream' (scope/name)"
        )
    target = Target(
        connection=options.connection(),
        scope=check_scope(scope),
        stream=stream,
        keepalive=options.seconds("keepalive", defaults.SPARK_KEEPALIVE_S, least=1.0),
        encoding=encoding_of(options, schema, by_column=stream is None),
    )
    options.check_all_used()
    return target


def _query_and_batch() -> tuple[str, str]:
    context = TaskContext.get()
    query_id = context.getLocalProperty(QUERY_ID) if context else None
    batch_id = context.getLocalProperty(BATCH_ID) if context else None
    if query_id is None or batch_id is None:
        raise IllegalState(
            f"Spark gives the task no {QUERY_ID} and {BATCH_ID}: this version of Spark has other streaming sinks"
        )
    return query_id, batch_id


def _written(messages: Sequence[WriterCommitMessage | None]) -> list[Written]:
    return [message for message in messages if isinstance(message, Written)]


def _receipts(
    messages: Sequence[WriterCommitMessage | None], reservation: Reservation
) -> list[bytes]:
    written = _written(messages)
    check(
        all(message.reservation == reservation for message in written),
        f"messages of one batch are of several transactions, not of {reservation} alone",
    )
    return [message.receipt for message in written]


def _too_many(receipts: Sequence[bytes], target: Target, error: AnabranchError) -> str:
    """The message for a commit whose receipts do not fit into one command."""
    connection = target.connection
    places = sum(len(Receipt.from_bytes(receipt).record.extents) for receipt in receipts)
    return (
        f"no row is visible: the receipts of {len(receipts)} tasks, which wrote to {places} partitions in all, are "
        "more than one commit takes. Write by fewer tasks (df.coalesce), or raise max.message.bytes of the topic "
        f"{commands_topic(connection.prefix, connection.lane)}, up to 15 MB, and start the driver anew; {error}"
    )


def _log_commit(result: Result, reservation: Reservation) -> None:
    if result.txn_id == reservation.txn_id:
        log.info("committed %d events in transaction %s", result.counts.committed, reservation)
    else:
        log.info("committed before, in transaction %s; this one is left out", result.txn_id.hex())


class Handover:
    """A file that names the transaction reserved by a query's planner, for the process that aborts the micro-batch.

    Spark aborts a micro-batch on a new object, in another process of the driver's machine, with the messages of
    the successful tasks. If no task succeeded, only this file names the transaction; without it the transaction
    would stay open until its keepalive has passed. The file is in the driver's own folder, one for each query. Best
    effort: no method raises.
    """

    def __init__(self, options: Options) -> None:
        folder = os.environ.get(LOCAL_DIRS, "").split(",")[0]
        own = any(options.text(name) for name in _OWN)
        name = sha256(repr(options.all()).encode()).hexdigest()[:32]
        self._path = Path(folder, f"anabranch-{name}") if folder and own else None

    def leave(self, reservation: Reservation) -> None:
        """Store the reservation for the next tasks, in place of the former one."""
        if self._path is None:
            return
        try:
            new = self._path.with_suffix(f".{os.getpid()}")
            new.unlink(missing_ok=True)
            # Only the owner may read it, because the reservation is enough to write and commit.
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(reservation.to_bytes())
            new.replace(self._path)
        except OSError as error:
            log.info("an abort without messages will not find its transaction: %s", error)

    def find(self) -> Reservation | None:
        """The latest reservation."""
        if self._path is None:
            return None
        try:
            return Reservation.from_bytes(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, AnabranchError) as error:
            log.info("what was written to is not known: %s", error)
            return None
