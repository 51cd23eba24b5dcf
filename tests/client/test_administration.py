"""Lanes, grants and the audit log, by the client: controllers are scripted, topics are in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from anabranch import errors
from anabranch.batches.records import Record, decode_records
from anabranch.client.client import Client
from anabranch.core.authorize import changed
from anabranch.ports import LogUncertain, TopicPartition, TopicSpec
from anabranch.protocol.ids import CORRELATION_HEADER, REPLY_HEADER, command_digest
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode
from anabranch.testing.memory.client import memory_client
from anabranch.testing.memory.log import MemoryBrokers, MemoryLog
from anabranch.topics.creation import create_control_topics, create_lane_topics
from anabranch.topics.declarations import COMMANDS, REPLIES
from anabranch.topics.rights import Acl, client_rights
from anabranch.types import Grant, right_bits
from tests.client.answers import refusal
from tests.client.doubles import ManualClock, counted, scripted_ports
from tests.client.world import World

ETL = "User:etl"
NAMES = "p.commands.etl", "p.replies.etl"
PARTITIONS = 2
START_OPEN = "describe", "safe-time", "write", "create", "scale", "series"
START = {("open", "*"): right_bits(START_OPEN)}


class Place:
    """Two control partitions that keep what commands set, topics, and the brokers' rules."""

    def __init__(self) -> None:
        self.lanes: list[dict[str, r.LaneInfo]] = [{}, {}]
        self.grants: list[dict[tuple[str, str], int]] = [{}, {}]  # besides those from the start
        self.audit: list[list[r.AuditRow]] = [[], []]
        self.acls: list[Acl] = []
        self.done: list[str] = []
        self.cut_at: int | None = None
        self.bus, clock, ports = scripted_ports(self.answer)
        self.bus.partitions = PARTITIONS
        self.log = MemoryBrokers(clock, on_call=self.called).log("admin")
        create_control_topics(self.log, "p", control_partitions=PARTITIONS, replication_factor=1)
        self.done.clear()
        ports = replace(ports, prefix="p", log=lambda _: nullcontext(self.log), acls=self)
        self.client = Client(ports, threads=False)

    def step(self, what: str) -> None:
        self.done.append(what)
        if len(self.done) - 1 == self.cut_at:
            raise KeyboardInterrupt

    def called(self, _: str, name: str) -> None:
        if name in ("create_topics", "create_topics.after"):
            self.step(name)

    def allow(self, acls: Iterable[Acl], _: float) -> None:
        self.step("allow")
        self.acls += acls

    def listed(self, _: float) -> list[Acl]:
        return self.acls

    def answer(self, command: Any) -> Any:
        at = self.bus.sent[-1].partition
        lanes, grants, audit = self.lanes[at], self.grants[at], self.audit[at]
        match command:
            case r.SetLane(lane, blocked, ids, quotas):
                self.step(f"SetLane {at}")
                lanes[lane] = r.LaneInfo(lane, blocked, "", ids, quotas, {"open": at + 1}, 3, 5)
                return r.LaneList((lanes[lane],))
            case r.ListLanes():
                return r.LaneList(tuple(lanes.values()))
            case r.SetGrant(lane, pattern, rights):
                has = (START | grants).get((lane, pattern), 0)
                grants[lane, pattern] = changed(has, rights)
                return r.GrantList((r.GrantRow(lane, pattern, grants[lane, pattern]),))
            case r.ListGrants():
                found = START | grants
                return r.GrantList(tuple(r.GrantRow(*key, bits) for key, bits in found.items()))
            case r.SetFeatureLevel():
                return r.FeatureLevel(4, 4, max(PARTITIONS, command.control_partitions))
            case r.ListAudit(before):
                begin = int.from_bytes(before or b"\0", "big")
                end = begin + 2
                more = end.to_bytes(1, "big") if end < len(audit) else None
                return r.AuditList(tuple(audit[begin:end]), more)
        raise AssertionError(command)


@pytest.fixture
def place() -> Place:
    return Place()


