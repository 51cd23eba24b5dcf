"""Tasks are taken, and positions move with commits: transcripts.

A line is what was asked and the answer. Rows read ``term holder sequence:record``, and ``!X`` while X is merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anabranch.core.authorize import Right
from anabranch.core.decisions import decide as decide_module
from anabranch.protocol.ids import hash_of, make_marked_id
from anabranch.protocol.schemas import records as r
from tests.core.harness import World, event
from tests.core.labels import MINUTE, SECRET

NAME = "nyc/p"
INPUTS = (r.ProcessorInput("nyc/in", "", 10, 0), r.ProcessorInput("lax/in", "a" * 32, 0, 0))
ALL = (0, 1, 2, 3)


class Workers(World):
    """Workers of a processor of four tasks; who takes them has a letter, each time another one."""

    def token_of(self, who: str) -> bytes:
        return who.encode().ljust(16, b".")

    def terms(self, tasks: Sequence[int] = ALL) -> tuple[int, ...]:
        rows = self.state.tasks
        return tuple(rows[NAME, t].term if (NAME, t) in rows else 0 for t in tasks)

    def taking(
        self, who: str, tasks: Sequence[int] = ALL, terms: Sequence[int] | None = None
    ) -> r.TakeTasks:
        seen = self.terms(tasks) if terms is None else tuple(terms)
        return r.TakeTasks(NAME, self.token_of(who), who, tuple(tasks), seen)

    def take(self, who: str, *tasks: int, terms: Sequence[int] | None = None) -> str:
        return self.ask(f"take {who}", self.taking(who, tasks or ALL, terms))

    def consumed(
        self, who: str, sequence: int, record: int, tasks: Sequence[int] = ALL, **more: Any
    ) -> r.Consumed:
        position = r.TaskPosition(more.pop("number", 0), record, 0, **more)
        step = r.TaskStep(tuple(tasks), sequence, (position,))
        return r.Consumed(NAME, self.token_of(who), (step,))

    def marked(self, label: str) -> str:
        self.ids[label] = make_marked_id(0, self.wall_ms, len(self.ids) + 1)
        return label

    def task(self, task: int = 0) -> str:
        found = self.state.tasks.get((NAME, task))
        if found is None:
            return "never"
        at = ",".join(str(p.record) for p in found.positions) or "-"
        busy = "" if found.in_progress is None else f" !{self.label(found.in_progress)}"
        return f"{found.term} {found.holder or 'nobody'} {found.sequence}:{at}{busy}"


class Tasks(Workers):
    """A processor, and transactions that move its tasks."""

    def create(self, tasks: int = 4, inputs: Sequence[r.ProcessorInput] = INPUTS) -> str:  # type: ignore[override]
        return self.ask("create", r.CreateProcessor(NAME, tasks, tuple(inputs)))

    def shot(self, label: str, consumed: r.Consumed | None, name: str | None = None) -> str:
        if label not in self.ids:
            self.marked(label)
        command = r.OneShot(self.id(label), "nyc", name, (event(value=label.encode()),), consumed)
        return self.ask(f"shot {label}", command)

    def open(self, label: str, who: str | None, **more: Any) -> str:
        """A transaction with a record of writer ``w`` in a journal."""
        hash_ = None if who is None else hash_of(NAME, self.token_of(who))
        begin = r.Begin(self.id(label), "nyc", more.get("name"), MINUTE, SECRET, hash_)
        said = self.ask(f"begin {label}", begin)
        if said.startswith("begun"):
            self.touch(label)
            self.write(label, f"w{label}")
        return said

    def end(self, label: str, consumed: r.Consumed | None, **more: Any) -> str:
        receipt = self.receipt(label, f"w{label}", sequence=1)
        command = r.Commit(
            self.token(label), (), (receipt,), more.get("name"), 10_000, None, consumed
        )
        return self.ask(more.get("asker", f"commit {label}"), command)

    def row(self, task: int = 0) -> str:  # type: ignore[override]
        return self.task(task)


def made() -> Tasks:
    world = Tasks()
    world.find_scope("nyc")
    for stream in ("nyc/a", "nyc/in"):
        World.create(world, stream)
        world.created(stream, 0, 0)
    assert world.create() == f"{NAME} 4 tasks"
    return world


def committed(world: Tasks) -> list[str]:
    """Labels of what the rounds merged, in order."""
    return [world.label(c.txn_id) for round_ in world.rounds for c in round_.commits]


def check_unmoved(world: Tasks, row: str) -> None:
    assert world.row() == row
    successor = Tasks()
    successor.log, successor.table = world.log, world.table
    successor.ids = world.ids
    successor.lead(keep_table=False)
    assert [successor.row(task) for task in ALL] == [world.row(task) for task in ALL], "of the log"


def test_a_task_is_taken_and_moved() -> None:
    w = made()
    assert w.row() == "never"
    assert w.take("a") == "0 a 0:- 1 a 0:- 2 a 0:- 3 a 0:-"
    assert w.take("a") == "0 a 0:- 1 a 0:- 2 a 0:- 3 a 0:-", "repeated"
    assert w.row() == "1 a 0:-"
    assert w.shot("X", w.consumed("a", 1, 12)) == "X COMMITTED 1"
    assert w.row() == "1 a 1:12"
    assert w.shot("X", w.consumed("a", 1, 12)) == "X COMMITTED 1", "repeated: of the row"
    assert w.shot("Y", w.consumed("a", 2, 12, tasks=(0, 2))) == "Y COMMITTED 1"
    assert [w.row(t) for t in ALL] == ["1 a 2:12", "1 a 1:12", "1 a 2:12", "1 a 1:12"]
    assert w.shot("Z", w.consumed("a", 3, 1, tasks=(0,), number=1)) == "Z COMMITTED 1"
    assert w.row() == "1 a 3:12,1"
    assert committed(w) == ["X", "Y", "Z"]
    assert not [key for key in w.table.rows if w.id("X") in key], "no outcome row is left"
    check_unmoved(w, "1 a 3:12,1")


def test_the_last_taker_owns_a_task() -> None:
    w = made()
    w.take("a")
    assert w.shot("X", w.consumed("a", 1, 12)) == "X COMMITTED 1"
    assert w.take("b", 0, 1) == "0 b 1:12 1 b 1:12"
    assert w.shot("Y", w.consumed("a", 2, 13)) == "OwnershipLost"
    assert w.message.startswith("task 0, 1 of nyc/p has another owner, b:")
    assert w.shot("Y", w.consumed("a", 2, 13, tasks=(2, 3))) == "Y COMMITTED 1", "the rest is a's"
    assert w.shot("X", w.consumed("a", 1, 12)) == "X COMMITTED 1", "committed before b came"
    assert w.shot("Z", w.consumed("b", 2, 13, tasks=(0, 1))) == "Z COMMITTED 1"
    assert w.shot("X", w.consumed("a", 1, 12)) == "OwnershipLost", "no row tells any more"
    assert committed(w) == ["X", "Y", "Z"]


def test_a_delayed_take_takes_nothing_back() -> None:
    w = made()
    late = w.taking("a")
    w.ask("take a", late)
    w.take("b")
    assert w.ask("take a", late) == "OwnershipLost"
    assert w.row() == "2 b 0:-"
    assert w.take("a", 0, 1, terms=(2, 1)) == "OwnershipLost", "one of them was taken meanwhile"
    check_unmoved(w, "2 b 0:-")


def test_a_release_ends_ownership() -> None:
    w = made()
    w.take("a")
    w.take("b", 1)
    assert w.ask("release", r.ReleaseTasks(NAME, w.token_of("a"), (0, 1))) == "0 nobody 0:- 1 b 0:-"
    assert w.shot("X", w.consumed("a", 1, 12, tasks=(0,))) == "OwnershipLost"
    assert w.shot("X", w.consumed("", 1, 12, tasks=(0,))) == "OwnershipLost", "nobody's"
    assert w.ask("again", r.ReleaseTasks(NAME, w.token_of("a"), (0,))) == "0 nobody 0:-"
    assert w.row() == "2 nobody 0:-"


def test_a_commit_by_journals_moves_when_it_is_merged() -> None:
    w = made()
    w.take("a")
    assert w.open("X", "a") == "begun X"
    assert w.end("X", w.consumed("a", 1, 12)) == ""
    assert w.row() == "1 a 0:- !X", "decided"
    check_unmoved(w, "1 a 0:- !X")
    turn = w.new_turn()  # nothing is merged before it is asked
    decide_module.decide(turn, w.committing("X", receipts=()), w.asker("other"))
    assert w.close(turn, None, "other") == "OutcomeUnknown", "with other positions than decided"
    both = w.shot("Y", w.consumed("a", 1, 12))
    assert both == "NotReady; [commit X] X COMMITTED 1", "else both would be committed"
    assert w.row() == "1 a 1:12"
    assert w.end("X", w.consumed("a", 1, 12)) == "X COMMITTED 1", "repeated"
    assert w.end("X", w.consumed("a", 1, 13)) == "AlreadyCommitted", "with other positions"
    assert w.end("X", None) == "AlreadyCommitted", "or with none"
    assert w.shot("Y", w.consumed("a", 1, 12)) == "InvalidArgument", "that sequence is gone"
    assert committed(w) == ["X"]


def test_a_take_fences_first_and_waits_for_what_is_decided() -> None:
    w = made()
    w.take("a")
    w.open("X", "a")
    w.end("X", w.consumed("a", 1, 12))
    assert w.take("b") == (
        "0 b 0:- !X 1 b 0:- !X 2 b 0:- !X 3 b 0:- !X; [commit X] X COMMITTED 1"
    ), "the answer names what is being merged"
    assert w.row() == "2 b 1:12", "merged by its id, whoever has the task by now"
    assert w.shot("Y", w.consumed("a", 2, 13)) == "OwnershipLost"
    assert w.shot("Y", w.consumed("b", 2, 13)) == "Y COMMITTED 1"


def test_what_waits_undecided_is_lost_with_its_ownership() -> None:
    w = made()
    w.take("a")
    w.held = True  # the journal does not show it yet
    w.open("X", "a")
    assert w.end("X", w.consumed("a", 1, 12)) == ""
    assert w.row() == "1 a 0:-"
    assert w.take("b").endswith("; [commit X] OwnershipLost")
    w.held = False
    w.turn()
    assert w.get("X").startswith("X ABORTED (task 0, 1, 2, 3 of nyc/p has another owner")
    assert w.row() == "2 b 0:-"
    assert committed(w) == []


def test_an_ownership_that_is_lost_aborts_the_transaction() -> None:
    w = made()
    w.take("a")
    w.open("X", "a")
    w.take("b")
    assert w.end("X", w.consumed("a", 1, 12)) == "OwnershipLost"
    assert w.get("X").startswith("X ABORTED")
    w.take("a")  # of the same bits: a client makes fresh ones
    assert w.end("X", w.consumed("a", 1, 12)) == "TransactionAborted"


def test_an_abort_after_the_decision_gives_the_tasks_back() -> None:
    w = made()
    w.take("a")
    w.open("X", "a")
    w.end("X", w.consumed("a", 1, 12))
    assert w.row() == "1 a 0:- !X"
    w.abort("X")
    assert w.row() == "1 a 0:-"
    assert w.shot("Y", w.consumed("a", 1, 12)) == "Y COMMITTED 1"
    w.turn()
    assert (w.row(), committed(w)) == ("1 a 1:12", ["Y"])


def test_another_commit_of_it_does_not_replace_the_positions() -> None:
    w = made()
    w.take("a")
    w.open("X", "a")
    w.held = True
    w.write("X", "wX")
    w.end("X", w.consumed("a", 1, 12), asker="first")
    assert w.end("X", w.consumed("a", 1, 13), asker="second") == "[first] OutcomeUnknown"
    w.held = False
    w.turn()
    w.turn()
    assert w.row() == "1 a 1:13"


def test_sequences_rise_and_positions_never_fall() -> None:
    w = made()
    w.take("a")
    assert w.shot("X", w.consumed("a", 1, 9)) == "InvalidArgument"
    assert "from record 10 to 9" in w.message, "before the processor's start"
    assert w.shot("X", w.consumed("a", 1, 12, segment=1, offset=5)) == "X COMMITTED 1"
    assert w.shot("Y", w.consumed("a", 2, 12, segment=1, offset=6)) == "Y COMMITTED 1"
    assert w.shot("Z", w.consumed("a", 3, 12, segment=0, offset=2)) == "Z COMMITTED 1"
    nothing = r.TaskStep((), 9, ())
    moved = w.consumed("a", 4, 13)
    assert w.shot("U", replace(moved, steps=(nothing, *moved.steps))) == "U COMMITTED 1"
    assert w.shot("V", w.consumed("a", 5, 13)) == "V COMMITTED 1", "only outputs"


def test_rights_are_judged() -> None:
    w = made()
    w.grant("etl", "nyc/*", Right.WRITE)
    w.grant("ops", "nyc/*", Right.PROCESS)
    w.take("a")
    with w.by("etl"):
        assert w.take("b") == "NotAuthorized"
        assert w.shot("X", w.consumed("a", 1, 12)) == "NotAuthorized"
    with w.by("ops"):
        assert w.shot("Y", w.consumed("a", 1, 12)) == "NotAuthorized", "no right on the output"
        assert w.take("b") == "NotAuthorized", "no right to see the inputs"
    for stream in ("nyc/in", "lax/in"):
        w.grant("ops", stream, Right.DESCRIBE)
    with w.by("ops"):
        assert w.take("b").startswith("0 b")
    assert w.row() == "2 b 0:-"


def test_creating_again_changes_nothing() -> None:
    w = made()
    assert w.create() == f"{NAME} 4 tasks"
    assert w.create(4, INPUTS[::-1]) == f"{NAME} 4 tasks", "their order means nothing"
    assert w.state.processors[NAME].inputs == INPUTS


def test_a_topic_id_may_come_later() -> None:
    """A broker told none when it was made, or tells none now."""
    w = made()
    for first, last in (("", "a"), ("b", ""), ("b", "a")):
        inputs = [replace(i, topic_id=x * 32) for i, x in zip(INPUTS, (first, last), strict=True)]
        assert w.create(4, inputs) == f"{NAME} 4 tasks"
    assert w.create(4, INPUTS) == f"{NAME} 4 tasks"
    assert w.create(4, [replace(INPUTS[0], topic_id="c" * 32), INPUTS[1]]) == "IllegalState"
    ids = [one.topic_id[:1] for one in w.state.processors[NAME].inputs]
    assert (ids, w.state.processors[NAME].inputs[0].record) == (["b", "a"], 10)
    start = r.ProcessorInput("nyc/in", "", 99, 0)
    assert w.create(4, (start, INPUTS[1])) == f"{NAME} 4 tasks", "its start was logged once"
    w.take("a")
    assert w.shot("X", w.consumed("a", 1, 12)) == "X COMMITTED 1", "from the first start on"
