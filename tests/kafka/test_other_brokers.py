"""Topics on brokers that answer otherwise than a new Apache Kafka: with their calls, texts and codes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from types import SimpleNamespace as Answer
from typing import Any

import pytest

from anabranch.errors import NotAuthorized, NotReady, TopicMisconfigured
from anabranch.kafka import calls
from anabranch.kafka import probe as probes
from anabranch.kafka.calls import Api, MalformedAnswer
from anabranch.kafka.cluster import Cluster
from anabranch.kafka.connection import Connection
from anabranch.kafka.log import KafkaLog
from anabranch.kafka.probe import Probe
from anabranch.kafka.settings import parse_settings
from anabranch.ports import LogRefused, TopicSpec
from anabranch.topics import creation
from anabranch.topics import declarations as d
from anabranch.topics.names import (
    history_topic,
    journal_topic,
    status_topic,
    stream_topic,
    topics_of,
)
from anabranch.topics.new_topics import NewTopics

STREAM = "shop/orders"
CLAMP = "9223372036854"
AFTER, BEFORE = "message.timestamp.after.max.ms", "message.timestamp.before.max.ms"
KAFKA = {"min.insync.replicas": "1", "max.message.bytes": "1048588"}


@dataclass
class Broker:
    """A broker's answers to calls about topics; by its fields it differs from a new Apache Kafka."""

    replicas: int = 1  # of new topics
    heeds_factors: bool = True
    defaults: dict[str, str] = field(default_factory=KAFKA.copy)  # settings that it reports
    unknown: tuple[str, ...] = ()  # settings that it refuses
    hidden: tuple[str, ...] = ()  # … that it takes, and does not keep
    longest: int = d.MAX_LONG  # the highest limit of times, to which others are cut
    most: int = d.MAX_LONG  # of max.message.bytes; more is refused
    says: str = "Config property '{}' with value '{}' exceeded max limit of {}."
    heeds_dry_runs: bool = True
    tells_replicas: bool = True
    allows: bool = True  # to see a topic's settings
    grown: int = 37  # the code for no more partitions than there are
    topics: dict[str, TopicSpec] = field(default_factory=dict)
    asked: list[TopicSpec] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)

    def log(self) -> KafkaLog:
        """A log that talks to it alone."""
        log = KafkaLog("broker:1")
        self.answers(log._cluster)
        return log

    def answers(self, cluster: Cluster) -> None:
        """Let the cluster talk to it alone."""
        cluster.pool.take = lambda *_: self  # type: ignore[method-assign,assignment]
        cluster.pool.give = lambda *_: None  # type: ignore[method-assign]

    def version(self, _: Api) -> int:
        """The version to delete topics in: by names."""
        return 5

    def ask(self, api: Api, _: float, **asked: Any) -> Any:
        """Its answer."""
        return getattr(self, api.folder)(**asked)

    def metadata(self, topics: list[dict[str, str]] | None, **_: Any) -> Any:
        names = list(self.topics) if topics is None else [topic["name"] for topic in topics]
        broker = Answer(node_id=1, host="broker", port=1)
        return Answer(
            brokers=[broker], controller_id=1, topics=[self._shown(name) for name in names]
        )

    def _shown(self, name: str) -> Any:
        known = self.topics.get(name)
        if known is None:
            return Answer(name=name, error_code=3, partitions=[])
        nodes = range(1, 1 + known.replication_factor)
        places = [
            Answer(
                partition_index=p, leader_id=1, leader_epoch=1, replica_nodes=nodes, isr_nodes=nodes
            )
            for p in range(known.partitions)
        ]
        return Answer(name=name, error_code=0, partitions=places)

    def list_offsets(self, topics: list[dict[str, Any]], **_: Any) -> Any:
        return Answer(
            topics=[
                Answer(
                    name=topic["name"],
                    partitions=[
                        Answer(error_code=0, partition_index=p["partition_index"], offset=0)
                        for p in topic["partitions"]
                    ],
                )
                for topic in topics
            ]
        )

    def create_topics(self, topics: list[dict[str, Any]], validate_only: bool, **_: Any) -> Any:
        return Answer(topics=[self._create(topic, validate_only) for topic in topics])

    def _create(self, topic: dict[str, Any], dry: bool) -> Any:
        name, config = topic["name"], {c["name"]: c["value"] for c in topic["configs"]}
        code, said = self._judge(name, config)
        factor = topic["replication_factor"]
        replicas = factor if self.heeds_factors and factor > 0 else self.replicas
        spec = TopicSpec(name, topic["num_partitions"], config, replicas)
        if not dry:
            self.asked.append(spec)
        if code == 0 and (not dry or not self.heeds_dry_runs):
            self.topics[name] = spec
        told = replicas if self.tells_replicas and self.allows else -1
        return Answer(
            name=name,
            error_code=code,
            error_message=said,
            replication_factor=told,
            topic_config_error_code=0 if self.allows else 29,
        )

    def _judge(self, name: str, config: dict[str, str]) -> tuple[int, str]:
        if name in self.topics:
            return 36, "exists"
        for setting in self.unknown:
            if setting in config:
                return 40, f"Unknown topic config name: {setting}"
        size = "max.message.bytes"
        if int(config.get(size, 0)) > self.most:
            return 44, self.says.format(size, config[size], self.most)
        return 0, ""

    def describe_configs(self, resources: list[dict[str, Any]], **_: Any) -> Any:
        return Answer(results=[self._described(r["resource_name"]) for r in resources])

    def _described(self, name: str) -> Any:
        config = {**self.defaults, **self.topics[name].config}
        for limit in (AFTER, BEFORE):
            if limit in config:
                config[limit] = str(min(self.longest, int(config[limit])))
        told = [Answer(name=n, value=v) for n, v in config.items() if n not in self.hidden]
        return Answer(error_code=0, resource_name=name, configs=told)

    def create_partitions(self, topics: list[dict[str, Any]], validate_only: bool, **_: Any) -> Any:
        (topic,) = topics
        known = self.topics[topic["name"]]
        if known.partitions >= topic["count"]:
            said = "Partition count must be greater then current number of partitions"
            return Answer(results=[Answer(error_code=self.grown, error_message=said)])
        if not validate_only or not self.heeds_dry_runs:
            grown = TopicSpec(known.name, topic["count"], known.config, known.replication_factor)
            self.topics[known.name] = grown
        return Answer(results=[Answer(error_code=0, error_message="")])

    def delete_topics(self, topic_names: tuple[str, ...], **_: Any) -> Any:
        for name in topic_names:
            self.deleted.append(name)
            self.topics.pop(name, None)
        return Answer(responses=[Answer(error_code=0)])


