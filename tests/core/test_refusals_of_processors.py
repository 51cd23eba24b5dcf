"""What commands about processors are refused for: tasks, positions, state; as `test_refusals`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from anabranch.protocol.ids import make_marked_id
from anabranch.protocol.schemas import records as r
from tests.core.harness import World, event
from tests.core.labels import MINUTE, SECRET
from tests.core.test_ownership import INPUTS, NAME
from tests.core.test_processor_state import CHUNK, STATE, Stored
from tests.core.test_processor_state import made as made_processor
from tests.core.test_refusals import (
    ILLEGAL,
    INVALID,
    UNSUPPORTED,
    Make,
    Row,
    after,
    check_row,
    lose,
    this,
)


def made_with_tasks() -> Stored:
    """Processor nyc/p of four tasks with a store: a owns them. X is open, begun with that ownership, P without."""
    world = made_processor()
    world.shot("first", world.consumed("a", 1, 12, segment=1, offset=5))
    world.open("X", "a")
    world.open("P", None)
    world.marked("M")
    return world


def shot_of_tasks(consumed: Make, label: str = "M", name: str | None = None) -> Make:
    events = (event(),)
    return lambda w: r.OneShot(w.id(label), "nyc", name, events, consumed(w))


def moves(who: str = "a", sequence: int = 2, record: int = 13, **more: Any) -> Make:
    return lambda w: w.consumed(who, sequence, record, **dict(more))


def moved(sequence: int = 2, record: int = 13, **more: Any) -> Make:
    """A one-shot that moves tasks of a."""
    return shot_of_tasks(moves("a", sequence, record, **more))


def ends(label: str, consumed: Make, name: str | None = None) -> Make:
    """A commit by journals."""
    return lambda w: r.Commit(
        w.token(label),
        (),
        (w.receipt(label, f"w{label}", sequence=1),),
        name,
        10_000,
        None,
        consumed(w),
    )


def stored(*tasks: int, moving: Make | None = None, **given: Any) -> Make:
    """A one-shot with a row of state for each of these tasks."""
    given = {"stream": STATE, "key": b"k", **given}
    rows = tuple(event(segment_id=task, **given) for task in tasks)
    return lambda w: r.OneShot(w.id("M"), "nyc", None, rows, (moving or moves())(w))


def taken_by(who: str, *tasks: int) -> Make:
    def take(world: Stored) -> None:
        world.take(who, *tasks)

    return take


def creating(tasks: int, *inputs: r.ProcessorInput, name: str = NAME) -> Make:
    return this(r.CreateProcessor(name, tasks, inputs))


def marked_begin(world: Stored) -> r.Begin:
    world.ids["B"] = make_marked_id(0, world.wall_ms, 77)
    return r.Begin(world.id("B"), "nyc", None, MINUTE, SECRET)


NOT_ENABLED, TOGETHER = "FeatureNotEnabled", "these parts together needs feature level 3"
NOTHING = r.TaskStep((), 9, ())
FIRST, SECOND = INPUTS
MORE = r.ProcessorInput("nyc/more", "", 0, 0)
PROCESSORS: dict[str, Row] = {
    **{
        f"{tasks} tasks": (creating(tasks, *INPUTS, name="nyc/r"), INVALID, words)
        for tasks, words in ((0, "a power of two"), (3, "a power of two"), (2048, "1,024 are allowed"))
    },
    "no inputs": (creating(4, name="nyc/r"), INVALID, "needs inputs"),
    "an input twice": (creating(4, FIRST, FIRST, name="nyc/r"), INVALID, "each once"),
    "other tasks": (creating(8, *INPUTS), ILLEGAL, "exists with 4 tasks, not 8:"),
    "without an input": (creating(4, FIRST), ILLEGAL, "exists with the input lax/in, too:"),
    "with another input": (
        creating(4, *INPUTS, r.ProcessorInput("nyc/other", "", 0, 0)),
        ILLEGAL, "exists with its inputs, without nyc/other:",
    ),
    "an input that was made again": (
        creating(4, FIRST, replace(SECOND, topic_id="b" * 32)), ILLEGAL, "created again since:",
    ),
    "the same in another order": (creating(4, SECOND, FIRST), f"{NAME} 4 tasks", ""),
    "unknown processor": (
        this(r.TakeTasks("nyc/none", bytes(16), "b", (0,), (0,))), "UnknownProcessor", "create it",
    ),
    "its state's stream": (this(r.CreateStream("nyc/x.state", 4, {})), INVALID, "`create_processor` makes it"),
    "another processor's state": (
        this(r.CreateStream(STATE, 4, {"processor": "x/y"})), INVALID, "`create_processor` makes it",
    ),
    "its state's retention": (
        this(r.CreateStream(STATE, 4, {"processor": NAME, "retention.ms": "1"})),
        UNSUPPORTED, "no setting retention.ms",
    ),
    "its state is truncated": (this(r.TruncateStream(STATE, 1)), INVALID, "reset that instead"),
    "its state is deleted": (this(r.DeleteStream(STATE)), ILLEGAL, "belongs to"),
    "an input is deleted": (this(r.DeleteStream("nyc/in")), ILLEGAL, NAME),
    "its state is scaled": (this(r.Scale(STATE, 8, (), ())), INVALID, "one segment for each task"),
    "a task without a term": (this(r.TakeTasks(NAME, bytes(16), "b", (0, 1), (0,))), INVALID, "needs its term"),
    "no such task": (this(r.TakeTasks(NAME, bytes(16), "b", (4,), (0,))), INVALID, "0 to 3"),
    "a task twice": (this(r.TakeTasks(NAME, bytes(16), "b", (0, 0), (1, 1))), INVALID, "each once"),
    "a short fencing token": (this(r.TakeTasks(NAME, b"x", "b", (0,), (1,))), INVALID, "has 16 bytes"),
    "a task that was taken meanwhile": (
        after(taken_by("b"), then=lambda w: w.taking("a", terms=(1, 1, 1, 1))),
        "OwnershipLost", "was taken by b meanwhile",
    ),
    "reset without a start": (this(r.ResetProcessor(NAME, 0, (), False)), INVALID, "say where it starts"),
    "reset with other inputs": (this(r.ResetProcessor(NAME, 0, (FIRST,), True)), INVALID, "all of its inputs"),
    "reset meanwhile": (this(r.ResetProcessor(NAME, 7, (), True)), ILLEGAL, "was reset meanwhile"),
    "altered meanwhile": (this(r.AlterProcessor(NAME, 7, (), (MORE,))), ILLEGAL, "was reset meanwhile"),
    "altered in nothing": (this(r.AlterProcessor(NAME, 0, (), ())), INVALID, "nothing to change"),
    "a drop of no input": (this(r.AlterProcessor(NAME, 0, ("nyc/no",), ())), INVALID, "has no input nyc/no"),
    "an input that is one": (this(r.AlterProcessor(NAME, 0, (), (FIRST,))), INVALID, "is an input of"),
    "all inputs dropped": (
        this(r.AlterProcessor(NAME, 0, (FIRST.stream, SECOND.stream), ())), INVALID, "needs inputs",
    ),
    "a plain topic more": (
        this(r.AlterProcessor(NAME, 0, (), (r.ProcessorInput("topic:t", "", 0, 0),))), INVALID, "bridge a topic",
    ),
    "deleted after a reset": (this(r.DeleteProcessor(NAME, 7)), ILLEGAL, "was reset meanwhile"),
}  # fmt: skip

POSITIONS: dict[str, Row] = {
    "the next": (moved(segment=1, offset=6), "M COMMITTED 1", ""),
    "a gap": (moved(3), INVALID, "a batch of `consumed()` was not committed"),
    "an earlier sequence": (moved(0), INVALID, "which is at 1: take your tasks again"),
    "a negative record": (moved(record=-1), INVALID, "no place in a history"),
    "no such input": (moved(number=2), INVALID, "has no input 2"),
    "a segment without an offset": (moved(segment=3), INVALID, "no place in a history"),
    "back": (moved(record=11), INVALID, "from record 12 to 11"),
    "back to the record's beginning": (moved(record=12), INVALID, "positions only rise"),
    "back within the segment": (moved(record=12, segment=1, offset=4), INVALID, "positions only rise"),
    "no step": (shot_of_tasks(lambda w: r.Consumed(NAME, w.token_of("a"), ())), INVALID, "name a task"),
    "a step of nothing": (
        shot_of_tasks(lambda w: r.Consumed(NAME, w.token_of("a"), (NOTHING,))), INVALID, "name a task",
    ),
    "another owner": (
        after(taken_by("b", 0, 1), then=moved()), "OwnershipLost", "task 0, 1 of nyc/p has another owner, b:",
    ),
    "an output LOST": (after(lose("nyc/a"), then=moved()), "StreamLost", "nyc/a is lost"),
    "of another scope": (
        after(lambda w: w.find_scope("lax"), then=lambda w: r.OneShot(w.id("M"), "lax", None, (), moves()(w))),
        INVALID, "",
    ),
    "with a name": (shot_of_tasks(moves(), name="n"), INVALID, "marked if it moves positions and has no name"),
    "with locks": (
        lambda w: moved()(w)._replace(locks=(r.TableLocks("nyc/a", 0, 0, (), ()),)),
        NOT_ENABLED, TOGETHER,
    ),
    "an id without a mark": (shot_of_tasks(moves(), "unmarked"), INVALID, "marked if it moves positions"),
    "a marked id without positions": (shot_of_tasks(this(None)), INVALID, "marked if it moves positions"),
    "a marked id is begun": (marked_begin, INVALID, "make another one"),
    "a marked id is resolved": (lambda w: r.Resolve(w.id("first"), "nyc"), INVALID, "no outcome of its own"),
    "begun with a name": (
        lambda w: r.Begin(w.id("N"), "nyc", "n", MINUTE, SECRET, bytes(16)), INVALID, "has no name",
    ),
    "outputs without positions": (ends("X", this(None)), INVALID, "give `consumed`"),
    "positions of another owner": (ends("X", moves("b")), INVALID, "no others"),
    "a commit with a name": (ends("X", moves(), name="n"), NOT_ENABLED, TOGETHER),
    "a one-shot with a name": (shot_of_tasks(moves(), "unmarked", name="n"), NOT_ENABLED, TOGETHER),
    "a commit that prepares": (
        lambda w: replace(ends("X", moves())(w), prepare=r.Prepare(b"", b"")), NOT_ENABLED, TOGETHER,
    ),
    "begun without ownership": (ends("P", moves()), INVALID, "begin it with that ownership"),
    "lost since": (after(taken_by("b"), then=ends("X", moves())), "OwnershipLost", "has another owner, b"),
    "its processor is deleted while it is merged": (
        after(lambda w: w.end("X", w.consumed("a", 2, 13)), then=this(r.DeleteProcessor(NAME, 0))),
        "NotReady; [commit X] X COMMITTED 1", "is being merged",
    ),
    "decided with other positions": (
        after(lambda w: w.end("X", w.consumed("a", 2, 13)), then=ends("X", moves(record=14))),
        "OutcomeUnknown; [commit X] X COMMITTED 1", "with other positions",
    ),
    "while another commit of the task is merged": (
        after(lambda w: w.end("X", w.consumed("a", 2, 13)), then=moved()),
        "NotReady; [commit X] X COMMITTED 1", "another commit of task 0",
    ),
    "state of a task that isn't moved": (stored(2, moving=moves(tasks=(0, 1))), INVALID, "that of these tasks"),
    "state of no task": (stored(4), INVALID, "that of these tasks"),
    "state of a negative task": (stored(-1), INVALID, "that of these tasks"),
    "state without a key": (stored(0, key=None), INVALID, "has a key"),
    "much state": (stored(0, value=bytes(CHUNK)), "EventTooLarge", "--chunk-bytes"),
    "state of another processor": (stored(0, stream="nyc/q.state"), INVALID, "that of these tasks"),
    "state that moves nothing": (
        lambda w: r.OneShot(w.id("P2"), "nyc", None, (event(STATE, segment_id=0),)), INVALID, "",
    ),
    "state touched without ownership": (lambda w: r.Touch(w.token("P"), STATE), INVALID, STATE),
}  # fmt: skip

TABLES: dict[str, tuple[Callable[[], World], str | None, dict[str, Row]]] = {
    "processor": (made_with_tasks, "admin", PROCESSORS),
    "positions": (made_with_tasks, None, POSITIONS),
}


@pytest.mark.parametrize(
    ("command", "case"), [(command, case) for command, rows in TABLES.items() for case in rows[2]]
)
def test_a_command_about_a_processor_is_answered(
    command: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_world, lane, rows = TABLES[command]
    check_row(make_world(), rows[case], monkeypatch, lane)
