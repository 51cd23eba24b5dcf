"""What a controller is told at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from anabranch.core.turn import DAY_MS
from anabranch.topics.names import DEFAULT_PREFIX


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Options of `anabranch controller`.

    ``data_dir`` holds the RocksDB tables, one folder a control partition; they can be deleted and are rebuilt
    from the log. ``key_file`` None: the default place (see `keyfile`). Times in seconds.
    ``session_timeout_s``: how long after a SIGKILL another controller takes over.
    ``max_staged_bytes``: what open transactions may have in journals, before new ones are refused.
    ``chunk_bytes``: a bigger commit is carried aside in such chunks. ``collate_s``: a stream rolls at most once
    in this time. ``move_bytes``: what an old open transaction may keep in a journal before it is moved.
    ``lost_after_s``: how long a stream waits for a topic that is not found, before it is given up.
    ``status_file``: where to write, as JSON, which control partitions this process leads.
    """

    bootstrap: str
    data_dir: Path
    prefix: str = DEFAULT_PREFIX
    key_file: Path | None = None
    control_partitions: int = 1
    replication_factor: int = -1
    session_timeout_s: float = 6.0
    retention_s: float = 7 * DAY_MS / 1000
    max_open: int = 100_000
    max_staged_bytes: int = 64 << 30
    chunk_bytes: int = 16 << 20
    collate_s: float = 0.2
    move_bytes: int = 256 << 20
    lost_after_s: float = 30.0
    native_timeout_s: float = 60.0
    status_file: Path | None = None
    kafka: Mapping[str, str] = field(default_factory=dict)
