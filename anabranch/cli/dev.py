"""`anabranch dev`: broker and controllers in the foreground, for local work."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from anabranch.cli.broker import Folder, Heap, Port
from anabranch.cli.options import Json, Verbose, option
from anabranch.cli.output import print_json, print_line, print_note
from anabranch.extras import need

_POLL_S = 0.2
_LEAD_TIMEOUT_S = 60.0
_SESSION_TIMEOUT_S = 3.0
_AGAIN_S = 2 * _SESSION_TIMEOUT_S  # another one takes over meanwhile


def command(
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
