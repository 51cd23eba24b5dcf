"""Bases over a real controller and the log in memory: what begins at one shows what the whole log showed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anabranch.client.client import Client
from anabranch.core.hybrid_time import from_s, to_s
from anabranch.errors import AnabranchError, NotReady, SnapshotExpired
from anabranch.ports import TopicPartition
from anabranch.tables import follow
from anabranch.tables.replica import Replica
from anabranch.topics.names import history_topic, stream_topic
from tests.client.world import World
from tests.tables.test_replica import check, write
from tests.tables.worlds import Truth, as_it_lies, operator, replica

ONE, TWO = "bank/one", "bank/two"
BASE = "bank/one-base"


@pytest.fixture
def world() -> World:
    made = World()
    for table in (ONE, TWO):
        made.client.create_table(table, 2, {"table.history.ms": 2000})
    return made


def compacted(client: Client, table: str = ONE, **how: Any) -> Any:
    return client.compact_table(table, plain_readers_lose_history=True, **how)


def test_it(world: World, tmp_path: Path) -> None:
    truth = Truth(world, [ONE, TWO])
    for i in range(5):
        with world.client.begin("bank") as txn:
            for k in range(20):
                txn.write(ONE, b"%d" % i, b"k%d" % k)
            txn.commit()
        world.clock.sleep(1)
    old = replica(world, truth, [ONE], tmp_path)
    old.snapshot()
    old.close()
    base = compacted(operator(world))
    print(base)
    with replica(world, truth, [ONE], None) as found:
        found.snapshot()
        print(found._store.marks)
        for at in range(to_s(base.timestamp), to_s(found.timestamp)):
            check(found, truth, from_s(at))
