"""Tables and windows of agents: what Faust says of each word is so, with the worker's own batches, no broker."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import faust
import pytest

from anabranch.errors import EventTooLarge, InvalidArgument
from anabranch.presentation.topology import read_topology
from anabranch.processing.operations.topology import topology_of
from anabranch.testing import Driver
from tests.faust.played import AgentDriver, app_of

T0 = 2_000_000_000.0  # a multiple of 10 s, in the future of a driver's clock


class Sale(faust.Record, serializer="json"):
    """An event. ``at``: when it was, in its own words."""

    amount: int
    at: float = 0.0


def results_of(app: Any, words: dict[str, Any]) -> list[dict[str, Any]]:
    """Results of functions of (value, event), one dict for each event that an agent gets."""
    found: list[dict[str, Any]] = []

    @app.agent(app.topic("s/a", key_type=str, value_type=Sale), name="results")  # type: ignore[untyped-decorator]
    async def tell(stream: Any) -> None:
        async for event in stream.events():
            found.append({word: call(event) for word, call in words.items()})

    return found


def send(driver: Driver, key: str, amount: int, seconds: float, at: float = 0.0) -> None:
    value = Sale(amount, at).dumps()
    driver.send("s/a", value, key=key, timestamp=int((T0 + seconds) * 1000))


def value_of(table: Any) -> Any:
    """The value of an event's key."""
    return lambda event: table[event.key].value()


def plus(table: Any) -> Any:
    """Add an event's amount to a row."""

    def add(event: Any) -> None:
        table[event.key] += event.value.amount

    return add


# How to make them, and the sums 10 s before each event: of the newest window that has the moment.
WINDOWS: dict[str, tuple[Any, list[int]]] = {
    "tumbling": (lambda table: table.tumbling(10), [0, 0, 3, 4]),
    "hopping": (lambda table: table.hopping(20, 10), [1, 3, 7, 16]),
    "timedelta": (lambda table: table.tumbling(timedelta(seconds=10)), [0, 0, 3, 4]),
}


@pytest.mark.parametrize("how", WINDOWS)
def test_windows_are_those_of_faust(how: str) -> None:
    make, before = WINDOWS[how]
    app = app_of()
    table = make(app.Table("sums", default=int))
    found = results_of(
        app,
        {
            "add": plus(table),
            "current": lambda event: table[event.key].current(),
            "value": lambda event: table[event.key].value(),
            "delta": lambda event: table[event.key].delta(10),
            "in": lambda event: event.key in table,
            "of": lambda event: table[event.key][event].current(),
        },
    )
    with AgentDriver(app) as driver:
        for amount, seconds in ((1, 1), (2, 9.5), (4, 10), (8, 25), (4, 20)):
            send(driver, "k", amount, seconds)
        send(driver, "other", 1, 25)
    *ours, late, other = found
    assert [row["current"] for row in ours] == [1, 3, 4, 8]
    assert [row["value"] for row in ours] == [1, 3, 4, 8]
    assert [row["of"] for row in ours] == [1, 3, 4, 8]
    assert (late["current"], other["current"]) == (
        12,
        1,
    )  # a late event changes the window of its time
    assert all(row["in"] for row in found)
    assert [row["delta"] for row in (*ours[:3], late)] == before


def test_an_event_is_in_all_hopping_windows_that_have_its_time() -> None:
    app = app_of()
    table = app.Table("sums", default=int, window=faust.HoppingWindow(30, 10))
    found = results_of(app, {"add": plus(table), "sums": lambda event: [
        table[event.key][(T0 + start, T0 + start + 30 - 0.1)] for start in (-20, -10, 0, 10, 20)
    ]})  # fmt: skip
    with AgentDriver(app) as driver:
        send(driver, "k", 1, 5)
        send(driver, "k", 2, 15)
    assert [row["sums"] for row in found] == [[1, 1, 1, 0, 0], [1, 3, 3, 2, 0]]


