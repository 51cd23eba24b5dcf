"""Two real `anabranch controller` processes: handing over, taking over, and a leader that was only asleep.

A client works all the time, and loses no transaction.
"""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from confluent_kafka import ConsumerGroupState
from confluent_kafka.admin import AdminClient

import anabranch
from anabranch.ports import Log
from anabranch.topics.names import controllers_group
from tests.cluster import ControllerProcess
from tests.conftest import Broker
from tests.crash.oracle import check_stream, read_status, read_stream
from tests.waiting import wait_until
from tests.workload.steady import COMMITTED, Steady, steadily

pytestmark = [pytest.mark.broker, pytest.mark.slow(9), pytest.mark.timeout(240)]

SESSION_S = 2.0
# The time of a takeover besides the session timeout: a rebalance, a fold, a loaded machine.
SLACK_S = 15.0
HAND_OVER_S = 10.0
DEADLINE_S = 60.0


@dataclass
class Pair:
    """Two controllers, and a client that works all the time."""

    one: ControllerProcess
    two: ControllerProcess
    work: Steady
    kept: anabranch.Transaction

    def leader(self) -> ControllerProcess:
        """The leader; the other one waits."""
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until:
            for one in (self.one, self.two):
                if 0 in one.leading():
                    return one
            time.sleep(0.01)
        raise AssertionError("no controller leads")

    def wait_for_both(self) -> None:
        """Wait until both are members of the group, at rest."""
        admin = AdminClient({"bootstrap.servers": self.one.bootstrap})
        group = controllers_group(self.one.prefix)
        until = time.monotonic() + DEADLINE_S
        while True:
            found = admin.describe_consumer_groups([group])[group].result(DEADLINE_S)
            if found.state is ConsumerGroupState.STABLE and len(found.members) == 2:
                return
            assert time.monotonic() < until, f"{len(found.members)} members, {found.state}"
            time.sleep(0.02)

    def other(self, one: ControllerProcess) -> ControllerProcess:
        return self.two if one is self.one else self.one


def longest(pair: Pair, since: float) -> float:
    """Seconds of the longest commit that ended since then."""
    return max(one.slowest for one in pair.work.of(COMMITTED) if one.ended > since)


@pytest.fixture(scope="module")
def pair(broker: Broker, log: Log, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Tests leave both running. At the end each committed event is there once, also of the long transaction."""
    folder = tmp_path_factory.mktemp("takeover")
    prefix = f"to{uuid.uuid4().hex[:6]}"
    stream = f"{prefix}-scope/events"
    both = [
        ControllerProcess(
            broker.bootstrap,
            folder / name,
            prefix,
            arguments=("--session-timeout", str(SESSION_S)),
        )
        for name in ("one", "two")
    ]
    client = anabranch.connect(broker.bootstrap, prefix=prefix, timeout=DEADLINE_S)
    try:
        for controller in both:
            controller.start()
            if controller is both[0]:
                controller.wait_leading()
        client.create_stream(stream)
        kept = client.begin(f"{prefix}-scope", keepalive=30)
        kept.token()
        kept.write(stream, b"kept before", key=b"k")
        kept.flush()
        work = Steady(client, stream, pause=0.07, journal=True)
        with steadily(work):
            work.wait_more(3)
            pair = Pair(both[0], both[1], work, kept)
            pair.wait_for_both()
            yield pair
        assert not [one for one in work.commits if one.result != COMMITTED]
        kept.write(stream, b"kept after", key=b"k")
        assert kept.commit().counts.committed == 2
        found = read_stream(log, stream)
        check_stream(found)
        assert [e.value for e in found.events] == [
            *work.values,
            b"kept before",
            b"kept after",
        ]
        read_status(log, prefix)
    finally:
        for controller in both:
            if controller.running:
                controller.signal(signal.SIGCONT)
            controller.kill()
        client.close()


@pytest.mark.long
def test_sigterm_hands_over_at_once(pair: Pair, measured: Callable[[str], None]) -> None:
    first = pair.leader()
    said = len(first.log_file.read_text())  # a stop of the machine may have ended a session before
    began = time.monotonic()
    first.signal(signal.SIGTERM)
    pair.other(first).wait_leading()
    seconds = time.monotonic() - began
    assert first.ended() == 0
    pair.work.wait_more(3)
    measured(
        f"SIGTERM: another leads after {seconds:.2f} s, longest commit {longest(pair, began):.2f} s"
    )
    assert seconds < HAND_OVER_S
    assert "session" not in first.log_file.read_text()[said:].lower()
    first.start()
    pair.wait_for_both()


@pytest.mark.soak
def test_sigkill_costs_the_session_timeout(pair: Pair, measured: Callable[[str], None]) -> None:
    first = pair.leader()
    began = time.monotonic()
    first.kill()
    pair.other(first).wait_leading()
    seconds = time.monotonic() - began
    pair.work.wait_more(3)
    measured(
        f"SIGKILL: another leads after {seconds:.2f} s (session timeout {SESSION_S:g} s), "
        f"longest commit {longest(pair, began):.2f} s"
    )
    assert seconds < SESSION_S + SLACK_S
    first.start()
    pair.wait_for_both()


@pytest.mark.soak
def test_asleep_for_longer_than_its_session(pair: Pair) -> None:
    """It wakes up as a zombie, learns it, and waits: it does not fight for the lead."""
    first = pair.leader()
    second = pair.other(first)
    first.signal(signal.SIGSTOP)
    second.wait_leading()
    pair.work.wait_more(5)
    said = len(second.log_file.read_text())

    def is_calm() -> bool:
        leading = [0 in one.leading() for one in (first, second)]
        # If the machine stops, the second one's session ends too, and the first rightly leads.
        return leading == [False, True] or "SESSTMOUT" in second.log_file.read_text()[said:]

    first.signal(signal.SIGCONT)
    wait_until(is_calm, DEADLINE_S, what=lambda: "two lead, or none")
    pair.work.wait_more(5)
    time.sleep(SESSION_S)
    assert is_calm()
    assert first.running
    pair.work.wait_more(5)
