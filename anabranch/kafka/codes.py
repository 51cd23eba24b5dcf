"""The meaning of brokers' error codes for each call: one table for each operation, with a reason for each code.

The codes and their names are kio's, generated from Kafka's. A call is repeated only if the code means that nothing
happened; a code that is not in a table is *uncertain*.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from kio.schema.errors import ErrorCode as E

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
NOT_CONTROLLER = 41
INVALID_REQUEST = 42


class Act(Enum):
    """The caller's next step after a code."""

    RETRY = "nothing happened: the same request again, soon"
    REFRESH = "nothing happened: find the leader or coordinator again, then repeat"
    REFUSED = "the broker refused the content: LogRefused"
    FENCED = "another producer has the transactional id: LogFenced"
    UNCERTAIN = "it can't be known: LogUncertain"


class Meaning(NamedTuple):
    """The next step after a code, and why."""

    act: Act
    reason: str


_R = Act.RETRY
_F = Act.REFRESH
_X = Act.REFUSED
_Z = Act.FENCED
_U = Act.UNCERTAIN

_FENCING = {
    E.invalid_producer_epoch: Meaning(
        _Z, "a newer producer has the id, or the broker timed it out"
    ),
    E.producer_fenced: Meaning(_Z, "a newer producer has the id"),
    E.invalid_producer_id_mapping: Meaning(_Z, "the id now has another producer id, or expired"),
}


def _forbidden(right: str) -> dict[E, Meaning]:
    """Codes of a call that needs this right on a topic, or on a transactional id."""
    missing = f"the right {right} on the {{}} is missing"
    return {
        E.topic_authorization_failed: Meaning(_X, missing.format("topic")),
        E.cluster_authorization_failed: Meaning(_X, missing.format("cluster kafka-cluster")),
        E.unsupported_version: Meaning(_X, "the broker does not speak this version"),
        E.invalid_request: Meaning(_X, "the broker can't read the request"),
        E.transactional_id_authorization_failed: Meaning(_X, missing.format("transactional id")),
    }


_COORDINATOR = {
    E.coordinator_load_in_progress: Meaning(_R, "it reads its log and did nothing yet"),
    E.coordinator_not_available: Meaning(_F, "there is none right now"),
    E.not_coordinator: Meaning(_F, "it moved; this broker did nothing"),
    E.concurrent_transactions: Meaning(
        _R, "the markers of the transaction before are on their way"
    ),
}

# Inside a transaction, a request that may have been stored is never sent again: the transaction is aborted
# instead, so that nothing depends on the brokers' deduplication.
PRODUCE_CODES = {
    **_FENCING,
    **_forbidden("Write"),
    E.corrupt_message: Meaning(_X, "the CRC does not match, or the topic asks for keys"),
    E.message_too_large: Meaning(_X, "above max.message.bytes"),
    E.invalid_topic_exception: Meaning(_X, "the topic can't be written"),
    E.record_list_too_large: Meaning(_X, "above segment.bytes"),
    E.invalid_timestamp: Meaning(_X, "outside message.timestamp.before.max.ms or after.max.ms"),
    E.unsupported_for_message_format: Meaning(_X, "the topic keeps an old message format"),
    E.policy_violation: Meaning(_X, "a policy of the broker"),
    E.unsupported_compression_type: Meaning(_X, "the broker does not know the codec"),
    E.invalid_record: Meaning(_X, "breaks a rule of the format"),
    E.concurrent_transactions: _COORDINATOR[E.concurrent_transactions],
    E.coordinator_load_in_progress: _COORDINATOR[E.coordinator_load_in_progress],
    E.coordinator_not_available: Meaning(_R, "the leader could not add the partition yet"),
    E.not_coordinator: Meaning(_R, "the leader could not add the partition yet"),
    E.not_enough_replicas: Meaning(_R, "checked before the append; also: partition not added yet"),
    E.unknown_topic_or_partition: Meaning(_U, "the topic was deleted or replaced"),
    E.not_leader_or_follower: Meaning(_U, "also the answer of a leader that lost it in mid-append"),
    E.request_timed_out: Meaning(_U, "appended, but not replicated in time"),
    E.not_enough_replicas_after_append: Meaning(_U, "appended, but not replicated"),
    E.out_of_order_sequence_number: Meaning(_U, "a batch before this one is missing"),
    E.duplicate_sequence_number: Meaning(_U, "stored before, at an offset not known any more"),
    E.invalid_txn_state: Meaning(
        _U, "the partition is in no transaction: it was ended from outside"
    ),
    E.kafka_storage_error: Meaning(_U, "the leader's disk failed"),
    E.unknown_producer_id: Meaning(_U, "the leader forgot this producer"),
    E.fenced_leader_epoch: Meaning(_U, "the leader moved"),
    E.unknown_topic_id: Meaning(_U, "the topic was replaced"),
    E.transaction_abortable: Meaning(_U, "the broker asks for an abort (KIP-890)"),
}

