"""examples/spark_pipeline.py: its streaming query, driver and JVM, ends with the process that started it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90.0
# As far as the driver sees, a JVM that takes long to start.
JAVA = """\
#!/bin/sh
case "$*" in
    *-version*) echo 'openjdk version "17.0.1" 2021-10-19' >&2; exit ;;
esac
echo $$ >"$PID_FILE.new"
mv "$PID_FILE.new" "$PID_FILE"
exec sleep 600
"""
OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, "examples")
import spark_pipeline
spark_pipeline._start_join(spark_pipeline.Plan("127.0.0.1:1", Path(sys.argv[1])))
time.sleep(600)
"""


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has started the query, with a JVM that notes who it is."""
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(JAVA)
    java.chmod(0o700)
    more = {"JAVA_HOME": str(tmp_path / "java"), "PID_FILE": str(tmp_path / "jvm")}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | more,
        stdin=subprocess.DEVNULL,
    ) as process:
        yield process
        process.kill()


@pytest.mark.slow(5)
def test_the_query_ends_with_its_owner(owner: subprocess.Popen[bytes], tmp_path: Path) -> None:
    wait_until((tmp_path / "jvm").exists)
    (driver,) = psutil.Process(owner.pid).children()
    jvm = int((tmp_path / "jvm").read_text())
    everything = [driver, *driver.children(recursive=True)]
    assert jvm in {process.pid for process in everything}
    owner.kill()
    try:
        wait_until(lambda: not any(map(runs, everything)))
    finally:
        for process in filter(runs, everything):
            process.kill()


def runs(process: psutil.Process) -> bool:
    """Also one that nobody has buried yet does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
