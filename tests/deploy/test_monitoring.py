"""Alerts and dashboard in a real Prometheus that scrapes controllers, a processor and a ledger under load.

Each alert is made to fire: most by a real fault; those whose faults would take too long, by numbers of `PLANTED`,
which the product's own HTTP server shows. `for:` is a second here; all else is as in the file.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

import anabranch
from anabranch.cli.main import app as command_line
from anabranch.controller import metrics as of_leaders
from anabranch.controller.monitor import Labels, Monitor, Numbers, Table
from anabranch.errors import AnabranchError, TooManyStreams
from anabranch.infra.cluster import EmbeddedCluster
from anabranch.infra.sockets import HOST, free_port
from anabranch.ledger import watch as of_ledgers
from anabranch.processing import metrics as of_workers
from tests import shifted
from tests.cluster import ControllerProcess
from tests.deploy.files import INFRA
from tests.deploy.program import BAD
from tests.deploy.prometheus import Prometheus
from tests.deploy.test_files import queries, rules
from tests.owned import start_module
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.broker, pytest.mark.timeout(300)]
SOON_S = 60.0
SCOPE, ORDERS, SUMS, ERRORS = "shop", "shop/orders", "shop/sums", "shop/errors"
PROCESSOR = "shop/totals"
# Lanes with a quota so small that commands wait.
SLOW_LANE, OWING_LANE = "slow", "owing"
FLOOD = 10_500  # the alert's limit is 10,000 commands
AHEAD_S = 120.0
# How long brokers are frozen: less than until a leader asks for the successor, and more than until they are fenced.
SHORT_S = 1.6
LONG_S = 5.0
# Of other owners than the test's control partition, processor and ledger.
PLANTED: Mapping[str, tuple[Table, Mapping[str, Mapping[Labels, float]]]] = {
    "7": (
        of_leaders.TABLE,
        {
            "leading": {(): 1},
            "stuck_merges": {("torn",): 1},
            "journal_debt": {("shop/flood",): 500},
            "plain_writes_refused": {(): 1},
            "broker_lacks": {("DeleteRecords",): 1},
        },
    ),
    "shop/planted": (
        of_workers.TABLE,
        {
            "processor_lag_seconds": {("shop/in",): 100},
            "processor_lost": {("shop/in",): 1},
            "processor_misplaced": {("shop/in",): 1},
        },
    ),
    "planted": (
        of_ledgers.TABLE,
        {
            "ledger_alarms": {(): 1},
            "ledger_waiting": {(): 1},
            "ledger_held": {(): 1},
            "ledger_failures": {("OperationalError",): 1},
        },
    ),
}
BY_NUMBERS = {
    "AnabranchMergeStuck", "AnabranchJournalFloods", "AnabranchPlainWritesRefused", "AnabranchBrokerLacksCall",
    "AnabranchProcessorLags", "AnabranchProcessorLost", "AnabranchProcessorMisplaced",
    "AnabranchLedgerAlarm", "AnabranchLedgerWaits", "AnabranchLedgerHeld", "AnabranchLedgerFails",
}  # fmt: skip
AT_THE_END = {"AnabranchTargetDown", "AnabranchNoLeader"}


@contextmanager
def planted() -> Iterator[list[str]]:
    """Serves `PLANTED`; the addresses."""
    with ExitStack() as stack:
        addresses = []
        for owner, (table, values) in PLANTED.items():
            numbers = Numbers(table)
            numbers.values.update({name: dict(given) for name, given in values.items()})
            monitor = Monitor(f"{HOST}:0", table, partial(dict, {owner: numbers}), lambda: None)
            stack.enter_context(closing(monitor))
            addresses.append(f"{HOST}:{monitor.port}")
        yield addresses


@dataclass
class Alarms:
    """What fired while it watched: name -> labels."""

    prometheus: Prometheus

    def __post_init__(self) -> None:
        self.fired: dict[str, list[dict[str, str]]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopping.wait(0.5):
            for labels in self.prometheus.firing():
                self.fired.setdefault(labels["alertname"], []).append(labels)

    def leaderless(self) -> bool:
        """Whether it was the test's own control partition that had no leader."""
        found = self.fired.get("AnabranchNoLeader", ())
        return any(labels.get("control_partition") == "0" for labels in found)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()


