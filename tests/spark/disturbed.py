"""The sink with accidents: what a task or a driver suffers is written in a folder, each once.

``tasks``: partition of the batch job -> "kill" (SIGKILL in mid-write), "fail" (after all is written and the
receipt given), "zombie" (likewise, while a process that has joined goes on writing). ``commits``: micro-batch ->
when its driver is killed: "before", "during" or "after" the commit.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
from anabranch.spark.sink import BatchSink, StreamSink

FOLDER = "DISTURB_FOLDER"
DEADLINE_S = 60.0


def folder() -> Path:
    return Path(os.environ[FOLDER])


def take(kind: str, number: int) -> str | None:
    """The accident that is due here; taken, it is no more."""
    accident: str | None = json.loads((folder() / "plan.json").read_text())[kind].get(str(number))
    if accident is not None:
        try:
            (folder() / f"{kind}-{number}-{accident}").touch(exist_ok=False)
        except FileExistsError:
            return None
    return accident


def wait_for(what: str, condition: Any) -> None:
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
        return DisturbedStream(Options(self.options), schema, overwrite)


class DisturbedBatch(BatchSink):
    """Whose task attempts die."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        accident = take("tasks", context.partitionId())
        if accident is None:
            return super().write(iterator)
        if accident == "kill":
            return super().write(self._killed(iterator))
        rows = list(iterator)
        super().write(iter(rows))
        if accident == "zombie":
            self._raise_zombie(rows)
        raise RuntimeError(f"this attempt fails: {accident}")

    def _killed(self, iterator: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from iterator
        stream = self._target.stream
        assert stream is not None
        wait_for(
            "nothing is in the journal",
            lambda: self._target.client.describe(stream).staged_bytes > 0,
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
        wait_for("no zombie", (folder() / "zombie-writes").exists)


class DisturbedStream(StreamSink):
    """Whose driver is killed."""

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        accident = take("commits", batchId)
        if accident == "before":
            kill_driver()
        else:
            if accident == "during":
                threading.Thread(target=kill_driver).start()
            super().commit(messages, batchId)
            if accident == "after":
                kill_driver()
        if accident is not None:
            time.sleep(DEADLINE_S)  # nobody is left to tell


def kill_driver() -> None:
    """SIGKILL the JVM and the Python driver."""
    for pid in json.loads((folder() / "driver.json").read_text()):
        os.kill(pid, signal.SIGKILL)


def zombie() -> None:
    """Goes on writing with what a dead attempt had, until it is told that the transaction is over."""
    sink, rows = pickle.loads((folder() / "zombie.pickle").read_bytes())
    written, until, end = 0, time.monotonic() + DEADLINE_S, "nobody told it"
    try:
        with sink._target.client.join(sink._reservation, heartbeat=True) as writer:
            while time.monotonic() < until:
                for batch in rows:
                    written += writer.write_batch(sink._target.stream, batch)
                writer.flush()
                (folder() / "zombie-writes").touch()
                time.sleep(0.05)
    except AnabranchError as error:
        end = type(error).__name__
    result = folder() / "zombie.tmp"
    result.write_text(json.dumps({"end": end, "written": written}))
    result.rename(folder() / "zombie.json")


if __name__ == "__main__":
    zombie()
