"""`anabranch processor` and `bridge`: run processors, and list, describe, release, alter, reset and delete them."""

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from anabranch import logs
from anabranch.backoff import Backoff
from anabranch.cli.errors import ChildFailed, NotFound
from anabranch.cli.options import (
    App,
    ClusterOptions,
    LogFormat,
    Scope,
    Yes,
    argument,
    confirm,
    imported,
    option,
    parse_kafka,
    start_of,
)
from anabranch.cli.output import (
    Column,
    Grid,
    Row,
    print_line,
    print_note,
    print_result,
    show,
    show_failure,
)
from anabranch.clock import SystemClock
from anabranch.errors import InvalidArgument, count_of
from anabranch.presentation.rows import (
    bytes_fields,
    bytes_text,
    lag_fields,
    lag_text,
    processor_row,
    segment_name,
    time_text,
)
from anabranch.presentation.topology import read_topology, topology_row, tree
from anabranch.protocol.hybrid_time import to_ms, to_text
from anabranch.protocol.legal_names import is_plain

if TYPE_CHECKING:
    from anabranch import Client
    from anabranch.cli.options import Target
    from anabranch.processing.app import Processor
    from anabranch.processing.operations.dead import Letter
    from anabranch.protocol.schemas.records import ProcessorInfo, TaskInfo, TaskPosition
    from anabranch.reading.committed_log import ReaderPorts
    from anabranch.reading.group_lag import InputLag, Lag


app = App(
    no_args_is_help=True,
    help="Run, list, describe, alter, reset and delete processors; read their stores.",
)
dead_app = App(
    no_args_is_help=True, help="List and show dead letters, and send them back to their inputs."
)
app.add_typer(dead_app, name="dead")
Name = Annotated[str, argument("SCOPE/PROCESSOR", "The processor.")]
Letters = Annotated[str, argument("SCOPE/STREAM", "The stream of dead letters.")]


@app.command("list")
def list_processors(
    options: ClusterOptions,
    scope: Scope,
) -> None:
    """List the processors of a scope: tasks, inputs, workers, last commits, and lags.

    An input's lag is that of its task with the lowest position. The last commit is that of the task that has not
    committed for longest; tasks without a commit do not count.
    """
    with options.client() as client:
        infos = [client.processor(one.processor) for one in client.processors(scope)]
        rows = [processor_row(info, client.lag(info)) for info in infos]
    show("processors", rows, _COLUMNS, as_json=options.json)


@app.command("describe")
def describe(options: ClusterOptions, processor: Name) -> None:
    """Draw a processor's topology, and show its tasks: the worker of each, its last commit, positions, and lag.

    Under each input, timer and closing window are its handlers, and under these the state that they use (in
    brackets) and the streams that they write (>). The program that started last has declared them.

    Lag in events counts the input's committed events from the position on; a commit that is consumed in part counts
    whole. `~` marks an estimate by offsets: for more than 10,000 history records, and for plain topics. Lag in
    seconds is the age of the oldest of these commits or records.
    """
    with options.client() as client:
        info = client.processor(processor, topology=True)
        lags = client.lag(info)
    found = read_topology(info.topology)
    tasks = [_task(task) for task in info.tasks]
    positions = [_position(*each) for each in _places(lags)]
    document = processor_row(info, lags) | {
        "stores": info.stores,
        "incarnation": info.incarnation,
        "resets": info.resets,
        "topology": None if found is None else topology_row(found),
        "held_by": tasks,
        "positions": positions,
    }
    columns = ("task", "holder", "since", "sequence", "last_commit", "in_progress")
    print_result(
        document,
        *([] if found is None else tree(found, document["inputs"])),
        Grid(f"{processor}: {count_of(info.task_count, 'task')}", tasks, columns),
        Grid("Positions", positions, _POSITION_COLUMNS),
        f"stores: {', '.join(info.stores) or 'none'}; resets: {info.resets:,}",
        *([document["trouble"]] if document["trouble"] else []),
        *(f"{lag.stream}: {lag.trouble}" for lag in lags if lag.trouble),
        as_json=options.json,
    )


