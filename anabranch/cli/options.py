"""The common options of commands, how they are read, and the connection that they describe.

A command takes a dataclass of options as one argument; `App` turns its fields into options. Only this module
connects to a cluster.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, Signature, cleandoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from typer.models import CommandFunctionType

from anabranch.cli.output import is_agreed, print_note
from anabranch.errors import (
    AnabranchError,
    InvalidArgument,
    NotReady,
    UnknownProcessor,
    UnknownScope,
    UnknownStream,
)
from anabranch.librdkafka.configuration import (
    BOOTSTRAP,
    CONFIG_VARIABLE,
    KAFKA_FILE,
    LANE,
    LOG_FORMAT,
    PREFIX,
    config_file,
    exposed_secrets,
    lines_of,
    named_values,
)
from anabranch.protocol import defaults
from anabranch.protocol.hybrid_time import read_moment
from anabranch.protocol.ids import segment_id
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.topics.names import DEFAULT_PREFIX, stream_topic

if TYPE_CHECKING:
    from anabranch import Client
    from anabranch.kafka.settings import Settings
    from anabranch.values import Stream


def option(form: str, text: str, **more: Any) -> Any:
    """An option of a command. ``form``: its names and its metavar, as in ``--stream -s NAME``. ``text``: its help.

    ``more``: arguments of `typer.Option`.
    """
    words = form.split()
    names = [word for word in words if word.startswith("-")]
    return typer.Option(*names, metavar=" ".join(words[len(names) :]) or None, help=text, **more)


def argument(metavar: str, text: str, **more: Any) -> Any:
    """An argument of a command. ``text``: its help. ``more``: arguments of `typer.Argument`."""
    return typer.Argument(metavar=metavar, help=text, **more)


def _streams(incomplete: str) -> list[str]:
    """Streams for a shell's completion; none if no address is set, or no broker answers within a second."""
    try:
        import anabranch

        logging.getLogger("anabranch").setLevel(logging.CRITICAL)
        with anabranch.connect(timeout=1.0) as client:
            found = [one.stream for one in client.streams()]
    except Exception:  # noqa: BLE001 - a shell can't show errors here
        return []
    return [name for name in found if name.startswith(incomplete)]


Scope = Annotated[str, argument("SCOPE", "The scope.")]
OnlyScope = Annotated[str | None, argument("SCOPE", "Only this scope.")]
StreamName = Annotated[str, argument("SCOPE/STREAM", "The stream.", autocompletion=_streams)]
Bootstrap = Annotated[
    str | None,
    option(
        "--bootstrap -b HOST:PORT",
        "The cluster's brokers, separated by commas.",
        envvar=BOOTSTRAP.variable,
    ),
]
Prefix = Annotated[
    str,
    option(
        "--cluster-prefix NAME",
        "The prefix of the command, reply and status topics.",
        envvar=PREFIX.variable,
    ),
]
Lane = Annotated[
    str,
    option("--lane LANE", "The lane of the command, whose rights it needs.", envvar=LANE.variable),
]
Kafka = Annotated[
    list[str] | None,
    option(
        "--kafka -X NAME=VALUE",
        "A librdkafka setting, such as security.protocol=SASL_SSL. Visible in `ps`. Repeatable.",
    ),
]
KafkaFile = Annotated[
    Path | None,
    option(
        "--kafka-file FILE",
        "A file of such settings, one per line; use it for passwords.",
        envvar=KAFKA_FILE.variable,
    ),
]
Config = Annotated[
    Path | None,
    option(
        "--config FILE",
        "A TOML file of settings, which options and environment variables override.",
        envvar=CONFIG_VARIABLE,
    ),
]
LogFormat = Annotated[
    Literal["text", "json"],
    option(
        "--log-format", "The log on standard error: text, or JSON, one object a line.",
        envvar=LOG_FORMAT.variable,
    ),
]  # fmt: skip
Timeout = Annotated[float, option("--timeout SECONDS", "Give up after this many seconds.", min=0.1)]
Limit = Annotated[int, option("--limit -n", "At most this many.", min=1)]
Json = Annotated[bool, option("--json", "Print results and errors as JSON.")]
Yes = Annotated[bool, option("--yes -y", "Don't ask for confirmation; needed without a terminal.")]
Verbose = Annotated[
    bool, option("--verbose -v", "Show the library's log, and the traceback of an error.")
]
Into = Annotated[
    str,
    option("--stream -s SCOPE/STREAM", "The stream to write to.", autocompletion=_streams),
]
Segments = Annotated[
    int | None, option("--segments -s", "The number of segments (default: 1).", min=1, max=10_000)
]
Description = Annotated[
    str, option("--description TEXT", "Text for people. Needs feature level 2.")
]
IfNotExists = Annotated[
    bool,
    option(
        "--if-not-exists",
        "Accept an existing stream if it has the given --segments and settings.",
    ),
]
StreamSettings = Annotated[
    list[str] | None,
    option("--setting NAME=VALUE", "A setting of the stream, such as retention.ms=7d. Repeatable."),
]
Near = Annotated[
    str | None, option("--near SCOPE", "Put a new scope on the control partition of this scope.")
]
At = Annotated[
    str | None,
    option("--at TIME", "As of a commit timestamp or an ISO 8601 time (default: now)."),
]
NewSegments = Annotated[
    int | None,
    option("--segments", "Create the stream first, with this number of segments.", min=1),
]
LoadedAs = Annotated[
    str | None, option("--name", "A name that commits only once, so the command is safe to repeat.")
]


