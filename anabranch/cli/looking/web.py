"""`anabranch web`: the cluster in the browser."""

from __future__ import annotations

import logging
from typing import Annotated

from anabranch.cli.options import OperatorOptions, option
from anabranch.cli.output import log_to_stderr, print_json, print_line

_POLL_S = 5.0


def command(
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
            "Let people abort, settle, scale and delete, each after a question.",
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
            client, options.target().bootstrap, names, allow_actions, min(options.timeout, _POLL_S)
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
