"""`anabranch system`: what the cluster knows of its transactions, locks, commits, tables and versions, as rows."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

from anabranch.cli import output
from anabranch.cli.options import App, ClusterOptions, Limit, OnlyScope, argument, moment_of, option
from anabranch.cli.output import Column, Columns, Row
from anabranch.core.hybrid_time import to_text
from anabranch.core.ids import NO_TXN
from anabranch.presentation.rows import bytes_fields
from anabranch.presentation.words import bytes_text

app = App(
    no_args_is_help=True,
    help="Show system tables: transactions, locks, commits, tables, and a row's versions.",
)
# Moments are shown as the hybrid times that these columns have: each may be given back as a time.
_MOMENTS = {
    "committed_at": "commit_timestamp",
    "newest_at": "newest",
    "since": "mincsn",
    "until": "maxcsn",
}
_TEXTS = ("key", "value")  # other bytes are ids


def _digits(column: str) -> Column:
    """A column of hybrid times, which are no amounts: without commas."""
    return Column(column, lambda row: None if row[column] is None else str(row[column]))


def _ids(column: str) -> Column:
    """A column of transactions; one that this lane may not see is `another`."""
    hidden = NO_TXN.hex()
    return Column(
        column.replace("_", " "),
        lambda row: ["another" if one == hidden else one for one in row[column]],
    )


def _value_text(row: Row) -> str:
    encoded = row.get("value_base64")
    return bytes_text(row["value"].encode() if encoded is None else base64.b64decode(encoded))


# Columns for people; --json has all.
_COLUMNS: Mapping[str, Columns] = {
    "transactions": (
        "txn_id", "state", "scope", "owner", "name", "begun", "age", "rows", "streams", "reason"
    ),
    "locks": (
        "txn_id", "table", "points", "ranges", "frozen", "broken", _ids("waiting"), _ids("waits_for")
    ),
    "commits": ("committed_at", "txn_id", "rows", "streams"),
    "tables": (
        "table", "state", "segments", "newest_at", "history_ms", _digits("base"), "settings"
    ),
    "versions": (
        "since", "until", _digits("mincsn"), "mintid", "maxtid", Column("value", _value_text)
    ),
}  # fmt: skip


@app.command("transactions")
def transactions(options: ClusterOptions, scope: OnlyScope = None, limit: Limit = 100) -> None:
    """Transactions: open ones, the oldest first, then those that ended and are kept, the newest first."""
    with options.client() as client:
        found = client.system("transactions", scope, limit=limit)
    show("transactions", found, options)
    found.check()


@app.command("locks")
def locks(options: ClusterOptions, scope: OnlyScope = None, limit: Limit = 100) -> None:
    """Tables that open transactions read, and their locks there, the oldest one's first; and who waits for whom."""
    with options.client() as client:
        found = client.system("locks", scope, limit=limit)
    show("locks", found, options)
    found.check()


@app.command("commits")
def commits(
    options: ClusterOptions,
    of: Annotated[str, argument("SCOPE[/STREAM]", "The scope, or the stream.")],
    start: Annotated[
        str | None,
        option("--from TIME", "After a commit timestamp, or an ISO 8601 time with its zone."),
    ] = None,
    until: Annotated[str | None, option("--to TIME", "Up to such a time (default: now).")] = None,
    limit: Limit = 100,
) -> None:
    """Commits of a scope or a stream, the newest first: by which transaction, to which streams, how many rows."""
    begin, end = (
        None if text is None else moment_of(text, name)
        for name, text in (("--from", start), ("--to", until))
    )
    with options.client() as client:
        found = client.system("commits", of, start=begin, until=end, limit=limit)
    show("commits", found, options)


@app.command("tables")
def tables(options: ClusterOptions, scope: OnlyScope = None, limit: Limit = 1000) -> None:
    """Tables: their segments, newest commits, and how long versions are kept."""
    with options.client() as client:
        found = client.system("tables", scope, limit=limit)
    show("tables", found, options)
    found.check()


def show(name: str, rows: Sequence[Any], options: ClusterOptions, **more: object) -> None:
    """Print a system table. ``more``: columns of all rows beside their own."""
    found = [_row(each._asdict()) | more for each in rows]
    output.show(name, found, (*_COLUMNS[name], *more), as_json=options.json)


def _row(values: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    times = {at: values[time] for at, time in _MOMENTS.items() if values.get(at) is not None}
    for column, value in (values | {at: to_text(time) for at, time in times.items()}).items():
        if isinstance(value, bytes) and column in _TEXTS:
            row |= bytes_fields(**{column: value})
        elif isinstance(value, tuple):
            row[column] = [_plain(each) for each in value]
        else:
            row[column] = _plain(value)
    return row


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime):
        return value.isoformat(" ", "milliseconds").removesuffix("+00:00") + "Z"
    return dict(value) if isinstance(value, Mapping) else value
