"""Planted bugs in rounds that overlap: one is decided while the one before is being written; see `catalogue`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from anabranch.controller import controller, durability
from anabranch.controller.controller import Controller
from anabranch.controller.lanes import Command, Lanes
from anabranch.core.decisions.turn import Turn
from anabranch.core.state import Overlay
from anabranch.ports import Producer, Steps, Table, all_steps
from tests.mutants.planting import Planted, instead_of, wrapping


@wrapping(Controller, "_turn")
def no_drafts(real: Any, self: Controller, former: Turn | None = None) -> Turn:
    """The next round is decided over memory from before the round under way."""
    del former
    turn: Turn = real(self)
    return turn


@instead_of(Overlay, "seal")
def unsealed(_: Overlay) -> None:
    """Changes of the next round are written to the table with those of the round under way."""


@instead_of(Lanes, "decide")
def decided_twice(_: Lanes, __: Sequence[Command]) -> None:
    """The next round decides the commands of the round under way again."""


@wrapping(Controller, "_end_overlap")
def written_all_the_same(real: Any, self: Controller, former: Any) -> bool:
    """The next round is written although the round before it was refused."""
    real(self, former)
    return True


def answered_early() -> Planted:
    """The answers of the next round leave before the round under way is committed."""
    real_turn, real_end = Controller._turn, Controller._end_overlap
    next_turns: dict[int, Turn] = {}

    def _turn(self: Controller, former: Turn | None = None) -> Turn:
        turn = real_turn(self, former)
        if former is not None:
            next_turns[id(former)] = turn
        return turn

    def _end_overlap(self: Controller, former: Any) -> bool:
        turn = next_turns.pop(id(former.turn), None)
        if turn is not None and self._background is not None:
            to, time = self._durable(self._background), turn.hybrid_time
            prefix = self.settings.prefix
            to.send(durability.answers_of(prefix, turn.round.replies, time, turn.wall_ms))
        return real_end(self, former)

    return _patched(_turn=_turn, _end_overlap=_end_overlap)


@wrapping(Controller, "_begin")
def followed_early(real: Any, self: Controller, *given: Any, **named: Any) -> Any:
    """Memory follows a round that is left under way before it is committed."""
    writing = real(self, *given, **named)
    if writing is not None and not writing.is_written:
        writing.turn.done()
    return writing


@contextmanager
def _patched(**methods: Any) -> Iterator[None]:
    with patch.multiple(Controller, **methods):
        yield


# -- two rounds in flight -----------------------------------------------------------------------------


class _Sent:
    """A round whose end is sent, and not acknowledged. It is its own producer, and its own table."""

    def __init__(self, producer: Producer, table: Table) -> None:
        self._producer = producer
        self._table = table
        self._end: Steps[None] | None = None
        self.answers: list[Any] = []
        self.changes: dict[bytes, bytes | None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def committing(self) -> Steps[None]:
        """Send the end, and don't wait."""
        self._end = self._producer.committing()
        next(self._end, None)
        yield

    def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        self.changes.update(changes)

    def acknowledge(self) -> None:
        if self._end is not None:
            all_steps(self._end)

    def finish(self, send: Any) -> None:
        send(self.answers)
        self._table.write(self.changes)


def two_in_flight() -> Planted:
    """The next round is appended, and its end sent, before the end of the round under way is acknowledged."""
    real, real_step, real_lead = durability.write_round, Controller.step, Controller.lead
    real_end, real_finish, real_drop = (
        Controller._end_overlap,
        Controller._finish,
        Controller._drop,
    )
    ending: set[int] = (
        set()
    )  # controllers whose former round is finished before the next one begins
    sent: dict[int, tuple[_Sent, Any, list[Overlay]]] = {}  # by table

    def finish(table: Table) -> None:
        """Wait for the round that was sent, and do what follows it."""
        found = sent.pop(id(table), None)
        if found is not None:
            round_, send, overlays = found
            round_.acknowledge()
            round_.finish(send)
            for overlay in overlays:
                overlay.rows = table

    def write_round(
        to: Any, producer: Any, round_: Any, state: Any, rows: Any, *rest: Any, **more: Any
    ) -> Steps[None]:
        mine = _Sent(producer, to.table)
        early = to._replace(send=mine.answers.extend, table=mine)
        yield from real(early, mine, round_, state, rows, *rest, **more)
        if id(to.table) in sent:
            mine.acknowledge()  # the later one first
            finish(to.table)
        overlays = [state._table, rows]
        for overlay in overlays:
            kept = Overlay(to.table)
            kept.changes, kept.fresh = mine.changes, list(mine.changes)
            overlay.rows = kept
        sent[id(to.table)] = mine, to.send, overlays

    def _end_overlap(self: Controller, former: Any) -> bool:
        ending.add(id(self))
        try:
            return real_end(self, former)
        finally:
            ending.discard(id(self))

    def _finish(self: Controller, writing: Any) -> None:
        real_finish(self, writing)
        if id(self) not in ending:
            finish(self.table)

    def _drop(self: Controller) -> None:
        finish(self.table)
        real_drop(self)

    def step(self: Controller, max_wait: float) -> bool:
        wrote = real_step(self, max_wait)
        if self._under_way is None:
            finish(self.table)
        return wrote

    def lead(self: Controller) -> None:
        sent.pop(id(self.table), None)
        real_lead(self)

    @contextmanager
    def planted() -> Iterator[None]:
        with (
            patch.object(controller, "write_round", write_round),
            _patched(step=step, lead=lead, _end_overlap=_end_overlap, _finish=_finish, _drop=_drop),
        ):
            yield

    return planted()
