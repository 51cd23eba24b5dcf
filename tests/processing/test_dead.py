"""Dead letters are listed, shown, and sent back to their inputs exactly once."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner
from typer.main import get_command

from anabranch.cli import options
from anabranch.cli.main import app as cli
from anabranch.client.transaction import Transaction
from anabranch.errors import InvalidArgument, NotReady
from anabranch.processing.app import Processor
from anabranch.processing.operations import dead
from anabranch.protocol.legal_names import PLAIN
from tests.processing.test_worker import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def failing(place: Place) -> tuple[Processor, set[bytes]]:
    """Copies its input; fails for keys of a set, and for the timers of events "timer"."""
    app, bad = place.with_dead_letters(retries=0), {b"a", b"c", b"d"}
    out = app.output("nyc/out")

    @app.timer("late", wall=True)
    def late(key: bytes, due: int) -> None:
        raise ValueError("of a timer")

    @app.on(app.input("nyc/in"))
    def handle(event: Any) -> None:
        if event.key in bad:
            raise ValueError(event.key)
        if event.key == b"timer":
            late.set(event.key, at=1)
        headers = [(name, value) for name, value in event.headers if name == "h"]
        out.write(event.value, key=event.key, headers=headers)

    return app, bad


def write(place: Place, *keys: bytes) -> None:
    with place.client.begin("nyc") as txn:
        for key in keys:
            txn.write("nyc/in", b"v", key=key, timestamp=2**40, headers={"h": key})
        txn.commit()


def waiting(place: Place) -> list[bytes | None]:
    return [one.event.key for one in dead.letters(place.client, "nyc/dead")]


def test_letters_go_back_once_and_stay_readable(place: Place) -> None:
    app, bad = failing(place)
    write(place, b"a", b"b", b"c")
    write(place, b"d")
    place.run(app)
    assert place.written() == [b"b"]
    first, *_ = found = list(dead.letters(place.client, "nyc/dead"))
    assert [one.event.key for one in found] == [b"a", b"c", b"d"]
    assert (first.kind, first.stream, first.error) == ("event", "nyc/in", "ValueError: b'a'")
    assert first.place.startswith("nyc/in[0]@")
    done = dead.retry(place.client, "nyc/dead", most=2)
    assert (done.sent, done.more, done.stopped) == ({"nyc/in": 2}, True, None)
    assert waiting(place) == [b"d"]
    bad.clear()
    place.run(app)
    assert place.written() == [b"b", b"a", b"c"]
    events = {one.key: one for one in place.events("nyc/out")}
    assert ("h", b"a") in events[b"a"].headers
    assert events[b"a"].timestamp_ms == 2**40
    done = dead.retry(place.client, "nyc/dead", most=2)
    assert (done.sent, done.more) == ({"nyc/in": 1}, False)
    assert dead.retry(place.client, "nyc/dead", most=2).sent == {}
    assert waiting(place) == []
    assert len(list(dead.letters(place.client, "nyc/dead", sent=True))) == 3
    at = f"{first.event.partition}@{first.event.offset}"
    assert dead.letter_at(place.client, "nyc/dead", at) == first
    for wrong in ("0", "0@999999", "x@1"):
        with pytest.raises(InvalidArgument, match="letter"):
            dead.letter_at(place.client, "nyc/dead", wrong)
    place.run(app)
    assert place.written() == [b"b", b"a", b"c", b"d"]


def test_a_letter_that_fails_again_is_a_new_one(place: Place) -> None:
    app, _ = failing(place)
    write(place, b"a")
    place.run(app)
    for count in range(1, 4):
        assert dead.retry(place.client, "nyc/dead", most=10).sent == {"nyc/in": 1}
        place.run(app)
        assert place.written("nyc/dead") == [b"a"] * (count + 1)
        assert waiting(place) == [b"a"]


def test_a_timer_s_letter_stops_it_or_is_passed_over(place: Place) -> None:
    app, _ = failing(place)
    write(place, b"a")
    place.run(app)
    write(place, b"timer")
    place.run(app)
    write(place, b"c")
    place.run(app)
    done = dead.retry(place.client, "nyc/dead", most=10)
    assert (done.sent, done.passed) == ({"nyc/in": 1}, 0)
    assert done.stopped is not None
    assert (done.stopped.kind, done.stopped.place) == ("timer", "late@1")
    assert waiting(place) == [b"timer", b"c"]
    assert dead.retry(place.client, "nyc/dead", most=10).sent == {}
    done = dead.retry(place.client, "nyc/dead", most=10, pass_over=True)
    assert (done.sent, done.passed, done.stopped) == ({"nyc/in": 1}, 1, None)
    assert waiting(place) == []


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_commit_without_an_answer_sends_no_letter_twice(place: Place, lost: str) -> None:
    app, _ = failing(place)
    write(place, b"a", b"c")
    place.run(app)
    commit = Transaction.commit

    def fail(self: Transaction, **how: Any) -> Any:
        if lost == "answer":
            commit(self, **how)
        raise NotReady("planted")

    with patch.object(Transaction, "commit", fail), pytest.raises(NotReady):
        dead.retry(place.client, "nyc/dead", most=10)
    dead.retry(place.client, "nyc/dead", most=10)
    assert place.written("nyc/in") == [b"a", b"c"] * 2


def test_what_can_t_go_back_is_said(place: Place) -> None:
    place.client.create_stream("nyc/dead")
    place.client.create_stream("far/in")

    def letter(*headers: tuple[str, bytes]) -> dead.Letter:
        with place.client.begin("nyc") as txn:
            txn.write("nyc/dead", b"v", key=b"k", headers=headers)
            txn.commit()
        return list(dead.letters(place.client, "nyc/dead"))[-1]

    assert "no dead letter" in letter().obstacle
    error = ("error", b"E: e")
    assert "plain topic" in letter(error, ("from", f"{PLAIN}orders[0]@7".encode())).obstacle
    assert "no event" in letter(error, ("from", b"somewhere")).obstacle
    left_out = letter(error, ("from", b"nyc/in[0]@7"), ("left_out", b"value, headers"))
    assert "too big" in left_out.obstacle
    own = letter(("error", b"the event's own"), error, ("from", b"nyc/in[0]@7"))
    assert (own.obstacle, own.headers) == ("", [("error", b"the event's own")])


def test_the_commands(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*words: str) -> Any:
        monkeypatch.setattr(options, "connected", lambda _: nullcontext(place.client))
        arguments = ["processor", "dead", *words, "--bootstrap", "fake:9092"]
        command: Any = get_command(cli)
        found = CliRunner().invoke(command, arguments)
        assert found.exit_code == 0, found.output
        return json.loads(found.stdout) if "--json" in words else found.stdout

    app, _ = failing(place)
    write(place, b"a", b"secret\xff")
    place.run(app)
    write(place, b"timer")
    place.run(app)
    letters = run("list", "nyc/dead", "--json")["letters"]
    assert [one["kind"] for one in letters] == ["event", "timer"]
    assert letters[0]["error"] == "ValueError: b'a'"
    assert "v" not in letters[0].values()
    assert "nyc/in[0]@" in run("list", "nyc/dead")
    shown = run("show", "nyc/dead", letters[0]["place"], "--json")
    assert (shown["key"], shown["value"]) == ("a", "v")
    assert {"name": "h", "value": "a"} in shown["headers"]
    assert "key: a" in run("show", "nyc/dead", letters[0]["place"])
    done = run("retry", "nyc/dead", "--yes", "--json")
    assert (done["sent"], done["stopped_at"]["kind"]) == ({"nyc/in": 1}, "timer")
    assert "--pass-over" in run("retry", "nyc/dead", "--yes")
    assert "1 letter passed over" in run("retry", "nyc/dead", "--yes", "--pass-over")
    assert "no letters" in run("retry", "nyc/dead", "--yes")
    assert run("list", "nyc/dead", "--json")["letters"] == []
    assert len(run("list", "nyc/dead", "--all", "--json")["letters"]) == 2
