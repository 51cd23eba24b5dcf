"""Exclusive streams through clients: one transaction at a time writes a segment, whoever leads."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

import anabranch
from anabranch import errors
from anabranch.client.transaction import Transaction
from anabranch.protocol.ids import made_ms_of
from anabranch.protocol.partitioner import position_of
from anabranch.testing import MemoryCluster
from tests.cluster import Cluster

LOW, HIGH = b"key-0", b"key-1"  # in the first and in the second of two segments


def test_a_client_waits_for_younger_ones_and_dies_of_older_ones() -> None:
    cluster = MemoryCluster()
    with cluster.connect() as client, cluster.connect(timeout=2) as other:
        stream = "shop/once"
        found = client.create_stream(stream, segments=2, exclusive=True)
        assert found.settings == {"exclusive": "true"}
        client.create_stream(stream, segments=2, exclusive=True)
        with pytest.raises(errors.StreamExists, match="exclusive is true"):
            client.create_stream(stream, segments=2)
        with cluster.connect(lane="admin") as operator:
            with pytest.raises(errors.UnsupportedSetting, match="exclusive"):
                operator.alter_stream(stream, {"exclusive": None})
            operator.alter_stream(stream, {"exclusive.hold.ms": "1h"})
        with client.begin("shop") as old, other.begin("shop") as young:
            token = old.token()
            cluster.advance(0.01)
            young.token()
            young.write(stream, b"1", key=LOW)
            young.flush()
            writer = other.join(token)
            with pytest.raises(errors.Locked, match="segment 0 of shop/once for"):
                writer.write(stream, b"2", key=LOW)
            (held,) = client.open_transaction(young.txn_id or b"").locked_segments
            assert (held.segment, held.waiting) == (0, (old.txn_id,))
            with client.outside(), client.begin("shop") as small:
                small.write(stream, b"3", key=LOW)
                with pytest.raises(errors.Locked):
                    small.commit()
            old.write_many(stream, [(b"4", HIGH)] * 3)
            with pytest.raises(errors.TransactionAborted, match="locked segment 1 of shop/once"):
                young.write_many(stream, [(b"5", HIGH)])
            with pytest.raises(errors.TransactionAborted, match="wait-die"):
                young.write(stream, b"6", key=LOW)
            old.write(stream, b"7", key=LOW)
            old.write(stream, b"8")
            assert old.commit(receipts=[]).counts.committed == 5
        with client.session() as session:
            session.apply(stream, b"9", LOW)
        with client.read(stream, timeout=1) as reader:
            assert Counter(event.value for event in reader) == {b"4": 3, b"7": 1, b"8": 1, b"9": 1}


def test_a_transaction_commits_without_the_write_that_raised_locked() -> None:
    cluster = MemoryCluster()
    with cluster.connect(timeout=4) as client, cluster.connect() as other:
        client.create_stream("shop/once", exclusive=True)
        client.transact(lambda txn: (txn.token(), txn.write("shop/once", b"0")), scope="shop")
        with client.begin("shop") as old, other.begin("shop") as young:
            old.token()
            cluster.advance(0.01)
            young.token()
            young.write("shop/once", b"1")
            with pytest.raises(errors.Locked):
                old.write("shop/once", b"2")
            assert old.commit().counts.committed == 0


def test_a_try_after_an_abort_is_as_old_as_the_first_one() -> None:
    cluster = MemoryCluster()
    tries: list[bytes] = []
    with cluster.connect() as client, cluster.connect() as older:
        client.create_stream("shop/once", exclusive=True)
        with older.begin("shop") as holder:
            holder.token()
            holder.write("shop/once", b"1", key=LOW)
            holder.flush()
            cluster.advance(1)

            def write(txn: Transaction) -> None:
                txn.token()
                tries.append(txn.txn_id or b"")
                if len(tries) == 3:
                    holder.commit()
                txn.write("shop/once", b"2", key=LOW)

            client.transact(write, scope="shop")
    assert len(set(tries)) == 3
    assert len({made_ms_of(txn_id) for txn_id in tries}) == 1


class Desks:
    """Which transaction is in which segment, as its client sees it."""

    def __init__(self) -> None:
        self.lock, self.inside = threading.Lock(), dict[tuple[str, int], int]()
        self.committed = Counter[str]()
        self.died = 0

    def enter(self, places: list[tuple[str, int]], who: int) -> None:
        with self.lock:
            for place in places:
                assert self.inside.setdefault(place, who) == who, f"two are in {place}"

    def leave(self, who: int) -> None:
        with self.lock:
            self.inside = {place: one for place, one in self.inside.items() if one != who}


@pytest.mark.broker
@pytest.mark.soak
def test_contenders_never_meet_and_all_end_while_leaders_are_killed(
    own_cluster: Cluster, unique: str
) -> None:
    at, prefix, desks = own_cluster.bootstrap, own_cluster.prefix, Desks()
    streams = [f"e{unique}/{name}" for name in "ab"]
    with anabranch.connect(at, prefix=prefix, lane="admin") as operator:
        operator.feature_level(raise_to=4)
    with anabranch.connect(at, prefix=prefix, timeout=120) as client:
        for stream in streams:
            client.create_stream(stream, segments=2, exclusive=True)

        def transfer(number: int, rng: random.Random) -> None:
            who = rng.randrange(1 << 60)
            with client.begin(f"e{unique}", keepalive=20) as txn:
                txn.token()
                places = []
                for stream in rng.sample(streams, rng.randrange(1, 3)):
                    key = b"key-%d" % rng.randrange(20)
                    txn.write(stream, b"%d" % number, key=key)
                    places.append((stream, position_of(key) >> 31))
                    desks.enter(places, who)
                    time.sleep(0.01)
                    desks.leave(who)  # a call may free them: a commit, or a write of one that dies
                counts = txn.commit().counts
                desks.committed.update({"events": counts.committed})

        def work(number: int) -> None:
            rng, done = random.Random(number), 0
            while done < 8:
                try:
                    transfer(number, rng)
                    done += 1
                except (errors.BeginAgainError, errors.RetryError):
                    desks.died += 1
                    time.sleep(rng.uniform(0.02, 0.1))

        with ThreadPoolExecutor() as pool:
            futures = [pool.submit(work, number) for number in range(6)]
            for _ in range(2):
                time.sleep(1)
                own_cluster.controller.kill()
                own_cluster.controller.start().wait_leading()
            for future in futures:
                future.result(timeout=240)
        found = sum(client.count_events(stream).events for stream in streams)
        assert found == desks.committed["events"]
        assert not client.open_transactions().check()
