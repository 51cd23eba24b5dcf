"""`anabranch txn`: list, describe, abort and settle transactions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli.options import App, ClusterOptions, Yes, confirm
from anabranch.cli.output import print_json, print_table, time_text
from anabranch.core.hybrid_time import to_text
from anabranch.core.ids import parse_txn_text

if TYPE_CHECKING:
    from anabranch import TransactionInfo

app = App(no_args_is_help=True, help="List, describe, abort and settle transactions.")
TxnIdText = Annotated[
    str, typer.Argument(metavar="ID", help="The transaction's id, 32 hexadecimal digits.")
]


@app.command("list")
def list_transactions(
    options: ClusterOptions,
    scope: Annotated[str | None, typer.Argument(metavar="SCOPE", help="Only this scope.")] = None,
    finished: Annotated[
        bool, typer.Option("--finished", "-f", help="Committed and aborted ones too.")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 100,
) -> None:
    """List transactions: open ones, the oldest first; or all that are kept, the newest first."""
    with options.client() as client:
        found = list(client.transactions(scope=scope, finished=finished, limit=limit))
    if options.json:
        print_json({"transactions": [document_of(each) for each in found]})
        return
    print_table(
        "Transactions" if finished else "Open transactions",
        ("id", "scope", "name", "state", "begun", "committed", "rejected", "left out"),
        (
            (t.txn_id.hex(), t.scope, t.name, t.state, time_text(t.begun_ms), t.counts.committed,
             t.counts.rejected, t.counts.left_out)
            for t in found
        ),
    )  # fmt: skip


@app.command("describe")
def describe(options: ClusterOptions, txn: TxnIdText) -> None:
    """Show a transaction: its state and outcome, its streams and writers."""
    txn_id = parse_txn_text(txn)
    with options.client() as client:
        _show(client.state(txn_id), as_json=options.json)


@app.command("abort")
def abort(options: ClusterOptions, txn: TxnIdText) -> None:
    """Abort an open transaction, as an operator: in a lane that may operate on its scope, or that began it.

    Programs that hold a token of the transaction call client.abort(token) instead.
    """
    txn_id = parse_txn_text(txn)
    with options.client() as client:
        client.abort(txn_id, reason="aborted by an operator")
        _show(client.state(txn_id), as_json=options.json)


@app.command("settle")
def settle(
    options: ClusterOptions,
    txn: TxnIdText,
    yes: Yes = False,
) -> None:
    """End a transaction whose merge can't go on because a stream of it is LOST: abort it in all its streams.

    Only for a big transaction in FINALIZE_IN_PROGRESS with a part in a LOST stream. Consumers that read the
    topics of its other streams directly may have seen events of it, and keep seeing them; snapshots, ordered
    readers and Spark never do. Needs a lane that may operate on the scope.
    """
    txn_id = parse_txn_text(txn)
    connecting = options.client()  # wrong options are refused before the question
    confirm(
        f"Transaction {txn_id.hex()} will be aborted in all its streams for good. Events of it that stand in their "
        "topics stay there for consumers that read them plainly.",
        yes=yes,
    )
    with connecting as client:
        client.settle(txn_id, reason="settled by an operator")
        _show(client.state(txn_id), as_json=options.json)


def document_of(info: TransactionInfo) -> dict[str, Any]:
    """A transaction as JSON."""
    return {
        "txn_id": info.txn_id.hex(),
        "state": info.state,
        "scope": info.scope,
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
        "writers": [
            {
                "writer": f"{w.writer & 0xFFFFFFFFFFFFFFFF:016x}",
                "events": w.events,
                "finished": w.finished,
            }
            for w in info.writers
        ],
    }


def _show(info: TransactionInfo, *, as_json: bool) -> None:
    document = document_of(info)
    if as_json:
        print_json(document)
        return
    counts, writers = document.pop("counts"), document.pop("writers")
    if not document["commit_timestamp"]:
        document["commit_timestamp"] = None
    rows = [*document.items(), *counts.items()]
    rows = [(k.replace("_", " "), ", ".join(v) if isinstance(v, list) else v) for k, v in rows]
    print_table("Transaction", ("", "value"), [(k, "-" if v in ("", None) else v) for k, v in rows])
    if writers:
        print_table(
            "Writers",
            ("writer", "events", "finished"),
            ((w["writer"], w["events"], "yes" if w["finished"] else "no") for w in writers),
        )
