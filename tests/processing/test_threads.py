"""A worker with several threads: a slow or conflicting event delays its own task alone.

Most tests are in one thread: a handler that takes long lets the other threads of its worker take steps meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from anabranch.batches.records import Record
from anabranch.errors import InvalidArgument, NotReady
from anabranch.ports import TopicPartition, TopicSpec
from anabranch.processing.app import Processor
from anabranch.processing.failures import HandlerFailed
from anabranch.processing.tables import TaskTables
from anabranch.processing.threads import CALM_S, LEAST_CALM_S, SLOW_TIMES, ThreadedWorker
from anabranch.processing.worker import AllTasks
from anabranch.protocol.partitioner import task_of
from tests.processing.test_tables import Shop
from tests.processing.test_worker import Place

TASKS = 4
# A key of each task.
KEYS = [
    next(key for n in range(100) if task_of(key := b"%d" % n, TASKS) == t) for t in range(TASKS)
]
SLOW, OTHERS = KEYS[0], KEYS[1:]


class Team:
    """A worker whose threads take steps as the test says."""

    def __init__(self, place: Place, app: Processor, folder: str = "w") -> None:
        self.place = place
        self.worker = ThreadedWorker(
            app, place.client, place.folder / folder, tasks=AllTasks(range(TASKS)), threads=False
        )

    def steps(self, count: int = 12, *, but: int = -1) -> None:
        """Let all threads but one take steps."""
        for _ in range(count):
            self.worker.watch()
            for number, part in enumerate(self.worker.parts):
                if number != but:
                    self._step(number, part.worker)

    def _step(self, number: int, worker: Any) -> None:
        try:
            worker.step()
        except Exception as error:
            if type(error).__name__ != "TaskMoved":
                raise
            worker._drop()

    def meanwhile(self, but: int = 0) -> None:
        """While a handler of one thread is at work: what the others do."""
        copy_context().run(self.steps, but=but)

    def parts(self) -> list[set[int]]:
        return [set(part.claimed) for part in self.worker.parts]

    def close(self) -> None:
        self.worker.close()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def counting(seen: Callable[[Any], None], threads: int = 2, **more: Any) -> Processor:
    """Counts events by key, in a store; ``seen`` is called after the count."""
    app = Processor("nyc/p", tasks=TASKS, commit_interval=0, threads=threads, **more)
    store, out = app.store("n", value=json), app.output("nyc/out")

    @app.on(app.input("nyc/in"))
    def count(event: Any) -> None:
        store[event.key] = store.get(event.key, 0) + 1
        out.write(b"%d" % store[event.key], key=event.key)
        seen(event)

    return app


def counts(place: Place) -> dict[bytes, list[int]]:
    """The counts of each key, in the order in which they were written."""
    found: dict[bytes, list[int]] = {}
    for event in place.events("nyc/out"):
        found.setdefault(event.key or b"", []).append(int(event.value or b""))
    return found


def test_other_tasks_commit_while_an_event_is_at_work(place: Place) -> None:
    """Also events that the slow thread had handled before, in the batch that it gives up."""
    calls = Counter[bytes]()
    during: list[dict[bytes, list[int]]] = []

    def seen(event: Any) -> None:
        calls[event.key] += 1
        if event.key == SLOW and not during:
            place.write(*OTHERS, SLOW)
            team.meanwhile()
            during.append(counts(place))
            assert team.parts() == [{0}, {1, 2, 3}]

    team = Team(place, counting(seen))
    with closing(team):
        place.write(*OTHERS, SLOW, *OTHERS)
        team.steps()
    assert during == [{key: [1, 2, 3] for key in OTHERS}]
    assert counts(place) == {SLOW: [1, 2], **{key: [1, 2, 3] for key in OTHERS}}
    assert calls[SLOW] == 3  # the first call had no effect


def test_tasks_come_back_when_no_event_is_slow(place: Place) -> None:
    slow = [True]

    def seen(event: Any) -> None:
        if event.key == SLOW and slow:
            slow.clear()
            team.meanwhile()

    team = Team(place, counting(seen))
    with closing(team):
        place.write(*KEYS)
        team.steps()
        assert team.parts() == [{0}, {1, 2, 3}]
        place.clock.sleep(CALM_S / 2)
        place.write(*KEYS)
        team.steps()
        assert team.parts() == [{0}, {1, 2, 3}]
        place.clock.sleep(CALM_S)
        place.write(*KEYS)
        team.steps()
        assert team.parts() == [set(), set(range(TASKS))]
        place.write(*KEYS)
        team.steps()
    assert counts(place) == {key: [1, 2, 3, 4] for key in KEYS}


def test_a_quick_event_moves_nothing(place: Place) -> None:
    """However many of them a thread handles between two looks."""

    def seen(_: Any) -> None:
        for _ in range(SLOW_TIMES - 1):
            team.worker.watch()

    team = Team(place, counting(seen))
    with closing(team):
        place.write(*KEYS, *KEYS)
        team.steps()
        assert team.parts() == [set(range(TASKS)), set()]
    assert counts(place) == {key: [1, 2] for key in KEYS}


def test_tasks_wait_while_no_thread_is_free(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.processing.threads.LEAST_CALM_S", CALM_S)
    during: list[list[set[int]]] = []

    def seen(event: Any) -> None:
        at = KEYS.index(event.key)
        if at < 2 and len(during) == at:
            during.append([])
            team.meanwhile(but=at)
            during[at] = team.parts()

    team = Team(place, counting(seen))
    with closing(team):
        place.write(KEYS[0])
        team.steps()
        place.write(*KEYS[1:])
        team.steps()
    assert during == [[{0}, {1, 2, 3}], [{0}, {1, 2, 3}]]
    assert counts(place) == {key: [1] for key in KEYS}


def test_a_slow_task_of_a_thread_that_keeps_several_gets_one_of_its_own(place: Place) -> None:
    """Two events are slow at the same time: ``async`` ones."""
    app = Processor("nyc/p", tasks=TASKS, commit_interval=0, threads=2)
    out = app.output("nyc/out")
    looked: list[list[set[int]]] = []

    @app.on(app.input("nyc/in"))
    async def copy(event: Any) -> None:
        out.write(b"1", key=event.key)
        if event.key == KEYS[1] and not looked:
            await asyncio.sleep(0)  # the other one begins, too
            _outside_of_loop(team.meanwhile)
            looked.append(team.parts())
        while event.key == KEYS[0] and not looked:
            await asyncio.sleep(0)

    team = Team(place, app)
    with closing(team):
        place.write(*KEYS)
        team.steps()
    assert looked == [[{0, 1}, {2, 3}]]
    assert counts(place) == {key: [1] for key in KEYS}


def _outside_of_loop(call: Callable[[], None]) -> None:
    """Call a function in a thread, as an event loop runs in this one. It waits."""
    thread = threading.Thread(target=copy_context().run, args=(call,))
    thread.start()
    thread.join()


@pytest.mark.parametrize("what", ["timer", "window"])
def test_a_slow_timer_or_window_delays_its_task_alone(place: Place, what: str) -> None:
    app = Processor("nyc/p", tasks=TASKS, commit_interval=0, threads=2)
    out, during = app.output("nyc/out"), list[list[bytes]]()
    windows = app.windows("w", 1, value=json)

    def fired(key: bytes) -> None:
        out.write(b"", key=b"fired " + key)
        if key == SLOW and not during:
            during.append([])
            place.write(*OTHERS, timestamp=5000)
            team.meanwhile()
            during[0] = place.written()

    @app.timer("t")
    def timer(key: bytes, _: int) -> None:
        fired(key)

    @windows.on_close
    def closed(window: Any) -> None:
        fired(window.key)

    @app.on(app.input("nyc/in"))
    def handle(event: Any) -> None:
        if event.timestamp == 1 and what == "timer":
            timer.set(event.key, at=1000)
        elif event.timestamp == 1:
            for window in windows.of(event):
                window.value = 1
        else:
            out.write(b"", key=event.key)

    team = Team(place, app)
    with closing(team):
        place.write(*KEYS)
        team.steps()
        place.write(*KEYS, timestamp=5000)
        team.steps()
    assert sorted(during[0]) == sorted([*OTHERS, *OTHERS, *(b"fired " + key for key in OTHERS)])
    wanted = [*OTHERS, *KEYS, *(b"fired " + key for key in KEYS)]
    assert sorted(place.written()) == sorted(wanted)


def test_a_commit_under_way_ends_before_its_tasks_move(place: Place) -> None:
    """Its rows would else be written to the folder after those of later commits."""
    under_way = [True]

    def seen(event: Any) -> None:
        if event.key == SLOW and event.value == b"slow" and under_way[0]:
            part = team.worker.parts[0]
            kind: Any = type(part.worker)
            kind.is_committing = property(lambda _: under_way[0])
            team.meanwhile()
            assert team.parts()[0] == set(range(TASKS))
            assert team.parts()[1] == set()
            under_way[0] = False
            team.meanwhile()
            assert team.parts() == [{0}, {1, 2, 3}]

    team = Team(place, counting(seen))
    with closing(team), _kept(team):
        place.write(*KEYS)
        team.steps()
        place.write(SLOW, *OTHERS, value=b"slow")
        team.steps()
    assert counts(place) == {key: [1, 2] for key in KEYS}


@contextmanager
def _kept(team: Team) -> Iterator[None]:
    kind: Any = type(team.worker.parts[0].worker)
    before = kind.is_committing
    try:
        yield
    finally:
        kind.is_committing = before


def test_retries_of_a_batch_that_was_given_up_end(place: Place) -> None:
    """They are made again in the thread that keeps the task, and not before that."""
    calls: list[bytes] = []

    def seen(event: Any) -> None:
        if event.key == SLOW:
            calls.append(event.key)
            if len(calls) == 1:
                team.meanwhile()
            raise ValueError(len(calls))

    place.client.create_stream("nyc/dead")
    team = Team(place, counting(seen, dead_letter="nyc/dead", retries=2))
    with closing(team):
        place.write(*KEYS)
        team.steps()
    assert len(calls) == 1 + 3
    assert counts(place) == {key: [1] for key in OTHERS}
    assert [e.key for e in place.events("nyc/dead")] == [SLOW]


def test_a_row_in_conflict_delays_its_task_alone(tmp_path: Path) -> None:
    """Others change it each time that its event is handled. The third time, its task gets a thread."""
    shop = Shop(tmp_path)
    app, rows = shop.program(tasks=TASKS, threads=2)
    out, tries = app.output("nyc/out"), Counter[bytes]()
    written: list[list[bytes]] = []

    @app.on(app.input("nyc/in"))
    def count(event: Any) -> None:
        tries[event.key] += 1
        now = rows.get(event.key, 0)
        if event.key == SLOW and tries[SLOW] <= 6:
            shop.put(**{SLOW.decode(): 100 * tries[SLOW]})
            written.append(shop.written())
        rows[event.key] = now + 1
        out.write(b"%d" % (now + 1), key=event.key)

    team = Team(shop, app)
    with closing(team):
        shop.write(*KEYS)
        team.steps(40)
        assert team.parts() == [{0}, {1, 2, 3}]
    assert tries[SLOW] == 7
    assert written[2] == []
    assert sorted(written[4]) == sorted(OTHERS)  # before the conflicts end
    assert shop.rows() == {key.decode(): 1 for key in OTHERS} | {SLOW.decode(): 601}


def test_a_damaged_folder_is_emptied_once_no_thread_uses_it(place: Place) -> None:
    from anabranch.tables.rocks import TableDamaged

    def seen(event: Any) -> None:
        if event.key == SLOW and event.value == b"slow":
            team.meanwhile()

    team = Team(place, counting(seen))
    with closing(team):
        place.write(SLOW, value=b"slow")
        place.write(*KEYS)
        team.steps()
        assert team.parts() == [{0}, {1, 2, 3}]
        part = team.worker.parts[1]
        part.worker._drop()
        emptying = threading.Thread(
            target=part.worker.on_damage, args=(TableDamaged(f"{place.folder / 'w'} is damaged"),)
        )
        emptying.start()
        until = time.monotonic() + 10
        while emptying.is_alive():
            assert time.monotonic() < until
            team.steps(1, but=1)
            time.sleep(0.01)
        place.write(*KEYS)
        team.steps()
        assert team.worker.metrics.total("processor_folders_emptied") == 1
    assert counts(place) == {SLOW: [1, 2, 3], **{key: [1, 2] for key in OTHERS}}


def test_threads_are_counted(place: Place) -> None:
    with pytest.raises(InvalidArgument, match="threads=0"):
        Processor("nyc/p", threads=0)
    team = Team(place, counting(lambda _: None, threads=3))
    with closing(team):
        team.steps()
        assert team.worker.tasks == set(range(TASKS))
        assert team.worker.metrics.total("processor_tasks") == TASKS
        assert team.worker.trouble is None
        assert len(team.worker.parts) == 2  # one is kept free


# -- with threads ---------------------------------------------------------------------------------------


@contextmanager
def running(worker: ThreadedWorker) -> Iterator[list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            worker.run()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield errors
    finally:
        worker.stop.set()
        thread.join()
        worker.close()


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_with_threads_a_handler_that_hangs_holds_its_task_alone(place: Place) -> None:
    free = threading.Event()

    def seen(event: Any) -> None:
        if event.key == SLOW:
            assert free.wait(30)

    app = counting(seen)
    place.write(*KEYS)
    with running(
        ThreadedWorker(app, place.client, place.folder / "w", tasks=AllTasks(range(TASKS)))
    ):
        until(lambda: set(counts(place)) == set(OTHERS))
        place.write(*OTHERS)
        until(lambda: all(counts(place).get(key) == [1, 2] for key in OTHERS))
        assert SLOW not in counts(place)
        free.set()
        until(lambda: SLOW in counts(place))
    assert counts(place) == {SLOW: [1], **{key: [1, 2] for key in OTHERS}}


def test_an_error_in_one_thread_ends_the_worker(place: Place) -> None:
    held = threading.Event()

    def seen(event: Any) -> None:
        if event.key == SLOW and not held.is_set():
            held.wait(5)
        elif event.value == b"bad":
            raise ValueError("planted")

    app = counting(seen, retries=0)
    place.write(*KEYS)
    worker = ThreadedWorker(app, place.client, place.folder / "w", tasks=AllTasks(range(TASKS)))
    with running(worker) as errors:
        until(lambda: set(counts(place)) == set(OTHERS))
        place.write(OTHERS[0], value=b"bad")
        until(worker.stop.is_set)
        held.set()
        until(lambda: bool(errors))
    assert isinstance(errors[0], HandlerFailed)


def test_an_error_of_the_group_is_raised_in_the_worker(place: Place) -> None:
    class Failing(AllTasks):
        failed = False

        def serve(self, wait: float) -> frozenset[int]:
            if not self.failed:
                self.failed = True
                raise NotReady("planted")
            return super().serve(wait)

    app = counting(lambda _: None)
    place.write(*KEYS)
    worker = ThreadedWorker(app, place.client, place.folder / "w", tasks=Failing(range(TASKS)))
    with running(worker):
        until(lambda: ("NotReady",) in worker.metrics.values["processor_taken_again"])
        until(lambda: len(counts(place)) == TASKS)
    assert counts(place) == {key: [1] for key in KEYS}


# -- found by review ------------------------------------------------------------------------------------


def test_new_tasks_do_not_wait_for_an_event_of_the_only_task(place: Place) -> None:
    free, group = threading.Event(), AllTasks([0])

    def seen(event: Any) -> None:
        if event.key == SLOW:
            assert free.wait(30)

    worker = ThreadedWorker(counting(seen), place.client, place.folder / "w", tasks=group)
    place.write(*KEYS)
    with running(worker):
        until(lambda: worker.parts[0].slow_at > 0)
        group.wanted, group.generation = frozenset(range(TASKS)), 2
        try:
            until(lambda: set(counts(place)) == set(OTHERS), 10)
        finally:
            free.set()
        until(lambda: SLOW in counts(place))
    assert counts(place) == {key: [1] for key in KEYS}


def test_concurrent_events_of_a_task_are_in_one_thread(place: Place) -> None:
    """When its thread gives up a batch, no call of the other tasks begins there, and those at work end first."""
    app = Processor("nyc/p", tasks=TASKS, threads=2, commit_interval=0)
    out, calls = app.output("nyc/out"), list[tuple[str, str]]()

    @app.on(app.input("nyc/in"))
    async def copy(event: Any) -> None:
        name = threading.current_thread().name
        if event.key != SLOW:
            calls.append((name, "begin"))
        await asyncio.sleep(1 if event.key == SLOW else 0.02)
        if event.key != SLOW:
            calls.append((name, "end"))
        out.write(b"1", key=event.key)

    place.write(SLOW, *[OTHERS[0]] * 20)
    worker = ThreadedWorker(app, place.client, place.folder / "w", tasks=AllTasks(range(TASKS)))
    with running(worker):
        until(
            lambda: (
                {key: len(some) for key, some in counts(place).items()} == {SLOW: 1, OTHERS[0]: 20}
            )
        )
    assert len({name for name, _ in calls}) == 2
    for begin, end in zip(calls[::2], calls[1::2], strict=True):
        assert (begin[0], begin[1], end[1]) == (end[0], "begin", "end")


def test_a_thread_at_work_is_not_free(place: Place) -> None:
    """The group takes the slow task away, while the commit before is under way."""
    looked, under_way = list[tuple[bool, set[int]]](), [False]

    def seen(event: Any) -> None:
        if event.value == b"slow" and event.key == SLOW and not looked:
            part = team.worker.parts[0]
            kind, member = type(part.worker), team.worker._member
            kind.is_committing = property(lambda _: under_way[0])  # type: ignore[assignment, method-assign]
            under_way[0] = True
            team.meanwhile()
            member.wanted, member.generation = frozenset({1, 2, 3}), 2
            team.meanwhile()
            under_way[0] = False
            team.meanwhile()
            looked.append((part.is_free, set(part.claimed)))

    team = Team(place, counting(seen))
    with closing(team), _kept(team):
        place.write(*KEYS)
        team.steps()
        place.write(SLOW, *OTHERS, value=b"slow")
        team.steps()
    assert looked == [(False, {0})]


def test_the_clock_of_a_thread_that_hangs_is_not_that_of_others(place: Place) -> None:
    """Of plain topics, ``ahead`` counts from the worker's clock."""
    log = place.cluster.log("kafka")
    log.create_topics([TopicSpec("orders", TASKS, {}, 1)])
    app = Processor("nyc/p", tasks=TASKS, commit_interval=0, threads=2, ahead=100)
    windows, seen, calls = app.windows("w", 1, value=json), Counter[bytes](), list[bytes]()

    def produce(task: int, key: bytes) -> None:
        now = int(place.clock.wall() * 1000)
        log.produce(TopicPartition("orders", task), [Record(0, now, key, b"1")])

    @app.on(app.topic("orders"))
    def handle(event: Any) -> None:
        if event.key == b"slow":
            calls.append(event.key)
            team.meanwhile()
            if len(calls) == 2:
                place.clock.sleep(600)
                for task in range(1, TASKS):
                    produce(task, b"%d" % task)
                team.meanwhile()
        seen[event.key] += len(list(windows.of(event)))

    team = Team(place, app)
    with closing(team):
        produce(0, b"slow")
        team.steps()
    assert (seen[b"1"], seen[b"2"], seen[b"3"]) == (1, 1, 1)


