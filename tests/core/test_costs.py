"""No command costs much more than the units of work that it is charged, whatever it asks for, and of whom.

Costs are counted: calls of functions, and bytes that are allocated at most. Both repeat exactly; a unit stands for
so many of each.
"""

from __future__ import annotations

import gc
import io
import pickle
import sys
import tracemalloc
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from anabranch.batches import framing
from anabranch.controller.lanes import Command, decide_command
from anabranch.core import rows as k
from anabranch.core import work
from anabranch.core.authorize import ALL, RULES, Right
from anabranch.core.decisions.turn import Turn
from anabranch.core.round import ReplyTo
from anabranch.protocol.limits import WRITERS
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode
from tests.core import harness
from tests.core.harness import World, event, nyc
from tests.core.labels import SECRET
from tests.core.tables import Memory

CALLS, BYTES = 25, 1_200  # a unit, of 10 µs, is as much
MOST = 3  # times what it is charged
MANY = 3_000
TABLE = "nyc/t"


class Table(Memory):
    """Rows in order, so that a scan costs what is taken of it."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: list[bytes] = []

    def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        for key in changes:
            at = bisect_left(self._keys, key)
            has = self._keys[at : at + 1] == [key]
            if changes[key] is not None and not has:
                insort(self._keys, key)
            elif changes[key] is None and has:
                del self._keys[at]
        super().write(changes)

    def scan(self, prefix: bytes, first: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        at = bisect_left(self._keys, max(prefix, first))
        while at < len(self._keys) and self._keys[at].startswith(prefix):
            yield self._keys[at], self.rows[self._keys[at]]
            at += 1

    def scan_back(self, before: bytes) -> Iterator[tuple[bytes, bytes]]:
        for at in range(bisect_left(self._keys, before) - 1, -1, -1):
            yield self._keys[at], self.rows[self._keys[at]]


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    """Load the compiled code before anything is counted."""
    framing.warm()


class Crowd:
    """Copies of a world. They share records and bytes, which nothing changes: to load those takes the longest."""

    def __init__(self, world: World) -> None:
        self._shared: list[Any] = []
        to = io.BytesIO()
        pickler = pickle.Pickler(to)
        pickler.persistent_id = self._place  # type: ignore[method-assign]
        pickler.dump(world)
        self._data = to.getvalue()

    def _place(self, found: Any) -> int | None:
        if not isinstance(found, bytes) and type(found).__module__ != r.__name__:
            return None
        self._shared.append(found)
        return len(self._shared) - 1

    def copy(self) -> World:
        unpickler = pickle.Unpickler(io.BytesIO(self._data))
        unpickler.persistent_load = self._shared.__getitem__  # type: ignore[method-assign]
        gc.disable()  # the collector would walk through all that is made, again and again
        try:
            world: World = unpickler.load()
        finally:
            gc.enable()
        return world


@cache
def crowded() -> Crowd:
    """A control partition that has many of everything. T is open, has many writers, and locks much."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(harness, "Memory", Table)
        world = nyc("nyc/a", TABLE)
    own = dict.fromkeys(("open", "streams", "scopes", "locks", "processors", "tasks"), 1 << 30)
    world.log_rows([(k.lane_key("etl"), r.LaneRow("etl", False, ("1", "2"), own))])
    world.grant("etl", "*", ALL)
    row = world.state.streams["nyc/a"]
    world.log_rows([(k.table_key(TABLE), r.TableRow(0))])
    many: list[tuple[bytes, Any]] = []
    for n in range(1_000):
        many.append((k.stream_key(f"nyc/s{n}"), replace(row, stream=f"nyc/s{n}")))
        many.append((k.scope_key(f"scope{n}"), r.ScopeRow(f"scope{n}", 0, "etl")))
        many.append(
            (
                k.series_key("nyc", f"s{n}"),
                r.SeriesRow(n, bytes(16), -1, bytes(16), (n, n), ("etl", "lane1")[n % 2]),
            )
        )
        many.append((k.grant_key("etl", f"nyc/s{n}"), r.GrantRow("etl", f"nyc/s{n}", int(ALL))))
        many.append(
            (k.audit_key(world.wall_ms, n), r.AuditRow(world.wall_ms, "etl", "Scale", "x" * 1_000))
        )
    inputs = tuple(r.ProcessorInput(f"nyc/s{n}", "", 0, 0) for n in range(64))
    stores = tuple(f"store {n}" for n in range(256))
    for n in range(300):
        made = r.ProcessorRow(f"nyc/p{n}", 1_024 if n == 0 else 4, inputs, 0, "etl", stores)
        many.append((k.processor_key(f"nyc/p{n}"), made))
        if n < 200:
            many.append((k.lane_key(f"lane{n}"), r.LaneRow(f"lane{n}", False, ("1", "2"), {})))
    world.log_rows(many)
    for lane in ("lane1", "lane7"):
        world.grant(lane, "nyc/none", Right.DESCRIBE)
    with world.by("etl"):
        for n in range(MANY // 2):
            txn_id = world.id(f"open {n}")
            its = r.Begin(txn_id, "nyc", None, 60_000, SECRET, None, 0)
            world.ask("begin", its) if n == 0 else None
            like = world.row("open 0")._replace(txn_id=txn_id)
            world.log_rows([(k.txn_key(txn_id), like)])
        world.begin("T", name="daily")
    txn_id = world.id("T")
    extent = (r.Extent("nyc/a", 0, 0, 1, 1, 7),)
    world.log_rows(
        [
            (k.txn_key(txn_id), world.row("T")._replace(snapshot=1)),
            (k.participant_key(txn_id, "nyc/a"), r.ParticipantRow("nyc/a", 0)),
            *[
                (k.writer_key(txn_id, n), r.WriterRow(r.Receipt(txn_id, n, 1, True, extent), "etl"))
                for n in range(1, MANY)
            ],
            *[
                (
                    k.read_lock_key(txn_id, 1, n),
                    r.ReadLockRow((r.TableLocks(TABLE, 0, 0, (n,), ()),), ()),
                )
                for n in range(1, 2_000)
            ],
            (k.read_lock_key(txn_id, 1, 0), r.ValidatedRow(1_999, 1, 0)),
        ]
    )
    return Crowd(world)


def receipts(world: World, extents: int = 1, many: int = MANY) -> tuple[r.Receipt, ...]:
    its = tuple(r.Extent("nyc/a", n % 2, 0, 1, 1, 7) for n in range(min(2, extents)))
    return tuple(r.Receipt(world.id("T"), n, 2, True, its) for n in range(1, many))


def begun(world: World) -> r.Begin:
    return r.Begin(world.id("new"), "nyc", "daily", 60_000, SECRET, None, 0)


def token(world: World) -> bytes:
    return world.id("T")  # the lane made it


def unfinished(world: World) -> r.Commit:
    """A commit that has to look through as many writers as a transaction may have, none of which has finished."""
    txn_id = world.id("T")
    rows = [r.Receipt(txn_id, n, 1, False, ()) for n in range(1, WRITERS.value)]
    world.log_rows([(k.writer_key(txn_id, its.writer), r.WriterRow(its, "etl")) for its in rows])
    return r.Commit(token(world), (), None, None, 0, None)


def copying(world: World) -> r.CopyProcessor:
    world.log_rows([(k.FEATURE_KEY, r.FeatureRow(3, 1))])
    return r.CopyProcessor("nyc/copy", PROCESSOR, 0, 0, "copying")


PROCESSOR = "nyc/p0"
FENCING_TOKEN = bytes(16)
ALL_TASKS = tuple(range(1_024))
LONG = "x" * 250
# The worst of each command, as far as it is legal in its form.
WORST: dict[str, Callable[[World], Any]] = {
    "find a scope": lambda w: r.FindScope("fresh", True),
    "adopt": lambda w: r.AdoptScope("fresh", "etl"),
    "create": lambda w: r.CreateStream("nyc/new", 2_000, {"max.message.bytes": "20000"}),
    "describe one": lambda w: r.DescribeStreams(None, "nyc/a"),
    "describe all": lambda w: r.DescribeStreams(None, None),
    "forget": lambda w: r.ForgetStream("nyc/a"),
    "delete": lambda w: r.DeleteStream("nyc/a"),
    "recover": lambda w: r.RecoverStream("nyc/a"),
    "alter": lambda w: r.AlterStream("nyc/a", {"retention.ms": "1000000"}, ()),
    "truncate": lambda w: r.TruncateStream("nyc/a", 1),
    "publish": lambda w: r.PublishBase(TABLE, 1, bytes(16)),
    "scale": lambda w: r.Scale("nyc/a", 2_000, (), ()),
    "begin": begun,
    "begin another": lambda w: replace(begun(w), name=None),
    "touch": lambda w: r.Touch(token(w), "nyc/s1", MANY + 1),
    "register": lambda w: r.Register(token(w), replace(receipts(w, 2)[5], sequence=9)),
    "register much": lambda w: r.Register(
        token(w), r.Receipt(w.id("T"), 1, 9, True, tuple(r.Extent("nyc/a", n, 0, 1, 1, 7) for n in range(9_000)))
    ),
    "label": lambda w: r.LabelWriter(token(w), 1, "loader"),
    "heartbeat": lambda w: r.Heartbeat((token(w),) * 1_000),
    "abort": lambda w: r.Abort(token(w), "x" * 1_000),
    "force": lambda w: r.Force(token(w), "x" * 1_000),
    "feature level": lambda w: r.SetFeatureLevel(1),
    "state": lambda w: r.GetState(w.id("T"), None),
    "state, on": lambda w: r.GetState(w.id("T"), None, 1_000),
    "resolve": lambda w: r.Resolve(w.id("T"), "nyc"),
    "resolve nothing": lambda w: r.Resolve(w.id("new"), "nyc"),
    "list": lambda w: r.ListTransactions(None, True, 10_000),
    "list open ones": lambda w: r.ListTransactions(None, False, 10_000),
    "list prepared": lambda w: r.ListTransactions(None, False, 10_000, None, True, SECRET),
    "list what is open": lambda w: r.ListOpen(None, None, 10_000),
    "tell one": lambda w: r.ListOpen(None, w.id("T"), 1),
    "runs": lambda w: r.ListRuns(token(w), "nyc/a", tuple(r.RunsWanted(n, 0, 0, 0) for n in range(1, 5_000))),
    "lock": lambda w: r.LockReads(
        token(w), 2, 1, (r.TableLocks(TABLE, 0, 0, tuple(range(7_000)), ()),),
        tuple(r.WriterAt(n, 1) for n in range(1, 900)),
    ),
    "lock ranges": lambda w: r.LockReads(
        token(w), 2, 1,
        (r.TableLocks(TABLE, 0, 0, (), tuple(r.LockedRange(b"k%05d" % n, None) for n in range(900))),),
    ),
    "validate": lambda w: r.LockReads(token(w), 1, 0, (), (), tuple(r.Validated(1, 1, 1) for _ in range(5_000))),
    "list locks": lambda w: r.ListLocks(token(w), 1, 0),
    "list all locks": lambda w: r.ListTableLocks(None, 10_000),
    "list commands": lambda w: r.ListCommands(),
    "describe the leader": lambda w: r.DescribeLeader(),
    "commit": lambda w: r.Commit(token(w), receipts(w), (), None, 0, None),
    "commit what is not there": lambda w: r.Commit(w.id("none"), receipts(w), (), None, 0, None),
    "commit without the receipts of many": unfinished,
    "commit all": lambda w: r.Commit(token(w), (), None, "daily", 0, None),
    "one-shot": lambda w: r.OneShot(w.id("new"), "nyc", None, tuple(event("nyc/a", b"k") for n in range(3_000))),
    "one-shot into streams in turn": lambda w: r.OneShot(
        w.id("new"), "nyc", None, tuple(event(("nyc/a", "nyc/s1")[n % 2]) for n in range(3_000)),
    ),
    "one-shot that has headers": lambda w: r.OneShot(
        w.id("new"), "nyc", None,
        tuple(event(headers={f"h{i}": None for i in range(20)}) for n in range(300)),
    ),
    "one-shot that is refused at its end": lambda w: r.OneShot(
        w.id("new"), "nyc", None, (*[event() for n in range(3_000)], event(headers={"ab.x": b""})),
    ),
    "one-shot that changes rows": lambda w: r.OneShot(
        w.id("new"), "nyc", None, (event(TABLE, b"k"),) * 100, None, (r.TableLocks(TABLE, 0, 0, (), ()),),
        tuple(r.RowChange(TABLE, b"%05d" % n, "ADD", 1, b"1") for n in range(64)),
    ),
    "small one-shot": lambda w: r.OneShot(w.id("new"), "nyc", None, (event("nyc/a", b"k"),)),
    "prepared": lambda w: r.PrepareEvents(
        w.id("new"), "nyc", None, tuple(event("nyc/a", b"k") for n in range(500)), SECRET,
        r.Prepare(bytes(32), b""),
    ),
    "safe time": lambda w: r.SafeTime("nyc", None, (TABLE,) * 5_000),
    "turn at a row": lambda w: r.TakeTurn(w.id("new"), None, TABLE, 1, (TABLE,) * 100, 1_000),
    "list series": lambda w: r.ListSeries("nyc", None, None),
    "set series": lambda w: r.SetSeries("nyc", "s1", 1, 2),
    "grant": lambda w: r.SetGrant("etl", "nyc/x", 4),
    "list grants": lambda w: r.ListGrants(),
    "audit": lambda w: r.ListAudit(None),
    "set a lane": lambda w: r.SetLane("etl", False, ("1", "2"), {"streams": 1 << 30, "scopes": 1 << 30}),
    "list lanes": lambda w: r.ListLanes(),
    "make a processor": lambda w: r.CreateProcessor(
        "nyc/px", 1_024, tuple(r.ProcessorInput(f"nyc/s{n}", "", 0, 0) for n in range(64)),
        tuple(f"{n}{LONG}" for n in range(256)), ("kind",) * 256,
    ),
    "take": lambda w: r.TakeTasks(PROCESSOR, FENCING_TOKEN, "me", ALL_TASKS, (0,) * 1_024),
    "release": lambda w: r.ReleaseTasks(PROCESSOR, FENCING_TOKEN, ALL_TASKS),
    "alter a processor": lambda w: r.AlterProcessor(
        PROCESSOR, 0, tuple(f"nyc/s{n}" for n in range(60)),
        tuple(r.ProcessorInput(f"nyc/more{n}", "", 0, 0) for n in range(60)),
    ),
    "copy a processor": copying,
    "reset": lambda w: r.ResetProcessor(PROCESSOR, 0, (), True),
    "delete a processor": lambda w: r.DeleteProcessor(PROCESSOR, 0),
    "describe a processor": lambda w: r.DescribeProcessors("nyc", PROCESSOR),
    "describe processors": lambda w: r.DescribeProcessors("nyc"),
}  # fmt: skip


def measured(decide: Callable[[], object]) -> tuple[int, int]:
    """Calls of functions, and the most bytes that were allocated at once."""
    calls = 0

    def count(frame: object, what: str, it: object) -> None:
        nonlocal calls
        calls += what in ("call", "c_call")

    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    sys.setprofile(count)
    try:
        decide()
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return calls, peak - before


def played(
    name: str, lane: str = "etl", *, asked: bool = True
) -> tuple[Turn, Callable[[], object]]:
    """A turn, and the deciding of this command in it."""
    world = crowded().copy()
    turn = world.new_turn()
    payload = encode(WORST[name](world))
    to = ReplyTo(b"c", 0, b"d", lane) if asked else None
    command = Command(7, to, payload, False, lane, control=name == "adopt")
    return turn, lambda: decide_command(turn, command)


@pytest.mark.parametrize(
    ("name", "lane"), [*((name, "etl") for name in WORST), ("list series", "lane1")]
)
def test_no_command_costs_much_more_than_it_is_charged(name: str, lane: str) -> None:
    turn, decide = played(name, lane)
    calls, size = measured(decide)
    assert calls <= MOST * CALLS * turn.work, f"{calls:,} calls for {turn.work:,} units"
    assert size <= MOST * BYTES * turn.work, f"{size:,} bytes for {turn.work:,} units"


def test_each_command_is_among_them() -> None:
    world = crowded().copy()
    assert {type(make(world)) for make in WORST.values()} == RULES.keys()


@pytest.mark.parametrize(
    ("cost", "none", "name"),
    [
        ("LISTED", 0, "list what is open"),
        ("ROW", 0, "take"),
        pytest.param("of_items", lambda _: 0, "validate", marks=pytest.mark.soak),
        ("of_receipts", lambda _: 0, "state"),
    ],
)
def test_without_a_charge_some_command_costs_more(
    cost: str, none: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, cost, none)
    turn, decide = played(name)
    calls, size = measured(decide)
    assert calls > MOST * CALLS * turn.work or size > MOST * BYTES * turn.work


@pytest.mark.parametrize(
    "name",
    ["list open ones", "list what is open", "list all locks", "describe all", "list series"],
)
def test_a_lane_pays_nothing_for_what_only_others_may_see(name: str) -> None:
    turn, decide = played(name, lane="lane7")
    decide()
    assert not isinstance(turn.round.replies[0][1], r.Refusal)
    assert turn.work < 2 * work.SMALL


def test_an_answer_is_made_for_an_asker_alone() -> None:
    """A command without a place for its answer costs no list of writers."""
    units = []
    for asked in (True, False):
        turn, decide = played("abort", asked=asked)
        calls, _ = measured(decide)
        units.append(turn.work)
        assert calls <= MOST * CALLS * turn.work
    assert units[1] < units[0] - 400
    turn, decide = played("state", asked=False)
    decide()
    assert turn.work == work.COMMAND


def test_what_is_due_is_charged_to_its_owner() -> None:
    """A commit is small, and its merge goes through all that was written."""
    world = nyc()
    world.grant("etl", "*", ALL)
    turns: list[Turn] = []
    make = world.new_turn

    def kept() -> Turn:
        turns.append(make())
        return turns[-1]

    with world.by("etl"), pytest.MonkeyPatch.context() as patched:
        world.begin("A")
        world.touch("A")
        for _ in range(40):
            world.write("A", "w1")
        patched.setattr(world, "new_turn", kept)
        world.commit("A", own=[world.receipt("A", "w1")])
        for _ in range(3):
            world.turn()
    assert world.row("A").state == "COMMITTED"
    assert all(turn.owed.keys() <= {"etl"} for turn in turns)
    assert sum(turn.owed.get("etl", 0) for turn in turns) > 40 // work.ITEMS_A_UNIT
