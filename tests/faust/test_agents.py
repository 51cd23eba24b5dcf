"""Agents in this process, on a real broker: what fails leaves no trace, and what can't be exact is refused."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import faust
import pytest

import anabranch.faust
from anabranch.errors import IllegalState, InvalidArgument, UnknownScope
from anabranch.faust.agents import Stream, make_loader
from anabranch.faust.app import Event
from anabranch.processing.batch import HandlerContext, WorkBatch
from anabranch.processing.failures import HandlerFailed
from tests.faust.conftest import Make, Place, Running

pytestmark = pytest.mark.broker


def counting(
    app: anabranch.faust.App, place: Place, hook: Callable[..., Any], **options: Any
) -> Any:
    """An agent that counts and sums by key, and calls ``hook`` with each event's number."""
    output = app.topic(f"{place.scope}/out")
    sums = app.Table("sums", default=lambda: [0, 0])

    @app.agent(app.topic(f"{place.scope}/a", f"{place.scope}/b"), **options)
    async def count(stream: Any) -> None:
        async for event in stream.events():
            seen, total = sums[event.key]
            n = event.value["n"]
            await hook(n)
            sums[event.key] = seen + 1, total + n
            await output.send(key=event.key, value={"seen": seen + 1, "total": total + n, "n": n})

    return sums


@pytest.mark.parametrize("dead_letter", [pytest.param(False, marks=pytest.mark.soak), True])
def test_an_agent_that_raises_leaves_no_trace(place: Place, make: Make, dead_letter: bool) -> None:
    """Not of the event, nor of what shares its commit; with `dead_letter` that event alone goes elsewhere."""
    app = make(retries=1, **({"dead_letter": f"{place.scope}/dead"} if dead_letter else {}))
    calls: Counter[int] = Counter()

    async def fail(n: int) -> None:
        calls[n] += 1
        await asyncio.sleep(0)
        if n in (4, 12):
            raise SystemExit(3) if n == 12 and dead_letter else ValueError("no")

    counting(app, place, fail)
    place.write(20)
    running = Running(app)
    if not dead_letter:
        reason = running.end(crashes=True)
        assert isinstance(reason, HandlerFailed)
        assert isinstance(reason.error, ValueError)
        assert place.read("out") == []
        assert sorted((calls[4], calls[12])) == [0, 2]
        return
    for number in (4, 12):
        place.written[b"key-%d" % number].remove(number)
    place.wait()
    place.write(40)
    place.wait()
    assert running.end() is None
    place.check()
    assert {json.loads(e.value or b"")["n"] for e in place.read("dead")} == {4, 12}


@pytest.mark.soak
def test_concurrent_actors_keep_each_key_s_order(place: Place, make: Make) -> None:
    app, most, at_once = make(), 0, 0

    async def sleep(_: int) -> None:
        nonlocal most, at_once
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.001)
        at_once -= 1

    counting(app, place, sleep, concurrency=5)
    place.write(300)
    running = Running(app)
    place.wait()
    assert running.end() is None
    place.check()
    assert most == 5


async def _after(topic: Any) -> None:
    await asyncio.sleep(0.3)
    await topic.send(value=1)


async def _concurrently(app: Any, topic: Any) -> None:
    """The first event's task sends while the second one is handled, in the same batch."""
    if vars(app).setdefault("seen", False):
        await asyncio.sleep(1.0)
    else:
        app.seen = asyncio.create_task(_after(topic))


BAD: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "a stray task": (
        lambda app, own, sums: asyncio.create_task(_after(own)), IllegalState, "went on after"
    ),
    "a stray with another event": (
        lambda app, own, sums: _concurrently(app, own), IllegalState, "went on after"
    ),
    "another scope": (
        lambda app, own, sums: app.send("elsewhere/out", value=1), UnknownScope, "elsewhere"
    ),
    "another task's key": (
        lambda app, own, sums: sums.update({f"key-{i}": 1 for i in range(20)}), InvalidArgument, "belongs"
    ),
    "a partition": (
        lambda app, own, sums: own.send(value=1, partition=0), InvalidArgument, "by key"
    ),
    "no loop": (lambda app, own, sums: asyncio.sleep(0), IllegalState, "without end"),
}  # fmt: skip


# One of each error.
QUICK = ("a stray task",)


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[] if what in QUICK else pytest.mark.long) for what in BAD]
)
def test_what_an_agent_must_not_do_fails_by_name(place: Place, make: Make, what: str) -> None:
    act, kind, text = BAD[what]
    app = make(retries=0)
    own, sums = app.topic(f"{place.scope}/out"), app.Table("sums")

    @app.agent(app.topic(f"{place.scope}/a"))
    async def bad(stream: Any) -> None:
        async for _ in stream:
            found = act(app, own, sums)
            if asyncio.iscoroutine(found):
                await found
            if what == "no loop":
                break

    place.write(4)
    reason = Running(app).end(crashes=True)
    error = reason.error if isinstance(reason, HandlerFailed) else reason
    assert isinstance(error, kind)
    assert text in str(error)
    assert place.read("out") == []


def test_a_task_of_the_app_writes_in_a_transaction_of_its_own(place: Place, make: Make) -> None:
    """A table is not for it."""
    app = make()

    async def nothing(_: int) -> None: ...

    sums = counting(app, place, nothing)
    errors: list[Exception] = []

    @app.task  # type: ignore[untyped-decorator]
    async def write() -> None:
        await app.topic(f"{place.scope}/ticks").send(key="k", value=7, headers={"a": b"b"})
        for key in ("get", "setdefault"):
            try:
                getattr(sums, key)("k")
            except IllegalState as error:
                errors.append(error)

    running = Running(app)
    place.wait(lambda: len(errors) == 2)
    assert running.end() is None
    assert [(e.key, e.value, e.headers) for e in place.read("ticks")] == [
        (b"k", b"7", [("a", b"b")])
    ]


