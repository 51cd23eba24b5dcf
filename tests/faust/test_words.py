"""Every word of Faust works as there, or is refused by name: the table of `tests.faust.words`, and its page."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faust
import pytest
from faust.sensors import Monitor

from anabranch.errors import InvalidArgument
from anabranch.faust.words import REFUSED, check_function
from tests.faust.played import AgentDriver, app_of
from tests.faust.words import INNER, PAGE, WORDS, WORKS, page, works

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("kind", WORDS)
def test_each_word_of_faust_has_one_place(kind: str) -> None:
    """A word that a later Faust brings is in no list."""
    lists = [works(kind), sorted(REFUSED.get(kind, {})), INNER.get(kind, "").split()]
    listed = [word for words in lists for word in words]
    assert len(listed) == len(set(listed)), "a word is in two lists"
    assert set(listed) == WORDS[kind]


def test_each_kind_has_words() -> None:
    assert WORKS.keys() | REFUSED.keys() | INNER.keys() <= WORDS.keys()


def test_each_word_that_works_has_a_test() -> None:
    text = "".join(path.read_text() for path in FOLDER.glob("test_*.py"))
    shown = {name for tests in WORKS.values() for name in tests}
    assert [name for name in sorted(shown) if f"def {name}(" not in text] == []


def test_the_page_has_the_table() -> None:
    """``python -m tests.faust.words`` writes it."""
    assert PAGE.read_text() == page()


# -- what is refused before any event --------------------------------------------------------------


def _stream_word(_: Any) -> Any:
    async def bad(stream: Any) -> None:
        async for _ in stream.noack():
            pass

    return bad


def _event_word(_: Any) -> Any:
    async def bad(stream: Any) -> None:
        async for event in stream.events():
            if event.value == "never":
                event.ack()

    return bad


def _agent_word(of: Any) -> Any:
    other = of.other

    async def bad(stream: Any) -> None:
        async for _ in stream:
            await other.ask(1)

    return bad


def _option(of: Any) -> Any:
    topic = of.topic

    async def bad(stream: Any) -> None:
        async for _ in stream:
            await topic.send(value=1, partition=3)

    return bad


def _option_of_cast(of: Any) -> Any:
    other = of.other

    async def bad(stream: Any) -> None:
        async for _ in stream:
            await other.cast(1, partition=1)

    return bad


def _topic_word(of: Any) -> Any:
    topic = of.topic

    async def bad(stream: Any) -> None:
        async for _ in stream:
            topic.send_soon(value=1)

    return bad


def _table_word(of: Any) -> Any:
    table = of.table

    async def bad(stream: Any) -> None:
        async for _ in stream:
            table.left_join()

    return bad


def _app_word(of: Any) -> Any:
    app = of.app

    async def bad(stream: Any) -> None:
        async for _ in stream:
            await app.commit("topic")

    return bad


def _plain(of: Any) -> Any:
    app = of.app

    async def bad(stream: Any) -> None:
        async for _ in stream:
            await app.send("orders", value=1)

    return bad


def _plain_topic(of: Any) -> Any:
    orders = of.app.topic("orders")

    async def bad(stream: Any) -> None:
        async for _ in stream:
            await orders.send(value=1)

    return bad


IN_CODE: dict[str, Callable[[Any], Any]] = {
    "stream.noack in": _stream_word,
    "event.ack in": _event_word,
    "agent.ask in": _agent_word,
    "topic.send(partition=) in": _option,
    "topic.send(partition=) in _option_of_cast": _option_of_cast,
    "topic.send_soon in": _topic_word,
    "table.left_join in": _table_word,
    "app.commit in": _app_word,
    "app.send('orders') in": _plain,
    "plain topic.send in": _plain_topic,
}


@pytest.mark.parametrize("what", IN_CODE)
def test_a_word_in_the_code_of_an_agent_is_refused_at_the_start(what: str) -> None:
    app = app_of()
    topic = app.topic("s/a")
    other = app.agent(topic, name="other")(_good)
    of = SimpleNamespace(app=app, topic=topic, table=app.Table("t"), other=other)
    app.agent(topic, name="bad")(IN_CODE[what](of))
    with pytest.raises(InvalidArgument) as refused, AgentDriver(app):
        pass
    assert what in str(refused.value)


async def _good(stream: Any) -> None:
    """Names of its own, and words of others, are not meant."""
    topic = ask = stream
    async for value in topic:
        ", ".join(str(ask) for _ in range(0))
        value.commit()


class Committed(Monitor):
    """A sensor for what never happens."""

    def on_commit_completed(self, consumer: Any, state: Any) -> None:
        """Not called."""


AT_START: dict[str, Callable[[Any], object]] = {
    "Committed.on_commit_completed": lambda app: app.sensors.add(Committed()),
    "app.on_partitions_assigned": lambda app: app.on_partitions_assigned.connect(_signal),
    "App(broker_commit_every=)": lambda app: app.config_from_object({"broker_commit_every": 3}),
    "App(topic_replication_factor=)": lambda app: os.environ.update(TOPIC_REPLICATION_FACTOR="3"),
}


def _start(app: Any) -> None:
    app.agent(app.topic("s/a"))(_good)
    app.finalize()
    assert app.conf
    app.check_words()


def _use(of: Any, name: str) -> None:
    found = getattr(of, name)
    if name == "producer":
        assert found.send
    elif name == "stream":  # Faust's own agents make streams
        aiter(app_of().topic("s/a").stream())
    found(1)


async def _signal(*_: Any, **__: Any) -> None: ...


@pytest.mark.parametrize("what", AT_START)
def test_what_would_do_nothing_is_refused_at_the_start(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    app = app_of()
    AT_START[what](app)
    with pytest.raises(InvalidArgument) as refused:
        _start(app)
    assert what in str(refused.value)


def test_a_name_that_is_another_object_inside_of_a_function_is_not_refused() -> None:
    """Arguments of functions inside, variables of comprehensions, and events of something else than the stream."""
    topic = object()

    async def good(stream: Any, others: Any) -> None:
        def first(topic: Any) -> Any:
            return topic.get(partition=1)

        async for event in others.events():
            event.ack()
        async for _ in stream:
            first(topic) or [topic.get for topic in others]

    check_function(good, lambda found: "topic" if found is topic else None, stream=True)

    async def bad(stream: Any) -> None:
        async for event in stream.filter(bool).events():
            event.ack()

    with pytest.raises(InvalidArgument, match=r"event\.ack"):
        check_function(bad, lambda _: None, stream=True)


def test_each_refused_setting_is_refused() -> None:
    for name in REFUSED["setting"]:
        with pytest.raises(InvalidArgument, match=name):
            app_of(**{name: 1})
    with pytest.raises(TypeError, match="no option"):
        app_of(commit_every=3)


def test_each_refused_method_is_refused() -> None:
    """By name, for each object: not Faust's own error."""
    app: Any = app_of()
    topic = app.topic("s/a")
    objects = {
        "app": app, "stream": topic.stream(), "topic": topic, "table": app.Table("t"),
        "agent": app.agent(topic)(_good), "event": app.conf.Event(app, None, None, None, None),
        "windowed table": app.Table("w").tumbling(10),
    }  # fmt: skip
    for kind, of in objects.items():
        for name in REFUSED[kind]:
            with pytest.raises(InvalidArgument):
                _use(of, name)
    for kind, make in (("app.topic", app.topic), ("app.Table", app.Table)):
        for name in REFUSED[kind]:
            with pytest.raises(InvalidArgument, match=name):
                make("s/b", **{name: name != "acks" and 1})
    for name in REFUSED["app.agent"]:
        with pytest.raises(InvalidArgument):
            app.agent(topic, **{name: name != "use_reply_headers"})(_good)


