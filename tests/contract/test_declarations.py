"""Topics as declared: created right, and refused by name where they are not."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import pytest

from anabranch.errors import (
    InvalidArgument,
    NotAuthorized,
    NotReady,
    TopicMisconfigured,
    TopicNotEmpty,
    UnsupportedSetting,
)
from anabranch.ports import Log, LogRefused, TopicInfo, TopicPartition, TopicSpec
from anabranch.topics import creation, rights
from anabranch.topics import declarations as d
from anabranch.topics.names import (
    commands_topic,
    control_topic,
    history_topic,
    journal_topic,
    replies_topic,
    status_topic,
    stream_topic,
    topics_of,
)
from tests.contract.conftest import Maker
from tests.contract.helpers import batch, delete, until, wait_stable, write

Create = Callable[..., tuple[dict[int, int], Any]]
ALL = {
    "commands": d.COMMANDS,
    "control": d.CONTROL,
    "replies": d.REPLIES,
    "status": d.STATUS,
    "journal": d.JOURNAL,
    "history": d.HISTORY,
    "stream": d.STREAM,
    "state": d.STATE,
}


@pytest.fixture
def prefix(maker: Maker) -> str:
    made = f"p{uuid.uuid4().hex[:8]}"
    maker.allow(rights.controller_rights(made))
    return made


@pytest.fixture
def stream(maker: Maker) -> str:
    scope = f"s{uuid.uuid4().hex[:8]}"
    maker.allow(rights.scope_rights(scope))
    return f"{scope}/events"


@pytest.fixture
def create(log: Log, stream: str) -> Create:
    """Creates the stream's topics, by default of one segment and without settings."""
    return partial(creation.create_stream_topics, log, stream, segments=1, settings={})


def test_control_topics_are_created_as_declared(log: Log, prefix: str) -> None:
    assert creation.create_control_topics(log, prefix, control_partitions=3)[:2] == (3, 8)
    names = (
        commands_topic(prefix),
        status_topic(prefix),
        replies_topic(prefix),
        control_topic(prefix),
        commands_topic(prefix, "admin"),
        replies_topic(prefix, "admin"),
    )
    infos = log.describe_topics(names)
    assert [infos[n].partitions for n in names] == [3, 3, 8, 3, 3, 1]
    assert infos[names[0]].config["retention.ms"] == str(7 * d.DAY_MS)
    assert infos[names[1]].config["cleanup.policy"] == "compact"
    assert infos[names[1]].config["delete.retention.ms"] == str(7 * d.DAY_MS)
    assert infos[names[2]].config["retention.ms"] == str(d.HOUR_MS)
    # Again, and with fewer asked for: as they are.
    assert creation.create_control_topics(log, prefix, control_partitions=1)[:2] == (3, 8)
    log.add_partitions(status_topic(prefix), 5)  # an interrupted growth
    assert creation.create_control_topics(log, prefix, control_partitions=1)[:2] == (3, 8)
    creation.grow_control_topics(log, prefix, 4)
    assert creation.create_control_topics(log, prefix, control_partitions=1)[:2] == (4, 8)
    assert [log.describe_topics([n])[n].partitions for n in names] == [4, 5, 8, 4, 4, 1]


def test_g1_a_cluster_grows_in_an_order_in_which_each_control_partition_can_be_led() -> None:
    """Controllers lead the partitions of the topic of commands, and log to that of status."""

    class Grown(list[str]):
        def add_partitions(self, topic: str, count: int) -> None:
            assert count == 4
            self.append(topic)

    grown = Grown()
    creation.grow_control_topics(cast("Log", grown), "p", 4)
    assert (grown[0], grown[-1]) == (status_topic("p"), commands_topic("p"))


def test_a_streams_topics_are_created_as_declared(log: Log, stream: str, create: Create) -> None:
    ends, ids = create(segments=2)
    assert ends == {0: 0, 1: 0}
    names = topics_of(stream)
    infos = log.describe_topics(names)
    assert ids == tuple(infos[n].topic_id for n in names)
    assert [infos[n].partitions for n in names] == [2, 2, 1]
    for name in names:
        config = infos[name].config
        assert config["compression.type"] == "producer"
        assert config["message.timestamp.type"] == "CreateTime"
        assert config["message.timestamp.after.max.ms"] == str(d.MAX_LONG)
        assert config["cleanup.policy"] == "delete"
        assert config["retention.ms"] == config["retention.bytes"] == "-1"


