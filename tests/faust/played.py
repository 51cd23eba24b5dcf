"""A `Driver` for the agents of an app: a worker's own batches and handlers, Faust's loop in a thread, no broker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, Self

import anabranch.faust
from anabranch.controller.monitor import Numbers
from anabranch.faust.agents import AgentHandlers
from anabranch.processing.handlers import Handlers
from anabranch.processing.metrics import TABLE
from anabranch.testing import Driver
from anabranch.values import stream_of


def app_of(**options: Any) -> anabranch.faust.App:
    """An app that never connects."""
    return anabranch.faust.App("s/x", bootstrap="none:1", tasks=4, **options)


class AgentDriver(Driver):
    """Runs the agents of an app. ``outputs``: the streams that they write to."""

    def __init__(self, app: anabranch.faust.App, *outputs: str) -> None:
        self.of: Any = app
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        try:
            self.wait(self._start())
            for name in outputs:
                app.program.outputs[name] = stream_of(name, None, None, "raise")
            super().__init__(app.program)
        except BaseException:
            self.wait(self._stop())
            self._end()
            raise

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What a coroutine on the loop returns."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    async def _start(self) -> None:
        self.of.finalize()
        self.of.check_words()
        for agent in self.of.agents.values():
            await agent.on_start()
        engine = self.of.engine
        engine._on = self.loop
        await engine._ready()
        engine._worker = SimpleNamespace(tasks=range(self.of.program.tasks))

    async def _stop(self) -> None:
        for agent in self.of.agents.values():
            await agent.on_stop()

    def _new_handlers(self) -> Handlers:
        program, agents = self.of.program, list(self.of.agents.values())
        handlers = AgentHandlers(
            program, tuple(program.stores), Numbers(TABLE), threading.Event(),
            loop=self.loop, agents=agents, strays=self.of.strays,
        )  # fmt: skip
        handlers.resume(self._rows, range(program.tasks))
        return handlers

    def _end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.wait(self._stop())
        super().__exit__(*error)
        self._end()
