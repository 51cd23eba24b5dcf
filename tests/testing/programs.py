"""The table of programs: each with the input that a driver and a worker get, step by step."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from anabranch.processing.app import Processor
from anabranch.processing.failures import HandlerFailed
from anabranch.testing import InputEvent
from anabranch.testing.driver import START_MS as T

Names = Callable[[str], str]  # of a stream within the program's scope
Step = list[InputEvent] | float  # an input transaction, or seconds by which the clock advances


@dataclass(frozen=True)
class Row:
    """A program. ``streams``: what it reads and writes. ``error``: the error that stops it.

    ``wants``: the values of some outputs, for programs about time and failures: the driver and the worker share the
    code that decides them, so that a comparison alone would not show an error in that code.
    """

    name: str
    build: Callable[[Names], Processor]
    steps: list[Step]
    streams: tuple[str, ...]
    error: type[Exception] | None = None
    wants: dict[str, list[Any]] = field(default_factory=dict)
    by_key: bool = False  # only the order of each key's outputs is promised


TABLE: list[Row] = []


def program(
    *steps: Step,
    streams: str = "in out",
    error: type[Exception] | None = None,
    by_key: bool = False,
    **wants: list[Any],
) -> Callable[[Callable[[Names], Processor]], Callable[[Names], Processor]]:
    """Add a program to the table."""

    def add(build: Callable[[Names], Processor]) -> Callable[[Names], Processor]:
        name = build.__name__.replace("_", "-")
        TABLE.append(Row(name, build, list(steps), tuple(streams.split()), error, wants, by_key))
        return build

    return add


def ev(key: str | None, value: Any = 1, at: int = 0, stream: str = "in", **more: Any) -> InputEvent:
    """An event ``at`` milliseconds after the beginning."""
    return InputEvent(stream, value, key, T + at, **more)


def each(*events: InputEvent) -> list[Step]:
    """A transaction for each event."""
    return [[event] for event in events]


KEYS = [f"k{n}" for n in range(6)]
SOME = each(*(ev(key, n, n * 10) for n, key in enumerate(KEYS * 2)))


# -- stateless, codecs, several inputs and outputs ----------------------------------------------------


@program(*SOME)
def stateless_map(name: Names) -> Processor:
    app = Processor(name("p"), tasks=4)
    out = app.output(name("out"), value=json)

    @app.on(app.input(name("in"), value=json))
    def double(event: Any) -> None:
        out.write({"double": event.value * 2}, key=event.key)

    return app


@program(*each(ev("a", "grün"), ev("b", "rot"), ev("a", "blau", headers=[("h", b"1")])))
def text_and_a_filter(name: Names) -> Processor:
    app = Processor(name("p"), tasks=2)
    out = app.output(name("out"), value=str)

    @app.on(app.input(name("in"), value=str))
    def keep(event: Any) -> None:
        if "r" in event.value:
            out.write(event.value.upper(), key="upper", headers=event.headers)

    return app


@program(*each(ev("a", b"\x00\xff", headers={"h": b"1", "n": None}), ev("b", None), ev("c", b"")))
def plain_bytes_headers_and_tombstones(name: Names) -> Processor:
    app = Processor(name("p"), tasks=2)
    out = app.output(name("out"))

    @app.on(app.input(name("in")))
    def copy(event: Any) -> None:
        out.write(event.value, key=event.key, headers=event.headers, timestamp=event.timestamp + 5)

    return app


class Numbers:
    """A codec of the program's own."""

    @staticmethod
    def dumps(value: int) -> bytes:
        return value.to_bytes(4, "big")

    @staticmethod
    def loads(data: bytes) -> int:
        return int.from_bytes(data, "big")


@program(*each(ev("a", 7), ev("a", 8), ev("b", 9)))
def a_codec_of_ones_own(name: Names) -> Processor:
    app = Processor(name("p"), tasks=2)
    out = app.output(name("out"), value=Numbers)
    sums = app.store("sums", value=Numbers)

    @app.on(app.input(name("in"), value=Numbers))
    def add(event: Any) -> None:
        sums[event.key] = sums.get(event.key, 0) + event.value
        out.write(sums[event.key], key=event.key)

    return app


