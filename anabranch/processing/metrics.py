"""The metrics of a worker. A test checks that `docs/operations.md` has the same table."""

from __future__ import annotations

from anabranch.controller.monitor import Number, Table

NUMBERS = {
    "processor_tasks": Number("gauge", "Tasks that this worker has"),
    "processor_events_in": Number("counter", "Events consumed by its commits", ("input",)),
    "processor_events_out": Number("counter", "Events written by its commits", ("output",)),
    "processor_commits": Number("counter", "Commits"),
    "processor_late_events": Number(
        "counter", "Events that came too late for a window, in its commits", ("windows",)
    ),
    "processor_dead_letters": Number("counter", "Events, timers and windows that are dead letters"),
    "processor_failures": Number("counter", "Times that a handler failed"),
    "processor_conflicts": Number(
        "counter", "Times that a batch was handled again, as others wrote what it had read", ("table",)
    ),
    "processor_lost": Number(
        "counter",
        "Commits (of a plain topic: offsets) passed over as retention took from them before they were consumed",
        ("input",),
    ),
    "processor_misplaced": Number(
        "counter", "Events read whose key is outside of its segment's range", ("input",)
    ),
    "processor_taken_again": Number(
        "counter", "Times that its tasks were taken again, by error", ("error",)
    ),
    "processor_folders_emptied": Number(
        "counter", "Times that files of its folder were damaged, so that its state was read again"
    ),
    "processor_restored_rows": Number("counter", "Rows of state read from the log"),
    "processor_lag_events": Number(
        "gauge", "Events not consumed yet, of the task that is furthest behind; by the worker of task 0", ("input",)
    ),
    "processor_lag_seconds": Number("gauge", "Age of the oldest of these events", ("input",)),
}  # fmt: skip
TABLE = Table(
    NUMBERS, "processor", ("processor_commit_seconds", "Time of a commit, until it is stored")
)
