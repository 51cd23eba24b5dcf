"""The peers' programs: what each needs, is told, and says.

anabranch: `ours.py`. Kafka Streams: `KafkaStreamsPeer.java`, launched from source, so it needs a JDK; its jars are
the broker's and two more from Maven. Quix Streams and faust-streaming: `pythons.py`, each in a virtual environment
that pip fills once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import psutil  # type: ignore[import-untyped]
from confluent_kafka.admin import AdminClient, NewTopic

import anabranch
from anabranch.infra.fetch import cache_root, ensure_broker
from anabranch.infra.java import find_java
from anabranch.protocol.partitioner import SPACE, position_of
from anabranch.protocol.schemas.records import Consumed, TaskStep
from anabranch.reading.store_lookup import state_key
from bench.processing.ends import Ends, produce
from bench.setting import cpu_s

HERE = Path(__file__).parent
STREAMS = "4.3.1"
JARS = (f"org.apache.kafka:kafka-streams:{STREAMS}", "org.rocksdb:rocksdbjni:10.1.3")
QUIX = ("quixstreams==3.28.1",)
FAUST = ("faust-streaming==0.15.3", "orjson==3.11.4", "cramjam==2.14.0")
SEED_ROWS = 50_000
_STOP_S = 30


@dataclass(frozen=True)
class Job:
    """One worker's job. ``source``, ``other``, ``target``: topics, or streams with `peer.streams`.

    ``work``: map, count, window, session, table or join; the last two read ``other``, too. ``folder``: of
    the worker alone, for state. ``settings``: the peer's own, by its own names.
    """

    bootstrap: str
    name: str
    source: str
    target: str
    work: str
    folder: str
    commit_ms: int = 100
    partitions: int = 2
    threads: int = 1
    other: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)


class Peer(Protocol):
    """A way to do the jobs. ``streams``: it reads and writes streams, no plain topics."""

    @property
    def name(self) -> str: ...
    @property
    def streams(self) -> bool: ...
    @property
    def exactly_once(self) -> bool: ...

    def command(self, job: Job) -> Sequence[str]:
        """The worker's command line; fetches what it needs, once."""

    def about(self) -> dict[str, str]:
        """Versions and settings, for people."""


class Keeper(Peer, Protocol):
    """A peer of which restores and failovers are measured.

    Its worker prints lines of JSON (``said``, ``at`` in milliseconds): for each task ``restoring``, then
    ``restored`` with its ``rows``; all the time its state, RUNNING once it works, with ``stores`` (copies of tasks'
    stores that it has) and their ``lag``.
    """

    @property
    def failover(self) -> Mapping[str, str]:
        """Settings of a session of six seconds."""

    def seed(self, where: Ends, job: Job, rows: int) -> None:
        """Fill the log of a store, before any worker starts."""


@dataclass(frozen=True)
class KafkaStreams:
    """`exactly_once_v2`, a store without a cache."""

    name: str = "Kafka Streams"
    streams: bool = False
    exactly_once: bool = True

    def command(self, job: Job) -> Sequence[str]:
        """Java's command line. The commits, threads and folder are the job's, all else is as Kafka has it."""
        from jgo.maven import MavenContext

        java = find_java()
        modules = subprocess.run([java.path, "--list-modules"], capture_output=True, check=True)
        if b"jdk.compiler" not in modules.stdout:
            raise RuntimeError(
                f"{java.path} has no compiler: apt-get install openjdk-17-jdk-headless"
            )
        maven = MavenContext(repo_cache=cache_root() / "bench-kafka-streams", timeout=60)
        jars = [
            *ensure_broker(),
            *(maven.create_dependency(jar).artifact.resolve() for jar in JARS),
        ]
        settings = {
            "bootstrap.servers": job.bootstrap,
            "application.id": job.name,
            "state.dir": job.folder,
            "processing.guarantee": "exactly_once_v2",
            "commit.interval.ms": str(job.commit_ms),
            "num.stream.threads": str(job.threads),
            "auto.offset.reset": "earliest",
            **job.settings,
        }
        command = [str(java.path), "-Xmx2g", "-cp", os.pathsep.join(map(str, jars))]
        command += [str(HERE / "KafkaStreamsPeer.java"), job.source, job.target, job.work]
        settings["bench.other"] = job.other
        return command + [f"{key}={value}" for key, value in settings.items()]

    def about(self) -> dict[str, str]:
        """Its version and Java's."""
        java = find_java()
        store = "RocksDB, changelog, no cache"
        return {"version": STREAMS, "java": str(java.major), "json": "Jackson", "store": store}

    @property
    def failover(self) -> Mapping[str, str]:
        """At once a task for each worker, not after a probing rebalance of ten minutes."""
        return {
            "session.timeout.ms": "6000",
            "heartbeat.interval.ms": "2000",
            "acceptable.recovery.lag": str(2**62),
        }

    def seed(self, where: Ends, job: Job, rows: int) -> None:
        """Rows of a key and a count, straight into the changelog."""
        topic = f"{job.name}-counts-changelog"
        made = NewTopic(topic, job.partitions, 1, config={"cleanup.policy": "compact"})
        admin = AdminClient({"bootstrap.servers": job.bootstrap})
        admin.create_topics([made])[topic].result(30)
        produce(where.place, topic, ((n.to_bytes(8, "big"), b"key-%07d" % n) for n in range(rows)))


