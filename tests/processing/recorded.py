"""Workers of processors that record what they read, write, consume and commit (`docs/inside/checker.md`).

``python -m tests.processing.recorded`` is ``anabranch`` with the recorder; the history is in the folder that
``ANABRANCH_HISTORY`` names. A bug of `planted` may be planted, as there. Values begin with ids, as in
`tests.tables.recorded`; the programs have tables, but no stores.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

from anabranch.client.client import Client
from anabranch.client.table_transaction import TableTransaction
from anabranch.errors import LocksBroken, TransactionAborted
from anabranch.processing.batch import WorkBatch
from anabranch.processing.commits import Commits
from anabranch.processing.tables import TaskTables
from anabranch.processing.worker import Worker
from anabranch.protocol.schemas.records import Consumed
from anabranch.types import TaskOwnership
from checker.recorder import SUFFIX, Recorder
from tests.processing import bank, planted
from tests.tables.recorded import OWN, RecordedSnapshot, broken_of, text
from tests.workload.recording import id_of

VARIABLE = "ANABRANCH_HISTORY"
ONE_SHOT_BYTES = 400, 1 << 18, 1 << 18


def recorder_in(folder: Path, name: str) -> Recorder:
    """A recorder of this process."""
    return Recorder(folder / f"{name}-{os.getpid()}{SUFFIX}")


class RecordedReads:
    """A batch's reads of tables, recorded; all else as the table transaction of the batch has it."""

    def __init__(self, recorder: Recorder, txn: TableTransaction, label: str) -> None:
        self.txn, self.label = txn, label
        self._view = RecordedSnapshot(recorder, txn, {"txn": label})
        self.get, self.scan = self._view.get, self._view.scan

    def __getattr__(self, name: str) -> Any:
        return getattr(self.txn, name)

    def __enter__(self) -> Self:
        self.txn.__enter__()
        return self

    def __exit__(self, *how: Any) -> None:
        self.txn.__exit__(*how)


