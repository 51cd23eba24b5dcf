"""What kfake itself lacks of Apache Kafka: tests that can't pass over it, each with the reason."""

from __future__ import annotations

from tests.kfake.kinds import TIME_LIMITS, Kind

_ANY_SETTING = "it takes any setting of a topic, and any value"
_ANY_RECORD = "it looks neither into batches nor at the times in them"
_ANY_KEY = "it takes records without a key into compacted topics"
_STABLE_END = (
    "DeleteRecords goes no further than the stable end, and refuses what is before the start"
)
_NO_DISKS = "it reports no log folders with their sizes"
_FEW_DEFAULTS = "it reports the defaults of few settings"
_FIRST_SEQUENCE = "a producer's first batch in a topic that was made again has to have the number 0"
_NO_IDS = "this kind has no ids of topics"
_FENCED_BATCH = (
    "by the older protocol it says of a fenced producer's batch that no transaction is open"
)
_FENCED_END = (
    "it takes an EndTxn that is one epoch too old for a repeated one, not for a fenced producer's"
)

# File, from tests/ on -> test -> reason.
_BY_FILE = {
    "behaviour/test_lives.py": {"test_a_stream_s_life_under_load": _ANY_SETTING},
    "behaviour/test_looking.py": {"test_the_doctor": _NO_DISKS},
    "contract/test_journal_producer.py": {
        "test_a_topic_that_is_made_anew_is_another_one[the next writer]": _FIRST_SEQUENCE,
    },
    "contract/test_log.py": {
        "test_a_topic_is_described_with_its_defaults[kafka-v2]": _FEW_DEFAULTS,
        "test_a_wrong_setting_is_refused[kafka-v2]": _ANY_SETTING,
        "test_deleting_records_moves_the_start[kafka-v2]": _STABLE_END,
        "test_what_is_open_may_be_deleted[kafka-v2]": _STABLE_END,
    },
    "contract/test_producer.py": {
        "test_appended_then_fenced_does_not_commit[kafka-v2]": _FENCED_END,
        "test_a_refusal_ends_the_transaction_not_the_producer[broken body-kafka-v2]": _ANY_RECORD,
        "test_a_refusal_ends_the_transaction_not_the_producer[far future-kafka-v2]": _ANY_RECORD,
        "test_a_compacted_topic_asks_for_keys[kafka-v2]": _ANY_KEY,
    },
}
# The same, where kfake plays a kind of brokers.
_OF_OLDER = {
    "contract/test_producer.py": {
        "test_a_second_init_fences_the_first[kafka-v2]": _FENCED_BATCH,
    },
}
_WITHOUT_IDS = {
    "contract/test_declarations.py": {
        "test_a_streams_topics_are_created_as_declared[kafka-v2]": _NO_IDS,
    },
    "contract/test_deleted_topics.py": {
        "test_whoever_reads_a_deleted_topic_is_told_its_name[kafka-v2]": _NO_IDS,
    },
    "contract/test_log.py": {
        "test_a_deleted_topic_is_gone_and_one_made_anew_is_left[kafka-v2]": _NO_IDS,
        "test_whether_a_topic_is_gone[kafka-v2]": _NO_IDS,
    },
    "contract/test_send.py": {
        "test_a_topic_in_the_place_of_another_gets_nothing_unasked": _NO_IDS,
    },
}
_WITHOUT_LIMITS = {
    "contract/test_declarations.py": {
        "test_all_that_is_wrong_is_named_at_once[kafka-v2]": "this kind reports no limits of time",
    },
}
_FIRST_WITH_IDS = 10  # of Metadata's versions


def lacks(kind: Kind) -> dict[str, str]:
    """Tests that can't pass over a kind -> the reason."""
    parts = [_BY_FILE]
    parts += [] if kind.features else [_OF_OLDER]
    parts += [_WITHOUT_IDS] if kind.versions.get("Metadata", (0, 12))[1] < _FIRST_WITH_IDS else []
    parts += [_WITHOUT_LIMITS] if TIME_LIMITS[0] in (*kind.hidden, *kind.unknown) else []
    return {
        f"{file}::{test}": reason
        for part in parts
        for file, some in part.items()
        for test, reason in some.items()
    }
