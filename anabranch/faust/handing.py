"""Handing events from the worker's thread to the agents on Faust's loop, and waiting until they are done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from anabranch.errors import IllegalState
from anabranch.faust.agents import Agent, Given, Hand, Inbox
from anabranch.processing.cut import Cut, Doing
from anabranch.processing.failures import PATIENCE_S, Case, HandlerFailed
from anabranch.processing.handlers import Handlers, closed_by_failure
from anabranch.processors.monitor import Numbers
from anabranch.reading.slices import Piece
from anabranch.types import Event

_SAY_S = 30.0


class AgentHandlers(Handlers):
    """Agents as the handlers of a worker. All methods but `end` are called on the worker's thread."""

    def __init__(
        self, app: Any, stores: Sequence[str], metrics: Numbers, stop: threading.Event,
        loop: asyncio.AbstractEventLoop, agents: Sequence[Agent], strays: list[IllegalState],
    ) -> None:  # fmt: skip
        super().__init__(app, stores, metrics, stop)
        self._on, self._agents, self._strays = loop, agents, strays
        self._readers: dict[str, list[Agent]] = {}
        for agent in agents:
            for stream in agent.get_topic_names():
                self._readers.setdefault(stream, []).append(agent)
        self._hand: Hand | None = None
        self._ended = False

    def handle(self, cut: Cut, pieces: Sequence[Piece]) -> list[Piece]:
        """Hand events to agents, and wait until all are done. After a failure, hand them over one by one.

        Raises: HandlerFailed, IllegalState (an asyncio task wrote after its event).
        """
        given = [pair for piece in pieces for pair in zip(piece.events, piece.tasks, strict=True)]
        self._failures.patience = PATIENCE_S
        with closed_by_failure(cut) as at:
            failed = self._failed(at, given) if given else None
            if failed is not None:
                at.take_back()  # agents share rows, so the changes of one event can't be undone alone
                for event, task in given:
                    case = partial(Case.of, event)
                    first = failed.error if event is failed.event else None
                    self._failures.settle(at, case, partial(self._failure, at, event, task), first)
        if self._strays:
            raise self._strays[0]
        return []

    def _failure(self, at: Doing, event: Event, task: int) -> BaseException | None:
        failed = self._failed(at, [(event, task)])
        if failed is not None and failed.event is None:
            raise failed  # the agent ended without an event at work
        return None if failed is None else failed.error

    def _failed(self, at: Doing, given: Sequence[tuple[Event, int]]) -> HandlerFailed | None:
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

    async def _give(self, at: Doing, given: Sequence[tuple[Event, int]]) -> None:
        hand = self._hand = Hand(at.cut, at.undo)
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
        """Put each event into an inbox of each agent of its stream: that of the actor for the event's key."""
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
