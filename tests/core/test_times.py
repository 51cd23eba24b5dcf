"""Hybrid time, safe time, and what clients have seen: commits exceed it whatever leaders and clocks do."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from anabranch.core import rows as k
from anabranch.core.authorize import Right
from anabranch.core.decisions.turn import Turn
from anabranch.core.round import ReplyTo, Round
from anabranch.errors import InvalidArgument, InvariantViolation
from anabranch.protocol import hybrid_time
from anabranch.protocol import hybrid_time as ht
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import make, peek
from tests.conftest import some
from tests.core.harness import START_MS, World, nyc
from tests.core.harness import event as an_event
from tests.core.labels import SECRET
from tests.core.scaled_world import ScaledWorld
from tests.core.test_scaled_model import STREAMS, Account, moves

MAX_US = (1 << 51) - 1
us_values = st.integers(0, MAX_US)
logicals = st.integers(0, 4095)
timestamps = st.integers(0, (1 << 63) - 1)


@given(st.integers(0, (1 << 63) - 2), us_values)
def test_next_is_later_than_the_previous_and_not_before_the_clock(
    previous: int, now_us: int
) -> None:
    after = ht.next_after(previous, now_us)
    assert after > previous
    assert after >= now_us << 12
    assert after in (previous + 1, now_us << 12)  # and no further than it must be


@given(us_values, st.lists(st.integers(-5, 5), min_size=1, max_size=200))
def test_a_clock_that_jumps_about_never_breaks_the_order(start: int, steps: list[int]) -> None:
    now, last, seen = start, 0, []
    for step in steps:
        now = min(MAX_US - 1, max(0, now + step))
        last = ht.next_after(last, now)
        seen.append(last)
    assert seen == sorted(set(seen))


def test_a_full_logical_part_carries() -> None:
    full = ht.from_us(1_000_000, 4095)
    assert ht.next_after(full, 1_000_000) == ht.from_us(1_000_001, 0)
    assert ht.next_after(full, 0) == ht.from_us(1_000_001, 0)
    assert ht.next_after(ht.from_us(7, 12), 7) == ht.from_us(7, 13)
    assert ht.next_after(ht.from_us(7, 12), 8) == ht.from_us(8)


def test_times_with_different_numbers_are_never_equal() -> None:
    assert ht.next_after(ht.from_us(7, 12), 7, 13) == ht.from_us(7, 13)
    assert ht.next_after(ht.from_us(7, 13), 7, 13) == ht.from_us(8, 13)
    assert ht.next_after(ht.from_us(7, 14), 8, 13) == ht.from_us(8, 13)
    assert ht.next_after(ht.from_us(7, 14), 7, 4096 + 13) == ht.from_us(8, 13)


@given(us_values, logicals)
def test_parts_come_back(us: int, logical: int) -> None:
    stamp = ht.from_us(us, logical)
    assert 0 <= stamp <= ht.MAX == (1 << 63) - 1
    assert (ht.to_us(stamp), ht.logical_of(stamp)) == (us, logical)
    assert ht.to_ms(stamp) == us // 1000


@given(timestamps, timestamps)
def test_order_is_that_of_the_parts(a: int, b: int) -> None:
    assert (a < b) == ((ht.to_us(a), ht.logical_of(a)) < (ht.to_us(b), ht.logical_of(b)))


@given(st.integers(0, MAX_US // 1000 - 1))
def test_a_millisecond_has_a_first_and_a_last(ms: int) -> None:
    first, last = ht.from_us(ms * 1000), ht.from_us(ms * 1000 + 999, 4095)
    assert ht.to_ms(first) == ht.to_ms(last) == ms
    assert ht.to_ms(last + 1) == ms + 1
    assert first == 0 or ht.to_ms(first - 1) == ms - 1


@given(us_values)
def test_datetimes_are_exact(us: int) -> None:
    moment = ht.to_datetime(ht.from_us(us, 9))
    assert moment.tzinfo is UTC
    assert ht.from_datetime(moment) == ht.from_us(us)
    elsewhere = moment.astimezone(timezone(timedelta(hours=-7)))
    assert ht.from_datetime(elsewhere) == ht.from_us(us)


def test_known_values() -> None:
    stamp = ht.from_datetime(datetime(2025, 3, 1, 12, 30, 15, 123456, tzinfo=UTC))
    assert stamp == 1_740_832_215_123_456 << 12
    assert ht.to_ms(stamp + 4095) == 1_740_832_215_123
    assert ht.to_text(stamp) == "2025-03-01T12:30:15.123456Z"
    assert ht.to_text(stamp + 7) == "2025-03-01T12:30:15.123456Z+7"
    assert ht.read_moment(ht.to_text(stamp + 7)) == stamp + 7
    assert ht.to_datetime(ht.MAX).year == 2041


def test_what_is_out_of_range_is_refused() -> None:
    for previous, now in [(-1, 0), (ht.MAX, 0), (0, -1), (0, MAX_US + 1)]:
        with pytest.raises(InvariantViolation):
            ht.next_after(previous, now)
    assert ht.next_after(ht.MAX - 1, 0) == ht.MAX
    for us, logical in [(-1, 0), (MAX_US + 1, 0), (0, -1), (0, 4096)]:
        with pytest.raises(InvalidArgument):
            ht.from_us(us, logical)
    with pytest.raises(InvalidArgument, match="time zone"):
        ht.from_datetime(datetime(2025, 1, 1))  # noqa: DTZ001
    with pytest.raises(InvalidArgument):
        ht.from_datetime(datetime(1969, 12, 31, tzinfo=UTC))


NOW = hybrid_time.from_us(START_MS * 1000)
MS = 1000 << hybrid_time.LOGICAL_BITS


def ask(world: World, at: int | None, scope: str = "nyc") -> int | str:
    """The timestamp that is answered, or the refusal."""
    world.ask("safe", r.SafeTime(scope, at))
    result = world.result
    return result.timestamp if isinstance(result, r.SafeTimeReply) else result.code


def stamp(world: World, label: str) -> int:
    """Commits a one-shot; its timestamp."""
    world.one_shot(label, an_event())
    return world.row(label).commit_timestamp


def test_now_is_the_clock_and_is_logged(world: World) -> None:
    world.wait(5)
    rounds = len(world.log)
    assert ask(world, None) == NOW + 5 * MS
    assert len(world.log) == rounds + 1, "an idle controller writes a round for it"
    assert world.state.round.hybrid_time == NOW + 5 * MS
    assert stamp(world, "A") == NOW + 5 * MS + 1


@pytest.mark.parametrize(
    ("at", "answer"),
    [
        (0, 0),
        (NOW, NOW),
        (NOW + 10 * MS, NOW + 10 * MS),
        (NOW + 10 * MS + 1, "NotReady"),
        (hybrid_time.MAX, "NotReady"),
        (-1, "InvalidArgument"),
    ],
)
def test_a_time_is_answered_once_the_clock_has_reached_it(
    world: World, at: int, answer: int | str
) -> None:
    world.wait(10)
    before = world.state.round.hybrid_time
    assert ask(world, at) == answer
    moved = max(before, answer) if isinstance(answer, int) else before
    assert world.state.round.hybrid_time == moved, "no further than what was answered"


def test_a_time_to_come_is_reached_later(world: World) -> None:
    assert ask(world, NOW + 10 * MS) == "NotReady"
    assert "10 ms are missing" in world.message
    world.wait(10)
    assert ask(world, NOW + 10 * MS) == NOW + 10 * MS


def test_the_safe_time_of_another_partitions_scope_is_refused(world: World) -> None:
    assert ask(world, None, scope="sfo") == "UnknownScope"


def test_a_clock_that_goes_back_does_not_take_time_with_it(world: World) -> None:
    world.wait(60_000)
    told = ask(world, None)
    assert isinstance(told, int)
    world.wall_us -= 59_000_000
    assert ask(world, None) == told
    assert stamp(world, "A") == told + 1
    assert ask(world, None) == told + 1
    world.lead(keep_table=False)
    assert ask(world, None) == told + 1
    assert stamp(world, "B") == told + 2


def test_between_commits_of_one_round(world: World) -> None:
    """What is decided before it in the round counts, what is decided after it exceeds it."""
    shots = [
        (label, r.OneShot(world.id(label), "nyc", None, (an_event(),))) for label in ("A", "B")
    ]
    world.turn(shots[0], ("safe", r.SafeTime("nyc", None)), shots[1])
    (told,) = [x.timestamp for _, x in world.said if isinstance(x, r.SafeTimeReply)]
    assert world.row("A").commit_timestamp <= told < world.row("B").commit_timestamp


# -- random lives --------------------------------------------------------------------------------------


class Watched(ScaledWorld):
    """Holds every round against what was answered before its steps were decided."""

    told = 0
    answers = 0
    _round: Round | None = None
    _seen = 0

    def _decide(self, turn: Turn, command: Any, to: ReplyTo) -> None:
        self._hold(turn)
        said = len(turn.round.replies)
        super()._decide(turn, command, to)
        for _, result in turn.round.replies[said:]:
            if isinstance(result, r.SafeTimeReply):
                self.told = max(self.told, result.timestamp)
                self.answers += 1

    def close(self, turn: Turn, expired_ms: int | None = None, asker: str | None = None) -> str:
        self._hold(turn)
        return super().close(turn, expired_ms, asker)

    def _hold(self, turn: Turn) -> None:
        """What the round has decided since the last look exceeds all that was answered before it."""
        if turn.round is not self._round:
            self._round, self._seen = turn.round, 0
        assert all(step.timestamp > self.told for step in turn.round.history[self._seen :])
        self._seen = len(turn.round.history)


class Timed(Account):
    """Moves of streams that scale, and of time."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = self.world = Watched(
            STREAMS, chunk_bytes=600, round_bytes=1_500, collate_ms=100, max_open=100
        )

    def safe(self, *, ahead_ms: int | None, with_one: bool) -> None:
        """Alone, or in front of a one-shot of the same round; in the past, now, or still to come."""
        self.count += 1
        world = self.world
        wall = hybrid_time.from_us(world.wall_us)
        at = None if ahead_ms is None else max(0, wall + ahead_ms * MS)
        before = world.state.round.hybrid_time
        asked: list[tuple[str, Any]] = [("safe", r.SafeTime("nyc", at))]
        if with_one:
            shot = r.OneShot(world.id(f"o{self.count}"), "nyc", None, (an_event(STREAMS[0]),))
            asked.append(("one-shot", shot))
        world.turn(*asked)
        (found,) = [x for to, x in world.said if to.correlation_id == b"safe"]
        if at is not None and at > max(before, wall):
            assert isinstance(found, r.Refusal)
            assert found.code == "NotReady"
        else:
            assert isinstance(found, r.SafeTimeReply)
            assert found.timestamp == (max(before, wall) if at is None else at)

    def clock(self, *, by_ms: int) -> None:
        """The wall clock is set; the monotonic one is not."""
        self.world.wall_us += by_ms * 1000