@pytest.mark.soak
def test_actors_that_ended_are_freed() -> None:
    """Each failed batch begins all of them again."""
    app = anabranch.faust.App("s/x", bootstrap="none:1")

    async def read(stream: Any) -> None:
        async for _ in stream:
            pass

    agent: Any = app.agent(app.topic("s/a"), concurrency=2)(read)

    async def fail() -> int:
        for _ in range(5):
            await agent.on_start()
            await asyncio.sleep(0)
            await agent.on_stop()
        gc.collect()
        return sum(type(one) is Stream and one.app is app for one in gc.get_objects())

    assert asyncio.run(fail()) <= 2


class Named(faust.Record):
    """A key that other programs encode in their own way."""

    id: int


KEYS_OF_TABLES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[int], bytes]]] = {
    "int": ({"key_type": int}, {"key_type": int}, lambda n: b"%d" % n),
    "int of a table without a type": ({}, {"key_type": int}, lambda n: b"%d" % n),
    "text by json": (
        {"key_serializer": "json"}, {"key_type": str, "key_serializer": "json"}, lambda n: b'"%d"' % n
    ),
    "record": (
        {"key_type": Named}, {"key_type": Named, "key_serializer": "json"}, lambda n: b'{ "id": %d }' % n
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", KEYS_OF_TABLES)
def test_an_event_s_own_key_is_the_key_of_its_row_as_it_came(what: str) -> None:
    """The types and serializers of topic and table make no difference."""
    of_table, of_topic, raw = KEYS_OF_TABLES[what]
    app = anabranch.faust.App("s/x", bootstrap="none:1")
    table = app.Table("t", default=int, **of_table)
    load: Any = make_loader(app, app.topic("s/a", **of_topic))
    for number in range(20):
        given = anabranch.Event("s/a", raw(number), b"1", [], 1000, None, 1, 0, 0, number)
        at = HandlerContext(cast("WorkBatch", SimpleNamespace(known={})))
        at.task, at.key, at.name = 0, given.key, load(given).key
        table.local = True
        assert table._place(at, at.name) == (0, raw(number))


async def _agent(stream: Any) -> None: ...


REFUSED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "stream.group_by": lambda app, topic, stream: stream.group_by(lambda v: v, name="x"),
    "stream.through": lambda app, topic, stream: stream.through("s/x"),
    "a stream outside of an agent": lambda app, topic, stream: stream.take(10, within=1),
    "within=None": lambda app, topic, stream: stream.take(10, within=None),
    "take_events(0": lambda app, topic, stream: stream.take_events(0, within=1),
    "stream.noack": lambda app, topic, stream: stream.noack(),
    "stream.join": lambda app, topic, stream: stream.join(faust.Record),
    "stream.__and__": lambda app, topic, stream: stream & stream,
    "a stream outside": lambda app, topic, stream: stream.__aiter__(),
    "app.GlobalTable": lambda app, topic, stream: app.GlobalTable("x"),
    "app.SetTable": lambda app, topic, stream: app.SetTable("x"),
    "app.channel": lambda app, topic, stream: app.channel(),
    "table.on_recover": lambda app, topic, stream: app.Table("x").on_recover(print),
    "app.Table(partitions=)": lambda app, topic, stream: app.Table("x", partitions=8),
    "app.Table(store=)": lambda app, topic, stream: app.Table("x", store="memory://"),
    "table.changelog_topic": lambda app, topic, stream: app.Table("x").changelog_topic,
    "app.topic(partitions=)": lambda app, topic, stream: app.topic("s/y", partitions=8),
    "app.topic(acks=)": lambda app, topic, stream: app.topic("s/y", acks=False),
    "a sink: p is a plain topic, which": lambda app, topic, stream: app.agent(topic, sink=[app.topic("p")])(_agent),
    "agent.ask": lambda app, topic, stream: app.agent(topic)(_agent).ask(1),
    "agent.send": lambda app, topic, stream: app.agent(topic)(_agent).send(reply_to="x").send(None),
    "an agent without": lambda app, topic, stream: app.agent()(_agent),
    "isolated_partitions": lambda app, topic, stream: app.agent(topic, isolated_partitions=True)(_agent),
    "topic.send_soon": lambda app, topic, stream: topic.send_soon(value=1),
    "app.topic(pattern=)": lambda app, topic, stream: app.topic(pattern=".*"),
    "scope/stream": lambda app, topic, stream: app.topic("a/b/c"),
    "no topic of Kafka's": lambda app, topic, stream: app.topic("no topic"),
    "App(broker=)": lambda app, topic, stream: anabranch.faust.App("s/y", broker="kafka://x"),
    "App(broker_commit_every=)": lambda app, topic, stream: anabranch.faust.App("s/y", broker_commit_every=1),
    "App(num_standby_replicas=)": lambda app, topic, stream: anabranch.faust.App("s/y", num_standby_replicas=1),
    "app.consumer": lambda app, topic, stream: app.consumer,
    "app.producer": lambda app, topic, stream: app.producer.send,
    "event.ack": lambda app, topic, stream: Event(app, None, None, None, None).ack(),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_can_not_be_exact_is_refused_by_name(what: str) -> None:
    app = anabranch.faust.App("s/x", bootstrap="none:1")
    topic = app.topic("s/a")
    with pytest.raises(InvalidArgument) as refused:
        REFUSED[what](app, topic, topic.stream())
    assert what in str(refused.value)
