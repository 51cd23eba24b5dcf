"""Lanes, grants and the audit log, on the command line."""

from __future__ import annotations

import json
import re

import pytest

from anabranch.cli.errors import ExitCode
from anabranch.cli.lane import differences
from anabranch.presentation.load import advice, loads
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.topics.names import commands_topic
from anabranch.topics.rights import Acl, Right, client_rights, writer_rights
from anabranch.types import Grant, LeaderInfo
from tests.cli.conftest import Run
from tests.cli.fakes import TXN_ID, FakeClient

ETL = "User:etl"
OPERATORS = (
    ("txn", "abort", TXN_ID.hex()),
    ("stream", "recover", "nyc/flights"),
    ("stream", "forget", "nyc/flights", "-y"),
    ("command", "list"),
    ("lane", "add", "etl"),
    ("lane", "list"),
    ("lane", "block", "etl"),
    ("lane", "unblock", "etl"),
    ("grants", "list"),
    ("grants", "add", "etl", "*", "write"),
    ("grants", "remove", "etl", "*"),
    ("grants", "check"),
    ("audit-log",),
)
CLIENTS = (("stream", "list"), ("txn", "list"), ("series", "list", "nyc"), ("read", "nyc/flights"))


@pytest.mark.parametrize("arguments", [*OPERATORS, *CLIENTS], ids=" ".join)
def test_the_lane_that_a_command_asks_by(
    run: Run, fake: FakeClient, arguments: tuple[str, ...]
) -> None:
    usual = ADMIN_LANE if arguments in OPERATORS else OPEN_LANE
    for expected, options, variable in (
        (usual, (), None),
        ("ops", (), "ops"),
        ("etl", ("--lane", "etl"), "ops"),
    ):
        run(*arguments, *options, lane=variable)
        assert fake.target is not None
        assert fake.target.lane == expected


def test_lane_add_shows_the_rules_and_asks(run: Run, fake: FakeClient) -> None:
    born = ("lane", "add", "etl", "--principal", ETL, "--quota", "open=1000,streams=10")
    asked = run(*born)
    assert asked.exit_code == ExitCode.USAGE
    assert asked.stdout == (
        "kafka-acls.sh $ADMIN --add --allow-principal User:etl --operation Write --topic anabranch.commands.etl\n"
        "kafka-acls.sh $ADMIN --add --allow-principal User:etl --operation Read --topic anabranch.replies.etl\n"
    )
    assert "safe only once the brokers have these ACLs" in asked.stderr
    assert fake.calls == []
    quotas = {"open": 1000, "streams": 10}
    call = {"name": "etl", "principals": [ETL], "quotas": quotas}
    document = json.loads(run(*born, "--yes", "--adopt", "--json").stdout)
    assert document["acls"] == asked.stdout.splitlines()
    assert document["name"] == "etl"
    assert ("add_lane", {**call, "apply": False, "adopt_topics": True}) in fake.calls
    told = run(*born, "--apply").stdout
    assert "kafka-acls" not in told
    assert "etl: streams 10 (was without a limit)" in told
    assert ("add_lane", {**call, "apply": True, "adopt_topics": False}) in fake.calls
    fake.calls.clear()
    assert run("lane", "add", "etl").exit_code == 0
    assert [each["quotas"] for name, each in fake.calls if name == "add_lane"] == [None]


GRANT = "grant it rights: anabranch grants add {} 'SCOPE/*' write"
BACK = "to restore the default: anabranch lane add {} --quota {}=default"


@pytest.mark.parametrize(
    ("arguments", "asked", "shown"),
    [
        (("bi",), None, ["lane bi exists", GRANT.format("bi")]),
        (("etl",), None, ["lane etl exists"]),
        (
            ("etl", "--quota", "work=2500,open=30"),
            {"work": 2500, "open": 30},
            [
                "etl: open 30 (was 1,000)",
                "etl: work 2,500 a second (was without a limit)",
                BACK.format("etl", "work"),
            ],
        ),
        (
            ("etl", "--quota", "open=default"),
            {"open": None},
            ["etl: its quotas did not change"],
        ),
    ],
)
def test_lane_add_says_what_it_changed(
    run: Run,
    fake: FakeClient,
    arguments: tuple[str, ...],
    asked: dict[str, int | None] | None,
    shown: list[str],
) -> None:
    fake.granted = [Grant("etl", "shop/*", ("write",)), Grant("bi", "shop/*", ())]
    assert run("lane", "add", *arguments).stdout.splitlines() == shown
    assert [each["quotas"] for name, each in fake.calls if name == "add_lane"] == [asked]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ETL",), "'ETL' is not a lane: small letters"),
        (("etl", "--principal", "etl"), "'etl' is not one principal"),
        (("etl", "--quota", "open"), "--quota 'open' must have the form NAME=NUMBER"),
        (("etl", "--quota", "open=-1"), "--quota 'open=-1' must have the form"),
        (("etl", "--quota", "open=" + "9" * 5000), "must have the form"),
    ],
)
def test_lane_add_refuses(
    run: Run, fake: FakeClient, arguments: tuple[str, ...], said: str
) -> None:
    result = run("lane", "add", *arguments, "--yes")
    assert result.exit_code == ExitCode.USAGE
    assert said in result.stderr
    assert fake.calls == []