def test_the_clock_of_a_windowed_table() -> None:
    """`relative_to_now`, of a field, of a moment, of the stream."""
    app, now = app_of(), time.time()
    table = app.Table("sums", default=int).tumbling(10, key_index=True)
    clocks = {
        "stream": table.relative_to_stream(),
        "field": table.relative_to_field(Sale.at),
        "now": table.relative_to_now(),
        "moment": table.relative_to(T0 + 55.0),
        "date": table.relative_to(datetime.fromtimestamp(T0 + 55, UTC)),
    }
    words: dict[str, Any] = {"add": plus(clocks["field"])}
    words |= {name: value_of(clock) for name, clock in clocks.items()}
    words["current"] = lambda event: clocks["field"][event.key].current()
    words["now()"] = lambda event: table[event.key].now()
    words["items"] = lambda event: list(clocks["field"].items())
    words["items.now"] = lambda event: list(table.items().now())
    words["values.current"] = lambda event: list(clocks["field"].values().current())
    words["keys.delta"] = lambda event: list(table.keys().delta(10))
    words["len"] = lambda event: len(table)
    words["drawn"] = lambda event: "k" in clocks["field"].as_ansitable(title="{table.name}")
    found = results_of(app, words)
    with AgentDriver(app) as driver:
        send(driver, "k", 3, 1, at=T0 + 55)
        send(driver, "k", 4, 2, at=now)
    first, second = found
    del first["add"], second["add"]
    assert first == {
        "stream": 0, "field": 3, "now": 0, "moment": 3, "date": 3, "current": 0, "now()": 0,
        "items": [("k", 3)], "items.now": [("k", 0)], "values.current": [0], "keys.delta": ["k"],
        "len": 1, "drawn": True,
    }  # fmt: skip
    if time.time() // 10 == now // 10:
        assert (second["field"], second["now"], second["now()"], second["moment"]) == (4, 4, 4, 3)


def test_operations_of_a_window() -> None:
    app = app_of()
    table = app.Table("numbers", default=lambda: 100).tumbling(10)

    def change(event: Any) -> list[int]:
        row, seen = table[event.key], []
        for word, other in (("iadd", 5), ("isub", 15), ("imul", 2), ("ifloordiv", 7), ("imod", 10)):
            row = getattr(row, f"__{word}__")(other)
            seen.append(row.value())
        table[event.key] = 50
        seen.append(row.apply(max, 60).value())
        del table[event.key]
        return [*seen, table[event.key].value()]

    found = results_of(app, {"seen": change})
    with AgentDriver(app) as driver:
        send(driver, "k", 1, 1)
    assert found == [{"seen": [105, 90, 180, 25, 5, 60, 100]}]


def test_windows_end_after_their_time() -> None:
    """By the worker's clock; `on_window_close` gets each key's window once, and may send and use its table."""
    app = app_of()
    closed: list[Any] = []
    out = app.topic("s/out", key_type=str)

    async def close(key: Any, value: Any) -> None:
        closed.append((key, value))
        ends[key[0]] += 1
        await out.send(key=key[0], value={"sum": value})

    ends = app.Table("ends", default=int)
    table = app.Table("sums", default=int, on_window_close=close).tumbling(10, expires=60)
    results_of(app, {"add": plus(table)})
    with AgentDriver(app, "s/out") as driver:
        driver.advance(T0 - driver.now / 1000)
        for key, amount, seconds in (("a", 1, 1), ("b", 2, 2), ("a", 4, 3), ("a", 8, 11)):
            send(driver, key, amount, seconds)
        driver.advance(69)  # the first window ends at 10 s, and is kept for 60
        assert closed == []
        assert len(driver.store("sums")) == 3
        driver.advance(1)
        first = (T0, T0 + 10 - 0.1)
        assert sorted(closed) == [(("a", first), 5), (("b", first), 2)]
        driver.advance(9)
        assert len(closed) == 2
        driver.advance(1)
        assert closed[2] == (("a", (T0 + 10, T0 + 20 - 0.1)), 8)
        assert len(driver.store("sums")) == 0
        assert dict(driver.store("ends")) == {b"a": 2, b"b": 1}
        assert [event.key for event in driver.outputs("s/out")].count(b"a") == 2


