"""Small commits and their reader beside a big transaction in the same stream (goal: p99 within 1.5 times alone).

One process commits one-shots of ten events, 20 a second, and small journal transactions of ten events, 10 a
second; another reads the stream in order. Times run from the commit call to its answer (journal writes are flushed
before), and from the commit call until the reader has the transaction's first event. One-shots are due at fixed
times; a one-shot delayed by the one before counts from its due time. Phases, one after the other on one stream:

- *alone*, before and after the others; both are shown, ratios are to the two together
- *open*: a big transaction is written during the phase, at some megabytes a second
- *carried*: a transaction of 2 GB (``--quick``: 200 MB), written before, is committed; the answer ends the phase
- *produced*: the limit. Another process appends as many bytes, in ready batches, at the same rate, in native
  transactions to a plain topic. It reads, checks and copies nothing

and the controller's most resident memory in each phase. Everything shares the machine's cores: broker,
controller, both processes and, in *open* and *produced*, a writer. Small commits feel the work that the broker and
the controller do for the big one; the ``cpu`` figures say how busy the controller and the broker were.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event as Signal
from pathlib import Path
from typing import Any

import anabranch
from anabranch.batches.records import Record, encode_batch
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicPartition
from bench.setting import Place, cpu_s, noise_values, percentile

EVENTS = 10
SMALL_BYTES = 100
BIG_VALUE_BYTES = 1_000
BIG_BYTES, QUICK_BYTES = 2_000_000_000, 200_000_000
OPEN_BYTES_PER_S = 4_000_000
BIG_WRITERS = 2
CHUNK_BYTES = 16 << 20  # of a native transaction, as a controller's `--chunk-bytes`
SECONDS, QUICK_SECONDS = 15.0, 4.0
WARM_UP_S = 5.0
EVERY_S = {"one-shot": 1 / 20, "journal": 1 / 10}
WARM_S = 1.0
GOAL = 1.5
_LAST = b"last"
_SAMPLE_S = 0.02


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Latencies in milliseconds by phase and kind, ratios to alone, and the controller's memory."""
    seconds = QUICK_SECONDS if quick else SECONDS
    size = QUICK_BYTES if quick else BIG_BYTES
    stream = place.new_stream(segments=2)
    phases: dict[str, dict[str, Any]] = {}

    def pause() -> None:
        time.sleep(seconds)

    with anabranch.connect(place.bootstrap) as client:
        _warm_up(client, stream)
        phases["alone before"] = _phase(place, stream, pause)
        with _written_slowly(place, client, stream):
            phases["open"] = _phase(place, stream, pause)
        token, receipts = _write_big(place, client, stream, size)
        time.sleep(2.0)  # the broker writes dirty pages back
        took: list[float] = []

        def commit_big() -> None:
            start = time.perf_counter()
            client.commit(token, receipts=receipts, timeout=300)
            took.append(time.perf_counter() - start)

        phases["carried"] = _phase(place, stream, commit_big)
        time.sleep(2.0)
        with _producing(place, size, size / took[0]) as produce:
            phases["produced"] = _phase(place, stream, produce)
        time.sleep(2.0)
        phases["alone after"] = _phase(place, stream, pause)
    alone = {
        name: phases["alone before"]["ms"][name] + phases["alone after"]["ms"][name]
        for name in phases["open"]["ms"]
    }
    base = {name: _spread(some) for name, some in alone.items()}
    return {
        "seconds_each": seconds,
        "big_bytes": size,
        "big_commit_s": took[0],
        "alone": base,
        "phases": {
            phase: {
                "controller_rss_mb": found["rss_mb"],
                "controller_cpu": found["cpu"],
                "broker_cpu": found["broker_cpu"],
                **{
                    name: {
                        **_spread(some),
                        "p99_of_alone": _spread(some)["p99_ms"] / base[name]["p99_ms"],
                        "p50_of_alone": _spread(some)["p50_ms"] / base[name]["p50_ms"],
                    }
                    for name, some in found["ms"].items()
                },
            }
            for phase, found in phases.items()
        },
        "goal_p99_of_alone_at_most": GOAL,
    }


def _warm_up(client: anabranch.Client, stream: str) -> None:
    """Let the broker compile its hot paths, so that small commits don't pay for that."""
    until = time.monotonic() + WARM_UP_S
    while time.monotonic() < until:
        with client.begin(stream.partition("/")[0]) as txn:
            txn.write(stream, b"warm", key=b"key-0")
            txn.commit()


def _spread(some: list[float]) -> dict[str, float]:
    ordered = sorted(some)
    return {
        "count": len(ordered),
        "p50_ms": percentile(ordered, 0.5),
        "p90_ms": percentile(ordered, 0.9),
        "p99_ms": percentile(ordered, 0.99),
        "max_ms": percentile(ordered, 1.0),
    }


