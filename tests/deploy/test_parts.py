"""The files of `infra/` on three brokers: each kind of part is killed, stopped and started again under load.

What runs is what the files say; `files.Place` only moves it to this machine. No commit may be lost or doubled.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from confluent_kafka.admin import AdminClient

from anabranch.infra.cluster import EmbeddedCluster
from tests.deploy.files import CONTROLLER, INFRA, KINDS, PROCESSOR, WEB, Part, Place
from tests.deploy.writer import ORDERS, TOTALS, Writer, check_orders, counted
from tests.owned import start_module
from tests.plain_reader import read_all
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.broker, pytest.mark.timeout(600)]
READY_S = 60.0
# The first address of loopback is the brokers'.
ADDRESSES = [f"127.0.0.{n}" for n in range(2, 9)]


@pytest.fixture(scope="module")
def brokers() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(3, quick_start=True) as started:
        yield started
        started.kill()


class Running:
    """A part, in a place of its own."""

    def __init__(self, part: Part, place: Place) -> None:
        self.part, self.place = part, place
        (place.folder / "state").mkdir(parents=True)
        shutil.copy(INFRA / "settings/kafka.properties", place.folder)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # Of the test's environment only what finds programs and this tree.
        environment = _ours() | self.place.environment(self.part)
        paths = [_ours().get("PYTHONPATH"), self.place.environment(self.part).get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        with (self.place.folder / "log").open("ab") as log:
            self._process = start_module(
                "anabranch.cli", self.place.words(self.part), output=log, environment=environment
            )

    def wait_ready(self) -> None:
        wait_until(self.ready, READY_S, pause=0.2, what=self.tail)
        assert self.part.live is None or _answers(self.place.put(self.part.live))

    def ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.tail()
        probe = self.part.ready or _usual_probe(self.part)
        if probe.startswith("http"):
            return _answers(self.place.put(probe))
        done = subprocess.run(
            [sys.executable, "-c", self.place.put(probe)], capture_output=True, check=False
        )
        return done.returncode == 0

    def tail(self) -> str:
        return f"{self.part}: {(self.place.folder / 'log').read_text()[-3000:]}"

    def end(self, number: signal.Signals) -> float:
        """Send it a signal. Returns the seconds until it has ended."""
        assert self._process is not None
        began = time.monotonic()
        self._process.send_signal(number)
        self._process.wait(self.part.grace_s)
        return time.monotonic() - began

    def close(self) -> None:
        """Kill it, and show its log if the test fails."""
        self.end(signal.SIGKILL)
        sys.stdout.write(self.tail())


def _ours() -> dict[str, str]:
    return {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}


def _usual_probe(part: Part) -> str:
    """systemd has no probes: what a monitor would ask."""
    return f"http://127.0.0.1:{_PROBES[part.role]}"


_PROBES = {CONTROLLER: "9464/ready", WEB: "8090/health", PROCESSOR: "9465/ready"}


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, ConnectionError, TimeoutError):
        return False


def wait_in_sync(brokers: EmbeddedCluster) -> None:
    """Until each replica of each partition is in sync: then any one broker may be lost."""
    admin = AdminClient({"bootstrap.servers": brokers.bootstrap, "log_level": 0})

    def in_sync() -> bool:
        topics = admin.list_topics(timeout=20).topics.values()
        parts = [part for topic in topics for part in topic.partitions.values()]
        return bool(parts) and all(len(part.isrs) == len(part.replicas) == 3 for part in parts)

    wait_until(in_sync, READY_S, pause=0.2)


def pairs(brokers: EmbeddedCluster, stream: str) -> list[tuple[bytes | None, bytes | None]]:
    return [(event.key, event.value) for event in read_all(brokers.bootstrap, stream)]


@pytest.mark.parametrize("kind", KINDS)
def test_no_commit_is_lost(kind: str, brokers: EmbeddedCluster, tmp_path: Path) -> None:
    parts = [
        Running(part, Place(tmp_path / part.name, address, brokers.bootstrap))
        for part, address in zip(KINDS[kind](), ADDRESSES, strict=False)
    ]
    controllers = [each for each in parts if each.part.is_controller]
    others = [each for each in parts if not each.part.is_controller]
    with ExitStack() as stack:
        for part in controllers:
            part.start()
            stack.callback(part.close)
        for part in controllers:
            part.wait_ready()
        apply_streams(brokers)
        for part in others:
            part.start()
            stack.callback(part.close)
        for part in others:
            part.wait_ready()
        writer = Writer(brokers.bootstrap, kind)
        writer.start()
        writer.more()
        first, leader = controllers
        strikes = [
            (first, signal.SIGKILL),
            (leader, signal.SIGTERM),
        ]  # the second one leads by then
        for each in others:
            strikes += [(each, signal.SIGKILL), (each, signal.SIGTERM)]
        for part, number in strikes:
            assert part.end(number) < part.part.grace_s
            writer.more()
            part.start()
            part.wait_ready()
        wait_in_sync(brokers)
        node = brokers.node(1 + list(KINDS).index(kind))
        node.kill()
        writer.more()
        node.start()
        writer.more()
        writer.stop()
        check_orders(pairs(brokers, ORDERS), kind, writer.committed)
        wait_until(
            lambda: counted(pairs(brokers, TOTALS), kind) >= writer.committed, READY_S, pause=0.5
        )
    assert counted(pairs(brokers, TOTALS), kind) == writer.committed


def apply_streams(brokers: EmbeddedCluster) -> None:
    words = ["apply", f"{INFRA}/processor/streams.toml", "--bootstrap", brokers.bootstrap]
    done = subprocess.run(
        [sys.executable, "-m", "anabranch.cli", *words], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
