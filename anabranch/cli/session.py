"""From options to a connected client: the only way from the commands to the library."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_IROTH
from typing import TYPE_CHECKING

from anabranch.cli.output import print_note
from anabranch.core.legal_names import OPEN_LANE
from anabranch.errors import InvalidArgument, NotReady

if TYPE_CHECKING:
    from anabranch import Client
    from anabranch.kafka.settings import Settings

_LOOK_S = 2.0  # each broker
NO_BOOTSTRAP = (
    "no broker given: use --bootstrap HOST:PORT or set ANABRANCH_BOOTSTRAP "
    "(`anabranch dev` starts one and prints its address)"
)


@dataclass(frozen=True, slots=True)
class Target:
    """The cluster to talk to, and the connection's options."""

    bootstrap: str
    prefix: str
    timeout: float
    kafka: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold secrets
    lane: str = OPEN_LANE


def target_of(
    bootstrap: str | None,
    prefix: str,
    timeout: float,
    kafka: Sequence[str] | None,
    kafka_file: Path | None,
    lane: str,
) -> Target:
    """The target of the shared options. `InvalidArgument` if they name none."""
    settings = parse_kafka(kafka, file=kafka_file)
    return Target(need_bootstrap(bootstrap), prefix, timeout, settings, lane)


def need_bootstrap(bootstrap: str | None) -> str:
    """The broker's address. `InvalidArgument` says how to give one."""
    if not bootstrap:
        raise InvalidArgument(NO_BOOTSTRAP)
    return bootstrap


def parse_kafka(
    settings: Sequence[str] | None, option: str = "--kafka", file: Path | None = None
) -> dict[str, str]:
    """``["a.b=c", "@settings.properties"]`` as a mapping, over those in ``file``. Else `InvalidArgument`."""
    found: dict[str, str] = {}
    for setting in (*([f"@{file}"] if file else ()), *(settings or ())):
        path = setting[1:] if setting.startswith("@") else None
        lines = [setting] if path is None else _lines_of(path)
        if path is not None and any(map(_is_secret, lines)) and Path(path).stat().st_mode & S_IROTH:
            print_note(
                f"warning: all users of this machine may read the secrets in {path}: chmod 600 {path}"
            )
        for line in lines:
            name, equals, value = line.partition("=")
            if not equals or not name.strip():
                # The message shows a part only: the rest may hold a secret.
                begin = name.split()[0] if name.split() else ""
                raise InvalidArgument(
                    f"{option} {begin!r} is not of the form NAME=VALUE, nor @FILE"
                )
            found[name.strip()] = value
    return found


def _lines_of(path: str) -> list[str]:
    """The settings in a file, one a line; ``#`` begins a comment."""
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the settings in {path} can't be read: {error}") from error
    return [line for line in lines if line and not line.startswith("#")]


def _is_secret(line: str) -> bool:
    name = line.partition("=")[0].strip()
    return name.endswith((".password", ".secret"))


def losses_of(target: Target) -> list[str]:
    """The losses where brokers do not offer a call, as text; nothing if they don't say."""
    from anabranch.kafka.cluster import Cluster
    from anabranch.kafka.needs import lacking_of, look_at, losses
    from anabranch.ports import LogError

    with closing(Cluster(raw_settings(target))) as cluster, suppress(LogError):
        return losses(lacking_of(look_at(cluster, _LOOK_S, disks=False)))
    return []


def raw_settings(target: Target) -> Settings:
    """The settings of a connection to these brokers without librdkafka."""
    from anabranch.kafka.settings import parse_settings
    from anabranch.librdkafka.options import Options

    given = Options(target.bootstrap, target.kafka)
    return parse_settings(given.bootstrap, given.raw_reader())


@contextmanager
def connected(target: Target) -> Iterator[Client]:
    """A client for one command."""
    import anabranch
    from anabranch.librdkafka.admin import no_broker

    if trouble := no_broker(target.bootstrap):  # at once: a wrong address stays wrong
        raise NotReady(f"{trouble}; start a broker there, or mend --bootstrap")
    if not logging.getLogger().handlers:
        # Logs are for -v: an error is one line, without librdkafka's messages.
        logging.getLogger("anabranch").setLevel(logging.CRITICAL)
    with anabranch.connect(
        target.bootstrap,
        prefix=target.prefix,
        lane=target.lane,
        timeout=target.timeout,
        config=target.kafka,
    ) as client:
        yield client
