"""The command line on a real cluster, as a shell sees it; most commands in this process, which is quicker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from anabranch.cli.cluster import child_environment
from anabranch.cli.main import app
from anabranch.topics.rights import scope_rights
from tests.cluster import Cluster
from tests.secured import CONTROLLER, grant

pytestmark = pytest.mark.broker
DEADLINE_S = 100.0


class Ended(NamedTuple):
    """How a command ended."""

    stdout: str
    stderr: str


class Shell:
    """Runs commands against a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._environment = child_environment({"ANABRANCH_BOOTSTRAP": cluster.bootstrap})

    def run(self, *arguments: str, code: int = 0, given: str | None = None) -> Ended:
        """A command's end, which has to be with this exit code. ``given``: its standard input."""
        done = CliRunner().invoke(app, arguments, input=given, env=self._environment)
        assert done.exit_code == code, (arguments, done.stdout[-2000:], done.stderr[-2000:])
        return Ended(done.stdout, done.stderr)

    def json(self, *arguments: str, given: str | None = None, code: int = 0) -> Any:
        """A command's JSON document."""
        return json.loads(self.run(*arguments, "--json", given=given, code=code).stdout)

    def lines(self, *arguments: str) -> list[Any]:
        """The JSON documents of `read`."""
        done = self.run("read", *arguments, "--json")
        return [json.loads(line) for line in done.stdout.splitlines()]


class Processes(Shell):
    """… each in a process of its own."""

    def run(self, *arguments: str, code: int = 0, given: str | None = None) -> Ended:
        done = subprocess.run(
            [sys.executable, "-m", "anabranch.cli", *arguments],
            input=given,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env=self._environment,
        )
        assert done.returncode == code, (arguments, done.stdout[-2000:], done.stderr[-2000:])
        assert "Traceback" not in done.stderr
        return Ended(done.stdout, done.stderr)


@pytest.fixture
def shell(cluster: Cluster) -> Shell:
    return Shell(cluster)


@pytest.fixture
def processes(cluster: Cluster) -> Shell:
    return Processes(cluster)


@pytest.fixture
def scope(cluster: Cluster) -> str:
    name = f"cli-{uuid.uuid4().hex[:8]}"
    grant(cluster.bootstrap, CONTROLLER, scope_rights(name))  # child processes make streams, too
    return name


def table(path: Path, rows: int) -> Path:
    lines = [f'{n},k{n % 7},"line {n}\nof ""two"""' for n in range(rows)]
    path.write_text("\n".join(["id,key,note", *lines]) + "\n", encoding="utf-8")
    return path


def test_commands_make_and_change_a_stream(shell: Shell, scope: str) -> None:
    stream = f"{scope}/flights"
    assert len(shell.json("stream", "create", stream, "--segments", "2")["segments"]) == 2
    shell.run("stream", "create", stream, "--segments", "2")
    again = shell.run("stream", "create", stream, "--segments", "3", code=2)
    assert again.stderr.startswith(f"StreamExists: {stream} exists, but segments are 2 (asked: 3) ")
    assert not shell.json("stream", "create", stream, "--if-not-exists")["created"]
    assert [s["stream"] for s in shell.json("stream", "list", scope)["streams"]] == [stream]
    assert shell.json("stream", "describe", stream)["stream_epoch"] == 0
    assert len(shell.json("stream", "scale", stream, "--segments", "3")["segments"]) == 3
    first = shell.json("stream", "describe", stream)["segments"][0]
    cut = ("--range", f"0:{first['high'] // 2}", "--range", f"{first['high'] // 2}:{first['high']}")
    scaled = shell.json("stream", "scale", stream, "--seal", str(first["segment_id"]), *cut)
    assert (len(scaled["segments"]), scaled["stream_epoch"]) == (4, 2)
    late = shell.run("stream", "scale", stream, "--seal", "0@0", *cut, code=2)
    assert late.stderr.startswith("InvalidArgument: not an active segment: 0@0")
    settings = ("--setting", "retention.ms=-1", "--setting", "scale.max.segments=8")
    made = shell.json("stream", "create", f"{scope}/weather", *settings)
    assert made["settings"] == {"retention.ms": "-1", "scale.max.segments": "8"}
    missing = shell.run("stream", "describe", f"{scope}/nope", code=2)
    assert missing.stderr.startswith("UnknownStream: ")
    similar = shell.run("stream", "describe", f"{scope}/flihgts", code=2)
    assert f"did you mean {stream}?" in similar.stderr


