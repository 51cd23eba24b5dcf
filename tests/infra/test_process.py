"""A supervised process ends with its owner, whatever ends the owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anabranch.infra.process import SupervisedProcess
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
SLEEP = ("sleep", "300")
SOON_S = 5.0


def state(pid: int) -> str | None:
    """The process's state as one letter, or None if there is none (a zombie is none)."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if letter in "ZX" else letter


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def sleeper(log: Path) -> Iterator[SupervisedProcess]:
    process = SupervisedProcess.start(SLEEP, log=log, environment=os.environ)
    yield process
    process.close()


class Owner:
    """A Python process of its own that runs a script, and prints words; it lives until it is killed or exits."""

    def __init__(self, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", f"{textwrap.dedent(script)}\ntime.sleep(300)\n"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )

    def words(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def numbers(self) -> list[int]:
        return [int(word) for word in self.words()]

    def kill(self) -> None:
        self.process.kill()
        self.exits()

    def exits(self) -> None:
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


def owner_of(log: Path, body: str) -> Owner:
    """Its script can ``start`` a supervised `SLEEP`, and ``tell`` numbers."""
    script = f"""
        import multiprocessing, os, threading, time
        from pathlib import Path
        from anabranch.infra.process import SupervisedProcess

        log = Path({str(log)!r})

        def start(remove=None):
            return SupervisedProcess.start({SLEEP!r}, log=log,
                environment=os.environ, remove_when_orphaned=remove)

        def tell(*values):
            print(*values, flush=True)
    """
    return Owner(textwrap.dedent(script) + textwrap.dedent(body))


# -- its life --------------------------------------------------------------------------------------------


def test_output_and_exit_code_are_kept(log: Path) -> None:
    process = SupervisedProcess.start(
        ["sh", "-c", "echo out; echo err >&2; exit 7"], log=log, environment=os.environ
    )
    assert process.wait(10) == 7
    assert process.poll() == 7
    assert log.read_text() == "out\nerr\n"
    # Orders to one that has ended do nothing.
    process.kill()
    process.pause()
    process.close()
    assert process.poll() == 7


def test_a_missing_command_is_an_error(log: Path) -> None:
    with pytest.raises(OSError, match=r"/no/such could not be started: .*No such file"):
        SupervisedProcess.start(["/no/such"], log=log, environment=os.environ)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda process: process.terminate(), -signal.SIGTERM),
        (lambda process: process.kill(), -signal.SIGKILL),
        (lambda process: os.kill(process._supervisor.pid, signal.SIGTERM), -signal.SIGTERM),
        pytest.param(
            lambda process: os.kill(process._supervisor.pid, signal.SIGKILL),
            -signal.SIGKILL,
            marks=pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's"),
        ),
    ],
    ids=["terminate", "kill", "SIGTERM to its supervisor", "SIGKILL to its supervisor"],
)
def test_each_end_has_its_exit_code(
    sleeper: SupervisedProcess, end: Callable[[SupervisedProcess], None], code: int
) -> None:
    end(sleeper)
    wait_until(lambda: state(sleeper.pid) is None, SOON_S)
    assert sleeper.wait(60) == code


def test_waiting_ends_at_its_deadline_or_when_another_thread_kills(
    sleeper: SupervisedProcess,
) -> None:
    started = time.monotonic()
    assert sleeper.wait(0.2) is None
    assert 0.2 <= time.monotonic() - started < SOON_S
    assert sleeper.poll() is None
    codes: list[int | None] = []
    waiter = threading.Thread(target=lambda: codes.append(sleeper.wait(30)))
    waiter.start()
    time.sleep(0.1)
    sleeper.kill()
    waiter.join(60)
    assert codes == [-9]


def test_it_is_paused_resumed_and_closed_even_if_paused(sleeper: SupervisedProcess) -> None:
    sleeper.pause()
    wait_until(lambda: state(sleeper.pid) == "T", SOON_S)
    sleeper.resume()
    wait_until(lambda: state(sleeper.pid) == "S", SOON_S)
    sleeper.pause()
    sleeper.close()
    assert state(sleeper.pid) is None
    assert sleeper.poll() == -signal.SIGTERM
    sleeper.close()


