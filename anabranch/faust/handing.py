"""From the worker's thread to the agents on Faust's loop, and back once all is done."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from anabranch.errors import IllegalState
from anabranch.faust.agents import Agent, Given, Hand, Inbox
from anabranch.processing.cut import Cut
from anabranch.processing.handlers import HandlerFailed, Handlers, Passed, Place, closed_by_failure
from anabranch.reading.tasks.shares import Piece

_SAY_S = 30.0


class AgentHandlers(Handlers):
    """Agents as the handlers of a worker. All but `end` is called on the worker's thread."""

    def __init__(
        self, app: Any, stores: Sequence[str], loop: asyncio.AbstractEventLoop, agents: Sequence[Agent],
        strays: list[IllegalState],
    ) -> None:  # fmt: skip
        super().__init__(app, stores)
        self._on, self._agents, self._strays = loop, agents, strays
        self._readers: dict[str, list[Agent]] = {}
        for agent in agents:
            for stream in agent.get_topic_names():
                self._readers.setdefault(stream, []).append(agent)
        self._hand: Hand | None = None
        self._ended = False

    def handle(self, cut: Cut, pieces: Sequence[Piece], passed: dict[Place, Passed]) -> list[Piece]:
        """Give events to agents, and wait until each is done. Raises: HandlerFailed, IllegalState (strays)."""
        with closed_by_failure(cut) as at:
            some = [self._without(at, piece, passed) if passed else piece for piece in pieces]
            if some:
                asyncio.run_coroutine_threadsafe(self._give(cut, some), self._on).result()
        if self._strays:
            raise self._strays[0]
        return []

    def end(self) -> None:
        """Wait no more for agents that don't end. On the loop."""
        self._ended = True
        if self._hand is not None:
            self._hand.fail(IllegalState("the worker ends, and an agent is not done"))

    async def _give(self, cut: Cut, pieces: Sequence[Piece]) -> None:
        hand = self._hand = Hand(cut)
        try:
            self._deal(hand, pieces)
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

    def _deal(self, hand: Hand, pieces: Sequence[Piece]) -> None:
        """Each agent of the stream gets each event: the actor of its key, if it has several."""
        if self._ended:
            raise IllegalState("the worker ends")
        woken: dict[Inbox, None] = {}
        for agent in self._agents:
            for inbox in agent.inboxes:
                if inbox.ended is not None:
                    raise HandlerFailed(None, inbox.ended)
        for piece in pieces:
            for agent in self._readers[piece.stream]:
                boxes = agent.inboxes
                count = len(boxes)
                hand.left += len(piece.events)
                for task, event in zip(piece.tasks, piece.events, strict=True):
                    which = event.offset if event.key is None else hash(event.key)
                    box = boxes[which % count]
                    box.items.append(Given(hand, task, event))
                    woken[box] = None
        for box in woken:
            box.wake(hand)
