"""`anabranch table`: tables and their rows, which each command reads from a replica of its own."""

from __future__ import annotations

import base64
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from anabranch.cli.errors import CheckFailed, NotFound, failure_of
from anabranch.cli.options import (
    App,
    At,
    ClusterOptions,
    Description,
    IfNotExists,
    KeyCodec,
    Limit,
    LogFormat,
    Near,
    OnlyScope,
    OperatorOptions,
    Segments,
    StreamSettings,
    Typed,
    ValueCodec,
    argument,
    imported,
    line_encoder,
    moment_of,
    option,
    parse_kafka,
    start_of,
)
from anabranch.cli.output import (
    Column,
    Row,
    begin_task,
    print_json,
    print_line,
    print_result,
    progress_bar,
    show,
    show_failure,
)
from anabranch.cli.stream import exists
from anabranch.core.stream_settings import (
    RATIO,
    derivations_of,
    derived_from,
    derived_table,
    is_table,
)
from anabranch.errors import AnabranchError, InvalidArgument, NotReady, UnknownStream, count_of
from anabranch.presentation.rows import (
    bytes_fields,
    bytes_text,
    system_row,
    value_fields,
    value_text,
)
from anabranch.protocol.hybrid_time import to_text
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.legal_names import split_stream

if TYPE_CHECKING:
    from anabranch import Client
    from anabranch.client.replica import Replica
    from anabranch.client.table_transaction import TableTransaction
    from anabranch.tables.snapshot import TableSnapshot
    from anabranch.types import Result, StreamDescription, Transacted

T = TypeVar("T")

_LOOK_S = 0.2
app = App(no_args_is_help=True, help="Create tables, and read and write their rows.")
Table = Annotated[str, argument("SCOPE/TABLE", "The table.")]
Key = Annotated[str, argument("KEY", "The key.")]
Folder = Annotated[
    Path | None,
    option("--folder DIR", "Keep the replica here for the next call (default: a temporary one)."),
]


@app.command("create")
def create(
    options: ClusterOptions,
    table: Table,
    segments: Segments = None,
    setting: StreamSettings = None,
    near: Near = None,
    description: Description = "",
    if_not_exists: IfNotExists = False,
) -> None:
    """Create a table, and its scope if that is new. A table that exists with the same settings is not changed."""
    settings = parse_kafka(setting, "--setting")
    with options.client() as client:
        is_new = not exists(client, table)
        made = client.create_table(
            table,
            segments,
            settings,
            near=near,
            description=description,
            exist_ok=if_not_exists,
        )
    document = {
        "table": made.stream,
        "segments": len(made.segments),
        "settings": dict(made.settings),
        "description": made.description,
        "created": is_new,
    }
    done = "is created" if is_new else "exists, so there was nothing to do"
    line = f"{table} {done}: {count_of(len(made.segments), 'segment')}"
    print_result(document, line, as_json=options.json)


def _digits(column: str) -> Column:
    """A column of hybrid times, which are no amounts: without commas."""
    return Column(column, lambda row: None if row[column] is None else str(row[column]))


def _value_text(row: Row) -> str:
    encoded = row.get("value_base64")
    return bytes_text(row["value"].encode() if encoded is None else base64.b64decode(encoded))


_TABLE_COLUMNS = (
    "table", "state", "segments", "newest_at", "history_ms", _digits("base"), "settings"
)  # fmt: skip
_VERSION_COLUMNS = (
    "since", "until", _digits("mincsn"), "mintid", "maxtid", Column("value", _value_text)
)  # fmt: skip


@app.command("list")
def list_tables(options: ClusterOptions, scope: OnlyScope = None, limit: Limit = 1000) -> None:
    """List tables: their segments, newest commits, and how long versions are kept."""
    with options.client() as client:
        found = client.system("tables", scope, limit=limit)
    show("tables", map(system_row, found), _TABLE_COLUMNS, as_json=options.json)
    found.check()


