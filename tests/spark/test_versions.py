"""Other versions of PySpark, and Spark Connect, do what `tests.spark.contract` says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import anabranch
from tests.cluster import Cluster

pytestmark = pytest.mark.broker

# What pip installs for each; everything else is the tests' own.
VERSIONS = {
    "4.0": ["pyspark==4.0.*"],
    "4.1": ["pyspark==4.1.*"],
    "4.2": ["pyspark==4.2.*"],
    "connect": [
        "grpcio>=1.76",
        "grpcio-status>=1.76",
        "googleapis-common-protos>=1.71",
        "zstandard>=0.25",
    ],
}
_ROOT = Path(__file__).parents[2]


def python_of(version: str) -> Path:
    """The Python of such an environment.

    The first time it is made, with the network, and stays in the folder of temporary files.
    """
    folder = Path(tempfile.gettempdir(), f"anabranch-pyspark-{version}")
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *VERSIONS[version]], check=True)
        (site,) = folder.glob("lib/python3*/site-packages")
        (site / "zz-tests.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
        ready.touch()
    return python


@pytest.mark.soak
@pytest.mark.network
@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_keeps_the_contract(
    version: str, cluster: Cluster, client: anabranch.Client, unique: str, tmp_path: Path
) -> None:
    stream = f"v{unique}/events"
    for name in (stream, f"{stream}-copy"):
        client.create_stream(name, segments=2)
    connect = version == "connect"
    python = python_of(version)
    words = ["connect"] * connect + [cluster.bootstrap, stream, str(tmp_path)]
    done = subprocess.run(
        [python, "-m", "tests.spark.contract", *words],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT), "PYSPARK_PYTHON": str(python)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    said = json.loads(done.stdout.splitlines()[-1])
    if not connect:
        assert said["version"].startswith(version)
    assert said["pushdown"] == (version != "4.0")
    assert said["limits"] == said["admission"] == (version not in ("4.0", "4.1"))
    assert said["lag"] == {stream: 0}
