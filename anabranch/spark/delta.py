"""Writing micro-batches into a Delta table, each exactly once, without Delta's jars.

Spark's executors write the batch's Parquet files into the table's folder. Then one commit of the table's log adds
them, and records the query and the batch number (Delta's transaction identifiers); a number that the log has is
skipped. An interrupted batch leaves files that the log does not name; a vacuum removes them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from anabranch.errors import InvariantViolation, UnsupportedSetting
from anabranch.extras import need
from anabranch.spark.jobs import OWNER, another_export

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from deltalake.transaction import AddAction
    from pyspark.sql import DataFrame

_QUERY_ID = "sql.streaming.queryId"
_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class DeltaFolder:
    """A Delta table in a folder, for ``foreachBatch(DeltaFolder(...).add)``.

    Raises:
        NotInstalled: the package ``deltalake`` is missing.
        UnsupportedSetting: the folder is not in this machine's file system.
    """

    to: str
    partition_by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        need("deltalake")  # before anything runs
        if urlsplit(self.to).scheme not in ("", "file"):
            raise UnsupportedSetting(
                f"{self.to}: Delta tables go to folders of this machine, so far"
            )

    @property
    def folder(self) -> Path:
        return Path(urlsplit(self.to).path)

    def add(self, frame: DataFrame, number: int) -> None:
        """Add micro-batch ``number`` of the running query, unless the table has it."""
        from deltalake import CommitProperties, Transaction

        session = frame.sparkSession
        query = session.sparkContext.getLocalProperty(_QUERY_ID)
        if query is None:
            raise InvariantViolation("a micro-batch does not know its query")
        table = self._table(frame)
        if not (self.folder / f"{OWNER}{query}").exists():
            raise another_export(self.to)
        known = table.transaction_version(query)
        if known is not None and known >= number:
            return
        part = self.folder / f"batch-{number}-{uuid.uuid4().hex}"
        frame.write.partitionBy(*self.partition_by).parquet(str(part))
        table.create_write_transaction(
            list(self._added(part)),
            mode="append",
            schema=table.schema(),
            partition_by=list(self.partition_by),
            commit_properties=CommitProperties(app_transactions=[Transaction(query, number)]),
        )

    def _table(self, frame: DataFrame) -> DeltaTable:
        """The table, created if it does not exist."""
        from deltalake import DeltaTable, Schema

        from anabranch.spark.api import arrow_schema

        # Parquet files don't record that a column can't be null.
        schema = Schema.from_arrow(_nullable(arrow_schema(frame.schema)))
        return DeltaTable.create(
            self.folder, schema, mode="ignore", partition_by=list(self.partition_by)
        )

    def _added(self, part: Path) -> Iterator[AddAction]:
        """The files of a batch, as the log names them."""
        import pyarrow.parquet as pq
        from deltalake.transaction import AddAction

        for path in sorted(part.rglob("part-*.parquet")):
            rows = pq.read_metadata(path).num_rows
            if not rows:
                continue
            stat = path.stat()
            yield AddAction(
                path=str(path.relative_to(self.folder)),
                size=stat.st_size,
                partition_values=dict(map(_partition, path.relative_to(part).parts[:-1])),
                modification_time=stat.st_mtime_ns // 1_000_000,
                data_change=True,
                stats=json.dumps({"numRecords": rows}),
            )


def _partition(folder: str) -> tuple[str, str | None]:
    name, _, value = folder.partition("=")
    return unquote(name), None if value == _NULL else unquote(value)


def _nullable(schema: Any) -> Any:
    import pyarrow as pa

    return pa.schema([field.with_nullable(True) for field in schema])
