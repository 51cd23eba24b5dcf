"""`anabranch controller` and `warm`: run a controller in the foreground, and compile its code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli.options import (
    Bootstrap,
    Config,
    Json,
    Kafka,
    KafkaFile,
    LogFormat,
    Prefix,
    Verbose,
    need_bootstrap,
    option,
    parse_kafka,
)
from anabranch.cli.output import print_result
from anabranch.protocol import defaults
from anabranch.topics.names import DEFAULT_PREFIX

if TYPE_CHECKING:
    from anabranch.controller.config import ControllerOptions


# Options with another name than their field of `ControllerOptions`.
RENAMED = {
    "session_timeout_s": "--session-timeout",
    "retention_s": "--retention",
    "collate_s": "--collate",
    "lost_after_s": "--lost-after",
    "native_timeout_s": "--native-timeout",
    "max_clock_skew_s": "--max-clock-skew",
    "skip_commands": "--skip-command",
    "prefix": "--cluster-prefix",
}


def _seconds(field: str, least: float, text: str) -> Any:
    """The option of a field in seconds."""
    return typer.Option(RENAMED[field], min=least, metavar="SECONDS", help=text)


@dataclass(frozen=True)
class AskedOfBrokers:
    """The options of `anabranch controller` on which its needs of brokers depend; `doctor --broker` has them
    too."""

    control_partitions: Annotated[
        int, option("", "Control partitions of a new cluster.", min=1, max=65_536)
    ] = 1
    replication_factor: Annotated[
        int, option("", "Replicas of new topics; -1: the broker's default.")
    ] = -1
    session_timeout_s: Annotated[
        float,
        _seconds(
            "session_timeout_s", 1.0, "The time from a crash until another controller takes over."
        ),
    ] = 6.0
    max_message_bytes: Annotated[
        int,
        option(
            "",
            "The largest message of new status, reply and history topics, if brokers allow it.",
            min=4 << 20,
            max=64 << 20,
        ),
    ] = 16 << 20
    native_timeout_s: Annotated[
        float, _seconds("native_timeout_s", 1.0, "The time limit of a native transaction.")
    ] = 60.0


@dataclass(frozen=True)
class Given(AskedOfBrokers):
    """The options of `anabranch controller`, with the names of `ControllerOptions`."""

    data_dir: Annotated[
        Path,
        option(
            "DIR",
            "The folder of this controller's status tables; it is rebuilt if deleted.",
        ),
    ] = Path("anabranch-data")
    retention_s: Annotated[
        float,
        _seconds("retention_s", 1.0, "How long outcomes are kept."),
    ] = defaults.OUTCOME_RETENTION_S
    max_open: Annotated[int, option("", "The most open transactions.", min=1)] = 100_000
    max_streams: Annotated[int, option("", "The most streams of a control partition.", min=1)] = (
        10_000
    )
    max_partitions: Annotated[
        int, option("", "The most partitions of streams and journals together.", min=2)
    ] = 5_000
    max_uncommitted_bytes: Annotated[
        int,
        option(
            "",
            "The most uncommitted bytes; beyond them new transactions are refused.",
            min=1,
        ),
    ] = 64 << 30
    chunk_bytes: Annotated[
        int, option("", "The size of a chunk; larger commits become staged merges.", min=1)
    ] = 16 << 20
    collate_s: Annotated[
        float,
        _seconds(
            "collate_s",
            0.0,
            "The least time between two rolling commits of a stream, which are combined.",
        ),
    ] = 0.2
    move_bytes: Annotated[
        int,
        option(
            "",
            "The most bytes of a journal that an old transaction keeps until its events are moved forward.",
            min=1,
        ),
    ] = 256 << 20
    lost_after_s: Annotated[
        float,
        _seconds(
            "lost_after_s",
            0.0,
            "How long a stream waits for a missing topic before it is LOST.",
        ),
    ] = 30.0
    max_clock_skew_s: Annotated[
        float,
        _seconds(
            "max_clock_skew_s",
            0.0,
            "How far a client's timestamp may be ahead of the controller's clock.",
        ),
    ] = 10.0
    clock_error_ms: Annotated[
        int | None,
        option(
            "",
            "The most that a controller's clock differs from true time; for commit wait.",
            min=0,
        ),
    ] = None
    skip_commands: Annotated[
        list[str] | None,
        typer.Option(
            RENAMED["skip_commands"],
            metavar="[LANE/]PARTITION:OFFSET",
            help="Quarantine this command without trying it; by default in the lane `open`. Repeatable.",
        ),
    ] = None
    lanes_only: Annotated[
        bool,
        option(
            "--lanes-only",
            "Don't serve the lane `open`.",
        ),
    ] = False
    trusts_open: Annotated[
        bool,
        option(
            "--trusts-open",
            "Let the lane `open` scale streams and set series, without quotas.",
        ),
    ] = False
    status_file: Annotated[
        Path | None,
        option("FILE", "A JSON file with the control partitions of which this process is leader."),
    ] = None
    http: Annotated[
        str | None,
        option("HOST:PORT", "Serve /metrics (Prometheus), /live and /ready here."),
    ] = None
    log_json: Annotated[bool, option("--log-json", "The same as --log-format json.")] = False
    log_format: LogFormat = "text"
    bootstrap: Bootstrap = None
    prefix: Prefix = DEFAULT_PREFIX
    kafka: Kafka = field(default=None, repr=False)  # may hold secrets
    kafka_file: KafkaFile = None
    config: Config = None
    verbose: Verbose = False


def command(given: Given) -> None:
    """Run a controller until Ctrl-C or SIGTERM.

    Run two or more on different machines: when one ends, another takes over.
    """
    from anabranch.controller.config import ControllerOptions
    from anabranch.controller.service import run_controller

    names = [each.name for each in fields(ControllerOptions)]
    values = {name: getattr(given, name) for name in names} | {
        "bootstrap": need_bootstrap(given.bootstrap),
        "skip_commands": tuple(given.skip_commands or ()),
        "log_format": "json" if given.log_json else given.log_format,
        "kafka": parse_kafka(given.kafka, file=given.kafka_file, config=given.config),
    }
    raise typer.Exit(run_controller(ControllerOptions(**values)))


def warm(json: Json = False, verbose: Verbose = False) -> None:
    """Compile all machine code ahead of time, for example while an image is built.

    A process that finds the code starts half a minute sooner.
    """
    from anabranch.batches import columns_read, columns_write, framing
    from anabranch.batches.kernels import parts as kernel_parts
    from anabranch.reading import commit_columns as commits

    for part in (framing, columns_read, columns_write, commits):
        part.warm()
    folders = sorted(kernel_parts.kept_in)
    line = f"compiled code is in {', '.join(folders) or 'no folder'}"
    print_result({"folders": folders}, line, as_json=json)


def arguments_of(options: ControllerOptions) -> Sequence[str]:
    """The arguments of `anabranch controller` for these options."""
    arguments = ["controller"]
    for each in fields(options):
        option = RENAMED.get(each.name, "--" + each.name.replace("_", "-"))
        value = getattr(options, each.name)
        if isinstance(value, Mapping):
            value = tuple(f"{name}={setting}" for name, setting in value.items())
        for one in value if isinstance(value, tuple) else (value,):
            if one is True:
                arguments.append(option)
            elif one is not None and one is not False:
                arguments += [option, str(one)]
    return arguments