def made(broker: Broker, **settings: str) -> dict[str, dict[str, str]]:
    """A stream's topics on it: their settings."""
    named = {name.replace("_", "."): value for name, value in settings.items()}
    creation.create_stream_topics(broker.log(), STREAM, segments=2, settings=named)
    return {name: dict(broker.topics[name].config) for name in topics_of(STREAM)}


def controls(broker: Broker, **options: Any) -> creation.ControlTopics:
    return creation.create_control_topics(
        broker.log(), "anabranch", control_partitions=1, **options
    )


def test_apache_kafka_is_asked_for_all_that_is_declared() -> None:
    broker = Broker(replicas=3)
    assert controls(broker)[:2] == (1, 8)
    for config in made(broker).values():
        assert config[AFTER] == str(d.MAX_LONG)
        assert config["min.insync.replicas"] == "2"
    assert broker.topics[status_topic("anabranch")].config["max.message.bytes"] == str(16 << 20)
    assert broker.deleted == []


def test_what_a_broker_does_not_report_is_not_judged(caplog: pytest.LogCaptureFixture) -> None:
    """A cluster that answers for majorities by itself keeps no number of replicas in sync."""
    caplog.set_level(logging.INFO)
    broker = Broker(replicas=3, hidden=("min.insync.replicas",))
    assert controls(broker)[:2] == (1, 8)
    assert len([r for r in caplog.records if "a majority" in r.getMessage()]) == 1
    assert made(broker)
    assert broker.deleted == []
    weak = Broker(replicas=3, hidden=("min.insync.replicas",))
    assert controls(weak)
    weak.hidden, weak.topics[status_topic("anabranch")] = (), TopicSpec("s", 1, {}, 3)
    with pytest.raises(
        TopicMisconfigured, match=r"min\.insync\.replicas=1 with replication factor 3"
    ):
        controls(weak)