@program(
    [ev("a", 1), ev("b", 2), ev("a", 3, stream="more"), ev("b", 4, 9, stream="more")],
    [ev("a", 5, stream="more")],
    [ev("b", 6, 20)],
    streams="in more out",
)
def several_inputs_of_one_transaction(name: Names) -> Processor:
    app = Processor(name("p"), tasks=4)
    out = app.output(name("out"), value=json)
    seen = app.store("seen", value=json)

    def note(kind: str, event: Any) -> None:
        seen[event.key] = [*seen.get(event.key, []), [kind, event.value]]
        out.write(seen[event.key], key=event.key)

    @app.on(app.input(name("in"), value=json))
    def first(event: Any) -> None:
        note("in", event)

    @app.on(app.input(name("more"), value=json))
    def second(event: Any) -> None:
        note("more", event)

    return app


@program(*SOME, streams="in out odd")
def several_outputs_and_handlers(name: Names) -> Processor:
    app = Processor(name("p"), tasks=4)
    out, odd = app.output(name("out"), value=json), app.output(name("odd"), value=str)
    source = app.input(name("in"), value=json)

    @app.on(source)
    def all_of_them(event: Any) -> None:
        out.write(event.value, key=event.key)

    @app.on(source)
    def odd_ones(event: Any) -> None:
        if event.value % 2:
            odd.write(str(event.value), key=event.key)

    return app


@program([ev(None, n, n) for n in range(9)], [ev(None, 99, 99)])
def events_without_a_key(name: Names) -> Processor:
    app = Processor(name("p"), tasks=1)
    out = app.output(name("out"), value=json)
    total = app.store("total", value=json, local=True)

    @app.on(app.input(name("in"), value=json))
    def add(event: Any) -> None:
        total["all"] = total.get("all", 0) + event.value
        out.write(total["all"])

    return app


@program([ev("a", 3)], 0.0, [ev("b", 1)], streams="in out steps")
def an_output_that_is_also_an_input(name: Names) -> Processor:
    app = Processor(name("p"), tasks=4)
    out, steps = app.output(name("out"), value=json), app.output(name("steps"), value=json)

    @app.on(app.input(name("in"), value=json), app.input(name("steps"), value=json))
    def count_down(event: Any) -> None:
        if event.value:
            steps.write(event.value - 1, key=event.key)
        else:
            out.write("done", key=event.key)

    return app


# -- stores -------------------------------------------------------------------------------------------


@program(*SOME, out=[{"n": n} for n in (1, 2) for _ in KEYS])
def counts(name: Names) -> Processor:
    app = Processor(name("p"), tasks=4)
    out, totals = app.output(name("out"), value=json), app.store("totals", value=json)

    @app.on(app.input(name("in"), value=json))
    def count(event: Any) -> None:
        totals[event.key] = totals.get(event.key, 0) + 1
        out.write({"n": totals[event.key]}, key=event.key)

    return app


@program(
    *each(ev("a", "x"), ev("b", "y"), ev("a", None), ev("c", None), ev("b", "z"), ev("a", "w"))
)
def deletes_and_missing_keys(name: Names) -> Processor:
    app = Processor(name("p"), tasks=2)
    out, rows = app.output(name("out"), value=json), app.store("rows", value=str)

    @app.on(app.input(name("in"), value=str))
    def put(event: Any) -> None:
        try:
            before = rows[event.key]
        except KeyError:
            before = "nothing"
        if event.value is None:
            del rows[event.key]
        else:
            rows[event.key] = event.value
        out.write([before, event.key in rows], key=event.key)

    return app


