"""Files and transactions that pipelines read."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import anabranch

CSV = 'id,name,at\n1,"an ""apple"", red",2013-01-01T05:00:00Z\n2,,2013-01-01T06:00:00Z\n'
NOON_MS = 1_357_041_600_000


def commit(client: anabranch.Client, stream: str, *events: tuple[str | None, str | None]) -> int:
    """A transaction of (key, value); its commit timestamp."""
    with client.begin(stream.partition("/")[0]) as txn:
        for key, value in events:
            txn.write(
                stream,
                None if value is None else value.encode(),
                None if key is None else key.encode(),
                timestamp=NOON_MS,
            )
        return txn.commit().commit_timestamp


def files(folder: Path, form: str) -> str:
    """The rows 1 and 2 as a file of this format."""
    path = folder / f"rows.{form}"
    if form == "csv":
        path.write_text(CSV)
    elif form == "json":
        path.write_text('{"id": 1, "name": "an \\"apple\\", red"}\n{"id": 2}\n')
    elif form == "text":
        path.write_text("one\ntwo\n")
    else:
        table = pa.table({"id": [1, 2], "name": ['an "apple", red', None], "at": [NOON_MS] * 2})
        pq.write_table(table, path)
    return str(path)