def test_a_clients_clock_may_be_a_day_ahead(maker: Maker, log: Log, prefix: str) -> None:
    """A controller says so to those that are further ahead; the status topic keeps its hour."""
    creation.create_control_topics(log, prefix, control_partitions=1)
    maker.allow(rights.client_rights(prefix))
    ahead = maker.now_ms + d.DAY_MS + 60_000
    place = TopicPartition(commands_topic(prefix), 0)
    assert write(log, maker, [(place, batch("a", timestamps=(ahead,)))]) == [0]
    config = log.describe_topics([status_topic(prefix)])[status_topic(prefix)].config
    assert int(config.get("message.timestamp.after.max.ms", d.HOUR_MS)) <= d.HOUR_MS


def test_events_may_be_old_and_from_the_future(
    maker: Maker, log: Log, stream: str, create: Create
) -> None:
    create()
    for name in (stream_topic(stream), journal_topic(stream)):
        times = (0, maker.now_ms + 400 * d.DAY_MS, maker.now_ms - 9000 * d.DAY_MS)
        tp = TopicPartition(name, 0)
        assert write(log, maker, [(tp, batch("a", "b", "c", timestamps=times))]) == [0]


def test_ends_of_topics_with_a_past(maker: Maker, log: Log, stream: str, create: Create) -> None:
    create(segments=2)
    tp = TopicPartition(stream_topic(stream), 1)
    write(log, maker, [(tp, batch("a", "b"))])
    there = [stream_topic(stream)]
    delete(log, journal_topic(stream))
    for has in ("has 3 records that", "had records, deleted by now, that"):
        with pytest.raises(TopicNotEmpty, match=has):
            create(segments=2)
        assert list(log.describe_topics([*there, journal_topic(stream)])) == there
        wait_stable(log, {tp})
        log.delete_records({tp: 3})
    ends, _ = create(segments=2, adopt=True)
    assert ends == {0: 0, 1: 3}


def test_a_topic_of_others_becomes_no_journal(
    maker: Maker, log: Log, stream: str, create: Create
) -> None:
    """It has records, and there is no topic of the stream that an earlier attempt would have made."""
    create()
    journal = journal_topic(stream)
    write(log, maker, [(TopicPartition(journal, 0), batch("a", "b"))])
    rest = [stream_topic(stream), history_topic(stream)]
    delete(log, *rest)
    with pytest.raises(TopicNotEmpty, match=f"{journal} has .* or delete that topic"):
        create()
    assert list(log.describe_topics([*rest, journal])) == [journal]


def test_a_streams_topics_grow(maker: Maker, log: Log, stream: str, create: Create) -> None:
    create(segments=2, settings={"max.message.bytes": "2000000"})
    write(log, maker, [(TopicPartition(stream_topic(stream), 1), batch("a", "b"))])
    creation.grow_stream_topics(log, stream, 4)
    names = topics_of(stream)
    infos = log.describe_topics(names)
    assert [infos[n].partitions for n in names] == [4, 4, 1]
    assert infos[names[0]].config["max.message.bytes"] == "2000000"
    for name in names[:2]:
        write(log, maker, [(TopicPartition(name, 3), batch("c"))])
    # Again, and with fewer asked for: as they are.
    creation.grow_stream_topics(log, stream, 3)
    assert [log.describe_topics([n])[n].partitions for n in names] == [4, 4, 1]


def test_growing_continues_where_it_ended(log: Log, stream: str, create: Create) -> None:
    create()
    log.add_partitions(journal_topic(stream), 3)
    creation.grow_stream_topics(log, stream, 2)
    names = stream_topic(stream), journal_topic(stream)
    assert [log.describe_topics([n])[n].partitions for n in names] == [2, 3]


