"""A cluster in one thread: brokers in memory, a real controller that runs while clients wait, and clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from anabranch.client.client import Client
from anabranch.clock import SystemEntropy
from anabranch.controller.controller import Controller
from anabranch.core.decisions.turn import Settings
from anabranch.errors import UnsupportedSetting
from anabranch.ports import Entropy
from anabranch.protocol import defaults
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.iteration import Readers
from anabranch.testing.memory.broker import OnCall
from anabranch.testing.memory.client import memory_client
from anabranch.testing.memory.log import MemoryBrokers
from anabranch.testing.memory.table import MemoryStore
from anabranch.topics.creation import create_control_topics
from anabranch.topics.names import DEFAULT_PREFIX

CLIENT = "client"
CONTROLLER = "controller"
_START_S = 1_750_000_000.0  # in June 2025
_STEP_S = 1.0


@dataclass
class SteppedClock:
    """A clock that only sleeping moves. ``epoch``: the Unix time at its second 0."""

    now: float = 1_000_000.0
    epoch: float = 0.0
    on_sleep: Callable[[], None] | None = None

    def wall(self) -> float:
        return self.epoch + self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.on_sleep is not None:
            self.on_sleep()


class MemoryCluster:
    """Brokers and a controller in memory, for one thread.

        with anabranch.testing.MemoryCluster().connect() as client:
            client.create_stream("shop/orders")

    A client that waits lets the controller work, and moves the clock, so that a time-out takes no time.
    """

    def __init__(
        self,
        *,
        clock: SteppedClock | None = None,
        control_partitions: int = 1,
        on_call: OnCall | None = None,
        entropy: Entropy | None = None,
        feature_level: int = LEVEL,
        controllers: int = 1,
    ) -> None:
        """``controllers``: the first control partitions have one each, the others have none.

        ``on_call``: as of `MemoryBrokers`.

        ``feature_level``: 1 is the level of a cluster that was upgraded, until an operator raises it.
        """
        self.clock = clock or SteppedClock(epoch=_START_S)
        self.brokers = MemoryBrokers(self.clock, on_call=on_call)
        self.controllers: dict[int, Controller] = {}  # by control partition
        self._entropy = entropy or SystemEntropy()
        self._control_partitions = control_partitions
        self._stores = [MemoryStore() for _ in range(controllers)]
        self._in_step = False
        create_control_topics(
            self.brokers.log(CONTROLLER),
            DEFAULT_PREFIX,
            control_partitions=control_partitions,
            replication_factor=1,
        )
        for number in range(controllers):
            self.start_controller(number)
        self.clock.on_sleep = self.step
        if feature_level > 1:
            with self.connect(lane=ADMIN_LANE) as operator:
                operator.feature_level(raise_to=feature_level)

    def connect(
        self,
        *,
        lane: str = OPEN_LANE,
        timeout: float = defaults.TIMEOUT_S,
        one_shot_bytes: int = defaults.ONE_SHOT_BYTES,
    ) -> Client:
        """A client of this cluster. Arguments as of `anabranch.connect`."""
        readers = ReaderPorts(lambda _: self.brokers.log("reader"), _no_groups, self.clock)
        return memory_client(
            self.brokers.log(CLIENT),
            self.clock,
            self._entropy,
            lane=lane,
            timeout=timeout,
            one_shot_bytes=one_shot_bytes,
            readers=Readers(readers, timeout),
        )

    def advance(self, seconds: float) -> None:
        """Let time pass, in which the controller works: it may abort a transaction whose keepalive is over."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.sleep(min(_STEP_S, until - self.clock.now))

    @property
    def controller(self) -> Controller | None:
        """The controller of control partition 0, if it runs."""
        return self.controllers.get(0)

    def start_controller(self, number: int = 0) -> None:
        """Start the controller of a control partition."""
        settings = Settings(
            control_partition=number,
            control_partitions=self._control_partitions,
            reply_partitions=8,
            prefix=DEFAULT_PREFIX,
            trusts_open=True,
        )
        name = CONTROLLER if number == 0 else f"{CONTROLLER}-{number}"
        controller = Controller(
            self.brokers.log(name),
            self._stores[number].open(name),
            self.clock,
            settings,
            "memory",
        )
        controller.lead()
        self.controllers[number] = controller

    def stop_controller(self, number: int = 0) -> None:
        """Stop it as a crash does; its table is kept."""
        self.controllers.pop(number, None)
        self._stores[number].release()

    def step(self) -> None:
        """One pass of each controller."""
        if not self._in_step:
            self._in_step = True
            try:
                for controller in list(self.controllers.values()):
                    controller.step(0.0)
            finally:
                self._in_step = False


def _no_groups(group: str, *_: object) -> NoReturn:
    raise UnsupportedSetting(f"group {group}: a cluster in memory has no consumer groups")
