"""Commands that run on this machine: a broker, controllers, the web page, and the kit that tests clients."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from anabranch import logs
from anabranch.cli.errors import CheckFailed
from anabranch.cli.options import (
    Json,
    Lane,
    LogFormat,
    OperatorOptions,
    Prefix,
    Verbose,
    argument,
    codec_spec,
    option,
)
from anabranch.cli.output import print_note, print_result
from anabranch.errors import InvalidArgument
from anabranch.protocol.legal_names import OPEN_LANE
from anabranch.topics.names import DEFAULT_PREFIX

if TYPE_CHECKING:
    from anabranch.cli.cluster import LocalCluster
    from anabranch.values import Stream
    from anabranch.web.login import Login

_CONTROLLERS = 2  # so that one takes over when the kit kills the other

_POLL_S = 0.2
_WEB_ANSWER_S = 5.0  # each question of a page
Brokers = Annotated[
    int,
    option("--brokers", "The number of brokers, on ports from --port on.", min=1, max=9),
]


@dataclass(frozen=True)
class BrokerOptions:
    """The options of commands that run a broker on this machine."""

    folder: Annotated[
        Path | None,
        option("--folder DIR", "Keep data here for the next run (default: a temporary folder)."),
    ] = None
    port: Annotated[
        int, option("--port", "The port to listen on; 0: any free one.", min=0, max=65_535)
    ] = 9092
    heap: Annotated[int, option("--heap MB", "The largest Java heap.", min=128)] = 512
    json: Json = False
    log_format: LogFormat = "text"
    verbose: Verbose = False

    def prepare(self) -> None:
        """Fetch the broker, unless that was done. Raises: as `anabranch.infra.__main__.prepare`."""
        from anabranch.infra.__main__ import prepare

        prepare(print_note if logs.is_json() else None)


def dev(
    options: BrokerOptions,
    controllers: Annotated[
        int, option("--controllers", "The number of controllers.", min=1, max=16)
    ] = 1,
) -> None:
    """Run a broker and controllers for development, until Ctrl-C or SIGTERM.

    A controller that is killed is started again after 6 seconds; one that fails ends the command.
    """
    from tempfile import TemporaryDirectory

    from anabranch.cli.cluster import SESSION_TIMEOUT_S, check_local, compiling, local_cluster

    check_local()
    from anabranch.infra.errors import BrokerDied
    from anabranch.infra.storage import hold

    folder = options.folder
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="anabranch-dev-")))
        folder = folder.absolute()
        stack.enter_context(hold(folder))
        stack.enter_context(
            compiling(folder / "compile.log")
        )  # while the broker is fetched and starts
        options.prepare()
        print_note(
            "starting a broker and controllers; the first time they compile code for half a minute or longer"
        )
        broker, running = stack.enter_context(
            local_cluster(folder, controllers, port=options.port, heap_mb=options.heap)
        )
        again_s = 2 * SESSION_TIMEOUT_S  # another one takes over meanwhile
        print_result(
            {
                "bootstrap": broker.bootstrap,
                "folder": str(folder),
                "controllers": [controller.pid for controller in running],
            },
            f"export ANABRANCH_BOOTSTRAP={broker.bootstrap}",
            f"data and logs: {folder}   Ctrl-C ends it",
            "here the lane open may scale streams and set series, without quotas (--trusts-open)",
            as_json=options.json,
        )
        while broker.running:
            for controller in running:
                if controller.was_killed:
                    print_note(
                        f"{controller.name} was killed; it is started again in {again_s:g} s"
                    )
                    time.sleep(again_s)
                    controller.start()
                else:
                    controller.check()
            time.sleep(_POLL_S)
        raise BrokerDied("the broker ended", log=broker.log, log_tail=broker.log_tail())


def broker(options: BrokerOptions, brokers: Brokers = 1) -> None:
    """Run an embedded Kafka broker until Ctrl-C or SIGTERM.

    The first start downloads it (45 MB). The broker listens on this machine only, without authentication.
    """
    from anabranch.infra.broker import EmbeddedBroker
    from anabranch.infra.cluster import EmbeddedCluster
    from anabranch.infra.errors import BrokerDied

    options.prepare()
    folder, port = options.folder, options.port
    if brokers > 1:
        ports = [port + n for n in range(brokers)] if port else []
        with EmbeddedCluster(brokers, folder, ports=ports, heap_mb=options.heap) as cluster:
            document = {"bootstrap": cluster.bootstrap, "folder": str(cluster.folder)}
            line = f"brokers: {cluster.bootstrap}   data: {cluster.folder}   Ctrl-C ends them"
            print_result(document, line, as_json=options.json)
            while len(cluster.running) == brokers:
                time.sleep(_POLL_S)
            ended = next(node for node in cluster.nodes.values() if not node.running)
            raise BrokerDied(f"{ended} ended", log=ended.log, log_tail=ended.log_tail())
    with EmbeddedBroker(folder, port=port, heap_mb=options.heap) as running:
        document = {"bootstrap": running.bootstrap, "folder": str(running.folder)}
        line = f"broker: {running.bootstrap}   data: {running.folder}   Ctrl-C ends it"
        print_result(document, line, as_json=options.json)
        while running.running:
            time.sleep(_POLL_S)
        raise BrokerDied("the broker ended", log=running.log, log_tail=running.log_tail())


@dataclass(frozen=True)
class ValueOptions:
    """The options of `web` that say which values pages show, and to whom."""

    show_values: Annotated[
        bool,
        option(
            "--show-values",
            "Show events and rows to others than this machine, too; needs --user-header or --password-file.",
        ),
    ] = False
    user_header: Annotated[
        str | None,
        option(
            "--user-header NAME",
            "The header in which a proxy names the user. Requests without it are refused.",
        ),
    ] = None
    proxy: Annotated[
        list[str] | None,
        option(
            "--proxy ADDRESS",
            "An address or network whose --user-header, or X-Forwarded-For, counts (default: this machine). "
            "Repeatable.",
        ),
    ] = None
    password_file: Annotated[
        Path | None,
        option(
            "--password-file FILE",
            "Users and their passwords, by lines of `anabranch web-password`.",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    codec: Annotated[
        list[str] | None,
        option(
            "--codec PATTERN=KEY,VALUE",
            "Codecs of the streams SCOPE/STREAM, SCOPE/* or *, such as 'shop/*=str,json'. Repeatable.",
        ),
    ] = None

    def login(self) -> Login | None:
        """How users are found; None: not at all. Raises: InvalidArgument."""
        from anabranch.web.login import THIS_MACHINE, HeaderLogin, PasswordLogin

        if self.user_header is not None and self.password_file is not None:
            raise InvalidArgument("give --user-header or --password-file, not both")
        proxies = self.proxy or THIS_MACHINE
        if self.password_file is not None:
            return PasswordLogin(self.password_file, proxies)
        if self.user_header is not None:
            return HeaderLogin(self.user_header, proxies)
        if self.proxy:
            raise InvalidArgument(
                "--proxy says whose headers count: give --user-header or --password-file, too"
            )
        return None

    def shows_values(self, *, local: bool) -> bool:
        """Whether pages show events and rows. ``local``: only this machine comes. Raises: InvalidArgument."""
        if local:
            return True
        has_users = self.user_header is not None or self.password_file is not None
        if self.show_values and not has_users:
            raise InvalidArgument(
                "--show-values would show events to all who reach the page: add --user-header NAME, for a proxy "
                "with a login, or --password-file FILE"
            )
        return self.show_values

    def warning(self, address: str, *, acts: bool) -> str:
        """The danger of a page that others can reach; or an empty text."""
        if self.user_header is not None:
            return ""
        if self.password_file is not None:
            return "passwords are readable on the way here: use a proxy with TLS"
        may = "see and change" if acts else "see"
        return f"everyone who reaches {address} can {may} the cluster: use a proxy with a login"

    def handle(self) -> Callable[[str], Stream[Any, Any] | None]:
        """The handle of a stream by its name; None: its keys and values are bytes. Raises: InvalidArgument."""
        from anabranch.values import stream_of

        codecs: list[tuple[str, Any, Any]] = []
        for text in self.codec or ():
            pattern, _, words = text.partition("=")
            key, comma, value = words.partition(",")
            if not pattern or not comma:
                raise InvalidArgument(
                    f"--codec {text!r}: PATTERN=KEY,VALUE, as in 'shop/*=str,json'"
                )
            codecs.append((pattern, codec_spec(key or None), codec_spec(value or None)))

        def handle(stream: str) -> Stream[Any, Any] | None:
            legal = ("*", f"{stream.partition('/')[0]}/*", stream)
            found = next((each for each in codecs if each[0] in legal), None)
            return None if found is None else stream_of(stream, found[1], found[2], "raise")

        return handle


def web(
    options: OperatorOptions,
    shows: ValueOptions,
    host: Annotated[
        str,
        option("--host ADDRESS", "The address to listen on."),
    ] = "127.0.0.1",
    port: Annotated[int, option("--port", "The port; 0: any free one.", min=0, max=65_535)] = 8090,
    host_name: Annotated[
        list[str] | None,
        option(
            "--host-name NAME",
            "A host name that browsers may use, such as a proxy's. Repeatable.",
        ),
    ] = None,
    allow_actions: Annotated[
        bool,
        option(
            "--allow-actions",
            "Allow abort, force, scale and delete, each after a confirmation.",
        ),
    ] = False,
    log_format: LogFormat = "text",
) -> None:
    """Show the cluster in the browser, until Ctrl-C or SIGTERM.

    Without --user-header or --password-file there is no login, so the page listens only on this machine by default.
    With another --host, or a --host-name, it shows events and rows only with --show-values and a login. Without
    --allow-actions it changes nothing.
    """
    from anabranch.web.app import Site
    from anabranch.web.guard import LOCAL
    from anabranch.web.pages import Showing
    from anabranch.web.serve import listen, serve

    logs.start(log_format, logging.INFO)
    shown = f"[{host}]" if ":" in host else host
    is_local = _is_loopback(host)
    login = shows.login()
    values = shows.shows_values(local=is_local and not set(host_name or ()) - set(LOCAL))
    showing = Showing(allow_actions, values, shows.handle())
    with listen(host, port) as listening, options.client() as client:
        at = listening.getsockname()[1]
        names = frozenset({*LOCAL, shown, *(host_name or ())})
        site = Site(
            client,
            options.target().bootstrap,
            names,
            min(options.timeout, _WEB_ANSWER_S),
            showing,
            login,
        )

        def ready() -> None:
            url = f"http://{shown}:{at}/"
            warning = shows.warning(f"{shown}:{at}", acts=allow_actions)
            document = {
                "url": url,
                "actions": allow_actions,
                "values": values,
                "lane": options.lane,
            }
            lines = [f"{url}   Ctrl-C ends it", *([] if is_local or not warning else [warning])]
            print_result(document, *lines, as_json=options.json)

        serve(site, listening, ready)


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address to listen on. A name other than localhost may be any address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def web_password(
    user: Annotated[str, argument("USER", "The user's name.")],
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Ask for a password, and print a line for the file of `anabranch web --password-file`.

    Without a terminal, the password is the first line of standard input.
    """
    from getpass import getpass

    from anabranch.web.login import password_line

    if sys.stdin.isatty():
        password = getpass("Password: ")
        if getpass("Again: ") != password:
            raise InvalidArgument("these are two different passwords: nothing was made")
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    line = password_line(user, password)
    print_result({"user": user, "line": line}, line, as_json=json)