def test_a_broker_that_stood_still_shows_it_later(
    log: Log, stream: str, create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    create()
    before = log.describe_topics([stream_topic(stream), journal_topic(stream)])
    now = log.describe_topics

    def late(names: Sequence[str]) -> dict[str, TopicInfo]:
        return now(names) | {journal_topic(stream): before[journal_topic(stream)]}

    with monkeypatch.context() as patch:
        patch.setattr(log, "describe_topics", late)
        with pytest.raises(NotReady, match=r"all 3 partitions of \S+\.journal yet; ask again"):
            creation.grow_stream_topics(log, stream, 3)
    creation.grow_stream_topics(log, stream, 3)


def test_what_grows_is_checked(log: Log, stream: str) -> None:
    with pytest.raises(LogRefused) as caught:
        creation.grow_stream_topics(log, stream, 2)
    assert caught.value.error == 3
    wrong = [{"compression.type": "lz4"}, {}, {}]
    log.create_topics(
        [TopicSpec(n, 1, config) for n, config in zip(topics_of(stream), wrong, strict=True)]
    )
    with pytest.raises(TopicMisconfigured, match=r"compression\.type=lz4; set producer"):
        creation.grow_stream_topics(log, stream, 2)


def test_a_users_settings_go_where_they_belong(log: Log, stream: str, create: Create) -> None:
    settings = {
        "retention.ms": "3600000",
        "max.message.bytes": "2000000",
        "segment.bytes": "20000000",
        "replication.factor": "1",
    }
    create(settings=settings)
    infos = log.describe_topics(topics_of(stream))
    target, journal, history = (infos[n].config for n in infos)
    assert target["retention.ms"] == "3600000"
    assert journal["retention.ms"] == history["retention.ms"] == "-1"
    assert target["max.message.bytes"] == journal["max.message.bytes"] == "2000000"
    assert history["max.message.bytes"] == str(16 << 20)
    assert target["segment.bytes"] == journal["segment.bytes"] == "20000000"


# What a call asks for -> the settings after it of a topic that existed with the brokers' defaults.
ASKED: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "nothing": ({}, {"retention.ms": "-1"}),
    "what it has": ({"retention.ms": "604800000"}, {"retention.ms": "604800000"}),
    "time": ({"retention.ms": "1000"}, {"retention.ms": "1000"}),
    "bytes": ({"retention.bytes": "1000"}, {"retention.ms": "-1", "retention.bytes": "1000"}),
    "a size": ({"max.message.bytes": "2000000"}, {"max.message.bytes": "2000000"}),
}


@pytest.mark.parametrize("what", ASKED)
@pytest.mark.parametrize("adopt", [False, True])
def test_a_topic_that_was_there_gets_what_the_stream_asks_for(
    log: Log, stream: str, create: Create, what: str, adopt: bool
) -> None:
    asked, due = ASKED[what]
    latest = {"message.timestamp.after.max.ms": str(d.MAX_LONG)}
    log.create_topics([TopicSpec(stream_topic(stream), 1, {"retention.ms": "604800000"} | latest)])
    create(settings=asked, adopt=adopt)

    def found() -> dict[str, str | None]:
        config = log.describe_topics([stream_topic(stream)])[stream_topic(stream)].config
        return {name: config.get(name) for name in due}

    until(lambda: found() == due, found)


def test_replicas_that_were_asked_for_are_demanded(log: Log, stream: str, create: Create) -> None:
    latest = {"message.timestamp.after.max.ms": str(d.MAX_LONG)}
    log.create_topics([TopicSpec(stream_topic(stream), 1, latest)])
    with pytest.raises(TopicMisconfigured, match=r"it has 1 replica; give it 3, as replication"):
        create(settings={"replication.factor": "3"})
    assert log.describe_topics([journal_topic(stream)]) == {}


def test_settings_of_scaling_are_no_topics(log: Log, stream: str, create: Create) -> None:
    settings = {"scale.events.per.second": "1000", "scale.cooldown.ms": "5000"}
    assert create(settings=settings)[0] == {0: 0}
    for info in log.describe_topics([stream_topic(stream), journal_topic(stream)]).values():
        assert not [name for name in info.config if name.startswith("scale")]