@app.command("release")
def release(
    options: ClusterOptions,
    processor: Name,
    task: Annotated[
        list[int] | None, option("--task -t", "Only this task. Repeatable.", min=0)
    ] = None,
    yes: Yes = False,
) -> None:
    """End the ownership of tasks, so that another worker can take them.

    Use it for a worker that hangs and can't be reached: it can't commit any more. Decided commits are merged.
    """
    with options.client_after(
        f"The workers of these tasks of {processor} lose them.", yes=yes
    ) as client:
        ownership = client.take_tasks(processor, task or None)
        client.release_tasks(ownership)
    tasks = sorted(ownership.tasks)
    line = f"{processor}: {count_of(len(tasks), 'task')} released"
    print_result({"processor": processor, "tasks": tasks}, line, as_json=options.json)


@app.command("reset")
def reset(
    options: ClusterOptions,
    processor: Name,
    to: Annotated[
        str | None,
        option(
            "--to begin|end|TIME",
            "The new start: begin, end, or after a commit timestamp or an ISO 8601 time.",
        ),
    ] = None,
    keep_state: Annotated[bool, option("--keep-state", "Keep the contents of its stores.")] = False,
    yes: Yes = False,
) -> None:
    """Restart a processor from another position, with empty stores. Its workers lose their tasks.

    Events that it has written stay. With --keep-state its stores stay too, so events that are read again count
    twice; without --to its positions also stay.
    """
    start = None if to is None else start_of(to, "--to")
    if to is None and not keep_state:
        raise InvalidArgument("give its start: --to begin, --to end or --to TIME")
    stores = "keeps its stores" if keep_state else "loses the contents of its stores"
    begins = f", and reads its inputs again from {to} on" if to else ""
    with options.client_after(f"{processor} {stores}{begins}.", yes=yes) as client:
        info = client.reset_processor(processor, start, keep_state=keep_state)
    _show_starts(info, as_json=options.json)


@app.command("alter")
def alter(
    options: ClusterOptions,
    processor: Name,
    add: Annotated[
        list[str] | None,
        option("--add-input SCOPE/STREAM", "A stream to read, too. Repeatable; needs --from."),
    ] = None,
    drop: Annotated[
        list[str] | None,
        option("--drop-input SCOPE/STREAM", "An input to read no more. Repeatable."),
    ] = None,
    start: Annotated[
        str | None,
        option(
            "--from begin|end|TIME",
            "Where added inputs begin: begin, end, or after a commit timestamp or an ISO 8601 time.",
        ),
    ] = None,
    yes: Yes = False,
) -> None:
    """Let a processor read more inputs, or fewer. Its stores and its other positions are kept.

    Its workers lose their tasks, and stop unless their program has exactly these inputs; then start the new
    program. The command may be repeated after any failure.
    """
    if not add and not drop:
        raise InvalidArgument("give an input: --add-input or --drop-input")
    if bool(add) != (start is not None):
        raise InvalidArgument(
            "say where added inputs begin: --add-input and --from belong together"
        )
    begins = None if start is None else start_of(start, "--from")
    changes = [f"reads {', '.join(add)} from {start} on"] if add else []
    changes += [f"reads {', '.join(drop)} no more"] if drop else []
    with options.client_after(
        f"{processor} {' and '.join(changes)}; workers with another program stop.", yes=yes
    ) as client:
        info = client.alter_processor(processor, add=add or (), start=begins, drop=drop or ())
    _show_starts(info, as_json=options.json)


New = Annotated[str, argument("SCOPE/NEW", "The new name, in the same scope.")]
CopyFolder = Annotated[
    Path | None, option("DIR", "Hold the state here meanwhile (default: a temporary folder).")
]


@app.command("copy")
def copy(options: ClusterOptions, processor: Name, new: New, folder: CopyFolder = None) -> None:
    """Copy a processor, or a savepoint: a processor under a new name, with the same positions and state.

    The original continues; its workers pause for a second or so. Run the copy with a program of that name, whose
    inputs and stores are the same, and whose outputs are its own. After a failure repeat the command.
    """
    _copy(options, processor, new, folder, savepoint=False)


@app.command("savepoint")
def savepoint(
    options: ClusterOptions, processor: Name, new: New, folder: CopyFolder = None
) -> None:
    """Keep positions and state that a processor has now, under a name, until `processor delete`.

    No worker can run a savepoint: `processor copy` makes processors from it. The original continues; its workers
    pause for a second or so. After a failure repeat the command.
    """
    _copy(options, processor, new, folder, savepoint=True)


def _copy(
    options: ClusterOptions, processor: str, new: str, folder: Path | None, *, savepoint: bool
) -> None:
    from anabranch.processing.operations.copies import copy_processor

    with options.client() as client:
        info = copy_processor(client, processor, new, savepoint=savepoint, folder=folder)
    what = "a savepoint" if savepoint else "a copy"
    document = {
        "processor": new, "origin": processor, "phase": info.phase or None, "tasks": info.task_count
    }  # fmt: skip
    print_result(document, f"{new} is {what} of {processor}", as_json=options.json)


