"""Lanes as data: made, changed, blocked, unblocked; and which silence counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from anabranch.core.authorize import Right
from anabranch.core.decisions.lanes import position_of, resume
from anabranch.core.decisions.transactions import UNREAD_MS, silent_lanes
from anabranch.core.decisions.turn import AT_END
from anabranch.core.rows import writer_key
from anabranch.core.state import State
from anabranch.protocol import limits
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.protocol.schemas import records as r
from tests.core.harness import World, nyc, states
from tests.core.labels import MINUTE

IDS = ("c", "r")


@dataclass
class Seen:
    """A lane as decisions see it, without a queue."""

    end: int = 0
    read_ms: int = -1
    well_ms: int = -1
    trouble: str = ""

    def usage(self) -> dict[str, int]:
        return {}


def admin(world: World, command: Any) -> Any:
    """The answer to a command by the lane `admin`: a refusal's name, or the lanes."""
    with world.by(ADMIN_LANE):
        turn = world.new_turn()
        world._decide(turn, command, world.asker("admin"))
        world.close(turn)
    answer = next(result for to, result in world.said if to.correlation_id == b"admin")
    return answer.code if isinstance(answer, r.Refusal) else answer.lanes


def setting(
    lane: str, blocked: bool = False, ids: tuple[str, ...] = IDS, **quotas: int
) -> r.SetLane:
    return r.SetLane(lane, blocked, ids, quotas)


@pytest.mark.parametrize(
    ("commands", "answer"),
    [
        ([setting("etl")], (False, IDS, {}, False)),
        ([setting("etl"), setting("etl")], (False, IDS, {}, False)),
        ([setting("etl", open=5)], (False, IDS, {"open": 5}, False)),
        ([setting("etl", ids=())], (False, (), {}, False)),
        ([setting("etl", True)], (True, IDS, {}, False)),
        ([setting("etl"), setting("etl", True)], (True, IDS, {}, False)),
        ([setting("etl", True), setting("etl")], (False, IDS, {}, True)),
        ([setting("etl", True), setting("etl"), setting("etl")], (False, IDS, {}, True)),
        ([setting(OPEN_LANE, True, ())], (True, (), {}, False)),
        ([setting(OPEN_LANE, True, ()), setting(OPEN_LANE, ids=())], (False, (), {}, True)),
        ([setting(ADMIN_LANE, open=5)], (False, IDS, {"open": 5}, False)),
    ],
)
def test_lanes_are_set(commands: list[r.SetLane], answer: Any) -> None:
    world = nyc()
    found = [admin(world, command) for command in commands][-1]
    (info,) = found
    own = dict(world.state.lanes[info.lane].quotas)
    assert (info.blocked, info.topic_ids, own, info.position == AT_END) == answer
    assert own.items() <= info.quotas.items()
    assert State(world.table).lanes == world.state.lanes, "a successor knows"
    assert position_of(State(world.table), info.lane) == info.position


@pytest.mark.parametrize(("lane", "found", "at"), [("etl", 7, 7), (OPEN_LANE, 7, 0)])
def test_an_unblocked_lane_continues_at_the_end_of_its_topic(
    lane: str, found: int, at: int
) -> None:
    """The offset of `open` stands in the round's own row."""
    world = nyc()
    admin(world, setting(lane, True))
    admin(world, setting(lane))
    turn = world.new_turn()
    resume(turn, {lane: found})
    world.offset = 0
    world.close(turn)
    assert position_of(world.state, lane) == at