@pytest.mark.parametrize(
    ("segments", "settings", "error", "said"),
    [
        (1, {"scale.cooldown.ms": "soon"}, InvalidArgument, r"scale\.cooldown\.ms=soon: set a whole number"),
        (1, {"scale.speed": "9"}, UnsupportedSetting, r"no setting scale\.speed; it takes .*scale\.bytes"),
        (1, {"flush.ms": "1", "cleanup.policy": "x"}, UnsupportedSetting, r"cleanup\.policy, flush\.ms;"),
        (1, {"replication.factor": "0"}, InvalidArgument, r"replication\.factor"),
        (1, {"replication.factor": "-2"}, InvalidArgument, r"replication\.factor"),
        (1, {"replication.factor": "many"}, InvalidArgument, r"replication\.factor"),
        (0, {}, InvalidArgument, "has 1 to 10,000 segments"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_by_name(
    log: Log,
    stream: str,
    create: Create,
    segments: int,
    settings: dict[str, str],
    error: type[Exception],
    said: str,
) -> None:
    with pytest.raises(error, match=said):
        create(segments=segments, settings=settings)
    assert log.describe_topics([stream_topic(stream)]) == {}


def test_a_journal_of_fewer_partitions_than_its_stream_is_refused(
    log: Log, stream: str, create: Create
) -> None:
    """All partitions of a topic that was there before are the stream's: a producer would write to each."""
    declared = ((stream_topic(stream), 3, d.STREAM), (journal_topic(stream), 2, d.JOURNAL))
    log.create_topics([TopicSpec(n, p, {s.name: s.value for s in c}) for n, p, c in declared])
    with pytest.raises(TopicMisconfigured, match=r"journal: it has 2 partitions and \S+ 3; add"):
        create(segments=2)
    log.add_partitions(journal_topic(stream), 3)
    assert create(segments=2)[0] == {
        0: 0,
        1: 0,
        2: 0,
    }


def test_all_that_is_wrong_is_named_at_once(log: Log, stream: str, create: Create) -> None:
    wrong = {
        "cleanup.policy": "compact",
        "compression.type": "lz4",
        "message.timestamp.after.max.ms": "3600000",
    }
    journal = TopicSpec(journal_topic(stream), 2, {"retention.ms": "1000"})
    log.create_topics([TopicSpec(stream_topic(stream), 1, wrong), journal])
    with pytest.raises(TopicMisconfigured) as caught:
        create(segments=2)
    for problem in (
        f"{stream_topic(stream)}: it has 1 partition; add some until it has 2",
        f"{stream_topic(stream)}: cleanup.policy=compact; set delete",
        f"{stream_topic(stream)}: compression.type=lz4; set producer",
        f"{stream_topic(stream)}: message.timestamp.after.max.ms=3600000; set {d.MAX_LONG}",
        f"{journal_topic(stream)}: retention.ms=1000; set -1",
    ):
        assert problem in str(caught.value)


def test_a_stream_takes_what_its_journal_took(log: Log, stream: str, create: Create) -> None:
    big = {"max.message.bytes": "3000000", "message.timestamp.after.max.ms": str(d.MAX_LONG)}
    kept = {**big, "retention.ms": "-1", "retention.bytes": "-1"}
    log.create_topics([TopicSpec(journal_topic(stream), 1, kept)])
    with pytest.raises(TopicMisconfigured, match=r"max\.message\.bytes=1048588 is less"):
        create()


def test_commands_and_status_have_the_same_partitions(log: Log, prefix: str) -> None:
    later = {"message.timestamp.after.max.ms": str(2 * d.DAY_MS)}
    log.create_topics([TopicSpec(commands_topic(prefix), 5, config=later)])
    with pytest.raises(
        TopicMisconfigured, match=r"commands has 5, .*control has 2, .* add partitions"
    ):
        creation.create_control_topics(log, prefix, control_partitions=2)


WRONG = [
    ("commands", "retention.ms", "60000"),
    ("commands", "retention.bytes", "1000000"),
    ("commands", "cleanup.policy", "compact"),
    ("commands", "message.timestamp.after.max.ms", "3600000"),
    ("control", "retention.ms", "60000"),
    ("control", "cleanup.policy", "compact"),
    ("replies", "retention.ms", "1000"),
    ("replies", "max.message.bytes", "1048588"),
    ("status", "cleanup.policy", "delete"),
    ("status", "cleanup.policy", "compact,delete"),
    ("status", "delete.retention.ms", "86400000"),
    ("status", "max.message.bytes", "1048588"),
    ("journal", "cleanup.policy", "compact"),
    ("journal", "retention.ms", "604800000"),
    ("journal", "retention.bytes", "1000000"),
    ("journal", "compression.type", "zstd"),
    ("journal", "message.timestamp.type", "LogAppendTime"),
    ("journal", "message.timestamp.after.max.ms", "3600000"),
    ("journal", "message.timestamp.before.max.ms", "3600000"),
    ("history", "retention.ms", "604800000"),
    ("history", "message.timestamp.type", "LogAppendTime"),
    ("stream", "cleanup.policy", "compact"),
    ("stream", "compression.type", "uncompressed"),
    ("stream", "message.timestamp.type", "LogAppendTime"),
    ("stream", "message.timestamp.before.max.ms", "3600000"),
    ("stream", "unclean.leader.election.enable", "true"),
]


def info(topic: str, replicas: int = 1, **changed: str) -> TopicInfo:
    config = {setting.name: setting.value for setting in ALL[topic]}
    config["min.insync.replicas"] = "1"
    return TopicInfo(
        topic, 4, replicas, config | {k.replace("_", "."): v for k, v in changed.items()}
    )


@pytest.mark.parametrize("topic", ALL)
def test_every_topic_has_room_for_markers(topic: str) -> None:
    """With less a native transaction can't be ended, and no controller can lead."""
    small = info(topic, max_message_bytes="16383")
    assert any("markers" in problem for problem in creation.problems(small, ALL[topic], at_least=4))
    enough = info(topic, max_message_bytes=str(16 << 20))
    assert creation.problems(enough, ALL[topic], at_least=4) == []


@pytest.mark.parametrize(("topic", "name", "value"), WRONG)
def test_each_wrong_setting_is_found(topic: str, name: str, value: str) -> None:
    good = info(topic)
    assert creation.problems(good, ALL[topic], at_least=4) == []
    bad = TopicInfo(topic, 4, 1, {**good.config, name: value})
    (problem,) = creation.problems(bad, ALL[topic], at_least=4)
    wanted = next(s for s in ALL[topic] if s.name == name)
    assert problem == f"{topic}: {name}={value}; set {wanted.value} ({wanted.why})"


def test_longer_is_as_good() -> None:
    for topic in ("commands", "replies"):
        for value in ("-1", str(30 * d.DAY_MS)):
            assert creation.problems(info(topic, retention_ms=value), ALL[topic], at_least=1) == []
    assert creation.problems(info("status", segment_ms="1000"), d.STATUS, at_least=1) == []


def test_replicas_in_sync_fit_the_replicas() -> None:
    def found(replicas: int, in_sync: str) -> list[str]:
        return creation.problems(
            info("stream", replicas, min_insync_replicas=in_sync), d.STREAM, at_least=1
        )

    assert found(1, "1") == found(3, "2") == found(2, "2") == found(3, "3") == []
    assert "set 2" in found(3, "1")[0]
    assert "set 1" in found(1, "2")[0]


def test_what_an_older_broker_does_not_know_is_not_judged() -> None:
    assert creation.problems(TopicInfo("t", 1, 1, {}), d.STREAM, at_least=1) == []


def test_two_replicas_stay_in_sync_where_there_are_two(
    log: Log, maker: Maker, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    if not maker.name.startswith("memory"):
        for topic in (f"{prefix}.commands", f"{prefix}.commands"):
            assert log.replicas_of_new(topic) == 1
            assert log.describe_topics([topic]) == {}, "nothing is made"
        return
    made: list[TopicSpec] = []

    def create_topics(_: object, specs: list[TopicSpec]) -> dict[str, str]:
        made.extend(specs)
        return {}

    monkeypatch.setattr(type(log), "replicas_of_new", lambda *_: 3)
    monkeypatch.setattr(type(log), "create_topics", create_topics)
    with pytest.raises(NotReady, match="not found"):
        creation.create_control_topics(log, prefix, control_partitions=1)
    assert [spec.config["min.insync.replicas"] for spec in made] == ["2"] * 6
    made.clear()
    with pytest.raises(NotReady, match="not found"):
        creation.create_control_topics(log, prefix, control_partitions=1, replication_factor=1)
    assert [spec.config["min.insync.replicas"] for spec in made] == ["1"] * 6
    monkeypatch.setattr(type(log), "replicas_of_new", lambda *_: None)
    with pytest.raises(NotAuthorized, match=rf"right DescribeConfigs on .*{prefix}\.commands"):
        creation.create_control_topics(log, prefix, control_partitions=1)
