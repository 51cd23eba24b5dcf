"""What kfake itself lacks of Apache Kafka: tests that can't pass over it, each with the reason."""

from __future__ import annotations

_ANY_SETTING = "it takes any setting of a topic, and any value"
_ANY_RECORD = "it looks neither into batches nor at the times in them"
_ANY_KEY = "it takes records without a key into compacted topics"
_STABLE_END = (
    "DeleteRecords goes no further than the stable end, and refuses what is before the start"
)
_NO_DISKS = "it reports no log folders with their sizes"
_FEW_DEFAULTS = "it reports the defaults of few settings"
_FIRST_SEQUENCE = "a producer's first batch in a topic that was made again has to have the number 0"
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
LACKS = {
    f"{file}::{test}": reason for file, some in _BY_FILE.items() for test, reason in some.items()
}
