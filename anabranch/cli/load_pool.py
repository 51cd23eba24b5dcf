"""The processes of `anabranch load`: who gets which block, and what becomes of a failure.

Each worker has a pipe of its own (a shared queue would stay locked when a worker is killed), and at
most a few blocks on their way.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from anabranch.cli import load_worker
from anabranch.cli.errors import ChildFailed, ExitCode
from anabranch.cli.load_split import Block, Opened, opened
from anabranch.cli.load_worker import SILENCE_S, Failed, Finished, Job, Wrote
from anabranch.cli.output import progress_bar
from anabranch.cli.session import Target
from anabranch.errors import (
    AnabranchError,
    BeginAgainError,
    FixCallError,
    InvalidArgument,
    InvariantViolation,
    RetryError,
    check,
    error_of,
)

_AHEAD = 3
_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to load where."""

    target: Target
    token: bytes = field(repr=False)
    stream: str
    form: str
    key: str | None
    timestamp: str | None
    workers: int


@dataclass
class Loaded:
    """What was written, in no order."""

    receipts: list[bytes] = field(default_factory=list)
    rows: int = 0
    files: int = 0
    workers: int = 0


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    ahead: int = 0
    finished: Finished | None = None


def run_workers(plan: LoadPlan, files: Sequence[Path], *, quiet: bool) -> Loaded:
    """Writes all rows of all files; the receipts to commit with.

    Each file has its workers, because each has its columns. Raises what a worker raised.
    """
    loaded = Loaded(workers=plan.workers)
    with progress_bar(quiet=quiet) as bar:
        for path in files:
            with opened(path) as source:
                _check_columns(path, source.columns, plan)
                task = bar.add_task(path.name, total=source.size)

                def advance(rows: int, source: Opened = source, task: Any = task) -> None:
                    loaded.rows += rows
                    bar.update(task, completed=source.done)

                with closing(_Pool(plan, tuple(source.columns))) as pool:
                    loaded.receipts += pool.run(source.blocks(), advance)
                bar.update(task, completed=source.size)
            loaded.files += 1
    return loaded


def _check_columns(path: Path, columns: Sequence[str], plan: LoadPlan) -> None:
    for option, column in (("--key", plan.key), ("--timestamp", plan.timestamp)):
        if column is not None and column not in columns:
            raise InvalidArgument(
                f"{path} has no column {column!r} for {option}: {', '.join(columns)}"
            )


class _Pool:
    def __init__(self, plan: LoadPlan, columns: tuple[str, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        self._broadcast = plan.key is not None
        self._workers: list[_Worker] = []
        try:
            for number in range(plan.workers):
                ours, theirs = context.Pipe()
                job = Job(
                    target=plan.target,
                    token=plan.token,
                    stream=plan.stream,
                    columns=columns,
                    form=plan.form,
                    key=plan.key,
                    timestamp=plan.timestamp,
                    worker=number,
                    workers=plan.workers,
                )
                process = context.Process(target=load_worker.run, args=(theirs, job), daemon=True)
                process.start()
                theirs.close()
                self._workers.append(_Worker(process, ours))
        except BaseException:
            self.close()
            raise

    def run(self, blocks: Iterator[Block], advance: Callable[[int], None]) -> list[bytes]:
        """Hands out the blocks; the receipts of all workers."""
        for block in blocks:
            if self._broadcast:
                for worker in self._workers:
                    self._await_room([worker], advance)
                    self._send(worker, block)
            else:
                self._send(self._await_room(self._workers, advance), block)
        for worker in self._workers:
            self._send(worker, None)
        while any(worker.finished is None for worker in self._workers):
            self._hear(advance)
        return [w.finished.receipt for w in self._workers if w.finished is not None]

    def _await_room(self, workers: Sequence[_Worker], advance: Callable[[int], None]) -> _Worker:
        while (least := min(workers, key=lambda worker: worker.ahead)).ahead >= _AHEAD:
            self._hear(advance)
        return least

    def _send(self, worker: _Worker, block: Block | None) -> None:
        try:
            worker.pipe.send(block)
        except OSError as error:
            # It went away; it may have said why.
            self._hear_last(worker)
            raise ChildFailed(f"worker process {worker.process.pid} went away") from error
        worker.ahead += block is not None

    def _hear(self, advance: Callable[[int], None]) -> None:
        """Takes what the workers say, waiting for the first word; raises if one failed."""
        waiting = {worker.pipe: worker for worker in self._workers if worker.finished is None}
        ready = wait(list(waiting), SILENCE_S)
        if not ready:
            raise ChildFailed(f"no worker process said anything for {SILENCE_S:.0f} s")
        for pipe in ready:
            worker = waiting[pipe]  # type: ignore[index]
            try:
                message = worker.pipe.recv()
            except (EOFError, OSError):
                worker.process.join(_STOP_TIMEOUT_S)
                raise ChildFailed(
                    f"worker process {worker.process.pid} ended with exit code "
                    f"{worker.process.exitcode}; the transaction is aborted"
                ) from None
            self._take(worker, message, advance)

    def _take(self, worker: _Worker, message: object, advance: Callable[[int], None]) -> None:
        if isinstance(message, Wrote):
            worker.ahead -= 1
            advance(message.rows)
        elif isinstance(message, Finished):
            worker.finished = message
        elif isinstance(message, Failed):
            raise _error_of(message)
        else:
            check(False, f"a worker said {message!r}")

    def _hear_last(self, worker: _Worker) -> None:
        with suppress(EOFError, OSError):
            while worker.pipe.poll(0.5):
                self._take(worker, worker.pipe.recv(), lambda rows: None)

    def close(self) -> None:
        """Ends every worker process."""
        for worker in self._workers:
            worker.pipe.close()
            if worker.finished is None:
                worker.process.terminate()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join(_STOP_TIMEOUT_S)


def _error_of(failed: Failed) -> AnabranchError:
    """A worker's error, of the same kind here."""
    known = error_of(failed.name, failed.message)
    if type(known).__name__ == failed.name:
        return known
    message = f"{failed.name}: {failed.message}"
    kinds: dict[ExitCode, type[AnabranchError]] = {
        ExitCode.USAGE: FixCallError,
        ExitCode.RETRY: RetryError,
        ExitCode.BEGIN_AGAIN: BeginAgainError,
        ExitCode.ENVIRONMENT: ChildFailed,
    }
    return kinds.get(failed.code, InvariantViolation)(message)
