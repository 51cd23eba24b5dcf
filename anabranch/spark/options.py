"""Options of the format "anabranch", which the driver checks before anything runs.

Spark lower-cases their names, and all values are text. An unknown option is refused by name, so that a typing error
is never ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from anabranch.client.connect import reader_ports
from anabranch.errors import InvalidArgument
from anabranch.librdkafka.configuration import BOOTSTRAP, LANE, PREFIX, Named
from anabranch.protocol import defaults
from anabranch.protocol.hybrid_time import MAX, read_moment
from anabranch.protocol.legal_names import OPEN_LANE, check_lane
from anabranch.reading.committed_log import ReaderPorts

_KAFKA = "kafka."
_CONNECTION = ("bootstrap", "prefix", "lane", "timeout")
# Options of Spark itself, which it passes to the source, too.
_SPARKS = ("checkpointlocation", "path", "queryname")


@dataclass(frozen=True)
class Connection:
    """The cluster's address and options, plain data that Spark sends to the tasks."""

    bootstrap: str
    prefix: str
    timeout: float
    librdkafka: tuple[tuple[str, str], ...] = field(repr=False)  # may hold secrets
    lane: str = OPEN_LANE

    def reader_ports(self) -> ReaderPorts:
        """The ports that readers of this cluster need. Raises: UnsupportedSetting."""
        return reader_ports(self.bootstrap, dict(self.librdkafka))


class Options:
    """The options that a user gave. Code reads each by its name; `check_all_used` refuses the others."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = {name.lower(): value for name, value in given.items()}
        self._asked = set(_SPARKS)

    def all(self) -> list[tuple[str, str]]:
        return sorted(self._given.items())

    def text(self, name: str, default: str | None = None) -> str | None:
        self._asked.add(name)
        value = self._given.get(name, default)
        return value if value != "" else default

    def choice(self, name: str, allowed: Iterable[str], default: str) -> str:
        value = (self.text(name, default) or default).lower()
        words = tuple(allowed)
        if value not in words:
            raise InvalidArgument(f"option {name}={value!r}: one of {', '.join(words)}")
        return value

    def seconds(self, name: str, default: float, least: float = 0.0) -> float:
        """A number of seconds, more than ``least``."""
        text = self.text(name)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not least < value < 1e9:
            raise InvalidArgument(f"option {name}={text!r}: seconds above {least:g}")
        return value

    def number(self, name: str, default: int | None) -> int | None:
        """A whole number, 1 or more."""
        text = self.text(name)
        if text is None:
            return default
        try:
            value = int(text)
        except ValueError:
            value = 0
        if value < 1:
            raise InvalidArgument(f"option {name}={text!r}: a whole number, 1 or more")
        return value

    def words(self, name: str) -> tuple[str, ...]:
        """A list of words, separated by commas."""
        text = self.text(name) or ""
        return tuple(word.strip() for word in text.split(",") if word.strip())

    def connection(self) -> Connection:
        """The cluster, from options ``bootstrap``, ``prefix`` and ``lane``, or else the driver's environment
        and its configuration file.

        Options ``kafka.…`` go to librdkafka, and override those of the files that these name.
        """
        self._asked.update(_CONNECTION)
        self._asked.update(name for name in self._given if name.startswith(_KAFKA))
        named = Named()
        bootstrap = named.value(BOOTSTRAP, self.text("bootstrap"))
        if not bootstrap:
            raise InvalidArgument(
                f"no address: give option bootstrap=host:port, or set {BOOTSTRAP.variable} for the driver"
            )
        own = {
            name.removeprefix(_KAFKA): value
            for name, value in self._given.items()
            if name.startswith(_KAFKA)
        }
        return Connection(
            bootstrap,
            named.text(PREFIX, self.text("prefix")),
            self.seconds("timeout", defaults.SPARK_TIMEOUT_S),
            tuple(sorted((named.options() | own).items())),
            check_lane(named.text(LANE, self.text("lane"))),
        )

    def check_all_used(self) -> None:
        """Raise `InvalidArgument` for options that no code has read."""
        unknown = sorted(self._given.keys() - self._asked)
        if unknown:
            known = sorted(self._asked - set(_SPARKS))
            raise InvalidArgument(
                f"unknown option {', '.join(unknown)}; there are {', '.join(known)} and {_KAFKA}…"
            )


def moment(name: str, text: str) -> int | datetime:
    """The hybrid time, or ISO datetime with a time zone, in an option's text."""
    at = read_moment(text)
    if at is None or (at > MAX if isinstance(at, int) else at.utcoffset() is None):
        raise InvalidArgument(
            f"option {name}={text!r}: a commit timestamp, or a time with its zone, as 2026-03-01T12:00:00+00:00"
        )
    return at
