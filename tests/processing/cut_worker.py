"""A forked worker that is killed before a line of its own: each line of a commit and a restore is a failpoint."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tests.workload.zygote import Spec

FILES = ("commits.py", "state.py", "table.py", "worker.py")
LIFE = {
    "__init__",
    "close",
    "run",
    "step",
    "holds",
    "_wanted",
    "_follow",
    "follow",
    "wait",
}  # no steps of these
FEW_BYTES = 2_000  # of a batch


@dataclass(frozen=True)
class Work(Spec):
    """``point``: ``file:function:line#n``: killed before that line, the n-th time. ``trace``: a file for all."""

    scope: str = ""
    folder: str = ""
    point: str = ""
    trace: str = ""
    one_shot_bytes: int = 1 << 20
    bug: str = ""

    run = "tests.processing.cut_worker:work"


def lines(each: Callable[[str], None]) -> None:
    """Call it before each line of a commit or restore, in all threads to come."""

    def line(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if event == "line":
            each(f"{Path(code.co_filename).name}:{code.co_name}:{frame.f_lineno}")
        return line

    def call(frame: FrameType, _: str, __: Any) -> Any:
        place, name = os.path.split(frame.f_code.co_filename)
        ours = place.endswith("/anabranch/processing") and name in FILES
        return line if ours and frame.f_code.co_name not in LIFE else None

    threading.settrace(call)
    sys.settrace(call)


def warm_up() -> None:
    """Import, and have compiled, whatever a worker uses, so that children have it."""
    from anabranch.batches import columns_read, columns_write
    from anabranch.processing import worker  # noqa: F401

    columns_read.warm()
    columns_write.warm()


def work(_: int, told: dict[str, Any]) -> int:
    """Work until SIGTERM, or the point."""
    spec = Work(**told)
    os.environ["ANABRANCH_TRIAL_SCOPE"] = spec.scope
    import anabranch
    from anabranch.processing.worker import AllTasks, Worker
    from tests.processing.program import TASKS, app

    app.commit_interval, app.cut_bytes = 0.0, FEW_BYTES
    seen: Counter[str] = Counter()
    # As long as the process; without a buffer, which threads would share.
    trace = Path(spec.trace).open("ab", buffering=0) if spec.trace else None  # noqa: SIM115

    def each(point: str) -> None:
        seen[point] += 1
        named = f"{point}#{seen[point]}"
        if trace is not None:
            trace.write(f"{named}\n".encode())
        if named == spec.point:
            os.kill(os.getpid(), signal.SIGKILL)

    if spec.bug:
        from tests.processing.planted import BUGS

        BUGS[spec.bug]().start()
    with anabranch.connect(
        spec.bootstrap, prefix=spec.prefix, one_shot_bytes=spec.one_shot_bytes
    ) as client:
        lines(each)
        worker = Worker(app, client, Path(spec.folder), tasks=AllTasks(range(TASKS)))
        signal.signal(signal.SIGTERM, lambda *_: worker.stop.set())
        worker.run()
        worker.close()
    if trace is not None:
        trace.close()
    return 0