@program(*each(*(ev("k", word) for word in ("tree", "tea", "ten", "inn", "to", "-tea", "zoo"))))
def scans_of_a_local_store(name: Names) -> Processor:
    app = Processor(name("p"), tasks=2)
    out, words = app.output(name("out"), value=json), app.store("words", value=json, local=True)

    @app.on(app.input(name("in"), value=str))
    def put(event: Any) -> None:
        if event.value.startswith("-"):
            del words[event.value[1:]]
        else:
            words[event.value] = len(event.value)
        prefixed = [(key.decode(), size) for key, size in words.items(prefix="te")]
        ranged = [key.decode() for key, _ in words.items("j", "u")]
        out.write([prefixed, ranged], key=event.key)

    return app


@program(*SOME, *each(ev("k0", 1), ev("k3", 1)))
def two_stores_in_one_commit(name: Names) -> Processor:
    app = Processor(name("p"), tasks=4)
    out = app.output(name("out"), value=json)
    last, sums = app.store("last", value=json), app.store("sums", value=json)

    @app.on(app.input(name("in"), value=json))
    def put(event: Any) -> None:
        sums[event.key] = sums.get(event.key, 0) + event.value
        out.write([last.get(event.key), sums[event.key]], key=event.key)
        last[event.key] = {"value": event.value, "at": event.timestamp}

    return app


@program(*each(ev("k0"), ev("k1")), error=HandlerFailed)
def a_key_of_another_task(name: Names) -> Processor:
    app = Processor(name("p"), tasks=4, retries=0)
    out, rows = app.output(name("out"), value=json), app.store("rows", value=json)

    @app.on(app.input(name("in"), value=json))
    def put(event: Any) -> None:
        rows["k0"] = 1  # k1 is of another task
        out.write(1, key=event.key)

    return app


# -- windows ------------------------------------------------------------------------------------------

TIMES = [0, 400, 900, 1100, 300, 2500, 1200, 4200, 4300, 9000]
BY_TIME = each(*(ev("a", n, at) for n, at in enumerate(TIMES)))


def windowed(name: Names, tasks: int = 2, **how: Any) -> Processor:
    """Sums by key and window of a second."""
    app = Processor(name("p"), tasks=tasks)
    out = app.output(name("out"), value=json)
    hours = app.windows("hours", 1, value=json, **how)

    @app.on(app.input(name("in"), value=json))
    def add(event: Any) -> None:
        for window in hours.of(event):
            window.value = (window.value or 0) + event.value

    @hours.on_close
    def closed(window: Any) -> None:
        out.write([window.start - T, window.value], key=window.key)

    return app


@program(*BY_TIME, out=[[0, 3], [1000, 3], [2000, 5], [4000, 15]])
def tumbling_windows(name: Names) -> Processor:
    return windowed(name)


@program(
    *BY_TIME,
    out=[
        [-750, 0],
        [-500, 1],
        [-250, 1],
        [0, 3],
        [250, 10],
        [500, 5],
        [750, 5],
        [1000, 3],
        [1750, 5],
        [2000, 5],
        [2250, 5],
        [2500, 5],
        [3250, 7],
        [3500, 15],
        [3750, 15],
        [4000, 15],
        [4250, 8],
    ],
)
def hopping_windows(name: Names) -> Processor:
    return windowed(name, every=0.25)


@program(*BY_TIME, out=[[0, 7], [1000, 9], [2000, 5], [4000, 15]])
def windows_with_grace(name: Names) -> Processor:
    return windowed(name, grace=1.5)


@program(*BY_TIME, streams="in out late", out=[1, 1, 1, 1, 0, 1, 0, 1, 1, 1], late=[b"4", b"6"])
def late_events(name: Names) -> Processor:
    app = Processor(name("p"), tasks=2)
    out, late = app.output(name("out"), value=json), app.output(name("late"))
    hours = app.windows("hours", 0.5, value=json, late=late)

    @app.on(app.input(name("in"), value=json))
    def count(event: Any) -> None:
        kept = 0
        for window in hours.of(event):
            window.value, kept = (window.value or 0) + 1, kept + 1
        out.write(kept, key=event.key)

    return app


@program(*each(*(ev(KEYS[n % 6], n, n * 300) for n in range(40))))
def windows_of_many_keys(name: Names) -> Processor:
    return windowed(name, tasks=4, every=0.5, grace=0.2)


