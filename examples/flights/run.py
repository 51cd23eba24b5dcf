"""One complete run: a folder, a cluster, the story, and the removal of everything."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from examples.flights.cast import STEP_S, Cast
from examples.flights.checks import judge
from examples.flights.cluster import Controllers, start_broker
from examples.flights.display import Display
from examples.flights.processes import Family
from examples.flights.report import Report
from examples.flights.source import find_source
from examples.flights.story import Story


@dataclass(frozen=True, slots=True)
class Settings:
    """The user's options.

    ``limit``: most rows of each table; None: all. ``picture``: the file for the drawing of the flights' epochs;
    None: a new one in the folder for temporary files.
    """

    bootstrap: str | None = None
    kafka: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold secrets
    limit: int | None = None
    keep: bool = False
    picture: Path | None = None


def run_flights(settings: Settings, display: Display) -> Report:
    """Run everything. All processes are stopped at the end, also after an error."""
    source = find_source(settings.limit)
    folder = Path(tempfile.mkdtemp(prefix="anabranch-flights-"))
    picture = settings.picture or folder.with_name(f"{folder.name}.svg")
    with ExitStack() as stack:
        if settings.keep:
            # Also on the display: after an error there is no report.
            stack.callback(display.note, f"data and logs are kept in {folder}")
        else:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        family = Family(folder)
        stack.callback(family.close)
        # The first run compiles code, while the broker starts.
        compiler = family.start("compiler", {})
        display.state("starting the broker")
        place = start_broker(stack, folder, settings.bootstrap, settings.kafka, keep=settings.keep)
        display.note(f"broker: {place.target.bootstrap}")
        display.state("compiling (the first time only)")
        family.hear(compiler, "finished", STEP_S)
        display.state("starting two controllers")
        controllers = Controllers(place.target, folder)
        stack.callback(controllers.stop)
        controllers.start()
        # Ends before the controllers, which it needs.
        stack.callback(family.close)
        story = Story(Cast(place, source, family, display, folder, picture), controllers, display)
        checks = judge(story.tell())
        display.note("every stream was compared with its source")
        display.state("stopping everything")
    return Report(
        checks=checks,
        timeline=tuple(display.timeline),
        seconds=display.elapsed,
        folder=str(folder) if settings.keep else None,
        picture=str(picture),
        measured=story.measured,
    )
