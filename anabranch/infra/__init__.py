"""The embedded Kafka broker and cluster, for tests and development."""

import sys

from anabranch.errors import NotSupported

if sys.platform == "win32":
    raise NotSupported(
        "the embedded broker and controllers need Linux or macOS: use WSL; clients run here"
    )
