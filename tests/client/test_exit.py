"""A process that ends with its client and readers open: it ends in silence, and leaves nothing open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import Cluster


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Which has to end well and say nothing on stderr."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program, *arguments],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done


PROGRAM = """
import sys
import pyarrow as pa
import anabranch

client = anabranch.connect(sys.argv[1], timeout=60)
stream = sys.argv[2]
scope = stream.partition("/")[0]
client.create_stream(stream)
with client.begin(scope) as txn:
    txn.write(stream, b"first")
    txn.write(stream, b"second")
    txn.commit()
writer = client.join(client.begin(scope).token())
writer.write_batch(stream, pa.record_batch({"value": [b"x"] * 1000}))
writer.flush()
readers = [
    client.read(stream, timeout=60),
    client.read(stream, group=scope, timeout=60),
    client.read_transactions(stream, timeout=60),
    client.snapshot(stream).read(stream),
]
for reader in readers:
    next(reader)
kept = [client, writer, *readers]  # until the interpreter takes its modules apart
"""


@pytest.mark.broker
@pytest.mark.slow(3)
def test_a_client_that_is_left_open_ends_in_silence(cluster: Cluster, unique: str) -> None:
    run(PROGRAM, cluster.bootstrap, f"e{unique}/events")


STUBBED = """
import sys
from unittest.mock import MagicMock
import anabranch.errors
from anabranch.client.client import Client


class Port(MagicMock):
    def close(self):
        print("late" if sys.is_finalizing() else "in time")


ports = MagicMock(bus=Port(), journals=Port(), readers=None)
anabranch.errors.kept = Client(ports, threads=False)  # in a module that is taken apart late
"""


LATE = """
import sys
import anabranch.errors
from anabranch.reading.ordered_reader import Reader
from anabranch.reading.snapshot import SnapshotReader
from anabranch.reading.transaction_reader import TransactionReader


def left(kind):
    class Left(kind):
        def __init__(self):
            self._closed = False

        def close(self):
            sys.stdout.write(kind.__name__ + (" late\\n" if sys.is_finalizing() else " in time\\n"))

    return Left()


for kind in (Reader, SnapshotReader, TransactionReader):
    left(kind)
anabranch.errors.kept = [left(kind) for kind in (Reader, SnapshotReader, TransactionReader)]
"""


def test_readers_close_by_themselves_only_while_modules_are_there() -> None:
    assert run(LATE).stdout.splitlines() == [
        f"{kind} in time" for kind in ("Reader", "SnapshotReader", "TransactionReader")
    ]


def test_it_is_closed_while_modules_are_there() -> None:
    assert run(STUBBED).stdout == "in time\nin time\n"
