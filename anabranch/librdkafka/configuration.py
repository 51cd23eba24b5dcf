"""The settings that name a cluster: from arguments, else environment variables, else the configuration file.

`connect`, the command line and Spark's options all use this module, so the same settings mean the same cluster.
The file is read only if `--config` or $ANABRANCH_CONFIG names it: a file that is found in the working folder could
send writes to another cluster unseen (docs/inside/decisions/0050-configuration.md).
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from stat import S_IROTH
from typing import Any, NamedTuple

from anabranch.errors import InvalidArgument, UnsupportedSetting
from anabranch.protocol.legal_names import OPEN_LANE
from anabranch.topics.names import DEFAULT_PREFIX

log = logging.getLogger("anabranch")

CONFIG_VARIABLE = "ANABRANCH_CONFIG"


class Setting(NamedTuple):
    """A text by which all programs find their cluster: its key in the file, its variable, and its default."""

    key: str
    variable: str
    default: str | None = None


BOOTSTRAP = Setting("bootstrap", "ANABRANCH_BOOTSTRAP")
PREFIX = Setting("prefix", "ANABRANCH_PREFIX", DEFAULT_PREFIX)
LANE = Setting("lane", "ANABRANCH_LANE", OPEN_LANE)
KAFKA_FILE = Setting("kafka_file", "ANABRANCH_KAFKA_FILE")
# Only commands use it, but it is no setting of a single one.
LOG_FORMAT = Setting("log_format", "ANABRANCH_LOG_FORMAT", "text")
KEYS = {each.key: each for each in (BOOTSTRAP, PREFIX, LANE, KAFKA_FILE, LOG_FORMAT)}
KAFKA = "kafka"  # the table of librdkafka's options
# The tables of services, whose keys only commands know.
SERVICES = ("controller", "web", "processor", "ledger")

_FILE = "_file"  # the end of a key that names a file with the value
# A table's head, or the beginning of a key with its value.
_HEAD = re.compile(r"\s*(?:\[\s*(?P<table>[^\[\]]+?)\s*\]|(?P<key>[\w.\"' -]+?)\s*=)")
# Settings, and options of librdkafka, whose values are never shown. A database's address may have a password.
_SECRET = re.compile(
    r"^ledger\.database$|pass(word|phrase)|secret|credential|\.pem$|ssl\.key$|oauthbearer\.config|token(?!\.(endpoint|file))",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether the value of a setting, or of an option of librdkafka, must not be shown. A file's path may be."""
    return not name.endswith(_FILE) and _SECRET.search(name) is not None


@dataclass(frozen=True)
class ConfigFile:
    """A configuration file, checked except for the tables of services."""

    path: Path
    document: Mapping[str, Any]
    lines: Mapping[tuple[str, ...], int]

    @classmethod
    def read(cls, path: str | Path) -> ConfigFile:
        """Raises: InvalidArgument: it can't be read, or has an unknown key, or a value of a wrong type."""
        try:
            text = Path(path).read_text(encoding="utf-8")
            found = cls(Path(path), tomllib.loads(text), _lines(text))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"the configuration {path} can't be read: {error}") from error
        except tomllib.TOMLDecodeError as error:
            raise InvalidArgument(f"the configuration {path} is no TOML: {error}") from error
        found._check()
        return found

    def place(self, *key: str) -> str:
        """The file, and the line of a key where that is known."""
        number = self.lines.get(key)
        return f"{self.path}" if number is None else f"{self.path}, line {number}"

    def refusal(self, key: tuple[str, ...], why: str) -> InvalidArgument:
        """The error about a key, without the value, which may be a secret."""
        return InvalidArgument(f"{self.place(*key)}: {'.'.join(key)} {why}")

    def check_known(
        self, table: tuple[str, ...], keys: Iterable[str], known: Collection[str]
    ) -> None:
        """Raise `InvalidArgument` for the first unknown key. The error names the known key that is most like it."""
        for key in keys:
            if key not in known:
                near = get_close_matches(key, known, 1)
                why = (
                    f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
                )
                raise self.refusal((*table, key), f"is unknown: {why}")

    def text(self, setting: Setting) -> str | None:
        """The value of a setting, if the file has one."""
        return self.document.get(setting.key) or None

    def kafka(self) -> dict[str, str]:
        """The options of librdkafka. Those that end in ``_file`` name a file with the value."""
        found: dict[str, str] = {}
        for name, value in _flat(self.document.get(KAFKA, {})):
            key = (KAFKA, name)
            if isinstance(value, bool):
                value = str(value).lower()
            if not isinstance(value, str | int | float):
                raise self.refusal(key, "must be a text, a number, true or false")
            if name.endswith(_FILE):
                name, value = name.removesuffix(_FILE), self.secret(key, value)
            if name in found:
                raise self.refusal(key, "is given twice, also by a file")
            self._check_option(key, name, str(value))
            found[name] = str(value)
        return found

    def secret(self, key: tuple[str, ...], path: object) -> str:
        """The content of the file that a key names, without the end of its last line."""
        if not isinstance(path, str):
            raise self.refusal(key, "must be a text: the name of a file")
        return secret_of(path, f"{self.place(*key)}: {'.'.join(key)}")

    def _check(self) -> None:
        self.check_known((), self.document, {*KEYS, KAFKA, *SERVICES})
        for key, value in self.document.items():
            if key in KEYS:
                if not isinstance(value, str):
                    raise self.refusal((key,), "must be a text")
            elif not isinstance(value, dict):
                raise self.refusal((key,), f"must be a table: [{key}]")

    @property
    def warning(self) -> str:
        """A warning if all users of this machine can read secrets in the file; else empty."""
        names = [name for name, _ in _flat(self.document) if not name.endswith(_FILE)]
        return exposed_secrets(self.path, names)

    def _check_option(self, key: tuple[str, ...], name: str, value: str) -> None:
        """Refuse an option of librdkafka that no connection could take."""
        from anabranch.librdkafka.options import check_option

        try:
            check_option(name, value)
        except (UnsupportedSetting, InvalidArgument) as error:
            raise type(error)(f"{self.place(*key)}: {error}") from None


