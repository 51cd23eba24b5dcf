"""`commit(wait="decided")`: it returns at the decision of a big commit, and the next leader merges the rest."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

import anabranch
from anabranch import aio
from anabranch.client.client import Client
from anabranch.client.transaction import Transaction
from anabranch.errors import DeadlineExceeded
from tests.cluster import Cluster

CHUNKS = 200
CHUNK_BYTES = 4096


def filled(client: Client, stream: str) -> Transaction:
    """A transaction of many chunks, of which each is carried in a round of its own."""
    txn = client.begin(stream.split("/")[0], keepalive=60)
    txn.token()
    txn.write_many(stream, [(os.urandom(CHUNK_BYTES), b"%d" % n) for n in range(CHUNKS)])
    txn.flush()
    return txn


@pytest.mark.soak
@pytest.mark.parametrize(
    "own_cluster",
    [("--chunk-bytes", str(CHUNK_BYTES), "--session-timeout", "2")],
    indirect=True,
)
def test_the_decision_is_answered_and_the_rest_survives_the_leader(
    own_cluster: Cluster, unique: str
) -> None:
    at, prefix = own_cluster.bootstrap, own_cluster.prefix
    stream, second = f"d{unique}/big", f"d{unique}/more"
    with anabranch.connect(at, prefix=prefix, lane="admin") as operator:
        operator.feature_level(raise_to=4)
    with anabranch.connect(at, prefix=prefix) as client, ThreadPoolExecutor() as pool:
        client.create_stream(stream, segments=2)
        client.create_stream(second, segments=2)
        with filled(client, stream) as txn, filled(client, second) as other:
            token, ids = txn.token("all"), [txn.txn_id or b"", other.txn_id or b""]
            first = txn.commit(wait="decided")
            assert (first.is_merged, first.commit_timestamp) == (False, 0)
            assert first.counts.committed == CHUNKS
            assert not client.is_finished(ids[0])
            assert txn.commit(wait="decided") is first
            assert not client.commit(token, wait="decided").is_merged
            assert not other.commit(wait="decided").is_merged
            with pytest.raises(DeadlineExceeded):
                list(client.finished(ids, timeout=0.05))
            future = pool.submit(txn.merged)

            own_cluster.controller.kill()  # between decision and merge
            own_cluster.controller.start().wait_leading()

            found = {info.txn_id: info for info in client.finished(ids, timeout=60)}
            assert {info.state for info in found.values()} == {"COMMITTED"}
            whole = future.result()
            assert whole.is_merged
            assert whole.commit_timestamp == found[ids[0]].commit_timestamp > 0
            assert (txn.commit(), txn.commit(wait="decided")) == (whole, whole)
            assert client.commit(token) == whole
            assert client.is_finished(ids[0])
        # One request is decided and merged in one round: it has its whole result.
        small = client.transact(lambda txn: txn.write(stream, b"one"), wait="decided")
        assert small.is_merged

    async def awaited() -> None:
        async with aio.connect(at, prefix=prefix) as client, client.begin(f"d{unique}") as txn:
            await txn.write_many(stream, [(os.urandom(CHUNK_BYTES),) for _ in range(20)])
            await txn.flush()
            first = await txn.commit(wait="decided")
            assert not first.is_merged
            waiting = asyncio.create_task(txn.merged())
            assert [info.state async for info in client.finished([first.txn_id])] == ["COMMITTED"]
            assert (await waiting).is_merged
            assert await client.is_finished(first.txn_id)

    asyncio.run(awaited())
