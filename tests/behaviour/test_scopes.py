"""Scopes of one control partition commit together and are read as of one instant; partitions may be added."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

import anabranch
from anabranch.errors import CrossScope, NotReady
from anabranch.protocol.ids import control_partition_of
from anabranch.topics.names import commands_topic, control_topic, status_topic
from tests.cluster import START_DEADLINE_S, start_cluster
from tests.conftest import Broker

pytestmark = [pytest.mark.broker, pytest.mark.unsecured]

# The broker is shared: these names are of this file alone. The first three are near each other.
SCOPES = ("scopes-bank", "scopes-shop", "scopes-till")
BANK, FAR = SCOPES[0], "scopes-far"
START, ACCOUNTS, TRANSFERS = 100, 4, 40


@pytest.fixture(scope="module")
def client(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[anabranch.Client]:
    folder = tmp_path_factory.mktemp("scopes")
    cluster = start_cluster(broker.bootstrap, folder, "scopes", ("--control-partitions", "2"))
    try:
        with anabranch.connect(broker.bootstrap, prefix="scopes") as client:
            client.create_stream(f"{BANK}/accounts", 2)
            client.create_stream(f"{FAR}/accounts", 2)
            for scope in SCOPES[1:]:
                client.create_stream(f"{scope}/accounts", 2, near=BANK)
            yield client
    finally:
        cluster.controller.kill()


def _balances(events: dict[str, list[anabranch.Event]]) -> int:
    last = {(s, event.key): int(event.value or 0) for s, found in events.items() for event in found}
    return sum(last.values())


def test_money_over_three_scopes_is_right_at_every_instant(client: anabranch.Client) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    streams = [f"{scope}/accounts" for scope in SCOPES]
    accounts = [(s, b"a%d" % n) for s in streams for n in range(ACCOUNTS)]
    held = dict.fromkeys(accounts, START)
    with client.begin(SCOPES[1]) as txn:  # one command
        for stream, key in accounts:
            txn.write(stream, b"%d" % START, key=key)
        first = txn.commit()

    def scale() -> None:
        for stream in streams * 2:
            with suppress(NotReady):
                client.scale(stream, chance.choice((1, 2, 3)))

    scaling = threading.Thread(target=scale)
    scaling.start()
    stamps = [first.commit_timestamp]
    for number in range(TRANSFERS):
        moves = chance.sample(accounts, 2)
        for account, amount in zip(moves, (-7, 7), strict=True):
            held[account] += amount
        with client.begin(chance.choice(SCOPES)) as txn:
            mine, theirs = moves
            if number % 2:  # by journals, from two writers
                writer = client.join(txn.token())
                writer.write(theirs[0], b"%d" % held[theirs], key=theirs[1])
                receipt = writer.finish()
                txn.write(mine[0], b"%d" % held[mine], key=mine[1])
                stamps.append(txn.commit([receipt]).commit_timestamp)
            else:
                for stream, key in moves:
                    txn.write(stream, b"%d" % held[stream, key], key=key)
                stamps.append(txn.commit().commit_timestamp)
    scaling.join()
    assert stamps == sorted(stamps), seed
    for at in (*chance.sample(stamps, 8), None):
        snapshot = client.snapshot(streams, at)
        events = {s: list(snapshot.read(s)) for s in streams}
        assert _balances(events) == START * len(accounts), (seed, at)
    # A processor's cut has each transaction whole, whichever scopes it is of.
    client.create_processor(f"{SCOPES[2]}/audit", streams, 1)
    total: dict[tuple[str, bytes | None], int] = {}
    with client.read(
        streams, timeout=2.0, ownership=client.take_tasks(f"{SCOPES[2]}/audit")
    ) as reader:
        while pieces := reader.cut(time.monotonic() + 2.0, 1, 1 << 20):
            for piece in pieces:
                total |= {(e.stream, e.key): int(e.value or 0) for e in piece.events}
            assert sum(total.values()) == START * len(accounts), seed


def test_what_is_on_another_control_partition_is_refused(client: anabranch.Client) -> None:
    with client.begin(BANK) as txn:
        txn.write(f"{BANK}/accounts", b"1", key=b"k")
        with pytest.raises(
            CrossScope, match=f"'{BANK}' is on control partition 0 and '{FAR}' on 1"
        ):
            txn.write(f"{FAR}/accounts", b"1", key=b"k")
        assert txn.commit().counts.committed == 1, "nothing else happened to it"
    with pytest.raises(CrossScope):
        client.snapshot([f"{BANK}/accounts", f"{FAR}/accounts"])


GROWING = "growing"


@pytest.mark.long
def test_a_connected_client_uses_control_partitions_that_are_added(
    broker: Broker, tmp_path: Path
) -> None:
    first = start_cluster(broker.bootstrap, tmp_path, GROWING).controller
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})

    def grow(*topics: str) -> None:
        for made in admin.create_partitions([NewPartitions(each, 2) for each in topics]).values():
            made.result()

    try:
        with anabranch.connect(broker.bootstrap, prefix=GROWING, timeout=30.0) as client:
            client.create_stream(f"{GROWING}-a/s")
            # One topic after the other: a controller that looks in between goes on.
            grow(commands_topic(GROWING))
            time.sleep(8.0)
            grow(commands_topic(GROWING, "admin"), control_topic(GROWING), status_topic(GROWING))
            until = time.monotonic() + START_DEADLINE_S
            while first.leading() != [0, 1]:
                assert first.running
                assert time.monotonic() < until, first.log_file.read_text()[-4000:]
                time.sleep(0.1)
            first.stop()  # new scopes are put there by controllers that were started since
            first.start().wait_leading()
            client.create_stream(f"{GROWING}-b/s")
            with client.begin(f"{GROWING}-b") as txn:
                txn.write(f"{GROWING}-b/s", b"v")
                assert control_partition_of(txn.commit().txn_id) == 1
    finally:
        first.kill()