@app.command("describe")
def describe(options: ClusterOptions, table: Table) -> None:
    """Show a table: its segments, settings, newest commit, derivations, number of events, and description."""
    with options.client() as client:
        description = _check_table(client, table).description
        found = client.system("tables", split_stream(table)[0], limit=10_000)
        events = client.count_events(table)
    row = next((each for each in found if each.table == table), None)
    if row is None:
        raise UnknownStream(
            f"{table} is deleted, or not among the first 10,000 tables of its scope"
        )
    document = system_row(row) | {"events": events.events, "exact": events.exact}
    document["description"] = description
    due = derivations_of(table, row.settings)
    derived = [one for each in found if (one := derived_from(each.settings)) is not None]
    document["derivations"] = [
        {
            "name": one.of.name,
            "version": one.of.version,
            "kind": one.kind,
            "table": derived_table(one.of),
        }
        for one in sorted(derived)
        if one.of in due or (one.asynchronous and one.of.source == table)
    ]
    columns = (*_TABLE_COLUMNS, "derivations", "events", "exact", "description")
    show("tables", [document], columns, as_json=options.json)


@app.command("get")
def get(
    options: ClusterOptions,
    typed: Typed,
    table: Table,
    key: Key,
    at: At = None,
    folder: Folder = None,
) -> None:
    """Print a row. If it does not exist, the exit code is 1."""
    raw = line_encoder(typed.key_codec, table, of_keys=True)(os.fsencode(key))
    with _view(options, table, at, folder) as view:
        value: Any = view.get(table, raw)
    if value is not None and typed.value_codec is not None:
        value = typed.handle(table).decode_value(raw, value)
    if options.json:
        found = {"timestamp": view.timestamp, "found": value is not None}
        print_json(bytes_fields(key=raw) | found | value_fields(value=value))
    elif value is not None:
        is_bytes = isinstance(value, bytes)
        print_line(value.decode(errors="backslashreplace") if is_bytes else value_text(value))
    if value is None:
        raise NotFound(f"{table} has no row {bytes_text(os.fsencode(key))}")


@app.command("scan")
def scan(
    options: ClusterOptions,
    typed: Typed,
    table: Table,
    starts: Annotated[str | None, option("--prefix KEY", "Only keys that begin with this.")] = None,
    low: Annotated[str | None, option("--from KEY", "From this key on.")] = None,
    high: Annotated[str | None, option("--to KEY", "Before this key.")] = None,
    reverse: Annotated[bool, option("--reverse", "The highest keys first.")] = False,
    limit: Annotated[int | None, option("--limit -n", "At most this many rows.", min=1)] = None,
    at: At = None,
    folder: Folder = None,
) -> None:
    """Print rows in the order of their keys, one line each: key, tab, row.

    Choose keys by --prefix, or by --from and --to. In keys and rows, a tab is `\\t`, a backslash `\\\\`, and a byte
    that is not UTF-8 `\\xff`; --json is exact.
    """
    if starts is not None and (low is not None or high is not None):
        raise InvalidArgument("give --prefix, or --from and --to")
    given = {"low": low, "high": high, "prefix": starts}
    bounds = {name: os.fsencode(key) for name, key in given.items() if key is not None}
    with _view(options, table, at, folder) as view:
        source: Any = typed.given(table)
        for key, value in view.scan(source, **bounds, reverse=reverse, limit=limit):
            if options.json:
                print_json(value_fields(key=key, value=value))
            else:
                print_line(value_text(key), value_text(value))


@app.command("versions")
def versions(
    options: ClusterOptions, table: Table, key: Key, at: At = None, folder: Folder = None
) -> None:
    """Show the versions of a row, the newest first: from when to when, and by which transactions.

    `table.history.ms` says how long versions are kept.
    """
    from anabranch.presentation.system_tables import version_rows

    with _view(options, table, at, folder) as view:
        found = list(version_rows(table, view.versions(table, os.fsencode(key))))
    show("versions", map(system_row, found), _VERSION_COLUMNS, as_json=options.json)


