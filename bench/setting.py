"""What the benches share: a broker with a controller, names, percentiles, and what is measured on."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from confluent_kafka.admin import AdminClient, NewTopic

import anabranch
from anabranch.infra.broker import EmbeddedBroker


@dataclass(frozen=True)
class Place:
    """A broker and a controller process that leads."""

    bootstrap: str

    def new_stream(self, segments: int) -> str:
        """A fresh stream."""
        stream = f"bench/s{uuid.uuid4().hex[:8]}"
        with anabranch.connect(self.bootstrap) as client:
            client.create_stream(stream, segments=segments)
        return stream

    def new_topic(self, partitions: int) -> str:
        """A fresh plain topic."""
        topic = f"bench.t{uuid.uuid4().hex[:8]}"
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        future = admin.create_topics([NewTopic(topic, partitions, 1)])[topic]
        future.result(30)
        return topic


@contextmanager
def place() -> Iterator[Place]:
    """An embedded broker and a controller of their own, for one run."""
    with (
        EmbeddedBroker() as broker,
        tempfile.TemporaryDirectory(prefix="anabranch-bench-") as folder,
        _controller(broker.bootstrap, Path(folder)),
    ):
        yield Place(broker.bootstrap)


@contextmanager
def _controller(bootstrap: str, folder: Path) -> Iterator[None]:
    status = folder / "status.json"
    command = [sys.executable, "-m", "anabranch.cli", "controller", "--bootstrap", bootstrap]
    command += ["--data-dir", str(folder / "data"), "--key-file", str(folder / "key")]
    command += ["--status-file", str(status)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not (status.exists() and '"leading": [0]' in status.read_text()):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the controller does not lead")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(30)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of an ascending sequence; 0 if it is empty."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def machine() -> dict[str, Any]:
    """Versions and size: figures mean nothing without them."""
    packages = ("anabranch", "confluent-kafka", "kio", "fastavro", "rocksdict", "numba", "cramjam")
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "kafka": "4.3.1, one embedded broker, replication factor 1, no TLS, loopback",
        "versions": {name: version(name) for name in packages},
    }