def test_a_lane_is_born_in_order(place: Place) -> None:
    lane = place.client.add_lane("etl", [ETL], {"open": 9}, apply=True)
    assert place.done == [
        "allow", "create_topics", "create_topics.after", "SetLane 0", "SetLane 1",
    ]  # fmt: skip
    assert place.acls == [Acl(ETL, right) for right in client_rights("p", "etl")]
    found = place.log.describe_topics(NAMES)
    assert [found[name].partitions for name in NAMES] == [PARTITIONS, 1]
    for name, settings in zip(NAMES, (COMMANDS, REPLIES), strict=True):
        assert {s.name: s.value for s in settings}.items() <= found[name].config.items()
    ids = tuple(found[name].topic_id for name in NAMES)
    assert all(ids)
    told = [(sent.partition, sent.command) for sent in place.bus.sent[-PARTITIONS:]]
    command = r.SetLane("etl", False, ids, {"open": 9})
    assert told == [(0, command), (1, command)]
    assert (lane.name, lane.topic_ids, lane.quotas, lane.trouble) == ("etl", ids, {"open": 9}, "")
    assert (lane.usage, lane.waiting) == ({"open": 3}, 4)


@pytest.mark.parametrize("cut_at", range(5))
def test_a_birth_cut_short_is_repeated(place: Place, cut_at: int) -> None:
    place.cut_at = cut_at
    with pytest.raises(KeyboardInterrupt):
        place.client.add_lane("etl", [ETL], {"open": 9}, apply=True)
    place.cut_at = None
    ids = [info.topic_id for info in place.log.describe_topics(NAMES).values()]
    known = "etl" in place.lanes[0]
    if ids and not known:
        with pytest.raises(errors.IllegalState, match="--adopt"):
            place.client.add_lane("etl", [ETL])
    lane = place.client.add_lane("etl", [ETL], None if known else {"open": 9}, adopt_topics=True)
    assert (lane.trouble, lane.quotas) == ("", {"open": 9})
    assert list(lane.topic_ids) == ids or not ids
    assert place.lanes[0]["etl"].topic_ids == place.lanes[1]["etl"].topic_ids == lane.topic_ids


def made(
    log: MemoryLog,
    partitions: int = PARTITIONS,
    config: Mapping[str, str] | None = None,
    write: bool = False,
) -> None:
    for name, count, settings in zip(NAMES, (partitions, 1), (COMMANDS, REPLIES), strict=True):
        declared = {s.name: s.value for s in settings}
        log.create_topics([TopicSpec(name, count, {**declared, **(config or {})}, 1)])
    if write:
        log.produce(TopicPartition(NAMES[1], 0), [Record(0, 1, None, b"who was it?", ())])


@pytest.mark.parametrize(
    ("there", "why"),
    [
        (partial(made, partitions=1), "add some until it has 2"),
        (partial(made, partitions=3), "has 3 partitions, not 2"),
        (partial(made, config={"cleanup.policy": "compact"}), "cleanup.policy=compact"),
        (partial(made, write=True), "p.replies.etl has, or had, records"),
    ],
)
def test_topics_that_are_not_as_they_would_be_are_not_adopted(
    place: Place, there: Callable[[MemoryLog], None], why: str
) -> None:
    there(place.log)
    with pytest.raises(errors.IllegalState, match=why):
        place.client.add_lane("etl", adopt_topics=True)
    assert not place.bus.of(r.SetLane)


@pytest.mark.parametrize("repeated", [1, 2])
def test_a_lane_grows_with_the_control_partitions(place: Place, repeated: int) -> None:
    born = place.client.add_lane("etl")
    place.log.add_partitions("p.commands", PARTITIONS + 1)
    place.bus.partitions = PARTITIONS + 1
    place.lanes.append({})
    place.grants.append({})
    place.audit.append([])
    assert "control partition 2 lacks it" in place.client.lanes()[0].trouble
    for _ in range(repeated):
        assert place.client.add_lane("etl").topic_ids == born.topic_ids
    found = place.log.describe_topics(NAMES)
    assert [found[name].partitions for name in NAMES] == [PARTITIONS + 1, 1]
    assert place.client.lanes()[0].trouble == ""


def test_a_cluster_grows_in_spite_of_a_dead_lane_and_busy_operators(place: Place) -> None:
    """A right that is taken away while grants are copied is gone on the new control partition, too."""
    place.client.add_lane("etl")
    for info in place.log.describe_topics(NAMES).values():
        place.log.delete_topics([info])
    place.bus.partitions = PARTITIONS + 1
    place.lanes.append({})
    place.grants.append({})
    place.audit.append([])
    with pytest.raises(errors.NotReady, match="block the lane"):
        place.client.grow_cluster(PARTITIONS + 1)
    place.client.block_lane("etl")
    place.grants[0]["etl", "nyc/*"] = place.grants[1]["etl", "nyc/*"] = right_bits(["write"])
    asked = place.client._session.ask

    def ask(number: int, command: Any, *rest: Any) -> Any:
        if isinstance(command, r.SetGrant):
            place.grants[0]["etl", "nyc/*"] = place.grants[1]["etl", "nyc/*"] = 0
        return asked(number, command, *rest)

    with patch.object(place.client._session, "ask", ask):
        assert place.client.grow_cluster(PARTITIONS + 1) == PARTITIONS + 1
    assert place.lanes[PARTITIONS]["etl"].blocked
    assert place.grants[PARTITIONS]["etl", "nyc/*"] == 0