# -- a phase -------------------------------------------------------------------------------------------


def _phase(place: Place, stream: str, during: Callable[[], None]) -> dict[str, Any]:
    """Small commits and a reader while ``during`` runs."""
    ctx = mp.get_context("spawn")
    stop, ready = ctx.Event(), ctx.Semaphore(0)
    committed, seen = ctx.Queue(), ctx.Queue()
    processes = [
        ctx.Process(target=_read, args=(place.bootstrap, stream, ready, seen), daemon=True),
        ctx.Process(
            target=_commit, args=(place.bootstrap, stream, stop, ready, committed), daemon=True
        ),
    ]
    for process in processes:
        process.start()
        ready.acquire(timeout=60)
    time.sleep(WARM_S)
    with _Sampler(place.controller) as sampler:
        start, broker = time.monotonic(), cpu_s(place.broker)
        during()
        end, broker = time.monotonic(), cpu_s(place.broker) - broker
    stop.set()
    calls = committed.get(timeout=120)
    arrivals = seen.get(timeout=120)
    for process in processes:
        process.join(30)
    ms: dict[str, list[float]] = {}
    for number, (kind, due, asked, answered) in calls.items():
        if start <= due < end:
            ms.setdefault(kind, []).append((answered - due) * 1000)
            ms.setdefault(f"{kind}, read", []).append((arrivals[number] - asked) * 1000)
    seconds = end - start
    return {
        "ms": ms,
        "rss_mb": sampler.most_mb,
        "cpu": sampler.cpu / seconds,
        "broker_cpu": broker / seconds,
    }


Calls = dict[
    int, tuple[str, float, float, float]
]  # number -> kind, due, called, answered (seconds)


def _commit(bootstrap: str, stream: str, stop: Signal, ready: Any, out: Any) -> None:
    """Commit both kinds, each on its own thread, until the stop; then commit the end mark for the reader."""
    calls: Calls = {}
    lock = threading.Lock()
    numbers = iter(range(1 << 30))
    value = b"v" * (SMALL_BYTES - 8)
    with anabranch.connect(bootstrap) as client:
        scope = stream.partition("/")[0]

        def once(kind: str, due: float) -> None:
            with lock:
                number = next(numbers)
            with client.begin(scope) as txn:
                for i in range(EVENTS):
                    txn.write(stream, number.to_bytes(8, "big") + value, key=b"key-%d" % i)
                if kind == "journal":
                    txn.flush()
                asked = time.monotonic()
                if kind == "journal":
                    due = asked  # only the commit is timed
                txn.commit(timeout=120)
            calls[number] = (kind, due, asked, time.monotonic())

        def work(kind: str) -> None:
            due = time.monotonic()
            while not stop.is_set():
                due += EVERY_S[kind]
                time.sleep(max(0.0, due - time.monotonic()))
                once(kind, due)

        threads = [threading.Thread(target=work, args=(kind,)) for kind in EVERY_S]
        for kind in EVERY_S:
            once(kind, time.monotonic())  # connections are not timed
        calls.clear()
        for thread in threads:
            thread.start()
        ready.release()
        for thread in threads:
            thread.join()
        with client.begin(scope) as txn:
            for i in range(EVENTS):
                txn.write(stream, _LAST, key=b"key-%d" % i)
            txn.commit(timeout=120)
    out.put(calls)


def _read(bootstrap: str, stream: str, ready: Any, out: Any) -> None:
    """Report when the first event of each small transaction arrived."""
    arrivals: dict[int, float] = {}
    last = EVENTS  # on all segments: once they are here, everything before is
    with (
        anabranch.connect(bootstrap) as client,
        client.read(stream, timeout=120, start="end") as reader,
    ):
        ready.release()
        for event in reader:
            value = event.value or b""
            if len(value) == SMALL_BYTES:
                arrivals.setdefault(int.from_bytes(value[:8], "big"), time.monotonic())
            elif value == _LAST:
                last -= 1
                if not last:
                    break
    out.put(arrivals)


