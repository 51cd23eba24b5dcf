"""Lanes on a broker with an authorizer: made with the rights of the table, used by their principals."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import count
from typing import NamedTuple

import pytest

from anabranch import errors
from anabranch.clock import SystemClock
from anabranch.kafka.log import KafkaLog
from anabranch.librdkafka.admin import KafkaAdmin
from anabranch.librdkafka.command_bus import KafkaBus
from anabranch.librdkafka.options import Options
from anabranch.ports import LogError
from anabranch.topics import rights
from anabranch.topics.creation import (
    create_control_topics,
    create_lane_topics,
    grow_lane_topic,
    lane_topic_ids,
)
from anabranch.topics.names import commands_topic
from anabranch.topics.rights import Acl, Right
from tests.conftest import Broker
from tests.rights.test_each_right import is_named, names
from tests.secured import SecuredBroker
from tests.secured_lanes import at_last

pytestmark = pytest.mark.broker
MAKER, ETL = "maker", "etl"
SOON_S = 30.0


class Place(NamedTuple):
    """A broker, the maker's hands, and names for new lanes."""

    secured: SecuredBroker
    admin: KafkaAdmin
    log: KafkaLog
    numbers: Iterator[int]

    def make(self, lane: str) -> None:
        """As `Client.add_lane` does, but for the controllers' part; then look at the rules."""
        acls = [Acl(f"User:{ETL}", right) for right in rights.client_rights(lane=lane)]
        self.admin.allow(acls, soon())
        create_lane_topics(self.log, "anabranch", lane, like="admin")
        until = soon()
        while True:
            with suppress(errors.NotReady):
                lane_topic_ids(self.log, "anabranch", lane)
                break
            assert time.monotonic() < until
            time.sleep(0.05)
        create_lane_topics(self.log, "anabranch", lane, like="admin", adopt=True)
        found = [(acl.principal, acl.right[:3], acl.allowed) for acl in self.admin.listed(soon())]
        assert all((acl.principal, acl.right[:3], acl.allowed) in found for acl in acls)

    def bus(self, lane: str, bootstrap: str, options: dict[str, str]) -> KafkaBus:
        given, clock = Options(bootstrap, options), SystemClock()
        return KafkaBus(given, KafkaAdmin(given, clock), "anabranch", lane, clock, os.urandom)


def soon() -> float:
    return time.monotonic() + SOON_S


@pytest.fixture(scope="module")
def place(secured: SecuredBroker) -> Iterator[Place]:
    with closing(KafkaLog(secured.broker.bootstrap)) as log:
        create_control_topics(log, "anabranch", control_partitions=2)
        if commands_topic(lane="admin") not in log.describe_topics([commands_topic(lane="admin")]):
            create_lane_topics(log, "anabranch", "admin", like="open")
    secured.grant(MAKER, rights.client_rights(lane="admin"))
    secured.grant(MAKER, rights.lane_maker_rights())
    options = secured.options(MAKER)
    with closing(KafkaLog(secured.bootstrap, options)) as log:
        admin = KafkaAdmin(Options(secured.bootstrap, options), SystemClock())
        yield Place(secured, admin, log, count(1))


def test_a_lane_lets_in_its_principal_alone(place: Place) -> None:
    place.make("etl")
    other = next(place.numbers)
    place.make(f"n{other}")
    secured = place.secured
    with closing(place.bus("etl", secured.bootstrap, secured.options(ETL))) as bus:
        bus.ready(soon())
        assert bus.control_partitions(soon()) == 2
    for lane in ("open", "admin"):
        with (
            closing(place.bus(lane, secured.bootstrap, secured.options(ETL))) as bus,
            pytest.raises(
                errors.NotAuthorized, match=rf"on the topic {commands_topic(lane=lane)} "
            ),
        ):
            bus.ready(soon())


def test_a_lane_grows(place: Place) -> None:
    lane, model = (f"n{next(place.numbers)}" for _ in range(2))
    place.make(lane)
    place.make(model)
    with closing(KafkaLog(place.secured.broker.bootstrap)) as log:
        log.add_partitions(commands_topic(lane=model), 3)
        at_last(lambda: grow_lane_topic(place.log, "anabranch", lane, like=model))
        for _ in range(2):
            grow_lane_topic(place.log, "anabranch", lane, like=model)
        name = commands_topic(lane=lane)
        assert log.describe_topics([name])[name].partitions == 3


def test_the_brokers_passwords_are_for_its_owner_alone(place: Place) -> None:
    settings = place.secured.broker.folder / "server.properties"
    assert "wonder" in settings.read_text()
    assert stat.S_IMODE(settings.stat().st_mode) == 0o600
    assert stat.S_IMODE(settings.parent.stat().st_mode) == 0o700


def test_a_lane_that_does_not_exist(place: Place) -> None:
    plain = place.secured.broker.bootstrap
    with (
        closing(place.bus("elt", plain, {})) as bus,
        pytest.raises(errors.UnknownLane, match="`anabranch lane add elt`"),
    ):
        bus.ready(time.monotonic() + 3.0)


@pytest.mark.parametrize("right", list(rights.lane_maker_rights()), ids=names)
def test_a_lane_maker_without(place: Place, right: Right) -> None:
    lane = f"n{next(place.numbers)}"
    place.secured.revoke(MAKER, [right])
    until, told = soon(), ""
    try:
        while not is_named(right, told):
            assert time.monotonic() < until, f"nothing says that {names(right)} is missing: {told}"
            try:
                place.make(lane)
            except (errors.NotAuthorized, LogError) as error:
                told = str(error)
            except errors.IllegalState:  # half of it was there when rights were still believed
                lane = f"n{next(place.numbers)}"
    finally:
        place.secured.grant(MAKER, [right])
    at_last(lambda: place.make(f"n{next(place.numbers)}"))


@pytest.mark.unsecured
def test_brokers_without_an_authorizer_have_no_rules(broker: Broker) -> None:
    admin = KafkaAdmin(Options(broker.bootstrap, {}), SystemClock())
    with pytest.raises(errors.IllegalState, match="no authorizer"):
        admin.listed(soon())
    with pytest.raises(errors.IllegalState, match="no authorizer"):
        admin.allow([Acl("User:etl", next(rights.client_rights()))], soon())