class WorkRecorder:
    """Records what the workers of this process do.

    ``one_shot_bytes``: one of these for each batch that reads tables, so that some commits go through journals.
    """

    def __init__(self, recorder: Recorder, one_shot_bytes: Sequence[int] = ()) -> None:
        self.recorder = recorder
        self._one_shot_bytes = one_shot_bytes
        self._count = itertools.count()
        self._ownerships: dict[bytes, str] = {}  # fencing token -> label
        self._commits: dict[int, tuple[str, dict[str, Any]]] = {}  # of each `Commits`: label, moves

    def label(self) -> str:
        """A name of no other transaction, ownership or snapshot."""
        return f"work.{os.getpid()}.{next(self._count)}"

    @contextmanager
    def installed(self) -> Iterator[Self]:
        """Record all workers of this process, and whoever takes tasks in it."""
        with ExitStack() as stack:
            for owner, name, wrapper in (
                (Client, "take_tasks", self._take),
                (TaskTables, "begin", self._begin),
                (TaskTables, "get_at", self._get_at),
                (Commits, "_commit_batch", self._commit_batch),
                (Commits, "_until_known", self._until_known),
            ):
                stack.enter_context(patch.object(owner, name, _around(owner, name, wrapper)))
            yield self

    def moves(
        self, ownership: TaskOwnership, consumed: Consumed, ids: Sequence[str]
    ) -> dict[str, Any]:
        """What the request of a commit says of positions. ``ids``: of the consumed events, in order."""
        return {
            "processor": consumed.processor,
            "ownership": self._ownerships[ownership.fencing_token],
            "tasks": sorted(task for step in consumed.steps for task in step.tasks),
            "consumes": list(ids),
        }

    def _take(
        self, usual: Any, client: Client, processor: str, tasks: Sequence[int], **how: Any
    ) -> TaskOwnership:
        label = self.label()
        asked = {"processor": processor, "ownership": label, "tasks": sorted(tasks)}
        with self.recorder.asking("take", **asked):
            found: TaskOwnership = usual(client, processor, tasks, **how)
        self._ownerships[found.fencing_token] = label
        return found

    def _begin(self, usual: Any, tables: TaskTables, least: int) -> RecordedReads:
        txn: TableTransaction = usual(tables, least)
        assert tables._ownership is not None
        if self._one_shot_bytes:
            tables._tables._client._shared.one_shot_bytes = random.choice(self._one_shot_bytes)
        asked = {"scope": tables._ownership.scope, "isolation": "serializable", "seen": least}
        label = self.label()
        with self.recorder.asking("begin", txn=label, **asked) as told:
            told |= {"txn_id": None, "snapshot": txn.timestamp}
        return RecordedReads(self.recorder, txn, label)

    def _get_at(
        self, usual: Any, tables: TaskTables, table: str, key: bytes, at: int
    ) -> bytes | None:
        label = self.label()
        asked = {"snapshot": label, "streams": [table], "asked_for": at, "stale": True}
        with self.recorder.asking("snapshot", **asked) as told:
            row: bytes | None = usual(tables, table, key, at)
            told["timestamp"] = at
        with self.recorder.asking("read", table=table, snapshot=label) as told:
            rows = [] if row is None else [[text(key), id_of(row)]]
            told |= {"low": text(key), "high": text(key + b"\0"), "rows": rows}
        return row

    def _commit_batch(
        self, usual: Any, commits: Commits, ownership: TaskOwnership, batch: WorkBatch,
        consumed: Consumed,
    ) -> None:  # fmt: skip
        assert batch.tables is not None, "batches without tables forget their input"
        reads: Any = batch.tables.reads
        if isinstance(reads, RecordedReads):
            label = reads.label
        else:
            label = self.label()
            with self.recorder.asking("begin", txn=label, scope=ownership.scope) as told:
                told["txn_id"] = None
        for stream, written in batch.outputs.items():
            self._note_write(label, stream, [(key, value) for value, key, *_ in written])
        for table, rows in batch.tables.rows.items():
            self._note_write(label, table, list(rows.items()))
        ids = [id_of(event.value) for piece in batch.pieces for event in piece.events]
        self._commits[id(commits)] = label, self.moves(ownership, consumed, ids)
        usual(commits, ownership, batch, consumed)

    def _note_write(
        self, label: str, stream: str, rows: Sequence[tuple[bytes | None, bytes | None]]
    ) -> None:
        events = [[text(key or b""), None if row is None else id_of(row)] for key, row in rows]
        self.recorder.note("write", txn=label, writer=OWN, stream=stream, events=events)

    def _until_known(self, usual: Any, commits: Commits, txn: Any, consumed: Consumed) -> int:
        label, moves = self._commits[id(commits)]
        op = self.recorder.ask("commit", txn=label, writers=[OWN], own=[OWN], **moves)
        try:
            timestamp: int = usual(commits, txn, consumed)
        except BaseException as error:
            refused = isinstance(error, LocksBroken | TransactionAborted)
            self.recorder.told(op, "failed" if refused else "unknown", **broken_of(error))
            raise
        result = txn.result
        self.recorder.told(
            op, "ok", txn_id=result.txn_id.hex(), timestamp=timestamp,
            committed=result.counts.committed,
        )  # fmt: skip
        return timestamp


def _around(owner: object, name: str, wrapper: Callable[..., Any]) -> Callable[..., Any]:
    usual = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        return wrapper(usual, *given, **named)

    return call


def _with_functions(
    usual: Any, worker: Worker, app: Any, client: Client, *more: Any, **how: Any
) -> None:
    """A worker of the bank whose client has the functions of derived tables."""
    bank.derive(client, bank.Names(bank.SCOPE))
    usual(worker, app, client, *more, **how)


def main() -> None:
    """The command line, recorded."""
    from anabranch.cli import app

    bug = os.environ.get(planted.VARIABLE)
    with ExitStack() as stack:
        if bug:
            stack.enter_context(planted.BUGS[bug]())
        recorder = recorder_in(Path(os.environ[VARIABLE]), "worker")
        stack.enter_context(WorkRecorder(recorder, ONE_SHOT_BYTES).installed())
        if os.environ.get(bank.DERIVES):
            around = _around(Worker, "__init__", _with_functions)
            stack.enter_context(patch.object(Worker, "__init__", around))
        app()


if __name__ == "__main__":
    main()
