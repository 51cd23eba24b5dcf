"""`MemoryCluster`: clients on a real controller in memory, and what such a cluster refuses."""

from __future__ import annotations

import threading
import time

import pytest

from anabranch.client.table_transaction import TableTransaction
from anabranch.errors import DeadlineExceeded, RetryError, TransactionAborted, UnsupportedSetting
from anabranch.testing import MemoryCluster


def test_clients_write_together_and_read() -> None:
    cluster = MemoryCluster()
    with cluster.connect() as one, cluster.connect(one_shot_bytes=0) as two:
        one.create_stream("shop/orders", segments=2)
        with one.begin("shop") as txn, two.join(txn.token()) as writer:
            writer.write("shop/orders", b"theirs", key=b"a")
            txn.write("shop/orders", b"ours", key=b"a")
            txn.commit(receipts=[writer.finish()])
        one.scale("shop/orders", segments=4)
        with two.begin("shop") as txn:
            txn.write("shop/orders", b"later", key=b"a")
            txn.commit()
        with one.read("shop/orders", timeout=60) as reader:
            values = [event.value for event in reader]
        assert sorted(values[:2]) == [b"ours", b"theirs"]  # type: ignore[type-var]
        assert values[2:] == [b"later"]


def test_a_transaction_without_heartbeats_expires_as_time_passes() -> None:
    cluster = MemoryCluster()
    began = time.monotonic()
    with cluster.connect() as client:
        client.create_stream("shop/orders")
        txn = client.begin("shop")
        txn.write("shop/orders", b"value", key=b"a")
        txn.flush()
        cluster.advance(600)
        with pytest.raises(TransactionAborted):
            txn.commit()
        assert client.count_events("shop/orders").events == 0
    assert time.monotonic() - began < 30


def test_without_a_controller_calls_time_out_and_a_new_one_knows_all() -> None:
    cluster = MemoryCluster()
    with cluster.connect(timeout=5) as client:
        client.create_stream("shop/orders")
        cluster.stop_controller()
        with pytest.raises((DeadlineExceeded, RetryError)):
            client.create_stream("shop/more")
        cluster.start_controller()
        assert len(client.describe("shop/orders").segments) == 1


def test_rows_and_events_commit_together_without_another_thread() -> None:
    """A thread of the replica would move the clock during the test's own calls, so that they time out."""
    pytest.importorskip("rocksdict")
    with MemoryCluster().connect() as client:
        client.create_table("shop/stock")
        client.create_stream("shop/orders")
        with client.replica("shop/stock") as replica:
            assert "replica" not in {thread.name for thread in threading.enumerate()}

            def order(txn: TableTransaction) -> int:
                left = int(txn.get("shop/stock", b"figs") or b"3") - 1
                txn.put("shop/stock", b"figs", b"%d" % left)
                txn.write("shop/orders", b"fig", key=b"ann")
                return left

            assert [replica.transact(order).value for _ in range(2)] == [2, 1]
            with replica.snapshot() as now:
                assert now.get("shop/stock", b"figs") == b"1"
        with client.read("shop/orders", timeout=1) as reader:
            assert len(list(reader)) == 2


def test_groups_are_refused() -> None:
    with MemoryCluster().connect() as client:
        client.create_stream("shop/orders")
        with pytest.raises(UnsupportedSetting, match="no consumer groups"):
            client.read("shop/orders", "group")