def test_a_table_is_a_dict() -> None:
    app = app_of()
    number: Any = int
    schema: Any = faust.Schema(key_type=str, value_type=number)
    table = app.Table("sums", default=int, help="all sales", schema=schema)
    plain = app.Table("plain", key_type=str)

    def use(event: Any) -> Any:
        key = event.key
        table[key] += 1
        plain[key] = event.value.amount
        seen = [table.get(key), plain.get("none", 7) if key == "none" else 7, key in table]
        seen += [plain.setdefault(key, 9), plain.pop(key), key in plain, plain.get(key, 8)]
        plain.update({key: 5})
        return [*seen, plain[key], "all sales" in table.help, key in table.as_ansitable()]

    def all_of(_: Any) -> Any:
        rows = sorted(table.items()), sorted(table.keys()), sorted(table.values()), len(table)
        return *rows, sorted(table), table.copy() == dict(table.items())

    found = results_of(app, {"use": use, "all": all_of})
    with AgentDriver(app) as driver:
        for key in ("a", "b", "a"):
            send(driver, key, 3, 1)
    assert [row["use"] for row in found] == [
        [n, 7, True, 3, 3, False, 8, 5, True, True] for n in (1, 1, 2)
    ]
    rows = [("a", 2), ("b", 1)]
    assert found[-1]["all"] == (rows, ["a", "b"], [1, 2], 2, ["a", "b"], True)
    assert app.tables["sums"] is table
    with pytest.raises(InvalidArgument, match="on_window_close needs"), AgentDriver(_closing()):
        pass


def _closing() -> Any:
    """An app with a table whose windows never end."""
    app = app_of()
    results_of(app, {})
    app.Table("t", on_window_close=print).tumbling(10)
    return app


def test_a_missing_row_without_default() -> None:
    app = app_of(retries=0)
    table = app.Table("t")
    found = results_of(app, {"get": lambda event: table.get("k", 4) if event.key == "k" else 0})

    @app.agent(app.topic("s/b"))
    async def fail(stream: Any) -> None:
        async for event in stream.events():
            table[event.key]

    with AgentDriver(app) as driver:
        send(driver, "k", 1, 1)
        assert found == [{"get": 4}]
        with pytest.raises(Exception, match="KeyError"):
            driver.send("s/b", b"1", key="k")


BAD = {
    "SlidingWindow": lambda app: app.Table("t", window=faust.SlidingWindow(1, 1, 10)),
    "whole seconds": lambda app: app.Table("t").tumbling(0.5),
    "windows already": lambda app: app.Table("t").tumbling(1).table.hopping(20, 10),
}


@pytest.mark.parametrize("what", BAD)
def test_other_windows_are_refused(what: str) -> None:
    with pytest.raises(InvalidArgument, match=what):
        BAD[what](app_of())


def test_the_topology_of_an_app() -> None:
    """Agents with their tables, and streams that they write: named in their code, as sinks, and by `group_by`."""
    app = app_of()
    flights, out, even = app.topic("s/flights"), app.topic("s/out"), app.topic("s/even")
    counts, windows = app.Table("counts", default=int), app.Table("hours", default=int).tumbling(60)

    async def count(stream: Any) -> None:
        async for key, value in stream.items():
            counts[key] += 1
            await out.send(key=key, value=value)

    async def grouped(stream: Any) -> Any:
        async for key, value in stream.group_by(len, name="size").items():
            windows[key] += 1
            yield value

    app.agent(flights)(count)
    app.agent(flights, sink=[even])(grouped)
    with AgentDriver(app):
        found = read_topology(topology_of(app.program))
    assert found is not None
    (own,) = (one for one in found.outputs if one.endswith("-flights-size-repartition"))
    calls = {
        one.name.rpartition(".")[2]: (one.of, one.uses, set(one.writes)) for one in found.calls
    }
    assert calls == {
        "count": (("s/flights",), ("counts",), {"s/out"}),
        "grouped": (("s/flights", own), ("hours",), {"s/even", own}),
    }
    assert set(found.outputs) == {"s/even", "s/out", own}


def test_an_event_that_is_too_big_for_a_commit_is_a_dead_letter() -> None:
    """After `Handlers.shrink` has marked it, no agent gets it."""
    app = app_of(dead_letter="s/dead")
    counts = app.Table("counts", default=int)

    @app.agent(app.topic("s/a", key_type=str, value_type=Sale))
    async def count(stream: Any) -> None:
        async for event in stream.events():
            counts[event.key] += 1

    with AgentDriver(app) as driver:
        driver._handlers._refused = ("s/a", 0, 1), EventTooLarge("planted")
        for key in ("a", "bad", "a"):
            send(driver, key, 1, 0.0)
        assert dict(driver.store("counts")) == {b"a": 2}
        assert [one.key for one in driver.dead_letters()] == [b"bad"]
