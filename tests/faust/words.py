"""All words of Faust, read from its own classes, and what becomes of each: it works, or is refused by name.

`WORKS` names, for each word, the test that shows that it works here as there. `INNER` has what Faust's own parts
use of each other: no word of its guide. ``python -m tests.faust.words`` writes the table of `docs/faust.md`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import faust
import faust.cli
from faust.models.record import Record
from faust.tables.base import Collection
from faust.tables.wrappers import WindowedItemsView, WindowSet, WindowWrapper
from faust.types.models import ModelOptions
from faust.types.settings import Settings

from anabranch.faust.words import REFUSED

PAGE = Path(__file__).parents[2] / "docs" / "faust.md"
_BEGIN, _END = "<!-- all words: begin -->", "<!-- all words: end -->"


def _members(of: type) -> set[str]:
    """Public members that a class has from Faust, and not from Python or `mode`."""
    named = (name for name in dir(of) if not name.startswith("_") or name == "__and__")
    owners = ((name, next(one for one in of.__mro__ if name in vars(one))) for name in named)
    return {name for name, owner in owners if owner.__module__.startswith("faust")}


def _options(*calls: Callable[..., Any]) -> set[str]:
    given = (one for call in calls for one in inspect.signature(call).parameters.values())
    return {one.name for one in given if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)} - {
        "self",
        "app",
    }


def _commands() -> set[str]:
    folder = Path(inspect.getfile(faust.cli)).parent
    return {path.stem for path in folder.glob("*.py")} - {"__init__", "base", "faust", "params"}


APP, STREAM = faust.App, faust.Stream
_SIGNALS = {name for name in _members(APP) if hasattr(getattr(APP, name), "connect")}
# What Faust has, by kind.
WORDS: Mapping[str, set[str]] = {
    "app": _members(APP) - _SIGNALS,
    "signal": _SIGNALS,
    "setting": set(Settings.SETTINGS),
    "app.topic": _options(APP.topic),
    "app.agent": _options(APP.agent, faust.Agent.__init__) - {"fun", "on_error", "help"},
    "app.Table": _options(APP.Table, Collection.__init__),
    "app.timer": _options(APP.timer),
    "app.crontab": _options(APP.crontab),
    "app.task": _options(APP.task),
    "app.page": _options(APP.page),
    "app.command": _options(APP.command),
    "command": _commands(),
    "stream": _members(STREAM),
    "stream.group_by": _options(STREAM.group_by, STREAM.through) - {"channel"},
    "stream.take": _options(STREAM.take, STREAM.take_with_timestamp),
    "agent": _members(faust.Agent),
    "topic": _members(faust.Topic),
    "topic.send": _options(faust.Topic.send),
    "plain topic": {"send"},
    "event": _members(faust.Event),
    "table": _members(faust.Table),
    "window": {name for name in dir(faust) if name.endswith("Window")},
    "windowed table": _members(WindowWrapper),
    "windows of a key": _members(WindowSet),
    "items of windows": _members(WindowedItemsView),
    "record": _members(Record),
    "option of a record": {*ModelOptions.__annotations__, *_options(Record.__init_subclass__)},
    "schema": _members(faust.Schema),
    "sensor": _members(faust.Sensor),
}
_SEEN = "test_a_worker_that_is_killed"
_WINDOWS = "test_windows_are_those_of_faust"
_RECORDS = "test_records_and_schemas_are_faust_s_own"
_LISTS = "test_lists_end_when_they_are_full_or_in_time"
_SETTINGS = "test_settings_are_faust_s_own"
# By kind and test.
WORKS: Mapping[str, Mapping[str, str]] = {
    "app": {
        "test_a_table_is_a_dict": "tables",
        "test_commands": "main",
        _RECORDS: "serializers",
        _LISTS: "web_server",
        _SEEN: "agent topic timer crontab page command",
        "test_the_words_of_an_app": "Table actor config_from_object discover finalize send service task trace "
        "traced cache http_client conf monitor web is_leader",
    },
    "signal": {
        "test_the_words_of_an_app": "on_after_configured on_before_configured on_before_shutdown on_configured "
        "on_worker_init"
    },
    "setting": {
        _SETTINGS: "HttpClient Monitor Schema Serializers Worker autodiscover blocking_timeout cache canonical_url "
        "datadir debug env_prefix key_serializer logging_config loghandlers origin tabledir "
        "timezone value_serializer web web_application_options web_bind web_cors_options "
        "web_enabled web_graph_enabled web_host web_metrics_enabled web_port web_ssl_context "
        "web_stats_enabled web_transport worker_redirect_stdouts worker_redirect_stdouts_level",
        "test_events_come_again_under_another_key": "topic_partitions",
    },
    "app.topic": {
        _RECORDS: "allow_empty key_serializer key_type schema value_serializer value_type",
    },
    "app.agent": {
        _SEEN: "channel concurrency sink",
        "test_the_words_of_an_app": "name",
        _RECORDS: "key_type schema value_type",
    },
    "app.Table": {
        _SEEN: "default name value_type",
        "test_a_table_is_a_dict": "help key_type schema",
        _WINDOWS: "window",
        "test_windows_end_after_their_time": "on_window_close",
    },
    "app.timer": {
        _SEEN: "interval",
        "test_the_words_of_an_app": "max_drift_correction name on_leader traced",
    },
    "app.crontab": {_SEEN: "cron_format", "test_the_words_of_an_app": "on_leader timezone traced"},
    "app.task": {"test_the_words_of_an_app": "fun on_leader traced"},
    "app.page": {_SEEN: "path", "test_the_words_of_an_app": "base cors_options name"},
    "app.command": {"test_commands": "base"},
    "command": {
        _SEEN: "worker",
        "test_commands": "agents clean_versions completion model models send tables",
    },
    "stream": {
        "test_the_words_of_a_stream": "add_processor current_event echo enumerate events filter items events_total "
        "get_active_stream get_root_stream label shortlabel",
        "test_events_come_again_under_another_key": "group_by through",
        _LISTS: "take take_events take_with_timestamp",
    },
    "stream.group_by": {"test_events_come_again_under_another_key": "key name partitions topic"},
    "stream.take": {_LISTS: "max_ within timestamp_field_name"},
    "agent": {
        "test_the_words_of_a_stream": "add_sink cast channel get_topic_names info label send shortlabel",
    },
    "topic": {"test_the_words_of_a_stream": "get_topic_name label send"},
    "topic.send": {
        "test_the_words_of_a_stream": "force headers key key_serializer schema timestamp value value_serializer",
    },
    "event": {"test_the_words_of_a_stream": "app forward headers key message send value"},
    "table": {
        _WINDOWS: "hopping tumbling using_window",
        "test_a_table_is_a_dict": "as_ansitable",
    },
    "window": {_WINDOWS: "HoppingWindow TumblingWindow"},
    "windowed table": {
        _WINDOWS: "as_ansitable clone get_relative_timestamp get_timestamp items key_index keys name relative_to "
        "relative_to_field relative_to_now relative_to_stream values",
    },
    "windows of a key": {_WINDOWS: "apply current delta now value"},
    "items of windows": {_WINDOWS: "current delta now"},
    "record": {
        _RECORDS: "asdict derive dumps from_data is_valid loads make_final to_representation validate "
        "validate_or_raise validation_errors",
    },
    "option of a record": {
        _RECORDS: "abstract allow_blessed_key coerce coercions date_parser decimals include_metadata isodates "
        "lazy_creation namespace polymorphic_fields serializer validation",
    },
    "schema": {
        _RECORDS: "allow_empty compile decode dumps_key dumps_value key_serializer key_type loads_key loads_value "
        "on_dumps_key_prepare_headers on_dumps_value_prepare_headers update value_serializer value_type",
    },
    "sensor": {
        "test_sensors_see_events_sends_and_tables": "asdict on_message_in on_message_out on_send_completed "
        "on_send_initiated on_stream_event_in on_stream_event_out on_table_del on_table_get on_table_set",
        "test_the_words_of_an_app": "on_web_request_end on_web_request_start",
    },
}
INNER: Mapping[str, str] = {
    "app": "BootStrategy FlowControlQueue SCAN_CATEGORIES Settings Worker assignor client_only configured "
    "consumer_generation_id finalized flow_control in_recovery in_transaction in_worker label "
    "logger on_first_start on_init_dependencies on_init_extra_service on_rebalance_end "
    "on_rebalance_return on_rebalance_start on_start on_started on_started_init_extra_services "
    "on_started_init_extra_tasks on_started_init_web_server on_stop on_webserver_init "
    "producer_only producer_transport rebalancing rebalancing_count shortlabel topics tracer "
    "transport unassigned web_server_driver_version web_server_url worker_init "
    "worker_init_post_autodiscover",
    "stream": "active_partitions clone concurrency_index derive_topic enable_acks info join_strategy logger "
    "mundane_level on_start on_stop outbox prefix stop task_owner",
    "agent": "actor_from_stream actor_tracebacks cancel channel_iterator logger on_init_dependencies on_start "
    "on_stop supervisor",
    "topic": "clone decode deliver has_prefix maybe_declare on_decode_error on_key_decode_error on_stop_iteration "
    "on_value_decode_error partitions pattern prepare_headers prepare_key prepare_value queue "
    "subscriber_count",
    "event": "acked",
    "table": "WindowWrapper clone is_global label logger shortlabel on_start on_window_close",
    "window": "Window",
    "windowed table": "ValueType key_index_table on_del_key on_set_key",
    "windows of a key": "items keys values",
    "option of a record": "defaults descriptors fieldpos fields fieldset has_personal_fields has_secret_fields "
    "has_sensitive_fields has_tagged_fields optionalset personal_fields secret_fields "
    "sensitive_fields tagged_fields",
    "sensor": "logger",
}


def works(kind: str) -> list[str]:
    """The words of a kind that work."""
    return sorted(word for words in WORKS.get(kind, {}).values() for word in words.split())


def table() -> str:
    """The table of the page."""
    return "\n".join(_rows())


def _rows() -> Iterator[str]:
    yield "| what | works | refused: use instead |"
    yield "|---|---|---|"
    for kind in WORDS:
        by_reason: dict[str, list[str]] = {}
        for word, instead in sorted(REFUSED.get(kind, {}).items()):
            by_reason.setdefault(instead, []).append(word)
        refused = [f"{_code(words)}: {instead}" for instead, words in by_reason.items()]
        yield f"| {kind} | {_code(works(kind))} | {'<br>'.join(refused).replace('|', '&#124;')} |"


def _code(words: list[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def page() -> str:
    """The page, with the table."""
    text = PAGE.read_text()
    before, _, rest = text.partition(_BEGIN)
    return f"{before}{_BEGIN}\n\n{table()}\n\n{_END}{rest.partition(_END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE} written\n")
