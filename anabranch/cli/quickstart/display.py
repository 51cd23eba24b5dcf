"""Progress of the quickstart: live on a terminal, lines elsewhere, nothing with --json."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Display:
    """Says what goes on. This one says nothing."""

    def __init__(self) -> None:
        """The clock of the time-line starts now."""
        self.started = time.monotonic()
        self.timeline: list[tuple[float, str]] = []

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def note(self, text: str, *, at: float | None = None) -> None:
        """Something happened, now or at a moment of the monotonic clock: it stays in the report."""
        moment = (time.monotonic() if at is None else at) - self.started
        self.timeline.append((moment, text))
        self._show_note(moment, text)

    def _show_note(self, moment: float, text: str) -> None:
        pass

    def bar(self, name: str, done: int, total: int) -> None:
        """How far something is."""

    def state(self, text: str) -> None:
        """What is going on right now."""

    def tick(self, count: int, seconds: float) -> None:
        """So many small transactions were committed; the last one took so long."""


class LineDisplay(Display):
    """A line for each thing that happened, on standard error."""

    def _show_note(self, moment: float, text: str) -> None:
        sys.stderr.write(f"{moment:7.1f} s  {text}\n")
        sys.stderr.flush()


class LiveDisplay(Display):
    """The same above bars that move."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._bars: dict[str, TaskID] = {}
        self._ticks: TaskID | None = None
        self._state = progress.add_task("starting", total=None)

    def _show_note(self, moment: float, text: str) -> None:
        self._progress.console.print(f"[dim]{moment:7.1f} s[/dim]  {text}", highlight=False)

    def bar(self, name: str, done: int, total: int) -> None:
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, total=total)
        self._progress.update(self._bars[name], completed=min(done, total), total=total)
        if done >= total:
            self._progress.update(self._bars[name], visible=False)

    def state(self, text: str) -> None:
        self._progress.update(self._state, description=text)

    def tick(self, count: int, seconds: float) -> None:
        if self._ticks is None:
            self._ticks = self._progress.add_task("", total=None)
        text = f"{count:,} small transactions meanwhile, the last in {seconds * 1000:.0f} ms"
        self._progress.update(self._ticks, description=text)


@contextmanager
def make_display(*, quiet: bool) -> Iterator[Display]:
    """The display that fits standard error."""
    if quiet:
        yield Display()
    elif not sys.stderr.isatty():
        yield LineDisplay()
    else:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        from anabranch.cli.output import console

        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console(to_stderr=True),
            transient=True,
        ) as progress:
            yield LiveDisplay(progress)