@program(
    [ev("a", n, at) for n, at in enumerate(TIMES)],
    [ev("a", 0, 20_000)],
    out=[[0, 7], [1000, 9], [2000, 5], [4000, 15], [9000, 9]],
)
def windows_in_one_transaction(name: Names) -> Processor:
    return windowed(name)


# -- timers -------------------------------------------------------------------------------------------


@program(
    *each(ev("a", 500), ev("b", 700, 100), ev("a", 900, 200), ev("a", 0, 1200), ev("b", 0, 1200)),
    out=[T + 800, T + 1100],
)
def event_timers(name: Names) -> Processor:
    app = Processor(name("p"), tasks=2)
    out = app.output(name("out"), value=json)

    @app.timer("quiet")
    def quiet(key: bytes, due: int) -> None:
        out.write(due, key=key)

    @app.on(app.input(name("in"), value=json))
    def wait(event: Any) -> None:
        if event.value:
            quiet.set(event.key, event.timestamp + event.value)

    return app


@program(
    *each(
        ev("a", "set"),
        ev("a", "cancel", 10),
        ev("b", "set", 20),
        ev("b", "", 5000),
        ev("a", "", 5000),
    ),
    out=[T + 1020],
)
def cancelled_timers(name: Names) -> Processor:
    app = Processor(name("p"), tasks=2)
    out = app.output(name("out"), value=json)

    @app.timer("quiet")
    def quiet(key: bytes, due: int) -> None:
        out.write(due, key=key)

    @app.on(app.input(name("in"), value=str))
    def wait(event: Any) -> None:
        if event.value == "set":
            quiet.set(event.key, event.timestamp + 1000)
        elif event.value == "cancel":
            quiet.cancel(event.key)

    return app


@program(
    *each(ev("a", 0), ev("a", 1, 2500), ev("a", 1, 2600), ev("a", 1, 9000)),
    out=[[T + 1000, 1], [T + 2000, 2], [T + 3000, 3]],
)
def a_timer_that_sets_itself(name: Names) -> Processor:
    app = Processor(name("p"), tasks=1)
    out, ticks = app.output(name("out"), value=json), app.store("ticks", value=json)

    @app.timer("tick")
    def tick(key: bytes, due: int) -> None:
        ticks[key] = ticks.get(key, 0) + 1
        out.write([due, ticks[key]], key=key)
        tick.set(key, due + 1000)

    @app.on(app.input(name("in"), value=json))
    def begin(event: Any) -> None:
        if event.value == 0:
            tick.set("a", event.timestamp + 1000)

    return app


@program(
    *each(ev("a"), ev("b")),
    100.0,
    [ev("c")],
    50.0,
    [ev("a")],
    200.0,
    out=["alarm a", "alarm c", "alarm a", "alarm b"],
)
def wall_timers(name: Names) -> Processor:
    app = Processor(name("p"), tasks=4)
    out = app.output(name("out"), value=json)

    @app.timer("alarm", wall=True)
    def alarm(key: bytes, due: int) -> None:
        out.write(f"alarm {key.decode()}", key=key, timestamp=due)

    @app.on(app.input(name("in"), value=json))
    def wait(event: Any) -> None:
        alarm.set(event.key, T + {b"a": 60_000, b"b": 300_000, b"c": 120_000}[event.key])

    return app


@program(*each(ev("k0", 1), ev("k1", 2, 5000)), 1000.0, out=[[0, 1]])
def idle_tasks(name: Names) -> Processor:
    app = windowed(name, tasks=4)
    app.idle = 60.0
    return app


