"""The output of commands, as tables and as JSON, and their calls of the client; rows of the doctor about topics."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from xml.etree import ElementTree as ET

import pytest
import typer

from anabranch.cli import options, txn
from anabranch.cli import stream as stream_commands
from anabranch.cli.doctor import Row, State, _asked, _topics
from anabranch.cli.errors import ExitCode
from anabranch.cli.options import Target
from anabranch.errors import (
    AlreadyCommitted,
    IllegalState,
    InvalidArgument,
    NotAuthorized,
    NotReady,
    UnknownProcessor,
    UnknownScope,
    UnknownStream,
)
from anabranch.kafka.cluster import NO_TOPIC_ID, Cluster, Topic
from anabranch.kafka.settings import parse_settings
from anabranch.ports import LogRefused
from anabranch.presentation import history
from anabranch.presentation.history import History
from anabranch.topics.names import commands_topic, replies_topic
from anabranch.types import Counts, Listed
from anabranch.web.actions import plan
from tests.cli.conftest import Run
from tests.cli.fakes import TXN_ID, FakeClient, event, stream, transaction
from tests.cli.histories import rolled_history

ID = TXN_ID.hex()


def cells(shown: str) -> list[list[str]]:
    """The rows of all tables in an output, without their headings."""
    rows = (line for line in shown.splitlines() if line.startswith("│"))
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]


def test_stream_create(run: Run, fake: FakeClient) -> None:
    result = run("stream", "create", "nyc/flights", "--segments", "2", "--json")
    assert result.exit_code == 0
    asked = {"name": "nyc/flights", "segments": 2, "settings": {}}
    assert fake.calls[1] == ("create_stream", asked)
    document = json.loads(result.stdout)
    assert (document["stream"], document["created"]) == ("nyc/flights", False)
    assert [s["partition"] for s in document["segments"]] == [0, 1]


def test_created_is_said_only_of_what_was_created(
    run: Run, fake: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = ("stream", "create", "nyc/flights", "--if-not-exists")
    shown = run(*create).stdout
    assert "Nothing to do: the stream exists" in shown
    assert "Created" not in shown
    asked: Any = {"name": "nyc/flights", "segments": None, "settings": {}, "exist_ok": True}
    assert fake.calls[1] == ("create_stream", asked)
    answers: Iterator[Exception | None] = iter([UnknownStream("there is no stream"), None])

    def describe(name: str) -> Any:
        if error := next(answers):
            raise error
        return stream(name)

    monkeypatch.setattr(fake, "describe", describe)
    assert "Created" in run(*create).stdout


def test_stream_create_with_settings(run: Run, fake: FakeClient) -> None:
    settings = ("--setting", "retention.ms=-1", "--setting", "scale.events.per.second=100")
    assert run("stream", "create", "nyc/flights", *settings).exit_code == 0
    asked = {"retention.ms": "-1", "scale.events.per.second": "100"}
    assert fake.calls[1][1]["settings"] == asked
    assert run("stream", "create", "nyc/flights", "--adopt").exit_code == 0
    assert fake.calls[-2][1]["adopt"] is True
    assert run("stream", "create", "nyc/flights", "--description", "From JFK").exit_code == 0
    assert fake.calls[-2][1]["description"] == "From JFK"
    assert "description: From JFK" in run("stream", "describe", "nyc/flights").stdout
    wrong = run("stream", "create", "nyc/flights", "--setting", "retention.ms")
    assert wrong.exit_code == ExitCode.USAGE
    assert "--setting 'retention.ms' must have the form NAME=VALUE" in wrong.stderr


def test_settings_from_a_file(run: Run, tmp_path: Path, fake: FakeClient) -> None:
    """Secrets need not stand where `ps` shows them, nor where an error would."""
    file = tmp_path / "kafka.properties"
    file.write_text("# ours\n\nsasl.username=a\n  sasl.password=x=y \n")
    for mode, warning in ((0o604, f"can read the secrets in {file}"), (0o640, "")):
        file.chmod(mode)
        result = run("stream", "list", "--kafka-file", str(file))
        assert (result.exit_code, "x=y" in result.stderr) == (0, False)
        assert (warning in result.stderr, bool(result.stderr)) == (True, bool(warning))
    assert run("stream", "list", "--kafka", f"@{file}", "-X", "sasl.username=b").exit_code == 0
    assert fake.target is not None
    assert fake.target.kafka == {"sasl.username": "b", "sasl.password": "x=y"}
    assert run("stream", "list", "-X", "sasl.username=b", "--kafka-file", str(file)).exit_code == 0
    assert fake.target.kafka == {"sasl.username": "b", "sasl.password": "x=y"}
    assert run("stream", "list", "--kafka-file", "/no/file").exit_code == ExitCode.USAGE
    file.write_text("sasl.password hush\n")
    for wrong in (f"@{file}", "sasl.password hush", "@/no/file"):
        refused = run("stream", "list", "--kafka", wrong)
        assert refused.exit_code == ExitCode.USAGE
        assert "hush" not in refused.stderr
        assert ("sasl.password" in refused.stderr) or ("/no/file" in refused.stderr)


def test_stream_scale(run: Run, fake: FakeClient) -> None:
    document = json.loads(run("stream", "scale", "nyc/flights", "--segments", "4", "--json").stdout)
    asked = {"name": "nyc/flights", "segments": 4, "seal": [], "ranges": []}
    assert fake.calls[-1] == ("scale", asked)
    assert [s["segment_id"] for s in document["segments"]] == [0, 1]
    by_hand = ("--seal", "3@1", "--seal", "7", "--range", "0x10:0x20", "--range", "32:64")
    result = run("stream", "scale", "nyc/flights", *by_hand)
    assert result.exit_code == 0
    asked = {"segments": None, "seal": [(1 << 32) + 3, 7], "ranges": [(16, 32), (32, 64)]}
    assert fake.calls[-1] == ("scale", {"name": "nyc/flights", **asked})
    assert "0@0" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give --segments N, or --seal and --range"),
        (("--segments", "2", "--seal", "0@0"), "give --segments N, or --seal and --range"),
        (("--seal", "a@0"), "'a@0' must be NUMBER@EPOCH"),
        (("--seal", "-1"), "'-1' must be NUMBER@EPOCH"),
        (("--seal", "0@0", "--range", "5:5"), "'5:5' must be LOW:HIGH"),
        (("--seal", "0@0", "--range", "0:0x100000001"), "must be LOW:HIGH"),
        (("--seal", "0@0", "--range", "7"), "'7' must be LOW:HIGH"),
    ],
)
def test_stream_scale_refuses_what_it_cannot_mean(
    run: Run, fake: FakeClient, arguments: tuple[str, ...], said: str
) -> None:
    result = run("stream", "scale", "nyc/flights", *arguments)
    assert result.exit_code == ExitCode.USAGE
    assert said in result.stderr
    assert fake.calls == []


def test_stream_list(run: Run, fake: FakeClient) -> None:
    document = json.loads(run("stream", "list", "nyc", "--json").stdout)
    assert [s["stream"] for s in document["streams"]] == ["nyc/flights", "nyc/weather"]
    assert fake.calls[-1] == ("streams", {"scope": "nyc"})
    flights, weather = document["streams"]
    assert (flights["events"], flights["exact"], flights["bytes"]) == (12_345, False, None)
    assert (weather["events"], weather["newest_commit"], weather["bytes"]) == (None, None, 123_456)
    assert cells(run("stream", "list").stdout) == [
        [
            "nyc/flights",
            "stream",
            "ACTIVE",
            "2",
            "~12,345",
            "-",
            "2023-11-14T22:13:20.000000Z",
            "-",
        ],
        ["nyc/weather", "stream", "ACTIVE", "2", "?", "123,456", "-", "-"],
    ]
    assert "newest" not in run("stream", "list", "--brief").stdout
    assert fake.calls[-1][1]["scope"] is None


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "stream"),
        ({"table": "true"}, "table"),
        ({"processor": "nyc/p"}, "state"),
        ({"table.base": "nyc/t"}, "bases"),
    ],
)
def test_stream_list_marks_what_a_stream_is_for(
    run: Run, fake: FakeClient, monkeypatch: pytest.MonkeyPatch, settings: Any, kind: str
) -> None:
    found = Listed([replace(stream("nyc/x"), settings=settings)])
    monkeypatch.setattr(fake, "streams", lambda _: found)
    assert cells(run("stream", "list").stdout)[0][:2] == ["nyc/x", kind]


def test_what_brokers_lack_is_shown_with_the_streams(run: Run, fake: FakeClient) -> None:
    for words in (("list",), ("describe", "nyc/flights")):
        fake.losses = []
        assert json.loads(run("stream", *words, "--json").stdout)["losses"] == []
        fake.losses = ["no DeleteRecords: journals are never cut"]
        assert json.loads(run("stream", *words, "--json").stdout)["losses"] == fake.losses
        assert fake.losses[0] in run("stream", *words).stdout.splitlines()


@pytest.mark.parametrize(
    "words",
    ["stream list", "txn list", "txn list --finished", "txn locks", "txn abort abcd",
     "grants check", "txn abort --owner open", "command list"],
)  # fmt: skip
def test_a_list_without_a_control_partition_is_shown_and_no_success(
    words: str, run: Run, fake: FakeClient
) -> None:
    """Commands that choose from a list do nothing if the list is incomplete."""
    fake.missing = {1: NotReady("no controller answered")}
    result = run(*words.split(), "--json")
    assert result.exit_code == ExitCode.RETRY, result.output
    assert "no answer of control partition 1" in json.loads(result.stderr)["error"]["message"]
    acts = words.split()[1] in ("abort", "check")
    assert bool(result.stdout) is not acts
    assert "abort" not in [call for call, _ in fake.calls]


def test_stream_describe(run: Run, fake: FakeClient) -> None:
    document = json.loads(run("stream", "describe", "nyc/flights", "--json").stdout)
    assert document == {
        "stream": "nyc/flights",
        "stream_epoch": 0,
        "reference_epoch": 0,
        "segments": [
            {"segment_id": 0, "low": 0, "high": 1 << 31, "partition": 0},
            {"segment_id": 1, "low": 1 << 31, "high": 1 << 32, "partition": 1},
        ],
        "partitions": 2,
        "settings": {"retention.ms": "-1"},
        "rejected": {"late": 3},
        "journal": {"0": 12, "1": 34},
        "low_water": {"0": 10},
        "uncommitted_bytes": 0,
        "foreign": 0,
        "state": "ACTIVE",
        "trouble": "",
        "description": "",
        "events": 12_345,
        "exact": False,
        "newest_commit": "2023-11-14T22:13:20.000000Z",
        "effective": {"retention.ms": "60000"},
        "losses": [],
        "locked_segments": [],
    }
    text = run("stream", "describe", "nyc/flights").stdout
    for part in (
        "0x80000000",
        "0x100000000",
        "late: 3",
        "1: 34",
        "retention.ms │ -1     │ 60000",
        "up to: 0: 10",
        "events: ~12,345\nnewest commit: 2023-11-14T22:13:20.000000Z\n",
    ):
        assert part in text


@pytest.fixture
def past(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """A stream that was scaled, and a transaction rolled in; what was asked for."""
    asked: list[tuple[str, int]] = []

    def read(_ports: None, stream: str, *, last: int, timeout: float) -> History:
        asked.append((stream, last))
        found = History()
        for record in rolled_history():
            found.add(record, last)
        return found

    monkeypatch.setattr(history, "read_history", read)
    return asked


def test_stream_describe_with_its_epochs(
    run: Run, fake: FakeClient, past: list[tuple[str, int]]
) -> None:
    document = json.loads(run("stream", "describe", "nyc/flights", "--epochs", "--json").stdout)
    assert past == [("nyc/flights", 200)]
    assert [e["copy_of"] for e in document["epochs"]] == [None, None, 0, 1]
    assert [e["commits"] for e in document["epochs"]] == [2, 1, 1, 0]
    assert [e["events"] for e in document["epochs"]] == [10, 10, 4000, 0]
    assert document["epochs"][1]["sealed"] == [{"segment_id": 0, "end_offset": 17}]
    assert document["epochs"][1]["segments"][1]["start_offset"] == 30
    text = run("stream", "describe", "nyc/flights", "-e", "--last", "1").stdout
    assert past[-1][1] == 1
    assert "copy of" in text
    assert "4,000" not in text


def test_stream_draw(
    run: Run, fake: FakeClient, past: list[tuple[str, int]], tmp_path: Path
) -> None:
    picture = run("stream", "draw", "nyc/flights").stdout
    assert ET.fromstring(picture).tag.endswith("svg")
    assert fake.calls[-1] == ("describe", {"name": "nyc/flights"})
    file = tmp_path / "flights.svg"
    result = run("stream", "draw", "nyc/flights", "-o", str(file))
    assert result.stdout == f"4 epochs drawn to {file}\n"
    assert file.read_text(encoding="utf-8") == picture
    document = json.loads(run("stream", "draw", "nyc/flights", "--json").stdout)
    assert document["svg"].strip() == picture.strip()
    assert (document["epochs"], document["commits"], document["file"]) == (4, 4, None)


def test_txn_list(run: Run, fake: FakeClient) -> None:
    result = run("txn", "list", "nyc", "--finished", "--limit", "5", "--json")
    assert fake.calls[-1] == ("transactions", {"scope": "nyc", "finished": True, "limit": 5})
    (document,) = json.loads(result.stdout)["transactions"]
    assert document["txn_id"] == ID
    assert document["counts"] == {"committed": 10, "rejected": 1, "left_out": 2}
    assert document["committed_at"] == "2023-11-14T22:13:20.000000Z"
    assert document["begun_at"] == "2023-11-14T22:13:20.000+00:00"
    for shown in (ID, "nyc/flights, ber/…"):
        assert shown in run("txn", "list").stdout
    (opened,) = json.loads(run("txn", "list", "--json").stdout)["transactions"]
    assert (opened["uncommitted_bytes"], opened["keepalive_left_s"], opened["age_s"]) == (
        7,
        20.0,
        60.0,
    )
    waiting = run("txn", "list", "--waiting").stdout
    for shown in (ID, "3m", "it has no leader", "anabranch txn force"):
        assert shown in waiting
    fake.several = [fake.info, transaction(txn_id=TXN_ID[::-1])]
    fake.ages = {TXN_ID[::-1]: 0.0}
    shown = json.loads(run("txn", "list", "--waiting", "--json").stdout)["transactions"]
    assert [each["txn_id"] for each in shown] == [ID]


def test_locks(run: Run, fake: FakeClient) -> None:
    (row,) = json.loads(run("txn", "locks", "nyc", "--limit", "5", "--json").stdout)["locks"]
    assert fake.calls == [("system", {"asked": ("locks", "nyc"), "limit": 5})]
    assert row == {
        "txn_id": ID, "table": "nyc/a", "points": 2, "ranges": 1, "frozen": True, "broken": False,
        "waiting": ["00" * 16, (b"w" * 16).hex()], "waits_for": [],
    }  # fmt: skip
    shown = run("txn", "locks").stdout
    assert ID in shown
    assert "another" in shown


def test_txn_describe(run: Run, fake: FakeClient) -> None:
    fake.info = transaction(state="OPEN", commit_timestamp=0, finished_ms=0, name=None)
    document = json.loads(run("txn", "describe", ID, "--json").stdout)
    assert (document["state"], document["committed_at"], document["finished_at"]) == (
        "OPEN",
        None,
        None,
    )
    assert fake.calls[0] == ("state", {"txn": TXN_ID})
    assert document["merge"] == [
        {
            "stream": "nyc/flights",
            "partition": 1,
            "events_done": 5,
            "events": 10,
            "chunks_done": 2,
            "chunks": 4,
        }
    ]
    told = run("txn", "describe", ID).stdout
    assert "merge of nyc/flights, partition 1: 5 of 10 events, about 2 of 4 chunks" in told
    assert "OPEN" in told
    assert "loader 7" in told
    assert "left out" not in told
    for shown in ("it has no leader", "3m", "nyc/flights: 9,000", f"anabranch txn force {ID}"):
        assert shown in told
    fake.several = [fake.info, transaction(txn_id=TXN_ID[:8] + bytes(8))]
    assert json.loads(run("txn", "describe", ID[-8:], "--json").stdout)["txn_id"] == ID
    assert "round of votes" in told
    ambiguous = run("txn", "describe", ID[:8])
    assert ambiguous.exit_code == ExitCode.USAGE
    assert "2 transactions of the newest 10,000 begin or end with" in ambiguous.stderr
    assert run("txn", "describe", "xyz").exit_code == ExitCode.USAGE


def test_txn_describe_of_one_that_has_ended(run: Run, fake: FakeClient) -> None:
    """It has its parts on other control partitions, and nothing that it would wait for."""
    document = json.loads(run("txn", "describe", ID, "--json").stdout)
    parts = document["control_partitions"]
    assert [(one["scopes"], one["state"]) for one in parts] == [
        (["ber"], "COMMITTED"),
        ([], "COMMITTED"),
    ]
    assert "waits_for" not in document
    told = run("txn", "describe", ID).stdout
    for shown in (
        "Parts on other control partitions",
        "ber",
        "known only there",
        "left out",
        "6963200000000000000",
    ):
        assert shown in told
    assert "round of votes" not in told


def test_txn_describe_with_its_timeline(run: Run, fake: FakeClient) -> None:
    document = json.loads(run("txn", "describe", ID, "--timeline", "--json").stdout)
    steps = document.pop("steps")
    assert document == {"txn_id": ID, "waits": "its turn", "gaps": ["the rest is gone"]}
    assert [(step["step"], step["since_begun_ms"], step["since_step_ms"]) for step in steps] == [
        ("id made", -2, 0), ("begun", 0, 2), ("decided", 1500, 1500), ("readable", 1507, 7)
    ]  # fmt: skip
    assert steps[3] | {"at": "", "waited_for": ""} == {
        "at": "",
        "clock": "broker",
        "since_begun_ms": 1507,
        "since_step_ms": 7,
        "step": "readable",
        "about": "nyc/flights",
        "waited_for": "",
    }
    told = run("txn", "describe", ID, "--timeline").stdout
    for shown in ("1,500", "the journals of nyc/flights", "waits now: its turn", "gap: the rest"):
        assert shown in told
    assert run("txn", "describe", ID, "--timeline", "--watch").exit_code == ExitCode.USAGE


def test_txn_abort(run: Run, fake: FakeClient) -> None:
    fake.info = transaction(state="ABORTED", counts=Counts(0, 0, 0), owner="etl")
    state = ("state", {"txn": TXN_ID})
    result = run("txn", "abort", ID, "--json")
    assert result.exit_code == 0
    asked = ("abort", {"transaction": TXN_ID, "reason": "aborted by an operator"})
    assert fake.calls == [state, asked, state]
    assert json.loads(result.stdout)["state"] == "ABORTED"
    assert json.loads(result.stdout)["owner"] == "etl"
    other = TXN_ID[::-1].hex()
    both = json.loads(run("txn", "abort", ID, other, "--json").stdout)["transactions"]
    assert len(both) == 2
    assert [each["transaction"].hex() for call, each in fake.calls if call == "abort"] == [
        ID,
        ID,
        other,
    ]


def test_txn_abort_takes_digits_of_an_open_one(
    run: Run, fake: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.info = transaction(state="OPEN")
    assert run("txn", "abort", ID[-8:]).exit_code == 0
    assert [call for call, _ in fake.calls] == ["open_transactions", "state", "abort", "state"]
    monkeypatch.setattr(txn, "_MOST", 1)
    more = run("txn", "abort", ID[-8:])
    assert more.exit_code == ExitCode.USAGE, "there may be another one"
    assert "1 transaction of the oldest 1 open ones" in more.stderr


def test_txn_abort_by_owner_and_age(run: Run, fake: FakeClient) -> None:
    ages = {b"a": ("etl", 7200), b"b": ("etl", 60), b"c": ("open", 7200), b"d": ("etl", 3700)}
    fake.several = [transaction(txn_id=key * 16, owner=owner) for key, (owner, _) in ages.items()]
    fake.ages = {key * 16: age for key, (_, age) in ages.items()}

    def aborted(*options: str) -> str:
        fake.calls.clear()
        result = run("txn", "abort", *options, "--yes")
        assert result.exit_code == 0, result.stderr
        return "".join(a["transaction"][:1].decode() for call, a in fake.calls if call == "abort")

    assert aborted("--owner", "etl") == "abd"
    assert aborted("--older-than", "1h") == "acd"
    assert aborted("--owner", "etl", "--older-than", "1h") == "ad"
    assert aborted("--owner", "etl", "--older-than", "3d") == ""
    fake.calls.clear()
    asked = run("txn", "abort", "--owner", "etl")
    assert asked.exit_code == ExitCode.USAGE
    assert "3 transactions will be aborted" in asked.stderr
    assert (b"d" * 16).hex() in asked.stdout
    assert (b"c" * 16).hex() not in asked.stdout
    assert [call for call, _ in fake.calls] == ["open_transactions"]


def test_txn_abort_of_many_continues_after_a_committed_one(
    run: Run, fake: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def abort(token: bytes, reason: str) -> None:
        asked.append(token.hex())
        raise AlreadyCommitted("it is committed")

    monkeypatch.setattr(fake, "abort", abort)
    other = TXN_ID[::-1].hex()
    many = run("txn", "abort", ID, other)
    assert many.exit_code == 0
    assert asked == [ID, other]
    assert "COMMITTED" in many.stdout
    assert run("txn", "abort", ID).exit_code == ExitCode.USAGE


def test_txn_abort_leaves_what_was_prepared(run: Run, fake: FakeClient) -> None:
    other = TXN_ID[::-1]
    fake.several = [transaction(state="PREPARED"), transaction(state="OPEN", txn_id=other)]
    for asked in ((ID, other.hex()), (ID,)):
        fake.calls.clear()
        result = run("txn", "abort", *asked)
        assert result.exit_code == ExitCode.USAGE
        assert "txn force --outcome" in result.stderr
        aborted = [given["transaction"].hex() for call, given in fake.calls if call == "abort"]
        assert aborted == list(asked[1:])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give ids, or --owner and --older-than"),
        ((ID, "--owner", "etl"), "give ids, or --owner and --older-than"),
        (("xyz",), "'xyz' is no transaction id: give its 32"),
        (("--older-than", "1"), "'1' must be a span of time"),
        (("--older-than", "-1h"), "'-1h' must be a span of time"),
        (("--older-than", "1w"), "'1w' must be a span of time"),
        (("--older-than", "9" * 5000 + "d"), "must be a span of time"),
    ],
)
def test_txn_abort_refuses(
    run: Run, fake: FakeClient, arguments: tuple[str, ...], said: str
) -> None:
    result = run("txn", "abort", *arguments, "--yes")
    assert result.exit_code == ExitCode.USAGE
    assert said in result.stderr
    assert fake.calls == []


def test_txn_force_asks(run: Run, fake: FakeClient) -> None:
    fake.info = transaction(state="ABORTED", counts=Counts(0, 0, 0))
    force = ("txn", "force", ID, "--json")
    asked = run(*force)
    assert asked.exit_code == ExitCode.USAGE
    assert "--yes" in asked.stderr
    assert "Plain consumers keep seeing" in asked.stderr
    assert fake.calls == []
    result = run(*force, "--yes")
    assert result.exit_code == 0
    (call,) = [arguments for call, arguments in fake.calls if call == "force"]
    assert call["transaction"] == TXN_ID
    assert json.loads(result.stdout)["state"] == "ABORTED"


def test_txn_force_of_one_part_says_which_way(run: Run, fake: FakeClient) -> None:
    force = ("txn", "force", ID, "--at", "2")
    assert "give --outcome, too" in run(*force, "--yes").stderr
    asked = run(*force, "--outcome", "commit")
    assert "at control partition 2 will end by commit, alone" in asked.stderr
    assert fake.calls == []
    assert run(*force, "--outcome", "commit", "--yes").exit_code == 0
    (call,) = [arguments for call, arguments in fake.calls if call == "force"]
    assert (call["control_partition"], call["outcome"]) == (2, True)


@pytest.mark.usefixtures("fake")
def test_group_list_sums_what_is_known_of_all_streams(run: Run) -> None:
    assert cells(run("group", "list").stdout) == [
        ["loaders", "Stable", "2", "nyc/flights, nyc/weather", "-", "-", "-"],
        ["nyc.delays", "Empty", "0", "nyc/flights", "1,234", "0.000", "nyc/delays"],
        ["readers", "Empty", "0", "nyc/flights", "1,234", "0.000", "-"],
    ]
    (lost,) = [
        one
        for group in json.loads(run("group", "list", "--json").stdout)["groups"]
        for one in group["streams"]
        if one["trouble"]
    ]
    assert (lost["reads"], lost["offsets"], lost["events_behind"]) == ("transactions", {}, None)


@pytest.mark.usefixtures("fake")
def test_command_list(run: Run) -> None:
    (document,) = json.loads(run("command", "list", "--json").stdout)["control_partitions"]
    kept = {"open_transactions": 3, "outcomes": 12}
    assert document | kept | {"position": 40, "end": 42} == document
    shown = cells(run("command", "list").stdout)
    assert shown[0] == ["0", "40", "2", "1", "3", "12"]
    assert shown[1][:3] == ["0", "open", "17"]


def test_series(run: Run, fake: FakeClient) -> None:
    (document,) = json.loads(run("series", "list", "nyc", "--json").stdout)["series"]
    assert document == {
        "series": "s",
        "number": 17,
        "txn_id": ID,
        "owner": "etl",
        "taken_at": "2026-01-01T00:00:00.000+00:00",
    }
    assert "17" in run("series", "list", "nyc").stdout
    command = ("series", "set", "nyc", "spark/q/0", "5")
    fake.calls.clear()
    asked = run(*command)
    assert asked.exit_code == ExitCode.USAGE
    assert "is at 17" in asked.stderr
    assert [call for call, _ in fake.calls] == ["series"]
    result = run(*command, "--yes", "--json")
    assert json.loads(result.stdout) == {"series": "spark/q/0", "number": 5, "before": 17}
    arguments = {"scope": "nyc", "name": "spark/q/0", "number": 5, "expected": 17, "owner": None}
    assert fake.calls[-1] == ("set_series", arguments)


def test_stream_delete(run: Run, fake: FakeClient) -> None:
    asked = run("stream", "delete", "nyc/flights")
    assert asked.exit_code == ExitCode.USAGE
    for what in (
        "about 1,234 events) will be",
        "nyc.flights.journal",
        "positions of all groups",
        "--yes",
    ):
        assert what in asked.stderr
    result = run("stream", "delete", "nyc/flights", "--yes", "--json")
    assert json.loads(result.stdout) == {"stream": "nyc/flights", "state": "FORGOTTEN"}
    assert [call for call, _ in fake.calls] == ["describe", "describe", "delete_stream"]


def test_stream_delete_is_of_the_stream_that_was_shown(
    run: Run, fake: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody deletes it, and makes it again, while the question is shown: here, and in the browser."""
    monkeypatch.setattr(stream_commands, "confirm", lambda *_, **__: None)
    fake.topic_ids = ["one", "another", "one", "another", "another"]
    refused = run("stream", "delete", "nyc/flights")
    assert refused.exit_code == ExitCode.USAGE
    assert "was deleted and made again meanwhile" in refused.stderr
    first, second, third = (plan(fake, "delete", "nyc/flights", {}).effects for _ in range(3))  # type: ignore[arg-type]
    assert first != second
    assert second == third
    assert "delete_stream" not in [call for call, _ in fake.calls]


