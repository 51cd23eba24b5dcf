"""Fixtures for all tests: a broker, started when the first test asks for one.

With ``--bootstrap HOST:PORT`` (or ``$ANABRANCH_BOOTSTRAP``) ``broker`` is that cluster instead; with
``ANABRANCH_TEST_BROKER=kafka-container`` or ``redpanda`` it runs in a container, and with
``ANABRANCH_TEST_KAFKA=4.0.2`` it is of another version (tests/containers/README.md).
Tests share it: give topics names of your own (the ``unique`` fixture), and don't stop it. A test
that kills or pauses a broker starts one of its own with `EmbeddedBroker`.

With ``--kfake KIND`` ``broker`` is a kfake that plays another one (tests/kfake/kinds.py).

Tests marked ``soak`` or ``long`` are left out unless ``-m`` asks for them (pyproject.toml, ``scripts/soak``,
``scripts/long``).
``--part 2/5`` runs the second of five parts of what was asked for, which take about as long as each other.

Workers of pytest-xdist (``-n 4``) have a share of the files that takes about as long as the others. Two of them
have a broker each, and the others have tests without one. They collect no other files: to collect all
takes 20 s of processor time. All files of a folder of `TOGETHER` go to one worker: they share what takes long
to start (a JVM, a server, a warm process). ``durations.json`` has the seconds of each file, by tier;
``scripts/test --store-durations`` writes those of tests that it runs.
"""

from __future__ import annotations

import gc
import json
import os
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Generator, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import hypothesis
import pytest

import anabranch
from anabranch.infra import sockets
from anabranch.infra.broker import EmbeddedBroker
from tests import secured
from tests.cluster import Cluster, start_cluster
from tests.containers import brokers as containers
from tests.containers import versions
from tests.kfake.kinds import KINDS
from tests.kfake.lacks import lacks
from tests.kfake.server import Kfake, NoGo, program
from tests.parts import DURATIONS, LONG, ROOT, SOAK, TEST, TIERS, shared, stored_durations

if TYPE_CHECKING:
    from xdist.remote import Producer as Log
    from xdist.scheduler import Scheduling
    from xdist.workermanage import WorkerController

    from anabranch.kafka.log import KafkaLog
    from tests.workload.zygote import Zygote

# How long an example takes says how busy the machine is, and no more. scripts/soak draws fresh ones, and more: the
# same ones again and again find little.
FRESH, SHARE = "fresh", 3
hypothesis.settings.register_profile(
    "anabranch", deadline=None, derandomize=True, max_examples=100 // SHARE
)
hypothesis.settings.register_profile(FRESH, deadline=None)
hypothesis.settings.load_profile("anabranch")

MEASURED = "measured"
# Workers with a broker. More brokers would take the cores from the tests: each is slow until its code is compiled.
BROKERS = 2
TOGETHER = ("tests/crash/", "tests/ledger/", "tests/rights/", "tests/spark/")
# Each worker draws from its own ports: one that a killed broker is to have again is no other's meanwhile.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = 12_000 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
sockets._LOWEST += _WORKER * _PORTS
sockets._HIGHEST = sockets._LOWEST + _PORTS - 1
# Of a broker that is never killed: each of the workers has one all the time.
QUIET = {"broker.heartbeat.interval.ms": "2000", "broker.session.timeout.ms": "9000"}
# Tests of a file that stands not there yet: with and without a broker.
BROKER_TEST_S, OTHER_TEST_S = 0.7, 0.02
# Tests of a file that takes longer come into parts one by one. Those of others share what they start.
LONG_FILE_S = 600.0


class Broker(Protocol):
    """The facts of a broker that tests may rely on, whichever it is."""

    @property
    def bootstrap(self) -> str:
        """``host:port``, for clients."""
        ...


def some(examples: int) -> int:
    """How many examples are drawn where fresh ones are that many."""
    fresh = hypothesis.settings.get_current_profile_name() == FRESH
    return examples if fresh else examples // SHARE


@dataclass(frozen=True)
class GivenBroker:
    """A cluster that runs already."""

    bootstrap: str


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make what a test printed fit for the wire between pytest's processes: it may have lone surrogates."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--bootstrap",
        metavar="HOST:PORT",
        default=os.environ.get("ANABRANCH_BOOTSTRAP"),
        help="run against this cluster instead of the embedded broker",
    )
    parser.addoption(
        "--kfake", choices=sorted(KINDS), help="run against a kfake that plays this broker"
    )
    parser.addoption(
        "--secured",
        action="store_true",
        help="controllers and clients come in over SASL_SSL, with the rights of docs/security.md and no others",
    )
    parser.addoption(
        "--store-durations",
        action="store_true",
        help="write down how long each file took, by which workers share them",
    )
    parser.addoption(
        "--part",
        metavar="K/N",
        help="run the K-th of N parts, which take about as long; without tests that need a registry",
    )