@program(
    *each(*(ev(f"k{n}", n, n) for n in range(60)), *(ev("k1", -n, 5000 + n) for n in range(9))),
    out=[0, 0, *["x" * 50] * 59, *range(-1, -9, -1)],
)
def timers_of_several_commits(name: Names) -> Processor:
    app = Processor(name("p"), tasks=1, cut_bytes=600)
    out = app.output(name("out"), value=json)

    @app.timer("end")
    def end(key: bytes, due: int) -> None:
        out.write("x" * 50, key=key)

    @app.on(app.input(name("in"), value=json))
    def wait(event: Any) -> None:
        if event.value > 0:
            end.set(event.key, event.timestamp + 1000)
        else:
            out.write(event.value, key=event.key)

    return app


# -- failures -----------------------------------------------------------------------------------------


def failing(name: Names, **more: Any) -> Processor:
    """Refuses negative numbers."""
    app = Processor(name("p"), tasks=2, retries=1, **more)
    out, sums = app.output(name("out"), value=json), app.store("sums", value=json)

    @app.on(app.input(name("in"), value=json))
    def add(event: Any) -> None:
        out.write(event.value, key=event.key)
        sums[event.key] = sums.get(event.key, 0) + event.value
        if event.value < 0:
            raise ValueError(f"{event.value} is negative")

    return app


BAD = [ev("a", 1), ev("a", -1, headers=[("h", b"1")]), ev("b", 2)], [ev("b", -2), ev("a", 3)]


@program(*BAD, streams="in out dead", out=[1, 2, 3], dead=[b"-1", b"-2"])
def dead_letters(name: Names) -> Processor:
    return failing(name, dead_letter=name("dead"))


@program(*BAD, error=HandlerFailed)
def a_handler_that_fails(name: Names) -> Processor:
    return failing(name)


@program(*each(ev("a", b"1"), ev("a", b"{no"), ev("b", b"2")), streams="in out dead")
def values_that_are_not_json(name: Names) -> Processor:
    return failing(name, dead_letter=name("dead"))


@program(
    *SOME,
    streams="in out dead",
    out=[[0, 1], [1, 1], [2, 1], [3, 3], [4, 1], [5, 1], [6, 1], [8, 1], [9, 1], [10, 1], [11, 1]],
    dead=[b"7"],
)
def retries(name: Names) -> Processor:
    app = Processor(name("p"), tasks=4, retries=2, dead_letter=name("dead"))
    out, tries = app.output(name("out"), value=json), dict[int, int]()

    @app.on(app.input(name("in"), value=json))
    def flaky(event: Any) -> None:
        tries[event.value] = tries.get(event.value, 0) + 1
        out.write([event.value, tries[event.value]], key=event.key)
        if event.value in (3, 7) and tries[event.value] < event.value:
            raise OSError("an outage")

    return app


@program(
    *each(ev("a", 1), ev("b", -1, 10), ev("c", 1, 3000)),
    streams="in out dead",
    out=[T + 1000],
    dead=[None],
)
def a_timer_that_fails(name: Names) -> Processor:
    app = Processor(name("p"), tasks=1, retries=0, dead_letter=name("dead"))
    out, rows = app.output(name("out"), value=json), app.store("rows", value=json)

    @app.timer("quiet")
    def quiet(key: bytes, due: int) -> None:
        if rows[key] < 0:
            raise ValueError("negative")
        out.write(due, key=key)

    @app.on(app.input(name("in"), value=json))
    def wait(event: Any) -> None:
        rows[event.key] = min(event.value, rows.get(event.key, 1))
        quiet.set(event.key, event.timestamp + 1000)

    return app


@program(*BY_TIME, streams="in out dead", out=[3, 1, 2], dead=[b"1"])
def a_window_that_fails(name: Names) -> Processor:
    app = Processor(name("p"), tasks=2, retries=0, dead_letter=name("dead"))
    out = app.output(name("out"), value=json)
    hours = app.windows("hours", 1, value=json)

    @app.on(app.input(name("in"), value=json))
    def count(event: Any) -> None:
        for window in hours.of(event):
            window.value = (window.value or 0) + 1

    @hours.on_close
    def closed(window: Any) -> None:
        out.write(window.value, key=window.key)
        if window.start == T + 1000:
            raise ValueError("a bad window")

    return app


