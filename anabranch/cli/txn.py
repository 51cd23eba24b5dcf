"""`anabranch txn` and `anabranch series`: transactions, their locks and commits, and series of numbered commits."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

from anabranch.cli.options import (
    App,
    ClusterOptions,
    Limit,
    OnlyScope,
    OperatorOptions,
    Scope,
    Yes,
    argument,
    confirm,
    moment_of,
    option,
    seconds_of,
)
from anabranch.cli.output import (
    Column,
    Columns,
    Grid,
    Row,
    fields_of,
    print_result,
    print_table,
    show,
)
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    IllegalState,
    InvalidArgument,
    NotAuthorized,
    OutcomeUnknown,
    count_of,
)
from anabranch.presentation.rows import (
    open_transaction_row,
    span_text,
    system_row,
    time_text,
    timeline_row,
    transaction_row,
)
from anabranch.protocol.ids import NO_TXN, TXN_ID_SIZE, parse_txn_text

if TYPE_CHECKING:
    from anabranch import Client, TransactionInfo
    from anabranch.types import OpenTransaction

_MOST = 10_000  # that a list may have
_WATCH_S = 1.0
_LATE = (AlreadyCommitted, OutcomeUnknown)
app = App(no_args_is_help=True, help="List, describe, abort and force transactions.")
_FINISHED = ("COMMITTED", "ABORTED")
TxnIdText = Annotated[
    str,
    argument("ID", "The id, or at least 4 of its first or last digits."),
]


def _span_of(key: str) -> Callable[[Row], str | None]:
    """A column of seconds as a span of time."""
    return lambda row: None if row[key] is None else span_text(row[key])


def _count_of(key: str) -> Callable[[Row], int]:
    return lambda row: row["counts"][key]


def _age(row: Row) -> str:
    return span_text(time.time() - datetime.fromisoformat(row["prepared_at"]).timestamp())


def _streams_of(row: Row) -> list[str]:
    """The coordinator's streams, and the scopes of all others, of which it knows no more."""
    scopes = [scope for part in row["control_partitions"] for scope in part["scopes"]]
    return [*row["streams"], *(f"{scope}/…" for scope in scopes)]


_ABORTED_COLUMNS = ("txn_id", "owner", "state")
_FINISHED_COLUMNS: Columns = (
    "txn_id",
    "scope",
    "owner",
    "name",
    "state",
    Column("begun", "begun_at"),
    Column("committed", _count_of("committed")),
    Column("rejected", _count_of("rejected")),
    Column("left out", _count_of("left_out")),
)
_PREPARED_COLUMNS: Columns = (
    "txn_id",
    "scope",
    "owner",
    "name",
    Column("prepared", "prepared_at"),
    Column("age", _age),
    Column("events", _count_of("committed")),
    Column("ended by", lambda row: row["prepared_by"][:8] if row["prepared_by"] else "its token"),
)
_OPEN_COLUMNS: Columns = (
    "txn_id",
    "scope",
    "owner",
    "name",
    "state",
    Column("age", _span_of("age_s")),
    Column("silent for", _span_of("silent_s")),
    Column("keepalive left", _span_of("keepalive_left_s")),
    Column("bytes", "uncommitted_bytes"),
    Column("writers", "writer_count"),
    Column("streams", _streams_of),
)
_WAITING_COLUMNS: Columns = (
    "txn_id",
    "scope",
    "owner",
    "state",
    Column("age", _span_of("age_s")),
    Column("waits", "waits_since"),
    Column("for", "waits_for"),
    Column("end it by", "ended_by"),
)


@app.command("list")
def list_transactions(
    options: ClusterOptions,
    scope: OnlyScope = None,
    finished: Annotated[
        bool, option("--finished -f", "Also committed and aborted transactions.")
    ] = False,
    prepared: Annotated[bool, option("--prepared", "Only prepared transactions.")] = False,
    waiting: Annotated[
        bool, option("--waiting", "Only decided transactions that are not merged yet.")
    ] = False,
    limit: Limit = 100,
) -> None:
    """List open transactions, the oldest first; or all known ones, the newest first."""
    from anabranch.types import Listed

    found: Listed[Any]
    row_of: Callable[[Any], Row]
    with options.client() as client:
        if prepared:
            title, columns, row_of = "Prepared transactions", _PREPARED_COLUMNS, transaction_row
            found = client.prepared(scope, limit=limit)
        elif finished:
            title, columns, row_of = "Transactions", _FINISHED_COLUMNS, transaction_row
            found = client.transactions(scope=scope, finished=True, limit=limit)
        elif waiting:
            title, columns = "Decided transactions that wait", _WAITING_COLUMNS
            opened, row_of = client.open_transactions(scope, _MOST), open_transaction_row
            found = Listed([each for each in opened if each.waits], opened.missing)
        else:
            title, columns = "Open transactions", _OPEN_COLUMNS
            found, row_of = client.open_transactions(scope, limit), open_transaction_row
    rows = map(row_of, found[:limit])
    show("transactions", rows, columns, as_json=options.json, title=title)
    found.check()