@app.command("delete")
def delete(options: ClusterOptions, processor: Name, yes: Yes = False) -> None:
    """Delete a processor and its stores. Events that it has written stay."""
    with options.client_after(f"{processor} and its stores will be deleted.", yes=yes) as client:
        client.delete_processor(processor)
    print_result({"processor": processor}, f"{processor} is deleted", as_json=options.json)


@app.command("get")
def get(
    options: ClusterOptions,
    processor: Name,
    store: Annotated[str, argument("STORE", "The store.")],
    key: Annotated[str, argument("KEY", "The key.")],
    task: Annotated[int | None, option("--task", "The task of a local store.", min=0)] = None,
    program: Annotated[
        str | None,
        option("--program MODULE:APP", "The processor's program, whose store decodes the value."),
    ] = None,
) -> None:
    """Show the committed value of a key in a processor's store. The exit code is 1 if the key has no value.

    Without --program a row is shown as it is stored: those of sessions, joins and ttl= are binary, and those of
    windows are not found. This reads the whole partition of the key's task in the state topic, so it is too slow to
    serve requests.
    """
    stores = None if program is None else _load(program).stores
    if stores is not None and store not in stores:
        raise InvalidArgument(f"{program} has no store {store!r}: {', '.join(stores) or 'none'}")
    with options.client() as client:
        value = client.stored(
            processor, store if stores is None else stores[store], key.encode(), task
        )
    if value is None:
        raise NotFound(f"the store {store} of {processor} has no {key!r}")
    document: dict[str, Any] = {"processor": processor, "store": store, "key": key}
    if stores is None:
        text = value.decode("utf-8", "backslashreplace")
        document |= bytes_fields(value=value)
    else:
        text = json.dumps(value, ensure_ascii=False, default=_text_of)
        document["value"] = json.loads(text)
    print_result(document, text, as_json=options.json)


def _text_of(value: Any) -> str:
    """A text for a value of a kind that JSON lacks."""
    return bytes_text(value) if isinstance(value, bytes) else str(value)


@dead_app.command("list")
def list_dead(
    options: ClusterOptions,
    stream: Letters,
    every: Annotated[
        bool,
        option("--all", "Also list the letters that `dead retry` has sent back or passed over."),
    ] = False,
    most: Annotated[int, option("--most N", "At most this many, the oldest.", min=1)] = 100,
) -> None:
    """List dead letters, oldest first: place, time, where the event came from, and the error. No keys or values."""
    from anabranch.processing.operations.dead import letters

    with options.client() as client:
        found = list(islice(letters(client, stream, sent=every), most + 1))
    rows = [_letter(one) for one in found[:most]]
    show("letters", rows, _LETTER_COLUMNS, as_json=options.json, title=stream)
    if len(found) > most:
        print_note(f"there are more than {most:,}: --most shows more")


@dead_app.command("show")
def show_dead(
    options: ClusterOptions,
    stream: Letters,
    place: Annotated[str, argument("PARTITION@OFFSET", "The letter, as `dead list` shows it.")],
) -> None:
    """Show one dead letter whole: its error, and the key, value and headers of the event."""
    from anabranch.processing.operations.dead import letter_at

    with options.client() as client:
        found = letter_at(client, stream, place)
    headers = [bytes_fields(name=name.encode(), value=value) for name, value in found.headers]
    data = bytes_fields(key=found.event.key, value=found.event.value)
    document = _letter(found) | data | {"headers": headers}
    lines = [f"{name}: {'' if value is None else value}" for name, value in document.items()]
    print_result(document, *lines, as_json=options.json)


