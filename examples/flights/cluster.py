"""The run's cluster: a broker and two controllers, which the story kills and restarts."""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.cli.cluster import ControllerProcess, await_leader
from anabranch.cli.options import Target
from anabranch.librdkafka.options import for_librdkafka
from anabranch.topics.names import DEFAULT_PREFIX
from examples.flights.findings import Killed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from confluent_kafka.admin import AdminClient

LEAD_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 60.0
SESSION_TIMEOUT_S = 2.0
ARMED = "examples.flights.armed"
GROUPS_WITHIN_S = 20.0  # a killed member leaves its group after its session timeout
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Place:
    """A cluster, and the run's own names on it."""

    target: Target
    scope: str
    embedded: bool


def start_broker(
    stack: ExitStack,
    folder: Path,
    bootstrap: str | None,
    kafka: Mapping[str, str],
    *,
    keep: bool,
) -> Place:
    """Start an embedded broker, or use the given cluster with names of our own."""
    if bootstrap is not None:
        run = secrets.token_hex(3)
        target = Target(bootstrap, f"flights-{run}", REQUEST_TIMEOUT_S, kafka)
        place = Place(target, f"nyc-{run}", embedded=False)
        stack.callback(_delete_topics, place)
        return place
    from anabranch.infra.broker import EmbeddedBroker

    # A temporary folder of its own, removed even if this process is killed.
    broker = stack.enter_context(EmbeddedBroker(folder / "broker" if keep else None))
    if not keep:
        # Its data is deleted, so it needs no clean shutdown.
        stack.callback(broker.kill)
    target = Target(broker.bootstrap, DEFAULT_PREFIX, REQUEST_TIMEOUT_S)
    return Place(target, "nyc", embedded=True)


def _delete_topics(place: Place) -> None:
    """Remove the run's topics and groups from a user's cluster."""
    from confluent_kafka.admin import AdminClient

    settings = for_librdkafka(place.target.kafka) | {"bootstrap.servers": place.target.bootstrap}
    admin = AdminClient(settings)
    mine = (f"{place.target.prefix}.", f"{place.scope}.")
    topics = [name for name in admin.list_topics(timeout=10).topics if name.startswith(mine)]
    if topics:
        for future in admin.delete_topics(topics, operation_timeout=20).values():
            future.result(30)
    groups = [
        group.group_id
        for group in admin.list_consumer_groups(request_timeout=10).result(20).valid
        if group.group_id.startswith(mine)
    ]
    _delete_groups(admin, groups, time.monotonic() + GROUPS_WITHIN_S)


def _delete_groups(admin: AdminClient, groups: list[str], deadline: float) -> None:
    """Delete consumer groups. A closed member may stay in its group for a moment."""
    from confluent_kafka import KafkaError, KafkaException

    while groups:
        rest = []
        for group, future in admin.delete_consumer_groups(groups, request_timeout=20).items():
            try:
                future.result(30)
            except KafkaException as error:
                code = error.args[0].code()
                if code == KafkaError.GROUP_ID_NOT_FOUND:
                    continue
                if code != KafkaError.NON_EMPTY_GROUP or time.monotonic() > deadline:
                    raise
                rest.append(group)
        groups = rest
        if groups:
            time.sleep(0.2)


class Controllers:
    """Two controllers. The armed one kills itself right after it has logged the decision of a commit."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.both = [
            ControllerProcess.inside(
                folder,
                name,
                target.bootstrap,
                SESSION_TIMEOUT_S,
                prefix=target.prefix,
                kafka=target.kafka,
                trusts_open=True,  # it scales a stream
            )
            for name in ("controller-1", "controller-2")
        ]
        self._plain, self._armed = self.both

    def start(self) -> None:
        """Start the plain one, which becomes leader, then the armed one."""
        self._plain.start()
        await_leader([self._plain], 0, LEAD_TIMEOUT_S)
        self._armed.start(ARMED)

    def stop(self) -> None:
        """End both, concurrently."""
        for controller in self.both:
            controller.terminate()
        for controller in self.both:
            controller.stop()

    def kill_leader(self, partition: int) -> Killed:
        """Kill the leader, start it again, and wait until the other one leads.

        If the armed one led, this is done twice: it has to lead when the big commit comes.
        """
        killed = self._kill_once(partition)
        if killed.by != self._armed.name:
            self._kill_once(partition)
        return killed

    def _kill_once(self, partition: int) -> Killed:
        leader = await_leader(self.both, partition, LEAD_TIMEOUT_S)
        others = [controller for controller in self.both if controller is not leader]
        leader.kill()
        at = time.monotonic()
        successor = await_leader(others, partition, LEAD_TIMEOUT_S)
        taken_over = time.monotonic()
        if leader is self._armed:
            leader.start(ARMED)
        else:
            leader.start()
        return Killed(leader.name, at, taken_over, successor.name)

    def armed_is_gone(self) -> bool:
        """Whether the armed one has killed itself."""
        return not self._armed.running

    def replace_armed(self, partition: int) -> Killed:
        """Wait until the plain one leads, then start the other one, unarmed."""
        at = time.monotonic()
        successor = await_leader([self._plain], partition, LEAD_TIMEOUT_S)
        taken_over = time.monotonic()
        self._armed.start()
        return Killed(self._armed.name, at, taken_over, successor.name)
