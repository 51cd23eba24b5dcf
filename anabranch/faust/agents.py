"""Faust's agents as the handlers of a worker.

`AgentHandlers`, in the worker's thread, puts events into inboxes, one for each actor (a running instance of an
agent) on Faust's loop, and waits until the actors are done with them.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import faust
from faust.agents import agent as faust_agent
from faust.exceptions import Skip
from faust.streams import maybe_forward
from faust.types import TP
from faust.types.tuples import Message

from anabranch.controller.monitor import Numbers
from anabranch.errors import IllegalState
from anabranch.faust.refusals import AGENT, STREAM, refuse, refusing
from anabranch.processing.batch import HandlerContext, Undo, WorkBatch, begin_context
from anabranch.processing.failures import Case, HandlerFailed, is_from_outside
from anabranch.processing.handlers import Handlers, closed_by_failure
from anabranch.reading.slices import Piece
from anabranch.types import Event

_TURN = 64  # events that an actor handles before other actors run
_END_S = 5.0


class Hand:
    """A group of events that agents handle together.

    ``over``: ends when all agents are done with all events, or with the first error. ``left``: pairs of
    event and agent that are not done yet. ``undo``: undoes the changes of all agents.
    """

    def __init__(self, batch: WorkBatch, undo: list[Undo]) -> None:
        self.batch, self.undo = batch, undo
        self.left = 0
        self.failed = False
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(self) -> None:
        """Note that one agent is done with one event."""
        self.left -= 1
        if not self.left and not self.over.done():
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


class Inbox:
    """Events for one actor. ``own_key``: the actor may use its event's key alone: others work concurrently."""

    def __init__(self, *, own_key: bool, strays: list[IllegalState]) -> None:
        self.items: deque[Given] = deque()
        self.own_key, self.strays = own_key, strays
        self.at_work: Event | None = None
        self.at: HandlerContext | None = None  # the call for the event at work
        self.hand: Hand | None = None
        self.ended: BaseException | None = None  # why its actor ended
        self._wake: asyncio.Future[None] | None = None

    def wake(self, hand: Hand) -> None:
        self.hand = hand
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def wait(self) -> None:
        self._wake = asyncio.get_running_loop().create_future()
        await self._wake

    def drop(self) -> None:
        """Refuse writes for the event at work, because its actor starts again; the writes don't count as strays."""
        if self.at is not None:
            self.at.over, self.at.strays = True, None

    def end(self, error: BaseException) -> None:
        """Note that the inbox's actor ended with this error, which fails the hand."""
        self.ended = error
        if self.hand is not None:
            self.hand.fail(HandlerFailed(self.at_work, error))


@refusing("stream", STREAM)
class Stream(faust.Stream[Any]):
    """The stream of events that an actor iterates over."""

    app: Any
    inbox: Inbox | None = None

    def echo(self, *channels: Any) -> Stream:
        """Forward values to topics. An error counts as the agent's."""
        topics = [self.app.topic(one) if isinstance(one, str) else one for one in channels]

        async def echoing(value: Any) -> Any:
            for topic in topics:
                await maybe_forward(value, topic)
            return value

        self.add_processor(echoing)
        return self

    def __aiter__(self) -> AsyncIterator[Any]:
        if self.inbox is None:
            refuse("a stream outside of an agent", "decorate a function with @app.agent(topic)")
        return self._given(self.inbox)

    async def _given(self, inbox: Inbox) -> AsyncIterator[Any]:
        # An event is done when the agent asks for the next one, which it does not after an exception or `break`.
        app, items, processors = self.app, inbox.items, self._processors
        event_in, event_out = self._on_stream_event_in, self._on_stream_event_out
        load = _loader(app, self.channel)
        turn = 0
        while True:
            while not items:
                await inbox.wait()
            hand, task, given = items.popleft()
            if hand.failed:
                continue
            inbox.at_work = given
            inbox.at = at = begin_context(hand.batch)
            at.undo = hand.undo
            at.task, at.key, at.timestamp = task, given.key, given.timestamp
            at.own_key, at.strays = inbox.own_key, inbox.strays
            event = load(given)
            at.name = event.key
            tp, offset = event.message.tp, given.offset
            state = event_in(tp, offset, self, event)
            self._set_current_event(event)
            value = event.value
            try:
                for processor in processors:
                    value = processor(value)
                    if isinstance(value, Awaitable):
                        value = await value
            except Skip:
                pass
            else:
                self.events_total += 1
                yield value
            at.over = True
            self.current_event = None
            event_out(tp, offset, self, event, state)
            inbox.at_work = inbox.at = None
            hand.done()
            turn += 1
            if turn % _TURN == 0:
                await asyncio.sleep(0)