@dead_app.command("retry")
def retry_dead(
    options: ClusterOptions,
    stream: Letters,
    most: Annotated[int, option("--most N", "At most this many letters.", min=1)] = 1000,
    pass_over: Annotated[
        bool,
        option(
            "--pass-over", "Pass over letters that can't be sent back, such as those of timers."
        ),
    ] = False,
    yes: Yes = False,
) -> None:
    """Send dead letters back to their inputs, oldest first, each exactly once.

    Each goes back in the commit that moves the position of the processor STREAM-retry, so the command may be
    repeated after any failure. All letters that are there when the command begins are sent, up to the first that
    can't be sent back. Handlers get the event as a new one: later events of its key have been handled before.
    """
    from anabranch.processing.operations.dead import retry

    with options.client_after(
        f"The letters of {stream}, at most {most:,}, are written to their inputs again.", yes=yes
    ) as client:
        done = retry(client, stream, most=most, pass_over=pass_over)
    document = {
        "stream": stream,
        "sent": dict(sorted(done.sent.items())),
        "passed_over": done.passed,
        "lost_commits": done.lost,
        "stopped_at": None if done.stopped is None else _letter(done.stopped),
        "more": done.more,
    }
    lines = [
        f"{name}: {count_of(count, 'letter')} sent" for name, count in sorted(done.sent.items())
    ]
    if done.passed:
        lines.append(f"{count_of(done.passed, 'letter')} passed over")
    if done.lost:
        lines.append(f"{count_of(done.lost, 'commit')} of letters deleted by retention")
    if done.stopped is not None:
        where = _letter(done.stopped)["place"]
        lines.append(
            f"the letter {where} can't be sent back ({done.stopped.obstacle}): --pass-over passes it over"
        )
    if done.more:
        lines.append("there are more: repeat the command")
    print_result(document, *(lines or ["no letters to send"]), as_json=options.json)


@app.command("import-group")
def import_group(
    options: ClusterOptions,
    processor: Name,
    group: Annotated[str, option("--group -g", "The consumer group.")],
    stream: Annotated[
        list[str] | None,
        option("--input SCOPE/STREAM", "Create the processor with this input. Repeatable."),
    ] = None,
    tasks: Annotated[
        int, option("--tasks", "With --input: the number of tasks, a power of two.")
    ] = 16,
    yes: Yes = False,
) -> None:
    """Start a processor at the offsets of a Kafka consumer group in the topics of its inputs.

    With --input the processor is created; else it is reset, with empty stores. The start is the first commit of
    each input that the group has not read completely, so some events may come again. Stop the group's members
    first.
    """
    connecting = options.client()
    if not stream:
        confirm(
            f"{processor} loses the contents of its stores, and starts at another position.",
            yes=yes,
        )
    with connecting as client:
        info = client.import_group(processor, group, stream or (), tasks)
    _show_starts(info, as_json=options.json)


def _show_starts(info: ProcessorInfo, *, as_json: bool) -> None:
    rows = [
        {"input": one.stream, "record": one.record, "behind": time_text(to_ms(one.timestamp))}
        for one in info.inputs
    ]
    columns = ("input", Column("history offset", "record"), Column("after the commit at", "behind"))
    document = {"processor": info.processor, "tasks": info.task_count, "starts": rows}
    print_result(document, Grid(info.processor, rows, columns), as_json=as_json)


_COLUMNS = (
    "processor",
    "tasks",
    Column("inputs", lambda row: [one["stream"] for one in row["inputs"]]),
    "held",
    "holders",
    "oldest_last_commit",
    Column("events behind", lambda row: ", ".join(map(lag_text, row["inputs"]))),
    Column(
        "seconds behind",
        lambda row: max((one["seconds_behind"] or 0.0 for one in row["inputs"]), default=0.0),
    ),
    "trouble",
)


def _letter(letter: Letter) -> dict[str, Any]:
    event = letter.event
    return {
        "place": f"{event.partition}@{event.offset}",
        "time": to_text(event.commit_timestamp),
        "kind": letter.kind,
        "from": letter.place,
        "error": letter.error,
        "obstacle": letter.obstacle or None,
    }


_LETTER_COLUMNS = ("place", "time", "kind", "from", "error", "obstacle")


def _task(task: TaskInfo) -> dict[str, Any]:
    return {
        "task": task.task,
        "holder": task.holder or None,
        "since": time_text(task.taken_ms),
        "sequence": task.sequence,
        "last_commit": to_text(task.commit_timestamp) if task.commit_timestamp else None,
        "in_progress": task.in_progress.hex() if task.in_progress else None,
    }


def _places(lags: Iterable[InputLag]) -> Iterator[tuple[str, list[int], TaskPosition, Lag]]:
    """Each position and lag of an input, with the tasks that have them."""
    for one in lags:
        alike: dict[tuple[TaskPosition, Lag], list[int]] = {}
        for task, place in one.tasks.items():
            alike.setdefault(place, []).append(task)
        for (position, lag), tasks in sorted(alike.items()):
            yield one.stream, tasks, position, lag


