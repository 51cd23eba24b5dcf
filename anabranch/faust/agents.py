"""Faust's agents as the handlers of a worker.

`AgentHandlers`, in the worker's thread, puts events into inboxes, one for each actor (a running instance of an
agent) on Faust's loop, and waits until the actors are done with them, or hold them for a list (`Stream.take`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Sequence,
)
from functools import partial
from typing import Any, NamedTuple

import faust
from faust.agents import agent as faust_agent
from faust.exceptions import ImproperlyConfigured, Skip
from faust.streams import maybe_forward
from faust.types import TP, FieldDescriptorT
from faust.types.tuples import Message
from mode import want_seconds

from anabranch.controller.monitor import Numbers
from anabranch.errors import IllegalState
from anabranch.faust.words import REFUSED, refuse, refusing
from anabranch.processing.batch import (
    HandlerContext,
    TaskRows,
    Undo,
    WorkBatch,
    begin_context,
)
from anabranch.processing.failures import Case, HandlerFailed, is_from_outside
from anabranch.processing.handlers import Handlers, closed_by_failure
from anabranch.protocol.legal_names import PLAIN
from anabranch.protocol.limits import copied_name
from anabranch.reading.slices import Piece, split_pieces
from anabranch.types import Event

_TURN = 64  # events that an actor handles before other actors run
_END_S = 5.0
_SAY_S = 30.0
_SKIPPED: Any = object()


class Hand:
    """Events that agents handle together: those of a batch since all agents were last done with all.

    ``over``: ends when each event is done, or waits in a list, or with the first error. ``left``: pairs of event
    and agent that are not done yet; ``held``: those of them that wait. ``undo``: undoes the changes of all agents.
    """

    def __init__(self, batch: WorkBatch, undo: list[Undo]) -> None:
        self.batch, self.undo = batch, undo
        self.left = self.held = 0
        self.failed = False
        self.begun_s = time.monotonic()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(self) -> None:
        """Note that one agent is done with one event."""
        self.left -= 1
        self.rest()

    def hold(self) -> None:
        """Note that one event waits for others."""
        self.held += 1
        self.rest()

    def rest(self) -> None:
        """End the wait if nothing happens until the worker does something."""
        if self.left == self.held and not self.over.done():
            self.over.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Note that an agent failed: no event of the hand counts as done."""
        self.failed = True
        if not self.over.done():
            self.over.set_exception(error)


class Given(NamedTuple):
    hand: Hand
    task: int
    event: Event


class Work(NamedTuple):
    """An event that an actor handles. ``state``: what the sensors returned for it."""

    given: Given
    event: Any  # of Faust
    at: HandlerContext
    state: Any


class Keys(dict[Any, tuple[int, bytes]]):
    """The keys of a list of events, in place of one event's: decoded or as bytes -> task, and bytes."""


class Inbox:
    """Events for one actor. ``own_key``: the actor may use its event's key alone: others work concurrently."""

    def __init__(self, *, own_key: bool, strays: list[IllegalState]) -> None:
        self.items: deque[Given] = deque()
        self.own_key, self.strays = own_key, strays
        self.at_work: Event | None = None
        self.at: HandlerContext | None = None  # the call for the event at work
        self.hand: Hand | None = None
        self.ended: BaseException | None = None  # why its actor ended
        self.asked = asyncio.Event()  # set once its actor has asked for an event, or has ended
        # A list's events so far, and the most that it may have; the seconds that it may last, and when it began;
        # whether it has to end.
        self.held: list[Work] = []
        self.most = 1
        self.within_s = self.since_s = 0.0
        self.is_due = False
        self._wake: asyncio.Future[None] | None = None

    def wake(self, hand: Hand) -> None:
        self.hand = hand
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def wait(self) -> None:
        self.asked.set()
        self._wake = asyncio.get_running_loop().create_future()
        await self._wake

    @property
    def room(self) -> int:
        """How many events more the list may have."""
        return self.most - len(self.held)

    def hold(self, work: Work) -> None:
        """Add an event to the list, which ends if it is full now."""
        hand = work.given.hand
        if not self.held:
            self.since_s = time.monotonic()
        work.at.over = True
        if self.room > 1:
            self.held.append(work)
            hand.hold()
        else:
            self.flush(hand)
            self.held.append(work)

    def flush(self, hand: Hand) -> None:
        """End the list, so that its events are handled now."""
        self.is_due = True
        hand.held -= len(self.held)
        self.wake(hand)

    def drop(self) -> None:
        """Refuse writes for the event at work, because its actor starts again; the writes don't count as strays."""
        if self.at is not None:
            self.at.over, self.at.strays = True, None

    def end(self, error: BaseException) -> None:
        """Note that the inbox's actor ended with this error, which fails the hand."""
        self.ended = error
        self.asked.set()
        if self.hand is not None:
            self.hand.fail(HandlerFailed(self.at_work, error))