timed = st.one_of(
    moves,
    moves,
    st.tuples(
        st.just("safe"),
        st.fixed_dictionaries(
            {
                "ahead_ms": st.none() | st.sampled_from((-100_000, -50, 0, 1, 30)),
                "with_one": st.booleans(),
            }
        ),
    ),
    st.tuples(
        st.just("clock"),
        st.fixed_dictionaries({"by_ms": st.sampled_from((-5_000, -20, 40, 5_000))}),
    ),
)


@settings(
    max_examples=some(40),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(timed, min_size=30, max_size=80))
def test_no_later_commit_is_at_or_below_what_was_answered(life: list[tuple[Any, ...]]) -> None:
    account = Timed()
    for name, *given_ in life:
        own = getattr(account, name, None) or getattr(account.world, name)
        if given_ and isinstance(given_[0], dict):
            own(**given_[0])
        else:
            own(*given_)
    account.check()
    event(f"answers: {min(account.watched.answers, 10)}")


US = 1 << hybrid_time.LOGICAL_BITS
SKEW = 10_000 * MS
BROKEN = hybrid_time.MAX


def shot(world: World, label: str, seen: int) -> str | int:
    """What is told to a one-shot of a client that has seen this: its timestamp above now, or the refusal."""
    world.seen = seen
    said = world.one_shot(label, an_event())
    world.seen = 0
    return world.row(label).commit_timestamp - NOW if "COMMITTED" in said else said