def _position(stream: str, tasks: list[int], position: TaskPosition, lag: Lag) -> dict[str, Any]:
    return {"tasks": tasks, **position._asdict(), "input": stream, **lag_fields(lag)}


def _committed_at(row: Row) -> str | None:
    return None if is_plain(row["input"]) else time_text(to_ms(row["timestamp"]))


def _inside(row: Row) -> str | None:
    """The position inside a commit that is consumed in part."""
    if row["segment"] < 0:
        return None
    return f"segment {segment_name(row['segment'])} to {row['offset']:,}"


_POSITION_COLUMNS = (
    "input",
    Column("tasks", lambda row: ranges(row["tasks"])),
    Column("history offset", "record"),
    Column("committed at", _committed_at),
    Column("in it", _inside),
    Column("events behind", lag_text),
    "seconds_behind",
)


def ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in found)


_STOP_S = 10.0
_POLL_S = 0.2
# Before a worker that was killed is started again.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


@app.command("run")
def run(
    options: ClusterOptions,
    target: Annotated[str, argument("MODULE:APP", "A module, and a processor in it.")],
    workers: Annotated[int, option("", "The number of processes.", min=1, max=256)] = 1,
    folder: Annotated[
        Path | None,
        option(
            "DIR",
            "Keep stores here for the next run (default: a temporary one).",
        ),
    ] = None,
    standby: Annotated[
        bool, option("--standby", "Keep copies of the stores of other workers' tasks.")
    ] = False,
    http: Annotated[
        str | None,
        option(
            "--http HOST:PORT",
            "Serve /metrics (Prometheus), /live and /ready here; other workers use the next ports (:0: any port).",
            show_default=False,
        ),
    ] = None,
    log_format: LogFormat = "text",
) -> None:
    """Run workers of a processor, until Ctrl-C or SIGTERM.

    Workers on several machines share the tasks, and take over from each other. A worker that is killed is started
    again. If a worker fails, for example in a handler, the command ends.
    """
    cluster = options.target()
    _load(target)  # its errors before anything is started
    if workers == 1:
        _work(target, cluster, folder, standby, http, log_format)
        return
    host, _, port = (http or "").rpartition(":")
    further = port.isdecimal() and int(port) > 0  # :0 is any port, for each
    with ExitStack() as stack:
        running = [
            _Worker(
                target,
                cluster,
                None if folder is None else folder / f"worker-{n}",
                standby,
                f"{host}:{int(port) + n}" if further else http,
                log_format,
            )
            for n in range(workers)
        ]
        for one in running:
            stack.callback(one.join)
        for one in running:
            stack.callback(one.terminate)
            one.start()
        if not options.json:
            print_line(f"{count_of(workers, 'worker')} of {target}; Ctrl-C ends them")
        while True:
            for one in running:
                one.check()
            time.sleep(_POLL_S)


class _Worker:
    """A process of a worker, which is started again when it is killed."""

    def __init__(self, *arguments: Any) -> None:
        """``arguments``: of `_work`."""
        self._arguments = arguments
        self._process: BaseProcess | None = None
        self._pauses = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, SystemClock())

    def start(self) -> None:
        spawn = multiprocessing.get_context("spawn")  # a client can't be forked
        self._process = spawn.Process(target=_work, args=self._arguments)
        self._process.start()

    def check(self) -> None:
        """Start the process again if it was killed. Raises: ChildFailed if it ended with an error."""
        process = self._process
        if process is None:
            if self._pauses.is_over:
                self.start()
            return
        if process.exitcode is None:
            return
        if process.exitcode >= 0:
            raise ChildFailed(
                f"a worker ended with exit code {process.exitcode}; its error is shown above"
            )
        pause = self._pauses.begin()
        print_note(
            f"a worker ended by signal {-process.exitcode}; it is started again in {pause:g} s"
        )
        self._process = None

    def terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def join(self) -> None:
        if self._process is not None:
            self._process.join(_STOP_S)
            if self._process.exitcode is None:
                self._process.kill()
            self._process.join()


def _work(
    target: str,
    cluster: Target,
    folder: Path | None,
    standby: bool,
    http: str | None,
    log_format: str,
) -> None:
    from anabranch.cli.errors import failure_of
    from anabranch.cli.options import connected
    from anabranch.processing.run import run_worker

    if log_format == "json":  # a process of its own has no log yet
        logs.start(log_format, logging.WARNING)
    try:
        with connected(cluster) as client:
            # A service has a log; `connected` silences it for other commands.
            logs.start(log_format, logging.WARNING)
            logging.getLogger("anabranch").setLevel(logging.WARNING)
            logging.getLogger("anabranch.processor").setLevel(logging.INFO)
            run_worker(_load(target), client, folder=folder, standby=standby, http=http)
    except Exception as error:
        if multiprocessing.parent_process() is None:
            raise
        failure = failure_of(error)
        show_failure(failure, as_json=False)
        sys.exit(failure.code)