def _ids(column: str) -> Column:
    """A column of transactions; one that this lane may not see is `another`."""
    hidden = NO_TXN.hex()
    return Column(
        column.replace("_", " "),
        lambda row: ["another" if one == hidden else one for one in row[column]],
    )


_LOCK_COLUMNS = (
    "txn_id", "table", "points", "ranges", "frozen", "broken", _ids("waiting"), _ids("waits_for")
)  # fmt: skip


@app.command("locks")
def locks(options: ClusterOptions, scope: OnlyScope = None, limit: Limit = 100) -> None:
    """List the locks of open transactions on tables, those of the oldest one first, and who waits for whom."""
    with options.client() as client:
        found = client.system("locks", scope, limit=limit)
    show("locks", map(system_row, found), _LOCK_COLUMNS, as_json=options.json)
    found.check()


@app.command("commits")
def commits(
    options: ClusterOptions,
    of: Annotated[str, argument("SCOPE[/STREAM]", "A scope or stream.")],
    start: Annotated[
        str | None,
        option("--from TIME", "Only commits after a commit timestamp or an ISO 8601 time."),
    ] = None,
    until: Annotated[str | None, option("--to TIME", "Only commits up to this time.")] = None,
    limit: Limit = 100,
) -> None:
    """List the commits of a scope or a stream, the newest first: transaction, streams, number of events."""
    begin = None if start is None else moment_of(start, "--from")
    end = None if until is None else moment_of(until, "--to")
    with options.client() as client:
        found = client.system("commits", of, start=begin, until=end, limit=limit)
    columns = ("committed_at", "txn_id", Column("events", "rows"), "streams")
    show("commits", map(system_row, found), columns, as_json=options.json)


@app.command("describe")
def describe(
    options: ClusterOptions,
    txn: TxnIdText,
    watch: Annotated[bool, option("--watch -w", "Repeat each second until it has ended.")] = False,
    timeline: Annotated[
        bool, option("--timeline", "Show when each step happened, and what it waited for.")
    ] = False,
) -> None:
    """Show a transaction: state, outcome, streams, writers, locks, control partitions, merge."""
    if watch and timeline:
        raise InvalidArgument("give --watch or --timeline, not both")
    with options.client() as client:
        txn_id = id_of(client, txn)
        if timeline:
            _show_timeline(timeline_row(client.timeline(txn_id)), as_json=options.json)
            return
        while True:
            info = client.state(txn_id)
            _show(info, client.open_transaction(txn_id), as_json=options.json)
            if info.state in _FINISHED or not watch:
                return
            time.sleep(_WATCH_S)


_ENDED_PART_COLUMNS: Columns = (
    "control_partition",
    Column("scopes", lambda row: row["scopes"] or "known only there"),
    "state",
)
_PART_COLUMNS: Columns = (
    *_ENDED_PART_COLUMNS,
    Column("round of votes", "votes_round"),
    "vote",
    Column("waited for", _span_of("waited_s")),
)
_TIMELINE_COLUMNS: Columns = (
    "at",
    Column("since begun, ms", "since_begun_ms"),
    Column("since step before, ms", "since_step_ms"),
    "step",
    "about",
    "waited_for",
    "clock",
)


def _show_timeline(document: Row, *, as_json: bool) -> None:
    waits = [f"waits now: {document['waits']}"] if document["waits"] else []
    gaps = [f"gap: {gap}" for gap in document["gaps"]]
    table = Grid(f"Timeline of {document['txn_id']}", document["steps"], _TIMELINE_COLUMNS)
    print_result(document, table, *waits, *gaps, as_json=as_json)


def id_of(client: Client, text: str, *, of_open: bool = False) -> bytes:
    """The id of a transaction, given by all its digits, or by first or last ones among the newest 10,000.

    ``of_open``: among the open ones, of which there must be fewer. Raises: InvalidArgument if not exactly one fits.
    """
    digits = text.lower()
    if not re.fullmatch(r"[0-9a-f]{4,32}", digits):
        raise InvalidArgument(
            f"{text!r:.100} is no transaction id: give its 32 hexadecimal digits, or at least 4 of its first or "
            "last ones, as `anabranch txn list --finished` shows them, beside names"
        )
    if len(digits) == 2 * TXN_ID_SIZE:
        return parse_txn_text(text)
    if of_open:
        kept = [t.info for t in client.open_transactions(limit=_MOST).check()]
        those, shown = f"the oldest {_MOST:,} open ones", "txn list"
    else:
        kept = client.transactions(finished=True, limit=_MOST).check()
        those, shown = f"the newest {_MOST:,}", "txn list --finished"
    ids = [t.txn_id for t in kept]
    found = [i for i in ids if i.hex().startswith(digits) or i.hex().endswith(digits)]
    if len(found) != 1 or (of_open and len(kept) >= _MOST):
        raise InvalidArgument(
            f"{count_of(len(found), 'transaction')} of {those} begin or end with {text}: give all 32 digits of an "
            f"id, as `anabranch {shown}` shows them"
        )
    return found[0]


