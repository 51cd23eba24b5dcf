"""Two real `anabranch controller` processes: handing over, taking over, and a leader that was only asleep.

A client works all the time, and loses no transaction.
"""

from __future__ import annotations

import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from confluent_kafka import ConsumerGroupState
from confluent_kafka.admin import AdminClient

import anabranch
from anabranch.ports import Log
from anabranch.topics.names import controllers_group
from tests.cluster import ControllerProcess
from tests.conftest import Broker
from tests.crash.oracle import check_stream, read_status, read_stream

pytestmark = [pytest.mark.broker, pytest.mark.slow(9), pytest.mark.timeout(240)]

SESSION_S = 2.0
# The time of a takeover besides the session timeout: a rebalance, a fold, a loaded machine.
SLACK_S = 15.0
HAND_OVER_S = 10.0
DEADLINE_S = 60.0


@dataclass
class Work:
    """A thread of transactions; ``stalls``: how long each commit took."""

    client: anabranch.Client
    stream: str
    told: list[bytes] = field(default_factory=list)
    longest: float = 0.0
    error: BaseException | None = None
    _end: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                began = time.monotonic()
                self._one(len(self.told))
                self.longest = max(self.longest, time.monotonic() - began)
                self._end.wait(0.02)  # some commits a second, and time for others
        except BaseException as error:  # noqa: BLE001 - raised in `finish`
            self.error = error

    def _one(self, n: int) -> None:
        value = f"{n:06}".encode()
        txn = self.client.begin(self.stream.partition("/")[0])
        if n % 2:
            txn.token()  # through the journal
        txn.write(self.stream, value, key=b"k")
        txn.commit()
        self.told.append(value)
        time.sleep(0.05)

    def wait_for_more(self, count: int) -> None:
        goal, until = len(self.told) + count, time.monotonic() + DEADLINE_S
        while len(self.told) < goal and self.error is None:
            assert time.monotonic() < until, "the client's work does not go on"
            time.sleep(0.01)
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        self._end.set()
        self._thread.join(DEADLINE_S)
        if self.error is not None:
            raise self.error


@dataclass
class Pair:
    """Two controllers and the work of a client beside them."""

    one: ControllerProcess
    two: ControllerProcess
    work: Work
    kept: anabranch.Transaction

    def leader(self) -> ControllerProcess:
        """The leader; the other one stands by."""
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until:
            for one in (self.one, self.two):
                if 0 in one.leading():
                    return one
            time.sleep(0.01)
        raise AssertionError("nobody leads")

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


@pytest.fixture(scope="module")
def pair(broker: Broker, log: Log, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Tests leave both running. At last: everything told is there once, and the transaction that was open too."""
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
        work = Work(client, stream)
        work.wait_for_more(3)
        pair = Pair(both[0], both[1], work, kept)
        pair.wait_for_both()
        yield pair
        work.finish()
        kept.write(stream, b"kept after", key=b"k")
        assert kept.commit().counts.committed == 2
        found = read_stream(log, stream)
        check_stream(found)
        assert [e.value for e in found.events] == [
            *work.told,
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


def test_sigterm_hands_over_at_once(pair: Pair, measured: Callable[[str], None]) -> None:
    first = pair.leader()
    said = len(first.log_file.read_text())  # a stop of the machine may have ended a session before
    began = time.monotonic()
    first.signal(signal.SIGTERM)
    pair.other(first).wait_leading()
    seconds = time.monotonic() - began
    assert first.ended() == 0
    pair.work.wait_for_more(3)
    measured(
        f"SIGTERM: another leads after {seconds:.2f} s, longest commit {pair.work.longest:.2f} s"
    )
    assert seconds < HAND_OVER_S
    assert "session" not in first.log_file.read_text()[said:].lower()
    first.start()
    pair.wait_for_both()


@pytest.mark.soak
def test_sigkill_costs_the_session_timeout(pair: Pair, measured: Callable[[str], None]) -> None:
    first = pair.leader()
    pair.work.longest = 0.0
    began = time.monotonic()
    first.kill()
    pair.other(first).wait_leading()
    seconds = time.monotonic() - began
    pair.work.wait_for_more(3)
    measured(
        f"SIGKILL: another leads after {seconds:.2f} s (session timeout {SESSION_S:g} s), "
        f"longest commit {pair.work.longest:.2f} s"
    )
    assert seconds < SESSION_S + SLACK_S
    first.start()
    pair.wait_for_both()


@pytest.mark.soak
def test_asleep_for_longer_than_its_session(pair: Pair) -> None:
    """It wakes up as a zombie, finds out, and stands by: it does not fight for the lead."""
    first = pair.leader()
    second = pair.other(first)
    first.signal(signal.SIGSTOP)
    second.wait_leading()
    pair.work.wait_for_more(5)
    said = len(second.log_file.read_text())

    def stands() -> bool:
        leading = [0 in one.leading() for one in (first, second)]
        # If the machine stops, the second one's session ends too, and the first rightly leads.
        return leading == [False, True] or "SESSTMOUT" in second.log_file.read_text()[said:]

    first.signal(signal.SIGCONT)
    until = time.monotonic() + DEADLINE_S
    while not stands():
        assert time.monotonic() < until, "two lead, or none"
        time.sleep(0.02)
    pair.work.wait_for_more(5)
    time.sleep(SESSION_S)
    assert stands()
    assert first.running
    pair.work.wait_for_more(5)