@refusing("stream", faust.Stream)
class Stream(faust.Stream[Any]):
    """The stream of events that an actor iterates over. ``agent``: None outside of an agent."""

    app: Any
    channel: Any
    agent: Agent | None = None
    inbox: Inbox
    filters = 0  # how many of the processors, from the first one on, only filter

    def begin(self, agent: Agent, inbox: Inbox) -> None:
        """Let an actor of an agent read the stream."""
        self.agent, self.inbox = agent, inbox
        self._load = make_loader(self.app, self.channel)

    def echo(self, *channels: Any) -> Stream:
        """Forward values to topics. An error counts as the agent's."""
        topics = [self.app.topic(one) if isinstance(one, str) else one for one in channels]
        for topic in topics:
            self.app.check_written(topic, "stream.echo")

        async def echoing(value: Any) -> Any:
            for topic in topics:
                await maybe_forward(value, topic)
            return value

        self.add_processor(echoing)
        return self

    def filter(self, fun: Any) -> Stream:
        """As Faust's. Filters before a `group_by` or `through` decide what is written there."""
        if self.filters == len(self._processors):
            self.filters += 1
        super().filter(fun)
        return self

    def group_by(
        self, key: Any, *, name: str | None = None, topic: Any = None, partitions: int | None = None
    ) -> Stream:
        """Write the events to a stream under another key, and read them there, each in a later commit.

        ``key``: a field, or a function, of the value; its error counts as the agent's. ``topic``: an existing
        stream. Without it, the app has a stream for it, made with ``partitions`` segments at its first start.

        Raises: InvalidArgument, ImproperlyConfigured.
        """
        is_field = isinstance(key, FieldDescriptorT)
        if not name and not is_field:
            raise TypeError("group_by with a function needs name=")
        if topic is None and self.agent is not None:
            topic = self.app.own_topic(self.agent.name, self.channel, name or key.ident, partitions)

        async def forward(value: Any) -> Any:
            found = key.getattr(value) if is_field else key(value)
            if isinstance(found, Awaitable):
                found = await found
            await self._forward(topic, key=found)
            return value

        return self._derived("group_by", topic, forward)

    def through(self, channel: Any) -> Stream:
        """Write the events to a stream, and read them there, each in a later commit. Raises: as `group_by`."""
        topic = (
            self.app.topic(channel, schema=self.channel.schema)
            if isinstance(channel, str)
            else channel
        )

        async def forward(value: Any) -> Any:
            await self._forward(topic)
            return value

        return self._derived("through", topic, forward)

    async def _forward(self, topic: Any, **key: Any) -> None:
        event: Any = self.current_event
        headers = [(copied_name(name), data) for name, data in event.message.headers or ()]
        await event.forward(topic, headers=headers, **key)

    def _derived(self, word: str, topic: Any, forward: Callable[[Any], Awaitable[Any]]) -> Stream:
        """A stream of the events that ``forward`` writes to a topic. The agent reads this stream in its place."""
        if self.agent is None:
            refuse(f"stream.{word} outside of an agent", REFUSED["app"]["stream"])
        if self.concurrency_index is not None:
            raise ImproperlyConfigured(f"an agent with concurrency above 1 can't use stream.{word}")
        if self._next is not None or self.inbox.asked.is_set():
            raise ImproperlyConfigured(
                f"stream.{word}: the stream is read already, or by another such word"
            )
        self.app.check_written(topic, f"stream.{word}")
        processors, self._processors = self._processors, self._processors[: self.filters]
        self._processors.append(forward)
        derived: Any = self.clone(channel=topic, processors=processors[self.filters :], prev=self)
        self._next = derived
        self.agent.adopt(derived, drained=self)
        found: Stream = derived
        return found

    def take(self, max_: int, within: Any) -> AsyncGenerator[Sequence[Any], None]:
        """Lists of at most ``max_`` values. A list ends when it is full, or ``within`` seconds after its first one.

        A list also ends with its commit, if that is full, tasks move, or another agent's list has ended.

        Raises: InvalidArgument.
        """
        return self._lists("take", max_, within, lambda work, value: value)

    def take_events(self, max_: int, within: Any) -> AsyncGenerator[Sequence[Any], None]:
        """As `take`, with events."""
        return self._lists("take_events", max_, within, lambda work, value: work.event)

    def take_with_timestamp(
        self, max_: int, within: Any, timestamp_field_name: str
    ) -> AsyncGenerator[Sequence[Any], None]:
        """As `take`. Values that are dicts get the event's timestamp (Unix seconds) under a name."""

        def stamped(work: Work, value: Any) -> Any:
            if isinstance(value, dict) and timestamp_field_name:
                value[timestamp_field_name] = work.event.message.timestamp
            return value

        return self._lists("take_with_timestamp", max_, within, stamped)

    def _lists(
        self, word: str, most: int, within: Any, item: Callable[[Work, Any], Any]
    ) -> AsyncGenerator[Sequence[Any], None]:
        seconds = want_seconds(within) if within else 0.0
        if most < 1 or not 0 < seconds <= 3600:
            refuse(
                f"stream.{word}({most}, within={within})",
                "a commit waits for its lists: take 1 or more, within 3600 seconds at most",
            )
        self._check_agent()
        return self._taken(most, seconds, item)

    async def _taken(
        self, most: int, seconds: float, item: Callable[[Work, Any], Any]
    ) -> AsyncGenerator[Sequence[Any], None]:
        inbox, items = self.inbox, list[Any]()
        inbox.most, inbox.within_s = most, seconds
        while True:
            if inbox.is_due:
                held, inbox.held, inbox.is_due = inbox.held, [], False
                yield self._begin_list(held, items)
                items = []
                for work in held:
                    self._done(work)
                await asyncio.sleep(0)
                continue
            found = await self._next_work()
            if found is None:
                continue
            value = await self._processed(found)
            if value is _SKIPPED:
                self._done(found)
                continue
            items.append(item(found, value))
            inbox.hold(found)

    def _begin_list(self, held: Sequence[Work], items: list[Any]) -> list[Any]:
        """Let the actor's changes count for a list of events, whose keys' rows it may use."""
        last, inbox = held[-1], self.inbox
        inbox.at_work = last.given.event if len(held) == 1 else None
        inbox.at = at = self._begin(last.given)
        keys = Keys()
        for work in held:
            if (raw := work.given.event.key) is not None:
                place = work.given.task, raw
                keys[raw] = place
                if getattr(type(work.event.key), "__hash__", None) is not None:
                    keys[work.event.key] = place
        at.key, at.name, at.own_key = None, keys, inbox.own_key
        self.events_total += len(held)
        return items

    def __aiter__(self) -> AsyncIterator[Any]:
        self._check_agent()
        return self._given()

    def _check_agent(self) -> None:
        if self.agent is None:
            refuse("a stream outside of an agent", REFUSED["app"]["stream"])

    async def _given(self) -> AsyncIterator[Any]:
        # An event is done when the agent asks for the next one, which it does not after an exception or `break`.
        turn = 0
        while True:
            work = await self._next_work()
            if work is None:
                continue
            value = await self._processed(work)
            if value is not _SKIPPED:
                self.events_total += 1
                yield value
            self._done(work)
            turn += 1
            if turn % _TURN == 0:
                await asyncio.sleep(0)

    async def _next_work(self) -> Work | None:
        """The next event, decoded. None: ask again."""
        inbox = self.inbox
        if not inbox.items:
            await inbox.wait()
            return None
        given = inbox.items.popleft()
        if given.hand.failed:
            return None
        inbox.at_work = given.event
        inbox.at = at = self._begin(given)
        at.own_key = inbox.own_key
        event = self._load(given.event)
        at.name = event.key
        tp, offset = event.message.tp, given.event.offset
        self._on_message_in(tp, offset, event.message)
        state = self._on_stream_event_in(tp, offset, self, event)
        self._set_current_event(event)
        return Work(given, event, at, state)

    def _begin(self, given: Given) -> HandlerContext:
        at = begin_context(given.hand.batch)
        at.undo, at.strays = given.hand.undo, self.inbox.strays
        at.task, at.key, at.timestamp = given.task, given.event.key, given.event.timestamp
        return at

    async def _processed(self, work: Work) -> Any:
        """The value after all processors, or `_SKIPPED`."""
        value = work.event.value
        try:
            for processor in self._processors:
                value = processor(value)
                if isinstance(value, Awaitable):
                    value = await value
        except Skip:
            return _SKIPPED
        return value

    def _done(self, work: Work) -> None:
        if self.inbox.at is not None:
            self.inbox.at.over = True
        work.at.over = True
        self.current_event = None
        message = work.event.message
        self._on_stream_event_out(message.tp, message.offset, self, work.event, work.state)
        self._on_message_out(message.tp, message.offset, message)
        self.inbox.at_work = self.inbox.at = None
        work.given.hand.done()


