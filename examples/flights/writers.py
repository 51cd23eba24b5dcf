"""The roles that write, commit and abort the run's big transactions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from threading import Event
from typing import Any

from anabranch.batches import framing
from anabranch.cli.options import Target, connected
from examples.flights.child import Say
from examples.flights.notes import BY_HEADER, stream_of
from examples.flights.source import TABLES, find_source

PROGRESS_ROWS = 1_000
HANG_S = 120.0


def target_from(parameters: Mapping[str, Any]) -> Target:
    """The cluster named by the parent."""
    return Target(**parameters["target"])


def compile_code(parameters: Mapping[str, Any], say: Say, finish: Event) -> None:
    """Compile the code that controllers compile at their first use, so that they need not wait for it."""
    framing.warm()
    say("finished")


def make(parameters: Mapping[str, Any], say: Say, finish: Event) -> None:
    with connected(target_from(parameters)) as client:
        for table in TABLES:
            client.create_stream(
                stream_of(parameters["scope"], table),
                segments=table.segments,
                # The rows carry times of 2013: a stream with a time limit would lose them.
                settings={"retention.ms": "-1"},
            )
    say("finished")


def drive(parameters: Mapping[str, Any], say: Say, finish: Event) -> None:
    """Begin a transaction, report its token, and end."""
    with connected(target_from(parameters)) as client:
        txn = client.begin(
            parameters["scope"], name=parameters["begin_as"], keepalive=parameters["keepalive"]
        )
        # Tokens with the fewest rights: five processes write, and another one commits or aborts.
        token, ending = txn.token("write"), txn.token(("commit", "abort"))
        txn_id = txn.txn_id
        if txn_id is None:
            raise RuntimeError("a begun transaction has no id")
        say("begun", token=token.hex(), ending=ending.hex(), txn_id=txn_id.hex())


def write(parameters: Mapping[str, Any], say: Say, finish: Event) -> None:
    """Join by token and write a share of the given tables.

    With ``flush_at`` and ``hang_at`` it flushes after this many rows, continues, and then waits to be killed.
    """
    source = find_source(parameters["limit"])
    tables = [table for table in TABLES if table.name in parameters["tables"]]
    scope, share, of = parameters["scope"], parameters["share"], parameters["of"]
    prefix = parameters.get("mark", "").encode()
    flush_at, hang_at = parameters.get("flush_at"), parameters.get("hang_at")
    by = parameters["by"]
    headers = [(BY_HEADER, by.encode())] if by else None
    written = 0
    with (
        connected(target_from(parameters)) as client,
        client.join(bytes.fromhex(parameters["token"])) as writer,
    ):
        for table in tables:
            stream = stream_of(scope, table)
            for row in source.share(table, share, of):
                writer.write(stream, prefix + row.value(), row.key, headers, row.timestamp)
                written += 1
                if written % PROGRESS_ROWS == 0:
                    say("wrote", rows=written)
                if written == flush_at:
                    receipt = writer.flush()
                    say("flushed", rows=written, receipt=receipt.to_bytes().hex())
                if written == hang_at:
                    say("waiting", rows=written)
                    finish.wait(HANG_S)
                    raise RuntimeError("nobody came to kill this process")
        receipt = writer.finish()
    say("wrote", rows=written)
    say("finished", rows=written, receipt=receipt.to_bytes().hex(), txn_id=receipt.txn_id.hex())


def commit(parameters: Mapping[str, Any], say: Say, finish: Event) -> None:
    """Commit by token, with exactly the given receipts."""
    with connected(target_from(parameters)) as client:
        token = bytes.fromhex(parameters["token"])
        receipts = [bytes.fromhex(receipt) for receipt in parameters["receipts"]]
        say("state", state=client.state(token).state)
        requested = time.monotonic()
        say("requested", requested=requested)
        result = client.commit(token, receipts=receipts, timeout=parameters["timeout"])
        say(
            "committed",
            requested=requested,
            txn_id=result.txn_id.hex(),
            commit_timestamp=result.commit_timestamp,
            committed=result.counts.committed,
            rejected=result.counts.rejected,
            left_out=result.counts.left_out,
        )


def abort(parameters: Mapping[str, Any], say: Say, finish: Event) -> None:
    with connected(target_from(parameters)) as client:
        token = bytes.fromhex(parameters["token"])
        client.abort(token)
        say("aborted", state=client.state(token).state)


def ask(parameters: Mapping[str, Any], say: Say, finish: Event) -> None:
    """Begin under a committed name, as a restarted driver would, and report the outcome."""
    with connected(target_from(parameters)) as client:
        result = client.begin(parameters["scope"], name=parameters["begin_as"]).result
        say(
            "outcome",
            txn_id=result.txn_id.hex() if result else None,
            commit_timestamp=result.commit_timestamp if result else None,
            committed=result.counts.committed if result else None,
        )