def config_file(path: str | Path | None = None) -> ConfigFile | None:
    """The file at ``path``, or that $ANABRANCH_CONFIG names; None without either.

    Raises: InvalidArgument.
    """
    path = path or os.environ.get(CONFIG_VARIABLE)
    return ConfigFile.read(path) if path else None


class Named:
    """The cluster as the environment and the configuration file name it, as they were when this was made."""

    def __init__(self) -> None:
        """Raises: InvalidArgument, for what is wrong in the file."""
        self._file = config_file()
        if self._file is not None and self._file.warning:
            log.warning("%s", self._file.warning)

    def value(self, setting: Setting, given: str | None) -> str | None:
        """The given value, else the environment's, else the file's, else the default."""
        if found := given or os.environ.get(setting.variable):
            return found
        return (self._file and self._file.text(setting)) or setting.default

    def text(self, setting: Setting, given: str | None) -> str:
        """The same for a setting with a default."""
        return self.value(setting, given) or ""

    def options(self) -> dict[str, str]:
        """The options of librdkafka: those of the file's table, and those of $ANABRANCH_KAFKA_FILE over them.

        Raises: InvalidArgument, UnsupportedSetting.
        """
        found = {} if self._file is None else self._file.kafka()
        if path := self.value(KAFKA_FILE, None):
            options = named_values(lines_of(path), f"a line of {path},")
            if warning := exposed_secrets(path, options):
                log.warning("%s", warning)
            found |= options
        return found


def lines_of(path: str | Path) -> list[str]:
    """The options in a file, one a line, without comments, which begin with ``#``. Raises: InvalidArgument."""
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the settings in {path} can't be read: {error}") from error
    return [line for line in lines if line and not line.startswith("#")]


def secret_of(path: str, what: str) -> str:
    """The content of a file, without the end of its last line. ``what``: names the file in an error.

    Raises: InvalidArgument: it can't be read, or is empty.
    """
    try:
        found = Path(path).read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{what}: {path} can't be read: {error}") from error
    if not found:
        raise InvalidArgument(f"{what}: {path} is empty")
    return found


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


def exposed_secrets(path: str | Path, names: Iterable[str]) -> str:
    """A warning if all users of this machine can read secrets in a file with these names; else empty."""
    if not any(map(is_secret, names)) or not Path(path).stat().st_mode & S_IROTH:
        return ""
    return f"all users of this machine can read the secrets in {path}: chmod 600 {path}"


def _flat(table: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, Any]]:
    """The items of a table, with those of tables in it: ``sasl.username`` needs no quotes."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """The lines of a file's keys. `tomllib` does not know them; this finds those of ordinary files."""
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        head = _HEAD.match(line)
        if head is None:
            continue
        words = re.sub(r"[\"' ]", "", head["table"] or head["key"])
        if head["table"]:
            name, _, rest = words.partition(".")
            table = (name, rest) if rest else (name,)
            found.setdefault((name,), number)
        elif len(table) > 1:
            found.setdefault((table[0], f"{table[1]}.{words}"), number)
        elif table:
            found.setdefault((*table, words), number)
        else:
            found.setdefault((words,) if "." not in words else tuple(words.split(".", 1)), number)
    return found