@pytest.mark.parametrize(
    ("error_ms", "own", "seen", "told"),
    [
        (None, 0, -SKEW, 2),
        (None, 0, 0, 2),
        (None, 0, 5 * MS, 5 * MS + 1),
        (None, 0, SKEW, SKEW + 1),
        (None, 0, SKEW + US, "ClockSkew"),
        (None, 0, BROKEN - NOW, "ClockSkew"),
        (None, 2 * SKEW, 2 * SKEW, 2 * SKEW + 1),  # a former leader's clock was fast: no outage
        (None, 2 * SKEW, 2 * SKEW + 1, "ClockSkew"),
        (50, 0, 50 * MS, 50 * MS + 1),  # commit wait: answers wait for the clock
        (50, 0, 50 * MS + US, "NotReady"),
        (50, 0, SKEW + US, "ClockSkew"),
    ],
)
def test_a_commit_exceeds_what_its_sender_has_seen(
    error_ms: int | None, own: int, seen: int, told: int | str
) -> None:
    world = nyc(clock_error_ms=error_ms)
    if own:
        world.log_rows([(k.ROUND_KEY, replace(world.state.round, hybrid_time=NOW + own))])
    before = world.state.round.hybrid_time
    assert shot(world, "A", NOW + seen) == told
    if isinstance(told, str):
        assert world.state.round.hybrid_time == before, "a refused command raises nothing"
        world.wait(20_001)
        assert shot(world, "A", NOW + min(seen, SKEW + US)) != told, "the clock came there"


