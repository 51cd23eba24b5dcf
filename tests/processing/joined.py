"""The trial's processor with tables: ``anabranch processor run tests.processing.joined:app``.

It does what `tests.processing.program` does. Besides, all tasks add to rows of one table, which they read with
locks, and events are joined with a rate as it was at their own commit, through a replica.
"""

from __future__ import annotations

import json
from typing import Any

from tests.processing.program import RATE, SCOPE, SHARED, TEMPORAL, app, group_of, inputs

groups = app.table(f"{SCOPE}/groups", value=json)
rates = app.replica(f"{SCOPE}/rates")
out = app.output(f"{SCOPE}/joined", value=json)


@app.on(*inputs)
def join(event: Any) -> None:
    """Add, and join, now and then."""
    number = event.value["n"]
    if number % SHARED == 0:
        group = group_of(number)
        groups[group] = groups.get(group, 0) + number
    if number % TEMPORAL == 0:
        with rates.snapshot(event.commit_timestamp) as then:
            rate = then.get(f"{SCOPE}/rates", RATE)
        out.write([number, int(rate or b"0")], key=event.key)