def test_who_may_not_finish_growing_adds_no_partition(place: Place) -> None:
    place.bus.script = lambda command: (
        refusal("NotAuthorized") if isinstance(command, r.ListLanes) else place.answer(command)
    )
    with pytest.raises(errors.NotAuthorized):
        place.client.grow_cluster(PARTITIONS + 1)
    assert place.log.describe_topics(["p.status"])["p.status"].partitions == PARTITIONS


def test_topics_that_are_not_the_lanes_are_refused(place: Place) -> None:
    place.client.add_lane("etl")
    for info in place.log.describe_topics(NAMES).values():
        place.log.delete_topics([info])
    with pytest.raises(errors.NotReady, match=r"p\.commands\.etl.*not found"):
        place.client.add_lane("etl", timeout=1)
    made(place.log)
    with pytest.raises(errors.IllegalState, match="not those that it was made with"):
        place.client.add_lane("etl", adopt_topics=True)
    assert len(place.bus.of(r.SetLane)) == PARTITIONS


def test_a_topic_that_may_be_there_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise LogUncertain("the answer was lost")

    monkeypatch.setattr(MemoryLog, "create_topics", lost)
    with pytest.raises(errors.NotReady, match="--adopt"):
        place.client.add_lane("etl")


@pytest.mark.parametrize(
    ("principals", "apply", "why"),
    [
        (["etl"], False, "'etl' is not one principal"),
        (["User:"], False, "is not one principal"),
        (["User:*"], True, "is not one principal"),
        ([], True, "name the principals"),
    ],
)
def test_principals(place: Place, principals: list[str], apply: bool, why: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=why):
        place.client.add_lane("etl", principals, apply=apply)
    assert not place.done
    assert not place.bus.sent


def test_quotas_of_a_lane_that_is_there_from_the_start(place: Place) -> None:
    for lanes in place.lanes:
        lanes["open"] = r.LaneInfo("open", False, "", (), {}, {}, 0, 0)
    assert place.client.add_lane("open", quotas={"open": 3}).quotas == {"open": 3}
    assert place.bus.of(r.SetLane) == [r.SetLane("open", False, (), {"open": 3})] * PARTITIONS
    assert not place.log.describe_topics(NAMES)


def test_a_quota_is_set_and_all_others_stay(place: Place) -> None:
    place.client.add_lane("etl", quotas={"open": 9, "work": 500, "series": None})
    for quotas, left in (
        ({"work": 700}, {"open": 9, "work": 700}),
        ({}, {"open": 9, "work": 700}),
        ({"open": None}, {"work": 700}),
        (None, {"work": 700}),
    ):
        assert place.client.add_lane("etl", quotas=quotas).quotas == left
    with pytest.raises(errors.InvalidArgument, match="'wrok' is no quota: open, staged, work"):
        place.client.add_lane("etl", quotas={"wrok": None})


def test_blocking_keeps_all_else(place: Place) -> None:
    born = place.client.add_lane("etl", quotas={"open": 9})
    assert place.client.block_lane("etl") == replace(born, blocked=True)
    assert place.client.add_lane("etl").blocked, "a repeated birth does not unblock"
    assert place.client.unblock_lane("etl") == born
    with pytest.raises(errors.UnknownLane, match="there is no lane 'elt'"):
        place.client.block_lane("elt")


def test_a_lane_that_a_partition_lacks(place: Place) -> None:
    place.client.add_lane("etl")
    place.lanes[0]["etl"] = replace(place.lanes[0]["etl"], trouble="gone")
    place.lanes[1]["etl"] = replace(place.lanes[1]["etl"], blocked=True)
    assert place.client.lanes()[0].blocked
    del place.lanes[1]["etl"]
    (lane,) = place.client.lanes()
    assert lane.trouble == (
        "control partition 0: gone; control partition 1 lacks it: repeat `anabranch lane add etl`"
    )


