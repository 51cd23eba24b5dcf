"""`anabranch txn`: list, describe, abort and settle transactions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli.options import App, ClusterOptions, KeyFile, Yes, confirm
from anabranch.cli.output import print_json, print_table, time_text
from anabranch.core.hybrid_time import to_text
from anabranch.core.ids import parse_txn_text
from anabranch.errors import InvalidArgument

if TYPE_CHECKING:
    from anabranch import Client, TransactionInfo

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
def abort(options: ClusterOptions, txn: TxnIdText, key_file: KeyFile = None) -> None:
    """Abort an open transaction, as an operator.

    An abort needs a token, and only the controllers' key file can make one for an id: run this where the key file
    is, or give it with --key-file. Programs that hold the transaction's token call client.abort(token) instead.
    """
    txn_id = parse_txn_text(txn)
    key = operator_key(key_file)
    with options.client() as client:
        client.abort(_operator_token(client, txn_id, key), reason="aborted by an operator")
        _show(client.state(txn_id), as_json=options.json)


@app.command("settle")
def settle(
    options: ClusterOptions,
    txn: TxnIdText,
    yes: Yes = False,
    key_file: KeyFile = None,
) -> None:
    """End a transaction whose merge can't go on because a stream of it is LOST: abort it in all its streams.

    Only for a big transaction in FINALIZE_IN_PROGRESS with a part in a LOST stream. Consumers that read the
    topics of its other streams directly may have seen events of it, and keep seeing them; snapshots, ordered
    readers and Spark never do. Needs the controllers' key file, as abort does.
    """
    txn_id = parse_txn_text(txn)
    key = operator_key(key_file)
    connecting = options.client()  # wrong options are refused before the question
    confirm(
        f"Transaction {txn_id.hex()} will be aborted in all its streams for good. Events of it that stand in their "
        "topics stay there for consumers that read them plainly.",
        yes=yes,
    )
    with connecting as client:
        client.settle(_operator_token(client, txn_id, key), reason="settled by an operator")
        _show(client.state(txn_id), as_json=options.json)


def _operator_token(client: Client, txn_id: bytes, key: bytes) -> bytes:
    """A token of the transaction, made with the controllers' key."""
    from anabranch.core.tokens import Token, operator_proof, sign

    info = client.state(txn_id)
    signed = sign(Token(txn_id, round(info.keepalive * 1000), info.scope), key)
    return signed + operator_proof(signed, key)


def operator_key(key_file: Path | None) -> bytes:
    """The controllers' key. Never makes one: controllers would refuse its tokens."""
    from anabranch.processors.keyfile import key_path, load_or_create

    path = key_path(key_file)
    if not path.exists():
        raise InvalidArgument(
            f"an operator needs the controllers' key file, and {path} is not there: "
            "run this on a controller's machine, or give it with --key-file"
        )
    return load_or_create(path)


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
