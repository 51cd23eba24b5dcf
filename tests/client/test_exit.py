"""A process that ends with its client open: it ends in silence, and leaves nothing open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import Cluster

PROGRAM = """
import sys
import pyarrow as pa
import anabranch

client = anabranch.connect(sys.argv[1])
client.create_stream(sys.argv[2])
writer = client.join(client.begin(sys.argv[2].partition("/")[0]).token())
writer.write_batch(sys.argv[2], pa.record_batch({"value": [b"x"] * 1000}))
writer.flush()
kept = [client, writer]  # until the interpreter takes its modules apart
"""


@pytest.mark.broker
@pytest.mark.slow(3)
def test_a_client_that_is_left_open_ends_in_silence(cluster: Cluster, unique: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", PROGRAM, cluster.bootstrap, f"e{unique}/events"],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


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


def test_it_is_closed_while_modules_are_there() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUBBED],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "in time\nin time\n", "")