def test_stream_alter(run: Run, fake: FakeClient) -> None:
    assert "--unset" in run("stream", "alter", "nyc/flights").stderr
    result = run("stream", "alter", "nyc/flights", "--setting", "a=1", "--unset", "b", "--json")
    assert json.loads(result.stdout)["effective"] == {"retention.ms": "60000"}
    assert fake.calls == [
        ("alter_stream", {"name": "nyc/flights", "settings": {"a": "1", "b": None}})
    ]
    assert "60000" in run("stream", "describe", "nyc/flights").stdout
    fake.calls.clear()
    shown = run("stream", "alter", "nyc/flights", "--description", "From JFK").stdout
    assert "description: From JFK" in shown
    assert "description" not in run("stream", "alter", "nyc/flights", "--description", "").stdout
    assert [more for call, more in fake.calls if call == "alter_stream"] == [
        {"name": "nyc/flights", "settings": {}, "description": text} for text in ("From JFK", "")
    ]


def test_stream_truncate(run: Run, fake: FakeClient) -> None:
    command = ("stream", "truncate", "nyc/flights", "--until")
    assert "give a commit timestamp" in run(*command, "now", "--yes").stderr
    assert "will be deleted for good" in run(*command, "17").stderr
    assert fake.calls == []
    assert run(*command, "17", "--yes").exit_code == 0
    assert fake.calls == [("truncate_stream", {"name": "nyc/flights", "until": 17})]


