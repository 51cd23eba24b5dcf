"""A session whose leader, and then its own process, is killed in the middle: each row once, in order, no gap."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

import anabranch
from anabranch.ports import Log
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from tests.cluster import ControllerProcess
from tests.conftest import Broker
from tests.crash.oracle import check_stream, read_stream

pytestmark = [pytest.mark.broker, pytest.mark.long, pytest.mark.timeout(240)]

SESSION_S = 2.0
WRITER = textwrap.dedent("""
    import itertools, sys, time
    import anabranch
    bootstrap, prefix, stream = sys.argv[1:]
    client = anabranch.connect(bootstrap, prefix=prefix, one_shot_bytes=2000)
    session = client.session()
    for number in itertools.count():
        session.apply(stream, b"%d" % number, b"k")
        if number % 100 == 0:
            time.sleep(0.005)
            print(session._sender.ended, flush=True)
""")


def test_each_row_once_and_in_order(broker: Broker, log: Log, tmp_path: Path) -> None:
    prefix = f"se{uuid.uuid4().hex[:6]}"
    stream = f"{prefix}-scope/rows"
    arguments = ("--session-timeout", str(SESSION_S))
    controller = ControllerProcess(broker.bootstrap, tmp_path / "one", prefix, arguments=arguments)
    writer: subprocess.Popen[str] | None = None
    try:
        controller.start().wait_leading()
        with anabranch.connect(broker.bootstrap, prefix=prefix, lane=ADMIN_LANE) as operator:
            operator.feature_level(raise_to=LEVEL)
            operator.create_stream(stream)
        command = [sys.executable, "-c", WRITER, broker.bootstrap, prefix, stream]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        ended = 0
        for _ in range(2):
            ended = wait_for(writer, ended + 2_000)
            controller.kill()
            controller.start().wait_leading()
        ended = wait_for(writer, ended + 2_000)
        writer.kill()
        writer.wait()
        time.sleep(0.5)  # for requests that were under way
        found = read_stream(log, stream)
    finally:
        if writer is not None:
            writer.kill()
            writer.communicate()  # closes the pipe
        controller.kill()
    check_stream(found)
    numbers = [int(event.value) for event in found.events]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= ended > 6_000


def wait_for(writer: subprocess.Popen[str], ended: int) -> int:
    """Wait until the writer knows that more rows than these are committed; returns how many."""
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) > ended:
            return int(line)
    raise AssertionError("the writer ended")