def _loader(app: Any, topic: Any) -> Callable[[Event], Any]:
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
            place = places[stream, partition] = TP(stream, partition)
        message = Message(
            stream,
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


@refusing("agent", AGENT)
class Agent(faust.Agent):
    """An agent whose actors all start again after a `Hand` failed."""

    app: Any

    def __init__(self, fun: Any, *, isolated_partitions: bool = False, **options: Any) -> None:
        """Raises: InvalidArgument."""
        if options.get("channel") is None:
            refuse(
                "an agent without a topic", "name the stream: @app.agent(app.topic('scope/name'))"
            )
        if isolated_partitions or options.get("supervisor_strategy") is not None:
            refuse(
                "isolated_partitions or supervisor_strategy",
                "use concurrency=; what failed is done again",
            )
        super().__init__(fun, **options)
        self.inboxes: list[Inbox] = []
        self._running: list[asyncio.Task[None]] = []

    async def on_start(self) -> None:
        self.inboxes, self._running = [], []
        for index in range(self.concurrency):
            inbox = Inbox(own_key=self.concurrency > 1, strays=self.app.strays)
            stream: Any = self.stream(concurrency_index=index if self.concurrency > 1 else None)
            stream.inbox = inbox
            self.inboxes.append(inbox)
            actor = self.actor_from_stream(stream, index=stream.concurrency_index)
            await self._prepare_actor(actor, self.beacon)
            if actor.actor_task is not None:  # always true; for mypy
                self._running.append(actor.actor_task)

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

    async def send(self, *, reply_to: Any = None, **options: Any) -> Any:
        """Send to the agent's topic. Raises: as `Topic.send`."""
        if reply_to is not None:
            refuse("agent.send(reply_to=)", AGENT["ask"])
        return await self.channel.send(**options)

    async def _execute_actor(self, coro: Awaitable[Any], aref: Any) -> None:
        faust_agent._current_agent.set(self)  # noqa: SLF001  # as in the method that this one replaces
        error: BaseException = IllegalState(
            f"agent {self.name} ended: it has to read its stream without end (no break, no return)"
        )
        try:
            await coro
        except BaseException as raised:
            error = raised
            # An exit counts as a failure of the agent. If it were raised, asyncio would end the process.
            if not isinstance(raised, Exception | SystemExit) or is_from_outside(raised):
                raise
        finally:
            aref.stream.inbox.end(error)


_SAY_S = 30.0


class AgentHandlers(Handlers):
    """Calls agents with a worker's events. All methods but `end` are called on the worker's thread."""

    def __init__(
        self, app: Any, stores: Sequence[str], metrics: Numbers, stop: threading.Event,
        *, loop: asyncio.AbstractEventLoop, agents: Sequence[Agent], strays: list[IllegalState],
    ) -> None:  # fmt: skip
        super().__init__(app, stores, metrics, stop)
        self._on, self._agents, self._strays = loop, agents, strays
        self._readers: dict[str, list[Agent]] = {}
        for agent in agents:
            for stream in agent.get_topic_names():
                self._readers.setdefault(stream, []).append(agent)
        self._hand: Hand | None = None
        self._ended = False

    def handle(self, batch: WorkBatch, pieces: Sequence[Piece]) -> list[Piece]:
        """Hand events to agents, and wait until all are done. After a failure, hand the events over one by one.

        Raises: HandlerFailed, IllegalState (an asyncio task wrote after its event).
        """
        given = [pair for piece in pieces for pair in zip(piece.events, piece.tasks, strict=True)]
        with closed_by_failure(batch) as at:
            failed = self._failed(at, given) if given else None
            if failed is not None:
                at.take_back()  # agents share rows, so the changes of one event can't be undone alone
                for event, task in given:
                    case = partial(Case.of, event)
                    first = failed.error if event is failed.event else None
                    self._failures.try_or_bury(
                        at, case, partial(self._failure, at, event, task), first
                    )
        if self._strays:
            raise self._strays[0]
        return []

    def _failure(self, at: HandlerContext, event: Event, task: int) -> BaseException | None:
        failed = self._failed(at, [(event, task)])
        if failed is not None and failed.event is None:
            raise failed  # the agent ended without an event at work
        return None if failed is None else failed.error

    def _failed(
        self, at: HandlerContext, given: Sequence[tuple[Event, int]]
    ) -> HandlerFailed | None:
        try:
            asyncio.run_coroutine_threadsafe(self._give(at, given), self._on).result()
        except HandlerFailed as failed:
            return failed
        at.undo.clear()
        return None

    def end(self) -> None:
        """Stop waiting for agents that don't end. Called on Faust's loop."""
        self._ended = True
        if self._hand is not None:
            self._hand.fail(IllegalState("the worker ends, and an agent is not done"))

    async def _give(self, at: HandlerContext, given: Sequence[tuple[Event, int]]) -> None:
        hand = self._hand = Hand(at.batch, at.undo)
        try:
            self._deal(hand, given)
            while hand.left:
                done, _ = await asyncio.wait([hand.over], timeout=_SAY_S)
                if done:
                    hand.over.result()
                else:
                    busy = [one.name for one in self._agents if any(b.at_work for b in one.inboxes)]
                    self._agents[0].log.warning("not done yet: %s", ", ".join(busy))
        except BaseException as error:
            hand.fail(error)
            if not self._ended:
                for agent in self._agents:
                    await agent.on_stop()
                    await agent.on_start()
            raise
        finally:
            self._hand = None

    def _deal(self, hand: Hand, given: Sequence[tuple[Event, int]]) -> None:
        """Put each event into an inbox of each agent of its stream. The key decides which inbox."""
        if self._ended:
            raise IllegalState("the worker ends")
        woken: dict[Inbox, None] = {}
        for agent in self._agents:
            for inbox in agent.inboxes:
                if inbox.ended is not None:
                    raise HandlerFailed(None, inbox.ended)
        for event, task in given:
            readers = self._readers[event.stream]
            hand.left += len(readers)
            for agent in readers:
                boxes = agent.inboxes
                which = event.offset if event.key is None else hash(event.key)
                box = boxes[which % len(boxes)]
                box.items.append(Given(hand, task, event))
                woken[box] = None
        for box in woken:
            box.wake(hand)
