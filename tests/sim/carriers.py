"""Carriers that run beside the leader's loop, as its threads do on Kafka: each is a task of the process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from anabranch.controller import carrier
from anabranch.controller.carrier import Carrier, Carriers
from anabranch.core.journal_index import JournalIndex
from anabranch.core.state import State
from anabranch.protocol.schemas.records import StagedMergeRow
from tests.sim.world import START_S, World

_JOIN_S = 30.0
_LOOK_S = 0.02


def carriers_beside(world: World) -> Callable[..., Carriers]:
    """What takes the place of `Carriers` in a run."""

    def make(each: Sequence[Carrier], *, threads: bool) -> Carriers:
        return CarriersBeside(world, each)

    return make


class CarriersBeside(Carriers):
    """See `Carriers`: what a carrier does and says is the same, only who runs it is another."""

    def __init__(self, world: World, each: Sequence[Carrier]) -> None:
        super().__init__(each, threads=False)
        self._world = world
        self._busy = 0
        self._started = False

    def sync(
        self, state: State, index: JournalIndex, wall_ms: int, usable: Callable[[str], bool]
    ) -> None:
        """See `Carriers`; the tasks begin with the first work."""
        super().sync(state, index, wall_ms, usable)
        if self._waiting and not self._started:
            self._started = True
            for number, one in enumerate(self._each):
                body = partial(self._run, one)
                self._world.spawn(self._world.current, f"carrier-{number}", body)

    def take(self, wall_ms: int) -> list[StagedMergeRow]:
        """See `Carriers`; what waits is for the tasks."""
        waiting, self._waiting = self._waiting, deque()
        try:
            return super().take(wall_ms)
        finally:
            self._waiting = waiting

    def _run(self, one: Carrier) -> None:
        while not self._stop.is_set():
            if not self._waiting:
                self._world.sleep(_LOOK_S)
                continue
            job = self._waiting.popleft()
            self._busy += 1
            try:
                while not self._stop.is_set():
                    wall_ms = int((START_S + self._world.now) * 1000)
                    self._results.put(result := carrier._chunk(one, job, wall_ms))
                    if not isinstance(result, StagedMergeRow) or result.done:
                        break
            except Exception as error:  # noqa: BLE001 the leader raises it
                self._results.put(error)
                return
            finally:
                self._busy -= 1

    def close(self) -> bool:
        """See `Carriers`."""
        self._stop.set()
        until = self._world.now + _JOIN_S
        while self._busy and self._world.now < until:
            self._world.sleep(_LOOK_S)
        return super().close() and not self._busy
