"""A controller for which a day is a minute: ``python -m tests.short_days …`` is ``anabranch …`` with such days.

It lets the status topic's tombstones be deleted after a day of that length, which Kafka would keep for a week.
"""

from __future__ import annotations

import runpy

from anabranch.topics import declarations as declared

DAY_S = 60
TOMBSTONES = "delete.retention.ms"

if __name__ == "__main__":
    assert any(setting.name == TOMBSTONES for setting in declared.STATUS)
    shorter = declared._at_least(TOMBSTONES, DAY_S * 1000, "a day")
    declared.STATUS = tuple(
        shorter if setting.name == TOMBSTONES else setting for setting in declared.STATUS
    )
    runpy.run_module("anabranch.cli", run_name="__main__", alter_sys=True)