def test_a_process_that_ignores_sigterm_is_killed(log: Path) -> None:
    stubborn = ("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done")
    process = SupervisedProcess.start(stubborn, log=log, environment=os.environ)
    wait_until(lambda: log.read_text() == "ready\n", SOON_S)
    process.close()
    assert process.poll() == -signal.SIGKILL


def test_ctrl_c_in_the_owner_s_terminal_does_not_reach_it(sleeper: SupervisedProcess) -> None:
    assert os.getsid(sleeper.pid) != os.getsid(0)
    assert os.getpgid(sleeper.pid) != os.getpgid(0)


def test_a_forked_copy_of_the_object_does_nothing(sleeper: SupervisedProcess) -> None:
    child = os.fork()
    if child == 0:
        sleeper.kill()
        sleeper.close()
        os._exit(0 if sleeper.foreign and sleeper.wait(0.2) is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sleeper.poll() is None
    assert state(sleeper.pid) is not None


# -- its end with its owner ------------------------------------------------------------------------------

# Controllers are started so: by a thread that is gone since, and they may be frozen.
MODULE = """
    import signal
    from tests.owned import send_signal, start_module
    made = []
    def begin():
        with log.open("wb") as output:
            made.append(start_module("http.server", ["--bind", "127.0.0.1", "0"], output=output,
                environment=dict(os.environ, PYTHONUNBUFFERED="1")))
    thread = threading.Thread(target=begin)
    thread.start(); thread.join()
    while not log.read_bytes().startswith(b"Serving"):
        time.sleep(0.01)
    {then}
    tell(made[0].pid)
"""
BODIES = {
    "an owner that is killed": "tell(start().pid)",
    "an owner that exits": "tell(start().pid); os._exit(0)",
    "a process that is paused": "p = start(); p.pause(); tell(p.pid)",
    "started by a thread that has ended": """
        made = []
        thread = threading.Thread(target=lambda: made.append(start()))
        thread.start(); thread.join()
        time.sleep(0.5)
        assert made[0].poll() is None
        tell(made[0].pid)
    """,
    "a module of tests": MODULE.format(then="pass"),
    "a module of tests that is frozen": MODULE.format(
        then="send_signal(made[0].pid, signal.SIGSTOP)"
    ),
    # The copy of the pipe is what makes this hard.
    "a forked child that lives on": """
        p, child = start(), os.fork()
        if child:
            tell(p.pid, child)
    """,
}


@pytest.mark.parametrize("case", BODIES)
def test_it_ends_with_its_owner(log: Path, case: str) -> None:
    owner = owner_of(log, BODIES[case])
    pid, *children = owner.numbers()
    try:
        if case == "an owner that exits":
            owner.exits()
        else:
            assert state(pid) is not None
            owner.kill()
        wait_until(lambda: state(pid) is None, SOON_S)
        assert all(state(child) is not None for child in children)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_closing_works_while_a_forked_child_lives_on(log: Path) -> None:
    body = """
        p, child = start(), os.fork()
        if child:
            p.close()
            tell(p.pid, child, p.poll())
    """
    owner = owner_of(log, body)
    pid, child, code = owner.numbers()
    os.kill(child, signal.SIGKILL)
    owner.kill()
    assert code == -signal.SIGTERM
    assert state(pid) is None


def test_it_ends_with_an_owner_that_was_forked_itself(log: Path) -> None:
    body = """
        def work():
            tell(start().pid, os.getpid())
            time.sleep(300)
        multiprocessing.get_context("fork").Process(target=work).start()
    """
    owner = owner_of(log, body)
    try:
        pid, forked = owner.numbers()
        os.kill(forked, signal.SIGKILL)
        wait_until(lambda: state(pid) is None, SOON_S)
    finally:
        owner.kill()


@pytest.mark.parametrize("ended", ["", "p.kill(); assert p.wait(60) == -9"])
def test_an_orphan_s_folder_is_removed(log: Path, tmp_path: Path, ended: str) -> None:
    """Also if the command has ended long before."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("x")
    owner = owner_of(log, f"p = start(Path({str(folder)!r})); {ended}\ntell(p.pid)")
    assert owner.numbers()
    time.sleep(0.2)
    assert folder.exists()
    owner.kill()
    wait_until(lambda: not folder.exists(), SOON_S)


def test_a_living_owner_s_folder_is_kept(log: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    process = SupervisedProcess.start(
        SLEEP, log=log, environment=os.environ, remove_when_orphaned=folder
    )
    process.close()
    assert folder.exists()
