"""Helpers: they join the transactions of others.

They are given tokens, and give receipts, through files in the spool, as tasks of a batch job would.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anabranch
from anabranch.errors import (
    AlreadyCommitted,
    AskOutcomeError,
    BeginAgainError,
    RetryError,
)
from checker.recorder import Recorder
from tests.crash.children import put
from tests.crash.zygote import Spec, say
from tests.faults.acting import (
    CALL_S,
    PATIENCE,
    Ending,
    in_threads,
    rows,
    write_all,
)


@dataclass(frozen=True)
class Help(Spec):
    """Joins transactions by the tokens that it finds in the spool."""

    scope: str = ""
    spool: str = ""
    seed: int = 0

    run = "tests.faults.helping:help_out"


def help_out(number: int, told: dict[str, Any]) -> int:
    """Until SIGTERM: take tasks, write, leave receipts."""
    spec = Help(**told)
    ending = Ending()
    spool = Path(spec.spool)
    recorder = Recorder(spool / f"{spec.name}.history")
    with anabranch.connect(
        spec.bootstrap, prefix=spec.prefix, timeout=CALL_S, config=PATIENCE
    ) as client:

        def work(thread: int) -> None:
            chance = random.Random(f"{spec.seed}/{thread}")
            while not ending.event.is_set():
                for path in sorted(spool.glob("*.task")):
                    mine = path.with_suffix(f".{spec.name}-{thread}")
                    with contextlib.suppress(FileNotFoundError):  # another one was quicker
                        path.rename(mine)
                        _help_with(number, client, spec, recorder, chance, mine)
                time.sleep(0.02)

        return in_threads(number, ending, work)


def _help_with(
    number: int,
    client: anabranch.Client,
    spec: Help,
    recorder: Recorder,
    chance: random.Random,
    task: Path,
) -> None:
    token, handle, name, count = json.loads(task.read_text())
    events = rows(f"{handle}.{name}", count, chance, spec.scope)
    try:
        with client.join(bytes.fromhex(token)) as writer:
            write_all(recorder, writer, handle, name, events)
            with recorder.asking("finish", txn=handle, writer=name):
                receipt = writer.finish()
        put(Path(spec.spool) / f"{handle}.{name}.receipt", receipt.to_bytes().hex())
    except (RetryError, BeginAgainError, AskOutcomeError, AlreadyCommitted) as error:
        # The last two: the driver waited for so long, and commits (or has committed) without this helper.
        say(number, "trouble", kind="help", why=str(error)[:300])
