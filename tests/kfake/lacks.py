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
_NOT_REPORTED = "this kind does not report the setting"
_AS_MANY_REPLICAS = "this kind has as many replicas as it likes"
_FEW_CODECS = "this kind takes gzip alone"
_NO_CALL = "this kind does not offer the call"
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
        "test_a_refusal_ends_the_transaction_not_the_producer[kafka-v2-broken body]": _ANY_RECORD,
        "test_a_refusal_ends_the_transaction_not_the_producer[kafka-v2-far future]": _ANY_RECORD,
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
        "test_reading_a_deleted_topic_raises_its_name[kafka-v2]": _NO_IDS,
    },
    "contract/test_log.py": {
        "test_a_deleted_topic_is_gone_and_one_made_anew_is_left[kafka-v2]": _NO_IDS,
        "test_whether_a_topic_is_gone[kafka-v2]": _NO_IDS,
    },
    "contract/test_send.py": {
        "test_a_topic_in_the_place_of_another_gets_nothing_unasked": _NO_IDS,
    },
}
_ADOPTED = "test_a_topic_that_was_there_gets_what_the_stream_asks_for[kafka-v2-{}-{}]"
_DECLARATIONS = "contract/test_declarations.py"
# By a setting that this kind does not report.
_WITHOUT_SETTING = {
    TIME_LIMITS[0]: {
        _DECLARATIONS: {"test_all_that_is_wrong_is_named_at_once[kafka-v2]": _NOT_REPORTED},
    },
    "segment.bytes": {
        _DECLARATIONS: {
            "test_a_streams_topics_are_created_as_declared[kafka-v2]": _NOT_REPORTED,
            "test_a_users_settings_go_where_they_belong[kafka-v2]": _NOT_REPORTED,
        },
    },
    "retention.ms": {
        _DECLARATIONS: {
            "test_control_topics_are_created_as_declared[kafka-v2]": _NOT_REPORTED,
            "test_a_streams_topics_are_created_as_declared[kafka-v2]": _NOT_REPORTED,
            "test_a_users_settings_go_where_they_belong[kafka-v2]": _NOT_REPORTED,
            "test_all_that_is_wrong_is_named_at_once[kafka-v2]": _NOT_REPORTED,
            **{
                _ADOPTED.format(adopt, what): _NOT_REPORTED
                for adopt in (False, True)
                for what in ("nothing", "what it has", "time", "bytes")
            },
        },
        "contract/test_log.py": {
            "test_a_topic_is_created_once[kafka-v2]": _NOT_REPORTED,
            "test_topics_settings_are_altered_or_not_at_all[kafka-v2]": _NOT_REPORTED,
        },
    },
}
_WITHOUT_CODECS = {
    "contract/test_producer.py": {
        "test_batches_of_a_partition_stay_in_order[kafka-v2]": _FEW_CODECS,
        "test_the_log_has_the_records_that_were_given[kafka-v2]": _FEW_CODECS,
    },
}
_OWN_REPLICAS = {
    _DECLARATIONS: {
        "test_replicas_that_were_asked_for_are_demanded[kafka-v2]": _AS_MANY_REPLICAS,
        "test_two_replicas_stay_in_sync_where_there_are_two[kafka-v2]": _AS_MANY_REPLICAS,
    },
}
# By a call that this kind does not offer: the test makes it itself, or the product names it.
_WITHOUT_CALL = {
    "DeleteRecords": {
        _DECLARATIONS: {"test_ends_of_topics_with_a_past[kafka-v2]": _NO_CALL},
        "contract/test_log.py": {
            "test_a_position_outside_the_log_is_refused[kafka-v2]": _NO_CALL,
            "test_all_may_be_deleted[kafka-v2]": _NO_CALL,
            "test_half_a_batch_is_deleted[kafka-v2]": _NO_CALL,
        },
        "behaviour/test_client_snapshots.py": {
            f"{name}[{params}]": _NO_CALL
            for client in ("blocking", "aio")
            for name, params in (
                ("test_what_retention_has_left", client),
                ("test_all_of_it_is_gone", f"{client}-its events"),
                ("test_all_of_it_is_gone", f"{client}-its last marker too"),
                ("test_the_history_is_cut", client),
            )
        },
        "behaviour/test_ranges.py": {"test_what_retention_removed_is_a_named_error": _NO_CALL},
    },
    "IncrementalAlterConfigs": {
        _DECLARATIONS: {
            _ADOPTED.format(adopt, what): _NO_CALL
            for adopt in (False, True)
            for what in ("nothing", "time", "bytes", "a size")
        },
        "contract/test_log.py": {
            "test_topics_settings_are_altered_or_not_at_all[kafka-v2]": _NO_CALL,
        },
        "behaviour/bad_input/test_limits.py": {
            "test_data_that_the_stream_refuses_once_merged": _NO_CALL
        },
        "behaviour/test_cli.py": {"test_streams_become_what_a_file_says": _NO_CALL},
        "behaviour/test_client_journal.py": {
            "test_a_batch_that_the_broker_refuses_is_a_failure": _NO_CALL
        },
    },
}
_FIRST_WITH_IDS = 10  # of Metadata's versions


def lacks(kind: Kind) -> dict[str, str]:
    """Tests that can't pass over a kind -> the reason."""
    silent = {*kind.hidden, *kind.unknown}
    parts = [_BY_FILE]
    parts += [] if kind.features else [_OF_OLDER]
    parts += [_WITHOUT_IDS] if kind.versions.get("Metadata", (0, 12))[1] < _FIRST_WITH_IDS else []
    parts += [some for setting, some in _WITHOUT_SETTING.items() if setting in silent]
    parts += [_WITHOUT_CODECS] if kind.codecs is not None else []
    parts += [_OWN_REPLICAS] if kind.replicas else []
    parts += [some for call, some in _WITHOUT_CALL.items() if call in kind.refused]
    return {
        f"{file}::{test}": reason
        for part in parts
        for file, some in part.items()
        for test, reason in some.items()
    }
