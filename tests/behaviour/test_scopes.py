"""Scopes of one control partition commit together and are read as of one instant; partitions may be added."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

import anabranch
from anabranch.client.calls.admin import Administration
from anabranch.errors import (
    CrossScope,
    FeatureNotEnabled,
    InvalidArgument,
    NotAuthorized,
    NotReady,
)
from anabranch.kafka.log import KafkaLog
from anabranch.protocol.schemas import records as r
from anabranch.types import right_words
from tests.cluster import ControllerProcess, start_cluster
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


@pytest.mark.long
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


def test_a_snapshot_over_control_partitions_has_what_was_answered_to_anybody(
    broker: Broker, client: anabranch.Client
) -> None:
    streams = [f"{BANK}/accounts", f"{FAR}/accounts"]
    plans = []
    with anabranch.connect(broker.bootstrap, prefix="scopes") as other:
        for number in range(8):
            with other.begin((BANK, FAR)[number % 2]) as txn:
                txn.write(streams[number % 2], b"n%d" % number, key=b"n")
                done = txn.commit()
            snapshot = client.snapshot(streams)
            assert snapshot.timestamp >= (done.commit_timestamp or 0)
            values = {e.value for s in streams for e in snapshot.read(s) if e.key == b"n"}
            assert values == {b"n%d" % n for n in range(number + 1)}
            plans.append((snapshot.plan(), len(values)))
    for plan, count in plans:
        found = client.open_snapshot(plan)
        again = [e.value for s in streams for e in found.read(s) if e.key == b"n"]
        assert len(again) == count
        assert client.snapshot(streams, found.timestamp).plan() == plan


GROWING = "growing"
# An old client in another process: it writes to each stream that it is told, and says where it was committed.
OLD = f"""
import sys, anabranch
with anabranch.connect(sys.argv[1], prefix={GROWING!r}, timeout=90) as client:
    for stream in map(str.strip, sys.stdin):
        done = client.transact(lambda txn: txn.write(stream, b"v"))
        print(int.from_bytes(done.txn_id[:2], "big"), flush=True)
"""


class Interrupted(Exception):
    """What ends a call of `grow_cluster` in the middle."""


class Load:
    """A thread that commits all the time, until it is closed or a commit fails."""

    def __init__(self, client: anabranch.Client, stream: str) -> None:
        self._client, self._stream = client, stream
        self._stop = threading.Event()
        self._errors = list[Exception]()
        self.done = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._client.transact(lambda txn: txn.write(self._stream, b"v"))
                self.done += 1
            except Exception as error:  # noqa: BLE001 - the test fails with it
                self._errors.append(error)
                return

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        assert not self._errors


class OldClient:
    """A process that was connected before the cluster grew."""

    def __init__(self, bootstrap: str) -> None:
        command = [sys.executable, "-c", OLD, bootstrap]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def commit(self, stream: str) -> int:
        """Commit an event there. Returns the control partition."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(stream, file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()  # closes its pipes


