"""The commands `anabranch spark audit | export | compact | load` on millions of events, each a process of its own.

Two streams of one scope get 2.2M events (100 bytes, half of each value noise, 10,000 keys) in 220 transactions,
each over both, while the first is scaled 4, 6, 3, 5 segments with transactions open across each scaling; an open
transaction keeps the journals, so that the audit has all evidence. Seconds are of the whole command, with the
JVM's start, at local[2] with Spark's default heap of 1 GB; memory is the processes' peak (RSS), the JVM and the
Python workers apart. Everything runs on the same two cores.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pyarrow as pa
from pyarrow import csv, parquet

import anabranch
from bench.setting import Place, begin_and_touch, noise_values

SCOPE = "bench"
EVENTS, OTHER = f"{SCOPE}/events", f"{SCOPE}/other"
KEYS = 10_000
A_TRANSACTION, OF_THEM_OTHER = 10_000, 1_000
SCALINGS = (6, 3, 5)
_LOOK_S = 0.1


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Seconds, events/s and memory of each command."""
    transactions = 20 if quick else 220
    with (
        anabranch.connect(place.bootstrap, timeout=120) as client,
        tempfile.TemporaryDirectory(prefix="anabranch-bench-") as name,
    ):
        folder = Path(name)
        started = time.perf_counter()
        events = _write(client, transactions)
        result: dict[str, Any] = {
            "events": events,
            "transactions": transactions,
            "written_s": round(time.perf_counter() - started, 1),
        }
        both = ["--stream", EVENTS, "--stream", OTHER]
        result["audit"] = _measured(place, "audit", both)
        export = ["--to", str(folder / "out"), "--max-events", "500000"]
        result["export"] = _measured(place, "export", [*both, *export])
        compact = ["--stream", EVENTS, "--to", str(folder / "latest")]
        result["compact"] = _measured(place, "compact", compact)
        into = ["--stream", EVENTS, "--into", f"{SCOPE}/latest", "--segments", "4"]
        result["compact into a stream"] = _measured(place, "compact", into)
        for form, path in _files(folder, events):
            to = ["--stream", f"{SCOPE}/{form}", "--segments", "4", "--key", "key"]
            result[f"load {form}"] = _measured(place, "load", [path, "--format", form, *to])
    for found in result.values():
        if isinstance(found, dict):
            # compact reads one of the streams
            found["events"] = found["said"].get("events", events)
            found["events_per_s"] = round(found["events"] / found["seconds"])
    return result


def _rows(count: int, rng: random.Random, values: list[bytes]) -> pa.RecordBatch:
    columns = {
        "key": [b"key-%d" % rng.randrange(KEYS) for _ in range(count)],
        "value": [rng.choice(values) for _ in range(count)],
    }
    return pa.record_batch(columns)


def _write(client: anabranch.Client, transactions: int) -> int:
    """Write the streams; returns the number of events."""
    rng, values = random.Random(7), noise_values(100)
    client.create_stream(EVENTS, segments=4)
    client.create_stream(OTHER, segments=2)
    for stream in (EVENTS, OTHER):
        begin_and_touch(client, stream)  # open while this runs
    events = 0
    for stage in range(len(SCALINGS) + 1):
        early = client.begin(SCOPE)
        count = transactions // (len(SCALINGS) + 1)
        events += _fill(early, rng, values)
        for _ in range(count - 1):
            with client.begin(SCOPE) as txn:
                events += _fill(txn, rng, values)
                txn.commit()
        if stage < len(SCALINGS):
            client.scale(EVENTS, segments=SCALINGS[stage])
        early.commit()  # after the scaling: it rolls
    return events


def _fill(txn: anabranch.Transaction, rng: random.Random, values: list[bytes]) -> int:
    for stream, count in ((EVENTS, A_TRANSACTION - OF_THEM_OTHER), (OTHER, OF_THEM_OTHER)):
        txn.write_batch(stream, _rows(count, rng, values))
    txn.flush()
    return A_TRANSACTION


def _files(folder: Path, rows: int) -> list[tuple[str, str]]:
    """Format and path of files with so many rows of five columns."""
    rng = random.Random(8)
    table = pa.table(
        {
            "key": [f"key-{rng.randrange(KEYS)}" for _ in range(rows)],
            "number": range(rows),
            "share": [rng.random() for _ in range(rows)],
            "text": ["x" * rng.randrange(40) for _ in range(rows)],
            "carrier": [rng.choice(("UA", "AA", "DL", "B6")) for _ in range(rows)],
        }
    )
    paths = [(form, str(folder / f"rows.{form}")) for form in ("csv", "parquet")]
    csv.write_csv(table, paths[0][1])
    parquet.write_table(table, paths[1][1], row_group_size=250_000)
    return paths


def _measured(place: Place, command: str, arguments: list[str]) -> dict[str, Any]:
    """Seconds, peak memory, and output of a command."""
    line = [sys.executable, "-m", "anabranch.cli", "spark", command, *arguments, "--json"]
    line += ["--master", "local[2]", "--bootstrap", place.bootstrap]
    most = {"jvm": 0, "python": 0}
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=output)
        while process.poll() is None:
            for kind, used in _memory(process.pid).items():
                most[kind] = max(most[kind], used)
            time.sleep(_LOOK_S)
        seconds = time.perf_counter() - started
        output.seek(0)
        said = output.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(line)} ended with {process.returncode}: {said[-2000:]}")
    found = json.loads(said)
    if isinstance(found, dict):
        found.pop("checks", None)
    most_mb = {kind: round(used / 1e6) for kind, used in most.items()}
    print(f"{command}: {seconds:.1f} s, {most_mb} MB", file=sys.stderr, flush=True)
    return {"seconds": round(seconds, 1), "most_mb": most_mb, "said": found}


def _memory(pid: int) -> dict[str, int]:
    """Bytes of resident memory of a command's processes now."""
    used = {"jvm": 0, "python": 0}
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            kind = "jvm" if process.name() == "java" else "python"
            used[kind] += process.memory_info().rss
    except psutil.Error:
        pass
    return used


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    head = ["command", "events", "s", "events/s", "JVM MB", "Python MB"]
    rows = [
        [
            name,
            f"{found['events']:,}",
            f"{found['seconds']:.1f}",
            f"{found['events_per_s']:,}",
            str(found["most_mb"]["jvm"]),
            str(found["most_mb"]["python"]),
        ]
        for name, found in result.items()
        if isinstance(found, dict)
    ]
    return head, rows
