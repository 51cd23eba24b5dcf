"""A living stream's settings are altered, and its oldest events deleted, whoever leads meanwhile."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from anabranch.core import rows as k
from anabranch.ports import LogRefused, LogUnavailable
from anabranch.protocol.hybrid_time import to_text
from anabranch.protocol.schemas.records import (
    AlterStream,
    CreateStream,
    DeleteStream,
    Scale,
    SetFeatureLevel,
    StreamList,
    TruncateStream,
)
from anabranch.testing.memory.log import MemoryLog
from anabranch.topics.names import history_topic, journal_topic, stream_topic
from tests.controller.losing import GONE as ONE
from tests.controller.losing import OTHER, Play, killed_at

TOPICS = {"stream": stream_topic(ONE), "journal": journal_topic(ONE), "history": history_topic(ONE)}
# The calls that each change makes.
TRUNCATION = ["start_offsets", "delete_records", "append", "commit"]
KILLED_AT = {
    "alter": ["describe_topics", "alter_topics", "append", "commit"],
    "truncate": TRUNCATION,
}


def alter(play: Play, *unset: str, **settings: object) -> Any:
    named = {name.replace("_", "."): str(value) for name, value in settings.items()}
    return play.ask(AlterStream(ONE, named, unset), seconds=0.2)


def config(play: Play, name: str) -> dict[str, str]:
    """Kind of topic -> its value of a setting."""
    return {kind: play.world.cluster.topics[topic].config[name] for kind, topic in TOPICS.items()}


def audited(play: Play) -> list[str]:
    """The audit's rows, the newest first."""
    rows = play.controller.state.rows_below(k.AUDIT_KEY, b"\xff" * 13)
    return [f"{row.lane}: {row.command} {row.what}" for _, row in rows]


def now(play: Play) -> int:
    """The commit timestamp of all that is committed so far."""
    return play.controller.state.round.hybrid_time


def test_settings_are_altered_under_open_transactions_and_taken_back() -> None:
    play = Play()
    _, token, receipt = play.begun(ONE, OTHER)
    before = config(play, "max.message.bytes")
    answer = alter(play, retention_ms=60_000, max_message_bytes=2_000_000)
    assert isinstance(answer, StreamList)
    wanted = {"retention.ms": "60000", "max.message.bytes": "2000000"}
    assert answer.streams[0].settings == wanted
    assert config(play, "retention.ms") == {"stream": "60000", "journal": "-1", "history": "-1"}
    raised = {"stream": "2000000", "journal": "2000000"}
    assert config(play, "max.message.bytes") == before | raised
    play.commit(token, receipt)
    assert alter(play, retention_ms=60_000).streams[0].settings == wanted, "repeated"
    assert alter(play, "retention.ms").streams[0].settings == {"max.message.bytes": "2000000"}
    assert config(play, "retention.ms")["stream"] == "-1"
    play.world.cluster.alter(
        {TOPICS["stream"]: {"max.message.bytes": "3000000", "segment.ms": "7"}}
    )
    assert (
        alter(play, segment_ms=9, scale_max_segments=9).streams[0].settings["scale.max.segments"]
        == "9"
    )
    assert (config(play, "segment.ms")["stream"], config(play, "max.message.bytes")["stream"]) == (
        "9",
        "3000000",
    )
    play.world.cluster.alter({TOPICS["stream"]: {"segment.ms": "7"}})
    alter(play, segment_ms=9)
    assert config(play, "segment.ms")["stream"] == "9", "what was altered by hand is set again"
    play.lead_anew(keeps_table=False)
    assert play.one_shot(ONE) == "COMMITTED"
    assert play.controller.state.streams[ONE].change is None


def test_a_broker_that_lags_loses_no_alteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = Play()
    older = play.world.cluster.log("reader").describe_topics([*TOPICS.values()])
    real = MemoryLog.describe_topics

    def stale(self: MemoryLog, topics: Any, **how: Any) -> Any:
        found = real(self, topics, **how)
        return {name: older.get(name, info) for name, info in found.items()}

    monkeypatch.setattr(MemoryLog, "describe_topics", stale)
    alter(play, retention_ms=60_000, max_message_bytes=2_000_000)
    assert config(play, "retention.ms")["stream"] == "60000"
    assert isinstance(alter(play, "retention.ms"), StreamList)
    assert config(play, "retention.ms")["stream"] == "-1"
    refused = alter(play, max_message_bytes=1_500_000)
    assert (refused.code, "only be raised" in refused.message) == ("InvalidArgument", True)


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ({"max.message.bytes": "20000"}, "InvalidArgument", "only be raised"),
        ({"min.insync.replicas": "2"}, "TopicMisconfigured", "set 1"),
    ],
)
def test_what_the_topics_do_not_allow_is_refused_and_changes_nothing(
    settings: dict[str, str], code: str, said: str
) -> None:
    play = Play()
    before = dict(play.world.cluster.topics)
    refused = play.ask(AlterStream(ONE, settings, ()), seconds=0.2)
    assert (refused.code, said in refused.message) == (code, True), refused
    assert play.world.cluster.topics == before
    row = play.controller.state.streams[ONE]
    assert (row.settings, row.change, row.correlation_id) == ({}, None, b"")
    assert audited(play) == []
    assert play.one_shot(ONE) == "COMMITTED"