@dataclass(frozen=True)
class Python:
    """Quix Streams or faust-streaming. ``program``: the function of `pythons.py`. ``needs``: for pip."""

    name: str
    program: str
    needs: tuple[str, ...]
    told: str
    exactly_once: bool
    streams: bool = False

    def command(self, job: Job) -> Sequence[str]:
        """Python's command line, in an environment of its own."""
        folder = cache_root() / "-".join(["bench", self.program, *self.needs]).replace("==", "-")
        python, whole = folder / "bin" / "python", folder / "whole"
        if not whole.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, *self.needs], check=True)
            whole.touch()
        return [str(python), str(HERE / "pythons.py"), self.program, json.dumps(asdict(job))]

    def about(self) -> dict[str, str]:
        """Its versions."""
        return {"version": ", ".join(self.needs), "json": "orjson", "store": self.told}


KAFKA_STREAMS = KafkaStreams()
QUIX_STREAMS = Python("Quix Streams", "quix", QUIX, "RocksDB, changelog", exactly_once=True)
FAUST_STREAMING = Python(
    "faust-streaming", "faust", FAUST, "table in memory, changelog", exactly_once=False
)


@dataclass(frozen=True)
class Ours:
    """anabranch, one process and one worker; JSON by msgspec."""

    name: str = "anabranch"
    streams: bool = True
    exactly_once: bool = True

    def command(self, job: Job) -> Sequence[str]:
        """This Python's command line."""
        return [sys.executable, str(HERE / "ours.py"), json.dumps(asdict(job))]

    def about(self) -> dict[str, str]:
        """Its version."""
        return {"version": version("anabranch"), "json": "msgspec", "store": "RocksDB, state topic"}

    @property
    def failover(self) -> Mapping[str, str]:
        """Its session has six seconds."""
        return {}

    def seed(self, where: Ends, job: Job, rows: int) -> None:
        """Rows of a key and a count, in commits of 50,000."""
        name = f"bench/{job.name}"
        with anabranch.connect(job.bootstrap, timeout=120) as client:
            client.create_processor(name, where.source, tasks=job.partitions, stores=["counts"])
            ownership = client.take_tasks(name)
            some: dict[int, list[tuple[bytes, bytes | None]]] = {}
            sequences = dict.fromkeys(ownership.tasks, 0)

            def commit(task: int) -> None:
                sequences[task] += 1
                head = state_key(ownership.incarnation, 0, b""), sequences[task].to_bytes(8, "big")
                with client.begin(ownership.scope, ownership=ownership) as txn:
                    txn.write_state(task, [*some.pop(task), head])
                    step = TaskStep((task,), sequences[task], ())
                    txn.commit(consumed=Consumed(name, ownership.fencing_token, (step,)))

            for n in range(rows):
                key = b"key-%07d" % n
                task = position_of(key) * job.partitions // SPACE
                found = some.setdefault(task, [])
                found.append((state_key(ownership.incarnation, 2, key), b"%d" % n))
                if len(found) == SEED_ROWS:
                    commit(task)
            for task in list(some):
                commit(task)
            client.release_tasks(ownership)


OURS = Ours()


class Worker:
    """A running worker; its output goes to a file."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    def said(self) -> list[dict[str, Any]]:
        """The lines of JSON that it printed so far. Raises `RuntimeError` once it has ended by itself."""
        text = self._log.read_text("utf-8", errors="replace")
        if self.process.poll() not in (None, -signal.SIGKILL):
            raise RuntimeError(f"a worker ended: {text[-2000:]}")
        return [json.loads(line) for line in text.splitlines() if line[:1] + line[-1:] == "{}"]

    def cpu_s(self) -> float:
        """CPU seconds so far, of its children too."""
        process = psutil.Process(self.process.pid)
        return cpu_s(process.pid, *(one.pid for one in process.children(recursive=True)))

    def kill(self) -> float:
        """SIGKILL; the time at which."""
        self.process.kill()
        return time.monotonic()


@contextmanager
def working(peer: Peer, job: Job) -> Iterator[Worker]:
    """A worker during the block."""
    with tempfile.TemporaryDirectory(prefix="anabranch-bench-worker-") as folder:
        log = Path(folder, "worker.log")
        with log.open("wb") as out:
            process = subprocess.Popen(
                peer.command(job), stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=folder
            )
        try:
            yield Worker(process, log)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_S)