@app.command("put")
def put(
    options: ClusterOptions,
    table: Table,
    key: Key,
    value: Annotated[str, argument("VALUE", "The row; - reads it from standard input.")],
    insert: Annotated[
        bool, option("--insert", "Only if the key has no row at the commit.")
    ] = False,
    replace: Annotated[
        bool, option("--replace", "Only if the key has a row at the commit.")
    ] = False,
    folder: Folder = None,
    key_codec: KeyCodec = None,
    value_codec: ValueCodec = None,
) -> None:
    """Write a row. With --value, VALUE is JSON (with str, text), and is encoded; --key, the same for KEY."""
    if insert and replace:
        raise InvalidArgument(
            "--insert is for a new row and --replace for an existing one: give only one of them"
        )
    row = sys.stdin.buffer.read() if value == "-" else os.fsencode(value)
    row = line_encoder(value_codec, table)(row)
    raw = line_encoder(key_codec, table, of_keys=True)(os.fsencode(key))
    with options.client() as client:
        _check_table(client, table)
        if insert or replace:
            work = methodcaller("insert" if insert else "replace", table, raw, row)
            result: Result = _transact(options, client, table, folder, work)
        else:
            with client.begin(split_stream(table)[0]) as txn:
                txn.write(table, row, key=raw)
                result = txn.commit()
    _print_written(options, table, key, result, "written")


@app.command("delete")
def delete(
    options: ClusterOptions,
    table: Table,
    key: Annotated[str | None, argument("[KEY]", "The key.")] = None,
    starts: Annotated[
        str | None, option("--prefix KEY", "All rows whose keys begin with this.")
    ] = None,
    low: Annotated[str | None, option("--from KEY", "All rows from this key on.")] = None,
    high: Annotated[str | None, option("--to KEY", "All rows before this key.")] = None,
    everything: Annotated[bool, option("--all", "All rows of the table.")] = False,
    folder: Folder = None,
) -> None:
    """Delete a row, or all rows of a range, in one commit. Without such a row nothing is written."""
    given = {"low": low, "high": high, "prefix": starts}
    bounds = {name: os.fsencode(end) for name, end in given.items() if end is not None}
    if (key is not None) + bool(bounds) + everything != 1:
        raise InvalidArgument("give a key; or --prefix, or --from and --to; or --all")

    def work(txn: TableTransaction) -> int:
        if everything:
            return txn.truncate(table)
        if key is None:
            return txn.delete_range(table, **bounds)
        if txn.get(table, os.fsencode(key)) is None:
            return 0
        txn.delete(table, os.fsencode(key))
        return 1

    with options.client() as client:
        _check_table(client, table)
        result = _transact(options, client, table, folder, work)
    if key is not None:
        _print_written(options, table, key, result, "deleted")
        return
    deleted = result.value
    document = {"table": table, "deleted": deleted, **_committed(result)}
    wrote = f": transaction {document['txn_id']}" if deleted else ""
    line = f"{count_of(deleted, 'row')} of {table} {'is' if deleted == 1 else 'are'} deleted{wrote}"
    print_result(document, line, as_json=options.json)