# Outside of transactions brokers recognise a stored batch by its sequence (KIP-98), so the same batch may be sent
# again, whether it was stored or not.
IDEMPOTENT_CODES = {
    **PRODUCE_CODES,
    E.unknown_topic_or_partition: Meaning(_F, "not known to this broker (yet)"),
    E.leader_not_available: Meaning(_F, "an election is under way"),
    E.not_leader_or_follower: Meaning(_F, "the leader moved"),
    E.request_timed_out: Meaning(_R, "not replicated in time"),
    E.network_exception: Meaning(_F, "the broker went away"),
    E.not_enough_replicas: Meaning(_R, "too few are in sync"),
    E.not_enough_replicas_after_append: Meaning(_R, "too few are in sync"),
    E.kafka_storage_error: Meaning(_F, "the leader's disk failed: another leads soon"),
    E.fenced_leader_epoch: Meaning(_F, "the leader moved"),
    E.unknown_topic_id: Meaning(_F, "the topic is new here, or was replaced"),
}

ADD_PARTITIONS_CODES = {
    **_FENCING,
    **_forbidden("Write"),
    **_COORDINATOR,
    E.unknown_topic_or_partition: Meaning(_R, "a new topic is not known to every broker yet"),
    E.invalid_topic_exception: Meaning(_X, "the topic can't be written"),
    E.invalid_txn_state: Meaning(_U, "the transaction was ended from outside"),
    E.operation_not_attempted: Meaning(_R, "another partition of the request failed"),
}

# A coordinator that loses leadership in mid-append answers 15 or 16, though its successor may find the decision in
# the log. A repeated request for the same end then gets the first one's answer (KIP-98, KIP-890).
END_TXN_CODES = {
    **_FENCING,
    E.coordinator_load_in_progress: _COORDINATOR[E.coordinator_load_in_progress],
    E.coordinator_not_available: Meaning(_F, "the same end may be asked for again"),
    E.not_coordinator: Meaning(_F, "the same end may be asked for again"),
    E.concurrent_transactions: Meaning(_R, "the coordinator is writing its log; it did nothing"),
    E.invalid_txn_state: Meaning(_U, "there is no transaction to end: it was ended from outside"),
    E.transactional_id_authorization_failed: Meaning(
        _U, "the right Write on the transactional id was taken in mid-transaction"
    ),
}

INIT_CODES = {
    **_FENCING,
    **_forbidden("Write"),
    **_COORDINATOR,
    E.request_timed_out: Meaning(_R, "initialising again is always safe"),
    E.invalid_transaction_timeout: Meaning(
        _X,
        "--native-timeout is above the brokers' transaction.max.timeout.ms: lower the one, or raise the other",
    ),
}

