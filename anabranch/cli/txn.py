"""`anabranch txn`: list, describe, abort and force transactions; and `anabranch series` of numbered commits."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

from anabranch.cli import system
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
    option,
    seconds_of,
)
from anabranch.cli.output import (
    Column,
    Columns,
    Row,
    print_fields,
    print_json,
    print_line,
    print_table,
    show,
)
from anabranch.core.ids import TXN_ID_SIZE, parse_txn_text
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    IllegalState,
    InvalidArgument,
    NotAuthorized,
    OutcomeUnknown,
)
from anabranch.presentation.rows import open_transaction_row, transaction_row
from anabranch.presentation.words import count_of, span_text, time_text

if TYPE_CHECKING:
    from anabranch import Client, TransactionInfo
    from anabranch.types import Listed, OpenTransaction

_MOST = 10_000  # that a list may have
_WATCH_S = 1.0
_LATE = (AlreadyCommitted, OutcomeUnknown)
app = App(no_args_is_help=True, help="List, describe, abort and force transactions.")
_FINISHED = ("COMMITTED", "ABORTED")
TxnIdText = Annotated[
    str, argument("ID", "The transaction's id, 32 hexadecimal digits, or its first or last ones.")
]


def _span_of(key: str) -> Callable[[Row], str | None]:
    """A column's value: the span of time of so many seconds."""
    return lambda row: None if row[key] is None else span_text(row[key])


def _count_of(key: str) -> Callable[[Row], int]:
    return lambda row: row["counts"][key]


def _age(row: Row) -> str:
    return span_text(time.time() - datetime.fromisoformat(row["prepared_at"]).timestamp())


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
    "streams",
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
    finished: Annotated[bool, option("--finished -f", "Committed and aborted ones too.")] = False,
    prepared: Annotated[
        bool, option("--prepared", "Those that wait for their coordinator's word.")
    ] = False,
    waiting: Annotated[
        bool, option("--waiting", "Decided ones that are not merged yet, and why.")
    ] = False,
    limit: Limit = 100,
) -> None:
    """List transactions: open ones, the oldest first; or all that are kept, the newest first."""
    answered: Listed[Any]
    if prepared or finished:
        columns = _PREPARED_COLUMNS if prepared else _FINISHED_COLUMNS
        title = "Prepared transactions" if prepared else "Transactions"
        with options.client() as client:
            found = (
                client.prepared(scope, limit=limit)
                if prepared
                else client.transactions(scope=scope, finished=True, limit=limit)
            )
        rows, answered = [transaction_row(each) for each in found], found
    else:
        columns = _WAITING_COLUMNS if waiting else _OPEN_COLUMNS
        title = "Decided transactions that wait" if waiting else "Open transactions"
        with options.client() as client:
            opened = client.open_transactions(scope, _MOST if waiting else limit)
        chosen = [each for each in opened if each.waits is not None or not waiting]
        rows, answered = [open_transaction_row(each) for each in chosen[:limit]], opened
    show("transactions", rows, columns, as_json=options.json, title=title)
    answered.check()


app.command("locks")(system.locks)


@app.command("describe")
def describe(
    options: ClusterOptions,
    txn: TxnIdText,
    watch: Annotated[
        bool, option("--watch -w", "Show it again each second until it has ended.")
    ] = False,
) -> None:
    """Show a transaction: its state and outcome, its streams and writers, and how far its merge is."""
    with options.client() as client:
        txn_id = id_of(client, txn)
        while True:
            info = client.state(txn_id)
            if ended := info.state in _FINISHED:
                _show(info, as_json=options.json)
            else:
                _show(info, client.open_transaction(txn_id), as_json=options.json)
            if ended or not watch:
                return
            time.sleep(_WATCH_S)