class _Sampler:
    """The most resident memory of a process, and its processor time, while the block runs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.most_mb = 0.0
        self.cpu = 0.0

    def __enter__(self) -> _Sampler:
        self.cpu = -cpu_s(self._pid)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.cpu += cpu_s(self._pid)

    def _run(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        while True:
            pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
            self.most_mb = max(self.most_mb, pages * page / 1e6)
            if self._stop.wait(_SAMPLE_S):
                return


# -- the big one ---------------------------------------------------------------------------------------


@contextmanager
def _written_slowly(place: Place, client: anabranch.Client, stream: str) -> Iterator[None]:
    """A transaction that another process writes to meanwhile; aborted in the end."""
    ctx = mp.get_context("spawn")
    stop, ready = ctx.Event(), ctx.Semaphore(0)
    txn = client.begin(stream.partition("/")[0], keepalive=120)
    process = ctx.Process(
        target=_write_slowly, args=(place.bootstrap, txn.token(), stream, stop, ready), daemon=True
    )
    process.start()
    ready.acquire(timeout=60)
    yield
    stop.set()
    process.join(30)
    txn.abort()


def _write_slowly(bootstrap: str, token: bytes, stream: str, stop: Signal, ready: Any) -> None:
    values = noise_values(BIG_VALUE_BYTES, 1_000)
    each = OPEN_BYTES_PER_S // BIG_VALUE_BYTES // 20
    with anabranch.connect(bootstrap) as client:
        writer = client.join(token)
        writer.write(stream, values[0], key=b"key-0")
        ready.release()
        while not stop.wait(0.05):
            writer.write_many(stream, ((values[i], b"key-%d" % i) for i in range(each)))
        writer.discard()


def _write_big(
    place: Place, client: anabranch.Client, stream: str, size: int
) -> tuple[bytes, list[anabranch.Receipt]]:
    """Let several processes write and finish a transaction: its token and receipts."""
    ctx = mp.get_context("spawn")
    out = ctx.Queue()
    txn = client.begin(stream.partition("/")[0], keepalive=600)
    token = txn.token("all")
    count = size // BIG_VALUE_BYTES // BIG_WRITERS
    processes = [
        ctx.Process(target=_write_share, args=(place.bootstrap, token, stream, count, out))
        for _ in range(BIG_WRITERS)
    ]
    for process in processes:
        process.start()
    receipts = [anabranch.Receipt.from_bytes(out.get(timeout=300)) for _ in processes]
    for process in processes:
        process.join(30)
    return token, receipts


def _write_share(bootstrap: str, token: bytes, stream: str, count: int, out: Any) -> None:
    values = [os.urandom(BIG_VALUE_BYTES) for _ in range(2_000)]
    config = {"compression.type": "none"}  # so that its size is that of its events
    with (
        anabranch.connect(bootstrap, timeout=120, config=config) as client,
        client.join(token) as writer,
    ):
        keys = [b"key-%d" % i for i in range(10_000)]
        writer.write_many(stream, ((values[i % 2_000], keys[i % 10_000]) for i in range(count)))
        out.put(writer.finish(timeout=120).to_bytes())


# -- the limit -----------------------------------------------------------------------------------------


@contextmanager
def _producing(place: Place, size: int, bytes_per_s: float) -> Iterator[Callable[[], None]]:
    """A call that starts a waiting process, which appends ``size`` bytes, and returns when it has ended."""
    ctx = mp.get_context("spawn")
    go, ready = ctx.Event(), ctx.Semaphore(0)
    process = ctx.Process(
        target=_produce,
        args=(place.bootstrap, place.new_topic(2), size, bytes_per_s, ready, go),
        daemon=True,
    )
    process.start()
    ready.acquire(timeout=60)

    def produce() -> None:
        go.set()
        process.join(300)

    yield produce


def _produce(
    bootstrap: str, topic: str, size: int, bytes_per_s: float, ready: Any, go: Signal
) -> None:
    value = os.urandom(BIG_VALUE_BYTES)
    batch = encode_batch([Record(0, 0, b"key", value)] * 900)
    each = CHUNK_BYTES // len(batch)
    log = KafkaLog(bootstrap)
    producer = log.producer("bench-beside", timeout=60)
    ready.release()
    go.wait(60)
    start, done = time.monotonic(), 0
    while done < size:
        place = TopicPartition(topic, done // CHUNK_BYTES % 2)
        producer.append_stream([(place, batch)] * each)
        producer.commit()
        done += each * len(batch)
        time.sleep(max(0.0, start + done / bytes_per_s - time.monotonic()))
    producer.close()
    log.close()


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    head = [
        "phase",
        "what",
        "p50 ms",
        "p99 ms",
        "max ms",
        "p99 of alone",
        "controller MB, cores; broker",
    ]
    rows = []
    for phase, found in result["phases"].items():
        machine = (
            f"{found['controller_rss_mb']:.0f}, {found['controller_cpu']:.2f}; "
            f"{found['broker_cpu']:.2f}"
        )
        for name in ("one-shot", "journal", "one-shot, read", "journal, read"):
            ms = found[name]
            rows.append(
                [
                    phase,
                    name,
                    f"{ms['p50_ms']:.1f}",
                    f"{ms['p99_ms']:.1f}",
                    f"{ms['max_ms']:.1f}",
                    f"{ms['p99_of_alone']:.2f} ×",
                    machine,
                ]
            )
    rate = result["big_bytes"] / 1e6 / result["big_commit_s"]
    rows.append(
        [
            "carried",
            "the big commit",
            f"{result['big_commit_s']:.1f} s",
            f"{rate:.0f} MB/s",
            "",
            "",
            "",
        ]
    )
    return head, rows