@app.command("changes")
def changes(
    options: ClusterOptions,
    table: Table,
    group: Annotated[
        str | None, option("--group -g", "A consumer group, which continues at its position.")
    ] = None,
    start: Annotated[
        str,
        option(
            "--from TIME",
            "Start at begin, at end, or after a commit timestamp or an ISO 8601 time.",
        ),
    ] = "begin",
    to: Annotated[
        str | None,
        option("--to TIME", "Stop at a time, or at the present end: end."),
    ] = None,
    before: Annotated[
        bool,
        option("--before", "Also show the row before each change, from a replica."),
    ] = False,
    limit: Annotated[
        int | None,
        option(
            "--limit -n",
            "Stop after this many changes. A group gets the last transaction again.",
            min=1,
        ),
    ] = None,
    idle: Annotated[
        float | None,
        option(
            "--idle SECONDS", "Stop after this time without a change (default: never).", min=0.1
        ),
    ] = None,
    folder: Folder = None,
    log_format: LogFormat = "text",
) -> None:
    """Print changes of rows in commit order, one line each: time, key, row before, row after.

    `-` means no row before, `(deleted)` no row after.
    """
    end: Any = "end" if to in ("end", "now") else None if to is None else moment_of(to, "--to")
    first = start_of(start, "--from")
    with (
        options.client() as client,
        client.changes(table, group, idle, first, until=end, before=before, folder=folder) as found,
    ):
        for each in islice(found, limit):
            if not options.json:
                cells = [to_text(each.commit_timestamp), bytes_text(each.key)]
                for row, without in ((each.before, "-"), (each.after, "(deleted)")):
                    cells.append(without if row is None else bytes_text(row))
                print_line(*cells)
                continue
            document: dict[str, Any] = {
                "commit_timestamp": each.commit_timestamp,
                "committed_at": to_text(each.commit_timestamp),
                "txn_id": each.txn_id and each.txn_id.hex(),
            }
            former = {"before": each.before} if before else {}
            print_json(document | bytes_fields(key=each.key, **former, after=each.after))


@app.command("check")
def check(
    options: ClusterOptions,
    table: Table,
    derivation: Annotated[str, argument("DERIVATION", "The name of a derivation of the table.")],
    function: Annotated[
        str, argument("MODULE:FUNCTION", "Its function, installed or in the current folder.")
    ],
) -> None:
    """Compare a derived table with its source. If they differ, the exit code is 1."""
    made = imported(function, "a function in it, such as shop:city")
    with options.client() as client:
        found = client.check_derivation(table, derivation, made)
        versions = derivations_of(table, client.describe(table).settings)
        of = next((each for each in versions if each.name == derivation), None)
        kind = "asynchronous"  # then it is not in the settings of its source
        if of is not None:
            derived = derived_from(client.describe(derived_table(of)).settings)
            kind = derived.kind if derived is not None else kind
    document = {"table": table, "derivation": derivation, "kind": kind, "differences": found}
    what = f"{derivation} ({kind}) of {table}"
    print_result(document, *(found or (f"{what} is right",)), as_json=options.json)
    if found:
        raise CheckFailed(
            f"{what} has {count_of(len(found), 'difference')} from what {function} returns",
            f"if {function} is of the version that look-ups use, build a higher version (`client.rebuild`)",
        )


@app.command("compact")
def compact(
    options: OperatorOptions,
    table: Annotated[
        str | None, argument("SCOPE/TABLE", "The table; with --watch by default all.")
    ] = None,
    plain: Annotated[
        bool,
        option(
            "--plain-readers-lose-history",
            "Accept that consumers that read the topic from its beginning miss unchanged rows.",
        ),
    ] = False,
    folder: Folder = None,
    watch: Annotated[
        bool,
        option(
            "--watch -w",
            "Keep running, and compact tables that exceed their table.compact.ratio.",
        ),
    ] = False,
    every: Annotated[
        float, option("--every SECONDS", "Time between two checks of --watch.", min=0.1)
    ] = 60.0,
    log_format: LogFormat = "text",
) -> None:
    """Write a base with all rows as of now minus table.history.ms, and delete the older events.

    Rows, and snapshots since then, stay. The command is refused while a consumer group has not read all changes up
    to the base.
    """
    if table is None and not watch:
        raise InvalidArgument("name a table, or give --watch")
    if folder is not None and table is None:
        raise InvalidArgument("--folder needs the name of a table")
    if watch and not plain:
        raise InvalidArgument("--watch needs --plain-readers-lose-history, as it does not ask")
    with options.client() as client:
        if not watch and table is not None:
            _compact(options, client, table, folder, plain=plain)
            return
        from anabranch.client.calls.compact import due_tables

        if table is not None and RATIO not in _check_table(client, table).settings:
            raise InvalidArgument(
                f"{table} has no {RATIO}, so --watch would never compact it: set it with "
                f"`anabranch stream alter {table} --setting {RATIO}=4`"
            )
        while True:
            with _failures_value_text(options):
                found = client.streams() if table is None else [client.describe(table)]
                for name in due_tables(found, client.count_events):
                    with _failures_value_text(options):
                        _compact(options, client, name, folder, plain=plain)
            time.sleep(every)