def id_of(client: Client, text: str, *, of_open: bool = False) -> bytes:
    """The id of a transaction given by all its digits, or by the first or last ones: among the newest 10,000.

    ``of_open``: among the open ones, of which there must be fewer. `InvalidArgument`: no digits, or not of one.
    """
    digits = text.lower()
    if len(digits) == 2 * TXN_ID_SIZE or not re.fullmatch(r"[0-9a-f]{4,31}", digits):
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
        argument("ID...", "Open transactions, by id, or its first or last digits."),
    ] = None,
    owner: Annotated[str | None, option("--owner LANE", "Open ones that this lane began.")] = None,
    older_than: Annotated[
        str | None, option("--older-than TIME", "Open ones begun so long ago: 90s, 30m, 1h, 2d.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Abort open transactions, as an operator: those named, or all of a lane, of an age, or both.

    The command shows those that --owner or --older-than choose of the 10,000 oldest, and asks. Programs that hold a
    transaction's token call client.abort(token) instead.
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
    """Abort, unless it was prepared since it was chosen: its coordinator may have decided."""
    if client.state(txn_id).state == "PREPARED":
        raise IllegalState(
            f"transaction {txn_id.hex()} is PREPARED: its coordinator ends it, or, if that is gone for good, "
            "`anabranch txn force --outcome`"
        )
    client.abort(txn_id, reason="aborted by an operator")


def _choose(
    client: Client, owner: str | None, age: float | None, *, yes: bool, quiet: bool
) -> list[bytes]:
    """The open transactions of a lane, of an age by their controller's clock, if the user agrees."""
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
    txn: TxnIdText,
    outcome: Annotated[
        str | None,
        option("--outcome commit|abort", "It is PREPARED, and its coordinator is gone for good."),
    ] = None,
    yes: Yes = False,
) -> None:
    """End a transaction whose merge does not go on, as a stream of it waits or is LOST: abort it in all of them.

    Or end a PREPARED one in the place of its coordinator, which may have decided otherwise. Else only for one in
    FINALIZE_IN_PROGRESS that waits (`anabranch txn describe` says for what). Consumers that read the topics of its
    other streams directly may have seen events of it, and keep seeing them; snapshots, ordered readers and Spark
    never do. Needs a lane that may operate on the scope.
    """
    if outcome not in (None, "commit", "abort"):
        raise InvalidArgument(f"--outcome {outcome!r}: commit or abort")
    connecting = options.client()  # wrong options are refused before the question
    if len(txn) != 2 * TXN_ID_SIZE:
        raise InvalidArgument("force takes all 32 digits of an id")
    txn_id = parse_txn_text(txn)
    what = (
        f"Transaction {txn_id.hex()} will be aborted in all its streams for good, though it might go on by itself "
        "once what it waits for is mended. Events of it that stand in their "
        "topics stay there for consumers that read them plainly."
    )
    if outcome is not None:
        what = (
            f"Prepared transaction {txn_id.hex()} will end by {outcome}, whatever its coordinator decided: if a "
            "database has its row, or lacks it, the two disagree from then on."
        )
    confirm(what, yes=yes)
    with connecting as client:
        client.force(
            txn_id,
            reason="forced by an operator",
            outcome=None if outcome is None else outcome == "commit",
        )
        _show(client.state(txn_id), as_json=options.json)


def _show(
    info: TransactionInfo, opened: OpenTransaction | None = None, *, as_json: bool = False
) -> None:
    document = transaction_row(info)
    if opened is not None and opened.info.state not in _FINISHED:
        document = open_transaction_row(opened)
    if as_json:
        print_json(document)
        return
    counts = document.pop("counts") if info.state in _FINISHED else {}
    document.pop("counts", None)
    merge = document.pop("merge", ())
    for carried in merge:
        print_line(
            f"merge of {carried['stream']}, partition {carried['partition']}: {carried['events_done']:,} of "
            f"{carried['events']:,} events, about {carried['chunks_done']:,} of {carried['chunks']:,} chunks"
        )
    writers = document.pop("writers")
    if not document["commit_timestamp"]:
        document["commit_timestamp"] = None
    print_fields("Transaction", document | counts)
    if writers:
        columns = ("writer", Column("label", lambda row: row.get("label")), "events", "finished")
        print_table("Writers", writers, columns)


# -- series of numbered commits ---


series_app = App(no_args_is_help=True, help="List and set the series of numbered commits.")


@series_app.command("list")
def list_series(options: ClusterOptions, scope: Scope) -> None:
    """List the series of a scope: the highest number of each, the transaction with it, its owner, since when."""
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
    number: Annotated[int, argument("NUMBER", "Its latest number from now on.", min=-1)],
    owner: Annotated[
        str | None, option("--owner LANE", "The lane that has it from now on; '': none.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Move a series to a number: the next commit must have a higher one (-1: any); or give it to a lane.

    For a series that was moved, by mistake or not, or that another lane took. Set too low, numbers are committed
    twice; set too high, the numbers up to there are never committed. Needs the right series on the scope.
    """
    with options.client() as client:
        at = next((s.number for s in client.series(scope, series) if s.number >= 0), None)
        before = "has no commit" if at is None else f"is at {at}"
        confirm(
            f"The series {series!r} {before}. It will be at {number}: only numbers above can be committed.",
            yes=yes,
        )
        client.set_series(scope, series, number, expected=at, owner=owner)
    if options.json:
        print_json({"series": series, "number": number, "before": at})
    else:
        print_line(f"{series} is at {number}; before: {'no commit' if at is None else at}")