def test_a_limit_that_no_event_reaches_suits() -> None:
    broker = Broker(longest=int(CLAMP))
    assert controls(broker)
    assert made(broker)
    assert (
        creation.stream_problems(STREAM, broker.log().describe_topics(topics_of(STREAM)), 2) == []
    )


def test_new_topics_that_do_not_suit_are_deleted_again() -> None:
    with pytest.raises(TopicMisconfigured) as caught:
        made(broker := Broker(longest=d.HOUR_MS))
    assert f"{stream_topic(STREAM)}: {AFTER}=3600000; set {d.MAX_LONG}" in str(caught.value)
    assert "are deleted again: shop.orders, shop.orders.history, shop.orders.journal" in str(
        caught.value
    )
    assert broker.topics == {}
    # What was there before stays.
    (there := Broker(longest=d.HOUR_MS)).topics[stream_topic(STREAM)] = TopicSpec(
        stream_topic(STREAM), 2, {"retention.ms": "-1"}, 1
    )
    with pytest.raises(TopicMisconfigured):
        made(there)
    assert list(there.topics) == [stream_topic(STREAM)]


@dataclass
class Lagging(Broker):
    """It makes topics one after the other, and shows or describes new ones late."""

    slow: int = 0  # topics that are answered with "the controller moved" at first
    unseen: int = 0  # descriptions that it gives as if it knew no topic

    def _judge(self, name: str, config: dict[str, str]) -> tuple[int, str]:
        judged = super()._judge(name, config)
        if self.slow and judged[0] == 0 and self.topics:
            self.slow -= 1
            return 41, "not the controller"
        return judged

    def describe_configs(self, resources: list[dict[str, Any]], **more: Any) -> Any:
        if self.unseen:
            self.unseen -= 1
            told = [Answer(error_code=3, resource_name=r["resource_name"]) for r in resources]
            return Answer(results=told)
        return super().describe_configs(resources, **more)


NEW = "shop.orders, shop.orders.history, shop.orders.journal"


def test_what_an_earlier_try_made_is_deleted_when_it_is_refused_at_last() -> None:
    broker = Lagging(longest=d.HOUR_MS, unknown=("retention.bytes",), unseen=1)
    new, log = NewTopics(), broker.log()
    with pytest.raises(NotReady, match=f"not found .*; these topics are made already: {NEW}$"):
        creation.create_stream_topics(log, STREAM, segments=2, settings={}, new=new)
    assert sorted(broker.topics) == sorted(topics_of(STREAM))
    said = f"retention.bytes; without that: .* are deleted again: {NEW}$"
    with pytest.raises(LogRefused, match=said):
        creation.create_stream_topics(log, STREAM, segments=2, settings={}, new=new)
    assert broker.topics == {}


def test_what_the_first_of_two_requests_made_is_deleted_with_the_rest() -> None:
    broker = Lagging(longest=d.HOUR_MS, slow=2)
    with pytest.raises(TopicMisconfigured, match=f"deleted again: {NEW}$"):
        made(broker)
    assert broker.topics == {}


