"""Random histories of transactions over control partitions, by the leaders' real decisions.

Transactions and one-shots write events and rows of tables, and lock some rows.

Messages are lost, doubled and late, leaders are taken over, clients abort, merges are staged, programs prepare and
decide later, operators scale streams and force ends, commits are followed by ones with more events, and a stream
may be lost. At the end nothing is lost any more, and each transaction is merged
everywhere at one timestamp or nowhere, and each stream's timestamps rise. What was prepared ends as its program
says, and a transaction lacks only what was in the lost stream. No row that a transaction has locked was written
between its snapshot and its commit.
"""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from anabranch.core.memory import DraftMap
from anabranch.errors import InvariantViolation
from anabranch.protocol.ids import control_partition_of
from anabranch.protocol.schemas import records as r
from tests.core.across.leaders import SCOPES, Leader
from tests.core.across.tables import Tables
from tests.mutants.catalogue import planted

STEPS = 140
KEYS = (b"x", b"y")
Row = tuple[str, bytes]
COUNTS = re.compile(r"(?:COMMITTED|,) (\d+)")  # events that are committed, and left out
BY_TOKEN = r.Prepare(b"", b"")


class Play:
    """One random history. ``told``: the last answer to each commit.

    ``hard``: leaders also die before a round of theirs is written, or do not know that they lead no more.
    """

    def __init__(self, seed: int, *, hard: bool = True) -> None:
        self.rnd, self.ends, self.hard = Random(seed), Random(seed), hard
        self.leaders = Tables(3, chunk_bytes=2_000)
        self.keys = KEYS[: 1 + seed % 2]
        for one in self.leaders.all:
            one.wall_us += self.rnd.choice((0, 0, 30_000, 400_000))
        self.open: dict[str, list[str]] = {}  # label -> streams that it has touched
        self.wrote: dict[str, set[str]] = {}
        self.told: dict[str, str] = {}
        self.committed: set[str] = set()  # what was ever answered so
        self.shots: dict[str, tuple[str, ...]] = {}  # label -> streams of a one-shot
        self.own: dict[str, dict[int, Any]] = {}  # … and, by control partition, its command's locks
        self.rows: dict[str, set[Row]] = {}  # that a transaction writes
        self.locked: dict[str, list[tuple[Row, int]]] = {}  # … has locked, since when
        self.prepares: set[str] = set()
        self.words: dict[str, bool] = {}  # of what was prepared: whether to commit
        self.sent: dict[str, int] = {}  # label -> commits of it
        self.events: dict[str, int] = {}  # commit -> the events that its receipts name
        self.forced: set[str] = set()  # a part ended without the coordinator's word
        self.lost = ""  # a stream
        self.count = 0

    def run(self) -> None:
        for _ in range(STEPS):
            self.step()
        # The clients of the others have died.
        alive = [label for label in self.shots if int(label[1:]) % 3]
        for label, streams in self.shots.items():
            self.wrote[label] = set(streams)
        for label in alive:
            self.send(label)
        self.settle()
        for label in alive:  # a copy that comes last has the same answer
            again = self.send(label, to=(self.number(label),))
            committed = "COMMITTED" in again
            was = "COMMITTED" in self.told.get(label, again)
            may_come = self.is_single(label) and not was  # one that was refused left no row
            assert may_come or committed == was, (label, again)
            self.told[label] = again
        for label in self.wrote:  # those that no commit ended
            if self.words.get(label):
                self.end(label, "commit")
            else:
                self.note(self.home(label).abort(label))
        self.settle()
        self.check()

    def number(self, label: str) -> int:
        """The control partition that coordinates the transaction."""
        return control_partition_of(self.leaders[0].id(label))

    def home(self, label: str) -> Leader:
        return self.leaders[self.number(label)]

    def settle(self) -> None:
        for one in self.leaders.all:
            one.dies = False
        for ms in (0, 300, 700, 1500, 3000, 6000):
            self.leaders.carry()
            self.note(self.leaders.wait(ms))

    def end(self, label: str, asker: str, **given: Any) -> None:
        """Commit a prepared transaction."""
        home, token = self.home(label), self.leaders[0].token(label)
        self.note(home.ask(asker, r.Commit(token, (), None, None, 5_000, **given)))

    def note(self, said: str) -> None:
        for one in said.split("; "):
            name, _, text = one.removeprefix("[").partition("] ")
            if " COMMITTED" in text:
                self.committed.add(text.split()[0])
            if text and name.startswith("commit "):
                label = name.split()[1]
                self.told[label] = text
                if text.startswith(f"{label} COMMITTED") and label not in self.forced:
                    found = [int(one) for one in COUNTS.findall(text)]
                    assert sum(found) >= self.events.get(name, 0), f"lost: {name} {text}"
            label, _, number = name.partition("@")
            if text and label in self.shots and number == str(self.number(label)):
                self.told[label] = text

    def step(self) -> None:
        rnd, leaders, luck = self.rnd, self.leaders, self.rnd.random()
        if luck < 0.15:
            self.count += 1
            label = f"T{self.count}"
            home = rnd.choice((0, 0, 1, 2))
            leaders[home].new_id(label, made_ms=leaders[0].wall_ms + rnd.choice((-200, 0, 200)))
            leaders.open(label, home)
            self.open[label], self.wrote[label] = [], set()
            self.rows[label], self.locked[label] = set(), []
            self.write(label)
            if rnd.random() < 0.6:
                self.lock(label)
        elif luck < 0.22 and self.open:
            self.lock(rnd.choice(sorted(self.open)))
        elif luck < 0.28 and self.open:
            self.write(rnd.choice(sorted(self.open)))
        elif luck < 0.48 and self.open:
            self.commit(rnd.choice(sorted(self.open)))
        elif luck < 0.49 and self.prepares:
            label = rnd.choice(sorted(self.prepares))
            if "PREPARED" not in self.told.get(label, ""):
                return
            if self.words.setdefault(label, rnd.random() < 0.7):
                self.end(label, f"commit {label} {len(self.told)} again")
            else:
                self.note(self.home(label).abort(label))
        elif luck < 0.50 and self.wrote:
            label = rnd.choice(sorted(self.wrote))
            if self.words.setdefault(label, False):
                return
            self.note(self.home(label).abort(label))
            self.open.pop(label, None)
        elif luck < 0.66:
            self.shot()
        elif luck < 0.70:
            number = rnd.randrange(3)
            end = self.ends.choice(("dies later", "freezes", "dies", "dies"))
            if self.hard and end == "dies later":
                leaders[number].dies = True
                return
            leaders.bag = [one for one in leaders.bag if one.sender != number or rnd.random() < 0.5]
            leaders[number].freeze() if self.hard and end == "freezes" else leaders.lead(number)
        elif luck < 0.705 and not self.lost and rnd.random() < 0.3:
            self.lost = "tok/a"
            leaders.lose(self.lost)
        elif luck < 0.71:
            self.force()
        elif luck < 0.72:
            stream = f"{rnd.choice(SCOPES)}/{rnd.choice('at')}"
            leaders.of(stream).ask("scale", r.Scale(stream, rnd.choice((1, 2, 3)), (), ()))
        elif luck < 0.74:
            leaders.carry()
        elif luck < 0.77:
            for one in leaders.all:
                self.note(one.wait(rnd.choice([10, 120, 300])))
        else:
            self.deliver()

    def commit(self, label: str) -> None:
        """Commit, or prepare. Some commits are followed by one with more events."""
        rnd, leaders = self.rnd, self.leaders
        self.sent[label] = self.sent.get(label, 0) + 1
        receipt = replace(leaders.receipt(label, f"w{label}"), sequence=self.sent[label])
        home, wait_ms = self.home(label), rnd.choice([150, 5_000, 5_000])
        command = home.committing(label, receipts=[receipt], wait_ms=wait_ms)
        if self.sent[label] == 1 and rnd.random() < 0.3:
            command = replace(command, prepare=BY_TOKEN)
            self.prepares.add(label)
        asker = f"commit {label} {len(self.told)} {self.sent[label]}"
        self.events[asker] = sum([extent.count for extent in receipt.extents])
        self.note(home.ask(asker, command))
        if label in self.prepares or rnd.random() < 0.7:
            del self.open[label]

    def force(self) -> None:
        """An operator ends a part of a transaction alone."""
        one = self.rnd.choice(self.leaders.all)
        parts = sorted([one.label(txn_id) for txn_id in one.state.promised])
        if parts:
            label = self.rnd.choice(parts)
            self.forced.add(label)
            one.ask("force", r.Force(one.id(label), "", self.rnd.random() < 0.5))

    def shot(self) -> None:
        """Send the commands of a one-shot, a new or a former one. Some are lost, and some are only sent later."""
        rnd = self.rnd
        former = sorted(self.shots) if rnd.random() < 0.4 else []
        label = rnd.choice(former) if former else self.new_shot()
        if not former and rnd.random() < 0.3:
            return
        home = self.number(label)
        all_ = sorted({home, *(self.leaders.number(stream) for stream in self.shots[label])})
        to = [number for number in all_ if rnd.random() < 0.8] or all_
        rnd.shuffle(to)
        for number in to:
            said = self.send(label, to=(number,))
            self.note(said if said.startswith("[") else f"[{label}@{number}] {said}")

    def locks(self, label: str, table: str) -> tuple[r.TableLocks, ...]:
        """Lock some row of a table from now on, or nothing; always nothing if a replica would not be complete."""
        row = table, self.rnd.choice(self.keys)
        if self.rnd.random() < 0.5 or self.is_held(table):
            return ()
        its = self.leaders.lock(*row)
        self.locked[label].append((row, its.since))
        return (its,)

    def new_shot(self) -> str:
        """Make a one-shot. It writes to streams of one control partition or several, and may have locked rows."""
        rnd, leaders = self.rnd, self.leaders
        self.count += 1
        label, home = f"O{self.count}", rnd.randrange(3)
        leaders[home].new_id(label, made_ms=leaders[0].wall_ms + rnd.choice((-200, 0, 200)))
        others = [scope for scope in SCOPES if scope != SCOPES[home]]
        chosen = rnd.sample(others, rnd.choice((0, 0, 1, 1, 2)))
        if not chosen or rnd.random() < 0.5:
            chosen.append(SCOPES[home])
        self.shots[label] = tuple(f"{scope}/{rnd.choice('tta')}" for scope in sorted(chosen))
        key = rnd.choice(self.keys)
        self.rows[label] = {(stream, key) for stream in self.shots[label]}
        self.own[label], self.locked[label] = {}, []
        for scope in sorted({*chosen, SCOPES[home]}):
            if locks := self.locks(label, f"{scope}/t"):
                self.own[label][SCOPES.index(scope)] = {"locks": locks}
        return label

    def is_single(self, label: str) -> bool:
        """Whether all of a one-shot is at its coordinator."""
        return {self.leaders.number(stream) for stream in self.shots[label]} == {self.number(label)}

    def send(self, label: str, to: tuple[int, ...] = ()) -> str:
        """Send a one-shot's commands; what was answered at once."""
        streams, ((_, key), *_) = self.shots[label], sorted(self.rows[label])
        how: dict[str, Any] = {"home": self.number(label), "own": self.own[label]}
        if self.is_single(label):
            how["secret"] = None
        return self.leaders.one_shot(label, *streams, key=key, to=to, **how)

    def is_held(self, table: str) -> bool:
        """Whether something prepared may still be merged into a table. Then no replica of it is complete."""
        holds = self.leaders.of(table).memory.holds
        return any(entry.since_ms < 0 for entry in holds.on((table,)))

    def write(self, label: str) -> None:
        leaders, touched = self.leaders, self.open[label]
        if label in self.sent:  # more events where there are some
            more = [stream for stream in touched if stream.endswith("/a")]
            if more:
                leaders.write(label, f"w{label}", self.rnd.choice(more))
            return
        scope, key = self.rnd.choice(SCOPES), self.rnd.choice([None, *self.keys])
        stream = f"{scope}/{'a' if key is None else 't'}"
        if stream not in touched:
            leaders.touch(label, stream)
            txn = leaders.of(stream).state.open.get(leaders[0].id(label))
            if txn is None or stream not in txn.participants or txn.row.state != "OPEN":
                return
            touched.append(stream)
        if key is None:
            size = self.rnd.choice([None, None, None, 5_000])
            leaders.write(label, f"w{label}", stream, size=size)
        else:
            leaders.add(label, stream, key, f"w{label}")
            self.rows[label].add((stream, key))
        self.wrote[label].add(stream)

    def lock(self, label: str) -> None:
        """Lock a row. Its replica validates that if it is complete, and aborts if the row was written."""
        leaders, writer = self.leaders, f"r{label}"
        row = f"{self.rnd.choice(SCOPES)}/t", self.rnd.choice(self.keys)
        through = leaders.register(label, *row, writer=writer)
        its = self.home(label).state.txn_row(leaders[0].id(label))
        if isinstance(through, str) or its is None or self.is_held(row[0]):
            return
        written = leaders.merges().get(row[0], [])
        if any(at > its.snapshot and row in self.rows[by] for by, at in written):
            self.note(self.home(label).abort(label))
            del self.open[label]
            return
        leaders.validate(label, row[0], through, writer)
        self.locked[label].append((row, its.snapshot))

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
            assert states <= {"COMMITTED", "ABORTED"}, f"endless: {label} {states}"
            if label in self.forced:
                continue
            assert len(states) <= 1, f"torn: {label} {states}"
            there = streams if states == {"COMMITTED"} else set()
            assert there - {self.lost} <= set(found) <= there, f"torn: {label} {found}"
            word = self.words.get(label, False)
            assert label not in self.prepares or word or states != {"COMMITTED"}, (
                f"no word: {label}"
            )
            assert not word or states == {"COMMITTED"}, f"its program said commit: {label}"
            assert len(set(found.values())) <= 1, f"times: {label} {found}"
            assert label not in self.committed or states == {"COMMITTED"}, f"told: {label}"
        self.check_locks(merges)
        for one in self.leaders.all:
            memory = one.memory.across
            kept = {
                name for name in memory.__slots__ if isinstance(getattr(memory, name), DraftMap)
            }
            left = {name for name in kept if not getattr(memory, name).is_empty}
            assert not left, f"left in memory: {left}"
            assert not one.memory.holds.in_use, "left: a hold"

    def check_locks(self, merges: dict[str, list[tuple[str, int]]]) -> None:
        written = [
            (row, at, label)
            for stream, its in merges.items()
            for label, at in its
            for row in self.rows[label]
            if row[0] == stream
        ]
        for label, locks in self.locked.items():
            home = self.home(label).state.txn_row(self.leaders[0].id(label))
            if home is None or home.state != "COMMITTED" or label in self.forced:
                continue
            for row, since in locks:
                stale = [
                    by
                    for its, at, by in written
                    if its == row and by != label and since < at < home.commit_timestamp
                ]
                assert not stale, f"stale: {label} has read {row}, which {stale} wrote"


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 40))]
)
def test_transactions_are_whole_everywhere(seed: int) -> None:
    Play(seed).run()


# Planted bugs of `tests.mutants.catalogue`, and the first seed that finds each.
PLANTED: dict[str, int] = {
    "a participant's time counts": 2,
    "staged with the vote": 0,
    "staged parts date themselves": 0,
    "what is decided later is aborted": 6,
    "prepared before all have voted": 4,
    "committed without a word": 0,
    "unknown one-shots are not answered": 3,
    "a coordinator's locks are not frozen": 12,
    "waiting commits keep times": 36,
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str) -> None:
    with planted(name), pytest.raises((AssertionError, InvariantViolation)):
        Play(PLANTED[name], hard=False).run()
