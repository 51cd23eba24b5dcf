"""A control partition's RocksDB folder as a checkpoint of its logs: kept, or thrown away when it can't be trusted.

It is thrown away when it is of another cluster, of topics made anew or of another version, when it is ahead of the
log, and when it is older than the status topic keeps tombstones: a deletion that compaction has already dropped
would be missed.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from anabranch.core import rows as k
from anabranch.core.journal_runs import FORM
from anabranch.ports import Clock, Log, LogUnavailable, Table, TopicPartition
from anabranch.processors.leadership import STATUS_POSITION
from anabranch.processors.rocks_table import RocksTable
from anabranch.topics.names import status_topic

log = logging.getLogger("anabranch.controller")

ORIGIN = k.META + b"origin"
WRITTEN = k.META + b"written_ms"
DEFAULT_TOMBSTONE_MS = 86_400_000
SAFETY = 2  # thrown away at half the tombstone retention


def open_checkpoint(
    folder: Path, source: Log, clock: Clock, prefix: str, control_partition: int
) -> Table:
    """The table to fold into: the folder's if it can be trusted, else an empty one in its place.

    Raises: TableError; LogError, and then it may be called again.
    """
    topic = status_topic(prefix)
    info = source.describe_topics([topic]).get(topic)
    if info is None:
        raise LogUnavailable(f"the broker asked does not know {topic} (yet)")
    origin = f"{FORM}/{info.topic_id}/{control_partition}".encode()
    table = RocksTable(folder)
    try:
        why = _distrust(
            table, source, TopicPartition(topic, control_partition), origin, clock, info.config
        )
    except BaseException:
        table.close()
        raise
    if why:
        log.warning("checkpoint %s is thrown away: %s", folder, why)
        table.close()
        shutil.rmtree(folder)
        table = RocksTable(folder)
    if table.get(ORIGIN) is None:
        table.write({ORIGIN: origin})
        # An empty table misses nothing; else only a fold makes it young.
        touch_checkpoint(table, clock)
    return table


def touch_checkpoint(table: Table, clock: Clock) -> None:
    """Note that the table is abreast of its log now."""
    table.write({WRITTEN: int(clock.wall() * 1000).to_bytes(8, "big")})


def _distrust(
    table: Table,
    source: Log,
    status: TopicPartition,
    origin: bytes,
    clock: Clock,
    config: Mapping[str, str],
) -> str:
    known = table.get(ORIGIN)
    if known is None:
        return ""  # new and empty
    if known != origin:
        return "it is of another cluster or status topic, or of another version"
    stored = table.get(STATUS_POSITION)
    if (
        stored
        and int.from_bytes(stored, "big") > source.end_offsets([status], committed=False)[status]
    ):
        return "it is ahead of the status log"
    keep_ms = int(config.get("delete.retention.ms", DEFAULT_TOMBSTONE_MS)) // SAFETY
    written = table.get(WRITTEN)
    age_ms = int(clock.wall() * 1000) - int.from_bytes(written or b"", "big")
    if age_ms > keep_ms:
        return f"it is {age_ms / 3_600_000:.1f} hours old, tombstones are sure for {keep_ms / 3_600_000:.1f}"
    return ""
