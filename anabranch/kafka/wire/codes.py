"""What each of the brokers' error codes means for a call: one table an operation, each with its reason.

The codes are Kafka's (``org.apache.kafka.common.protocol.Errors``). The rule: a call is repeated only
where the broker says that nothing happened; a code that is not in a table is *uncertain*.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from anabranch.ports import (
    NOT_AUTHORIZED,
    LogError,
    LogFenced,
    LogRefused,
    LogUnavailable,
    LogUncertain,
)

NONE = 0
UNKNOWN_TOPIC_ID = 100
DUPLICATE_SEQUENCE = 46
CONCURRENT_TRANSACTIONS = 51
TOPIC_ALREADY_EXISTS = 36
UNSUPPORTED_VERSION = 35
INVALID_PARTITIONS = 37


class Act(Enum):
    """What the caller does with a code."""

    RETRY = "nothing happened: the same request again, soon"
    REFRESH = "nothing happened: find the leader or coordinator anew, then again"
    REFUSED = "the broker refused the content: LogRefused"
    FENCED = "somebody else has the transactional id: LogFenced"
    UNCERTAIN = "it can't be told: LogUncertain"


class Meaning(NamedTuple):
    """A code's name, what to do, and why."""

    name: str
    act: Act
    reason: str


_R, _F = Act.RETRY, Act.REFRESH
_X, _Z, _U = Act.REFUSED, Act.FENCED, Act.UNCERTAIN

_FENCING = {
    47: Meaning(
        "INVALID_PRODUCER_EPOCH", _Z, "a newer producer has the id, or the broker timed it out"
    ),
    90: Meaning("PRODUCER_FENCED", _Z, "a newer producer has the id"),
    49: Meaning(
        "INVALID_PRODUCER_ID_MAPPING", _Z, "the id now has another producer id, or expired"
    ),
}


def _forbidden(right: str) -> dict[int, Meaning]:
    """Codes of a call that needs this right on a topic, or on a transactional id."""
    missing = f"the right {right} on the {{}} is missing"
    return {
        29: Meaning("TOPIC_AUTHORIZATION_FAILED", _X, missing.format("topic")),
        31: Meaning("CLUSTER_AUTHORIZATION_FAILED", _X, "may not do this on the cluster"),
        35: Meaning("UNSUPPORTED_VERSION", _X, "the broker does not speak this version"),
        42: Meaning("INVALID_REQUEST", _X, "the broker can't read the request"),
        53: Meaning(
            "TRANSACTIONAL_ID_AUTHORIZATION_FAILED", _X, missing.format("transactional id")
        ),
    }


_COORDINATOR = {
    14: Meaning("COORDINATOR_LOAD_IN_PROGRESS", _R, "it reads its log and did nothing yet"),
    15: Meaning("COORDINATOR_NOT_AVAILABLE", _F, "there is none right now"),
    16: Meaning("NOT_COORDINATOR", _F, "it moved; this broker did nothing"),
    51: Meaning(
        "CONCURRENT_TRANSACTIONS", _R, "the markers of the transaction before are on their way"
    ),
}

