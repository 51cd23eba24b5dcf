"""Copies of commands that set something, as clients send them: two operators, lost answers, late records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anabranch.batches.records import Record, decode_records
from anabranch.client.client import Client
from anabranch.client.session import Session
from anabranch.errors import NotReady
from anabranch.ports import TopicPartition
from anabranch.protocol.defaults import FIRST_REPEAT_S
from anabranch.protocol.hybrid_time import from_us, parse
from anabranch.protocol.ids import TIME_HEADER, command_digest
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode, encode
from anabranch.testing.memory.client import memory_client
from anabranch.testing.memory.cluster import CLIENT
from anabranch.topics.names import commands_topic, stream_topic
from tests.client.answers import STREAM
from tests.client.doubles import scripted_ports
from tests.client.world import World

OTHER = "nyc/other"
INPUT = [r.ProcessorInput(STREAM, "", 0, 0)]
SETTING = (
    r.CreateStream, r.DeleteStream, r.AlterStream, r.Scale, r.SetGrant, r.CreateProcessor, r.SetSeries,
)  # fmt: skip
PLACE = TopicPartition(commands_topic("anabranch", ADMIN_LANE), 0)


def operator(world: World) -> Client:
    return memory_client(world.cluster.log(CLIENT), world.clock, world._entropy, lane=ADMIN_LANE)


def retention(world: World) -> str | None:
    return world.cluster.topics[stream_topic(STREAM)].config.get("retention.ms")


def alter(client: Client, ms: str) -> str:
    return client.alter_stream(STREAM, {"retention.ms": ms}).settings["retention.ms"]


def split(client: Client) -> int:
    """Split the first segment by hand."""
    first = client.describe(STREAM).segments[0]
    middle = (first.low + first.high) // 2
    ranges = [(first.low, middle), (middle, first.high)]
    return len(client.scale(STREAM, seal=[first.segment_id], ranges=ranges).segments)


class Deaf:
    """Loses the first answer that a client waits for; then another call runs, and it sends again."""

    def __init__(self, world: World, client: Client, then: Callable[[], object] = int) -> None:
        self._world, self._bus, self._then = world, client._shared.ports.bus, then
        self._wait: Any = self._bus.wait
        self._bus.wait = self  # type: ignore[method-assign]

    def __call__(self, correlation_id: bytes, deadline: float) -> bytes | None:
        bus: Any = self._bus
        bus.wait = self._wait
        while self._world.clock.now < deadline:
            self._world.clock.sleep(0.1)
        bus._receive(0.0)
        bus._slots[correlation_id].clear()
        self._then()
        return None


def test_two_operators_set_the_same_thing_in_turn(world: World) -> None:
    """The refusal carries the time of the other operator's change, so the call succeeds at once, by itself."""
    one, other = operator(world), operator(world)
    one.add_lane("etl")
    for number in range(3):
        for client in (one, other):
            began, wanted = world.clock.now, str(10_000_000 + number)
            assert alter(client, wanted) == wanted == retention(world)
            assert client.grant("etl", "nyc/*", ("write",)).rights == ("write",)
            assert world.clock.now < began + FIRST_REPEAT_S
        for client in (other, one):
            assert client.revoke("etl", "nyc/*").rights == ()
            assert client.block_lane("etl").blocked
            assert not client.unblock_lane("etl").blocked
            client.create_stream(OTHER)
            client.delete_stream(OTHER)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda client: client.create_stream(OTHER, 3).state, "ACTIVE"),
        (lambda client: client.delete_stream(STREAM), None),
        (lambda client: alter(client, "10000000"), "10000000"),
        (lambda client: len(client.scale(STREAM, 5).segments), 5),
        (split, 3),
        (lambda client: client.grant("open", "nyc/*", ("write",)).rights, ("write",)),
        (lambda client: client.create_processor("nyc/p", INPUT).processor, "nyc/p"),
        (lambda client: client.set_series("nyc", "s", 5, expected=None), None),
    ],
)
def test_a_call_whose_answer_is_lost_has_the_answer_of_its_copy(
    world: World, call: Callable[[Client], object], answer: object
) -> None:
    client = operator(world)
    client.streams("nyc")
    bus: Any = client._shared.ports.bus
    send, sent = bus.send, list[bytes]()

    def sending(partition: int, correlation_id: bytes, payload: bytes, more: Any = ()) -> None:
        is_first = correlation_id not in sent
        sent.append(correlation_id)
        if is_first and isinstance(decode(payload), SETTING):
            Deaf(world, client)
        send(partition, correlation_id, payload, more)

    bus.send = sending
    assert call(client) == answer
    assert len(sent) > len(set(sent)), "nothing was sent again"