def test_the_wall_limits_it_so_it_does_not_creep(world: World) -> None:
    assert shot(world, "A", NOW + SKEW) == SKEW + 1
    assert shot(world, "B", NOW + SKEW + MS) == "ClockSkew"
    world.wait(1)
    assert shot(world, "C", NOW + SKEW + MS) == SKEW + MS + 1


def test_it_outlives_the_leader_and_its_clock(opened: World) -> None:
    """A writer registers, the next leader's clock is minutes behind, and the committer has seen nothing."""
    opened.write("A", "w1")
    opened.seen = NOW + 5 * MS
    opened.finish("A", "w1")
    opened.seen = 0
    opened.wall_us -= 300_000_000
    opened.lead(keep_table=False)
    opened.commit("A")
    assert opened.turn() == "[commit A] A COMMITTED 1"
    assert opened.row("A").commit_timestamp == NOW + 5 * MS + 1


@pytest.mark.parametrize("told_by", ["receipt", "own", "registered", "token", "touch"])
def test_it_comes_with_receipts_and_tokens(opened: World, told_by: str) -> None:
    opened.write("A", "w1")
    seen = NOW + 5 * MS
    receipt = replace(opened.receipt("A", "w1"), seen=seen)
    token = make(SECRET, replace(peek(opened.token("A")), seen=seen))
    plain = replace(receipt, seen=0)
    if told_by == "registered":
        opened.register("A", receipt)
    if told_by == "touch":
        opened.ask("touch", r.Touch(token, "nyc/a"))
    command = {
        "receipt": r.Commit(opened.token("A"), (), (receipt,), None, 1000),
        "own": r.Commit(opened.token("A"), (receipt,), None, None, 1000),
        "registered": r.Commit(opened.token("A"), (), None, None, 1000),
        "token": r.Commit(token, (plain,), None, None, 1000),
        "touch": r.Commit(opened.token("A"), (plain,), None, None, 1000),
    }[told_by]
    opened.ask("commit", command)
    assert opened.turn() == "[commit] A COMMITTED 1"
    assert opened.row("A").commit_timestamp == seen + 1