def make_loader(app: Any, topic: Any) -> Callable[[Event], Any]:
    """A function that turns our events into Faust's, by a topic's schema."""
    schema, registry = topic.schema, app.serializers
    loads_key, loads_value = registry.loads_key, registry.loads_value
    make_event = app.conf.Event
    places: dict[tuple[str, int], TP] = {}

    def load(event: Event) -> Any:
        headers: Any  # in Faust's types each header has a value
        stream, key, value, headers, ms, *_, partition, offset = event
        place = places.get((stream, partition))
        if place is None:
            place = places[stream, partition] = TP(stream.removeprefix(PLAIN), partition)
        message = Message(
            place.topic,
            partition,
            offset,
            timestamp=ms / 1000,
            timestamp_type=0,
            headers=headers,
            key=key,
            value=value,
            checksum=None,
            serialized_key_size=len(key or b""),
            serialized_value_size=len(value or b""),
            tp=place,
        )
        name = schema.loads_key(app, message, loads=loads_key)
        found = None
        if value is not None or not topic.allow_empty:
            found = schema.loads_value(app, message, loads=loads_value)
        return make_event(app, name, found, headers, message)

    return load


class Reader(NamedTuple):
    """Inboxes that share the events of some inputs. Actors read them, or a task that writes them elsewhere."""

    inputs: Sequence[str]
    inboxes: list[Inbox]