# Inside a transaction, a request that may have been stored is never sent again: the transaction is
# given up instead, so that nothing hangs on the brokers' deduplication.
PRODUCE_CODES = {
    **_FENCING,
    **_forbidden("Write"),
    2: Meaning("CORRUPT_MESSAGE", _X, "the CRC does not match, or the topic asks for keys"),
    10: Meaning("MESSAGE_TOO_LARGE", _X, "above max.message.bytes"),
    17: Meaning("INVALID_TOPIC_EXCEPTION", _X, "the topic can't be written"),
    18: Meaning("RECORD_LIST_TOO_LARGE", _X, "above segment.bytes"),
    32: Meaning("INVALID_TIMESTAMP", _X, "outside message.timestamp.before.max.ms or after.max.ms"),
    43: Meaning("UNSUPPORTED_FOR_MESSAGE_FORMAT", _X, "the topic keeps an old message format"),
    44: Meaning("POLICY_VIOLATION", _X, "a policy of the broker"),
    76: Meaning("UNSUPPORTED_COMPRESSION_TYPE", _X, "the broker does not know the codec"),
    87: Meaning("INVALID_RECORD", _X, "breaks a rule of the format"),
    51: _COORDINATOR[51],
    14: _COORDINATOR[14],
    15: Meaning("COORDINATOR_NOT_AVAILABLE", _R, "the leader could not add the partition yet"),
    16: Meaning("NOT_COORDINATOR", _R, "the leader could not add the partition yet"),
    19: Meaning(
        "NOT_ENOUGH_REPLICAS", _R, "checked before the append; also: partition not added yet"
    ),
    3: Meaning("UNKNOWN_TOPIC_OR_PARTITION", _U, "the topic went away, or was made anew"),
    6: Meaning(
        "NOT_LEADER_OR_FOLLOWER", _U, "also the answer of a leader that lost it in mid-append"
    ),
    7: Meaning("REQUEST_TIMED_OUT", _U, "appended, but not replicated in time"),
    20: Meaning("NOT_ENOUGH_REPLICAS_AFTER_APPEND", _U, "appended, but not replicated"),
    45: Meaning("OUT_OF_ORDER_SEQUENCE_NUMBER", _U, "a batch before this one is missing"),
    46: Meaning("DUPLICATE_SEQUENCE_NUMBER", _U, "stored before, at an offset not known any more"),
    48: Meaning(
        "INVALID_TXN_STATE", _U, "the partition is in no transaction: it was ended from outside"
    ),
    56: Meaning("KAFKA_STORAGE_ERROR", _U, "the leader's disk failed"),
    59: Meaning("UNKNOWN_PRODUCER_ID", _U, "the leader forgot this producer"),
    74: Meaning("FENCED_LEADER_EPOCH", _U, "the leader moved"),
    100: Meaning("UNKNOWN_TOPIC_ID", _U, "the topic was made anew"),
    120: Meaning("TRANSACTION_ABORTABLE", _U, "the broker asks for an abort (KIP-890)"),
}

# Outside of transactions brokers tell a batch that they have by its sequence (KIP-98), so that the very same
# one may be sent again, stored or not.
IDEMPOTENT_CODES = {
    **PRODUCE_CODES,
    3: Meaning("UNKNOWN_TOPIC_OR_PARTITION", _F, "not known to this broker (yet)"),
    5: Meaning("LEADER_NOT_AVAILABLE", _F, "an election is under way"),
    6: Meaning("NOT_LEADER_OR_FOLLOWER", _F, "the leader moved"),
    7: Meaning("REQUEST_TIMED_OUT", _R, "not replicated in time"),
    13: Meaning("NETWORK_EXCEPTION", _F, "the broker went away"),
    19: Meaning("NOT_ENOUGH_REPLICAS", _R, "too few are in sync"),
    20: Meaning("NOT_ENOUGH_REPLICAS_AFTER_APPEND", _R, "too few are in sync"),
    56: Meaning("KAFKA_STORAGE_ERROR", _F, "the leader's disk failed: another leads soon"),
    74: Meaning("FENCED_LEADER_EPOCH", _F, "the leader moved"),
    100: Meaning("UNKNOWN_TOPIC_ID", _F, "the topic is new here, or was made anew"),
}

ADD_PARTITIONS_CODES = {
    **_FENCING,
    **_forbidden("Write"),
    **_COORDINATOR,
    3: Meaning("UNKNOWN_TOPIC_OR_PARTITION", _R, "a new topic is not known to every broker yet"),
    17: Meaning("INVALID_TOPIC_EXCEPTION", _X, "the topic can't be written"),
    48: Meaning("INVALID_TXN_STATE", _U, "the transaction was ended from outside"),
    55: Meaning("OPERATION_NOT_ATTEMPTED", _R, "another partition of the request failed"),
}

# A coordinator that loses its log in mid-append says 15 or 16, though its successor may find the decision
# there. Asking for the same end again is then answered as the first time (KIP-98, KIP-890).
END_TXN_CODES = {
    **_FENCING,
    14: _COORDINATOR[14],
    15: Meaning("COORDINATOR_NOT_AVAILABLE", _F, "the same end may be asked for again"),
    16: Meaning("NOT_COORDINATOR", _F, "the same end may be asked for again"),
    51: Meaning(
        "CONCURRENT_TRANSACTIONS", _R, "the coordinator is writing its log; it did nothing"
    ),
    48: Meaning(
        "INVALID_TXN_STATE", _U, "there is no transaction to end: it was ended from outside"
    ),
    53: Meaning(
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
        _U,
        "the right Write on the transactional id was taken in mid-transaction",
    ),
}

INIT_CODES = {
    **_FENCING,
    **_forbidden("Write"),
    **_COORDINATOR,
    7: Meaning("REQUEST_TIMED_OUT", _R, "initialising again is always safe"),
    50: Meaning("INVALID_TRANSACTION_TIMEOUT", _X, "above the broker's transaction.max.timeout.ms"),
}

