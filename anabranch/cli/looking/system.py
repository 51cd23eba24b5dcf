"""`anabranch system`: what the cluster knows of its transactions, locks, commits, tables and versions, as rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

from anabranch.cli.options import App, ClusterOptions, argument, option
from anabranch.cli.output import bytes_document, bytes_text, print_json, print_table
from anabranch.cli.read import moment_of
from anabranch.core.hybrid_time import to_text
from anabranch.core.ids import NO_TXN

app = App(
    no_args_is_help=True,
    help="Show system tables: transactions, locks, commits, tables, and a row's versions.",
)
Scope = Annotated[str | None, argument("SCOPE", "Only this scope.")]
Limit = Annotated[int, option("--limit -n", "At most so many rows.", min=1, max=10_000)]
# Columns for people; --json has all.
_SHOWN = {
    "transactions": ("txn_id", "state", "scope", "owner", "name", "begun", "age", "rows", "streams", "reason"),
    "locks": ("txn_id", "table", "points", "ranges", "frozen", "broken", "waiting", "waits_for"),
    "commits": ("committed_at", "txn_id", "rows", "streams"),
    "tables": ("table", "state", "segments", "newest_at", "history_ms", "base", "settings"),
    "versions": ("since", "until", "mincsn", "mintid", "maxtid", "value"),
}  # fmt: skip
# Hybrid times as digits; and moments, which are shown as these are: each may be given back as a time.
_DIGITS = ("mincsn", "base")
_MOMENTS = {
    "committed_at": "commit_timestamp",
    "newest_at": "newest",
    "since": "mincsn",
    "until": "maxcsn",
}
_TEXTS = ("key", "value")  # other bytes are ids


@app.command("transactions")
def transactions(options: ClusterOptions, scope: Scope = None, limit: Limit = 100) -> None:
    """Transactions: open ones, the oldest first, then those that ended and are kept, the newest first."""
    with options.client() as client:
        found = client.system("transactions", scope, limit=limit)
    show("transactions", found, options)
    found.check()


@app.command("locks")
def locks(options: ClusterOptions, scope: Scope = None, limit: Limit = 100) -> None:
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
def tables(options: ClusterOptions, scope: Scope = None, limit: Limit = 1000) -> None:
    """Tables: their segments, newest commits, and how long versions are kept."""
    with options.client() as client:
        found = client.system("tables", scope, limit=limit)
    show("tables", found, options)
    found.check()


def show(name: str, rows: Sequence[Any], options: ClusterOptions, **more: object) -> None:
    """Print a system table. ``more``: columns of all rows beside their own."""
    found = [_timed(row._asdict()) | more for row in rows]
    if options.json:
        print_json({name: [_document(row) for row in found]})
        return
    columns = (*_SHOWN[name], *more)
    cells = ([_cell(column, row[column]) for column in columns] for row in found)
    print_table(name, columns, cells)


def _timed(row: dict[str, Any]) -> dict[str, Any]:
    times = {at: row[time] for at, time in _MOMENTS.items() if row.get(at) is not None}
    return row | {at: to_text(time) for at, time in times.items()}


def _document(row: Mapping[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for column, value in row.items():
        if isinstance(value, bytes) and column in _TEXTS:
            document |= bytes_document(**{column: value})
        elif isinstance(value, bytes | datetime):
            document[column] = _cell(column, value)
        elif isinstance(value, tuple):
            document[column] = [_plain(each) for each in value]
        else:
            document[column] = dict(value) if isinstance(value, Mapping) else value
    return document


def _cell(column: str, value: object) -> object:
    if isinstance(value, bytes):
        return bytes_text(value) if column in _TEXTS else value.hex()
    if isinstance(value, datetime):
        return value.isoformat(" ", "milliseconds").removesuffix("+00:00") + "Z"
    if column in _DIGITS and value is not None:
        return str(value)
    if isinstance(value, Mapping):
        value = tuple(f"{name}={text}" for name, text in sorted(value.items()))
    if isinstance(value, tuple):
        return ", ".join("another" if each == NO_TXN else _plain(each) for each in value)
    return value


def _plain(item: str | bytes) -> str:
    return item.hex() if isinstance(item, bytes) else item