@dataclass(frozen=True)
class ConnectionOptions:
    """The options of a connection to a cluster."""

    bootstrap: Bootstrap = None
    lane: Lane = OPEN_LANE
    prefix: Prefix = DEFAULT_PREFIX
    kafka: Kafka = field(default=None, repr=False)  # may hold secrets
    kafka_file: KafkaFile = None
    config: Config = None

    def target_within(self, timeout: float) -> Target:
        """The cluster of these options. ``timeout``: seconds of each call. Raises: InvalidArgument."""
        settings = parse_kafka(self.kafka, file=self.kafka_file, config=self.config)
        return Target(need_bootstrap(self.bootstrap), self.prefix, timeout, settings, self.lane)


@dataclass(frozen=True)
class ClusterOptions(ConnectionOptions):
    """The options of most commands that connect to a cluster."""

    timeout: Timeout = defaults.TIMEOUT_S
    json: Json = False
    verbose: Verbose = False

    def target(self) -> Target:
        """The cluster of these options. Raises: InvalidArgument if they name none."""
        return self.target_within(self.timeout)

    def client(self) -> AbstractContextManager[Client]:
        """A client of that cluster."""
        return opened(self.target())

    def client_after(self, warning: str, *, yes: bool) -> AbstractContextManager[Client]:
        """A client, if the user agrees to ``warning``. Wrong options are refused before the question."""
        target = self.target()
        confirm(warning, yes=yes)
        return opened(target)

    def losses(self) -> list[str]:
        """The features that don't work because brokers lack a call, in sentences."""
        return losses_of(self.target())

    def topic_sizes(self, topics: Collection[str]) -> dict[str, int]:
        """As `topic_sizes_of`."""
        return topic_sizes_of(self.target(), topics)


@dataclass(frozen=True)
class OperatorOptions(ClusterOptions):
    """The options of operators' commands, which have the lane `admin` by default."""

    lane: Lane = ADMIN_LANE