class Growing:
    """A cluster with two controllers, which an operator grows from 1 to 3 control partitions."""

    def __init__(self, bootstrap: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        how = ("--session-timeout", "2")
        self.bootstrap, self._monkeypatch = bootstrap, monkeypatch
        with ExitStack() as stack:
            self.first = start_cluster(bootstrap, folder / "a", GROWING, how).controller
            stack.callback(self.first.kill)
            self.second = ControllerProcess(bootstrap, folder / "b", GROWING, how).start()
            stack.callback(self.second.kill)
            self.old = stack.enter_context(closing(OldClient(bootstrap)))
            self.client = stack.enter_context(self.connect("open"))
            self.operator = stack.enter_context(self.connect("admin"))
            self.client.create_stream(f"{GROWING}-a/s")
            self.load = stack.enter_context(closing(Load(self.client, f"{GROWING}-a/s")))
            assert self.old.commit(f"{GROWING}-a/s") == 0
            self.close = stack.pop_all().close

    def connect(self, lane: str) -> anabranch.Client:
        return anabranch.connect(self.bootstrap, prefix=GROWING, lane=lane, timeout=90)

    def prepare(self) -> None:
        """Raise the level, and make a lane and rights that the new control partitions have to get, too."""
        with pytest.raises(FeatureNotEnabled, match="needs feature level 4"):
            self.operator.grow_cluster(3)
        self.operator.feature_level(raise_to=4)
        self.operator.add_lane("etl")
        self.operator.grant("etl", f"{GROWING}-a/*", ["write"])
        self.operator.revoke("open", "*", ["scale"])
        with pytest.raises(NotAuthorized):
            self.client.grow_cluster(3)

    def stop_after_two_topics(self) -> None:
        """Call `grow_cluster`, and interrupt it when two topics have grown."""
        add, grown = KafkaLog.add_partitions, list[str]()

        def add_two(log: KafkaLog, topic: str, partitions: int) -> None:
            if len(grown) == 2:
                raise Interrupted
            grown.append(topic)
            add(log, topic, partitions)

        with self._monkeypatch.context() as patch:
            patch.setattr(KafkaLog, "add_partitions", add_two)
            with pytest.raises(Interrupted):
                self.operator.grow_cluster(3)
        assert grown == [f"{GROWING}.status", f"{GROWING}.control"]

    def stop_at(self, step: str) -> None:
        """Call `grow_cluster`, and interrupt it at this step."""
        with self._monkeypatch.context() as patch:
            patch.setattr(Administration, step, Mock(side_effect=Interrupted))
            with pytest.raises(Interrupted):
                self.operator.grow_cluster(3)

    def check_scopes(self) -> None:
        """New scopes are spread over the new control partitions, also for an old client; no scope moves."""
        places = {}
        for scope in "def":
            self.client.create_stream(f"{GROWING}-{scope}/s")
            places[scope] = self.old.commit(f"{GROWING}-{scope}/s")
        assert places == {"d": 1, "e": 2, "f": 1}
        assert self.old.commit(f"{GROWING}-b/s") == 0, "no scope moves"
        assert {n for each in (self.first, self.second) for n in each.leading()} == {0, 1, 2}

    def check_lanes(self) -> None:
        """Each control partition has the lane, and the rights; what is granted now holds everywhere."""
        (etl,) = (lane for lane in self.operator.lanes() if lane.name == "etl")
        assert etl.trouble == ""
        for number in range(3):
            ask = self.operator._session.ask
            rows = ask(number, r.ListGrants(), r.GrantList, time.monotonic() + 30).grants
            rights = {(row.lane, row.pattern): right_words(row.rights) for row in rows}
            assert rights["etl", f"{GROWING}-a/*"] == ("write",)
            assert "scale" not in rights["open", "*"]
        with self.connect("etl") as worker:
            self.operator.grant("etl", "*", ["write", "describe"])
            assert worker.transact(lambda txn: txn.write(f"{GROWING}-e/s", b"v")).is_merged


@pytest.mark.long
def test_a_cluster_grows_under_load(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 1 to 3, with two controllers, in several attempts; nobody notices but those who make new scopes."""
    with closing(Growing(broker.bootstrap, tmp_path, monkeypatch)) as its:
        its.prepare()
        its.stop_after_two_topics()
        its.stop_at("_await_leaders")
        its.first.kill()
        its.first.start()
        its.stop_at("_make_alike")
        with pytest.raises(NotReady, match="does not know lane 'etl' yet, as the cluster grows"):
            its.operator.grant("etl", f"{GROWING}-a/*", ["write"])
        its.second.stop()  # so the first one leads, which has found three control partitions
        its.second.start()
        for scope in "bc":  # they are not ready for new scopes
            its.operator.create_stream(f"{GROWING}-{scope}/s")
            assert its.old.commit(f"{GROWING}-{scope}/s") == 0
        assert its.operator.grow_cluster(3, timeout=90) == 3
        assert its.operator.grow_cluster(3) == 3, "repeated"
        with pytest.raises(InvalidArgument, match="has 3 control partitions, and they never"):
            its.operator.grow_cluster(2)
        with pytest.raises(InvalidArgument, match="one call adds at most 64"):
            its.operator.grow_cluster(68)
        its.check_scopes()
        its.check_lanes()
        before = its.load.done
        time.sleep(1.0)
        assert its.load.done > before