@program(*each(ev("a", 10), ev("a", 2_000_000), ev("b", 20)), streams="in out dead")
def an_event_that_is_too_large(name: Names) -> Processor:
    app = Processor(name("p"), tasks=2, retries=0, dead_letter=name("dead"))
    out = app.output(name("out"))

    @app.on(app.input(name("in"), value=json))
    def grow(event: Any) -> None:
        out.write(b"x" * event.value, key=event.key)

    return app


# -- async handlers, Arrow batches, cuts --------------------------------------------------------------


@program(
    [ev(key, n, n) for n, key in enumerate(KEYS * 3)], *BAD, streams="in out dead", by_key=True
)
def async_handlers(name: Names) -> Processor:
    app = Processor(name("p"), tasks=4, retries=1, dead_letter=name("dead"), concurrency=8)
    out, sums = app.output(name("out"), value=json), app.store("sums", value=json)

    @app.on(app.input(name("in"), value=json))
    async def add(event: Any) -> None:
        for _ in range(event.value % 3):
            await asyncio.sleep(0)
        sums[event.key] = sums.get(event.key, 0) + event.value
        await asyncio.sleep(0)
        out.write(sums[event.key], key=event.key)
        if event.value < 0:
            raise ValueError("negative")

    return app


@program([ev(key, str(n), n) for n, key in enumerate(KEYS * 3)], [ev("a", "bad"), ev("b", "1")],
         streams="in out dead")  # fmt: skip
def arrow_batches(name: Names) -> Processor:
    app = Processor(name("p"), tasks=4, retries=0, dead_letter=name("dead"))
    out = app.output(name("out"))

    @app.on(app.input(name("in"), value=str), batch=True)
    def double(rows: pa.RecordBatch) -> None:
        values = [b"%d" % (2 * int(value.as_py())) for value in rows.column("value")]
        columns = {
            "key": rows.column("key"),
            "value": pa.array(values, pa.binary()),
            "timestamp": rows.column("timestamp"),
        }
        out.write_batch(pa.record_batch(columns))

    return app


BIG = [ev(KEYS[n % 6], "x" * 90, n * 20) for n in range(60)]


def lengths(name: Names, **more: Any) -> Processor:
    """The lengths of Arrow batches, one for each part of an input transaction."""
    app = Processor(name("p"), tasks=1, cut_bytes=1500, **more)
    out = app.output(name("out"))

    @app.on(app.input(name("in"), value=str), batch=True)
    def count(rows: pa.RecordBatch) -> None:
        values = pa.array([b"%d" % rows.num_rows], pa.binary())
        columns = {"value": values, "timestamp": rows.column("timestamp").slice(0, 1)}
        out.write_batch(pa.record_batch(columns))

    return app


@program(BIG, out=[b"13", b"13", b"13", b"13", b"8"])
def parts_of_a_big_transaction(name: Names) -> Processor:
    return lengths(name)


@program(BIG)
def a_big_transaction_kept_whole(name: Names) -> Processor:
    return lengths(name, whole=True)


@program(*each(*(ev("a", n) for n in range(30))), out=[f"{n:0200}" for n in range(30)])
def input_that_a_commit_has_no_room_for(name: Names) -> Processor:
    app = Processor(name("p"), tasks=1, cut_bytes=600)
    out = app.output(name("out"), value=str)

    @app.on(app.input(name("in"), value=json))
    def grow(event: Any) -> None:
        out.write(f"{event.value:0200}", key=event.key)

    return app


@program(BIG, [ev(key, "end", 9000) for key in KEYS])
def windows_over_parts(name: Names) -> Processor:
    app = Processor(name("p"), tasks=2, cut_bytes=1500)
    out = app.output(name("out"), value=json)
    hours = app.windows("hours", 0.2, value=json)

    @app.on(app.input(name("in"), value=str))
    def count(event: Any) -> None:
        for window in hours.of(event):
            window.value = (window.value or 0) + 1

    @hours.on_close
    def closed(window: Any) -> None:
        out.write([window.start - T, window.value], key=window.key)

    return app
