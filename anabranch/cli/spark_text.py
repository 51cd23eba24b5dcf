"""What the commands on Spark say at their end, and meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from anabranch.cli.output import count_of, print_json, print_line
from anabranch.core import hybrid_time

if TYPE_CHECKING:
    from anabranch.spark.pipelines.compact import Compacted
    from anabranch.spark.pipelines.export import Batch, Exported
    from anabranch.spark.pipelines.load import Loaded


def batch_lines(*, quiet: bool) -> Callable[[Batch], None] | None:
    """A line on standard error for each micro-batch."""
    if quiet:
        return None

    def say(batch: Batch) -> None:
        sys.stderr.write(f"micro-batch {batch.number}: {batch.rows:,} events\n")

    return say


def show_loaded(found: Loaded, *, as_json: bool) -> None:
    """Of `anabranch spark load`."""
    document = {
        "stream": found.stream,
        "txn_id": _hex(found.txn_id),
        "name": found.name,
        "already_committed": found.already_committed,
        "commit_timestamp": found.commit_timestamp,
        "rows": found.rows,
    }
    if found.already_committed:
        line = (
            f"{found.name} was loaded before: transaction {_hex(found.txn_id)}, "
            f"{found.rows:,} events; nothing was written now"
        )
    elif found.txn_id is None:
        line = f"no row: nothing was written to {found.stream}"
    else:
        line = (
            f"{count_of(found.rows, 'row')} in {found.stream}, all at once: "
            f"transaction {_hex(found.txn_id)}"
        )
    _show(document, line, as_json=as_json)


def show_exported(found: Exported, *, as_json: bool) -> None:
    """Of `anabranch spark export`."""
    document = {
        "to": found.to,
        "checkpoint": found.checkpoint,
        "query_id": found.query_id,
        "batches": found.batches,
        "rows": found.rows,
    }
    line = f"nothing new for {found.to}"
    if found.batches:
        line = (
            f"{count_of(found.rows, 'event')} to {found.to} "
            f"in {count_of(found.batches, 'micro-batch')}"
        )
    _show(document, line, as_json=as_json)


def show_compacted(found: Compacted, *, as_json: bool) -> None:
    """Of `anabranch spark compact`."""
    document = {
        "stream": found.stream,
        "at": found.at,
        "to": found.to,
        "txn_id": _hex(found.txn_id),
        "already_committed": found.already_committed,
        "events": found.events,
        "keyless": found.keyless,
        "keys": found.keys,
    }
    if found.already_committed:
        line = (
            f"committed before: transaction {_hex(found.txn_id)}, "
            f"{found.keys:,} events; nothing was written now"
        )
    else:
        keyless = f", {found.keyless:,} without a key left out" if found.keyless else ""
        line = (
            f"{count_of(found.keys, 'key')} of {count_of(found.events, 'event')} of "
            f"{found.stream} as of {hybrid_time.to_text(found.at)} in {found.to}{keyless}"
        )
    _show(document, line, as_json=as_json)


def _show(document: dict[str, Any], line: str, *, as_json: bool) -> None:
    if as_json:
        print_json(document)
    else:
        print_line(line)


def _hex(txn_id: bytes | None) -> str | None:
    return None if txn_id is None else txn_id.hex()
