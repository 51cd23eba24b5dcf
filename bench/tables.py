"""A replica from nothing, its reads against bare rocksdict, and a base (``--quick``: a tenth of the rows).

1,000,000 rows of a key of 16 bytes and a value of 100 that does not compress, written by one transaction to four
segments. Loading is timed from opening the replica to its first snapshot. Reads are of random keys, and of 100 rows
from a random key on, in one thread at that snapshot; bare: a get, and an iterator's items, of an Rdict with the
same rows under their keys, flushed like the replica's folder. In turn, in one run, medians.

A base: each of 200,000 such rows is written 11 times, then the table compacted. Bytes are those of batches that a
consumer of the table's topic and of its companion is given; a live row has its key's and value's.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rocksdict import Options, Rdict, WriteBatch

import anabranch
from anabranch.ports import TopicPartition
from anabranch.protocol.legal_names import ADMIN_LANE, base_stream
from anabranch.tables.replica import ReadReplica, ReplicaSettings
from anabranch.topics.names import stream_topic
from bench.setting import Place, noise_values

ROWS, QUICK_ROWS = 1_000_000, 100_000
ROUNDS, READS = 20, 500
GOAL_LOAD, GOAL_READ = 300_000, 2.0
STREAM = "bench/table"
TABLE = "bench/compacted"
BASE_ROWS, WRITES = 200_000, 11
GOAL_BYTES, GOAL_QUICKER = 2.2, 3.0
_FETCH = 8 << 20


class _Known:
    """`SafeTimes` of the one transaction that there is."""

    def __init__(self, timestamp: int) -> None:
        self.last_timestamp = timestamp

    def safe(self, tables: Sequence[str], at: int, _: float) -> tuple[int, Mapping[str, int]]:
        return max(at, self.last_timestamp), dict.fromkeys(tables, self.last_timestamp)

    def base(self, _table: str, _deadline: float) -> None:
        return None

    def oldest_snapshot(self, _table: str, _deadline: float) -> int:
        return 0


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Rates of loading and times of reads."""
    rows = QUICK_ROWS if quick else ROWS
    keys = [b"%016d" % i for i in np.random.default_rng(1).permutation(rows)]
    noise = noise_values(100)
    values = [noise[i % len(noise)] for i in range(rows)]
    with anabranch.connect(place.bootstrap) as client, tempfile.TemporaryDirectory() as folder:
        client.create_stream(STREAM, 4)
        with client.begin("bench") as txn:
            for at in range(0, rows, 50_000):
                columns = {"key": keys[at : at + 50_000], "value": values[at : at + 50_000]}
                txn.write_batch(STREAM, pa.table(columns))
            timestamp = txn.commit().commit_timestamp or 0
        bare = _bare(Path(folder, "bare"), keys, values)
        began, cpu = time.perf_counter(), time.process_time()
        ports = client._reading.readers().ports
        settings = ReplicaSettings(tables=[STREAM], cluster_id="bench", folder=Path(folder, "ours"))
        with (
            ReadReplica(ports, _Known(timestamp), settings) as replica,
            replica.snapshot(timeout=600) as snapshot,
        ):
            load_s, load_cpu_s = time.perf_counter() - began, time.process_time() - cpu
            reads: dict[str, tuple[Callable[[bytes], Any], Callable[[bytes], Any]]] = {
                "get": (lambda k: snapshot.get(STREAM, k), bare.get),
                "scan": (
                    lambda k: list(snapshot.scan(STREAM, k, limit=100)),
                    lambda k: list(islice(bare.items(from_key=k), 100)),
                ),
            }
            took = {name: _in_turn(keys, *both) for name, both in reads.items()}
    result: dict[str, Any] = {
        "rows": rows,
        "load_s": load_s,
        "load_cpu_s": load_cpu_s,
        "load_rows_per_s": round(rows / load_s),
        "goal_rows_per_s": GOAL_LOAD,
        "goal_of_bare": GOAL_READ,
    }
    for name, (ours, theirs) in took.items():
        result |= {f"{name}_us": ours, f"{name}_bare_us": theirs, f"{name}_of_bare": ours / theirs}
    return result | _compacted(place, BASE_ROWS // 10 if quick else BASE_ROWS)


def _compacted(place: Place, rows: int) -> dict[str, Any]:
    """What a base saves."""
    noise = noise_values(100)
    keys = [b"%016d" % i for i in range(rows)]
    with anabranch.connect(place.bootstrap, lane=ADMIN_LANE, timeout=120) as client:
        client.create_table(TABLE, 4, {"table.history.ms": 0})
        for n in range(WRITES):
            with client.begin("bench") as txn:
                for at in range(0, rows, 50_000):
                    some = keys[at : at + 50_000]
                    values = [noise[(i + n) % len(noise)] for i in range(len(some))]
                    txn.write_batch(TABLE, pa.table({"key": some, "value": values}))
                txn.commit()
        time.sleep(2)
        whole_s, whole = _loaded(client), _bytes(client, TABLE)
        began = time.perf_counter()
        client.compact_table(TABLE, plain_readers_lose_history=True)
        compact_s = time.perf_counter() - began
        base_s = _loaded(client)
        left = _bytes(client, TABLE) + _bytes(client, base_stream(TABLE))
    return {
        "base_rows": rows,
        "compact_s": compact_s,
        "whole_s": whole_s,
        "base_s": base_s,
        "base_quicker": whole_s / base_s,
        "whole_bytes_of_rows": whole / (rows * 116),
        "base_bytes_of_rows": left / (rows * 116),
        "goal_bytes_of_rows": GOAL_BYTES,
        "goal_base_quicker": GOAL_QUICKER,
    }


def _loaded(client: anabranch.Client) -> float:
    """Seconds until a new replica shows its first snapshot."""
    began = time.perf_counter()
    with client.replica(TABLE) as replica, replica.snapshot(timeout=600):
        return time.perf_counter() - began


def _bytes(client: anabranch.Client, stream: str) -> int:
    """Bytes of the batches that a topic still has."""
    topic = stream_topic(stream)
    places = [TopicPartition(topic, p) for p in range(client.describe(stream).partitions)]
    total = 0
    with closing(client.reader_ports().committed_log(60.0)) as source:
        deadline = time.monotonic() + 600
        at, ends = source.start_offsets(places, deadline), source.end_offsets(places, deadline)
        for one in places:
            while at[one] < ends[one]:
                found = source.fetch(one, at[one], deadline, _FETCH)
                if found is not None:
                    total += sum(len(batch.data) for batch in found.batches)
                    at[one] = found.next_offset
    return total


def _bare(folder: Path, keys: list[bytes], values: list[bytes]) -> Rdict:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    made = Rdict(str(folder), options)
    for at in range(0, len(keys), 50_000):
        batch = WriteBatch(raw_mode=True)
        for key, value in zip(keys[at : at + 50_000], values[at : at + 50_000], strict=True):
            batch.put(key, value)
        made.write(batch)
    made.flush()
    return made


def _in_turn(
    keys: list[bytes], ours: Callable[[bytes], Any], theirs: Callable[[bytes], Any]
) -> tuple[float, float]:
    """Microseconds a read, medians of rounds."""
    took: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        asked = random.sample(keys, READS)
        for read, times in zip((ours, theirs), took, strict=True):
            began = time.perf_counter()
            for key in asked:
                read(key)
            times.append((time.perf_counter() - began) / READS * 1e6)
    return statistics.median(took[0]), statistics.median(took[1])


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The figures as a table."""
    rows = [
        [
            f"load {result['rows']:,} rows",
            f"{result['load_rows_per_s']:,} rows/s",
            "",
            f"≥ {result['goal_rows_per_s']:,} rows/s",
        ]
    ]
    for name, title in (("get", "point read"), ("scan", "scan of 100")):
        rows.append(
            [
                title,
                f"{result[f'{name}_us']:.1f} µs",
                f"{result[f'{name}_of_bare']:.2f} ×",
                f"≤ {result['goal_of_bare']} ×",
            ]
        )
    rows += [
        [
            f"new replica of {result['base_rows']:,} rows, each written {WRITES} times",
            f"{result['base_s']:.2f} s from the base, {result['whole_s']:.2f} s from all",
            f"{result['base_quicker']:.1f} × as quick",
            f"≥ {result['goal_base_quicker']} ×",
        ],
        [
            "bytes in topics for each of live rows",
            f"{result['base_bytes_of_rows']:.2f} with the base, {result['whole_bytes_of_rows']:.2f} before",
            f"made in {result['compact_s']:.2f} s",
            f"≤ {result['goal_bytes_of_rows']}",
        ],
    ]
    return ["", "replica", "of bare rocksdict", "goal"], rows