def test_apply(run: Run, fake: FakeClient, tmp_path: Path) -> None:
    file = tmp_path / "streams.toml"

    def apply(text: str, *more: str) -> Any:
        file.write_text(text)
        fake.calls.clear()
        return run("apply", str(file), "--json", *more)

    def done() -> list[str]:
        return [call for call, _ in fake.calls if call != "describe"]

    same = '[streams."nyc/flights"]\nsegments = 2\nsettings = {"retention.ms" = %d}\n'
    longer, shorter = same % 90_000, same % 50_000
    scaled = same.replace("2", "5") % 90_000
    result = apply(longer, "--dry-run")
    (change,) = json.loads(result.stdout)["changes"]
    assert (change["now"], change["wanted"], change["deletes"]) == ("60000", "90000", False)
    assert done() == []
    assert apply(longer).exit_code == 0
    assert done() == ["alter_stream"]
    apply(scaled)
    assert done() == ["alter_stream", "scale"]
    for text in (shorter, '[streams."nyc/flights"]\nabsent = true\n'):
        refused = apply(text)
        assert refused.exit_code == ExitCode.USAGE
        assert "WouldDelete" in refused.stderr
        assert done() == []
        assert json.loads(apply(text, "--dry-run").stdout)["changes"][0]["deletes"]
        assert apply(text, "--allow-delete").exit_code == 0
    assert done() == ["delete_stream"]
    table = '[tables."nyc/flights"]\nsegments = 2\n'
    for text, said in (
        ("no toml", "can't be read"),
        ("[stream]", "needs a section [streams."),
        ("streams = 1", "needs a section [streams."),
        (table, "describe it as [streams."),
        (table + '[streams."nyc/flights"]', "a stream and a table"),
        ('[streams."nyc/flights"]\nsegments = "2"', "segments"),
        ('[streams."nyc/flights"]\nsettings = {"retention" = 1}', "no setting retention"),
        ('[streams."flights"]', "flights"),
        ('[streams."nyc/flights"]\nsegments = 2\nsettings = {"replication.factor" = 3}', "altered"),
    ):
        wrong = apply(text)
        assert wrong.exit_code == ExitCode.USAGE
        assert said in wrong.stderr
        assert done() == []


