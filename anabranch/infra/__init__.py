"""The embedded Kafka broker and cluster, for tests and development.

Start with `broker.EmbeddedBroker`: its ``start`` calls everything else here, in this order.

- ``java``: finds a Java, and keeps an archive of the broker's parsed classes, by which it starts faster;
- ``fetch``: the broker's jars, by a lock file, in a cache;
- ``storage``: locks and formats the broker's folder;
- ``settings``: the broker's properties and JVM options, each with its reason;
- ``process``, ``supervisor``: a child process that ends with its owner, however that ends; its log;
- ``sockets``: free ports, and whether a broker serves.

``cluster.EmbeddedCluster`` starts several brokers. ``errors`` has what all of these raise. ``python -m
anabranch.infra`` fetches and warms up the broker ahead of time.

Other imports from anabranch than ``errors`` and ``extras`` are forbidden. Windows is refused here.
"""

import sys

from anabranch.errors import NotSupported

if sys.platform == "win32":
    raise NotSupported(
        "the embedded broker and controllers need Linux or macOS: use WSL; clients run here"
    )