@refusing("agent", faust.Agent)
class Agent(faust.Agent):
    """An agent whose actors all start again after a `Hand` failed."""

    app: Any

    def __init__(self, fun: Any, *, isolated_partitions: bool = False, **options: Any) -> None:
        """Raises: InvalidArgument."""
        channel = options.get("channel")
        if channel is None:
            refuse(
                "an agent without a topic", "name the stream: @app.agent(app.topic('scope/name'))"
            )
        if isolated_partitions or options.get("supervisor_strategy") is not None:
            refuse(
                "isolated_partitions or supervisor_strategy",
                "use concurrency=; what failed is done again",
            )
        if not options.get("use_reply_headers", True):
            refuse("agent(use_reply_headers=)", "there are no replies: leave it out")
        if isinstance(channel, str):
            types = {o: options.pop(o, None) for o in ("schema", "key_type", "value_type")}
            options["channel"] = options["app"].topic(channel, **types)
        super().__init__(fun, **options)
        for sink in self._sinks:
            self.app.check_written(sink, "a sink")
        self.readers: list[Reader] = []
        self._running: list[asyncio.Task[None]] = []

    def add_sink(self, sink: Any) -> None:
        """As Faust's. Raises: InvalidArgument (a plain topic)."""
        self.app.check_written(sink, "a sink")
        super().add_sink(sink)

    @property
    def sinks(self) -> Sequence[Any]:
        """Topics, agents and functions that get what the agent yields."""
        return self._sinks

    @property
    def inboxes(self) -> list[Inbox]:
        """The inboxes of all readers."""
        return [inbox for reader in self.readers for inbox in reader.inboxes]

    async def on_start(self) -> None:
        self._running = []
        channel: Any = self.channel
        root = Reader(channel.inputs, [])
        self.readers = [root]
        for index in range(self.concurrency):
            inbox = Inbox(own_key=self.concurrency > 1, strays=self.app.strays)
            stream: Any = self.stream(concurrency_index=index if self.concurrency > 1 else None)
            stream.begin(self, inbox)
            root.inboxes.append(inbox)
            actor = self.actor_from_stream(stream, index=stream.concurrency_index)
            await self._prepare_actor(actor, self.beacon)
            if actor.actor_task is not None:  # always true; for mypy
                self._running.append(actor.actor_task)

    def adopt(self, derived: Stream, *, drained: Stream) -> None:
        """Let an actor read a derived stream, and a task of its own the events that become it."""
        derived.begin(self, Inbox(own_key=False, strays=self.app.strays))
        self.app.check_input(derived.channel)
        self.readers.append(Reader(derived.channel.inputs, [derived.inbox]))
        self._running.append(asyncio.get_running_loop().create_task(self._drain(drained)))

    async def _drain(self, stream: Stream) -> None:
        async def drain() -> None:
            async for _ in stream:
                pass

        await self._until_end(drain(), stream)

    async def until_ready(self) -> None:
        """Wait until each actor has asked for its first event. Raises: HandlerFailed (one has ended)."""
        seen = 0
        while seen < len(inboxes := self.inboxes):  # an actor may add one meanwhile
            await inboxes[seen].asked.wait()
            if (error := inboxes[seen].ended) is not None:
                raise HandlerFailed(None, error)
            seen += 1

    async def on_stop(self) -> None:
        """End the actors. Their events at work don't count as done."""
        for inbox in self.inboxes:
            inbox.drop()
        tasks, self._running = self._running, []
        for task in tasks:
            task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=_END_S)
            if left:
                self.log.error("%s: %d actors don't end", self.name, len(left))
        self.beacon.children.clear()  # `mode` adds each stream and actor, and never removes one

    def cancel(self) -> None:
        """Do nothing: `on_stop` ends the actors."""

    async def send(
        self, *, reply_to: Any = None, correlation_id: Any = None, **options: Any
    ) -> Any:
        """Send to the agent's topic. Raises: as `Topic.send`."""
        if reply_to is not None or correlation_id is not None:
            refuse(
                "agent.send(reply_to=)", "send to a topic, and read the answers from another one"
            )
        return await self.channel.send(**options)

    async def _execute_actor(self, coro: Awaitable[Any], aref: Any) -> None:
        faust_agent._current_agent.set(self)  # noqa: SLF001  # as in the method that this one replaces
        await self._until_end(coro, aref.stream)

    async def _until_end(self, work: Awaitable[Any], stream: Any) -> None:
        """Await what reads a stream, or a stream derived from it. When it ends, events of both fail."""
        error: BaseException = IllegalState(
            f"agent {self.name} ended: it has to read its stream without end (no break, no return)"
        )
        try:
            await work
        except BaseException as raised:
            error = raised
            # An exit counts as a failure of the agent. If it were raised, asyncio would end the process.
            if not isinstance(raised, Exception | SystemExit) or is_from_outside(raised):
                raise
        finally:
            stream.get_active_stream().inbox.end(error)
            stream.inbox.end(error)


