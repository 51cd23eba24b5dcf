"""Rows of lists: the fields of a stream, transaction, group or processor, for `--json`, tables and pages.

A row is a dictionary of JSON values. `--json` prints all of it; a table or a page shows a part.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from anabranch.core.hybrid_time import to_text
from anabranch.presentation.words import span_text, time_text

if TYPE_CHECKING:
    from anabranch.reading.group_lag import ConsumerGroup, InputLag, Lag
    from anabranch.schemas.records import ProcessorInfo
    from anabranch.types import CommandsInfo, OpenTransaction, StreamDescription, TransactionInfo


def stream_row(found: StreamDescription) -> dict[str, Any]:
    """A stream."""
    return {
        "stream": found.stream,
        "stream_epoch": found.stream_epoch,
        "reference_epoch": found.reference_epoch,
        "segments": [asdict(segment) for segment in found.segments],
        "partitions": found.partitions,
        "settings": dict(found.settings),
        "rejected": dict(found.rejected),
        "journal": {str(partition): end for partition, end in sorted(found.journal.items())},
        "low_water": {str(partition): at for partition, at in sorted(found.low_water.items())},
        "uncommitted_bytes": found.uncommitted_bytes,
        "state": found.state,
        "trouble": found.trouble,
        "foreign": found.foreign,
    }


def transaction_row(info: TransactionInfo) -> dict[str, Any]:
    """A transaction."""
    return {
        "txn_id": info.txn_id.hex(),
        "state": info.state,
        "scope": info.scope,
        "owner": info.owner,
        "name": info.name,
        "commit_timestamp": info.commit_timestamp,
        "committed_at": to_text(info.commit_timestamp) if info.commit_timestamp else None,
        "counts": {
            "committed": info.counts.committed,
            "rejected": info.counts.rejected,
            "left_out": info.counts.left_out,
        },
        "reason": info.reason,
        "begun_at": time_text(info.begun_ms),
        "finished_at": time_text(info.finished_ms),
        "keepalive_s": info.keepalive,
        "streams": list(info.streams),
        "prepared_at": time_text(info.prepared_ms),
        "prepared_by": info.prepared_by.hex() or None,
        "writers": [
            {"writer": _writer_text(w.writer), "events": w.events, "finished": w.finished}
            for w in info.writers
        ],
    }


def _writer_text(writer: int) -> str:
    return f"{writer & 0xFFFFFFFFFFFFFFFF:016x}"


def open_transaction_row(found: OpenTransaction) -> dict[str, Any]:
    """An open transaction, with the resources that it has reserved, and the reason why it waits."""
    row = transaction_row(found.info) | {
        "uncommitted_bytes": found.uncommitted_bytes,
        "age_s": found.age,
        "silent_s": found.silent,
        "keepalive_left_s": found.left,
        "writer_count": found.writer_count,
        "locks": found.locks,
        "locks_frozen": found.frozen,
        "journal_bytes": dict(found.journals),
        "waits_for": None if found.waits is None else found.waits.text,
        "waits_since": None
        if found.waits is None or found.waits.age_ms < 0
        else span_text(found.waits.age_ms / 1000),
        "ended_by": found.ends,
    }
    if found.writers:
        row["writers"] = [
            {
                "writer": _writer_text(w.writer),
                "label": w.label,
                "lane": w.lane,
                "events": w.events,
                "finished": w.finished,
            }
            for w in found.writers
        ]
    if found.staged_merges:
        row["merge"] = [
            {
                "stream": c.stream,
                "partition": c.partition,
                "events_done": c.staged,
                "events": c.events,
                "chunks_done": c.chunks if c.done else c.chunks * c.staged // max(1, c.events),
                "chunks": c.chunks,
            }
            for c in found.staged_merges
        ]
    return row


def commands_row(found: CommandsInfo) -> dict[str, Any]:
    """A control partition: how far its leader has read the commands, and which commands are quarantined."""
    return asdict(found)


def group_row(group: ConsumerGroup) -> dict[str, Any]:
    """A consumer group, with its position in each stream."""
    return {
        "group": group.name,
        "state": group.state,
        "members": list(group.members),
        "streams": [
            {
                "stream": one.stream,
                "reads": "transactions" if one.by_transactions else "events",
                "offsets": {}
                if one.by_transactions
                else {str(p): o for p, o in one.offsets.items()},
                **lag_fields(None if one.trouble else one.lag),
                "trouble": one.trouble,
            }
            for one in group.streams
        ],
    }


def processor_row(info: ProcessorInfo, lags: Sequence[InputLag]) -> dict[str, Any]:
    """A processor, with the lag of each of its inputs."""
    commits = [task.commit_timestamp for task in info.tasks if task.commit_timestamp]
    return {
        "processor": info.processor,
        "tasks": info.task_count,
        "inputs": [
            {
                "stream": lag.stream,
                **lag_fields(None if lag.trouble else lag.most),
                "trouble": lag.trouble,
            }
            for lag in lags
        ],
        "held": sum(1 for task in info.tasks if task.holder),
        "holders": sorted({task.holder for task in info.tasks if task.holder}),
        "oldest_last_commit": to_text(min(commits)) if commits else None,
    }


def lag_fields(lag: Lag | None) -> dict[str, Any]:
    """The fields of a lag; None if it is unknown."""
    if lag is None:
        return {"events_behind": None, "seconds_behind": None, "exact": None}
    seconds = round(lag.age_s(time.time()), 3)
    return {"events_behind": lag.events, "seconds_behind": seconds, "exact": lag.exact}


def lag_text(row: Mapping[str, Any]) -> str:
    """The number of events of a lag: ``~`` marks an estimate, ``?`` an unknown number."""
    if row["events_behind"] is None:
        return "?"
    return f"{'' if row['exact'] else '~'}{row['events_behind']:,}"


def bytes_fields(**data: bytes | None) -> dict[str, Any]:
    """Bytes as JSON: under their name as text, or under ``name_base64`` if they are not UTF-8."""
    row: dict[str, Any] = {}
    for name, some in data.items():
        try:
            row[name] = None if some is None else some.decode("utf-8")
        except UnicodeDecodeError:
            row[f"{name}_base64"] = base64.b64encode(some or b"").decode("ascii")
    return row
