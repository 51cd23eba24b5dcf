"""Two controllers whose clocks are seconds apart, and clients that tell each other what they were told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.clock import SystemClock
from anabranch.controller.leader import Leader
from anabranch.core.decisions.turn import Settings
from anabranch.errors import ClockSkew, InvalidArgument
from anabranch.kafka.log import KafkaLog
from anabranch.protocol import hybrid_time
from anabranch.protocol.ids import control_partition_of
from anabranch.topics.creation import create_control_topics
from tests.conftest import Broker

pytestmark = [pytest.mark.broker, pytest.mark.unsecured]

FAST, SLOW = "fast/a", "slow/a"  # as the clocks of those who lead their control partitions are
APART_S = 2.0
FAR_S = 7.0  # behind; no machine stops for as long, and the default skew of 10 s allows it
ERROR_S = 0.4
DEADLINE_S = 60.0


class OwnClock(SystemClock):
    """One that is wrong."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s

    def wall(self) -> float:
        return super().wall() + self.ahead_s


class Controllers:
    """Leaders in this process, each with a clock of its own."""

    def __init__(
        self, bootstrap: str, prefix: str, folder: Path, control_partitions: int = 2
    ) -> None:
        self.bootstrap, self.prefix, self.folder = bootstrap, prefix, folder
        self.leaders: dict[int, Leader] = {}
        with closing(KafkaLog(bootstrap)) as log:
            self.topics = create_control_topics(log, prefix, control_partitions=control_partitions)

    def lead(self, partition: int, ahead_s: float, **settings: Any) -> None:
        """Let a controller with this clock take over a control partition."""
        self.stop(partition)
        led = threading.Event()
        leader = self.leaders[partition] = Leader(
            lambda: KafkaLog(self.bootstrap),
            OwnClock(ahead_s),
            Settings(
                control_partition=partition,
                **self.topics._asdict(),
                prefix=self.prefix,
                trusts_open=True,
                **settings,
            ),
            folder=self.folder / f"{partition}-{ahead_s}-{len(settings)}",
            leader="here",
            native_timeout=60.0,
            on_change=led.set,
            on_failure=lambda error: led.set(),
        )
        leader.start()
        assert led.wait(DEADLINE_S)
        assert leader.leading

    def stop(self, *partitions: int) -> None:
        for partition in partitions:
            if partition in self.leaders:
                assert self.leaders.pop(partition).stop(DEADLINE_S)

    def client(self, **more: Any) -> anabranch.Client:
        return anabranch.connect(self.bootstrap, prefix=self.prefix, **more)


@pytest.fixture(scope="module")
def controllers(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controllers]:
    found = Controllers(broker.bootstrap, "times", tmp_path_factory.mktemp("times"))
    try:
        found.lead(0, APART_S)
        found.lead(1, -APART_S)
        with found.client() as client:
            for stream in (FAST, SLOW):  # the first scope goes to the first control partition
                client.create_stream(stream, 1)
            assert control_partition_of(commit(client, FAST).txn_id) == 0
            assert control_partition_of(commit(client, SLOW).txn_id) == 1
        yield found
    finally:
        found.stop(0, 1)


def commit(client: anabranch.Client, stream: str) -> anabranch.Result:
    with client.begin(stream.split("/")[0]) as txn:
        txn.write(stream, b"v", key=b"k")
        return txn.commit()


Way = Callable[[anabranch.Client, anabranch.Client], tuple[anabranch.Result, anabranch.Result]]


def by_nothing(one: anabranch.Client, other: anabranch.Client) -> Any:
    return commit(one, FAST), commit(other, SLOW)


def by_observe(one: anabranch.Client, other: anabranch.Client) -> Any:
    first = commit(one, FAST)
    other.observe(first.commit_timestamp)
    assert other.last_timestamp == first.commit_timestamp
    return first, commit(other, SLOW)


