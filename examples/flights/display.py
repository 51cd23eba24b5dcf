"""Progress of the run: live on a terminal, lines elsewhere, nothing with --json."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


class Display:
    """Shows progress. This one shows nothing."""

    def __init__(self) -> None:
        """Start the clock of the timeline."""
        self.started = time.monotonic()
        self.timeline: list[tuple[float, str]] = []

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def note(self, text: str, *, at: float | None = None) -> None:
        """Note what happened, for the report: now, or at a moment of the monotonic clock."""
        moment = (time.monotonic() if at is None else at) - self.started
        self.timeline.append((moment, text))
        self._show_note(moment, text)

    def _show_note(self, moment: float, text: str) -> None:
        pass

    def state(self, text: str) -> None:
        """Show the current activity."""

    def wrote(self, done: int, total: int) -> None:
        """Show how many of the big transaction's rows are written."""

    def tick(self, count: int, seconds: float) -> None:
        """Show the number of small transactions, and how long the last one took."""


class LineDisplay(Display):
    """Prints a line for each note on standard error."""

    def _show_note(self, moment: float, text: str) -> None:
        sys.stderr.write(f"{moment:7.1f} s  {text}\n")
        sys.stderr.flush()


class LiveDisplay(Display):
    """Prints the same lines, and under them a few that change."""

    def __init__(self, console: Console, states: Progress, bars: Progress) -> None:
        """The caller shows the two progresses."""
        super().__init__()
        self._console = console
        self._states = states
        self._bars = bars
        self._state = states.add_task("starting", total=None)
        self._ticks: TaskID | None = None
        self._rows: TaskID | None = None

    def _show_note(self, moment: float, text: str) -> None:
        self._console.print(f"[dim]{moment:7.1f} s[/dim]  {text}", highlight=False)

    def state(self, text: str) -> None:
        self._states.update(self._state, description=text)

    def wrote(self, done: int, total: int) -> None:
        if self._rows is None:
            self._rows = self._bars.add_task("rows written", total=total)
        self._bars.update(self._rows, completed=done, visible=done < total)

    def tick(self, count: int, seconds: float) -> None:
        if self._ticks is None:
            self._ticks = self._states.add_task("", total=None)
        text = f"{count:,} small transactions meanwhile, the last in {seconds * 1000:.0f} ms"
        self._states.update(self._ticks, description=text)


@contextmanager
def make_display(*, quiet: bool) -> Iterator[Display]:
    """The display that fits standard error."""
    if quiet:
        yield Display()
    elif not sys.stderr.isatty():
        yield LineDisplay()
    else:
        with _live_display() as display:
            yield display


@contextmanager
def _live_display() -> Iterator[LiveDisplay]:
    from rich.console import Group
    from rich.live import Live
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    from anabranch.cli.output import console

    out = console(to_stderr=True)
    states = Progress(
        SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"), console=out
    )
    bars = Progress(
        TextColumn("  {task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        console=out,
    )
    with Live(Group(states, bars), console=out, transient=True, refresh_per_second=8):
        yield LiveDisplay(out, states, bars)
