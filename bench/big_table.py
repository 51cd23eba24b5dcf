"""Four workers of a processor over one big table: memory, disk, and the time until they have it (``--rows``).

Each worker, a process with four of 16 tasks, keeps a replica of the whole table. Rows have a key of 16 bytes and a
value of 100, half of it noise. The workers start at the same time: with empty folders, from the topic; with
these folders again; after a compaction with empty folders, from the base. Then they handle events that read random
rows with locks. Memory is resident memory, with RocksDB's block cache; that of workers without a table is given,
too. Disk is the worker's folder. Both are given for each worker.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import random
import shutil
import tempfile
import time
import uuid
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]
import pyarrow as pa

import anabranch
from anabranch.processing.worker import AllTasks, Worker
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from bench.setting import Place, noise_values

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

ROWS = 2_000_000
QUICK_ROWS = 100_000
WORKERS = 4
TASKS = 16
READS = 100  # of an event
EVENTS = 4  # of a task
_AT_ONCE = 50_000  # rows
_LONGEST_S = 1800.0
_STEPS = (("writing the rows", "load_s"), ("the compaction", "compact_s"))


def run(place: Place, *, quick: bool = False, rows: int = ROWS) -> dict[str, Any]:
    """Seconds, and bytes of each worker, by kind of start."""
    rows = QUICK_ROWS if quick else rows
    table = f"bench/t{uuid.uuid4().hex[:8]}"
    found: dict[str, Any] = {"rows": rows}
    with (
        anabranch.connect(place.bootstrap, lane=ADMIN_LANE, timeout=600) as client,
        tempfile.TemporaryDirectory(prefix="anabranch-bench-") as folder,
    ):
        client.feature_level(raise_to=LEVEL)
        client.create_table(table, WORKERS, {"table.history.ms": 0})
        began = time.monotonic()
        _load(client, table, rows)
        found["load_s"] = time.monotonic() - began
        source = place.new_stream(WORKERS)
        client.create_stream(out := f"bench/o{uuid.uuid4().hex[:8]}")
        at = Path(folder)
        started = _Started(place.bootstrap, client, source, out, rows)
        found["no table"] = started.measured(at / "none", None)
        found["from the topic"] = started.measured(at / "rows", table)
        found["with its folder"] = started.measured(at / "rows", table)
        shutil.rmtree(at / "rows")
        began = time.monotonic()
        client.compact_table(table, plain_readers_lose_history=True)
        found["compact_s"] = time.monotonic() - began
        found["from the base"] = started.measured(at / "rows", table)
    return found


def _load(client: anabranch.Client, table: str, rows: int) -> None:
    noise = noise_values(100)
    for first in range(0, rows, 20 * _AT_ONCE):
        with client.begin("bench") as txn:
            for at in range(first, min(rows, first + 20 * _AT_ONCE), _AT_ONCE):
                some = range(at, min(rows, at + _AT_ONCE))
                values = [noise[number % len(noise)] for number in some]
                txn.write_batch(
                    table, pa.table({"key": [b"%016d" % n for n in some], "value": values})
                )
            txn.commit(timeout=600)


@dataclass(frozen=True)
class _Program:
    """What a worker runs. ``rows``: of the table."""

    bootstrap: str
    name: str
    source: str
    out: str
    table: str | None
    rows: int


class _Started:
    """Starts four workers at the same time."""

    def __init__(
        self, bootstrap: str, client: anabranch.Client, source: str, out: str, rows: int
    ) -> None:
        self._client = client
        self._program = _Program(bootstrap, "", source, out, None, rows)

    def measured(self, folder: Path, table: str | None) -> dict[str, Any]:
        """Seconds until the last worker has its tasks, and memory and disk of each worker."""
        context = multiprocessing.get_context("spawn")
        program = replace(self._program, name=f"bench/p{uuid.uuid4().hex[:6]}", table=table)
        ends, processes = list[Any](), list[Any]()
        try:
            for number in range(WORKERS):
                end, other = context.Pipe()
                arguments = (program, folder / str(number), number, other)
                process = context.Process(target=_work, args=arguments)
                process.start()
                ends.append(end)
                processes.append(process)
            for end in ends:  # they have imported their code
                _answer(end)
            began = time.monotonic()
            for end in ends:
                end.send("start")
            loaded = max(_answer(end) for end in ends) - began
            with self._client.begin("bench") as txn:
                for number in range(EVENTS * TASKS):
                    txn.write(program.source, b"", key=b"%d" % number)
                txn.commit()
            began = time.monotonic()
            reads = max(_answer(end) for end in ends) - began
            memory = [psutil.Process(one.pid).memory_info().rss for one in processes]
        finally:
            for process in processes:
                process.terminate()
                process.join()
        disk = [_bytes(folder / str(number)) for number in range(WORKERS)]
        return {"start_s": loaded, "reads_s": reads, "memory": memory, "disk": disk}


def _answer(end: Connection) -> float:
    if not end.poll(_LONGEST_S):
        raise RuntimeError("a worker does not answer")
    found: float = end.recv()
    return found


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _work(program: _Program, folder: Path, number: int, end: Connection) -> None:
    """The process of a worker."""
    logging.getLogger("anabranch").setLevel(logging.ERROR)
    app = anabranch.Processor(program.name, tasks=TASKS, start="end")
    shared = None if program.table is None else app.table(program.table)
    given, outputs = app.input(program.source), app.output(program.out, value=json)
    chance = random.Random(number)

    @app.on(given)
    def read(event: anabranch.Event) -> None:
        keys = (b"%016d" % chance.randrange(program.rows) for _ in range(READS))
        found = 0 if shared is None else sum(shared.get(key) is not None for key in keys)
        outputs.write(found, key=event.key)

    own = AllTasks(range(number, TASKS, WORKERS))
    with anabranch.connect(program.bootstrap, timeout=600) as client:
        end.send(0.0)
        end.recv()
        with closing(Worker(app, client, folder, tasks=own)) as worker:
            while not worker.metrics.total("processor_tasks"):
                worker.step()
            end.send(time.monotonic())
            while not worker.metrics.total("processor_events_in"):
                worker.step()
            end.send(time.monotonic())
            worker.run()


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows for people."""
    rows = []
    for kind, found in result.items():
        if isinstance(found, dict):
            memory, disk = (
                ", ".join(f"{one / (1 << 20):,.0f}" for one in found[what])
                for what in ("memory", "disk")
            )
            rows.append([kind, f"{found['start_s']:.1f} s", memory, disk])
    rows += [[what, f"{result[took]:.1f} s", "", ""] for what, took in _STEPS]
    return [f"four workers, {result['rows']:,} rows", "start", "memory, MiB", "disk, MiB"], rows
