"""Timers and windows in a real table: the same whatever the batches, and as a plain fold of the input says."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import anabranch
import anabranch.testing
from anabranch.controller.monitor import Numbers
from anabranch.errors import IllegalState, InvalidArgument
from anabranch.processing import failures as failures_module
from anabranch.processing import handlers as handlers_module
from anabranch.processing import timers
from anabranch.processing.app import Processor
from anabranch.processing.batch import WorkBatch, begin_context
from anabranch.processing.failures import Failures, HandlerFailed
from anabranch.processing.handlers import Handlers
from anabranch.processing.metrics import TABLE
from anabranch.processing.stores import prefix_of
from anabranch.processing.table import Table
from anabranch.processing.timers import Windows
from anabranch.protocol.partitioner import SPACE, position_of
from anabranch.reading.slices import Piece
from anabranch.reading.store_lookup import FIRST_STORE
from anabranch.values import RAW

TASKS = 4
KEYS = [b"k%d" % i for i in range(9)]
HOUR, GRACE = 1000, 300


def task_of(key: bytes) -> int:
    return position_of(key) * TASKS // SPACE


def event(key: bytes, timestamp: int, value: bytes = b"1", offset: int = 0) -> anabranch.Event:
    return anabranch.Event("t/in", key, value, [], timestamp, None, 1, 0, 0, offset)


def commit_of(number: int, *events: anabranch.Event, whole: bool = True) -> Piece:
    """An input commit."""
    return Piece("t/in", number, list(events), [task_of(e.key or b"") for e in events], whole)


def committed(handlers: Handlers, table: Table, *pieces: Piece, now: int = 0) -> WorkBatch:
    """A batch whose rows are in the table; ``now``: of the wall clock, in milliseconds."""
    batch = WorkBatch(table, TASKS)
    handlers.fire_wall(batch, range(TASKS), now)
    handlers.handle(batch, list(pieces))
    batch.open = False
    table.write(((task, rows.items()) for task, rows in batch.rows.items()), {})
    return batch


def commits(rng: random.Random, count: int) -> list[Piece]:
    """Input commits of some events each, mostly in time."""
    found, now = [], 0
    for number in range(count):
        events = []
        for _ in range(rng.randint(1, 6)):
            now += rng.randint(0, 200)
            events.append(event(rng.choice(KEYS), max(0, now - rng.choice([0, 0, 50, 400, 2000]))))
        tasks = [task_of(each.key or b"") for each in events]
        found.append(Piece("t/in", number, events, tasks))
    return found


class Program:
    """Counts by key and window, and a timer for each key; what it wrote, with times."""

    def __init__(self, folder: Path, cut_bytes: int = 1 << 20) -> None:
        self.app = app = Processor("t/p", tasks=TASKS, cut_bytes=cut_bytes)
        source = app.input("t/in", value=json)
        out = app.output("t/out", value=json)
        late = app.output("t/late")
        hours = app.windows("hours", HOUR / 1000, grace=GRACE / 1000, value=json, late=late)
        seen = app.store("seen", value=json)

        @app.timer("quiet")
        def quiet(key: bytes, due: int) -> None:
            out.write(["quiet", key.decode(), due], key=key)

        @app.on(source)
        def count(each: Any) -> None:
            for window in hours.of(each):
                window.value = (window.value or 0) + each.value
            assert each.key is not None
            seen[each.key] = seen.get(each.key, 0) + 1
            quiet.set(each.key, each.timestamp + 700)

        @hours.on_close
        def closed(window: anabranch.processing.timers.Window) -> None:
            out.write([window.key.decode(), window.start, window.value], key=window.key)

        self.table = Table(folder)
        self.handlers = Handlers(app, tuple(app.stores))
        self.written: list[tuple[str, bytes | None]] = []

    def restart(self) -> None:
        """As another worker, which took the tasks."""
        self.handlers = Handlers(self.app, tuple(self.app.stores))
        self.handlers.resume(self.table, range(TASKS))

    def run(self, pieces: list[Piece]) -> None:
        """One batch, and its commit; more of them if not all has room."""
        batch = WorkBatch(self.table, TASKS)
        self.handlers.fire_wall(batch, range(TASKS), 0)
        left = self.handlers.handle(batch, pieces)
        batch.open = False
        self.table.write(((task, rows.items()) for task, rows in batch.rows.items()), {})
        for stream, events in batch.outputs.items():
            self.written += [(stream, one[0]) for one in events if isinstance(one, tuple)]
        if left or batch.is_full(self.handlers.batch_bytes):
            self.run(left)


def cuts(rng: random.Random, pieces: list[Piece], most: int) -> list[list[Piece]]:
    found, at = [], 0
    while at < len(pieces):
        size = rng.randint(1, most)
        found.append(pieces[at : at + size])
        at += size
    return found


def parts(rng: random.Random, pieces: list[Piece]) -> list[Piece]:
    """The same, some commits in parts: of those only the last one is whole."""
    found = []
    for piece in pieces:
        events = list(piece.events)
        at = rng.randint(1, len(events))
        if at < len(events) and rng.random() < 0.5:
            found.append(piece._replace(events=events[:at], tasks=piece.tasks[:at], whole=False))
            piece = piece._replace(events=events[at:], tasks=piece.tasks[at:])
        found.append(piece)
    return found


def folded(pieces: list[Piece]) -> Counter[tuple[str, bytes]]:
    """What the program writes, by a plain fold: windows by key, a timer a key, event time by task."""
    wrote: Counter[tuple[str, bytes]] = Counter()
    time: dict[int, int] = {}
    windows: dict[tuple[int, bytes, int], int] = {}
    quiet: dict[bytes, int] = {}

    def say(*what: object) -> None:
        wrote["t/out", json.dumps(list(what), separators=(",", ":")).encode()] += 1

    for piece in pieces:
        for each, task in zip(piece.events, piece.tasks, strict=True):
            assert each.key is not None
            start = each.timestamp - each.timestamp % HOUR
            if start + HOUR + GRACE <= time.get(task, 0):
                wrote["t/late", b"1"] += 1
            else:
                windows[task, each.key, start] = windows.get((task, each.key, start), 0) + 1
            quiet[each.key] = each.timestamp + 700
        for task in set(piece.tasks):
            mine = [
                e.timestamp for e, t in zip(piece.events, piece.tasks, strict=True) if t == task
            ]
            time[task] = now = max(time.get(task, 0), *mine)
            if max(mine) < now:
                continue  # time has not moved: nothing fires
            for key, due in sorted(quiet.items()):
                if task_of(key) == task and due <= now:
                    say("quiet", key.decode(), due)
                    del quiet[key]
            for of, key, start in sorted(windows):
                if of == task and start + HOUR + GRACE <= now:
                    say(key.decode(), start, windows.pop((of, key, start)))
    return wrote


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 8))]
)
def test_windows_and_timers_are_those_of_a_fold_however_the_input_is_cut(
    tmp_path: Path, seed: int
) -> None:
    pieces = commits(random.Random(seed), 120)
    by_cuts = []
    for number, (most, size) in enumerate(((1, 1 << 20), (7, 1 << 20), (120, 1 << 20), (120, 300))):
        program, rng = Program(tmp_path / str(number), size), random.Random(seed + 1)
        for some in cuts(rng, parts(rng, pieces) if most == 1 else pieces, most):
            if rng.random() < 0.1:
                program.restart()
            program.run(some)
        by_cuts.append(program.written)
    assert Counter(by_cuts[0]) == folded(pieces), f"seed {seed}"
    out = [[w for w in written if w[0] == "t/out"] for written in by_cuts]
    assert out[0] == out[1] == out[2] == out[3], f"seed {seed}"


def test_the_wall_clock_s_timers_fire_once_and_are_cancelled(tmp_path: Path) -> None:
    app = Processor("t/p", tasks=TASKS)
    source, fired = app.input("t/in"), []

    @app.timer("at", wall=True)
    def at(key: bytes, due: int) -> None:
        fired.append((key, due))

    @app.on(source)
    def handle(each: anabranch.Event) -> None:
        assert each.key is not None
        if each.value == b"cancel":
            at.cancel(each.key)
        else:
            at.set(each.key, 500)
            at.set(each.key, int(each.value or b""))

    handlers, table = Handlers(app, tuple(app.stores)), Table(tmp_path)

    def step(now: int, *events: anabranch.Event) -> None:
        committed(handlers, table, commit_of(now, *events), now=now)

    step(0, event(b"a", 0, b"1000"), event(b"b", 0, b"1000"), event(b"c", 0, b"2000"))
    step(999, event(b"b", 0, b"cancel"))
    assert fired == []
    step(1000)
    assert fired == [(b"a", 1000)]
    step(5000)
    step(6000)
    assert fired == [(b"a", 1000), (b"c", 2000)]
    assert [*table.scan(task_of(b"a"), b"", b"\xff")] == []


def test_an_idle_task_follows_the_others(tmp_path: Path) -> None:
    """After its seconds by the wall clock, once, and not in the middle of a commit that comes in parts."""
    app = Processor("t/p", tasks=TASKS, idle=5)
    source, fired = app.input("t/in"), []

    @app.timer("at")
    def at(key: bytes, due: int) -> None:
        fired.append((key, due))

    @app.on(source)
    def handle(each: anabranch.Event) -> None:
        assert each.key is not None
        at.set(each.key, each.timestamp + 100)

    table, tasks = Table(tmp_path), range(TASKS)
    silent, busy = KEYS[0], next(key for key in KEYS if task_of(key) != task_of(KEYS[0]))
    handlers = Handlers(app, tuple(app.stores))

    def step(now: int, *events: anabranch.Event, whole: bool = True) -> int:
        pieces = [commit_of(now, *events, whole=whole)] if events else []
        return len(committed(handlers, table, *pieces, now=now).rows)

    step(0, event(silent, 1000))
    step(1000, event(busy, 5000))
    step(4000, event(silent, 1010))
    step(5000)
    assert fired == []
    handlers = Handlers(app, tuple(app.stores))  # another worker's; it has seen no event
    handlers.resume(table, tasks)
    step(6000)
    step(10_999)
    assert fired == []
    step(11_000)
    assert fired == [(silent, 1110)]
    assert [step(12_000), step(20_000)] == [0, 0], "what is idle writes nothing"
    step(20_500, event(silent, 5050), event(busy, 9000))
    step(21_000, event(silent, 5060), whole=False)
    fired.clear()
    step(27_000)
    assert fired == [], "more of its commit may come"
    step(27_001, event(busy, 9001))
    step(27_002)
    assert fired == [(silent, 5160)]


def test_stores_are_for_keys_of_their_task_and_for_handlers_at_work(tmp_path: Path) -> None:
    app = Processor("t/p", tasks=TASKS)
    source, store = app.input("t/in"), app.store("s", value=json)
    local, out = app.store("local", value=json, local=True), app.output("t/out")
    asked: list[object] = []
    other = next(key for key in KEYS if task_of(key) != task_of(b"k0"))

    @app.on(source)
    def handle(each: anabranch.Event) -> None:
        if each.value == b"bad":
            store[other] = 1
        names: list[bytes | str] = ["k0", b"k0-b", b"k0-a", b"k1"]
        for number, key in enumerate(names):
            local[key] = number
        del local["k1"]
        store["k0"] = store.get("k0", 0) + 1
        asked.append([store["k0"], [*local.items()], [*local.items(prefix="k0-")], other in local])
        asked.append([*local.items("k0-a", "k0-b")])

    handlers, table = Handlers(app, tuple(app.stores)), Table(tmp_path)
    for number in (1, 2):
        committed(handlers, table, commit_of(1, event(b"k0", 1)))
        rows = [(b"k0", 0), (b"k0-a", 2), (b"k0-b", 1)]
        assert asked[-2:] == [[number, rows, rows[1:], False], rows[1:2]]
    batch = WorkBatch(table, TASKS)
    with pytest.raises(HandlerFailed, match=r"belongs to task \d.*local=True"):
        handlers.handle(batch, [commit_of(1, event(b"k0", 1, b"bad"))])
    with pytest.raises(IllegalState, match="for handlers"):
        out.write(b"x")
    with pytest.raises(InvalidArgument, match="a name of its own"):
        app.store("s")


def failures() -> Failures:
    return Failures(Processor("t/p", retries=0), Numbers(TABLE), threading.Event())


class CountingTable(Table):
    """Counts rows that are looked at."""

    looked = 0

    def scan(self, task: int, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        for pair in super().scan(task, low, high):
            self.looked += 1
            yield pair


def test_due_timers_are_read_once_among_timers_of_another_program(tmp_path: Path) -> None:
    table, fired = CountingTable(tmp_path), list[int]()
    live, gone = prefix_of(10), prefix_of(11)
    dues = [*((due, gone) for due in range(300)), *((due, live) for due in range(500, 800))]
    for due, store in [*dues, (2000, live), (3000, gone), (4000, live)]:
        row = timers._DUE + timers._time(due) + store + b"key"
        table.write([(0, [(row, b"")])], {}, logged=False)
    timer = timers.Timer("t", lambda _, due: fired.append(due), wall=False)
    timer.number(10)
    time = timers.TimeOfTasks([timer], failures(), None, lambda batch: batch.size >= 2000)
    looked = list[int]()
    for now in (1000, 2000, 4000):
        table.looked = 0
        batch = WorkBatch(table, 1)
        time.move(begin_context(batch), "t", now, {0: now}, whole=True)
        while batch.is_full(2000):
            table.write([(0, batch.rows[0].items())], {})
            batch = WorkBatch(table, 1)
            time.fire_wall(begin_context(batch), 0, 0)
        table.write([(0, batch.rows[0].items())], {})
        looked.append(table.looked)
    assert fired == [*range(500, 800), 2000, 4000]
    assert looked[0] < 700
    assert max(looked[1:]) < 10


def test_timers_that_fill_commits_do_not_wait_for_input(tmp_path: Path) -> None:
    app, reads = Processor("t/p", tasks=1, cut_bytes=500), list[int]()
    out = app.output("t/out")
    app.on(app.input("t/in"))(print)

    @app.timer("end", wall=True)
    def end(key: bytes, due: int) -> None:
        out.write(b"x" * 100, key=key)

    table, handlers = Table(tmp_path), Handlers(app, ("end",))
    prefix = prefix_of(FIRST_STORE)
    rows = [(timers._WALL + timers._time(due) + prefix + b"k", b"") for due in range(12)]
    table.write([(0, rows)], {})
    handlers.resume(table, [0])

    def read() -> list[Piece]:
        reads.append(len(fired))
        return []

    fired = list[Any]()
    while not reads:
        batch = WorkBatch(table, 1)
        handlers.step(batch, [0], lambda: 1.0, read)
        handlers.close_batch(batch)
        table.write(((task, rows.items()) for task, rows in batch.rows.items()), {})
        fired += batch.outputs.get("t/out", ())
    assert reads == [12]
    assert len(fired) == 12


def test_a_folder_can_be_opened_again_after_a_timer_s_handler_raised(tmp_path: Path) -> None:
    def fail(_: bytes, due: int) -> None:
        raise ValueError(due)

    table = Table(tmp_path)
    table.write([(0, [(timers._DUE + timers._time(1) + prefix_of(10), b"")])], {})
    timer = timers.Timer("t", fail, wall=False)
    timer.number(10)
    time = timers.TimeOfTasks([timer], failures(), None, lambda batch: batch.size >= 2000)
    at = begin_context(WorkBatch(table, 1))
    with pytest.raises(HandlerFailed, match="ValueError: 1") as kept:
        time.move(at, "t", 2, {0: 2}, whole=True)
    table.close()
    del table, at
    begin_context(WorkBatch(Table(tmp_path), 1))
    assert kept.tb is not None


def test_a_window_that_is_kept_is_of_the_event_at_work(tmp_path: Path) -> None:
    """Setting it between events, or once closed, is refused; in a later event it changes that event's batch."""
    app = Processor("t/p", tasks=TASKS)
    source, kept, seen = app.input("t/in"), list[timers.Window](), list[object]()
    hours = app.windows("hours", 1, value=json)

    @app.on(source)
    def handle(each: anabranch.Event) -> None:
        kept.extend(() if kept else hours.of(each))
        try:
            kept[0].value = (kept[0].value or 0) + 1
        except IllegalState as error:
            seen.append(str(error))

    @hours.on_close
    def closed(window: timers.Window) -> None:
        seen.append(window.value)
        with pytest.raises(IllegalState, match="is closed"):
            window.value = 7

    table = Table(tmp_path)
    handlers = Handlers(app, tuple(app.stores))

    def batch(timestamp: int) -> WorkBatch:
        return committed(handlers, table, commit_of(timestamp, event(b"k0", timestamp)))

    first = batch(10)
    before = str(first.rows)
    for access in (lambda: kept[0].value, lambda: setattr(kept[0], "value", 9)):
        with pytest.raises(IllegalState, match="for handlers"):
            access()
    batch(20)
    assert str(first.rows) == before, "what is being committed"
    batch(5000)
    assert seen == [3], "the event that closes it is handled before"
    batch(6000)
    assert seen[1:] == ["window 0 of hours is closed: a value that is set now would be lost"]
    kept.clear()
    several = [commit_of(at, event(b"k1", at)) for at in (10_000, 20_000, 21_000)]
    committed(handlers, table, *several)
    assert seen[2:] == [2, "window 10000 of hours is closed: a value that is set now would be lost"]