# -- what works: Faust's own parts, at work here -----------------------------------------------------


class Money(faust.Record, serializer="json", abstract=True):
    """A base of records."""

    amount: int


class Sale(Money, serializer="json", isodates=True, coerce=True, validation=True, namespace="sale"):
    """An event."""

    city: str = "Oslo"


def test_records_and_schemas_are_faust_s_own() -> None:
    """They decode what agents get, and encode what they send: no part of them is replaced."""
    assert "anabranch" not in {one.__module__.partition(".")[0] for one in Sale.__mro__}
    app = app_of(key_serializer="json", value_serializer="json")
    schema: Any = faust.Schema(key_type=str, key_serializer="json", value_type=Sale)
    out = app.topic("s/out", schema=schema)
    seen: list[Any] = []

    @app.agent(app.topic("s/a", schema=schema, allow_empty=True))
    async def read(stream: Any) -> None:
        async for key, sale in stream.items():
            seen.append((key, sale))
            if sale is not None:
                await out.send(key=key, value=sale.derive(city="Rome"))

    @app.agent("s/b", key_type=int, value_type=Sale)
    async def read_too(stream: Any) -> None:
        async for key, sale in stream.items():
            seen.append((key, sale.asdict(), sale.is_valid()))

    with AgentDriver(app, "s/out") as driver:
        driver.send("s/a", b'{"amount": "3"}', key=b'"k"')
        driver.send("s/a", None, key=b'"k"')
        driver.send("s/b", b'{"amount": 4, "city": "Bonn"}', key=b"7")
        (written,) = driver.outputs("s/out")
    assert seen[0] == ("k", Sale(amount=3))
    assert seen[1:] == [("k", None), (7, {"amount": 4, "city": "Bonn"}, True)]
    assert written.key == b'"k"'
    assert Sale.loads(written.value).city == "Rome"


