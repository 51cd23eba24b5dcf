"""An app of which several workers run; while a file is there, its agent does not end with an event."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import anabranch.faust

SCOPE, HANG = os.environ["SCOPE"], Path(os.environ["HANG"])
app = anabranch.faust.App(
    f"{SCOPE}/sums",
    bootstrap=os.environ["BOOTSTRAP"],
    connect={"session_timeout_ms": 6000},
    tasks=4,
    commit_interval=0.02,
)
output = app.topic(f"{SCOPE}/out")
sums = app.Table("sums", default=lambda: [0, 0])


@app.agent(app.topic(f"{SCOPE}/a", f"{SCOPE}/b"))
async def count(stream: Any) -> None:
    """Count and sum by key; pass on what came."""
    expected = 0
    async for number, value in stream.echo(f"{SCOPE}/even").enumerate():
        assert number == expected
        expected += 1
        while HANG.exists():
            await asyncio.sleep(0.05)
        key, n = stream.current_event.key, value["n"]
        seen, total = sums[key]
        sums[key] = seen + 1, total + n
        await output.send(key=key, value={"seen": seen + 1, "total": total + n, "n": n})


@app.crontab("* * * * * */2")
async def tick() -> None:
    """Each two seconds."""
    await app.topic(f"{SCOPE}/ticks").send(value="cron")