class App(typer.Typer):
    """A group whose commands may take a dataclass of options, such as `ClusterOptions`, as an argument."""

    def command(
        self, name: str | None = None, **settings: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Register a command. The options of its dataclasses come after its own."""
        register = super().command(name, **settings)

        def add(function: CommandFunctionType) -> CommandFunctionType:
            register(_spread(function))
            return function

        return add


def _spread(function: Callable[..., None]) -> Callable[..., None]:
    """The function as typer reads it, with the fields of its dataclasses as parameters."""
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
    # The help keeps the ends of lines, and terminals have other widths than the code.
    call.__doc__ = re.sub(r"(?<=\S)\n(?=\S)(?!- )", " ", cleandoc(function.__doc__ or ""))
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def confirm(warning: str, *, yes: bool) -> None:
    """Return if the user agrees, by ``--yes`` or by an answer at a terminal. Raises: InvalidArgument."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgument(f"{warning} Add --yes to do it")
    if not is_agreed(f"{warning} Continue?"):
        raise InvalidArgument("not done: nothing was changed")


# -- values -------------------------------------------------------------------------------------------------


def moment_of(text: str, option: str = "--at") -> int | datetime | None:
    """The moment of an option: a hybrid time, a time, or None for now. Raises: InvalidArgument."""
    if text == "now":
        return None
    moment = read_moment(text)
    if moment is None:
        raise InvalidArgument(
            f"{option} {text!r} must be a commit timestamp, an ISO 8601 time with its zone, or now"
        )
    return moment


def start_of(text: str, option: str) -> str | int | datetime:
    """The start of reading, as in `Client.read`: begin, end, or a moment. Raises: InvalidArgument."""
    if text in ("begin", "end"):
        return text
    moment = moment_of(text, f"{option} may be begin, end, or a time:")
    return "end" if moment is None else moment


def seconds_of(text: str) -> float:
    """Seconds of a span such as ``90s``, ``30m``, ``1h``, ``2d``. Raises: InvalidArgument."""
    if not re.fullmatch(r"[0-9]{1,9}[smhd]", text):
        raise InvalidArgument(f"{text!r} must be a span of time, such as 90s, 30m, 1h or 2d")
    return float(text[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[text[-1]]


def parse_segment(text: str, option: str = "--seal") -> int:
    """The id of a segment, given as number@epoch or as an id. Raises: InvalidArgument."""
    number, at, epoch = text.partition("@")
    try:
        if not at:
            found = int(text, 0)
            if 0 <= found < 1 << 63:
                return found
        elif 0 <= int(number) < 1 << 31 and 0 <= int(epoch) < 1 << 31:
            return segment_id(int(epoch), int(number))
    except ValueError:
        pass
    raise InvalidArgument(
        f"{option} {text!r} must be NUMBER@EPOCH, as in `anabranch stream describe`, or a segment's id"
    )


def parse_range(text: str) -> tuple[int, int]:
    """(low, high) of ``LOW:HIGH``, decimal or hexadecimal with 0x. Raises: InvalidArgument."""
    from anabranch.protocol.partitioner import SPACE

    low, _, high = text.partition(":")
    try:
        found = int(low, 0), int(high, 0)
    except ValueError:
        found = (0, 0)
    if 0 <= found[0] < found[1] <= SPACE:
        return found
    raise InvalidArgument(f"--range {text!r} must be LOW:HIGH with 0 <= LOW < HIGH <= {SPACE:#x}")


_LOOK_S = 2.0  # each broker
NO_BOOTSTRAP = (
    "no broker is given: use --bootstrap HOST:PORT, set ANABRANCH_BOOTSTRAP, or name a file by --config "
    "(`anabranch dev` starts one and prints its address)"
)


@dataclass(frozen=True, slots=True)
class Target:
    """A cluster, and the options of the connection."""

    bootstrap: str
    prefix: str
    timeout: float
    kafka: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold secrets
    lane: str = OPEN_LANE


def need_bootstrap(bootstrap: str | None) -> str:
    """The broker's address. Raises: InvalidArgument, which says how to give one."""
    if not bootstrap:
        raise InvalidArgument(NO_BOOTSTRAP)
    return bootstrap


KeyCodec = Annotated[
    str | None, option("--key CODEC", "Keys are bytes, str, json, or a codec MODULE:NAME.")
]
ValueCodec = Annotated[
    str | None, option("--value CODEC", "Values are bytes, str, json, or a codec MODULE:NAME.")
]


@dataclass(frozen=True)
class Typed:
    """The codecs of a command that reads."""

    key_codec: KeyCodec = None
    value_codec: ValueCodec = None

    def given(self, name: str) -> Any:
        """The stream's name, or its handle if there is a codec. Raises: InvalidArgument."""
        return name if self.key_codec is self.value_codec is None else self.handle(name)

    def handle(self, name: str) -> Stream[Any, Any]:
        """The stream's handle. Raises: InvalidArgument."""
        from anabranch.values import stream_of

        mode = getattr(self, "undecodable", "raise")
        return stream_of(name, codec_spec(self.key_codec), codec_spec(self.value_codec), mode)


@dataclass(frozen=True)
class TypedReading(Typed):
    """The codecs of a command that reads events."""

    undecodable: Annotated[
        str, option("--undecodable MODE", "raise, skip, or the stream of dead letters.")
    ] = "raise"

    def handle(self, name: str) -> Stream[Any, Any]:
        """See `Typed`. An error about `--key` names the option that chooses events by their key."""
        try:
            codec_spec(self.key_codec)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"--key: {error}; --with-key KEY reads the events with a key"
            ) from error
        return super().handle(name)


def codec_spec(word: str | None) -> Any:
    """The codec of `--key` or `--value`. Its module may be in the current folder. Raises: InvalidArgument."""
    from anabranch.values import spec_of

    if word is None:
        return None
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return spec_of(word)


def line_encoder(
    word: str | None, stream: str, *, of_keys: bool = False
) -> Callable[[bytes], bytes]:
    """A function that encodes what a person wrote: with str it is text, with other codecs JSON.

    The function raises `InvalidArgument` for a text that the codec does not take.
    """
    spec = codec_spec(word)
    if spec is None or spec is bytes:
        return lambda text: text
    from anabranch.values import codec_of, from_text

    codec = codec_of(spec, stream_topic(stream), of_keys=of_keys)

    def encode(text: bytes) -> bytes:
        try:
            coded: bytes = codec.encode(from_text(codec, text))
            return coded
        except Exception as error:
            raise InvalidArgument(f"{text!r:.100}: codec {codec.name}: {error}") from error

    return encode


def parse_kafka(
    settings: Sequence[str] | None,
    option: str = "--kafka",
    file: Path | None = None,
    config: Path | None = None,
) -> dict[str, str]:
    """``["a.b=c", "@settings.properties"]`` as a mapping, after the table of ``config`` and the lines of ``file``.

    Raises: InvalidArgument, UnsupportedSetting.
    """
    found: dict[str, str] = {}
    for _, layer in layers_of(settings, option, file, config):
        found |= layer
    return found


def layers_of(
    settings: Sequence[str] | None, option: str, file: Path | None, config: Path | None
) -> Iterator[tuple[str, dict[str, str]]]:
    """The mappings of `parse_kafka`, each with its source. Later ones override earlier ones."""
    if named := config_file(config) if config else None:
        yield str(config), named.kafka()
    for setting in (*([f"@{file}"] if file else ()), *(settings or ())):
        lines, source = [setting], f"option {option}"
        if setting.startswith("@"):
            lines = lines_of(source := setting[1:])
        found = named_values(lines, option)
        if source == setting[1:] and (warning := exposed_secrets(source, found)):
            print_note(f"warning: {warning}")
        yield source, found


def losses_of(target: Target) -> list[str]:
    """The features that don't work because brokers lack a call, in sentences; empty if no broker answers."""
    from anabranch.kafka.cluster import Cluster
    from anabranch.kafka.needs import lacking_of, look_at, losses
    from anabranch.ports import LogError

    with closing(Cluster(raw_settings(target))) as cluster, suppress(LogError):
        return losses(lacking_of(look_at(cluster, _LOOK_S, disks=False)))
    return []


@contextmanager
def opened(target: Target) -> Iterator[Client]:
    """A client for one command. An error about an unknown stream or processor names a similar one."""
    with connected(target) as client, _similar_named(client):
        yield client


@contextmanager
def _similar_named(client: Client) -> Iterator[None]:
    """Add the most similar name to an error about an unknown stream, scope or processor."""
    try:
        yield
    except (UnknownStream, UnknownScope, UnknownProcessor) as error:
        named = re.search(r"'([^'/]+(/[^'/]+)?)'", str(error))
        similar: list[str] = []
        if named is not None:
            with suppress(AnabranchError):
                if isinstance(error, UnknownProcessor):
                    scope = named[1].partition("/")[0]
                    known = [one.processor for one in client.processors(scope)]
                else:
                    known = [one.stream for one in client.streams()]
                if not named[2]:
                    known = sorted({name.partition("/")[0] for name in known})
                similar = get_close_matches(named[1], known, 1)
        if not similar:
            raise
        raise type(error)(f"{error}; did you mean {similar[0]}?") from error


def topic_sizes_of(target: Target, topics: Collection[str]) -> dict[str, int]:
    """Topic -> its bytes on disk. Topics that brokers do not show to this client are left out."""
    from anabranch.kafka.cluster import Cluster
    from anabranch.kafka.needs import sizes_of
    from anabranch.ports import LogError

    with closing(Cluster(raw_settings(target))) as cluster, suppress(LogError):
        return sizes_of(cluster, topics, _LOOK_S)
    return {}


def raw_settings(target: Target) -> Settings:
    """The settings of a connection without librdkafka."""
    from anabranch.kafka.settings import parse_settings
    from anabranch.librdkafka.options import Options

    given = Options(target.bootstrap, target.kafka)
    return parse_settings(given.bootstrap, given.raw_reader())


@contextmanager
def connected(target: Target) -> Iterator[Client]:
    """A client for one command."""
    from anabranch.client.connect import connect_to
    from anabranch.librdkafka.admin import no_broker

    if trouble := no_broker(target.bootstrap):  # a wrong address fails at once
        raise NotReady(f"{trouble}; start a broker there, or correct --bootstrap")
    if not logging.getLogger().handlers:
        # Without -v an error is one line, without librdkafka's messages.
        logging.getLogger("anabranch").setLevel(logging.CRITICAL)
    with connect_to(
        target.bootstrap, target.prefix, target.lane, target.kafka, timeout=target.timeout
    ) as client:
        yield client


def imported(target: str, what: str) -> Any:
    """Import ``module:name``, also from the current folder. ``what``: the thing that it has to name, for a refusal.

    Raises: InvalidArgument.
    """
    module, _, name = target.partition(":")
    if not module or not name:
        raise InvalidArgument(f"{target!r} must name a module and {what}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except AnabranchError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in (
            module,
            module.partition(".")[0],
        ):
            raise InvalidArgument(
                f"there is no module {module}, neither installed nor in this folder"
            ) from error
        trace = traceback.extract_tb(error.__traceback__)
        *_, last = (frame for frame in trace if not frame.filename.startswith("<frozen"))
        at = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
        raise InvalidArgument(
            f"the import of {module} failed: {type(error).__name__}: {error}{at}"
        ) from error
    if not hasattr(found, name):
        raise InvalidArgument(f"{module} has no `{name}`")
    return getattr(found, name)
