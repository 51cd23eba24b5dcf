"""The stream decides: the outcome of a transaction ends a transaction that a database has prepared.

This is the reverse of the ledger (docs/ledger.md). PostgreSQL's `PREPARE TRANSACTION` keeps the rows and their
locks, under the id of the anabranch transaction. `recover` asks for the outcome, and ends the prepared one alike.
The server needs `max_prepared_transactions` above 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

import anabranch

FORMAT = 0x616E6162  # marks ours among the server's prepared transactions


@contextmanager
def decided_by_stream(
    txn: anabranch.Transaction, connection: psycopg.Connection
) -> Iterator[psycopg.Cursor]:
    """A cursor whose statements are committed if the transaction is. ``connection`` has begun no transaction."""
    txn.token()  # gives it an id
    name = (txn.txn_id or b"").hex()
    connection.tpc_begin(connection.xid(FORMAT, name, "anabranch"))
    try:
        with connection.cursor() as cursor:
            yield cursor
        connection.tpc_prepare()
    except BaseException:
        connection.tpc_rollback()
        raise
    try:
        txn.commit()
    except anabranch.errors.AskOutcomeError:
        raise  # it stays prepared: `recover` ends it
    except anabranch.errors.AnabranchError:
        txn.abort()
        connection.tpc_rollback()
        raise
    connection.tpc_commit()


def recover(client: anabranch.Client, connection: psycopg.Connection) -> int:
    """End the prepared transactions of dead processes; returns how many of these can't be ended yet."""
    waiting = 0
    for xid in connection.tpc_recover():
        if xid.format_id != FORMAT:
            continue
        state = client.resolve(xid.gtrid).state  # aborts it if the controller does not know it
        if state == "COMMITTED":
            connection.tpc_commit(xid)
        elif state == "ABORTED":
            connection.tpc_rollback(xid)
        else:
            waiting += 1
    return waiting
