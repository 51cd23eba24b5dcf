"""The time to lead with many finished transactions and their names: from RocksDB, and from the log alone.

A controller commits one named one-shot and ends. Its two rows are written to the status log a million times, under
other ids and names (``--quick``: 100,000). A controller without a folder leads from the log then, and controllers
with that folder from RocksDB, the median of five. Seconds from the start of the process, less those of controllers
with an empty log, likewise; a former one has just ended.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anabranch
from anabranch.batches.records import Record, decode_records, encode_batch
from anabranch.core import rows as k
from anabranch.infra.broker import EmbeddedBroker
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicPartition
from anabranch.protocol.ids import control_partition_of, make_txn_id
from anabranch.protocol.schemas.codec import encode
from anabranch.protocol.schemas.records import NameRow, TxnRow
from anabranch.topics.names import DEFAULT_PREFIX, status_topic

TRANSACTIONS, QUICK_TRANSACTIONS = 1_000_000, 100_000
BATCH, STARTS = 1_000, 5
GOAL_TABLE_S, GOAL_LOG_S = 2.0, 30.0
STATUS = TopicPartition(status_topic(DEFAULT_PREFIX), 0)


def run(*, quick: bool = False) -> dict[str, Any]:
    """Seconds of each."""
    count = QUICK_TRANSACTIONS if quick else TRANSACTIONS
    with EmbeddedBroker() as broker, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            _leads(broker.bootstrap, folder / "first"),
            anabranch.connect(broker.bootstrap) as client,
        ):
            client.create_stream("bench/s")
            with client.begin("bench", "named") as txn:
                txn.write("bench/s", b"v")
                txn.commit()
        empty_s = _median(broker.bootstrap, folder / "first")
        _write(broker.bootstrap, count)
        with _leads(broker.bootstrap, folder / "second") as log_s:
            pass
        table_s = _median(broker.bootstrap, folder / "second")
    found = {"from_rocksdb_s": table_s - empty_s, "from_log_s": log_s - empty_s}
    return {"transactions": count, "names": count, "empty_s": empty_s, **found}


def _median(bootstrap: str, folder: Path) -> float:
    """The median of several starts with a folder that is there."""
    took = []
    for _ in range(STARTS):
        with _leads(bootstrap, folder) as seconds:
            took.append(seconds)
    return statistics.median(took)


@contextmanager
def _leads(bootstrap: str, folder: Path) -> Iterator[float]:
    """A controller that leads during the block; the seconds until it did."""
    status = folder / "status.json"
    folder.mkdir(exist_ok=True)
    status.unlink(missing_ok=True)
    command = [sys.executable, "-m", "anabranch.cli", "controller", "--bootstrap", bootstrap]
    command += ["--data-dir", str(folder / "data"), "--status-file", str(status)]
    began = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not (status.exists() and json.loads(status.read_text() or "{}").get("leading")):
            if process.poll() is not None or time.monotonic() > began + 300:
                raise RuntimeError("the controller does not lead")
            time.sleep(0.02)
        yield time.monotonic() - began
    finally:
        process.terminate()
        process.wait(60)


def _write(bootstrap: str, count: int) -> None:
    """The rows of the one transaction again, under other ids."""
    with closing(KafkaLog(bootstrap)) as log, closing(log.producer("bench-rows", timeout=60)) as to:
        model = _model(log)
        partition, made_ms = control_partition_of(model.txn_id), model.begun_ms
        for first in range(0, count, BATCH):
            records = []
            for number in range(first, first + BATCH):
                txn_id, name = make_txn_id(partition, made_ms, number), f"name-{number}"
                row = model._replace(txn_id=txn_id, name=name)
                records += [
                    (k.txn_key(txn_id), encode(row)),
                    (k.name_key(row.scope, name), encode(NameRow(txn_id))),
                ]
            batch = encode_batch([Record(i, made_ms, *each) for i, each in enumerate(records)])
            to.append([(STATUS, batch)])
        to.commit()


def _model(log: KafkaLog) -> TxnRow:
    """The row of the committed transaction."""
    end = log.end_offsets([STATUS], committed=True)[STATUS]
    position = 0
    while position < end:
        found = log.fetch({STATUS: position}, max_wait=1, max_bytes=8 << 20, committed=True)
        for batch in found[STATUS].batches if STATUS in found else ():
            for record in decode_records(batch.data):
                row = k.read_row(record.key, record.value) if record.key and record.value else None
                if isinstance(row, TxnRow) and row.state == "COMMITTED":
                    return row
        position = found[STATUS].next_offset if STATUS in found else position
    raise RuntimeError("the status log has no committed transaction")


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    head = [
        "transactions",
        "names",
        "empty, s",
        "from RocksDB, s more",
        "goal",
        "from the log, s more",
        "goal",
    ]
    row = [
        f"{result['transactions']:,}",
        f"{result['names']:,}",
        f"{result['empty_s']:.1f}",
        f"{result['from_rocksdb_s']:.2f}",
        f"≤ {GOAL_TABLE_S:g}",
        f"{result['from_log_s']:.1f}",
        f"≤ {GOAL_LOG_S:g}",
    ]
    return head, [row]
