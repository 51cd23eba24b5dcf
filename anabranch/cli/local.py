"""`anabranch dev`, `broker` and `web`: a broker, controllers and the web page on this machine."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from anabranch import logs
from anabranch.cli.options import Json, LogFormat, OperatorOptions, Verbose, option
from anabranch.cli.output import print_note, print_result

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