class AgentHandlers(Handlers):
    """Calls agents with a worker's events. All methods but `end` are called on the worker's thread."""

    def __init__(
        self, app: Any, stores: Sequence[str], metrics: Numbers, stop: threading.Event,
        *, loop: asyncio.AbstractEventLoop, agents: Sequence[Agent], strays: list[IllegalState],
    ) -> None:  # fmt: skip
        super().__init__(app, stores, metrics, stop)
        self._on, self._agents, self._strays = loop, agents, strays
        self._hand: Hand | None = None  # at work, or with events that wait
        self._waiting: list[tuple[Event, int]] = []  # the events of the hand, if some of them wait
        self._ended = False

    @property
    def held_until(self) -> float:
        """As of `Handlers`: until the last list has to end. A list that begins later ends with the commit."""
        hand = self._hand
        if hand is None or not self._waiting:
            return 0.0
        inboxes = self._holding()
        longest = max((one.within_s for one in inboxes), default=0.0)
        ends = (one.since_s + one.within_s for one in inboxes)
        return min(max(ends, default=0.0), hand.begun_s + longest)

    def _holding(self) -> list[Inbox]:
        return [one for agent in self._agents for one in agent.inboxes if one.held]

    def resume(self, table: TaskRows, tasks: Collection[int]) -> None:
        super().resume(table, tasks)
        if self._waiting:  # of a batch that was dropped
            self._waiting = []
            asyncio.run_coroutine_threadsafe(self._restart(), self._on).result()

    def step(
        self, batch: WorkBatch, tasks: Collection[int], wall: Callable[[], float],
        read: Callable[[], list[Piece]],
    ) -> list[Piece]:  # fmt: skip
        """As of `Handlers`. Lists end whose time has come."""
        some = super().step(batch, tasks, wall, read)
        now = time.monotonic()
        if any(one.since_s + one.within_s <= now for one in self._holding()):
            self._flush(batch, now)
        return some

    def close_batch(self, batch: WorkBatch) -> bool:
        """As of `Handlers`. All lists end."""
        if self._waiting:
            self._flush(batch, None)
        return super().close_batch(batch)

    def _flush(self, batch: WorkBatch, now: float | None) -> None:
        """End the lists that are due at a monotonic second; None: all of them."""
        with closed_by_failure(batch) as at:
            self._handle(at, (), partial(self._end_lists, now))
        self._check_strays()

    def handle(self, batch: WorkBatch, pieces: Sequence[Piece]) -> list[Piece]:
        """Hand events to agents, and wait until all are done. After a failure, hand the events over one by one.

        If the commit is due, and waits for lists, it ends with them: returns the events after them. Raises:
        HandlerFailed, IllegalState (an asyncio task wrote after its event).
        """
        left = list(pieces)
        with closed_by_failure(batch) as at:
            while left:
                _, left = split_pieces(left, self._bury_refused(at, left))
                waits = bool(self._waiting) and self.monotonic() >= self.due and not self._app.whole
                room = min((one.room for one in self._holding()), default=1)
                some, left = split_pieces(left, room) if waits else (left, [])
                given = [
                    pair for piece in some for pair in zip(piece.events, piece.tasks, strict=True)
                ]
                if given:
                    self._handle(at, given, partial(self._deal, given))
                if waits and not self._waiting:
                    break
        self._check_strays()
        return left

    def _check_strays(self) -> None:
        if self._strays:
            raise self._strays[0]

    def _handle(
        self, at: HandlerContext, given: Iterable[tuple[Event, int]], begin: Callable[[Hand], None]
    ) -> None:
        if self._waiting and self._hand is not None:
            at.undo = self._hand.undo
        self._waiting += given
        failed = self._failed(at, begin)
        if failed is None:
            return
        events, self._waiting = self._waiting, []
        at.take_back()  # agents share rows, so the changes of one event can't be undone alone
        for event, task in events:
            case = partial(Case.of, event)
            first = failed.error if event is failed.event else None
            self._failures.try_or_bury(at, case, partial(self._failure, at, event, task), first)

    def _failure(self, at: HandlerContext, event: Event, task: int) -> BaseException | None:
        """The error of one event, without others."""
        self._waiting = [(event, task)]
        failed = self._failed(at, partial(self._deal, self._waiting))
        if failed is None and self._waiting:
            failed = self._failed(at, partial(self._end_lists, None))
        self._waiting = []
        if failed is not None and failed.event is None:
            raise failed  # the agent ended without an event at work
        return None if failed is None else failed.error

    def _failed(self, at: HandlerContext, begin: Callable[[Hand], None]) -> HandlerFailed | None:
        try:
            asyncio.run_coroutine_threadsafe(self._give(at, begin), self._on).result()
        except HandlerFailed as failed:
            return failed
        if self._hand is None:
            self._waiting = []
            at.undo.clear()
        return None

    def end(self) -> None:
        """Stop waiting for agents that don't end. Called on Faust's loop."""
        self._ended = True
        if self._hand is not None:
            self._hand.fail(IllegalState("the worker ends, and an agent is not done"))

    async def _give(self, at: HandlerContext, begin: Callable[[Hand], None]) -> None:
        hand = self._hand
        if hand is None:
            hand = self._hand = Hand(at.batch, at.undo)
        else:
            hand.over = asyncio.get_running_loop().create_future()
        try:
            begin(hand)
            hand.rest()
            done: Collection[Any] = ()
            while not done:
                done, _ = await asyncio.wait([hand.over], timeout=_SAY_S)
                if not done:
                    busy = [one.name for one in self._agents if any(b.at_work for b in one.inboxes)]
                    self._agents[0].log.warning("not done yet: %s", ", ".join(busy))
            hand.over.result()
        except BaseException as error:
            hand.fail(error)
            await self._restart()
            raise
        if not hand.left:
            self._hand = None

    async def _restart(self) -> None:
        """Begin all actors again, without the events that they have."""
        self._hand = None
        if not self._ended:
            for agent in self._agents:
                await agent.on_stop()
                await agent.on_start()
            for agent in self._agents:
                await agent.until_ready()

    def _check_running(self) -> None:
        if self._ended:
            raise IllegalState("the worker ends")
        for agent in self._agents:
            for inbox in agent.inboxes:
                if inbox.ended is not None:
                    raise HandlerFailed(None, inbox.ended)

    def _deal(self, given: Sequence[tuple[Event, int]], hand: Hand) -> None:
        """Put each event into an inbox of each reader of its stream. The key decides which inbox."""
        self._check_running()
        readers = dict[str, list[list[Inbox]]]()
        for agent in self._agents:
            for reader in agent.readers:
                for name in reader.inputs:
                    readers.setdefault(name, []).append(reader.inboxes)
        woken: dict[Inbox, None] = {}
        for event, task in given:
            of_stream = readers[event.stream]
            hand.left += len(of_stream)
            for boxes in of_stream:
                which = event.offset if event.key is None else hash(event.key)
                box = boxes[which % len(boxes)]
                box.items.append(Given(hand, task, event))
                woken[box] = None
        for box in woken:
            box.wake(hand)

    def _end_lists(self, now: float | None, hand: Hand) -> None:
        """End lists, as of `_flush`."""
        self._check_running()
        for box in self._holding():
            if now is None or box.since_s + box.within_s <= now:
                box.flush(hand)
