"""The key that signs tokens: a file that all controllers of a cluster share.

32 random bytes as 64 hexadecimal digits, for its owner's eyes only (mode 0600). The first controller
makes it; two that start at once agree, because the file appears complete and only once. A file that
others may read, or without a key, is refused by name and never repaired: replacing a key makes every
token in use worthless.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from anabranch.core.tokens import KEY_SIZE
from anabranch.errors import InvalidArgument

ENVIRONMENT = "ANABRANCH_KEY_FILE"
_DIGITS = re.compile(rb"[0-9a-fA-F]{%d}" % (2 * KEY_SIZE))
_FOR_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def key_path(path: Path | str | None = None) -> Path:
    """The key file's path: ``path``, else $ANABRANCH_KEY_FILE, else in ~/.config/anabranch."""
    chosen = path or os.environ.get(ENVIRONMENT) or "~/.config/anabranch/token.key"
    return Path(chosen).expanduser()


def load_or_create(path: Path | str | None = None, *, create: bool = True) -> bytes:
    """The key, 32 bytes. Without a file: a new random one is made, or no bytes returned unless ``create``.

    `InvalidArgument` names the file and what to do when it can't be read, made or trusted.
    """
    file = key_path(path)
    try:
        try:
            return _read(file)
        except FileNotFoundError:
            if not create:
                return b""
            _create(file)
            return _read(file)  # another process may have been first: its key counts
    except OSError as error:
        raise InvalidArgument(
            f"the key file {file} can't be used: {error.strerror or error}"
        ) from error


def _read(file: Path) -> bytes:
    with open(file, "rb") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise InvalidArgument(f"the key file {file} is not a regular file")
        if status.st_mode & _FOR_OTHERS:
            raise InvalidArgument(
                f"the key file {file} has mode {stat.S_IMODE(status.st_mode):04o}; others must "
                f"have no access to it: chmod 600 {file}"
            )
        text = opened.read(4096).strip()
    if not _DIGITS.fullmatch(text):
        raise InvalidArgument(
            f"the key file {file} does not hold a key: {2 * KEY_SIZE} hexadecimal digits expected, "
            f"{len(text)} characters found; give controllers the same file that the others have"
        )
    return bytes.fromhex(text.decode("ascii"))


def _create(file: Path) -> None:
    """Make the file, complete at once, unless it exists by then."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as opened:
            opened.write(secrets.token_hex(KEY_SIZE).encode("ascii") + b"\n")
            opened.flush()
            os.fsync(opened.fileno())
        try:
            os.link(draft, file)  # fails if the file exists, and shows it only when it is whole
        except FileExistsError:
            return
        _sync_folder(file.parent)
    finally:
        draft.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
