"""The asyncio client on a real broker: threads, cancellation, and what must not block the loop."""

from __future__ import annotations

import asyncio

import pytest

import anabranch
import anabranch.aio
from tests.cluster import Cluster

pytestmark = pytest.mark.broker


def test_a_line_through_everything(cluster: Cluster, unique: str) -> None:
    stream = f"s{unique}/events"

    async def main() -> None:
        async with anabranch.aio.connect(cluster.bootstrap) as client:
            await client.create_stream(stream, segments=2)
            async with client.begin(f"s{unique}") as txn:
                await txn.write(stream, b"one", key=b"k")
                result = await txn.commit()
            assert result.counts.committed == 1
            async with client.begin(f"s{unique}") as txn:
                await txn.write(stream, b"two", key=b"k")
                await txn.flush()
                await txn.commit()
            found = [event.value async for event in client.read(stream, timeout=1)]
            assert found == [b"one", b"two"]

    asyncio.run(main(), debug=True)
