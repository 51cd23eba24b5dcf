"""The environment variables that name a cluster, and the file of librdkafka's options that one of them names.

`connect`, the command line and Spark's options all use this module, so the same variables mean the same cluster.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from stat import S_IROTH

from anabranch.errors import InvalidArgument
from anabranch.protocol.legal_names import OPEN_LANE
from anabranch.topics.names import DEFAULT_PREFIX

BOOTSTRAP_VARIABLE = "ANABRANCH_BOOTSTRAP"
PREFIX_VARIABLE = "ANABRANCH_PREFIX"
LANE_VARIABLE = "ANABRANCH_LANE"
KAFKA_FILE_VARIABLE = "ANABRANCH_KAFKA_FILE"

log = logging.getLogger("anabranch")


def given_bootstrap(bootstrap: str | None) -> str | None:
    """The given address, else the one of $ANABRANCH_BOOTSTRAP, else None."""
    return bootstrap or os.environ.get(BOOTSTRAP_VARIABLE) or None


def given_prefix(prefix: str | None) -> str:
    """The given prefix of the cluster's topics, else the one of $ANABRANCH_PREFIX, else ``anabranch``."""
    return prefix or os.environ.get(PREFIX_VARIABLE) or DEFAULT_PREFIX


def given_lane(lane: str | None) -> str:
    """The given lane, else the one of $ANABRANCH_LANE, else ``open``."""
    return lane or os.environ.get(LANE_VARIABLE) or OPEN_LANE


def file_options() -> dict[str, str]:
    """The options in the file that $ANABRANCH_KAFKA_FILE names; empty without one. Raises: InvalidArgument."""
    path = os.environ.get(KAFKA_FILE_VARIABLE)
    if not path:
        return {}
    lines = lines_of(path)
    if warning := exposed_secrets(path, lines):
        log.warning("%s", warning)
    return named_values(lines, f"a line of {path},")


def lines_of(path: str | Path) -> list[str]:
    """The options in a file, one a line, without comments, which begin with ``#``. Raises: InvalidArgument."""
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the settings in {path} can't be read: {error}") from error
    return [line for line in lines if line and not line.startswith("#")]


def named_values(lines: Iterable[str], what: str) -> dict[str, str]:
    """``["a.b=c"]`` as a mapping. ``what``: names the lines in an error. Raises: InvalidArgument."""
    found: dict[str, str] = {}
    for line in lines:
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            # The message shows a part only: the rest may hold a secret.
            begin = name.split()[0] if name.split() else ""
            raise InvalidArgument(f"{what} {begin!r} must have the form NAME=VALUE")
        found[name.strip()] = value
    return found


def exposed_secrets(path: str | Path, lines: Iterable[str]) -> str:
    """A warning if all users of this machine can read passwords in these lines of a file; else empty."""
    if not any(map(_is_secret, lines)) or not Path(path).stat().st_mode & S_IROTH:
        return ""
    return f"all users of this machine can read the secrets in {path}: chmod 600 {path}"


def _is_secret(line: str) -> bool:
    name = line.partition("=")[0].strip()
    return name.endswith((".password", ".secret"))