@pytest.mark.parametrize("allows", [True, False])
def test_new_control_topics_that_can_t_be_described_are_taken_away(allows: bool) -> None:
    """As brokers show no settings, or show them late and otherwise than asked for."""
    broker = Lagging(longest=d.HOUR_MS, unknown=("segment.ms",), unseen=int(allows))
    if not allows:
        broker._described = lambda name: Answer(  # type: ignore[method-assign]
            error_code=29, resource_name=name
        )
    new = NewTopics()

    def controls() -> None:
        creation.create_control_topics(
            broker.log(), "anabranch", control_partitions=1, replication_factor=1, new=new
        )

    if allows:
        with pytest.raises(NotReady, match="not found"):
            controls()
    with pytest.raises(LogRefused) as caught:
        controls()
    assert "; these new topics are deleted again: anabranch.commands, " in str(caught.value)
    assert broker.topics == {}


def test_new_topics_that_others_write_to_are_left_and_named() -> None:
    broker = Lagging(longest=d.HOUR_MS)
    list_offsets = broker.list_offsets

    def written(topics: list[dict[str, Any]], **more: Any) -> Any:
        found = list_offsets(topics, **more)
        for topic in found.topics:
            topic.partitions[0].offset = 7
        return found

    broker.list_offsets = written  # type: ignore[method-assign]
    with pytest.raises(TopicMisconfigured, match=f"are left, delete them: {NEW} \\(unless you"):
        made(broker)
    assert sorted(broker.topics) == sorted(topics_of(STREAM))


def test_a_setting_that_older_brokers_do_not_know_is_left_out() -> None:
    """As Kafka 3.5: it has one limit for both directions, which is looked at instead."""
    both = "message.timestamp.difference.max.ms"
    broker = Broker(unknown=(AFTER, BEFORE), defaults={**KAFKA, both: str(d.MAX_LONG)})
    assert controls(broker)[:2] == (1, 8)
    for config in made(broker).values():
        assert not config.keys() & {AFTER, BEFORE}
        assert config["compression.type"] == "producer"
    low = Broker(unknown=(AFTER, BEFORE), defaults={**KAFKA, both: "3600000"})
    with pytest.raises(LogRefused) as caught:
        made(low)
    assert str(caught.value).startswith(
        f"create topic {stream_topic(STREAM)}: INVALID_CONFIG (40), Unknown topic config name: {AFTER}; without "
    )
    assert f"{journal_topic(STREAM)}: {both}=3600000; set {d.MAX_LONG}" in str(caught.value)
    assert caught.value.to_do == "let brokers give new topics what it says to set"
    assert low.topics == {}


