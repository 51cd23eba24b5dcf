"""Children are heard, ordered, killed and ended, and their failures are noticed and told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.cli.cluster import child_environment
from anabranch.cli.errors import ChildFailed
from examples.flights.processes import Child, Family

QUICK_S = 20.0


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    family = Family(tmp_path)
    yield family
    family.close()


def start(family: Family, script: str, name: str = "child") -> Child:
    """A child that runs a script, in which ``say`` and ``finish`` are those of a role."""
    before = (
        "import sys, time, os\nfrom examples.flights.child import orders, say\nfinish = orders()\n"
    )
    after = "\nsys.stdout.flush(); os._exit(0)"
    return family.start_command(name, [sys.executable, "-c", before + script + after])


def gone(pid: int) -> bool:
    deadline = time.monotonic() + QUICK_S
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_messages_arrive_and_other_lines_are_kept(family: Family) -> None:
    child = start(family, "print('plain'); say('one', x=1); say('two'); say('one', x=2)")
    assert family.hear(child, "two", QUICK_S)["say"] == "two"
    family.wait_for("its end", lambda: child.poll() == 0, QUICK_S)
    assert family.hear(child, "one", QUICK_S)["x"] == 2
    assert [message["x"] for message in child.said("one")] == [1, 2]
    assert child.lines == ["plain"]
    with pytest.raises(ChildFailed, match="ended without saying 'three'"):
        family.hear(child, "three", QUICK_S)


def test_messages_are_taken_as_they_come_and_the_order_arrives(family: Family) -> None:
    taken: list[str] = []
    script = "from examples.flights.child import orders, say; f = orders(); say('a'); f.wait(60); say('b')"
    command = [sys.executable, "-c", script]
    child = family.start_command("child", command, lambda message: taken.append(message["say"]))
    family.hear(child, "a", QUICK_S)
    child.finish()
    family.wait_for("both", lambda: taken == ["a", "b"], QUICK_S)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            "say('failed', name='NotReady', message='nobody'); os._exit(3)",
            "writer: NotReady: nobody",
        ),
        ("sys.stderr.write('why\\n'); sys.stderr.flush(); os._exit(9)", r"exit code 9\n.*\n  why"),
        ("os.kill(os.getpid(), 9)", "exit code -9"),
    ],
)
def test_a_failure_is_raised(family: Family, script: str, told: str) -> None:
    start(family, script, "writer")
    with pytest.raises(ChildFailed, match=told):
        family.wait_for("anything", lambda: False, QUICK_S)


def test_waits_have_a_deadline(family: Family) -> None:
    start(family, "time.sleep(60)")
    with pytest.raises(ChildFailed, match=r"a miracle: not within 0\.2 s"):
        family.wait_for("a miracle", lambda: False, 0.2)


def test_a_child_killed_on_purpose_is_no_failure(family: Family) -> None:
    child = start(family, "say('ready'); time.sleep(60)")
    family.hear(child, "ready", QUICK_S)
    child.kill()
    assert child.poll() == -signal.SIGKILL
    family.check()


def test_closing_ends_all_even_the_stubborn(family: Family) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    stubborn += "say('ready')\nwhile True: time.sleep(1)"
    children = [
        start(family, stubborn, "one"),
        start(family, "say('ready'); time.sleep(60)", "two"),
    ]
    for child in children:
        family.hear(child, "ready", QUICK_S)
    family.close()
    assert all(child.poll() is not None for child in children)
    assert family.children == []


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from examples.flights.processes import Family\n"
        f"family = Family(Path({str(tmp_path)!r}))\n"
        "inner = 'import time; from examples.flights.child import orders, say\\n'\n"
        "inner += 'orders(); say(\"ready\"); time.sleep(60)'\n"
        "child = family.start_command('inner', [sys.executable, '-c', inner])\n"
        "family.hear(child, 'ready', 20); print(child.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=child_environment()
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
    finally:
        parent.kill()
        parent.wait(QUICK_S)
        if parent.stdout is not None:
            parent.stdout.close()
    assert gone(pid)
