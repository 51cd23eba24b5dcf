"""The options of a controller at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from anabranch.core import defaults, limits
from anabranch.core.decisions.turn import DAY_MS
from anabranch.core.legal_names import OPEN_LANE, check_lane
from anabranch.errors import InvalidArgument
from anabranch.topics.names import DEFAULT_PREFIX


def parse_place(text: str) -> tuple[str, int, int]:
    """(lane, partition, offset) of ``LANE/PARTITION:OFFSET``; without a lane, of `open`. `InvalidArgument`."""
    lane, slash, place = text.rpartition("/")
    partition, _, offset = place.partition(":")
    if not (partition.isascii() and partition.isdigit() and offset.isascii() and offset.isdigit()):
        raise InvalidArgument(f"{text!r} is not the place of a command: give LANE/PARTITION:OFFSET")
    return check_lane(lane) if slash else OPEN_LANE, int(partition), int(offset)


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Options of `anabranch controller`.

    ``data_dir`` holds the RocksDB tables, one folder a control partition; they can be deleted and are rebuilt
    from the log. Times in seconds.
    ``session_timeout_s``: how long after a SIGKILL another controller takes over.
    ``max_staged_bytes``: of open transactions in journals, before new ones are refused.
    ``max_message_bytes``: asked for of the topics of status, replies and histories when they are made.
    ``chunk_bytes``: a bigger commit is carried aside in such chunks. ``collate_s``: a stream rolls at most once
    in this time. ``move_bytes``: unneeded bytes that an old open one may keep in a journal before it is moved.
    ``lost_after_s``: how long a stream waits for a topic that is not found, before it is given up.
    ``max_streams``, ``max_partitions`` (with those of journals): of a control partition.
    ``max_clock_skew_s``: how far ahead of the clock times that clients have seen may be. ``clock_error_ms``: the
    most that any controller's clock differs from true time; commit wait needs it.
    ``skip_commands``: as LANE/PARTITION:OFFSET, commands that are set aside instead of being tried.
    ``lanes_only``: the lane `open` is not served. ``trusts_open``: it may scale and set series from the start, and
    has no quotas.
    ``status_file``: where to write, as JSON, which control partitions this process leads. ``http``: HOST:PORT of
    `/metrics`, `/live` and `/ready`. ``log_json``: the log as JSON, a document a line.
    """

    bootstrap: str
    data_dir: Path
    prefix: str = DEFAULT_PREFIX
    control_partitions: int = 1
    replication_factor: int = -1
    session_timeout_s: float = 6.0
    retention_s: float = 7 * DAY_MS / 1000
    max_open: int = 100_000
    max_streams: int = 10_000
    max_partitions: int = 5_000
    max_staged_bytes: int = 64 << 30
    chunk_bytes: int = 16 << 20
    max_message_bytes: int = limits.RECORD.value
    collate_s: float = 0.2
    move_bytes: int = 256 << 20
    lost_after_s: float = 30.0
    native_timeout_s: float = 60.0
    max_clock_skew_s: float = defaults.MAX_CLOCK_SKEW_S
    clock_error_ms: int | None = None
    skip_commands: tuple[str, ...] = ()
    lanes_only: bool = False
    trusts_open: bool = False
    status_file: Path | None = None
    http: str | None = None
    log_json: bool = False
    kafka: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold secrets
