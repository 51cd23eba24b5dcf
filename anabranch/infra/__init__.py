"""The embedded Kafka broker and cluster, for tests and development.

Start with `broker.EmbeddedBroker`: its ``start`` calls the other modules in this order:

- ``java``: finds a Java, and keeps an archive of the broker's parsed classes, with which it starts faster;
- ``fetch``: fetches the jars that a lock file names into a cache;
- ``storage``: locks and formats the broker's folder;
- ``settings``: the broker's properties and JVM options, each with its reason;
- ``process``, ``supervisor``: a child process that ends with the process that started it; its log;
- ``sockets``: free ports, and whether a broker serves.

``cluster.EmbeddedCluster`` starts several brokers. ``errors`` has the errors of all modules. ``python -m
anabranch.infra`` fetches the broker and its archive ahead of time.

This folder may import only ``errors`` and ``extras`` of anabranch. Windows is refused here.
"""

import sys

from anabranch.errors import NotSupported

if sys.platform == "win32":
    raise NotSupported(
        "the embedded broker and controllers need Linux or macOS: use WSL; clients run here"
    )
