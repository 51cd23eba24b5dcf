"""Random histories of transactions over control partitions, by the leaders' real decisions.

Messages are lost, doubled and late, leaders are taken over, clients abort, merges are staged, programs prepare and
decide later, and a stream may be lost. At the end nothing is lost any more, and each transaction is merged
everywhere at one timestamp or nowhere, and each stream's timestamps rise. What was prepared ends as its program
says, and a transaction lacks only what was in the lost stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from anabranch.core.across import coordinator
from anabranch.core.across.coordinator import Step
from anabranch.core.decisions.across import participating
from anabranch.core.decisions.turn import Turn
from anabranch.core.state import OpenTxn
from anabranch.core.transaction_states import TRANSACTIONS, Op
from anabranch.errors import InvariantViolation
from anabranch.protocol.schemas import records as r
from tests.core.across.leaders import SCOPES, Leaders
from tests.core.harness import event

Patch = pytest.MonkeyPatch
STEPS = 140
BY_TOKEN = r.Prepare(b"", b"")


class Play:
    """One random history. ``told``: the last answer to each commit."""

    def __init__(self, seed: int) -> None:
        self.rnd = Random(seed)
        self.leaders = Leaders(3, chunk_bytes=2_000)
        for one in self.leaders.all:
            one.wall_us += self.rnd.choice((0, 0, 30_000, 400_000))
        self.open: dict[str, list[str]] = {}  # label -> streams that it has touched
        self.wrote: dict[str, set[str]] = {}
        self.told: dict[str, str] = {}
        self.prepares: set[str] = set()
        self.words: dict[str, bool] = {}  # of what was prepared: whether to commit
        self.lost = ""  # a stream
        self.count = 0

    def run(self) -> None:
        for _ in range(STEPS):
            self.step()
        self.settle()
        for label in self.wrote:  # those that no commit ended
            if self.words.get(label):
                self.end(label, "commit")
            else:
                self.note(self.leaders[0].abort(label))
        self.settle()
        self.check()

    def settle(self) -> None:
        for ms in (0, 300, 700, 1500, 3000, 6000):
            self.leaders.carry()
            self.note(self.leaders.wait(ms))

    def end(self, label: str, asker: str, **given: Any) -> None:
        """Commit a prepared transaction."""
        token = self.leaders[0].token(label)
        self.note(self.leaders[0].ask(asker, r.Commit(token, (), None, None, 5_000, **given)))

    def note(self, said: str) -> None:
        for one in said.split("; "):
            name, _, text = one.removeprefix("[").partition("] ")
            if text and name.startswith("commit "):
                self.told[name.split()[1]] = text

    def step(self) -> None:
        rnd, leaders, luck = self.rnd, self.leaders, self.rnd.random()
        if luck < 0.12:
            self.count += 1
            label = f"T{self.count}"
            leaders[0].begin(label)
            self.open[label], self.wrote[label] = [], set()
        elif luck < 0.35 and self.open:
            self.write(rnd.choice(sorted(self.open)))
        elif luck < 0.47 and self.open:
            label = rnd.choice(sorted(self.open))
            receipt = replace(leaders.receipt(label, f"w{label}"), sequence=1)
            command = leaders[0].committing(
                label, receipts=[receipt], wait_ms=rnd.choice([150, 5_000, 5_000])
            )
            if rnd.random() < 0.3:
                command = replace(command, prepare=BY_TOKEN)
                self.prepares.add(label)
            self.note(leaders[0].ask(f"commit {label} {len(self.told)}", command))
            del self.open[label]
        elif luck < 0.49 and self.prepares:
            label = rnd.choice(sorted(self.prepares))
            if "PREPARED" not in self.told.get(label, ""):
                return
            if self.words.setdefault(label, rnd.random() < 0.7):
                self.end(label, f"commit {label} {len(self.told)} again")
            else:
                self.note(leaders[0].abort(label))
        elif luck < 0.50 and self.wrote:
            label = rnd.choice(sorted(self.wrote))
            if self.words.setdefault(label, False):
                return
            self.note(leaders[0].abort(label))
            self.open.pop(label, None)
        elif luck < 0.60:
            number = rnd.randrange(3)
            self.count += 1
            stream = f"{SCOPES[number]}/a"
            leaders[number].one_shot(f"S{self.count}@{number}", event(stream), scope=SCOPES[number])
        elif luck < 0.64:
            number = rnd.randrange(3)
            leaders.bag = [one for one in leaders.bag if one.sender != number or rnd.random() < 0.5]
            leaders.lead(number)
        elif luck < 0.645 and not self.lost and rnd.random() < 0.3:
            self.lost = "tok/a"
            leaders.lose(self.lost)
        elif luck < 0.68:
            leaders.carry()
        elif luck < 0.72:
            for one in leaders.all:
                self.note(one.wait(rnd.choice([10, 120, 300])))
        else:
            self.deliver()

    def write(self, label: str) -> None:
        leaders, touched = self.leaders, self.open[label]
        stream = f"{self.rnd.choice(SCOPES)}/a"
        if stream not in touched:
            leaders.touch(label, stream)
            number = SCOPES.index(stream.partition("/")[0])
            txn = leaders[number].state.open.get(leaders[0].id(label))
            if txn is None or stream not in txn.participants or txn.row.state != "OPEN":
                return
            touched.append(stream)
        leaders.write(label, f"w{label}", stream, size=self.rnd.choice([None, None, None, 5_000]))
        self.wrote[label].add(stream)

    def deliver(self) -> None:
        """A pass of one leader: of what is under way to it, some is lost, doubled, or stays for later."""
        rnd, leaders = self.rnd, self.leaders
        leaders.collect()
        number, mine, rest = rnd.randrange(3), [], []
        for one in leaders.bag:
            luck = rnd.random()
            if one.receiver != number or luck < 0.2:
                rest.append(one)
            elif luck < 0.85:
                mine.append(one)
                if luck < 0.35:
                    rest.append(one)
        rnd.shuffle(mine)
        leaders.bag = rest[-60:]
        if mine:
            self.note(leaders[number].receive(*mine))
        leaders.collect()

    def check(self) -> None:
        merges = self.leaders.merges()
        for stream, its in merges.items():
            # Two coordinators may choose the same time: then the lower id goes first (H1).
            times = [(at, self.leaders[0].ids[label]) for label, at in its]
            assert times == sorted(times), f"order: {stream}"
            assert len({label for label, _ in its}) == len(its), f"twice: {stream}"
        for label, streams in self.wrote.items():
            states = {state for state in self.leaders.states(label) if state != "-"}
            found = {
                stream: at for stream, its in merges.items() for one, at in its if one == label
            }
            assert states <= {"COMMITTED"} or states <= {"ABORTED"}, f"endless: {label} {states}"
            there = streams if states == {"COMMITTED"} else set()
            assert there - {self.lost} <= set(found) <= there, f"torn: {label} {found}"
            word = self.words.get(label, False)
            assert label not in self.prepares or word or states != {"COMMITTED"}, (
                f"no word: {label}"
            )
            assert not word or states == {"COMMITTED"}, f"its program said commit: {label}"
            assert len(set(found.values())) <= 1, f"times: {label} {found}"
            told = self.told.get(label, "")
            assert "COMMITTED" not in told or states == {"COMMITTED"}, f"told: {label}"


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 40))]
)
def test_transactions_are_whole_everywhere(seed: int) -> None:
    Play(seed).run()


# -- planted bugs ------------------------------------------------------------------------------------------


def c3_a_part_is_staged_with_its_vote(patch: Patch) -> None:
    prepare = participating._prepare

    def early(turn: Turn, ask: r.AskVote) -> bool:
        found = prepare(turn, ask)
        participating.commit_part(turn, ask.txn_id, 0)
        return found

    patch.setattr(participating, "_prepare", early)


def c3_a_staged_part_is_dated_by_itself(patch: Patch) -> None:
    patch.setattr(OpenTxn, "lacks_time", property(lambda self: False))


def c4_what_is_decided_later_is_aborted(patch: Patch) -> None:
    place: tuple[r.TxnState, Op] = ("FINALIZE_IN_PROGRESS", "begin_abort")
    patch.setitem(TRANSACTIONS.transitions, place, "ABORT_IN_PROGRESS")


def prepared_before_all_have_voted(patch: Patch) -> None:
    next_step = coordinator.next_step

    def at_once(*given: Any, **more: Any) -> Step:
        early = more["prepares"] and not more["decided"]
        return Step.PREPARE if early else next_step(*given, **more)

    patch.setattr(coordinator, "next_step", at_once)


def prepared_and_committed_without_a_word(patch: Patch) -> None:
    next_step = coordinator.next_step
    patch.setattr(
        coordinator, "next_step", lambda *given, **more: next_step(*given, **{**more, "prepares": False})
    )  # fmt: skip


# The first seed that finds each.
PLANTED: dict[Callable[[Patch], None], int] = {
    c3_a_part_is_staged_with_its_vote: 0,
    c3_a_staged_part_is_dated_by_itself: 0,
    c4_what_is_decided_later_is_aborted: 32,
    prepared_before_all_have_voted: 1,
    prepared_and_committed_without_a_word: 0,
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(
    plant: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, InvariantViolation)):
        Play(PLANTED[plant]).run()