# For calls that only read: repeat after any transient error.
READ_CODES = {
    **_forbidden("Describe"),
    E.unknown_topic_or_partition: Meaning(_F, "not known to this broker (yet)"),
    E.leader_not_available: Meaning(_F, "an election is under way"),
    E.not_leader_or_follower: Meaning(_F, "the leader moved"),
    E.request_timed_out: Meaning(_R, "reading again is always safe"),
    E.replica_not_available: Meaning(_F, "the leader moved"),
    E.network_exception: Meaning(_F, "the broker went away"),
    E.coordinator_load_in_progress: _COORDINATOR[E.coordinator_load_in_progress],
    E.coordinator_not_available: _COORDINATOR[E.coordinator_not_available],
    E.not_coordinator: _COORDINATOR[E.not_coordinator],
    E.invalid_topic_exception: Meaning(_X, "not the name of a topic"),
    E.not_controller: Meaning(_F, "the controller moved"),
    E.kafka_storage_error: Meaning(_F, "the leader's disk failed: another leads soon"),
    E.fenced_leader_epoch: Meaning(_F, "the leader changed"),
    E.unknown_leader_epoch: Meaning(_F, "this broker lags"),
    E.offset_not_available: Meaning(_R, "the leader is new and waits for its high watermark"),
    E.unknown_topic_id: Meaning(_F, "the topic is new here, or was replaced"),
    E.inconsistent_topic_id: Meaning(_F, "the topic was replaced"),
}

FETCH_CODES = {**READ_CODES, **_forbidden("Read")}
SETTINGS_CODES = {**READ_CODES, **_forbidden("DescribeConfigs")}
DELETE_RECORDS_CODES = {**READ_CODES, **_forbidden("Delete")}

CREATE_CODES = {
    **READ_CODES,
    **_forbidden("Create"),
    E.invalid_topic_exception: Meaning(_X, "not the name of a topic"),
    E.invalid_partitions: Meaning(_X, "a topic has at least one partition"),
    E.invalid_replication_factor: Meaning(_X, "more replicas than brokers, or none"),
    E.invalid_config: Meaning(_X, "a setting or its value is not known"),
    E.policy_violation: Meaning(_X, "a policy of the broker"),
    E.throttling_quota_exceeded: Meaning(_R, "too many topic changes at once"),
}

DELETE_CODES = {
    **DELETE_RECORDS_CODES,
    E.policy_violation: CREATE_CODES[E.policy_violation],
    E.topic_deletion_disabled: Meaning(_X, "delete.topic.enable is false"),
    E.throttling_quota_exceeded: CREATE_CODES[E.throttling_quota_exceeded],
}

ALTER_CODES = {
    **CREATE_CODES,
    **_forbidden("AlterConfigs"),
    E.unknown_topic_or_partition: Meaning(_X, "there is no such topic"),
}

# The caller handles INVALID_PARTITIONS: the topic has as many already.
GROW_CODES = {
    **CREATE_CODES,
    **_forbidden("Alter"),
    E.invalid_replication_factor: Meaning(_R, "some of the topic's brokers are away"),
    E.invalid_replica_assignment: Meaning(_X, "too few brokers for the topic's replicas"),
    E.reassignment_in_progress: Meaning(_R, "the topic's replicas are being moved"),
}


_CODES = frozenset(E)


def meaning(table: Mapping[E, Meaning], code: int) -> Meaning:
    """The table's entry for a code; *uncertain* if the table does not name the code."""
    found = table.get(E(code)) if code in _CODES else None
    return found or Meaning(_U, "not an answer this call is known to get")


def error_for(
    meant: Meaning, code: int, what: str, detail: str | None = None, topics: Iterable[str] = ()
) -> LogError:
    """The error to raise when retrying is over. ``topics``: the topics of the code."""
    if code in NOT_AUTHORIZED:
        detail = None  # brokers add no detail to this code
    name = E(code).name.upper() if code in _CODES else "error"
    text = f"{what}: {name} ({code}), {detail or meant.reason}"
    match meant.act:
        case Act.REFUSED:
            return LogRefused(text, code, topics)
        case Act.FENCED:
            return LogFenced(text)
        case Act.UNCERTAIN:
            return LogUncertain(text, topics)
        case Act.RETRY | Act.REFRESH:
            return LogUnavailable(text, topics)
