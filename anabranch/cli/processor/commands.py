"""`anabranch processor`: list, describe, release, reset and delete processors, and look into their stores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

from anabranch.cli.errors import NotFound
from anabranch.cli.options import App, ClusterOptions, Yes, argument, confirm, option
from anabranch.cli.output import (
    bytes_document,
    count_of,
    lag_document,
    print_json,
    print_line,
    print_result,
    print_table,
    time_text,
)
from anabranch.cli.processor import run
from anabranch.cli.read import moment_of
from anabranch.cli.stream.commands import segment_name
from anabranch.core.hybrid_time import to_ms, to_text
from anabranch.core.legal_names import is_plain
from anabranch.errors import InvalidArgument

if TYPE_CHECKING:
    from anabranch.reading.tasks.lag import InputLag, Lag
    from anabranch.schemas.records import ProcessorInfo, TaskInfo, TaskPosition

app = App(
    no_args_is_help=True,
    help="Run, list, describe, reset and delete processors; read their stores.",
)
Name = Annotated[str, argument("SCOPE/PROCESSOR", "The processor.")]


app.command("run")(run.command)


@app.command("list")
def list_processors(
    options: ClusterOptions,
    scope: Annotated[str, argument("SCOPE", "The scope.")],
) -> None:
    """List the processors of a scope: tasks, inputs, who has them, their last commits, and how far they are behind.

    The lag of an input is that of the task that stands lowest, as `describe` counts it. The last commit is the
    oldest one of all tasks' last ones, of those that ever committed.
    """
    with options.client() as client:
        infos = [client.processor(one.processor) for one in client.processors(scope)]
        documents = [_summary(info, client.lag(info)) for info in infos]
    if options.json:
        print_json({"processors": documents})
        return
    print_table(
        "Processors",
        (
            "processor",
            "tasks",
            "inputs",
            "held",
            "holders",
            "oldest last commit",
            "events behind",
            "seconds behind",
        ),
        (
            (
                one["processor"],
                one["tasks"],
                ", ".join(each["stream"] for each in one["inputs"]),
                one["held"],
                ", ".join(one["holders"]) or None,
                one["oldest_last_commit"],
                ", ".join(_events(each) for each in one["inputs"]),
                max((each["seconds_behind"] or 0.0 for each in one["inputs"]), default=0.0),
            )
            for one in documents
        ),
    )


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
    if options.json:
        positions = [_position(*each) for each in _stands(lags)]
        more = {"stores": info.stores, "incarnation": info.incarnation, "resets": info.resets}
        more |= {"held_by": tasks, "positions": positions}
        print_json(_summary(info, lags) | more)
        return
    print_table(
        f"{processor}: {count_of(info.task_count, 'task')}",
        ("task", "holder", "since", "sequence", "last commit", "in progress"),
        (tuple(task.values()) for task in tasks),
    )
    print_table(
        "Positions",
        (
            "input",
            "tasks",
            "history offset",
            "committed at",
            "in it",
            "events behind",
            "seconds behind",
        ),
        (_position_row(*each) for each in _stands(lags)),
    )
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
        tenure = client.take(processor, task or None)
        client.release(tenure)
    tasks = sorted(tenure.tasks)
    told = f"{processor}: {count_of(len(tasks), 'task')} released"
    print_result({"processor": processor, "tasks": tasks}, told, as_json=options.json)


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
    start: str | int | datetime | None = to
    if to is not None and to not in ("begin", "end"):
        moment = moment_of(to, "--to")
        start = "end" if moment is None else moment
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
        told = {"processor": processor, "store": store, "key": key}
        print_json(told | bytes_document(value=value))
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
    starts = [(one.stream, one.record, time_text(to_ms(one.timestamp))) for one in info.inputs]
    if as_json:
        documents = [dict(zip(("input", "record", "behind"), one, strict=True)) for one in starts]
        print_json({"processor": info.processor, "tasks": info.task_count, "starts": documents})
        return
    columns = ("input", "history offset", "behind what was committed at")
    print_table(info.processor, columns, starts)


def _summary(info: ProcessorInfo, lags: Sequence[InputLag]) -> dict[str, Any]:
    commits = [task.commit_timestamp for task in info.tasks if task.commit_timestamp]
    return {
        "processor": info.processor,
        "tasks": info.task_count,
        "inputs": [
            {
                "stream": lag.stream,
                **lag_document(None if lag.trouble else lag.most),
                "trouble": lag.trouble,
            }
            for lag in lags
        ],
        "held": sum(1 for task in info.tasks if task.holder),
        "holders": sorted({task.holder for task in info.tasks if task.holder}),
        "oldest_last_commit": to_text(min(commits)) if commits else None,
    }


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
    return {"tasks": tasks, **position._asdict(), "input": stream, **lag_document(lag)}


def _position_row(
    stream: str, tasks: list[int], position: TaskPosition, lag: Lag
) -> tuple[object, ...]:
    told = lag_document(lag)
    inside = (
        f"segment {segment_name(position.segment)} to {position.offset:,}"
        if position.segment >= 0
        else None
    )
    at = None if is_plain(stream) else time_text(to_ms(position.timestamp))
    return stream, ranges(tasks), position.record, at, inside, _events(told), told["seconds_behind"]


def _events(told: dict[str, Any]) -> str:
    if told["events_behind"] is None:
        return "?"
    return f"{'' if told['exact'] else '~'}{told['events_behind']:,}"


def ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in found)