def test_apply_a_table(
    run: Run, fake: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its derivations, which programs make, stay."""
    file = tmp_path / "streams.toml"
    file.write_text('[tables."bank/accounts"]\nsettings = {"table.history.ms" = 0}\n')

    def missing(_: str) -> NoReturn:
        raise UnknownStream("none")

    monkeypatch.setattr(fake, "describe", missing)
    assert run("apply", str(file)).exit_code == 0
    ((_, made),) = fake.calls
    settings = {"table": "true", "table.history.ms": "0"}
    assert made["settings"] == settings
    there = replace(
        stream("bank/accounts"),
        segments=stream().segments[:1],
        settings=settings | {"derive.size": "1"},
    )
    monkeypatch.setattr(fake, "describe", lambda _: there)
    monkeypatch.setattr(fake, "effective_settings", lambda _: settings)
    assert "nothing to do" in run("apply", str(file)).stdout
    file.write_text('[streams."bank/accounts"]\n')
    assert 'describe it as [tables."bank/accounts"]' in run("apply", str(file)).stderr


def test_apply_a_description(
    run: Run, fake: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "effective_settings", lambda _: {})
    file = tmp_path / "streams.toml"
    same = '[streams."nyc/flights"]\nsegments = 2\nsettings = {"retention.ms" = -1}\n'
    for text in ("From JFK", ""):
        described = same + f'description = "{text}"'
        file.write_text(described)
        fake.calls.clear()
        assert run("apply", str(file)).exit_code == 0
        altered = {"name": "nyc/flights", "settings": {}, "description": text}
        assert fake.calls == [("describe", {"name": "nyc/flights"}), ("alter_stream", altered)]
        assert "nothing to do" in run("apply", str(file)).stdout
    file.write_text(same)
    assert "nothing to do" in run("apply", str(file)).stdout
    fake.description = "by hand"
    assert "by hand" in run("apply", str(file), "--dry-run").stdout, "the file names none"


def test_apply_asks_before_a_limit_of_bytes_is_taken_back(
    run: Run, fake: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker's own may be lower."""
    file = tmp_path / "streams.toml"
    file.write_text('[streams."nyc/flights"]\nsegments = 2\n')
    given = replace(stream("nyc/flights"), settings={"retention.bytes": "1000"})
    monkeypatch.setattr(fake, "describe", lambda _: given)
    assert "WouldDelete" in run("apply", str(file)).stderr


def test_stream_forget(run: Run, fake: FakeClient) -> None:
    asked = run("stream", "forget", "nyc/flights")
    assert asked.exit_code == ExitCode.USAGE
    assert "nyc/flights" in asked.stderr
    assert "--yes" in asked.stderr
    assert fake.calls == []
    result = run("stream", "forget", "nyc/flights", "--yes", "--json")
    assert result.exit_code == 0
    assert fake.calls == [("forget_stream", {"name": "nyc/flights"})]
    assert json.loads(result.stdout) == {"stream": "nyc/flights", "state": "FORGOTTEN"}
    assert "nyc/flights is forgotten" in run("stream", "forget", "nyc/flights", "-y").stdout
    fake.error = IllegalState("nyc/flights is ACTIVE: only a LOST stream can be forgotten")
    refused = run("stream", "forget", "nyc/flights", "-y")
    assert refused.exit_code == ExitCode.USAGE
    assert "only a LOST stream" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("answer", [True, False])
def test_at_a_terminal_it_is_asked(answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def confirm(text: str, **_: object) -> bool:
        said.append(text)
        return answer

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(typer, "confirm", confirm)
    with (
        pytest.raises(InvalidArgument, match="nothing was changed") if not answer else nullcontext()
    ):
        options.confirm("It goes.", yes=False)
    assert said == ["It goes. Continue?"]


class Terminal:
    """A standard input with a user at it."""

    def isatty(self) -> bool:
        return True


def test_read_events(run: Run, fake: FakeClient) -> None:
    result = run("read", "nyc/flights", "--group", "g", "--timeout", "2", "--json")
    assert fake.calls[-1] == (
        "read",
        {"name": "nyc/flights", "group": "g", "timeout": 2.0, "start": "begin"},
    )
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["offset"] for line in lines] == [40, 41, 42]
    assert lines[0] == {
        "stream": "nyc/flights",
        "key": "N14228",
        "value": '{"n":0}',
        "headers": [
            {"name": "by", "value": "me"},
            {"name": "raw", "value_base64": "/w=="},
            {"name_base64": "Y2Fm6Q==", "value": "1"},
        ],
        "timestamp": 1_700_000_000_000,
        "txn_id": ID,
        "commit_timestamp": 1_700_000_000_000_000 << 12,
        "segment_id": 1,
        "partition": 1,
        "offset": 40,
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"key": None, "value": None}, "1@40\t-\tnull"),
        ({"key": b"\xff", "value": b"a\xfeb"}, "1@40\t\\xff\ta\\xfeb"),
    ],
)
def test_read_events_for_people(
    run: Run, fake: FakeClient, changes: dict[str, None], expected: str
) -> None:
    fake.events = [event(0, **changes)]
    assert run("read", "nyc/flights").stdout == expected + "\n"
    assert fake.calls[-1][1]["group"] is None