class Load(threading.Thread):
    """Commits to `ORDERS` until it is stopped. ``pause``: seconds between two commits."""

    def __init__(self, bootstrap: str, pause: float) -> None:
        super().__init__(daemon=True)
        self.pause = pause
        self._brokers, self._stopping = bootstrap, threading.Event()

    def run(self) -> None:
        with anabranch.connect(self._brokers) as client:
            for n in iter(lambda: self._stopping.is_set(), True):
                with suppress(AnabranchError):
                    commit(client, b"%d" % n)
                time.sleep(self.pause)

    def stop(self) -> None:
        self._stopping.set()
        self.join(SOON_S)


def commit(client: anabranch.Client, value: bytes, timeout: float | None = None) -> None:
    with client.begin(SCOPE) as txn:
        txn.write(ORDERS, value, key=os.urandom(4))
        txn.commit(timeout=timeout)


class Machine:
    """Brokers, controllers, a processor and a ledger's recovery, each with its port for Prometheus."""

    def __init__(self, brokers: EmbeddedCluster, folder: Path, stack: ExitStack) -> None:
        self.brokers, self.folder, self._stack = brokers, folder, stack
        self.bootstrap = brokers.bootstrap
        self.jobs: dict[str, list[str]] = {"controllers": [], "processors": [], "ledgers": []}
        self.controllers: list[ControllerProcess] = []

    def controller(self, name: str, *, ahead_s: float = 0.0) -> ControllerProcess:
        address = f"{HOST}:{free_port()}"
        self.jobs["controllers"] += [] if ahead_s else [address]
        started = ControllerProcess(
            self.bootstrap,
            self.folder / name,
            arguments=("--http", address, "--max-clock-skew", "300"),
            module="tests.shifted" if ahead_s else "anabranch.cli",
            environment=shifted.environment(ahead_s),
        ).start()
        self._stack.callback(started.kill)
        return started

    def service(self, job: str, *words: str) -> None:
        address = f"{HOST}:{free_port()}"
        self.jobs[job].append(address)
        with (self.folder / job).open("ab") as log:
            process = start_module(
                "anabranch.cli",
                [*words, "--http", address, "-b", self.bootstrap],
                output=log,
                environment=os.environ,
            )
        self._stack.callback(process.wait, SOON_S)
        self._stack.callback(process.kill)

    def run(self, *words: str) -> None:
        from typer.testing import CliRunner

        done = CliRunner().invoke(command_line, [*words, "-b", self.bootstrap])
        assert done.exit_code == 0, done.output

    def produce(self, topic: str, *values: bytes, **more: Any) -> None:
        """One batch, as any producer would write it."""
        producer = Producer({
            "bootstrap.servers": self.bootstrap, "linger.ms": 1000, "batch.size": 40 << 20,
            "message.max.bytes": 40 << 20, "queue.buffering.max.messages": 1_000_000,
            "batch.num.messages": 100_000, "compression.type": "gzip", "log_level": 0,
        })  # fmt: skip
        for value in values:
            producer.produce(topic, value, **{"partition": 0} | more)
        assert producer.flush(SOON_S) == 0

    def last_of(self, topic: str) -> Any:
        """The last record of a topic's only partition."""
        consumer = Consumer(
            {"bootstrap.servers": self.bootstrap, "group.id": "none", "log_level": 0}
        )
        with closing(consumer):
            _, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=SOON_S)
            consumer.assign([TopicPartition(topic, 0, end - 1)])
            found = consumer.poll(SOON_S)
            assert found is not None
            assert found.error() is None
            return found


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """With two controllers of which neither leads: their clock was ahead at first."""
    with ExitStack() as stack, EmbeddedCluster(3, quick_start=True) as brokers:
        made = Machine(brokers, tmp_path, stack)
        fast = made.controller("fast", ahead_s=AHEAD_S)
        fast.wait_leading()
        with anabranch.connect(made.bootstrap) as client:
            for stream in (ORDERS, SUMS, ERRORS):
                client.create_stream(stream, segments=2)
        made.run("ledger", "create", "--database", f"{tmp_path}/rows.db")
        made.service("processors", "processor", "run", "tests.deploy.program:app")
        database = ("--database", f"{tmp_path}/rows.db", "--every", "1s")
        made.service("ledgers", "ledger", "recover", *database)
        made.controllers = [made.controller("one"), made.controller("two")]
        fast.signal(signal.SIGTERM)
        fast.ended()
        wait_until(lambda: any(one.leading() for one in made.controllers))
        yield made
        brokers.kill()


