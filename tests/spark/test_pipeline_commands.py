"""The commands that load, export and compact: on a real broker, by real jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import anabranch
from anabranch.cli.main import app
from anabranch.protocol.legal_names import ADMIN_LANE
from tests.spark.pipeline_input import commit, files

pytestmark = [pytest.mark.broker, pytest.mark.slow(60)]


@pytest.fixture
def command(spark: SparkSession, bootstrap: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `anabranch spark …` on this process' session; (exit code, standard output, standard error)."""
    monkeypatch.setenv("ANABRANCH_BOOTSTRAP", bootstrap)

    def run(*arguments: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, ["spark", *arguments])
        return done.exit_code, done.stdout, done.stderr

    return run


@pytest.mark.long
def test_the_commands_from_file_to_file(command: Any, unique: str, tmp_path: Path) -> None:
    stream, path, out = f"c{unique}/rows", files(tmp_path, "csv"), str(tmp_path / "out")
    options = ("--stream", stream, "--segments", "2", "--key", "id", "--name", "n")
    code, said, _ = command("load", path, *options)
    assert (code, said.startswith(f"2 rows in {stream}, all at once: transaction ")) == (0, True)
    code, said, _ = command("load", path, *options, "--json")
    document = json.loads(said)
    assert (code, document["already_committed"], document["rows"]) == (0, True, 2)

    code, said, progress = command("export", "-s", stream, "--to", out, "--partition-by", "segment")
    assert (code, said) == (0, f"2 events to {out} in 1 micro-batch\n")
    assert progress.startswith("micro-batch 0: 2 events")
    code, said, _ = command("export", "-s", stream, "--to", out, "--partition-by", "segment")
    assert (code, said) == (0, f"nothing new for {out}\n")

    code, said, _ = command("compact", "-s", stream, "--to", out + "-latest", "--json")
    document = json.loads(said)
    assert (code, document["to"]) == (0, out + "-latest")
    assert (document["events"], document["keys"]) == (2, 2)


@pytest.mark.soak
def test_an_export_of_a_stream_that_is_made_again(
    command: Any, bootstrap: str, client: anabranch.Client, unique: str, tmp_path: Path
) -> None:
    stream, out = f"c{unique}/rows", str(tmp_path / "out")
    load = ("load", files(tmp_path, "csv"), "--stream", stream, "--segments", "1")
    export = ("export", "-s", stream, "--to", out)
    assert [command(*load)[0], command(*export)[0]] == [0, 0]
    with anabranch.connect(bootstrap, lane=ADMIN_LANE) as operator:
        operator.delete_stream(stream)
    client.create_stream(stream)
    commit(client, stream, *[("k", "{}")] * 4)
    code, said, error = command(*export)
    assert (code, said) == (2, "")
    assert error.startswith(f"UnknownStream: the checkpoint is of a former stream {stream}, ")
    assert error.count("\n") == 1
    code, said, _ = command(*export, "--lossy")
    assert (code, said) == (0, f"4 events to {out} in 1 micro-batch\n")
    assert command(*export)[:2] == (0, f"nothing new for {out}\n")
    commit(client, stream, ("k", "{}"))
    assert command(*export)[:2] == (0, f"1 event to {out} in 1 micro-batch\n")


# arguments, exit code, what standard error says
ENDS = [
    ("load /no/such.csv -s STREAM", 2, "InvalidArgument: Spark: Path does not exist"),
    ("load /no/such.csv -s STREAM-x", 2, "UnknownStream: "),
    ("load x.csv -s STREAM --conf x", 2, "InvalidArgument: --conf 'x'"),
    ("export -s STREAM-x --to TMP/out", 2, "UnknownStream: "),
    ("export -s STREAM --to TMP/o --partition-by x", 2, "no column x"),
    ("compact -s STREAM", 2, "InvalidArgument: give a folder or a stream"),
    ("compact -s STREAM-x --to TMP/out", 2, "UnknownStream: "),
    ("export -s STREAM --to TMP/o -b 127.0.0.1:1 --timeout 2", 3, "127.0.0.1:1"),
]


@pytest.mark.long
@pytest.mark.parametrize(("arguments", "code", "says"), ENDS)
def test_a_command_ends_with_one_line_and_its_code(
    command: Any, empty: str, tmp_path: Path, arguments: str, code: int, says: str
) -> None:
    line = arguments.replace("STREAM", empty).replace("TMP", str(tmp_path))
    ended, out, error = command(*line.split())
    assert (ended, out) == (code, "")
    assert says in error
    assert len(error.splitlines()) == 1