@pytest.mark.long
def test_load_and_read(processes: Shell, shell: Shell, scope: str, tmp_path: Path) -> None:
    stream, path = f"{scope}/rows", table(tmp_path / "rows.csv", 500)
    arguments = ("load", str(path), "--stream", stream, "--key", "key")
    loaded = shell.json(*arguments, "--segments", "2", "--name", "once")
    assert (loaded["rows"], loaded["already_committed"]) == (500, False)
    again = shell.json(*arguments, "--name", "once")
    assert again["already_committed"]
    assert again["txn_id"] == loaded["txn_id"]
    events = shell.lines(stream, "--limit", "500", "--timeout", "30")
    rows = [json.loads(event["value"]) for event in events]
    assert sorted(int(row["id"]) for row in rows) == list(range(500))
    for key in {row["key"] for row in rows}:
        ids = [int(row["id"]) for row in rows if row["key"] == key]
        assert ids == sorted(ids), "an empty field means no key"
    assert rows[0]["note"] == f'line {rows[0]["id"]}\nof "two"'
    (whole,) = shell.lines(stream, "--transactions", "--limit", "1", "--timeout", "30")
    assert (whole["txn_id"], whole["count"]) == (loaded["txn_id"], 500)
    at_end = shell.lines(stream, "--at", str(whole["commit_timestamp"]))
    assert len(at_end) == 500
    processes.run("write", stream, "--key", "k3", given="last\n")
    newest = shell.lines(stream, "--tail", "3")
    assert newest[:2] == at_end[-2:]
    assert newest[2]["value"] == "last"
    of_key = shell.lines(stream, "--tail", "2", "--with-key", "k3")
    assert of_key == [[each for each in at_end if each["key"] == "k3"][-1], newest[2]]
    followed = shell.lines(stream, "--tail", "1", "--follow", "--timeout", "2")
    assert followed == newest[2:]
    [listed] = shell.json("stream", "list", scope)["streams"]
    assert (listed["events"], listed["exact"], listed["kind"]) == (501, True, "stream")
    assert listed["newest_commit"] > whole["committed_at"]
    assert listed["bytes"] is None or listed["bytes"] > 1_000  # None: no right to ask for it


def test_a_load_that_fails_leaves_nothing(shell: Shell, scope: str, tmp_path: Path) -> None:
    stream, path = f"{scope}/rows", table(tmp_path / "rows.csv", 200)
    with path.open("a", encoding="utf-8") as file:
        file.write("only,two\n")
    arguments = ("load", str(path), "--stream", stream, "--segments", "1")
    assert "rows.csv: line 402 has 2 fields" in shell.run(*arguments, code=2).stderr
    assert shell.lines(stream, "--timeout", "1") == []
    (txn,) = shell.json("txn", "list", scope, "--finished")["transactions"]
    assert txn["state"] == "ABORTED"


