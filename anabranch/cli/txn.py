"""`anabranch txn`: list, describe, abort and settle transactions."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

from anabranch.cli.looking import system
from anabranch.cli.options import (
    App,
    ClusterOptions,
    OperatorOptions,
    Yes,
    argument,
    confirm,
    option,
)
from anabranch.cli.output import count_of, print_json, print_line, print_table, time_text
from anabranch.core.hybrid_time import to_text
from anabranch.core.ids import TXN_ID_SIZE, parse_txn_text
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    IllegalState,
    InvalidArgument,
    NotAuthorized,
    OutcomeUnknown,
)

if TYPE_CHECKING:
    from anabranch import Client, TransactionInfo
    from anabranch.schemas.records import WaitInfo
    from anabranch.types import OpenTransaction

_MOST = 10_000  # that a list may have
_WATCH_S = 1.0
_LATE = (AlreadyCommitted, OutcomeUnknown)
app = App(no_args_is_help=True, help="List, describe, abort and settle transactions.")
_FINISHED = ("COMMITTED", "ABORTED")
TxnIdText = Annotated[
    str, argument("ID", "The transaction's id, 32 hexadecimal digits, or its first or last ones.")
]


@app.command("list")
def list_transactions(
    options: ClusterOptions,
    scope: Annotated[str | None, argument("SCOPE", "Only this scope.")] = None,
    finished: Annotated[bool, option("--finished -f", "Committed and aborted ones too.")] = False,
    prepared: Annotated[
        bool, option("--prepared", "Those that wait for their coordinator's word.")
    ] = False,
    waiting: Annotated[
        bool, option("--waiting", "Decided ones that are not merged yet, and why.")
    ] = False,
    limit: Annotated[int, option("--limit -n", "At most so many.", min=1)] = 100,
) -> None:
    """List transactions: open ones, the oldest first; or all that are kept, the newest first."""
    with options.client() as client:
        if prepared:
            found = client.prepared(scope, limit=limit)
        elif finished:
            found = client.transactions(scope=scope, finished=True, limit=limit)
        else:
            opened = client.open_transactions(scope, _MOST if waiting else limit)
            shown = [t for t in opened if t.waits is not None][:limit] if waiting else list(opened)
            if options.json:
                print_json({"transactions": [open_document(each) for each in shown]})
            elif waiting:
                _list_waiting(shown)
            else:
                _list_open(shown)
            opened.check()
            return
    if options.json:
        print_json({"transactions": [document_of(each) for each in found]})
    elif prepared:
        _list_prepared(found)
    else:
        _list("Transactions", found)
    found.check()


def _list_prepared(found: Iterable[TransactionInfo]) -> None:
    print_table(
        "Prepared transactions",
        ("id", "scope", "owner", "name", "prepared", "age", "events", "by"),
        (
            (t.txn_id.hex(), t.scope, t.owner, t.name, time_text(t.prepared_ms), _age(t.prepared_ms),
             t.counts.committed, t.prepared_by.hex()[:8] or "who has its token")
            for t in found
        ),
    )  # fmt: skip


def _age(since_ms: int) -> str:
    return _span(time.time() - since_ms / 1000)


def _span(span: float) -> str:
    seconds = max(0, int(span))
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _list_open(found: Iterable[OpenTransaction]) -> None:
    print_table(
        "Open transactions",
        ("id", "scope", "owner", "name", "state", "age", "heard of", "keepalive left", "bytes",
         "writers", "streams"),
        (
            (t.info.txn_id.hex(), t.info.scope, t.info.owner, t.info.name, t.info.state, _span(t.age),
             f"{_span(t.silent)} ago", None if t.left is None else _span(t.left), t.staged_bytes, t.writer_count,
             ", ".join(t.info.streams))
            for t in found
        ),
    )  # fmt: skip


def _list_waiting(found: Iterable[OpenTransaction]) -> None:
    print_table(
        "Decided transactions that wait",
        ("id", "scope", "owner", "state", "age", "waits", "for", "end it by"),
        (
            (t.info.txn_id.hex(), t.info.scope, t.info.owner, t.info.state, _span(t.age),
             _waited(t.waits), t.waits.text, t.ends)
            for t in found if t.waits is not None
        ),
    )  # fmt: skip


def _waited(waits: WaitInfo) -> str | None:
    return None if waits.age_ms < 0 else _span(waits.age_ms / 1000)


def _list(title: str, found: Iterable[TransactionInfo]) -> None:
    print_table(
        title,
        ("id", "scope", "owner", "name", "state", "begun", "committed", "rejected", "left out"),
        (
            (t.txn_id.hex(), t.scope, t.owner, t.name, t.state, time_text(t.begun_ms), t.counts.committed,
             t.counts.rejected, t.counts.left_out)
            for t in found
        ),
    )  # fmt: skip


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
    elif options.json:
        print_json({"transactions": [document_of(info) for info in found]})
    else:
        print_table(
            "Transactions",
            ("id", "owner", "state"),
            [(t.txn_id.hex(), t.owner, t.state) for t in found],
        )
    if refused is not None:
        raise refused


def _abort(client: Client, txn_id: bytes) -> None:
    """Abort, unless it was prepared since it was chosen: its coordinator may have decided."""
    if client.state(txn_id).state == "PREPARED":
        raise IllegalState(
            f"transaction {txn_id.hex()} is PREPARED: its coordinator ends it, or, if that is gone for good, "
            "`anabranch txn settle --presume`"
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
        _list_open(found)
    if found:
        confirm(f"{count_of(len(found), 'transaction')} will be aborted.", yes=yes)
    return [t.info.txn_id for t in found]


def seconds_of(text: str) -> float:
    """Seconds of a span such as ``90s``, ``30m``, ``1h``, ``2d``. `InvalidArgument`."""
    if not re.fullmatch(r"[0-9]{1,9}[smhd]", text):
        raise InvalidArgument(f"{text!r} is no span of time, such as 90s, 30m, 1h or 2d")
    return float(text[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[text[-1]]


@app.command("settle")
def settle(
    options: OperatorOptions,
    txn: TxnIdText,
    presume: Annotated[
        str | None,
        option("--presume commit|abort", "It is PREPARED, and its coordinator is gone for good."),
    ] = None,
    yes: Yes = False,
) -> None:
    """End a transaction whose merge does not go on, as a stream of it waits or is LOST: abort it in all of them.

    Or end a PREPARED one in the place of its coordinator, which may have decided otherwise. Else only for one in
    FINALIZE_IN_PROGRESS that waits (`anabranch txn describe` says for what). Consumers that read the topics of its
    other streams directly may have seen events of it, and keep seeing them; snapshots, ordered readers and Spark
    never do. Needs a lane that may operate on the scope.
    """
    if presume not in (None, "commit", "abort"):
        raise InvalidArgument(f"--presume {presume!r}: commit or abort")
    connecting = options.client()  # wrong options are refused before the question
    if len(txn) != 2 * TXN_ID_SIZE:
        raise InvalidArgument("settle takes all 32 digits of an id")
    txn_id = parse_txn_text(txn)
    what = (
        f"Transaction {txn_id.hex()} will be aborted in all its streams for good, though it might go on by itself "
        "once what it waits for is mended. Events of it that stand in their "
        "topics stay there for consumers that read them plainly."
    )
    if presume is not None:
        what = (
            f"Prepared transaction {txn_id.hex()} will end by {presume}, whatever its coordinator decided: if a "
            "database has its row, or lacks it, the two disagree from then on."
        )
    confirm(what, yes=yes)
    with connecting as client:
        client.settle(
            txn_id,
            reason="settled by an operator",
            presume=None if presume is None else presume == "commit",
        )
        _show(client.state(txn_id), as_json=options.json)


def document_of(info: TransactionInfo) -> dict[str, Any]:
    """A transaction as JSON."""
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
        "writers": [
            {
                "writer": _writer_text(w.writer),
                "events": w.events,
                "finished": w.finished,
            }
            for w in info.writers
        ],
    }


def _writer_text(writer: int) -> str:
    return f"{writer & 0xFFFFFFFFFFFFFFFF:016x}"


def open_document(found: OpenTransaction) -> dict[str, Any]:
    """An open transaction as JSON, with what it holds."""
    document = document_of(found.info) | {
        "staged_bytes": found.staged_bytes,
        "age_s": found.age,
        "silent_s": found.silent,
        "keepalive_left_s": found.left,
        "writer_count": found.writer_count,
        "locks": found.locks,
        "locks_frozen": found.frozen,
        "journal_bytes": dict(found.journals),
        "waits_for": None if found.waits is None else found.waits.text,
        "waits_since": None if found.waits is None else _waited(found.waits),
        "ended_by": found.ends,
    }
    if found.writers:
        document["writers"] = [
            {
                "writer": _writer_text(w.writer),
                "label": w.label,
                "lane": w.lane,
                "events": w.events,
                "finished": w.finished,
            }
            for w in found.writers
        ]
    if found.carries:
        document["merge"] = [
            {
                "stream": c.stream,
                "partition": c.partition,
                "events_done": c.carried,
                "events": c.events,
                "chunks_done": c.chunks if c.done else c.chunks * c.carried // max(1, c.events),
                "chunks": c.chunks,
            }
            for c in found.carries
        ]
    return document


def _show(
    info: TransactionInfo, opened: OpenTransaction | None = None, *, as_json: bool = False
) -> None:
    document = document_of(info)
    if opened is not None and opened.info.state not in _FINISHED:
        document = open_document(opened)
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
    kept = document.get("journal_bytes")
    if isinstance(kept, dict):
        document["journal_bytes"] = [f"{stream}: {size:,}" for stream, size in kept.items()]
    rows = [*document.items(), *counts.items()]
    rows = [(k.replace("_", " "), ", ".join(v) if isinstance(v, list) else v) for k, v in rows]
    print_table("Transaction", ("", "value"), [(k, "-" if v in ("", None) else v) for k, v in rows])
    if writers:
        print_table(
            "Writers",
            ("writer", "label", "events", "finished"),
            (
                (w["writer"], w.get("label") or None, w["events"], "yes" if w["finished"] else "no")
                for w in writers
            ),
        )