def test_read_limit_and_start(run: Run, fake: FakeClient) -> None:
    result = run("read", "nyc/flights", "-n", "2", "--from", "end")
    assert len(result.stdout.splitlines()) == 2
    assert fake.calls[-1][1]["start"] == "end"


@pytest.mark.parametrize(
    ("chosen", "offsets"),
    [
        ("--with-key N1", [40, 42]),
        ("--segment 1@0 --with-key N2", []),
        ("--segment 1@0", []),
        ("--segment 1 --with-key N2", [41]),
        ("--with-key N3", []),
    ],
)
def test_read_of_one_key(run: Run, fake: FakeClient, chosen: str, offsets: list[int]) -> None:
    fake.events = [
        event(n, key=key, segment_id=1 if "1@0" not in chosen else 0)
        for n, key in enumerate((b"N1", b"N2", b"N1"))
    ]
    lines = run("read", "nyc/flights", *chosen.split(), "--json").stdout.splitlines()
    assert [json.loads(line)["offset"] for line in lines] == offsets


@pytest.mark.parametrize(
    ("chosen", "offsets"),
    [
        ("--key str --with-key N1", [0]),
        ("--key json --with-key 7", [1]),
        ('--key json --with-key "N1"', [0]),
        ("--value json --with-key N1", [2]),
    ],
)
def test_read_of_one_decoded_key(
    run: Run, fake: FakeClient, chosen: str, offsets: list[int]
) -> None:
    keys: tuple[Any, ...] = ("N1", 7, b"N1", None)
    fake.events = [event(0)._replace(offset=n, key=key) for n, key in enumerate(keys)]
    result = run("read", "nyc/flights", *chosen.split(), "--json")
    assert [json.loads(line)["offset"] for line in result.stdout.splitlines()] == offsets
    for given, said in (("--key json --with-key {", "codec json"), ("--key N1", "--with-key KEY")):
        refused = run("read", "nyc/flights", *given.split())
        assert refused.exit_code == ExitCode.USAGE
        assert said in refused.stderr