@pytest.mark.long
def test_commands_make_and_read_a_table(shell: Shell, scope: str, tmp_path: Path) -> None:
    name, kept = f"{scope}/accounts", ("--folder", str(tmp_path / "kept"))
    shell.run("table", "create", name, "--segments", "2", "--setting", "table.history.ms=1000000")
    first = shell.json("table", "put", name, "ann", "5")["commit_timestamp"]
    shell.run("table", "put", name, "ann", "7", "--replace", *kept)
    shell.run("table", "put", name, "bob", "1", "--insert", *kept)
    again = shell.run("table", "put", name, "bob", "1", "--insert", *kept, code=2)
    assert again.stderr.startswith("RowExists: ")
    shell.run("table", "delete", name, "bob", *kept)
    assert shell.run("table", "get", name, "ann", *kept).stdout == "7\n"
    assert shell.json("table", "get", name, "ann", "--at", str(first))["value"] == "5"
    assert not shell.json("table", "get", name, "bob", *kept, code=1)["found"]
    assert shell.json("table", "scan", name, "--prefix", "a") == {"key": "ann", "value": "7"}
    found = shell.json("table", "versions", name, "ann", *kept)["versions"]
    assert [(row["value"], row["until"] is None) for row in found] == [("7", True), ("5", False)]
    assert found[1]["maxcsn"] == found[0]["mincsn"]
    assert found[1]["maxtid"] == found[0]["mintid"]
    assert [row["table"] for row in shell.json("table", "list", scope)["tables"]] == [name]
    [told] = shell.json("table", "describe", name)["tables"]
    assert (told["segments"], told["history_ms"], told["events"]) == (2, 1_000_000, 4)
    commits = shell.json("txn", "commits", scope, "--from", str(first))["commits"]
    assert [(row["streams"], row["rows"]) for row in commits] == [([name], 1)] * 3
    assert told["newest"] == commits[0]["commit_timestamp"]
    assert found[0]["mintid"] in {row["txn_id"] for row in commits}
    assert name in shell.run("table", "list", scope).stdout
    assert "COMMITTED" in shell.run("txn", "list", scope, "--finished", "--limit", "1").stdout
    shell.run("stream", "create", f"{scope}/plain")
    lines = shell.run("table", "changes", name, "--before", "--to", "end", "--limit", "9").stdout
    rows = [line.split("\t")[1:] for line in lines.splitlines()]
    gone = ["bob", "1", "(deleted)"]
    assert rows == [["ann", "-", "5"], ["ann", "5", "7"], ["bob", "-", "1"], gone]
    change = shell.json("table", "changes", name, "--from", str(first), "--limit", "1")
    assert (change["key"], change.get("before", "not told"), change["after"]) == (
        "ann",
        "not told",
        "7",
    )
    other = shell.run("table", "put", f"{scope}/plain", "k", "v", code=2)
    assert "is a stream, not a table" in other.stderr


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_the_flights(cluster: Cluster, tmp_path: Path) -> None:
    """A small one, on this cluster: everything holds, and it leaves nothing behind."""
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    before = set(admin.list_topics(timeout=20).topics)
    done = subprocess.run(
        [sys.executable, "-m", "examples.flights", "--rows", "2000", "--json",
         "--picture", str(tmp_path / "flights.svg"), "--bootstrap", cluster.bootstrap],
        capture_output=True,
        text=True,
        timeout=280,
        env=child_environment({"TMPDIR": os.environ.get("TMPDIR", "/tmp")}),
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["measured"]["rows"] == 3 * 2000 + 1_458 + 16
    assert [segments for _, segments in report["measured"]["scaled_at_s"]] == [4, 3]
    (epochs,) = [c["seen"] for c in report["checks"] if c["title"].endswith(": its epochs")]
    assert "3: 2 segments, duplicates 0, takes the transaction" in epochs
    assert "rolled-in" in (tmp_path / "flights.svg").read_text(encoding="utf-8")
    mine = set(admin.list_topics(timeout=20).topics) - before
    assert not [name for name in mine if name.startswith(("nyc-", "flights-"))]


@pytest.mark.long
def test_streams_become_what_a_file_says(shell: Shell, scope: str, tmp_path: Path) -> None:
    file = tmp_path / "streams.toml"
    kept, going = f"{scope}/kept", f"{scope}/going"

    def apply(segments: int, retention: int, absent: bool, *more: str, code: int = 0) -> list[str]:
        file.write_text(
            f'[streams."{kept}"]\nsegments = {segments}\n'
            f'settings = {{"retention.ms" = {retention}}}\n[streams."{going}"]\n'
            f"absent = {str(absent).lower()}\n"
        )
        done = shell.run("apply", str(file), "--json", *more, code=code)
        changes = json.loads(done.stdout)["changes"] if done.stdout else [done.stderr]
        return [f"{c['stream']} {c['change']}" if isinstance(c, dict) else c for c in changes]

    def in_effect(retention: str) -> None:
        until = time.monotonic() + 20
        while shell.json("stream", "describe", kept)["effective"]["retention.ms"] != retention:
            assert time.monotonic() < until  # brokers tell of a setting a moment after it is taken

    both = [f"{kept} create", f"{going} create"]
    assert apply(2, 90_000_000, False, "--dry-run") == both
    assert apply(2, 90_000_000, False) == both
    in_effect("90000000")
    assert apply(2, 90_000_000, False) == []
    assert apply(3, 95_000_000, False) == [f"{kept} segments", f"{kept} retention.ms"]
    in_effect("95000000")
    assert apply(3, 95_000_000, False) == []
    for retention, absent in ((1000, False), (95_000_000, True)):
        assert "WouldDelete" in apply(3, retention, absent, code=2)[0]
    found = shell.json("stream", "describe", kept)
    assert (len(found["segments"]), found["effective"]["retention.ms"]) == (3, "95000000")
    assert apply(3, 95_000_000, True, "--allow-delete") == [f"{going} delete"]
    assert apply(3, 95_000_000, True) == []