@contextmanager
def _failures_value_text(options: ClusterOptions) -> Iterator[None]:
    """Show errors, and continue with the other tables and later checks."""
    try:
        yield
    except AnabranchError as error:
        show_failure(failure_of(error), as_json=options.json)


def _compact(
    options: ClusterOptions, client: Client, table: str, folder: Path | None, *, plain: bool
) -> None:
    with progress_bar(quiet=options.json) as bar:
        known = client.describe(table).base
        task = begin_task(bar, f"{table}: rows", None if known is None else known.rows)
        base = client.compact_table(
            table,
            plain_readers_lose_history=plain,
            folder=folder,
            progress=lambda rows: bar.update(task, completed=rows),
        )
    at = to_text(base.timestamp)
    document = {"table": table, "base": at, "timestamp": base.timestamp, "rows": base.rows}
    document["txn_id"] = base.txn_id.hex()
    line = f"{table} begins at its base of {at}: {count_of(base.rows, 'row')}"
    print_result(document, line, as_json=options.json)


def _transact(
    options: ClusterOptions,
    client: Client,
    table: str,
    folder: Path | None,
    work: Callable[[TableTransaction], T],
) -> Transacted[T]:
    with client.replica(table, folder=folder) as replica:
        _brought_up(options, replica, table, None).close()
        return replica.transact(work)


def _check_table(client: Client, table: str) -> StreamDescription:
    found = client.describe(table)
    if not is_table(found.settings):
        raise InvalidArgument(f"{table} is a stream, not a table: use `anabranch write`")
    return found


def _print_written(
    options: ClusterOptions, table: str, key: str, result: Result, what: str
) -> None:
    document = {"table": table, **bytes_fields(key=os.fsencode(key)), **_committed(result)}
    wrote = document["txn_id"]
    done = f"is {what}: transaction {wrote}" if wrote else "had no row"
    line = f"{table} {bytes_text(os.fsencode(key))} {done}"
    print_result(document, line, as_json=options.json)


def _committed(result: Result) -> dict[str, Any]:
    return {
        "txn_id": result.txn_id.hex() if result.txn_id != NO_TXN else None,
        "commit_timestamp": result.commit_timestamp,
        "committed_at": to_text(result.commit_timestamp),
    }


@contextmanager
def _view(
    options: ClusterOptions, table: str, at: str | None, folder: Path | None
) -> Iterator[TableSnapshot]:
    """The table as of a time, from a replica that is built first, however long that takes."""
    when = None if at is None else moment_of(at)
    with (
        options.client() as client,
        client.replica(table, folder=folder) as replica,
        _brought_up(options, replica, table, when) as view,
    ):
        yield view


def _brought_up(options: ClusterOptions, replica: Replica, table: str, at: Any) -> TableSnapshot:
    """A snapshot, once the replica has it. Raises: NotReady if nothing arrived within --timeout."""
    most, over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(_LOOK_S):
            left = replica.lag()[table].records
            most = max(most, left)
            bar.update(task, total=most or None, completed=most - left)

    with progress_bar(quiet=options.json) as bar:
        task = begin_task(bar, f"loading {table}", None)
        watcher = threading.Thread(target=watch, name="progress", daemon=True)
        watcher.start()
        behind = None
        try:
            while True:
                try:
                    return replica.snapshot(at, timeout=options.timeout)
                except NotReady:
                    left = replica.lag()[table].records
                    if left >= (most if behind is None else behind):
                        raise
                    behind = left
        finally:
            over.set()
            watcher.join()
