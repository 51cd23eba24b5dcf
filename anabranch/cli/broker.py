"""`anabranch broker`: the embedded broker in the foreground."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from anabranch.cli.options import Json, Verbose, option
from anabranch.cli.output import print_result

_POLL_S = 0.2
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


def command(
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
            told = f"brokers: {cluster.bootstrap}   data: {cluster.folder}   Ctrl-C ends them"
            print_result(document, told, as_json=json)
            while len(cluster.running) == brokers:
                time.sleep(_POLL_S)
            ended = next(node for node in cluster.nodes.values() if not node.running)
            raise BrokerDied(f"{ended} ended", log=ended.log, log_tail=ended.log_tail())
    with EmbeddedBroker(folder, port=port, heap_mb=heap) as broker:
        document = {"bootstrap": broker.bootstrap, "folder": str(broker.folder)}
        told = f"broker: {broker.bootstrap}   data: {broker.folder}   Ctrl-C ends it"
        print_result(document, told, as_json=json)
        while broker.running:
            time.sleep(_POLL_S)
        raise BrokerDied("the broker ended", log=broker.log, log_tail=broker.log_tail())