def conformance(
    client: Annotated[
        list[str] | None,
        argument("COMMAND...", "The client under test, after --; without it: the Python client."),
    ] = None,
    only: Annotated[
        list[str] | None, option("--only SCENARIO", "Play only this scenario. Repeatable.")
    ] = None,
    bootstrap: Annotated[
        str | None,
        option(
            "--bootstrap -b HOST:PORT",
            "Play on this cluster. The variable ANABRANCH_BOOTSTRAP is not read: the command leaves scopes there.",
        ),
    ] = None,
    prefix: Prefix = DEFAULT_PREFIX,
    lane: Lane = OPEN_LANE,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Play scenarios with a client in any language, and report which rules of the protocol it keeps.

    The client is a child process that answers requests, one JSON document a line. Without --bootstrap the command
    starts a broker and two controllers. The exit code is 1 if a rule is broken.
    """
    from tempfile import TemporaryDirectory

    from anabranch.conformance.child import NoAnswer
    from anabranch.conformance.play import Controllers, Target
    from anabranch.conformance.run import chosen, run

    chosen(only or ())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="anabranch-conformance-")))
        words = client or [sys.executable, "-m", "anabranch.conformance.python_client"]
        if bootstrap:
            target = Target(bootstrap, prefix, lane, words, folder)
        else:
            from anabranch.cli.cluster import local_cluster

            print_note("starting a broker and controllers")
            cluster = stack.enter_context(local_cluster(folder, _CONTROLLERS))
            own = Controllers(
                partial(_kill_leader, cluster), cluster.broker.pause, cluster.broker.resume
            )
            target = Target(cluster.broker.bootstrap, prefix, lane, words, folder, own)
        try:
            report = run(target, only or (), progress=print_note)
        except (OSError, NoAnswer) as error:
            raise InvalidArgument(f"{shlex.join(words)} can't be played with: {error}") from error
    print_result(report.document(), *report.lines(), as_json=json)
    if report.failures:
        raise CheckFailed(f"{len(report.broken)} rules are broken")


def _kill_leader(cluster: LocalCluster) -> None:
    for controller in cluster.controllers:
        if 0 in controller.leads():
            controller.kill()
