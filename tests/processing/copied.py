"""Programs of `test_copied_killed`, which number the events of each key. The environment chooses one."""

from __future__ import annotations

import json
import os
from typing import Any

from anabranch.processing.app import Processor

SCOPE = os.environ.get("ANABRANCH_TRIAL_SCOPE", "copied")
NAME = os.environ.get("ANABRANCH_TRIAL_NAME", "old")
INPUTS = os.environ.get("ANABRANCH_TRIAL_INPUTS", "in").split(",")
TASKS = 4

app = Processor(f"{SCOPE}/{NAME}", tasks=TASKS, commit_interval=0.05)
_out, _seen = app.output(f"{SCOPE}/out-{NAME}", value=json), app.store("seen", value=json)


@app.on(*(app.input(f"{SCOPE}/{name}", value=json) for name in INPUTS))
def count(event: Any) -> None:
    """Write the number of the event among those of its key, and what it is."""
    _seen[event.key] = _seen.get(event.key, 0) + 1
    _out.write([_seen[event.key], event.stream.partition("/")[2], event.value], key=event.key)
