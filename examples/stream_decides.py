"""The stream decides: the commit of a transaction ends the one that a database has prepared.

The other way round than the ledger (docs/ledger.md): PostgreSQL's `PREPARE TRANSACTION` holds the rows and their
locks, and the transaction's id names both. `recover` asks for the outcome, and makes it final. The server needs
`max_prepared_transactions` above 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

import anabranch

FORMAT = 0x616E6162  # marks our own among the server's prepared transactions


@contextmanager
def decided_by_stream(
    txn: anabranch.Transaction, connection: psycopg.Connection
) -> Iterator[psycopg.Cursor]:
    """A cursor whose statements are committed if the transaction is. ``connection`` has begun nothing."""
    txn.token()  # it gets an id
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
    """End what dead processes left prepared in the database; returns how many wait for their transaction's end."""
    waiting = 0
    for xid in connection.tpc_recover():
        if xid.format_id != FORMAT:
            continue
        state = client.resolve(xid.gtrid).state  # an unknown one is aborted by this
        if state == "COMMITTED":
            connection.tpc_commit(xid)
        elif state == "ABORTED":
            connection.tpc_rollback(xid)
        else:
            waiting += 1
    return waiting
