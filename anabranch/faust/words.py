"""Words of Faust that are refused, each by its name, with what to use instead.

They can't be exactly once, or belong to Faust's own Kafka side, of which no part runs. All other words work.
`tests/faust/words.py` has the words that work; a test compares both with all that Faust has.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from anabranch.errors import InvalidArgument

_JOIN = "keep one side in an app.Table, in an agent that reads both topics; or join() of anabranch.Processor"
_ASK = "send to a topic, and read the answers from another one"
_GLOBAL = (
    "a row belongs to the task of its key: send to a topic with that key, or use replica() of "
    "anabranch.Processor"
)
_KAFKA = "no part of Faust's own Kafka side runs; streams are read and written by anabranch"
_ACK = "an event is consumed with the commit that holds its effects"
_PLACE = "a stream places events by key, in a commit"
_STREAM = "streams are made by `anabranch stream create`"
_INTERNAL = "it is a part of Faust's own streams and tables, which do not run"
_OWN = "the app has classes of its own"
_STATE = "tables are stores of a processor: their rows are there before the first event"
_COMMIT = "anabranch commits; use App(commit_interval=, cut_bytes=)"
_CONNECT = "use App(bootstrap=, connect={...}), as of anabranch.connect"
_OUTSIDE = "streams are read by agents: decorate a function with @app.agent(topic)"
_READ = "`anabranch processor get` reads stores"


def _all(words: str, instead: str) -> dict[str, str]:
    return dict.fromkeys(words.split(), instead)


REFUSED: Mapping[str, Mapping[str, str]] = {
    "app": {
        "stream": _OUTSIDE,
        **_all("GlobalTable SetGlobalTable", _GLOBAL),
        "SetTable": "use app.Table(default=list), with a list without repetitions as value",
        "channel": "an event in memory is lost with the process: name a stream, app.topic('scope/name')",
        "LiveCheck": "it samples by Kafka topics of its own; test with a broker, as docs/testing.md says",
        **_all("table_route topic_route router", _READ),
        **_all(
            "commit start_client maybe_start_client maybe_start_producer consumer producer create_event",
            _KAFKA,
        ),
    },
    "signal": _all(
        "on_partitions_assigned on_partitions_revoked on_rebalance_complete on_produce_message",
        "tasks move without a stop; app.engine.tasks has those of this worker",
    ),
    "setting": {
        **_all("broker broker_consumer broker_producer broker_credentials ssl_context", _CONNECT),
        **_all(
            "broker_api_version broker_check_crcs broker_client_id broker_heartbeat_interval "
            "broker_max_poll_interval broker_max_poll_records broker_rebalance_timeout "
            "broker_request_timeout broker_session_timeout consumer_api_version "
            "consumer_max_fetch_size consumer_group_instance_id consumer_metadata_max_age_ms "
            "consumer_connections_max_idle_ms ConsumerScheduler producer_acks "
            "producer_api_version producer_compression_type producer_linger producer_linger_ms "
            "producer_max_batch_size producer_max_request_size producer_request_timeout "
            "producer_threaded producer_metadata_max_age_ms producer_connections_max_idle_ms url",
            _CONNECT,
        ),
        **_all(
            "broker_commit_every broker_commit_interval broker_commit_livelock_soft_timeout "
            "stream_publish_on_commit processing_guarantee stream_ack_cancelled_tasks "
            "stream_ack_exceptions stream_wait_empty",
            _COMMIT,
        ),
        "consumer_auto_offset_reset": "use App(start=)",
        "producer_partitioner": _PLACE,
        **_all("reply_create_topic reply_expires reply_to reply_to_prefix", _ASK),
        **_all(
            "store table_cleanup_interval table_key_index_size table_standby_replicas "
            "recovery_consistency_check stream_recovery_delay store_check_exists "
            "crash_app_on_aerospike_exception aerospike_retries_on_exception "
            "aerospike_sleep_seconds_between_retries_on_exception TableManager",
            "tables are stores of a processor: App(folder=, standby=)",
        ),
        **_all("topic_allow_declare topic_replication_factor topic_disable_leader", _STREAM),
        **_all(
            "stream_buffer_maxsize stream_processing_timeout",
            "App(cut_bytes=) bounds what is in memory",
        ),
        "agent_supervisor": "what failed is done again: App(retries=, dead_letter=)",
        "cython_optimizations": "agents read by anabranch",
        **_all(
            "version id_format",
            "the processor's name is the app's: give it another name, with new state",
        ),
        **_all("web_router_enabled web_tables_enabled", _READ),
        "web_in_thread": "agents and pages share one loop",
        **_all(
            "Agent Event Stream Table SetTable GlobalTable SetGlobalTable Topic PartitionAssignor "
            "LeaderAssignor Router",
            _OWN,
        ),
    },
    "app.topic": {
        "pattern": "name the streams",
        **_all("partitions retention compacting deleting replicas config internal", _STREAM),
        "acks": _ACK,
        "maxsize": "App(cut_bytes=) bounds what is in memory",
        "has_prefix": _STREAM,
        "loop": "the app has one loop",
    },
    "app.agent": {
        "isolated_partitions": "use concurrency=: n actors share the keys, each in order",
        "supervisor_strategy": "what failed is done again: App(retries=, dead_letter=)",
        "use_reply_headers": _ASK,
    },
    "app.Table": {
        "partitions": "App(tasks=) decides how state is split",
        **_all("store options", "tables are stores of a processor: App(folder=)"),
        **_all(
            "changelog_topic extra_topic_configs", "the state stream keeps the rows of all tables"
        ),
        **_all(
            "on_recover recover_callbacks on_changelog_event recovery_buffer_size standby_buffer_size",
            _STATE,
        ),
        "use_partitioner": "a row belongs to the task of its key: send to a topic with that key",
        **_all("is_global synchronize_all_active_partitions", _GLOBAL),
    },
    "topic.send": {
        "partition": _PLACE,
        "callback": "an event has no offset before the commit; after the commit nothing is called",
    },
    "stream": {
        **_all("noack ack noack_take", _ACK),
        **_all(
            "combine join left_join inner_join outer_join __and__ contribute_to_stream",
            _JOIN,
        ),
        **_all("remove_from_stream on_merge throw", _INTERNAL),
    },
    "plain topic": {
        "send": "no commit writes it: name a stream, scope/name; `anabranch bridge` copies it to a topic"
    },
    "event": {"ack": _ACK},
    "agent": {
        "stream": _OUTSIDE,
        **_all("ask ask_nowait map kvmap join kvjoin", _ASK),
        "test_context": "test with a broker, as docs/testing.md says",
        **_all(
            "on_isolated_partitions_assigned on_isolated_partitions_revoked "
            "on_shared_partitions_assigned on_shared_partitions_revoked on_partitions_assigned "
            "on_partitions_revoked clone",
            _INTERNAL,
        ),
    },
    "topic": {
        "stream": _OUTSIDE,
        "send_soon": "await topic.send(…)",
        **_all("publish_message as_future_message", "await topic.send(…)"),
        **_all("declare derive derive_topic", _STREAM),
        **_all("put get empty throw clone_using_queue", _INTERNAL),
    },
    "table": {
        **_all(
            "join left_join inner_join outer_join combine __and__ contribute_to_stream remove_from_stream",
            _JOIN,
        ),
        **_all(
            "on_recover on_recovery_completed call_recover_callbacks on_changelog_event "
            "on_rebalance need_active_standby_for persisted_offset apply_changelog_batch "
            "send_changelog changelog_topic changelog_topic_name partition_for_key data info "
            "on_key_get on_key_set on_key_del on_clear",
            _STATE,
        ),
        "reset_state": "`anabranch processor reset` begins from the inputs",
    },
    "windowed table": {"on_recover": _STATE},
    "command": {
        "livecheck": "test with a broker, as docs/testing.md says",
        "reset": "`anabranch processor reset` begins from the inputs",
    },
    "window": {"SlidingWindow": "use sliding() of anabranch.Processor"},
    "sensor": _all(
        "on_commit_initiated on_commit_completed on_assignment_start on_assignment_error "
        "on_assignment_completed on_rebalance_start on_rebalance_return on_rebalance_end "
        "on_topic_buffer_full on_send_error on_threaded_producer_buffer_processed",
        "Faust's consumer and producer do not run; `anabranch processor describe` has positions and lag",
    ),
}


# Faust's own agents call these. Their streams are refused when a program reads them outside of an agent.
_CALLED = {"stream"}


def refuse(what: str, instead: str) -> NoReturn:
    """Refuse a word of Faust. Raises: InvalidArgument."""
    raise InvalidArgument(f"{what} does not work on anabranch: {instead}")


def refuse_options(kind: str, options: Iterable[str]) -> None:
    """Refuse these options of a call. Raises: InvalidArgument, TypeError (Faust has no such option)."""
    for option in options:
        instead = REFUSED[kind].get(option)
        if instead is None:
            raise TypeError(f"{kind}() has no option {option!r}")
        refuse(f"{kind}({option}=)", instead)


def refusing(kind: str, base: type) -> Callable[[type], type]:
    """Decorate a class that takes the place of ``base``, so that its refused methods and properties raise.

    Not those that the class has itself.
    """

    def refused(name: str, instead: str) -> Any:
        def call(*_: Any, **__: Any) -> NoReturn:
            refuse(f"{kind}.{name}", instead)

        return call if callable(inspect.getattr_static(base, name, call)) else property(call)

    def decorate(found: type) -> type:
        for name in REFUSED[kind].keys() - vars(found).keys() - _CALLED:
            setattr(found, name, refused(name, REFUSED[kind][name]))
        return found

    return decorate


def check_sensor(sensor: object) -> None:
    """Raise `InvalidArgument` if a class of the program has a method for what never happens."""
    for of in type(sensor).__mro__:
        if of.__module__.partition(".")[0] in ("faust", "mode"):
            return
        for name in REFUSED["sensor"].keys() & vars(of).keys():
            refuse(f"{of.__name__}.{name}", REFUSED["sensor"][name])


_CALLS = {
    ("topic", "send"): "topic.send",
    ("app", "send"): "topic.send",
    ("agent", "send"): "topic.send",
    ("agent", "cast"): "topic.send",
    ("event", "send"): "topic.send",
    ("event", "forward"): "topic.send",
    ("app", "topic"): "app.topic",
    ("app", "Table"): "app.Table",
}


def _parsed(source: str) -> ast.Module:
    """CPython 3.11 counts the depth of all threads together (gh-106905): a parse may fail while another runs."""
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)


def check_function(
    call: Callable[..., Any], kind_of: Callable[[object], str | None], *, stream: bool = False
) -> None:
    """Raise `InvalidArgument` if a function's code has a refused word, so that it is not found while events come.

    ``kind_of``: the kind of an object. ``stream``: whether the first argument is a stream. Words of objects whose
    names the function does not get from outside are found when they are called.
    """
    if not hasattr(call, "__code__"):
        return
    try:
        tree = _parsed(textwrap.dedent(inspect.getsource(call)))
    except (OSError, TypeError, SyntaxError):
        return  # without a source, the words are refused when they are called
    kinds = _kinds_of_names(call, kind_of, tree, stream=stream)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            kind = kinds.get(node.value.id)
            if kind is not None and node.attr in REFUSED.get(kind, {}):
                refuse(f"{kind}.{node.attr} in {call.__qualname__}", REFUSED[kind][node.attr])
        if isinstance(node, ast.Call):
            _check_call(call, node, kinds)


def _check_call(call: Callable[..., Any], node: ast.Call, kinds: Mapping[str, str]) -> None:
    if not (isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)):
        return
    kind = kinds.get(node.func.value.id, "")
    options = _CALLS.get((kind, node.func.attr))
    first = node.args[0] if node.args else None
    if (kind, node.func.attr) == ("app", "send") and isinstance(first, ast.Constant):
        name = str(first.value)
        if "/" not in name:
            refuse(f"app.send({name!r}) in {call.__qualname__}", REFUSED["plain topic"]["send"])
    for option in node.keywords:
        value = option.value
        if options is None or option.arg is None or option.arg not in REFUSED[options]:
            continue
        if not (isinstance(value, ast.Constant) and value.value is None):
            refuse(f"{options}({option.arg}=) in {call.__qualname__}", REFUSED[options][option.arg])


def _kinds_of_names(
    call: Callable[..., Any],
    kind_of: Callable[[object], str | None],
    tree: ast.AST,
    *,
    stream: bool,
) -> dict[str, str]:
    code = call.__code__
    outer = {name: found for name, found in call.__globals__.items() if name in _names(tree)}
    for name, cell in zip(code.co_freevars, call.__closure__ or (), strict=True):
        try:
            outer[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    kinds = {name: kind for name, found in outer.items() if (kind := kind_of(found)) is not None}
    bound = _bound_names(tree)
    for name in (*code.co_varnames, *code.co_cellvars, *bound):
        kinds.pop(name, None)
    if stream and code.co_argcount and bound[given := code.co_varnames[0]] == 1:
        kinds[given] = "stream"
        events = Counter(
            node.target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.AsyncFor) and isinstance(node.target, ast.Name)
            if ast.unparse(node.iter).startswith(f"{given}.")
            if ast.unparse(node.iter).endswith(".events()")
        )
        kinds |= {name: "event" for name, count in events.items() if bound[name] == count}
    return kinds


def _bound_names(tree: ast.AST) -> Counter[str]:
    """How often a name is bound, also in functions, lambdas and comprehensions inside, where it is another one."""
    return Counter(
        node.arg if isinstance(node, ast.arg) else node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
    )


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
