"""`anabranch dev`, `broker` and `web`: processes in the foreground, on this machine."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from anabranch.cli.options import Json, OperatorOptions, Verbose, option
from anabranch.cli.output import log_to_stderr, print_json, print_line, print_note, print_result
from anabranch.extras import need

_POLL_S = 0.2
_LEAD_TIMEOUT_S = 60.0
_SESSION_TIMEOUT_S = 3.0
_AGAIN_S = 2 * _SESSION_TIMEOUT_S  # another one takes over meanwhile
_WEB_ANSWER_S = 5.0  # each question of a page
Folder = Annotated[
    Path | None,
    option(
        "--folder DIR", "Keep data in this folder for the next time (default: a temporary one)."
    ),
]
Port = Annotated[
    int, option("--port", "The port to listen on; 0: any free one.", min=0, max=65_535)
]
Heap = Annotated[int, option("--heap MB", "Most Java heap.", min=128)]
Brokers = Annotated[
    int,
    option("--brokers", "So many brokers that replicate, on ports from --port on.", min=1, max=9),
]


def dev(
    folder: Folder = None,
    port: Port = 9092,
    controllers: Annotated[
        int, option("--controllers", "How many controllers.", min=1, max=16)
    ] = 1,
    heap: Heap = 512,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run a broker and controllers for local work, until Ctrl-C or SIGTERM.

    Prints the address for ANABRANCH_BOOTSTRAP once both answer. With --folder, streams and transactions are
    there again the next time.
    """
    from tempfile import TemporaryDirectory

    need("rocksdict", "mode", "numba", extra="local")
    from anabranch.cli.cluster import ControllerProcess, await_leader
    from anabranch.infra.__main__ import prepare
    from anabranch.infra.broker import EmbeddedBroker
    from anabranch.infra.errors import BrokerDied
    from anabranch.infra.storage import hold

    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="anabranch-dev-")))
        folder = folder.absolute()
        stack.enter_context(hold(folder))
        if prepare():
            print_note("Starting broker and controllers; these compile their code the first time")
        broker = stack.enter_context(EmbeddedBroker(folder / "broker", port=port, heap_mb=heap))
        running = [
            ControllerProcess.inside(
                folder, f"controller-{n}", broker.bootstrap, _SESSION_TIMEOUT_S, trusts_open=True
            )
            for n in range(1, controllers + 1)
        ]
        for controller in running:
            stack.callback(controller.stop)
            controller.start()
        await_leader(running, 0, _LEAD_TIMEOUT_S)
        if json:
            print_json(
                {
                    "bootstrap": broker.bootstrap,
                    "folder": str(folder),
                    "controllers": [controller.pid for controller in running],
                }
            )
        else:
            print_line(f"export ANABRANCH_BOOTSTRAP={broker.bootstrap}")
            print_line(f"data and logs: {folder}   Ctrl-C ends it")
            print_line(
                "the lane open may scale and set series here, without quotas (--trusts-open)"
            )
        while broker.running:
            for controller in running:
                if controller.was_killed:
                    print_note(f"{controller.name} was killed; again in {_AGAIN_S:g} s")
                    time.sleep(_AGAIN_S)
                    controller.start()
                else:
                    controller.check()
            time.sleep(_POLL_S)
        raise BrokerDied("the broker ended", log=broker.log, log_tail=broker.log_tail())


def broker(
    folder: Folder = None,
    port: Port = 9092,
    heap: Heap = 512,
    brokers: Brokers = 1,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run an embedded Kafka broker until Ctrl-C or SIGTERM.

    The first start fetches it (45 MB). The broker listens on this machine only, without authentication.
    """
    from anabranch.infra.__main__ import prepare
    from anabranch.infra.broker import EmbeddedBroker
    from anabranch.infra.cluster import EmbeddedCluster
    from anabranch.infra.errors import BrokerDied

    prepare()
    if brokers > 1:
        ports = [port + n for n in range(brokers)] if port else []
        with EmbeddedCluster(brokers, folder, ports=ports, heap_mb=heap) as cluster:
            document = {"bootstrap": cluster.bootstrap, "folder": str(cluster.folder)}
            line = f"brokers: {cluster.bootstrap}   data: {cluster.folder}   Ctrl-C ends them"
            print_result(document, line, as_json=json)
            while len(cluster.running) == brokers:
                time.sleep(_POLL_S)
            ended = next(node for node in cluster.nodes.values() if not node.running)
            raise BrokerDied(f"{ended} ended", log=ended.log, log_tail=ended.log_tail())
    with EmbeddedBroker(folder, port=port, heap_mb=heap) as running:
        document = {"bootstrap": running.bootstrap, "folder": str(running.folder)}
        line = f"broker: {running.bootstrap}   data: {running.folder}   Ctrl-C ends it"
        print_result(document, line, as_json=json)
        while running.running:
            time.sleep(_POLL_S)
        raise BrokerDied("the broker ended", log=running.log, log_tail=running.log_tail())


def web(
    options: OperatorOptions,
    host: Annotated[
        str,
        option(
            "--host ADDRESS", "The address to listen at; beyond this machine, anybody may look."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, option("--port", "The port; 0: any free one.", min=0, max=65_535)] = 8090,
    host_name: Annotated[
        list[str] | None,
        option(
            "--host-name NAME",
            "A name that browsers may call it by, as of a proxy. May be repeated.",
        ),
    ] = None,
    allow_actions: Annotated[
        bool,
        option(
            "--allow-actions",
            "Let people abort, force, scale and delete, each after a question.",
        ),
    ] = False,
) -> None:
    """Show streams, transactions, processors and controllers in the browser, live, until Ctrl-C or SIGTERM.

    Nothing in it asks who looks: it listens at this machine alone. Put a proxy with a login before it to let others
    in. Without --allow-actions it only shows.
    """
    from anabranch.web.app import Site
    from anabranch.web.guard import LOCAL
    from anabranch.web.serve import listen, serve

    if not logging.getLogger().handlers:
        log_to_stderr(logging.INFO, "%(asctime)s %(levelname)s %(name)s: %(message)s")
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
            if options.json:
                document = {
                    "url": f"http://{shown}:{at}/",
                    "actions": allow_actions,
                    "lane": options.lane,
                }
                return print_json(document)
            print_line(f"http://{shown}:{at}/   Ctrl-C ends it")
            if not local:
                may = "see the cluster and act on it" if allow_actions else "see the cluster"
                print_line(
                    f"anybody who reaches {shown}:{at} may {may}: put a proxy with a login before it"
                )
            return None

        serve(site, listening, ready)
