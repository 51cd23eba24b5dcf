"""The options of a controller at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from anabranch.core.decisions.turn import DAY_MS
from anabranch.errors import InvalidArgument
from anabranch.protocol import defaults, limits
from anabranch.protocol.legal_names import OPEN_LANE, check_lane
from anabranch.topics.names import DEFAULT_PREFIX


def parse_place(text: str) -> tuple[str, int, int]:
    """Lane, partition and offset from ``LANE/PARTITION:OFFSET``. Without ``LANE/``, the lane is `open`.

    Raises: InvalidArgument.
    """
    lane, slash, place = text.rpartition("/")
    partition, _, offset = place.partition(":")
    if not (partition.isascii() and partition.isdigit() and offset.isascii() and offset.isdigit()):
        raise InvalidArgument(f"{text!r} is not the place of a command: give LANE/PARTITION:OFFSET")
    return check_lane(lane) if slash else OPEN_LANE, int(partition), int(offset)


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Options of `anabranch controller`. Names that end in ``_s`` are seconds, in ``_ms`` milliseconds.

    ``data_dir``: RocksDB tables, one folder for each control partition; if deleted, they are rebuilt from the log.
    ``session_timeout_s``: the time between a SIGKILL and the takeover by another controller.
    ``max_uncommitted_bytes``: the most uncommitted bytes; above it, new transactions are refused.
    ``max_message_bytes``: the size of messages of new topics of status, replies and histories.
    ``chunk_bytes``: a bigger commit is a staged merge, in chunks of this size.
    ``collate_s``: a stream has at most one rolling commit in this time.
    ``move_bytes``: how many unneeded bytes an old open transaction may keep in a journal before its runs are moved.
    ``lost_after_s``: how long a stream waits for a topic that is not found, before it becomes LOST.
    ``max_streams``, ``max_partitions``: the most of a control partition; partitions of journals count, too.
    ``max_clock_skew_s``: how far timestamps that clients have seen may be ahead of the clock.
    ``clock_error_ms``: the most by which any controller's clock differs from true time; commit wait needs it.
    ``skip_commands``: commands to quarantine instead of trying them, as LANE/PARTITION:OFFSET.
    ``lanes_only``: don't serve lane `open`. ``trusts_open``: `open` may scale and set series from the start, and
    has no quotas.
    ``status_file``: where to write, as JSON, which control partitions this process leads.
    ``http``: HOST:PORT of `/metrics`, `/live` and `/ready`. ``log_format``: of the log, text or json.
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
    max_uncommitted_bytes: int = 64 << 30
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
    log_format: str = "text"
    kafka: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold secrets