def _load(target: str) -> Processor:
    """The processor of ``module:name``, also in the current folder. Raises: InvalidArgument."""
    from anabranch.processing.app import Processor

    found = imported(target, "a processor in it, such as delays:app")
    if isinstance(getattr(found, "program", None), Processor):
        raise InvalidArgument(
            f"{target} is a Faust app: run it with `faust -A {target} worker`, and give each worker its own "
            "--datadir and --web-port"
        )
    if not isinstance(found, Processor):
        raise InvalidArgument(f"{target} is not an anabranch.Processor: {found!r:.100}")
    found.check()
    return found


def bridge(
    options: ClusterOptions,
    topic: Annotated[str, argument("TOPIC", "The topic to read.")],
    stream: Annotated[str, option("SCOPE/STREAM", "The stream to write to, which must exist.")],
    source: Annotated[
        str | None, option("--from HOST:PORT", "The topic's cluster (default: the stream's).")
    ] = None,
    from_file: Annotated[
        Path | None, option("FILE", "The librdkafka settings of that cluster, as --kafka-file.")
    ] = None,
    group: Annotated[
        str | None,
        option("GROUP", "Start at the offsets of this Kafka consumer group (only the first time)."),
    ] = None,
    tasks: Annotated[
        int,
        option(
            "", "The most partitions that the topic will have, a power of two.", min=1, max=1024
        ),
    ] = 64,
    dead_letter: Annotated[
        str | None,
        option(
            "--dead-letter SCOPE/STREAM",
            "A stream for records that the stream does not accept (default: stop).",
        ),
    ] = None,
    once: Annotated[bool, option("--once", "Stop at the end of the topic.")] = False,
    strict: Annotated[
        bool,
        option(
            "--strict/--lossy",
            "Stop, or continue, if retention deleted records before they were copied.",
        ),
    ] = True,
    log_format: LogFormat = "text",
) -> None:
    """Copy a plain topic into a stream, each record exactly once, until Ctrl-C or SIGTERM.

    The processor STREAM-bridge commits positions with the copies. Bridges on several machines share the partitions.
    Records of native transactions are copied once these commit.
    """
    import pyarrow as pa

    from anabranch.processing.app import Processor
    from anabranch.processing.plain import Cluster, outputs_of, plain_ports
    from anabranch.processing.run import run_worker
    from anabranch.processing.worker import make_processor

    on_lost: Literal["stop", "skip"] = "stop" if strict else "skip"
    app = Processor(f"{stream}-bridge", tasks=tasks, dead_letter=dead_letter, on_lost=on_lost)
    config = parse_kafka(None, file=from_file)
    records, output = app.topic(topic, bootstrap=source, config=config), app.output(stream)

    @app.on(records, batch=True)
    def copy(batch: pa.RecordBatch) -> None:
        output.write_batch(outputs_of(batch))

    with options.client() as client:
        client.describe(stream)
        made = make_processor(client, app)
        ports = plain_ports(client, Cluster(source, config))
        if group is not None:
            _begin_at(client, ports, app.name, group, options.timeout)
        if not options.json:
            print_line(f"{topic} to {stream}, by processor {made.processor}; Ctrl-C ends it")
        is_copied = partial(_is_copied, ports, options.timeout)
        run_worker(app, client, until=is_copied if once else None)


def _begin_at(
    client: Client, ports: ReaderPorts, processor: str, group: str, timeout: float
) -> None:
    """Begin at the offsets of a consumer group, unless the processor has committed before."""
    from anabranch.processing.plain import import_group

    if not any(task.sequence for task in client.processor(processor).tasks):
        count = import_group(client, ports, processor, group, timeout)
        print_line(f"begins at the offsets of group {group}: {count_of(count, 'partition')}")


def _is_copied(ports: ReaderPorts, timeout: float, info: ProcessorInfo) -> bool:
    """Whether the processor has copied its topic to the end."""
    from anabranch.reading.group_lag import input_lags

    with closing(ports.committed_log(timeout)) as log:
        lags = input_lags(log, info, timeout)
    return not any(lag.trouble or lag.most.events for lag in lags)
