"""Safe time: what is answered stays below every later commit, whoever leads and whatever the clock does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from anabranch.core.decisions.turn import Turn
from anabranch.core.round import ReplyTo, Round
from anabranch.protocol import hybrid_time
from anabranch.protocol.schemas import records as r
from tests.conftest import some
from tests.core.harness import START_MS, World
from tests.core.harness import event as an_event
from tests.core.scaled_world import ScaledWorld
from tests.core.test_scaled_model import STREAMS, Account, moves

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


def test_of_a_scope_that_is_not_served_here(world: World) -> None:
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
