"""Commands that run on this machine: a broker, controllers, the web page, and the kit that tests clients."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from anabranch import logs
from anabranch.cli.errors import CheckFailed
from anabranch.cli.options import (
    Bootstrap,
    Json,
    Lane,
    LogFormat,
    OperatorOptions,
    Prefix,
    Verbose,
    argument,
    option,
)
from anabranch.cli.output import print_note, print_result
from anabranch.errors import InvalidArgument
from anabranch.protocol.legal_names import OPEN_LANE
from anabranch.topics.names import DEFAULT_PREFIX

if TYPE_CHECKING:
    from anabranch.cli.cluster import LocalCluster

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

    from anabranch.cli.cluster import SESSION_TIMEOUT_S, check_local, local_cluster

    check_local()
    from anabranch.infra.errors import BrokerDied
    from anabranch.infra.storage import hold

    folder = options.folder
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="anabranch-dev-")))
        folder = folder.absolute()
        stack.enter_context(hold(folder))
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


def web(
    options: OperatorOptions,
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

    The page has no login, so it listens only on this machine by default: use a proxy with a login for others.
    Without --allow-actions it changes nothing.
    """
    from anabranch.web.app import Site
    from anabranch.web.guard import LOCAL
    from anabranch.web.serve import listen, serve

    logs.start(log_format, logging.INFO)
    with listen(host, port) as listening, options.client() as client:
        at = listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        names = frozenset({*LOCAL, shown, *(host_name or ())})
        site = Site(
            client,
            options.target().bootstrap,
            names,
            allow_actions,
            min(options.timeout, _WEB_ANSWER_S),
        )
        local = shown in LOCAL or host.startswith("127.")

        def ready() -> None:
            url = f"http://{shown}:{at}/"
            may = "see and change" if allow_actions else "see"
            warning = (
                f"everyone who reaches {shown}:{at} can {may} the cluster: use a proxy with a login"
            )
            document = {"url": url, "actions": allow_actions, "lane": options.lane}
            lines = [f"{url}   Ctrl-C ends it", *([] if local else [warning])]
            print_result(document, *lines, as_json=options.json)

        serve(site, listening, ready)


def conformance(
    client: Annotated[
        list[str] | None,
        argument("COMMAND...", "The client under test, after --; without it: the Python client."),
    ] = None,
    only: Annotated[
        list[str] | None, option("--only SCENARIO", "Play only this scenario. Repeatable.")
    ] = None,
    bootstrap: Bootstrap = None,
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
