"""The broker's log file: a mark at each start, and its last lines for error messages."""

from __future__ import annotations

import os
import time
from pathlib import Path

TAIL_LINES = 25
_TAIL_BYTES = 64 * 1024


def mark(log: Path, text: str) -> int:
    """Append a line of ours; returns the log's size in bytes after it."""
    with log.open("ab") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} anabranch: {text}\n".encode())
        return file.tell()


def tail(log: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines (of the last 64 KiB); none if there is no file."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]


def since(log: Path, position: int) -> str:
    """The text that was appended from byte ``position`` on."""
    with log.open("rb") as file:
        file.seek(position)
        return file.read().decode(errors="replace")