@pytest.mark.usefixtures("fake")
def test_lane_list_block_and_unblock(run: Run) -> None:
    found = json.loads(run("lane", "list", "--json").stdout)["lanes"]
    assert [each["name"] for each in found] == ["admin", "etl", "open"]
    assert found[0]["usage"] == {"open": 17}
    shown = run("lane", "list").stdout
    for part in ("blocked", "in trouble", "its topic is gone", "open 17 of 1000"):
        assert part in shown
    assert json.loads(run("lane", "block", "etl", "--json").stdout)["blocked"] is True
    assert run("lane", "block", "etl").stdout == "etl is blocked\n"
    assert run("lane", "unblock", "etl").stdout == "etl is read\n"


def test_grants(run: Run, fake: FakeClient) -> None:
    fake.granted = [Grant("etl", "shop/*", ("describe", "write")), Grant("open", "*", ())]
    found = json.loads(run("grants", "list", "--json").stdout)["grants"]
    assert found[0] == {"lane": "etl", "pattern": "shop/*", "rights": ["describe", "write"]}
    shown = run("grants", "list").stdout
    assert "describe,write" in shown
    assert re.search(r"open │ \* +│ - ", shown)
    assert "open" not in run("grants", "list", "etl").stdout
    added = run("grants", "add", "etl", "shop/*", "write,safe-time")
    assert added.stdout == "etl on shop/*: write,safe-time\n"
    call = {"lane": "etl", "pattern": "shop/*"}
    assert fake.calls[-1] == ("grant", {**call, "rights": ["write", "safe-time"]})
    run("grants", "remove", "etl", "shop/*")
    assert fake.calls[-1] == ("revoke", {**call, "rights": None})
    run("grants", "remove", "etl", "shop/*", "write")
    assert fake.calls[-1] == ("revoke", {**call, "rights": ["write"]})


def rule(operation: str, topic: str, principal: str = ETL, allowed: bool = True) -> Acl:
    name = topic.removesuffix("…")
    return Acl(principal, Right("topic", name, operation, "", name != topic), allowed)


LANE = [Acl(ETL, right) for right in client_rights(lane="etl")]
JOURNAL = [Acl(ETL, right) for right in writer_rights("shop/a")]
WRITE = Grant("etl", "shop/a", ("write",))
MAY, MAY_NOT = "may write to shop.a.journal, but lacks", "may not write to shop.a.journal"


@pytest.mark.parametrize(
    ("acls", "grants", "found"),
    [
        ([*LANE, *JOURNAL], [WRITE], []),
        ([*LANE, *JOURNAL], [], [MAY]),
        ([*LANE, *JOURNAL], [Grant("etl", "shop/a", ("describe",))], [MAY]),
        ([*LANE, *JOURNAL], [Grant("etl", "shop/b", ("write",))], [MAY]),
        ([*LANE, *JOURNAL], [Grant("open", "shop/a", ("write",))], [MAY]),
        ([*LANE, *JOURNAL], [Grant("etl", "shop/*", ("write",))], []),
        ([*LANE, *JOURNAL], [Grant("etl", "*", ("write",))], []),
        (LANE, [WRITE], [MAY_NOT]),
        (LANE, [Grant("etl", "shop/*", ("write",))], [MAY_NOT]),
        (LANE, [Grant("etl", "*", ("write",))], []),
        ([*LANE, *JOURNAL, rule("Write", "shop.a.journal", allowed=False)], [WRITE], [MAY_NOT]),
        ([*LANE, rule("Write", "shop.…")], [], [MAY]),
        ([*LANE, rule("All", "*")], [], [MAY]),
        ([*LANE, rule("Read", "shop.a.journal")], [], []),
        ([*LANE, rule("Write", "shop.a.journal", "User:*")], [], [MAY]),
        ([*LANE, rule("Write", "shop.a.journal", "User:other")], [], []),
        (JOURNAL, [], []),
        (
            [rule("Write", "anabranch.commands.etl", "User:*")],
            [],
            ["every principal may write to anabranch.commands.etl"],
        ),
        ([rule("Write", "anabranch.commands", "User:*")], [], []),
    ],
)
def test_a_rule_that_differs_from_a_grant_is_found(
    acls: list[Acl], grants: list[Grant], found: list[str]
) -> None:
    commands = {lane: commands_topic(lane=lane) for lane in ("open", "etl")}
    told = list(differences(acls, grants, commands, ["shop/a"]))
    assert len(told) == len(found)
    assert all(part in each.what for part, each in zip(found, told, strict=True)), told


