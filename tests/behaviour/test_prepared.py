"""Prepared transactions on a real broker: a takeover without the folder, a scaling and readers in between."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

import anabranch
from anabranch.errors import (
    IllegalState,
    NotAuthorized,
    ReservedByPrepared,
    RetryError,
    TransactionAborted,
    WritersUnfinished,
)
from tests.behaviour.test_client_transactions import run
from tests.cluster import Cluster, start_cluster
from tests.conftest import Broker

pytestmark = pytest.mark.broker
SECRET = b"s" * 32
BY = sha256(SECRET).digest()

DIES = """
import os, sys, anabranch
client = anabranch.connect(sys.argv[1], prefix=sys.argv[2])
txn = client.begin("shop", keepalive=10)
txn.write("shop/a", b"of the dead", key=b"k")
txn.prepare(by=bytes.fromhex(sys.argv[3]), attempt=b"1")
os._exit(0)
"""


@pytest.fixture(scope="module")
def own(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder, quick = tmp_path_factory.mktemp("prepared"), ("--session-timeout", "2")
    cluster = start_cluster(broker.bootstrap, folder, "prepared", quick)
    yield cluster
    cluster.controller.kill()


@pytest.fixture(scope="module")
def client(own: Cluster, broker: Broker) -> Iterator[anabranch.Client]:
    with anabranch.connect(broker.bootstrap, prefix="prepared") as client:
        for stream in ("shop/a", "shop/b"):
            client.create_stream(stream, segments=2)
        yield client


def values(client: anabranch.Client, stream: str = "shop/a") -> Counter[bytes | None]:
    return Counter(event.value for event in client.snapshot(stream).read(stream))


@pytest.mark.long
def test_days_later_by_another_process(
    own: Cluster, client: anabranch.Client, broker: Broker, tmp_path: Path
) -> None:
    """Its process dies, the leader dies and loses its folder, the stream scales; others never wait."""
    told = run(DIES, broker.bootstrap, "prepared", BY.hex())
    assert told.returncode == 0, told.stderr
    with client.begin("shop", keepalive=10) as mine:
        mine.write("shop/a", b"mine", key=b"k")
        mine.write("shop/b", b"mine", key=b"k")
        token = mine.token("all")
        assert mine.prepare().state == "PREPARED"
        with pytest.raises(IllegalState, match="prepared: commit or abort"):
            mine.write("shop/a", b"more")
    own.controller.kill()
    shutil.rmtree(own.controller.folder / "data")
    own.controller.start()
    own.controller.wait_leading()
    client.scale("shop/a", 3)
    with client.begin("shop") as plain:
        plain.write("shop/a", b"plain", key=b"k")
        plain.commit()
    assert values(client) == {b"plain": 1}
    waiting = client.prepared("shop")
    assert {info.state for info in waiting} == {"PREPARED"}
    (dead,) = client.prepared("shop", secret=SECRET)
    assert (dead.counts.committed, dead.prepared_by, len(waiting)) == (1, BY, 2)
    assert dead.prepared_at is not None
    with pytest.raises(NotAuthorized):
        client.commit(dead.txn_id, secret=b"x" * 32)
    assert client.commit(dead.txn_id, secret=SECRET).counts.committed == 1
    assert client.commit(dead.txn_id, secret=SECRET).txn_id == dead.txn_id
    assert client.commit(token).counts.committed == 2
    assert values(client) == {b"plain": 1, b"mine": 1, b"of the dead": 1}
    assert values(client, "shop/b") == {b"mine": 1}
    assert client.prepared() == []


@pytest.mark.long
def test_a_refused_prepare_leaves_it_open(client: anabranch.Client) -> None:
    with client.begin("shop") as txn:
        writer = client.join(txn.token())
        writer.write("shop/a", b"half", key=b"h")
        writer.flush()
        with pytest.raises(WritersUnfinished):
            txn.prepare()
        txn.write("shop/a", b"half", key=b"h")
        writer.finish()
        assert txn.prepare(by=BY, attempt=b"1").counts.committed == 2
        with pytest.raises(NotAuthorized, match="whose word alone"):
            txn.abort()
        assert txn.prepare(by=BY, attempt=b"1").state == "PREPARED", "its handle is as it was"
        txn.abort(secret=SECRET)
        with pytest.raises(TransactionAborted):
            txn.commit()
    assert b"half" not in values(client)


@pytest.mark.soak
def test_its_name_gives_it_back(client: anabranch.Client) -> None:
    with client.begin("shop", name="nightly") as txn:
        txn.write("shop/b", b"named", key=b"n")
        txn.prepare()
        token = txn.token("all")
    with client.begin("shop", name="nightly") as again:
        assert (again.prepare().state, again.txn_id) == ("PREPARED", txn.txn_id)
    with (
        client.begin("shop") as other,
        pytest.raises(ReservedByPrepared, match=(txn.txn_id or b"").hex()),
    ):
        other.commit(name="nightly")
    assert txn.commit().counts.committed == 1
    assert client.commit(token).txn_id == txn.txn_id
    with client.begin("shop", name="nightly") as done:
        assert done.result is not None
        assert done.prepare().state == "COMMITTED", "what was done before is told"


@pytest.mark.long
def test_locked_rows_and_positions_are_held_until_the_end(
    client: anabranch.Client, broker: Broker
) -> None:
    """By one command, and by journals."""
    with anabranch.connect(broker.bootstrap, prefix="prepared", lane="admin") as operator:
        operator.feature_level(raise_to=3)
    client.create_stream("held/orders")
    client.create_table("held/stock")
    client.create_processor("held/sell", "held/orders", tasks=1)
    client.transact(lambda txn: txn.write_many("held/orders", [(b"1", b"a"), (b"2", b"a")]))

    def sold(left: int) -> None:
        with anabranch.connect(broker.bootstrap, prefix="prepared") as other:
            txn = other.begin("held")
            txn.write("held/stock", b"%d" % left, key=b"tea")
            with pytest.raises(RetryError):
                txn.commit(timeout=0.5)
            txn.abort()

    with client.replica("held/stock") as stock:
        for keepalive in (None, 60.0):
            ownership = client.take_tasks("held/sell")
            with (
                client.read("held/orders", timeout=5, ownership=ownership) as reader,
                stock.begin(keepalive=keepalive, ownership=ownership) as txn,
            ):
                next(reader)
                left = int(txn.get("held/stock", b"tea") or b"9")
                txn.put("held/stock", b"tea", b"%d" % (left - 1))
                txn.prepare(consumed=reader.consumed())
                sold(100)
                txn.commit()
        with stock.snapshot() as view:
            assert view.get("held/stock", b"tea") == b"7"
    with client.read(
        "held/orders", timeout=0.5, ownership=client.take_tasks("held/sell")
    ) as reader:
        assert list(reader) == []
