"""State of processors is written by commits that move them alone; resets, deletions: transcripts.

Transcripts read as those of `test_ownership`. A task's state is its row's ``state_sequence``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from anabranch.core import rows as k
from anabranch.core.authorize import Right
from anabranch.core.decisions import commit
from anabranch.core.decisions.streams import stream_forgotten
from anabranch.errors import UnknownStream
from anabranch.protocol.ids import hash_of
from anabranch.protocol.schemas import records as r
from tests.core.harness import World, event
from tests.core.labels import MINUTE, SECRET
from tests.core.test_ownership import ALL, INPUTS, NAME, Tasks, check_unmoved

STATE = f"{NAME}.state"
CHUNK = 1000


class Stored(Tasks):
    """A processor with a store; `nyc/q` is another one."""

    def store(self, *names: str, tasks: int = 4) -> str:
        return self.ask("create", r.CreateProcessor(NAME, tasks, INPUTS, names))

    def state_of(self, *tasks: int) -> list[int]:
        return [self.state.tasks[NAME, task].state_sequence for task in tasks or ALL]

    def stored(self, label: str, consumed: r.Consumed | None, *tasks: int, **given: Any) -> str:
        """A one-shot with an output and a row of state for each task."""
        self.ids.get(label) or self.marked(label)
        given = {"stream": STATE, "key": b"k", "value": label.encode(), **given}
        rows = tuple(event(segment_id=task, **given) for task in tasks)
        shot = r.OneShot(self.id(label), "nyc", None, (event(value=b"out"), *rows), consumed)
        return self.ask(f"shot {label}", shot)

    def journal(
        self, label: str, who: str | None, *tasks: int, out: int = 100, size: int = 100
    ) -> str:
        """A transaction with an output and state of tasks in journals."""
        hash_ = None if who is None else hash_of(NAME, self.token_of(who))
        self.ask(f"begin {label}", r.Begin(self.id(label), "nyc", None, MINUTE, SECRET, hash_))
        self.touch(label)
        said = self.touch(label, STATE)
        self.write(label, f"w{label}", size=out)
        for task in tasks:
            self.write(label, f"w{label}", STATE, partition=task, size=size, keys=(0, 1 << 31))
        return said

    def reset(
        self, *inputs: r.ProcessorInput, keep: bool = False, resets: int | None = None
    ) -> str:
        seen = self.state.processors[NAME].resets if resets is None else resets
        asker = f"reset {len(self.asked)}"  # each time another one
        return self.ask(asker, r.ResetProcessor(NAME, seen, inputs, keep))

    def delete(self, resets: int = 0) -> str:
        return self.ask("delete", r.DeleteProcessor(NAME, resets))


def made() -> Stored:
    world = Stored(chunk_bytes=CHUNK)
    world.find_scope("nyc")
    for stream in ("nyc/a", "nyc/in"):
        World.create(world, stream)
        world.created(stream, 0, 0, 0, 0)
    world.store("counts")
    world.ask("create", r.CreateProcessor("nyc/q", 4, INPUTS, ("s",)))
    for name in (NAME, "nyc/q"):
        assert World.create(world, f"{name}.state", 4, processor=name) == ""
        world.created(f"{name}.state", 0, 0, 0, 0)
    world.take("a")
    return world


def test_one_shots_change_state() -> None:
    w = made()
    assert w.stored("X", w.consumed("a", 1, 12), 2, 0) == "X COMMITTED 3"
    assert w.plan() == f"X nyc/a 0: out; X {STATE} 0: X, 2: X", "by task, not by key"
    assert w.state_of() == [1, 0, 1, 0]
    assert w.stored("Y", w.consumed("a", 2, 12), 1) == "Y COMMITTED 2"
    assert w.stored("Y", w.consumed("a", 2, 12), 1) == "Y COMMITTED 2", "repeated"
    assert w.state_of() == [1, 2, 1, 0]
    check_unmoved(w, "1 a 2:12")


def test_journals_change_state() -> None:
    w = made()
    w.journal("X", "a", 1, 3)
    assert w.end("X", w.consumed("a", 1, 12)) == ""
    w.turn()
    assert w.plan() == f"X nyc/a 0: wX[0-1); X {STATE} 1: wX[0-1), 3: wX[0-1)"
    assert (w.state_of(), w.get("X")) == ([0, 1, 0, 1], "X COMMITTED 3")
    w.journal("Y", "a", 1)
    assert w.end("Y", w.consumed("a", 2, 12, tasks=(0, 2))) == "InvalidArgument", "not its tasks"
    w.journal("Z", "a", 1, size=CHUNK + 1)
    assert w.end("Z", w.consumed("a", 2, 12)) == "EventTooLarge", "not in one round"
    assert w.message.startswith("a state change of 1,001 bytes, bigger than a commit may have")
    assert w.get("Z") == "Z OPEN"
    assert w.state_of() == [0, 1, 0, 1]


def test_what_belongs_to_no_commit_is_rejected() -> None:
    w = made()
    w.write_plainly(STATE, 3)
    w.turn()
    assert w.index.rejected[STATE] == {"plain_write": 3}
    assert not list(w.index.plain_waiting(w.state))
    w.journal("X", "a")
    place = (STATE, 0)
    run = w.write("X", "wX", STATE)._replace(keyless=1)
    w.journals[place][-1] = w.journals[place][-1]._replace(run=run)
    w.turn()
    assert w.index.rejected[STATE]["wrong_segment"] == 1, "a compacted topic takes no null key"


def test_state_stays_in_its_partition_while_outputs_are_staged_and_rolled() -> None:
    w = made()
    w.journal("X", "a", 2, out=CHUNK, size=CHUNK)
    w.end("X", w.consumed("a", 1, 12))
    w.turn()
    assert [key[0] for key in w.state.open[w.id("X")].staged_merges] == ["nyc/a"]
    (staged,) = w.state.open[w.id("X")].staged_merges.values()
    done = replace(staged, done=True, first=0, end=1, count=1)
    w.log_rows([(k.staged_merge_key(w.id("X"), "nyc/a", staged.number), done)])
    w.wait(1000)
    assert w.get("X") == "X COMMITTED 2"
    rolled = {epoch.stream for round_ in w.rounds for epoch in round_.epochs if epoch.stream_epoch}
    assert (rolled, w.state.streams[STATE].stream_epoch) == ({"nyc/a"}, 0)
    assert w.state_of() == [0, 0, 1, 0]
    assert w.ask("scale", r.Scale(STATE, 8, (), ())) == "InvalidArgument"


def test_the_right_to_process_is_what_counts() -> None:
    w = made()
    w.grant("etl", "nyc/*", Right.WRITE)
    w.grant("ops", NAME, Right.PROCESS)
    w.grant("ops", "nyc/a", Right.WRITE)
    with w.by("etl"):
        assert w.stored("X", w.consumed("a", 1, 12), 0) == "NotAuthorized"
        assert w.reset(keep=True) == w.delete() == "NotAuthorized"
        assert World.create(w, STATE, 4, processor=NAME) == "NotAuthorized"
    with w.by("ops"):
        assert w.stored("X", w.consumed("a", 1, 12), 0) == "X COMMITTED 2"
        w.journal("Y", "a", 0)
        w.end("Y", w.consumed("a", 2, 12))
    w.turn()
    assert w.state_of() == [2, 0, 0, 0]


def test_without_outputs_it_is_all_that_is_needed() -> None:
    w = made()
    w.grant("ops", NAME, Right.PROCESS)
    with w.by("ops"):
        hash_ = hash_of(NAME, w.token_of("a"))
        for number, label in enumerate(("nothing", "state"), 1):
            begin = r.Begin(w.id(label), "nyc", None, MINUTE, SECRET, hash_)
            assert w.ask("begin", begin) == f"begun {label}"
            if label == "state":
                w.touch(label, STATE)
                w.write(label, f"w{label}", STATE, partition=0, size=10, keys=(0, 1 << 31))
            w.end(label, w.consumed("a", number, 12))
            w.turn()
            assert w.get(label) == f"{label} COMMITTED {number - 1}"
        bare = r.OneShot(w.id(w.marked("shot")), "nyc", None, (), w.consumed("a", 3, 12))
        assert w.ask("shot", bare) == "shot COMMITTED 0"


def test_no_other_stream_has_the_name_of_a_processors_state() -> None:
    w = made()
    known = f"{STATE} ACTIVE"
    assert World.create(w, STATE, 4, processor=NAME).startswith(known[:5])
    for stream, segments, settings in (
        (STATE, 4, {}), ("nyc/b", 4, {"processor": NAME}), (STATE, 8, {"processor": NAME}),
        ("nyc/q.state", 4, {"processor": NAME}),
    ):  # fmt: skip
        assert World.create(w, stream, segments, **settings) == "InvalidArgument"
    assert World.create(w, "nyc/no.state", 4, processor="nyc/no") == "UnknownProcessor"
    for setting in ("retention.ms", "scale.events.per.second"):
        command = r.CreateStream(STATE, 4, {"processor": NAME, setting: "1"})
        assert w.ask("create", command) == "UnsupportedSetting"
    assert w.store("counts", "more") == f"{NAME} 4 tasks"
    assert w.store("third", "counts") == f"{NAME} 4 tasks"
    assert w.state.processors[NAME].stores == ("counts", "more", "third"), "numbers stay"
    assert w.store("") == "InvalidArgument"
    assert w.ask("create", r.CreateProcessor(STATE, 4, INPUTS)) == "InvalidArgument"


def test_a_reset_ends_ownership() -> None:
    w = made()
    w.stored("X", w.consumed("a", 1, 12), 0)
    assert w.reset() == "InvalidArgument", "without state it starts somewhere"
    assert w.reset(INPUTS[0]) == "InvalidArgument", "not all inputs"
    assert w.reset(keep=True) == f"{NAME} 4 tasks"
    assert (w.row(), w.state_of(0)) == ("2 nobody 1:12", [1]), "it goes on where it stood"
    assert w.stored("Y", w.consumed("a", 2, 13), 0) == "OwnershipLost"
    assert w.reset(keep=True, resets=0) == "IllegalState", "of one who saw it before"
    assert w.reset(*INPUTS, keep=True) == f"{NAME} 4 tasks"
    assert (w.row(), w.state_of(0)) == ("3 nobody 1:-", [1]), "the head names a sequence"
    assert w.state.processors[NAME].incarnation == 0
    late = r.ResetProcessor(NAME, 2, (r.ProcessorInput("nyc/in", "", 5, 0), INPUTS[1]), False)
    assert w.ask("reset", late) == f"{NAME} 4 tasks"
    w.take("b")
    assert w.ask("reset", late) == f"{NAME} 4 tasks", "repeated"
    assert (w.row(), w.state_of(0)) == ("5 b 0:-", [0])
    row = w.state.processors[NAME]
    assert (row.incarnation, row.resets, row.inputs[0].record) == (1, 3, 5)
    assert w.stored("Z", w.consumed("b", 1, 5), 0) == "Z COMMITTED 2", "from the new start"
    check_unmoved(w, "5 b 1:5")
    assert [row.command for round_ in w.rounds for row in round_.audit] == ["ResetProcessor"] * 3


def test_nothing_is_reset_while_it_is_merged() -> None:
    w = made()
    w.journal("X", "a", 0)
    w.end("X", w.consumed("a", 1, 12))
    turn = w.new_turn()  # nothing is merged before it is asked
    for name, command in (
        ("reset", r.ResetProcessor(NAME, 0, INPUTS, False)), ("delete", r.DeleteProcessor(NAME, 0)),
    ):  # fmt: skip
        w._decide(turn, command, w.asker(name))
    assert w.close(turn) == "[reset] NotReady; [delete] NotReady"
    w.turn()
    assert w.row() == "1 a 1:12"


def test_a_commit_that_waits_ends_with_its_processor() -> None:
    w = made()
    w.open("X", "a")
    command = r.Commit(
        w.token("X"), (), (w.receipt("X", "wX", sequence=1),), None, 10_000, None,
        w.consumed("a", 1, 12),
    )  # fmt: skip
    said = w.turn(("commit", command), ("delete", r.DeleteProcessor(NAME, 0)))
    assert "[commit] UnknownProcessor" in said
    assert w.get("X").startswith("X ABORTED")


def test_a_commit_that_fails_ends_alone() -> None:
    w = made()
    w.open("X", "a")
    with patch.object(commit, "_check_events", side_effect=UnknownStream("a bug")):
        assert w.end("X", w.consumed("a", 1, 12)) == "UnknownStream"
    w.end("X", w.consumed("a", 1, 12))
    assert w.turn() == "[commit X] X COMMITTED 1"


def test_a_deleted_one_leaves_its_count() -> None:
    w = made()
    w.stored("X", w.consumed("a", 1, 12), 0)
    late = w.taking("a", terms=(0, 0, 0, 0))
    w.journal("O", "a", 0)
    w.delete()
    assert w.state.streams[STATE].state == "FORGETTING"
    assert w.get("O").startswith("O ABORTED")
    w.delete()
    assert NAME not in w.state.processors
    floor = w.state.get(k.scope_key("nyc")).floor
    assert floor > 1, "each incarnation, count of resets and term that it had"
    assert (
        w.take("b")
        == w.ask("reset", r.ResetProcessor(NAME, 1, INPUTS, False))
        == "UnknownProcessor"
    )
    turn = w.new_turn()
    stream_forgotten(turn, STATE)
    w.close(turn)
    assert not [key for key in w.table.rows if key.startswith(k.STATUS + k.task_key(NAME, 0)[:-5])]
    assert w.store("other", tasks=2) == f"{NAME} 2 tasks"
    row = w.state.processors[NAME]
    assert (row.incarnation, row.resets, row.first_term, row.stores) == (*[floor] * 3, ("other",))
    assert w.delete() == "IllegalState", "a copy by somebody who saw the first one"
    assert w.ask("take", replace(late, tasks=(0, 1), terms=(0, 0))) == "OwnershipLost"
    assert World.create(w, STATE, 2, processor=NAME) == ""


def test_a_store_stays_what_it_is_until_a_reset() -> None:
    """Else rows would be read as what they are not."""
    w = made()

    def create(**kinds: str) -> str:
        command = r.CreateProcessor(NAME, 4, INPUTS, tuple(kinds), tuple(kinds.values()))
        return w.ask("create", command)

    steps = [
        (create(a="of json"), ""),
        (create(a="of str"), "IllegalState"),
        (create(b="of str", a="of json"), ""),
        (create(b="of json"), "IllegalState"),
        (w.store("a", "c"), ""),  # a program that says nothing of them
        (create(c="of str"), ""),
        (create(c="of json"), "IllegalState"),
        (
            w.ask("create", r.CreateProcessor(NAME, 4, INPUTS, ("a",), ("x", "y"))),
            "InvalidArgument",
        ),
        (w.reset(keep=True), ""),
        (create(a="of str"), "IllegalState"),
        (w.reset(*INPUTS), ""),
        (create(a="of str"), ""),
    ]
    assert [told if told in ("IllegalState", "InvalidArgument") else "" for told, _ in steps] == [
        due for _, due in steps
    ]
    assert w.state.processors[NAME].stores == ("counts", "a", "b", "c")


def test_inputs_change_and_positions_follow_them() -> None:
    w = made()
    more = r.ProcessorInput("nyc/more", "", 3, 0)
    for number, record in ((0, 12), (1, 7)):
        w.stored(f"X{number}", w.consumed("a", number + 1, record, number=number), 0)
    alter = r.AlterProcessor(NAME, 0, ("nyc/in",), (more,))
    assert w.ask("alter", alter) == f"{NAME} 4 tasks"
    row = w.state.processors[NAME]
    assert [one.stream for one in row.inputs] == ["lax/in", "nyc/more"]
    assert (row.incarnation, row.resets) == (0, 1)
    assert (w.row(), w.state_of(0)) == ("2 nobody 2:7", [2]), "state, sequence and a position stay"
    assert [p.input for p in w.state.tasks[NAME, 0].positions] == [0], "by its new number"
    assert w.stored("Y", w.consumed("a", 3, 8), 0) == "OwnershipLost", "numbers are others by now"
    w.take("b")
    assert w.ask("alter", alter) == f"{NAME} 4 tasks", "repeated"
    assert w.row() == "3 b 2:7"
    late = r.AlterProcessor(NAME, 0, ("lax/in",), ())
    assert w.ask("late", late) == "IllegalState", "of one who saw it before"
    assert w.stored("back", w.consumed("b", 3, 6), 0) == "InvalidArgument", "positions only rise"
    assert w.stored("start", w.consumed("b", 3, 2, number=1), 0) == "InvalidArgument", (
        "from its start"
    )
    assert w.stored("Z", w.consumed("b", 3, 4, number=1), 0) == "Z COMMITTED 2"
    check_unmoved(w, "3 b 3:7,4")
    assert [row.command for round_ in w.rounds for row in round_.audit] == ["AlterProcessor"]


def test_inputs_stay_while_a_commit_is_merged() -> None:
    w = made()
    w.journal("X", "a", 0)
    w.end("X", w.consumed("a", 1, 12))
    turn = w.new_turn()
    w._decide(turn, r.AlterProcessor(NAME, 0, ("nyc/in",), ()), w.asker("alter"))
    assert w.close(turn) == "[alter] NotReady"


def test_a_copy_is_begun_filled_and_ended() -> None:
    w = made()
    w.log_rows([(k.FEATURE_KEY, r.FeatureRow(3, 1))])
    w.stored("X", w.consumed("a", 1, 12), 0)
    copy = "nyc/copy"

    def phase(phase: str, resets: int = 0, asker: str = "") -> str:
        command = r.CopyProcessor(copy, NAME, 0, resets, phase)
        return w.ask(asker or f"{phase} {len(w.asked)}", command)

    def take(who: str, *, copying: bool) -> str:
        rows = w.state.tasks
        terms = tuple(rows[copy, t].term if (copy, t) in rows else 0 for t in ALL)
        command = r.TakeTasks(copy, w.token_of(who), who, ALL, terms, copying)
        return w.ask(f"take {who} {len(w.asked)}", command)

    assert phase("") == "UnknownProcessor", "not begun"
    assert phase("copying", asker="first") == f"{copy} 4 tasks"
    row = w.state.processors[copy]
    assert (row.origin, row.phase, row.inputs) == (NAME, "copying", INPUTS)
    assert (row.stores, row.tasks) == (("counts",), 4)
    assert take("b", copying=False) == "IllegalState"
    assert w.ask("make", r.CreateProcessor(copy, 4, INPUTS, ("counts",))) == "IllegalState"
    assert take("b", copying=True).startswith("0 b 0:-")
    assert take("c", copying=True).startswith("0 c 0:-"), "of a second copier, who begins again"
    assert phase("copying") == f"{copy} 4 tasks"
    row = w.state.processors[copy]
    assert (row.incarnation, row.resets) == (1, 1), "rows of the first one are nothing"
    assert phase("savepoint") == "IllegalState", "of the first one"
    assert phase("savepoint", 1, "end") == f"{copy} 4 tasks"
    assert phase("savepoint", 1, "end") == f"{copy} 4 tasks", "repeated"
    assert phase("copying", 2) == "IllegalState", "it is complete"
    for copying in (False, True):
        assert take("d", copying=copying) == "IllegalState", "never run"
    assert w.ask("reset", r.ResetProcessor(copy, 2, INPUTS, False)) == "IllegalState"
    assert w.ask("alter", r.AlterProcessor(copy, 2, ("nyc/in",), ())) == "IllegalState"
    assert (
        w.ask("take it", r.TakeTasks(NAME, w.token_of("e"), "e", (0,), (1,), True))
        == "IllegalState"
    )
    assert w.ask("delete", r.DeleteProcessor(copy, 2)) == ""
