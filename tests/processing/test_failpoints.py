"""SIGKILL of a worker before each line of its commits and of bringing state back: redone or done, never both."""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import anabranch
from tests.cluster import Cluster
from tests.crash.zygote import Child, Zygote
from tests.processing.cut_worker import FEW_BYTES, Work
from tests.processing.judging import Found, Seen
from tests.processing.program import GRACE_MS, WINDOW_MS
from tests.processing.test_trial import SEED
from tests.processing.writing import Writing

FEW = 3  # points that the quick test meets
TRIES = 4 * FEW
TIMES = 2  # of a line
HIT_S = 8.0
END_S = 60.0


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as warm:
        yield warm


@pytest.mark.broker
@pytest.mark.slow(40)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.soak)])
@pytest.mark.parametrize("one_shot_bytes", [1 << 20, 1])
def test_a_worker_is_killed_before_any_line(
    cluster: Cluster, zygote: Zygote, unique: str, tmp_path: Path, measured: Callable[[str], None],
    few: bool, one_shot_bytes: int,
) -> None:  # fmt: skip
    """By one-shots, and by journals. Each life begins with input, and every other one without its folder."""
    print(f"ANABRANCH_SEED={SEED}")
    chance = random.Random(SEED)
    writing = Writing(cluster.bootstrap, cluster.prefix, f"f{unique}", SEED)
    folder, trace = tmp_path / "table", tmp_path / "trace"
    seen: list[Seen] = []

    def begin(point: str = "", trace: str = "") -> Child:
        spec = Work(
            cluster.bootstrap, cluster.prefix, scope=writing.scope, folder=str(folder), point=point,
            trace=trace, one_shot_bytes=one_shot_bytes,
        )  # fmt: skip
        return zygote.fork(spec)

    def finish(child: Child) -> None:
        deadline = time.monotonic() + END_S
        while len(seen) < writing.fold().outputs:
            assert child.running, child.events
            assert time.monotonic() < deadline, f"{len(seen)} outputs of {writing.fold().outputs}"
            time.sleep(0.05)
        child.signal(signal.SIGTERM)
        child.wait_ended()
        assert child.status == 0, child.events

    with writing.connect() as client, client.read(_created(writing, client)) as reader:

        def write() -> None:
            for _ in range(TIMES + 1):
                count = FEW_BYTES // 200
                writing.commit(client, writing.events(chance.randint(2, count), chance))

        def collect() -> None:
            seen.extend((0.0, event) for event in reader)

        threading.Thread(target=collect, daemon=True).start()
        writing.to_each_task(client)
        finish(begin())
        shutil.rmtree(folder)
        write()
        finish(begin(trace=str(trace)))
        named = {line.rpartition("#")[::2] for line in trace.read_text().split()}
        again = {line for line, n in named if int(n) == TIMES}
        points = [f"{p}#{TIMES if p in again else 1}" for p in sorted({line for line, _ in named})]
        chosen = chance.sample(points, TRIES) if few else points
        missed: list[str] = []
        for number, point in enumerate(chosen):
            if few and number - len(missed) == FEW:
                chosen = chosen[:number]
                break
            write()
            if number % 2:
                shutil.rmtree(folder, ignore_errors=True)  # one that was killed early made none
            child = begin(point)
            try:
                child.wait_ended(HIT_S)
            except AssertionError:
                missed.append(point)  # which lines run depends on time, too
                child.kill()
            assert child.killed, child.events
        writing.to_each_task(client, 3 * (WINDOW_MS + GRACE_MS))
        finish(begin())
        found = Found(writing, seen, client.processor(f"{writing.scope}/sums"), [folder])
        found.check()
    measured(f"{len(chosen)} of {len(points)} points, {len(missed)} not met; {found.told()}")
    if few:
        assert len(chosen) - len(missed) == FEW, missed
    else:
        assert len(missed) <= len(chosen) // 4, missed


def _created(writing: Writing, client: anabranch.Client) -> list[str]:
    writing.create(client)
    return writing.outputs