def test_grants(place: Place) -> None:
    client = place.client
    shop = partial(Grant, "etl", "shop/*")
    assert client.grant("etl", "shop/*", ["write"]) == shop(("write",))
    assert client.grant("etl", "shop/*", ["describe"]) == shop(("describe", "write"))
    assert client.grants()[0] == shop(("describe", "write"))
    assert client.revoke("etl", "shop/*", ["write"]) == shop(("describe",))
    assert client.revoke("etl", "shop/*") == shop(())
    assert place.grants == [{("etl", "shop/*"): 0}] * 2
    place.grants[0]["etl", "shop/*"] = 4
    assert shop(("write",)) in client.grants(), "what one partition still grants is shown"
    del place.grants[1]["etl", "shop/*"]
    assert client.grant("etl", "shop/*", ["describe"]) == shop(("describe", "write"))
    assert place.grants == [{("etl", "shop/*"): 5}] * 2, "one that lacked the grant has all of it"
    assert client.grant("etl", "shop/a", ()) == Grant("etl", "shop/a", ())
    with pytest.raises(
        errors.InvalidArgument, match="'wite' is not a right; use some of describe, "
    ):
        client.grant("etl", "shop/*", ["wite"])


@pytest.mark.parametrize("end", [("write",), ()])
def test_two_operators_at_once_lose_no_change(world: World, end: tuple[str, ...]) -> None:
    mine, other = (
        memory_client(world.cluster.log(name), world.clock, counted(), lane="admin")
        for name in ("mine", "other")
    )
    mine.grant("open", "nyc/*", ["create"])
    listed = mine._session.ask_each

    def and_then(*question: Any) -> list[Any]:
        found = listed(*question)
        change = other.grant if end else other.revoke
        change("open", "nyc/*", ["write"] if end else ["create"])
        return found

    with patch.object(mine._session, "ask_each", and_then):
        left = mine.revoke("open", "nyc/*", ["create"]) if end else mine.grant("open", "nyc/*", ())
    assert left.rights == end
    assert Grant("open", "nyc/*", end) in mine.grants()


def test_a_grant_keeps_the_rights_from_the_start(place: Place) -> None:
    assert Grant("open", "*", START_OPEN) in place.client.grants()
    assert place.client.grant("open", "*", ["operate"]).rights == (*START_OPEN, "operate")
    assert place.client.revoke("open", "*").rights == ()
    assert Grant("open", "*", ()) in place.client.grants()


def test_the_audit_log(place: Place) -> None:
    for at, row in enumerate([9, 7, 5, 3, 8, 6, 4]):
        place.audit[at // 4].append(r.AuditRow(row, "admin", "Force", "x"))
    every = [9, 8, 7, 6, 5, 4, 3]
    for limit in (1, 3, 7, 100):
        assert [entry.at_ms for entry in place.client.audit_log(limit)] == every[:limit]
    found = place.client.audit_log()
    assert [entry.control_partition for entry in found[:3]] == [0, 1, 0]
    with pytest.raises(errors.InvalidArgument):
        place.client.audit_log(0)


def test_a_client_of_a_lane_uses_the_topics_of_its_lane() -> None:
    clock = ManualClock()
    heard: list[bytes | None] = []
    log = MemoryBrokers(clock).log("etl")
    create_control_topics(log, "p", control_partitions=PARTITIONS, replication_factor=1)
    create_lane_topics(log, "p", "etl", like="open")
    commands, replies = (TopicPartition(name, 0) for name in NAMES)

    def controller() -> None:
        """Answer what came by the lane, in it."""
        got = log.fetch({commands: len(heard)}, max_wait=0, max_bytes=1 << 20, committed=True)
        for batch in got[commands].batches if commands in got else ():
            for record in decode_records(batch.data):
                headers = dict(record.headers)
                heard.append(headers[REPLY_HEADER])
                value = record.value or b""
                answer = r.ScopeInfo("nyc", 0)
                reply = r.Reply(
                    headers[CORRELATION_HEADER] or b"", command_digest(value), 1, answer
                )
                key = headers[CORRELATION_HEADER]
                log.produce(replies, [Record(0, 1, key, encode(reply), ())])

    clock.on_sleep = controller
    with memory_client(log, clock, counted(), prefix="p", lane="etl") as client:
        assert client.lane == "etl"
        assert client.reserve("nyc").scope == "nyc"
    clock.on_sleep = None
    with memory_client(log, clock, counted(), prefix="p", lane="etl") as blocked:
        said = "start `anabranch controller`; or lane 'etl' is not read: `anabranch lane list`"
        with pytest.raises(errors.NotReady, match=said):
            blocked.reserve("nyc")
    assert heard == [bytes(4)], "one command, to be answered on the lane's only partition"