def test_a_copy_does_not_undo_what_came_after_the_first(world: World) -> None:
    one, other = operator(world), operator(world)
    alter(one, "10000000")
    Deaf(world, one, lambda: alter(other, "20000000"))
    with pytest.raises(NotReady, match=r"one sent before may be carried out"):
        alter(one, "30000000")
    assert retention(world) == "20000000"
    assert alter(one, "40000000") == "40000000" == retention(world), "a new call knows of it"


def test_copies_that_are_all_refused_had_no_effect(world: World) -> None:
    """Without a controller for a while: another command comes first, then two copies of this one."""
    client = operator(world)
    alter(client, "10000000")
    world.stop_controller()
    former = encode(r.AlterStream(STREAM, {"retention.ms": "20000000"}, ()))
    world.cluster.produce(PLACE, [Record(0, 1, None, former, ())])
    until = world.clock.now + 1.5 * FIRST_REPEAT_S

    def lead() -> None:
        if world.clock.now > until:
            if world.controller is None:
                world.start_controller()
            world.step()

    world.clock.on_sleep = lead
    assert alter(client, "30000000") == "30000000" == retention(world)
    assert world.clock.now < until + FIRST_REPEAT_S


@pytest.mark.parametrize("last", ["deleted", "altered", "revoked"])
def test_a_late_copy_changes_nothing(world: World, last: str) -> None:
    one, other = operator(world), operator(world)
    log = world.cluster.log("network")
    one.create_stream(OTHER)
    alter(one, "10000000")
    one.grant("open", "nyc/*", ("write",))
    fetched = log.fetch({PLACE: 0}, max_wait=0, max_bytes=1 << 20, committed=True)[PLACE]
    records = [record for batch in fetched.batches for record in decode_records(batch.data)]
    other.delete_stream(OTHER)
    alter(other, "20000000")
    other.revoke("open", "nyc/*")
    kinds = {"deleted": r.CreateStream, "altered": r.AlterStream, "revoked": r.SetGrant}
    late = [record for record in records if isinstance(decode(record.value or b""), kinds[last])]
    assert late
    world.cluster.produce(PLACE, late)
    for _ in range(20):
        world.clock.sleep(0.5)
    assert not any(name.startswith("nyc.other") for name in world.cluster.topics)
    assert retention(world) == "20000000"
    assert [grant.rights for grant in other.grants() if grant.pattern == "nyc/*"] == [()]


def test_a_time_of_one_control_partition_is_not_sent_to_another() -> None:
    """The clock of partition 1 is an hour ahead: no command to partition 0 may carry a time of partition 1."""
    times = 5, 5 + from_us(3_600_000_000)
    number = 0

    def answer(command: Any) -> Any:
        digest = command_digest(encode(command))
        return r.Reply(bus.sent[-1].correlation_id, digest, times[number], r.LaneList(()))

    bus, _, ports = scripted_ports(answer)
    told, send = [], bus.send

    def sending(partition: int, correlation_id: bytes, payload: bytes, more: Any = ()) -> None:
        nonlocal number
        number = partition
        told.append((partition, parse(dict(more)[TIME_HEADER])))
        send(partition, correlation_id, payload, more)

    bus.send = sending  # type: ignore[method-assign,assignment]
    session = Session(ports)
    for command in (r.ListLanes(), r.SetLane("etl", False, (), {}), r.ListLanes()):
        for partition in (0, 1):
            session.ask(partition, command, r.LaneList, 2000.0)
    assert told == [(0, 0), (1, 5), (0, 5), (1, times[1]), (0, times[1]), (1, times[1])]