@pytest.mark.parametrize("says", [Broker.says, "Request parameters do not satisfy the policy."])
@pytest.mark.parametrize(("most", "takes"), [(8 << 20, 8 << 20), (5_000_000, 4 << 20)])
def test_smaller_messages_are_asked_for(
    most: int, takes: int, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As some hosted brokers have it. All controllers go by what the topics show."""
    broker = Broker(most=most, says=says)
    creation._said.clear()
    assert controls(broker).record_bytes == takes
    tried = [r.getMessage() for r in caplog.records if "topics are made without" in r.getMessage()]
    assert len(tried) == 1
    assert says[:14] in tried[0]
    assert tried[0].endswith(
        f": some topics are made without max.message.bytes=16777216; with max.message.bytes={takes}"
    )
    assert controls(broker, max_message_bytes=32 << 20).record_bytes == takes
    creation.create_stream_topics(broker.log(), STREAM, segments=1, settings={}, record_bytes=takes)
    creation.create_lane_topics(broker.log(), "anabranch", "etl", like="open")
    for name in (history_topic(STREAM), "anabranch.replies.etl", status_topic("anabranch")):
        assert broker.topics[name].config["max.message.bytes"] == str(takes)


def test_messages_that_are_too_small_for_any_row_are_refused() -> None:
    low = Broker(most=1 << 20)
    with pytest.raises(LogRefused) as caught:
        controls(low)
    assert str(caught.value) == (
        "create topic anabranch.status: POLICY_VIOLATION (44), Config property 'max.message.bytes' with value "
        "'4194304' exceeded max limit of 1048576.; these new topics are deleted again: anabranch.commands, "
        "anabranch.commands.admin, anabranch.control"
    )
    assert caught.value.to_do == "let brokers take max.message.bytes=4194304"
    assert low.topics == {}
    with pytest.raises(
        LogRefused, match=r"^create topic anabranch\.status: POLICY_VIOLATION \(44\), no; these"
    ):
        controls(Broker(most=1 << 20, says="no"))
    with pytest.raises(LogRefused, match=r"exceeded max limit of 2097152\."):
        made(Broker(most=2 << 20), max_message_bytes="3000000")


def test_a_policy_is_not_got_around() -> None:
    """What a topic has without a setting may change with the brokers' defaults."""

    def against(setting: str) -> Broker:
        broker = Broker()
        judge = broker._judge
        broker._judge = (  # type: ignore[method-assign]
            lambda name, config: (44, f"no {setting}") if setting in config else judge(name, config)
        )
        return broker

    broker = against("retention.ms")
    with pytest.raises(
        LogRefused, match=r"commands: POLICY_VIOLATION \(44\), no retention\.ms; these"
    ):
        controls(broker)
    assert broker.topics == {}
    assert controls(against("segment.bytes")), "any value of it is accepted"


def test_the_size_is_an_option() -> None:
    broker = Broker()
    assert controls(broker, max_message_bytes=8 << 20).record_bytes == 8 << 20
    sizes = [spec.config.get("max.message.bytes") for spec in broker.topics.values()]
    assert sorted(size for size in sizes if size) == [str(8 << 20)] * 3
    assert controls(broker).record_bytes == 8 << 20


def test_what_a_user_chose_is_never_left_out() -> None:
    broker = Broker(unknown=("retention.bytes",))
    with pytest.raises(LogRefused, match=r"Unknown topic config name: retention\.bytes$"):
        made(broker, retention_bytes="1000")
    assert broker.topics == {}
    with pytest.raises(
        LogRefused, match=r"INVALID_CONFIG.*without that: .*cleanup\.policy=delete; set"
    ):
        controls(
            Broker(unknown=("cleanup.policy",), defaults={**KAFKA, "cleanup.policy": "delete"})
        )


@pytest.mark.parametrize("heeds", [True, False], ids=["heeds dry runs", "makes topics in them"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_the_question_for_replicas_makes_no_topic(heeds: bool, replicas: int) -> None:
    broker = Broker(replicas=replicas, heeds_dry_runs=heeds)
    log = broker.log()
    assert log.replicas_of_new("anabranch.replies") == replicas
    assert broker.topics == {}
    assert controls(broker)[:2] == (1, 8)
    made(broker)
    assert len(broker.topics) == 6 + 3
    assert broker.topics["anabranch.replies"].partitions == 8
    in_sync = {spec.config["min.insync.replicas"] for spec in broker.topics.values()}
    assert in_sync == {"2" if replicas == 3 else "1"}


@pytest.mark.parametrize("dry", [True, False], ids=["heeds dry runs", "makes topics in them"])
def test_a_creation_may_be_repeated_where_each_topic_has_three_replicas(dry: bool) -> None:
    """The process that made the topics is gone, so a dry run shows what the broker makes of the factor."""
    hidden = ("min.insync.replicas",)  # majorities are the broker's own affair
    broker = Broker(replicas=3, heeds_factors=False, heeds_dry_runs=dry, hidden=hidden)
    for factor in ("1", "5"):
        made(broker, replication_factor=factor)
    assert len(broker.topics) == 3


@pytest.mark.parametrize("dry", [True, False], ids=["heeds dry runs", "makes topics in them"])
def test_another_number_of_replicas_is_refused_where_brokers_heed_it(dry: bool) -> None:
    broker = Broker(replicas=3, heeds_dry_runs=dry)
    made(broker)
    with pytest.raises(TopicMisconfigured, match=r"it has 3 replicas; give it 1"):
        made(broker, replication_factor="1")
    assert len(broker.topics) == 3


def test_a_repetition_by_the_same_process_needs_no_number_in_dry_runs() -> None:
    hidden = ("min.insync.replicas",)
    broker = Broker(replicas=3, heeds_factors=False, tells_replicas=False, hidden=hidden)
    settings, new = {"replication.factor": "1"}, NewTopics()
    for _ in range(2):
        creation.create_stream_topics(broker.log(), STREAM, segments=2, settings=settings, new=new)
    with pytest.raises(TopicMisconfigured, match=r"it has 3 replicas; give it 1"):
        made(broker, replication_factor="1")


@pytest.mark.parametrize("partitions", [1, 5])
def test_what_controllers_need_is_counted_by_what_is_made(partitions: int) -> None:
    broker = Broker()
    creation.create_control_topics(broker.log(), "anabranch", control_partitions=partitions)
    counts = {name: spec.partitions for name, spec in broker.topics.items()}
    assert counts == creation.control_topics("anabranch", partitions)
    refused = LogRefused("create topic: too many partitions", creation.POLICY_VIOLATION)
    way = probes.way_out(refused, partitions, brokers=1)
    assert f" {len(counts)} topics and {sum(counts.values())} partitions for controllers" in way


def test_a_topic_that_another_client_makes_meanwhile_stays() -> None:
    """Of two controllers that begin at once, one finds in its second dry run what the other made."""
    broker = Broker()
    create, times = broker._create, 0

    def beside(topic: dict[str, Any], dry: bool) -> Any:
        nonlocal times
        answer, times = create(topic, dry), times + 1
        if times == 1:
            create(topic, False)
        return answer

    broker._create = beside  # type: ignore[method-assign]
    assert broker.log().replicas_of_new("anabranch.commands") == 1
    assert list(broker.topics) == ["anabranch.commands"]
    assert broker.deleted == []


@pytest.mark.parametrize("heeds", [True, False], ids=["heeds dry runs", "makes topics in them"])
@pytest.mark.parametrize("grown", [37, 42, 0])
def test_whether_a_topic_is_gone_is_asked_without_effect(heeds: bool, grown: int) -> None:
    broker = Broker(heeds_dry_runs=heeds, grown=grown)
    log = broker.log()
    log.partition_counts([])  # it knows the brokers
    assert log.is_gone("t", 2, "")
    assert broker.topics == {}
    broker.topics["t"] = TopicSpec("t", 2, {}, 1)
    assert not log.is_gone("t", 2, "")
    assert log.is_gone("t", 3, "")
    assert broker.topics == {"t": TopicSpec("t", 2, {}, 1)}


def test_replicas_that_a_broker_does_not_tell() -> None:
    """An older broker tells nothing; one with rights says that we may not know."""
    old = Broker(replicas=3, tells_replicas=False, hidden=("min.insync.replicas",))
    assert controls(old)
    assert "min.insync.replicas" not in old.topics[status_topic("anabranch")].config
    with pytest.raises(
        TopicMisconfigured, match=r"min\.insync\.replicas=1 with replication factor 3; set 2"
    ):
        controls(Broker(replicas=3, tells_replicas=False))
    with pytest.raises(
        NotAuthorized, match=r"^the right DescribeConfigs on the topic \S+ is missing$"
    ):
        controls(Broker(allows=False))
    assert controls(Broker(allows=False), replication_factor=1)


@pytest.mark.parametrize("code", [37, 42])
def test_growth_that_was_done_already_is_done(code: int) -> None:
    broker = Broker(grown=code)
    broker.topics["t"] = TopicSpec("t", 2, {}, 1)
    log = broker.log()
    create, lost = broker.create_partitions, 0

    def lose_answer(**asked: Any) -> Any:
        nonlocal lost
        answer, lost = create(**asked), lost + 1
        if lost == 1:
            raise MalformedAnswer("cut off")
        return answer

    broker.create_partitions = lose_answer  # type: ignore[method-assign,assignment]
    log.add_partitions("t", 4)
    assert lost == 2
    assert broker.topics["t"].partitions == 4


def test_growth_that_is_refused_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.kafka.admin._SHOWN_S", 0.0)
    broker = Broker()
    broker.topics["t"] = TopicSpec("t", 2, {}, 1)
    said = Answer(results=[Answer(error_code=42, error_message="no room")])
    broker.create_partitions = lambda **_: said  # type: ignore[method-assign]
    with pytest.raises(LogRefused, match=r"INVALID_REQUEST \(42\), no room"):
        broker.log().add_partitions("t", 4)


def test_a_call_that_a_broker_lacks_is_named() -> None:
    here: Any = Answer(address="broker:1", versions={19: (0, 1)})
    with pytest.raises(LogRefused, match=r"^broker:1 does not offer DeleteRecords$"):
        Connection.version(here, calls.DELETE_RECORDS)
    with pytest.raises(LogRefused, match="speaks CreateTopics 0 to 1; 2 to 7 are supported here"):
        Connection.version(here, calls.CREATE_TOPICS)


def test_a_stream_takes_the_times_that_its_journal_took() -> None:
    broker = Broker()
    made(broker)
    target = broker.topics[stream_topic(STREAM)]
    target.config[AFTER] = CLAMP  # type: ignore[index]
    infos = broker.log().describe_topics(topics_of(STREAM))
    (problem,) = creation.stream_problems(STREAM, infos, 2)
    assert problem.startswith(
        f"{target.name}: {AFTER}={CLAMP} is less than its journal's; set {d.MAX_LONG} ("
    )


HOUR = 3600
AN_HOUR_AGO = "anabranch-probe-5ffffff0-0123abcd"
KEPT = [  # another prefix's; no probe's; another probe's that may be under way
    "other-probe-5ffffff0-0123abcd.commands",
    "anabranch-probe-of-us.orders",
    "anabranch-probe-60000e00-0123abcd.commands",
]


@pytest.mark.parametrize("lags", ["in showing", "in deleting", "for ever"])
def test_no_topic_of_a_probe_is_left_unnamed(lags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_GONE_S", 0.5)
    monkeypatch.setattr("anabranch.kafka.probe.time.time", lambda: float(0x60000E01))
    broker = Broker()
    probe = Probe(
        parse_settings("broker:1", {}), "anabranch", control_partitions=1, replication_factor=1,
        session_timeout=6.0, max_message_bytes=16 << 20, native_timeout=60.0,
    )  # fmt: skip
    for cluster in (probe._cluster, probe._log._cluster):
        broker.answers(cluster)
    probe._control_topics()
    dry = f"{probe.mark}.0123456789abcdef"
    for name in (dry, f"{AN_HOUR_AGO}.commands", *KEPT):
        broker.topics[name] = TopicSpec(name, 1)
    asked: list[Any] = []
    shown, delete = broker.metadata, broker.delete_topics

    def metadata(topics: Any, **more: Any) -> Any:
        """Its control topics are not shown so far."""
        found = shown(topics, **more)
        found.topics = [topic for topic in found.topics if topic.name not in probe._names()]
        return found

    def delete_topics(topic_names: tuple[str, ...], **more: Any) -> Any:
        """The first deletion is not done; with "for ever", none is."""
        asked.append(topic_names)
        return delete(() if len(asked) < 2 or lags == "for ever" else topic_names, **more)

    if lags == "in showing":
        broker.metadata = metadata  # type: ignore[method-assign]
    else:
        broker.delete_topics = delete_topics  # type: ignore[method-assign]
    done = probe._delete()
    mine = sorted(name for name in broker.topics if name not in KEPT)
    if lags == "for ever":
        assert done.state == probes.LOSS
        assert len(mine) == 8
        assert f"The probe's are left: {', '.join(mine)}" in done.found
    else:
        assert (done.state, done.found) == (
            probes.WORKS,
            "all topics of this probe are deleted again, and 1 that earlier ones had left",
        )
        assert mine == []
    assert set(KEPT) <= broker.topics.keys()