def test_tables_are_opened_by_one_thread(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    app, rows = shop.program(tasks=TASKS, threads=2)
    app.on(app.input("nyc/in"))(lambda event: rows.get(event.key))
    team = Team(shop, app)
    with closing(team):
        tables, found = team.worker._shared.tables, list[Any]()
        tables.close()
        opened: Any = tables._opened

        def look() -> None:
            tables.is_loaded(1)
            found.append(tables.replica)

        other = threading.Thread(target=look)

        def slowly(*args: Any) -> Any:
            other.start()
            other.join(0.3)
            return opened(*args)

        tables._opened = slowly  # type: ignore[assignment, method-assign]
        look()
        other.join()
    assert None not in found


def test_a_given_up_task_is_released_at_the_end(place: Place) -> None:
    free, calls = threading.Event(), list[bytes]()

    def seen(event: Any) -> None:
        if event.key == SLOW:
            calls.append(SLOW)
            assert free.wait(30)

    place.write(*KEYS)
    worker = ThreadedWorker(
        counting(seen), place.client, place.folder / "w", tasks=AllTasks(range(TASKS))
    )
    with running(worker):
        until(lambda: set(counts(place)) == set(OTHERS))
        worker.stop.set()
        free.set()
    assert [row.task for row in place.client.processor("nyc/p").tasks if row.holder] == []


def test_a_worker_that_ends_gives_up_all_tasks_but_that_of_a_slow_event(place: Place) -> None:
    """Before the event ends. Here it had other tasks' events in its batch, so it is handled again."""
    free, left = threading.Event(), threading.Event()

    class Group(AllTasks):
        def close(self) -> None:
            left.set()

    def seen(event: Any) -> None:
        if event.key == SLOW:
            assert free.wait(30)

    def held() -> list[int]:
        return [row.task for row in place.client.processor("nyc/p").tasks if row.holder]

    place.write(*KEYS)
    worker = ThreadedWorker(
        counting(seen), place.client, place.folder / "w", tasks=Group(range(TASKS))
    )
    with running(worker):
        until(lambda: set(counts(place)) == set(OTHERS))
        worker.stop.set()
        try:
            until(lambda: held() == [0])
            assert left.wait(10)
            with closing(place.worker(counting(lambda _: None), "other", 1, 2, 3)) as other:
                place.write(*OTHERS)
                for _ in range(5):
                    other.step()
            assert counts(place) == {key: [1, 2] for key in OTHERS}
        finally:
            free.set()
    assert held() == []
    place.run(counting(lambda _: None))
    assert counts(place) == {SLOW: [1], **{key: [1, 2] for key in OTHERS}}


def test_metrics_count_the_tasks_of_all_threads_once(place: Place) -> None:
    seen_counts = list[float]()

    def seen(event: Any) -> None:
        if event.key == SLOW and not seen_counts:
            team.meanwhile()
            seen_counts.append(team.worker.metrics.total("processor_tasks"))

    team = Team(place, counting(seen))
    with closing(team):
        place.write(*KEYS)
        team.steps()
        assert team.parts() == [{0}, {1, 2, 3}]
        seen_counts.append(team.worker.metrics.total("processor_tasks"))
    assert [*seen_counts, team.worker.metrics.total("processor_tasks")] == [TASKS, TASKS, 0]


def test_the_wait_for_a_snapshot_is_no_slow_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any event of the batch would wait as long. Otherwise each such wait would take a thread for a minute."""
    shop, begun, begin = Shop(tmp_path), list[list[set[int]]](), TaskTables.begin
    app, rows = shop.program(tasks=TASKS, threads=2)

    def slowly(self: TaskTables, least: int) -> Any:
        if not begun:
            begun.append([])
            team.meanwhile()
            begun.append(team.parts())
        return begin(self, least)

    @app.on(app.input("nyc/in"))
    def count(event: Any) -> None:
        rows[event.key] = rows.get(event.key, 0) + 1

    monkeypatch.setattr(TaskTables, "begin", slowly)
    team = Team(shop, app)
    with closing(team):
        shop.write(*KEYS)
        team.steps()
    assert begun == [[], [set(range(TASKS)), set()]]
    assert shop.rows() == {key.decode(): 1 for key in KEYS}


def test_without_a_free_thread_the_calmest_task_comes_back(place: Place) -> None:
    during: list[list[set[int]]] = []

    def seen(event: Any) -> None:
        at = KEYS.index(event.key)
        if at < 2 and len(during) == at:
            if at:
                place.clock.sleep(LEAST_CALM_S + 1)
            during.append([])
            team.meanwhile(but=at)
            during[at] = team.parts()

    team = Team(place, counting(seen))
    with closing(team):
        place.write(KEYS[0])
        team.steps()
        place.write(*KEYS[1:])
        team.steps()
    assert during == [[{0}, {1, 2, 3}], [{0, 2, 3}, {1}]]
    assert counts(place) == {key: [1] for key in KEYS}