def test_commands_without_a_timestamp_are_done_at_any_skew(opened: World) -> None:
    opened.seen = BROKEN
    before = opened.state.round.hybrid_time
    assert opened.get("A") == "A OPEN"
    assert opened.commit("A") == "ClockSkew"
    assert opened.abort("A", "so") == "A ABORTED (so)"
    assert opened.state.round.hybrid_time == before
    opened.ask("sets", r.SetGrant("open", "nyc/a", 1), lane="admin")
    assert opened.state.grants["open"] == {"nyc/a": 1}, opened.result
    assert opened.state.round.hybrid_time < before + MS


def test_what_leads_to_no_commit_raises_nothing(world: World) -> None:
    """Nor does what a lane asks that may not write; its snapshot waits for the clock, as it would not see all."""
    world.grant("reader", "nyc/*", Right.SAFE_TIME | Right.DESCRIBE)
    world.grant("writer", "nyc/a", Right.WRITE | Right.SAFE_TIME)
    world.grant("gone", "nyc/*", Right.WRITE)
    with world.by("gone"):
        assert world.one_shot("G", an_event()) == "G COMMITTED 1"
    world.grant("gone", "nyc/*", 0)
    seen = world.seen = NOW + 5 * MS
    again = r.OneShot(world.id("G"), "nyc", None, (an_event(),))
    for lane, command, answer in (
        ("reader", r.ListTransactions(None, False, 10, None), "TransactionList"),
        ("open", r.DescribeStreams(None, None), "StreamList"),
        ("gone", again, "Outcome"),
    ):
        world.ask("asks", command, lane=lane)
        assert type(world.result).__name__ == answer
        assert world.state.round.hybrid_time < seen, command
    world.ask("reads", r.SafeTime("nyc", None), lane="reader")
    assert world.result.code == "NotReady"
    ahead = NOW + 2 * MS
    world.seen = ahead
    world.ask("sets", r.SetGrant("reader", "nyc/a", 1), lane="admin")
    assert world.state.round.hybrid_time > ahead, "a copy that had seen this must not set it again"
    world.seen = seen
    world.wait(5)
    world.ask("reads", r.SafeTime("nyc", None), lane="reader")
    assert world.result.timestamp >= seen, "the clock came there"
    world.seen = seen = seen + 5 * MS
    world.ask("reads", r.SafeTime("nyc", None), lane="writer")
    assert world.result.timestamp == seen


def test_a_refused_command_raises_nothing(world: World) -> None:
    before = world.state.round.hybrid_time
    world.seen = NOW + 5 * MS
    assert world.one_shot("A", an_event("nyc/none")) == "UnknownStream"
    assert world.state.round.hybrid_time == before


def test_safe_time_has_what_its_asker_has_seen(world: World) -> None:
    world.seen = NOW + 5 * MS
    world.ask("safe", r.SafeTime("nyc", None))
    assert world.result.timestamp == NOW + 5 * MS
    world.ask("safe", r.SafeTime("nyc", NOW + 6 * MS))
    assert world.result.code == "NotReady", "what is asked for has not been seen"


def test_who_asked_for_commit_wait_is_known_to_the_next_leader() -> None:
    world = nyc(clock_error_ms=50)
    world.begin("A")
    world.touch("A")
    world.write("A", "w1")
    own = [world.receipt("A", "w1")]
    world.held = world.waits = True
    world.commit("A", own=own, asker="waits")
    world.waits = False
    world.commit("A", own=own, asker="not")
    world.lead(keep_table=False)
    world.held = False
    world.turn()
    world.turn()
    assert {to.correlation_id: to.held for to, _ in world.said} == {b"waits": True, b"not": False}


def test_commit_wait_needs_the_clocks_error(world: World) -> None:
    world.waits = True
    assert world.one_shot("A", an_event()) == "InvalidArgument"
    assert "--clock-error-ms" in world.message
