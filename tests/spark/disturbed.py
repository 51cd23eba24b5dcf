"""The sink with accidents: what a task or a driver suffers, each once, noted by a file in a folder.

Tasks of the batch job, by partition: "early" (SIGKILL after it has joined, before its first row), "middle" (SIGKILL
with rows in the journal), "late" (SIGKILL when the receipt is there, before Spark has it), "fail" (an error,
there too), "zombie" (likewise, while a process that has joined keeps writing).

Queries, by option ``accident``: when the driver is killed in each micro-batch from 1 on that `LIVES` has: "before",
"during" or "after" its commit. All three wait until each is where it has to be: one SIGKILL takes them all. In
the one of "after" a task attempt has been killed before.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceStreamArrowWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from anabranch.errors import AnabranchError
from anabranch.spark.datasource import AnabranchDataSource
from anabranch.spark.options import Options
from anabranch.spark.sink.writer import BATCH_ID, BatchSink, StreamSink

FOLDER = "DISTURB_FOLDER"
# Drivers that are killed: `docs/inside/spark.md`.
LIVES = int(os.environ.get("ANABRANCH_SPARK_LIVES", "1"))
SEED = int(os.environ.get("ANABRANCH_SEED", "0"))  # of the moments
DEADLINE_S = 300.0  # a driver on a machine that is busy
TASKS = {0: "middle", 1: "fail", 2: "zombie", 3: "early", 4: "late"}
COMMITS = ("before", "during", "after")


def folder() -> Path:
    return Path(os.environ[FOLDER])


def once(accident: str) -> bool:
    """Whether it is the first time that this happens."""
    try:
        (folder() / accident).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(what)
        time.sleep(0.01)


class DisturbedSource(AnabranchDataSource):
    """``format("disturbed")``."""

    @classmethod
    def name(cls) -> str:
        return "disturbed"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return DisturbedBatch(Options(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        options = dict(self.options)
        accident = options.pop("accident")
        sink = DisturbedStream(Options(options), schema, overwrite)
        sink.accident = accident
        return sink


# -- tasks -----------------------------------------------------------------------------------------------


class DisturbedBatch(BatchSink):
    """Whose task attempts die."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        accident = TASKS.get(context.partitionId())
        if accident is None or not once(f"task-{accident}"):
            return super().write(iterator)
        if accident == "early":
            with self._target.client.join(self._reservation) as writer:
                writer.open()
                os.kill(os.getpid(), signal.SIGKILL)
        if accident == "middle":
            return super().write(self._killed(iterator))
        rows = list(iterator)
        super().write(iter(rows))
        if accident == "late":
            os.kill(os.getpid(), signal.SIGKILL)
        if accident == "zombie":
            self._raise_zombie(rows)
        raise RuntimeError(f"this attempt fails: {accident}")

    def _killed(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """All rows, and then death: they are in the journal, and in no receipt."""
        yield from rows
        target = self._target
        stream = target.stream
        assert stream is not None
        wait_for(
            "rows in the journal", lambda: target.client.describe(stream).uncommitted_bytes > 0
        )
        os.kill(os.getpid(), signal.SIGKILL)

    def _raise_zombie(self, rows: Sequence[pa.RecordBatch]) -> None:
        (folder() / "zombie.pickle").write_bytes(pickle.dumps((self, rows)))
        subprocess.Popen(
            [sys.executable, "-m", "tests.spark.disturbed"],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        wait_for("a zombie", (folder() / "zombie-writes").exists)


def zombie() -> None:
    """Keep writing with what a dead attempt had, until a call fails as the transaction is over."""
    sink, rows = pickle.loads((folder() / "zombie.pickle").read_bytes())
    written, until, end = 0, time.monotonic() + DEADLINE_S, "no call failed"
    try:
        with sink._target.client.join(sink._reservation, heartbeat=True) as writer:
            while time.monotonic() < until:
                for batch in rows:
                    written += writer.write_batch(sink._target.stream, batch)
                writer.flush()
                (folder() / "zombie-writes").touch()
                time.sleep(0.2)
    except AnabranchError as error:
        end = type(error).__name__
    result = folder() / "zombie.tmp"
    result.write_text(json.dumps({"end": end, "written": written}))
    result.rename(folder() / "zombie.json")


# -- drivers ---------------------------------------------------------------------------------------------


class DisturbedStream(StreamSink):
    """Whose driver is killed."""

    accident = ""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        batch = int(context.getLocalProperty(BATCH_ID) or 0)
        message = super().write(iterator)
        if self.accident == "after" and 1 <= batch <= LIVES and once(f"attempt-{batch}"):
            os.kill(os.getpid(), signal.SIGKILL)
        return message

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        if not (1 <= batchId <= LIVES and once(f"commit-{batchId}-{self.accident}")):
            super().commit(messages, batchId)
            return
        if self.accident == "after":
            super().commit(messages, batchId)
        here = folder() / f"there-{batchId}-{self.accident}"
        here.touch()
        if self.accident == "during":
            others = [here.with_name(f"there-{batchId}-{name}") for name in ("before", "after")]
            wait_for("the other queries", lambda: all(other.exists() for other in others))
            threading.Thread(target=kill_driver, args=(batchId,)).start()
            super().commit(messages, batchId)
        time.sleep(DEADLINE_S)  # no process is left to tell


def kill_driver(batch: int) -> None:
    """SIGKILL of the Python driver, the JVM, and of the process that commits, at a moment of its commit."""
    time.sleep(random.Random(SEED + batch).uniform(0.0, 0.02))
    for pid in (*json.loads((folder() / "pids").read_text()), os.getpid()):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    zombie()