@app.command("abort")
def abort(
    options: OperatorOptions,
    txns: Annotated[
        list[str] | None,
        argument("ID...", "Ids, or at least 4 of their first or last digits."),
    ] = None,
    owner: Annotated[str | None, option("--owner LANE", "Transactions of this lane.")] = None,
    older_than: Annotated[
        str | None, option("--older-than SPAN", "Transactions older than 90s, 30m, 1h, 2d.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Abort open transactions as an operator: by id, or all of a lane or an age.

    With --owner or --older-than it chooses among the 10,000 oldest, and shows them first.
    """
    if bool(txns) == (owner is not None or older_than is not None):
        raise InvalidArgument("give ids, or --owner and --older-than")
    age = None if older_than is None else seconds_of(older_than)
    with options.client() as client:
        given = [id_of(client, txn, of_open=True) for txn in txns or ()]
        chosen = given or _choose(client, owner, age, yes=yes, quiet=options.json)
        found = []
        refused: AnabranchError | None = None
        for txn_id in chosen:
            try:
                _abort(client, txn_id)
            except _LATE:  # the commit of one of many came first
                if len(chosen) == 1:
                    raise
            except (IllegalState, NotAuthorized) as error:
                refused = refused or error
            found.append(client.state(txn_id))
    if refused is not None and len(chosen) == 1:
        raise refused
    if len(given) == 1:
        _show(found[0], as_json=options.json)
    else:
        rows = map(transaction_row, found)
        show("transactions", rows, _ABORTED_COLUMNS, as_json=options.json)
    if refused is not None:
        raise refused


def _abort(client: Client, txn_id: bytes) -> None:
    """Abort a transaction, unless it was prepared meanwhile: its coordinator may have decided."""
    if client.state(txn_id).state == "PREPARED":
        raise IllegalState(
            f"transaction {txn_id.hex()} is PREPARED, so only its coordinator may end it; if that is gone for "
            "good, use `anabranch txn force --outcome`"
        )
    client.abort(txn_id, reason="aborted by an operator")


def _choose(
    client: Client, owner: str | None, age: float | None, *, yes: bool, quiet: bool
) -> list[bytes]:
    """The open transactions of a lane or an age (by their controller's clock), if the user agrees."""
    found = [
        t
        for t in client.open_transactions(limit=_MOST).check()
        if (owner is None or t.info.owner == owner)
        and (age is None or t.age > age)
        and t.info.state != "PREPARED"  # its coordinator may have decided
    ]
    if found and not quiet:
        print_table("Open transactions", map(open_transaction_row, found), _OPEN_COLUMNS)
    if found:
        confirm(f"{count_of(len(found), 'transaction')} will be aborted.", yes=yes)
    return [t.info.txn_id for t in found]


@app.command("force")
def force(
    options: OperatorOptions,
    txn: Annotated[str, argument("ID", "The id: all 32 digits.")],
    outcome: Annotated[
        str | None,
        option(
            "--outcome commit|abort",
            "How a PREPARED transaction ends, as its coordinator is gone for good; or how a transaction was "
            "decided that waits for a control partition which is.",
        ),
    ] = None,
    at: Annotated[
        int | None,
        option(
            "--at CONTROL-PARTITION",
            "End its part there alone, as the control partition in its id can't be led any more.",
        ),
    ] = None,
    yes: Yes = False,
) -> None:
    """Abort a transaction in all its streams if its merge can't finish, or end a PREPARED one.

    A merge can't finish while a stream of it waits or is LOST: `anabranch txn describe` says why. Plain consumers
    of its other streams may have seen some of its events, and keep seeing them; snapshots, ordered readers and
    Spark never show them. The coordinator of a PREPARED transaction may have decided otherwise. A decided
    transaction that waits for a control partition which can't be led any more ends without its part there.
    """
    if outcome not in (None, "commit", "abort"):
        raise InvalidArgument(f"--outcome {outcome!r} must be commit or abort")
    if at is not None and outcome is None:
        raise InvalidArgument("a part of a transaction is ended one way: give --outcome, too")
    if len(txn) != 2 * TXN_ID_SIZE:
        raise InvalidArgument("give all 32 digits of the id")
    txn_id = parse_txn_text(txn)
    what = (
        f"Transaction {txn_id.hex()} will be aborted in all its streams for good, though it would finish by itself "
        "once its streams are repaired. Plain consumers keep seeing those of its events that are in the topics."
    )
    if outcome is not None:
        what = (
            f"Transaction {txn_id.hex()} will end by {outcome}. If it is PREPARED, that is so whatever its "
            "coordinator decided: if a database decided otherwise, its rows and the events will differ. If it is "
            "decided, it will end without its parts at control partitions that do not answer."
        )
    if at is not None:
        what = (
            f"The part of transaction {txn_id.hex()} at control partition {at} will end by {outcome}, alone. Look "
            "first how its parts at other control partitions ended: if this one ends otherwise, it is torn."
        )
    with options.client_after(what, yes=yes) as client:
        client.force(
            txn_id,
            reason="forced by an operator",
            outcome=None if outcome is None else outcome == "commit",
            control_partition=at,
        )
        if at is not None:
            return  # the control partition that knows the whole transaction can't be asked
        _show(client.state(txn_id), as_json=options.json)


def _show(
    info: TransactionInfo, opened: OpenTransaction | None = None, *, as_json: bool = False
) -> None:
    document = transaction_row(info)
    if opened is not None:
        of_open = open_transaction_row(opened)
        ended = opened.info.state in _FINISHED
        parts_alone = {"control_partitions": of_open["control_partitions"]}
        document = document | parts_alone if ended else of_open
    fields = dict(document)
    counts = fields.pop("counts")
    merge = [
        f"merge of {one['stream']}, partition {one['partition']}: {one['events_done']:,} of "
        f"{count_of(one['events'], 'event')}, about {one['chunks_done']:,} of {count_of(one['chunks'], 'chunk')}"
        for one in fields.pop("merge", ())
    ]
    segments = fields.pop("locked_segments", ()), fields.pop("waits_for_segments", ())
    for title, its in zip(("has locked", "waits for"), segments, strict=True):
        fields |= (
            {title: ", ".join(f"segment {one['segment']} of {one['stream']}" for one in its)}
            if its
            else {}
        )
    if segments[1]:
        fields["… which are locked by"] = ", ".join(sorted({one["txn_id"] for one in segments[1]}))
    if waiting := sorted({txn_id for one in segments[0] for txn_id in one["waiting"]}):
        fields["others wait"] = ", ".join(waiting)
    writers, parts = fields.pop("writers"), fields.pop("control_partitions", ())
    # Without commas, as options such as --at take it.
    fields["commit_timestamp"] = str(fields["commit_timestamp"] or "")
    fields |= counts if info.state in _FINISHED else {}
    columns = ("writer", Column("label", lambda row: row.get("label")), "events", "finished")
    tables = [Grid("Writers", writers, columns)] if writers else []
    part_columns = _ENDED_PART_COLUMNS if info.state in _FINISHED else _PART_COLUMNS
    tables += [Grid("Parts on other control partitions", parts, part_columns)] if parts else []
    print_result(document, *merge, fields_of("Transaction", fields), *tables, as_json=as_json)


series_app = App(no_args_is_help=True, help="List and set series of numbered commits.")


@series_app.command("list")
def list_series(options: ClusterOptions, scope: Scope) -> None:
    """List the series of a scope: highest number, its transaction, owner, and time."""
    with options.client() as client:
        found = client.series(scope)
    rows = [
        {
            "series": s.series,
            "number": s.number,
            "txn_id": s.txn_id.hex(),
            "owner": s.owner,
            "taken_at": time_text(s.taken_ms),
        }
        for s in found
    ]
    columns = ("series", "number", "txn_id", "owner", "taken_at")
    show("series", rows, columns, as_json=options.json)


@series_app.command("set")
def set_series(
    options: OperatorOptions,
    scope: Scope,
    series: Annotated[str, argument("SERIES", "The series' name.")],
    number: Annotated[int, argument("NUMBER", "Its new latest number.", min=-1)],
    owner: Annotated[str | None, option("--owner LANE", "Its new owner; '': no lane.")] = None,
    yes: Yes = False,
) -> None:
    """Set the latest number of a series (-1: none), or its owner. The next commit must have a higher number.

    If the number is too low, numbers are committed twice; if it is too high, the numbers up to it are never
    committed.
    """
    with options.client() as client:
        at = next((s.number for s in client.series(scope, series) if s.number >= 0), None)
        before = "has no commit" if at is None else f"is at {at}"
        confirm(
            f"The series {series!r} {before}. It will be at {number}: only higher numbers can be committed.",
            yes=yes,
        )
        client.set_series(scope, series, number, expected=at, owner=owner)
    print_result(
        {"series": series, "number": number, "before": at},
        f"{series} is at {number}; before: {'no commit' if at is None else at}",
        as_json=options.json,
    )
