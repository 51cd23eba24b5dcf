"""Sessions, sliding windows, joins, aggregates and expiring rows: each equals a brute-force fold of its input.

The folds keep all events and compute everything again for each commit. The programs are run with batches of any
size, with input commits in parts, with restarts, and with batches that are full after any timer.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

import anabranch
from anabranch import aggregates as agg
from anabranch.errors import InvalidArgument
from anabranch.processing.app import Processor
from anabranch.processing.batch import WorkBatch
from anabranch.processing.failures import HandlerFailed
from anabranch.processing.handlers import Handlers
from anabranch.processing.stores import after
from anabranch.protocol.partitioner import task_of
from anabranch.reading.slices import Piece
from anabranch.testing import Driver, InputEvent
from anabranch.testing.driver import MemoryRows
from tests.pages import DOCS, run_page
from tests.processing import planted
from tests.processing.words import (
    LEFT,
    RIGHT,
    TASKS,
    WORDS,
    Build,
    Commits,
    Fold,
    Given,
    Parts,
    SessionFold,
    join,
    join_fold,
    program,
    random_commits,
    sessions_by_hand,
)

SEEDS = range(3)
some_seeds = pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 6))]
)


class Runner:
    """Runs a program as a worker does, over a dict of rows. ``wrote``: stream, key, value and timestamp."""

    def __init__(self, app: Processor, rng: random.Random | None = None) -> None:
        self.app, self.rng = app, rng
        self.rows = MemoryRows(TASKS)
        self.wrote: list[tuple[str, bytes | None, Any, int | None]] = []
        self.handlers = self._handlers()

    def _handlers(self) -> Handlers:
        handlers = Handlers(self.app, tuple(self.app.stores), pauses=False)
        if self.rng is not None:
            handlers.batch_bytes = self.rng.choice([300, 2000, 1 << 20])
            handlers._most_events = self.rng.choice([1, 3, math.inf])
            handlers._splits = self.rng.random() < 0.5
        handlers.resume(self.rows, range(TASKS))
        return handlers

    def run(self, commits: Commits) -> None:
        """All commits; with a random generator in batches, parts and lives of any size."""
        pieces = [piece for n, some in enumerate(commits) for piece in self._pieces(n + 1, some)]
        while pieces:
            count = 1 if self.rng is None else self.rng.randint(1, 9)
            some, pieces = pieces[:count], pieces[count:]
            while some or self._is_due():
                some = self._batch(some)
            if self.rng is not None and self.rng.random() < 0.2:
                self.handlers = self._handlers()

    def _is_due(self) -> bool:
        before = len(self.wrote)
        self._batch([])
        return len(self.wrote) > before

    def _batch(self, pieces: list[Piece]) -> list[Piece]:
        batch = WorkBatch(self.rows, TASKS)
        self.handlers.fire_wall(batch, range(TASKS), 0)
        left = self.handlers.handle_part(batch, pieces)
        batch.open = False
        for task, rows in batch.rows.items():
            self.rows.by_task[task].change(rows)
        for stream, events in batch.outputs.items():
            for value, key, _, at in events:
                self.wrote.append((stream, key, json.loads(value or b"null"), at))
        return left

    def _pieces(self, number: int, commit: list[Given]) -> Iterator[Piece]:
        events = [
            anabranch.Event(g.stream, g.key, b"%d" % g.n, [], g.at, None, number, 5 << 32, 0, g.n)
            for g in commit
        ]
        places = [task_of(one.key, TASKS) for one in commit]
        cut = self.rng.randint(0, len(events)) if self.rng is not None else 0
        for some in (slice(0, cut), slice(cut, None)):
            for stream in (LEFT, RIGHT):
                mine = [n for n in range(len(events))[some] if events[n].stream == stream]
                if mine:
                    last = mine[-1] == len(events) - 1
                    yield Piece(
                        stream, number, [events[n] for n in mine], [places[n] for n in mine], last
                    )


def check(build: Build, fold: type[Fold], seed: int, *, closes: bool = True) -> list[Any]:
    """The same in batches of one commit, and in any batches, and as the fold says. Returns what was written."""
    commits, wanted = random_commits(seed), fold()
    wanted.run(commits)
    for rng in (None, random.Random(seed), random.Random(seed + 1000)):
        runner = Runner(program(build), rng)
        runner.run(commits)
        assert _by_stream(runner.wrote) == _by_stream(wanted.wrote)
        if not closes:
            continue
        left = [row for rows in runner.rows.by_task for row in rows.scan(b"\0\2", b"\xff\xff")]
        due = [row for rows in runner.rows.by_task for row in rows.scan(b"\0\1d", b"\0\1e")]
        assert len(left) <= 2 * TASKS, "rows of what is closed stay"
        assert len(due) <= 2 * TASKS, "timers of what is closed stay"
    return wanted.wrote


def _by_stream(wrote: Iterable[Any]) -> dict[str, list[Any]]:
    found = defaultdict(list)
    for stream, *rest in wrote:
        found[stream].append(rest)
    return found


# -- sessions -----------------------------------------------------------------------------------------


@some_seeds
@pytest.mark.parametrize("build", [WORDS["sessions"][0], sessions_by_hand])
def test_sessions_are_clusters_of_events(build: Build, seed: int) -> None:
    wrote = check(build, SessionFold, seed)
    assert any(stream == "t/late" for stream, *_ in wrote)
    assert any(stream == "t/out" and value[0] < value[1] for stream, _, value, _ in wrote)


# -- sliding windows ----------------------------------------------------------------------------------


@some_seeds
def test_sliding_windows_end_at_each_event(seed: int) -> None:
    assert any(stream == "t/late" for stream, *_ in check(*WORDS["sliding"], seed))


# -- joins of streams ---------------------------------------------------------------------------------


@some_seeds
@pytest.mark.parametrize("kind", ["inner", "left", "outer"])
def test_a_join_finds_each_pair_once(kind: str, seed: int) -> None:
    wrote = check(join(kind), join_fold(kind), seed)
    assert any(stream == "t/out" and None not in value for stream, _, value, _ in wrote)
    assert any(stream == "t/late" for stream, *_ in wrote)


# -- the latest values, as of event times ---------------------------------------------------------------


@some_seeds
def test_versions_are_the_values_as_of_an_event_time(seed: int) -> None:
    wrote = check(*WORDS["versions"], seed, closes=False)
    assert any(value[1] == "too early" for stream, _, value, _ in wrote if stream == "t/out")


def test_the_latest_value_of_each_key_is_joined_in_the_order_of_commits() -> None:
    app, left, right, out, _ = Parts.of(program())
    rows = app.latest("rows", left)

    @app.on(right)
    def enrich(event: Any) -> None:
        out.write([event.value, rows.get(event.key)], key=event.key)

    driver = Driver(app)
    driver.transaction(
        [(RIGHT, 1, "k"), (LEFT, "one", "k")]
    )  # the input that is declared first comes first
    driver.send(LEFT, "two", key="k", timestamp=5)
    driver.send(RIGHT, 2, key="k")
    driver.send(LEFT, None, key="k")
    driver.send(RIGHT, 3, key="k")
    assert [event.value for event in driver.outputs("t/out")] == [[1, "one"], [2, "two"], [3, None]]
    assert not driver.store("rows")


def test_a_deleted_key_keeps_no_row() -> None:
    app, left, right, out, _ = Parts.of(program())
    rows = app.latest("rows", left, keep=10)

    @app.on(right)
    def enrich(event: Any) -> None:
        out.write(rows.get(event.key, "none", at=event.timestamp), key=event.key)

    driver = Driver(app)
    driver.send(LEFT, "one", key="k", timestamp=1_000)
    driver.send(LEFT, None, key="k", timestamp=5_000)
    driver.send(RIGHT, 1, key="k", timestamp=4_999)
    driver.send(RIGHT, 2, key="k", timestamp=5_000)
    driver.send(LEFT, "three", key="k", timestamp=3_000)  # out of order
    driver.send(RIGHT, 3, key="k", timestamp=4_000)
    driver.send(RIGHT, 4, key="k", timestamp=15_000)
    assert driver.store("rows")
    driver.send(RIGHT, 5, key="k", timestamp=15_001)
    assert not driver.store("rows")
    assert [e.value for e in driver.outputs("t/out")] == ["one", "none", "three", "none", "none"]


# -- rows that expire, periodic calls, event time ---------------------------------------------------------


@some_seeds
def test_a_row_expires_by_event_time(seed: int) -> None:
    wrote = check(*WORDS["expiring"], seed, closes=False)
    assert wrote


def test_expired_rows_are_deleted_though_their_keys_never_come_again() -> None:
    app = Processor("t/p", tasks=1)
    source = app.input("t/in", value=json)
    rows = app.store("rows", value=json, ttl=1)

    @app.on(source)
    def keep(event: Any) -> None:
        rows[event.key] = event.value

    driver, most = Driver(app), 0
    for n in range(3000):
        driver.send("t/in", n, key=f"key-{n}", timestamp=10 * (n + 1))
        most = max(most, len(driver.store("rows")))
    assert 100 <= most <= 250  # a hundred are not expired


@some_seeds
def test_a_periodic_call_comes_once_for_each_period_that_is_passed(seed: int) -> None:
    wrote = check(*WORDS["periodic"], seed, closes=False)
    assert wrote


def test_a_periodic_call_by_the_wall_clock() -> None:
    app = Processor("t/p", tasks=2)
    source, out = app.input("t/in", value=json), app.output("t/out", value=json)
    app.on(source)(lambda event: None)

    @app.every("tick", 60, wall=True)
    def tick(now: int) -> None:
        out.write(now)

    driver = Driver(app, now=1_000_000)
    driver.advance(0)
    driver.advance(20)
    assert driver.outputs("t/out")[0].value == 1_020_000
    driver.advance(200)
    driver.advance(19)
    assert [e.value for e in driver.outputs("t/out")] == [1_020_000] * 2 + [1_200_000] * 2


def test_a_periodic_call_that_fails_is_a_dead_letter_and_comes_again() -> None:
    app = Processor("t/p", tasks=1, dead_letter="t/dead", retries=1)
    source = app.input("t/in", value=json)
    app.on(source)(lambda event: None)
    calls = list[int]()

    @app.every("tick", 1)
    def tick(now: int) -> None:
        calls.append(now)
        raise ValueError("no")

    driver = Driver(app)
    for at in (500, 1_500, 1_600, 2_500):
        driver.send("t/in", 1, key="k", timestamp=at)
    assert calls == [1_000, 1_000, 2_000, 2_000]
    assert [dict(e.headers)["from"] for e in driver.dead_letters()] == [b"tick@1000", b"tick@2000"]


# -- other keys -------------------------------------------------------------------------------------------


def test_an_input_is_read_under_another_key() -> None:
    app = Processor("t/p", tasks=TASKS)
    orders, out = app.input("t/orders", value=json), app.output("t/out", value=json)
    by_city = app.rekey(orders, "t/by-city", lambda event: event.value["city"], codec=str)
    totals = app.windows("totals", 1, into=agg.sum(lambda event: event.value["n"]))
    app.on(by_city)(totals.add)

    @totals.on_close
    def closed(window: Any) -> None:
        out.write([window.start, window.value], key=window.key)

    driver = Driver(app)
    given = [("Oslo", 5, 100), ("Bonn", 1, 9_000), ("Oslo", 7, 200), (None, 9, 300)]
    driver.transaction(
        InputEvent("t/orders", {"city": city, "n": n}, f"o{n}", at, [("h", b"1")])
        for city, n, at in given
    )
    driver.transaction(
        InputEvent("t/orders", {"city": city, "n": 0}, "o", 20_000) for city in ("Oslo", "Bonn")
    )
    assert {(e.key, *e.value) for e in driver.outputs("t/out")} == {
        (b"Oslo", 0, 12),  # not late, though an order of 9,000 was handled before its second step
        (b"Bonn", 9_000, 1),
    }
    again = driver.outputs("t/by-city")[0]
    assert (again.key, again.timestamp, again.headers) == ("Oslo", 100, [("h", b"1")])


class Joined(NamedTuple):
    """The rows of both tables, and the last result of each left key."""

    left: dict[str, Any]
    right: dict[str, Any]
    found: dict[str, Any]


def key_join(kind: str = "inner") -> Processor:
    app = Processor("t/p", tasks=TASKS)
    orders, people = app.input("t/orders", value=json), app.input("t/people", value=json)
    out = app.output("t/out", value=json)

    @app.join_by_key("of", orders, people, by=lambda order: order["of"], via="t/of-via")
    def joined(key: Any, order: Any, person: Any) -> None:
        gone = order is None or (person is None and kind == "inner")
        out.write(None if gone else [order["n"], person], key=key)

    return app


@pytest.mark.parametrize("kind", ["inner", "left"])
@some_seeds
def test_a_join_of_tables_by_key_ends_as_the_join_of_all_rows(kind: str, seed: int) -> None:
    rng, driver = random.Random(seed), Driver(key_join(kind))
    orders, people = dict[str, Any](), dict[str, Any]()
    for n in range(150):
        changes = list[InputEvent]()
        for _ in range(rng.randint(1, 3)):
            if rng.random() < 0.6:
                key = f"o{rng.randint(0, 9)}"
                row = {"n": n, "of": rng.choice(["ann", "bob", "ann2", None])}
                orders[key] = value = None if rng.random() < 0.2 else row
                changes.append(InputEvent("t/orders", value, key))
            else:
                key = rng.choice(["ann", "bob", "ann2"])
                people[key] = value = None if rng.random() < 0.2 else {"name": key, "n": n}
                changes.append(InputEvent("t/people", value, key))
        driver.transaction(changes)
        found = {event.key.decode(): event.value for event in driver.outputs("t/out")}
        wanted = {
            key: [order["n"], people.get(order["of"])]
            for key, order in orders.items()
            if order is not None and (kind == "left" or people.get(order["of"]) is not None)
        }
        assert {key: value for key, value in found.items() if value is not None} == wanted


def test_an_answer_for_an_earlier_change_of_a_row_has_no_effect() -> None:
    """The second change of a row comes between the first one and its answer."""
    app = key_join()
    driver = Driver(app)
    driver.send("t/people", {"name": "ann"}, key="ann")
    driver.transaction(
        [("t/orders", {"n": 1, "of": "ann"}, "o"), ("t/orders", {"n": 2, "of": "bob"}, "o")]
    )
    assert [event.value for event in driver.outputs("t/out")] == [None]


# -- aggregates -------------------------------------------------------------------------------------------


def test_aggregates_of_a_store_and_of_windows() -> None:
    app = Processor("t/p", tasks=1, dead_letter="t/dead", retries=0)
    source, out = app.input("t/in", value=json), app.output("t/out", value=json)
    back = app.input("t/back", value=json)
    counts, sums = app.store("counts", into=agg.count()), app.store("sums", into=agg.sum())
    most = app.store("most", into=agg.reduce(max))
    best = app.store("best", into=agg.top(2, lambda e: [e.value, e.timestamp], by=lambda i: i[0]))
    means = app.windows("means", 1, into=mean())

    @app.on(source)
    def take(event: Any) -> None:
        means.add(event)
        out.write([one.add(event) for one in (counts, sums, most, best)])

    @app.on(back)
    def take_back(event: Any) -> None:
        out.write([counts.remove(event), sums.remove(event)])
        if event.value == 4:
            best.remove(event)

    @means.on_close
    def closed(window: Any) -> None:
        out.write(window.value)

    driver = Driver(app)
    for n, at in ((3, 10), (5, 20), (5, 30), (4, 40)):
        driver.send("t/in", n, key="k", timestamp=at)
    driver.send("t/back", 5, key="k", timestamp=50)
    driver.send("t/back", 4, key="k", timestamp=1_000)
    assert [event.value for event in driver.outputs("t/out")] == [
        [1, 3, 3, [[3, 10]]],
        [2, 8, 5, [[5, 20], [3, 10]]],
        [3, 13, 5, [[5, 20], [5, 30]]],
        [4, 17, 5, [[5, 20], [5, 30]]],
        [3, 12],
        4.25,
    ]
    (letter,) = driver.dead_letters()
    assert b"top 2 can't take an event back" in error_of(letter)


def mean() -> agg.Aggregate:
    """Its states are not its results."""
    return agg.Aggregate(
        "mean", lambda n: [n, 1], lambda s, n: [s[0] + n, s[1] + 1],
        lambda one, two: [one[0] + two[0], one[1] + two[1]], result=lambda s: s[0] / s[1],
    )  # fmt: skip


@pytest.mark.parametrize("ttl", [None, 60])
def test_a_store_gives_the_results_of_an_aggregate(ttl: float | None) -> None:
    app = Processor("t/p", tasks=1)
    source, out = app.input("t/in", value=json), app.output("t/out", value=json)
    means = app.store("means", into=mean(), ttl=ttl)
    hours = app.windows("hours", 3600, into=mean())

    @app.on(source)
    def take(event: Any) -> None:
        before = means.get(event.key)
        hours.add(event)
        rows = {key.decode(): value for key, value in means.items()}
        out.write([before, means.add(event), means[event.key], rows])

    driver = Driver(app)
    for n in (3, 5):
        driver.send("t/in", n, key="k", timestamp=1_000)
    assert [event.value for event in driver.outputs("t/out")] == [
        [None, 3, 3, {}],
        [3, 4, 4, {"k": 3}],
    ]
    assert driver.store("means")["k"] == 4
    assert list(driver.store("hours").values()) == [4]


def error_of(letter: anabranch.Event) -> bytes:
    """The error in a dead letter."""
    return dict(letter.headers)["error"] or b""


# -- planted bugs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", planted.WORDS)
def test_a_planted_bug_is_found(name: str) -> None:
    word, bug = planted.WORDS[name]
    build, fold = WORDS[word]
    with bug(), pytest.raises((AssertionError, HandlerFailed)):
        check_all(build, fold)


def check_all(build: Build, fold: type[Fold]) -> None:
    for seed in SEEDS:
        check(build, fold, seed, closes=False)


# -- failures, limits, refusals ---------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["sessions", "sliding", "join"])
def test_a_close_that_fails_is_one_dead_letter(word: str) -> None:
    """Others of the key close as if nothing had happened."""
    app = Processor("t/p", tasks=1, dead_letter="t/dead", retries=1)
    left, right = app.input(LEFT, value=json), app.input(RIGHT, value=json)
    out = app.output("t/out", value=json)

    def close(value: Any) -> None:
        if value == 2:
            raise ValueError("two")
        out.write(value)

    if word == "sessions":
        found: Any = app.sessions("some", 0.01, into=agg.sum(), grace=0.1)
        found.on_close(lambda session: close(session.value))
    elif word == "sliding":
        found = app.sliding("some", 0.01, into=agg.sum(), grace=0.1)
        found.on_close(lambda window: close(window.value))
    else:
        app.join("some", left, right, within=0.1, kind="left")(lambda one, _: close(one.value))
        app.on(right)(lambda event: None)
        found = None
    if found is not None:
        app.on(left, right)(found.add)
    driver = Driver(app)
    driver.transaction([(LEFT, n, "k", 100 + 50 * n) for n in range(1, 4)])
    driver.send(RIGHT, 9, key="k", timestamp=5_000)
    assert [event.value for event in driver.outputs("t/out")] == [1, 3]
    (letter,) = driver.dead_letters()
    assert (letter.key, letter.value) == (b"k", b"2")
    assert b"ValueError: two" in error_of(letter)


def test_a_key_with_too_many_events_is_refused_by_name() -> None:
    app = Processor("t/p", tasks=1, dead_letter="t/dead", retries=0)
    left, right = app.input(LEFT), app.input(RIGHT)
    app.join("pairs", left, right, within=10)(lambda one, two: None)
    driver = Driver(app)
    for n in range(5):
        driver.send(LEFT, b"x" * 300_000, key="k", timestamp=1_000 + n)
    letters = driver.dead_letters()
    assert len(letters) == 2
    assert b"EventTooLarge: key b'k' of pairs" in error_of(letters[0])


def test_events_too_far_ahead_are_late() -> None:
    app = Processor("t/p", tasks=1, ahead=10)
    left, right = app.input(LEFT, value=json), app.input(RIGHT, value=json)
    late = app.output("t/late")
    visits = app.sessions("visits", 1, into=agg.count(), late=late)
    last = app.sliding("last", 1, grace=1, into=agg.count(), late=late)
    app.join("pairs", left, right, within=1, late=late)(lambda one, two: None)
    app.latest("rows", right, keep=1, late=late)
    app.on(left, right)(visits.add)
    app.on(left, right)(last.add)
    driver = Driver(app)
    driver.send(LEFT, 1, key="k", timestamp=driver.now + 11_000)
    driver.send(RIGHT, 1, key="k", timestamp=driver.now + 11_000)
    assert len(driver.outputs("t/late")) == 7
    assert all(not driver.store(name) for name in ("visits", "last", "pairs", "rows"))


def test_stores_show_their_rows_to_a_driver() -> None:
    app = Processor("t/p", tasks=1)
    left, right = app.input(LEFT, key=str, value=json), app.input(RIGHT, key=str, value=json)
    visits = app.sessions("visits", 1, into=agg.count())
    last = app.sliding("last", 1, grace=1, into=agg.count())
    app.join("pairs", left, right, within=1)(lambda one, two: None)
    app.latest("rows", left, keep=1)
    kept = app.store("kept", ttl=5, into=agg.count())
    for add in (visits.add, last.add, kept.add):
        app.on(left, right)(add)
    driver = Driver(app)
    driver.send(LEFT, 7, key="k", timestamp=1_000)
    driver.send(LEFT, 8, key="k", timestamp=1_100)
    assert driver.store("visits")["k"] == [(1_000, 1_100, 2)]
    assert driver.store("last")["k"] == [(1_000, 1), (1_100, 1)]
    assert driver.store("pairs")["k"] == [(LEFT, 1_000, 7), (LEFT, 1_100, 8)]
    assert driver.store("rows")["k"] == [(1_000, 7), (1_100, 8)]
    assert driver.store("kept")["k"] == 2


@pytest.mark.parametrize(
    ("store", "key", "shown"),
    [
        ("visits", b"k", [(1_000, 1_100, 2)]),
        ("last", b"k", [(1_000, 1), (1_100, 1)]),
        ("pairs", b"k", [(LEFT, 1_000, 7), (LEFT, 1_100, 8)]),
        ("rows", b"k", [(1_000, 7), (1_100, 8)]),
        ("kept", b"k", 2),
        ("means", b"k", 7.5),
        ("hours", b"k", [(0, 7.5)]),
        ("names", b"k", {"l": None}),
        ("kept", b"none", None),
        ("hours", b"none", None),
    ],
)
def test_a_program_shows_the_stored_rows_of_a_key(store: str, key: bytes, shown: Any) -> None:
    app = Processor("t/p", tasks=1)
    left, right = app.input(LEFT, key=str, value=json), app.input(RIGHT, key=str, value=json)
    stores = [
        app.sessions("visits", 1, into=agg.count()),
        app.sliding("last", 1, grace=1, into=agg.count()),
        app.store("kept", ttl=5, into=agg.count()),
        app.store("means", into=mean()),
        app.windows("hours", 3600, into=mean()),
    ]
    app.join("pairs", left, right, within=1)(lambda one, two: None)
    app.latest("rows", left, keep=1)
    app.join_by_key("names", left, right, by=lambda _: None, via="t/via")(lambda *_: None)
    for one in stores:
        app.on(left, right)(cast("Any", one).add)
    driver = Driver(app)
    driver.send(LEFT, 7, key="k", timestamp=1_000)
    driver.send(LEFT, 8, key="k", timestamp=1_100)
    found = app.stores[store]
    rows = {row[2:]: data for row, data in driver._rows.scan(0, found.prefix, after(found.prefix))}
    result = found.shown({row: data for row, data in rows.items() if found.is_of(row, key)})
    assert result.keys() == shown.keys() if store == "names" else result == shown


def test_keys_come_decoded_where_all_inputs_have_one_codec() -> None:
    app = Processor("t/p", tasks=1)
    left, right = app.input(LEFT, key=str, value=json), app.input(RIGHT, key=str, value=json)
    visits, keys = app.sessions("visits", 1, into=agg.count()), list[Any]()
    last = app.sliding("last", 1, grace=0, into=agg.count())
    for some in (visits, last):
        app.on(left, right)(some.add)
        some.on_close(lambda closed: keys.append(closed.key))
    app.join("pairs", left, right, within=1, kind="left")(lambda one, two: keys.append(one.key))
    driver = Driver(app)
    driver.send(LEFT, 7, key="k", timestamp=1_000)
    driver.send(RIGHT, 8, key="z", timestamp=10_000)
    assert keys == ["k"] * 3


def refusals() -> dict[str, Callable[[Processor, Any, Any], Any]]:
    """By what the error says."""
    return {
        "is on both sides": lambda app, left, _: app.join("j", left, left, within=1)(print),
        "kind='full'": lambda app, left, right: app.join(
            "j", left, right, within=1, kind=cast("Any", "full")
        )(print),
        "same codec of keys": lambda app, left, _: app.join(
            "j", left, app.input("t/third", key=str), within=1
        )(print),
        "within=-1": lambda app, left, right: app.join("j", left, right, within=-1)(print),
        "gap=0": lambda app, *_: app.sessions("s", 0, into=agg.count()),
        "give into=": lambda app, *_: app.sessions("s", 1),
        "nothing is late": lambda app, left, _: app.latest(
            "l", left, keep=cast("Any", None), late=app.output("t/l")
        ),
        "keep=0": lambda app, left, _: app.latest("l", left, keep=0),
        "ttl=0": lambda app, *_: app.store("s", ttl=0),
        "every 0 seconds": lambda app, *_: app.every("e", 0)(print),
        "top(0)": lambda *_: agg.top(0),
        "a function of two": lambda *_: agg.reduce(3),  # type: ignore[arg-type]
        "of='x' is no function": lambda *_: agg.sum(cast("Any", "x")),
        "into='sum'": lambda app, *_: app.store("s", into=cast("Any", "sum")),
        "into=1": lambda app, *_: app.sliding("s", 1, grace=0, into=cast("Any", 1)),
        "late= of s is 't/late'": lambda app, *_: app.sessions(
            "s", 1, into=agg.count(), late=cast("Any", "t/late")
        ),
        "late= of w": lambda app, *_: app.windows("w", 1, late=Processor("t/q").output("t/other")),
        "is a stream of this program": lambda app, left, right: app.join_by_key(
            "j", left, right, by=str, via=LEFT
        )(print),
        "an async function": lambda app, left, right: app.join("j", left, right, within=1)(_async),
    }


async def _async(*_: Any) -> None: ...


@pytest.mark.parametrize("text", refusals())
def test_what_makes_no_sense_is_refused_when_it_is_declared(text: str) -> None:
    app, left, right, *_ = Parts.of(program())
    with pytest.raises(InvalidArgument, match=text.replace("(", r"\(").replace(")", r"\)")):
        refusals()[text](app, left, right)


def test_the_page_runs(tmp_path: Path) -> None:
    run_page(DOCS / "windows-and-joins.md", "", tmp_path, {})


# -- found by review ------------------------------------------------------------------------------------


def test_an_aggregate_that_fails_as_a_window_closes_is_a_dead_letter() -> None:
    app = Processor("t/p", tasks=1, dead_letter="t/dead", retries=1)
    source = app.input(LEFT, value=json)
    bad = agg.Aggregate(
        "bad", lambda n: n, lambda s, n: s + n, lambda a, b: a + b, result=lambda s: 1 / s
    )
    last = app.sliding("last", 1, grace=1, into=bad)
    last.on_close(lambda window: None)
    app.on(source)(lambda event: None if event.value else _suppressed(last.add, event))
    driver = Driver(app)
    driver.send(LEFT, 0, key="k", timestamp=1_000)
    driver.send(LEFT, 1, key="k", timestamp=10_000)
    (letter,) = driver.dead_letters()
    assert (letter.key, letter.value) == (b"k", None)
    assert not driver.store("last")


def test_a_result_is_computed_for_windows_alone() -> None:
    """Not when the last entries of a key are deleted."""
    app = Processor("t/p", tasks=1)
    source, out = app.input(LEFT, value=json), app.output("t/out", value=json)
    last = app.sliding("last", 1, grace=1, into=mean())
    app.on(source)(last.add)
    last.on_close(lambda window: out.write(window.value))
    driver = Driver(app)
    for key, value, at in (("k", 4, 1_000), ("k", 6, 1_500), ("z", 1, 50_000)):
        driver.send(LEFT, value, key=key, timestamp=at)
    assert [event.value for event in driver.outputs("t/out")] == [4.0, 5.0]


def _suppressed(call: Callable[[Any], Any], event: Any) -> None:
    with contextlib.suppress(ZeroDivisionError):
        call(event)


@pytest.mark.parametrize("kind", ["inner", "left"])
def test_a_late_event_of_a_join_is_written_unchanged(kind: Any) -> None:
    """Not the value of the event that is, or was last, handled."""
    app = Processor("t/p", tasks=1)
    left, right = app.input(LEFT, value=json), app.input(RIGHT, value=json)
    late = app.output("t/late", value=json)
    visits = app.sessions("visits", 1, into=agg.count(), late=late)
    app.join("pairs", left, right, within=5, grace=100, kind=kind)(lambda one, _: visits.add(one))
    driver = Driver(app)
    driver.send(LEFT, "order", key="k", timestamp=1_000)
    driver.send(LEFT, "of z", key="z", timestamp=20_000)
    if kind == "inner":
        driver.send(RIGHT, "payment", key="k", timestamp=2_000)
    else:
        driver.send(LEFT, "of z", key="z", timestamp=200_000)
    found = [(e.key, e.value, e.timestamp) for e in driver.outputs("t/late") if e.key == b"k"]
    assert found == [(b"k", "order", 1_000)]


def test_latest_is_read_by_handlers_whose_key_has_another_codec() -> None:
    """A periodic call has no key at all."""
    app = Processor("t/p", tasks=1)
    left, right = app.input(LEFT, key=json, value=json), app.input(RIGHT, key=str, value=json)
    out = app.output("t/out", value=json)
    rows = app.latest("rows", left)
    app.on(right)(lambda event: out.write(rows.get(event.key)))
    app.every("tick", 1)(lambda now: out.write(rows.get("k")))
    driver = Driver(app)
    driver.send(LEFT, 1, key="k", timestamp=500)
    driver.send(RIGHT, 2, key="k", timestamp=1_500)
    assert [event.value for event in driver.outputs("t/out")] == [1, 1]


@pytest.mark.parametrize("word", ["windows", "sessions", "sliding"])
@pytest.mark.parametrize("key", [5, "Oslo", "Bonn", "Rome", ["a", 1]])
def test_another_key_may_have_another_codec(word: str, key: Any) -> None:
    app = Processor("t/p", tasks=TASKS)
    orders = app.input("t/orders", value=json)
    again = app.rekey(orders, "t/again", lambda event: event.value, codec=json)
    more: dict[str, Any] = {"grace": 0} if word == "sliding" else {}
    found, keys = getattr(app, word)("found", 1, into=agg.count(), **more), list[Any]()
    app.on(again)(found.add)
    found.on_close(lambda closed: keys.append(closed.key))
    driver = Driver(app)
    driver.send("t/orders", key, key="x", timestamp=1_000)
    driver.send("t/orders", key, key="x", timestamp=9_000)
    assert [json.loads(each) for each in keys] == [key]


def test_sides_of_a_join_are_part_of_its_format() -> None:
    def kind(left: str, right: str) -> str:
        app = Processor("t/p", tasks=1)
        return app.join("j", app.input(left), app.input(right), within=1)(
            lambda one, two: None
        ).kind

    assert kind(LEFT, RIGHT) != kind(RIGHT, LEFT)


def test_a_shorter_period_counts_at_once() -> None:
    calls = list[int]()

    def periodic(seconds: float) -> Processor:
        app = Processor("t/p", tasks=TASKS)
        app.on(app.input(LEFT))(lambda event: None)
        app.every("tick", seconds)(calls.append)
        return app

    first, second = Runner(periodic(86_400)), Runner(periodic(1))
    first.run([[Given(LEFT, b"k", 1, 1_000)]])
    second.rows = first.rows
    second.handlers = second._handlers()
    second.run([[Given(LEFT, b"k", 1, at)] for at in (5_000, 9_500)])
    assert calls == [9_000]


@pytest.mark.parametrize("bad", [_async, "name"])
@pytest.mark.parametrize("word", ["key", "by=", "merge="])
def test_functions_are_checked_when_they_are_declared(word: str, bad: Any) -> None:
    app, left, right, *_ = Parts.of(program())
    declare: dict[str, Callable[[], Any]] = {
        "key": lambda: app.rekey(left, "t/again", bad),
        "by=": lambda: app.join_by_key("j", left, right, by=bad, via="t/via")(print),
        "merge=": lambda: app.sessions("s", 1, merge=bad),
    }
    with pytest.raises(InvalidArgument, match=word):
        declare[word]()


def test_a_join_by_key_does_not_advance_the_time_of_other_tasks() -> None:
    """Another worker may be far behind: all its events would be late."""
    app = Processor("t/p", tasks=TASKS)
    left, right = app.input(LEFT, value=json), app.input(RIGHT, value=json)
    windows = app.windows("w", 1, into=agg.count(), late=app.output("t/late"))
    app.on(right)(windows.add)
    app.join_by_key("of", left, right, by=lambda row: row["of"], via="t/via")(lambda *_: None)
    assert task_of(b"o1", TASKS) != task_of(b"ann", TASKS)
    driver = Driver(app)
    driver.send(LEFT, {"of": "ann"}, key="o1", timestamp=1_000_000)
    driver.send(RIGHT, 1, key="ann", timestamp=1_000)
    assert not driver.outputs("t/late")
