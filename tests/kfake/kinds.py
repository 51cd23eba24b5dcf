"""Kinds of brokers that kfake plays: what each lacks, limits or answers otherwise than Apache Kafka.

A kind is read off sources and manuals of the broker of that name: nothing here was run on it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

# Versions of calls in Redpanda's source of December 2024.
_REDPANDA_CALLS = {
    "Produce": (0, 7),
    "Fetch": (4, 11),
    "ListOffsets": (0, 4),
    "Metadata": (0, 8),
    "FindCoordinator": (0, 3),
    "CreateTopics": (0, 6),
    "DeleteTopics": (0, 4),
    "InitProducerID": (0, 3),
    "AddPartitionsToTxn": (0, 3),
    "EndTxn": (0, 3),
}
TIME_LIMITS = ("message.timestamp.before.max.ms", "message.timestamp.after.max.ms")
_NO_OPS = ("min.insync.replicas", "unclean.leader.election.enable")
_EIGHT_MIB = 8 << 20
# 292 years: the most that fits into the nanoseconds of a signed 64-bit number.
_CENTURIES_MS = 9_223_372_036_854


@dataclass(frozen=True)
class Kind:
    """A kind of broker. All fields but ``brokers`` and ``default_replicas`` go to the Go program as they are."""

    brokers: int = 1
    release: str = ""  # of Kafka, whose calls it has; empty: kfake's newest
    # Call -> lowest and highest version.
    versions: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    refused: tuple[str, ...] = ()  # calls that it does not offer
    features: bool = True  # whether it reports versions of features, like transaction.version
    hidden: tuple[str, ...] = ()  # settings of topics that it takes, and does not report
    unknown: tuple[str, ...] = ()  # settings of topics that it refuses by name
    # Setting -> most. A higher value, or a retention of -1, is cut to it, is no valid one, is against a policy.
    highest: Mapping[str, int] = field(default_factory=dict)
    invalid: Mapping[str, int] = field(default_factory=dict)
    policy: Mapping[str, int] = field(default_factory=dict)
    partitions: int = 0  # most of all topics; 0: any number
    replicas: int = 0  # of each topic, by its word, whatever is asked for; 0: as many as there are
    codecs: tuple[str, ...] | None = None  # that it takes; None: all
    dry_runs_make: bool = False  # CreateTopics ignores validate_only
    dry_runs_are_bare: bool = False  # they report neither partitions nor replicas
    strict_growth: bool = False  # for as many partitions as there are it answers INVALID_REQUEST
    # Kind of resource and operation: rights that its user lacks, who signs in (`server.USER`).
    denied: tuple[tuple[str, str], ...] = ()
    short_ends: bool = False  # it lies: an end is that of the last batch's first record
    broker: Mapping[str, str] = field(default_factory=dict)  # settings of brokers

    def text(self, ports: tuple[int, ...], data: str) -> str:
        """The argument of the Go program."""
        fields = dataclasses.asdict(self)
        del fields["brokers"]
        return json.dumps({**fields, "ports": ports, "data": data})


def _redpanda(brokers: int, **more: Mapping[str, int]) -> Kind:
    return Kind(
        brokers,
        release="3.6",
        versions=_REDPANDA_CALLS,
        features=False,
        hidden=_NO_OPS if more else (*_NO_OPS, *TIME_LIMITS),
        strict_growth=True,
        **more,  # type: ignore[arg-type]
    )


_CUT = {"highest": dict.fromkeys(TIME_LIMITS, _CENTURIES_MS)}
_INVALID = {"invalid": dict.fromkeys(TIME_LIMITS, _CENTURIES_MS)}

# The columns of the table of scenarios.
KINDS = {
    "nothing missing": Kind(),
    "nothing missing, 3 brokers": Kind(3),
    "Redpanda before 25.3, 1 broker": _redpanda(1),
    "Redpanda before 25.3, 3 brokers": _redpanda(3),
    "Redpanda from 25.3, 1 broker": _redpanda(1, **_CUT),
    "Redpanda from 25.3, 3 brokers": _redpanda(3, **_CUT),
    # Whether it cuts a higher limit or refuses it is not known.
    "Redpanda from 25.3, refusing": _redpanda(3, **_INVALID),
    "WarpStream": Kind(
        release="3.6",
        refused=(
            "DeleteRecords",
            "IncrementalAlterConfigs",
            "DescribeProducers",
            "DescribeLogDirs",
        ),
        features=False,
        replicas=3,
        hidden=(
            *_NO_OPS,
            *TIME_LIMITS,
            "segment.ms",
            "segment.bytes",
            "min.cleanable.dirty.ratio",
        ),
    ),
    "Confluent Cloud": Kind(3, policy={"max.message.bytes": _EIGHT_MIB}),
    "MSK Serverless": Kind(
        3,
        release="3.6",
        features=False,
        unknown=(*TIME_LIMITS, "segment.bytes", "segment.ms", "unclean.leader.election.enable"),
        policy={"max.message.bytes": _EIGHT_MIB},
    ),
    # Its topics are always deleted by time. Whether it reports that is not known: here not; `FORGETTING` does.
    "Event Hubs": Kind(
        release="3.6", features=False, codecs=("gzip",), hidden=("retention.ms", "retention.bytes")
    ),
    "Kafka 3.6": Kind(3, release="3.6", features=False),
    "Kafka 3.5": Kind(3, release="3.5", features=False, unknown=TIME_LIMITS),
    "dry runs make topics": Kind(dry_runs_make=True),
    "dry runs are bare": Kind(
        release="2.3", features=False, dry_runs_are_bare=True, refused=("DeleteRecords",)
    ),
}

# Clusters that can't carry a controller, or no stream.
UNFIT = {
    "no transactions": Kind(refused=("AddPartitionsToTxn", "EndTxn")),
    "short time-outs": Kind(broker={"transaction.max.timeout.ms": "10000"}),
    "few partitions": Kind(partitions=4),
    "a policy": Kind(policy={"retention.ms": 3_600_000}),
    "settings not shown": Kind(denied=(("topic", "DescribeConfigs"),)),
    "topics not shown": Kind(denied=(("topic", "Describe"),)),
    "no right to make topics": Kind(denied=(("topic", "Create"),)),
    "no right to transactions": Kind(denied=(("transactional_id", "Write"),)),
    "no groups": Kind(refused=("JoinGroup",)),
    "no settings": Kind(refused=("DescribeConfigs",)),
    "an old Fetch": Kind(versions={"Fetch": (0, 10)}),
    "time always deletes": Kind(highest={"retention.ms": 3_600_000}),
    "deletions are forgotten": Kind(highest={"delete.retention.ms": 3_600_000}),
    "small messages": Kind(policy={"max.message.bytes": 2 << 20}),
    "no room for a stream": Kind(partitions=15),
    "short ends": Kind(release="3.6", features=False, short_ends=True),
}
LIAR = UNFIT["short ends"]
# It takes records as they are.
NO_CODEC = Kind(codecs=())

# It deletes all topics by time, and says so: a week is the most.
FORGETTING = Kind(
    release="3.6", features=False, codecs=("gzip",), highest={"retention.ms": 7 * 24 * 3_600_000}
)