def test_a_refused_change_leaves_the_description(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is changed together with the topics, and whoever leads at the end takes both back."""
    play = Play()
    play.ask(SetFeatureLevel(2))
    for before, wanted in (("", "one"), ("two", ""), ("two", "three")):
        play.ask(AlterStream(ONE, {}, (), before), seconds=0.2)
        with monkeypatch.context() as patched:
            error = LogRefused("no such right", 29)
            patched.setattr(MemoryLog, "alter_topics", Mock(side_effect=error))
            asked = AlterStream(ONE, {"retention.ms": "60000"}, (), wanted)
            assert play.ask(asked, seconds=0.2).code == "NotAuthorized"
        play.lead_anew(keeps_table=False)
        row = play.controller.state.streams[ONE]
        assert (row.description, row.settings, row.change) == (before, {}, None)
    done = play.ask(AlterStream(ONE, {"retention.ms": "60000"}, (), "three"), seconds=0.2)
    (stream,) = done.streams
    assert (stream.description, stream.settings) == ("three", {"retention.ms": "60000"})
    assert audited(play)[0].endswith("retention.ms=60000, description=three")
    assert play.ask(TruncateStream(ONE, now(play)), seconds=0.2).streams[0].description == "three"


def test_a_change_that_brokers_refuse_or_never_do_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = Play()
    for error, code in (
        (LogRefused("no such right", 29), "NotAuthorized"),
        (LogUnavailable("no broker"), "NotReady"),
    ):
        with monkeypatch.context() as patched:

            def refuse(*_: object, error: Exception = error) -> None:
                raise error

            patched.setattr(MemoryLog, "alter_topics", refuse)
            first = play.world.send(AlterStream(ONE, {"retention.ms": "1"}, ()))
            play.play(1)
            if code == "NotReady":
                for other in (AlterStream(ONE, {}, ("retention.ms",)), TruncateStream(ONE, 1)):
                    assert play.ask(other).code == "NotReady", "one change after the other"
            play.play(40, 40.0)
        assert play.world.reply(first).code == code
        assert play.controller.state.streams[ONE].settings == {}
        assert audited(play) == [], "nothing was changed"
        assert play.one_shot(ONE) == "COMMITTED"
    assert config(play, "retention.ms")["stream"] == "-1"


def test_events_go_up_to_a_commit_and_no_further() -> None:
    play = Play()
    ask_at = []
    for _ in range(3):
        for _, token, receipt in (play.begun(ONE, OTHER), play.begun(ONE, OTHER)):
            play.commit(token, receipt)
        ask_at.append(now(play))
        play.world.clock.sleep(1)
    _, token, receipt = play.begun(ONE)
    assert isinstance(play.ask(Scale(ONE, 3, (), ()), seconds=0.2), StreamList)
    others = play.begins(OTHER)
    for at, left in zip(ask_at, (4 * 8, 2 * 8, 0), strict=True):
        for _ in range(2):
            assert isinstance(play.ask(TruncateStream(ONE, at), seconds=0.2), StreamList)
            assert play.events(ONE) == left
    assert play.begins(OTHER) == others
    assert isinstance(play.ask(TruncateStream(ONE, 0), seconds=0.2), StreamList)
    play.commit(token, receipt)
    assert play.events(ONE) == 8


@pytest.mark.parametrize("phase", ["", ".after"])
@pytest.mark.parametrize(
    ("change", "call"), [(change, call) for change, calls in KILLED_AT.items() for call in calls]
)
def test_a_successor_completes_a_change_wherever_a_leader_ends(
    change: str, call: str, phase: str
) -> None:
    at = 0

    def start() -> tuple[Play, Any]:
        nonlocal at
        play = Play()
        at = now(play)
        play.world.clock.sleep(1)
        assert play.one_shot(ONE) == "COMMITTED"
        if change == "truncate":
            return play, TruncateStream(ONE, at)
        return play, AlterStream(ONE, {"retention.ms": "7"}, ())

    for play, asked in killed_at(call + phase, start):
        assert isinstance(play.world.reply(asked), StreamList)
        row = play.controller.state.streams[ONE]
        assert (row.change, row.correlation_id) == (None, b"")
        what = "AlterStream nyc/gone: retention.ms=7"
        if change == "truncate":
            what = f"TruncateStream nyc/gone up to {at}, {to_text(at)}"
        assert set(audited(play)) == {f"open: {what}"}  # a copy is carried out, too
        if change == "alter":
            assert config(play, "retention.ms")["stream"] == row.settings["retention.ms"] == "7"
        else:
            assert play.events(ONE) == 1
        assert play.one_shot(ONE) == play.one_shot(OTHER) == "COMMITTED"


def test_a_deletion_answers_an_alteration_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = Play()
    with monkeypatch.context() as patched:

        def away(*_: object) -> None:
            raise LogUnavailable("a broker is away")

        patched.setattr(MemoryLog, "alter_topics", away)
        waits = play.world.send(AlterStream(ONE, {"retention.ms": "1"}, ()))
        play.play(2, 0.1)
        assert play.world.reply(waits) is None
        assert isinstance(play.ask(DeleteStream(ONE), seconds=0.2), StreamList)
    assert play.world.reply(waits).code == "StreamLost"
    assert audited(play) == [f"open: DeleteStream {ONE}"]
    assert isinstance(play.ask(CreateStream(ONE, 2, {}), seconds=0.2), StreamList)
    assert play.one_shot(ONE) == "COMMITTED"
