"""How commands end: exit codes, one line of error, JSON, Ctrl-C; and how quickly help comes."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest

from anabranch import errors
from anabranch.cli.cluster import child_environment
from anabranch.cli.errors import (
    EXIT_CODES,
    CheckFailed,
    ChildFailed,
    ExitCode,
    exit_code_of,
    failure_of,
)
from anabranch.extras import command_of
from anabranch.infra import fetch
from anabranch.infra.errors import DownloadFailed, NoJava, PortTaken
from anabranch.ports import TableError
from tests.cli.conftest import Run
from tests.cli.fakes import TXN_ID, FakeClient

ONE_OF_EACH = [
    (errors.UnknownStream("no such stream"), ExitCode.USAGE),
    (errors.NotReady("nobody answers"), ExitCode.RETRY),
    (errors.TransactionAborted("gone"), ExitCode.BEGIN_AGAIN),
    (errors.OutcomeUnknown("who knows", txn_id=TXN_ID), ExitCode.OUTCOME_UNKNOWN),
    (DownloadFailed("no network"), ExitCode.ENVIRONMENT),
    (NoJava("no Java"), ExitCode.ENVIRONMENT),
    (PortTaken(9092), ExitCode.ENVIRONMENT),
    (OSError("disk full"), ExitCode.ENVIRONMENT),
    (TableError("disk full"), ExitCode.ENVIRONMENT),
    (ChildFailed("a process ended"), ExitCode.ENVIRONMENT),
    (errors.InvariantViolation("impossible"), ExitCode.DEFECT),
    (ZeroDivisionError("oops"), ExitCode.DEFECT),
    (CheckFailed("differs"), ExitCode.DIFFERENCE),
    (KeyboardInterrupt(), ExitCode.INTERRUPTED),
]


@pytest.mark.parametrize(("error", "code"), ONE_OF_EACH, ids=lambda x: type(x).__name__)
def test_each_kind_of_error_has_its_exit_code(
    run: Run, fake: FakeClient, error: BaseException, code: ExitCode
) -> None:
    fake.error = error
    result = run("stream", "list")
    assert result.exit_code == code
    assert result.stdout == ""
    if code is ExitCode.INTERRUPTED:
        assert result.stderr == ""
        return
    assert result.stderr.count("\n") == 1, "one line, no traceback"
    assert result.stderr.startswith(f"{type(error).__name__}: ")
    assert result.stderr.rstrip().endswith(getattr(error, "to_do", "") or EXIT_CODES[code][1])


@pytest.mark.parametrize(("error", "code"), ONE_OF_EACH[:-1], ids=lambda x: type(x).__name__)
def test_errors_as_json(run: Run, fake: FakeClient, error: BaseException, code: ExitCode) -> None:
    fake.error = error
    result = run("stream", "list", "--json")
    assert result.exit_code == code
    found = json.loads(result.stderr)["error"]
    assert found["name"] == type(error).__name__
    assert found["exit_code"] == code
    assert found["to_do"] == (getattr(error, "to_do", "") or EXIT_CODES[code][1])
    assert found.get("txn_id") == (TXN_ID.hex() if code is ExitCode.OUTCOME_UNKNOWN else None)


def test_a_check_that_names_the_next_step(run: Run, fake: FakeClient) -> None:
    fake.error = CheckFailed("1 need not met", "follow the advice in the rows above")
    shown = run("stream", "list").stderr
    assert shown == "CheckFailed: 1 need not met -> follow the advice in the rows above\n"


def test_every_error_of_the_library_has_a_code_of_its_kind() -> None:
    def leaves(base: type[errors.AnabranchError]) -> list[type[errors.AnabranchError]]:
        found = [leaf for sub in base.__subclasses__() for leaf in leaves(sub)]
        return [base, *found]

    kinds = {
        errors.FixCallError: ExitCode.USAGE,
        errors.RetryError: ExitCode.RETRY,
        errors.BeginAgainError: ExitCode.BEGIN_AGAIN,
        errors.AskOutcomeError: ExitCode.OUTCOME_UNKNOWN,
    }
    for kind, code in kinds.items():
        for leaf in leaves(kind):
            if leaf.__module__ == errors.__name__:
                assert exit_code_of(leaf("x")) is code, leaf


def test_verbose_shows_the_traceback_too(run: Run, fake: FakeClient) -> None:
    fake.error = errors.NotReady("nobody answers")
    result = run("stream", "list", "-v")
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("NotReady: nobody answers")


def test_a_long_message_is_cut_to_its_first_line_and_whole_in_json(
    run: Run, fake: FakeClient
) -> None:
    fake.error = ChildFailed("it ended:\n  line 1\n  line 2")
    assert run("stream", "list").stderr == (
        "ChildFailed: it ended (-v shows more) -> correct what its log says, then repeat the command\n"
    )
    document = json.loads(run("stream", "list", "--json").stderr)
    assert document["error"]["message"].endswith("line 2")


def test_an_error_without_a_message_says_what_its_class_says() -> None:
    assert "start `anabranch controller`" in failure_of(errors.NotReady()).line()


@pytest.mark.parametrize(("package", "extra"), [("pyspark.sql", "spark"), ("deltalake", "delta")])
def test_a_missing_extra_is_named_with_the_command_that_gets_it(package: str, extra: str) -> None:
    failure = failure_of(ModuleNotFoundError(f"No module named {package!r}", name=package))
    assert (failure.name, failure.code) == ("NotInstalled", ExitCode.ENVIRONMENT)
    assert (
        f"{package.split('.')[0]} is not installed; this gets it: {command_of(extra)}"
        in failure.line()
    )
    assert failure_of(ModuleNotFoundError("", name="other")).code is ExitCode.DEFECT


@pytest.mark.parametrize(
    "arguments",
    [("nope",), ("stream", "nope"), ("stream", "create"), ("stream", "list", "--nope"),
     ("read", "nyc/flights", "--limit", "0"), ("write", "nyc/x", "--nope"),
     ("load", "/no/such/file.csv", "--stream", "nyc/x")],
)  # fmt: skip
def test_wrong_usage_is_one_line_with_the_help_option(
    run: Run, fake: FakeClient, arguments: tuple[str, ...]
) -> None:
    result = run(*arguments)
    assert result.exit_code == ExitCode.USAGE
    assert result.stderr.startswith("Usage: ")
    assert result.stderr.count("\n") == 1
    assert "--help" in result.stderr
    document = json.loads(run(*arguments, "--json").stderr)
    assert document["error"]["exit_code"] == ExitCode.USAGE
    assert fake.calls == []


@pytest.mark.parametrize("arguments", [(), ("stream",), ("txn",)])
def test_groups_without_a_command_show_their_help(run: Run, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == ExitCode.USAGE
    assert "Commands" in result.output


def test_without_a_broker_it_says_how_to_give_one(run: Run, fake: FakeClient) -> None:
    result = run("stream", "list", bootstrap=None)
    assert result.exit_code == ExitCode.USAGE
    assert "--bootstrap" in result.stderr
    assert "ANABRANCH_BOOTSTRAP" in result.stderr


def test_the_shared_options_reach_the_client(run: Run, fake: FakeClient) -> None:
    arguments = ["--bootstrap", "b:1", "--cluster-prefix", "p", "--timeout", "7"]
    arguments += ["-X", "security.protocol=SSL", "--kafka", "a=b=c"]
    assert run("stream", "list", *arguments).exit_code == 0
    assert fake.target is not None
    assert (fake.target.bootstrap, fake.target.prefix, fake.target.timeout) == ("b:1", "p", 7.0)
    assert fake.target.kafka == {"security.protocol": "SSL", "a": "b=c"}
    assert run("stream", "list", "-X", "nonsense").exit_code == ExitCode.USAGE


def test_version(run: Run) -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("anabranch ")


def _python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def test_help_comes_quickly() -> None:
    best = 9.0
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            _python("-m", "anabranch.cli", "--help"),
            check=True,
            capture_output=True,
            env=child_environment(),
            timeout=60,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # CPU seconds, 0.3 on a quiet machine; it must not creep up to where one waits for it.
    assert best < 1.0


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys; from anabranch.cli import main\n"
        "heavy = {'confluent_kafka', 'fastavro', 'numpy', 'numba', 'rocksdict', 'mode', 'jgo'}\n"
        "heavy.add('anabranch.protocol.schemas.records')\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        _python("-c", script), check=True, capture_output=True, env=child_environment(), timeout=60
    )
    assert done.stdout.decode().strip() == "[]"


TABLE = (
    "from anabranch.cli import main, output\n"
    "@main.app.command('shown')\n"
    "def shown(): output.print_table('t', [{'a': 1}], ('a',))\n"
    "main.app(['shown'])\n"
)


def test_a_closed_standard_output_is_no_defect() -> None:
    command = f'exec {sys.executable} -c "$TABLE" >&-'
    environment = child_environment({"TABLE": TABLE})
    done = subprocess.run(["sh", "-c", command], capture_output=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


WAITING = (
    "import signal, sys, time\n"
    # A shell's background jobs ignore Ctrl-C, and so would their children.
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from anabranch.cli import stream, main\n"
    "def wait(*a, **k):\n"
    "    try:\n"
    "        print('waiting', flush=True)\n"
    # One long sleep could begin just after the signal: Python looks for signals before it and when it ends.
    "        while True: time.sleep(0.05)\n"
    "    finally:\n"
    "        print('cleaned', flush=True)\n"
    "from anabranch.cli import options\n"
    "options.need_bootstrap = wait\n"
    "main.app(['stream', 'list'])\n"
)


@pytest.mark.parametrize(
    ("sent", "code"),
    [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)],
)
def test_signals_clean_up_and_end_quietly(sent: signal.Signals, code: ExitCode) -> None:
    process = subprocess.Popen(
        _python("-c", WAITING),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(),
    )
    guard = threading.Timer(30, process.kill)
    guard.start()
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waiting\n"
        os.kill(process.pid, sent)
        out, err = process.communicate(timeout=30)
    finally:
        guard.cancel()
        process.kill()
    assert process.returncode == code
    assert out == b"cleaned\n"
    assert err == b""


def test_a_circle_of_causes_ends() -> None:
    one, two = OSError("one"), OSError("two")
    one.__cause__, two.__context__ = two, one
    assert list(errors.chain_of(one)) == [one, two]


def test_a_taken_port_and_a_missing_network_have_steps_of_their_own() -> None:
    taken, missing = (failure_of(each).line() for each in (PortTaken(9092), DownloadFailed("x")))
    assert taken.startswith("PortTaken: port 9092 is in use -> choose another port with --port")
    assert fetch.REPOSITORY_VARIABLE in missing