@pytest.fixture
def stretches(fake: FakeClient, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A stream of 200 commits of one event at the times 1, 2 …; every 50th has the key `b`.

    The numbers of events in the stretches of it that were read.
    """
    events = [event(n, commit_timestamp=n, key=b"a" if n % 50 else b"b") for n in range(1, 201)]
    found: list[int] = []

    def system(name: str, of: str, *, until: int, limit: int) -> list[SimpleNamespace]:
        assert (name, of) == ("commits", "nyc/flights")
        times = [one.commit_timestamp for one in reversed(events)]
        chosen = [at for at in times if at <= until][:limit]
        return [SimpleNamespace(commit_timestamp=at, rows=1) for at in chosen]

    def snapshot(_: str, at: int = 200, since: int | None = None) -> SimpleNamespace:
        chosen = [each for each in events if (since or 0) < each.commit_timestamp <= at]

        def read(_: str) -> Iterator[Any]:
            found.append(len(chosen))
            return iter(chosen)

        return SimpleNamespace(timestamp=200, read=read)

    def read(_: str, *, timeout: float | None, start: int) -> Iterator[Any]:
        assert start == 200
        return iter([event(201, commit_timestamp=201, key=b"b")])

    for name, call in (("system", system), ("snapshot", snapshot), ("read", read)):
        monkeypatch.setattr(fake, name, call)
    return found


@pytest.mark.parametrize(
    ("options", "times", "reads"),
    [
        ("--tail 3", [198, 199, 200], [3]),
        ("--tail 3 --follow", [198, 199, 200, 201], [3]),
        ("--tail 3 -f -n 4", [198, 199, 200, 201], [3]),
        ("--tail 200", [*range(1, 201)], [200]),
        ("--tail 900", [*range(1, 201)], [200]),
        ("--tail 1 --with-key b", [200], [1]),
        ("--tail 2 --with-key b", [150, 200], [2, 32, 200]),
        ("--tail 9 --with-key b -f", [50, 100, 150, 200, 201], [9, 144, 200]),
        ("--tail 2 --with-key c", [], [2, 32, 200]),
    ],
)
def test_read_of_the_newest_events(
    run: Run, stretches: list[int], options: str, times: list[int], reads: list[int]
) -> None:
    result = run("read", "nyc/flights", *options.split(), "--json")
    assert result.exit_code == 0, result.output
    found = [json.loads(line)["commit_timestamp"] for line in result.stdout.splitlines()]
    assert found == times
    assert stretches == reads


@pytest.mark.parametrize(
    "options",
    ["--tail 3 -g g", "--tail 3 -t", "--tail 3 --from end", "--tail 3 --at now", "--follow --to end",
     "--follow --latest", "--with-key k -t", "--tail 0"],
)  # fmt: skip
def test_read_refuses_options_that_exclude_each_other(
    run: Run, fake: FakeClient, options: str
) -> None:
    assert run("read", "nyc/flights", *options.split()).exit_code == ExitCode.USAGE
    assert fake.calls == []


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (UnknownStream("there is no stream 'nyc/flihgts': create it first"), "nyc/flights"),
        (UnknownScope("there is no scope 'nyx'"), "nyc"),
        (UnknownStream("there is no stream 'lax/other'"), None),
        (UnknownProcessor("there is no processor 'nyc/dealys': create it first"), "nyc/delays"),
    ],
)
def test_an_unknown_name_is_answered_with_a_similar_one(
    run: Run, fake: FakeClient, monkeypatch: pytest.MonkeyPatch, error: Exception, hint: str | None
) -> None:
    def describe(_: str) -> Any:
        raise error

    monkeypatch.setattr(fake, "describe", describe)
    result = run("stream", "describe", "nyc/flihgts")
    assert result.exit_code == ExitCode.USAGE
    assert ("did you mean" in result.stderr) is (hint is not None)
    assert hint is None or f"did you mean {hint}?" in result.stderr


@pytest.mark.parametrize(
    ("options", "means"),
    [
        ("--at now", (None, None, "snapshot")),
        ("--at 7238556067840028672", (7238556067840028672, None, "snapshot")),
        ("--at 2026-01-01T01:00:00+01:00", (datetime(2026, 1, 1, tzinfo=UTC), None, "snapshot")),
        ("--at 2026-01-01T00:00:00Z", (datetime(2026, 1, 1, tzinfo=UTC), None, "snapshot")),
        ("--since 5 --at 7", (7, 5, "snapshot")),
        ("--since 2026-01-01T00:00:00Z", (None, datetime(2026, 1, 1, tzinfo=UTC), "snapshot")),
        ("--latest", (None, None, "latest")),
        ("--changes --since 5 --latest", (None, 5, "latest")),
    ],
)
def test_read_as_of(run: Run, fake: FakeClient, options: str, means: tuple[Any, ...]) -> None:
    result = run("read", "nyc/flights", *options.split(), "-n", "2", "--timeout", "5")
    (asked, (call, read)) = fake.calls
    assert asked == ("snapshot", {"given": ("nyc/flights", *means), "timeout": 5.0})
    changed = "--changes" in options
    assert (call, read) == ("changes" if changed else "read", {"name": "nyc/flights"})
    assert len(result.stdout.splitlines()) == (1 if changed else 2)


@pytest.mark.parametrize(
    "options",
    [
        ("--at", "yesterday"),
        ("--at", "-5"),
        ("--at", "now", "--group", "g"),
        ("--at", "now", "--transactions"),
        ("--at", "now", "--from", "end"),
        ("--since", "5", "--group", "g"),
        ("--latest", "--transactions"),
        ("--changes", "--from", "end"),
    ],
)
def test_read_as_of_what_is_no_time_or_with_other_ways(
    run: Run, fake: FakeClient, options: tuple[str, ...]
) -> None:
    result = run("read", "nyc/flights", *options)
    assert result.exit_code == ExitCode.USAGE
    assert result.stderr.startswith("InvalidArgument: --at")
    assert fake.calls == []


def test_the_progress_of_a_copy(run: Run, fake: FakeClient) -> None:
    asked = "stream", "progress", "nyc/flights", "nyc/crew", "-g", "copy"
    assert run(*asked).stdout == "6963200000000000000\t2023-11-14T22:13:20.000000Z\n"
    assert fake.calls[-1][1] == {"streams": ["nyc/flights", "nyc/crew"], "group": "copy"}
    assert json.loads(run(*asked, "--json").stdout)["timestamp"] == 6963200000000000000


def test_read_transactions(run: Run, fake: FakeClient) -> None:
    result = run("read", "nyc/flights", "--transactions", "--json")
    document = json.loads(result.stdout)
    assert (document["txn_id"], document["count"]) == (ID, 3)
    assert [e["offset"] for e in document["events"]] == [40, 41, 42]
    assert document["committed_at"] == "2023-11-14T22:13:20.000000Z"
    assert run("read", "nyc/flights", "-t").stdout == (
        f"2023-11-14T22:13:20.000000Z\t{ID}\t3 events\n"
    )


ASKED, ANSWERED = commands_topic("p", "open"), replies_topic("p", "open")


def test_what_a_lane_may_not_see_is_not_checked() -> None:
    def ask() -> None:
        raise NotAuthorized("lane 'open' has no right 'admin'; nothing was changed")

    rows: list[Row] = []
    with _asked(rows, "quarantined commands", ""):
        ask()
    (row,) = rows
    assert (row.state, row.found) == ("not checked", "lane 'open' has no right 'admin'")
    assert "--lane admin" in row.to_do


class Answering(Cluster):
    """Brokers that say this of the topics; None: the client has no right to ask."""

    def __init__(self, in_sync: dict[str, int] | None) -> None:
        super().__init__(parse_settings("b:1", {}))
        self.in_sync = in_sync

    def refresh(self, names: Iterable[str], deadline: float) -> dict[str, Topic]:
        if self.in_sync is None:
            raise LogRefused("TOPIC_AUTHORIZATION_FAILED", 29)
        found = {name: self.in_sync[name] for name in names if name in self.in_sync}
        return {name: Topic(name, NO_TOPIC_ID, {}, 1, 3, count) for name, count in found.items()}


@pytest.mark.parametrize(
    ("in_sync", "states", "told"),
    [
        ({ASKED: 3, ANSWERED: 3}, [State.OK, State.OK], "3 of 3 replicas in sync"),
        ({ASKED: 3, ANSWERED: 2}, [State.OK, State.WARN], "2 of 3 replicas in sync"),
        ({ASKED: 3}, [State.OK, State.BAD], "it is not there, or may not be seen"),
        (None, [State.BAD], "TOPIC_AUTHORIZATION_FAILED"),
    ],
)
def test_the_doctor_has_a_row_for_each_topic(
    in_sync: dict[str, int] | None, states: list[str], told: str
) -> None:
    rows = list(_topics(Answering(in_sync), Target("b:1", "p", 1.0)))
    assert [row.state for row in rows] == states
    assert told in rows[-1].found
    assert [bool(row.to_do) for row in rows] == [state != State.OK for state in states]