def by_token(one: anabranch.Client, other: anabranch.Client) -> Any:
    with one.begin("slow") as txn:
        txn.token()
        with one.outside():
            first = commit(one, FAST)
        other.join(txn.token())
        assert other.last_timestamp >= first.commit_timestamp
        return first, commit(other, SLOW)


def by_receipt(one: anabranch.Client, other: anabranch.Client) -> Any:
    """The writer has seen it; the committer, who takes its receipt, has not."""
    with other.begin("slow") as txn:
        writer = one.join(txn.token())
        writer.write(SLOW, b"v", key=b"k")
        first = commit(one, FAST)
        receipt = writer.finish().to_bytes()
        return first, txn.commit([receipt])


@pytest.mark.parametrize("way", [by_nothing, by_observe, by_token, by_receipt])
def test_a_commit_exceeds_the_timestamps_that_its_client_has_seen(
    controllers: Controllers, way: Way
) -> None:
    controllers.lead(1, -FAR_S)  # its hybrid time is as it was, and behind
    with ExitStack() as stack:
        one, other = (stack.enter_context(controllers.client()) for _ in range(2))
        first, second = way(one, other)
        told = way is not by_nothing
        assert (second.commit_timestamp > first.commit_timestamp) == told
        assert (second.committed_at >= first.committed_at) == told
        assert first.committed_at.tzinfo is UTC
        assert other.last_timestamp >= second.commit_timestamp


@pytest.mark.soak
def test_clocks_that_are_further_apart_than_is_allowed(controllers: Controllers) -> None:
    controllers.lead(1, -APART_S, max_clock_skew_ms=1000)
    with controllers.client() as client, controllers.client() as fresh:
        before = client.snapshot(SLOW).timestamp
        commit(client, FAST)
        with pytest.raises(ClockSkew, match=r"ahead of the controller's clock, 1,000 are allowed"):
            commit(client, SLOW)
        client.transactions("slow")  # what needs no timestamp goes on
        after = commit(fresh, SLOW)
        assert before < after.commit_timestamp < client.last_timestamp
    controllers.lead(1, -APART_S)


def test_what_can_not_be_observed(controllers: Controllers) -> None:
    far = hybrid_time.from_datetime(datetime(2040, 1, 1, tzinfo=UTC))
    wrong: list[Any] = [-1, 1 << 63, "now", None]
    with controllers.client() as client:
        client.observe(7)
        for timestamp in (far, hybrid_time.MAX):
            with pytest.raises(ClockSkew):
                client.observe(timestamp)
        for timestamp in wrong:
            with pytest.raises(InvalidArgument):
                client.observe(timestamp)
        assert client.last_timestamp == 7


@pytest.mark.soak
def test_commit_wait_holds_up_its_own_answer_alone(controllers: Controllers) -> None:
    unknown = pytest.raises(InvalidArgument, match="--clock-error-ms")
    with controllers.client(commit_wait=True) as client, unknown:
        commit(client, FAST)
    controllers.lead(0, 0.0, clock_error_ms=int(ERROR_S * 1000))
    time.sleep(APART_S)  # what the former leader with its fast clock has dated is past
    with controllers.client(commit_wait=True) as client, controllers.client() as other:
        commit(other, FAST)
        done = threading.Event()
        quick: list[float] = []

        def hurry() -> None:
            while not done.is_set():
                begun = time.monotonic()
                commit(other, FAST)
                quick.append(time.monotonic() - begun)

        thread = threading.Thread(target=hurry)
        thread.start()
        begun = time.monotonic()
        result = commit(client, FAST)
        waited = time.monotonic() - begun
        done.set()
        thread.join(DEADLINE_S)
    assert waited >= 2 * ERROR_S
    assert datetime.now(UTC) - result.committed_at >= timedelta(seconds=2 * ERROR_S)
    assert sorted(quick)[len(quick) // 2] < ERROR_S, "others don't wait"
    controllers.lead(0, APART_S)
