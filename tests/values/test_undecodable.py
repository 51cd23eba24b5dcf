"""What readers do with events that can't be decoded, and what a group's position is then."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from typer.main import get_command

import anabranch
from anabranch.cli.main import app as commands
from anabranch.errors import UndecodableValue
from tests.cluster import Cluster
from tests.values.kinds import Line

pytestmark = pytest.mark.broker

TIMEOUT_S = 2.0


@pytest.fixture
def name(client: anabranch.Client, unique: str) -> str:
    """A stream with 1, an undecodable value, and 3."""
    stream = f"u{unique}/numbers"
    client.create_stream(stream)
    client.create_stream(f"u{unique}/dead")
    with client.begin(f"u{unique}") as txn:
        for value in (b"1", b"x", b"3"):
            txn.write(stream, value, key=b"k", headers={"from": b"here"})
        txn.commit()
    return stream


def test_an_error_comes_again_in_a_group_until_the_reader_continues(
    client: anabranch.Client, name: str
) -> None:
    numbers, group = client.stream(name, key=str, value=json), name.replace("/", ".")
    with client.read(numbers, group=group, timeout=TIMEOUT_S) as reader:
        assert next(reader).value == 1
        with pytest.raises(UndecodableValue) as raised:
            next(reader)
        assert raised.value.event.value == b"x"
    with client.read(numbers, group=group, timeout=TIMEOUT_S) as reader:
        with pytest.raises(UndecodableValue):
            next(reader)
        assert [event.value for event in reader] == [3]
    with client.read(numbers, group=group, timeout=TIMEOUT_S) as reader:
        assert list(reader) == []


@pytest.mark.parametrize("dead", [False, True])
def test_skipped_events_and_dead_letters(client: anabranch.Client, name: str, dead: bool) -> None:
    scope = name.partition("/")[0]
    numbers = client.stream(name, str, json, f"{scope}/dead" if dead else "skip")
    with client.read(numbers, group=f"{scope}.g", timeout=TIMEOUT_S) as reader:
        assert [event.value for event in reader] == [1, 3]
        assert reader.skipped == 1
    with client.read(numbers, group=f"{scope}.g", timeout=TIMEOUT_S) as reader:
        assert list(reader) == []
    letters = list(client.snapshot(f"{scope}/dead").read(f"{scope}/dead"))
    assert len(letters) == int(dead)
    for letter in letters:
        headers = letter.headers
        assert (letter.key, letter.value, headers[0]) == (b"k", b"x", ("from", b"here"))
        assert headers[1][0] == "error"
        assert (headers[1][1] or b"").startswith(b"UndecodableValue: ")
        assert headers[2] == ("from", f"{name}[0]@1".encode())


@pytest.mark.long
def test_commands_encode_and_say_what_they_can_not(
    client: anabranch.Client, cluster: Cluster, unique: str
) -> None:
    table, word = f"c{unique}/lines", "tests.values.kinds:Line"
    client.create_table(table)

    def run(*arguments: str, given: str | None = None) -> tuple[int, str]:
        environment = {"ANABRANCH_BOOTSTRAP": cluster.bootstrap}
        command = get_command(commands)
        done = CliRunner().invoke(command, [*arguments], input=given, env=environment)  # type: ignore[arg-type]
        return done.exit_code, done.stdout + done.stderr

    line = '{"count": 5, "item": "apple"}'
    assert run("table", "put", table, "ann", line, "--value", word)[0] == 0
    assert run("write", table, "--key", "bob", "--value", word, given=line)[0] == 0
    code, said = run("write", table, "--key", "eve", "--value", word, given='{"count": 5}')
    assert code != 0
    assert "codec Line" in said
    lines = client.stream(table, key=str, value=Line)
    wanted = [(name, Line("apple", 5)) for name in ("ann", "bob")]
    assert [(event.key, event.value) for event in client.snapshot(lines).read(lines)] == wanted
    code, said = run("table", "get", table, "ann", "--value", word, "--json")
    assert (code, json.loads(said)["value"]) == (0, json.loads(line))
    code, said = run("table", "scan", table, "--value", "json")
    assert said.splitlines() == [f'{name}\t{{"item":"apple","count":5}}' for name in ("ann", "bob")]
