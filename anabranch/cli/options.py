"""The options that many commands share, and how a command takes them all as one argument."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.models import CommandFunctionType

from anabranch.cli.output import is_agreed
from anabranch.core import defaults
from anabranch.core.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.errors import InvalidArgument
from anabranch.topics.names import DEFAULT_PREFIX

if TYPE_CHECKING:
    from anabranch import Client
    from anabranch.cli.session import Target

BOOTSTRAP_VARIABLE = "ANABRANCH_BOOTSTRAP"
PREFIX_VARIABLE = "ANABRANCH_PREFIX"
LANE_VARIABLE = "ANABRANCH_LANE"
KAFKA_FILE_VARIABLE = "ANABRANCH_KAFKA_FILE"


def option(form: str, told: str, **more: Any) -> Any:
    """An option of a command. ``form``: its names, and its metavar if it has one, as in ``--stream -s NAME``.

    ``told``: its help. ``more``: as `typer.Option`.
    """
    words = form.split()
    names = [word for word in words if word.startswith("-")]
    return typer.Option(*names, metavar=" ".join(words[len(names) :]) or None, help=told, **more)


def argument(metavar: str, told: str, **more: Any) -> Any:
    """An argument of a command, and its help. ``more``: as `typer.Argument`."""
    return typer.Argument(metavar=metavar, help=told, **more)


def _streams(incomplete: str) -> list[str]:
    """Names of streams for a shell's completion: none, unless the address is set and answers in a second."""
    try:
        import anabranch

        address, lane = os.environ[BOOTSTRAP_VARIABLE], os.environ.get(LANE_VARIABLE)
        prefix = os.environ.get(PREFIX_VARIABLE, DEFAULT_PREFIX)
        logging.getLogger("anabranch").setLevel(logging.CRITICAL)
        with anabranch.connect(address, prefix=prefix, lane=lane, timeout=1.0) as client:
            found = [one.stream for one in client.streams()]
    except Exception:  # noqa: BLE001 - a shell shows nothing of it
        return []
    return [name for name in found if name.startswith(incomplete)]


StreamName = Annotated[str, argument("SCOPE/STREAM", "The stream.", autocompletion=_streams)]
Bootstrap = Annotated[
    str | None,
    option(
        "--bootstrap -b HOST:PORT",
        "A broker of the cluster; several with commas between.",
        envvar=BOOTSTRAP_VARIABLE,
    ),
]
Prefix = Annotated[
    str,
    option(
        "--prefix NAME",
        "Prefix of the topics commands, replies and status.",
        envvar=PREFIX_VARIABLE,
    ),
]
Lane = Annotated[
    str, option("--lane LANE", "The lane to ask by: its rights count.", envvar=LANE_VARIABLE)
]
Kafka = Annotated[
    list[str] | None,
    option(
        "--kafka -X NAME=VALUE",
        "A librdkafka setting, such as security.protocol=SASL_SSL. May be repeated; `ps` shows it.",
    ),
]
KafkaFile = Annotated[
    Path | None,
    option(
        "--kafka-file FILE",
        "A file of such settings, one a line: the place for passwords.",
        envvar=KAFKA_FILE_VARIABLE,
    ),
]
Timeout = Annotated[float, option("--timeout SECONDS", "Give up after so many seconds.", min=0.1)]
Json = Annotated[bool, option("--json", "One JSON document instead of tables; errors as JSON too.")]
Yes = Annotated[bool, option("--yes -y", "Don't ask; needed without a terminal.")]
Verbose = Annotated[bool, option("--verbose -v", "Show the traceback of an error.")]
Into = Annotated[
    str,
    option("--stream -s SCOPE/STREAM", "The stream to write to.", autocompletion=_streams),
]
NewSegments = Annotated[
    int | None, option("--segments", "Create the stream first, with so many segments.", min=1)
]
LoadedAs = Annotated[
    str | None, option("--name", "A name that can be loaded only once: repeat it safely.")
]


@dataclass(frozen=True)
class ClusterOptions:
    """The options of every command that talks to a cluster."""

    bootstrap: Bootstrap = None
    lane: Lane = OPEN_LANE
    prefix: Prefix = DEFAULT_PREFIX
    kafka: Kafka = field(default=None, repr=False)  # may hold secrets
    kafka_file: KafkaFile = None
    timeout: Timeout = defaults.TIMEOUT_S
    json: Json = False
    verbose: Verbose = False

    def target(self) -> Target:
        """The cluster of these options. `InvalidArgument` if they name none."""
        from anabranch.cli import session

        return session.target_of(
            self.bootstrap, self.prefix, self.timeout, self.kafka, self.kafka_file, self.lane
        )

    def client(self) -> AbstractContextManager[Client]:
        """A client of that cluster, for one command."""
        from anabranch.cli import session

        return session.connected(self.target())


@dataclass(frozen=True)
class OperatorOptions(ClusterOptions):
    """The same for a command of operators, who have a lane of their own."""

    lane: Lane = ADMIN_LANE


class App(typer.Typer):
    """A group whose commands may take a dataclass of options, such as `ClusterOptions`, as an argument."""

    def command(
        self, name: str | None = None, **settings: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Register a command. Options of its dataclasses follow its own."""
        register = super().command(name, **settings)

        def add(function: CommandFunctionType) -> CommandFunctionType:
            register(_spread(function))
            return function

        return add


def _spread(function: Callable[..., None]) -> Callable[..., None]:
    """The function in a form that typer reads: the dataclasses' fields take the dataclasses' place."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    @wraps(function)
    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})
        function(**given)

    parameters = [
        parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY)
        for name, parameter in signature(function).parameters.items()
        if name not in groups
    ]
    for group in groups.values():
        types = get_type_hints(group, include_extras=True)
        parameters += [
            Parameter(
                each.name,
                Parameter.KEYWORD_ONLY,
                default=each.default,
                annotation=types[each.name],
            )
            for each in fields(group)
        ]
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def confirm(warning: str, *, yes: bool) -> None:
    """Return if the user agrees: by ``--yes``, or by an answer at a terminal.

    Raises: InvalidArgument, without a terminal or after a no; nothing was changed.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgument(f"{warning} Give --yes to do it")
    if not is_agreed(f"{warning} Do it?"):
        raise InvalidArgument("not done: nothing was changed")
