"""Stand-ins for `load_worker.run`, which real worker processes can import."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

from anabranch.cli.errors import ExitCode
from anabranch.cli.load_worker import Failed, Finished, Job, Wrote, write_block


def counts(pipe: Connection, job: Job) -> None:
    """Counts its rows; the receipt names the worker."""
    rows = 0
    while (block := pipe.recv()) is not None:
        written = write_block(block, job, lambda *event: None)
        rows += written
        pipe.send(Wrote(written))
    pipe.send(Finished(b"%d" % job.worker, rows))


def refuses(pipe: Connection, job: Job) -> None:
    """The second one refuses its first block."""
    if job.worker == 1:
        pipe.recv()
        pipe.send(Failed("EventTooLarge", "that one is too big", ExitCode.USAGE))
    else:
        counts(pipe, job)


def breaks(pipe: Connection, job: Job) -> None:
    """All fail by an error that is not the library's."""
    pipe.recv()
    pipe.send(Failed("ZeroDivisionError", "division by zero", ExitCode.DEFECT))


def dies(pipe: Connection, job: Job) -> None:
    """The first one is killed after its first block."""
    if job.worker == 0:
        pipe.recv()
        os.kill(os.getpid(), signal.SIGKILL)
    counts(pipe, job)


def dies_at_once(pipe: Connection, job: Job) -> None:
    """All are killed before they read anything."""
    os.kill(os.getpid(), signal.SIGKILL)