def pytest_configure(config: pytest.Config) -> None:
    """A broker that can't be had ends the run at once: skipped tests must not look like passed ones."""
    if hasattr(config, "workerinput"):
        return  # its master has looked
    if config.getoption("--bootstrap") and len(getattr(config.option, "tx", None) or ()) > 1:
        raise pytest.UsageError(
            "--bootstrap: one cluster is for one worker, as its controllers would share a group; leave -n out"
        )
    try:
        versions.embed_wanted()  # workers find it in their environment
        if containers.kind_from_environment() != containers.EMBEDDED:
            containers.check_engine()
    except (ValueError, containers.NoContainer) as error:
        raise pytest.UsageError(str(error)) from error


# -- several workers ------------------------------------------------------------------------------------


_FREE = pytest.StashKey[list[int]]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Log) -> Scheduling:
    """Each worker runs all that it has collected."""
    from xdist.scheduler import EachScheduling

    class Scheduler(EachScheduling):  # type: ignore[misc]
        def schedule(self) -> None:
            reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
            reporter._session.testscollected = sum(map(len, self.node2collection.values()))
            super().schedule()

    return Scheduler(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Give a worker its share; one that takes the place of a dead one gets the share of that."""
    count = int(node.workerinput["workercount"])
    free = node.config.stash.setdefault(_FREE, [*range(count)])
    node.workerinput["share"] = free.pop(0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController, error: object | None) -> None:
    if error:
        node.config.stash[_FREE].append(node.workerinput["share"])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A worker collects the files of its share alone."""
    own = own_share(config)
    if own is None or not collection_path.match("test_*.py"):
        return None
    return collection_path.relative_to(ROOT).as_posix() not in own or None


def own_share(config: pytest.Config) -> frozenset[str] | None:
    """The files of this worker; None in a process that has them all."""
    given = getattr(config, "workerinput", None)
    return None if given is None else share(int(given["share"]), int(given["workercount"]))


@cache
def share(number: int, count: int) -> frozenset[str]:
    """The files of worker ``number`` of ``count``. Some start no broker, if the other tests are enough for them."""
    known = stored_durations()[TEST]
    files = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/test_*.py")]
    seconds: dict[str, float] = defaultdict(float)
    on_brokers = set()
    for file in files:
        seconds[scope_of(file)] += known.get(file, OTHER_TEST_S)
        if "pytest.mark.broker" in (ROOT / file).read_text("utf-8"):
            on_brokers.add(scope_of(file))
    brokers = min(BROKERS, max(1, count - 1))
    if sum(map(seconds.__getitem__, on_brokers)) * count > 1.1 * sum(seconds.values()) * brokers:
        on_brokers.clear()  # they would end long before the others
    mine = frozenset(shared(seconds, count, on_brokers, brokers)[number])
    return frozenset(file for file in files if scope_of(file) in mine)


def scope_of(nodeid: str) -> str:
    """The unit that goes to one worker: a test's file, or its folder."""
    file = _file_of(nodeid)
    return next((folder for folder in TOGETHER if file.startswith(folder)), file)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is of another part. Workers take the long files first, so that they end at the same time."""
    if config.getoption("--part"):
        _keep_part(config, items)
    if played := config.getoption("--kfake"):
        reasons = lacks(KINDS[played])
        for item in items:
            if reason := reasons.get(item.nodeid.removeprefix("tests/")):
                item.add_marker(pytest.mark.skip(reason=f"kfake: {reason}"))
    if config.getoption("--secured"):
        skip = pytest.mark.skip(
            reason="with an authorizer, which tells clients without a right nothing"
        )
        for item in items:
            if item.get_closest_marker("unsecured"):
                item.add_marker(skip)
    own = own_share(config)
    if own is None:
        return
    # Files that are named one by one are collected by all workers.
    items[:] = [item for item in items if _file_of(item.nodeid) in own]
    seconds = seconds_of(items, scope_of)
    items.sort(key=lambda item: -seconds[scope_of(item.nodeid)])


def _keep_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of one part only."""
    part, _, count = config.getoption("--part").partition("/")
    if not (part.isdecimal() and count.isdecimal() and 1 <= int(part) <= int(count)):
        raise pytest.UsageError("--part K/N: two numbers, K from 1 to N")
    able = [item for item in items if not item.get_closest_marker("network")]
    files = seconds_of(able, _file_of)

    def unit_of(nodeid: str) -> str:
        return nodeid if files[_file_of(nodeid)] > LONG_FILE_S else _file_of(nodeid)

    units = shared(seconds_of(able, unit_of), int(count))[int(part) - 1]
    kept = [item for item in able if unit_of(item.nodeid) in units]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def seconds_of(items: list[pytest.Item], unit_of: Callable[[str], str]) -> dict[str, float]:
    """How long the tests of each unit take: as it was measured of their file, shared alike; else about."""
    measured = stored_durations()
    tests = Counter((tier_of(item.keywords), _file_of(item.nodeid)) for item in items)
    seconds: dict[str, float] = defaultdict(float)
    for item in items:
        tier, file = tier_of(item.keywords), _file_of(item.nodeid)
        known = measured[tier].get(file)
        seconds[unit_of(item.nodeid)] += (
            expected_seconds(item) if known is None else known / tests[tier, file]
        )
    return seconds


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


# Nothing that is loaded while tests are collected goes away: the collector would take a fifth of the time.
gc.disable()


def pytest_collection_finish() -> None:
    """What is loaded by now stays: the collector need not walk through thousands of tests again and again.

    Its usual threshold of 700 objects costs a tenth of the time of tests in memory.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


def tier_of(keywords: Container[str]) -> str:
    """Which tier a test belongs to, by its marks."""
    return next((tier for tier in (LONG, SOAK) if tier in keywords), TEST)


def expected_seconds(item: pytest.Item) -> float:
    """A test's rough duration."""
    slow = item.get_closest_marker("slow")
    if slow is not None and slow.args:
        return float(slow.args[0])
    return BROKER_TEST_S if item.get_closest_marker("broker") else OTHER_TEST_S


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The measurements of tests in all workers."""
    if terminalreporter.config.getoption("--store-durations"):
        _store_durations(terminalreporter)
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)]
    lines = [
        line
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, line in report.user_properties
        if name == MEASURED
    ]
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(line)


def _store_durations(reporter: pytest.TerminalReporter) -> None:
    """Add up set-up, call and teardown of each file that ran; the others keep what they have."""
    took: dict[tuple[str, str], float] = defaultdict(float)
    for reports in reporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                took[tier_of(report.keywords), _file_of(report.nodeid)] += report.duration
    known = stored_durations()
    for (tier, file), seconds in took.items():
        known[tier][file] = round(seconds, 1)
    there = {
        tier: {file: known[tier][file] for file in sorted(known[tier]) if Path(file).exists()}
        for tier in TIERS
    }
    DURATIONS.write_text(json.dumps(there, indent=1) + "\n")


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Takes a line about a measurement; the run ends with all of them."""
    return lambda line: request.node.user_properties.append((MEASURED, line))


# -- brokers and clusters -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Broker]:
    """A broker for the whole session, with transactions of the current protocol.

    ``quick_start``: in the few minutes of a session a second compiler costs more than it brings.
    """
    given = request.config.getoption("--bootstrap")
    if given:
        yield GivenBroker(given)
        return
    if played := request.config.getoption("--kfake"):
        need_go()
        with Kfake(KINDS[played], tmp_path_factory.mktemp("kfake")) as kfake:
            yield kfake
        return
    kind = containers.kind_from_environment()
    if kind != containers.EMBEDDED:
        with containers.start_broker(kind) as contained:
            yield contained
        return
    if request.config.getoption("--secured"):
        with secured.entered(tmp_path_factory.mktemp("secured")) as entered:
            yield entered
        return
    with EmbeddedBroker(quick_start=True, properties=QUIET) as embedded:
        yield embedded
        embedded.kill()  # its data is not needed: quicker than a shutdown


def need_go() -> None:
    """Skip the test where kfake can't be built, as Go is missing."""
    try:
        program()
    except NoGo as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def broker_tv0(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Broker]:
    """A broker with transaction.version=0: the protocol before KIP-890's second part. One for a file: few need it.

    In a container if ``broker`` is one of Kafka's: Redpanda has no such feature.
    """
    if containers.kind_from_environment() == containers.KAFKA:
        with containers.start_broker(containers.KAFKA, transaction_version=0) as contained:
            yield contained
        return
    if request.config.getoption("--secured"):
        with secured.entered(tmp_path_factory.mktemp("secured"), 0) as entered:
            yield entered
        return
    with EmbeddedBroker(transaction_version=0, quick_start=True) as embedded:
        yield embedded
        embedded.kill()


@pytest.fixture(scope="session")
def cluster(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The session's broker with a controller that leads. Tests share it and must not stop it."""
    running = start_cluster(broker.bootstrap, tmp_path_factory.mktemp("cluster"))
    yield running
    running.controller.kill()  # quicker than a handover


@pytest.fixture(scope="session")
def client(cluster: Cluster) -> Iterator[anabranch.Client]:
    """A client of the session's cluster."""
    with anabranch.connect(cluster.bootstrap) as connected:
        yield connected


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """A warm process that forks controllers and clients; they end with it."""
    from tests.workload.zygote import Zygote

    with Zygote() as warm:
        yield warm


@pytest.fixture(scope="session")
def log(broker: Broker) -> Iterator[KafkaLog]:
    """The broker's log, to read its records."""
    from anabranch.kafka.log import KafkaLog

    kafka = KafkaLog(broker.bootstrap)
    yield kafka
    kafka.close()


@pytest.fixture
def unique() -> str:
    """A name that nothing else uses: 8 hex digits."""
    return uuid.uuid4().hex[:8]
