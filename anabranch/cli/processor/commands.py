"""`anabranch processor`: list, describe, release, reset and delete processors, and look into their stores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from anabranch.cli.errors import NotFound
from anabranch.cli.options import (
    App,
    ClusterOptions,
    Scope,
    Yes,
    argument,
    confirm,
    option,
    start_of,
)
from anabranch.cli.output import (
    Column,
    Row,
    print_json,
    print_line,
    print_result,
    print_table,
    show,
)
from anabranch.cli.processor import run
from anabranch.core.hybrid_time import to_ms, to_text
from anabranch.core.legal_names import is_plain
from anabranch.errors import InvalidArgument
from anabranch.presentation.rows import bytes_fields, lag_fields, lag_text, processor_row
from anabranch.presentation.words import count_of, segment_name, time_text

if TYPE_CHECKING:
    from anabranch.reading.group_lag import InputLag, Lag
    from anabranch.schemas.records import ProcessorInfo, TaskInfo, TaskPosition

app = App(
    no_args_is_help=True,
    help="Run, list, describe, reset and delete processors; read their stores.",
)
Name = Annotated[str, argument("SCOPE/PROCESSOR", "The processor.")]


app.command("run")(run.run)


@app.command("list")
def list_processors(
    options: ClusterOptions,
    scope: Scope,
) -> None:
    """List the processors of a scope: tasks, inputs, who has them, their last commits, and how far they are behind.

    The lag of an input is that of the task that stands lowest, as `describe` counts it. The last commit is the
    oldest one of all tasks' last ones, of those that ever committed.
    """
    with options.client() as client:
        infos = [client.processor(one.processor) for one in client.processors(scope)]
        rows = [processor_row(info, client.lag(info)) for info in infos]
    show("processors", rows, _COLUMNS, as_json=options.json)


@app.command("describe")
def describe(options: ClusterOptions, processor: Name) -> None:
    """Show a processor's tasks: who has each, since when, its last commit, its positions, and how far it is behind.

    Events behind: the committed events of the whole input, of all tasks' keys, in the commits from the position on;
    a commit that is consumed in part counts whole. Behind more than 10,000 records of the input's history, and in
    a plain topic, offsets are counted instead, so the markers between events, too: `~`. Seconds behind: the age of
    the oldest of these commits, or of the first record. A task without events of its own moves with its worker's
    commits, once in 10 s.
    """
    with options.client() as client:
        info = client.processor(processor)
        lags = client.lag(info)
    tasks = [_task(task) for task in info.tasks]
    positions = [_position(*each) for each in _stands(lags)]
    if options.json:
        more = {"stores": info.stores, "incarnation": info.incarnation, "resets": info.resets}
        more |= {"held_by": tasks, "positions": positions}
        print_json(processor_row(info, lags) | more)
        return
    columns = ("task", "holder", "since", "sequence", "last_commit", "in_progress")
    print_table(f"{processor}: {count_of(info.task_count, 'task')}", tasks, columns)
    print_table("Positions", positions, _POSITION_COLUMNS)
    print_line(f"stores: {', '.join(info.stores) or 'none'}; resets: {info.resets:,}")
    for lag in lags:
        if lag.trouble:
            print_line(f"{lag.stream}: {lag.trouble}")


@app.command("release")
def release(
    options: ClusterOptions,
    processor: Name,
    task: Annotated[
        list[int] | None, option("--task -t", "Only this task. May be repeated.", min=0)
    ] = None,
    yes: Yes = False,
) -> None:
    """Take tasks from those who have them, and give them up: another worker may take them.

    For a worker that hangs and can't be reached. Nothing that it sends commits any more; what was decided before is
    merged.
    """
    connecting = options.client()
    confirm(f"Those who have these tasks of {processor} lose them.", yes=yes)
    with connecting as client:
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
            "Where it begins again; TIME, ISO 8601 or a commit timestamp: behind what was committed by then.",
        ),
    ] = None,
    keep_state: Annotated[bool, option("--keep-state", "Keep what its stores have.")] = False,
    yes: Yes = False,
) -> None:
    """Let a processor begin again: all who have its tasks lose them, and its stores are empty.

    Streams keep what it has written. With --keep-state its stores stay, too: what is read again is counted
    again. Then without --to its positions stay, and only its workers lose their tasks.
    """
    start = None if to is None else start_of(to, "--to")
    connecting = options.client()
    if to is None and not keep_state:
        raise InvalidArgument("say where it begins: --to begin, --to end or --to TIME")
    stores = "keeps its stores" if keep_state else "loses all that its stores have"
    begins = f", and reads its inputs again from {to} on" if to else ""
    confirm(f"{processor} {stores}{begins}.", yes=yes)
    with connecting as client:
        info = client.reset_processor(processor, start, keep_state=keep_state)
    _show_starts(info, as_json=options.json)


@app.command("delete")
def delete(options: ClusterOptions, processor: Name, yes: Yes = False) -> None:
    """Take a processor away, with all that its stores have. Streams keep what it has written."""
    connecting = options.client()
    confirm(f"{processor} will be deleted, and all that its stores have.", yes=yes)
    with connecting as client:
        client.delete_processor(processor)
    print_result({"processor": processor}, f"{processor} is deleted", as_json=options.json)


@app.command("get")
def get(
    options: ClusterOptions,
    processor: Name,
    store: Annotated[str, argument("STORE", "The store's name.")],
    key: Annotated[str, argument("KEY", "The key, as text.")],
    task: Annotated[int | None, option("--task", "Of a local store: which task's.", min=0)] = None,
) -> None:
    """Show the committed value of a key in a processor's store. An absent key is exit code 2.

    The whole partition of the key's task in the state topic is read, once: fine for a look, too slow to serve
    requests.
    """
    with options.client() as client:
        value = client.stored(processor, store, key.encode(), task)
    if value is None:
        raise NotFound(f"{key!r} is not in the store {store} of {processor}")
    if options.json:
        asked = {"processor": processor, "store": store, "key": key}
        print_json(asked | bytes_fields(value=value))
    else:
        print_line(value.decode("utf-8", "backslashreplace"))


@app.command("import-group")
def import_group(
    options: ClusterOptions,
    processor: Name,
    group: Annotated[str, option("--group -g", "The consumer group.")],
    stream: Annotated[
        list[str] | None,
        option("--input SCOPE/STREAM", "Make the processor, with this input. May be repeated."),
    ] = None,
    tasks: Annotated[int, option("--tasks", "With --input: how many tasks; a power of two.")] = 16,
    yes: Yes = False,
) -> None:
    """Let a processor begin where a consumer group of Kafka's stands in its inputs' own topics.

    With --input it is made; else it is reset, and its stores are empty. The processor begins with the first commit
    of each input that the group has not read whole: nothing is left out, some events may come again. Stop the
    group's members first.
    """
    connecting = options.client()
    if not stream:
        confirm(f"{processor} loses all that its stores have, and begins elsewhere.", yes=yes)
    with connecting as client:
        info = client.import_group(processor, group, stream or (), tasks)
    _show_starts(info, as_json=options.json)


def _show_starts(info: ProcessorInfo, *, as_json: bool) -> None:
    rows = [
        {"input": one.stream, "record": one.record, "behind": time_text(to_ms(one.timestamp))}
        for one in info.inputs
    ]
    if as_json:
        print_json({"processor": info.processor, "tasks": info.task_count, "starts": rows})
        return
    columns = (
        "input",
        Column("history offset", "record"),
        Column("after what was committed at", "behind"),
    )
    print_table(info.processor, rows, columns)


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
)


def _task(task: TaskInfo) -> dict[str, Any]:
    return {
        "task": task.task,
        "holder": task.holder or None,
        "since": time_text(task.taken_ms),
        "sequence": task.sequence,
        "last_commit": to_text(task.commit_timestamp) if task.commit_timestamp else None,
        "in_progress": task.in_progress.hex() if task.in_progress else None,
    }


def _stands(lags: Iterable[InputLag]) -> Iterator[tuple[str, list[int], TaskPosition, Lag]]:
    """Each place where tasks stand, with these tasks."""
    for one in lags:
        alike: dict[tuple[TaskPosition, Lag], list[int]] = {}
        for task, stands in one.tasks.items():
            alike.setdefault(stands, []).append(task)
        for (position, lag), tasks in sorted(alike.items()):
            yield one.stream, tasks, position, lag


def _position(stream: str, tasks: list[int], position: TaskPosition, lag: Lag) -> dict[str, Any]:
    return {"tasks": tasks, **position._asdict(), "input": stream, **lag_fields(lag)}


def _committed_at(row: Row) -> str | None:
    return None if is_plain(row["input"]) else time_text(to_ms(row["timestamp"]))


def _inside(row: Row) -> str | None:
    """The place inside of a commit that is consumed in part."""
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