class Seen(faust.Sensor):
    """What it was called with."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[str] = []

    def on_message_in(self, tp: Any, offset: int, message: Any) -> None:
        self.seen.append(f"in {tp.topic}@{offset}")

    def on_message_out(self, tp: Any, offset: int, message: Any) -> None:
        self.seen.append(f"out {tp.topic}@{offset}")

    def on_stream_event_in(self, tp: Any, offset: int, stream: Any, event: Any) -> Any:
        self.seen.append(f"event {event.value}")
        return {"state": 1}

    def on_stream_event_out(
        self, tp: Any, offset: int, stream: Any, event: Any, state: Any = None
    ) -> None:
        self.seen.append(f"done {event.value} {state}")

    def on_table_get(self, table: Any, key: Any) -> None:
        self.seen.append(f"get {table.name} {key}")

    def on_table_set(self, table: Any, key: Any, value: Any) -> None:
        self.seen.append(f"set {table.name} {key} {value}")

    def on_table_del(self, table: Any, key: Any) -> None:
        self.seen.append(f"del {table.name} {key}")

    def on_send_initiated(
        self, producer: Any, topic: str, message: Any, keysize: int, valsize: int
    ) -> Any:
        self.seen.append(f"send {topic} {keysize} {valsize}")

    def on_send_completed(self, producer: Any, state: Any, metadata: Any) -> None:
        self.seen.append(f"sent {metadata.topic}")


def test_sensors_see_events_sends_and_tables() -> None:
    app, sensor = app_of(), Seen()
    app.sensors.add(sensor)
    table, out = app.Table("t", key_type=str), app.topic("s/out")

    @app.agent(app.topic("s/a", key_type=str))
    async def read(stream: Any) -> None:
        async for key, value in stream.items():
            table[key] = value
            await out.send(key=key, value=table[key])
            del table[key]

    with AgentDriver(app, "s/out") as driver:
        driver.send("s/a", b"7", key="k")
    assert sensor.seen == [
        "in s/a@0", "event 7", "set t k 7", "get t k", "send s/out 1 1", "sent s/out", "del t k",
        "done 7 {'state': 1}", "out s/a@0",
    ]  # fmt: skip


def test_the_words_of_a_stream() -> None:
    """Processors, filters, sinks, echoes; values, events, numbers; sends with all options."""
    app = app_of()
    found: list[Any] = []
    out = app.topic("s/out", key_type=str)

    @app.agent(app.topic("s/b"), name="second")
    async def second(stream: Any) -> None:
        async for value in stream:
            found.append(("second", value, stream.current_event.value, stream.events_total))

    @app.agent(app.topic("s/a", key_type=str), sink=[out], concurrency=1, name="first")
    async def first(stream: Any) -> Any:
        stream.add_processor(lambda value: value * 2)
        assert stream.get_active_stream() is stream.get_root_stream() is stream
        assert "s/a" in stream.label
        assert "s/a" in stream.shortlabel
        async for number, value in stream.filter(lambda v: v > 2).echo("s/copies").enumerate(5):
            event: Any = stream.current_event
            assert event.app is app
            assert [faust.current_event()] == [event]
            await event.send("s/out", value="sent", key="e")
            await event.forward(out, headers={"a": b"b"})
            await second.cast(value, key="c")
            await second.send(key="s", value=value + 1)
            sent = await out.send(
                key=event.key, value=b"raw", timestamp=1e9, headers={"x": b"y"}, force=True,
                key_serializer="raw", value_serializer="raw", schema=out.schema,
            )  # fmt: skip
            assert (await sent).topic == "s/out"
            yield [number, value]

    first.add_sink(second)
    assert [*first.get_topic_names()] == ["s/a"]
    assert first.channel.get_topic_name() == "s/a"
    assert "first" in first.label
    assert "first" in first.shortlabel
    assert first.info()["name"] == "first"
    with AgentDriver(app, "s/out", "s/copies", "s/b") as driver:
        driver.send("s/a", b"1", key="k", headers=[("h", b"1")])
        driver.send("s/a", b"2", key="k", headers=[("h", b"1")])
        written = [(e.key, e.value, e.headers, e.timestamp) for e in driver.outputs("s/out")]
        copied = [event.value for event in driver.outputs("s/copies")]
        now = driver.now
    assert written[:3] == [
        (b"e", b'"sent"', [("h", b"1")], now),
        (b"k", b"2", [("a", b"b")], now),
        (b"k", b"raw", [("x", b"y")], 10**12),
    ]
    assert [json.loads(value) for _, value, _, _ in written[3:]] == [[5, 4]]
    assert copied == [b"4"]
    assert found == [
        ("second", value, value, total) for total, value in enumerate((4, 5, [5, 4]), 1)
    ]


def test_settings_are_faust_s_own() -> None:
    """Those that work have Faust's values, and are read by Faust's own parts, or as their tests show."""
    ours, theirs = app_of(), faust.App("s-x")
    for app in (ours, theirs):
        app.finalize()
    of_id = {"datadir", "tabledir"}
    for name in set(works("setting")) - of_id:
        assert getattr(ours.conf, name) == getattr(theirs.conf, name), name
    given = app_of(timezone=UTC, debug=True, web_port=7001, blocking_timeout=3, topic_partitions=5)
    assert (given.conf.timezone, given.conf.debug, given.conf.web_port) == (UTC, True, 7001)
    assert (given.conf.blocking_timeout, given.conf.topic_partitions) == (3, 5)
