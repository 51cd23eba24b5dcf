"""Holds against a brute force: all timestamps that were given, sorted; and who gives way to whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.across import coordinator, holds, messages, participant
from anabranch.core.across.coordinator import Step
from anabranch.core.across.holds import Entry, Holds
from anabranch.core.across.messages import Meeting
from anabranch.core.across.participant import Action
from anabranch.errors import ClockSkew
from anabranch.protocol import hybrid_time
from anabranch.protocol.ids import make_txn_id
from anabranch.protocol.schemas import records as r
from tests.conftest import some

STREAMS = ("bank/a", "bank/b", "bank/c")
some_streams = st.sets(st.sampled_from(STREAMS), min_size=1, max_size=2).map(sorted)
# What happens next: a prepared transaction comes; the oldest is decided, so much later than its prepare timestamp,
# or aborted; a one-shot comes; milliseconds pass.
happenings = st.lists(
    st.one_of(
        st.tuples(st.just("prepare"), some_streams),
        st.tuples(st.just("decide"), st.integers(0, 3)),
        st.tuples(st.just("abort"), st.just(0)),
        st.tuples(st.just("one_shot"), some_streams),
        st.tuples(st.just("wait"), st.integers(1, 120)),
    ),
    max_size=40,
)


@dataclass
class Line:
    """One control partition: what is given, and what is merged."""

    held: Holds = field(default_factory=Holds)
    clock: int = 0
    now_ms: int = 0
    streams: dict[bytes, list[str]] = field(default_factory=dict)
    open: list[bytes] = field(default_factory=list)
    alone: list[bytes] = field(default_factory=list)
    merged: dict[str, list[tuple[int, bytes]]] = field(
        default_factory=lambda: {s: [] for s in STREAMS}
    )
    safe: list[tuple[str, int, int]] = field(default_factory=list)  # stream, time, merges up to it

    def new(self, streams: list[str]) -> bytes:
        txn_id = len(self.streams).to_bytes(16, "big")
        self.streams[txn_id] = streams
        return txn_id

    def next(self) -> int:
        self.clock += 1
        return self.clock

    def happen(self, what: str, arg: Any) -> None:
        if what == "prepare":
            self.open.append(txn_id := self.new(arg))
            self.held.put(txn_id, arg, Entry(self.next(), txn_id, fixed=False))
        elif what in ("decide", "abort") and self.open:
            txn_id = self.open.pop(0)
            entry = self.held.of(txn_id)
            assert entry is not None
            at = entry.timestamp + arg
            self.clock = max(self.clock, at)
            decided = Entry(at, txn_id, fixed=True) if what == "decide" else None
            self.held.put(txn_id, self.streams[txn_id], decided)
        elif what == "one_shot":
            self.alone.append(self.new(arg))
        elif what == "wait":
            self.now_ms += arg
        for _ in range(3):
            self.merge()
        for stream in STREAMS:
            at = self.held.safe_time(self.clock, [stream])
            self.safe.append((stream, at, self.count(stream, at)))

    def merge(self) -> None:
        for entry in sorted(set(self.held.on())):
            streams = self.streams[entry.txn_id]
            waits = entry.since_ms >= 0 or not entry.fixed
            if not waits and self.held.may_go(entry.timestamp, entry.txn_id, streams):
                self.held.put(entry.txn_id, (), None)
                self.put(entry.timestamp, entry.txn_id)
        self.held.expire(self.now_ms)
        for txn_id in list(self.alone):
            at = self.held.admit(txn_id, self.streams[txn_id], (), self.now_ms, self.next())
            if at is not None:
                self.alone.remove(txn_id)
                self.put(at, txn_id)

    def put(self, at: int, txn_id: bytes) -> None:
        for stream in self.streams[txn_id]:
            self.merged[stream].append((at, txn_id))

    def count(self, stream: str, at: int) -> int:
        return sum(time <= at for time, _ in self.merged[stream])


@settings(max_examples=some(150), deadline=None, print_blob=True)
@given(happenings)
def test_merges_are_in_order_and_what_is_safe_stays(lives: list[tuple[str, Any]]) -> None:
    line = Line()
    for what, arg in lives:
        line.happen(what, arg)
    for what, arg in [("decide", 1)] * len(line.open) + [("wait", 1)]:
        line.happen(what, arg)
    for stream, merged in line.merged.items():
        assert merged == sorted(merged), stream
        assert len({txn_id for _, txn_id in merged}) == len(merged)
    for stream, at, count in line.safe:
        assert line.count(stream, at) == count, "more was merged below a safe time"
    assert not line.alone
    assert not list(line.held.on()), "nothing is left when all is decided"
    for txn_id, streams in line.streams.items():
        found = {at for stream in streams for at, one in line.merged[stream] if one == txn_id}
        assert len(found) <= 1, "one timestamp everywhere"


@pytest.mark.parametrize("seed", range(5))
def test_the_first_entries_decide_and_no_one_shot_that_may_go_is_missed(seed: int) -> None:
    """Against a list of all entries. Some belong to one-shots, which wait for one stream more than they write."""
    rnd, held, known = Random(seed), Holds(), dict[bytes, tuple[list[str], Entry]]()
    for step in range(600):
        before = {shot for shot in held.shots if _may_go(known, held, shot)}
        txn_id = bytes(15) + bytes((rnd.randrange(9),))
        known.pop(txn_id, None)
        if rnd.random() < 0.5:  # it ends, or its timestamp is taken back
            (held.give_up if step % 2 else partial(held.put, streams=(), entry=None))(txn_id)
        else:
            held.give_up(txn_id)
            kind, streams = rnd.choice(("open", "fixed", "shot")), rnd.sample(STREAMS, 2)
            since_ms = 5 if kind == "shot" else -1
            entry = Entry(rnd.randrange(9), txn_id, kind != "open", since_ms)
            known[txn_id] = streams, entry
            held.put(txn_id, streams, entry)
            if kind == "shot":
                both = (*streams, rnd.choice(STREAMS))
                held.wait(txn_id, holds.WaitingShot(None, None, "", None, 7, both))  # type: ignore[arg-type]
        found = {one.txn_id for one in held.shots_on(held.freed)}
        held.freed = frozenset()
        assert found <= known.keys()
        for shot in held.shots.keys() & known.keys() - before - {txn_id}:
            assert shot in found or not _may_go(known, held, shot)
        assert sorted(set(held.on())) == sorted(entry for _, entry in known.values())
        assert held.size == 7 * len(held.shots)


def _may_go(known: dict[bytes, tuple[list[str], Entry]], held: Holds, txn_id: bytes) -> bool:
    if txn_id not in known:
        return False
    at, streams = known[txn_id][1].timestamp, held.shots[txn_id].streams
    others = [
        entry for its, entry in known.values() if entry.txn_id != txn_id and {*its} & {*streams}
    ]
    waits = any(
        (e.timestamp, e.txn_id) < (at, txn_id) if e.fixed else e.timestamp <= at for e in others
    )
    assert held.may_go(at, txn_id, streams) is not waits
    return not waits


@pytest.mark.parametrize("takes", [True, False])
def test_a_one_shot_is_merged_although_its_stream_is_always_held(takes: bool) -> None:
    """Each ms a prepared transaction comes, which is decided 7 ms later (H4). ``takes``: it takes a timestamp."""
    line, waited = Line(), None
    shot = line.new(["bank/a"])
    for ms in range(90):
        line.happen("prepare", ["bank/a"])
        if ms >= 10 and waited is None:
            if not takes:
                line.held.give_up(shot)
            if line.held.admit(shot, ["bank/a"], (), ms, line.next()) is not None:
                waited = ms - 10
        if ms >= 7:
            line.happen("decide", 0)
    assert (waited is not None and waited <= 10) if takes else waited is None


def test_a_snapshot_is_safe_although_its_stream_is_always_held() -> None:
    """The time of the first answer is reached soon; the time of now never is (H5)."""
    line = Line()
    fixed = 0
    reached = []
    for ms in range(60):
        line.happen("prepare", ["bank/a"])
        if ms == 20:
            fixed = line.clock
        if ms >= 7:
            line.happen("decide", 0)
        if ms >= 20:
            safe = line.held.safe_time(line.clock, ["bank/a"])
            assert safe < line.clock
            reached += [ms] * (safe >= fixed)
    assert reached[0] <= 28
    assert line.held.safe_time(line.clock, ["bank/b"]) == line.clock, (
        "others are not concerned (H2)"
    )


def test_a_chain_of_waits_ends() -> None:
    """B waits for A, which a dead coordinator holds; who comes at B later waits for 100 ms at most (H4)."""
    held, dead, behind, last = Holds(), b"\1" * 16, b"\2" * 16, b"\3" * 16
    held.put(dead, ["bank/a"], Entry(10, dead, fixed=False))
    assert held.admit(behind, ["bank/a", "bank/b"], (), 0, 11) is None
    assert held.admit(last, ["bank/b"], (), 1, 12) is None
    assert held.expire(holds.KEPT_MS - 1) == []
    assert held.expire(holds.KEPT_MS) == [behind]
    assert held.admit(last, ["bank/b"], (), holds.KEPT_MS, 13) == 12
    assert held.admit(behind, ["bank/a", "bank/b"], (), holds.KEPT_MS, 14) is None
    assert held.of(behind) is None, "it waits, and takes no other timestamp"
    held.put(dead, (), None)
    assert held.admit(behind, ["bank/a", "bank/b"], (), 999, 15) == 15


def test_the_older_one_waits_and_the_younger_one_gives_way() -> None:
    old, young = make_txn_id(7, 1_000, 5), make_txn_id(2, 1_001, 4)
    assert sorted([young, old], key=messages.age) == [old, young], "not by control partition"
    assert messages.meet(old, young, decided=False) is Meeting.WAIT
    assert messages.meet(young, old, decided=False) is Meeting.AGAIN
    assert messages.meet(old, young, decided=True) is Meeting.AGAIN


def test_a_message_is_of_one_sender_for_one_receiver() -> None:
    secret, payload = b"s" * 32, b"\4\x3d..."
    mac = messages.mac_of(secret, 1, 2, payload)
    assert messages.is_genuine(secret, 1, 2, payload, mac)
    for wrong in (
        (secret, 2, 1, payload),
        (secret, 1, 3, payload),
        (secret, 1, 2, payload + b"."),
        (b"t" * 32, 1, 2, payload),
    ):
        assert not messages.is_genuine(*wrong, mac)
    assert not messages.is_genuine(secret, 1, 2, payload, None)


def test_a_time_is_accepted_up_to_the_skew() -> None:
    now_us = 1_000_000_000
    clock, near, far = (hybrid_time.from_us(now_us + ms * 1000) for ms in (0, 900, 1_100))
    assert messages.raised(clock, near, now_us, 1_000) == near
    assert messages.raised(far, far, now_us, 1_000) == far, "it was reached before"
    with pytest.raises(ClockSkew, match="1,100 ms ahead"):
        messages.raised(clock, far, now_us, 1_000)


def _vote(answer: r.VoteAnswer, timestamp: int = 0, *, stages: bool = False) -> r.Vote:
    return r.Vote(bytes(16), 1, 3, answer, timestamp, stages)


YES, STAMPED, STAGES = _vote("YES"), _vote("YES", 9), _vote("YES", stages=True)
NO, AGAIN, WAITING = _vote("NO"), _vote("AGAIN"), _vote("WAITING")


@pytest.mark.parametrize(
    ("asks", "votes", "more", "step"),
    [
        ("TIMESTAMP", [STAMPED, None], {}, Step.WAIT),
        ("TIMESTAMP", [STAMPED, None], {"held_ms": 100}, Step.TAKE_BACK),
        ("TIMESTAMP", [STAMPED, WAITING], {"held_ms": 100}, Step.TAKE_BACK),
        ("TIMESTAMP", [STAMPED, STAMPED], {}, Step.DECIDE),
        ("TIMESTAMP", [STAMPED, STAGES], {}, Step.TAKE_BACK),
        ("TIMESTAMP", [STAGES, STAGES], {}, Step.DECIDE_LATER),
        ("VOTE", [YES, STAGES], {}, Step.DECIDE_LATER),
        ("VOTE", [YES, YES], {}, Step.TIMESTAMPS),
        ("VOTE", [YES, None], {"held_ms": 100}, Step.WAIT),
        ("VOTE", [YES, STAGES], {"decided": True}, Step.WAIT),
        ("VOTE", [YES, YES], {"decided": True}, Step.TIMESTAMPS),
        ("TIMESTAMP", [STAMPED, STAMPED], {"decided": True}, Step.DECIDE),
        ("TIMESTAMP", [STAMPED, AGAIN], {}, Step.AGAIN),
        ("TIMESTAMP", [STAMPED, AGAIN], {"decided": True}, Step.AGAIN),
        ("TIMESTAMP", [NO, AGAIN], {}, Step.REFUSE),
        ("TIMESTAMP", [STAMPED, None], {"late": True}, Step.REFUSE),
        ("REOPEN", [NO, None], {"late": True}, Step.WAIT),
    ],
)
def test_what_follows_from_votes(
    asks: Any, votes: list[r.Vote | None], more: dict[str, Any], step: Step
) -> None:
    partners = {number: r.PartitionRow(("bank",)) for number in range(len(votes))}
    answered = {number: one for number, one in enumerate(votes) if one is not None}
    given: dict[str, Any] = {"late": False, "held_ms": 0, "decided": False, **more}
    assert coordinator.next_step(asks, partners, answered, **given) is step


def test_a_timestamp_is_kept_in_its_round_of_votes_alone() -> None:
    def ask(number: int, asks: Any) -> r.AskVote:
        head = r.TxnHead("bank", "open", 1000, 0, b"s" * 32, 0)
        return r.AskVote(bytes(16), head, number, asks, True)

    first = participant.next_promise(None, ask(1, "TIMESTAMP"), staged=True, fresh=10)
    assert first == r.CoordinatorRow(1, 10, staged=True)
    for asks in ("TIMESTAMP", "VOTE"):
        assert participant.next_promise(first, ask(1, asks), staged=True, fresh=20) == first
    second = participant.next_promise(first, ask(2, "VOTE"), staged=True, fresh=20)
    assert second == r.CoordinatorRow(2, 0, staged=True)
    assert (
        participant.next_promise(
            second, ask(2, "TIMESTAMP"), staged=False, fresh=30
        ).prepare_timestamp
        == 0
    )
    assert participant.reopened(first, ask(2, "REOPEN")) == r.CoordinatorRow(2, 0, staged=True)


def test_every_message_has_a_meaning_in_every_state() -> None:
    assert {known for known, _ in participant.TRANSITIONS} == set(participant._ORDER)
    for (known, said), action in participant.TRANSITIONS.items():
        over = known in ("COMMITTED", "ABORTED")
        assert not (
            over and action in (Action.VOTE, Action.PROMISE, Action.REOPEN, Action.MERGE)
        ), (known, said)
        if said == "old":
            assert action is Action.PASS
