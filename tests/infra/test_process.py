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

ROOT = Path(__file__).parents[2]
SLEEP = ("sleep", "300")


def state(pid: int) -> str | None:
    """The process's state as one letter, or None if there is none (a zombie is none)."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if letter in "ZX" else letter


def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def sleeper(log: Path) -> Iterator[SupervisedProcess]:
    process = SupervisedProcess.start(SLEEP, log=log, environment=os.environ)
    yield process
    process.close()


class Owner:
    """A Python process of its own that starts a supervised command and tells its pid."""

    def __init__(self, log: Path, body: str = "", command: tuple[str, ...] = SLEEP) -> None:
        script = f"""
            import multiprocessing, os, sys, threading, time
            from pathlib import Path
            from anabranch.infra.process import SupervisedProcess

            def start(remove=None):
                return SupervisedProcess.start({command!r}, log=Path({str(log)!r}),
                    environment=os.environ, remove_when_orphaned=remove)

            def tell(*values):
                print(*values, flush=True)
        """
        script = textwrap.dedent(script) + textwrap.dedent(body or "p = start(); tell(p.pid)")
        self.process = subprocess.Popen(
            [sys.executable, "-c", script + "\ntime.sleep(300)\n"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self) -> list[int]:
        assert self.process.stdout is not None
        return [int(word) for word in self.process.stdout.readline().split()]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


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


def test_a_command_that_is_not_there_is_an_error(log: Path) -> None:
    with pytest.raises(OSError, match=r"/no/such could not be started: .*No such file"):
        SupervisedProcess.start(["/no/such"], log=log, environment=os.environ)


def test_waiting_ends_at_its_deadline(sleeper: SupervisedProcess) -> None:
    started = time.monotonic()
    assert sleeper.wait(0.2) is None
    assert 0.2 <= time.monotonic() - started < 2
    assert sleeper.poll() is None


@pytest.mark.parametrize(
    ("order", "code"), [("terminate", -signal.SIGTERM), ("kill", -signal.SIGKILL)]
)
def test_signals_end_it(sleeper: SupervisedProcess, order: str, code: int) -> None:
    getattr(sleeper, order)()
    assert sleeper.wait(5) == code
    assert state(sleeper.pid) is None


def test_pause_and_resume(sleeper: SupervisedProcess) -> None:
    sleeper.pause()
    assert eventually(lambda: state(sleeper.pid) == "T")
    sleeper.resume()
    assert eventually(lambda: state(sleeper.pid) == "S")


def test_one_thread_can_kill_what_another_waits_for(sleeper: SupervisedProcess) -> None:
    codes: list[int | None] = []
    waiter = threading.Thread(target=lambda: codes.append(sleeper.wait(30)))
    waiter.start()
    time.sleep(0.1)
    sleeper.kill()
    waiter.join(5)
    assert codes == [-9]


def test_closing_ends_even_a_paused_one(sleeper: SupervisedProcess) -> None:
    sleeper.pause()
    sleeper.close()
    assert state(sleeper.pid) is None
    assert sleeper.poll() == -signal.SIGTERM
    sleeper.close()


def test_one_that_ignores_sigterm_is_killed(log: Path) -> None:
    stubborn = ("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done")
    process = SupervisedProcess.start(stubborn, log=log, environment=os.environ)
    assert eventually(lambda: log.read_text() == "ready\n")
    process.close()
    assert process.poll() == -signal.SIGKILL


def test_it_ends_when_the_owner_is_killed(log: Path) -> None:
    owner = Owner(log)
    (pid,) = owner.read()
    assert state(pid) is not None
    owner.kill()
    assert eventually(lambda: state(pid) is None)


def test_a_paused_one_ends_when_the_owner_is_killed(log: Path) -> None:
    owner = Owner(log, "p = start(); p.pause(); tell(p.pid)")
    (pid,) = owner.read()
    owner.kill()
    assert eventually(lambda: state(pid) is None)


def test_it_ends_when_the_owner_just_exits(log: Path) -> None:
    owner = Owner(log, "p = start(); tell(p.pid); os._exit(0)")
    (pid,) = owner.read()
    assert eventually(lambda: state(pid) is None)
    owner.kill()


def test_a_forked_child_that_lives_on_does_not_keep_it(log: Path) -> None:
    body = """
        p = start()
        child = os.fork()
        if child:
            tell(p.pid, child)
    """
    owner = Owner(log, body)
    pid, child = owner.read()
    try:
        owner.kill()
        assert eventually(lambda: state(pid) is None)
        # Else nothing was shown: the copy of the pipe is what makes this hard.
        assert state(child) is not None
    finally:
        os.kill(child, signal.SIGKILL)


def test_closing_works_while_a_forked_child_lives_on(log: Path) -> None:
    body = """
        p = start()
        child = os.fork()
        if child:
            p.close()
            tell(p.pid, child, p.poll())
    """
    owner = Owner(log, body)
    pid, child, code = owner.read()
    os.kill(child, signal.SIGKILL)
    owner.kill()
    assert code == -signal.SIGTERM
    assert state(pid) is None


def test_an_owner_that_was_forked_itself(log: Path) -> None:
    body = """
        def work():
            p = start()
            tell(p.pid, os.getpid())
            time.sleep(300)
        multiprocessing.get_context("fork").Process(target=work).start()
    """
    owner = Owner(log, body)
    try:
        pid, forked = owner.read()
        os.kill(forked, signal.SIGKILL)
        assert eventually(lambda: state(pid) is None)
    finally:
        owner.kill()


def test_it_outlives_the_thread_that_started_it(log: Path) -> None:
    body = """
        made = []
        thread = threading.Thread(target=lambda: made.append(start()))
        thread.start(); thread.join()
        time.sleep(0.5)
        tell(made[0].pid, 0 if made[0].poll() is None else 1)
    """
    owner = Owner(log, body)
    try:
        pid, ended = owner.read()
        assert not ended
        assert state(pid) is not None
    finally:
        owner.kill()
    assert eventually(lambda: state(pid) is None)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_it_ends_when_its_supervisor_is_killed(sleeper: SupervisedProcess) -> None:
    os.kill(sleeper._supervisor.pid, signal.SIGKILL)
    assert eventually(lambda: state(sleeper.pid) is None)
    assert sleeper.wait(5) == -9


def test_ending_the_supervisor_gently_ends_it_too(sleeper: SupervisedProcess) -> None:
    os.kill(sleeper._supervisor.pid, signal.SIGTERM)
    assert sleeper.wait(5) == -signal.SIGTERM


def test_ctrl_c_in_the_owners_terminal_does_not_reach_it(sleeper: SupervisedProcess) -> None:
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


def test_an_orphans_folder_is_removed(log: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("x")
    owner = Owner(log, f"p = start(Path({str(folder)!r})); tell(p.pid)")
    owner.read()
    owner.kill()
    assert eventually(lambda: not folder.exists())


def test_an_orphans_folder_is_removed_though_the_command_ended_long_before(
    log: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    owner = Owner(log, f"p = start(Path({str(folder)!r})); p.kill(); tell(p.wait(5))")
    assert owner.read() == [-9]
    time.sleep(0.2)
    assert folder.exists()
    owner.kill()
    assert eventually(lambda: not folder.exists())


def test_a_living_owners_folder_is_not_removed(log: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    process = SupervisedProcess.start(
        SLEEP, log=log, environment=os.environ, remove_when_orphaned=folder
    )
    process.close()
    assert folder.exists()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_modules_of_tests_end_when_their_owner_is_killed(log: Path, is_frozen: bool) -> None:
    """Controllers are started so: by a thread that is gone since, and they may be frozen."""
    script = f"""
        import os, threading, time
        from tests.owned import start_module

        def start():
            with open({str(log)!r}, "wb") as output:
                arguments = ["--bind", "127.0.0.1", "0"]
                started = start_module("http.server", arguments, output=output,
                    environment=dict(os.environ, PYTHONUNBUFFERED="1"))
                print(started.pid, flush=True)

        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        time.sleep(300)
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    with owner.stdout:
        pid = int(owner.stdout.readline())
    # The command does not end with the thread.
    assert eventually(lambda: log.read_bytes().startswith(b"Serving"), 30)
    if is_frozen:
        os.kill(pid, signal.SIGSTOP)
        assert eventually(lambda: state(pid) == "T")
    owner.kill()
    owner.wait()
    assert eventually(lambda: state(pid) is None)
