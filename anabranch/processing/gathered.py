"""One commit to come, while its events are handled: cut, events, and those that are passed over."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from anabranch.ports import TableError
from anabranch.processing.cut import Cut
from anabranch.processing.handlers import HandlerFailed, Handlers, Passed, Place
from anabranch.processing.program import Program
from anabranch.processors.numbers import Numbers
from anabranch.reading.tasks.shares import Piece

log = logging.getLogger("anabranch.processor")

SLICE_BYTES = 256 << 10  # so much is read before it is handled
_READ_AHEAD = 4  # times as many bytes are read for a commit, at most, as it may write


class Gathered:
    """A cut, and what it is made of. A handler that fails has all of it done again, from the beginning."""

    def __init__(
        self, app: Program, handlers: Handlers, metrics: Numbers, new_cut: Callable[[], Cut],
        fire: Callable[[Cut], None], stop: threading.Event,
    ) -> None:  # fmt: skip
        """``fire``: fires timers of the wall clock in a cut. ``stop``: set, it waits no more between tries."""
        self._app, self._handlers, self._metrics, self._new_cut = app, handlers, metrics, new_cut
        self._fire, self._stop = fire, stop
        self.cut = new_cut()
        self.pieces: list[Piece] = []
        self.left: list[Piece] = []  # of the last ones, for the next cut: this one is full
        self.passed: dict[Place, Passed] = {}
        self._tried: dict[Place, int] = {}
        self._slices = 0

    @property
    def is_full(self) -> bool:
        """Whether it is to be sent, early or late."""
        most = self._handlers.most
        if self.left or self.cut.late:
            return True
        return self.cut.size >= most or self._slices * SLICE_BYTES >= _READ_AHEAD * most

    def add(self, some: Sequence[Piece]) -> None:
        """Handle these events, too. Raises: HandlerFailed, and nothing of all has happened."""
        first = not self.pieces
        self.pieces += some
        self._slices += bool(some)
        failed = self._handle(some, fire=first)
        while failed is not None:
            self._judge(failed)
            self.cut = self._new_cut()
            failed = self._handle(self.pieces, fire=True)
        del self.pieces[len(self.pieces) - len(self.left) :]

    def closed(self) -> Cut:
        """The cut, when all is handled, with its counts."""
        self.cut.open = False
        for piece in self.pieces:
            self.cut.counts["processor_events_in", piece.stream] += len(piece.events)
        if self.passed:
            self.cut.counts["processor_dead_letters",] = len(self.passed)
        return self.cut

    def _handle(self, pieces: Sequence[Piece], *, fire: bool) -> HandlerFailed | None:
        try:
            if fire:
                self._fire(self.cut)
            self.left = self._handlers.handle(self.cut, pieces, self.passed)
        except HandlerFailed as failed:
            return failed
        return None

    def _judge(self, failed: HandlerFailed) -> None:
        """Whether the cut is tried again, without the event perhaps. Raises the failure if not."""
        if isinstance(failed.error, TableError):
            raise failed.error  # the worker's disk is no fault of the event
        event, tried = failed.event, self._tried
        place = ("", 0, 0) if event is None else (event.stream, event.partition, event.offset)
        self._metrics.add("processor_failures")
        tried[place] = tried.get(place, 0) + 1
        what = "a timer or batch" if event is None else f"{place[0]}[{place[1]}] offset {place[2]}"
        text = "%s: the handler of %s failed: %s"
        trace = failed.error if tried[place] == 1 else None
        log.warning(text, self._app.name, what, failed, exc_info=trace)
        if tried[place] <= self._app.retries:
            self._stop.wait(min(2.0, 0.05 * 2 ** tried[place]))
        elif self._app.dead_letter is None or event is None:
            raise failed
        else:
            self.passed[place] = Passed(event, str(failed))