def test_grants_check_exits_with_the_differences(run: Run, fake: FakeClient) -> None:
    assert run("grants", "check", "--json").stdout == '{"differences": []}\n'
    fake.rules = [*LANE, *(Acl(ETL, right) for right in writer_rights("nyc/flights"))]
    result = run("grants", "check")
    assert result.exit_code == ExitCode.DIFFERENCE
    assert "nyc.flights.journal" in result.stdout
    assert "disagree in 1 case" in result.stderr
    (found,) = json.loads(run("grants", "check", "--json").stdout)["differences"]
    assert (found["principal"], found["lane"], found["stream"]) == (ETL, "etl", "nyc/flights")


@pytest.mark.parametrize(
    ("given", "asked", "shown"),
    [
        ((), None, "feature level 1; the controllers that lead know levels up to 2"),
        (("--raise", "2", "--yes"), 2, "feature level 2;"),
    ],
)
def test_cluster_feature(
    run: Run, fake: FakeClient, given: tuple[str, ...], asked: int | None, shown: str
) -> None:
    assert shown in run("cluster", "feature", *given).stdout
    assert fake.calls == [("feature_level", {"raise_to": asked})]


def test_cluster_grow(run: Run, fake: FakeClient) -> None:
    assert run("cluster", "grow", "--control-partitions", "3").exit_code == ExitCode.USAGE
    assert fake.calls == [], "without a yes"
    said = run("cluster", "grow", "--control-partitions", "3", "--yes").stdout
    assert said.startswith("3 control partitions are in use")


def test_cluster_status(run: Run, fake: FakeClient) -> None:
    found = json.loads(run("cluster", "status", "--seconds", "0.1", "--json").stdout)
    (row,) = found["control_partitions"]
    assert (row["commits"], row["busy"], row["open"], found["advice"]) == (0.0, None, 3, [])


def leader(number: int, name: str, committed: int, busy_s: float) -> LeaderInfo:
    return LeaderInfo(number, 1, name, 0, committed, 0, int(busy_s * 1e6) + 1)


# Shares of a core by control partition and leader; what the advice says, a part of each sentence.
ADVICE: list[tuple[dict[int, tuple[str, float]], list[str]]] = [
    ({0: ("a", 0.4), 1: ("a", 0.2)}, []),
    ({0: ("a", 0.6), 1: ("a", 0.3)}, ["give control partition 1 (30%) to another controller: start"]),
    ({0: ("a", 0.6), 1: ("a", 0.3), 2: ("b", 0.1)}, ["to another controller, such as b, which takes 10%"]),
    ({0: ("a", 0.6), 1: ("a", 0.3), 2: ("b", 0.6)}, ["to another controller: start one more"]),
    ({0: ("a", 0.9), 1: ("a", 0.01)}, ["control partition 0 alone"]),
    (dict.fromkeys(range(20), ("a", 0.04)), ["give control partition 18 (4%) to another controller"]),
]  # fmt: skip


@pytest.mark.parametrize(("shares", "said"), ADVICE)
def test_which_control_partition_another_controller_should_lead(
    shares: dict[int, tuple[str, float]], said: list[str]
) -> None:
    before = [leader(n, name, 7, 1.0) for n, (name, _) in shares.items()]
    after = [leader(n, name, 27, 1.0 + 2 * busy) for n, (name, busy) in shares.items()]
    found = loads(before, after, 2.0)
    assert {load.commits for load in found} == {10.0}
    texts = advice(found)
    assert len(texts) == len(said)
    assert all(part in text for part, text in zip(said, texts, strict=True)), texts
    after[0] = leader(0, "c", 30, 9.0)  # it leads since a moment ago
    assert loads(before, after, 2.0)[0].busy is None


def test_the_feature_level_is_not_raised_without_a_yes(run: Run, fake: FakeClient) -> None:
    found = run("cluster", "feature", "--raise", "2")
    assert found.exit_code == ExitCode.USAGE
    assert fake.calls == []


def test_audit_log(run: Run, fake: FakeClient) -> None:
    (entry,) = json.loads(run("audit-log", "-n", "5", "--json").stdout)["entries"]
    assert fake.calls == [("audit_log", {"limit": 5})]
    assert (entry["lane"], entry["what"]) == ("admin", "etl blocked")
    assert entry["at"].startswith("2023-11-14")
    assert "etl blocked" in run("audit-log").stdout
