"""Parts that the benches share: a broker with a controller, names, events, percentiles, facts of the machine."""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from confluent_kafka.admin import AdminClient, NewTopic

import anabranch
from anabranch.errors import AnabranchError
from anabranch.infra.broker import EmbeddedBroker
from anabranch.protocol.schemas.records import Begin, Outcome

WARM_S = 15.0  # for as long a broker's JVM gets quicker under one-shots


@dataclass(frozen=True)
class Place:
    """A broker, and a controller that leads: the process ids of both."""

    bootstrap: str
    controller: int
    broker: int

    def new_stream(self, segments: int, *, table: bool = False) -> str:
        """A fresh stream, or table."""
        stream = f"bench/s{uuid.uuid4().hex[:8]}"
        with anabranch.connect(self.bootstrap) as client:
            (client.create_table if table else client.create_stream)(stream, segments)
        return stream

    def new_topic(self, partitions: int) -> str:
        """A fresh plain topic."""
        topic = f"bench.t{uuid.uuid4().hex[:8]}"
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        future = admin.create_topics([NewTopic(topic, partitions, 1)])[topic]
        future.result(30)
        return topic


@contextmanager
def place(*arguments: str) -> Iterator[Place]:
    """An embedded broker and a controller of their own, for one run. ``arguments``: the controller's options."""
    with (
        EmbeddedBroker() as broker,
        tempfile.TemporaryDirectory(prefix="anabranch-bench-") as folder,
        controller(broker.bootstrap, Path(folder), arguments) as pid,
    ):
        yield Place(broker.bootstrap, pid, broker.pid)


@contextmanager
def controller(
    bootstrap: str,
    folder: Path,
    arguments: Sequence[str],
    variables: Mapping[str, str] = {},
    *,
    trusts_open: bool = True,
    module: str = "anabranch.cli",
    leads: int | None = 0,
) -> Iterator[int]:
    """A leading controller process; its process id. Its output goes to ``controller.log``.

    ``trusts_open``: clients of the lane `open` have no quotas; older builds don't know the option, and have none.
    ``module``: the command line. ``leads``: a control partition that it has to lead; None: any.
    """
    folder.mkdir(exist_ok=True)
    status = folder / "status.json"
    status.unlink(missing_ok=True)  # of one that was killed
    command = [sys.executable, "-m", module, "controller", "--bootstrap", bootstrap]
    command += ["--data-dir", str(folder / "data")]
    command += ["--status-file", str(status), *arguments]
    command += ["--trusts-open"] if trusts_open else []
    said = folder / "controller.log"
    with said.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **variables},
        )
    try:
        until = time.monotonic() + 60
        while not (status.exists() and _leads(json.loads(status.read_text())["leading"], leads)):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the controller does not lead: {said.read_text()[-4000:]}")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


def _leads(leading: Sequence[int], one: int | None) -> bool:
    return bool(leading) if one is None else one in leading


def noise_values(size: int, count: int = 10_000) -> list[bytes]:
    """Values of which half is noise: like real events, lz4 compresses them to a bit more than half."""
    noise = random.Random(size)
    half = size // 2
    tail = b"0123456789abcdef" * (half // 16 + 1)
    return [noise.randbytes(half) + tail[: size - half] for _ in range(count)]


def one_shots(
    client: anabranch.Client, streams: Sequence[str], first: int = 0, timeout: float = 60.0
) -> Callable[[], None]:
    """A call that commits ten events: to one stream after the other, to all key ranges in turn."""
    numbers = itertools.count(first)

    def commit() -> None:
        number = next(numbers)
        stream = streams[number % len(streams)]
        with client.begin(stream.partition("/")[0]) as txn:
            for i in range(10):
                txn.write(stream, b"v" * 100, key=b"key-%d" % (10 * number + i))
            txn.commit(timeout=timeout)

    return commit


@dataclass(frozen=True)
class Load:
    """Start and seconds of each commit. ``failed``: commits that ended by an error."""

    calls: list[tuple[float, float]]
    failed: list[tuple[float, float]]


@contextmanager
def loaded(
    bootstrap: str, streams: Sequence[str], in_flight: int, *, a_second: float = math.inf
) -> Iterator[Load]:
    """One-shots of a client during the block, ``in_flight`` at once, to one stream after the other.

    ``a_second``: the most that begin in a second.
    """
    load, stop = Load([], []), threading.Event()
    apart = in_flight / a_second
    with anabranch.connect(bootstrap, timeout=60) as client:

        def work(number: int) -> None:
            commit = one_shots(client, streams, number * 1_000_003)
            due = time.monotonic() + apart * number / in_flight
            while not stop.wait(max(0.0, due - time.monotonic())):
                began, into = time.monotonic(), load.calls
                due = max(due + apart, began)
                try:
                    commit()
                except AnabranchError:
                    into = load.failed
                into.append((began, time.monotonic() - began))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(in_flight)]
        for thread in threads:
            thread.start()
        try:
            yield load
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def side_by_side(work: Callable[[int], None], count: int) -> None:
    """Call ``work`` with each number below ``count``, each in a thread of its own. Raises the first error."""
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def write_events(
    client: anabranch.Client, stream: str, count: int, values: Sequence[bytes]
) -> tuple[bytes, list[anabranch.Receipt]]:
    """A transaction with so many flushed events, ready to be committed: its token and receipts."""
    token = _begin(client, stream)
    with client.join(token) as writer:
        writer.write_many(
            stream, ((values[i % len(values)], b"key-%d" % (i % 10_000)) for i in range(count))
        )
        return token, [writer.finish()]


def _begin(client: anabranch.Client, stream: str) -> bytes:
    """Begin without a handle: no heartbeats, ten minutes to go."""
    session = client._session
    deadline = session.now() + 30
    scope = stream.partition("/")[0]
    txn_id = session.new_txn_id(scope, deadline)
    begin = Begin(txn_id, scope, None, 600_000, session.new_secret())
    begun = session.begin(begin, deadline)
    if isinstance(begun, Outcome):
        raise RuntimeError(f"a new transaction is {begun.state}")
    return session.token_of(begin)


def begin_and_touch(client: anabranch.Client, stream: str) -> bytes:
    """An open transaction that is registered in the stream's reference epoch; its token."""
    token = _begin(client, stream)
    client._session.touch(token, stream, 1, client._session.now() + 30)
    return token


def epochs_of(client: anabranch.Client, stream: str) -> int:
    """How many stream epochs there were, the present one included."""
    return client.describe(stream).stream_epoch + 1


def cpu_s(*processes: int) -> float:
    """CPU seconds of these processes until now, without their children."""
    times = [psutil.Process(process).cpu_times() for process in processes]
    return float(sum(one.user + one.system for one in times))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value at a share of an ascending sequence; 0 if it is empty."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def machine() -> dict[str, Any]:
    """Versions and size of the machine: figures mean nothing without them."""
    packages = ("anabranch", "confluent-kafka", "kio", "fastavro", "rocksdict", "numba", "cramjam")
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "kafka": "4.3.1, one embedded broker, replication factor 1, no TLS, loopback",
        "versions": {name: version(name) for name in packages},
    }
