"""SIGKILL of a worker before each line of its commits and of bringing state back: redone or done, never both."""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import anabranch
from tests.cluster import Cluster
from tests.processing.cut_worker import FEW_BYTES, Work
from tests.processing.judging import Found, Seen
from tests.processing.program import GRACE_MS, WINDOW_MS
from tests.processing.test_trial import SEED
from tests.processing.writing import Writing
from tests.workload.children import read_on
from tests.workload.zygote import Child, Zygote

FEW = 3  # points that the quick test meets in each way
TRIES = 4 * FEW
TIMES = 2  # of a line
HIT_S = 30.0  # a worker starts slowly on a busy machine; the wait ends with it, or with its outputs
IDLE_S = 1.0  # a line is met so soon after the last output, or never
BY_ONE_SHOT, BY_JOURNAL = 1 << 20, 1  # `one_shot_bytes` of its client
END_S = 60.0


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote("tests.processing.cut_worker") as warm:
        yield warm


@pytest.mark.broker
@pytest.mark.slow(25)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "few",
    [pytest.param(True, marks=pytest.mark.long), pytest.param(False, marks=pytest.mark.soak)],
)
def test_a_worker_is_killed_before_any_line(
    cluster: Cluster, zygote: Zygote, unique: str, tmp_path: Path, measured: Callable[[str], None],
    few: bool,
) -> None:  # fmt: skip
    """By one-shots, and by journals. Each life begins with input, and every other one without its folder."""
    print(f"ANABRANCH_SEED={SEED}")
    chance = random.Random(SEED)
    writing = Writing(cluster.bootstrap, cluster.prefix, f"f{unique}", SEED)
    folder = tmp_path / "table"
    seen: list[Seen] = []
    failed: list[BaseException] = []  # the thread's

    def begin(one_shot_bytes: int = BY_ONE_SHOT, point: str = "", trace: str = "") -> Child:
        spec = Work(
            cluster.bootstrap, cluster.prefix, scope=writing.scope, folder=str(folder), point=point,
            trace=trace, one_shot_bytes=one_shot_bytes,
        )  # fmt: skip
        return zygote.fork(spec)

    def is_whole() -> bool:
        if failed:
            raise failed[0]
        return len(seen) >= writing.fold().outputs

    def finish(child: Child) -> None:
        deadline = time.monotonic() + END_S
        while not is_whole():
            assert child.running, child.events
            assert time.monotonic() < deadline, f"{len(seen)} outputs, too few"
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
            try:
                seen.extend((0.0, event) for event in read_on(reader))
            except BaseException as error:  # noqa: BLE001 - raised again by `is_whole`
                failed.append(error)

        threading.Thread(target=collect, daemon=True).start()
        writing.to_each_task(client)
        finish(begin())
        points: list[tuple[int, str]] = []
        for way in (BY_ONE_SHOT, BY_JOURNAL):
            trace = tmp_path / f"trace-{way}"
            shutil.rmtree(folder)
            write()
            finish(begin(way, trace=str(trace)))
            named = {line.rpartition("#")[::2] for line in trace.read_text().split()}
            again = {line for line, n in named if int(n) == TIMES}
            mine = [
                (way, f"{p}#{TIMES if p in again else 1}") for p in sorted({p for p, _ in named})
            ]
            points += chance.sample(mine, TRIES) if few else mine
        met: Counter[int] = Counter()
        missed: list[str] = []
        for way, point in points:
            if few and met[way] == FEW:
                continue
            write()
            if (met.total() + len(missed)) % 2:
                shutil.rmtree(folder, ignore_errors=True)  # one that was killed early made none
            child = begin(way, point)
            until = time.monotonic() + HIT_S
            while child.running and not is_whole() and time.monotonic() < until:
                time.sleep(0.05)
            try:
                child.wait_ended(IDLE_S)
                met[way] += 1
            except AssertionError:
                missed.append(point)  # which lines run depends on time, too
                child.kill()
            assert child.killed, child.events
        writing.to_each_task(client, 3 * (WINDOW_MS + GRACE_MS))
        finish(begin())
        found = Found(writing, seen, client.processor(f"{writing.scope}/sums"), [folder])
        found.check()
    measured(f"{met.total()} of {len(points)} points, {len(missed)} not met; {found.told()}")
    if few:
        assert met == {BY_ONE_SHOT: FEW, BY_JOURNAL: FEW}, missed
    else:
        assert len(missed) <= len(points) // 4, missed


def _created(writing: Writing, client: anabranch.Client) -> list[str]:
    writing.create(client)
    return writing.outputs
