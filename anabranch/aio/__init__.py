"""The client for asyncio, which needs the extra ``aio``.

    async with anabranch.aio.connect("localhost:9092") as client:
        async with client.begin("nyc") as txn:
            await txn.write("nyc/flights", b"value", key=b"key")
            await txn.commit()

The protocol has no second code: each call runs the blocking client's code in a greenlet, whose waits park it.
"""

from __future__ import annotations

from anabranch.extras import need

need("greenlet")

from anabranch.aio.calls import (  # noqa: E402 - after the check of what is installed
    AsyncChanges,
    AsyncClient,
    AsyncJoinedTransaction,
    AsyncReader,
    AsyncReplica,
    AsyncSnapshot,
    AsyncSnapshotReader,
    AsyncTableSnapshot,
    AsyncTableTransaction,
    AsyncTaskReader,
    AsyncTransaction,
    AsyncTransactionReader,
    AsyncWriter,
    AsyncWriteSession,
    connect,
)

__all__ = [
    "AsyncChanges",
    "AsyncClient",
    "AsyncJoinedTransaction",
    "AsyncReader",
    "AsyncReplica",
    "AsyncSnapshot",
    "AsyncSnapshotReader",
    "AsyncTableSnapshot",
    "AsyncTableTransaction",
    "AsyncTaskReader",
    "AsyncTransaction",
    "AsyncTransactionReader",
    "AsyncWriteSession",
    "AsyncWriter",
    "connect",
]