# For calls that only read: all that may pass by itself is asked again.
READ_CODES = {
    **_forbidden("Describe"),
    3: Meaning("UNKNOWN_TOPIC_OR_PARTITION", _F, "not known to this broker (yet)"),
    5: Meaning("LEADER_NOT_AVAILABLE", _F, "an election is under way"),
    6: Meaning("NOT_LEADER_OR_FOLLOWER", _F, "the leader moved"),
    7: Meaning("REQUEST_TIMED_OUT", _R, "reading again is always safe"),
    9: Meaning("REPLICA_NOT_AVAILABLE", _F, "the leader moved"),
    13: Meaning("NETWORK_EXCEPTION", _F, "the broker went away"),
    14: _COORDINATOR[14],
    15: _COORDINATOR[15],
    16: _COORDINATOR[16],
    17: Meaning("INVALID_TOPIC_EXCEPTION", _X, "not the name of a topic"),
    41: Meaning("NOT_CONTROLLER", _F, "the controller moved"),
    56: Meaning("KAFKA_STORAGE_ERROR", _F, "the leader's disk failed: another leads soon"),
    74: Meaning("FENCED_LEADER_EPOCH", _F, "the leader changed"),
    75: Meaning("UNKNOWN_LEADER_EPOCH", _F, "this broker is behind"),
    78: Meaning("OFFSET_NOT_AVAILABLE", _R, "the leader is new and waits for its high watermark"),
    100: Meaning("UNKNOWN_TOPIC_ID", _F, "the topic is new here, or was made anew"),
    103: Meaning("INCONSISTENT_TOPIC_ID", _F, "the topic was made anew"),
}

FETCH_CODES = {**READ_CODES, **_forbidden("Read")}
SETTINGS_CODES = {**READ_CODES, **_forbidden("DescribeConfigs")}
DELETE_RECORDS_CODES = {**READ_CODES, **_forbidden("Delete")}

CREATE_CODES = {
    **READ_CODES,
    **_forbidden("Create"),
    17: Meaning("INVALID_TOPIC_EXCEPTION", _X, "not the name of a topic"),
    37: Meaning("INVALID_PARTITIONS", _X, "a topic has at least one partition"),
    38: Meaning("INVALID_REPLICATION_FACTOR", _X, "more replicas than brokers, or none"),
    40: Meaning("INVALID_CONFIG", _X, "a setting or its value is not known"),
    44: Meaning("POLICY_VIOLATION", _X, "a policy of the broker"),
    89: Meaning("THROTTLING_QUOTA_EXCEEDED", _R, "too many topic changes at once"),
}

DELETE_CODES = {
    **DELETE_RECORDS_CODES,
    44: CREATE_CODES[44],
    73: Meaning("TOPIC_DELETION_DISABLED", _X, "delete.topic.enable is false"),
    89: CREATE_CODES[89],
}

# INVALID_PARTITIONS is the caller's: it says that the topic has as many already.
GROW_CODES = {
    **CREATE_CODES,
    **_forbidden("Alter"),
    38: Meaning("INVALID_REPLICATION_FACTOR", _R, "some of the topic's brokers are away"),
    39: Meaning("INVALID_REPLICA_ASSIGNMENT", _X, "too few brokers for the topic's replicas"),
    60: Meaning("REASSIGNMENT_IN_PROGRESS", _R, "the topic's replicas are being moved"),
}


def meaning(table: dict[int, Meaning], code: int) -> Meaning:
    """The table's entry, or *uncertain* for a code that it does not name."""
    found = table.get(code)
    return found or Meaning(f"error {code}", _U, "not an answer this call is known to get")


def error_for(
    meant: Meaning, code: int, what: str, detail: str | None = None, topics: Iterable[str] = ()
) -> LogError:
    """The error to raise, once retrying is over. ``topics``: those that the broker says it of."""
    if code in NOT_AUTHORIZED:
        detail = None  # brokers say no more there than that
    text = f"{what}: {meant.name} ({code}), {detail or meant.reason}"
    match meant.act:
        case Act.REFUSED:
            return LogRefused(text, code, topics)
        case Act.FENCED:
            return LogFenced(text)
        case Act.UNCERTAIN:
            return LogUncertain(text, topics)
        case Act.RETRY | Act.REFRESH:
            return LogUnavailable(text, topics)