@pytest.mark.parametrize(
    ("owner", "decided", "end"),
    [
        ("etl", False, "NotAuthorized"),
        ("web", False, ""),
        ("etl", True, ""),
    ],
)
def test_commits_of_a_blocked_lane(owner: str, decided: bool, end: str) -> None:
    world = nyc(round_bytes=1) if decided else nyc()
    admin(world, setting("etl"))
    world.grant(owner, "nyc/*", Right.WRITE)
    world.lane = owner
    for label in "BA":  # A is decided, and merged a round after B
        world.begin(label)
        world.touch(label)
        world.write(label, f"w{label}")
    own = {label: [world.receipt(label, f"w{label}")] for label in "AB"}
    world.held = not decided
    if not decided:
        world.commit("A", own=own["A"], wait_ms=10 * MINUTE)
        before = ("OPEN", False)
    else:
        world.turn(*((x, world.committing(x, own=own[x])) for x in "BA"))
        before = ("COMMIT_IN_PROGRESS", True)
    assert states(world, "A") == before
    admin(world, setting("etl", True))
    answers = [result.code for to, result in world.said if to.correlation_id != b"admin"]
    assert answers == ([end] if end else [])
    assert states(world, "A") == (("OPEN", None) if end else before)
    world.held = False
    if end:
        admin(world, setting("etl"))
        world.commit("A", own=own["A"])
        assert world.turn() == "[commit A] A COMMITTED 1", "it was open all the time"


@pytest.mark.parametrize(
    ("owner", "writers", "seen", "ends"),
    [
        ("open", (), {"open": 6_000}, True),
        ("open", (), {"open": 4_999}, False),
        ("open", (), {"open": 6_000, "web": -1}, True),
        ("web", (), {"open": -1, "web": 6_000}, True),
        ("web", (), {"open": 6_000, "web": -1}, False),
        ("web", (), {"open": -1}, True),  # blocked
        ("web", ("etl",), {"web": 6_000, "etl": -1}, False),
        ("web", ("etl",), {"web": 6_000, "etl": 6_000}, True),
        ("web", ("etl",), {"web": 6_000}, True),
    ],
)
def test_silence_aborts_once_all_lanes_of_the_transaction_are_read(
    owner: str, writers: tuple[str, ...], seen: dict[str, int], ends: bool
) -> None:
    """``seen``: for each lane that is read, ms behind the begin up to which it is."""
    world = nyc()
    world.grant("web", "nyc/*", Right.WRITE)
    with world.by(owner):
        world.begin("A", keepalive_ms=5_000)
    begun_ms = world.now_ms
    for number, lane in enumerate(writers):
        receipt = r.Receipt(world.id("A"), number, 0, False, ())
        world.log_rows([(writer_key(world.id("A"), number), r.WriterRow(receipt, lane))])
    world.memory.lanes = {lane: Seen(read_ms=begun_ms + ms) for lane, ms in seen.items()}
    assert silent_lanes(world.state, world.memory.keepalives, world.now_ms) == set()
    world.now_ms += 5_500
    assert silent_lanes(world.state, world.memory.keepalives, world.now_ms) == {owner, *writers}
    world.turn()
    assert world.row("A").state == ("ABORTED" if ends else "OPEN")


@pytest.mark.parametrize("keepalive_ms", [5_000, 2 * UNREAD_MS])
@pytest.mark.parametrize(("well_ms", "end"), [(-1, "ABORTED"), (0, "ABORTED"), (1, "OPEN")])
def test_silence_of_a_lane_that_can_not_be_read(keepalive_ms: int, well_ms: int, end: str) -> None:
    """``well_ms``: until when it could be read, ms behind the keepalive. One merely behind is waited for."""
    world = nyc()
    world.grant("web", "nyc/*", Right.WRITE)
    with world.by("web"):
        world.begin("A", keepalive_ms=keepalive_ms)
    world.memory.lanes = {"web": Seen(well_ms=world.now_ms + keepalive_ms + well_ms)}
    world.wait(max(UNREAD_MS, 10 * keepalive_ms))
    assert world.row("A").state == "OPEN"
    world.wait(500)
    assert world.row("A").state == end
    assert len(world.round.unread) == (end == "ABORTED")


def test_no_more_lanes_of_helpers_are_kept_than_the_limit() -> None:
    world = nyc()
    world.begin("A", keepalive_ms=5_000)
    lanes = [f"l{number}" for number in range(limits.HELPERS.value + 2)]
    for lane in (OPEN_LANE, *lanes, *lanes):
        with world.by(lane):
            assert world.heartbeat("A") == ""
    world.now_ms += 5_500
    known = silent_lanes(world.state, world.memory.keepalives, world.now_ms)
    assert known == {OPEN_LANE, *lanes[: limits.HELPERS.value]}
    world.abort("A")
    assert world.memory.keepalives.helpers.as_dict() == {}
