"""Temporary folders for the replicas of web processes. Folders that killed processes left are removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "anabranch-web-"
_LOCK = "lock"


class Folders:
    """A temporary folder of this process, with a folder for each replica. A lock in it is held until `close`."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._count = 0
        # Only a folder with a lock is removed by others, so the lock is taken before it gets its name.
        new = self.path / "new"
        self._lock = new.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / _LOCK)

    def new(self) -> Path:
        """The path of a folder that does not exist yet."""
        self._count += 1
        return self.path / str(self._count)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_left() -> None:
    """Remove the folders of this user's web processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            with (path / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # its process is alive, or another process removes it
            continue


def size_of(folder: Path) -> int:
    """The bytes of a folder's files, while others may write and delete them."""
    size = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.stat(os.path.join(where, name)).st_size
            except OSError:
                continue
    return size