def test_a_cut_that_is_not_open_takes_nothing(tmp_path: Path) -> None:
    """A caller may have kept it, but the commit may be iterating over it."""
    batch = WorkBatch(Table(tmp_path), TASKS)
    at, batch.open = begin_context(batch), False
    writes: list[Callable[[], object]] = [
        lambda: at.put(0, b"row", b""),
        lambda: at.put_due(0, b"kind", 1, b"place", b""),
        lambda: at.write("t/out", (b"", None, None, None)),
        lambda: at.write_batch("t/out", Any),
    ]
    for write in writes:
        with pytest.raises(IllegalState, match="open"):
            write()
    assert [*batch.rows, *batch.outputs] == []


def changing(app: Processor, rng: random.Random, *, side_by_side: bool) -> Callable[[Any], Any]:
    """A handler that changes all kinds of state; with the value 'bad' it fails after some of the changes."""
    out, more = app.output("t/out"), app.output("t/more")
    store, late = app.store("s", value=json), app.output("t/late")
    windows = app.windows("w", 1, every=0.5, value=json, late=late)
    timer = app.timer("t")(lambda key, due: out.write(b"%d" % due, key=key))

    def add(each: Any) -> None:
        for window in windows.of(each):
            window.value = (window.value or 0) + 1

    def acts(each: Any) -> list[Callable[[], object]]:
        number = int(each.timestamp)
        return [
            lambda: store.__setitem__(each.key, number),
            lambda: store.__setitem__(each.key, store.get(each.key, 0) + 1),
            lambda: store.__delitem__(each.key),
            lambda: timer.set(each.key, number + 300),
            lambda: timer.cancel(each.key),
            lambda: out.write(b"%d" % number, key=each.key, headers={"a": b"b"}),
            lambda: more.write(None, key=each.key),
            lambda: add(each),
        ]

    def chosen(each: Any) -> list[Callable[[], object]]:
        return random.Random(f"{each.offset}").choices(acts(each), k=6)

    def handle(each: Any) -> None:
        for act in chosen(each):
            act()
            if each.value == b"bad" and rng.random() < 0.3:
                break
        if each.value == b"bad":
            raise ValueError

    async def handle_later(each: Any) -> None:
        for act in chosen(each):
            act()
            if each.value == b"bad" and rng.random() < 0.3:
                break
            await asyncio.sleep(rng.choice((0, 0, 0.0001)))
        if each.value == b"bad":
            raise asyncio.CancelledError

    return handle_later if side_by_side else handle


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_what_fails_leaves_no_trace_in_a_cut(
    tmp_path: Path, seed: int, side_by_side: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is as if the bad events had not come, but for their dead letters and their event times."""
    monkeypatch.setattr(failures_module, "_FIRST_PAUSE_S", 0.0)
    rng = random.Random(seed)
    offsets = iter(range(10_000))

    def marked(piece: Piece) -> Piece:
        events = [
            each._replace(offset=next(offsets), value=rng.choice((b"bad", b"good")))
            for each in piece.events
        ]
        return piece._replace(events=events)

    with_bad = [marked(piece) for piece in commits(rng, 40 if seed > 2 else 1)]
    found, letters = list[Any](), list[int]()
    for number, keep in enumerate((True, False)):
        app = Processor("t/p", tasks=TASKS, retries=1, dead_letter="t/dead")
        app.on(app.input("t/in"))(changing(app, rng, side_by_side=side_by_side))
        handlers = Handlers(app, tuple(app.stores))
        batch = WorkBatch(Table(tmp_path / str(number)), TASKS)
        for piece in with_bad:
            pairs = zip(piece.events, piece.tasks, strict=True)
            kept = [(each, task) for each, task in pairs if keep or each.value == b"good"]
            events, tasks = [each for each, _ in kept], [task for _, task in kept]
            with handled(piece):
                handlers.handle(batch, [piece._replace(events=events, tasks=tasks)])
        handlers.close()
        dead = batch.outputs.pop("t/dead", [])
        letters.append(len(dead))
        assert batch.counts.pop(("processor_dead_letters",), 0) == len(dead)
        size = batch.size - sum(len(v or b"") + len(k or b"") + 48 for v, k, *_ in dead)
        outputs = {stream: sorted(map(str, some)) for stream, some in batch.outputs.items()}
        found.append([batch.rows, outputs, size, +batch.counts])
    assert letters == [sum(e.value == b"bad" for piece in with_bad for e in piece.events), 0]
    assert found[0] == found[1]


@contextmanager
def handled(whole: Piece) -> Iterator[None]:
    """Event time moves by all events of the piece, good or bad."""
    move = handlers_module._move_time
    moved = lambda at, time, _, **how: move(at, time, [whole], **how)  # noqa: E731
    with patch.object(handlers_module, "_move_time", moved):
        yield


def test_sizes_of_windows_are_to_the_millisecond() -> None:
    """Sizes are rounded as decimals, not truncated as binary fractions."""
    app = Processor("t/p")
    for ms in range(1, 100_000):
        windows = Windows(str(ms), RAW, ms / 1000, None, ms / 1000, None)
        assert (windows.size, windows.kind) == (ms, f"windows of {ms} ms every {ms} ms, of bytes")
        assert windows._grace == ms
    assert app.windows("hopping", 64.2, every=32.1, grace=0.0004)._every == 32_100


def test_a_time_of_0_is_refused_as_in_a_transaction(tmp_path: Path) -> None:
    app = Processor("t/p", tasks=TASKS)
    out = app.output("t/out")
    app.on(app.input("t/in"))(lambda each: out.write(b"", timestamp=int(each.value)))
    handlers, batch = Handlers(app, ()), WorkBatch(Table(tmp_path), TASKS)
    handlers.handle(batch, [commit_of(1, event(b"k0", 5, b"7"))])
    assert batch.outputs == {"t/out": [(b"", None, None, 7)]}
    app.retries = 0
    with pytest.raises(HandlerFailed, match="InvalidArgument: timestamp 0"):
        handlers.handle(batch, [commit_of(2, event(b"k0", 5, b"0"))])


def test_a_kept_window_knows_whether_its_row_is_still_there() -> None:
    app = Processor("a/p", tasks=1, retries=1)
    seen, kept, closed, tries = app.input("a/s"), list[Any](), list[Any](), list[int]()
    minutes = app.windows("minutes", 60, value=json)
    minutes.on_close(lambda window: closed.append((window.start, window.value)))

    @app.on(seen)
    def keep(event: anabranch.Event) -> None:
        tries.append(event.timestamp)
        kept[:] = kept or list(minutes.of(event))
        kept[0].value = (kept[0].value or 0) + 1
        if len(tries) == 1:
            raise OSError("taken back, so the window has no row")

    with anabranch.testing.Driver(app, now=0) as driver:
        driver.send("a/s", b"", b"k", 1_000)
        driver.send("a/s", b"", b"k", 90_000)
        assert closed == [(0, 2)]
        with pytest.raises(HandlerFailed, match="is closed"):
            driver.send("a/s", b"", b"k", 91_000)