def strike(machine: Machine) -> None:
    """The faults that alerts are for, but the last ones."""
    topic = ORDERS.replace("/", ".")
    with anabranch.connect(machine.bootstrap, lane="admin") as admin:
        with pytest.raises(TooManyStreams):
            admin.create_stream("shop/many", segments=6_000)
        for lane in (SLOW_LANE, OWING_LANE):
            admin.add_lane(lane)
            admin.grant(lane, "*", ["describe", "write"])
        # A flood of commands, each as the lane's client sent the one before.
        with anabranch.connect(machine.bootstrap, lane=SLOW_LANE) as client:
            commit(client, b"small")
            sent = machine.last_of(f"anabranch.commands.{SLOW_LANE}")
            admin.add_lane(SLOW_LANE, quotas={"work": 1})
            machine.produce(
                sent.topic(), *[sent.value()] * FLOOD, key=sent.key(), headers=sent.headers() or []
            )
        # One command that costs more than ten seconds of the lane's quota.
        with anabranch.connect(machine.bootstrap, lane=OWING_LANE) as client:
            commit(client, b"small")
            admin.add_lane(OWING_LANE, quotas={"work": 1})
            with suppress(AnabranchError):
                commit(client, bytes(200_000), timeout=5)
    # A batch that unpacks to more than a batch of commands may.
    machine.produce("anabranch.commands", *[bytes(1_000_000)] * 20)
    machine.produce(topic, b"foreign")
    machine.produce(f"{topic}.journal", b"rejected", headers=[("ab.txn", b"?")])
    with anabranch.connect(machine.bootstrap) as client:
        commit(client, BAD)
    machine.run("processor", "release", PROCESSOR, "--yes")


def test_each_query_finds_a_series_and_each_alert_fires(machine: Machine, tmp_path: Path) -> None:
    text = re.sub(r"for: \w+", "for: 1s", (INFRA / "monitoring/alerts.yml").read_text())
    names = {rule["alert"] for rule in rules()}
    with planted() as addresses, ExitStack() as stack:
        jobs = {f"anabranch-{job}": targets for job, targets in machine.jobs.items()}
        jobs["planted"] = addresses
        prometheus = stack.enter_context(Prometheus(tmp_path / "prometheus", jobs, text))
        alarms = Alarms(prometheus)
        stack.callback(alarms.close)
        load = Load(machine.bootstrap, 0.5)
        load.start()
        stack.callback(load.stop)
        # While there are few rounds, so that one of 100 is slow.
        freeze(machine, alarms)
        load.pause = 0.05
        strike(machine)

        def missing() -> list[str]:
            return sorted(names - AT_THE_END - alarms.fired.keys())

        wait_until(lambda: not missing(), SOON_S, what=missing)
        wait_until(lambda: not silent(prometheus), SOON_S, what=lambda: silent(prometheus))
        load.stop()
        for controller in machine.controllers:
            controller.kill()
        wait_until(lambda: alarms.fired.keys() == names and alarms.leaderless())
    by_numbers = {name for name, found in alarms.fired.items() if all(map(is_planted, found))}
    assert by_numbers <= BY_NUMBERS


def freeze(machine: Machine, alarms: Alarms) -> None:
    """Freeze a broker after the other: shortly, so that rounds are slow; then until leaderships end."""
    until = time.monotonic() + SOON_S
    nodes = cycle(machine.brokers.nodes.values())
    for alert, seconds in (("AnabranchRoundsSlow", SHORT_S), ("AnabranchLeadershipFails", LONG_S)):
        while alert not in alarms.fired:
            assert time.monotonic() < until, f"{alert} does not fire"
            node = next(nodes)
            node.pause()
            time.sleep(seconds)
            node.resume()
            time.sleep(0.5)


def is_planted(labels: Mapping[str, str]) -> bool:
    owners = {labels.get(name) for name in ("control_partition", "processor", "ledger")}
    return bool(owners & PLANTED.keys())


def silent(prometheus: Prometheus) -> list[str]:
    """The queries of the dashboard that return no series for any moment of the last ten minutes, as a panel asks.

    What a leader counts is gone once it leads no more.
    """
    found = [query.replace("$__rate_interval", "30s") for query in queries()]
    return [query for query in found if not prometheus.series(f"last_over_time(({query})[10m:1s])")]
