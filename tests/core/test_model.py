"""Random lives, played on the core and on a naive model at once: every answer and every merge alike.

And what must hold whatever the model thinks: a committed transaction is merged once, with exactly
its chosen writers' records, each once; an aborted one never; at most one is committed under a name.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from anabranch.core import rows as k
from anabranch.core.round import Part
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode
from tests.conftest import some
from tests.core.harness import World
from tests.core.labels import SECRET
from tests.core.model import Merged, Model
from tests.core.moves import (
    Hold,
    TakeOver,
    Wait,
    Write,
    asked,
    lives,
    new_world,
    play,
    takeovers,
    transactions,
)
from tests.core.tables import txn_rows

moves_of_a_life = lives(
    st.one_of(transactions, transactions, transactions, transactions, takeovers), 30
)


def step(world: World, model: Model, move: Any, number: int) -> tuple[str, str] | None:
    """Play a move on both; what each says, if the move is a turn."""
    if isinstance(move, Write | Hold):
        play(world, move, number)
        return None
    if isinstance(move, TakeOver):
        model.take_over(keep_table=move.keep_table)
        play(world, move, number)
        return None
    if isinstance(move, Wait):
        said = world.wait(move.ms)  # the model reads the clocks: they have moved by then
        return said, model.turn([])
    commands = asked(world, move, number)
    return world.turn(*commands), model.turn(commands)


def merges_of(world: World) -> list[Merged]:
    """The last round's merges, by transaction in commit order."""
    merges: dict[str, dict[tuple[str, int], list[Any]]] = {}
    for commit in world.round.commits:
        where = merges.setdefault(world.label(commit.txn_id), {})
        for part in commit.parts:
            place = (commit.stream, part.partition)
            assert place not in where, "one part for each segment"
            where[place] = _content(part)
    return list(merges.items())


def _content(part: Part) -> list[Any]:
    if part.events:
        return [e.value for e in part.events]
    return [(run.writer, run.first, run.end) for run in part.runs]


class Watch:
    """Invariants of the log, looked at after every turn."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.merged: Counter[tuple[str, str, int, int]] = Counter()
        self.times: dict[bytes, int] = {}
        self.last_time = 0
        self.numbers: dict[bytes, tuple[str, int]] = {}  # claimed by decided commits
        self.highest: dict[str, int] = {}

    def look(self) -> None:
        self._look_at_series()
        fresh = {c.txn_id for c in self.world.round.commits} - self.times.keys()
        for commit in self.world.round.commits:
            assert commit.txn_id in fresh, "merged in one round only"
            assert self.times.setdefault(commit.txn_id, commit.timestamp) == commit.timestamp
            for part in commit.parts:
                for run in part.runs:
                    for offset in range(run.first, run.end):
                        writer = f"{commit.txn_id.hex()} {run.writer}"
                        self.merged[writer, commit.stream, part.partition, offset] += 1
        for time in sorted({self.times[txn_id] for txn_id in fresh}):
            assert time > self.last_time
            self.last_time = time
        assert set(self.merged.values()) <= {1}, "each record once"
        rows = [row for row in txn_rows(self.world.state) if row.name]
        names = Counter((row.scope, row.name) for row in rows if row.state == "COMMITTED")
        assert set(names.values()) <= {1}, "one committed transaction for each name"
        for row in txn_rows(self.world.state):
            if row.state == "COMMITTED":
                assert row.committed == self._records(row.txn_id)
                assert self.times.get(row.txn_id, row.commit_timestamp) == row.commit_timestamp
            else:
                assert row.txn_id not in self.times, "only what is committed is merged"
        unfinished = self.world.state.open.keys()
        assert self.world.heard().keys() <= unfinished
        for key in self.world.table.rows:
            if key[:1] == k.INDEX:
                assert key[-32:-16] in unfinished, "runs of an ended one are forgotten"
            elif key[:1] == k.REJECTED:
                assert key[1:17] in unfinished

    def _look_at_series(self) -> None:
        """Each series is committed in the order of its numbers, and each number once."""
        ended: list[r.TxnRow] = []
        for value in self.world.round.rows.values():
            row = decode(value) if value is not None else None
            if isinstance(row, r.TxnRow) and row.state == "COMMITTED":
                ended.append(row)
        for row in sorted(ended, key=lambda row: row.commit_timestamp):
            series, number = self.numbers.pop(row.txn_id, ("", -1))
            if series:
                assert number > self.highest.get(series, -1), "rising numbers"
                self.highest[series] = number
        for txn_id, txn in self.world.state.open.items():
            claim = txn.pending
            if claim and claim.decided and claim.name and claim.number is not None:
                self.numbers[txn_id] = claim.name, claim.number

    def _records(self, txn_id: bytes) -> int:
        """How many records all rounds merged of a transaction."""
        return sum(
            len(part.events) + sum(run.records for run in part.runs)
            for round_ in self.world.rounds
            for commit in round_.commits
            if commit.txn_id == txn_id
            for part in commit.parts
        )

    def owners_are_right(self) -> None:
        """Every merged record was written by that writer for that transaction."""
        written = {
            (f"{b.run.txn_id.hex()} {b.run.writer}", stream, partition, offset)
            for (stream, partition), batches in self.world.journals.items()
            for b in batches
            for offset in range(b.run.first, b.run.end)
        }
        assert self.merged.keys() <= written


@settings(
    max_examples=some(120),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(moves_of_a_life)
def test_core_and_model_agree(moves: list[Any]) -> None:
    world = new_world()
    model, watch = Model(world), Watch(world)
    for number, move in enumerate(moves):
        said = step(world, model, move, number)
        if said is not None:
            assert said[0] == said[1]
            assert merges_of(world) == model.merged
            watch.look()
    watch.owners_are_right()
    event(f"merged transactions: {min(4, len(watch.times))}")


def test_the_model_knows_a_usual_life() -> None:
    """The model itself, on a life that is easily read."""
    world = new_world()
    model = Model(world)
    token = world.token("A")

    def turn(name: str, command: Any) -> str:
        return model.turn([(name, command)])

    assert turn("1", r.Begin(world.id("A"), "nyc", "x", 60_000, SECRET)) == "begun A"
    assert turn("2", r.Touch(token, "nyc/a")) == "touched nyc/a epoch 0 on 0,1"
    world.write("A", "w1", count=2)
    world.write("A", "w2")
    own = world.receipt("A", "w1")
    assert turn("3", r.Commit(token, (own,), (), None, 0)) == ""
    assert model.turn([]) == "[3] A COMMITTED 2, 1 left out"
    assert model.merged == [("A", {("nyc/a", 0): [(world.writer("w1"), 0, 2)]})]
    assert (
        turn("4", r.Begin(world.id("B"), "nyc", "x", 60_000, SECRET)) == "A COMMITTED 2, 1 left out"
    )
